"""Which values a field that is read from a file may have."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import pytest

from rankwise.run.config import RunConfig
from rankwise.run.directory import Attempt, Failure, Job, NodeRecord
from rankwise.run.kinds import NUMBER, fits, kind_of

TYPES = {float: (int, float), Mapping: (dict,)}


@pytest.mark.parametrize("record", [RunConfig, NodeRecord, Attempt, Failure, Job])
def test_each_field_is_checked_for_what_it_is_declared_with(record: type) -> None:
    for name, hint in typing.get_type_hints(record).items():
        declared = next(each for each in fields(record) if each.name == name)
        given = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        expected = [typing.get_origin(each) or each for each in given if each is not type(None)]
        assert [kind_of(declared).types] == [TYPES.get(each, (each,)) for each in expected], name
        assert fits(None, declared) == (type(None) in given), name


def test_a_number_may_be_a_whole_one_and_a_whole_one_no_fraction() -> None:
    @dataclass
    class Record:
        share: float = field(metadata=NUMBER)
        ranks: int = 1
        ended: float | None = field(default=None, metadata=NUMBER)

    share, ranks, ended = fields(Record)
    assert (fits(1, share), fits(0.5, share), fits(None, share), fits("1", share)) == (True, True, False, False)
    assert (fits(1, ranks), fits(0.5, ranks), fits(None, ranks)) == (True, False, False)
    assert (fits(1, ended), fits(None, ended)) == (True, True)
