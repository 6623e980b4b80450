"""Checkpoints that all ranks write together: the same states as with one writer, on any number of ranks; complete or absent."""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from boxes import Box, background
from ranks import RankError, on_ranks
from test_trainer_checkpoints import fit
from torch import nn

from rankwise.checkpoint import Checkpoints, commands, sharding, writer
from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.manifest import Manifest
from rankwise.dist import comm, log
from rankwise.errors import CheckpointError, RunDirError
from rankwise.sync import AllReduce, DiLoCo, LocalSGD, SyncStrategy

__all__ = ["background"]  # a fixture


def of_step(step: int) -> dict[str, Any]:
    """Equal on every rank."""
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(40, 60), nn.BatchNorm1d(60), nn.Linear(60, 40), nn.Linear(60, 40))
    model[3].weight = model[2].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model[:3](torch.randn(8, 40)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "box": Box([None, torch.full((500,), float(step)), {"step": step}])}


def sums(parts: dict[str, Any]) -> dict[str, str]:
    states = {name: part.state_dict() for name, part in parts.items()}
    return {path: manifests.tensor_sum(tensor) for path, tensor in manifests.tensors(states)}


def sums_of_step(step: int) -> dict[str, str]:
    return sums(of_step(step))


def save(folder: Path, steps: tuple[int, ...], background: bool, sharded: bool = True) -> list[str]:
    checkpoints = Checkpoints(folder, keep_last=9, background=background, sharded=sharded)
    paths = [checkpoints.save(of_step(step), step) for step in steps]
    checkpoints.wait()
    return [path.name for path in paths]


def load(folder: Path, sharded: bool = False) -> tuple[int, dict[str, str], Any]:
    parts = of_step(99)
    parts["optimizer"] = torch.optim.AdamW(parts["model"].parameters())
    manifest = Checkpoints(folder, sharded=sharded, background=False).load_latest(parts)
    assert manifest is not None
    groups = [{name: value for name, value in group.items() if name != "params"} for group in parts["optimizer"].param_groups]
    return manifest.step, sums(parts), (groups, parts["box"].state["value"][2])


def whole(folder: Path) -> list[str]:
    """The checkpoints in the folder, each verified; nothing else is there."""
    for path in folder.iterdir():
        manifests.verify(path)
        assert {p.name for p in path.iterdir()} == {*Manifest.read(path).files, manifests.NAME}
    return sorted(path.name for path in folder.iterdir())


# --- who writes what


def test_bytes_are_divided_evenly_and_what_shares_memory_stays_together() -> None:
    parts = of_step(1)
    states = {name: part.state_dict() for name, part in parts.items()}
    for ranks in (2, 3, 5):
        shares = sharding.divide(parts, states, ranks)
        assert shares == sharding.divide(parts, states, ranks)
        loads = [0] * ranks
        seen = set()
        for part in ("model", "optimizer"):
            for path, tensor in manifests.tensors(states[part]):
                if (part, tensor.data_ptr()) not in seen:
                    loads[shares[part].get(path, 0)] += tensor.nbytes
                seen.add((part, tensor.data_ptr()))
        assert max(loads) - min(loads) <= 60 * 40 * 4
        assert shares["model"].get("2.weight", 0) == shares["model"].get("3.weight", 0)
        assert not [path for path in shares["model"] if "running" in path or "num_batches" in path]
        assert "box" not in shares


def test_a_parameter_that_shares_memory_with_a_buffer_is_the_main_ranks() -> None:
    model = nn.Linear(40, 40)
    model.register_buffer("view", model.weight.detach()[3])
    other = nn.Linear(40, 40)
    parts = {"model": model, "other": other}
    shares = sharding.divide(parts, {name: part.state_dict() for name, part in parts.items()}, 2)
    assert shares == {"other": {"weight": 1}}


@pytest.mark.parametrize("sync", [LocalSGD(), DiLoCo(), AllReduce()])
def test_the_main_rank_writes_the_state_of_an_optimizer_that_differs_between_ranks(sync: SyncStrategy) -> None:
    parts = of_step(1)
    states = {name: part.state_dict() for name, part in parts.items()}
    shares = sharding.divide({**parts, "sync": sync}, {**states, "sync": {}}, 2)
    assert ("optimizer" in shares) == isinstance(sync, AllReduce)
    assert "model" in shares


