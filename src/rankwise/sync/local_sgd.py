"""Local SGD: each rank steps alone, and every few steps all replicas become their average.

    sync = LocalSGD(every=16).attach(model, optimizer, clip_norm=1.0)
    sync.backward(loss_sum, count);   sync.step()            # every 16th step averages
    sync.finish()                                            # replicas become one

Local SGD: Stich 2019, arXiv:1805.09767; post-local SGD (`start`): Lin et al. 2020, arXiv:1808.07217.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from rankwise.dist import comm, log, private_names
from rankwise.dist.left_out import belongs_in_checkpoints
from rankwise.errors import ConfigError, StepError
from rankwise.host.arguments import FROM_ONE, FROM_ZERO, SECONDS, STEPS, one_of, takes
from rankwise.host.text import count, numbered, size
from rankwise.sync.average import average, gather_numbers, payload_bytes
from rankwise.sync.local import Local
from rankwise.sync.reduction import Count
from rankwise.sync.strategy import Held, LateResult, NeedsAttach, Promise, Shared, StepResult, check_alike
from rankwise.training.optimizer import named_state
from rankwise.training.precision import LossScale

_MEASURED = 3  # before a period in seconds is known in steps, this many averages follow one step each
_LONGEST = 1_000_000  # steps per period, at most
_TOLD = 3  # warnings about skipped steps and replicas, at most


class LocalSGD(NeedsAttach):
    """Each rank steps with the mean gradient of its own samples, which it clips itself; then the replicas are averaged.

    `every`: steps between two averages. `seconds`: the time between two averages instead; the first three averages follow one
    step each, to measure the steps. `start`: number of exact steps before the first local step (post-local SGD). `at_steps`:
    average exactly after these steps, and at the end. The weight of a replica is the number of samples (the counts) of its
    steps since the last average, so that uneven shares have the right weight. Floating buffers are averaged in the same way,
    others are copied from rank 0, except buffers that are not in the state_dict. `optimizer_state`: keep (each rank its own),
    average, or reset to that of a new optimizer at each average.

    With one step between averages, plain SGD and no clipping this is AllReduce; with momentum only if all counts are equal,
    because each rank has its own momentum.
    """

    promise: Promise = "averaged"
    held = Held("own", "own", "own")

    @takes(
        every=FROM_ONE.or_none, seconds=SECONDS.or_none, start=FROM_ZERO, at_steps=STEPS,
        optimizer_state=one_of("keep", "average", "reset"),
    )  # fmt: skip
    def __init__(
        self,
        every: int | None = None,
        *,
        seconds: float | None = None,
        start: int = 0,
        at_steps: Collection[int] = (),
        optimizer_state: str = "keep",
    ) -> None:
        name = type(self).__name__
        if sum((every is not None, seconds is not None, bool(at_steps))) > 1:
            raise ConfigError(f"{name}: every, seconds and at_steps each set when replicas are averaged; give one of them")
        self.every = every if every is not None else self._usual
        self.seconds, self.start = seconds, start
        self._at_steps = sorted(at_steps)
        self._optimizer_state = optimizer_state
        self._local = Local(exact_first=start > 0)
        self._done = 0
        self._weight = 0.0  # the weight of this replica: the counts of its steps since the last average
        self._skipped = 0
        self._averages = 0
        self._next = 0
        self._own: dict[str, Any] | None = None
        self._told = 0
        self._waited_s = 0.0
        self._sent_bytes = 0
        self.averaged_at: list[int] = []
        """The steps of the averages so far. Pass them as `at_steps` to a run that must average at the same steps as this
        one."""
        self.drift = math.nan
        """At the last average: the root of the weighted mean squared distance between the replicas and their average."""

    _usual = 16

    @property
    def wait_s(self) -> float:
        return self._waited_s + self._local.wait_s

    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip_norm: float | None = None,
        loss_scale: LossScale | None = None,
        typical_count: float = 1.0,
    ) -> Self:
        check_alike(self)
        self._model, self._optimizer = model, optimizer
        self._local.attach(model, optimizer, clip_norm=clip_norm, loss_scale=loss_scale, typical_count=typical_count)
        self._of_new_optimizer = {p: copy.deepcopy(kept) for p, kept in getattr(optimizer, "state", {}).items()}
        self._local.begin_period()
        self._next = self._after(self.start)
        self._start_clock()
        belongs_in_checkpoints(self, "_is_apart", "its model is the replica of rank 0, not the average")
        return self

    def follow(self) -> None:
        self._local.follow()

    def meet(self) -> None:
        self._local.meet()

    def backward(self, loss_sum: torch.Tensor, count: Count, *, last: bool = False) -> None:
        self._local.backward(loss_sum, count, last=last)

    # --- steps

    def step(self) -> StepResult | LateResult:
        result = self._local.step()
        self._done += 1
        if self._local.is_exact:
            if self._done == self.start:
                self._part()
            return result
        mine = result.mine
        self._weight += mine.total if mine.stepped else 0.0
        self._skipped += result.shared.skipped if result.shared is not None else 0
        return StepResult(mine, self._average_now() if self._done == self._next else None)

    def _part(self) -> None:
        self._local.switch(exact=False)
        self._local.begin_period()
        self._start_clock()

    def _start_clock(self) -> None:
        """From here the time of the steps is measured. After a resume, this is not where the period began."""
        self._since, self._since_step = time.perf_counter(), self._done

    def _average_now(self) -> Shared:
        """Collective. The replicas become their average, and the next period starts."""
        began = time.perf_counter()
        shared, share = self._survey((began - self._since) / max(self._done - self._since_step, 1))
        self._exchange(share)
        self._weight, self._skipped = 0.0, 0
        self._local.begin_period()
        self._averages += 1
        self.averaged_at.append(self._done)
        self._waited_s += time.perf_counter() - began
        self._start_clock()
        return shared

    def _survey(self, step_s: float) -> tuple[Shared, float]:
        """Collective. Exchange the results of this period: (the result, this rank's share of the average). Also plans the next
        average; all ranks compute the same."""
        finite, steps = self._is_finite(), self._done - self._began_period
        rows = gather_numbers([self._weight if finite else 0.0, float(finite), float(self._skipped), step_s, self._layout()])
        if len({row[4] for row in rows}) > 1:
            self._meet_in_layout()
        bad = [rank for rank, row in enumerate(rows) if not row[1]]
        skipped = [int(row[2]) for row in rows]
        if len(bad) == len(rows):
            raise StepError(f"after step {self._done} no replica is finite; check the learning rate and the data")
        self._warn(bad, skipped)
        self._next = self._after(self._done, max(row[3] for row in rows))
        if not finite:
            self._forget_optimizer_state()
        total = sum(row[0] for row in rows)
        weights = [row[0] if total > 0 else row[1] for row in rows]  # no rank has stepped: all finite replicas are equal
        shared = Shared(total, math.nan, total > 0 or not any(skipped), sum(skipped), steps)
        return shared, weights[comm.rank()] / sum(weights)

    def _exchange(self, share: float) -> None:
        tensors = self._averaged_tensors()
        if self._optimizer_state == "average":
            tensors += [value for _, value in self._optimizer_tensors()]
        apart = self._average(tensors, share)
        apart = apart * share if share else 0.0  # a replica that is not finite has no weight
        self.drift = math.sqrt(float(comm.all_reduce(torch.tensor(apart, dtype=torch.float64, device="cpu"))))
        self._apply(tensors)
        comm.broadcast(_counted_buffers(self._model))
        if self._optimizer_state == "reset":
            self._forget_optimizer_state()

    def _average(self, tensors: Sequence[torch.Tensor], share: float) -> float:
        """Collective. Each tensor becomes the weighted average over ranks. Returns the square of this rank's distance from
        it."""
        self._sent_bytes += 0 if comm.is_alone() else payload_bytes(tensors)
        return average(tensors, share)

    def _apply(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called when these tensors hold the average. Does nothing here; DiLoCo steps."""

    def _after(self, step: int, step_s: float = 0.0) -> int:
        """The step of the average that follows this step."""
        self._began_period = step
        if self._at_steps:
            return next((at for at in self._at_steps if at > step), -1)
        if self.seconds is None:
            return step + self.every
        if self._averages < _MEASURED - 1:
            return step + 1
        return step + min(max(int(self.seconds / step_s), 1), _LONGEST)

    def _resumed(self, saved: int) -> int:
        """The step of the next average after a resume: the saved one, unless the script has changed when replicas are
        averaged."""
        local = max(self._done, self.start)
        if self._at_steps:
            return next((at for at in self._at_steps if at > local), -1)
        is_far = self.seconds is None and saved > local + self.every
        return local + self.every if saved <= local or is_far else saved

    def _is_finite(self) -> bool:
        norms = private_names.norms([t.detach() for t in self._local.moved.values()], torch.float64)
        return bool(torch.isfinite(torch.stack([norm.cpu() for norm in norms])).all())

    def _warn(self, bad: Sequence[int], skipped: Sequence[int]) -> None:
        told = []
        if bad:
            whose = numbered("rank", bad, ranges=True)
            told.append(f"the replica of {whose} is not finite and was replaced by the average of the others")
        if any(skipped):
            where = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(skipped) if n)
            told.append(f"steps skipped since the last average because the gradient was not finite: {where}")
        for text in told:
            self._told += 1
            if self._told <= _TOLD:
                log.warn(f"step {self._done}: {text}")

    # --- which tensors

    def _trained_now(self) -> dict[str, torch.Tensor]:
        return self._local.trained_parameters()

    def _averaged_tensors(self, module: nn.Module | None = None) -> list[torch.Tensor]:
        """The tensors of the model to average: what was trained in this period, also what was frozen meanwhile, and floating
        buffers."""
        if module is not None:
            trained: list[torch.Tensor] = [p for p in module.parameters() if p.is_floating_point()]
        else:
            module, trained = self._model, list(self._local.moved.values())
        return [*trained, *(b for b in _buffers(module).values() if b.is_floating_point())]

    def _optimizer_tensors(self) -> list[tuple[str, torch.Tensor]]:
        state = named_state(self._model, self._optimizer)
        return [(k, v) for k, v in sorted(state.items()) if isinstance(v, torch.Tensor) and v.is_floating_point()]

    def _forget_optimizer_state(self) -> None:
        """As in a new optimizer: most create their state in the first step. With "average", it becomes that of the others."""
        if self._optimizer_state == "average":
            for _, value in self._optimizer_tensors():
                value.zero_()
        elif (state := getattr(self._optimizer, "state", None)) is not None:
            state.clear()
            state.update({p: copy.deepcopy(kept) for p, kept in self._of_new_optimizer.items()})

    def _layout(self) -> float:
        """A number that is equal on two ranks if their averages have the same tensors."""
        return float(int(xxhash.xxh3_64_hexdigest(repr(self._traits()).encode())[:12], 16))

    def _traits(self) -> list[tuple[str, ...]]:
        named: dict[str, torch.Tensor] = {**self._local.moved, **_buffers(self._model)}
        if self._optimizer_state == "average":
            named |= dict(self._optimizer_tensors())
        traits = [(name, str(tuple(t.shape)), str(t.dtype)) for name, t in named.items()]
        return [*traits, *self._local.came.items()]

    def _meet_in_layout(self) -> None:
        """Collective. Called if the averages of two ranks have different tensors. Raises StepError unless it is only that a
        rank has not stepped a parameter yet: an expert without samples, first steps that were skipped."""
        if self._optimizer_state == "average":
            self._add_missing_state()
        told = comm.all_gather_object(self._traits())
        rank = next((r for r, traits in enumerate(told) if traits != told[0]), None)
        if rank is not None:
            odd = sorted(set(told[0]) ^ set(told[rank])) or [("the order of the parameters",)]
            raise StepError(
                f"the replicas cannot be averaged: {odd[0][0]} is not the same on rank 0 and rank {rank}; change the model in "
                "the same way on all ranks"
            )

    def _add_missing_state(self) -> None:
        """Collective. The optimizer's state for a parameter that only other ranks have stepped: zeros."""
        named, state = self._local.named_parameters(), self._optimizer.state
        mine = {n: {key: _outline_of(value) for key, value in state[p].items()} for n, p in named.items() if state.get(p)}
        for theirs in comm.all_gather_object(mine):
            for name, forms in theirs.items():
                if name in named and not state.get(parameter := named[name]):
                    state[parameter] = {
                        key: form.zeros(parameter) if isinstance(form, _Outline) else form for key, form in forms.items()
                    }

    # --- what evaluation and saves see

    @contextlib.contextmanager
    def averaged(self, module: nn.Module | None = None) -> Iterator[None]:
        if self._local.is_exact or comm.is_alone():
            with self._local.averaged(module):
                yield
            return
        tensors = self._averaged_tensors(module)
        counted = _counted_buffers(self._model if module is None else module)
        own = [tensor.detach().clone() for tensor in (*tensors, *counted)]
        outside = self._own
        if module is None and outside is None:
            self._own = self._kept(tensors, counted, own)
        average(tensors, self._share_of_average() if module is None else 1 / comm.world_size())
        comm.broadcast(counted)
        try:
            yield
        finally:
            self._own = outside
            with torch.no_grad():
                for tensor, value in zip((*tensors, *counted), own, strict=True):
                    tensor.copy_(value)

    def _share_of_average(self) -> float:
        """Collective. By the samples of this rank since the last average. Without any on all ranks, the replicas are equal."""
        total = sum(row[0] for row in gather_numbers([self._weight]))
        return self._weight / total if total > 0 else float(comm.is_main())

    def _kept(
        self, tensors: Sequence[torch.Tensor], counted: Sequence[torch.Tensor], own: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """This rank's own values, by the names in the model. Does not change the optimizer's state."""
        values = {id(t): value for t, value in zip((*tensors, *counted), own, strict=True)}
        named: dict[str, torch.Tensor] = {**self._local.named_parameters(), **dict(self._model.named_buffers())}
        return {name: values[id(t)] for name, t in named.items() if id(t) in values}

    @property
    def _is_under_way(self) -> bool:
        """Whether there were steps since the last average."""
        return not self._local.is_exact and self._done > self._began_period

    @property
    def _is_apart(self) -> bool:
        """Whether the replicas may differ."""
        return comm.world_size() > 1 and self._is_under_way

    def finish(self) -> Shared | None:
        rest = self._average_now() if self._is_under_way else None
        self._local.finish()
        return rest

    def check_length(self, steps: int) -> None:
        name, local = type(self).__name__, steps - self.start
        if local <= 0 and self.start:
            raise ConfigError(
                f"{name}(start={self.start}): the training ends after step {steps}, so no step is local; give a "
                "smaller start, or sync='all-reduce'"
            )
        if late := [at for at in self._at_steps if at > steps]:
            log.warn(f"{name}(at_steps=...): no average after {numbered('step', late)}: the training ends after step {steps}")
        if not self._at_steps and self.seconds is None and self.every > local:
            log.warn(
                f"{name}(every={self.every}): there are {count(local, 'local step')}; replicas are averaged once, at the end"
            )

    def describe(self) -> str:
        whole = size(payload_bytes(self._averaged_tensors()))
        first = f"{self.start} exact steps, then " if self.start else ""
        local = "local steps, each with the mean gradient of one rank's samples (the learning rate is for those)"
        return f"{first}{local}, {whole} averaged {self._when()}"

    def figures(self) -> dict[str, float]:
        """`drift` at the last average, and what was sent."""
        drift = {"drift": self.drift} if math.isfinite(self.drift) else {}
        return {"sent_bytes": self._sent_bytes + self._local.sent_bytes, **drift}

    def _when(self) -> str:
        if self._at_steps:
            return f"after {numbered('step', self._at_steps, most=3)}"
        return f"every {self.every} steps" if self.seconds is None else f"every {self.seconds:g} s"

    # --- what is saved

    def state_dict(self) -> dict[str, Any]:
        shared = {"done": self._done, "next": self._next, "began": self._began_period, "averages": self._averages}
        moved = {"moved": list(self._local.moved)}
        return {**shared, **moved, "averaged_at": list(self.averaged_at), "local": self._local.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "done" not in state:
            raise ConfigError(
                f"the checkpoint was made with another strategy, and the script now has {type(self).__name__}; "
                "use that strategy (sync=...), or start a new run with --fresh or --name NAME"
            )
        self._done, self._averages = state["done"], state["averages"]
        self._next = self._resumed(state["next"])
        self._began_period = min(state["began"], max(self._done, self.start))
        self.averaged_at = list(state.get("averaged_at", ()))
        if self._local.is_exact != (exact := self._done < self.start):
            self._local.switch(exact)
        self._local.load_state_dict(state["local"])
        named = self._local.named_parameters()
        self._local.moved = {n: named[n] for n in state.get("moved", ()) if n in named} | self._trained_now()
        self._start_clock()

    def rank_state_dict(self) -> dict[str, Any] | None:
        if self._local.is_exact:
            own = self._local.rank_state_dict()
            return {"exact": own} if own is not None else None
        if self._own is None:
            return None
        own = {"tensors": self._own, "optimizer": self._optimizer.state_dict(), "local": self._local.own_state_dict()}
        return {**own, "weight": self._weight, "skipped": self._skipped}

    def load_rank_state_dict(self, state: dict[str, Any] | None) -> None:
        self._weight, self._skipped = 0.0, 0
        if state is None or "exact" in state or self._local.is_exact:  # `start` may have been smaller
            self._local.load_rank_state_dict((state or {}).get("exact"))
            return
        self._load_own(state)

    @torch.no_grad()
    def _load_own(self, state: Mapping[str, Any]) -> None:
        named: dict[str, torch.Tensor] = {**self._local.named_parameters(), **dict(self._model.named_buffers())}
        for name, value in state["tensors"].items():
            named[name].copy_(value)
        self._optimizer.load_state_dict(state["optimizer"])
        self._local.load_own_state_dict(state["local"])
        self._weight, self._skipped = state["weight"], state["skipped"]


class _Outline(NamedTuple):
    """A tensor without its elements."""

    tensor: torch.Tensor
    device: str

    def zeros(self, beside: torch.Tensor) -> torch.Tensor:
        device = beside.device if beside.device.type == self.device else self.device
        return torch.zeros_like(self.tensor, device=device)


def _outline_of(value: Any) -> Any:
    return _Outline(value.to("meta"), value.device.type) if isinstance(value, torch.Tensor) else value


def _counted_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Buffers that are not averaged, because they count."""
    return [buffer for buffer in _buffers(module).values() if not buffer.is_floating_point()]


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Those of the state_dict, by name. Others (a table of positions, a mask) stay as they are on each rank."""
    return {name: b for name, b in private_names.persistent_buffers(module).items() if b.layout == torch.strided}
