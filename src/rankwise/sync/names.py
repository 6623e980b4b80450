"""Strategies by short names: for `rankwise run --sync NAME`, and for a script's own command line.

check("local-sgd:16", "--sync ")             # ConfigError for an unknown name; without torch
strategy = named("local-sgd:16")
strategy = named()                           # what was typed after --sync, or all-reduce
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankwise.dist import world as worlds
from rankwise.errors import ConfigError
from rankwise.host.arguments import Argument
from rankwise.host.text import seconds_of

if TYPE_CHECKING:
    from rankwise.sync.strategy import SyncStrategy

_CODEC = re.compile("bf16|fp16|int8")
_CODEC_OF_MATRICES = re.compile("bf16|fp16|int8|powersgd:[1-9][0-9]*")


@dataclass(frozen=True)
class _Form:
    """A strategy, and how to read the words after its name. `settings` raises ValueError for words that are wrong."""

    home: str
    settings: Callable[[list[str]], dict[str, Any]]
    examples: tuple[str, ...]


def _of_all_reduce(words: list[str]) -> dict[str, Any]:
    return {"compress": _codec(":".join(words), _CODEC_OF_MATRICES)} if words else {}


def _of_local_sgd(words: list[str]) -> dict[str, Any]:
    if not words:
        return {}
    [when] = words
    seconds = seconds_of(when)
    return {"every": _from_one(when)} if seconds is None else {"seconds": seconds}


def _of_post_local_sgd(words: list[str]) -> dict[str, Any]:
    start, *rest = words
    return {"start": _from_one(start), **_of_local_sgd(rest)}


def _of_diloco(words: list[str]) -> dict[str, Any]:
    every = {"every": _from_one(words.pop(0))} if words and words[0].isdecimal() else {}
    if not words:
        return every
    [codec] = words
    return {**every, "compress": _codec(codec, _CODEC)}


def _from_one(word: str) -> int:
    number = int(word) if word.isdecimal() else 0
    if number < 1:
        raise ValueError(word)
    return number


def _codec(word: str, known: re.Pattern[str]) -> str:
    if not known.fullmatch(word):
        raise ValueError(word)
    return word


_KINDS = {
    "all-reduce": _Form(
        "rankwise.sync.all_reduce.AllReduce",
        _of_all_reduce,
        ("all-reduce", *(f"all-reduce:{codec}" for codec in ("bf16", "fp16", "int8", "powersgd:2"))),
    ),
    "local-sgd": _Form("rankwise.sync.local_sgd.LocalSGD", _of_local_sgd, ("local-sgd:16", "local-sgd:30s")),
    "post-local-sgd": _Form(
        "rankwise.sync.local_sgd.LocalSGD", _of_post_local_sgd, ("post-local-sgd:1000", "post-local-sgd:1000:16")
    ),
    "diloco": _Form("rankwise.sync.diloco.DiLoCo", _of_diloco, ("diloco:32", "diloco:32:int8")),
}
_ALSO = {"allreduce": "all-reduce"}

EXAMPLES = tuple(example for kind in _KINDS.values() for example in kind.examples)
"""Example names, one for each way to write them."""

NAME = Argument(lambda value: isinstance(value, str), f"its name: {', '.join(EXAMPLES)}")


def check(name: str, given_as: str = "sync=") -> tuple[str, dict[str, Any]]:
    """(the module and class of the strategy, its arguments). Raises ConfigError for an unknown name; the message starts with
    `given_as`."""
    word, *rest = name.split(":")
    word = _ALSO.get(word, word)
    if word not in _KINDS:
        near = get_close_matches(word.lower().replace("_", "-"), _KINDS, n=1)
        meant = f"did you mean {' or '.join(_KINDS[near[0]].examples)}?" if near else f"write one like {', '.join(EXAMPLES)}"
        raise ConfigError(f"{given_as}{name}: there is no such strategy; {meant}")
    kind = _KINDS[word]
    try:
        return kind.home, kind.settings(rest)
    except ValueError:
        raise ConfigError(f"{given_as}{name}: write it like {' or '.join(kind.examples)}") from None


def named(name: str | None = None) -> SyncStrategy:
    """The strategy of this name: `all-reduce:bf16`, `local-sgd:16` (steps between two averages), `local-sgd:30s`,
    `post-local-sgd:1000:16` (after 1000 exact steps), `diloco:32:int8`. None: the name given as `rankwise run --sync NAME`, or
    all-reduce. Raises ConfigError for an unknown name."""
    home, settings = check(name if name is not None else typed() or "all-reduce")
    module, _, kind = home.rpartition(".")
    strategy: SyncStrategy = getattr(import_module(module), kind)(**settings)
    return strategy


def chosen(given: SyncStrategy | str | None) -> SyncStrategy:
    """The strategy that the script gives, or names; otherwise the one of the command line."""
    if given is not None and (name := typed()):
        from rankwise.dist import log

        log.warn(f"--sync {name} has no effect: the script sets its own strategy (sync=...)")
    return named(given) if given is None or isinstance(given, str) else given


def typed() -> str:
    """The name given as `rankwise run --sync NAME`; empty if none was given."""
    return worlds.strategy_name(worlds.discover(os.environ, allow_independent=True))
