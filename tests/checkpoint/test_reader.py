"""A part's file, read directly into the part's own memory if possible: the result of torch.load, every byte checked."""

from __future__ import annotations

import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from boxes import Box, of_step, step_in
from ranks import on_ranks
from torch import nn

from rankwise.checkpoint import Checkpoints, reader
from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.manifest import FileRecord, Manifest
from rankwise.dist import comm, log
from rankwise.errors import CheckpointError, DamagedError


def saved(folder: Path, part: Any) -> tuple[Path, FileRecord]:
    path = Checkpoints(folder, background=False).save({"part": part}, 1)
    return path / "part.pt", Manifest.read(path).files["part.pt"]


def assert_same(one: Any, other: Any) -> None:
    """The same types, values and strides."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride(), one.requires_grad) == (
            other.dtype,
            other.shape,
            other.stride(),
            other.requires_grad,
        )
        assert manifests.tensor_sum(one) == manifests.tensor_sum(other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
        if isinstance(one, OrderedDict):
            assert vars(one) == vars(other)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def states() -> dict[str, Any]:
    tensor = torch.randn(30, 40, dtype=torch.float64)
    kinds = [torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    kinds += [torch.complex64, torch.complex128, torch.float32]
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "kinds": [torch.ones(5).to(kind) for kind in kinds],
        "views": [tensor, tensor[1:, 2], tensor.t(), tensor[3], tensor[:0], torch.empty(0, 3), torch.tensor(3)],
        "slice": tensor[5:7].clone()[1:],
        "beginning": tensor[:2],
        "parameter": [nn.Parameter(tensor), nn.Parameter(tensor, requires_grad=False), torch.ones(2, requires_grad=True)],
        "nest": (None, True, 2**70, float("-inf"), "ä/\n", (1, (2.5,)), {0: {(1, 2): [tensor]}}, OrderedDict(b=1)),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }  # fmt: skip


# Not states(): to step an optimizer when tests are collected would import torch's compiler, in each worker.
@pytest.mark.parametrize("name", ["kinds", "views", "slice", "beginning", "parameter", "nest", "model", "optimizer"])
def test_what_is_read_is_what_torch_reads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, record = saved(tmp_path, Box(states()[name]))
    expected = torch.load(path, weights_only=True)
    monkeypatch.setattr(torch, "load", None)  # no other way to read
    assert_same(reader.read(path, record), expected)


def test_each_of_these_states_has_a_case() -> None:
    [mark] = test_what_is_read_is_what_torch_reads.pytestmark  # type: ignore[attr-defined]  # set by the decorator
    assert mark.args == ("name", [*states()])


def test_what_torch_alone_can_read_is_read_by_torch(tmp_path: Path) -> None:
    state = {
        "set": {1, 2},
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "bytes": b"\xff\0",
    }
    for name, value in state.items():
        path, record = saved(tmp_path / name, Box(value))
        found = reader.read(path, record)["value"]
        assert type(found) is type(value)
        assert torch.equal(found.float(), value.float()) if name == "float8" else found == value  # type: ignore[attr-defined]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(DamagedError):
            reader.read(path, record)


def test_tensors_that_share_memory_share_it_again(tmp_path: Path) -> None:
    base = torch.arange(400.0).reshape(20, 20)
    path, record = saved(tmp_path, Box([base, base[3:], base.t(), base.view(400)]))
    found = reader.read(path, record)["value"]
    assert len({t.untyped_storage().data_ptr() for t in found}) == 1
    assert all(torch.equal(a, b) for a, b in zip(found, [base, base[3:], base.t(), base.view(400)], strict=True))


# --- into a part's own memory


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)
        if tied:
            self.b.weight = self.a.weight


class Transposing(nn.Linear):
    """Loads a weight that an older version has saved transposed."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t()
        super()._load_from_state_dict(state_dict, prefix, *args)


