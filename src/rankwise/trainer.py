"""The Trainer: a model, an optimizer, a step function and a dataset in; a trained model out, on any number of ranks.

    def step(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    Trainer(model, optimizer, step, dataset, global_batch_size=64, max_epochs=3).fit()

`fit` is the whole loop, on one page; the parts that it calls also work without it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rankwise import errors
from rankwise.actions.of_trainer import Actions
from rankwise.actions.periodic import Action, every
from rankwise.actions.schedule import Schedule, check_schedule
from rankwise.actions.timed import Moments
from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint.saving import Saving
from rankwise.data import Loader
from rankwise.data.habits import warn_of_split
from rankwise.data.kinds import traits_of_split
from rankwise.dist import comm, log, seed
from rankwise.dist.device import local_device
from rankwise.dist.world import agent_row
from rankwise.errors import ConfigError, RunDirError
from rankwise.evaluation import Evaluate, predict
from rankwise.host.arguments import (
    DATA,
    FLAG,
    FROM_ONE,
    FROM_ZERO,
    FUNCTION,
    FUNCTIONS,
    OPTIMIZER,
    PATH,
    Argument,
    having,
    instance,
    is_number,
    one_of,
    takes,
)
from rankwise.host.text import in_lines
from rankwise.report.speed import since_change
from rankwise.run.directory import RunDir
from rankwise.run.lease import Fence
from rankwise.stop.signal import StopSignal
from rankwise.sync import StepResult, SyncStrategy
from rankwise.sync import names as strategies
from rankwise.sync.results import Results
from rankwise.sync.skipped import SkippedSteps
from rankwise.sync.strategy import LateResult
from rankwise.telemetry.breakdown import TimeBreakdown
from rankwise.telemetry.meters import Meters
from rankwise.telemetry.progress import Progress
from rankwise.training import messages
from rankwise.training import optimizer as optimizers
from rankwise.training.arguments import ELSEWHERE, MOVED, NOT_OF_FIT, as_loader, check_length
from rankwise.training.fingerprint import Fingerprint, compare, numerics
from rankwise.training.finite import Weights, check_rates
from rankwise.training.mean_loss import warn_of_means
from rankwise.training.model import begin_training, check_synced, check_unwrapped, prepare
from rankwise.training.open_run import already_done, open_run, run_path, take_folder, use_folder
from rankwise.training.precision import PRECISION, Precision
from rankwise.training.state import Stateful, TrainState
from rankwise.training.step import loss_and_count

_SCHEDULER = having("one of torch.optim.lr_scheduler", "step", "state_dict")
_STRATEGY = having("a strategy: rankwise.AllReduce()", "attach", "backward", "step").or_(strategies.NAME)
_LIMIT = Argument(
    lambda value: value == math.inf or (is_number(value) and value > 0), "a number above 0: the largest norm of the gradient"
)
_EVALUATE = instance(Evaluate, "Evaluate(data, fn)").or_(
    Argument(
        lambda value: (
            DATA.accepts(value) and not (isinstance(value, list | tuple) and any(isinstance(e, Evaluate) for e in value))
        ),
        f"{DATA.words}; one Evaluate: others are actions=[Evaluate(...)]",
    )
)
_PRECISION = PRECISION.or_(instance(Precision, "Precision(name, ...)"))
_wait_s = attrgetter("wait_s")


def _always(_state: TrainState) -> bool:
    """When an action is due that does not say it."""
    return True


_PREDICTED = Argument(DATA.accepts, "a dataset")


class Trainer:
    """Trains `model` with `optimizer` and `step_fn` on `train_data`; all arguments after these four are keyword-only.

    `model`: the module with all trained parameters. `step_fn(model, batch)` -> (loss sum, count). `train_data`: a `Loader`, or
    a dataset with `batch_size` (samples per rank and micro-batch) or `global_batch_size` (of a step, over all ranks), and
    `accumulate` micro-batches. Give `max_epochs` or `max_steps` or both. `scheduler` steps once per optimizer step, but not
    after a skipped step; torch's ReduceLROnPlateau gets eval_loss. `clip_norm`: the largest norm of the mean gradient.
    `precision`: fp32, bf16, fp16, or a Precision. `sync`: a strategy or its name, "local-sgd:16"; by default that of
    `rankwise run --sync`, otherwise AllReduce(), the exact gradient. `evaluate`: an Evaluate, or a dataset to compute the loss
    on after each epoch. `checkpoints`: when the state is saved, and which checkpoints are kept; default: every 300 s, the last
    two. `actions`: callables of the TrainState, run after each step, after the evaluation (rankwise.actions). `seed` (0): sets
    the order of the samples and the random numbers of the ranks. `run_dir`: where to write if the script was started without
    `rankwise run`.

    A run directory with checkpoints is resumed; `fit(fresh=True)` starts from scratch. Raises ConfigError for wrong arguments.
    """

    @takes(
        model=instance(nn.Module, "a torch.nn.Module"), optimizer=OPTIMIZER, step_fn=FUNCTION, train_data=DATA,
        batch_size=FROM_ONE.or_none, global_batch_size=FROM_ONE.or_none, accumulate=FROM_ONE.or_none,
        max_epochs=FROM_ONE.or_none, max_steps=FROM_ONE.or_none, scheduler=_SCHEDULER.or_none, clip_norm=_LIMIT.or_none,
        precision=_PRECISION, sync=_STRATEGY.or_none, evaluate=_EVALUATE.or_none,
        checkpoints=instance(Checkpoints, "Checkpoints(...)").or_none, actions=FUNCTIONS, seed=FROM_ZERO.or_none,
        run_dir=PATH.or_none, moved={**MOVED, **ELSEWHERE},
    )  # fmt: skip
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        step_fn: Callable[[Any, Any], tuple[torch.Tensor, float | torch.Tensor]],
        train_data: Any,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        accumulate: int | None = None,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        scheduler: Any = None,
        clip_norm: float | None = None,
        precision: str | Precision = "fp32",
        sync: SyncStrategy | str | None = None,
        evaluate: Any = None,
        checkpoints: Checkpoints | None = None,
        actions: Sequence[Action] = (),
        seed: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        errors.without_traceback()
        check_unwrapped(model)
        optimizers.check(model, optimizer, scheduler)
        self.world = comm.init()
        self.device = local_device(self.world)
        self.max_steps, self.step_fn = max_steps, step_fn
        self.precision = precision if isinstance(precision, Precision) else Precision(precision)
        self.loader = as_loader(
            train_data, max_epochs, batch_size=batch_size, global_batch_size=global_batch_size, accumulate=accumulate, seed=seed
        )
        check_length(self.loader.max_epochs, max_steps)
        self.seed = self.loader.seed
        self.sync = strategies.chosen(sync)
        self._unattached = copy.deepcopy(self.sync)
        self.run = RunDir(run_path(self.world, run_dir))
        self._is_run_chosen = run_dir is not None and self.world.run_dir is None
        self.checkpoints = checkpoints if checkpoints is not None else Checkpoints()
        if not self.checkpoints.has_folder:
            self.checkpoints.folder = self.run.checkpoints
        self.stop = StopSignal()
        self.evaluate = None if evaluate is None else evaluate if isinstance(evaluate, Evaluate) else Evaluate(evaluate)
        ours = [self.evaluate] if self.evaluate is not None else []
        self._actions = Actions([*ours, *actions], scheduler)
        self._actions.check(self.checkpoints.keep_best)
        fixed = {"clip_norm": clip_norm, "drop_last": self.loader.drop_last, **self.loader.sizes}
        self._settings = Fingerprint.of(fixed, optimizer, self._actions.scheduler)
        self._compare_ranks()
        nominal = self.loader.global_batch_size
        optimizers.check_scaled(optimizer, nominal if not self.loader.sizes.keys() & {"batch_size", "batch_tokens"} else None)
        model = prepare(model, self.device, self.world)
        optimizers.fuse(optimizer)
        self.state = TrainState(model, optimizer)
        self._attach = functools.partial(type(self.sync).attach, clip_norm=clip_norm, typical_count=nominal)
        self._attach(self.sync, model, optimizer, loss_scale=self.precision.new_loss_scale())
        check_synced(model, self.loader.fewest, self.world.world_size * self.loader.accumulate)
        self.progress = Progress(agent_row(self.world))
        self.meters = Meters("loss")
        self._in_actions_s = 0.0
        self.breakdown = TimeBreakdown(self._sources())
        self._has_begun = False
        self._wire()

    @property
    def run_dir(self) -> Path:
        """Where the run writes."""
        return self.run.path

    def _compare_ranks(self) -> None:
        """Collective. Raises ConfigError on all ranks if a rank has other settings."""
        loader = self.loader
        given: dict[str, Any] = {"max_epochs": loader.max_epochs, "max_steps": self.max_steps}
        given |= {"accumulate": loader.accumulate, "seed": self.seed, **self._settings.fixed, **loader.traits}
        given |= {"precision": self.precision.name, "the strategy": type(self.sync).__name__}
        for each in self._actions.evaluations:
            given |= {f"of {each.name}, {key}": value for key, value in traits_of_split(getattr(each, "data", None)).items()}
        given |= {
            "the log's every_steps": self._actions.log.every_steps,
            "the evaluations": self._actions.schedule_of_evaluations,
        }
        given |= {"keep_best": self.checkpoints.keep_best, "device": self.device.type}
        compare(given if loader.is_split else given | {"the number of samples in train_data": loader.samples})

    def _sources(self) -> dict[str, Callable[[], float]]:
        """How the time of steps was spent so far, in seconds."""
        sources = {
            "data wait": lambda: self.loader.wait_s,
            "all-reduce": lambda: self.sync.wait_s - self._actions.log.slower_ranks_s,
            "slower ranks": lambda: self._actions.log.slower_ranks_s,
            "saving": lambda: self.checkpoints.wait_s,
            "actions": lambda: self._in_actions_s,
        }
        if evaluations := self._actions.evaluations:
            sources["evaluation"] = lambda: sum(map(_wait_s, evaluations))
        return sources

    def _wire(self) -> None:
        """Decide what runs after each step, in which order, and what a checkpoint contains."""
        parts = self._actions
        self._weights = Weights()
        self._skipped = SkippedSteps(self._weights, self.progress.say)
        self._saving = Saving(
            self.checkpoints, self.progress.say, ready=self._ready_to_save, info=self._numerics,
            ends=lambda state: self._done(state) or bool(self.stop.signum),
        )  # fmt: skip
        for action in parts.all():
            attach = getattr(action, "attach", None)
            if attach is not None:
                attach(self)
        schedule = Schedule(parts.stepped) if parts.stepped is not None else None
        are_finite = functools.partial(self.meters.are_finite, "loss")
        self._results = Results(self._skipped, are_finite, self.meters.forget, schedule)
        self._dues = [getattr(action, "is_due", _always) for action in parts.given]
        hears: list[Action] = [self._saving.hear] if self.checkpoints.is_background and self.world.is_main else []
        triggers = self.checkpoints.triggers
        saves: list[Action] = [*([every(self._saving, **triggers)] if triggers else []), *self._saving.further()]
        self.actions: list[Action] = [
            parts.log, *hears, *([self._run_given] if parts.given else []), parts.write, check_rates, parts.replicas,
            *saves,
        ]  # fmt: skip
        self._moments = Moments(self.state, [*parts.given, *saves], self.stop, self._meet)
        self.actions.append(self._moments)
        of_state: dict[str, Stateful] = {
            "settings": self._settings, "train": self.state, "sync": self.sync, "model": self.state.model,
            "optimizer": self.state.optimizer, "loader": self.loader,
        }  # fmt: skip
        self.state.parts = parts.saved(of_state)

    def _run_given(self, state: TrainState) -> None:
        """Run the actions that the user has given, measure their time without that of evaluations, and follow what they have
        changed in the model."""
        evaluations = self._actions.evaluations
        if self._results.is_open and any(is_due(state) for is_due in self._dues):
            self._results.settle(state)
        began = time.perf_counter() - sum(map(_wait_s, evaluations))
        for action in self._actions.given:
            action(state)
        self._in_actions_s += time.perf_counter() - sum(map(_wait_s, evaluations)) - began
        self.sync.follow()

    @takes(fresh=FLAG, moved=NOT_OF_FIT)
    def fit(self, fresh: bool = False) -> TrainState:
        """Collective. Train until the last step or an agreed stop; everything is saved when it returns, or raises Stopped
        (after Ctrl-C in a notebook: Interrupted, a KeyboardInterrupt).

        Resumes from the last checkpoint of the run; with `fresh`, moves old checkpoints aside and starts from scratch. Raises
        ConfigError if it would start from scratch with a model that an earlier `fit` has changed.
        """
        with self._open(fresh) as state:
            batches = self._looked_at(iter(self.loader))
            while not self.stop.agreed(state.step) and not self._done(state):
                micro_batches = next(batches)  # the data of one optimizer step: this rank's part of the global batch
                for i, batch in enumerate(micro_batches, start=1):
                    loss_sum, count = self.forward(state.model, batch)
                    self.sync.backward(loss_sum, count, last=i == len(micro_batches))
                    self.meters.add(loss=(loss_sum.detach(), count))
                self._results.hear(state, after=len(micro_batches))  # of the last step: a GPU has judged it by now
                self._advance(state, self.sync.step(), len(micro_batches))
                for action in self.actions:  # log, evaluate, the user's own, save: each is an action
                    action(state)
            self._results.hear(state)
            self._meet()
            self.stop.finish()
            if is_stopped := self._moments.end():  # by the script
                self._end_early(state)
            # The checkpoint of this step does not record that the script has stopped there.
            self._saving.at_end(state, again=is_stopped)
            if not self.stop.signum:
                rest = self.sync.finish()
                if rest is not None and (not rest.finite or rest.total <= 0):
                    self._skipped.add(state, rest)
            self._say_end(state)
        if self.stop.signum:
            raise self.stop.to_raise()
        return state

    @takes(data=_PREDICTED, predict_fn=FUNCTION, on=one_of("main", "all"), into=FUNCTION.or_none)
    def predict(
        self, data: Any, predict_fn: Callable[[Any, Any], Any], *, on: str = "main", into: Callable[..., object] | None = None
    ) -> Any:
        """Collective. What `predict_fn(model, batch)` returns for each sample of `data`, in the order of `data`: on the main
        rank, None on the others (with `on="all"` on all), or passed to `into(indices, rows)`. See `rankwise.predict`."""
        with self.sync.averaged():
            loader = data if isinstance(data, Loader) else self.loader.over(data)
            return predict(predict_fn, self.state.model, loader, on=on, into=into, precision=self.precision)

    def new_sync(self, model: nn.Module, optimizer: Optimizer, **given: Any) -> SyncStrategy:
        """Collective. A strategy like this Trainer's, attached to copies of its model and optimizer (`given`: other arguments
        of `attach`)."""
        return self._attach(copy.deepcopy(self._unattached), model, optimizer, **given)

    def forward(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
        """(loss sum, count) of step_fn, in this Trainer's precision."""
        if self.precision.dtype is None:
            result = self.step_fn(model, batch)
        else:
            with self.precision.autocast():
                result = self.step_fn(model, batch)
        return loss_and_count(result)

    def _looked_at(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """Collective at the first step: the stream is compared, and step_fn is tried on the batches of this step."""
        if self.state.step == 0:
            for micro_batches in itertools.islice(batches, 1):
                warn_of_split(self.loader.begins_with)
                warn_of_means(self.forward, self.state.model, micro_batches)
                yield micro_batches
        yield from batches

    def _advance(self, state: TrainState, result: StepResult | LateResult, micro_batches: int) -> None:
        state.step += 1
        state.epoch = self.loader.epoch
        state.epoch_ended = self.loader.position == 0
        state.last = self._done(state)
        state.skipped = False
        self._results.add(state, result, micro_batches)
        if isinstance(result, LateResult) and self._actions.log.is_due(state):
            self._results.hear(state)

    def _end_early(self, state: TrainState) -> None:
        """Collective. The script has stopped the run: do what the actions of this step would have done if it were the last."""
        if not state.last:
            state.last = True
            self._actions.at_end(state)
            self.sync.follow()

    def _done(self, state: TrainState) -> bool:
        return state.stopped or self.loader.finished or (self.max_steps is not None and state.step >= self.max_steps)

    # --- before and after the loop

    @contextlib.contextmanager
    def _open(self, fresh: bool) -> Iterator[TrainState]:
        """Collective. Begin the run, and close what is open when the loop ends or raises."""
        if fresh and self._has_begun:
            raise ConfigError(messages.used_before("fit(fresh=True) starts from scratch"))
        folder = self.checkpoints.folder
        first = use_folder(folder, self.state.model, chosen=self._is_run_chosen or folder != self.run.checkpoints)
        attempt, lease = open_run(self.run, self.world, fresh)
        self.checkpoints.fence = Fence(self.run.lease) if self.world.is_main else None
        outcome, status, raised = "ended by an exception", 1, True
        of_folder = None
        try:
            of_folder = take_folder(folder, self.run, new=first and attempt.life == 1 and not (fresh or attempt.fresh))
            if fresh:
                self.checkpoints.start_from_scratch()
            self._begin(self.state)
            yield self.state
            outcome, status = f"ended after step {self.state.step}", 0
            if self.stop.signum:
                outcome, status = f"stopped after step {self.state.step}", int(str(self.stop.stopped().code))
            raised = False
        finally:
            self.progress.close()
            failed = self._actions.close()
            self._saving.close()
            self.stop.leave()
            if of_folder is not None:
                of_folder.release()
            if failed and not raised:
                outcome, status = "ended by an exception", 1
            if lease is not None:
                try:
                    self.run.update_attempt(attempt, ended=time.time(), status=status, outcome=outcome)
                except RunDirError as error:  # a full disk: it must not hide the exception that ended the loop
                    log.warn(f"cannot record the outcome of this attempt: {error}")
                lease.release()
            self._settings.trained(self.state.optimizer, self._actions.scheduler)
            for reason in failed:  # it must not hide the exception that ended the loop
                if not raised:
                    raise reason
                log.warn(f"an action cannot be closed: {type(reason).__name__}: {reason}")

    def _begin(self, state: TrainState) -> None:
        """Collective. Load the newest checkpoint, if there is one, and print the plan."""
        seed.seed_rank(self.seed, self.world.rank)
        if begin_training(state.model):
            log.say("the model was in evaluation mode (as from_pretrained leaves it), and is now in training mode")
        check_rates(state)
        steps = self._total_steps()
        if steps is not None:
            self.sync.check_length(steps)
        manifest = self.checkpoints.load_latest(state.parts, may_be_new=self._actions.named.keys())
        if manifest is None and self._has_begun:
            raise ConfigError(messages.used_before("there is no checkpoint to resume from"))
        self._has_begun = True
        self.meters.clear()  # an exception may have ended a step of the last `fit`
        check_synced(state.model, self.loader.fewest, self.world.world_size * self.loader.accumulate)  # it may have changed
        self.sync.follow()  # the checkpoint may freeze and unfreeze parameters
        if self._actions.stepped is not None and steps is not None:
            check_schedule(self._actions.stepped, steps)
        self._saving.begin(state.step, saved=manifest is not None)
        self._results.begin()
        self._begun_at = self._weights.finite_at = state.step
        batch, strategy, precision = self.loader.describe_batch(), self.sync.describe(), self.precision.name
        scaled = optimizers.scaled(state.optimizer)
        rate = scaled.describe() if scaled is not None and scaled.factor != 1.0 else ""
        lines = messages.begun(state.model, f"{precision} on {self.device.type}", self.loader.describe(), batch, strategy, rate)
        for line in lines:
            log.say(line)
        if manifest is None:
            if len(self.run.attempts()) > 1:
                log.say("found no checkpoint of an earlier attempt: starting from scratch")
        elif self._done(state):
            log.say(in_lines(already_done(self.run, self.world, state.step, state.stopped, state.stop_reason)))
        else:
            same_ranks = manifest.world_size == self.world.world_size
            for line in messages.resumed(state, manifest.info, self._numerics(), same_ranks):
                log.say(line)
        self._moments.begin()
        self.progress.begin(steps, state.step)
        for action in self._actions.all():
            begin = getattr(action, "begin", None)
            if begin is not None:
                begin(state)

    def _say_end(self, state: TrainState) -> None:
        if not self.world.is_main:
            return
        where = self._saving.folder
        if state.step > self._begun_at:
            for line in since_change(self.run):
                self.progress.say(line)
        if self.stop.signum:
            for line in messages.stopped(state, where or self.checkpoints.folder, launched=self.world.run_dir is not None):
                self.progress.say(line)
        elif where is not None:  # steps were left
            self.progress.say(messages.ended(state, self._begun_at, self.breakdown.since_start().text(), where))
            if self.checkpoints.keep_best is not None:
                self.progress.say(messages.best(self.checkpoints.keep_best, self.checkpoints.best()))

    def _ready_to_save(self, state: TrainState) -> None:
        """Collective. Before a save: measure the state, and check that it is finite and the same on all ranks."""
        self._results.hear(state)
        self._meet()
        self._actions.log.reduce(state)
        self._actions.write(state)
        self._weights.check(state, f"found after step {state.step}")
        self._actions.replicas.before_save(state)

    def _meet(self) -> None:
        """Collective. Finds out, before anything else is done, whether actions have changed what is trained on only one
        rank."""
        if self._actions.given:
            self.sync.meet()

    def _numerics(self) -> dict[str, Any]:
        return numerics(self.precision.name, self.device.type, self.state.optimizer, self.sync.describe())

    def _total_steps(self) -> int | None:
        epochs, steps = self.loader.max_epochs, self.loader.steps_per_epoch
        by_epochs = epochs * steps if epochs is not None and steps is not None else None
        return min((n for n in (self.max_steps, by_epochs) if n is not None), default=None)
