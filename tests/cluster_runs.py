"""Runs of `rankwise run` over virtual hosts, for tests: in the background, typed here or on a host, and what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from clusters import HOSTS, STATE
from launched import left_over, wait_for

from rankwise.run.directory import Attempt, Failure, RunDir
from rankwise.schedulers.slurm import Slurm

slurm = Slurm()

RANKWISE = [sys.executable, "-m", "rankwise"]
TORCH = [*RANKWISE, "run"]  # for scripts that need torch: each host imports it once
RUN = [*TORCH, "--start-method", "spawn"]
DEADLINE_S = 60.0

TELL = """
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
with open(f"told-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}", "w") as file:
    file.write(" ".join([os.uname().nodename, *(os.environ[name] for name in names)]))
print("rank", os.environ["RANK"], flush=True)
"""
"""Each rank writes a file with its numbers, whose name has the attempt and the rank; `told` reads these files."""

SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(1.0 + dist.get_rank())
dist.all_reduce(total)
open(f"sum-{dist.get_rank()}", "w").write(str(int(total)))
dist.destroy_process_group()
"""

LISTENS = """
import gc; gc.disable()  # a collection during the imports takes a fifth of their time
import psutil, rankwise
world = rankwise.init(join_timeout_s=60)
rankwise.barrier()
found = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == world.master_port and not c.raddr]
print(world.rank, *found, flush=True)
"""
"""The rank whose process has the store prints where it listens."""

GATE = """
import os, signal, sys, time
from rankwise.dist.world import agent_row, discover
world = discover(os.environ)
row, step = agent_row(world), 0
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, lambda number, _: setattr(row, "flag", number))
row.join()
while row.pass_gate(step + 1):
    step += 1
    open(f"joined-{world.rank}", "a").close()
    time.sleep(0.01 * (1 + world.rank))
open(f"stopped-{world.rank}", "w").write(str(step))
sys.exit(130 if row.reason == 2 else 75)
"""
"""A loop with an agreed stop, like that of StopSignal, without torch."""

LONG_STEPS = """
import os, signal, sys, time
from rankwise.dist.world import agent_row, discover
world = discover(os.environ)
row, first = agent_row(world), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, lambda number, _: setattr(row, "flag", number))
row.join()
for step in (1, 2, 3):
    if not row.pass_gate(step):
        sys.exit(75)
    print("step", step, flush=True)
    if first and step == 2 and world.rank == world.world_size - 1:
        os.kill(os.getpid(), 9)
    until = time.monotonic() + first * (float(sys.argv[1]) if step == 2 else 1.0)
    while time.monotonic() < until:
        time.sleep(0.05)
    if first and step == 2:
        raise ConnectionError("Connection closed by peer")  # as the collective at the end of the step says it
"""
"""Steps with an agreed stop, without torch. In the first attempt, the last rank is killed in the second step, which has a given
length."""

TRAIN = """
import os, sys, time, torch, rankwise
torch.set_num_threads(1)
steps = int(sys.argv[1])
pause_s = 0.0 if os.path.exists("steps") else 0.1  # no rank takes a step before all are here
model = torch.nn.Linear(1, 1)

def step(model, batch):
    if torch.is_grad_enabled():  # not where the Trainer tries the first micro-batch
        with open(f"samples-{trainer.world.rank}", "a") as file:
            file.write("".join(f"{int(x)}\\n" for x in batch[0]))
    time.sleep(pause_s)
    return model(batch[0] / 1000).sum(), len(batch[0])

def note(state):
    if trainer.world.is_main:
        with open("steps", "a") as file:
            file.write(f"{state.step}\\n")

data = torch.utils.data.TensorDataset(torch.arange(4.0 * steps)[:, None])
trainer = rankwise.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=1e-3), step, data, global_batch_size=4, max_epochs=1, actions=[note],
    checkpoints=rankwise.Checkpoints(every_s=0.5),
)
trainer.fit()
"""
"""One epoch of a number of steps. Records each step that was done, and for each rank the samples that it used. The steps of the
first attempt are slow, so that a signal that is late still comes before the last one; later attempts do not wait."""

FOR_EVER = "\nimport time\ntime.sleep(600)\n"


