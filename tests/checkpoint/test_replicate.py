"""Nodes with their own disks: who writes, from what they resume, and what happens if one disk is lost or corrupted."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from boxes import loaded, of_step, step_in
from ranks import on_ranks, torchrun

import rankwise
from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint.replicate import copy_to_ranks, digest_manifest, group_by_folder
from rankwise.dist import comm
from rankwise.errors import CheckpointError, ConfigError, DamagedError

TWO_NODES = [torchrun(rank, 4, 2) for rank in range(4)]
THREE_NODES = [torchrun(rank, 3, 1) for rank in range(3)]

Where = list[str]
"""The name of each rank's disk."""

APART = ["a", "a", "b", "b"]
SHARED = ["a", "a", "a", "a"]


def folder_of(tmp: Path, where: Where) -> Path:
    return tmp / where[comm.rank()] / "checkpoints"


def on_nodes(function: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return on_ranks(4, function, *args, environ=TWO_NODES, **kwargs)


def steps(tmp: Path, disk: str) -> list[int]:
    """The steps of the checkpoints on this disk that load."""
    folder = tmp / disk / "checkpoints"
    found = []
    for path in sorted(folder.glob("*")):
        alone = folder.with_name("alone")
        shutil.rmtree(alone, ignore_errors=True)
        shutil.copytree(path, alone / path.name)
        step = loaded(alone)
        assert step is not None
        assert path.name == f"step-{step:08d}"
        found.append(step)
    return found


# --- who sees what


def groups(tmp: Path, where: Where) -> list[list[int]]:
    found = group_by_folder(folder_of(tmp, where))
    comm.barrier()
    assert os.listdir(folder_of(tmp, where)) == []
    return found


@pytest.mark.parametrize(
    ("where", "expected"),
    [(APART, [[0, 1], [2, 3]]), (SHARED, [[0, 1, 2, 3]])],
    ids=["a disk each", "one disk"],
)
def test_ranks_are_grouped_by_the_folder_that_their_nodes_see(where: Where, expected: list[list[int]], tmp_path: Path) -> None:
    assert on_nodes(groups, tmp_path, where) == [expected] * 4


def test_of_three_nodes_two_may_share_a_disk(tmp_path: Path) -> None:
    assert on_ranks(3, groups, tmp_path, ["a", "b", "a"], environ=THREE_NODES) == [[[0, 2], [1]]] * 3


def groups_or_error(tmp: Path) -> str:
    folder = folder_of(tmp, APART)
    if comm.rank() == 2:
        folder = tmp / "a file" / "checkpoints"
    try:
        group_by_folder(folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_node_that_cannot_write_is_an_error_on_all_ranks_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    for text in on_nodes(groups_or_error, tmp_path):
        assert text == f"{tmp_path}/a file/checkpoints cannot be written on rank 2 (Not a directory)"


# --- saving


def save_and_load(tmp: Path, where: Where, scope: str, background: bool) -> tuple[int | None, str]:
    checkpoints = Checkpoints(folder_of(tmp, where), scope=scope, background=background)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for step in (1, 2, 3):
            checkpoints.save(of_step(step), step)
        checkpoints.wait()
        parts = of_step(-1)
        manifest = Checkpoints(folder_of(tmp, where), scope=scope, background=False).load_latest(parts)
    assert manifest is not None
    assert step_in(parts) == manifest.step
    return manifest.step, out.getvalue()


@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_with_scope_node_each_disk_has_the_checkpoints(background: bool, tmp_path: Path) -> None:
    assert on_nodes(save_and_load, tmp_path, APART, "node", background) == [(3, "")] * 4
    assert steps(tmp_path, "a") == steps(tmp_path, "b") == [2, 3]


def test_with_scope_node_nodes_that_share_a_disk_after_all_write_once_and_that_is_said(tmp_path: Path) -> None:
    (_, said), *rest = on_nodes(save_and_load, tmp_path, SHARED, "node", False)
    assert said == f"scope='node' has no effect: all nodes share {tmp_path}/a/checkpoints, and rank 0 writes there\n"
    assert rest == [(3, "")] * 3
    assert steps(tmp_path, "a") == [2, 3]


def test_with_scope_main_one_disk_has_them_and_the_others_load_a_copy_that_does_not_stay(tmp_path: Path) -> None:
    (step, said), *rest = on_nodes(save_and_load, tmp_path, APART, "main", False)
    assert step == 3
    assert said.startswith("copying step-00000003 (")
    assert " to 1 node without it" in said
    assert rest == [(3, "")] * 3
    assert (steps(tmp_path, "a"), steps(tmp_path, "b")) == ([2, 3], [])


def test_a_scope_that_there_is_not_is_an_error_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^Checkpoints\(scope='all'\): give one of 'main', 'node', or None"):
        Checkpoints(tmp_path, scope="all", background=False)


def test_shares_of_one_checkpoint_on_disks_apart_are_an_error_that_names_both_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^Checkpoints\(sharded=True\) needs a folder .*scope='node'.* remove one of them"):
        Checkpoints(tmp_path, sharded=True, scope="node", background=False)


# --- loading


def load(tmp: Path, where: Where, scope: str) -> tuple[int | None, str]:
    parts = of_step(-1)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        manifest = Checkpoints(folder_of(tmp, where), scope=scope, background=False).load_latest(parts)
    assert (manifest.step if manifest is not None else -1) == step_in(parts)
    return manifest.step if manifest is not None else None, out.getvalue()


def saved_apart(tmp_path: Path) -> None:
    on_nodes(save_and_load, tmp_path, APART, "node", False)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_node_that_comes_back_with_an_empty_disk_is_given_the_newest_by_the_other(lost: str, tmp_path: Path) -> None:
    saved_apart(tmp_path)
    shutil.rmtree(tmp_path / lost)
    (step, said), *rest = on_nodes(load, tmp_path, APART, "node")
    assert step == 3
    assert "copying step-00000003 (" in said
    assert [step for step, _ in rest] == [3] * 3
    assert steps(tmp_path, lost) == [3]


def test_a_node_that_has_an_older_one_alone_does_not_hold_the_others_back(tmp_path: Path) -> None:
    saved_apart(tmp_path)
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "step-00000003")
    assert [step for step, _ in on_nodes(load, tmp_path, APART, "node")] == [3] * 4
    assert steps(tmp_path, "a") == [2, 3]


def test_one_of_the_same_name_and_other_content_is_replaced_by_that_of_the_lowest_rank(tmp_path: Path) -> None:
    saved_apart(tmp_path)
    shutil.rmtree(tmp_path / "b" / "checkpoints")
    Checkpoints(tmp_path / "b" / "checkpoints", background=False).save({**of_step(3), "more": of_step(3)["loader"]}, 3)
    assert [step for step, _ in on_nodes(load, tmp_path, APART, "node")] == [3] * 4
    both = [digest_manifest(tmp_path / disk / "checkpoints" / "step-00000003") for disk in "ab"]
    assert both[0] == both[1] != ""


@pytest.mark.parametrize("disk", ["a", "b"])
@pytest.mark.one_in(2)
def test_a_damaged_one_is_had_from_a_node_where_it_is_whole(disk: str, tmp_path: Path) -> None:
    saved_apart(tmp_path)
    path = tmp_path / disk / "checkpoints" / "step-00000003" / "model.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = on_nodes(load, tmp_path, APART, "node")
    assert [step for step, _ in found] == [3] * 4
    said = "".join(text for _, text in found)
    assert f"skipped a checkpoint: {path} is corrupted in tensor value" in said
    assert steps(tmp_path, disk) == [2, 3]


def test_one_that_is_damaged_everywhere_is_passed_over_everywhere(tmp_path: Path) -> None:
    saved_apart(tmp_path)
    for disk in "ab":
        (tmp_path / disk / "checkpoints" / "step-00000003" / "model.pt").write_bytes(b"nothing of it")
    assert [step for step, _ in on_nodes(load, tmp_path, APART, "node")] == [2] * 4


def load_error(tmp: Path, where: Where) -> str:
    try:
        load(tmp, where, "node")
    except CheckpointError as error:
        return str(error)
    return ""


def test_when_all_are_damaged_on_all_nodes_it_is_an_error_on_every_rank(tmp_path: Path) -> None:
    saved_apart(tmp_path)
    for path in tmp_path.glob("*/checkpoints/*/model.pt"):
        path.write_bytes(b"nothing of it")
    [text] = set(on_nodes(load_error, tmp_path, APART))
    assert text.startswith(f"no checkpoint in {tmp_path}/a/checkpoints is intact (")


def load_as_one_rank_misreads(tmp: Path, times: int) -> tuple[int | None, str]:
    """One rank reads another byte than the others do, from the same disk."""
    from rankwise.checkpoint import sharding

    read, left = sharding.read, [times if comm.rank() == 3 else 0]

    def misread(path: Path, *args: Any) -> Any:
        if left[0] and path.name == "model.pt":
            left[0] -= 1
            raise DamagedError(f"{path} is corrupted in tensor value")
        return read(path, *args)

    sharding.read = misread  # type: ignore[assignment]
    return load(tmp, SHARED, "main")


def test_a_node_that_misreads_a_disk_that_all_see_reads_it_once_more(tmp_path: Path) -> None:
    on_nodes(save_and_load, tmp_path, SHARED, "main", False)
    assert [step for step, _ in on_nodes(load_as_one_rank_misreads, tmp_path, 1)] == [3] * 4
    assert steps(tmp_path, "a") == [2, 3]


def test_a_node_that_misreads_it_twice_makes_all_go_on_from_the_one_before(tmp_path: Path) -> None:
    on_nodes(save_and_load, tmp_path, SHARED, "main", False)
    assert [step for step, _ in on_nodes(load_as_one_rank_misreads, tmp_path, 2)] == [2] * 4


def load_onto_a_full_disk(tmp: Path) -> str:
    from rankwise.checkpoint import replicate

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if comm.rank() == 2:
        replicate.put = full
    return load_error(tmp, APART)


def test_a_node_that_cannot_keep_its_copy_is_an_error_on_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    saved_apart(tmp_path)
    shutil.rmtree(tmp_path / "b")
    [text] = set(on_nodes(load_onto_a_full_disk, tmp_path))
    assert text == f"{tmp_path}/b/checkpoints/step-00000003 cannot be written on rank 2 (No space left on device)"
    assert list((tmp_path / "b" / "checkpoints").iterdir()) == []


def spread_what_is_gone(tmp: Path) -> str:
    try:
        copy_to_ranks(folder_of(tmp, APART) / "step-00000001", 0, [2])
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_cannot_be_read_where_it_is_is_an_error_on_every_rank(tmp_path: Path) -> None:
    [text] = set(on_nodes(spread_what_is_gone, tmp_path))
    assert text == f"{tmp_path}/a/checkpoints/step-00000001 cannot be read on rank 0 (No such file or directory)"


# --- used by a Trainer


def trained(tmp: Path, where: Where, steps: int, **settings: Any) -> list[float]:
    from test_trainer_checkpoints import fit

    parameters, _ = fit(folder_of(tmp, where).parent, steps, **settings)
    return parameters


def test_a_training_whose_first_node_lost_its_disk_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    unbroken = on_nodes(trained, tmp_path / "unbroken", APART, 8)
    on_nodes(trained, tmp_path, APART, 5, scope="node")
    shutil.rmtree(tmp_path / "a")
    assert on_nodes(trained, tmp_path, APART, 8, scope="node") == unbroken
    assert rankwise.__name__
