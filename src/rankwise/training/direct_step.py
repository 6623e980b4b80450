"""The step of an optimizer, without the Python that torch runs around it.

    step = DirectStep(optimizer, own_hook);  step()

For a model of two layers, `optimizer.step()` takes 70 to 90 us on a CPU, and its kernel 10 us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

from rankwise.dist import private_names

_grad = attrgetter("grad")
_kind = attrgetter("device", "dtype")  # torch has a kernel for each

Kernel = Callable[..., object]
State = Mapping[torch.Tensor, Mapping[str, Any]]
Group = Mapping[str, Any]
Launch = Callable[..., object]
"""A kernel with its arguments. `found_inf`: a tensor; if it is 1, the kernel changes nothing."""

LaunchOf = Callable[[list[nn.Parameter], State, Group], Launch | None]


class DirectStep:
    """Does what `optimizer.step()` does, bit for bit. Of torch's optimizers it calls what is inside of the functions that torch
    wraps around each step; of the fused SGD, Adam and AdamW it calls only the kernel.

    It calls `optimizer.step()` where more must happen: with a hook that is not `own_hook`, in a profiler, if the script has
    replaced the step, and for an optimizer that is not torch's.
    """

    def __init__(self, optimizer: Optimizer, own_hook: Callable[..., Any]) -> None:
        self._optimizer, self._own_hook = optimizer, own_hook
        self._is_watched = private_names.watch_on_steps(optimizer, own_hook) or (lambda: True)
        self._steps: tuple[Any, ...] = ()
        self._inner: Callable[[Optimizer], Any] | None = None
        self._launch_of = _launch_of(type(optimizer))

    def __reduce__(self) -> tuple[Any, ...]:
        return DirectStep, (self._optimizer, self._own_hook)

    def __call__(self) -> None:
        launches = self.launches()
        if launches is not None:
            self.launch(launches)
            return
        optimizer, steps = self._optimizer, self._methods()
        if steps != self._steps:
            self._steps, self._inner = steps, self._find_inner(*steps)
        if self._inner is None or self._is_watched():
            optimizer.step()
            return
        with torch.no_grad():
            self._inner(optimizer)

    def launches(self) -> list[Launch] | None:
        """The kernels of this step with their arguments. None if torch's Python is needed for one of them, as in the first
        step."""
        if self._launch_of is None or self._inner is None or self._methods() != self._steps or self._is_watched():
            return None
        return self._launches(self._launch_of)

    @staticmethod
    def launch(launches: Sequence[Launch], **given: torch.Tensor) -> None:
        """Step with these kernels. `given`: `found_inf`."""
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            for launch in launches:
                launch(**given)
        finally:
            torch.set_grad_enabled(before)

    def _methods(self) -> tuple[Any, Any]:
        optimizer = self._optimizer
        return getattr(type(optimizer), "step", None), getattr(optimizer, "__dict__", {}).get("step")

    def _find_inner(self, of_kind: Any, own: Any) -> Callable[[Optimizer], Any] | None:
        """The step without what torch has wrapped around it. None if something else may be around it."""
        optimizer = self._optimizer
        if own is not None:  # a scheduler gives its optimizer a `step` which notes that it was called
            is_of_scheduler = getattr(own, "__globals__", None) is vars(lr_scheduler) and own.__wrapped__ is of_kind
            if not is_of_scheduler or not private_names.note_step(optimizer, own):
                return None
        return None if getattr(optimizer, "defaults", {}).get("differentiable") else private_names.unwrapped_step(of_kind)

    def _launches(self, launch_of: LaunchOf) -> list[Launch] | None:
        """The kernels with their arguments. None if torch's Python is needed for one of them."""
        found = []
        for group in self._optimizer.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if not group["fused"] or isinstance(group["lr"], torch.Tensor) or len(set(map(_kind, parameters))) > 1:
                return None
            launch = launch_of(parameters, self._optimizer.state, group)
            if launch is None:
                return None
            found.append(launch)
        return found


def _launch_of(kind: type[Optimizer]) -> LaunchOf | None:
    """A function of the parameters with a gradient, the state and a group: the kernel with its arguments, or None."""
    if kind is SGD and (sgd := private_names.fused_kernel("_fused_sgd_")) is not None:
        return partial(_sgd, sgd)
    if kind in (Adam, AdamW):
        adam, adamw, add = map(private_names.fused_kernel, ("_fused_adam_", "_fused_adamw_", "_foreach_add_"))
        if adam is not None and adamw is not None and add is not None:
            return partial(_adam, adam, adamw, add)
    return None


def _sgd(kernel: Kernel, parameters: list[nn.Parameter], state: State, group: Group) -> Launch | None:
    momenta = [state[p].get("momentum_buffer") for p in parameters] if group["momentum"] else []
    if any(momentum is None for momentum in momenta):
        return None
    return partial(
        kernel, parameters, list(map(_grad, parameters)), momenta, weight_decay=group["weight_decay"],
        momentum=group["momentum"], lr=group["lr"], dampening=group["dampening"], nesterov=group["nesterov"],
        maximize=group["maximize"], is_first_step=False,
    )  # fmt: skip


def _adam(
    adam: Kernel, adamw: Kernel, add: Kernel, parameters: list[nn.Parameter], state: State, group: Group
) -> Launch | None:
    beta1, beta2 = group["betas"]
    kept = [state[p] for p in parameters]
    if isinstance(beta1, torch.Tensor) or isinstance(beta2, torch.Tensor) or not all(kept):  # the first gradient of one
        return None
    steps = [one["step"] for one in kept]
    averages = [one["exp_avg"] for one in kept], [one["exp_avg_sq"] for one in kept]
    largest = [one["max_exp_avg_sq"] for one in kept] if group["amsgrad"] else []
    kernel = partial(
        adamw if group["decoupled_weight_decay"] else adam, parameters, list(map(_grad, parameters)), *averages, largest, steps,
        amsgrad=group["amsgrad"], lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"],
        eps=group["eps"], maximize=group["maximize"],
    )  # fmt: skip

    def launch(**given: torch.Tensor) -> None:
        add(steps, 1)
        kernel(**given)
        if (found_inf := given.get("found_inf")) is not None:
            add(steps, [found_inf] * len(steps), alpha=-1)

    return launch
