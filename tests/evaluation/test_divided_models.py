"""Evaluate and predict with a model that fully_shard divides over the ranks: each of its forward passes waits for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.utils.data import TensorDataset

from rankwise import Evaluate, Loader, predict
from rankwise.dist import comm
from rankwise.errors import ConfigError


def squares(model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, int]]:
    (x,) = batch
    return {"square": (model(x).square().sum(), len(x))}


def by_fully_shard(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (comm.world_size(),)))


def flattened(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def found(samples: int, divide: Callable[[nn.Module], nn.Module]) -> tuple[float, list[float] | None]:
    """By Evaluate and by predict, of batches of 4."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    data = TensorDataset(torch.linspace(-1, 1, samples * 3).reshape(samples, 3))
    if not comm.is_alone():
        model = divide(model)
    loader = Loader(data, global_batch_size=4, shuffle=False, max_epochs=1)
    figures = Evaluate(loader, squares).figures(model)
    rows = predict(lambda model, batch: model(batch[0])[:, 0], model, loader)
    return figures["eval_square"], None if rows is None else rows.tolist()


@pytest.mark.parametrize("divide", [by_fully_shard, flattened])
def test_what_they_return_is_that_of_the_whole_model(divide: Any) -> None:
    [(square, rows)] = on_ranks(1, found, 11, divide)
    (first, first_rows), (second, second_rows), (third, third_rows) = on_ranks(3, found, 11, divide)
    assert first == second == third == pytest.approx(square)
    assert first_rows == pytest.approx(rows)
    assert second_rows is third_rows is None


def refused(samples: int, divide: Callable[[nn.Module], nn.Module]) -> str:
    with pytest.raises(ConfigError) as told:
        found(samples, divide)
    return str(told.value)


@pytest.mark.parametrize(
    ("divide", "how"), [(by_fully_shard, "0.weight is a DTensor"), (flattened, "it is in FullyShardedDataParallel")]
)
def test_a_last_batch_without_a_sample_for_each_rank_is_an_error_and_no_hang(divide: Any, how: str) -> None:
    assert on_ranks(2, refused, 9, divide) == [
        f"each rank has only a part of the model ({how}), so each needs a sample in every batch, but the last "
        "global batch may have only 1 for 2 ranks; change the batch size"
    ] * 2  # fmt: skip
