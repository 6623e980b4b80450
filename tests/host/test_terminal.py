"""Lines that scroll, and one status line below them."""

from __future__ import annotations

import io
import os
import select
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from rankwise.host.terminal import Terminal, progress_line, typed

CLEAR = b"\r\x1b[K"


class Screen:
    """One of our terminals on a real pseudo-terminal or pipe."""

    def __init__(self, tty: bool) -> None:
        self.reader, self._writer = os.openpty() if tty else os.pipe()
        os.set_blocking(self.reader, False)
        self.file: TextIO = os.fdopen(self._writer, "w")
        self.terminal = Terminal(self.file)

    def seen(self) -> bytes:
        """All output so far: the kernel delivers what is written to a terminal after some time."""
        found = b""
        while select.select([self.reader], [], [], 0.1)[0]:
            found += os.read(self.reader, 1 << 20)
        return found

    def close(self) -> None:
        self.file.close()
        os.close(self.reader)


@pytest.fixture
def tty() -> Iterator[Screen]:
    screen = Screen(tty=True)
    yield screen
    screen.close()


@pytest.fixture
def pipe() -> Iterator[Screen]:
    screen = Screen(tty=False)
    yield screen
    screen.close()


def test_a_pipe_gets_the_bytes_alone_untouched(pipe: Screen) -> None:
    assert not pipe.terminal.is_tty
    pipe.terminal.status("12/100")
    pipe.terminal.write(b"a \xff\x00\r")
    pipe.terminal.write(b"")
    pipe.terminal.status("13/100")
    pipe.terminal.write(b"b")
    pipe.terminal.status("")
    assert pipe.seen() == b"a \xff\x00\rb"


def test_a_status_line_leaves_the_cursor_where_the_next_line_overwrites_it(tty: Screen) -> None:
    assert tty.terminal.is_tty
    tty.terminal.status("12/100")
    assert tty.seen() == CLEAR + b"12/100\r"
    tty.terminal.status("13/100")
    assert tty.seen() == CLEAR + b"13/100\r"


def test_a_line_is_printed_above_the_status_line(tty: Screen) -> None:
    tty.terminal.status("12/100")
    tty.seen()
    tty.terminal.write(b"a line\n")
    assert tty.seen() == CLEAR + b"a line\r\n" + CLEAR + b"12/100\r"


def test_half_a_line_stays_by_itself_until_it_is_whole(tty: Screen) -> None:
    tty.terminal.status("12/100")
    tty.seen()
    tty.terminal.write(b"half")
    assert tty.seen() == CLEAR + b"half"
    tty.terminal.status("13/100")
    assert tty.seen() == b""
    tty.terminal.write(b" and half\n")
    assert tty.seen() == b" and half\r\n" + CLEAR + b"13/100\r"


def test_an_empty_status_removes_the_line_and_only_once(tty: Screen) -> None:
    tty.terminal.status("12/100")
    tty.seen()
    tty.terminal.status("")
    assert tty.seen() == CLEAR
    tty.terminal.status("")
    tty.terminal.write(b"a\n")
    assert tty.seen() == b"a\r\n"


def test_a_status_removed_while_half_a_line_stands_does_not_come_back(tty: Screen) -> None:
    tty.terminal.status("12/100")
    tty.terminal.write(b"half")
    tty.terminal.status("")
    tty.seen()
    tty.terminal.write(b"\n")
    assert tty.seen() == b"\r\n"


def test_a_reader_that_has_gone_silences_the_terminal_and_nothing_else() -> None:
    screen = Screen(tty=False)
    os.close(screen.reader)
    assert not screen.terminal.closed
    screen.terminal.write(b"to nobody\n")
    assert screen.terminal.closed
    screen.terminal.write(b"more\n")
    screen.terminal.status("12/100")
    screen.file.close()


