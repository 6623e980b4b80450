"""Real clusters on one machine: Open MPI and MPICH here; Slurm, Grid Engine or ssh over two virtual hosts. Debian, root.

Missing packages are installed. If this, or a namespace, is not possible, the tests are skipped with the reason. One of the
three runs at a time in a process, until a test needs another or the session ends; then its hosts and daemons are ended by their
process ids. Packages remain installed; no other file of the machine changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import with_name_servers

HOSTS = Path(__file__).parent / "cluster" / "hosts"
ROOT = Path(__file__).parents[1]
STATE = Path("/run/tc-hosts")
LOCK = Path("/run/lock/rankwise-tests")
"""Held while packages are installed."""

_MOUNTS, _NETWORK = 0x00020000, 0x40000000  # unshare(2)
_libc = ctypes.CDLL(None, use_errno=True)  # os.unshare is there from Python 3.12 on

Ended = subprocess.CompletedProcess[str]
Start = Callable[..., Ended]


def install(*packages: str) -> None:
    """Skip the test if the packages are missing and cannot be installed."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"{', '.join(packages)}: missing, and to install them needs root on Debian")
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300"]
    for words in (["install"], ["update"], ["install"]):
        command = [*apt, *words, *(["-y", "--no-install-recommends", *packages] if words == ["install"] else [])]
        done = subprocess.run(command, capture_output=True, text=True, env=_installing(), timeout=400)
        if done.returncode == 0 and words == ["install"]:
            return
    pytest.skip(f"{', '.join(packages)} cannot be installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")


_PACKAGES = {"mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich"}


def _install_mpi(mpirun: str) -> None:
    if shutil.which(mpirun) is None:
        install(_PACKAGES[mpirun])


def _installing() -> dict[str, str]:
    """The environment for what may install packages: apt-get asks a name server, which tests do not."""
    return {**with_name_servers(), "DEBIAN_FRONTEND": "noninteractive"}


def started(*command: str, **environ: str) -> Ended:
    """Run the command with this folder as its current one and an empty home, and wait for its end."""
    home = Path.cwd().parent / "home"
    home.mkdir(exist_ok=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": "/tmp", **environ}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=240
    )  # fmt: skip


@pytest.fixture(scope="session")
def openmpi() -> Start:
    """Calls Open MPI's mpirun; there may be more ranks than cores."""
    _install_mpi("mpirun.openmpi")
    # As root on a machine with few cores. As variables, so that a command line is the same as elsewhere.
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}

    def mpirun(*words: str, **environ: str) -> Ended:
        # If one run ends while another starts in the same folder, Open MPI's cleanup fails the second ("mkdir: File exists").
        with tempfile.TemporaryDirectory(dir="/tmp") as own:
            return started("mpirun.openmpi", *words, **{**allow, "TMPDIR": own, **environ})

    return mpirun


@pytest.fixture(scope="session")
def mpich() -> Start:
    """Calls MPICH's mpirun."""
    _install_mpi("mpirun.mpich")

    def mpirun(*words: str, **environ: str) -> Ended:
        return started("mpirun.mpich", *words, **environ)

    return mpirun


_UP = {
    "slurm": ["slurm-up", "2", "--gpus", "2", "--", "--no-ssh", "--debian-hosts"],
    "sge": ["sge-up", "2", "--", "--no-ssh"],
    "hosts": ["hosts-up", "2"],
    "debian": ["hosts-up", "2", "--debian-hosts", "--ipv6"],
}


