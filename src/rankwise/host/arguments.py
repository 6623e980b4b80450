"""Checks the arguments of a public class or function before it does anything; an error is one line.

@takes(every=FROM_ONE.or_none, lr=ABOVE_ZERO, moved={"workers": "num_workers=..."})
def __init__(self, every=None, *, lr=0.7): ...

LocalSGD(every="16")   ->   ConfigError: LocalSGD(every='16'): give a whole number of at least 1, without quotes, or None
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from rankwise import errors
from rankwise.errors import ConfigError, RankwiseError
from rankwise.host.text import listed

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST = 60  # characters of a value in a message


@dataclass(frozen=True)
class Argument:
    """What an argument accepts: a test of its value, and the same in words, to follow "give "."""

    accepts: Callable[[Any], bool]
    words: str

    @property
    def or_none(self) -> Argument:
        """This or None."""
        return Argument(lambda value: value is None or self.accepts(value), f"{self.words}, or None")

    def or_(self, other: Argument) -> Argument:
        return Argument(lambda value: self.accepts(value) or other.accepts(value), f"{self.words}, or {other.words}")


def is_whole(value: Any) -> bool:
    """Whether it is an integer, also one of numpy; True is not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a finite real number, also one of numpy; True is not."""
    return isinstance(value, int | float | Real) and not isinstance(value, bool) and math.isfinite(value)


ANYTHING = Argument(lambda value: True, "anything")
FROM_ONE = Argument(lambda value: is_whole(value) and value >= 1, "a whole number of at least 1")
FROM_ZERO = Argument(lambda value: is_whole(value) and value >= 0, "a whole number of at least 0")
ABOVE_ZERO = Argument(lambda value: is_number(value) and value > 0, "a number above 0")
NOT_NEGATIVE = Argument(lambda value: is_number(value) and value >= 0, "a number of at least 0")
SECONDS = Argument(lambda value: is_number(value) and value > 0, "a number of seconds above 0 (300 for five minutes)")
FLAG = Argument(lambda value: isinstance(value, bool), "True or False")
FUNCTION = Argument(callable, "a function")
TEXT = Argument(lambda value: isinstance(value, str) and bool(value), "a string")
PATH = Argument(lambda value: isinstance(value, str | os.PathLike) and bool(os.fspath(value)), "a path")
SEQUENCE = Argument(lambda value: isinstance(value, Sequence) and not isinstance(value, str), "a list or tuple: (1, 2)")
MAPPING = Argument(lambda value: isinstance(value, Mapping), 'a dict: {"name": value}')
STEPS = Argument(
    lambda value: isinstance(value, Collection) and not isinstance(value, str) and all(map(FROM_ONE.accepts, value)),
    "the steps, whole numbers of at least 1: [1000, 2000]",
)  # fmt: skip
OPTIMIZER = Argument(
    lambda value: all(hasattr(value, name) for name in ("param_groups", "step", "state_dict")) and not isinstance(value, type),
    "an optimizer: torch.optim.AdamW(model.parameters())",
)
DATA = Argument(
    lambda value: (
        not isinstance(value, str | bytes | type)
        and any(hasattr(value, name) for name in ("__getitem__", "__getitems__", "__iter__"))
    ),
    "a dataset (with __len__ and __getitem__, or an iterable one)",
)
FUNCTIONS = Argument(
    lambda value: isinstance(value, Collection) and not isinstance(value, str) and all(map(callable, value)),
    "functions in a list: [function]",
)  # fmt: skip


def one_of(*names: str) -> Argument:
    """One of these strings."""
    return Argument(lambda value: isinstance(value, str) and value in names, f"one of {', '.join(map(repr, names))}")


def having(words: str, *methods: str) -> Argument:
    """An object that has these methods."""
    return Argument(
        lambda value: not isinstance(value, type) and all(callable(getattr(value, method, None)) for method in methods), words
    )


def instance(kind: type, words: str) -> Argument:
    return Argument(lambda value: isinstance(value, kind), words)


def takes(*, moved: Mapping[str, str] | None = None, **kinds: Argument) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function, or `__init__`: its arguments are checked before its body runs. Raises ConfigError with the
    argument's name, the value and what it accepts. For an unknown argument, the error suggests the nearest name, or, if it is
    in `moved`, what to write instead. If an error of rankwise leaves the function, the script ends without a traceback."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        named = {
            key: kind for key, kind in kinds.items() if signature.parameters[key].kind is not inspect.Parameter.VAR_POSITIONAL
        }
        several = kinds.keys() - named.keys()
        names = _Names.of(signature)

        numbers = {key for key, kind in kinds.items() if kind is not ANYTHING}

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                check(args, kwargs)
                plain = [_plain(v) if key in numbers else v for key, v in zip(names.in_order, args, strict=False)]
                others = {key: _plain(v) if key in numbers else v for key, v in kwargs.items()}
                return function(*plain, *args[len(plain) :], **others)  # type: ignore[arg-type]
            except RankwiseError:
                errors.without_traceback()  # in a script that has not called init yet
                raise

        def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                given = _bound(signature, names, args, kwargs)
            except TypeError as error:
                raise ConfigError(_unbound(name, signature, args, kwargs, moved or {}, error)) from None
            for key, kind in named.items():
                if key in given and not kind.accepts(given[key]):
                    order = names.order_for(key, given[key], len(args), named)
                    raise ConfigError(refusal(name, key, given[key], kind) + order)
            for key in several:
                for value in given.get(key, ()):
                    if not kinds[key].accepts(value):
                        raise ConfigError(refusal(name, key, value, kinds[key]))

        checked.__takes__ = kinds  # type: ignore[attr-defined]
        return checked

    return decorate


def _plain(value: Any) -> Any:
    """A number of numpy as a number of Python: torch.load refuses those of numpy, and small types overflow in sums."""
    if isinstance(value, int | float) and type(value).__module__ != "numpy":
        return value
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value


@dataclass(frozen=True)
class _Names:
    """The names of a signature's parameters."""

    in_order: tuple[str, ...]
    """Parameters that can be given without a name."""
    needed: frozenset[str]
    all: frozenset[str]
    is_fixed: bool
    """Whether the signature has no *args and no **kwargs."""

    @classmethod
    def of(cls, signature: inspect.Signature) -> _Names:
        plain = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            tuple(p.name for p in plain if p.kind is p.POSITIONAL_OR_KEYWORD),
            frozenset(p.name for p in plain if p.default is p.empty),
            frozenset(p.name for p in plain),
            len(plain) == len(signature.parameters),
        )

    def order_for(self, name: str, value: Any, count: int, kinds: Mapping[str, Argument]) -> str:
        """`; the order of the arguments is model, optimizer` if this is one of `count` arguments without a name, and
        another one accepts the object."""
        places = self.in_order[:count]
        if value is None or isinstance(value, str | float | int):
            return ""
        told = {other: kind for other, kind in kinds.items() if kind is not ANYTHING and other != name}
        others = [other for other in self.in_order if other in told and told[other].accepts(value)]
        if name not in places or not others:
            return ""
        last = max(self.in_order.index(other) for other in (*places, *others))
        return f"; the order of the arguments is {', '.join(each for each in self.in_order[: last + 1] if each != 'self')}"


