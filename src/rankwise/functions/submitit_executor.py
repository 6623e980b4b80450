"""A function for Submitit's executors: one rank per task, which stops, saves and is requeued as usual with Submitit.

    from rankwise.functions import on_submitit
    executor = submitit.AutoExecutor("jobs");  executor.update_parameters(nodes=1, tasks_per_node=4, gpus_per_node=4)
    job = executor.submit(on_submitit(train), lr=0.1);  job.results()

Submitit saves in a signal handler on rank 0, where ranks cannot agree on a step. So while a Trainer (or a StopSignal) runs, it
handles the signal: all ranks stop after the same step and save. Only then Submitit's handler is called, which writes the next
submission and puts the job back into the queue; the next start resumes from the checkpoint.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rankwise.errors import ConfigError, FunctionError, Stopped
from rankwise.host.arguments import FUNCTION, takes


@takes(fn=FUNCTION)
def on_submitit(fn: Callable[..., Any]) -> Submission:
    """Wrap `fn` for a task of Submitit: `rankwise.init()` and the Trainer in it connect to the other tasks, with any executor.

    A Trainer without a run_dir writes into Submitit's folder, into <job id>_run, which is the same in each start of the job.
    """
    if find_spec("submitit") is None:
        raise ConfigError("on_submitit: Submitit is not installed; type: pip install 'rankwise[submitit]'")
    return Submission(fn)


class Submission:
    """Submitit pickles this object, and calls `checkpoint` to ask what to submit next."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._fn(*args, **kwargs)
        except Stopped as stopped:
            _hand_over(stopped.signum)
            raise FunctionError(  # an Exception: from a SystemExit, Submitit would get no result
                f"stopped by {signal.Signals(stopped.signum).name if stopped.signum else 'request'} after a step, saved; "
                "to resume, submit it again with the same run_dir"
            ) from stopped

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the same call: its progress is in its checkpoints. Submitit calls this, on rank 0."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *args, **kwargs)


def _hand_over(signum: int) -> None:
    """Everything is saved: if this is the signal on which Submitit requeues a job, call Submitit's own handler."""
    from submitit import JobEnvironment

    handler = signal.getsignal(signum) if signum else None
    if not callable(handler) or signum != JobEnvironment._usr_sig():
        return
    handler(signum, None)  # on rank 0 this does not return
    # The other ranks have nothing left to do; with another status than 0, srun -K could end rank 0's task too early.
    sys.exit(0)