def test_a_slow_reader_of_a_pipe_that_does_not_block_gets_all() -> None:
    """ssh or a shell may leave a pipe like this: if it is full, a write is an error, but not the end of the output."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    file = os.fdopen(writer, "w")
    terminal = Terminal(file)
    data = bytes(range(256)) * 4096  # sixteen times what a pipe holds
    thread = threading.Thread(target=lambda: (terminal.write(data), file.close()))
    thread.start()
    found = b""
    while piece := os.read(reader, 1 << 16):
        found += piece
    thread.join()
    os.close(reader)
    assert found == data
    assert not terminal.closed


@pytest.mark.parametrize("stream", [io.StringIO(), object()])
def test_on_a_stream_that_is_no_file_nothing_is_printed(stream: Any) -> None:
    terminal = Terminal(stream)
    terminal.write(b"a line\n")
    terminal.status("step 1")
    assert (terminal.closed, terminal.is_tty) == (True, False)


def progress(**changes: object) -> dict[str, object]:
    return {"done": 120, "total": 800, "elapsed_s": 60.0, "text": "loss 2.31", "label": "", **changes}


def test_a_progress_line_says_what_is_done_of_how_much_the_times_the_rate_and_the_text() -> None:
    line = progress_line(progress(label="epoch 3"), 100)
    assert line.startswith("epoch 3:  15%|")
    assert line.endswith("| 120/800 [01:00<05:40, 2 steps/s, loss 2.31]")
    assert len(line) == 99


def test_steps_of_an_earlier_attempt_do_not_make_the_rate_faster() -> None:
    assert "1 steps/s" in progress_line(progress(initial=60), 100)


@pytest.mark.parametrize("total", [None, 0])
def test_without_a_known_total_there_is_no_share_and_no_remaining_time(total: int | None) -> None:
    assert progress_line(progress(total=total), 100) == "120 steps [01:00, 2 steps/s, loss 2.31]"


def test_steps_that_take_longer_than_a_second_are_told_in_seconds_per_step() -> None:
    line = progress_line(progress(done=3, initial=0, total=40, elapsed_s=61.0, text="loss {2.31}"), 100)
    assert line.endswith("| 3/40 [01:01<12:32, 20.3 s/step, loss {2.31}]")


def test_before_any_time_has_passed_there_is_no_rate() -> None:
    line = progress_line(progress(done=0, elapsed_s=0.0, text=None), 100)
    assert line.endswith("| 0/800 [00:00<?]")


@pytest.mark.parametrize("columns", [21, 40, 80, 200])
@pytest.mark.parametrize("total", [800, None])
def test_a_progress_line_is_narrower_than_the_terminal_and_one_line(columns: int, total: int | None) -> None:
    line = progress_line(progress(total=total, text="x" * 300, label="y" * 50), columns)
    assert len(line) < columns
    assert "\n" not in line


def test_the_module_is_loaded_without_tqdm() -> None:
    """An agent whose output nobody watches never draws a line."""
    source = "import rankwise.host.terminal, sys; sys.exit('tqdm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source]).returncode == 0


# --- commands that the user may type


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command in a separate environment, which is not on the PATH."""
    command = tmp_path / ".venv" / "bin" / "rankwise"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command.with_name("python")))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return command


def test_the_command_is_printed_as_it_was_typed_unless_the_shell_finds_it_by_its_name(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [".venv/bin/rankwise"])
    assert typed("run", "train.py") == ".venv/bin/rankwise run train.py"
    monkeypatch.setattr(sys, "argv", ["/x/rankwise/agent/__main__.py"])  # nobody has typed this
    assert typed("run", "train.py") == ".venv/bin/rankwise run train.py"
    monkeypatch.setenv("PATH", f"{installed.parent}:/bin")
    assert typed("run", "train.py") == "rankwise run train.py"
    installed.unlink()
    monkeypatch.setattr(sys, "argv", ["/x/rankwise/__main__.py"])
    assert typed("run") == f"{sys.executable} -m rankwise run"


def test_another_rankwise_on_the_path_is_not_taken_for_this_one(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = installed.parents[2] / "other" / "rankwise"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{other.parent}:/bin")
    monkeypatch.setattr(sys, "argv", [".venv/bin/rankwise"])
    assert typed("status") == ".venv/bin/rankwise status"
    monkeypatch.setattr(sys, "argv", [str(other)])  # after pip install --user, the scripts of this Python are elsewhere
    assert typed("status") == "rankwise status"


def test_what_is_printed_to_be_typed_is_safe_to_paste(installed: Path) -> None:
    words = ["run", "./-lead $(touch X).py", "a'b", "", "`id`"]
    assert shlex.split(typed(*words)) == [".venv/bin/rankwise", *words]
