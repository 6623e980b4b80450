"""The self-test of a Trainer, on the current ranks. It works on copies, and removes its folder afterwards.

rankwise.selftest(trainer)              # prints its findings; False if one is a mistake
"""

from __future__ import annotations

import contextlib
import copy
import io
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rankwise.checkpoint import Checkpoints
from rankwise.checks.compare import compare_draws, first_apart
from rankwise.checks.determinism import Draws
from rankwise.checks.difference import Difference
from rankwise.checks.finding import FAILED, OK, OPEN, Finding, as_text, combined, passed
from rankwise.checks.gradients import Gradients, makes_up
from rankwise.checks.twin import Twin, computed
from rankwise.data import Loader
from rankwise.dist import comm, log, seed
from rankwise.dist.device import tensors_in
from rankwise.dist.guards import run_on_main
from rankwise.dist.world import World
from rankwise.evaluation import Evaluate
from rankwise.host.text import count
from rankwise.sync import AllReduce, SyncStrategy
from rankwise.trainer import Trainer
from rankwise.training.digest import digest, digests
from rankwise.training.model import evaluating
from rankwise.training.optimizer import named_state
from rankwise.training.step import loss_and_count

ONE = World(0, 1, 0, 1, 0, source="selftest")
"""A single rank: the reference for all numbers of ranks."""

SAMPLES, FEW = 13, 9
"""Samples in the global batch of the test; FEW if the Trainer's own is smaller. Each of 4 micro-batches has at least two, as
batch norms need, and their sizes differ: with equal sizes, a mean of means would be right by accident."""

_STEPS = 2
_STILL_FALLS = 0.8  # over twice as many steps; what is lost stays the same


def selftest(trainer: Trainer) -> bool:
    """Collective. Check, on copies, that the gradient does not depend on the number of ranks and micro-batches, that a step
    after resuming is the same as without a stop, and that ranks have different samples and random numbers. Prints a line for
    each check, and returns False if one found a mistake.

    `rankwise selftest SCRIPT.py` does this on 1, 2 and 4 ranks.
    """
    findings = findings_of(trainer)
    log.say(as_text(combined(findings)))
    return passed(findings)


def findings_of(trainer: Trainer) -> list[Finding]:
    """Collective. The findings of `selftest`, the same on all ranks. Takes a few steps with copies of model and optimizer."""
    with seed.streams_kept(), _not_compiled():
        return _found(trainer)


def _not_compiled() -> contextlib.AbstractContextManager[Any]:
    """The checks look into each layer, which torch.compile cannot follow."""
    if "torch._dynamo" not in sys.modules:  # its import takes seconds
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def _found(trainer: Trainer) -> list[Finding]:
    findings = [_weights(trainer)] if trainer.world.world_size > 1 else []
    if trainer.loader.is_split:
        why = "each rank reads its own stream, so another number of ranks has other batches"
        findings += [Finding("samples", OPEN, why), Finding("gradients", OPEN, why)]
    else:
        findings += [_samples(trainer), _gradients(trainer)]
    findings += [_random(trainer), *_resume_and_steps(trainer)]
    if trainer.evaluate is not None:
        findings.append(_evaluation(trainer, trainer.evaluate))
    return findings


def layout(ranks: int, accumulate: int) -> str:
    """For people: `2 ranks in 2 micro-batches`, `4 ranks`."""
    return count(ranks, "rank") + (f" in {accumulate} micro-batches" if accumulate > 1 else "")


def _ranks(trainer: Trainer) -> str:
    return count(trainer.world.world_size, "rank")


def _size(trainer: Trainer) -> int:
    return SAMPLES if trainer.loader.global_batch_size >= SAMPLES else FEW


