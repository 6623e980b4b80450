"""The precision of the forward pass, and the loss scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rankwise.errors import ConfigError
from rankwise.training.precision import LossScale, Precision

CPU = torch.device("cpu")


def test_an_unknown_precision_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"precision='fp8' is unknown; choose one of fp32, bf16, fp16"):
        Precision.of("fp8", CPU)


def test_fp16_is_for_the_cpu_too() -> None:
    assert Precision.of("fp16", CPU).dtype == torch.float16
    assert Precision.of("fp16", torch.device("cuda", 0)).dtype == torch.float16


def test_autocast_computes_in_its_dtype_and_leaves_the_parameters() -> None:
    model = nn.Linear(2, 2)
    with Precision.of("bf16", CPU).autocast():
        assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    with Precision.of("fp32", CPU).autocast():
        assert model(torch.ones(1, 2)).dtype == torch.float32
        assert model.double()(torch.ones(1, 2, dtype=torch.float64)).dtype == torch.float64
    assert model.weight.dtype == torch.float64


def test_the_loss_scale_halves_on_overflow_and_doubles_after_an_interval_of_finite_steps() -> None:
    scale = LossScale(8.0, growth_interval=3)
    seen = []
    for finite in [True, True, False, True, True, True, True, True, True, False, True, True]:
        scale.update(finite)
        seen.append(scale.scale)
    assert seen == [8, 8, 4, 4, 4, 8, 8, 8, 16, 8, 8, 8]
    again = LossScale(growth_interval=3)
    again.load_state_dict(scale.state_dict())
    again.update(True)
    assert again.scale == 16
    for _ in range(100):
        again.update(False)
    assert again.scale == 1.0
