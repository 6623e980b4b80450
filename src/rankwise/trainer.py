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
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rankwise import errors
from rankwise.actions.periodic import Action, Log, every
from rankwise.actions.plateau import check_plateau, step_plateau
from rankwise.actions.timed import Moments
from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint.retention import check_name
from rankwise.data import Loader
from rankwise.data.batching import of_all_ranks
from rankwise.dist import comm, log, seed
from rankwise.dist.device import local_device
from rankwise.dist.world import agent_row
from rankwise.dist.world import checkpoint_scope as scope_of
from rankwise.errors import CheckpointError, ConfigError, RunDirError, StepError
from rankwise.evaluation import Evaluate, Metrics, Pair, predict
from rankwise.host.terminal import short
from rankwise.run.directory import RunDir
from rankwise.run.lease import Fence, Lease
from rankwise.stop.signal import StopSignal
from rankwise.sync import AllReduce, Shared, StepResult, SyncStrategy
from rankwise.sync.divergence import Divergence
from rankwise.telemetry import Meters, Progress, TimeBreakdown
from rankwise.telemetry.writers import Writer, open_writers
from rankwise.training import optimizer as optimizers
from rankwise.training.fingerprint import Fingerprint, compare, plain
from rankwise.training.finite import Weights, check_rates
from rankwise.training.mean_loss import warn_of_means
from rankwise.training.model import begin_training, is_synced, prepare
from rankwise.training.open_run import already_done, open_run, run_path
from rankwise.training.precision import LossScale, Precision
from rankwise.training.state import Stateful, TrainState
from rankwise.training.step import loss_and_count