def _weights(trainer: Trainer) -> Finding:
    mine = digests(trainer.state.model.state_dict())
    apart = first_apart(comm.all_gather_object(mine))
    if apart is None:
        return Finding("weights", OK, "the same on {}", where=str(trainer.world.world_size))
    return Finding(
        "weights", FAILED, f"on {_ranks(trainer)}: {apart}", "the ranks do not start with the same model",
        "let sync.attach(model, optimizer) broadcast rank 0's weights, and change no parameter before the first step",
    )  # fmt: skip


# --- samples


def _samples(trainer: Trainer) -> Finding:
    """Collective. Padding may change a sample in a batch; then each sample is compared in a separate batch."""
    together = _compared(trainer, 1)
    if together.status != FAILED:
        return together
    alone = _compared(trainer, _size(trainer))
    if alone.status != OK:
        return together
    return replace(alone, evidence=f"{alone.evidence}, one by one: a batch changes them, for example by padding")


def _compared(trainer: Trainer, accumulate: int) -> Finding:
    """Collective. Compares the content of the samples, not only their indices."""
    size = _size(trainer)
    mine = _rows(trainer.loader.anew(trainer.world, accumulate, size))
    all_at_once = _rows(trainer.loader.anew(ONE, accumulate, size))
    told = comm.all_gather_object(mine)
    if not any(all_at_once):
        return Finding("samples", OPEN, "a batch has no tensors with one row per sample, so their content cannot be compared")
    for step, whole in enumerate(all_at_once):
        together = Counter(row for rank in told if step < len(rank) for row in rank[step])
        if together == Counter(whole):
            continue
        twice = sum((together - Counter(whole)).values())
        never = sum((Counter(whole) - together).values())
        return Finding(
            "samples", FAILED,
            f"on {_ranks(trainer)}: of {len(whole)} samples of step {step + 1}, no rank saw {never}, and {twice} were seen "
            "twice or should not be there",
            "the dataset returns different samples on another rank, or divides itself among the ranks too",
            "use the whole dataset on every rank: the Trainer divides it. Its random numbers must come from Python's, numpy's "
            "global or torch's default generator. A stream that divides itself needs split_by_rank = True",
        )  # fmt: skip
    samples = sum(map(len, all_at_once))
    return Finding("samples", OK, f"each of {samples} once on {{}}", where=str(trainer.world.world_size))


def _rows(loader: Loader) -> list[list[str]]:
    """For each of the first steps, a digest of each sample."""
    return [[row for batch in step for row in row_digests(batch)] for step in islice(loader, _STEPS)]


def row_digests(batch: Any) -> list[str]:
    """A digest for each row of a batch, over all its tensors that have as many rows as the first."""
    tensors = [t for t in tensors_in(batch) if t.dim() > 0]
    rows = len(tensors[0]) if tensors else 0
    return ["-".join(digest(tensor[row]) for tensor in tensors if len(tensor) == rows) for row in range(rows)]


# --- gradients


