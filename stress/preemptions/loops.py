"""Do all ranks stop after the same step if no collective keeps them together?

    python stress/preemptions/loops.py [ahead] [local] [none] [--stops 50] [--seed 0]

Four ranks, each at its own pace, in a loop whose hosts are four steps ahead of the device, in one that averages every 8 steps,
and in one without a collective; signals as in run.py. With `rankwise run` each stop ends an attempt. With two torchrun
commands, whose nodes know nothing of each other, one attempt is stopped again and again. After each stop: all ranks have done
the same steps, the attempt started where the previous one had ended, and each rank's parameter is that of a serial program
after the same number of steps. Exits with 1 if something is wrong.
"""

import argparse
import contextlib
import mmap
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from run import HANG_S, LONGEST_SKEW_S, SIGNALS, START_S, WrongError, judged, processes

SCRIPT = Path(__file__).with_name("hand_written.py")
RANKS = 4
ROW = 8
PID, DONE, PHASE, AGREED, GO = range(5)
EVERY = 8
LOOPS = ("ahead", "local", "none")


def gradient(rank: int, step: int) -> int:
    return (rank + 1) * (step % 97)


def serial(loop: str, steps: int) -> list[int]:
    """Each rank's parameter after `steps` steps."""
    values = [0] * RANKS
    for step in range(1, steps + 1):
        if loop == "ahead":
            values = [value + sum(gradient(rank, step) for rank in range(RANKS)) for value in values]
            continue
        values = [value + gradient(rank, step) for rank, value in enumerate(values)]
        if loop == "local" and step % EVERY == 0:
            values = [sum(values) // RANKS] * RANKS
    return values


class Run:
    """A run: its folder, and the processes that have started its ranks."""

    def __init__(self, folder: Path, loop: str) -> None:
        folder.mkdir()
        self.folder, self.loop = folder, loop
        self.stops = self._steps = 0
        self.out = folder / "out.txt"
        (folder / "now").write_bytes(bytes(RANKS * ROW * 8))
        with (folder / "now").open("r+b") as file:
            self._now = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._launchers: list[psutil.Popen] = []

    def start(self, commands: Sequence[Sequence[str]], stops: int) -> None:
        self._now[:] = memoryview(bytes(len(self._now) * 8)).cast("q")
        words = [str(SCRIPT), str(self.folder), self.loop, str(stops)]
        with self.out.open("w") as out:
            self._launchers = [
                psutil.Popen([*command, *words], cwd=self.folder, stdout=out, stderr=out, start_new_session=True)
                for command in commands
            ]

    def words(self, column: int) -> list[int]:
        return [self._now[rank * ROW + column] for rank in range(RANKS)]

    def stop(self) -> float:
        """Cause one preemption. Returns the seconds from its first signal until the last rank knew of it."""
        self._until(lambda: all(self.words(DONE)), START_S, "the first step")
        time.sleep(random.uniform(0.0, 0.4))
        who = random.choice([[random.randrange(RANKS)], random.sample(range(RANKS), random.randint(2, RANKS)), [*range(RANKS)]])
        skewed = len(who) > 1 and random.random() < 0.5
        pids, signum = self.words(PID), random.choice(SIGNALS)
        began = time.monotonic()
        delays = [random.uniform(0.0, LONGEST_SKEW_S) * skewed * (number > 0) for number, _ in enumerate(who)]
        for delay_s, rank in sorted(zip(delays, who, strict=True)):
            if delay_s and delay_s > random.uniform(0.0, 1.0):
                continue  # to wait for all late signals would take too long
            time.sleep(max(0.0, began + delay_s - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], signum)
        self.stops += 1
        self._until(lambda: self._ended() == [self.stops] * RANKS, HANG_S, "the stop of all ranks")
        return self._check(began)

    def let_on(self) -> None:
        for rank in range(RANKS):
            self._now[rank * ROW + GO] = self.stops

    def end(self, status: int) -> None:
        for launcher in self._launchers:
            if launcher.wait(timeout=HANG_S) != status:
                raise WrongError(f"the launcher left with {launcher.returncode}, not {status}\n{self.out.read_text()}")
        self._until(lambda: not processes(self.folder), HANG_S, "an empty ps")

    def _ended(self) -> list[int]:
        files = [self.folder / f"ends-{rank}" for rank in range(RANKS)]
        return [file.read_text().count("\n") if file.exists() else 0 for file in files]

    def _until(self, holds: object, limit_s: float, what: str) -> None:
        until = time.monotonic() + limit_s
        while not holds():  # type: ignore[operator]
            if time.monotonic() > until:
                raise WrongError(f"waited {limit_s:g} s for {what}: {self.words(DONE)}\n{self.out.read_text()}")
            time.sleep(0.001)

    def _check(self, began: float) -> float:
        ends = [(self.folder / f"ends-{rank}").read_text().splitlines()[-1].split() for rank in range(RANKS)]
        if len({end[1] for end in ends}) != 1:
            raise WrongError(f"ranks left after steps {[int(end[1]) for end in ends]}")
        steps = int(ends[0][1])
        if any(int(end[3]) != steps - self._steps for end in ends):
            raise WrongError(f"after {self._steps} steps it did {[int(end[3]) for end in ends]} and then had {steps}")
        self._steps = steps
        if (values := [int(end[2]) for end in ends]) != serial(self.loop, steps):
            raise WrongError(f"after {steps} steps the ranks have {values}, a serial program {serial(self.loop, steps)}")
        return max(float(end[0]) for end in ends) - began


def by_rankwise(folder: Path, loop: str, stops: int) -> tuple[Run, list[float]]:
    run, took_s = Run(folder, loop), []
    command = [sys.executable, "-m", "rankwise", "run", "--nproc", str(RANKS), "--run-dir", str(folder / "run")]
    for _ in range(stops):
        run.start([command], stops=1)
        took_s.append(run.stop())
        run.end(75)
    return run, took_s


def by_torchrun(folder: Path, loop: str, stops: int) -> tuple[Run, list[float]]:
    run, took_s = Run(folder, loop), []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", str(RANKS // 2)]
    address = ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    run.start([[*command, "--node_rank", str(node), *address] for node in range(2)], stops)
    for _ in range(stops):
        took_s.append(run.stop())
        run.let_on()
    run.end(1)
    return run, took_s


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("loops", nargs="*", choices=[*LOOPS, []], default=list(LOOPS))
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)

    def stops(folder: Path) -> None:
        for launcher, trial in (("torchrun, 2 nodes", by_torchrun), ("rankwise run", by_rankwise)):
            for loop in options.loops:
                run, took_s = trial(folder / f"{trial.__name__}-{loop}", loop, options.stops)
                print(
                    f"{launcher}, {loop}: {run.stops} of {len(took_s)} stops after one step; from the first signal until "
                    f"the last rank knew: {statistics.median(took_s):.3f} s (median), {max(took_s):.3f} s (longest)",
                    flush=True,
                )

    return judged(stops, Path("/dev/shm"))


if __name__ == "__main__":
    sys.exit(main())
