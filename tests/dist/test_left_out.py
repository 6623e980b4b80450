"""What a checkpoint of a script's own loop should contain is known while it is used."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from rankwise.dist.left_out import belongs_in_checkpoints, is_used, left_out


class Part:
    under_way = True


class Other(Part):
    pass


def test_a_part_belongs_in_checkpoints_while_its_attribute_is_true() -> None:
    part = Part()
    assert left_out([]) == []
    belongs_in_checkpoints(part, "under_way", "all of it")
    assert left_out([]) == left_out([Other(), 3]) == [(part, "all of it")]
    part.under_way = False
    assert left_out([]) == []


def test_a_part_is_there_by_itself_or_as_an_attribute_or_if_another_of_its_class_is() -> None:
    part = Part()
    belongs_in_checkpoints(part, "under_way", "all of it")
    for held in (part, SimpleNamespace(x=3, data=part), Part()):
        assert left_out([held]) == []


def test_a_part_that_was_used_and_one_that_nobody_holds_is_not_left_out() -> None:
    used = Part()
    with is_used(used, "under_way", "x"):
        assert left_out([]) == [(used, "x")]
    assert left_out([]) == []
    with pytest.raises(KeyError), is_used(used, "under_way", "x"):
        raise KeyError
    assert left_out([]) == []
    belongs_in_checkpoints(Part(), "under_way", "x")
    gc.collect()
    assert left_out([]) == []
