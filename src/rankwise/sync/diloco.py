"""DiLoCo: local steps, and an outer optimizer that steps along their average change.

    sync = DiLoCo(every=32, lr=0.7, momentum=0.9).attach(model, optimizer, clip_norm=1.0)

Douillard et al. 2023, arXiv:2311.08105.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from rankwise.dist import comm, log
from rankwise.errors import ConfigError
from rankwise.host.arguments import FROM_ONE, FROM_ZERO, Argument, is_number, takes
from rankwise.host.text import count
from rankwise.sync.average import assign
from rankwise.sync.codecs import CODEC, Codec, codec_of
from rankwise.sync.local_sgd import LocalSGD
from rankwise.sync.reduction import Count
from rankwise.sync.strategy import LateResult, Shared, StepResult
from rankwise.training.precision import LossScale

_RATE = Argument(lambda value: is_number(value) and value > 0, "the outer learning rate, a number above 0 (0.7 is usual)")
_MOMENTUM = Argument(lambda value: is_number(value) and 0 <= value < 1, "a number of at least 0 and less than 1 (0.9 is usual)")
_RATE_OF_MANY, _MOMENTUM_OF_MANY, _MOMENTUM_OF_FEW = 0.7, 0.9, 0.5
_MANY_ROUNDS, _FEW_ROUNDS = 100, 30
"""With fewer outer steps a larger momentum overshoots: at 0.9, 12 steps had 8 times the loss, and 13 steps 0.25 nats more."""

_OF_FEW = 1.0, 0.3
"""The learning rate and the momentum of few outer steps, if neither is given: lr / (1 - momentum) is that of 0.7 and 0.5, with
less delay (benchmarks/loss_at_equal_samples: 0.015 nats less)."""


class DiLoCo(LocalSGD):
    """Every `every` steps: d = (the parameters after the last outer step) - (the average of the replicas), b = momentum b + d,
    and all replicas become the parameters after the last outer step, minus lr (d + momentum b). Each rank keeps its own state
    of the inner optimizer.

    The outer step is SGD with Nesterov's momentum. Without `lr` and `momentum` they are 0.7 and 0.9, or 1.0 and 0.3 if
    `check_length` got fewer than 100 outer steps. If only one is given, the other is lr 0.7, or momentum 0.9 (0.5 for few
    steps). A resumed run keeps the values with which it began. lr=1 and momentum=0 is LocalSGD. Buffers, and parameters
    that are new in this period, are averaged. The outer state takes twice the memory of the trained parameters, and four times
    with `compress`: bf16, fp16 or int8 (codecs.py) for d; what one message loses is added to the next.

    An outer step goes beyond the average, which helps only the steps that follow. So after an outer step `averaged` gives the
    average itself, and so does `finish`; a parameter that was changed after the outer step keeps its value. Until the next
    backward pass begins, the averages take the memory of the trained parameters once more.
    """

    _usual = 32

    @takes(every=FROM_ONE.or_none, lr=_RATE.or_none, momentum=_MOMENTUM.or_none, compress=CODEC.or_none, start=FROM_ZERO)
    def __init__(
        self,
        every: int | None = None,
        *,
        lr: float | None = None,
        momentum: float | None = None,
        compress: str | None = None,
        start: int = 0,
    ) -> None:
        super().__init__(every, start=start)
        self._compress = compress
        self._lr, self._momentum = lr, momentum  # as given
        self._is_short = False
        self._outer_lr, self._outer_momentum = self._chosen()
        self._codec: Codec | None = None
        self._error: torch.Tensor | None = None  # from a checkpoint, until there is a codec
        self._anchors: dict[str, torch.Tensor] = {}
        self._velocities: dict[str, torch.Tensor] = {}
        self._before_step: dict[str, torch.Tensor] = {}
        """The averages before the outer step that was just made; empty after the next backward pass has begun."""

        self._shown: list[str] = []
        """Inside `averaged`, and in a checkpoint until the model is loaded: the parameters that have their average before the
        outer step."""

        self._is_finishing = False

    def _chosen(self, began_without: bool = False) -> tuple[float, float]:
        """The learning rate and the momentum of the outer step. `began_without`: of a checkpoint that does not hold them."""
        if self._is_short and self._lr is None and self._momentum is None and not began_without:
            return _OF_FEW
        usual = _MOMENTUM_OF_FEW if self._is_short else _MOMENTUM_OF_MANY
        return self._lr or _RATE_OF_MANY, usual if self._momentum is None else self._momentum

    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip_norm: float | None = None,
        loss_scale: LossScale | None = None,
        typical_count: float = 1.0,
    ) -> Self:
        super().attach(model, optimizer, clip_norm=clip_norm, loss_scale=loss_scale, typical_count=typical_count)
        self._begin_period()
        return self

    def _part(self) -> None:
        super()._part()
        self._begin_period()

    def follow(self) -> None:
        super().follow()
        for name, parameter in self._trained_now().items():  # new parameters have the values of rank 0
            if not self._holds_anchor(name, parameter):
                self._anchors[name] = parameter.detach().clone()
                self._velocities.pop(name, None)
                self._before_step.pop(name, None)

    def _begin_period(self) -> None:
        self._anchors = {name: p.detach().clone() for name, p in self._trained_now().items()}

    @torch.no_grad()
    def _average(self, tensors: Sequence[torch.Tensor], share: float) -> float:
        moved = [(p, self._anchors[name]) for name, p in self._trained_now().items() if self._holds_anchor(name, p)]
        if self._compress is None or self._is_finishing or comm.is_alone() or not moved:
            return super()._average(tensors, share)
        known = {id(p) for p, _ in moved}
        apart = super()._average([t for t in tensors if id(t) not in known], share)
        deltas = torch.cat([(p - anchor).reshape(-1) for p, anchor in moved])
        deltas = deltas.mul_(share) if share else deltas.zero_()
        if self._codec is None or self._codec.error.shape != deltas.shape:
            self._codec = codec_of(self._compress, deltas, [])
            if self._error is not None and self._error.shape == deltas.shape:
                self._codec.error.copy_(self._error)
            self._error = None
        total = self._codec.sum_(deltas)
        self._codec.remember()
        for (p, anchor), piece in zip(moved, torch.split(total, [p.numel() for p, _ in moved]), strict=True):
            apart += assign(p, anchor + piece.view(p.shape))
        self._sent_bytes += self._codec.sent_bytes(deltas)
        return apart

    def _is_anchor(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether the parameter is as the last outer step has left it."""
        anchor = self._anchors.get(name)
        if anchor is None or anchor.dtype != parameter.dtype or anchor.device != parameter.device:
            return False
        return torch.equal(parameter, anchor)

    def _holds_anchor(self, name: str, parameter: torch.Tensor) -> bool:
        return name in self._anchors and self._anchors[name].shape == parameter.shape

    def backward(self, loss_sum: torch.Tensor, count: Count, *, last: bool = False) -> None:
        self._before_step = {}
        super().backward(loss_sum, count, last=last)

    def step(self) -> StepResult | LateResult:
        self._before_step = {}  # a rank without a sample has no backward pass
        return super().step()

    @torch.no_grad()
    def _apply(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._is_finishing:
            return
        for name, parameter in self._trained_now().items():
            if not self._holds_anchor(name, parameter):
                continue
            anchor = self._anchors[name]
            delta = anchor - parameter
            velocity = self._velocities.get(name)
            velocity = delta.clone() if velocity is None else velocity.mul_(self._outer_momentum).add_(delta)
            self._velocities[name] = velocity
            after = anchor - self._outer_lr * (delta + self._outer_momentum * velocity)
            self._before_step[name] = anchor.copy_(parameter)  # the memory of the old anchor
            parameter.copy_(after)
        self._begin_period()

    @torch.no_grad()
    def _show(self) -> list[str]:
        """Replace what the outer step has made of the parameters by their averages, and return the names. A parameter that was
        changed since keeps its value."""
        named = self._local.named_parameters()
        shown = [name for name in self._before_step if name in named and self._is_anchor(name, named[name])]
        for name in shown:
            named[name].copy_(self._before_step[name])
        return shown

    @torch.no_grad()
    def _hide(self, names: Sequence[str]) -> None:
        """The opposite of `_show`."""
        named = self._local.named_parameters()
        for name in names:
            if name in named and self._holds_anchor(name, named[name]):
                named[name].copy_(self._anchors[name])

    @contextlib.contextmanager
    def averaged(self, module: nn.Module | None = None) -> Iterator[None]:
        with super().averaged(module):
            outside, shown = self._shown, self._show()
            self._shown = [*outside, *shown]
            try:
                yield
            finally:
                self._hide(shown)
                self._shown = outside

    def finish(self) -> Shared | None:
        self._is_finishing = True
        try:
            rest = super().finish()
        finally:
            self._is_finishing = False
        self._show()
        self._before_step = {}
        self._begin_period()
        return rest

    def check_length(self, steps: int) -> None:
        super().check_length(steps)
        rounds = (steps - self.start) // self.every
        self._is_short = rounds < _MANY_ROUNDS
        self._outer_lr, self._outer_momentum = self._chosen()
        if self._momentum is not None and 0 < rounds < _FEW_ROUNDS and self._momentum > _MOMENTUM_OF_FEW:
            usual = _OF_FEW[1] if self._lr is None else _MOMENTUM_OF_FEW
            log.warn(
                f"DiLoCo(momentum={self._momentum:g}): the outer optimizer makes {count(rounds, 'step')} in all, too few for "
                f"this momentum; remove momentum ({usual:g} is then used), or use a smaller every, or LocalSGD"
            )

    def figures(self) -> dict[str, float]:
        kept = (*self._anchors.values(), *self._velocities.values(), *self._before_step.values())
        outer = sum(tensor.nbytes for tensor in kept)
        return {**super().figures(), "outer_state_bytes": outer + (self._codec.held_bytes if self._codec is not None else 0)}

    def describe(self) -> str:
        sent = f" ({self._compress})" if self._compress is not None else ""
        return f"{super().describe()}{sent}, outer step lr {self._outer_lr:g}, momentum {self._outer_momentum:g}"

    def state_dict(self) -> dict[str, Any]:
        outer = {"outer_lr": self._outer_lr, "outer_momentum": self._outer_momentum}
        periods = {"anchors": self._anchors, "velocities": self._velocities, "before_step": list(self._shown)}
        return {**super().state_dict(), **outer, **periods}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if "anchors" not in state:
            raise ConfigError(
                f"the checkpoint was made with another strategy, and the script now has {type(self).__name__}; "
                "use that strategy (sync=...), or start a new run with --fresh or --name NAME"
            )
        lr, momentum = self._chosen(began_without=True)
        self._outer_lr = state.get("outer_lr", lr) if self._lr is None else self._lr
        self._outer_momentum = state.get("outer_momentum", momentum) if self._momentum is None else self._momentum
        places = {name: p.device for name, p in self._local.named_parameters().items()}
        self._anchors = {name: t.to(places.get(name, t.device)).clone() for name, t in state["anchors"].items()}
        self._velocities = {name: t.to(places.get(name, t.device)).clone() for name, t in state["velocities"].items()}
        self._shown = list(state.get("before_step", ()))  # until the model is loaded too

    def rank_state_dict(self) -> dict[str, Any] | None:
        own = super().rank_state_dict()
        error = self._codec.error if self._codec is not None else self._error
        return {**own, "error": error} if own is not None and error is not None else own

    def load_rank_state_dict(self, state: dict[str, Any] | None) -> None:
        named = self._local.named_parameters()
        self._before_step = {name: named[name].detach().clone() for name in self._shown if name in named}
        super().load_rank_state_dict(state)
        self._hide(self._shown)
        self._shown = []
        self._codec, self._error = None, (state or {}).get("error")
