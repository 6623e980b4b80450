"""The same training in the queue of a real Slurm, which requeues it after each preemption.

    python stress/preemptions/slurm.py [--stops 10] [--steps 800] [--seed 0]          as root on Debian

Three virtual hosts with Slurm (tests/cluster/hosts), one rank on each: `rankwise run --on slurm --requeue`. Each attempt is
ended by `scancel -s TERM`, `USR1` or `USR2`, or by that signal to one rank or two. Its agents exit with 75, Slurm requeues the
job, and the next attempt resumes. The checks are those of run.py. Exits with 1 if something is wrong.
"""

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from run import (
    HANG_S,
    LAUNCHERS,
    RANKS,
    SIGNALS,
    Launcher,
    Preemption,
    Tally,
    Training,
    WrongError,
    check_end,
    check_stop,
    finished,
    judged,
    wait_for_moment,
)

HOSTS = Path(__file__).parents[2] / "tests" / "cluster" / "hosts"
SLURM = Launcher(
    lambda folder: [
        *(sys.executable, "-m", "rankwise", "run", "--on", "slurm", "--requeue", "--time", "60", "--wait"),
        *("--nodes", str(RANKS), "--nproc", "1", "--run-dir", str(folder / "run")),
    ],
    status=75,
)


def preempt(training: Training, launcher: object, job: str) -> Preemption | None:
    """Send the signals of one preemption; None if the training ended before."""
    who, signum = random.choice(["scancel", "scancel", "one rank", "several"]), random.choice(SIGNALS)
    phase = wait_for_moment(training, launcher, random.randrange(RANKS))  # type: ignore[arg-type]
    if phase is None:
        return None
    pids = random.sample(ranks(training), {"scancel": 0, "one rank": 1, "several": 2}[who])
    sent = Preemption(time.monotonic(), who, signum, phase, late=0)
    if who == "scancel":
        subprocess.run(["scancel", "-s", signum.name[3:], job], check=True)
        return sent
    for number, pid in enumerate(pids):
        time.sleep(number * random.uniform(0.0, 1.0))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
            sent = Preemption(sent.began, who, signum, phase, sent.late + training.has_agreed())
    return sent


def ranks(training: Training) -> list[int]:
    """The processes of the ranks, found by the map that they have open: a rank knows only the number that it has on its
    host."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if str(training.folder / "now") in maps.read_text() and int(maps.parts[2]) != os.getpid():
                found.append(int(maps.parts[2]))
    return found


def trial(folder: Path, stops: int, steps: int) -> str:
    """Returns the summary. Raises WrongError."""
    reference = Training(LAUNCHERS["rankwise"], folder / "reference", steps)
    finished(reference, reference.wait(reference.start(), 600.0))
    training, tally = Training(SLURM, folder / "slurm", steps), Tally()
    launcher = training.start()
    while tally.stops < stops:
        sent = preempt(training, launcher, wait_for_job(training))
        if sent is None:
            raise WrongError(f"it ended before {stops} stops: give more --steps\n{training.out.read_text()}")
        attempt = wait_for_attempt(training, training.attempts)
        tally.add(sent, check_stop(training, SLURM, attempt, sent.began, within_s=1.0))
        training.forget()
        print(f"\rslurm: {tally.stops} preemptions", end="", file=sys.stderr, flush=True)
    finished(training, training.wait(launcher, 600.0))
    check_end(training, reference)
    tally.ended, tally.attempts = 1, [training.attempts]
    return tally.text("slurm")


def wait_for_job(training: Training) -> str:
    until = time.monotonic() + HANG_S
    while (job := training.run.read_job()) is None and time.monotonic() < until:
        time.sleep(0.05)
    return job.id if job is not None else ""


def wait_for_attempt(training: Training, number: int) -> int:
    """Wait for the end of this attempt, and return its exit status."""
    until = time.monotonic() + HANG_S
    while len(attempts := training.run.attempts()) < number or attempts[number - 1].status is None:
        if time.monotonic() > until:
            raise WrongError(f"it hangs: no end of life {number} within {HANG_S:g} s\n{training.out.read_text()}")
        time.sleep(0.05)
    return int(str(attempts[number - 1].status))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    subprocess.run([HOSTS / "slurm-up", str(RANKS), "--gpus", "0", "--", "--no-ssh", "--debian-hosts"], check=True)
    try:
        return judged(lambda folder: print(trial(folder, options.stops, options.steps)), Path("/tmp"))
    finally:
        subprocess.run([HOSTS / "slurm-down"], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