def hooked() -> nn.Module:
    def turn(module: nn.Module, state: Any, prefix: str, *args: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].t()

    model = nn.Linear(5, 5)
    model.register_load_state_dict_pre_hook(turn)
    return model


def last_channels() -> nn.Module:
    return nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "plain": (lambda: nn.Linear(5, 5), lambda: nn.Linear(5, 5)),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)),) * 2,
    "tied": (lambda: Tied(True), lambda: Tied(True)),
    "tied in the file alone": (lambda: Tied(True), lambda: Tied(False)),
    "tied in the module alone": (lambda: Tied(False), lambda: Tied(True)),
    "one layer twice": (lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2),) * 2,
    "hook": (hooked, hooked),
    "override": (lambda: Transposing(5, 5),) * 2,
    "channels last": (last_channels, lambda: nn.Conv2d(4, 4, 3)),
    "channels last in the module": (lambda: nn.Conv2d(4, 4, 3), last_channels),
    "another dtype": (lambda: nn.Linear(5, 5).double(), lambda: nn.Linear(5, 5)),
    "half": (lambda: nn.Linear(5, 5).bfloat16(),) * 2,
    "no parameters": (nn.ReLU, nn.ReLU),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODULES)
def test_a_module_holds_what_torch_would_have_loaded(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    was, new = MODULES[kind]
    path, _ = saved(tmp_path, was())
    ours, theirs = new(), new()
    theirs.load_state_dict(torch.load(path, weights_only=True))
    addresses = [p.data_ptr() for p in ours.parameters()]
    Checkpoints(tmp_path, background=False).load_latest({"part": ours})
    assert_same(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    assert_same(ours.state_dict(), theirs.state_dict())
    assert [p.data_ptr() for p in ours.parameters()] == addresses


def test_a_model_and_a_stepped_optimizer_are_read_into_and_nothing_is_copied(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.randn(5, 30)).sum().backward()
    optimizer.step()
    path = Checkpoints(tmp_path, background=False).save({"model": model, "optimizer": optimizer}, 1)
    for part in (model, optimizer):
        name = "model" if part is model else "optimizer"
        was = {place: (t.data_ptr(), t.clone()) for place, t in manifests.tensors(part.state_dict())}
        for _, tensor in manifests.tensors(part.state_dict()):
            tensor.detach().zero_()
        state = reader.read(path / f"{name}.pt", Manifest.read(path).files[f"{name}.pt"], part)
        for place, tensor in manifests.tensors(part.state_dict()):
            assert torch.equal(tensor, was[place][1]), place
        assert {place: t.data_ptr() for place, t in manifests.tensors(state)} == {place: at for place, (at, _) in was.items()}
        part.load_state_dict(state)  # type: ignore[arg-type]
        assert {place: t.data_ptr() for place, t in manifests.tensors(part.state_dict())} == {
            p: at for p, (at, _) in was.items()
        }


@pytest.mark.parametrize("large", [True, False])
def test_a_new_optimizer_goes_on_as_the_one_that_was_saved(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(reader, "_LARGE_PAGES_FROM", 0)

    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(30, 30)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.zero_grad()
        model(torch.ones(2, 30)).square().sum().backward()
        optimizer.step()

    one, two = new(), new()
    step(*one)
    Checkpoints(tmp_path, background=False).save({"model": one[0], "optimizer": one[1]}, 1)
    Checkpoints(tmp_path, background=False).load_latest({"model": two[0], "optimizer": two[1]})
    for _ in range(3):
        step(*one)
        step(*two)
    assert_same(two[0].state_dict(), one[0].state_dict())
    assert_same(two[1].state_dict(), one[1].state_dict())
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_large_pages_are_handed_out_one_after_the_other_until_there_is_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = reader._LargePages(256)
    first, second, third = (pages.take(size) for size in (100, 64, 1))
    assert [tensor.numel() for tensor in (first, second, third)] == [100, 64, 1]
    assert (second.data_ptr() - first.data_ptr(), third.data_ptr() - second.data_ptr()) == (128, 64)
    monkeypatch.setattr(reader, "_new", lambda size: size)
    assert pages.take(1) == 1


def test_tensors_of_a_module_that_share_a_part_of_their_memory_are_not_read_into() -> None:
    memory = torch.zeros(20)
    model = nn.ParameterDict({"a": memory[:6], "b": memory[4:10], "c": memory[10:], "d": torch.zeros(3)})
    assert reader.own_tensors(model).keys() == {"c", "d"}


# --- damage


def test_a_file_that_ends_while_it_is_read_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, record = saved(tmp_path, Box(torch.ones(300)))
    begin, preadv = record.layout["value"].offset or 0, os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:40]], at) if at == begin else 0)
    with pytest.raises(DamagedError, match=rf"^a file ends after {begin + 40} bytes, and was longer when it was opened$"):
        reader.read(path, record)


