"""Wrong types and values to every argument of everything public, generated from the signatures."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import rankwise
from rankwise import actions
from rankwise.errors import ConfigError, RankwiseError
from rankwise.host.arguments import shown

WRONG = ["16", "5m", 8.5, True, math.nan, None, "sgd", "yes", -1, object()]

MODEL = nn.Linear(2, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
DATA = TensorDataset(torch.zeros(4, 2))


def loss(model: Any, batch: Any) -> Any:
    return model(batch[0]).sum(), len(batch[0])


NEEDED: dict[str, Any] = {
    "model": MODEL, "optimizer": OPTIMIZER, "step_fn": loss, "train_data": DATA, "dataset": DATA, "data": DATA, "fn": loss,
    "func": int, "action": print, "tensor": torch.zeros(1), "value": 1, "text": "text", "seed": 1, "rank": 0,
    "metric": "eval_loss", "scheduler": ReduceLROnPlateau(OPTIMIZER), "rule": "linear", "batches": [1],
    "files": "none.h5", "path": "made.h5",
    "predict_fn": loss, "loader": rankwise.Loader(DATA, batch_size=2, shuffle=False, max_epochs=1),
}  # fmt: skip
"""A right value for each argument that has no default."""

TOGETHER: dict[str, dict[str, Any]] = {
    "Trainer": {"batch_size": 2, "max_steps": 1}, "Loader": {"batch_size": 2}, "LengthBatches": {"tokens": 5},
    "every": {"steps": 1}, "seed_rank": {"rank": 0},
}  # fmt: skip
"""Arguments that are required, although they have a default."""

STARTS = ("init", "run_function", "broadcast_object", "selftest")
"""A right value would start something, or needs another state of the program."""

WITHOUT_ARGUMENTS_TO_CHECK = ("RankwiseError", "Stopped", "TrainState", "all_gather_object", "local_device", "selftest")
"""Exceptions; what the Trainer creates; functions that accept any value, or the result of another call."""


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in rankwise.__all__:
        yield name, getattr(rankwise, name)
    for name in actions.__all__:
        if name not in rankwise.__all__:
            yield name, getattr(actions, name)


CALLABLES = dict(callables())


def checked(call: Callable[..., Any]) -> dict[str, Any] | None:
    function = call.__init__ if inspect.isclass(call) else call  # type: ignore[misc]
    return getattr(function, "__takes__", None)


def parameters(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {
        name: parameter
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def test_every_public_call_checks_each_of_its_arguments() -> None:
    for name, call in CALLABLES.items():
        if name not in WITHOUT_ARGUMENTS_TO_CHECK and (expected := set(parameters(call))):
            assert checked(call) is not None, name
            assert checked(call).keys() == expected, name  # type: ignore[union-attr]


CASES = [(name, argument) for name, call in CALLABLES.items() for argument in (checked(call) or {})]


def calling(name: str, argument: str, value: Any) -> Any:
    call = CALLABLES[name]
    given = {
        key: NEEDED[key]
        for key, parameter in parameters(call).items()
        if parameter.default is parameter.empty and key in NEEDED
    }
    given |= TOGETHER.get(name, {})
    if parameters(call)[argument].kind is inspect.Parameter.VAR_POSITIONAL:
        return call(value)
    return call(**{**given, argument: value})


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_a_wrong_value_is_one_line_with_the_argument_what_was_given_and_what_it_takes(name: str, argument: str) -> None:
    """An accepted value works, or is refused as plainly by the function that uses it: there is never another error."""
    kind = checked(CALLABLES[name])[argument]  # type: ignore[index]
    for value in WRONG:
        if kind.accepts(value):
            if name not in STARTS:
                with contextlib.suppress(RankwiseError):
                    calling(name, argument, value)
            continue
        with pytest.raises(ConfigError) as caught:
            calling(name, argument, value)
        said = str(caught.value)
        assert said.startswith(f"{name}({argument}={shown(value)}): give {kind.words}"), said
        assert "\n" not in said


RIGHT: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value >= 0,  # not nan
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
}
"""For the plain types: the values that an argument with this annotation may accept at most."""


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_an_argument_takes_no_more_than_its_annotation_says(name: str, argument: str) -> None:
    kinds = str(parameters(CALLABLES[name])[argument].annotation).split(" | ")
    if not set(kinds) <= RIGHT.keys():
        return
    kind = checked(CALLABLES[name])[argument]  # type: ignore[index]
    for value in WRONG:
        if kind.accepts(value):
            assert any(RIGHT[each](value) for each in kinds), f"{name}({argument}={value!r})"
