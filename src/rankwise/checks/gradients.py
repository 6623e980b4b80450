"""Compares the gradient of one global batch on one device with that of the same batch divided among ranks; if they differ,
finds out why. Also checks the update of the optimizer.

gradients = Gradients(model, optimizer, step_fn, forward, new_sync, whole, parts)
finding = gradients.finding({"2 ranks in 2 micro-batches": micro_batches})        # collective
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from rankwise.checks.determinism import Autocasts, Draws, stream, without_dropout
from rankwise.checks.difference import TOLERANCES, Difference, difference
from rankwise.checks.finding import FAILED, KNOWN, OK, OPEN, Finding
from rankwise.checks.layers import Mixing, first_mixing
from rankwise.checks.twin import Twin
from rankwise.dist import comm, private_names
from rankwise.host.text import listed
from rankwise.sync import SyncStrategy
from rankwise.training.model import buffers_of_batch_norms
from rankwise.training.optimizer import outside

Step = Callable[[Any, Any], tuple[torch.Tensor, float | torch.Tensor]]
Found = dict[str, Any]  # gradients, by the names of their parameters

_ROUNDED = 1e-6  # relative, of an update: another kernel may add in another order, and rounds differently
ROUNDINGS = (1, 16, 32, 64, 128, 256)
"""Steps after which a strategy that rounds gradients is asked whether it has made up for its rounding. powersgd:1 sends a
matrix of rank r in r steps or more."""

_MADE_UP_FOR = 3  # the error over many steps must be this many times smaller
_OF_A_SUM = 0.01  # the rounding error of a sum over ranks in 16 bits, which no later step corrects

_ADDITIVE = 1e-3  # tolerance for a sum over samples, in any type


class Gradients:
    """Uses `step_fn` in float64 on a copy of the model if this works, otherwise `forward`, like the Trainer.

    `whole`: the global batch; `parts`: the same in micro-batches. `times`: the strategy's factor on the mean gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        step_fn: Step,
        forward: Step,
        new_sync: Callable[..., SyncStrategy],
        whole: Any,
        parts: Sequence[Any],
        times: int = 1,
    ) -> None:
        self._new_sync, self._times = new_sync, times
        twin = Twin(model, optimizer)
        self._model, self._optimizer = twin.model, twin.optimizer
        self._step, self._dtype = forward, _name(next(model.parameters()).dtype)
        self._whole, self._parts = whole, list(parts)
        # Parameters outside the model keep their type, because they are not copied.
        if not outside(model, optimizer) and _works_in_float64(model, optimizer, step_fn, whole):
            self._model = self._model.double()
            _make_float64(self._optimizer)
            self._step, self._dtype = step_fn, "float64"
        self._tolerance = TOLERANCES.get(self._dtype, 1e-3)
        self._held: tuple[type[nn.Module], ...] = ()
        """Types of layers that are in evaluation mode."""
        self._buffers: dict[str, torch.Tensor] = {}
        """What these buffers have before each micro-batch, instead of what forward has computed."""

    def finding(self, layouts: Mapping[str, Sequence[Any]]) -> Finding:
        """Collective. `layouts`: by name, the micro-batches of this rank."""
        if (drawing := self._drawing()) is not None:
            return drawing
        with self._exact():
            reference, apart = self._compare(layouts)
            if (update := self._update(layouts)) is not None:
                return update
            figures = ", ".join(f"{name}: {a}" for name, a in apart.items())
            if self._is_small(apart.values()) and (thawed := self._thawed(reference, layouts)) is not None:
                return thawed
            if self._is_small(apart.values()):
                return Finding("gradients", OK, self._evidence("equal to those of one batch on one device"), where=figures)
            evidence = self._evidence("differ from those of one batch on one device")
            if (mixing := self._mixing()) is not None and isinstance(mixing.layer, private_names.batch_norms()):
                self._held = private_names.batch_norms()
                reference, apart = self._compare(layouts)
                if self._is_small(apart.values()):
                    return replace(_known(mixing, evidence), where=figures)
            if changing := self._changing():
                self._held = private_names.batch_norms()
                self._buffers = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}
                reference, apart = self._compare(layouts)
                if self._is_small(apart.values()):
                    return replace(_known_of_buffers(changing, evidence), where=figures)
            return replace(self._why(reference, evidence), where=figures)

    def _is_small(self, apart: Any) -> bool:
        return all(a.size <= self._tolerance for a in apart)

    def _evidence(self, words: str) -> str:
        return f"{words}: {{}}; relative, in {self._dtype}, {self._tolerance:g} is allowed"

    def _drawing(self) -> Finding | None:
        """Collective. A finding if random numbers make two passes differ."""
        before = stream()
        with without_dropout(), self._exact(), Draws() as draws, Autocasts() as autocasts:
            self._run(self._model, self._whole)
        if autocasts.dtype is not None and self._dtype != "float64":  # autocast leaves float64 as it is
            self._dtype, self._tolerance = autocasts.dtype, TOLERANCES.get(autocasts.dtype, 1e-3)
        if stream() == before:
            return None
        layers = sorted({layer for passed in draws.passes for layer in passed.layers}) or ["step_fn"]
        return Finding(
            "gradients", OPEN, f"two forward passes give different results: {', '.join(layers)} draws random numbers although "
            "torch's dropout is switched off",
            "random numbers that are not torch's dropout", "switch them off (self.training) and test again",
        )  # fmt: skip

    @contextlib.contextmanager
    def _exact(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        if self._dtype == "float64":
            torch.set_default_dtype(torch.float64)
        try:
            with without_dropout():
                yield
        finally:
            torch.set_default_dtype(before)

    def rounding(self, new_sync: Callable[..., SyncStrategy], batches: Sequence[Any]) -> list[tuple[int, Difference]]:
        """Collective. For a strategy that rounds: how far its mean gradient over a number of steps at the same parameters is
        from the exact one. (steps, difference): for the first step, then until later steps have made up for the rounding."""
        with self._exact(), self._twin() as twin:
            for group in (group for group in twin.optimizer.param_groups if "lr" in group):
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
            sync = new_sync(twin.model, twin.optimizer, clip_norm=None)
            reference = self._alone([self._whole])
            found: Found = {}
            twin.optimizer.register_step_pre_hook(lambda *_: found.update(_gradients_of(twin)))
            sums: Found = dict.fromkeys(reference, 0.0)
            told: list[tuple[int, Difference]] = []
            for steps in range(1, ROUNDINGS[-1] + 1):
                for i, batch in enumerate(batches, start=1):
                    sync.backward(*self._run(twin.model, batch), last=i == len(batches))
                sync.step()
                sums = {name: total + found[name] for name, total in sums.items()}
                if steps in ROUNDINGS:
                    far = difference(reference, {name: total / steps for name, total in sums.items()})
                    told.append((steps, max(comm.all_gather_object(far), key=lambda a: a.size)))
                    if makes_up(told):
                        break
            sync.finish()
        return told

    # --- two ways to a gradient

    def _fresh(self) -> nn.Module:
        return self._twin().model

    def _twin(self) -> Twin:
        twin = Twin(self._model, self._optimizer)
        for module in twin.model.modules():
            if isinstance(module, self._held):
                module.eval()
        return twin

    def _run(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
        for name, buffer in model.named_buffers():
            if name in self._buffers and buffer.shape == self._buffers[name].shape:
                buffer.data.copy_(self._buffers[name])
        return self._step(model, as_float64(batch) if self._dtype == "float64" else batch)

    def _alone(self, batches: Sequence[Any]) -> Found:
        """The mean gradient on one device: the sum of all gradients, divided once by the sum of all counts."""
        count = 0.0
        with self._twin() as twin:
            for batch in batches:
                loss_sum, n = self._run(twin.model, batch)
                loss_sum.backward()  # type: ignore[no-untyped-call]
                count += float(n)
            return {n: self._times * g / count if count else g * math.nan for n, g in _gradients_of(twin).items()}

    def _together(self, batches: Sequence[Any]) -> Found:
        """Collective. The gradient of the strategy, over all ranks."""
        return self._stepped(batches)[0]

    def _stepped(self, batches: Sequence[Any], thawed: str | None = None) -> tuple[Found, Found]:
        """Collective. (the gradient that the strategy passes to the optimizer, the parameters after the step). `thawed`: a
        parameter that is frozen until the strategy is attached."""
        with self._twin() as twin:
            late = [p for name, p in twin.named().items() if name == thawed]
            for parameter in late:
                parameter.requires_grad_(False)
            sync = self._new_sync(twin.model, twin.optimizer, clip_norm=None)
            for parameter in late:
                parameter.requires_grad_(True)
            found: Found = {}
            twin.optimizer.register_step_pre_hook(lambda *_: found.update(_gradients_of(twin)))
            for i, batch in enumerate(batches, start=1):
                sync.backward(*self._run(twin.model, batch), last=i == len(batches))
            sync.step()
            sync.finish()
            return found, _as_arrays(twin.named())

    def _update(self, layouts: Mapping[str, Sequence[Any]]) -> Finding | None:
        """Collective. None if the update is the same as that of the optimizer's plain kernel with this gradient."""
        name, batches = next(iter(layouts.items()))
        gradient, moved = self._stepped(batches)
        with Twin(self._model, self._optimizer) as twin:
            for group in twin.optimizer.param_groups:
                group.update({kernel: False for kernel in ("fused", "foreach") if kernel in group})
            before = _as_arrays(twin.named())
            for parameter_name, parameter in twin.named().items():
                if parameter_name in gradient:
                    parameter.grad = torch.from_numpy(gradient[parameter_name]).to(parameter)
            twin.optimizer.step()
            expected = {n: a - before[n] for n, a in _as_arrays(twin.named()).items()}
        apart = difference(expected, {n: a - before[n] for n, a in moved.items()})
        far = max(comm.all_gather_object(apart), key=lambda a: a.size)
        if far.size <= max(self._tolerance, _ROUNDED):
            return None
        return Finding(
            "gradients", FAILED, f"on {name} the update differs from that of the optimizer with fused=False, foreach=False: "
            f"{far}, relative, in {self._dtype}",
            "gradients are not in memory as their parameters are, or the optimizer misses a parameter",
            "give torch's optimizer fused=False, foreach=False; and report this, with the model's memory format",
        )  # fmt: skip

    def _thawed(self, reference: Found, layouts: Mapping[str, Sequence[Any]]) -> Finding | None:
        """Collective. None if a parameter that was frozen at first gets the same gradient after it is unfrozen."""
        trained = [name for name, p in self._twin().named().items() if p.requires_grad]
        if len(trained) < 2:
            return None
        name, batches = next(iter(layouts.items()))
        found, _ = self._stepped(batches, thawed=trained[0])
        far = max(comm.all_gather_object(difference(reference, found)), key=lambda a: a.size)
        if far.size <= self._tolerance:
            return None
        return Finding(
            "gradients", FAILED, f"on {name} gradients differ when {trained[0]} is unfrozen after the start: {far}, relative, "
            f"in {self._dtype}",
            "the strategy (sync=) checks only once, when it is attached, which parameters require a gradient",
            "it must check this in each step",
        )  # fmt: skip

    def _compare(self, layouts: Mapping[str, Sequence[Any]]) -> tuple[Found, dict[str, Difference]]:
        """Collective. (the reference, the difference of each layout from it, on the rank where it is largest)."""
        reference = self._alone([self._whole])
        apart = {}
        for name, batches in layouts.items():
            told = comm.all_gather_object(difference(reference, self._together(batches)))
            apart[name] = max(told, key=lambda a: a.size)
        return reference, apart

    # --- why

    def _mixing(self) -> Mixing | None:
        model = self._fresh()
        with torch.no_grad():
            return first_mixing(model, lambda batch: self._run(model, batch), self._whole, self._parts, self._tolerance)

    def _changing(self) -> list[str]:
        """The buffers that a forward pass changes, except those of batch norms."""
        model = self._fresh()
        norms = buffers_of_batch_norms(model)
        before = {name: buffer.detach().clone() for name, buffer in model.named_buffers() if name not in norms}
        with torch.no_grad():
            self._run(model, self._whole)
        now = dict(model.named_buffers())
        return [name for name, buffer in before.items() if name in now and not torch.equal(now[name], buffer)]

    def _why(self, reference: Found, evidence: str) -> Finding:
        """Collective, because all ranks have the same difference. Looks for the cause on one device."""
        model = self._fresh()
        with torch.no_grad():
            sums, counts = zip(*[_numbers(self._run(model, b)) for b in [self._whole, *self._parts]], strict=True)
        sum_adds, count_adds = _adds_up(sums), _adds_up(counts)
        if not count_adds:
            return Finding(
                "gradients", FAILED, evidence,
                f"step_fn's count is {counts[0]:g} for the whole batch and {', '.join(f'{c:g}' for c in counts[1:])} for its "
                "parts: means of parts that differ in size are averaged (a mean of means)",
                'return the sum of the loss and the number of samples: F.cross_entropy(..., reduction="sum"), len(y)',
            )  # fmt: skip
        mixing = self._mixing()
        if mixing is not None:
            return Finding(
                "gradients", FAILED, evidence, f"{mixing}: its output for a sample depends on the others in the micro-batch",
                "normalise each sample separately (LayerNorm, GroupNorm), or compute this in the loss over all ranks",
            )  # fmt: skip
        if not sum_adds:
            return Finding(
                "gradients", FAILED, evidence,
                f"the loss is {sums[0]:.6g} for the whole batch, but {sum(sums[1:]):.6g} for its parts together: it is not a "
                "sum over samples (but a mean, a loss between samples, or a limit on their number)",
                'return the sum over the samples: reduction="sum"',
            )  # fmt: skip
        if not self._is_small([difference(reference, self._alone(self._parts))]):
            return Finding(
                "gradients", FAILED, evidence, "the parts of the batch differ even on one device: the loss adds up, its "
                "gradient does not (a detach, a clip of each part, a parameter that only some parts use)",
                "look for this in step_fn",
            )  # fmt: skip
        return Finding(
            "gradients", FAILED, evidence, "the parts add up on one device, but not over the ranks: step_fn depends on its "
            "rank, or the strategy (sync=) does not average",
            "use the same function on every rank, and let the Trainer divide the data",
        )  # fmt: skip


def makes_up(told: Sequence[tuple[int, Difference]]) -> bool:
    """Whether later steps make up for what the first one has rounded: then the error over N steps is about 1/N of its error."""
    (_, first), (steps, now) = told[0], told[-1]
    return steps > 1 and now.size <= max(first.size / _MADE_UP_FOR, _OF_A_SUM)


def _known(mixing: Mixing, evidence: str) -> Finding:
    return Finding(
        "gradients", KNOWN, f"{evidence}; equal with {type(mixing.layer).__name__} in evaluation mode",
        f"{mixing} takes its statistics from a micro-batch, so results depend on how many there are",
        "none if this is intended; otherwise GroupNorm or LayerNorm, or torch.nn.SyncBatchNorm.convert_sync_batchnorm on GPUs",
    )  # fmt: skip


def _known_of_buffers(names: Sequence[str], evidence: str) -> Finding:
    return Finding(
        "gradients", KNOWN, f"{evidence}; equal if each micro-batch begins with the same buffers",
        f"forward changes {listed(names, 3)}, so results depend on the number of micro-batches",
        "none if this is intended (spectral norm); average a statistic of the samples over the ranks after each step: "
        'rankwise.all_reduce(buffer, "mean")',
    )  # fmt: skip


def _make_float64(optimizer: Optimizer) -> None:
    """Convert its state for each parameter, but not the counts of steps."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0:
                state[name] = value.double()


def _gradients_of(twin: Twin) -> Found:
    return _as_arrays({name: p.grad for name, p in twin.named().items() if p.grad is not None})


def _as_arrays(tensors: Mapping[str, torch.Tensor]) -> Found:
    dense = {name: tensor.to_dense() if tensor.is_sparse else tensor for name, tensor in tensors.items()}
    return {name: tensor.detach().to("cpu", torch.float64).numpy().copy() for name, tensor in dense.items()}


def _works_in_float64(model: nn.Module, optimizer: Optimizer, step_fn: Step, batch: Any) -> bool:
    """Collective. Whether `step_fn` works in float64, on all ranks."""
    before = torch.get_default_dtype()
    worked = False
    with contextlib.suppress(Exception):  # if the user's function raises anything, float32 is used
        torch.set_default_dtype(torch.float64)
        loss_sum, _ = step_fn(Twin(model, optimizer).model.double(), as_float64(batch))
        loss_sum.backward()  # type: ignore[no-untyped-call]
        worked = loss_sum.dtype == torch.float64
    torch.set_default_dtype(before)
    return comm.all_agree(worked)


def as_float64(batch: Any) -> Any:
    """The same nested batch, with floating-point tensors in float64."""
    if isinstance(batch, torch.Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: as_float64(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(as_float64(value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(as_float64(value) for value in batch)
    return batch


def _numbers(result: tuple[torch.Tensor, float | torch.Tensor]) -> tuple[float, float]:
    return float(result[0]), float(result[1])


def _adds_up(values: Sequence[float]) -> bool:
    """Whether the first is the sum of the others."""
    return bool(np.isclose(values[0], sum(values[1:]), rtol=_ADDITIVE, atol=1e-12))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
