"""What the user sees of the ranks' output."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwise.agent.console import Console, LogFollower
from rankwise.agent.screen import Screen
from rankwise.host.terminal import CHUNK, Terminal
from rankwise.ipc.shared_page import Page, Row


class Patient(Terminal):
    """A terminal that takes everything at once."""

    busy = False


class Watched:
    """A console on a file or a pseudo-terminal, and the output so far."""

    def __init__(self, log: Path, tty: bool) -> None:
        self.log = log
        self.row: Row = Page.create(1).row(0)
        self._reader, writer = os.openpty() if tty else os.pipe()
        os.set_blocking(self._reader, False)
        self._file = os.fdopen(writer, "w")
        self.console = Console([LogFollower(log, log.with_name("none"))], self.row, Patient(self._file))

    def print(self, data: bytes) -> None:
        with open(self.log, "ab") as file:
            file.write(data)

    def progress(self, done: int, text: str = "") -> None:
        self.row.say(json.dumps({"done": done, "total": 800, "elapsed_s": 10.0, "text": text, "label": ""}))

    def seen(self) -> bytes:
        found = b""
        try:
            while data := os.read(self._reader, 1 << 16):
                found += data
        except OSError:  # no more output now
            pass
        return found

    def close(self) -> None:
        self._file.close()
        os.close(self._reader)


@pytest.fixture
def piped(tmp_path: Path) -> Iterator[Watched]:
    (tmp_path / "rank-0.log").write_bytes(b"of an earlier life\n")
    watched = Watched(tmp_path / "rank-0.log", tty=False)
    yield watched
    watched.close()


@pytest.fixture
def on_terminal(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path / "rank-0.log", tty=True)
    yield watched
    watched.close()


def test_the_log_is_shown_as_it_grows_from_where_it_ended(piped: Watched) -> None:
    piped.console.show()
    assert piped.seen() == b""
    piped.print(b"one\n")
    piped.console.show()
    piped.print(b"two, \xff half of a li")
    piped.console.show()
    piped.print(b"ne\n")
    piped.console.show()
    piped.console.show()
    assert piped.seen() == b"one\ntwo, \xff half of a line\n"
    piped.console.close()


def test_a_traceback_that_is_written_while_the_log_is_read_is_kept_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, record = tmp_path / "rank-0.log", tmp_path / "exception"
    follower = LogFollower(log, record)
    read = os.pread

    def raise_then_read(fd: int, size: int, position: int) -> bytes:
        record.write_text(json.dumps({"log_bytes": len(b"one\n")}))
        log.write_bytes(b"one\nTraceback (most recent call last):\n")
        return read(fd, size, position)

    monkeypatch.setattr(os, "pread", raise_then_read)
    assert follower.read() == b"one\n"
    assert follower.read() == b""
    follower.close()


def test_a_log_that_is_not_there_yet_is_made_and_shown_from_its_start(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "new.log", tty=False)
    watched.print(b"first\n")
    watched.console.show()
    assert watched.seen() == b"first\n"
    watched.console.close()
    watched.close()


class Full:
    """A screen that takes one text, and then nothing until somebody reads it."""

    def __init__(self) -> None:
        self._text = b""

    @property
    def busy(self) -> bool:
        return bool(self._text)

    def write(self, data: bytes) -> None:
        self._text += data

    def progress(self, text: str) -> None:
        pass

    def end_line(self) -> None:
        pass

    def read(self) -> bytes:
        text, self._text = self._text, b""
        return text


def test_ranks_take_turns_on_a_screen_that_takes_the_output_of_one_and_the_rest_is_shown_at_the_end(tmp_path: Path) -> None:
    screen = Full()
    console = Console([LogFollower(tmp_path / name, tmp_path / "none") for name in ("a", "b")], None, screen)
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    console.show()
    assert screen.read() == b"1"
    (tmp_path / "a").write_text("11")
    console.show()
    assert screen.read() == b"2"
    console.show()
    assert screen.read() == b"1"
    (tmp_path / "a").write_text("111")
    (tmp_path / "b").write_text("222")
    console.close()
    assert screen.read() in (b"122", b"221")


def test_the_progress_line_does_not_stay_below_the_last_output_of_a_slow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as file, os.fdopen(reader, "rb", buffering=0) as shown:
        monkeypatch.setattr("sys.stdout", file)
        screen = Screen(plain=False)
        screen.progress(json.dumps({"done": 1, "total": 2, "elapsed_s": 1.0}))
        screen._outlet.waiting_bytes += 2 << 20
        screen.progress(json.dumps({"done": 2, "total": 2, "elapsed_s": 2.0}))  # too much waits for it to be of use
        screen.progress("")
        screen._outlet.waiting_bytes -= 2 << 20
        screen.write(b"the end\n")
        screen._outlet.drain(lambda: False)
        os.write(writer, b"read so far")
        text = b""
        while b"read so far" not in text:
            text += shown.read(4096)
    assert (text.count(b"1/2"), text.count(b"2/2")) == (1, 0)


def test_all_that_is_new_is_shown_at_once_however_long(piped: Watched) -> None:
    text = b"0123456789abcde\n" * 3000  # a chunk is 65536 bytes; a pipe holds this much
    piped.print(text)
    piped.console.show()
    assert piped.seen() == text
    piped.console.close()


def test_what_a_rank_printed_last_is_shown_when_the_console_closes(piped: Watched) -> None:
    piped.print(b"last words")
    piped.console.close()
    assert piped.seen() == b"last words\n"  # the next text of rankwise starts a new line


def test_progress_is_no_part_of_what_goes_into_a_pipe(piped: Watched) -> None:
    piped.progress(120)
    piped.print(b"a line\n")
    piped.console.show()
    piped.progress(121)
    piped.console.close()
    assert piped.seen() == b"a line\n"


def test_a_terminal_has_the_newest_progress_below_the_lines(on_terminal: Watched) -> None:
    on_terminal.progress(120)
    on_terminal.progress(121, "loss 2.31")
    on_terminal.print(b"a line\n")
    on_terminal.console.show()
    seen = on_terminal.seen()
    assert seen.startswith(b"a line\r\n")
    assert b"121/800" in seen
    assert b"loss 2.31" in seen
    assert b"120/800" not in seen
    on_terminal.console.show()
    assert on_terminal.seen() == b""  # nothing new, so nothing drawn
    on_terminal.console.close()


@pytest.mark.parametrize("how", ["the rank is through", "the console closes"])
def test_the_progress_line_is_removed_when_there_is_no_more(how: str, on_terminal: Watched) -> None:
    on_terminal.progress(120)
    on_terminal.console.show()
    assert b"120/800" in on_terminal.seen()
    if how == "the rank is through":
        on_terminal.row.say("")
        on_terminal.console.show()
        assert re.fullmatch(rb"\r\x1b\[K", on_terminal.seen())
    on_terminal.console.close()
    assert on_terminal.seen() == (b"" if how == "the rank is through" else b"\r\x1b[K")


def test_progress_with_a_long_text_does_no_harm(tmp_path: Path) -> None:
    row = Page.create(1).row(0)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file, os.fdopen(reader):
        console = Console([LogFollower(tmp_path / "log", tmp_path / "none")], row, Patient(file))
        row.say(json.dumps({"done": 1, "total": 2, "elapsed_s": 1.0, "text": "x" * 500}))
        try:
            console.show()
        finally:
            row.say("")
            console.close()


def test_all_ranks_are_shown_by_whole_lines_and_a_line_without_an_end_at_the_end(tmp_path: Path) -> None:
    follower = LogFollower(tmp_path / "log", tmp_path / "none", "[rank 1] ")
    with open(tmp_path / "log", "ab", buffering=0) as log:
        log.write(b"one\ntw")
        assert follower.read() == b"[rank 1] one\n"
        log.write(b"o\n\nthree")
    assert follower.read() == b"[rank 1] two\n[rank 1] \n"
    assert follower.close() == b"[rank 1] three\n"


def test_the_traceback_of_a_rank_that_raised_is_kept_back(tmp_path: Path) -> None:
    follower = LogFollower(tmp_path / "log", tmp_path / "exception.json")
    (tmp_path / "exception.json").write_text('{"log_bytes": 6}')
    (tmp_path / "log").write_bytes(b"before\nTraceback ...")
    assert follower.read() == b"before"
    assert follower.read() == b""
    follower.close()


@pytest.mark.parametrize("why", [errno.ESTALE, errno.EIO])
def test_a_log_that_a_file_server_does_not_give_is_shown_later_and_ends_nothing(
    why: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(why, os.strerror(why))

    follower = LogFollower(tmp_path / "log", tmp_path / "none")
    (tmp_path / "log").write_bytes(b"one\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", refuse)
        assert follower.read() == b""
    assert follower.read() == b"one\n"
    follower.close()


def test_a_line_that_does_not_end_hides_nothing_that_comes_after_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file, os.fdopen(reader, "rb") as shown:
        console = Console([LogFollower(path, tmp_path / "none", "[rank 1] ")], None, Patient(file))
        with open(path, "ab") as log:
            log.write(b"." * (CHUNK + 1) + b"\nthe end\n")
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4 * CHUNK)
        console.close()
        file.close()
        assert shown.read().endswith(b"\n[rank 1] the end\n")