def test_a_byte_that_differs_when_it_is_read_is_found_and_the_tensor_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    path, record = saved(tmp_path, model)
    for name, at in record.layout.items():
        with monkeypatch.context() as patch:
            flip(patch, at.offset or 0)
            with pytest.raises(DamagedError, match=rf"part.pt is corrupted in tensor {name}$"):
                reader.read(path, record, model)
    state = reader.read(path, record, model)
    model.load_state_dict(state)


def flip(patch: pytest.MonkeyPatch, at: int) -> None:
    """Between the disk and the memory, flip a bit of the byte at this offset in every read."""
    preadv = os.preadv

    def flipped(fd: int, buffers: Any, offset: int) -> int:
        got = preadv(fd, buffers, offset)
        if offset <= at < offset + got:
            buffers[0][at - offset] ^= 4
        return got

    patch.setattr(os, "preadv", flipped)


@pytest.mark.parametrize("bit", range(16))
def test_a_bit_outside_the_tensors_that_differs_when_it_is_read_is_damage(
    bit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, record = saved(tmp_path, Box(torch.ones(300)))
    pread = os.pread

    def flipped(fd: int, size: int, at: int) -> bytes:
        data = bytearray(pread(fd, size, at))
        if at == 0:
            data[bit // 8] ^= 1 << bit % 8
        return bytes(data)

    monkeypatch.setattr(os, "pread", flipped)
    with pytest.raises(DamagedError, match=r"part.pt is corrupted outside its tensors$"):
        reader.read(path, record)


def load_with_a_flip(folder: Path, on: int) -> tuple[int, int, list[str]]:
    at = Manifest.read(folder / "step-00000002").files["model.pt"].layout["value"].offset or 0
    checkpoints, parts = Checkpoints(folder, background=False), of_step(-1)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "warn", lambda text, force=False: said.append(text))
        if comm.rank() == on:
            preadv = os.preadv

            def flipped(fd: int, buffers: Any, offset: int) -> int:
                got = preadv(fd, buffers, offset)
                if (
                    Path(f"/proc/self/fd/{fd}").readlink() == folder / "step-00000002" / "model.pt"
                    and offset <= at < offset + got
                ):
                    buffers[0][at - offset] ^= 4
                return got

            patch.setattr(os, "preadv", flipped)
        manifest = checkpoints.load_latest(parts)
    assert manifest is not None
    return manifest.step, step_in(parts), said


@pytest.mark.parametrize("on", [0, 1])
def test_a_bit_that_flips_on_the_way_to_one_rank_has_all_ranks_load_the_one_before(on: int, tmp_path: Path) -> None:
    for step in (1, 2):
        path = Checkpoints(tmp_path, background=False).save(of_step(step), step)
    where = ", as read by rank 1" if on else ""
    said = [f"skipped a checkpoint: {path / 'model.pt'} is corrupted in tensor value{where}"]
    assert on_ranks(2, load_with_a_flip, tmp_path, on) == [(1, 1, said), (1, 1, [])]


def test_a_damaged_file_that_no_part_asks_for_is_damage_too(tmp_path: Path) -> None:
    for step in (1, 2):
        path = Checkpoints(tmp_path, background=False).save({**of_step(step), "more": Box(torch.ones(100))}, step)
    data = bytearray((path / "more.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "more.pt").write_bytes(data)
    parts = of_step(-1)
    manifest = Checkpoints(tmp_path, background=False).load_latest(parts)
    assert manifest is not None
    assert manifest.step == step_in(parts) == 1


class Failing(Box):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if comm.rank() == 1:
            raise AttributeError("no such thing")


def load_failing(folder: Path) -> str:
    try:
        Checkpoints(folder, background=False).load_latest({**of_step(0), "model": Failing()})
    except AttributeError as error:
        comm.barrier()  # no rank waits for the others
        return str(error)
    return ""


def test_whatever_one_rank_raises_while_it_loads_all_raise(tmp_path: Path) -> None:
    Checkpoints(tmp_path, background=False).save(of_step(1), 1)
    assert on_ranks(2, load_failing, tmp_path) == ["no such thing"] * 2


def test_a_pickle_that_would_call_something_calls_nothing(tmp_path: Path) -> None:
    path, record = saved(tmp_path, Box(torch.ones(3)))

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "called"),)

    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        contents = {name: reader._entry(archive, name, file.fileno()) for name in archive.namelist()}
    contents[next(name for name in contents if name.endswith("data.pkl"))] = pickle.dumps({"value": Evil()}, 2)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    rest = manifests.rest_sum(path, {})
    forged = replace(record, bytes=path.stat().st_size, tensors={}, layout={}, rest=rest)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        reader.read(path, forged)
    assert not (tmp_path / "called").exists()


def test_a_file_from_before_its_rest_had_a_sum_is_read(tmp_path: Path) -> None:
    path, record = saved(tmp_path, Box(torch.ones(300)))
    old = FileRecord(record.bytes, manifests.file_sum(path), record.tensors)
    assert torch.equal(reader.read(path, old)["value"], torch.ones(300))
    data = bytearray(path.read_bytes())
    data[record.layout["value"].offset or 0] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="corrupted in tensor value"):
        reader.read(path, old)


