"""A terminal with lines that scroll and one status line below them; a file or a pipe gets only the lines.

terminal = Terminal(sys.stdout)
terminal.status(progress_line({"done": 120, "total": 800, "elapsed_s": 14.2, "text": "loss 2.31"}, 80))
terminal.write(b"a line above it\\n")
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TextIO

from rankwise.host.text import folded, rate, short

CHUNK = 1 << 16
"""How many bytes of a log are read and shown at once, at most."""

_CLEAR_LINE = b"\r\x1b[K"


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream that this process was started without (`<&-`).

    Otherwise the first file or socket that this process opens gets that number, and its child processes use it as the stream.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: fd
            os.set_inheritable(null, True)
            stream = open(null, mode, closefd=False)  # noqa: SIM115  # stays open as long as this process runs
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def print_any_text() -> None:
    """Let this process print text that the terminal's encoding does not have, for example the name of a file that is not UTF-8:
    escaped, as on stderr. In a C locale Python writes such a name unchanged."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def unwritten(stream: TextIO, after: OSError | None = None) -> str | None:
    """Why output to `stream` cannot be written; None if it was written; empty if the reader is gone (`| head -1`).

    Drops the unwritten output, so that Python does not fail on it at exit. `after`: an error that may have come from this
    stream. An unbuffered stream has nothing left to flush, so this writes an empty line as a test.
    """
    try:
        if after is not None:
            stream.write("\n")
        stream.flush()
        return None
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
        return "" if error.errno == errno.EPIPE else str(error.strerror)


def leave(status: int) -> NoReturn:
    """Exit with that status, also if output cannot be written (Python would exit with 120), and also under PYTHONINSPECT
    (Python would start its prompt at SystemExit)."""
    for stream in (sys.stdout, sys.stderr):
        unwritten(stream)
    if sys.flags.inspect and not sys.flags.interactive:
        os._exit(status)
    sys.exit(status)


def message(text: str) -> str:
    """`rankwise: ` and a text for stderr: on a terminal, lines are broken between words; in a file it is one line."""
    line = f"rankwise: {text}"
    try:
        return folded(line, os.get_terminal_size(sys.stderr.fileno()).columns - 1)
    except (OSError, ValueError, AttributeError):  # a file, a pipe, or no stderr
        return line


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, however slowly the reader takes it, also if the descriptor does not block. Raises OSError."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            with contextlib.suppress(OSError):
                os.set_blocking(fd, True)


def _descriptor(stream: Any) -> int:
    """-1 if it has none: a script may have replaced sys.stderr by its own object."""
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return -1


