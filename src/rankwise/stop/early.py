"""Remembers a request to stop that comes before the first step, from `import rankwise` on.

    import rankwise                      # calls `listen`
    early.take(signum)                   # StopSignal, at its first step

Only in a rank that a launcher has started, and only if the script, or one of the user's modules that it imports, names a
Trainer or a StopSignal, which handle requests. In all other scripts signals keep their usual effect. This file imports only the
standard library, because it is part of the import of rankwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OF_A_RANK = ("RANKWISE_RUN_DIR", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")

listening = False
"""Whether requests are remembered in this process."""

_heard = 0
_pid = 0
_told: Callable[[], None] | None = None
_to: Callable[[int, FrameType | None], None] | None = None


def listen(file: str = "") -> None:
    """Remember the first SIGTERM, SIGUSR1 or SIGUSR2 from now on, if the script can handle it later and has no handler of its
    own.

    `file`: the user's file, if it is not among the callers of this function (functions/calls.py).
    """
    global listening, _pid
    if listening or not any(name in os.environ for name in _OF_A_RANK) or _is_a_child():
        return
    if not _can_answer([file] if file else _importers()):
        return
    import signal

    try:
        for signum in requests():
            if signal.getsignal(signum) is signal.SIG_DFL:
                signal.signal(signum, _on_signal)
                listening = True
    except ValueError:  # not the main thread
        return
    _pid = os.getpid()
    if listening and _told is not None:
        _told()


def tell(told: Callable[[], None]) -> None:
    """Call `told` as soon as requests are remembered in this process: at once, if they are."""
    global _told
    _told = told
    if listening:
        told()


def requests() -> tuple[int, ...]:
    """The signals that are remembered. A StopSignal handles Ctrl-C too."""
    import signal

    return signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


def remembers(handler: object) -> bool:
    """Whether this signal handler is the one of this module."""
    return handler is _on_signal


def take() -> int:
    """The remembered request, 0 if there is none. From now on, signals have their usual effect, or another handler."""
    global _heard, listening
    if not listening or os.getpid() != _pid:
        return 0
    import signal

    signum, _heard, listening = _heard, 0, False
    for each in requests():
        if signal.getsignal(each) is _on_signal:
            signal.signal(each, signal.SIG_DFL)
    return signum


def pass_to(function: Callable[[int, FrameType | None], None] | None) -> int:
    """As `take`, for a loop in a thread, which cannot set handlers: from now on requests are passed to `function`. With None
    they have their usual effect."""
    global _heard, _to
    if not listening or os.getpid() != _pid:
        return 0
    signum, _heard, _to = _heard, 0, function or _end
    return signum


def _on_signal(signum: int, frame: FrameType | None) -> None:
    global _heard
    if os.getpid() != _pid:
        _end(signum, frame)  # a process that this rank has forked: the signal ends it as usual
    elif _to is not None:
        _to(signum, frame)
    else:
        _heard = _heard or signum


def _end(signum: int, _frame: FrameType | None) -> None:
    import signal

    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _is_a_child() -> bool:
    """Whether multiprocessing has spawned this process."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _can_answer(files: list[str]) -> bool:
    """Whether one of these files, or one of the user's modules that they import, names a Trainer or a StopSignal that it does
    not define itself. A module must also name rankwise: the Trainer of another library handles no requests."""
    import re

    from rankwise.host import sources  # not at the top: the launcher does not need it

    names = re.compile(r"\b(Trainer|StopSignal)\b")
    own = re.compile(r"^[ \t]*class[ \t]+(Trainer|StopSignal)\b", re.MULTILINE)
    return any(
        names.search(text) and not own.search(text) and (place < len(files) or "rankwise" in text)
        for place, text in enumerate(sources.texts(files, sys.path))
    )


def _importers() -> list[str]:
    """The files that led to this import: the script, and the modules that imported each other up to rankwise."""
    import inspect

    files = []
    frame = inspect.currentframe()
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return [file for file in dict.fromkeys(files) if not file.startswith((_OURS, "<"))]
