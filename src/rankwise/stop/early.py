"""A request to stop that comes before there is anything to answer it: remembered from `import rankwise` to the first step.

    import rankwise                      # calls `listen`
    early.take(signum)                   # StopSignal, at its first step

Only in a rank that a launcher has started, and only where the code that imports rankwise names what answers (a Trainer or a
StopSignal): to all other scripts a signal does what it always did. The standard library alone, for it is part of the import.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OF_A_RANK = ("RANKWISE_RUN_DIR", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")

listening = False
"""Whether requests are remembered in this process."""

_heard = 0
_pid = 0


def listen() -> None:
    """Remember the first SIGTERM, SIGUSR1 or SIGUSR2 from now on, where that can be answered later and nobody else does."""
    global listening, _pid
    if not any(name in os.environ for name in _OF_A_RANK) or _is_a_child() or not _can_answer():
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


def requests() -> tuple[int, ...]:
    """The signals that are remembered. A StopSignal answers Ctrl-C too."""
    import signal  # the launcher's own start is not to pay for it

    return signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


def remembers(handler: object) -> bool:
    """Whether this handler of a signal is the one that remembers."""
    return handler is _on_signal


def take() -> int:
    """The request that was remembered, 0 for none. From now on somebody else answers, or a signal does what it always did."""
    global _heard, listening
    if not listening or os.getpid() != _pid:
        return 0
    import signal

    signum, _heard, listening = _heard, 0, False
    for each in requests():
        if signal.getsignal(each) is _on_signal:
            signal.signal(each, signal.SIG_DFL)
    return signum


def _on_signal(signum: int, _frame: FrameType | None) -> None:
    global _heard
    if os.getpid() == _pid:
        _heard = _heard or signum
        return
    import signal

    signal.signal(signum, signal.SIG_DFL)  # a process that this rank has forked: it ends as ever
    os.kill(os.getpid(), signum)


def _is_a_child() -> bool:
    """Whether multiprocessing has spawned this process."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _can_answer() -> bool:
    """Whether the script, or a module on the way to this import, names a Trainer or a StopSignal that is not its own."""
    import inspect
    import re

    names = re.compile(rb"\b(Trainer|StopSignal)\b")
    own = re.compile(rb"^[ \t]*class[ \t]+(Trainer|StopSignal)\b", re.MULTILINE)
    files = set()
    frame = inspect.currentframe()
    while frame is not None:
        files.add(frame.f_code.co_filename)
        frame = frame.f_back
    for file in files:
        if file.startswith((_OURS, "<")):
            continue
        try:
            with open(file, "rb") as source:
                text = source.read()
        except OSError:
            continue
        if names.search(text) and not own.search(text):
            return True
    return False
