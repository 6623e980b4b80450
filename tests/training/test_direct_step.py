"""A direct step does what `optimizer.step()` does, bit for bit, and leaves to it what it cannot do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankwise.dist import private_names
from rankwise.training.direct_step import DirectStep

Make = Callable[[Any], Optimizer]
FLOATS = (torch.float32, torch.float32)


class Direct:
    """An optimizer with a direct step. `how`: how each step was done: by torch's "step", by what is "inner" of it, or by the
    "kernel" alone."""

    def __init__(self, make: Make, dtypes: tuple[torch.dtype, torch.dtype] = FLOATS) -> None:
        self.optimizer = make(model(dtypes).parameters())
        self.how: list[str] = []
        self.optimizer.register_step_pre_hook(self.own_hook)
        self.step = DirectStep(self.optimizer, self.own_hook)
        self._find_inner = self.step._find_inner
        self.step._find_inner = self._noted  # type: ignore[method-assign]

    def own_hook(self, *_: Any) -> None:
        self.how[-1] = "step"

    def _noted(self, *steps: Any) -> Any:
        inner = self._find_inner(*steps)

        def noted(optimizer: Optimizer) -> None:
            self.how[-1] = "inner"
            assert inner is not None
            inner(optimizer)

        return noted if inner is not None else None

    def __call__(self) -> None:
        self.how.append("kernel")
        self.step()


def model(dtypes: tuple[torch.dtype, torch.dtype] = FLOATS) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4).to(dtypes[0]), nn.Linear(4, 2).to(dtypes[1]))


def parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def give_gradients(optimizer: Optimizer, number: int, without: int | None = None) -> None:
    for place, parameter in enumerate(parameters(optimizer)):
        generator = torch.Generator().manual_seed(100 * number + place)
        gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = gradient if place != without else None


def kept(optimizer: Optimizer) -> list[tuple[str, Any]]:
    """Everything that steps change, with its bits."""
    found: list[tuple[str, Any]] = [("parameter", p.detach().numpy().tobytes()) for p in parameters(optimizer)]
    for parameter in parameters(optimizer):
        for name, value in optimizer.state[parameter].items():
            found.append((name, value.numpy().tobytes() if isinstance(value, torch.Tensor) else value))
    return found


def assert_same_steps(make: Make, how: list[str], dtypes: tuple[torch.dtype, torch.dtype] = FLOATS, **options: Any) -> None:
    plain, direct = make(model(dtypes).parameters()), Direct(make, dtypes)
    for number, _ in enumerate(how):
        for optimizer, step in ((plain, plain.step), (direct.optimizer, direct)):
            give_gradients(optimizer, number, options.get(f"without_in_{number}"))
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.9
            step()
        assert kept(direct.optimizer) == kept(plain)
    assert direct.how == how


FUSED = [
    lambda given: SGD(given, 0.1, fused=True),
    lambda given: SGD(given, 0.1, fused=True, weight_decay=0.1, maximize=True),
    lambda given: SGD(given, 0.1, fused=True, momentum=0.9),
    lambda given: SGD(given, 0.1, fused=True, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda given: SGD(given, 0.1, fused=True, momentum=0.9, dampening=0.3),
    lambda given: Adam(given, 0.1, fused=True),
    lambda given: Adam(given, 0.1, fused=True, amsgrad=True, betas=(0.8, 0.7), eps=1e-3),
    lambda given: Adam(given, 0.1, fused=True, decoupled_weight_decay=True, weight_decay=0.2),
    lambda given: AdamW(given, 0.1, fused=True, weight_decay=0.2),
    lambda given: AdamW(given, 0.1, fused=True, maximize=True, amsgrad=True),
]


@pytest.mark.parametrize("make", FUSED)
def test_a_fused_optimizer_is_its_kernel_from_the_second_step_on(make: Make) -> None:
    assert_same_steps(make, ["inner", "kernel", "kernel", "kernel"])


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_have_kernels_of_their_own(kind: Any, dtype: torch.dtype) -> None:
    def make(given: Any) -> Optimizer:
        first, *others = given
        groups = [{"params": first, "weight_decay": 0.1}, {"params": others[:1], "lr": 0.3}, {"params": others[1:]}]
        return kind(groups, 0.1, fused=True)  # type: ignore[no-any-return]

    assert_same_steps(make, ["inner", "kernel", "kernel"], (dtype, dtype), without_in_2=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda given: SGD(given, 0.1, momentum=0.9),
        lambda given: SGD(given, 0.1, foreach=True),
        lambda given: Adam(given, 0.1),
        lambda given: Adam(given, torch.tensor(0.1), fused=True),
        lambda given: RMSprop(given, 0.1),
        lambda given: Adagrad(given, 0.1),
        lambda given: NAdam(given, 0.1),
        lambda given: ASGD(given, 0.1),
    ],
)
def test_any_other_optimizer_of_torch_runs_its_own_code_without_what_is_around_it(make: Make) -> None:
    assert_same_steps(make, ["inner", "inner", "inner"])


def test_parameters_of_two_dtypes_in_a_group_are_left_to_torch() -> None:
    assert_same_steps(FUSED[8], ["inner", "inner", "inner"], (torch.float32, torch.float64))


@pytest.mark.parametrize("make", FUSED)
def test_a_parameter_without_a_gradient_stays_as_it_is(make: Make) -> None:
    assert_same_steps(make, ["inner", "kernel", "kernel"], without_in_1=1, without_in_2=0)


@pytest.mark.parametrize("make", [FUSED[0], FUSED[5], FUSED[8]])
def test_the_first_gradient_of_a_parameter_may_come_later(make: Make) -> None:
    later = "kernel" if make is FUSED[0] else "inner"
    assert_same_steps(make, ["inner", later, "kernel"], without_in_0=2)


@pytest.mark.parametrize("make", [FUSED[3], FUSED[6]])
def test_a_state_that_is_loaded_or_cleared_is_used(make: Make) -> None:
    plain, direct = make(model().parameters()), Direct(make)
    for number in range(8):
        for optimizer, step in ((plain, plain.step), (direct.optimizer, direct)):
            give_gradients(optimizer, number)
            step()
            if number == 2:
                saved = optimizer.state_dict()
                saved["param_groups"][0]["weight_decay"] = 0.3
                optimizer.load_state_dict(saved)
            if number == 5:
                optimizer.state.clear()
        assert kept(direct.optimizer) == kept(plain)
    assert direct.how == ["inner", *["kernel"] * 5, "inner", "kernel"]


# --- what torch's own step is needed for


def test_hooks_of_the_optimizer_and_of_all_optimizers_are_called_while_they_are_registered() -> None:
    direct, heard = Direct(FUSED[0]), []
    ways = {
        "before": direct.optimizer.register_step_pre_hook,
        "after": direct.optimizer.register_step_post_hook,
        "before any": register_optimizer_step_pre_hook,
        "after any": register_optimizer_step_post_hook,
    }
    give_gradients(direct.optimizer, 0)
    direct()
    for name, register in ways.items():
        direct()
        handle = register(lambda *_, name=name: heard.append(name))
        direct()
        handle.remove()
        direct()
    assert heard == list(ways)
    assert direct.how == ["inner", *["kernel", "step", "kernel"] * 4]


def test_a_profiler_sees_the_step_by_its_name() -> None:
    direct = Direct(FUSED[8])
    give_gradients(direct.optimizer, 0)
    direct()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        direct()
    direct()
    assert "Optimizer.step#AdamW.step" in [event.key for event in profiled.key_averages()]
    assert direct.how == ["inner", "step", "kernel"]


def test_a_scheduler_that_is_created_between_two_steps_does_not_warn() -> None:
    direct = Direct(FUSED[0])
    give_gradients(direct.optimizer, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        direct()
        direct()
        for _ in range(2):
            scheduler = StepLR(direct.optimizer, 1)
            for _ in range(3):
                direct()
                scheduler.step()
    assert direct.how[:5] == ["inner", "kernel", "inner", "kernel", "kernel"]
    assert "step" not in direct.how[5:]  # the second scheduler uses the step of the first


def test_a_scheduler_that_notes_steps_in_another_way_sees_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_names, "note_step", lambda *_: False)
    direct = Direct(FUSED[0])
    give_gradients(direct.optimizer, 0)
    scheduler = StepLR(direct.optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            direct()
            scheduler.step()
    assert direct.how == ["step"] * 3


def test_a_step_that_the_script_has_replaced_is_called() -> None:
    direct, heard = Direct(FUSED[0]), []
    give_gradients(direct.optimizer, 0)
    direct()
    direct()
    torchs = direct.optimizer.step

    @wraps(torchs)  # copies all attributes of torch's step
    def replaced(*args: Any) -> Any:
        heard.append("replaced")
        return torchs(*args)

    direct.optimizer.step = replaced  # type: ignore[method-assign]
    for _ in range(3):
        direct()
    assert (heard, direct.how) == (["replaced"] * 3, ["inner", "kernel", "step", "step", "step"])


def test_a_step_that_a_scheduler_has_wrapped_around_a_replaced_one_is_called() -> None:
    direct, heard = Direct(FUSED[0]), []
    give_gradients(direct.optimizer, 0)
    torchs = type(direct.optimizer).step

    def replaced(self: Optimizer, *args: Any) -> Any:
        heard.append("replaced")
        return torchs(self, *args)

    direct.optimizer.step = replaced.__get__(direct.optimizer)  # type: ignore[method-assign]
    StepLR(direct.optimizer, 1)
    for _ in range(3):
        direct()
    assert (heard, direct.how) == (["replaced"] * 3, ["step"] * 3)


def test_a_class_whose_step_was_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    direct, heard = Direct(FUSED[0]), []
    give_gradients(direct.optimizer, 0)
    torchs = SGD.step

    @wraps(torchs)
    def replaced(self: SGD, *args: Any) -> Any:
        heard.append("replaced")
        return torchs(self, *args)

    monkeypatch.setattr(SGD, "step", replaced)
    for _ in range(3):
        direct()
    assert (heard, direct.how) == (["replaced"] * 3, ["step"] * 3)


class Halving(SGD):
    """An optimizer of a script, which uses that of torch."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return super().step(closure)


