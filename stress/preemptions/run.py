"""Is a training that is preempted again and again equal to one that never was, with every launcher?

    python stress/preemptions/run.py [rankwise] [torchrun] [mpirun] [--stops 50] [--steps 800] [--seed 0]
        [--within-s 1]

Sends SIGTERM, SIGUSR1 or SIGUSR2 to one rank of three, to several ranks up to 2 s after each other, to all, or to our launcher
or agent: at a random moment of an attempt after its first step, half of them while a rank loads, computes, reduces, evaluates
or saves. After each preemption: all ranks have stopped after the same step, the newest checkpoint is of that step, each rank
has exited with 75, the launcher with its own status for this, and no process is left. When a training reaches its end, it has
used the samples of one that was never preempted, in the same order, each step once, and has the same parameters, bit for bit.
Then another training starts, until there were enough preemptions. Exits with 1 if something is wrong.
"""

import argparse
import collections
import contextlib
import itertools
import mmap
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from rankwise.run.directory import RunDir

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from judge import WrongError, judged, processes

SCRIPT = Path(__file__).with_name("train.py")
RANKS = 3
MOST_RANKS = 4  # chain.py
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ROW = 8
PID, DONE, PHASE, AGREED = range(4)
PHASES = ("-", "load", "compute", "reduce", "evaluate", "save")
LONGEST_SKEW_S = 2.0
HANG_S = 30.0
START_S = 120.0


@dataclass(frozen=True)
class Launcher:
    """How the ranks are started."""

    command: Callable[[Path], list[str]]
    """The words before the script; takes a folder."""

    status: int
    """The launcher's exit status when its ranks have exited with 75."""

    own: tuple[str, ...] = ()
    """Processes of the launcher to which a signal counts as one to all ranks."""

    environ: dict[str, str] = field(default_factory=dict)


_AS_ROOT = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
LAUNCHERS = {
    "rankwise": Launcher(
        lambda folder: [sys.executable, "-m", "rankwise", "run", "--nproc", str(RANKS), "--run-dir", str(folder / "run")],
        status=75,
        own=("launcher", "agent"),
    ),
    "torchrun": Launcher(
        lambda _: [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)], status=1
    ),
    "mpirun": Launcher(
        lambda _: ["mpirun.openmpi", "-np", str(RANKS), "--oversubscribe", "--bind-to", "none", sys.executable],
        status=75,
        environ=_AS_ROOT,
    ),
}


class Training:
    """One training, over as many attempts as it needs."""

    def __init__(self, launcher: Launcher, folder: Path, steps: int) -> None:
        folder.mkdir()
        self.launcher, self.folder, self.steps = launcher, folder, steps
        self.run = RunDir(folder / "run")
        self.out = folder / "out.txt"
        self.attempts = 0
        self.words: list[str] = []
        now = folder / "now"
        now.write_bytes(bytes(MOST_RANKS * ROW * 8))
        with now.open("r+b") as file:
            self._now = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def forget(self) -> None:
        """Called before another attempt."""
        self.attempts += 1
        self._now[:] = memoryview(bytes(len(self._now) * 8)).cast("q")

    def start(self, *words: str) -> psutil.Popen:
        self.forget()
        self.words = list(words)
        command = [*self.launcher.command(self.folder), SCRIPT, str(self.folder), str(self.steps), *words]
        environ = {**os.environ, **self.launcher.environ, "TMPDIR": str(self.folder)}
        with self.out.open("w") as out:
            return psutil.Popen(command, cwd=self.folder, env=environ, stdout=out, stderr=out, start_new_session=True)

    def newest(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        return max((int(path.name[5:13]) for path in self.run.checkpoints.glob("step-*")), default=0)

    def word(self, rank: int, column: int) -> int:
        return self._now[rank * ROW + column]

    def wait(self, process: psutil.Popen, limit_s: float) -> int:
        """Wait for the launcher's exit status."""
        try:
            return process.wait(timeout=limit_s)
        except psutil.TimeoutExpired:
            raise WrongError(f"it hangs: nothing has ended within {limit_s:g} s\n{self.out.read_text()}") from None

    def has_agreed(self) -> bool:
        """Whether all ranks of this attempt know that they must stop."""
        return all(self.word(rank, AGREED) for rank in range(RANKS))

    def samples(self) -> list[list[str]]:
        """For each rank, the lines of all attempts."""
        return [(self.folder / f"samples-{rank}").read_text().splitlines() for rank in range(RANKS)]

    def ends(self) -> list[list[str]]:
        """For each rank, the words of the last attempt: its exit status, when it learned of the stop, and after which step it
        stopped."""
        lines = [(self.folder / f"ends-{rank}").read_text().splitlines() for rank in range(RANKS)]
        if any(len(line) != self.attempts for line in lines):
            raise WrongError(f"ranks left without a last word: {lines}\n{self.out.read_text()}")
        return [line[-1].split() for line in lines]

    def parameters(self) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / "final.pt", weights_only=True)


