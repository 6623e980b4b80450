"""The Trainer: a model, an optimizer, a step function and a dataset in; a trained model out, on any number of ranks.

    def step(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    Trainer(model, optimizer, step, dataset, global_batch_size=64, max_epochs=3).fit()

`fit` is the whole loop, on one page; what it calls are parts that work without it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rankwise import errors
from rankwise.actions.periodic import Action, Log, every
from rankwise.actions.plateau import check_metric, step_plateau
from rankwise.actions.timed import Moments
from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint.retention import check_name
from rankwise.checkpoint.saving import Saving
from rankwise.data import Loader
from rankwise.data.batching import as_given
from rankwise.dist import comm, log, seed
from rankwise.dist.device import local_device
from rankwise.dist.world import agent_row
from rankwise.dist.world import checkpoint_scope as scope_of
from rankwise.errors import ConfigError, RunDirError
from rankwise.evaluation import Evaluate, Metrics, Pair, predict
from rankwise.run.directory import RunDir
from rankwise.run.lease import Fence
from rankwise.stop.signal import StopSignal
from rankwise.sync import StepResult, SyncStrategy
from rankwise.sync.all_reduce import AllReduce
from rankwise.sync.divergence import Divergence
from rankwise.sync.skipped import SkippedSteps
from rankwise.telemetry import Meters, Progress, TimeBreakdown
from rankwise.telemetry.writers import Writer, open_writers
from rankwise.training import messages
from rankwise.training import optimizer as optimizers
from rankwise.training.arguments import check_counts, check_evaluation, check_length, check_workers
from rankwise.training.fingerprint import Fingerprint, compare, numerics
from rankwise.training.finite import Weights, check_rates
from rankwise.training.mean_loss import warn_of_means
from rankwise.training.model import begin_training, check_synced, prepare
from rankwise.training.open_run import already_done, open_run, run_path
from rankwise.training.precision import LossScale, Precision
from rankwise.training.state import Stateful, TrainState
from rankwise.training.step import loss_and_count


class Trainer:
    """Trains `model` with `optimizer` on `train_data`; every argument after these four is by name.

    step_fn(model, batch) -> (loss sum, the count it is over). eval_fn(model, batch) -> {name: (sum, count)}; by default the
    loss of `step_fn`. `eval_metrics`: {name: object with update, compute and reset} that eval_fn updates (torchmetrics').
    `scheduler` steps once an optimizer step; torch's ReduceLROnPlateau after each evaluation, on `scheduler_metric` (by default
    eval_loss). Give `batch_size` (of one rank and micro-batch) or `global_batch_size` (of all
    ranks and accumulated micro-batches), or `batch_tokens` or `global_batch_tokens` with `lengths`, or `batch_sampler`
    (data/loader.py), and `max_epochs` or `max_steps` or both. `precision`: fp32, bf16, fp16. `lr_scale`: none, linear or
    sqrt, by how many times the global batch is that of one rank (with `batch_size`). `reduction`: auto, flat or ddp
    (sync/all_reduce.py). `compile`: True, or torch.compile's arguments. `fused`: the optimizer's fused kernel; by default
    where there is one and nobody has chosen. `sync_batchnorm`: batch statistics of all ranks, on GPUs. The last `keep_last`
    checkpoints stay, and the one with the best `keep_best`, a figure such as eval_loss: one more is saved after each
    evaluation that is the best so far; those of `keep_steps`, which are saved for that, and those `keep_younger_than_s` stay
    too. With `background_saves` the loop waits for a copy of the state alone, which a thread of the main rank writes; with
    `sharded_saves` each rank copies and writes a share of the model and the optimizer.
    `checkpoint_scope`: main, and rank 0 writes; node, and so does one rank of each node, where they share no disk; by default
    what --checkpoint-scope says. `checkpoint_mirror`: a URL (s3://bucket/run) for fsspec, where checkpoints are copied to, and
    had from when they are not here.
    `on_divergence`: warn or error, where ranks no longer hold the same though they should.
    `actions` run after each step, after the Trainer's own. A run directory that holds checkpoints is gone on with, unless
    `fresh`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        step_fn: Callable[[Any, Any], tuple[torch.Tensor, float | torch.Tensor]],
        train_data: Any,
        *,
        eval_data: Any = None,
        eval_fn: Callable[[Any, Any], Mapping[str, Pair] | None] | None = None,
        eval_metrics: Mapping[str, Any] | None = None,
        scheduler: Any = None,
        scheduler_metric: str | None = None,
        on_divergence: str = "warn",
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        batch_tokens: float | None = None,
        global_batch_tokens: float | None = None,
        lengths: Sequence[float] | Callable[[int], float] | None = None,
        batch_sampler: Any = None,
        accumulate: int = 1,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        precision: str = "fp32",
        clip_norm: float | None = None,
        lr_scale: str = "none",
        reduction: str = "auto",
        compile: bool | Mapping[str, Any] = False,
        fused: bool | None = None,
        sync_batchnorm: bool = False,
        drop_last: bool = False,
        uneven: str | None = None,
        sync: SyncStrategy | None = None,
        actions: Sequence[Action] = (),
        seed: int = 0,
        run_dir: str | os.PathLike[str] | None = None,
        fresh: bool = False,
        log_every: int = 50,
        eval_every: int | None = None,
        save_every_s: float = 300.0,
        keep_last: int = 2,
        keep_best: str | None = None,
        larger_is_better: bool | None = None,
        keep_steps: Collection[int] = (),
        keep_younger_than_s: float | None = None,
        background_saves: bool = True,
        sharded_saves: bool = False,
        checkpoint_scope: str | None = None,
        checkpoint_mirror: str | None = None,
        workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        errors.without_traceback()
        check_length(max_epochs, max_steps)
        check_counts(max_epochs=max_epochs, max_steps=max_steps, log_every=log_every, eval_every=eval_every)
        check_evaluation(eval_data, eval_fn, eval_metrics, eval_every)
        check_workers(workers)
        optimizers.check(model, optimizer)
        if keep_best is not None and not actions:  # an action may measure anything
            check_name(keep_best, eval_data is not None, eval_fn is not None)
        self.world = comm.init()
        self.device = local_device(self.world)
        self.max_steps, self.seed, self.step_fn = max_steps, seed, step_fn
        self._precision = Precision.of(precision, self.device)
        self.loader = Loader.for_ranks(
            train_data, self.world, batch_size=batch_size, global_batch_size=global_batch_size, batch_tokens=batch_tokens,
            global_batch_tokens=global_batch_tokens, lengths=lengths, batch_sampler=batch_sampler, accumulate=accumulate,
            seed=seed, drop_last=drop_last, uneven=uneven, max_epochs=max_epochs, workers=workers, collate_fn=collate_fn,
            device=self.device,
        )  # fmt: skip
        self._once = self.loader.passes()  # now: a checkpoint may change the size of a micro-batch
        self.sync = AllReduce({"flat": False, "ddp": True}.get(reduction)) if sync is None else sync
        self._unattached = copy.deepcopy(self.sync)
        self.run = RunDir(run_path(self.world, run_dir))
        self._fresh = fresh
        self.checkpoints = Checkpoints(
            self.run.checkpoints, keep_last, keep_best, larger_is_better, keep_steps, keep_younger_than_s, background_saves,
            sharded_saves, checkpoint_scope or scope_of(self.world), checkpoint_mirror,
        )  # fmt: skip
        self._keep_best = keep_best
        self.stop = StopSignal(self.world)
        fixed = {"clip_norm": clip_norm, "lr_scale": lr_scale, "drop_last": drop_last, **optimizers.settings(optimizer)}
        fixed |= as_given("batch_size", batch_size, global_batch_size)
        fixed |= as_given("batch_tokens", batch_tokens, global_batch_tokens)
        self._settings = Fingerprint.of(fixed, scheduler)
        self._compare_ranks(reduction, log_every, eval_every)
        model = prepare(model, self.device, self.world, sync_batchnorm, compile)
        nominal = self.loader.global_batch_size
        fixed_batch = nominal if batch_size is None and batch_tokens is None else None
        self._lr_text = optimizers.prepare(optimizer, scheduler, fused, lr_scale, self.world.world_size, fixed_batch)
        self.state = TrainState(model, optimizer)
        self._attach = functools.partial(type(self.sync).attach, clip_norm=clip_norm, typical_count=nominal)
        self._attach(self.sync, model, optimizer, loss_scale=LossScale() if precision == "fp16" else None)
        check_synced(model, self.loader.fewest, self.world.world_size * self.loader.accumulate)
        self._progress = Progress(agent_row(self.world))
        self._writers: list[Writer] = []  # opened by `fit`, on the main rank
        self.evaluate = self._evaluation(eval_data, eval_fn, eval_metrics)
        self._log = self._new_log(log_every)
        check_metric(scheduler, scheduler_metric, eval_data is not None, eval_fn is not None, bool(actions))
        self._divergence = Divergence(self.sync, on_divergence)
        hears = background_saves and self.world.is_main
        self._wire(scheduler, scheduler_metric, eval_every, save_every_s, keep_steps, hears, actions)

    def _compare_ranks(self, reduction: str, log_every: int, eval_every: int | None) -> None:
        """Collective. Raises ConfigError on all ranks where one was given another training."""
        loader, kind = self.loader, type(self.sync).__name__
        given: dict[str, Any] = {"max_epochs": loader.max_epochs, "max_steps": self.max_steps}
        given |= {"accumulate": loader.accumulate, "seed": self.seed, **self._settings.fixed}
        given |= {"precision": self._precision.name, "the strategy": kind, "reduction": reduction, "log_every": log_every}
        given |= {"eval_every": eval_every, "keep_best": self._keep_best, "device": self.device.type}
        compare(given if loader.is_split else given | {"the number of samples in train_data": loader.samples})

    def _new_log(self, log_every: int) -> Log:
        sources = {
            "data wait": lambda: self.loader.wait_s,
            "all-reduce": lambda: self.sync.wait_s,
            "saving": lambda: self.checkpoints.wait_s,
        }
        if (evaluate := self.evaluate) is not None:
            sources["evaluation"] = lambda: evaluate.wait_s
        self.meters = Meters("loss")
        self._breakdown = TimeBreakdown(sources)
        return Log(
            self.meters, self._breakdown, self._progress, self._writers, every_steps=log_every,
            samples=lambda: self.loader.taken,
        )  # fmt: skip

    def _wire(
        self,
        scheduler: Any,
        scheduler_metric: str | None,
        eval_every: int | None,
        save_every_s: float,
        keep_steps: Collection[int],
        hears: bool,
        actions: Sequence[Action],
    ) -> None:
        """What runs after each step, in its order, and what a checkpoint holds. `hears`: of saves that fail behind the loop."""
        self._weights = Weights()
        self._skipped = SkippedSteps(self._weights, self._progress.say)
        self._saving = Saving(
            self.checkpoints, self._progress.say, ready=self._ready_to_save, info=self._numerics,
            ends=lambda state: self._done(state) or bool(self.stop.signum), keep_best=self._keep_best, at_steps=keep_steps,
        )  # fmt: skip
        schedule: list[Action] = []
        plateau: list[Action] = []
        if isinstance(scheduler, ReduceLROnPlateau):
            plateau = [step_plateau(scheduler, scheduler_metric or "eval_loss")]
        elif scheduler is not None:
            # Not for a step that was left out: fp16 begins with some, and a warm-up would lose its first ones.
            schedule = [lambda state: scheduler.step() if self._skipped.in_a_row == 0 else None]
        self.actions: list[Action] = [*schedule, self._log, *([self._saving.hear] if hears else [])]
        if self.evaluate is not None:
            self.actions.append(every(self.evaluate, steps=eval_every, epochs=None if eval_every else 1, at_end=True))
        self.actions += [*actions, *plateau]
        if actions:  # what they have changed of the model
            self.actions.append(lambda _: self.sync.follow())
        self.actions += [check_rates, self._divergence, every(self._saving, seconds=save_every_s), *self._saving.further()]
        self._moments = Moments(self.state, self.actions, self.stop)
        self.actions.append(self._moments)
        parts: dict[str, Stateful | None] = {
            "settings": self._settings, "train": self.state, "sync": self.sync, "model": self.state.model,
            "optimizer": self.state.optimizer, "loader": self.loader, "log": self._log, "scheduler": scheduler,
        }  # fmt: skip
        self.state.parts = {name: part for name, part in parts.items() if part is not None}

    def fit(self) -> TrainState:
        """Collective. Train until the last step or an agreed stop; everything is saved when it returns, or raises Stopped."""
        with self._open() as state:
            batches = self._looked_at(iter(self.loader))
            while not self.stop.agreed(state.step) and not self._done(state):
                micro_batches = next(batches)  # what one optimizer step takes: this rank's part of the global batch
                for i, batch in enumerate(micro_batches, start=1):
                    loss_sum, count = self.forward(state.model, batch)
                    self.sync.backward(loss_sum, count, last=i == len(micro_batches))
                    self.meters.add(loss=(loss_sum.detach(), count))
                self._advance(state, self.sync.step(), len(micro_batches))
                for action in self.actions:  # schedule, log, evaluate, the user's own, save: each an action
                    action(state)
            self.stop.finish()
            # What was saved of this step does not say that the script has stopped there.
            self._saving.at_end(state, again=self._moments.end())
            if not self.stop.signum:
                self.sync.finish()
            self._say_end(state)
        if self.stop.signum:
            raise self.stop.stopped()
        return state

    def predict(
        self, data: Any, predict_fn: Callable[[Any, Any], Any], *, on: str = "main", into: Callable[..., object] | None = None
    ) -> Any:
        """Collective. What `predict_fn(model, batch)` returns for each sample of `data`, in its order, once: on the main
        rank, None on the others (`on="all"`: there too), or handed to `into(indices, rows)`. `rankwise.predict` says more."""
        if not callable(predict_fn):
            raise ConfigError(
                f"predict_fn is a {type(predict_fn).__name__}: give trainer.predict(data, predict_fn), in this order"
            )
        with self.sync.averaged():
            return predict(predict_fn, self.state.model, self._once(data), on=on, into=into, precision=self._precision)

    def new_sync(self, model: nn.Module, optimizer: Optimizer, **given: Any) -> SyncStrategy:
        """Collective. A strategy like this Trainer's, attached to copies of its model and optimizer (`given`: what else
        `attach` takes)."""
        return self._attach(copy.deepcopy(self._unattached), model, optimizer, **given)

    def forward(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
        """(loss sum, count) of step_fn, in this Trainer's precision."""
        if self._precision.dtype is None:
            result = self.step_fn(model, batch)
        else:
            with self._precision.autocast():
                result = self.step_fn(model, batch)
        return loss_and_count(result)

    def _looked_at(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """Collective at the first of all: step_fn is tried on it."""
        for micro_batches in batches:
            if self.state.step == 0:
                warn_of_means(self.forward, self.state.model, micro_batches)
            yield micro_batches

    def _advance(self, state: TrainState, result: StepResult, micro_batches: int) -> None:
        state.step += 1
        state.epoch = self.loader.epoch
        state.epoch_ended = self.loader.position == 0
        state.last = self._done(state)
        if not result.mine.stepped:
            self.meters.forget(micro_batches)  # the NaN of a skipped step would be that of the whole interval
        if result.shared is None:
            return
        if not result.shared.finite or result.shared.total <= 0:
            self._skipped.add(state, result.shared)
        else:
            self._skipped.in_a_row = 0

    def _done(self, state: TrainState) -> bool:
        return state.stopped or self.loader.finished or (self.max_steps is not None and state.step >= self.max_steps)

    # --- before and after the loop

    @contextlib.contextmanager
    def _open(self) -> Iterator[TrainState]:
        """Collective. Begin; and, however the loop ends, close what is open."""
        life, lease = open_run(self.run, self.world, self._fresh)
        self.checkpoints.fence = Fence(self.run.lease) if self.world.is_main else None
        outcome, status = "ended by an exception", 1
        try:
            if self.world.is_main:
                self._writers += open_writers(self.run, life.life)
            if self._fresh or life.fresh:
                self.checkpoints.begin_anew()
            self._begin(self.state)
            yield self.state
            outcome, status = f"ended after step {self.state.step}", 0
            if self.stop.signum:
                outcome, status = f"stopped after step {self.state.step}", int(str(self.stop.stopped().code))
        finally:
            self._progress.close()
            while self._writers:
                self._writers.pop().close()
            self._saving.close()
            self.stop.leave()
            if lease is not None:
                try:
                    self.run.update_life(life, ended=time.time(), status=status, outcome=outcome)
                except RunDirError as error:  # a full disk: it must not hide what has ended the loop
                    log.warn(f"how this life ended is not recorded: {error}")
                lease.release()

    def _begin(self, state: TrainState) -> None:
        """Collective. Load the newest checkpoint if there is one, and say what will happen."""
        seed.seed_rank(self.seed, self.world.rank)
        if begin_training(state.model):
            log.say("the model was in evaluation mode (as from_pretrained leaves it), and is now in training mode")
        check_rates(state)
        manifest = self.checkpoints.load_latest(state.parts)
        self._saving.begin(state.step, saved=manifest is not None)
        self._skipped.begin(state.step)
        self._begun_at = self._weights.finite_at = state.step
        batch, strategy, precision = self.loader.describe_batch(), self.sync.describe(), self._precision.name
        lines = messages.begun(
            state.model, f"{precision} on {self.device.type}", self.loader.describe(), batch, strategy, self._lr_text
        )
        for line in lines:
            log.say(line)
        if manifest is None:
            if len(self.run.lives()) > 1:
                log.say("no checkpoint of an earlier life to go on from: from the beginning")
        elif self._done(state):
            log.say(already_done(self.run, self.world, state.step, by_script=state.stopped))
        else:
            same_ranks = manifest.world_size == self.world.world_size
            for line in messages.resumed(state, manifest.info, self._numerics(), same_ranks):
                log.say(line)
        self._progress.begin(self._total_steps(), state.step)
        self._log.begin()
        self._divergence.begin(state.step)

    def _say_end(self, state: TrainState) -> None:
        if not self.world.is_main:
            return
        where = self._saving.folder
        if self.stop.signum:
            argv = [] if self.world.run_dir is not None else sys.orig_argv  # a launcher will say it
            for line in messages.stopped(state, where or self.checkpoints.folder, argv):
                self._progress.say(line)
        elif where is not None:  # something was left to do
            self._progress.say(messages.ended(state, self._begun_at, self._breakdown.since_start().text(), where))
            if self._keep_best is not None:
                self._progress.say(messages.best(self._keep_best, self.checkpoints.best()))

    def _ready_to_save(self, state: TrainState) -> None:
        """Collective. What is saved is measured, finite and the same on all ranks."""
        self._log.reduce(state)
        self._weights.check(state, f"found after step {state.step}")
        self._divergence.before_save(state)

    def _eval_loss(self, model: Any, batch: Any) -> dict[str, Pair]:
        return {"loss": self.forward(model, batch)}

    def _numerics(self) -> dict[str, Any]:
        return numerics(self._precision.name, self.device.type, self.state.optimizer, self.sync.describe())

    def _evaluation(
        self,
        data: Any,
        eval_fn: Callable[[Any, Any], Mapping[str, Pair] | None] | None,
        eval_metrics: Mapping[str, Any] | None,
    ) -> Evaluate | None:
        """None without data."""
        if data is None:
            return None
        self._once(data)  # an error now, not after the first epoch
        metrics = Metrics(eval_metrics)
        metrics.to(self.device)
        once = functools.partial(self._once, data)
        return Evaluate(eval_fn or self._eval_loss, once, self.sync, metrics, self._precision, self._progress, self._writers)

    def _total_steps(self) -> int | None:
        epochs, steps = self.loader.max_epochs, self.loader.steps_per_epoch
        by_epochs = epochs * steps if epochs is not None and steps is not None else None
        return min((n for n in (self.max_steps, by_epochs) if n is not None), default=None)
