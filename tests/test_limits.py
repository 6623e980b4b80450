"""Faults that the kernel causes: memory, disks, files and processes. Each is reported with its limit, and nothing is left."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from launched import Launched, launch, left_over, wait_for

from rankwise.agent import out_of_memory
from rankwise.errors import ConfigError
from rankwise.host import processes
from rankwise.launch import launch as launcher
from rankwise.run.config import RunConfig

__all__ = ["launch"]  # a fixture

TRAINS = """
import os, torch, rankwise
from torch.utils.data import TensorDataset
model = torch.nn.Linear(4, 1)
def step(model, batch):
    return ((model(batch[0])) ** 2).sum(), len(batch[0])
def act(state):
    if state.step == 3 and os.environ["RANK"] == "1":
        FAULT
rankwise.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), step, TensorDataset(torch.randn(64, 4)),
                 global_batch_size=8, max_steps=40, checkpoints=rankwise.Checkpoints(every_s=0), actions=[act]).fit()
"""


# --- memory


@pytest.fixture
def memory_cgroup() -> Iterator[Callable[[int], Path]]:
    """Creates a memory cgroup with this limit below our own. Skips the test if this is not possible."""
    made: list[Path] = []

    def make(limit_bytes: int) -> Path:
        own = next(out_of_memory.cgroups(Path("/proc")), None)
        if own is None:
            pytest.skip("no memory cgroup is mounted")
        child = own / f"rankwise-test-{uuid.uuid4().hex}"
        try:
            child.mkdir()
            made.append(child)
            v1 = child / "memory.limit_in_bytes"
            if not v1.exists() and not (child / "memory.max").exists():
                (own / "cgroup.subtree_control").write_text("+memory")
            (v1 if v1.exists() else child / "memory.max").write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no memory cgroup can be made in {own}: {error.strerror}")
        return child

    yield make
    for folder in made:
        wait_for(functools.partial(_removed, folder), "the cgroup to be empty")


def _removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def test_a_rank_killed_by_the_kernel_for_memory_is_told_with_the_limit_and_what_each_rank_held(launch, memory_cgroup) -> None:
    cgroup = memory_cgroup(900_000_000)
    run = launch(
        TRAINS.replace("FAULT", "held = [b'1' * (1 << 20) for _ in range(4000)]"),
        preexec_fn=lambda: (cgroup / "cgroup.procs").write_text(str(os.getpid())),
    )
    assert run.wait() == 137
    output = run.output()
    assert (
        "rank 1 was killed by SIGKILL at step 3: the kernel killed it because memory was full: limit 0.9 GB, rank 1 used up to "
        in output
    )
    failure = json.loads(run.run.failure.read_text())
    held = [float(words.split()[0]) for words in failure["summary"].split("up to ")[1].replace("(rank 0: ", "").split("GB ")]
    assert 0.4 < held[0] < 0.95
    assert 0.05 < held[1] < held[0]


def test_a_sigkill_from_outside_is_not_taken_for_the_kernels(launch, memory_cgroup) -> None:
    cgroup = memory_cgroup(2_000_000_000)
    run = launch(
        "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(600)",
        preexec_fn=lambda: (cgroup / "cgroup.procs").write_text(str(os.getpid())),
    )
    assert run.wait() == 137
    assert "rank 1 was killed by SIGKILL (often the kernel's out-of-memory killer" in run.output()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        pytest.param("x = bytearray(1 << 40)", "rank 1 raised MemoryError", marks=pytest.mark.stress),
        pytest.param("x = torch.empty(1 << 40)", "can't allocate memory", marks=pytest.mark.stress),
    ],
)
def test_memory_refused_to_a_rank_is_told_with_what_each_rank_held(launch, statement: str, said: str) -> None:
    run = launch(
        TRAINS.replace("FAULT", statement),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (12_000_000_000, 12_000_000_000)),
    )
    assert run.wait() == 1, run.output()
    summary = json.loads(run.run.failure.read_text())["summary"]
    assert said in summary
    assert (
        " (at step 3, script.py:9); at most 12.0 GB of address space per process (ulimit -v); rank 1 used up to 0." in summary
    )
    assert "(rank 0: 0." in summary


# --- a disk that does not answer


@pytest.fixture
def frozen_disk(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """A small ext4 file system. After a call of `freeze()`, its writers hang until the test is over."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    commands = (
        ["truncate", "-s", "20M", str(image)],
        ["mkfs.ext4", "-q", str(image)],
        ["mount", "-o", "loop", str(image), str(folder)],
    )
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"there is no {error.filename}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no file system can be mounted from a file here: {error.stderr.strip()}")

    def freeze() -> Path:
        subprocess.run(["fsfreeze", "-f", str(folder)], check=True)
        return folder

    try:
        yield freeze
    finally:
        subprocess.run(["fsfreeze", "-u", str(folder)], check=False, stderr=subprocess.DEVNULL)
        # What has hung there ends now, which may take a moment.
        wait_for(lambda: subprocess.run(["umount", str(folder)], stderr=subprocess.DEVNULL).returncode == 0, "umount")