@dataclass
class Preemption:
    """The signals of one preemption."""

    began: float
    who: str
    signum: signal.Signals
    phase: str
    late: int


@dataclass
class Tally:
    """What was sent, and how long it took."""

    who: collections.Counter[str] = field(default_factory=collections.Counter)
    signals: collections.Counter[str] = field(default_factory=collections.Counter)
    phases: collections.Counter[str] = field(default_factory=collections.Counter)
    late: int = 0
    """Signals to ranks that already knew of the stop."""

    agreed_s: list[float] = field(default_factory=list)
    ended: int = 0
    attempts: list[int] = field(default_factory=list)

    @property
    def stops(self) -> int:
        return sum(self.who.values())

    def add(self, sent: Preemption, agreed_s: float) -> None:
        self.who[sent.who] += 1
        self.signals[sent.signum.name] += 1
        self.phases[sent.phase] += 1
        self.late += sent.late
        self.agreed_s.append(agreed_s)

    def text(self, name: str) -> str:
        def counted(counter: collections.Counter[str]) -> str:
            return ", ".join(f"{key} {n}" for key, n in counter.most_common())

        return (
            f"{name}: {self.stops} preemptions, 0 wrong ({counted(self.who)}; {counted(self.signals)}; a rank signalled in: "
            f"{counted(self.phases)}), {self.late} more signals after all had agreed\n"
            f"  {self.ended} trainings ended, in {min(self.attempts)} to {max(self.attempts)} attempts; from the first signal "
            f"until the last rank knew: {statistics.median(self.agreed_s):.3f} s (median), {max(self.agreed_s):.3f} s (longest)"
        )


def own_process(launcher: psutil.Popen, which: str) -> int:
    if which == "agent":
        return next(p.pid for p in launcher.children() if "rankwise.agent" in p.cmdline())
    return launcher.pid


def wait_for_moment(training: Training, launcher: psutil.Popen, rank: int) -> str | None:
    """Wait for the moment of a preemption, and return what the rank does then; None if the training ended before."""
    until = time.monotonic() + START_S
    while not all(training.word(r, DONE) for r in range(RANKS)):
        if launcher.poll() is not None:
            return None
        if time.monotonic() > until:
            raise WrongError(f"no first step within {START_S:g} s\n{training.out.read_text()}")
        time.sleep(0.0005)
    kind = random.choices(["first step", "any", *PHASES[1:]], [2, 5, 1, 1, 2, 2, 2])[0]
    if kind == "first step":
        return kind
    time.sleep(random.uniform(0.0, 1.2))
    if kind != "any":
        until = time.monotonic() + 1.5  # do not wait longer for a phase that is over, or is too rare
        while training.word(rank, PHASE) != PHASES.index(kind) and time.monotonic() < until and launcher.poll() is None:
            pass
    return PHASES[training.word(rank, PHASE)] if launcher.poll() is None else None


def preempt(training: Training, launcher: psutil.Popen, own: tuple[str, ...]) -> Preemption | None:
    """Send the signals of one preemption; None if the training ended before."""
    who = random.choice(["one rank", "several", "all", *own])
    signum = random.choice(SIGNALS)
    ranks = random.sample(range(RANKS), {"one rank": 1, "several": random.choice([2, 3])}.get(who, RANKS))
    phase = wait_for_moment(training, launcher, ranks[0])
    if phase is None:
        return None
    pids = [own_process(launcher, who)] if who in own else [training.word(rank, PID) for rank in ranks]
    delays = [0.0] * len(pids) if who != "several" else [0.0, *(random.uniform(0.0, LONGEST_SKEW_S) for _ in pids[1:])]
    sent = Preemption(time.monotonic(), who, signum, phase, late=0)
    for delay_s, pid in sorted(zip(delays, pids, strict=True)):
        if delay_s:
            with contextlib.suppress(psutil.TimeoutExpired):
                launcher.wait(timeout=sent.began + delay_s - time.monotonic())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
            sent.late += training.has_agreed()
    return sent


