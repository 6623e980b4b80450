"""How often replicas are compared. tests/test_trainer_changes.py tests what a comparison finds."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import on_ranks

from rankwise.dist import comm
from rankwise.errors import StepError
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


def with_one_more_buffer(rank: int) -> str:
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    if comm.rank() == rank:
        model.register_buffer("mean", torch.zeros(2))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    check = divergence.CheckReplicas("error")
    check.attach(SimpleNamespace(sync=SimpleNamespace(held=Held("same", "same", "same"))))
    with pytest.raises(StepError) as caught:
        check.before_save(state)
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_that_only_some_ranks_have_is_a_difference(rank: int) -> None:
    for said in on_ranks(2, with_one_more_buffer, rank):
        assert said.startswith("the ranks have diverged: mean differs between rank 0 and rank 1 by at most inf after step 0;")


def of_many_parameters() -> tuple[str, int]:
    """(what is said, the bytes of the largest object that each rank sends to all)."""
    model = torch.nn.ParameterDict({f"p{k:03}": torch.nn.Parameter(torch.zeros(1)) for k in range(500)})
    if comm.rank() == 1:
        model["p077"].data.fill_(1.0)
        model["p400"].data.fill_(5.0)
    sent = 0
    gather = comm.all_gather_object

    def measured(value: Any) -> list[Any]:
        nonlocal sent
        sent = max(sent, len(pickle.dumps(value)))
        return gather(value)

    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    check = divergence.CheckReplicas("error")
    check.attach(SimpleNamespace(sync=SimpleNamespace(held=Held("same", "same", "same"))))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(divergence.comm, "all_gather_object", measured)
        with pytest.raises(StepError) as caught:
            check.before_save(state)
    return str(caught.value), sent


def test_the_first_difference_is_named_and_no_rank_gets_the_digests_of_all_others() -> None:
    for said, sent in on_ranks(2, of_many_parameters):
        assert said.startswith("the ranks have diverged: p077 differs between rank 0 and rank 1 by at most 1 after step 0;")
        assert sent < 1000