HANGS = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    file = open("disk/file", "w")
    open("opened", "w").close()
    while not os.path.exists("frozen"): time.sleep(0.01)
    file.write("x" * 100000); file.flush(); os.fsync(file.fileno())
while not os.path.exists("go"): time.sleep(0.01)
ENDS
"""


def _hung(launch, frozen_disk, ends: str, *options: str) -> tuple[Launched, int]:
    """(a run whose rank 1 is in state D, the pid of this rank)."""
    run = launch(HANGS.replace("ENDS", ends), options=("--nproc", "2", *options))
    pid = run.pids()[1]
    wait_for(lambda: (run.folder / "opened").exists(), "the rank to open its file")
    frozen_disk()
    (run.folder / "frozen").touch()
    wait_for(lambda: processes.state(pid) == "D", "state D")
    return run, pid


def test_a_rank_that_no_signal_ends_is_named_and_nobody_waits_for_it(launch, frozen_disk) -> None:
    run, pid = _hung(launch, frozen_disk, "raise ValueError('loss is nan')")
    (run.folder / "go").touch()
    assert run.process.wait(timeout=25) == 1
    wchan = Path(f"/proc/{pid}/wchan").read_text()
    summary = json.loads(run.run.failure.read_text())["summary"]
    assert summary.startswith("rank 0 raised ValueError: loss is nan (script.py:10); rank 1 cannot be killed (state D in ")
    assert summary.endswith(f"(state D in {wchan}): ask the administrator of the host")
    assert summary in run.output()
    assert "Traceback (most recent call last):\n  File" in run.output()  # from the rank, not from us
    assert run.output().count("Traceback") == 1


@pytest.mark.stress
def test_a_rank_that_does_not_come_out_of_the_kernel_is_told_while_the_run_goes_on(launch, frozen_disk) -> None:
    run, _ = _hung(launch, frozen_disk, "raise ValueError('loss is nan')")
    said = wait_for(lambda: [line for line in run.output().splitlines() if "the kernel" in line], "a word")[0]
    assert re.search(r"rank 1 has been waiting in the kernel for [4-9] s \(state D in \S+\): a disk, a network file", said)
    (run.folder / "go").touch()
    assert run.process.wait(timeout=25) == 1


@pytest.mark.stress
def test_a_rank_that_no_signal_ends_is_the_cause_when_there_is_no_other(launch, frozen_disk) -> None:
    run, _ = _hung(launch, frozen_disk, "raise RuntimeError('Timed out waiting 6000ms for recv')", "--max-restarts", "3")
    (run.folder / "go").touch()
    assert run.process.wait(timeout=25) == 1
    failure = json.loads(run.run.failure.read_text())
    assert failure["rank"] == 1
    assert failure["summary"].startswith("rank 1 cannot be killed (state D in ")
    assert len(run.run.attempts()) == 1  # it would hold what a restart needs


@pytest.mark.stress
def test_ctrl_c_twice_ends_a_run_whose_rank_no_signal_ends(launch, frozen_disk) -> None:
    run, _ = _hung(launch, frozen_disk, "pass")
    run.process.send_signal(2)
    wait_for(lambda: run.run.attempts() and _asked(run), "the first Ctrl-C to arrive")
    run.process.send_signal(2)
    assert run.process.wait(timeout=25) == 130
    assert "killed by a second Ctrl-C, without saving; rank 1 cannot be killed (state D in " in run.output()


def _asked(run: Launched) -> bool:
    """Whether rank 0 has ended because of the request."""
    return processes.start_time(run.run.attempts()[-1].pids[0]) is None


# --- files


def limited(what: int, count: int, most: int | None = None) -> Callable[[], None]:
    """Sets a limit. `most`: up to which it may be raised; by default not at all."""
    return lambda: resource.setrlimit(what, (count, count if most is None else most))


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.stress)])
def test_few_open_files_are_a_warning_and_the_run_goes_on(launch, start_method: str) -> None:
    run = launch(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\nprint('met')",
        options=("--nproc", "2", "--tee", "all", "--start-method", start_method),
        preexec_fn=limited(resource.RLIMIT_NOFILE, 40),
    )
    assert run.wait() == 0
    assert "warning: only 40 open files per process (ulimit -n)" in run.output()
    assert run.output().count("met") == 2


@pytest.mark.parametrize("count", [33, 20, 12])
def test_too_few_open_files_to_begin_are_one_line_that_says_what_to_type(launch, count: int) -> None:
    run = launch("print('never')", preexec_fn=limited(resource.RLIMIT_NOFILE, count, 5000))
    assert run.wait() == 2
    said = "2 ranks need 34 open files to start, and a process may have only {} (ulimit -n); type: ulimit -n 4096"
    assert run.output() == f"rankwise: {said.format(count)}\n"


@pytest.mark.parametrize(
    ("nproc", "files", "processes", "said"),
    [
        (5000, (1024, 20000), 30000, r"^5000 ranks need 5032 open files to start, .* only 1024 .*; type: ulimit -n 10064$"),
        (15000, (1024, 20000), 30000, r"type: ulimit -n 20000$"),
        (
            100000,
            (1024, 20000),
            1 << 22,
            r"^100000 ranks do not fit on this machine, at most 19968: .*; give --nproc 19968 or",
        ),
        (100000, (1 << 20, 1 << 20), 32768, r"^100000 ranks do not fit on this machine, at most 32768: .* 32768 processes; "),
        (2, (20, 20), 32768, r"^2 ranks do not fit on this machine, at most 0: .*; ask an administrator for more$"),
    ],
)
def test_a_limit_that_is_advised_is_one_that_will_do_and_may_be_set(
    nproc: int, files: tuple[int, int], processes: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankwise.host.machine.open_files", lambda at_most=False: files[at_most])
    monkeypatch.setattr("rankwise.host.machine.processes", lambda: processes)
    Path("train.py").touch()
    with pytest.raises(ConfigError, match=said):
        launcher.launch(RunConfig(argv=("train.py",), nproc=str(nproc)), {})
    assert [path.name for path in Path().iterdir()] == ["train.py"]


def test_a_rank_that_has_no_descriptor_left_leaves_its_evidence_with_the_count_and_the_limit(launch) -> None:
    run = launch(
        "import os\nif os.environ['RANK'] == '1':\n    held = [open('/dev/null') for _ in range(100)]\n",
        preexec_fn=limited(resource.RLIMIT_NOFILE, 60),
    )
    assert run.wait() == 1
    output = run.output()
    assert "rank 1 raised OSError: [Errno 24] Too many open files: '/dev/null' (script.py:3); " in output
    assert re.search(r"; at most 60 open files per process \(ulimit -n\), \d+ here now, on ", output)
    assert "held = [open('/dev/null')" in output  # the traceback has its source lines


# --- processes


@pytest.fixture
def plain_user() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs a script on two ranks as a user who is not root, and may have this number of processes in addition to the current
    ones."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to become a user whose processes are counted")
    # The kernel refuses no process of root. The user may read the folder of our Python, which may be root's home.
    uid = 60100 + os.getpid() % 4000  # no real user, and of no other test worker: the kernel counts its processes
    become = f"setpriv --reuid {uid} --regid {uid} --clear-groups --inh-caps=-all,+dac_read_search"
    become += " --ambient-caps=-all,+dac_read_search"
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, uid, uid)

        def run(more: int, source: str, *options: str) -> subprocess.CompletedProcess[str]:
            Path(folder, "script.py").write_text(source)
            now = sum(p.info["num_threads"] for p in psutil.process_iter(["uids", "num_threads"]) if p.info["uids"].real == uid)
            command = [*become.split(), "prlimit", f"--nproc={now + more}", sys.executable, "-m", "rankwise", "run"]
            command += ["--nproc", "2", *options, "script.py"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
            assert wait_for(lambda: not left_over(Path(folder)), "nothing left in ps")
            return done

        yield run


@pytest.mark.stress
def test_a_loader_worker_that_may_not_be_started_is_told_with_the_count_of_processes(plain_user) -> None:
    done = plain_user(
        9,
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "for batch in DataLoader(list(range(64)), num_workers=20): pass\n",
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-2]
    assert "raised BlockingIOError: [Errno 11] Resource temporarily unavailable (script.py:3); " in last
    assert re.search(r"; at most \d+ processes and threads of this user \(ulimit -u\), \d+ now, on ", last)
    assert done.stderr.count("Traceback") == 1


def test_a_run_directory_that_may_not_be_written_is_one_line_that_says_what_to_type(plain_user) -> None:
    done = plain_user(64, "print('never')", "--run-dir", "/rankwise-test-that-only-root-may-make")
    assert done.returncode == 2
    assert done.stderr == (
        "rankwise: the run directory /rankwise-test-that-only-root-may-make cannot be created or written (Permission denied: "
        "/rankwise-test-that-only-root-may-make); choose another with --run-dir PATH\n"
    )


@pytest.mark.parametrize("more", [1, 2, 3])
def test_ranks_that_may_not_be_started_are_one_line_with_the_count_of_processes(plain_user, more: int) -> None:
    done = plain_user(more, "print('never')")
    assert done.returncode in (1, 2)
    assert re.search(r"\nrankwise: cannot start .*: at most \d+ processes and threads of this user \(ulimit -u\)", done.stderr)
    assert "Traceback" not in done.stderr
    assert "never" not in done.stdout


@pytest.mark.parametrize("more", [5, 6])  # the launcher and its thread, the agent, the warm process, its fork, one rank
@pytest.mark.one_in(2)
def test_ranks_that_the_warm_process_may_not_all_fork_are_started_by_themselves_and_run_once(plain_user, more: int) -> None:
    source = "import os\nwith open(os.environ['RANK'], 'a') as file: file.write('ran ')\nprint(open(os.environ['RANK']).read())"
    done = plain_user(more, source, "--start-method", "fork")
    assert done.returncode == 0, done.stderr
    assert "torch cannot be imported once for all ranks (cannot fork: Resource temporarily unavailable)" in done.stderr
    assert done.stdout == "ran \n"
