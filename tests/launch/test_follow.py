"""Reading a file while it grows."""

from __future__ import annotations

from pathlib import Path

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
