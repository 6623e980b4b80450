"""What the benchmarks share: rounds in turn, ratios of pairs, spread."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
_spec = importlib.util.spec_from_file_location("measure", BENCHMARKS / "measure.py")
assert _spec is not None
assert _spec.loader is not None
measure = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(measure)


def made(**settings: object) -> tuple[dict[str, list[str]], list[str]]:
    """(what `rounds` returned, the calls in order)."""
    calls: list[str] = []

    def way(name: str):
        def call(turn: int) -> str:
            calls.append(f"{name}{turn}")
            return calls[-1]

        return call

    return measure.rounds({name: way(name) for name in "abc"}, 2, **settings), calls


def test_each_way_is_called_once_per_round_in_turn() -> None:
    found, calls = made()
    assert calls == ["a0", "b0", "c0", "a1", "b1", "c1"]
    assert found == {"a": ["a0", "a1"], "b": ["b0", "b1"], "c": ["c0", "c1"]}


def test_warm_rounds_are_made_and_not_counted() -> None:
    found, calls = made(warm=2)
    assert len(calls) == 12
    assert found["b"] == ["b2", "b3"]


def test_with_rotate_another_way_begins_each_round_and_pairs_stay_pairs() -> None:
    found, calls = made(warm=1, rotate=True)
    assert calls == ["a0", "b0", "c0", "b1", "c1", "a1", "c2", "a2", "b2"]
    assert found == {"a": ["a1", "a2"], "b": ["b1", "b2"], "c": ["c1", "c2"]}


def test_ratios_are_of_the_pair_of_each_round() -> None:
    assert measure.ratios([1.0, 6.0], [2.0, 3.0]) == [0.5, 2.0]
    with pytest.raises(ValueError, match="argument"):
        measure.ratios([1.0], [2.0, 3.0])


def test_spread_has_the_median_the_least_and_the_most() -> None:
    assert measure.spread([3.0, 1.0, 2.0]) == "2.00 (1.00 .. 3.00)"
    assert measure.spread(iter([141.6, 150.2]), digits=0, unit=" ns") == "146 ns (142 .. 150)"


def test_the_tenths_of_a_hundred_figures() -> None:
    figures = [float(n) for n in range(1, 100)]
    assert (measure.p10(figures), measure.median(figures), measure.p90(figures)) == (10.0, 50.0, 90.0)


@pytest.mark.parametrize("bench", sorted(BENCHMARKS.glob("*/*.py")), ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_no_bench_computes_a_median_or_a_spread_on_its_own(bench: Path) -> None:
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(bench.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert "statistics" not in imported
