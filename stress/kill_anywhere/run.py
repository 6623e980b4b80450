"""Is a training that is killed at any moment, again and again, equal to one that was never killed?

    python stress/kill_anywhere/run.py [--kills 100] [--in-save 30] [--steps 1000] [--seed 0] [--folder /dev/shm]
        [--blocking] [--sync local-sgd:5]

Sends SIGKILL to a rank, the agent, the launcher or all of them: at a random moment of an attempt, including its start, or
inside a save. After each kill: no process is left, every checkpoint under its final name is complete, no complete checkpoint is
missing, and the next attempt resumes from the newest with exactly the losses of a run that was never killed. When a training
reaches its end, it must have that run's parameters, bit for bit. Then another training starts, until there were enough kills.
Exits with 1 if something is wrong.
"""

import argparse
import collections
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch

from rankwise.checkpoint import manifest as manifests
from rankwise.run.directory import RunDir

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from judge import WrongError, judged, processes

SCRIPT = Path(__file__).with_name("train.py")
VICTIMS = ("rank 0", "rank 1", "agent", "launcher", "all")
DEADLINE_S = 60.0


class Training:
    """One training, over as many attempts as it needs."""

    def __init__(self, folder: Path, steps: int, words: Sequence[str], options: Sequence[str] = ()) -> None:
        folder.mkdir()
        self.run = RunDir(folder / "run")
        self.final = folder / "final.pt"
        self.saved = folder / "saved.txt"
        self.out = folder / "out.txt"
        self.attempts = 0
        self._words = [str(steps), str(self.final), str(self.saved), *words]
        self._options = options

    def start(self) -> psutil.Popen:
        self.attempts += 1
        with self.out.open("w") as out:
            words = [sys.executable, "-m", "rankwise", "run", "--nproc", "2", "--run-dir", str(self.run.path)]
            words += [*self._options, str(SCRIPT), *self._words]
            return psutil.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def saving(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return [p for p in self.run.checkpoints.iterdir() if p.name.startswith("tmp.")]
        return []

    def newest(self) -> int:
        """The step of the newest checkpoint, 0 if there is none. Checks that each checkpoint is complete."""
        with contextlib.suppress(FileNotFoundError):
            return max((manifests.verify(p).step for p in self.run.checkpoints.iterdir() if p.name[:5] == "step-"), default=0)
        return 0

    def last_saved(self) -> int:
        lines = self.saved.read_text().split() if self.saved.exists() else []
        return int(lines[-1]) if lines else 0

    def losses(self) -> dict[int, list[tuple[int, float]]]:
        """(step, loss) in order, for each attempt that logged one."""
        attempts = collections.defaultdict(list)
        for record in self.run.read_metrics():
            if "loss" in record:
                attempts[record["life"]].append((record["step"], record["loss"]))
        return attempts

    def parameters(self) -> dict[str, torch.Tensor]:
        return torch.load(self.final, weights_only=True)


def pick(training: Training, launcher: psutil.Popen, victim: str) -> list[int]:
    """The pids of a victim; the launcher's if the victim has not started yet."""
    with contextlib.suppress(psutil.Error, IndexError, OSError):
        if victim == "all":
            return [launcher.pid, *(p.pid for p in launcher.children(recursive=True))]
        if victim == "agent":
            return [p.pid for p in launcher.children() if "rankwise.agent" in p.cmdline()][:1] or [launcher.pid]
        if victim.startswith("rank"):
            children = {p.pid for p in launcher.children(recursive=True)}
            pid = training.run.attempts()[-1].pids[int(victim[-1])]
            return [pid] if pid in children else [launcher.pid]
    return [launcher.pid]


def wait_and_kill(training: Training, launcher: psutil.Popen, victim: str, delay_s: float, in_save: bool) -> str | None:
    """Kill after `delay_s` seconds, or in the save after that with `in_save`. Returns who was killed; None if the training
    ended before."""
    with contextlib.suppress(subprocess.TimeoutExpired, psutil.TimeoutExpired):
        launcher.wait(timeout=delay_s)
        return None
    pids = pick(training, launcher, victim)  # before the save, because the search takes longer than a save
    if in_save:
        until = time.monotonic() + DEADLINE_S
        before = set(training.saving())
        while not set(training.saving()) - before:
            if launcher.poll() is not None or time.monotonic() > until:
                break
        pids = pids if victim == "launcher" or pids != [launcher.pid] else pick(training, launcher, victim)
        time.sleep(random.uniform(0.0, 0.03))  # a save takes about this long
    if launcher.poll() is not None:
        return None
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return victim if victim == "launcher" or pids != [launcher.pid] else "launcher"


def wait_until_gone(training: Training, launcher: psutil.Popen) -> float:
    """Returns the seconds until no process of it is left."""
    began = time.monotonic()
    while launcher.poll() is None or processes(training.run.path.parent):
        if time.monotonic() - began > DEADLINE_S:
            left = [(p.pid, p.cmdline()) for p in processes(training.run.path.parent)]
            for pid, _ in left:
                os.kill(pid, signal.SIGKILL)
            raise WrongError(f"left in ps {DEADLINE_S:.0f} s after a kill: {left}")
        time.sleep(0.02)
    return time.monotonic() - began


def check(training: Training, attempts_before: int, began_at: int, reference: dict[int, float]) -> None:
    """Check that the last attempt started one step after its checkpoint, and that its losses are those of the reference."""
    attempts = training.losses()
    steps = [step for step, _ in attempts.get(attempts_before + 1, [])]
    if steps != list(range(began_at + 1, began_at + 1 + len(steps))):
        raise WrongError(f"a life that had a checkpoint of step {began_at} did steps {steps[0]} to {steps[-1]}")
    for attempt, figures in attempts.items():
        for step, loss in figures:
            if loss != reference[step]:
                raise WrongError(
                    f"life {attempt} has loss {loss} at step {step}, the run that was never killed {reference[step]}"
                )
    newest, saved = training.newest(), training.last_saved()
    if newest < saved:
        raise WrongError(f"the save of step {saved} was complete, and the newest checkpoint is of step {newest}")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def never_killed(training: Training) -> tuple[dict[int, float], float, float]:
    """(its loss at each step, the seconds before its first step, the seconds after it)."""
    began = time.monotonic()
    launcher = training.start()
    if launcher.wait(timeout=600) != 0:
        raise WrongError(f"the run that nobody kills failed:\n{training.out.read_text()}")
    took_s = time.monotonic() - began
    wait_until_gone(training, launcher)
    train_s = max(record.get("clock_s", 0.0) for record in training.run.read_metrics())
    return dict(training.losses()[1]), took_s - train_s, train_s


def trial(make: Callable[[str], Training], kills: int, in_save: int, steps: int) -> str:
    """Returns the summary. Raises WrongError."""
    reference = make("reference")
    losses, start_s, train_s = never_killed(reference)
    if sorted(losses) != list(range(1, steps + 1)):
        raise WrongError("the run that nobody kills has not logged each step")
    trainings = [make("1")]
    victims: collections.Counter[str] = collections.Counter()
    before_first_step = in_saves = done = 0
    ended: list[Training] = []  # of those that were killed
    gone_s = []
    while done < kills or in_saves < in_save or done == 0 or not ended:
        training = trainings[-1]
        attempts_before, began_at, leftovers = len(training.run.attempts()), training.newest(), training.saving()
        enough = done >= kills and in_saves >= in_save
        aim_at_save = not enough and in_saves < in_save and (random.random() < 1.5 * in_save / kills or done >= kills)
        launcher = training.start()
        left_s = start_s + train_s * (1 - began_at / steps)
        delay_s = 1e6 if enough else random.uniform(0.0, left_s * (0.8 if aim_at_save else 1.0))
        victim = wait_and_kill(training, launcher, random.choice(VICTIMS), delay_s, aim_at_save)
        gone = wait_until_gone(training, launcher)
        check(training, attempts_before, began_at, losses)
        if victim is not None:
            gone_s.append(gone)
            done += 1
            victims[victim] += 1
            in_saves += bool(set(training.saving()) - set(leftovers))
            before_first_step += attempts_before + 1 not in training.losses()
        elif launcher.returncode != 0:
            raise WrongError(f"a life that nobody killed ended with {launcher.returncode}:\n{training.out.read_text()}")
        else:
            if not same(training.parameters(), reference.parameters()):
                raise WrongError("the parameters in the end are not those of the run that was never killed")
            if training.attempts > 1:
                ended.append(training)
            trainings.append(make(str(len(trainings) + 1)))
        if sys.stderr.isatty():
            print(f"\r{done} kills, {in_saves} in a save, {len(ended)} trainings ended", end="", file=sys.stderr)
    attempts = [training.attempts for training in ended]
    return (
        f"{done} kills ({', '.join(f'{name} {n}' for name, n in sorted(victims.items()))}), {in_saves} of them inside a save, "
        f"{before_first_step} before the first step of an attempt\n"
        f"{len(ended)} killed trainings of {steps} steps ended, in {min(attempts)} to {max(attempts)} attempts: losses of "
        "every step and the parameters bit for bit those of the run that was never killed\n"
        f"no torn checkpoint, none lost; nothing left in ps, after {statistics.median(gone_s):.2f} s (median), "
        f"{max(gone_s):.2f} s (longest)"
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--in-save", type=int, default=30)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the runs live: in memory, or on a disk")
    parser.add_argument("--blocking", action="store_true", help="saves that the loop waits for, instead of those behind it")
    parser.add_argument("--sync", metavar="NAME", help="a strategy: its replicas, moments and error memories come back too")
    options = parser.parse_args()
    random.seed(options.seed)
    words = ["blocking"] * options.blocking
    sync = ["--sync", options.sync] if options.sync else []

    def judge(folder: Path) -> None:
        def make(name: str) -> Training:
            return Training(folder / name, options.steps, words, sync)

        print(trial(make, options.kills, options.in_save, options.steps))

    return judged(judge, options.folder)


if __name__ == "__main__":
    sys.exit(main())