class Launched:
    """A command in the background, and the run directory that it creates."""

    def __init__(self, *words: str, name: str = "train", **environ: str) -> None:
        self.run = RunDir(Path("runs", name).absolute())
        home = Path.cwd().parent / "home"
        home.mkdir(exist_ok=True)
        self.out = Path(f"out-{time.monotonic_ns()}.txt").absolute()
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                words, env={"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": "/tmp", **environ}, stdout=out,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.began = time.monotonic()

    def wait(self) -> tuple[int, str]:
        """(exit status, the output)."""
        status = self.process.wait(timeout=DEADLINE_S)
        return status, self.output()

    def output(self) -> str:
        return self.out.read_text()

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def attempt(self) -> Attempt:
        return self.run.attempts()[-1]

    def failure(self) -> Failure:
        found = self.run.read_failure()
        assert found is not None, self.output()
        return found

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Returns when the condition holds. Fails with the output if the command ends first."""

        def holds() -> bool:
            if condition():
                return True
            assert self.process.poll() is None, f"ended before {what}: {self.output()}"
            return False

        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, f"waited for {what}: {self.output()}"
            time.sleep(0.02)

    def at_the_gate(self) -> None:
        """Returns when all ranks of the newest attempt have passed their first step."""
        self.until(lambda: self.run.world.exists() and self.run.attempts() and self.attempt().pids, "the ranks")
        ranks = self.attempt().ranks
        self.until(lambda: len(list(self.run.logs.glob("rank-*.log"))) >= ranks, "their logs")
        self.until(self._all_joined, "the gate")

    def _all_joined(self) -> bool:
        return all(f"joined-{rank}" in os.listdir() for rank in range(self.attempt().ranks))

    def end(self) -> None:
        if self.process.poll() is None:
            for below in psutil.Process(self.process.pid).children(recursive=True):  # the processes of host-ctl on the host
                below.kill()
            self.process.kill()
        self.process.wait()


@pytest.fixture
def launch() -> Iterator[Callable[..., Launched]]:
    """Starts a command. At the end nothing of it is left on any host, nor here."""
    started: list[Launched] = []

    def start(*words: str, **environ: str) -> Launched:
        started.append(Launched(*words, **environ))
        return started[-1]

    yield start
    for run in started:
        run.end()
    assert wait_for(lambda: not [*left(), *left_over(Path.cwd())], "nothing left, on the hosts and here")


def on(host: str, *words: str) -> list[str]:
    """The command that runs `words` on that host, in this folder."""
    return [str(HOSTS / "host-ctl"), "exec", host, *words]


def has_started_again(run: Launched) -> None:
    """Check that a run of LONG_STEPS that may restart has restarted once, and that the other ranks were not ended by a stop
    request."""
    status, out = run.wait()
    assert status == 0, out
    assert [attempt.status for attempt in run.run.attempts()] == [137, 0]
    assert " was killed by SIGKILL at step 2" in out
    assert "stopped by" not in out


def batch(script: str) -> tuple[int | None, str]:
    """Submit a user's own batch script of Slurm, which prints to own.log. Returns (exit status, what it printed) when it has
    ended."""
    submitted = subprocess.run(["sbatch", "--parsable", script], capture_output=True, text=True, check=True)
    ended = wait_for(
        lambda: state if (state := slurm.state({"id": submitted.stdout.strip()})).phase == "ended" else None, "its end"
    )
    return ended.status, Path("own.log").read_text()


def told(attempt: int = 0) -> dict[int, list[str]]:
    """For each rank what TELL wrote: host, rank, world size, local rank, local world size, group rank, group world size."""
    found = {int(path.name.rpartition("-")[2]): path.read_text().split() for path in Path.cwd().glob(f"told-{attempt}-*")}
    return dict(sorted(found.items()))


def steps() -> list[int]:
    """The steps that TRAIN has recorded, attempt after attempt."""
    return [int(line) for line in Path("steps").read_text().split()] if Path("steps").exists() else []


def samples() -> list[int]:
    """All samples that TRAIN has used, sorted."""
    return sorted(int(line) for path in Path.cwd().glob("samples-*") for line in path.read_text().split())


def write(source: str, name: str = "train.py") -> str:
    Path(name).write_text(source)
    return name


def with_configuration(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """As if a user had this ~/.ssh/config: ssh searches it in the folder that the password file gives, not in $HOME."""
    Path("config").write_text(text + f"\nHost *\n  User root\n  IdentityFile {STATE}/ssh/id\n  IdentitiesOnly yes\n")
    command = Path("bin", "ssh").absolute()
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {Path("config").absolute()} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")


_DAEMONS = ("init", "sshd", "slurmd", "munged", "sge_execd", "sge_shepherd")


def left() -> list[str]:
    """Processes on the hosts that do not belong to the hosts themselves."""
    found = []
    for folder in STATE.glob("node*"):
        listed = subprocess.run([HOSTS / "host-ctl", "pids", folder.name], capture_output=True, text=True)
        for pid in listed.stdout.split():
            try:
                process = psutil.Process(int(pid))
                words, name = process.cmdline(), process.name()
            except psutil.Error:
                continue
            if name not in _DAEMONS and words and words != ["sleep", "86400"]:
                found.append(f"{folder.name}: {' '.join(words)[:200]}")
    return found
