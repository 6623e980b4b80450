"""The agreed stop, in a rank: a signal to any rank stops all ranks after the same step.

    with StopSignal() as stop:
        for step, micro_batches in stop.steps(loader, done=0): ...
        checkpoints.save(parts, step)         # signals are still held; leaving the block raises Stopped after a signal

A step costs one store and one load in a shared page; nothing is sent until a rank gets a signal (shared_page.py has the proof).
The page belongs to rankwise's agent. If another launcher has started the ranks, each node's first rank makes a page, and a
thread of it replaces the agent.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Self, TypeVar

from rankwise.dist import comm
from rankwise.dist.world import agent_row
from rankwise.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Interrupted, Stopped
from rankwise.host.arguments import FROM_ZERO, Argument, takes
from rankwise.host.session import is_interactive
from rankwise.ipc.shared_page import Row
from rankwise.stop import early
from rankwise.stop.coordinator import Coordinator, open_gate

T = TypeVar("T")

SIGNALS = (*early.requests(), signal.SIGINT)

LATE_S = 10.0
"""For how long after a stop a signal still counts as the same request: some ranks may get it later than others."""

_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class _Alarms:
    """When each alarm is due, by this process's clock."""

    def __init__(self, seconds: Sequence[float] = (), call: Callable[[list[int]], None] | None = None) -> None:
        self._every_ns = [int(s * 1e9) for s in seconds]
        self._next_ns: list[int] = []
        self._call = call

    def begin(self) -> None:
        self._next_ns = [0] * len(self._every_ns)
        self.again(range(len(self._every_ns)))

    def next(self) -> tuple[int, int]:
        """(when the next alarm is due, which ones: one bit each); (0, 0) for never."""
        first = min(filter(None, self._next_ns), default=0)
        return first, sum(1 << place for place, at in enumerate(self._next_ns) if at and at == first)

    def ring(self, which: int) -> None:
        places = [place for place in range(len(self._every_ns)) if which >> place & 1]
        for place in places:
            self._next_ns[place] = 0
        if places and self._call is not None:
            self._call(places)

    def again(self, places: Sequence[int]) -> None:
        now = time.monotonic_ns()
        for place in places:
            self._next_ns[place] = now + self._every_ns[place]


