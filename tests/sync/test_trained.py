"""What is trained changes during training, cannot be trained at all, or is trained without the strategy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

from rankwise.dist import comm
from rankwise.dist.device import is_dense
from rankwise.errors import ConfigError, StepError
from rankwise.sync import AllReduce
from rankwise.sync.reduction import RidingTail
from rankwise.sync.trained import Trained

WAYS = (False, True)


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def one_step(model: nn.Module, sync: AllReduce) -> None:
    x = torch.full((2, 4), 1.0 + comm.rank(), dtype=torch.float64)
    sync.backward(model(x).square().sum(), 2, last=True)
    sync.step()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (StepError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- changes on some ranks only


def changed_on_rank_1(how: str, overlap: bool | None) -> list[str]:
    """What the next step raises, also after a rank without a sample."""
    model, optimizer = make()
    if how == "unfrozen":
        model[0].requires_grad_(False)
    sync = AllReduce(overlap=overlap).attach(model, optimizer)
    one_step(model, sync)
    if comm.rank() == 1:
        if how in ("unfrozen", "frozen"):
            model[0].requires_grad_(how == "unfrozen")
        elif how == "replaced":
            model[2] = nn.Linear(3, 2).double()
            optimizer.add_param_group({"params": list(model[2].parameters())})
        elif how == "replaced alike":
            model[0] = nn.Linear(4, 3).double()
            optimizer.param_groups[0]["params"][:2] = list(model[0].parameters())
    return [error_of(lambda: one_step(model, sync))]


@pytest.mark.parametrize("overlap", WAYS)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("unfrozen", "0.weight is frozen on rank 0 and trained on rank 1"),
        ("frozen", "0.weight is trained on rank 0 and frozen on rank 1"),
        ("replaced", "2.weight has groups (0,) on rank 0 and (1,) on rank 1"),
        ("replaced alike", "a layer was replaced only on rank 1"),
    ],
)
def test_a_change_on_some_ranks_only_is_an_error_of_all_that_names_it(how: str, said: str, overlap: bool | None) -> None:
    for [told] in on_ranks(3, changed_on_rank_1, how, overlap):
        assert told.startswith("StepError")
        assert said in told


def replaced_without_word(overlap: bool | None) -> str:
    model, optimizer = make()
    sync = AllReduce(overlap=overlap).attach(model, optimizer)
    one_step(model, sync)
    torch.manual_seed(comm.rank())
    model[2] = nn.Linear(3, 2).double()
    optimizer.add_param_group({"params": list(model[2].parameters())})
    return error_of(lambda: one_step(model, sync))


@pytest.mark.parametrize("overlap", WAYS)
def test_a_new_layer_with_other_values_on_each_rank_is_an_error_that_says_what_to_call(overlap: bool | None) -> None:
    for told in on_ranks(2, replaced_without_word, overlap):
        assert "the new parameters (2.weight, 2.bias) had different values on the ranks" in told
        assert "sync.follow()" in told


def other_models() -> list[str]:
    model, optimizer = make()
    wide = nn.Linear(4, 3 + comm.rank()).double()
    told = [error_of(lambda: AllReduce().attach(wide, torch.optim.SGD(wide.parameters())))]
    if comm.rank() == 1:
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    return [*told, error_of(lambda: AllReduce().attach(model, optimizer))]


def test_models_that_differ_between_ranks_are_refused_at_the_start() -> None:
    for shapes, layouts in on_ranks(2, other_models):
        assert "weight has shape (3, 4) on rank 0 and (4, 4) on rank 1" in shapes
        assert "0.weight has strides (4, 1) on rank 0 and (1, 3) on rank 1" in layouts


# --- what cannot be trained


def refused(model: nn.Module, optimizer: Callable[..., Any] = torch.optim.SGD) -> str:
    return error_of(lambda: AllReduce().attach(model, optimizer(list(model.parameters()))))


def test_what_cannot_be_trained_on_ranks_is_refused_with_what_to_do() -> None:
    linear = nn.Linear(2, 2)
    assert "LBFGS evaluates the loss several times" in refused(linear, torch.optim.LBFGS)
    assert "SparseAdam requires sparse gradients" in refused(linear, torch.optim.SparseAdam)
    linear.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    assert "phase is complex (torch.complex64)" in refused(linear)
    lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    assert "1.weight has no shape yet (a lazy module)" in refused(lazy)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    assert "the optimizer has no parameter of the model" in error_of(lambda: AllReduce().attach(nn.Linear(2, 2), other))
    assert "clip_norm=nan" in error_of(lambda: AllReduce().attach(*make(), clip_norm=math.nan))
    sync = AllReduce().attach(*make())
    assert "has a model already" in error_of(lambda: sync.attach(*make()))


def sparse(overlap: bool | None) -> str:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    return error_of(lambda: AllReduce(overlap=overlap).attach(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def test_sparse_gradients_are_refused_with_ddp() -> None:
    assert on_ranks(2, sparse, False) == ["", ""]
    assert all("the gradient of 0 is sparse" in told for told in on_ranks(2, sparse, True))


# --- outside the model


def loss_with_weights(overlap: bool | None) -> tuple[list[float], list[str], list[float]]:
    """(the weights of the loss after a step, what is saved, the weights after loading it)."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    torch.manual_seed(comm.rank())
    loss = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD([{"params": net.parameters()}, {"params": loss.parameters()}], lr=0.1)
    sync = AllReduce(overlap=overlap).attach(net, optimizer)
    sync.backward(loss(net(torch.full((2, 4), 1.0 + comm.rank(), dtype=torch.float64))).square().sum(), 2, last=True)
    sync.step()
    weights, state = loss.weight.flatten().tolist(), copy.deepcopy(sync.state_dict())
    nn.init.zeros_(loss.weight)
    sync.load_state_dict(state)
    return weights, list(state["trained"]["outside"]), loss.weight.flatten().tolist()


