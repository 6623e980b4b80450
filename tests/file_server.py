"""A file server on loopback, which can be slow, stall, break connections, and refuse to send parts of files."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path


class FileServer(http.server.ThreadingHTTPServer):
    """Serves the files in `folder`. Change the attributes while it runs."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.parts = True  # send parts of files, on request
        self.stalls_after: int | None = None  # after this many bytes of all answers together
        self.breaks_off = 0  # break this many answers in the middle
        self.sent: dict[str, int] = {}  # bytes sent, by the name of the file
        self.asked = 0  # number of requests
        self.go_on = threading.Event()  # ends a stall

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FileServer
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, *args: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        self.server.asked += 1
        name = self.path.lstrip("/")
        path = self.server.folder / name
        if path.is_dir():
            links = "".join(f'<a href="/{found.name}">x</a>\n' for found in sorted(path.iterdir())).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(links)))
            self.end_headers()
            if body:
                self.wfile.write(links)
            return
        if not path.exists():
            self.send_error(404)
            return
        content = path.read_bytes()
        stat = path.stat()
        start, stop = 0, len(content)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and self.server.parts:
            start, stop = int(asked[1]), min(int(asked[2] or stop) + 1, stop)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        else:
            self.send_response(200)
        if self.server.parts:
            self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{stat.st_mtime_ns}-{stat.st_size}"')
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if body:
            self._send(name, content[start:stop])

    def _send(self, name: str, content: bytes) -> None:
        if self.server.breaks_off:
            self.server.breaks_off -= 1
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        limit = self.server.stalls_after
        for at in range(0, len(content), 1 << 16):
            if limit is not None and sum(self.server.sent.values()) >= limit:
                self.wfile.flush()
                self.server.go_on.wait(60)
            piece = content[at : at + (1 << 16)]
            self.server.sent[name] = self.server.sent.get(name, 0) + len(piece)
            self.wfile.write(piece)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[FileServer]:
    server = FileServer(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()
