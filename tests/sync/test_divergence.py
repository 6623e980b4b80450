"""How often replicas are compared. tests/test_trainer_changes.py tests what a comparison finds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rankwise.sync import divergence
from rankwise.sync.strategy import Held
from rankwise.training.state import TrainState


def test_the_check_takes_a_hundredth_of_the_time_with_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def takes(seconds: float, result: Any = None) -> Any:
        nonlocal now
        now += seconds
        return result

    monkeypatch.setattr(divergence.time, "perf_counter", lambda: now)
    monkeypatch.setattr(divergence.comm, "is_alone", lambda: False)
    monkeypatch.setattr(divergence.comm, "all_gather_object", lambda value: takes(2.0, [value]))
    model = torch.nn.Linear(2, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    check = divergence.CheckReplicas()
    check.attach(SimpleNamespace(sync=SimpleNamespace(held=Held("same", "same", "same"), meet=lambda: takes(1.0))))
    check.begin(state)
    checked = []
    for state.step in range(1, 5000):
        takes(0.1)
        before = now
        check(state)
        if now > before:
            checked.append(state.step)
    assert checked == pytest.approx([50, 1050, 4050], abs=2)  # the first does not yet know the time of its own messages