@pytest.mark.parametrize("overlap", WAYS)
def test_parameters_of_the_optimizer_beside_the_model_are_summed_and_saved_like_the_others(overlap: bool | None) -> None:
    first, second = on_ranks(2, loss_with_weights, overlap)
    assert first == second
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    torch.manual_seed(0)
    loss = nn.Linear(3, 1).double()
    x = torch.cat([torch.full((2, 4), 1.0), torch.full((2, 4), 2.0)]).double()
    (loss(net(x)).square().sum() / 4).backward()
    assert loss.weight.grad is not None
    expected = (loss.weight - 0.1 * loss.weight.grad).flatten().tolist()
    assert first[0] == pytest.approx(expected, abs=1e-12)
    assert first[1] == ["parameter 0 of the optimizer's group 1", "parameter 1 of the optimizer's group 1"]
    assert first[2] == first[0]


# --- without the strategy


def test_gradients_that_came_by_loss_backward_are_an_error_at_that_step() -> None:
    model, optimizer = make()
    sync = AllReduce().attach(model, optimizer)
    one_step(model, sync)
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    with pytest.raises(StepError, match=r"loss.backward\(\).*sync.backward\(loss_sum, count\)"):
        sync.step()


def test_a_step_of_the_optimizer_itself_is_an_error_by_a_scaler_too() -> None:
    model, optimizer = make()
    sync = AllReduce().attach(model, optimizer)
    one_step(model, sync)
    with pytest.raises(StepError, match=r"call sync.step\(\) instead"):
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4, dtype=torch.float64)).sum()).backward()
    with pytest.raises(StepError, match=r"call sync.step\(\) instead"):
        scaler.step(optimizer)


def test_two_models_that_train_on_each_other_are_left_in_peace() -> None:
    """A GAN: the loss of one model gives gradients to the other, which zero_grad discards."""
    (one, opt_one), (two, opt_two) = make(), make()
    two[0] = nn.Linear(2, 3).double()
    opt_two = torch.optim.Adam(two.parameters())
    sync_one, sync_two = AllReduce().attach(one, opt_one), AllReduce().attach(two, opt_two)
    x = torch.ones(2, 4, dtype=torch.float64)
    for _ in range(3):
        opt_two.zero_grad()
        sync_two.backward(two(one(x).detach()).sum(), 2)
        sync_two.step()
        sync_one.backward(two(one(x)).sum(), 2)
        sync_one.step()
    plain = nn.Linear(2, 2)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(torch.ones(1, 2)).sum().backward()
    other.step()


# --- numbers


