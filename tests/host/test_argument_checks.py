"""The checks of arguments: what is bound, what is refused, and with which message."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import scripts_on_ranks

from rankwise.errors import ConfigError
from rankwise.host.arguments import ABOVE_ZERO, ANYTHING, FLAG, FROM_ONE, FUNCTION, TEXT, instance, one_of, shown, takes


@takes(first=FROM_ONE, second=TEXT.or_none, kind=one_of("a", "b"), rate=ABOVE_ZERO, moved={"old": "it is now second=..."})
def called(first: int, second: str | None = None, *, kind: str = "a", rate: float = 1.0) -> tuple[Any, ...]:
    return first, second, kind, rate


@takes(names=TEXT)
def named(*names: str) -> tuple[str, ...]:
    return names


@takes(first=FROM_ONE)
def open_ended(first: int, **others: Any) -> dict[str, Any]:
    return {"first": first, **others}


class Made:
    @takes(value=FLAG)
    def __init__(self, value: bool = False) -> None:
        self.value = value

    @takes(value=FLAG, other=ANYTHING)
    def turn(self, value: bool, other: Any = None) -> bool:
        return value


def test_numbers_of_numpy_arrive_as_numbers_of_python() -> None:
    for given in (called(np.int64(3), rate=np.float32(0.5)), called(first=np.uint8(3), rate=np.float64(0.5))):
        assert given == (3, None, "a", 0.5)
        assert list(map(type, given)) == [int, type(None), str, float]
    other = Made().turn(True, np.int64(3))
    assert other is True
    kept = open_ended(np.int64(1), x=np.int64(2))
    assert list(map(type, kept.values())) == [int, np.int64]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((1,), {}), ((1, "x"), {}), ((), {"first": 1}), ((2,), {"kind": "b", "second": "x"}), ((1,), {"rate": 2})],
)
def test_a_call_that_fits_is_the_functions_own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert called(*args, **kwargs) == inspect.unwrap(called)(*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "called needs first"),
        ((), {"second": "x"}, "called needs first"),
        (
            (1, "x", "a"),
            {},
            "called takes first and second as positional arguments, but 3 were given: write the others as name=value",
        ),
        ((1,), {"first": 2}, "called: multiple values for argument 'first'"),
        ((1,), {"secnd": 2}, "called(secnd=...): there is no such argument; did you mean second?"),
        ((1,), {"zzz": 2}, "called(zzz=...): there is no such argument; it takes first, second, kind and rate"),
        ((1,), {"old": 2}, "called(old=...): it is now second=..."),
        ((0,), {}, "called(first=0): give a whole number of at least 1"),
        (("3",), {}, "called(first='3'): give a whole number of at least 1, without quotes"),
        ((1,), {"rate": "0.5"}, "called(rate='0.5'): give a number above 0, without quotes"),
        ((1,), {"kind": "c"}, "called(kind='c'): give one of 'a', 'b'"),
        ((1, 5), {}, "called(second=5): give a string, or None"),
    ],
)
def test_a_call_that_does_not_fit_is_one_line(args: tuple[Any, ...], kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        called(*args, **kwargs)
    assert str(caught.value) == said


def test_each_of_several_is_checked_and_what_is_open_is_passed_on() -> None:
    assert named("a", "b") == ("a", "b")
    with pytest.raises(ConfigError, match=r"^named\(names=2\): give a string$"):
        named("a", 2)  # type: ignore[arg-type]
    assert open_ended(1, more=2) == {"first": 1, "more": 2}
    with pytest.raises(ConfigError, match=r"^open_ended\(first=0\)"):
        open_ended(0, more=2)


def test_a_class_is_called_by_its_own_name_and_a_method_by_its() -> None:
    assert Made(True).value
    with pytest.raises(ConfigError, match=r"^Made\(value=1\): give True or False$"):
        Made(1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^turn\(value='yes'\): give True or False$"):
        Made().turn("yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^turn needs value$"):
        Made().turn()  # type: ignore[call-arg]


def test_objects_in_the_wrong_order_are_told_the_order() -> None:
    @takes(model=instance(dict, "a dict"), function=FUNCTION, rate=ABOVE_ZERO)
    def trained(model: Any, function: Any, rate: float = 1.0) -> None: ...

    with pytest.raises(ConfigError, match=r"model=<function .*: give a dict; the order of the arguments is model, function$"):
        trained(shown, {})
    with pytest.raises(ConfigError, match=r"model=<function .*: give a dict$"):
        trained(model=shown, function={})  # by their names there is no order
    with pytest.raises(ConfigError, match=r"function=\[\]\): give a function$"):
        trained({}, [])  # neither argument accepts a list


def test_a_value_is_shown_on_one_short_line_even_if_its_repr_fails() -> None:
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    class Plain:
        pass

    assert shown(Rude()) == "<Rude>"
    assert shown(Plain()) == "<Plain>"
    assert len(shown("x" * 1000)) <= 60
    assert "\n" not in shown("a\nb" * 3)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "rankwise.Loader([1, 2], batch_size='2')",
            "Loader(batch_size='2'): give a whole number of at least 1, or None, without quotes",
        ),
        (
            "rankwise.Loader([1, 2])",
            "give batch_size (per rank and micro-batch), global_batch_size (of a whole step), or batches",
        ),
        (
            "rankwise.Checkpoints(keep_best='f1')",
            "keep_best='f1': is a larger value better? Give larger_is_better=True or False",
        ),
    ],
)
def test_a_script_that_has_not_called_init_ends_with_the_message_and_its_line_alone(line: str, said: str) -> None:
    Path("script.py").write_text(f"import rankwise\n\n{line}\n")
    [done] = scripts_on_ranks(1, "script.py")
    assert done.returncode == 1
    assert re.sub(r" at .*script", " at script", done.stdout) == f"error: {said}\n  at script.py:3\n"
