"""Which values from a file a field of a dataclass may have: the kind in its metadata, or that of its default.

host: str = field(metadata=TEXT)         # it has no default that shows the kind
ranks: int = 1                           # a whole number
status: int | None = field(default=None, metadata=WHOLE)
fits(value, field_of_it);  kind_of(field_of_it).words
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_METADATA = "kind"


@dataclass(frozen=True)
class Kind:
    """The types that a value may have, and what to call them in an error."""

    types: tuple[type, ...]
    words: str


_KINDS = {
    str: Kind((str,), "text in quotes"),
    bool: Kind((bool,), "true or false"),
    int: Kind((int,), "a whole number"),
    float: Kind((int, float), "a number"),
    tuple: Kind((tuple,), "a list of words"),
    dict: Kind((dict,), "a table"),
}
_KINDS[type(None)] = _KINDS[str]

TEXT, WHOLE, NUMBER, SEVERAL, TABLE = ({_METADATA: _KINDS[t]} for t in (str, int, float, tuple, dict))
"""Metadata of a field. A field without it whose default is None is text."""


def kind_of(field: dataclasses.Field[Any]) -> Kind:
    """Raises KeyError for a field whose kind neither its metadata nor its default shows: a mistake in its class."""
    metadata: Mapping[str, Any] = field.metadata
    return metadata[_METADATA] if _METADATA in metadata else _KINDS[type(field.default)]


def kind_of_type(kind: type) -> Kind:
    """The kind of values of this type. Raises KeyError for a type that a file cannot contain."""
    return _KINDS[kind]


def fits(value: object, field: dataclasses.Field[Any]) -> bool:
    """Whether the field may have this value; None is allowed if its default is None."""
    return isinstance(value, kind_of(field).types) or (value is None and field.default is None)