class Terminal:
    """The only writer of an output stream. Bytes are written unchanged: a script may print anything."""

    def __init__(self, stream: TextIO | None, plain: bool = False, write: Callable[[int, bytes], None] = write_all) -> None:
        """Nothing is printed if `stream` is None (Python's value if the process was started without that stream), or an object
        of the script without a descriptor. `plain`: no status line, even on a terminal. `write(fd, data)` writes all of it, now
        or later, or raises OSError, also for what it could not write earlier."""
        self._write = write
        self._fd = _descriptor(stream)
        self.is_tty = self._fd >= 0 and os.isatty(self._fd) and not plain
        self._status = b""
        self._shown = False
        self._at_line_start = True
        self.closed = self._fd < 0
        self.lost: str | None = None
        """Why nothing can be printed any more; None if the reader is gone."""

    @property
    def columns(self) -> int:
        return shutil.get_terminal_size().columns

    def write(self, data: bytes) -> None:
        """Print above the status line. If the reader is gone (`| head -1`), nothing more is printed."""
        if not data:
            return
        prefix = _CLEAR_LINE if self._shown else b""
        self._shown = False
        self._at_line_start = data.endswith((b"\n", b"\r"))
        self._put(prefix + data)
        if self._at_line_start:
            self._show()

    def status(self, text: str) -> None:
        """Replace the status line; empty removes it. Does nothing if the stream is not a terminal."""
        if not self.is_tty or self.closed:
            return
        self._status = text.encode()
        if self._at_line_start:
            self._put(_CLEAR_LINE if self._shown and not self._status else b"")
            self._show()

    def progress(self, text: str) -> None:
        """Show the progress as the status line. `text`: the argument of `progress_line` as JSON; empty removes the line;
        ignored if invalid."""
        with contextlib.suppress(ValueError):  # it was too long for the page and was cut
            self.status(progress_line(json.loads(text), self.columns) if text else "")

    def look(self) -> None:
        """Find out whether an earlier output was lost, if `write` returns before it has written all."""
        self._put(b"")

    def end_line(self) -> None:
        """Make sure that the next output begins a new line."""
        if not self._at_line_start:
            self.write(b"\n")

    def _show(self) -> None:
        self._shown = bool(self._status)
        if self._shown:
            # The cursor returns to the first column, so that output of other processes overwrites the line.
            self._put(_CLEAR_LINE + self._status + b"\r")

    def _put(self, data: bytes) -> None:
        if self.closed:
            return
        try:
            self._write(self._fd, data)
        except OSError as error:
            self.closed = True
            self.lost = str(error.strerror) if error.errno != errno.EPIPE else None


class Prefixed:
    """Adds a prefix to each line of some output, which comes in pieces; if the prefix is empty, the pieces stay as they are.

    A line of more than `CHUNK` bytes is cut: a progress bar may print for days without ending its line.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._partial = b""

    def lines(self, data: bytes) -> bytes:
        """The lines that are complete with this piece."""
        if not self._prefix:
            return data
        *whole, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) >= CHUNK:
            whole.append(self._partial)
            self._partial = b""
        return b"".join(self._prefix + line + b"\n" for line in whole)

    def rest(self) -> bytes:
        """The last line, if it has no line end."""
        rest, self._partial = self._partial, b""
        return self._prefix + rest + b"\n" if rest else b""


def typed(*words: str) -> str:
    """A rankwise command that can be pasted into the shell in which this command was typed: `rankwise status train`.

    Begins with `rankwise` if the shell finds this same installation under that name; else with its path, or `python -m
    rankwise`.
    """
    script = Path(sys.argv[0])
    beside = Path(sys.executable).with_name("rankwise")
    found = shutil.which("rankwise")
    if found is not None and (Path(found).parent == beside.parent or Path(found).resolve() == script.resolve()):
        command = ["rankwise"]
    elif script.name == "rankwise":
        command = [str(script)]
    elif beside.exists():
        command = [short(beside)]
    else:
        command = [sys.executable, "-m", "rankwise"]
    return shlex.join([*command, *words])


def progress_line(progress: Mapping[str, Any], columns: int) -> str:
    """One line of at most `columns`: steps done and total, elapsed and remaining time, rate, and the text.

    `progress`: done and total (steps; total None if unknown), elapsed_s and initial (steps done when the clock
    started), text, label.
    """
    from tqdm import tqdm

    steps = progress["done"] - progress.get("initial", 0)
    figures = [rate(steps, progress["elapsed_s"]) if steps > 0 and progress["elapsed_s"] > 0 else "", progress.get("text")]
    known = "".join(f", {figure}" for figure in figures if figure).replace("{", "{{").replace("}", "}}")
    bar = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}" if progress.get("total") else "{n_fmt} steps [{elapsed}"
    line: str = tqdm.format_meter(
        n=progress["done"],
        total=progress.get("total") or 0,  # 0 means unknown to tqdm
        elapsed=progress["elapsed_s"],
        ncols=max(columns - 1, 20),
        prefix=progress.get("label", ""),
        initial=progress.get("initial", 0),
        bar_format=f"{bar}{known}]",
    )
    return line[: max(columns - 1, 20)]
