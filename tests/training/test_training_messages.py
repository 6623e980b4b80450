"""What a training prints when it starts and ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rankwise.training import messages
from rankwise.training.state import TrainState


@pytest.fixture
def state() -> TrainState:
    model = nn.Linear(3, 1)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=12, epoch=3, metrics={"loss": 0.5})


def test_the_plan_says_how_large_the_model_is_and_the_rate_only_where_it_was_scaled(state: TrainState) -> None:
    assert messages.begun(state.model, "fp32 on cpu", "32 samples", "global batch 8", "", "") == [
        "4 parameters, fp32 on cpu; 32 samples",
        "global batch 8",
    ]
    large = nn.Linear(1000, 10)
    assert messages.begun(large, "bf16 on cuda", "a stream", "global batch 8", "ddp", "learning rate 1 x 2 = 2") == [
        "0.01 M parameters, bf16 on cuda; a stream",
        "global batch 8; ddp",
        "learning rate 1 x 2 = 2",
    ]


def test_a_resumed_run_says_what_changes_its_last_bits(state: TrainState) -> None:
    saved, now = {"torch": "2.6", "reduction": "flat"}, {"torch": "2.7", "reduction": "ddp", "new": 1}
    [first, second] = messages.resumed(state, saved, now, same_ranks=True)
    assert first == "resuming from step 12 (epoch 4)"
    assert second == (
        "results may differ from those of an uninterrupted run,\n"
        "  because this has changed: torch 2.6 -> 2.7, reduction flat -> ddp"
    )
    assert messages.resumed(state, saved, {"torch": "2.6", "reduction": "ddp"}, same_ranks=False) == [first]
    earlier, today = "one all-reduce of 9 B a step", "one all-reduce of 9 B per step"
    assert messages.resumed(state, {"reduction": earlier}, {"reduction": today}, same_ranks=True) == [first]


def test_a_stopped_run_says_what_to_type_where_no_launcher_does(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("/x/step-12")
    assert messages.stopped(state, folder, launched=True) == ["stopped after step 12, saved in /x/step-12"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "a b.py"])
    assert messages.stopped(state, folder, launched=False)[1:] == ["to resume, type:", "  python 'a b.py'"]
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert messages.stopped(state, folder, launched=False)[1:] == ["to resume, run the same code again"]


def test_the_end_says_how_many_steps_and_what_they_reached(state: TrainState) -> None:
    folder = Path("/x/step-12")
    assert (
        messages.ended(state, 0, "0:00:05 elapsed", folder) == "done: 12 steps, loss 0.5, 0:00:05 elapsed\nsaved in /x/step-12"
    )
    state.stopped, state.steps_left_out = True, 2
    assert messages.ended(state, 7, "0:00:05 elapsed", folder).startswith(
        "stopped by the script: 12 steps (7 in earlier attempts), loss 0.5,\n  2 steps skipped, 0:00:05 elapsed\n"
    )
    state.stop_reason = "eval_loss is nan"
    assert messages.ended(state, 0, "", folder).startswith("stopped by the script (eval_loss is nan): 12 steps, ")
    assert messages.best("eval_loss", folder) == "best eval_loss: /x/step-12"
    assert messages.best("eval_loss", None) == "best eval_loss: none was measured"
