"""What a script gives a training and cannot mean: one line each, before anything is made."""

from __future__ import annotations

import pytest

from rankwise.errors import ConfigError
from rankwise.training.arguments import check_counts, check_evaluation, check_length, check_workers


def test_a_training_without_a_length_is_an_error() -> None:
    check_length(None, 5)
    check_length(5, None)
    with pytest.raises(ConfigError, match="say how long to train"):
        check_length(None, None)


def test_a_count_is_from_1_up_or_left_out() -> None:
    check_counts(max_steps=None, log_every=1)
    with pytest.raises(ConfigError, match="log_every=0: give a whole number from 1 up"):
        check_counts(max_steps=1, log_every=0)
    check_workers(0)
    with pytest.raises(ConfigError, match="workers=-1"):
        check_workers(-1)


def test_what_belongs_to_an_evaluation_needs_its_data_and_metrics_need_a_function() -> None:
    check_evaluation(None, None, None, None)
    check_evaluation([1], print, {"f1": object()}, 5)
    for fn, metrics, every in ((print, None, None), (None, {}, None), (None, None, 5)):
        with pytest.raises(ConfigError, match="evaluate nothing without eval_data"):
            check_evaluation(None, fn, metrics, every)
    with pytest.raises(ConfigError, match="eval_metrics are updated by a function of yours"):
        check_evaluation([1], None, {"f1": object()}, None)
