"""What a wait for data costs: nothing while the GPU has work.

    cost = WaitCost()
    cost.begin()
    batch = next(batches)
    total_ns += cost.end()

fork_server.py loads this file by its path, in the script's own interpreter: it imports only the standard library.
"""

import sys
import time
from typing import Any

_MAY_BE_HIDDEN_NS = 500_000
"""On a GPU, shorter waits cost less than to ask what the GPU does."""


class WaitCost:
    """For the waits of one thread, one after another."""

    def __init__(self) -> None:
        self._last_ns = self._began_ns = 0
        self._gpu: Any = None
        self._was_busy = False

    def begin(self) -> None:
        self._gpu = _gpu() if self._last_ns > _MAY_BE_HIDDEN_NS else None
        self._was_busy = _is_busy(self._gpu)
        self._began_ns = time.perf_counter_ns()

    def end(self) -> int:
        """In nanoseconds. If the GPU ran out of work during the wait, nobody knows when: half of the wait."""
        self._last_ns = waited_ns = time.perf_counter_ns() - self._began_ns
        if _is_busy(self._gpu):
            return 0
        return waited_ns // 2 if self._was_busy else waited_ns


def _gpu() -> Any:
    """The module of the GPU that this thread uses; None if it uses none."""
    cuda = sys.modules.get("torch.cuda")
    return cuda if cuda is not None and cuda.is_initialized() else None


def _is_busy(gpu: Any) -> bool:
    """Whether the GPU still has work of this thread."""
    if gpu is None:
        return False
    try:
        return not gpu.current_stream().query()
    except RuntimeError:  # an error of an earlier kernel, which belongs to the script, or a graph is being captured
        return False
