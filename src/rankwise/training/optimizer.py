"""Preparing an optimizer for training: checks, the fused kernel, the learning rate for more ranks.

scale_lr(optimizer, "linear");  check(model, optimizer);  fuse(optimizer)
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rankwise.dist import comm, log
from rankwise.dist.device import is_dense
from rankwise.errors import ConfigError
from rankwise.host.arguments import ANYTHING, having, one_of, takes

_FUSED = (Adam, AdamW, SGD)
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
"""The keys in a parameter group that schedulers use for learning rates."""

RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "default_min_lr", "eta_min")
"""The attributes in which torch's schedulers keep learning rates: one for each group, or one for all."""


def check(model: nn.Module, optimizer: Optimizer, scheduler: Any = None) -> None:
    """Raises ConfigError for an optimizer without a parameter of this model, and for a scheduler of another optimizer or one
    whose step requires arguments (those of timm)."""
    mine = {id(p) for p in model.parameters()}
    if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError("the optimizer has no parameter of the model; create it from model.parameters(), after the model")
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            f"the scheduler {type(scheduler).__name__} does not belong to the Trainer's optimizer; create it with the same one"
        )
    needed = [] if scheduler is None or isinstance(scheduler, LRScheduler) else _arguments_of(scheduler.step)
    if needed:
        raise ConfigError(
            f"the Trainer calls scheduler.step() without arguments, and that of {type(scheduler).__name__} requires "
            f"{' and '.join(needed)}; remove scheduler=..., and call it in an action: "
            f"actions=[lambda state: scheduler.step({', '.join(f'{name}=...' for name in needed)})]"
        )


def _arguments_of(function: Any) -> list[str]:
    """The names of the arguments that it requires."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it is not written in Python
        return []
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in plain and p.default is p.empty]


@dataclass(frozen=True)
class Scaled:
    """How the learning rate of an optimizer was scaled, by `scale_lr`."""

    rule: str
    factor: float
    before: tuple[float, ...]
    """The rate of each group."""

    def describe(self) -> str:
        after = self.before[0] * self.factor
        return f"learning rate {self.before[0]:g} x {self.factor:.4g} = {after:.4g} ({self.rule} in the ranks)"


_scaled: WeakKeyDictionary[Optimizer, Scaled] = WeakKeyDictionary()


@takes(
    optimizer=having("an optimizer: torch.optim.SGD(model.parameters(), 0.1)", "step", "state_dict"),
    rule=one_of("linear", "sqrt"), scheduler=ANYTHING,
)  # fmt: skip
def scale_lr(optimizer: Optimizer, rule: str, scheduler: Any = None) -> None:
    """Multiply the learning rates by the number of ranks (`linear`: Goyal et al. 2017, arXiv:1706.02677, for SGD with a
    warm-up) or by its square root (`sqrt`: Krizhevsky 2014, arXiv:1404.5997), if each rank has its own `batch_size`. Call this
    once, after `init` and before the Trainer. `scheduler`: a scheduler that was created before; its rates are scaled too.

    Raises ConfigError if it was called before.
    """
    if optimizer in _scaled:
        raise ConfigError(f"scale_lr was called before for this optimizer ({_scaled[optimizer].rule}); call it only once")
    rates = [_rate_of(group) for group in optimizer.param_groups]
    if None in rates:
        raise ConfigError(f"scale_lr: {type(optimizer).__name__} has no learning rate; remove scale_lr")
    ranks = comm.world().world_size
    factor = float(ranks) if rule == "linear" else math.sqrt(ranks)
    _scaled[optimizer] = Scaled(rule, factor, tuple(rate for rate in rates if rate is not None))
    _multiply(optimizer, scheduler, factor)


def scaled(optimizer: Optimizer) -> Scaled | None:
    """None if `scale_lr` was not called."""
    return _scaled.get(optimizer)


def check_scaled(optimizer: Optimizer, fixed_batch: int | None) -> None:
    """Raises ConfigError for a scaled rate if the global batch is always `fixed_batch`, on any number of ranks."""
    done = scaled(optimizer)
    if done is not None and fixed_batch is not None:
        raise ConfigError(
            f"scale_lr(optimizer, {done.rule!r}) is for batch_size: a fixed global batch of {fixed_batch} needs the same "
            "learning rate on any number of ranks; remove scale_lr, or give batch_size"
        )


def _rate_of(group: dict[str, Any]) -> float | None:
    """The rate that the script has set: a scheduler may have changed lr since. None for an optimizer that has none."""
    rate = group.get("initial_lr", group.get("lr"))
    return float(rate) if rate is not None else None


def fuse(optimizer: Optimizer) -> None:
    """Use the fused kernel of the optimizer if it has one and the user has given neither `fused` nor `foreach`.

    One pass over the parameters instead of a dozen; on a CPU this saves a fifth of a whole step with Adam. The last bits are
    not those of the other kernel. It takes no parameter whose memory has gaps (a slice of a tensor): torch's writes into them.
    """
    if type(optimizer) not in _FUSED or optimizer.state:
        return
    for group in optimizer.param_groups:
        if group["fused"] and _is_broken(optimizer, group):
            log.warn(
                "torch's fused SGD leaves parameters in bf16 and fp16 on a CPU as they are (pytorch/pytorch#191763); "
                "give SGD(..., fused=False)"
            )
        nobody_chose = group["fused"] is None and group["foreach"] is None
        plain = not group.get("differentiable") and not group.get("capturable")
        usual = all(map(_is_usual, group["params"])) and not _is_broken(optimizer, group)
        if nobody_chose and plain and usual and (not isinstance(optimizer, SGD) or _give_momentum(optimizer, group)):
            group["fused"] = True


def _is_usual(parameter: nn.Parameter) -> bool:
    """Whether the fused kernels take it. A lazy one has no shape to ask for; `attach` refuses it."""
    on_device = parameter.device.type in ("cpu", "cuda")
    return not is_lazy(parameter) and parameter.is_floating_point() and on_device and is_dense(parameter)


def _is_broken(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the fused kernel does not work for this group."""
    short = (torch.bfloat16, torch.float16)
    return isinstance(optimizer, SGD) and any(p.device.type == "cpu" and p.dtype in short for p in group["params"])


