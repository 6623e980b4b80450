"""What the agent prints, while somebody reads it and while nobody does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from rankwise.agent.outlet import Outlet

MORE_THAN_A_PIPE_HOLDS = b"0123456789abcde\n" * 20000


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def read(reader: int, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += os.read(reader, size - len(found))
    return found


def started() -> Outlet:
    outlet = Outlet()
    outlet.start()
    return outlet


def never() -> bool:
    return False


def test_all_is_written_in_its_order_over_all_streams(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    outlet, again = started(), os.dup(writer)
    lines = [b"%d\n" % number for number in range(1000)]
    for number, line in enumerate(lines):
        outlet.put(again if number % 3 else writer, line)
    outlet.drain(never)
    assert (os.read(reader, 1 << 16), outlet.waiting_bytes) == (b"".join(lines), 0)
    os.close(again)


def test_who_puts_does_not_wait_for_the_reader_who_gets_everything_when_he_comes(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    outlet = started()
    outlet.put(writer, MORE_THAN_A_PIPE_HOLDS)
    outlet.put(writer, b"and this\n")
    asked = iter([False, False, True])
    outlet.drain(lambda: next(asked))
    assert outlet.waiting_bytes > 0
    expected = MORE_THAN_A_PIPE_HOLDS + b"and this\n"
    assert read(reader, len(expected)) == expected
    outlet.drain(never)
    assert outlet.waiting_bytes == 0


def test_an_error_is_raised_by_the_next_put_and_other_streams_go_on(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    gone, broken = os.pipe()
    os.close(gone)
    outlet = started()
    outlet.put(broken, b"to nobody\n")
    outlet.drain(never)
    with pytest.raises(BrokenPipeError):
        outlet.put(broken, b"more\n")
    outlet.put(writer, b"to somebody\n")
    outlet.drain(never)
    assert os.read(reader, 100) == b"to somebody\n"
    os.close(broken)


def test_where_no_thread_may_be_started_who_puts_writes_himself(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -u` counts threads too."""
    reader, writer = pipe
    outlet = Outlet()
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    outlet.start()
    outlet.put(writer, b"at once\n")
    assert os.read(reader, 100) == b"at once\n"
    monkeypatch.undo()
    outlet.start()
    outlet.put(writer, b"by the thread\n")
    outlet.drain(never)
    assert os.read(reader, 100) == b"by the thread\n"
