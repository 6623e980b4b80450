"""How long a rank waits for torch's DataLoader: measured in the rank, read by the agent (slow_ranks.py).

    data_wait = DataWait(path, offset)
    data_wait.prepare()        # if torch is imported already
    data_wait.prepare_later()  # if the script may import it

fork_server.py loads this file by its path, in the script's own interpreter: it imports only the standard library, and files of
rankwise that import no more.
"""

import functools
import mmap
import os
import sys
import threading

from ..host import wait_cost  # noqa: TID252  # the package may have either name
from . import collective_notes

_DATA_LOADER = "torch.utils.data.dataloader"


class DataWait:
    """The wrappers around the DataLoader of one rank. `path` and `offset`: of four words of 8 bytes, which this writes: the
    nanoseconds that the main thread has waited, the batches that it got, num_workers of the newest DataLoader, and how many of
    the nanoseconds were at the start and the end of loops."""

    def __init__(self, path, offset):
        self._place = path, offset
        self._main = threading.get_ident()
        self._is_waiting = False
        self._cost = wait_cost.WaitCost()
        self._words = None

    def prepare(self):
        """Call it in a process that has imported torch."""
        if _DATA_LOADER in sys.modules:
            self._wrap(sys.modules[_DATA_LOADER])
        else:
            self.prepare_later()

    def prepare_later(self):
        """Call it in a process whose script may import torch later."""
        sys.meta_path.insert(0, collective_notes.AfterImport(_DATA_LOADER, self._wrap))

    def _wrap(self, module):
        path, offset = self._place
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._words = memoryview(mmap.mmap(fd, 0))[offset : offset + 32].cast("q")
        os.close(fd)
        os.register_at_fork(after_in_child=self._end)  # a loader worker waits for nobody
        make = module.DataLoader.__iter__
        wrapped = set()

        @functools.wraps(make)
        def iterate(loader):
            iterator = self._measured(make, loader, 0)  # it starts the loader workers
            if self._words is not None:
                self._words[2] = getattr(loader, "num_workers", 0)
            kind = next((kind for kind in type(iterator).__mro__ if "__next__" in vars(kind)), None)
            if kind is not None and kind.__module__ == module.__name__ and kind not in wrapped:
                wrapped.add(kind)
                take = kind.__next__
                kind.__next__ = functools.wraps(take)(lambda batches: self._measured(take, batches, 1))
            return iterator

        module.DataLoader.__iter__ = iterate

    def _end(self):
        self._words = None

    def _measured(self, call, of, batches):
        """What `call(of)` returns, which is a wait of the main thread. A dataset may use another DataLoader: the outermost wait
        counts."""
        if self._words is None or self._is_waiting or threading.get_ident() != self._main:
            return call(of)
        self._is_waiting = True
        self._cost.begin()
        try:
            return call(of)
        except StopIteration:
            batches = 0
            raise
        finally:
            self._is_waiting = False
            cost_ns = self._cost.end()
            if self._words is not None:
                self._words[0] += cost_ns
                self._words[1] += batches
                if not batches:
                    self._words[3] += cost_ns