@pytest.mark.parametrize("overlap", [None, *WAYS])
def test_norms_beyond_the_squares_of_float32_are_exact(overlap: bool | None) -> None:
    for seen in on_ranks(1 if overlap is None else 2, norms, overlap):
        for (norm, finite, moved), size in zip(seen, (1e-30, 1e25, 1.0), strict=True):
            assert finite
            assert moved
            assert norm == pytest.approx(size * 3.0, rel=1e-6)


def norms(overlap: bool | None) -> list[tuple[float, bool, bool]]:
    """The mean gradient is 3 * size in one element."""
    found = []
    for size in (1e-30, 1e25, 1.0):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        sync = AllReduce(overlap=overlap).attach(model, torch.optim.SGD(model.parameters(), lr=1 / size))
        sync.backward(model(torch.full((1, 1), 3.0 * size)).sum(), 1)
        shared = sync.step().shared
        assert shared is not None
        found.append((shared.grad_norm, shared.finite, bool(model.weight.abs().item() > 2.9)))
    return found


def counts(overlap: bool | None, dtype: torch.dtype) -> list[float]:
    model = nn.Linear(2, 1).to(dtype)
    sync = AllReduce(overlap=overlap).attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
    found = []
    for count in (2**51 + 1 + comm.rank(), torch.tensor(2**51 + 1), 0.5, torch.tensor(0.25), 4095.75, 3e-9):
        sync.backward(model(torch.ones(1, 2, dtype=dtype)).sum(), count, last=True)
        found.append(sync.step().mine.total)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", WAYS)
def test_counts_are_exact_to_2_to_the_53(overlap: bool | None, dtype: torch.dtype) -> None:
    for seen in on_ranks(3, counts, overlap, dtype):
        assert seen[:5] == [3 * 2**51 + 6, 3 * 2**51 + 3, 1.5, 0.75, 3 * 4095.75]
        assert seen[5] == pytest.approx(9e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_count_on_the_device_is_written_as_one_here(dtype: torch.dtype) -> None:
    """A count on the CPU is converted to a number before."""
    for count in (0.0, 0.25, 4095.75, 4096.0, 2.0**51 + 1, 2.0**53):
        here, there = (torch.zeros(3 + RidingTail.LENGTH, dtype=dtype) for _ in range(2))
        RidingTail(here).write(count, [True, False, True], True)
        tail = RidingTail(there)
        tail.write(torch.tensor(count, dtype=torch.float64), [True, False, True], True)
        assert torch.equal(here, there)
        assert tail.read().total == count


# --- DDP's buckets


def order_of_hooks() -> list[str]:
    """What happens in a backward pass, in order: gradients of layers, and messages."""
    seen: list[str] = []
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))  # 64 MB
    sync = AllReduce(overlap=True).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, number=number: seen.append(f"layer {number}"))
    send = dist.all_reduce

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append("message")
        return send(*args, **kwargs)

    dist.all_reduce = noted
    sync.backward(model(torch.ones(1, 1024)).sum(), 1, last=True)
    sync.step()
    return seen


def test_the_first_bucket_leaves_before_the_first_layers_gradient_is_there() -> None:
    for seen in on_ranks(2, order_of_hooks):
        assert seen[0] == "layer 15"
        assert seen.index("message") < seen.index("layer 0")
        assert seen.count("message") >= 3
        assert seen[-1] == "message"


# --- layouts, saved state


def test_dense_is_what_autograd_takes_for_it() -> None:
    tensors = [
        torch.ones(2, 3), torch.ones(2, 3).t(), torch.ones(4, 6)[:, ::2], torch.ones(()), torch.ones(2, 1, 3)[:, :, :],
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(2, 1, 1, 1).to(memory_format=torch.channels_last),
        torch.ones(3, 1).expand(3, 4), torch.ones(2, 3, 4).permute(1, 2, 0),
    ]  # fmt: skip
    for tensor in tensors:
        leaf = tensor.detach().requires_grad_()
        leaf.sum().backward()
        assert leaf.grad is not None
        if is_dense(leaf):
            assert leaf.grad.stride() == leaf.stride() or leaf.grad.expand_as(leaf).is_contiguous()
    assert [is_dense(tensor) for tensor in tensors] == [True, True, False, True, True, True, True, False, True]


