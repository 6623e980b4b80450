"""Which models and optimizers have divided tensors. That they are saved and loaded: checkpoint/test_divided_parts.py."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn

from rankwise.dist.divided import divide_of_optimizer, how_divided, is_divided, is_flattened, whole


def test_without_the_modules_of_torch_nothing_is_divided_and_they_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch.distributed.tensor", "torch.distributed.fsdp"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    model = nn.Linear(2, 2)
    assert how_divided(model) is None
    assert how_divided(torch.optim.SGD(model.parameters())) is None
    assert not is_flattened(model)
    assert not is_divided(model.weight)
    assert not {"torch.distributed.tensor", "torch.distributed.fsdp"} & sys.modules.keys()


def found_on_a_rank() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
    model[1].register_buffer("mask", distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": [nn.Parameter(model[1].mask.clone())]}], lr=1.0)
    nested = {"a": [model[1].mask, (1, "text")], "b": torch.ones(2)}
    state = {"state": {0: "of another optimizer", 2: {"step": 1, "mean": torch.arange(5.0), "row": torch.ones(3)}, 9: {}}}
    kept = divide_of_optimizer({**state, "param_groups": [{"params": [0, 1]}, {"params": [2]}]}, optimizer)["state"]
    return {
        "how": [how_divided(model), how_divided(model[0]), how_divided(optimizer), how_divided([model])],
        "whole": str(whole(nested, keep=True)),
        "taken part": str(whole(nested, keep=False)),
        "divided": {key: is_divided(value) for key, value in kept[2].items()},
        "here": kept[2]["mean"].to_local().tolist(),
        "others": [kept[0], kept[9]],
    }


def test_a_divided_tensor_is_found_put_together_and_divided_again() -> None:
    first, second = on_ranks(2, found_on_a_rank)
    assert (first.pop("here"), second.pop("here")) == ([0.0, 1.0, 2.0], [3.0, 4.0])
    assert first == second == {
        "how": ["1.mask is a DTensor", None, "a parameter of group 1 is a DTensor", None],
        "whole": "{'a': [tensor([0., 1., 2., 3., 4.]), (1, 'text')], 'b': tensor([1., 1.])}",
        "taken part": "{'a': [None, (1, 'text')], 'b': tensor([1., 1.])}",
        "divided": {"step": False, "mean": True, "row": False},
        "others": ["of another optimizer", {}],
    }  # fmt: skip
