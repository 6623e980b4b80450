"""A function for Submitit's executors: one rank per task, stopped, saved and requeued as Submitit does it.

    from rankwise.functions import on_submitit
    executor = submitit.AutoExecutor("jobs");  executor.update_parameters(nodes=1, tasks_per_node=4, gpus_per_node=4)
    job = executor.submit(on_submitit(train), lr=0.1);  job.results()

Submitit saves in a signal handler, on rank 0 alone, where nothing can be agreed on. So while a Trainer (or a StopSignal) is at
work the signal is its own: all ranks stop after the same step and save. Only then is Submitit told, whose handler writes the
next submission and puts the job back into the queue; the next start goes on from the checkpoint.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rankwise.errors import ConfigError, FunctionError, Stopped


def on_submitit(fn: Callable[..., Any]) -> Submission:
    """`fn` for a task of Submitit: `rankwise.init()` and the Trainer in it connect to the other tasks, whatever the executor.

    A Trainer without a run_dir writes in Submitit's folder, <job id>_run, the same in each start of the job.
    """
    if find_spec("submitit") is None:
        raise ConfigError("on_submitit: Submitit is not installed; type: pip install 'rankwise[submitit]'")
    return Submission(fn)


class Submission:
    """This is pickled. Submitit calls `checkpoint` to ask what to submit next."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._fn(*args, **kwargs)
        except Stopped as stopped:
            _hand_over(stopped.signum)
            raise FunctionError(  # an Exception: Submitit would pass over a SystemExit, and have no result
                f"stopped by {signal.Signals(stopped.signum).name if stopped.signum else 'request'} after a step, saved; "
                "to resume, submit it again with the same run_dir"
            ) from stopped

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """The same call again: its progress is in its checkpoints. Called by Submitit, on rank 0."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *args, **kwargs)


def _hand_over(signum: int) -> None:
    """Everything is saved: Submitit's own handler requeues the job, where this is the signal that it does so for."""
    from submitit import JobEnvironment

    handler = signal.getsignal(signum) if signum else None
    if not callable(handler) or signum != JobEnvironment._usr_sig():
        return
    handler(signum, None)  # on rank 0 it does not come back
    # The other ranks have nothing left to do; any status but 0 could end rank 0's task before it is done (srun -K).
    sys.exit(0)
