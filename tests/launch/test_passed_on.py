"""The signals that the launcher passes on to its agent. In a separate process, because it replaces signal handlers."""

from __future__ import annotations

import os
import signal

from ranks import on_ranks

from rankwise.launch import launch


def is_asked_with_blocked_signals() -> bool:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])  # as a program does that starts a process
    forward = launch._Forward({})
    os.kill(os.getpid(), signal.SIGTERM)
    return forward.asked


def test_a_run_can_be_stopped_that_a_program_has_started_with_blocked_signals() -> None:
    assert on_ranks(1, is_asked_with_blocked_signals) == [True]
