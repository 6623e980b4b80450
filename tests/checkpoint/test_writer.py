"""What a rank writes of a checkpoint: where its tensors are, and for whom the rank that renames the folder waits."""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from boxes import Box
from torch import nn

from rankwise.checkpoint import Checkpoints, writer
from rankwise.errors import CheckpointError


def test_each_tensor_has_its_type_its_shape_and_its_place_in_the_file(tmp_path: Path) -> None:
    tensor = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    state = {"a": tensor, "row": tensor[1], "turned": tensor.t(), "empty": torch.empty(0, 2), "b": [torch.tensor(True)]}
    torch.save(state, tmp_path / "a.pt")
    places = writer.locate_tensors(tmp_path / "a.pt", torch.load(tmp_path / "a.pt", mmap=True, weights_only=True))
    assert {name: (at.dtype, at.shape, at.bytes) for name, at in places.items()} == {
        "a": ("float64", (3, 4), 96), "row": ("float64", (4,), 32), "turned": ("float64", (4, 3), 96),
        "empty": ("float32", (0, 2), 0), "b/0": ("bool", (), 1),
    }  # fmt: skip
    data = (tmp_path / "a.pt").read_bytes()
    for name, value in (("a", tensor), ("row", tensor[1]), ("b/0", state["b"][0])):
        at = places[name]
        assert at.offset is not None
        assert data[at.offset : at.offset + at.bytes] == value.numpy().tobytes()
    assert (places["turned"].offset, places["empty"].offset) == (None, None)


def test_a_file_without_torchs_own_sums_is_read_by_torch_and_files_of_the_user_have_them(tmp_path: Path) -> None:
    state = {"a": torch.arange(12.0), "n": 3}
    writer.write_file(tmp_path / "a.pt", state)
    torch.save(state, tmp_path / "users.pt")
    for mmap in (False, True):
        read = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mmap)
        assert torch.equal(read["a"], state["a"])
        assert read["n"] == 3
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is not None  # torch's sum of 20 GB would take as long as the writing
    with zipfile.ZipFile(tmp_path / "users.pt") as archive:
        assert archive.testzip() is None


def test_a_save_removes_what_a_killed_writer_has_left_and_no_temporary_folder_of_the_user(tmp_path: Path) -> None:
    leftover, of_mktemp = tmp_path / f"tmp.{uuid.uuid4().hex}", tmp_path / "tmp.Xa3bQ9zLmP"
    for folder in (leftover, of_mktemp):
        folder.mkdir()
        (folder / "model.pt").touch()
    Checkpoints(tmp_path, background=False).save({"a": torch.nn.Linear(1, 1)}, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", of_mktemp.name]
    assert (of_mktemp / "model.pt").exists()


def test_a_rank_that_is_not_heard_of_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.leave_word(tmp_path, 2, {})
    monkeypatch.setattr(writer, "_WAIT_S", 0.0)
    with pytest.raises(CheckpointError, match="is incomplete: the share of ranks 1, 3 is missing"):
        writer.Others(tmp_path, 4).wait()
    monkeypatch.undo()
    others = writer.Others(tmp_path, 2)
    monkeypatch.setattr(writer, "_LAST_WAIT_S", 0.0)
    others.hurry()
    with pytest.raises(CheckpointError, match="is incomplete"):
        others.wait()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "the reason"), RuntimeError("the reason")])
@pytest.mark.parametrize("asked", ["exists", "disk_usage"])
def test_a_failed_write_is_explained_even_if_the_folder_is_not_reachable_any_more(
    error: OSError | RuntimeError, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path if asked == "exists" else shutil, asked, fail)
    final = tmp_path / "step-00000001"
    assert writer.explain_failure(final, {}, error) == f"cannot write {final}: the reason"


def test_the_death_of_a_loaders_worker_that_is_raised_within_a_save_is_no_failure_to_write(tmp_path: Path) -> None:
    class Interrupted:
        def state_dict(self) -> dict[str, object]:
            return {"x": self}

        def __reduce__(self) -> object:  # while the file is written, like torch's SIGCHLD handler
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    with pytest.raises(RuntimeError, match="DataLoader worker"):
        Checkpoints(tmp_path, background=False).save({"part": Interrupted()}, 1)
    assert list(tmp_path.iterdir()) == []


def of_two_keys(one: torch.Tensor, other: torch.Tensor) -> object:
    return {1: one, "1": other}


def of_two_depths(one: torch.Tensor, other: torch.Tensor) -> object:
    return {"a": {"b": one}, "a/b": other}


def of_a_set(one: torch.Tensor, other: torch.Tensor) -> object:
    return {"seen": {one}, "other": other}


