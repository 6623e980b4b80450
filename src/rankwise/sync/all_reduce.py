"""The exact gradient of the whole global batch in every step.

    sync = AllReduce().attach(model, optimizer, clip_norm=1.0)
    sync.backward(loss_sum, count);   sync.step()

The loss is a sum, not a mean: rankwise adds the sums and the counts of all ranks, and one division gives the gradient of the
mean, for any number of ranks, micro-batches and samples. Ways to add: flat.py, ddp.py, and in_place.py for a single rank.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from rankwise.dist import accelerator, comm, log, private_names
from rankwise.errors import ConfigError, RankwiseError, StepError
from rankwise.host.arguments import ANYTHING, OPTIMIZER, Argument, instance, one_of, takes
from rankwise.sync import late
from rankwise.sync.average import common_buffers
from rankwise.sync.codecs import CODEC_OF_MATRICES
from rankwise.sync.compressed import CompressedReduction, Memory
from rankwise.sync.ddp import BUCKET_BYTES, DdpReduction, is_possible
from rankwise.sync.flat import FlatReduction
from rankwise.sync.gradient_watch import GradientWatch
from rankwise.sync.in_place import InPlaceReduction, pays
from rankwise.sync.late import LateSteps
from rankwise.sync.reduction import ADDED_TO_NORM, Count, Reduction, Sums, Tail, norm_of
from rankwise.sync.strategy import Held, LateResult, Mine, NeedsAttach, Promise, Shared, StepResult, check_alike
from rankwise.sync.trained import Trained, first_apart, some
from rankwise.training.direct_step import DirectStep
from rankwise.training.mean_loss import warn_of_mean
from rankwise.training.model import buffers_kept, buffers_of_batch_norms, check_unwrapped, give_own_elements
from rankwise.training.optimizer import align_state
from rankwise.training.precision import LossScale

_LARGE = 1e18  # between 1 / _LARGE and this, a float32 norm is exact: its squares neither overflow nor vanish
_OVERLAP = Argument(
    lambda value: value is None or isinstance(value, bool),
    "True (buckets during the backward pass), False (one message after it), or None",
)
_NOTHING = Memory({}, {})
_attached: WeakSet[AllReduce] = WeakSet()
"""The strategies that a model has."""

_FOLLOW = "call sync.follow() on all ranks after a layer is replaced or added, before the next forward pass"


class AllReduce(NeedsAttach):
    """Exact data parallelism.

    `overlap`: True sends the gradients in DDP's buckets during the backward pass, False in one message after it; None overlaps
    on GPUs if the gradients need more than one bucket. On a single rank nothing is sent.

    `reduce`: "mean" over all samples; "sum": the mean times the number of ranks, as some settings of Horovod do (the sum of the
    mean gradients of the ranks, if ranks have equal counts). The result is what is clipped and logged.

    `compress`: bf16, fp16, int8 or powersgd:RANK (codecs.py); one smaller message after the backward pass. What one message
    loses is added to the message of the next step, so gradients are rounded, but nothing is lost.

    Before they are summed, gradients are divided by `typical_count`, a constant (a power of two near it changes no bit). A hook
    on a gradient that is not linear sees this scaled sum, not the mean.

    A parameter that got no gradient on any rank in a step is not changed, as in a loop on one device, and is reported once.
    Each rank has its own buffers; evaluation and saves use a copy of the main rank's (not of those whose shape differs).
    """

    promise: Promise
    held = Held("same", "own", "same")

    @takes(overlap=_OVERLAP, compress=CODEC_OF_MATRICES.or_none, reduce=one_of("mean", "sum"))
    def __init__(self, overlap: bool | None = None, compress: str | None = None, reduce: str = "mean") -> None:
        if compress is not None and overlap:
            raise ConfigError(
                f"AllReduce(overlap=True, compress={compress!r}): a compressed message is sent after the backward pass; "
                "remove one"
            )
        if compress is not None and reduce == "sum":
            raise ConfigError(f"AllReduce(reduce='sum', compress={compress!r}): only the mean can be compressed; remove one")
        self.overlap, self._compress, self._reduce = overlap, compress, reduce
        self.promise = "rounded" if compress is not None else "summed" if reduce == "sum" else "exact"
        self._memory = Memory({}, {})
        self._loaded = _NOTHING
        """Of a checkpoint, until the next step: parameters that the script has frozen are added by `follow`, after the load."""
        self._on_step: Any = None
        self._seed: torch.Tensor | None = None
        self._told_unused = False
        self._told_buffers = False
        self._own_buffers: dict[str, torch.Tensor] | None = None
        self._inside = False
        """Whether `step` is running: then it is not the user who calls the optimizer."""
        self._called = False
        """Whether `backward` was called since the last step."""
        self._watch = GradientWatch()
        self._is_one_of_several = False
        """Whether other models have a strategy, too."""
        self._replaced = False
        """Whether another strategy was attached to the same model or optimizer later."""
        self._waited_s = 0.0
        self._sent_before = 0

    @property
    def wait_s(self) -> float:
        return self._waited_s + self._reduction.wait_s

    @property
    def _together(self) -> bool:
        return not comm.is_alone()

    @takes(
        model=instance(nn.Module, "a torch.nn.Module"), optimizer=OPTIMIZER, clip_norm=ANYTHING, loss_scale=ANYTHING,
        typical_count=ANYTHING,
    )  # fmt: skip
    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip_norm: float | None = None,
        loss_scale: LossScale | None = None,
        typical_count: float = 1.0,
    ) -> Self:
        if hasattr(self, "_trained"):
            raise ConfigError("this strategy has a model already; create another one: AllReduce().attach(model, optimizer)")
        check_unwrapped(model)
        give_own_elements(model)
        if clip_norm is not None and math.isnan(clip_norm):
            raise ConfigError("clip_norm=nan has no effect; give a number, or None to clip nothing")
        if not 0 < typical_count < math.inf:
            raise ConfigError(f"typical_count={typical_count}: give about the number of samples (or tokens) of a step")
        self._clip_norm = clip_norm if clip_norm is not None and clip_norm > 0 else math.inf
        self._nominal = 2.0 ** round(math.log2(typical_count))
        self._loss_scale = loss_scale
        scale = loss_scale.scale if loss_scale is not None else None
        check_alike(self, clip_norm=self._clip_norm, typical_count=self._nominal, loss_scale=scale)
        self._trained = Trained(model, optimizer)
        if self._trained.parameters[0].device.type == "cpu" and accelerator.current(os.environ) is not None:
            log.warn("the model is on the CPU although there is a GPU; call model.to(rankwise.local_device(world)) first")
        self._optimizer = optimizer
        self._pass, self._apply = private_names.backward(), DirectStep(optimizer, self._before_step)
        self._factor = comm.world_size() if self._reduce == "sum" else 1
        self._agree(ConfigError)
        comm.broadcast([*self._trained.named().values(), *common_buffers(model).values()])
        for other in list(_attached):
            if other._trained.model is model or other._optimizer is optimizer:
                other._end_for_another()
        _attached.add(self)
        for each in _attached:
            each._is_one_of_several = len(_attached) > 1
        self._reduction, self._late = self._new_reduction(), self._new_late()
        with contextlib.suppress(AttributeError):  # an optimizer that wraps another may have no hooks
            self._on_step = optimizer.register_step_pre_hook(self._before_step)
        return self

    def _new_reduction(self) -> Reduction:
        parameters = self._trained.parameters
        self._overlaps = self._compress is None and self._takes_ddp(parameters)
        if self._compress is not None and self._together:
            compressed = CompressedReduction(parameters, self._compress)
            compressed.memory.put(self._memory if self._loaded is _NOTHING else self._loaded)
            self._memory = compressed.memory
            return compressed
        if not self._overlaps:
            in_place = not self._together and pays(parameters)
            return InPlaceReduction(parameters) if in_place else FlatReduction(parameters, self._together)
        sparse = [name for name, module in self._trained.model.named_modules() if getattr(module, "sparse", False) is True]
        if sparse:
            raise ConfigError(
                f"the gradient of {sparse[0]} is sparse, which DDP's buckets cannot hold; use AllReduce(overlap=False)"
            )
        return DdpReduction(parameters)

    def _new_late(self) -> LateSteps | None:
        if self._loss_scale is not None or self._compress is not None or not late.is_possible(self._trained.parameters):
            return None
        agree = functools.partial(self._agree, StepError)
        return LateSteps(self._apply, self._trained.parameters[0], self._factor * self._nominal, self._clip_norm, agree)

    def _settle(self) -> None:
        if self._late is not None:
            self._late.settle()

    def _takes_ddp(self, parameters: Sequence[nn.Parameter]) -> bool:
        size = sum(p.numel() * p.element_size() for p in parameters)
        is_large = parameters[0].device.type != "cpu" and size > BUCKET_BYTES
        wanted = is_large if self.overlap is None else self.overlap
        return wanted and self._together and is_possible()

    def check_length(self, steps: int) -> None:
        """Nothing to check: any number of steps is fine."""

    def describe(self) -> str:
        summed = f", times {self._factor}, the number of ranks" if self._factor > 1 else ""
        return f"gradients: {self._reduction.describe()}{summed}" if self._together else ""

    def figures(self) -> dict[str, float]:
        return {"sent_bytes": self._sent_before + self._reduction.sent_bytes} if self._together else {}

    # --- what is trained may change

    def follow(self) -> None:
        if not self._called:
            self._reduction.drop()  # an action may have called backward: the next step is of its own samples only
        if self._trained.changed():
            self._follow(told=True)

    def meet(self) -> None:
        self._settle()
        if self._together:
            self._reduction.reduce(changed=True).read()
            self._reduction.release()
            self._agree(StepError)

    def _follow(self, told: bool) -> None:
        """Announce the change with a message that has the layout of the old parameters. A rank without a change takes part in
        it, because it looks like the message of a step. Then all ranks compare what they train, and use the new parameters.
        `told`: whether the values of new parameters may be sent."""
        self._settle()
        old = self._reduction
        gradients, count = old.take_home()
        home = {id(p): g for p, g in zip(old.parameters, gradients, strict=True)}
        new = self._trained.new()
        old.reduce(changed=True).read()
        old.release()
        for parameter in old.parameters:
            parameter.grad = None
        mine = {id(p): p.grad for p in self._trained.named().values() if p.grad is not None}
        self._agree(StepError, changed=True)
        self._trained.look()
        before = [tensor.detach().clone() for tensor in new.values()]
        comm.broadcast(list(new.values()))
        alike = all(_same_bits(a, b) for a, b in zip(before, new.values(), strict=True))
        if not told and not comm.all_agree(alike):
            raise StepError(f"the new parameters ({some(list(new))}) had different values on the ranks in this step; {_FOLLOW}")
        self._waited_s += old.wait_s
        self._sent_before += old.sent_bytes
        self._reduction, self._late = self._new_reduction(), self._new_late()
        found = [home.get(id(p), mine.get(id(p))) for p in self._reduction.parameters]
        self._reduction.put(found, count)
        align_state(self._optimizer)

    def _agree(self, kind: type[RankwiseError], changed: bool = False) -> None:
        """Collective. If the ranks do not train the same parameters, all raise an error of this kind."""
        told = comm.all_gather_object((changed, self._trained.traits()))
        apart = first_apart([traits for _, traits in told])
        if apart is not None:
            raise kind(f"the ranks do not train the same: {apart}; create and change the model in the same way on all ranks")
        if len({flag for flag, _ in told}) > 1:
            which = ", ".join(str(rank) for rank, (flag, _) in enumerate(told) if flag)
            raise kind(f"a layer was replaced only on rank {which}; replace it on all ranks after the same step")

    # --- a step

    def backward(self, loss_sum: torch.Tensor, count: Count, *, last: bool = False) -> None:
        seed = self._seed
        if seed is None or seed.dtype != loss_sum.dtype or seed.device != loss_sum.device:
            self._seed = seed = self._new_seed(loss_sum)
            warn_of_mean(loss_sum, count)
        if isinstance(count, torch.Tensor):
            count = count.item() if count.device.type == "cpu" else count.detach().double()
        if last and self._overlaps:
            self._settle()  # the pass sends
            last = not self._trained.changed()
        if self._watch.is_on or self._is_one_of_several:  # of several models, one may pass through another at any time
            self._watch.before_pass(self._reduction, is_first=not self._called)
        if self._reduction.begun:
            raise StepError("backward() was called after the micro-batch with last=True; give last=True to the last one only")
        self._called = True
        self._reduction.expect(count, last)
        try:
            # Of a pass in which DDP sends, the agent takes notes: it sees only torch's function.
            run = torch.Tensor.backward if self._overlaps else self._pass
            run(loss_sum, seed)  # a seed costs no node in the graph, a division would
        except BaseException as reason:
            if count == 0 and isinstance(reason, RuntimeError) and not loss_sum.requires_grad:
                return  # nothing to learn from on this rank: no target in its samples
            self._forget_micro_batches()
            self._check_loss(loss_sum)
            raise
        if self._watch.is_on:
            self._watch.after_pass(self._reduction.parameters, count)

    def _forget_micro_batches(self) -> None:
        """An exception has ended a backward pass (out of memory, for example), which may have computed a part of the gradient.
        If the script continues, this rank has nothing of this step."""
        self._watch.forget()
        if self._reduction.begun:
            self._reduction.expect(math.nan, last=False)  # a part may have been sent: all ranks skip the step
        else:
            self._reduction.drop()

    def _end_for_another(self) -> None:
        """Another strategy takes over: each would use gradients that the other has set."""
        _attached.discard(self)
        self._replaced, self._seed = True, None
        if self._on_step is not None:
            self._on_step.remove()

    @staticmethod
    def _check_loss(loss_sum: torch.Tensor) -> None:
        if loss_sum.dim() != 0 or not loss_sum.requires_grad:
            without = "" if loss_sum.requires_grad else " and needs no gradient"
            if without and not torch.is_grad_enabled():
                without += ": gradients are switched off here (torch.set_grad_enabled(False), no_grad or inference_mode)"
            raise StepError(
                f"the loss sum must be a scalar that depends on the parameters, but it has shape {tuple(loss_sum.shape)}"
                f"{without}; return (loss.sum(), count)"
            )

    def _new_seed(self, loss_sum: torch.Tensor) -> torch.Tensor:
        if self._replaced:
            raise StepError(
                "another strategy was attached to this model or optimizer later; use that one. For two optimizers, make one "
                "optimizer of both, or, if each part of the model has its own loss, attach a strategy to each part, with "
                "its optimizer"
            )
        if loss_sum.dim() != 0:
            self._check_loss(loss_sum)
        scale = self._loss_scale.scale if self._loss_scale is not None else 1.0
        return torch.full((), scale / self._nominal, dtype=loss_sum.dtype, device=loss_sum.device)

    def step(self) -> StepResult | LateResult:
        """Collective. Reduce the gradient (one message, or DDP's buckets); the same message carries the count and all flags.

        The step is skipped on all ranks if the gradient is not finite, or the count is 0.
        """
        if not self._called and self._reduction.has_gradients():
            raise StepError("loss.backward() does not count samples; call sync.backward(loss_sum, count) instead")
        if self._watch.is_on:
            self._watch.before_step()
        self._called = False
        self._inside = True
        try:
            return self._step()
        finally:
            self._inside = False

    def _step(self) -> StepResult | LateResult:
        self._settle()
        if not self._reduction.begun and self._trained.changed():
            self._follow(told=False)
        tail = self._reduction.reduce()
        gradients, dtype = self._reduction.gradients(), torch.float32 if self._late is None else torch.float64
        norm = norm_of(gradients, dtype)
        if self._late is not None and (result := self._late.step(gradients, norm, tail)) is not None:
            self._reduction.release()
            return result
        shared, sums = self._judge(gradients, norm, tail)
        if sums.changed:  # on other ranks: all compare what they train
            self._agree(StepError)
        stepped = shared.finite and shared.total > 0
        if stepped:
            if not sums.complete:
                self._leave_alone(tail.without_gradient())
            self._apply()
        self._reduction.release()
        self._loaded = _NOTHING
        known = StepResult(Mine(shared.total, shared.grad_norm, stepped), shared)
        return known if self._late is None else LateResult(lambda: known)

    def _judge(self, gradients: list[torch.Tensor], norm_there: torch.Tensor, tail: Tail) -> tuple[Shared, Sums]:
        """Make the gradients those of the mean loss, and clip them. All ranks see the same sums, so all make the same
        decision."""
        sums = tail.read()  # waits for the device, once per step
        norm = norm_there.item()
        if not 1 / _LARGE < norm < _LARGE:
            norm = norm_of(gradients, torch.float64).item()  # float32 cannot hold the squares
        finite = math.isfinite(norm) and math.isfinite(sums.total)
        if finite and sums.total > 0:
            self._reduction.applied([] if sums.complete else tail.without_gradient())
        loss_scale = self._loss_scale.scale if self._loss_scale is not None else 1.0
        factor = self._factor * self._nominal / (loss_scale * sums.total) if sums.total > 0 else 0.0
        if self._loss_scale is not None and not sums.changed:
            self._loss_scale.update(finite)
            self._memory.scale(self._loss_scale.scale / loss_scale)
            self._seed = None
        norm *= factor
        if norm > self._clip_norm:
            factor *= self._clip_norm / (norm + ADDED_TO_NORM)
        if gradients and finite and factor != 1.0:
            private_names.scale(gradients, factor)
        return Shared(sums.total, norm, finite, int(not finite)), sums

    def _leave_alone(self, indices: Sequence[int]) -> None:
        parameters = self._reduction.parameters
        for index in indices:
            parameters[index].grad = None
        if indices and not self._told_unused:
            self._told_unused = True
            names = [self._trained.name(parameters[index]) for index in indices]
            log.warn(
                f"{len(names)} of {len(parameters)} parameters got no gradient in this step, on any rank: "
                f"{some(names)}; the optimizer does not change them (if this is intended, call "
                "requires_grad_(False) before the optimizer is created)"
            )

    # --- mistakes in the user's own loop

    def _before_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._inside:
            raise StepError(
                "optimizer.step() (or scaler.step()) uses only this rank's gradient; call sync.step() instead: it sums the "
                "gradients over all ranks, and calls the optimizer"
            )

    # --- what evaluation and saves see

    @contextlib.contextmanager
    def averaged(self, module: nn.Module | None = None) -> Iterator[None]:
        self._settle()
        model = self._trained.model if module is None else module
        if not self._together:
            yield
            return
        with buffers_kept(model) as own:
            named = common_buffers(model)
            comm.broadcast(list(named.values()))
            if module is None:
                kept = private_names.persistent_buffers(model)
                self._own_buffers = {n: own[id(b)] for n, b in kept.items() if n in named and not _same_bits(own[id(b)], b)}
                if named and not self._told_buffers:
                    self._warn_of_differing_buffers(self._own_buffers)
            try:
                yield
            finally:
                self._own_buffers = None

    def _warn_of_differing_buffers(self, own: Mapping[str, torch.Tensor]) -> None:
        """Collective. Warn once of buffers that each rank computes from its own samples. Of a BatchNorm this is known."""
        differ = {name for names in comm.all_gather_object(list(own)) for name in names}
        differ -= buffers_of_batch_norms(self._trained.model)
        if differ:
            self._told_buffers = True
            log.warn(
                f"the ranks have different values of {some(sorted(differ))}, which forward computes from each rank's own "
                "samples; evaluation and saves use those of rank 0. To use all samples, average them in an action after each "
                'step: rankwise.all_reduce(buffer, "mean")'
            )

    def finish(self) -> Shared | None:
        """Collective. All ranks get the buffers of the main rank; the user may call the optimizer again."""
        self._settle()
        comm.broadcast(list(common_buffers(self._trained.model).values()))
        if self._on_step is not None:
            self._on_step.remove()
        return None

    # --- what is saved

    def state_dict(self) -> dict[str, Any]:
        scale = {"loss_scale": self._loss_scale.state_dict()} if self._loss_scale is not None else {}
        rights = {"rights": self._by_name(self._memory.rights)} if self._memory.rights else {}
        return {"trained": self._trained.state_dict(), **scale, **rights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reduction.take_home()  # of a step that an exception has ended: its gradients belong to no step after this
        self._called = False
        self._watch.forget()
        if "trained" in state:  # older checkpoints do not have it
            self._trained.load_state_dict(state["trained"])
        self._load_loss_scale(state)
        self._loaded = Memory({}, self._by_id(state.get("rights", {})))
        self._memory.put(self._loaded)

    def _load_loss_scale(self, state: Mapping[str, Any]) -> None:
        if self._loss_scale is not None and "loss_scale" in state:
            self._loss_scale.load_state_dict(state["loss_scale"])
            self._seed = None

    def _by_name(self, kept: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: kept[id(p)] for name, p in self._trained.named().items() if id(p) in kept}

    def _by_id(self, kept: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        named = self._trained.named()
        return {id(named[name]): value for name, value in kept.items() if name in named}

    def rank_state_dict(self) -> dict[str, Any] | None:
        errors = {"errors": self._by_name(self._memory.errors)} if self._memory.errors else {}
        return {"buffers": self._own_buffers or {}, **errors} if self._own_buffers or errors else None

    def load_rank_state_dict(self, state: dict[str, Any] | None) -> None:
        named = dict(self._trained.model.named_buffers())
        for name, value in (state or {}).get("buffers", {}).items():
            if name in named:
                named[name].copy_(value)
        self._loaded = Memory(self._by_id((state or {}).get("errors", {})), self._loaded.rights)
        self._memory.put(self._loaded)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares bits: zeros of different signs differ, and two NaNs may be equal."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
