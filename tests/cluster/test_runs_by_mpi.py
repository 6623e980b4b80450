"""`rankwise run --on mpi`, and several launchers that mpirun has started, over two hosts, with Open MPI and MPICH."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_runs import FOR_EVER, GATE, RUN, SUM, TELL, TORCH, Launched, batch, launch, left, left_over, told, wait_for, write
from clusters import Start, hosts, mpich, openmpi, slurm

__all__ = ["hosts", "launch", "mpich", "openmpi", "slurm"]  # fixtures

pytestmark = pytest.mark.cluster

New = Callable[..., Launched]
NUMBERS = {
    0: ["node1", "0", "3", "0", "2", "0", "2"],
    1: ["node1", "1", "3", "1", "2", "0", "2"],
    2: ["node2", "2", "3", "0", "1", "1", "2"],
}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(params=["openmpi", "mpich"])
def mpirun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the MPI that `mpirun` belongs to. Debian may have either one."""
    name = str(request.param)
    request.getfixturevalue(name)
    Path("bin").mkdir()
    Path("bin/mpirun").write_text(f'#!/bin/sh\nexec mpirun.{name} "$@"\n')
    Path("bin/mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:{os.environ['PATH']}")
    return name


def test_agents_that_mpirun_starts_have_the_ranks_that_the_hosts_were_given(hosts: Start, launch: New, mpirun: str) -> None:
    status, out = launch(*TORCH, "--on", "mpi", "-H", "node1:2,node2:1", write(TELL + SUM), **AS_ROOT).wait()
    assert status == 0, out
    assert told() == NUMBERS
    assert [Path(f"sum-{rank}").read_text() for rank in range(3)] == ["6", "6", "6"]


def test_a_rank_that_fails_below_mpirun_is_named_and_its_status_is_mpiruns(hosts: Start, launch: New, mpirun: str) -> None:
    source = "import os, sys\nif os.environ['RANK'] == '2':\n    sys.exit(5)\n" + FOR_EVER
    status, out = launch(*RUN, "--on", "mpi", "-H", "node1:2,node2:1", write(source), **AS_ROOT).wait()
    assert status == 5, out
    assert "rankwise: rank 2 exited with status 5, on node2" in out.splitlines()


def test_ctrl_c_below_mpirun_stops_all_ranks_after_one_step(hosts: Start, launch: New, mpirun: str) -> None:
    run = launch(*RUN, "--on", "mpi", "-H", "node1:2,node2:1", write(GATE), **AS_ROOT)
    run.at_the_gate()
    run.signal(signal.SIGINT)
    status, out = run.wait()
    assert status == 130, out
    assert len({path.read_text() for path in Path.cwd().glob("stopped-*")}) == 1, out


PLAIN = """
import os, time
open(f"there-{os.environ['RANK']}", "w").close()
try:
    time.sleep(600)
except KeyboardInterrupt:
    open(f"interrupted-{os.environ['RANK']}", "w").close()
    raise
"""


def there() -> bool:
    return len([*Path.cwd().glob("there-*")]) == 3


@pytest.mark.parametrize(
    ("signum", "expected", "interrupted"), [(signal.SIGINT, 130, 3), (signal.SIGTERM, 143, 0)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_script_of_another_library_gets_below_mpirun_what_the_launcher_got(
    hosts: Start, launch: New, mpirun: str, signum: int, expected: int, interrupted: int
) -> None:
    run = launch(*RUN, "--on", "mpi", "-H", "node1:2,node2:1", write(PLAIN), **AS_ROOT)
    run.until(there, "three ranks")
    run.signal(signum)
    status, out = run.wait()
    assert status == expected, out
    assert signal.Signals(signum).name in out, out
    assert len([*Path.cwd().glob("interrupted-*")]) == interrupted, out


def test_nothing_runs_on_below_mpirun_when_the_launcher_is_killed(hosts: Start, launch: New, mpirun: str) -> None:
    """Otherwise the same command would start other ranks, which write the same run. Elsewhere daemons of mpirun see to it."""
    run = launch(*RUN, "--on", "mpi", "--nproc", "3", write(PLAIN), **AS_ROOT)
    run.until(there, "three ranks")
    run.signal(signal.SIGKILL)
    run.process.wait()
    wait_for(lambda: not [*left(), *left_over(Path.cwd())], "nothing left, on the hosts and here")


def test_launchers_that_mpirun_starts_are_one_run(hosts: Start, launch: New, mpirun: str) -> None:
    status, out = launch(*launchers(mpirun), write(TELL), **AS_ROOT).wait()
    assert status == 0, out
    assert told() == NUMBERS
    assert out.splitlines().count("rank 0") == 1


def launchers(mpirun: str) -> list[str]:
    where = ["-H", "node1:2,node2:1"] if mpirun == "openmpi" else ["-hosts", "node1:2,node2:1"]
    return ["mpirun", "-np", "3", *where, *RUN]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_an_mpirun_of_launchers_stops_all_ranks_after_one_step(
    hosts: Start, launch: New, mpirun: str, signum: int
) -> None:
    """Open MPI's mpirun turns Ctrl-C into SIGTERM, and kills all within two seconds: to save, send SIGUSR1."""
    run = launch(*launchers(mpirun), write(GATE), **AS_ROOT)
    run.at_the_gate()
    run.signal(signum)
    status, out = run.wait()
    if mpirun == "openmpi" and signum == signal.SIGINT:
        assert status == 1, out
        assert "rankwise: SIGTERM: all ranks stop after the current step" in out
        return
    assert mpirun == "mpich" or status == 75, out  # after it has forwarded a signal, MPICH's status over hosts says nothing
    assert run.attempt().status == (130 if signum == signal.SIGINT else 75), out
    assert run.attempt().outcome == f"stopped by {signal.Signals(signum).name} after step {Path('stopped-0').read_text()}"
    assert len({path.read_text() for path in Path.cwd().glob("stopped-*")}) == 1, out


def test_uneven_launchers_of_which_mpich_does_not_tell_are_one_error_or_told_to_be_one_rank_each(
    hosts: Start, launch: New, mpich: Start
) -> None:
    """On node1 it looks like one rank per node; Open MPI says how many nodes there are."""
    started = ["mpirun.mpich", "-np", "3", "-hosts", "node1:1,node2:2"]
    status, out = launch(*started, *RUN, write(TELL)).wait()
    assert status == 1, out
    line = "rankwise: node2 has 2 of the 3 agents of this run, and each would use all devices of the host; use --nproc 1"
    assert [said.partition(" for one rank per agent")[0] for said in out.splitlines() if "rankwise: node2" in said] == [line]
    assert "Traceback" not in out
    assert not told()
    status, out = launch(*started, *RUN, "--nproc", "1", "--name", "each", "train.py", name="each").wait()
    assert status == 0, out
    assert told() == {
        0: ["node1", "0", "3", "0", "1", "0", "2"],
        1: ["node2", "1", "3", "0", "2", "1", "2"],
        2: ["node2", "2", "3", "1", "2", "1", "2"],
    }


def test_launchers_that_mpirun_starts_in_a_batch_job_are_one_run(
    slurm: Start, mpirun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own.sh").write_text(
        f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=2 -o own.log\nmpirun {' '.join(RUN)} {write(TELL)} </dev/null\n"
    )
    for name, value in AS_ROOT.items():
        monkeypatch.setenv(name, value)
    status, said = batch("own.sh")
    assert status == 0, said
    assert told() == {
        rank: [f"node{1 + rank // 2}", str(rank), "4", str(rank % 2), "2", str(rank // 2), "2"] for rank in range(4)
    }
