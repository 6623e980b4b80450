"""What makes a checkpoint verifiable."""

from __future__ import annotations

import errno
import json
import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.manifest import FileRecord, Manifest
from rankwise.errors import CheckpointError, DamagedError, UnreadableError


def test_every_tensor_of_a_nest_has_its_path() -> None:
    a, b = torch.ones(2), torch.zeros(1)
    state: dict[Any, Any] = {"state": {0: {"exp_avg": a, "step": 3}}, "list": [b, (a, "text")], "none": None}
    found = list(manifests.tensors(state))
    assert [path for path, _ in found] == ["state/0/exp_avg", "list/0", "list/1/0"]
    assert [tensor for _, tensor in found] == [a, b, a]
    assert list(manifests.tensors(a)) == [("", a)]


def test_the_sum_of_a_tensor_is_that_of_its_elements_in_row_major_order() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert manifests.tensor_sum(tensor) == xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())
    assert manifests.tensor_sum(tensor.t()) == xxhash.xxh3_128_hexdigest(tensor.numpy().T.tobytes())
    assert manifests.tensor_sum(tensor[:, 1]) == manifests.tensor_sum(tensor[:, 1].clone())
    assert manifests.tensor_sum(tensor.requires_grad_()) == manifests.tensor_sum(tensor.detach())
    kinds = [torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]
    sums = {manifests.tensor_sum(torch.ones(5).to(kind)) for kind in kinds}
    assert len(sums) >= len(kinds) - 1  # the ones of uint8 and bool are the same bytes
    assert manifests.tensor_sum(torch.tensor(1.0)) == manifests.tensor_sum(torch.tensor([1.0]))
    assert manifests.tensor_sum(torch.empty(0)) == xxhash.xxh3_128_hexdigest(b"")