def _gradients(trainer: Trainer) -> Finding:
    size = _size(trainer)
    ranks = trainer.world.world_size
    splits = (4, 3) if ranks == 1 else (max(4 // ranks, 1),)

    def batches(world: World, accumulate: int) -> list[Any]:
        return next(iter(trainer.loader.anew(world, accumulate, size)))

    (whole,), parts = batches(ONE, 1), batches(ONE, 4)
    model, optimizer, promise = trainer.state.model, trainer.state.optimizer, trainer.sync.promise
    exact = promise in ("exact", "summed")
    new_sync = trainer.new_sync if exact else _all_reduce
    times = ranks if promise == "summed" else 1
    forward = _exact_forward(trainer, whole)
    gradients = Gradients(model, optimizer, trainer.step_fn, forward, new_sync, whole, parts, times)
    finding = gradients.finding({layout(ranks, k): batches(trainer.world, k) for k in splits})
    if promise == "summed":
        return replace(finding, evidence=f"{finding.evidence} (times the number of ranks, because the strategy sums)")
    if exact or finding.status != OK:
        return finding
    if promise == "rounded":
        return _rounding(finding, gradients.rounding(trainer.new_sync, batches(trainer.world, splits[0])))
    return replace(
        finding, evidence=f"{finding.evidence} (with AllReduce(); with the strategy, ranks differ between two averages)"
    )


def _exact_forward(trainer: Trainer, batch: Any) -> Callable[..., tuple[torch.Tensor, float | torch.Tensor]]:
    """Collective. Without the Trainer's autocast if step_fn works without it: autocast rounds more than mistakes change."""
    if trainer.precision.dtype is None:
        return trainer.forward

    def forward(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
        return loss_and_count(trainer.step_fn(model, batch))

    worked = False
    with contextlib.suppress(Exception), Twin(trainer.state.model, trainer.state.optimizer) as twin:
        forward(twin.model, batch)[0].backward()  # type: ignore[no-untyped-call]
        worked = True
    return forward if comm.all_agree(worked) else trainer.forward


def _all_reduce(model: nn.Module, optimizer: Optimizer, **given: Any) -> SyncStrategy:
    """Collective. Used instead of a strategy that is not exact, to test the step function and the data."""
    return AllReduce().attach(model, optimizer, **given)


def _rounding(exact: Finding, told: Sequence[tuple[int, Difference]]) -> Finding:
    """`exact`: the finding without the strategy. `told`: see Gradients.rounding."""
    (_, first), (_, before), (steps, now) = told[0], told[-2], told[-1]
    where = f"{exact.where}; rounded by {first}, over {steps} steps by {now}"
    if makes_up(told):
        evidence = f"{exact.evidence} (with AllReduce(); later steps make up for what the strategy rounds off)"
        return replace(exact, evidence=evidence, where=where)
    if now.size <= _STILL_FALLS * before.size:
        return Finding("gradients", OPEN, f"the rounding error still falls after {steps} steps: {{}}", where=where)
    return Finding(
        "gradients", FAILED, "what the strategy rounds off is lost: {}",
        "the gradients of many steps do not add up to the exact ones",
        "let the strategy (sync=) add what a message has lost to the next one", where=where,
    )  # fmt: skip


# --- random numbers


def _random(trainer: Trainer) -> Finding:
    model = Twin(trainer.state.model, trainer.state.optimizer).model
    seed.seed_rank(trainer.seed, trainer.world.rank)
    with Draws() as draws:
        for step in islice(trainer.loader.anew(trainer.world, 1), _STEPS):
            for batch in step:
                trainer.forward(model, batch)
    return compare_draws(comm.all_gather_object(draws.passes))


# --- steps, and a step after resuming


class _Copy:
    """A copy of a model and everything that trains it, for a few steps."""

    def __init__(self, trainer: Trainer) -> None:
        self._twin = Twin(trainer.state.model, trainer.state.optimizer, trainer.state.parts.get("scheduler"))
        [self._scheduler] = self._twin.others
        self.model = self._twin.model
        with self._twin:
            self.sync = trainer.new_sync(self.model, self._twin.optimizer)
        loader = trainer.loader.anew(trainer.world, trainer.loader.accumulate)
        self._batches = iter(loader)
        self._forward = trainer.forward
        parts = {"sync": self.sync, "model": self.model, "optimizer": self._twin.optimizer, "loader": loader}
        self._parts: dict[str, Any] = parts | ({"scheduler": self._scheduler} if self._scheduler is not None else {})

    def step(self) -> None:
        """Collective. One step with the next batch of the loader."""
        micro_batches = next(self._batches)
        with self._twin:
            for i, batch in enumerate(micro_batches, start=1):
                self.sync.backward(*self._forward(self.model, batch), last=i == len(micro_batches))
            self.sync.step()
        if self._scheduler is not None and not callable(self._scheduler):  # an action (Plateau) waits for an evaluation
            self._scheduler.step()

    def freeze_one(self, before: dict[str, str]) -> str | None:
        """Collective. Freeze one of the parameters that have changed since `before`, and return its name."""
        now = self.parameters()
        moved = [name for name, _ in self.model.named_parameters() if before[name] != now[name]]
        name: str | None = comm.broadcast_object(moved[-1] if len(moved) > 1 else None)
        self.freeze(name)
        return name

    def freeze(self, name: str | None) -> None:
        if name is not None:
            self.model.get_parameter(name).requires_grad_(False)

    def save(self, checkpoints: Checkpoints) -> None:
        """Collective."""
        with self._twin:
            checkpoints.save(self._parts, 1)

    def load(self, checkpoints: Checkpoints) -> None:
        """Collective. Suppresses the output, which would be about a copy."""
        with self._twin, contextlib.redirect_stdout(io.StringIO()):
            checkpoints.load_latest(self._parts)

    def parameters(self) -> dict[str, str]:
        with self._twin:
            return digests(self._twin.named())

    def averaged(self) -> dict[str, str]:
        """Collective. Digests of the parameters as an evaluation sees them."""
        with self.sync.averaged():
            return self.parameters()

    def digests(self) -> dict[str, str]:
        """Digests of parameters, buffers, and the state of the optimizer."""
        kept = named_state(self.model, self._twin.optimizer)
        modes = torch.tensor([module.training for module in self.model.modules()], device="cpu")
        return {**digests({**self.model.state_dict(), **kept, "modes of modules": modes}), **self.parameters()}


def _resume_and_steps(trainer: Trainer) -> list[Finding]:
    with _folder() as folder:
        unbroken, resumed = _Copy(trainer), _Copy(trainer)
        checkpoints = Checkpoints(folder, background=False)
        before = unbroken.parameters()
        seed.seed_rank(trainer.seed, trainer.world.rank)
        unbroken.step()
        frozen = unbroken.freeze_one(before)
        with unbroken.sync.averaged(), evaluating(unbroken.model):
            pass
        unbroken.save(checkpoints)
        unbroken.step()
        moved = unbroken.parameters()
        averaged = trainer.sync.promise == "averaged"
        alike = unbroken.averaged() if averaged else moved
        seed.seed_rank(trainer.seed + 1, trainer.world.rank)  # like a new process, with other streams
        resumed.load(checkpoints)
        resumed.step()
        apart = first_apart([unbroken.digests(), resumed.digests()], ("the run without a stop", "the resumed run"))
        never = _Copy(trainer)
        seed.seed_rank(trainer.seed, trainer.world.rank)
        never.step()
        never.freeze(frozen)
        never.step()
        looked = first_apart([never.digests(), unbroken.digests()], ("a run without them", "one with them"))
        told = comm.all_gather_object((alike, apart, looked, [name for name in before if before[name] == moved[name]]))
    steps = _steps([of for of, *_ in told], [still for *_, still in told], len(before), averaged)
    resumes, looks = [text for _, text, _, _ in told if text], [text for _, _, text, _ in told if text]
    return [steps, _resume(resumes[0] if resumes else None), _looking(looks[0] if looks else None)]


def _steps(moved: Sequence[dict[str, str]], still: Sequence[Sequence[str]], parameters: int, averaged: bool) -> Finding:
    """`moved`: by rank, what must be the same on all ranks. `averaged`: whether this is the average of replicas."""
    lazy = [rank for rank, names in enumerate(still) if len(names) == parameters]
    if lazy and len(lazy) < len(moved):
        return Finding(
            "steps", FAILED, f"{_STEPS} steps changed no parameter on rank {', '.join(map(str, lazy))}, but on other ranks",
            "the optimizer steps only on some ranks", "step on every rank; write and print only on rank 0",
        )  # fmt: skip
    apart = first_apart(moved)
    if apart is not None:
        return Finding("steps", FAILED, f"after {_STEPS} steps {apart}", "the ranks do not take the same steps",
                       "every rank must step, with the same gradient and optimizer settings")  # fmt: skip
    if lazy:
        return Finding("steps", FAILED, f"{_STEPS} steps changed no parameter", "the learning rate or the gradient is 0",
                       "check the learning rate of the first steps, and what the loss depends on")  # fmt: skip
    same = "the average of the replicas has changed, and is" if averaged else "the parameters have changed, and are"
    evidence = f"after {_STEPS} steps {same} the same on all ranks ({{}})"
    return Finding("steps", OK, evidence, where=str(len(moved)))


def _resume(apart: str | None) -> Finding:
    if apart is None:
        return Finding("resume", OK, "a step after saving and loading is the same as without, bit for bit")
    return Finding(
        "resume", FAILED, f"a step after saving and loading is not the same as without: {apart}",
        "something that the step needs is not in the state_dict of the model, optimizer or scheduler (or the device's kernels "
        "do not compute the same bits twice)",
        "register it (register_buffer), or give the object that has it a state_dict",
    )  # fmt: skip


def _looking(apart: str | None) -> Finding:
    if apart is None:
        return Finding("looking", OK, "an evaluation and a save between two steps change nothing, bit for bit")
    return Finding(
        "looking", FAILED, f"an evaluation or a save between two steps changes the training: {apart}",
        "buffers, modes or random streams are not restored after it",
        "averaged() of the strategy (sync=) must restore what it changes; keep what forward changes in buffers",
    )  # fmt: skip


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Collective. A temporary folder that all ranks see."""
    path = run_on_main(tempfile.mkdtemp, kwargs={"prefix": "rankwise-selftest-"})
    try:
        yield Path(path)
    finally:
        if comm.rank() == 0:
            shutil.rmtree(path, ignore_errors=True)


# --- evaluation


def _evaluation(trainer: Trainer, evaluate: Evaluate) -> Finding:
    """Evaluate the first batches and the last one, and compare with the same on a single rank in other micro-batches."""
    model = copy.deepcopy(trainer.state.model, computed(trainer.state.model))
    given = evaluate.loader
    if given.is_split:
        return Finding("evaluation", OPEN, "each rank reads its own stream")

    def figures(world: World, accumulate: int) -> dict[str, float]:
        return evaluate.figures(model, batches=_ends(given, world, accumulate))

    here = figures(trainer.world, 1)
    with comm.alone():
        alone = figures(ONE, 3)
    apart, name = max(((_apart(value, here.get(name)), name) for name, value in alone.items()), default=(0.0, ""))
    tolerance = 1e-4 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 0.02
    if apart <= tolerance:
        evidence = f"the same as on one rank in batches of another size: {{}}; relative, {tolerance:g} is allowed"
        return Finding("evaluation", OK, evidence, where=f"{_ranks(trainer)}: {apart:.1e}")
    return Finding(
        "evaluation", FAILED, f"{name} is {here.get(name, float('nan')):.6g} on {_ranks(trainer)} and {alone[name]:.6g} on one "
        "rank, in batches of another size",
        "the function does not return sums: batches differ in size, and their means are averaged",
        "return the sum over the samples and their count: (loss_sum, len(y)), (correct, len(y))",
    )  # fmt: skip


def _ends(loader: Loader, world: World, accumulate: int) -> Iterator[list[Any]]:
    """The first two steps, and the last one."""
    yield from islice(loader.anew(world, accumulate), _STEPS)
    if loader.samples is not None and not loader.is_stream and (steps := loader.steps_per_epoch or 0) > _STEPS:
        last = loader.anew(world, accumulate)
        last.position = (steps - 1) * loader.global_batch_size
        yield next(iter(last))


def _apart(a: float, b: float | None) -> float:
    if b is None or a != a or b != b:
        return 0.0 if b is not None and a != a and b != b else float("inf")
    return abs(a - b) / max(abs(a), 1e-12) if a != b else 0.0
