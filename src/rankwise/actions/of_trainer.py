"""The actions of one Trainer, sorted by type: those that the user has given, and its own.

actions = Actions([evaluate, ema, report], scheduler);  actions.check(keep_best="eval_loss")
for action in actions.all(): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch.optim.lr_scheduler import ReduceLROnPlateau

from rankwise.actions.early_stopping import EarlyStopping
from rankwise.actions.log import Log
from rankwise.actions.periodic import Action, Every
from rankwise.actions.plateau import Plateau
from rankwise.errors import ConfigError
from rankwise.sync.divergence import CheckReplicas
from rankwise.telemetry.writers import JsonLines, TensorBoard, Writer
from rankwise.training.metric import check_measured
from rankwise.training.state import Stateful, TrainState


@runtime_checkable
class Evaluation(Protocol):
    """An action that measures metrics; `Evaluate` is one."""

    name: str
    names_by_user: bool
    """Whether a function of the user names its metrics."""
    every_steps: int | None
    every_epochs: int | None
    wait_s: float

    def at_end(self, state: TrainState) -> None:
        """The script has stopped the run after this step."""


class Actions:
    """`given`: the user's actions, in their order. A Log, CheckReplicas or writer among them replaces the Trainer's own.
    `scheduler`: the argument of the Trainer."""

    def __init__(self, given: Sequence[Action], scheduler: Any) -> None:
        plateau = [Plateau(scheduler)] if isinstance(scheduler, ReduceLROnPlateau) else []
        both: list[Action] = [*given, *plateau]
        if kind := next((action for action in map(_inner, given) if isinstance(action, type)), None):
            raise ConfigError(f"actions: {kind.__name__} is a class; create an object: {kind.__name__}(...)")
        self.log = _last_of(Log, both) or Log()
        self.replicas = _last_of(CheckReplicas, both) or CheckReplicas()
        self.writers = [action for action in both if isinstance(action, Writer)]
        for kind in (JsonLines, TensorBoard):
            if not any(isinstance(writer, kind) for writer in self.writers):
                self.writers.append(kind())
        self.given = [action for action in both if not _replaces(action)]
        self.evaluations = [inner for action in self.given if isinstance(inner := _inner(action), Evaluation)]
        self.stepped = scheduler if not plateau else None
        """The scheduler that is stepped after each step."""
        self.named = self._named()
        """The actions that are saved, by their names."""

    @property
    def scheduler(self) -> Any:
        """The object that changes the learning rate, or None."""
        of_plateau = [inner.scheduler for action in self.given if isinstance(inner := _inner(action), Plateau)]
        return self.stepped if self.stepped is not None else next(iter(of_plateau), None)

    def all(self) -> Iterator[Any]:
        """Each action once, without its triggers."""
        yield from (_inner(action) for action in (self.log, self.replicas, *self.given, *self.writers))

    def _named(self) -> dict[str, Stateful]:
        found: dict[str, Stateful] = {}
        for action in map(_inner, self.given):
            if not (hasattr(action, "state_dict") and hasattr(action, "load_state_dict")):
                continue
            name = getattr(action, "name", None)
            kind = type(action).__name__
            if not isinstance(name, str) or not name:
                raise ConfigError(
                    f"the action {kind} has a state_dict but no name; give it an attribute `name`, under which it is saved"
                )
            if name in found:
                raise ConfigError(
                    f"two actions are saved as {name!r} ({type(found[name]).__name__} and {kind}); "
                    "give one of them another name"
                )
            found[name] = action
        return found

    def check(self, keep_best: str | None) -> None:
        """Raises ConfigError for two evaluations with one name, and for a metric that no evaluation measures."""
        names = [evaluation.name for evaluation in self.evaluations]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two evaluations have the name {name!r}; rename one: Evaluate(..., name='ema')")
        if any(not isinstance(_inner(action), Evaluation | EarlyStopping | Plateau) for action in self.given):
            return  # an action may measure anything
        measured = {evaluation.name: evaluation.names_by_user for evaluation in self.evaluations}
        if keep_best is not None:
            check_measured("keep_best", keep_best, measured)
        for action in map(_inner, self.given):
            if isinstance(action, EarlyStopping | Plateau):
                check_measured(f"{type(action).__name__}: metric", action.metric, measured)

    @property
    def schedule_of_evaluations(self) -> list[tuple[Any, ...]]:
        """When each evaluation runs."""
        return [(each.name, each.every_steps, each.every_epochs) for each in self.evaluations]

    def saved(self, of_state: Mapping[str, Stateful]) -> dict[str, Stateful]:
        """Everything that a checkpoint saves: `of_state`, the log, the scheduler, and the named actions."""
        own = {**of_state, "log": self.log, **({"scheduler": self.stepped} if self.stepped is not None else {})}
        for name, action in self.named.items():
            if name in own:
                raise ConfigError(
                    f"the action {type(action).__name__} has the name {name!r}, which the Trainer itself uses; give it "
                    "another: name=..."
                )
        return {**own, **self.named}

    def write(self, state: TrainState) -> None:
        """Pass new metrics to the writers."""
        if state.new_metrics:
            for writer in self.writers:
                writer(state)

    def at_end(self, state: TrainState) -> None:
        """Collective. The script has stopped the run after this step: call what is due at the end and was not called yet."""
        self.log.reduce(state)
        for action in self.given:
            if isinstance(action, Every | Evaluation):
                action.at_end(state)

    def close(self) -> list[Exception]:
        """Close all actions that can be closed. Returns what they have raised."""
        errors: list[Exception] = []
        for action in self.all():
            close: Callable[[], None] | None = getattr(action, "close", None)
            try:
                if close is not None:
                    close()
            except Exception as error:
                errors.append(error)
        return errors


def _replaces(action: object) -> bool:
    """Whether it replaces one of the Trainer's own actions."""
    return isinstance(action, Log | CheckReplicas | Writer)


def _inner(action: Any) -> Any:
    """The action inside `every`."""
    while isinstance(action, Every):
        action = action.action
    return action


def _last_of(kind: type[Any], actions: Sequence[Any]) -> Any:
    return next((action for action in reversed(actions) if isinstance(action, kind)), None)