def test_a_tensor_that_ends_behind_its_storage_is_not_read() -> None:
    typed: Any = SimpleNamespace(storage=SimpleNamespace(memory=torch.zeros(8, dtype=torch.uint8)), dtype=torch.float32)
    assert reader._tensor(typed, 0, (2,), (1,), False, None).tolist() == [0.0, 0.0]
    for offset, shape, stride in ((0, (3,), (1,)), (1, (2,), (1,)), (0, (2,), (2,)), (0, (2, 2), (1, 1))):
        with pytest.raises(pickle.UnpicklingError):
            reader._tensor(typed, offset, shape, stride, False, None)
    odd: Any = SimpleNamespace(storage=SimpleNamespace(memory=torch.zeros(12, dtype=torch.uint8)), dtype=torch.float32)
    assert reader._tensor(odd, 0, (3,), (1,), False, None).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(pickle.UnpicklingError):
        reader._tensor(odd, 0, (4,), (1,), False, None)


def test_a_file_of_another_byte_order_is_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, record = saved(tmp_path, nn.Linear(3, 1))
    with path.open("rb") as file:
        reader._skeleton(file, record, nn.Linear(3, 1), {})
        monkeypatch.setattr(sys, "byteorder", "big")
        with pytest.raises(pickle.UnpicklingError, match="of another byte order"):
            reader._skeleton(file, record, nn.Linear(3, 1), {})


def test_the_ranks_of_a_node_share_its_cores_when_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "cores", lambda: 4)
    monkeypatch.setattr(comm, "local_world_size", lambda: 4)
    monkeypatch.setattr(reader, "_jobs", lambda found: [[], []])
    monkeypatch.setattr(reader, "ThreadPoolExecutor", None)  # with one thread, no pool is created
    assert reader._fill(-1, [], {}) == []