_LEFT_OUT_IN_A_ROW = 100  # steps; then it is no accident
_LEFT_OUT_TOLD = 3  # of them, one by one


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
        if max_epochs is None and max_steps is None:
            raise ConfigError("say how long to train: max_epochs=... or max_steps=...")
        numbers = {"max_epochs": max_epochs, "max_steps": max_steps, "log_every": log_every, "eval_every": eval_every}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: give a whole number from 1 up")
        if eval_data is None and (eval_fn is not None or eval_every is not None or eval_metrics is not None):
            raise ConfigError("eval_fn, eval_every and eval_metrics evaluate nothing without eval_data=...")
        if eval_fn is None and eval_metrics is not None:
            raise ConfigError("eval_metrics are updated by a function of yours: eval_fn=lambda model, batch: f1.update(...)")
        if workers < 0:
            raise ConfigError(f"workers={workers}: give how many processes fetch ahead, 0 for none")
        optimizers.check(model, optimizer)
        if keep_best is not None and not actions:  # an action may measure anything
            check_name(keep_best, eval_data is not None, eval_fn is not None)
        self.world = comm.init()
        self.device = local_device(self.world)
        self.max_steps = max_steps
        self.seed = seed
        self.step_fn = step_fn
        self._precision = Precision.of(precision, self.device)
        self._lr_text = ""
        size = of_all_ranks("batch_size", batch_size, global_batch_size, accumulate * self.world.world_size)
        tokens = of_all_ranks("batch_tokens", batch_tokens, global_batch_tokens, accumulate * self.world.world_size)
        if size is None and tokens is None and batch_sampler is None:
            raise ConfigError("give either batch_size (of one rank) or global_batch_size (of all ranks together)")
        self.loader = Loader(
            train_data,
            self.world,
            global_batch_size=size,
            global_batch_tokens=tokens,
            lengths=lengths,
            batch_sampler=batch_sampler,
            accumulate=accumulate,
            seed=seed,
            drop_last=drop_last,
            uneven=uneven,
            max_epochs=max_epochs,
            workers=workers,
            collate_fn=collate_fn,
            device=self.device,
        )
        nominal = self.loader.global_batch_size
        if sync is not None and reduction != "auto":
            raise ConfigError(f"reduction belongs to the strategy when you give one: sync=AllReduce({reduction!r})")
        self.sync: SyncStrategy = AllReduce(reduction) if sync is None else sync
        self._unattached = copy.deepcopy(self.sync)
        self.run = RunDir(run_path(self.world, run_dir))
        self._fresh = fresh
        self._lease: Lease | None = None
        self._weights = Weights()
        self.checkpoints = Checkpoints(
            self.run.checkpoints, keep_last, keep_best, larger_is_better, keep_steps, keep_younger_than_s, background_saves,
            sharded_saves, checkpoint_scope or scope_of(self.world), checkpoint_mirror,
        )  # fmt: skip
        self._keep_best = keep_best
        self.stop = StopSignal(self.world)
        self.meters = Meters("loss")
        fixed = {"clip_norm": clip_norm, "lr_scale": lr_scale, "drop_last": drop_last, **optimizers.settings(optimizer)}
        fixed |= {"batch_size": batch_size} if batch_size is not None else {"global_batch_size": global_batch_size}
        fixed |= {"batch_tokens": batch_tokens} if batch_tokens is not None else {"global_batch_tokens": global_batch_tokens}
        fixed |= {"scheduler": type(scheduler).__name__ if scheduler is not None else None}
        kept = plain(scheduler.state_dict()) if scheduler is not None else {}
        self._settings = Fingerprint(fixed, {f"{type(scheduler).__name__}'s {name}": value for name, value in kept.items()})
        every_rank = {"max_epochs": max_epochs, "max_steps": max_steps, "accumulate": accumulate, "seed": seed, **fixed}
        every_rank |= {"precision": precision, "the strategy": type(self.sync).__name__, "reduction": reduction}
        every_rank |= {"log_every": log_every, "eval_every": eval_every, "keep_best": keep_best, "device": self.device.type}
        if uneven is None and not self.loader.is_split:
            every_rank["the number of samples in train_data"] = self.loader.samples
        compare(every_rank)
        model = prepare(model, self.device, self.world, sync_batchnorm, compile)
        self._prepare_optimizer(optimizer, scheduler, fused, lr_scale, (batch_size or batch_tokens) is not None)
        self.state = TrainState(model, optimizer)
        self._attach = functools.partial(type(self.sync).attach, clip_norm=clip_norm, typical_count=nominal)
        self._attach(self.sync, model, optimizer, loss_scale=LossScale() if precision == "fp16" else None)
        self._check_rest()
        self._writers: list[Writer] = []  # opened by `fit`, on the main rank
        self._progress = Progress(agent_row(self.world))
        samples, at_once = max(nominal // accumulate, 1), tokens and tokens / accumulate  # as many as in training
        once = functools.partial(
            Loader, world=self.world, shuffle=False, max_epochs=1, workers=workers, collate_fn=collate_fn, device=self.device
        )

        def loader_of(data: Any) -> Loader:
            by_tokens = at_once is not None and hasattr(data, "lengths")
            return once(data, global_batch_tokens=at_once) if by_tokens else once(data, global_batch_size=samples)

        self._once = loader_of
        evaluate = self._evaluation(eval_data, eval_fn, eval_metrics)
        self._breakdown = self._new_breakdown(evaluate)
        self._log = Log(
            self.meters,
            self._breakdown,
            self._progress,
            self._writers,
            every_steps=log_every,
            samples=lambda: self.loader.taken,
        )
        self.actions: list[Action] = [self._log, *([self._hear] if background_saves and self.world.is_main else [])]
        if isinstance(scheduler, ReduceLROnPlateau):
            check_plateau(scheduler_metric, eval_data is not None, eval_fn is not None, bool(actions))
        elif scheduler_metric is not None:
            raise ConfigError("scheduler_metric is what a ReduceLROnPlateau is stepped on; leave it out for another scheduler")
        elif scheduler is not None:
            # Not for a step that was left out: fp16 begins with some, and a warm-up would lose its first ones.
            self.actions.insert(0, lambda state: scheduler.step() if self._left_out_in_a_row == 0 else None)
        self.evaluate = evaluate
        if evaluate is not None:
            self.actions.append(every(evaluate, steps=eval_every, epochs=None if eval_every else 1, at_end=True))
        self.actions += actions
        if isinstance(scheduler, ReduceLROnPlateau):
            self.actions.append(step_plateau(scheduler, scheduler_metric or "eval_loss"))
        self._divergence = Divergence(self.sync, on_divergence)
        if actions:  # what they have changed of the model
            self.actions.append(lambda _: self.sync.follow())
        self.actions += [check_rates, self._divergence, every(self._save, seconds=save_every_s)]
        if keep_steps:
            self.actions.append(lambda state: self._save(state) if state.step in keep_steps else None)
        if keep_best is not None and keep_best != "loss":  # that of training is new each log interval: no occasion to save
            self.actions.append(self._save_if_best)
        self._moments = Moments(self.state, self.actions, self.stop)
        self.actions.append(self._moments)
        parts: dict[str, Stateful | None] = {
            "settings": self._settings, "train": self.state, "sync": self.sync, "model": model, "optimizer": optimizer,
            "loader": self.loader, "log": self._log, "scheduler": scheduler,
        }  # fmt: skip
        self.state.parts = {name: part for name, part in parts.items() if part is not None}

    def _check_rest(self) -> None:
        """A forward pass that waits for the other ranks must not be left out on one of them."""
        loader, ranks = self.loader, self.world.world_size
        if is_synced(self.state.model) and loader.fewest < ranks * loader.accumulate:
            raise ConfigError(
                f"SyncBatchNorm needs a sample on every rank, but the last global batch of an epoch may have {loader.fewest} "
                f"for {ranks} ranks; type drop_last=True, or choose another batch size"
            )

    def _prepare_optimizer(
        self, optimizer: Optimizer, scheduler: Any, fused: bool | None, lr_scale: str, by_rank: bool
    ) -> None:
        optimizers.fuse(optimizer, fused)
        factor = optimizers.lr_factor(lr_scale, self.world.world_size)
        if lr_scale != "none" and not by_rank:
            raise ConfigError(
                f"lr_scale={lr_scale!r} goes with batch_size: a global batch of {self.loader.global_batch_size} is the same on "
                "any number of ranks, and so is its learning rate"
            )
        if factor != 1.0:
            before = optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"])
            optimizers.scale_lr(optimizer, scheduler, factor)
            self._lr_text = f"learning rate {before:g} x {factor:.4g} = {before * factor:.4g} ({lr_scale} in the ranks)"

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
            if self._moments.end():
                self._saved_step = -1  # what was saved of this step does not say that the script has stopped there
            self._save_at_end(state)
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
            self._say_left_out(state, result.shared)
        else:
            self._left_out_in_a_row = 0

    def _done(self, state: TrainState) -> bool:
        return state.stopped or self.loader.finished or (self.max_steps is not None and state.step >= self.max_steps)

    def _say_left_out(self, state: TrainState, result: Shared) -> None:
        """All ranks see the same result, so all raise or none does."""
        if not result.finite:
            self._weights.check(state, f"since step {state.step - 1}")
        why = "the gradient is not finite" if not result.finite else f"its counts sum to {result.total:g}"
        state.steps_left_out += 1
        self._left_out_in_a_row += 1
        if self._left_out_in_a_row >= _LEFT_OUT_IN_A_ROW:
            raise StepError(f"{why}, for {_LEFT_OUT_IN_A_ROW} steps in a row: look at the loss, the learning rate and the data")
        if state.last and self._left_out_in_a_row == state.step - self._begun_at:
            raise StepError(f"{why}, in each of the {self._left_out_in_a_row} steps: nothing was trained")
        if self._left_out_in_a_row <= _LEFT_OUT_TOLD:
            more = f"; more are only counted, and {_LEFT_OUT_IN_A_ROW} in a row end the run"
            self._progress.say(
                f"warning: step {state.step} is left out on all ranks: {why} ({state.steps_left_out} so far)"
                f"{more if self._left_out_in_a_row == _LEFT_OUT_TOLD else ''}"
            )

    # --- before and after the loop

    @contextlib.contextmanager
    def _open(self) -> Iterator[TrainState]:
        """Collective. Begin; and, however the loop ends, close what is open."""
        life, self._lease = open_run(self.run, self.world, self._fresh)
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
            self._end_saving()
            self.stop.leave()
            if self._lease is not None:
                try:
                    self.run.update_life(life, ended=time.time(), status=status, outcome=outcome)
                except RunDirError as error:  # a full disk: it must not hide what has ended the loop
                    log.warn(f"how this life ended is not recorded: {error}")
                self._lease.release()

    def _end_saving(self) -> None:
        """What is being written is finished before another process may write here."""
        error = self.checkpoints.close()
        if error is not None and error is not self._told:
            log.warn(str(error))

    def _begin(self, state: TrainState) -> None:
        """Collective. Load the newest checkpoint if there is one, and say what will happen."""
        seed.seed_rank(self.seed, self.world.rank)
        if begin_training(state.model):
            log.say("the model was in evaluation mode (as from_pretrained leaves it), and is now in training mode")
        check_rates(state)
        manifest = self.checkpoints.load_latest(state.parts)
        self._saved_step = state.step if manifest is not None else -1
        self._begun_at = self._weights.finite_at = state.step
        self._saved_in: Path | None = None
        self._left_out_in_a_row = 0
        self._told: BaseException | None = None  # of a save that failed
        self._say_plan(state)
        if manifest is None and len(self.run.lives()) > 1:
            log.say("no checkpoint of an earlier life to go on from: from the beginning")
        elif manifest is not None and self._done(state):
            log.say(already_done(self.run, self.world, state.step, by_script=state.stopped))
        elif manifest is not None:
            log.say(f"going on from step {state.step} (epoch {state.epoch + 1})")
            now = self._numerics()
            if manifest.world_size != self.world.world_size:
                del now["reduction"]  # it follows from that, which has been said
            differs = [f"{k} {manifest.info[k]} -> {v}" for k, v in now.items() if manifest.info.get(k, v) != v]
            if differs:
                log.say(f"not bit for bit as if it had never stopped: {', '.join(differs)}")
        self._progress.begin(self._total_steps(), state.step)
        self._log.begin()
        self._divergence.begin(state.step)

    def _say_end(self, state: TrainState) -> None:
        if not self.world.is_main:
            return
        where = short(self._saved_in or self.checkpoints.folder)
        if self.stop.signum:
            self._progress.say(f"stopped after step {state.step}, saved in {where}")
            if self.world.run_dir is None:  # no launcher that will say it
                self._progress.say(f"to go on, type: {shlex.join(sys.orig_argv)}")
            return
        if self._saved_in is None:  # nothing was left to do
            return
        figures = ", ".join(f"{name} {value:.4g}" for name, value in state.metrics.items())
        if state.steps_left_out:
            figures += f", {state.steps_left_out} steps left out"
        before = f" ({self._begun_at} of them before)" if self._begun_at else ""
        how = "stopped by the script" if state.stopped else "done"
        self._progress.say(
            f"{how}: {state.step} steps{before}, {self._breakdown.since_start().text()}, {figures}\nsaved in {where}"
        )
        if self._keep_best is not None:
            best = self.checkpoints.best()
            self._progress.say(f"best {self._keep_best}: {short(best) if best else 'none was measured'}")

    def _save(self, state: TrainState) -> None:
        """Collective. Save unless this step is saved already. A periodic save that fails is a warning: older checkpoints
        stay, and the next may succeed; at the end it is an error."""
        if state.step == self._saved_step:
            return
        self._log.reduce(state)
        self._weights.check(state, f"found after step {state.step}")
        self._divergence.before_save(state)
        try:
            self.checkpoints.wait()  # for the one before
        except CheckpointError as error:
            self._say_not_saved(error)
        try:
            self._saved_in = self.checkpoints.save(state.parts, state.step, self._numerics(), state.metrics_now())
        except CheckpointError as error:
            if self._done(state) or self.stop.signum:
                raise
            self._say_not_saved(error)
        else:
            self._saved_step = state.step

    def _save_at_end(self, state: TrainState) -> None:
        """Collective. The state as it is now is on the disk when this returns."""
        try:
            self.checkpoints.wait()
        except CheckpointError as error:
            self._say_not_saved(error, "it is tried once more")
            self._saved_step = -1  # it may have been this step's
        self._save(state)
        self.checkpoints.wait()

    def _hear(self, state: TrainState) -> None:
        """A save behind the loop that fails is said at the next step, by the main rank; all hear of it at the next save."""
        if self.checkpoints.failure is not None:
            self._say_not_saved(self.checkpoints.failure)

    def _say_not_saved(self, error: BaseException, then: str = "training goes on") -> None:
        if error is not self._told:
            self._told = error
            self._progress.say(f"warning: {error}; {then}")

    def _save_if_best(self, state: TrainState) -> None:
        """Collective. After an evaluation that is the best so far. The first one must have measured `keep_best`."""
        figures = state.metrics_now()
        evaluated = any(name.startswith("eval_") for name in figures)
        expected = self._keep_best in figures or (evaluated and self._keep_best not in state.measured)
        if expected and self.checkpoints.is_best(figures):
            self._save(state)

    def _eval_loss(self, model: Any, batch: Any) -> dict[str, Pair]:
        return {"loss": self.forward(model, batch)}

    def _numerics(self) -> dict[str, Any]:
        """What changes the last bits of a result without being a setting of the training."""
        return {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": self.device.type,
            "precision": self._precision.name,
            "fused": optimizers.is_fused(self.state.optimizer),
            "reduction": self.sync.describe(),
        }

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

    def _new_breakdown(self, evaluate: Evaluate | None) -> TimeBreakdown:
        sources = {
            "data wait": lambda: self.loader.wait_s,
            "all-reduce": lambda: self.sync.wait_s,
            "saving": lambda: self.checkpoints.wait_s,
        }
        if evaluate is not None:
            sources["evaluation"] = lambda: evaluate.wait_s
        return TimeBreakdown(sources)

    def _total_steps(self) -> int | None:
        epochs, steps = self.loader.max_epochs, self.loader.steps_per_epoch
        by_epochs = epochs * steps if epochs is not None and steps is not None else None
        return min((n for n in (self.max_steps, by_epochs) if n is not None), default=None)

    def _say_plan(self, state: TrainState) -> None:
        parameters = sum(p.numel() for p in state.model.parameters())
        log.say(f"{_amount(parameters)} parameters, {self._precision.name} on {self.device.type}; {self.loader.describe()}")
        log.say("; ".join(text for text in (self.loader.describe_batch(), self.sync.describe()) if text))
        if self._lr_text:
            log.say(self._lr_text)


def _amount(n: int) -> str:
    return f"{n / 1e6:.2f} M" if n >= 10_000 else str(n)
