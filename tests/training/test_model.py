"""Preparing a model for training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.utils.data import TensorDataset

import rankwise
from rankwise.dist import comm
from rankwise.dist.world import World
from rankwise.errors import ConfigError, StepError
from rankwise.sync import AllReduce, LocalSGD
from rankwise.training.mean_loss import warn_of_means
from rankwise.training.model import buffers_kept, check_synced, check_unwrapped, give_own_elements, prepare


def test_batch_statistics_of_all_ranks_need_a_sample_on_each() -> None:
    synced = nn.Sequential(nn.Linear(1, 1), nn.SyncBatchNorm(1))
    check_synced(synced, fewest=4, parts=4)
    check_synced(nn.Linear(1, 1), fewest=1, parts=4)
    with pytest.raises(ConfigError, match=r"SyncBatchNorm needs a sample on every rank.*may have only 3 "):
        check_synced(synced, fewest=3, parts=4)


@pytest.mark.parametrize("attach", [lambda model, _: check_unwrapped(model), AllReduce().attach])
def test_a_model_that_synchronises_itself_is_refused_with_what_to_give(attach: Any) -> None:
    model = nn.DataParallel(nn.Linear(1, 1))
    with pytest.raises(
        ConfigError, match=r"^the model is wrapped in DataParallel, .*; give the module inside \(model.module\)$"
    ):
        attach(model, torch.optim.Adam(model.parameters()))


class Expanded(nn.Linear):
    """With a buffer and a frozen parameter whose elements share their memory."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        value = float(comm.rank())
        self.register_buffer("position", torch.tensor([[value], [value + 1]]).expand(2, 3))
        self.scale = nn.Parameter(torch.tensor(value).expand(4), requires_grad=False)


def train_with_expanded() -> list[list[float]]:
    model = Expanded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = AllReduce().attach(model, optimizer)
    with buffers_kept(model):
        model.position.add_(1)
    sync.backward(model(torch.ones(1, 2)).sum(), 1, last=True)
    sync.step()
    model.load_state_dict(model.state_dict())
    return [model.position.flatten().tolist(), model.scale.tolist()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_expanded_tensors_are_trained_on_one_rank_as_on_many(ranks: int) -> None:
    assert on_ranks(ranks, train_with_expanded) == [[[0.0] * 3 + [1.0] * 3, [0.0] * 4]] * ranks


def test_other_tensors_stay_where_they_are() -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    model.register_buffer("turned", torch.ones(2, 3).t())
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("one", torch.ones(1).expand(1, 1))
    before = {name: tensor.data_ptr() for name, tensor in [*model[1].named_parameters(), ("turned", model.turned)]}
    give_own_elements(model)
    assert {name: t.data_ptr() for name, t in [*model[1].named_parameters(), ("turned", model.turned)]} == before
    assert model.turned.stride() == (1, 3)


def backward_inside(model: Any, batch: Any) -> Any:
    loss = model(batch).sum()
    loss.backward()
    return loss, len(batch)


def with_a_gradient_penalty(model: Any, batch: Any) -> Any:
    x = batch.requires_grad_(True)
    loss = model(x).sum()
    [gradient] = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.norm(), len(batch)


def test_a_step_function_that_calls_backward_is_an_error_and_one_that_takes_gradients_itself_is_none() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(StepError, match=r"^step_fn calls backward\(\); remove the call, and return \(loss sum, count\)"):
        warn_of_means(backward_inside, model, [torch.randn(4, 2)])
    warn_of_means(with_a_gradient_penalty, model, [torch.randn(4, 2)])


class Replaces(nn.Linear):
    """Its forward pass gives a buffer a new tensor, and counts."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.scale, self.is_first = 0, 1.0, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        self.calls, self.scale, self.is_first = self.calls + 1, self.scale * 0.5, False
        return super().forward(x)


def summed(model: Any, batch: Any) -> Any:
    return model(batch).sum(), len(batch)


def evaluated() -> bool:
    model = Replaces()
    before = model.seen
    with AllReduce().attach(model, torch.optim.SGD(model.parameters(), lr=0.1)).averaged():
        model(torch.randn(4, 2))
    return model.seen is before and bool(before == 0)


def evaluated_and_predicted(sync: Any) -> list[bool]:
    """Whether the buffer is as before: after an evaluation, a prediction."""
    comm.init()
    model = Replaces()
    strategy = sync.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before, kept = model.seen, []
    loader = rankwise.Loader(TensorDataset(torch.randn(8, 2)), global_batch_size=4, shuffle=False, max_epochs=1)
    rankwise.Evaluate(loader, lambda model, batch: {"y": (model(batch[0]).sum(), 1)}).figures(model, strategy)
    kept.append(model.seen is before and bool(before == 0))
    rankwise.predict(lambda model, batch: model(batch[0]), model, loader)
    return [*kept, model.seen is before and bool(before == 0)]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", [AllReduce, LocalSGD])
def test_an_evaluation_and_a_prediction_leave_the_buffers_that_a_forward_pass_replaces(kind: Any, n: int) -> None:
    assert on_ranks(n, evaluated_and_predicted, kind()) == [[True, True]] * n


def test_a_look_at_means_and_an_evaluation_on_two_ranks_leave_the_buffers_that_a_forward_pass_replaces() -> None:
    model = Replaces()
    before = model.seen
    warn_of_means(summed, model, [torch.randn(4, 2)])
    assert model.seen is before
    assert before == 0
    assert (model.calls, model.scale, model.is_first) == (0, 1.0, True)
    assert on_ranks(2, evaluated) == [True, True]


@pytest.mark.parametrize("batch", [torch.eye(4).to_sparse(), [torch.eye(4), torch.eye(4).to_sparse()]])
def test_a_batch_that_cannot_be_cut_is_not_looked_at(batch: Any) -> None:
    warn_of_means(lambda model, batch: (torch.ones(()), 1.0), nn.Linear(1, 1), [batch])


def test_a_batch_whose_tensors_have_several_lengths_is_not_looked_at(capfd: pytest.CaptureFixture[str]) -> None:
    """Tokens of several sequences one after the other, and the lengths; or a table of classes, and the samples."""
    for batch in ((torch.tensor([3, 2, 4]), torch.randn(9, 2)), (torch.randn(4, 2), torch.randn(7, 2))):
        warn_of_means(lambda model, batch: (model(batch[1]).sum(), len(batch[1])), nn.Linear(2, 1), [batch])
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_norm": 1.0}, "Embedding(max_norm=...) changes its weights in the forward pass"),
        ({"scale_grad_by_freq": True}, "Embedding(scale_grad_by_freq=True) divides by how often"),
        ({}, "Embedding("),
    ],
)
def test_an_embedding_that_looks_at_its_batch_is_named_on_several_ranks(
    ranks: int, given: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(nn.Embedding(3, 2, **given), torch.device("cpu"), World(0, ranks, 0, ranks, 0, source="test"))
    assert (said in capfd.readouterr().out) == (ranks == 2 and bool(given))
