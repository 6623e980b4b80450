"""The actions of a Trainer: which are saved, which replace its own, what is refused before it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rankwise import Evaluate, every
from rankwise.actions import EMA, CheckReplicas, EarlyStopping, JsonLines, Log, Plateau
from rankwise.actions.of_trainer import Actions
from rankwise.errors import ConfigError

DATA = torch.utils.data.TensorDataset(torch.zeros(4, 1))


class Counter:
    def __init__(self, name: Any = "counter") -> None:
        self.count, self.closed = 0, 0
        if name is not None:
            self.name = name

    def __call__(self, state: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def close(self) -> None:
        self.closed += 1
        if self.name == "rude":
            raise OSError("no")


def evaluation(name: str = "eval", fn: Any = None) -> Evaluate:
    return Evaluate(DATA, fn, name=name)


def ema() -> EMA:
    return EMA(nn.Linear(1, 1))


def checked(*given: Any, keep_best: str | None = None) -> Actions:
    actions = Actions(given, None)
    actions.check(keep_best)
    actions.saved({"model": nn.Linear(1, 1)})
    return actions


def test_those_with_a_state_are_saved_by_their_names_triggers_or_not() -> None:
    counter, average = Counter(), ema()
    actions = checked(every(counter, steps=3), average, print)
    assert actions.named == {"counter": counter, "ema": average}
    assert set(actions.saved({"model": nn.Linear(1, 1)})) == {"model", "log", "counter", "ema"}


def test_a_log_a_writer_or_a_check_that_is_given_takes_the_place_of_the_trainers_own() -> None:
    log, lines, check = Log(3), JsonLines(), CheckReplicas("error")
    actions = checked(log, print, lines, check)
    assert (actions.log, actions.replicas, actions.given) == (log, check, [print])
    assert [type(writer).__name__ for writer in actions.writers] == ["JsonLines", "TensorBoard"]
    assert actions.writers[0] is lines


NO_NAME = "the action Counter has a state_dict but no name; give it an attribute `name`, under which it is saved"
PLATEAU = ReduceLROnPlateau(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: checked(Counter(None)), NO_NAME),
        (lambda: checked(Counter(3)), NO_NAME),
        (lambda: checked(Counter(), every(Counter(), steps=2)), "two actions are saved as 'counter'"),
        (lambda: checked(ema(), ema()), "two actions are saved as 'ema' (EMA and EMA); give one of them another name"),
        (lambda: checked(Counter("model")), "the action Counter has the name 'model', which the Trainer itself uses"),
        (lambda: checked(Counter("log")), "the action Counter has the name 'log', which the Trainer itself uses"),
        (lambda: checked(evaluation(), evaluation()), "two evaluations have the name 'eval'; rename one"),
        (lambda: checked(EarlyStopping("eval_loss")), "EarlyStopping: metric='eval_loss' needs an evaluation: give evaluate"),
        (lambda: checked(evaluation(), EarlyStopping("ema_loss")), "nothing measures this metric; those of"),
        (lambda: checked(evaluation(), Plateau(PLATEAU, "eval_f1")), "Evaluate without a function measures only eval_loss"),
        (lambda: checked(keep_best="eval_loss"), "keep_best='eval_loss' needs an evaluation: give evaluate="),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_the_training(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert said in str(caught.value)


def test_a_metric_that_the_users_function_or_another_action_may_measure_is_not_refused() -> None:
    checked(evaluation(fn=lambda model, batch: {}), EarlyStopping("eval_f1", larger_is_better=True))
    checked(evaluation(), evaluation("ema"), EarlyStopping("ema_loss"), keep_best="loss")
    checked(print, keep_best="their_loss")


def test_all_are_closed_though_one_raises() -> None:
    first, rude, last = Counter("first"), Counter("rude"), Counter("last")
    actions = checked(first, every(rude, steps=3), last)
    assert [str(error) for error in actions.close()] == ["no"]
    assert (first.closed, rude.closed, last.closed) == (1, 1, 1)


@pytest.mark.parametrize("given", [EarlyStopping, Log, Counter, every(Counter, steps=2)])
def test_a_class_instead_of_an_object_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"actions: (EarlyStopping|Log|Counter) is a class; create an object: \w+\(\.\.\.\)"):
        Actions([given], None)