@pytest.mark.parametrize("state_of", [of_two_keys, of_two_depths, of_a_set])
def test_what_has_no_path_of_its_own_is_saved_and_loaded(state_of: Callable[..., Any], tmp_path: Path) -> None:
    one, other = torch.arange(7.0), torch.arange(7.0) + 10
    Checkpoints(tmp_path, background=False).save({"part": Box(state_of(one, other))}, 1)
    box = Box(None)
    assert Checkpoints(tmp_path).load_latest({"part": box}) is not None
    found = [next(iter(value)) if isinstance(value, set) else value for value in box.state["value"].values()]
    found = [next(iter(value.values())) if isinstance(value, dict) else value for value in found]
    assert [value.tolist() for value in found] == [one.tolist(), other.tolist()]


def test_a_tensor_that_is_not_in_the_mapped_file_has_no_place(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3.0)}, tmp_path / "a.pt")
    mapped = torch.load(tmp_path / "a.pt", mmap=True, weights_only=True)
    places = writer.locate_tensors(tmp_path / "a.pt", {**mapped, "elsewhere": torch.arange(3.0)})
    assert places["a"].offset is not None
    assert places["elsewhere"].offset is None
    assert writer.locate_tensors(tmp_path / "a.pt", {"elsewhere": torch.arange(3.0)})["elsewhere"].offset is None


def test_a_save_does_not_depend_on_the_names_of_the_files_that_are_mapped(tmp_path: Path) -> None:
    data = tmp_path / os.fsdecode("größe".encode("latin-1"))  # as a zip archive of Windows unpacks it
    np.zeros(1000, np.float32).tofile(data)
    samples = np.memmap(data, np.float32, "r")
    Checkpoints(tmp_path / "ck", background=False).save({"part": Box(torch.from_numpy(np.array(samples)))}, 1)
    box = Box(None)
    assert Checkpoints(tmp_path / "ck").load_latest({"part": box}) is not None
    assert box.state["value"].tolist() == samples.tolist()


def test_a_folder_whose_name_is_not_utf_8_has_checkpoints_too(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    plain, odd, box = nn.Linear(2, 2), nn.Module(), Box(torch.ones(3))
    odd.register_buffer("counts", torch.ones(3, dtype=torch.uint16))  # a type that only torch.load can read
    Checkpoints(folder, background=False).save({"plain": plain, "odd": odd, "box": box}, 1)
    saved = plain.weight.clone()
    with torch.no_grad():
        plain.weight.zero_()
        odd.counts.zero_()
    box.state = {"value": None}
    assert Checkpoints(folder).load_latest({"plain": plain, "odd": odd, "box": box}) is not None
    assert torch.equal(plain.weight, saved)
    assert odd.counts.tolist() == box.state["value"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_the_free_space_is_named_only_if_it_is_what_is_missing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=rf"cannot write .*: {os.strerror(number)}$"):
        Checkpoints(tmp_path, background=False).save({"model": nn.Linear(2, 2)}, 1)


def test_a_full_disk_is_reported_in_a_unit_that_fits_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(CheckpointError, match=r": it needs \d[\d.]* kB, and 0 B are free$"):
        Checkpoints(tmp_path, background=False).save({"model": nn.Linear(2, 2)}, 1)


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_with_no_room_for_the_next_save_is_a_warning_while_the_user_is_still_there(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(100, 100)  # a checkpoint of about 60 kB

    def say_after(free: int, keep_last: int, saves: int) -> list[str]:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        checkpoints = Checkpoints(tmp_path / f"{free}-{keep_last}", keep_last=keep_last, background=background)
        for step in range(1, saves + 1):
            checkpoints.save({"model": model}, step)
            checkpoints.wait()
        return [line for line in capsys.readouterr().out.splitlines() if "need" in line]

    assert say_after(200_000, keep_last=2, saves=1) == []
    (line,) = say_after(90_000, keep_last=2, saves=4)  # one place is free, and the next save needs one more
    assert re.fullmatch(
        r"warning: the next 2 checkpoints need \d+(\.\d+)? kB in \S*90000-2, and 90 kB are free; "
        r"free some space, or saves will fail",
        line,
    ), line
    assert say_after(90_000, keep_last=1, saves=3) == []
    (line,) = say_after(20_000, keep_last=1, saves=3)
    assert line.startswith("warning: the next checkpoint needs "), line


def test_a_pruned_link_to_a_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "here", keep_last=1, background=False)
    checkpoints.save({"model": nn.Linear(2, 2)}, 1)
    (tmp_path / "here" / "step-00000001").rename(tmp_path / "elsewhere")
    (tmp_path / "here" / "step-00000001").symlink_to(tmp_path / "elsewhere")
    checkpoints.save({"model": nn.Linear(2, 2)}, 2)
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["step-00000002"]
    assert (tmp_path / "elsewhere" / "manifest.json").exists()  # only the link was here