def check_stop(training: Training, launcher: Launcher, status: int, began: float, within_s: float) -> float:
    """Check that the last attempt ended as all ranks had agreed. Returns the seconds since the first signal."""
    out = training.out.read_text()
    ends = training.ends()
    if any(end[0] != "75" or len(end) != 3 for end in ends):
        raise WrongError(f"ranks left with {ends}\n{out}")
    steps = {int(end[2]) for end in ends}
    newest = training.newest()
    if steps != {newest}:
        raise WrongError(f"ranks left after steps {sorted(steps)}, the newest checkpoint is of step {newest}\n{out}")
    if status != launcher.status:
        raise WrongError(f"the launcher left with {status}, not {launcher.status}\n{out}")
    if bad := [code for code in re.findall(r"exitcode *: (-?[0-9]+)", out) if code != "75"]:  # in torchrun's report
        raise WrongError(f"torchrun saw ranks leave with {bad}\n{out}")
    agreed_s = max(float(end[1]) for end in ends) - began
    if agreed_s > within_s:
        raise WrongError(f"{agreed_s:.2f} s from the first signal until the last rank knew\n{out}")
    return agreed_s


def wait_until_gone(training: Training) -> None:
    until = time.monotonic() + HANG_S
    while left := processes(training.folder):
        if time.monotonic() > until:
            raise WrongError(f"left in ps: {[(p.pid, p.cmdline()) for p in left]}")
        time.sleep(0.02)


def check_end(training: Training, reference: Training) -> None:
    """Check what a complete training has done, over all its attempts."""
    for rank, (mine, theirs) in enumerate(zip(training.samples(), reference.samples(), strict=True)):
        if mine != theirs:
            first = next(i for i, (a, b) in enumerate(itertools.zip_longest(mine, theirs)) if a != b)
            raise WrongError(
                f"rank {rank}, after {first} steps: {mine[first : first + 2]}, never preempted {theirs[first : first + 2]}"
            )
    ours, theirs = training.parameters(), reference.parameters()
    if ours.keys() != theirs.keys() or any(not torch.equal(ours[name], theirs[name]) for name in theirs):
        raise WrongError("the parameters in the end are not those of the run that was never preempted")


def finished(training: Training, status: int, was_signalled: bool = False) -> None:
    """Check the last attempt. If a signal arrives at the very end of the script, the exit status may be that of the signal."""
    if (status != 0 and not was_signalled) or any(end[0] != "0" for end in training.ends()):
        raise WrongError(f"it ended with {status}, {training.ends()}\n{training.out.read_text()}")


def trial(folder: Path, name: str, stops: int, within_s: float, reference: Training) -> str:
    """Returns the summary. Raises WrongError."""
    launcher, tally, steps = LAUNCHERS[name], Tally(), reference.steps
    trainings = [Training(launcher, folder / f"{name}-1", steps)]
    while tally.stops < stops or trainings[-1].attempts:  # also check the end of the last training
        training = trainings[-1]
        words = [word for word in ("blocking", "workers") if random.random() < 0.5]
        if training.newest() == steps:  # stopped after the last step: for another command, a complete run is an error
            words = training.words
        process = training.start(*words)
        sent = preempt(training, process, launcher.own) if tally.stops < stops else None
        status = training.wait(process, HANG_S if sent is not None else 600.0)
        wait_until_gone(training)
        if sent is not None and "0" not in {end[0] for end in training.ends()}:
            tally.add(sent, check_stop(training, launcher, status, sent.began, within_s))
        else:
            finished(training, status, sent is not None)
            check_end(training, reference)
            tally.ended += 1
            tally.attempts.append(training.attempts)
            trainings.append(Training(launcher, folder / f"{name}-{len(trainings) + 1}", steps))
        print(f"\r{name}: {tally.stops} preemptions, {tally.ended} trainings ended", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return tally.text(name)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("launchers", nargs="*", choices=[*LAUNCHERS, []], default=list(LAUNCHERS))
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within-s", type=float, default=1.0, help="until all ranks must know, from the first signal")
    options = parser.parse_args()
    random.seed(options.seed)

    def stops(folder: Path) -> None:
        reference = Training(LAUNCHERS["rankwise"], folder / "reference", options.steps)
        finished(reference, reference.wait(reference.start(), 600.0))
        for launcher in options.launchers:
            print(trial(folder, launcher, options.stops, options.within_s, reference), flush=True)

    return judged(stops, Path("/dev/shm"))


if __name__ == "__main__":
    sys.exit(main())
