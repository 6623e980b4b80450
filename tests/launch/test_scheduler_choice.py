"""Which scheduler starts the agents, and which settings belong to it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from environments import SLURM_BATCH_ONE, SLURM_SALLOC, SLURM_STEP, Env

from rankwise import schedulers
from rankwise.errors import ConfigError
from rankwise.launch.scheduler_choice import Choice, choose
from rankwise.run.config import RunConfig
from rankwise.run.plan import Host

AT = {"master_addr": "node1", "master_port": 5555}


def config(**settings: Any) -> RunConfig:
    return RunConfig.of(schedulers.options(), {"argv": ("train.py",)}, settings)


def chosen(env: Env | None = None, **settings: Any) -> Choice:
    return choose(config(**settings), env or {})


@pytest.mark.parametrize(
    ("settings", "env", "name", "why"),
    [
        ({}, {}, "local", "no other scheduler was chosen"),
        ({"nodes": "1"}, {}, "local", "no other scheduler was chosen"),
        ({"on": "slurm"}, {}, "slurm", "--on"),
        ({"on": "local"}, SLURM_SALLOC, "local", "--on"),
        ({"hosts": "a,b"}, SLURM_SALLOC, "ssh", "-H names hosts"),
        ({"hostfile": "a"}, {}, "ssh", "--hostfile names hosts"),
        ({"nodes": "2", "node_rank": 0, **AT}, SLURM_SALLOC, "manual", "--node-rank: you type the command on each node"),
        ({"nodes": "1", "node_rank": 0}, {}, "local", "no other scheduler was chosen"),
        ({}, SLURM_SALLOC, "slurm", "this shell is in one of its jobs"),
        ({}, SLURM_BATCH_ONE, "slurm", "this shell is in one of its jobs"),
        ({}, {**SLURM_STEP[0], "SLURM_STEP_NUM_TASKS": "1"}, "local", "no other scheduler was chosen"),
        ({"site": {"on": "slurm"}}, {}, "slurm", "the site file says so"),
        ({"site": {"on": "ssh"}}, SLURM_SALLOC, "slurm", "this shell is in one of its jobs"),
    ],
)
def test_what_was_said_comes_before_where_this_is_and_that_before_the_sites_habit(
    settings: dict[str, Any], env: Env, name: str, why: str
) -> None:
    Path("a").write_text("node1\n")
    choice = chosen(env, **settings)
    assert (choice.name, choice.why) == (name, why)


def test_a_scheduler_that_is_none_is_an_error_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"^--on cobalt: there is no scheduler cobalt; choose local, .*slurm.*, mpi$"):
        chosen(on="cobalt")
    with pytest.raises(ConfigError, match=r"^on = 'cobalt' in the site file: there is no scheduler cobalt"):
        chosen(site={"on": "cobalt"})


@pytest.mark.parametrize(
    ("version", "name"),
    [("mpirun (Open MPI) 4.1.4", "openmpi"), ("mpirun (OpenRTE) 1.8", "openmpi"), ("HYDRA build details:", "mpich")],
)
def test_mpi_is_the_one_whose_mpirun_is_on_the_path(
    version: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho '{version}'\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert chosen(on="mpi", nodes="2").name == name


@pytest.mark.parametrize("source", [None, "#!/bin/sh\necho Intel\n"])
def test_an_mpirun_that_is_none_of_ours_or_not_there_is_an_error(
    source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source is not None:
        (tmp_path / "mpirun").write_text(source)
        (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    with pytest.raises(ConfigError, match=r"^(--on mpi: .*)?mpirun"):
        chosen(on="mpi")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"partition": "gpu"},
            r"^--partition gpu: local \(no other scheduler was chosen\) has no option --partition; .*--on slurm",
        ),
        (
            {"nodes": "2"},
            r"^--nodes 2: nothing says where the other nodes are; type -H HOST1,HOST2 .* --on slurm ",
        ),
        ({"node_rank": 1}, r"^--node-rank 1: the number of nodes is missing; add --nodes N, on each node$"),
        ({"nodes": "2", "node_rank": 2}, r"^--node-rank 2: with --nodes 2 it must be between 0 and 1$"),
        ({"nodes": "2", "node_rank": -1}, r"^--node-rank -1: "),
        (
            {"on": "manual", "nodes": "2", "master_addr": "a"},
            r"^--on manual: --node-rank K is missing, the number of this node; ",
        ),
        ({"hosts": ""}, r"^-H '' is empty; give a value, or leave it out$"),
        (
            {"nodes": "2", "node_rank": 0, "master_addr": "a:29501"},
            r"^--master-addr a:29501: give the host alone, and the port: --master-addr a --master-port 29501$",
        ),
        ({"on": "slurm", "gpus": "0,2"}, r"^--gpus 0,2: slurm \(--on\) has no option --gpus; local"),
        (
            {"on": "slurm", "slots": 8},
            r"^--slots 8: slurm \(--on\) has no option --slots; sge has: use --on sge, or leave --slots out$",
        ),
        ({"setup": ("a", "b")}, r"^--setup a, b: local "),
        ({"requeue": True}, r"^--requeue: local "),
        ({"on": "slurm", "nodes": "2", "node_rank": 0}, r"^--node-rank 0: slurm "),
    ],
)
def test_a_setting_given_where_it_has_no_meaning_is_an_error_that_says_where_it_has(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(**settings)


def test_a_sites_setting_is_taken_where_it_has_a_meaning_and_what_is_typed_wins() -> None:
    site = {"on": "slurm", "partition": "gpu", "time": "60", "pe": "mpi", "nodes": "2"}
    assert chosen(on="local", site=site).job == {}
    choice = chosen(time="5", site=site)
    assert choice.job == {"partition": "gpu", "time": "5"}
    assert (choice.min_nodes, choice.nodes, choice.attached) == (2, 2, False)


def test_within_a_job_nothing_is_asked_of_the_queue_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    choice = chosen(SLURM_SALLOC, time="5", requeue=True, setup=("a",), site={"partition": "gpu"})
    assert (choice.job, choice.attached, choice.nodes) == ({"within": True, "setup": ("a",)}, True, 2)
    assert capsys.readouterr().err == (
        "rankwise: warning: this shell is in a job already: nothing is queued, and --time, --requeue have no effect\n"
    )
    assert chosen(SLURM_SALLOC, nodes="1").nodes == 1
    assert capsys.readouterr().err == ""


def test_more_nodes_than_the_job_has_or_than_hosts_are_named_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"^--nodes 3, but there are 2 nodes in this job; leave --nodes out to use all of them$"
    ):
        chosen(SLURM_SALLOC, nodes="3")
    assert (chosen(hosts="a,b").nodes, chosen(hosts="a,b").hosts) == (2, (Host("a", 0), Host("b", 0)))