class _Machine:
    """Makes this process's network and files a machine of its own when hosts are first needed, so that other processes can do
    the same at the same time. One set of hosts is up at a time."""

    def __init__(self) -> None:
        self._guard: subprocess.Popen[bytes] | None = None
        self._up: str | None = None
        self._lacks: dict[str, str] = {}

    def use(self, what: str, session: pytest.Session) -> None:
        """From now on the hosts are those of `what`. Skips the test without root, if packages cannot be installed, and without
        namespaces; fails if the hosts do not come up."""
        if os.geteuid() != 0:
            pytest.skip("virtual hosts need root")
        if self._guard is None:
            self._begin(session)
        if self._up == what:
            return
        self.end()
        if what not in self._lacks:
            self._up = what
            up = _call(*_UP[what])
            if up.returncode == 0:
                return
            self.end()
            self._lacks[what] = up.stderr.strip()[-2000:] or f"{_UP[what][0]} said nothing"
        if "apt-get install" in self._lacks[what]:
            pytest.skip(self._lacks[what])
        pytest.fail(self._lacks[what], pytrace=False)

    def _begin(self, session: pytest.Session) -> None:
        with open(LOCK, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for what, (script, *_) in _UP.items():  # there is no way to the packages from the namespaces
                if (done := _call(script, "--install")).returncode != 0:
                    self._lacks[what] = done.stderr.strip()[-2000:]
            for mpirun in _PACKAGES:
                with contextlib.suppress(pytest.skip.Exception):  # tests that need it are skipped by its own fixture
                    _install_mpi(mpirun)
        if _libc.unshare(_MOUNTS | _NETWORK) != 0:
            pytest.skip(f"virtual hosts need namespaces: {os.strerror(ctypes.get_errno())}")
        subprocess.run([HOSTS / "apart"], check=True, timeout=60)
        # It outlives this process if that is killed, and then ends what this one started.
        at_end = 'cat; for down in slurm sge hosts; do "$0/$down-down"; done'
        with open(os.devnull, "w") as null:
            self._guard = subprocess.Popen(
                ["sh", "-c", at_end, HOSTS], stdin=subprocess.PIPE, stdout=null, stderr=null, cwd="/", start_new_session=True
            )
        session.addfinalizer(self._finish)

    def end(self) -> None:
        """Stop all hosts. `use` may start others."""
        if self._up is not None:
            script = _UP[self._up][0].replace("-up", "-down")
            self._up = None
            subprocess.run([HOSTS / script], check=True, capture_output=True, timeout=120)

    def _finish(self) -> None:
        self.end()
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.communicate(timeout=120)


def _call(script: str, *words: str) -> Ended:
    return subprocess.run(
        [HOSTS / script, *words], env=_installing(), capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL
    )


_machine = _Machine()  # not a fixture: one that several modules import exists once per module


@pytest.fixture
def slurm(request: pytest.FixtureRequest) -> Start:
    """Two hosts with Slurm; on each, its own name is 127.0.1.1. Calls a command on this machine like a user."""
    _machine.use("slurm", request.session)
    return started


@pytest.fixture
def slurm_elsewhere(request: pytest.FixtureRequest) -> None:
    """For a runner that starts Slurm itself: this is possible (otherwise the test is skipped), and no hosts are running."""
    _machine.use("slurm", request.session)
    _machine.end()


@pytest.fixture
def sge(request: pytest.FixtureRequest) -> Start:
    """Two hosts, node1 and node2, with Grid Engine. Calls a command on this machine, where jobs are submitted."""
    _machine.use("sge", request.session)
    return started


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Start:
    """Two hosts, node1 and node2, that this machine reaches over ssh: their keys are known by their names. Calls a command on
    this machine."""
    _machine.use("hosts", request.session)
    return started


@pytest.fixture
def debian_hosts(request: pytest.FixtureRequest) -> Start:
    """The same, but each host's own name is 127.0.1.1, as Debian installs it, and all also have IPv6 addresses."""
    _machine.use("debian", request.session)
    return started


@pytest.fixture
def script() -> str:
    """A script that connects the ranks, adds up their numbers, and prints what it knows in one line. The sum also has $JOB of
    each rank."""
    Path("train.py").write_text(
        "import gc; gc.disable()  # a collection during the imports takes a fifth of their time\n"
        "import os, rankwise, torch\n"
        "world = rankwise.init(join_timeout_s=60)\n"
        "total = rankwise.all_reduce(torch.tensor(1.0 + world.rank + int(os.environ.get('JOB', 0)))).item()\n"
        "print(world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank, total, flush=True)\n"
    )
    return str(Path("train.py").resolve())


def at_once(script: str, ranks: int) -> None:
    """Let none of so many ranks of several jobs go beyond its imports before all are there: one launcher may be much slower."""
    wait = (
        "open(f'here-{os.uname().nodename}-{os.getpid()}', 'w').close()\n"
        f"while sum(name.startswith('here-') for name in os.listdir()) < {ranks}: time.sleep(0.01)\n"
    )
    path = Path(script)
    path.write_text(path.read_text().replace("world = ", f"import time\n{wait}world = ", 1))


def ranks(done: Ended) -> list[list[int]]:
    """What `script` printed, by rank."""
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted([int(float(word)) for word in line.split()] for line in done.stdout.splitlines() if line[:1].isdigit())


def nothing_is_left() -> bool:
    return not [*Path.cwd().glob(".rankwise*"), *(Path.cwd().parent / "home").glob(".rankwise*")]


PYTHON = sys.executable
