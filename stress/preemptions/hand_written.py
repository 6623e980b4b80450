"""The training that loops.py stops: hand-written loops whose ranks run at different paces and are never all in the same step.

LAUNCHER hand_written.py FOLDER LOOP STOPS

LOOP: `ahead` (a collective in each step, which the device completes four steps later), `local` (parameters are averaged every 8
steps), `none` (no collective). After each of STOPS stops, a rank continues with a new StopSignal when loops.py lets it. In
FOLDER it writes `ends-RANK` (a line per stop: when it learned of it, after which step it stopped, the parameter then, the steps
since the previous stop), `state-RANK`, from which its next attempt resumes, and a row of `now`.
"""

import collections
import mmap
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import rankwise
from rankwise.dist import World

ROW = 8
PID, DONE, PHASE, AGREED, GO = range(5)
AHEAD = 4
EVERY = 8


def gradient(rank: int, step: int) -> int:
    return (rank + 1) * (step % 97)


class Loop:
    """One rank's parameter. It is an integer, so that a serial program gets the same value."""

    def __init__(self, kind: str, world: World, value: int) -> None:
        self.value = value
        self._kind, self._world = kind, world
        self._queue: collections.deque[tuple[torch.Tensor, dist.Work]] = collections.deque()

    def step(self, number: int) -> None:
        gradient_here = gradient(self._world.rank, number)
        if self._kind == "ahead":
            tensor = torch.tensor([gradient_here])
            self._queue.append((tensor, dist.all_reduce(tensor, async_op=True)))
            if len(self._queue) > AHEAD:
                self._device_ends_a_step()
            return
        self.value += gradient_here
        if self._kind == "local" and number % EVERY == 0:
            total = torch.tensor([self.value])
            dist.all_reduce(total)
            self.value = int(total) // self._world.world_size

    def _device_ends_a_step(self) -> None:
        tensor, work = self._queue.popleft()
        work.wait()
        self.value += int(tensor)

    def drain(self) -> None:
        while self._queue:
            self._device_ends_a_step()


def main() -> None:
    folder, kind, stops = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    world = rankwise.init(timeout_s=20.0)
    with (folder / "now").open("r+b") as file:
        now = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")[world.rank * ROW : (world.rank + 1) * ROW]
    state = folder / f"state-{world.rank}"
    step, value = map(int, state.read_text().split()) if state.exists() else (0, 0)
    loop, pace, chance = Loop(kind, world, value), 0.001 * (1 + world.rank % 3), random.Random()
    rankwise.barrier()
    for number in range(stops):
        stop, began = rankwise.StopSignal(), step
        now[PID], now[AGREED] = os.getpid(), 0
        while not stop.agreed(step):
            step += 1
            time.sleep(chance.random() * 2 * pace if chance.random() < 0.9 else 0.02)
            loop.step(step)
            now[DONE] = step - began
        learnt = time.monotonic()
        now[AGREED] = 1
        loop.drain()
        stop.finish()
        with (folder / f"ends-{world.rank}").open("a") as file:
            file.write(f"{learnt} {step} {loop.value} {step - began}\n")
        state.write_text(f"{step} {loop.value}")
        stop.leave()
        now[DONE] = 0
        while number + 1 < stops and now[GO] <= number:
            time.sleep(0.001)
    raise stop.stopped()


main()