def test_frozen_parameters_and_modes_are_saved_and_restored(capfd: pytest.CaptureFixture[str]) -> None:
    model, optimizer = make()
    state = Trained(model, optimizer).state_dict()
    model[0].requires_grad_(False)
    model[1].eval()
    frozen = Trained(model, optimizer).state_dict()
    Trained(model, optimizer).load_state_dict(state)
    assert all(p.requires_grad for p in model.parameters())
    assert all(module.training for module in model.modules())
    assert "2 parameters unfrozen (0.weight, 0.bias)" in capfd.readouterr().out
    Trained(model, optimizer).load_state_dict(frozen)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert "2 parameters frozen (0.weight, 0.bias)" in capfd.readouterr().out
    Trained(model, optimizer).load_state_dict(frozen)
    assert capfd.readouterr().out == ""


def test_a_training_that_was_saved_during_an_evaluation_is_resumed_in_the_modes_of_the_script() -> None:
    model, optimizer = make()
    model.eval()
    state = Trained(model, optimizer).state_dict()
    model.train()
    model[1].eval()
    Trained(model, optimizer).load_state_dict(state)
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_an_optimizer_of_other_groups_is_refused_with_the_names() -> None:
    model, optimizer = make()
    state = Trained(model, optimizer).state_dict()
    one = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(
        ConfigError, match=r"trains 2.weight, 2.bias, which the script's optimizer does not train; if the run changed"
    ):
        Trained(model, one).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"trains not 2.weight, 2.bias, which the script's optimizer trains;"):
        Trained(model, optimizer).load_state_dict(Trained(model, one).state_dict())
    two = torch.optim.SGD([{"params": model[2].parameters()}, {"params": model[0].parameters()}], lr=0.1)
    with pytest.raises(ConfigError, match=r"in another order or in other groups \(sizes 4; in the script 2, 2\)"):
        Trained(model, two).load_state_dict(state)


def test_a_group_of_a_corrupted_checkpoint_is_removed_before_an_older_one_is_loaded() -> None:
    def script() -> Trained:
        model, _ = make()
        return Trained(model, torch.optim.SGD(model[0].parameters(), lr=0.1))

    trained = script()
    older = trained.state_dict()
    trained.optimizer.add_param_group({"params": list(trained.model[2].parameters())})  # type: ignore[index, union-attr]
    newer, optimizer = trained.state_dict(), trained.optimizer.state_dict()
    again = script()
    again.load_state_dict(newer)
    again.optimizer.load_state_dict(optimizer)  # makes new groups
    again.load_state_dict(older)
    assert again.state_dict() == older
    again.load_state_dict(newer)
    assert again.state_dict() == newer


# --- a process group that the script creates


def without_a_cpu_backend(meeting: str) -> list[Any]:
    dist.destroy_process_group()
    # Not the address of the first group: a rank could find its store there, which is about to be closed.
    dist.init_process_group("cuda:gloo", init_method=f"file://{meeting}", rank=comm.rank(), world_size=2)
    model, optimizer = make()
    sync = AllReduce().attach(model, optimizer)
    one_step(model, sync)
    tensor = torch.ones(2) * (comm.rank() + 1)
    comm.all_reduce(tensor)
    comm.barrier()
    gathered = [comm.all_gather_object(comm.rank()), comm.broadcast_object(comm.rank(), 1), comm.gather_object(comm.rank())]
    other = torch.full((2,), float(comm.rank()))
    comm.broadcast([other])
    return [tensor.tolist(), *gathered, other.tolist(), float(model[0].weight.sum())]


def test_a_process_group_without_a_backend_for_the_cpu_does(tmp_path: Path) -> None:
    first, second = on_ranks(2, without_a_cpu_backend, str(tmp_path / "meeting"))
    assert first[:5] == [[3.0, 3.0], [0, 1], 1, [0, 1], [0.0, 0.0]]
    assert second[:5] == [[3.0, 3.0], [0, 1], 1, [], [0.0, 0.0]]
    assert first[5] == second[5]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_model_of_torchscript_is_trained_and_its_changes_are_seen() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    trained = Trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not trained.changed()
    next(model.parameters()).requires_grad_(False)
    assert trained.changed()
