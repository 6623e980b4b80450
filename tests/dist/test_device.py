"""This rank's device, and batches on it."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from rankwise.dist import accelerator
from rankwise.dist.device import local_device, tensors_in, to_device, with_values
from rankwise.dist.world import World
from rankwise.errors import ConfigError, DeviceError, WorldError
from rankwise.host import machine
from rankwise.run.directory import NodeRecord, RunDir
from rankwise.training.model import is_synced, prepare

Point = namedtuple("Point", ["x", "y"])


def world(local_rank: int, local_world_size: int, run_dir: Path | None = None) -> World:
    return World(local_rank, local_world_size, local_rank, local_world_size, 0, "test", run_dir=run_dir)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with GPUs of which torch can use some or all; returns the list of those that became the current device."""

    def fake(count: int, there: int | None = None, kind: str = "cuda") -> list[torch.device]:
        current: list[torch.device] = []
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        found = torch.device(kind) if count else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(machine, "gpus", lambda env: count if there is None else there)
        monkeypatch.setattr(accelerator, "use", current.append)
        return current

    return fake


def test_without_a_gpu_the_device_is_the_cpu(gpus: Any) -> None:
    gpus(0)
    assert local_device(world(3, 4)) == torch.device("cpu")


def test_each_rank_takes_the_gpu_of_its_local_rank(gpus: Any) -> None:
    current = gpus(4)
    assert [local_device(world(r, 4)) for r in range(4)] == [torch.device("cuda", r) for r in range(4)]
    assert current == [torch.device("cuda", r) for r in range(4)]


@pytest.mark.parametrize("kind", ["xpu", "mps", "mtia"])
def test_a_rank_takes_whatever_accelerator_torch_has(gpus: Any, kind: str) -> None:
    gpus(2, kind=kind)
    assert local_device(world(1, 2)) == torch.device(kind, 1)


