"""Strategies by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankwise import Trainer
from rankwise.errors import ConfigError
from rankwise.sync import AllReduce, DiLoCo, LocalSGD
from rankwise.sync.names import named


def test_a_name_is_the_strategy_with_its_one_setting() -> None:
    assert type(named("all-reduce")) is AllReduce
    assert named("all-reduce").promise == "exact"
    assert named("all-reduce:powersgd:2").promise == "rounded"
    exact, local, outer = named("local-sgd"), named("local-sgd:4"), named("diloco:8")
    assert isinstance(exact, LocalSGD)
    assert isinstance(local, LocalSGD)
    assert isinstance(outer, DiLoCo)
    assert (exact.every, local.every, outer.every) == (16, 4, 8)


@pytest.mark.parametrize("name", ["", "ddp", "local-sgd:0", "local-sgd:x", "diloco:1.5", "all-reduce:int4", "LocalSGD"])
def test_another_name_is_refused_with_those_there_are(name: str, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    given: Any = (model, torch.optim.SGD(model.parameters(), 0.1), lambda model, batch: None, torch.zeros(4, 1))
    with pytest.raises(ConfigError) as caught:
        Trainer(*given, batch_size=2, max_steps=1, sync=name, run_dir=tmp_path)
    assert str(caught.value).startswith(
        f"Trainer(sync={name!r}): give a strategy: rankwise.AllReduce(), or the name of a strategy: "
    )
    with pytest.raises(ConfigError, match="all-reduce, all-reduce:bf16, local-sgd:16, diloco:32"):
        named(name)
