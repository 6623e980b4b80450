"""Settings of RETURNN and Horovod, translated into ours."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import on_ranks

from rankwise.errors import ConfigError
from rankwise.sync import from_returnn

AVERAGES = "steps are counted over the whole training"
SUMS = "RETURNN's Horovod summed the gradients"


@pytest.mark.parametrize(
    ("config", "kind", "settings", "noted"),
    [
        ({"use_horovod": True}, "AllReduce", {"_reduce": "sum"}, [SUMS]),
        ({"use_horovod": 1, "horovod_avg_grad": True}, "AllReduce", {"_reduce": "mean"}, []),
        ({"grad_sum": True}, "AllReduce", {"_reduce": "sum"}, [SUMS]),
        ({"horovod_avg_grad": True, "horovod_param_sync_step": 5}, "AllReduce", {}, ["horovod_param_sync_step has no effect"]),
        ({"horovod_reduce_type": "param"}, "LocalSGD", {"every": 1}, [AVERAGES]),
        ({"horovod_reduce_type": "param", "horovod_param_sync_step": 100}, "LocalSGD", {"every": 100}, [AVERAGES]),
        ({"horovod_reduce_type": "param", "horovod_param_sync_time_diff": 90.0}, "LocalSGD", {"seconds": 90.0}, [AVERAGES]),
        (
            {"horovod_reduce_type": "param", "horovod_dataset_distribution": "random_seed_offset"},
            "LocalSGD", {}, ["random_seed_offset let", AVERAGES],
        ),
        ({"torch_distributed": {}}, "AllReduce", {"_reduce": "mean", "overlap": None}, []),
        ({"torch_distributed": {"reduce_type": "grad_explicit"}}, "AllReduce", {"overlap": False}, []),
        ({"torch_distributed": {"reduce_type": "param", "param_sync_step": 7}}, "LocalSGD", {"every": 7}, [AVERAGES]),
        ({"torch_distributed": {"param_sync_step": 7}}, "AllReduce", {}, ["param_sync_step has no effect"]),
        (
            {"torch_distributed": {"options": {"find_unused_parameters": True}, "backend": "gloo"}, "batch_size": 5},
            "AllReduce", {}, ["backend is not needed", "options is not needed"],
        ),
    ],
)  # fmt: skip
def test_each_setting_becomes_a_strategy_and_what_differs_is_said(
    config: dict[str, Any], kind: str, settings: dict[str, Any], noted: list[str]
) -> None:
    sync, factor, notes = from_returnn(config)
    assert type(sync).__name__ == kind
    assert {name: getattr(sync, name) for name in settings} == settings
    assert factor == 1.0
    assert [note[: len(start)] for note, start in zip(notes, noted, strict=True)] == noted


def scaled() -> tuple[float, list[str]]:
    import rankwise

    rankwise.init()
    mapped = from_returnn({"horovod_scale_lr": True})
    return mapped.lr_factor, mapped.notes


def test_a_scaled_learning_rate_is_multiplied_and_with_summed_gradients_that_is_told() -> None:
    for factor, notes in on_ranks(3, scaled):
        assert factor == 3.0
        assert notes[-1].endswith("with SGD a step is 9 times as large as with AllReduce() and the rate that is not scaled")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "give settings of Horovod (horovod_reduce_type, ...) or torch_distributed; found: nothing"),
        ({"batch_size": 1}, "or torch_distributed; found: batch_size"),
        ({"use_horovod": True, "torch_distributed": {}}, "or torch_distributed; both are set"),
        ({"horovod_reduce_typ": "param"}, "horovod_reduce_typ: RETURNN has no such setting; did you mean horovod_reduce_type?"),
        ({"horovod_reduce_type": "mean"}, "horovod_reduce_type='mean': give one of 'grad', 'param'"),
        ({"horovod_param_sync_step": 0}, "horovod_param_sync_step=0: give a whole number of at least 1"),
        (
            {"horovod_reduce_type": "param", "horovod_param_sync_step": 9, "horovod_param_sync_time_diff": 9.0},
            "horovod_param_sync_step and horovod_param_sync_time_diff are both set; remove one",
        ),
        ({"torch_distributed": 3}, "torch_distributed=3: give a dict"),
        ({"torch_distributed": {"reduce_type": "param"}}, "reduce_type='param' needs param_sync_step"),
        ({"torch_distributed": {"bakend": 1}}, "torch_distributed: bakend: RETURNN has no such setting; did you mean backend?"),
    ],
)  # fmt: skip
def test_what_cannot_be_understood_is_an_error_that_names_it(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_returnn(config)
    assert said in str(caught.value)
