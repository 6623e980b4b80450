"""The plan that a launcher leaves for its agent."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rankwise.errors import RunDirError
from rankwise.run.directory import write_json
from rankwise.run.plan import Host, Plan

PLAN = Plan(
    version=2,
    run_id="0123abc",
    run_dir="/runs/a b",
    argv=("train.py", "--lr", "1e-3", "", "a b;'\"$(x)", "größe"),
    interpreter=("/usr/bin/python3", "-u"),
    cwd="/home/me",
    name="train",
    on="local",
    nodes=1,
    min_nodes=1,
    hosts=(Host("a", 2), Host("b", 0)),
    node_rank=-1,
    job={"partition": "main"},
    master_addr="",
    nproc=4,
    threads=2,
    fork=True,
    stop_after_s=0.0,
    grace_s=120.0,
    stall_warn_s=120.0,
    check_collectives=False,
    tee="main",
    environment={"CUDA_VISIBLE_DEVICES": "0,2"},
    master_port=0,
    join_timeout_s=300.0,
    node_wait_s=30.0,
    max_restarts=3,
    launcher_pid=17,
    fresh=True,
    checkpoint_scope="node",
    sync="local-sgd:16",
)


def test_a_plan_read_back_is_the_plan_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, PLAN.record())
    assert Plan.load(path) == PLAN


def test_a_plan_is_plain_json_with_its_version(tmp_path: Path) -> None:
    record = json.loads(json.dumps(PLAN.record()))
    assert record["version"] == 2
    assert record.keys() == {field.name for field in dataclasses.fields(Plan)}


def test_a_plan_without_a_strategy_is_one_of_the_versions_before(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, sync="")
    assert PLAN.record().keys() - plan.record().keys() == {"sync"}
    assert Plan.of(json.loads(json.dumps(plan.record())), "") == plan


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.nproc = 8  # type: ignore[misc]


@pytest.mark.parametrize("text", ["", '{"version": 1', "\0"])
def test_what_is_no_json_is_an_error_that_names_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(RunDirError, match=r"plan\.json: .* cannot read this plan"):
        Plan.load(path)


def test_bytes_that_are_no_text_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b'"\xff"')
    with pytest.raises(RunDirError, match=r"plan\.json: .* cannot read this plan"):
        Plan.load(path)


def test_a_missing_plan_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"nowhere/plan\.json: .* cannot read this plan .*No such file"):
        Plan.load(tmp_path / "nowhere" / "plan.json")


@pytest.mark.parametrize(
    "change",
    [{"version": 3}, {"version": None}, {"kind": 2}, {"nproc": ...}, {"version": ...}],
    ids=["a later version", "no version number", "a field of a later one", "a field missing", "the version missing"],
)
def test_a_plan_of_another_version_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    record = {key: value for key, value in {**PLAN.record(), **change}.items() if value is not ...}
    path = tmp_path / "plan.json"
    write_json(path, record)
    with pytest.raises(RunDirError, match="not written by this version of rankwise; start the run again"):
        Plan.load(path)


def test_a_plan_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(RunDirError):
        Plan.load(tmp_path / "plan.json")