def test_the_sum_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    for data in (b"", b"x", b"abc" * 100_000):
        path = tmp_path / "file"
        path.write_bytes(data)
        assert manifests.file_sum(path) == xxhash.xxh3_128_hexdigest(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with one file of two tensors."""
    state = {"a": torch.arange(100.0), "b": {"c": torch.arange(50.0)}, "n": 3}
    torch.save(state, tmp_path / "model.pt")
    sums = {name: manifests.tensor_sum(tensor) for name, tensor in manifests.tensors(state)}
    path = tmp_path / "model.pt"
    record = FileRecord(path.stat().st_size, manifests.file_sum(path), sums)
    manifest = Manifest(manifests.VERSION, 7, 2, torch.__version__, {"model.pt": record}, {"precision": "fp32"})
    (tmp_path / manifests.NAME).write_text(manifest.text())
    return tmp_path


def test_what_is_written_is_read_and_verifies(folder: Path) -> None:
    manifest = manifests.verify(folder)
    assert (manifest.step, manifest.world_size, manifest.info) == (7, 2, {"precision": "fp32"})
    assert list(manifest.files["model.pt"].tensors) == ["a", "b/c"]
    assert manifest == Manifest.read(folder)


def test_a_damaged_tensor_is_named(folder: Path) -> None:
    path = folder / "model.pt"
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(50.0).numpy().tobytes(), data.index(torch.arange(100.0).numpy().tobytes()) + 400)
    data[at + 7] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        manifests.verify(folder)
    assert str(caught.value) == f"{path} is corrupted in tensor b/c"


def test_damage_that_prevents_loading_is_named_by_its_place_if_the_place_of_each_tensor_is_known(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, background=False).save({"model": torch.nn.Linear(9, 9)}, 1) / "model.pt"
    data = bytearray(path.read_bytes())
    data[data.index(b"\x80\x02")] ^= 1  # the beginning of the pickle
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        manifests.verify(path.parent)
    assert str(caught.value) == f"{path} is corrupted outside its tensors"


def test_a_checkpoint_from_before_there_were_metrics_in_it_is_read(folder: Path) -> None:
    path = folder / manifests.NAME
    record = json.loads(path.read_text())
    assert record.pop("metrics") == {}
    del record["xxh3_128"]
    record["xxh3_128"] = xxhash.xxh3_128_hexdigest(json.dumps(record, sort_keys=True).encode())
    path.write_text(json.dumps(record))
    assert manifests.verify(folder).metrics == {}


@pytest.mark.parametrize(("old", "new"), [("1e-05", "1E-05"), ("}\n", "}"), ("\\u00e4", "\\u00E4"), ('"info": ', '"info":')])
def test_a_manifest_of_which_a_byte_has_changed_is_damaged_though_it_says_the_same(folder: Path, old: str, new: str) -> None:
    manifest = replace(Manifest.read(folder), info={"eps": 1e-5, "name": "ä"})
    path = folder / manifests.NAME
    path.write_text(manifest.text())
    assert Manifest.read(folder) == manifest
    before, found, after = manifest.text().rpartition(old)
    assert found
    path.write_text(before + new + after)
    with pytest.raises(CheckpointError, match=f"{path} is corrupted"):
        Manifest.read(folder)


def test_info_with_numbers_as_keys_is_read_with_the_keys_that_json_gives_back(folder: Path) -> None:
    manifest = replace(Manifest.read(folder), info={"lr": {10: 0.1, 2: 0.2, "10": 0.3}, "at": {0.5: [True, (1, None)]}})
    (folder / manifests.NAME).write_text(manifest.text())
    assert Manifest.read(folder).info == {"lr": {"10": 0.3, "2": 0.2}, "at": {"0.5": [True, [1, None]]}}


def test_tensors_that_are_cut_off_are_named(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, background=False).save({"model": torch.nn.Linear(300, 2)}, 1)
    file = path / "model.pt"
    at = Manifest.read(path).files["model.pt"].layout
    for size, said in (
        (at["bias"].offset, "it ends in tensor bias"),
        ((at["weight"].offset or 0) + at["weight"].bytes, "it ends in tensor bias"),
        (at["weight"].offset, "it ends before tensors weight, bias"),
    ):
        os.truncate(file, size or 0)
        with pytest.raises(CheckpointError, match=rf"model.pt has {size} of \d+ bytes, {said}$"):
            manifests.verify(path)


def test_a_hole_over_many_tensors_names_the_first_and_counts_the_others(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, background=False).save(
        {"model": torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(3)))}, 1
    )
    file = path / "model.pt"
    at = Manifest.read(path).files["model.pt"].layout["0.weight"].offset
    assert at is not None
    data = file.read_bytes()
    file.write_bytes(data[:at] + bytes(600) + data[at + 600 :])
    with pytest.raises(CheckpointError, match=r"model.pt is corrupted in tensors 0.weight, 0.bias, 1.weight and \d more$"):
        manifests.verify(path)


def test_a_damaged_tensor_that_does_not_lie_in_order_is_named_too(tmp_path: Path) -> None:
    turned = torch.arange(400.0).reshape(20, 20).t()
    path = Checkpoints(tmp_path, background=False).save({"model": torch.nn.ParameterList([torch.nn.Parameter(turned)])}, 1)
    file = path / "model.pt"
    data = bytearray(file.read_bytes())
    data[data.index(torch.arange(400.0).numpy().tobytes()) + 801] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model.pt is corrupted in tensor 0$"):
        manifests.verify(path)


def test_a_truncated_an_emptied_and_a_missing_file_are_named(folder: Path) -> None:
    path = folder / "model.pt"
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 1, 0):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=rf"{path} has {size} of {len(whole)} bytes"):
            manifests.verify(folder)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match=rf"has {len(whole) + 1} of {len(whole)} bytes"):
        manifests.verify(folder)
    path.unlink()
    with pytest.raises(DamagedError, match=rf"{path} cannot be read \(No such file"):
        manifests.verify(folder)
    path.mkdir()
    with pytest.raises(CheckpointError, match=str(path)):
        manifests.verify(folder)


def test_a_file_that_the_system_does_not_read_is_not_reported_as_corrupted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(mmap, "mmap", fail)
    path = folder / "model.pt"
    with pytest.raises(UnreadableError, match=rf"^{path} cannot be read \(Input/output error\)$"):
        manifests.verify(folder)
    manifest = Manifest.read(folder)
    monkeypatch.setattr(Path, "stat", fail)
    with pytest.raises(UnreadableError, match=rf"^{path} cannot be read \(Input/output error\)$"):
        manifests.length_damage(path, manifest.files["model.pt"])


def test_a_manifest_that_is_missing_damaged_or_of_another_version_says_so(folder: Path) -> None:
    path = folder / manifests.NAME
    text = path.read_text()
    whole = json.loads(text)
    for damaged in (b"", b"{", b"null", b"[]", b"3", text[:-10].encode(), b"\xff" + text.encode(), b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{path} is corrupted"):
            Manifest.read(folder)
    for change in ({"files": {"model.pt": {"bytes": 3}}}, {"unknown": 1}, {"files": {"m": 3}}):
        path.write_text(json.dumps({**whole, **change}))
        with pytest.raises(CheckpointError, match=f"{path} is corrupted"):
            Manifest.read(folder)
    for version in (0, 99):
        path.write_text(json.dumps({**whole, "version": version}))
        with pytest.raises(
            CheckpointError, match=f"has version {version}, and this rankwise reads 1, 2 and 3; use a newer rankwise"
        ):
            Manifest.read(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path} is missing"):
        Manifest.read(folder)


@pytest.mark.parametrize("files", [None, [], 3, "model.pt"])
def test_a_manifest_of_which_the_files_are_no_mapping_is_damaged(folder: Path, files: Any) -> None:
    path = folder / manifests.NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "files": files}))
    with pytest.raises(CheckpointError, match=f"{path} is corrupted"):
        Manifest.read(folder)
