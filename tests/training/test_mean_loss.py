"""The look at the first micro-batch warns of means and constant counts only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rankwise.sync import AllReduce
from rankwise.training import mean_loss
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


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def said_in_a_loop(loss: Loss, count: float | torch.Tensor, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    """What is printed in two steps without a Trainer."""
    monkeypatch.setattr(mean_loss, "_has_warned", False)
    model = nn.Linear(2, 3)
    sync = AllReduce().attach(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        sync.backward(loss(model(torch.ones(4, 2)), torch.tensor([0, 1, 2, 0])), count)
        sync.step()
    return "".join(capsys.readouterr())


MEANS: list[Loss] = [
    F.cross_entropy,
    lambda x, y: F.mse_loss(x, torch.zeros(4, 3)),
    lambda x, y: x.square().mean(),
    lambda x, y: x.square().sum(1).mean(0),
    lambda x, y: F.l1_loss(x, torch.zeros(4, 3)),
    lambda x, y: nn.BCEWithLogitsLoss()(x, torch.zeros(4, 3)),
]


@pytest.mark.parametrize("loss", MEANS)
@pytest.mark.parametrize("count", [4, torch.tensor(4)])
def test_a_mean_with_the_count_of_a_sum_is_a_warning_once(loss: Loss, count: Any, monkeypatch: Any, capsys: Any) -> None:
    said = said_in_a_loop(loss, count, monkeypatch, capsys)
    assert said == (
        "warning: the loss for backward() is a mean, and its count is 4, so the gradient is 4 times too small; give the sum "
        '(reduction="sum") with that count\n'
    )


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (lambda x, y: F.cross_entropy(x, y, reduction="sum"), 4),
        (F.cross_entropy, 1),
        (lambda x, y: F.cross_entropy(x, y) * 4, 4),
        (lambda x, y: x.square().mean(1).sum(), 4),
        (lambda x, y: x.sum(), torch.tensor(4.0)),
    ],
)
def test_a_sum_and_a_mean_that_counts_once_are_not(loss: Loss, count: Any, monkeypatch: Any, capsys: Any) -> None:
    assert said_in_a_loop(loss, count, monkeypatch, capsys) == ""
