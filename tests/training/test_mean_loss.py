"""The look at the first micro-batch warns of means and constant counts only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rankwise.training.mean_loss import warn_of_means


def said_of(count: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed about a step function with these counts, for a micro-batch of four samples."""
    model = nn.Linear(2, 1)
    warn_of_means(lambda model, batch: (model(batch).sum(), count(batch)), model, [torch.ones(4, 2)])
    return "".join(capsys.readouterr())


def test_a_count_that_does_not_grow_with_the_samples_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert "step_fn returns the count 4 for a micro-batch and for each half" in said_of(lambda batch: 4, capsys)


@pytest.mark.parametrize("count", [len, lambda batch: torch.zeros(())])
def test_a_first_micro_batch_without_a_label_is_no_reason_for_a_warning(count: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert said_of(count, capsys) == ""
