"""Checkpoints of models that fully_shard or parallelize_module divides over the ranks: whole files, which any ranks load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn

from rankwise import AllReduce, Checkpoints, Trainer
from rankwise.checkpoint import manifest as manifests
from rankwise.dist import comm
from rankwise.errors import ConfigError

_STEPS, _SAVED = 4, 2


def plain(seed: int = 0) -> nn.Sequential:
    """17 rows cannot be divided evenly. The statistics of the batch norm are whole on each rank, and do not change."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(17, affine=False).eval()
    return nn.Sequential(nn.Linear(8, 17), norm, nn.ReLU(), nn.Linear(17, 2), nn.Linear(2, 1))


def by_fully_shard(model: nn.Sequential) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model[4].requires_grad_(False)
    if comm.is_alone():  # a process without others has the whole model
        return model
    mesh = init_device_mesh("cpu", (comm.world_size(),))
    return fully_shard(model, mesh=mesh)


def by_tensor_parallelism(model: nn.Sequential) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (comm.world_size(),))
    return parallelize_module(model[3:], mesh, {"0": ColwiseParallel()})


def of_both(model: nn.Sequential) -> nn.Module:
    """Two meshes: torch's FSDP then divides the parts of tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (comm.world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model[3:], mesh["tensor"], {"0": ColwiseParallel()})
    return fully_shard(model[3:], mesh=mesh["data"])


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Of all ranks' parameters, buffers and moments, in one piece. Collective."""
    moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    found = [whole(tensor).detach().double().reshape(-1) for tensor in (*model.state_dict().values(), *moments)]
    return torch.cat(found).tolist()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, width: int) -> None:
    """Ranks that divide a layer among them (width 17) need the same samples."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + (comm.rank() if width == 8 else 0))
        x = torch.randn(4, width, generator=generator)
        optimizer.zero_grad()
        whole(model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


def made(divide: Any, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    model = divide(plain(seed))
    width = 8 if len(model) == 5 else 17
    return model, torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.01), width


def unbroken(folder: Path, divide: Any, background: bool) -> tuple[list[float], list[float]]:
    """(the values at the save, those at the end)."""
    model, optimizer, width = made(divide, seed=0)
    checkpoints = Checkpoints(folder, background=background)
    train(model, optimizer, range(_SAVED), width)
    at_save = values(model, optimizer)
    with torch.no_grad():
        model(torch.ones(4, width))  # an evaluation: FSDP leaves whole parameters in the model
    checkpoints.save({"model": model, "optimizer": optimizer}, _SAVED)
    train(model, optimizer, range(_SAVED, _STEPS), width)
    checkpoints.wait()
    return at_save, values(model, optimizer)


def resumed(folder: Path, divide: Any) -> tuple[list[float], list[float]]:
    """(the values after the load, those at the end)."""
    model, optimizer, width = made(divide, seed=comm.rank() + 7)
    assert Checkpoints(folder).resume({"model": model, "optimizer": optimizer}) == _SAVED
    at_load = values(model, optimizer)
    train(model, optimizer, range(_SAVED, _STEPS), width)
    return at_load, values(model, optimizer)


@pytest.mark.parametrize(
    ("divide", "ranks", "others"),
    [
        (by_fully_shard, 2, 3),
        pytest.param(by_fully_shard, 3, 1, marks=pytest.mark.stress),
        pytest.param(by_tensor_parallelism, 2, 3, marks=pytest.mark.stress),
        pytest.param(of_both, 4, 2, marks=pytest.mark.stress),
    ],
)
def test_a_divided_model_goes_on_bit_for_bit_and_any_number_of_ranks_loads_it(
    divide: Any, ranks: int, others: int, tmp_path: Path
) -> None:
    [(at_save, at_end), *rest] = on_ranks(ranks, unbroken, tmp_path, divide, ranks == 2)
    assert all(found == (at_save, at_end) for found in rest)
    assert on_ranks(ranks, resumed, tmp_path, divide) == [(at_save, at_end)] * ranks
    assert at_end != at_save
    assert [at_load for at_load, _ in on_ranks(others, resumed, tmp_path, divide)] == [at_save] * others


def saved_with_the_model_beside_it(folder: Path) -> list[float]:
    model, optimizer, width = made(by_fully_shard, seed=0)
    train(model, optimizer, range(2), width)
    with torch.no_grad():
        model(torch.ones(4, width))
    assert not any(hasattr(p, "full_tensor") for p in model.parameters())  # as after an evaluation
    Checkpoints(folder, background=False).save({"model": model, "optimizer": optimizer}, 2)
    return [value for tensor in model.state_dict().values() for value in whole(tensor).double().reshape(-1).tolist()]


def test_its_file_is_that_of_the_undivided_model(tmp_path: Path) -> None:
    [expected, _] = on_ranks(2, saved_with_the_model_beside_it, tmp_path / "checkpoints")
    model = plain(seed=5)
    model.load_state_dict(torch.load(tmp_path / "checkpoints" / "step-00000002" / "model.pt", weights_only=True))
    assert [value for tensor in model.state_dict().values() for value in tensor.double().reshape(-1).tolist()] == expected
    manifests.verify(tmp_path / "checkpoints" / "step-00000002")


def partitioned(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)


def train_with_ddp(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    wrapped = nn.parallel.DistributedDataParallel(model)
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + comm.rank()))
        optimizer.zero_grad()
        (wrapped(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]).tolist()


def unbroken_with_a_partitioned_optimizer(folder: Path) -> list[float]:
    model, optimizer = partitioned(plain())
    train_with_ddp(model, optimizer, range(_SAVED))
    checkpoints = Checkpoints(folder)
    checkpoints.save({"model": model, "optimizer": optimizer}, _SAVED)
    checkpoints.wait()
    return train_with_ddp(model, optimizer, range(_SAVED, _STEPS))


def resumed_with_a_partitioned_optimizer(folder: Path) -> list[float]:
    model, optimizer = partitioned(plain(seed=comm.rank() + 7))
    assert Checkpoints(folder).resume({"model": model, "optimizer": optimizer}) == _SAVED
    return train_with_ddp(model, optimizer, range(_SAVED, _STEPS))


def test_a_partitioned_optimizer_goes_on_bit_for_bit_and_another_number_of_ranks_loads_it(tmp_path: Path) -> None:
    expected, *rest = on_ranks(2, unbroken_with_a_partitioned_optimizer, tmp_path)
    assert rest == [expected]
    assert on_ranks(2, resumed_with_a_partitioned_optimizer, tmp_path) == [expected] * 2
    on_three = on_ranks(3, resumed_with_a_partitioned_optimizer, tmp_path)
    assert on_three[0] == on_three[1] == on_three[2] != expected  # of other batches
    state = torch.load(tmp_path / "step-00000002" / "optimizer.pt", weights_only=True)["state"]
    assert all({"exp_avg", "exp_avg_sq", "step"} <= kept.keys() for kept in state.values())
    assert len(state) == len([*plain().parameters()])


class Holder:
    """A part of the user, which returns what it holds."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {"weights": dict(self.model.named_parameters())}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def errors(folder: Path) -> dict[str, str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, optimizer, _ = made(by_fully_shard, seed=0)
    flattened = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    told = {}
    for name, call in {
        "strategy": lambda: AllReduce().attach(model, optimizer),
        "trainer": lambda: Trainer(model, optimizer, print, [1, 2, 3], global_batch_size=2),
        "strategy, partitioned": lambda: AllReduce().attach(*partitioned(plain())),
        "strategy, flattened": lambda: AllReduce().attach(flattened, torch.optim.SGD(flattened.parameters())),
        "save, flattened": lambda: Checkpoints(folder).save({"net": flattened}, 1),
        "resume, flattened": lambda: Checkpoints(folder).resume({"net": flattened}),
        "sharded": lambda: Checkpoints(folder, sharded=True).save({"net": model}, 1),
        "holder": lambda: Checkpoints(folder, background=False).save({"holder": Holder(model)}, 1),
    }.items():
        with pytest.raises(ConfigError) as caught:
            call()
        told[name] = str(caught.value)
    assert not any(folder.glob("*"))
    return told


def test_what_needs_whole_tensors_says_so_on_all_ranks_before_anything_is_trained_or_saved(tmp_path: Path) -> None:
    told, other = on_ranks(2, errors, tmp_path)
    assert told == other
    assert told["strategy"] == (
        "each rank has only a part of the model (0.weight is a DTensor), but here each rank trains a whole copy; give the "
        "model before it was divided, or train it in your own loop without a strategy, as with torchrun"
    )
    assert told["trainer"] == told["strategy"]
    assert told["strategy, partitioned"].startswith("each rank of a ZeroRedundancyOptimizer has the state of some parameters")
    assert told["strategy, flattened"] == told["strategy"].replace("0.weight is a DTensor", "it is in FullyShardedDataParallel")
    assert told["save, flattened"] == told["resume, flattened"]
    assert told["save, flattened"].endswith("divide the model with torch.distributed.fsdp.fully_shard(model) instead")
    assert told["sharded"].endswith("is saved whole, by the main rank; remove sharded=True")
    assert told["holder"].startswith("holder/weights/0.weight is a DTensor, of which this rank has only a part")