# --- the result is what one rank would have written


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.one_in(2)
def test_a_sharded_checkpoint_is_loaded_on_any_number_of_ranks_as_one_that_is_not(
    ranks: int, background: bool, tmp_path: Path
) -> None:
    assert on_ranks(ranks, save, tmp_path / "sharded", (1, 2), background) == [["step-00000001", "step-00000002"]] * ranks
    on_ranks(1, save, tmp_path / "plain", (2,), background, sharded=False)
    assert whole(tmp_path / "sharded") == ["step-00000001", "step-00000002"]
    path = tmp_path / "sharded" / "step-00000002"
    sizes = {r: sum(p.stat().st_size for p in path.glob(f"*.shard-{r}.pt")) for r in range(1, ranks)}
    assert all(size > 0.5 * manifests.Manifest.read(path).bytes / ranks - 5000 for size in sizes.values())
    expected = on_ranks(1, load, tmp_path / "plain")
    for n in (1, 2, 3):
        assert on_ranks(n, load, tmp_path / "sharded", sharded=n == 2) == expected * n
    assert [held for _, held, _ in expected] == on_ranks(1, sums_of_step, 2)


def test_the_commands_know_a_sharded_checkpoint(tmp_path: Path) -> None:
    on_ranks(3, save, tmp_path, (1, 2), False)
    first, last = tmp_path / "step-00000001", tmp_path / "step-00000002"
    assert list(commands.verify([first, last])) == [(first, []), (last, [])]
    assert commands.list_all(tmp_path, verify=True).count("verified") == 2
    assert "model.shard-2" in commands.show(last)
    state = commands.read_model(last)
    assert list(state) == list(of_step(2)["model"].state_dict())
    nn.Module.load_state_dict(of_step(3)["model"], state)
    commands.write_model(state, tmp_path / "model.pt")
    assert sums({"model": Box(torch.load(tmp_path / "model.pt", weights_only=True))}) == sums({"model": Box(state)})
    mean = commands.average([first, last])
    assert torch.allclose(mean["0.weight"], (state["0.weight"] + of_step(1)["model"][0].weight) / 2)
    assert list(commands.read_model(last, "optimizer")) == ["state", "param_groups"]


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_a_damaged_share_is_named_and_the_checkpoint_before_is_loaded(damage: str, tmp_path: Path) -> None:
    on_ranks(2, save, tmp_path, (1, 2), False)
    path = tmp_path / "step-00000002" / "optimizer.shard-1.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink() if damage == "gone" else path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"optimizer.shard-1.pt (cannot be read|is corrupted in tensor state/)"):
        commands.read_model(path.parent, "optimizer")
    for n in (1, 2):
        assert [step for step, _, _ in on_ranks(n, load, tmp_path)] == [1] * n


# --- a rank that fails


def fail_once(folder: Path, on: int, how: str, background: bool) -> list[str]:
    """The errors when step 2 is saved. Steps 1 and 3 are saved without errors."""
    checkpoints = Checkpoints(folder, keep_last=9, background=background, sharded=True)
    checkpoints.save(of_step(1), 1)
    checkpoints.wait()
    raised = []
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank() == on:
            patch_to_fail(patch, how, checkpoints)
        try:
            checkpoints.save(of_step(2), 2)
            checkpoints.wait()
        except CheckpointError as error:
            raised.append(str(error))
    comm.barrier()  # the main rank has removed the folder
    left = [path.name for path in folder.iterdir() if not path.name.startswith("step-")]
    comm.barrier()
    checkpoints.folder = folder
    checkpoints.save(of_step(3), 3)
    checkpoints.wait()
    return [*raised, *left]


def patch_to_fail(patch: pytest.MonkeyPatch, how: str, checkpoints: Checkpoints) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def silent(*args: Any) -> None:
        raise RunDirError("cannot write rank-1.json: Input/output error")

    if how == "full disk":
        patch.setattr(os, "posix_fallocate", full)
    elif how == "no word":
        patch.setattr(writer, "leave_word", silent)
    else:
        patch.setattr(writer, "_SEEN_S", 0.1)
        patch.setattr(Path, "is_dir", lambda path: False)


