"""Is a training in attempts on 2, 3, 1 and 4 ranks, each killed, equal to one whose attempts ended cleanly at the same steps?

    python stress/preemptions/chain.py [--attempts 12] [--steps 300] [--seed 0]

Each attempt is `rankwise run` on the next number of ranks. It is ended by SIGKILL to one rank, to all ranks, to the agent or
the launcher, some time after its first step. The next attempt repeats what was lost since the last checkpoint. Then the same
chain runs with attempts that end cleanly at those checkpoints. Checks: each attempt starts one step after its checkpoint;
without the steps that were rolled back, the global batches are those of an unbroken run on one rank, in the same order, each
sample once per epoch; the final parameters are those of the clean chain, bit for bit. Exits with 1 if something is wrong.
"""

import argparse
import contextlib
import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

import psutil
import torch
from run import DONE, PID, START_S, Launcher, Training, WrongError, judged, own_process, wait_until_gone

CHAIN = (2, 3, 1, 4)
SAMPLES, STEPS_OF_AN_EPOCH = 203, 13
Ledger = dict[int, list[int]]


def on(ranks: int) -> Launcher:
    return Launcher(
        lambda folder: [sys.executable, "-m", "rankwise", "run", "--nproc", str(ranks), "--run-dir", str(folder / "run")],
        status=0,
    )


def take(training: Training, ranks: int) -> Ledger:
    """The samples of each step of the last attempt, with those of its ranks one after the other."""
    taken: Ledger = {}
    for rank in range(ranks):
        path = training.folder / f"samples-{rank}"
        for line in path.read_text().splitlines() if path.exists() else ():
            step, _, samples = line.partition(": ")
            taken.setdefault(int(step), []).extend(map(int, samples.split()))
        path.unlink(missing_ok=True)
    return taken


def newest(training: Training) -> int:
    return max((int(path.name[5:13]) for path in training.run.checkpoints.glob("step-*")), default=0)


def kill(training: Training, launcher: psutil.Popen, ranks: int) -> None:
    """Kill some time after the first step of all ranks; not at all if the attempt ends before."""
    until = time.monotonic() + START_S
    while not all(training.word(rank, DONE) for rank in range(ranks)):
        if launcher.poll() is not None or time.monotonic() > until:
            raise WrongError(f"no first step\n{training.out.read_text()}")
        time.sleep(0.001)
    with contextlib.suppress(psutil.TimeoutExpired):
        launcher.wait(timeout=random.uniform(0.4, 1.4))
    if launcher.poll() is None:
        who = random.choice(["rank", "rank", "all", "agent", "launcher"])
        pids = [training.word(rank, PID) for rank in range(ranks)]
        pids = pids if who == "all" else [random.choice(pids) if who == "rank" else own_process(launcher, who)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def killed_chain(training: Training, attempts: int) -> tuple[Ledger, list[tuple[int, int]], int]:
    """(the samples of the steps that count, (ranks, last such step) of each attempt, the steps that were rolled back)."""
    ledger: Ledger = {}
    ends: list[tuple[int, int]] = []
    rolled_back = began = status = 0
    for number, ranks in enumerate(itertools.islice(itertools.cycle(CHAIN), attempts)):
        training.launcher = on(ranks)
        launcher = training.start()
        if number + 1 < attempts and began < training.steps:
            kill(training, launcher, ranks)
        status = training.wait(launcher, 600.0)
        wait_until_gone(training)
        taken, saved = take(training, ranks), newest(training)
        if min(taken, default=began + 1) != began + 1:
            raise WrongError(f"life {number + 1} had a checkpoint of step {began} and began with step {min(taken)}")
        rolled_back += max(taken, default=saved) - saved
        ledger |= {step: samples for step, samples in taken.items() if step <= saved}
        ends.append((ranks, saved))
        began = saved
        print(f"\r{number + 1} attempts", end="", file=sys.stderr, flush=True)
        if status == 0:
            break  # the training is complete, perhaps before the last attempt
    if status != 0:
        raise WrongError(f"the last life ended with {status}\n{training.out.read_text()}")
    return ledger, ends, rolled_back


def clean_chain(training: Training, ends: list[tuple[int, int]]) -> Ledger:
    ledger: Ledger = {}
    for ranks, until in ends:
        if until == max(ledger, default=0):
            continue  # this attempt has saved no checkpoint
        training.launcher = on(ranks)
        if (status := training.wait(training.start(f"until={until}"), 600.0)) != 0:
            raise WrongError(f"a clean life ended with {status}\n{training.out.read_text()}")
        ledger |= take(training, ranks)
    return ledger


def trial(folder: Path, attempts: int, steps: int) -> str:
    """Returns the summary. Raises WrongError."""
    unbroken = Training(on(1), folder / "unbroken", steps)
    unbroken.wait(unbroken.start(), 600.0)
    batches = take(unbroken, 1)
    for first in range(1, steps - STEPS_OF_AN_EPOCH + 2, STEPS_OF_AN_EPOCH):
        epoch = [batches[step] for step in range(first, first + STEPS_OF_AN_EPOCH)]
        if sorted(itertools.chain.from_iterable(epoch)) != list(range(SAMPLES)):
            raise WrongError(f"the epoch from step {first} is not every sample once")
    killed, clean = Training(on(1), folder / "killed", steps), Training(on(1), folder / "clean", steps)
    ledger, ends, rolled_back = killed_chain(killed, attempts)
    theirs = clean_chain(clean, ends)
    if ledger != batches:
        wrong = next(step for step in range(1, steps + 1) if ledger.get(step) != batches[step])
        raise WrongError(f"step {wrong} took {ledger.get(wrong)}, the unbroken run {batches[wrong]}")
    if theirs != batches:
        raise WrongError("the clean chain has other global batches than the unbroken run")
    ours, parameters = killed.parameters(), clean.parameters()
    if any(not torch.equal(ours[name], parameters[name]) for name in parameters):
        raise WrongError("the parameters in the end are not those of the clean chain")
    told = ", ".join(f"{ranks} to step {step}" for ranks, step in ends)
    return (
        f"{len(ends)} attempts, by ranks: {told}; {rolled_back} steps rolled back\n"
        f"all {steps} global batches as on one rank without a break, parameters bit for bit those of the clean chain"
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--attempts", type=int, default=12)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    return judged(lambda folder: print(trial(folder, options.attempts, options.steps)), Path("/dev/shm"))


if __name__ == "__main__":
    sys.exit(main())