def _give_momentum(optimizer: SGD, group: dict[str, Any]) -> bool:
    """Whether SGD's fused kernel works here. It needs momenta for all parameters or for none, and fails if a parameter gets its
    first gradient later than others. So momenta start as zeros, as the first step would set them."""
    if not group["momentum"]:
        return True
    if group["dampening"] or not all(p.requires_grad for p in group["params"]):
        return False
    for parameter in group["params"]:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return True


@torch.no_grad()
def align_state(optimizer: Optimizer) -> None:
    """Lay the state of each parameter out in memory as the parameter is now. torch's fused kernels on a CPU go through the
    memory of both in order, and would pair other elements: after `model.to(memory_format=...)`, or if a script has that and
    the checkpoint was made without it. A checkpoint also has the kernel, and may have one that is broken here."""
    for group in optimizer.param_groups:
        if group.get("fused") and _is_broken(optimizer, group):
            group["fused"] = False
        for parameter in group["params"] if group.get("fused") else ():
            kept = optimizer.state.get(parameter, {})
            for key, value in kept.items():
                is_alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                if is_alike and value.stride() != parameter.stride():
                    kept[key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def is_fused(optimizer: Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def _multiply(optimizer: Optimizer, scheduler: Any, factor: float) -> None:
    """Multiply every learning rate, also those that a scheduler has stored."""
    for group in optimizer.param_groups:
        for name in _RATES:
            if name in group:
                group[name] = group[name] * factor
    _scale_rates(scheduler, factor)


def _scale_rates(scheduler: Any, factor: float) -> None:
    for name in RATES_OF_SCHEDULERS:
        rates = getattr(scheduler, name, None)
        if rates is not None:
            setattr(scheduler, name, [lr * factor for lr in rates] if isinstance(rates, list | tuple) else rates * factor)
    for value in getattr(scheduler, "__dict__", {}).values():
        for inner in value if isinstance(value, list | tuple) else ():
            if isinstance(inner, LRScheduler):  # inside a SequentialLR or a ChainedScheduler
                _scale_rates(inner, factor)


def outside(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Parameters that the optimizer trains outside the model, such as those of a loss, with a name."""
    mine = set(map(id, model.parameters()))
    return {
        f"parameter {k} of the optimizer's group {number}": p
        for number, group in enumerate(optimizer.param_groups)
        for k, p in enumerate(group["params"])
        if id(p) not in mine
    }


def named_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters of the model, including frozen ones, and others that the optimizer trains."""
    return dict(model.named_parameters()) | outside(model, optimizer)


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state of the optimizer for each parameter: `{"0.weight's exp_avg in the optimizer": tensor, ...}`."""
    names = {id(p): name for name, p in named_parameters(model, optimizer).items()}
    return {
        f"{names.get(id(p), 'a parameter')}'s {key} in the optimizer": value
        for p, kept in getattr(optimizer, "state", {}).items()
        if isinstance(p, torch.Tensor)  # some optimizers also keep numbers that belong to no parameter
        for key, value in kept.items()
    }


def settings(optimizer: Optimizer) -> dict[str, Any]:
    """The settings of the script: `{"optimizer": "AdamW", "lr": 0.1, ...}`, with `... of group k` from the second group on. The
    groups may change during a training; they are compared by the names of their parameters.

    The kernel (fused, foreach) is not included, because it changes only the last bits.
    """
    done = scaled(optimizer)
    found: dict[str, Any] = {"optimizer": type(optimizer).__name__, "lr_scale": done.rule if done is not None else "none"}
    for number, group in enumerate(optimizer.param_groups):
        where = f" of group {number}" if number else ""
        before = done.before if done is not None else ()
        found["lr" + where] = before[number] if number < len(before) else _rate_of(group)
        for name, value in group.items():
            if name in ("params", "param_names", "fused", "foreach", "capturable", *_RATES):
                continue
            found[name + where] = list(value) if isinstance(value, tuple) else value
    return {name: value for name, value in found.items() if isinstance(value, int | float | str | list | None)}