def _bound(signature: inspect.Signature, names: _Names, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The value of each argument. Raises TypeError for a call that does not fit. Avoids `bind`, which costs as much as 20
    calls."""
    given = {**dict(zip(names.in_order, args, strict=False)), **kwargs}
    if names.is_fixed and len(given) == len(args) + len(kwargs) and names.needed <= given.keys() <= names.all:
        return given
    return signature.bind(*args, **kwargs).arguments


def refusal(name: str, argument: str, value: Any, kind: Argument) -> str:
    """`LocalSGD(every='16'): give a whole number of at least 1, without quotes`"""
    quotes = ""
    if isinstance(value, str):
        for plain in (int, float):
            try:
                quotes = ", without quotes" if kind.accepts(plain(value)) else ""
            except ValueError:
                continue
            if quotes:
                break
    return f"{name}({argument}={shown(value)}): give {kind.words}{quotes}"


def shown(value: Any) -> str:
    """A value on one line, cut if it is long; an object without its own repr by its class."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a repr of the user's class that fails
        text = f"<{type(value).__name__}>"
    if re.fullmatch(r"<.* object at 0x[0-9a-f]+>", text):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def _unbound(
    name: str,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    moved: Mapping[str, str],
    error: TypeError,
) -> str:
    """Why the call does not fit the signature."""
    parameters = [p for key, p in signature.parameters.items() if key != "self"]
    names = [p.name for p in parameters]
    for key in kwargs:
        if key in moved:
            return f"{name}({key}=...): {moved[key]}"
        if key not in names:
            near = get_close_matches(key, names, n=1)
            cure = f"did you mean {near[0]}?" if near else f"it takes {_all(names)}"
            return f"{name}({key}=...): there is no such argument; {cure}"
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    number = len(args) - ("self" in signature.parameters)
    for value in args[len(positional) + len(args) - number :]:
        if (key := type(value).__name__.lower()) in moved:  # Loader(dataset, world)
            return f"{name}({key}): {moved[key]}"
    if number > len(positional):
        first = f"{_all([p.name for p in positional])} as positional arguments" if positional else "no positional argument"
        return f"{name} takes {first}, but {number} were given: write the others as name=value"
    missing = [p.name for p in positional[number:] if p.default is p.empty and p.name not in kwargs]
    missing += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in kwargs]
    if missing:
        return f"{name} needs {_all(missing)}"
    return f"{name}: {error}"


def _all(names: Sequence[str]) -> str:
    return listed(names, last=" and ")
