"""The signals that an agent gets: which count as one request, and which as a second. In a separate process, because it replaces
signal handlers."""

from __future__ import annotations

import errno
import os
import signal
import subprocess

from ranks import on_ranks

from rankwise.agent.event_loop import EventLoop


def signals_of_both() -> list[list[int]]:
    """What was requested after each of: a signal, the same signal from the guard, that and another from the guard, both
    again."""
    reader, writer = os.pipe()
    waiting = EventLoop(0, reader)
    os.kill(os.getpid(), signal.SIGINT)
    waiting.wait(0)
    asked = [list(waiting.asked)]
    os.write(writer, bytes([signal.SIGINT]))  # as late as possible
    waiting.wait(0)
    asked.append(list(waiting.asked))
    os.write(writer, bytes([signal.SIGINT, signal.SIGTERM]))
    waiting.wait(0)
    asked.append(list(waiting.asked))
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    waiting.wait(0)
    return [*asked, list(waiting.asked)]


def test_a_signal_that_the_guard_passes_on_too_is_one_request_whichever_comes_first() -> None:
    [asked] = on_ranks(1, signals_of_both)
    assert asked == [[signal.SIGINT], [signal.SIGINT], *[[signal.SIGINT, signal.SIGINT, signal.SIGTERM]] * 2]


def two_signals() -> list[int]:
    waiting = EventLoop(0)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    return waiting.asked


def test_two_signals_to_an_agent_are_two_requests_however_soon_the_second_comes() -> None:
    assert on_ranks(1, two_signals) == [[signal.SIGINT, signal.SIGINT]]


def guard_that_is_gone() -> tuple[list[int], bool, bool]:
    reader, writer = os.pipe()
    waiting = EventLoop(0, reader)
    os.close(writer)
    waiting.wait(0)
    seen = reader in waiting.ready
    waiting.wait(0)
    return waiting.asked, seen, reader in waiting.ready


def test_a_guard_that_is_gone_is_no_request_and_is_not_looked_at_again() -> None:
    assert on_ranks(1, guard_that_is_gone) == [([], True, False)]


def looks_at_a_parent_without_pidfd() -> list[bool]:
    """Whether it had ended: a running one, the same when it was killed, and again when it was reaped."""

    def refuse(_pid: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    os.pidfd_open = refuse
    parent = subprocess.Popen(["sleep", "60"])
    waiting = EventLoop(parent.pid)
    found = [waiting.parent_ended]
    parent.kill()
    os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
    found.append(waiting.parent_ended)
    parent.wait()
    return [*found, waiting.parent_ended]


def test_an_old_kernel_or_container_without_pidfd_open_tells_when_the_launcher_ends() -> None:
    assert on_ranks(1, looks_at_a_parent_without_pidfd) == [[False, True, True]]