def test_gpus_that_are_hidden_are_not_taken(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_device(world(1, 2)) == torch.device("cpu")


def test_a_gpu_that_torch_cannot_use_is_not_silently_the_cpu(gpus: Any) -> None:
    gpus(0, there=8)
    with pytest.raises(DeviceError, match=r"has 8 GPUs, but torch .* cannot use them: torch is built without CUDA"):
        local_device(world(0, 1))


def test_one_failed_gpu_of_several_is_named_as_such(gpus: Any) -> None:
    gpus(7, there=8)
    assert local_device(world(6, 8)) == torch.device("cuda", 6)
    failed = r"8 ranks on this node: .* has 8 GPUs, but torch can use 7 of them; nvidia-smi .*--nproc 7"
    with pytest.raises(DeviceError, match=failed):
        local_device(world(7, 8))


def test_a_rank_that_sees_one_gpu_alone_takes_that_one(gpus: Any) -> None:
    gpus(1)
    assert local_device(world(3, 4)) == torch.device("cuda", 0)  # the scheduler has given each rank its own GPU


def test_more_ranks_than_gpus_is_an_error_that_says_what_to_type(gpus: Any, tmp_path: Path) -> None:
    gpus(2)
    assert local_device(world(1, 3)) == torch.device("cuda", 1)
    with pytest.raises(WorldError, match=r"3 ranks on this node, but 2 GPUs visible; type --nproc 2.*CUDA_VISIBLE_DEVICES="):
        local_device(world(2, 3))
    gpus(1)
    RunDir(tmp_path).begin_attempt(2, ("train.py",), (NodeRecord("h", 0, 2, ""),))
    with pytest.raises(WorldError, match="2 ranks on this node, but 1 GPU visible; type --nproc 1"):
        local_device(world(0, 2, run_dir=tmp_path))


def test_a_rank_whose_agent_is_one_of_several_on_its_host_has_the_one_gpu_that_its_task_was_given(
    gpus: Any, tmp_path: Path
) -> None:
    gpus(1)
    RunDir(tmp_path).begin_attempt(2, ("train.py",), (NodeRecord("h", 0, 1, ""), NodeRecord("h", 1, 1, "")))
    assert [local_device(world(r, 2, run_dir=tmp_path)) for r in range(2)] == [torch.device("cuda", 0)] * 2


def test_every_tensor_of_a_nest_is_moved_and_the_nest_keeps_its_shape() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    nest = {"a": a, "l": [a, (b, "text", None)], "p": Point(a, 3), "m": OrderedDict(z=b)}
    meta = to_device(nest, torch.device("meta"))
    assert meta["a"].device.type == "meta"
    assert isinstance(meta["l"], list)
    assert isinstance(meta["l"][1], tuple)
    assert meta["l"][1][0].shape == (3,)
    assert meta["l"][1][0].device.type == "meta"
    assert meta["l"][1][1:] == ("text", None)
    assert isinstance(meta["p"], Point)
    assert meta["p"].x.device.type == "meta"
    assert meta["p"].y == 3
    assert meta["m"]["z"].device.type == "meta"


class Encoding(UserDict[str, Any]):
    """Like the batches of Hugging Face's tokenizers."""

    def __init__(self, data: dict[str, Any], length: int) -> None:
        super().__init__(data)
        self.length = length


class Fixed(Mapping[str, Any]):
    """A mapping that cannot be changed."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


class Named(Fixed):
    """One that is not made from its items."""

    def __init__(self, name: str, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.name = name


def test_a_mapping_of_its_own_class_keeps_its_class_and_its_attributes() -> None:
    batch = Encoding({"x": torch.ones(2), "names": ["a", "b"]}, length=2)
    moved = to_device(batch, torch.device("meta"))
    assert (type(moved), moved.length, moved["x"].device.type, moved["names"]) == (Encoding, 2, "meta", ["a", "b"])
    assert batch["x"].device.type == "cpu"
    assert [tensor.device.type for tensor in tensors_in(moved)] == ["meta"]
    counted = to_device(Counter({"x": torch.ones(2)}), torch.device("meta"))
    assert (type(counted), counted["x"].device.type) == (Counter, "meta")
    assert with_values(Counter(a=2), {"a": 3}) == Counter(a=3)
    ordered = to_device(OrderedDict(b=torch.ones(1), a=1), torch.device("meta"))
    assert (type(ordered), list(ordered), ordered["b"].device.type) == (OrderedDict, ["b", "a"], "meta")
    for made, kind in ((Fixed({"x": torch.ones(2)}), Fixed), (Named("a", {"x": torch.ones(2)}), dict)):
        fixed = to_device(made, torch.device("meta"))
        assert (type(fixed), fixed["x"].device.type) == (kind, "meta")
        assert made["x"].device.type == "cpu"


class Graph:
    """As PyG's: not a mapping, and moves itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device))


class InPlace:
    """As SpeechBrain's batch may be: it changes, and returns nothing."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> None:
        self.x = self.x.to(device)


class Metres:
    def to(self, unit: str) -> Metres:
        raise TypeError(f"a length cannot be converted to {unit}")


def test_an_object_with_a_method_to_moves_itself_and_other_objects_stay_as_they_are() -> None:
    graphs, length = [Graph(torch.ones(2)), InPlace(torch.ones(2))], Metres()
    moved = to_device({"graphs": graphs, "length": length, "kind": Graph, "name": "a"}, torch.device("meta"))
    assert [graph.x.device.type for graph in moved["graphs"]] == ["meta", "meta"]
    assert moved["length"] is length
    assert moved["kind"] is Graph
    assert moved["name"] == "a"


def test_what_is_there_already_is_not_copied() -> None:
    a = torch.ones(2)
    assert to_device([a], torch.device("cpu"))[0] is a
    assert to_device(7, torch.device("cpu")) == 7


class Moved(nn.Sequential):
    """Does not move."""

    def to(self, *_: Any, **__: Any) -> Moved:
        return self


@pytest.mark.parametrize(("kind", "works"), [("cuda", True), ("xpu", True), ("mps", False), ("cpu", False)])
def test_batch_statistics_of_all_ranks_are_refused_where_torch_cannot(kind: str, works: bool) -> None:
    model = Moved(nn.SyncBatchNorm(2))
    if works:
        assert is_synced(prepare(model, torch.device(kind), world(0, 2)))
        return
    with pytest.raises(ConfigError, match=f"works only on GPUs, and this rank uses {kind}; convert it only"):
        prepare(model, torch.device(kind), world(0, 2))


def test_packed_sequences_keep_their_sizes_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)
    moved = to_device([packed], torch.device("meta"))[0]
    assert moved.data.device.type == moved.sorted_indices.device.type == moved.unsorted_indices.device.type == "meta"
    assert moved.batch_sizes.tolist() == [2, 1, 1]
