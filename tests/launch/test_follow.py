"""Reading a file while it grows."""

from __future__ import annotations

from pathlib import Path

from rankwise.host.terminal import CHUNK
from rankwise.launch.follow import LogTail


def test_a_file_is_read_from_its_beginning_once_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    assert tail.read() == b""
    path.write_bytes(b"a\nb")
    assert (tail.read(), tail.read()) == (b"a\nb", b"")
    with open(path, "ab") as file:
        file.write(b"c\n")
    assert (tail.read(), tail.close()) == (b"c\n", b"")


def test_with_a_prefix_only_whole_lines_come_and_at_the_end_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\nb")
    tail = LogTail(path, "[rank 3] ")
    assert tail.read() == b"[rank 3] a\n"
    with open(path, "ab") as file:
        file.write(b"c\nd")
    assert tail.read() == b"[rank 3] bc\n"
    assert tail.close() == b"[rank 3] d\n"
    assert tail.close() == b""


def test_a_large_file_comes_in_parts_that_make_up_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    content = bytes(range(256)) * 1000
    path.write_bytes(content)
    tail, found = LogTail(path), b""
    while data := tail.read():
        assert len(data) < len(content)
        found += data
    assert found == content


def test_a_line_that_does_not_end_is_shown_in_parts_and_what_comes_after_it_too(tmp_path: Path) -> None:
    """A progress bar returns to the beginning of its line for hours. A read that showed nothing of it was taken for the end of
    the file, and the whole line was copied for each part of it."""
    path = tmp_path / "log"
    path.write_bytes(b"\r  3% done" * 30_000 + b"\nthe end\n")
    tail, found = LogTail(path, "[rank 3] "), []
    while data := tail.read():
        assert len(data) < 2 * CHUNK
        found.append(data)
    assert b"".join(found).replace(b"\n[rank 3] ", b"").count(b"% done") == 30_000
    assert b"".join(found).endswith(b"\n[rank 3] the end\n")
    assert tail.close() == b""