@pytest.mark.parametrize(
    ("how", "on", "said"),
    [
        ("full disk", 1, r"cannot write .*step-00000002: No space left on device \(the share of rank 1 on "),
        ("full disk", 0, r"cannot write .*step-00000002: No space left on device$"),
        ("no word", 1, r"rank-1.json: Input/output error \(the share of rank 1 on "),
        ("unseen folder", 1, r"rank 1 on .* does not see .*tmp.*a folder that all ranks share"),
    ],
)
@pytest.mark.one_in(3)
def test_a_rank_that_cannot_write_its_share_is_an_error_on_all_and_nothing_is_left(
    how: str, on: int, said: str, background: bool, tmp_path: Path
) -> None:
    answers = on_ranks(3, fail_once, tmp_path, on, how, background)
    for answer in answers:
        assert len(answer) == 1, answer
        assert re.search(said, answer[0]), answer
    assert whole(tmp_path) == ["step-00000001", "step-00000003"]


def die(folder: Path, on: int, at: str) -> None:
    checkpoints = Checkpoints(folder, keep_last=9, background=True, sharded=True)
    checkpoints.save(of_step(1), 1)
    checkpoints.wait()
    if comm.rank() == on:
        module, name = at.split(".")
        original = getattr(os if module == "os" else writer, name)

        def killed(*args: Any) -> Any:
            if name != "rename" or "step-00000002" in str(args[1]):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)

        setattr(os if module == "os" else writer, name, killed)
    checkpoints.save(of_step(2), 2)
    checkpoints.wait()


MOMENTS = [(1, "writer.write_file"), (1, "writer.leave_word"), (0, "os.rename"), (0, "os.posix_fallocate")]


@pytest.mark.parametrize(("on", "at"), MOMENTS)
@pytest.mark.one_in(2)
def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(on: int, at: str, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        on_ranks(2, die, tmp_path, on, at)
    for path in tmp_path.glob("step-*"):
        manifests.verify(path)
    assert [step for step, _, _ in on_ranks(2, load, tmp_path)] == [1, 1]
    on_ranks(2, save, tmp_path, (3,), True)
    assert whole(tmp_path) == ["step-00000001", "step-00000003"]


def differ(folder: Path) -> list[str]:
    parts = of_step(1)
    if comm.rank() == 1:
        parts["model"] = nn.Linear(40, 41)
    said: list[str] = []
    log.warning_once = said.append  # type: ignore[assignment]
    Checkpoints(folder, sharded=True, background=False).save(parts, 1)
    return said


def test_ranks_that_do_not_hold_the_same_tensors_have_the_main_rank_write_alone(tmp_path: Path) -> None:
    [said, _] = on_ranks(2, differ, tmp_path)
    assert said == ["sharded=True has no effect: the tensors differ between ranks, so rank 0 writes them all"]
    assert not list(tmp_path.rglob("*.shard-*"))
    assert [held for _, held, _ in on_ranks(1, load, tmp_path)] == on_ranks(1, sums_of_step, 1)


# --- the Trainer


def trained(folder: Path, max_steps: int, sharded: bool) -> list[float]:
    sharding._SMALL = 0  # so that the tensors of this small model are divided
    return fit(folder, max_steps, sharded=sharded)[0]


@pytest.mark.parametrize("then", [2, 1])
@pytest.mark.one_in(2)
def test_a_training_with_sharded_saves_goes_on_on_other_ranks_as_one_without(then: int, tmp_path: Path) -> None:
    ends: list[Any] = []
    for sharded in (False, True):
        on_ranks(2, trained, tmp_path / str(sharded), 4, sharded)
        ends.append(on_ranks(then, trained, tmp_path / str(sharded), 7, sharded))
    assert ends[0] == ends[1]
    assert list((tmp_path / "True" / "checkpoints" / "step-00000004").glob("*.shard-1.pt"))
    assert not list((tmp_path / "False").rglob("*.shard-1.pt"))


def test_shares_that_are_missing_are_named_by_the_ranges_of_their_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_LAST_WAIT_S", -1.0)
    others = writer.Others(tmp_path, 512)
    others.hurry()
    with pytest.raises(CheckpointError, match=r"the share of ranks 1-511 is missing$"):
        others.wait()
