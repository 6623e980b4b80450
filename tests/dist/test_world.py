"""Which rank this process is."""

from __future__ import annotations

import os
from pathlib import Path
from types import MappingProxyType

import pytest

from rankwise.dist.world import World, agent_row, discover
from rankwise.errors import WorldError
from rankwise.ipc.shared_page import Page
from rankwise.run.directory import NodeRecord, RunDir
from rankwise.schedulers import Ranks, launchers
from rankwise.schedulers.ranks import variables_of

COMPLETE = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


def test_nothing_in_the_environment_is_a_single_process() -> None:
    world = discover({})
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank) == (0, 1, 0, 1, 0)
    assert world.source == "local"
    assert (world.master_addr, world.master_port, world.run_dir) == (None, None, None)
    assert set(world.origin.values()) == {"a single process"}
    assert world.is_main
    assert world.is_local_main


def test_a_complete_triple_is_believed_and_each_number_names_its_variable() -> None:
    world = discover(COMPLETE)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank) == (5, 8, 1, 4, 1)
    assert (world.source, world.master_addr, world.master_port) == ("torchrun", "10.0.0.1", 29500)
    assert world.origin == {
        "rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_WORLD_SIZE",
        "node_rank": "GROUP_RANK", "master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT",
    }  # fmt: skip
    assert not world.is_main
    assert not world.is_local_main


def test_the_first_rank_of_a_later_node_is_main_there_alone() -> None:
    world = discover({**COMPLETE, "RANK": "4", "LOCAL_RANK": "0"})
    assert world.is_local_main
    assert not world.is_main


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_a_half_set_triple_is_never_taken_for_a_single_process(name: str) -> None:
    with pytest.raises(WorldError, match="this process would train alone"):
        discover({name: COMPLETE[name]})


def test_discover_reads_a_mapping_that_cannot_be_written_and_leaves_the_process_environment_alone() -> None:
    before = dict(os.environ)
    assert discover(MappingProxyType(COMPLETE)).rank == 5
    assert discover(MappingProxyType({})).rank == 0
    assert dict(os.environ) == before


def test_discover_believes_the_mapping_and_not_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in COMPLETE.items():
        monkeypatch.setenv(name, value)
    assert discover({}).world_size == 1


def test_the_run_directory_of_our_launcher_is_found() -> None:
    assert discover({"RANKWISE_RUN_DIR": "/runs/a b"}).run_dir == Path("/runs/a b")
    assert discover({**COMPLETE, "RANKWISE_RUN_DIR": "/runs/x"}).run_dir == Path("/runs/x")


@pytest.mark.parametrize(("rank", "world_size", "per_node"), [(0, 1, 1), (3, 4, 4), (6, 8, 2)])
def test_what_an_agent_sets_for_a_rank_is_what_the_rank_discovers(rank: int, world_size: int, per_node: int) -> None:
    told = Ranks(rank, world_size, rank % per_node, per_node, rank // per_node, "127.0.0.1", 1234)
    world = discover(variables_of(told, restart=0, max_restarts=0, run_id="x"))
    for field in ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "master_addr", "master_port"):
        assert getattr(world, field) == getattr(told, field), field


def test_a_single_process_is_the_last_thing_believed() -> None:
    """`local` recognises itself in every environment: after it, no scheduler would be asked."""
    assert list(launchers({}))[-1] == "local"


# --- the agent's page


def world_of(run: RunDir | None, local_rank: int = 0) -> World:
    return World(local_rank, 2, local_rank, 2, 0, "torchrun", run_dir=run.path if run is not None else None)


def parts(page: str) -> tuple[NodeRecord, ...]:
    return (NodeRecord(host="h", first=0, ranks=2, page=page),)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.prepare(fresh=False)
    return made


def test_a_rank_finds_its_row_in_the_page_of_its_agent(run: RunDir) -> None:
    page = Page.create(2)
    run.begin_attempt(2, ("train.py",), parts("/proc/0/fd/0"))  # an earlier attempt, which ended long ago
    run.begin_attempt(2, ("train.py",), parts(page.path))
    row = agent_row(world_of(run, local_rank=1))
    assert row is not None
    row.pass_gate(12)
    assert [page.row(r).claim for r in range(2)] == [0, 12]


def test_without_an_agent_there_is_no_row(run: RunDir) -> None:
    assert agent_row(world_of(None)) is None
    assert agent_row(world_of(run)) is None  # no attempt exists
    run.begin_attempt(2, ("train.py",))
    assert agent_row(world_of(run)) is None  # an attempt without an agent
    run.begin_attempt(2, ("train.py",), parts("/proc/0/fd/0"))
    assert agent_row(world_of(run)) is None  # the agent has exited