class StopSignal:
    """A context in which a signal to any rank stops all ranks after the same step. Inside it SIGTERM, SIGUSR1, SIGUSR2 and
    SIGINT are requests to stop. After such a request, leaving the context raises Stopped, which ends the script with status 75,
    or 130 after Ctrl-C.

    `with` and `steps` do everything that is needed. Without `with`: call `agreed` at the top of each step and `finish` after
    the loop, then save, call `leave`, and `raise stopped()` if `signum`. Making a StopSignal sends nothing; `with`, or the
    first `agreed`, is collective, after `init`.
    """

    @takes(moved={"world": "leave it out; rankwise.init() is called at the first use"})
    def __init__(self) -> None:
        self._row: Row | None = None
        self._keeper: Coordinator | None = None
        self._alone = False
        self._is_main = False
        self._open = False
        self._finished = False
        self._pid = os.getpid()
        self._received = 0
        self.asks = False
        """Whether this rank has called `ask` and has no answer yet."""
        self._due_ns = 0
        self._left = 0.0
        self._before: dict[int, object] = {}
        self.signum = 0
        """The signal because of which all ranks stop; 0 until they do, and if the script itself has asked."""
        self.by_script = False
        """Whether all ranks stop because a rank has called `ask`."""
        self._listening = False
        self._alarms = _Alarms()

    def open(self) -> None:
        """Collective, after `init`. Connects the ranks so that they can agree, unless they are connected already."""
        if self._open:
            return
        self._open = True
        self._pid = os.getpid()
        world = comm.world()
        self._row = agent_row(world)
        if world.world_size > 1 and not comm.all_agree(self._row is not None):
            self._row, self._keeper = open_gate(world)
        self._alone, self._is_main = world.world_size == 1, world.is_main

    def __enter__(self) -> Self:
        """Collective. From here on, signals are requests to stop."""
        self.open()
        if not self._listening:
            self._listen()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """An exception of the body passes through; otherwise raises Stopped if all ranks have stopped because of a signal, or
        Interrupted, a KeyboardInterrupt, after Ctrl-C in a notebook."""
        if error is None and not self._finished:
            self.finish()
        self.leave()
        if error is None and self.signum:
            raise self.to_raise()

    @takes(batches=Argument(lambda value: hasattr(value, "__iter__"), "a Loader, or another iterable"), done=FROM_ZERO)
    def steps(self, batches: Iterable[T], done: int = 0) -> Iterator[tuple[int, T]]:
        """(number of the step, its batch) for each step, until the data end or all ranks stop. `done`: steps done before, in
        all attempts of the run; the same on all ranks."""
        return self._steps(iter(batches), done)

    def _steps(self, batches: Iterator[T], step: int) -> Iterator[tuple[int, T]]:
        over: Any = object()
        while not self.agreed(step) and (batch := next(batches, over)) is not over:
            step += 1
            yield step, batch
        self.finish()

    @property
    def has_gate(self) -> bool:
        """Whether the ranks can agree without a message per step; False if nodes do not reach each other. Valid after
        `open`."""
        return self._row is not None or self._alone

    def _listen(self) -> None:
        self._listening = True
        self.signum, self.by_script = 0, False  # of an earlier loop
        if self._keeper is not None:
            self._keeper.start()
        if self.has_gate and _can_set_handlers():
            for signum in SIGNALS:
                before = signal.signal(signum, self._on_signal)
                self._before[signum] = signal.SIG_DFL if early.remembers(before) else before
        if self._row is not None:
            self._row.join()
            self._row.on_alarm = self._on_alarm
        passed = self._on_signal if self.has_gate else None
        if remembered := early.take() if _can_set_handlers() else early.pass_to(passed):
            os.kill(self._pid, remembered)  # sent again: the handlers are set now
        self._alarms.begin()
        self._set_alarm()

    def alarm(self, seconds: Sequence[float], call: Callable[[list[int]], None]) -> None:
        """Call `call(which)` in `agreed` on all ranks after the same step, each time that one of these intervals has passed by
        the main rank's clock. `which`: the positions of these intervals in `seconds`; they begin again with `again(which)`.
        Needs `has_gate`. To be set before the first `agreed`.
        """
        self._alarms = _Alarms(seconds, call)

    def again(self, which: Sequence[int]) -> None:
        """These intervals of `alarm` begin now. Call it on all ranks after the same step, in `call` or later."""
        self._alarms.again(which)
        self._set_alarm()

    def _on_alarm(self, which: int) -> None:
        self._alarms.ring(which)
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._row is not None and self._is_main:
            self._row.set_alarm(*self._alarms.next())
        self._due_ns = self._alarms.next()[0] if self._alone and self._row is None else 0

    def ask(self) -> None:
        """Ask all ranks to stop after the same step; any rank may call it, between two steps. If all ranks ask then, they stop
        right there. This is a request of the script, not a signal: `signum` stays 0, and there is nothing to raise. Needs
        `has_gate`.
        """
        self.asks = True
        if self._row is not None:
            self._row.ask()

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # in a forked loader worker: its rank ends it
            return
        if self._row is not None:
            self._row.flag = signum
        elif self._received and signum == signal.SIGINT:  # Slurm sends SIGTERM twice at a limit
            signal.signal(signum, signal.SIG_DFL)
            os.kill(self._pid, signum)  # a second Ctrl-C ends it at once
        self._received = signum

    def agreed(self, step: int) -> bool:
        """True if all ranks stop now, with exactly `step` steps done. Call it before each step, with the number of steps
        done."""
        if not self._listening:
            self.open()
            self._listen()
        if self._row is not None:
            if self.asks:
                if self._row.wait_for_answer(step + 1):
                    self.by_script = True
                    return True
                self.asks = self._row.asks
            if self._row.pass_gate(step + 1):
                return False
            self.by_script = self._row.by_script
            self.signum = 0 if self.by_script else self._row.reason
            return True
        if self._due_ns and time.monotonic_ns() >= self._due_ns:
            self._on_alarm(self._alarms.next()[1])
        self.signum = self._received if self._alone else 0
        self.by_script = self.by_script or (self.asks and self._alone and not self.signum)
        return self.by_script or bool(self.signum)

    def finish(self) -> None:
        """The loop is over on this rank; the others will do all their steps too, even if a request comes from now on."""
        self._finished = True
        if self._row is not None and not self.signum:
            self._row.finish()

    def leave(self) -> None:
        """Everything is saved: from here on a signal ends this process as usual.

        After a stop, only once LATE_S have passed: a signal may reach some ranks later than others, and a launcher may signal
        all ranks when the first has exited. These ranks are exiting already, and must keep the exit status of the stop.
        """
        if self._row is not None:
            self._row.leave()
            self._row.on_alarm = None  # the page can go now: no reference leads from its row back to this object
        if self._keeper is not None:
            self._keeper.stop()
        if self.signum:
            self._left = time.monotonic()
        if self._listening and not _can_set_handlers():
            early.pass_to(None)
        late = [signum for signum, handler in self._before.items() if self._is_answered(signum) and _is_default(handler)]
        for signum, handler in self._before.items():
            with contextlib.suppress(ValueError):
                signal.signal(signum, self._on_late_signal if signum in late else handler)  # type: ignore[arg-type]
        if late:
            atexit.register(self._end)
        self._before = {}
        # For another loop (`fit` again): it opens a new gate, because this one has stopped, or nobody manages it any more.
        self._open = self._listening = self._finished = self.asks = False
        self._received = 0

    def _is_answered(self, signum: int) -> bool:
        return bool(self.signum) and not (self._row is None and signum == signal.SIGINT)

    def _on_late_signal(self, signum: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid or time.monotonic() > self._left + LATE_S:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def _end(self) -> None:
        """At exit, ignore these signals: Python removes its handlers before the process is gone, but ignored signals stay
        ignored."""
        for signum in SIGNALS if os.getpid() == self._pid else ():
            if signal.getsignal(signum) == self._on_late_signal:
                signal.signal(signum, signal.SIG_IGN)

    def stopped(self) -> Stopped:
        """The exception to raise once everything is saved: ends the script with status 75, or 130 after Ctrl-C."""
        stopped = Stopped(EXIT_INTERRUPTED if self.signum == signal.SIGINT else EXIT_PREEMPTED)
        stopped.signum = self.signum
        return stopped

    def to_raise(self) -> Stopped | Interrupted:
        """`stopped`; after Ctrl-C where a person types the code, Interrupted, because Stopped would end the session."""
        if self.signum == signal.SIGINT and is_interactive():
            return Interrupted("stopped by Ctrl-C")
        return self.stopped()


def _can_set_handlers() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_default(handler: object) -> bool:
    """Whether it is Python's own handler, or one that an earlier StopSignal has left."""
    return handler in _DEFAULTS or getattr(handler, "__func__", None) is StopSignal._on_late_signal
