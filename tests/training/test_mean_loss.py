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


class Recurrent(nn.Module):
    """Continues with the hidden state of the batch before, as for a long text that is cut into batches."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(2, 3)
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.hidden if self.hidden is not None and len(self.hidden) == len(x) else None
        self.hidden = self.cell(x, before).detach()
        self.calls = getattr(self, "calls", 0) + 1
        return self.hidden


def test_the_look_leaves_no_hidden_state_to_the_first_step() -> None:
    model = Recurrent()
    warn_of_means(lambda model, batch: (model(batch).sum(), len(batch)), model, [torch.ones(4, 2)])
    assert model.hidden is None
    assert not hasattr(model, "calls")