class Signs(Optimizer):
    """One without torch's code."""

    def __init__(self, given: Any) -> None:
        super().__init__(given, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in parameters(self):
            parameter -= self.param_groups[0]["lr"] * parameter.grad.sign()


@pytest.mark.parametrize("make", [lambda given: Halving(given, 0.1, fused=True), Signs, lambda given: Adafactor(given, 0.1)])
def test_an_optimizer_with_other_functions_around_its_step_is_called_as_it_is(make: Make) -> None:
    assert_same_steps(make, ["step", "step", "step"])


def test_a_differentiable_optimizer_computes_with_gradients() -> None:
    direct = Direct(lambda given: SGD(given, 0.1, differentiable=True))
    for parameter in parameters(direct.optimizer):
        parameter.requires_grad_(False)
    give_gradients(direct.optimizer, 0)
    for _ in range(3):
        direct()
    assert direct.how == ["step"] * 3


def test_a_class_of_a_script_that_leaves_the_step_to_torch_runs_torchs_code() -> None:
    class Named(AdamW):
        pass

    assert_same_steps(lambda given: Named(given, 0.1, fused=True), ["inner", "inner", "inner"])


class Wrapping:
    """An optimizer that wraps another, and is none of torch's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups, self.step = optimizer.param_groups, optimizer.step


class Uninitialized(Optimizer):
    """Another, which does not call `super().__init__`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups, self.defaults = optimizer, optimizer.param_groups, optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("kind", [Wrapping, Uninitialized])
def test_an_optimizer_that_wraps_another_is_called_and_nothing_is_said(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    plain, inside = FUSED[8](model().parameters()), FUSED[8](model().parameters())
    direct = DirectStep(kind(inside), lambda: None)
    for number in range(3):
        for optimizer, step in ((plain, plain.step), (inside, direct)):
            give_gradients(optimizer, number)
            step()
    assert kept(inside) == kept(plain)
    assert capsys.readouterr().out == ""


def test_gradients_are_switched_on_again_after_a_step_that_failed() -> None:
    direct = Direct(FUSED[0])
    give_gradients(direct.optimizer, 0)
    direct()
    direct.optimizer.param_groups[0]["lr"] = "high"
    with pytest.raises(TypeError, match="lr"):
        direct()
    assert torch.is_grad_enabled()
    with torch.no_grad():
        direct.optimizer.param_groups[0]["lr"] = 0.1
        direct()
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("_optimizer_step_pre_hooks", "step"), ("_global_optimizer_post_hooks", "step"), ("_is_profiler_enabled", "step"),
        ("_use_grad_for_differentiable", "step"), ("_fused_adam_", "inner"), ("_foreach_add_", "inner"),
    ],
)  # fmt: skip
def test_a_torch_without_one_of_the_private_names_takes_the_longer_way(name: str, how: str) -> None:
    def find(owner: object, asked: str, *default: Any) -> Any:
        return default[0] if asked == name and default else getattr(owner, asked, *default)

    vars(private_names)["getattr"] = find
    try:
        assert_same_steps(FUSED[8], [how, how, how])
    finally:
        del vars(private_names)["getattr"]
