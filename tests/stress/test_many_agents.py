"""Agents without ranks and one real head: benchmarks/many_agents."""

from __future__ import annotations

import json

import pytest
from runners import right

pytestmark = pytest.mark.stress

DOSES = {"small": [100], "whole": [10, 100, 300, 1000]}


def test_each_of_many_agents_joins_starts_and_leaves_and_needs_no_more_messages_than_one(dose: str) -> None:
    text = right("benchmarks/many_agents/bench.py", *map(str, DOSES[dose]))
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [record["agents"] for record in found] == DOSES[dose]
    for record in found:
        beats = 2 * (record["calls_s"] + record["to_start_s"])  # one per second in each direction
        assert record["messages_an_agent"] <= 6 + beats
