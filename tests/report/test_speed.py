"""Whether more ranks helped, as the report shows it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from rankwise.errors import RunDirError
from rankwise.report import speed as speed_of
from rankwise.report.speed import Speed, compare, since_change
from rankwise.report.terminal import print_report, report
from rankwise.run.directory import Attempt, NodeRecord, RunDir, write_json


def made(folder: Path, name: str, attempts: dict[int, tuple[int, int]], records: list[dict[str, object]]) -> RunDir:
    """`attempts`: ranks and nodes of each."""
    run = RunDir(folder / "runs" / name)
    run.prepare(fresh=False)
    lives = []
    for number, (ranks, nodes) in attempts.items():
        each = ranks // nodes
        parts = tuple(NodeRecord(host=f"h{node}", first=node * each, ranks=each, page="") for node in range(nodes))
        lives.append(asdict(Attempt(life=number, started=1e9, host="h0", ranks=ranks, argv=("train.py",), parts=parts)))
    write_json(run.world, {"lives": lives})
    run.metrics.write_text("".join(json.dumps({"step": 50, "life": 1, **record}) + "\n" for record in records))
    return run


def interval(life: int, clock_s: float, rate: float, **shares: float) -> dict[str, object]:
    named = {f"share/{name.replace('_', ' ')}": share for name, share in shares.items()}
    return {"life": life, "clock_s": clock_s, "samples_per_s": rate, **named}


def speeds(run: RunDir) -> str:
    return speed_of.speeds(run, run.read_metrics())


def measured(run: RunDir) -> list[Speed]:
    return list(speed_of.measured(run, run.read_metrics()))


SLOW = [interval(1, 10, 1), interval(1, 20, 100, data_wait=0.1), interval(1, 30, 100, data_wait=0.1)]
FASTER = [interval(2, 5, 2), interval(2, 15, 150, **{"all-reduce": 0.4}, data_wait=0.1)]


def test_the_report_shows_whether_more_ranks_were_faster_and_what_took_the_rest(tmp_path: Path) -> None:
    run = made(tmp_path, "train", {1: (4, 1), 2: (8, 2)}, SLOW + FASTER)
    assert speeds(run).splitlines() == [
        "ranks  nodes  samples/s  speed-up  per rank  all-reduce  data wait",
        "    4      1        100      1.00    100.0%        0.0%      10.0%",
        "    8      2        150      1.50     75.0%       40.0%      10.0%",
        "8 ranks on 2 nodes: 1.50 times as fast as 4 ranks on 1 node, ideal is 2; the",
        "  lost time is 94% all-reduce, 6% data wait",
    ]
    assert speeds(run) in report(run)
    assert since_change(run) == speeds(run).splitlines()[3:]


def test_computing_that_takes_longer_per_sample_is_a_cause(tmp_path: Path) -> None:
    run = made(tmp_path, "train", {1: (1, 1), 2: (2, 1)}, [interval(1, 10, 100), interval(2, 10, 100)])
    assert speeds(run).endswith(
        "2 ranks on 1 node: 1.00 times as fast as 1 rank on 1 node, ideal is 2; the lost\n"
        "  time is 100% computing (smaller batches per rank, shared cores; on GPUs,\n  all-reduce too)"
    )


def test_nothing_is_lost_if_the_ranks_are_as_fast_as_they_should_be(tmp_path: Path) -> None:
    run = made(tmp_path, "train", {1: (1, 1), 2: (2, 1)}, [interval(1, 10, 100), interval(2, 10, 195)])
    assert since_change(run) == ["2 ranks on 1 node: 1.95 times as fast as 1 rank on 1 node, ideal is 2"]


def test_an_attempt_is_compared_with_the_last_one_of_another_size(tmp_path: Path) -> None:
    rates = [interval(life, 10, rate) for life, rate in enumerate((100, 150, 200, 70), start=1)]
    run = made(tmp_path, "train", {1: (1, 1), 2: (2, 1), 3: (4, 2), 4: (2, 2)}, rates)
    assert since_change(run)[0].startswith("2 ranks on 2 nodes: 0.35 times as fast as 4 ranks on 2 nodes, ideal is 0.5; the")


def test_a_run_that_has_trained_does_not_fail_because_its_records_cannot_be_read(tmp_path: Path) -> None:
    run = made(tmp_path, "train", {1: (4, 1), 2: (8, 2)}, SLOW + FASTER)
    run.world.write_text("{")
    assert since_change(run) == []
    assert since_change(made(tmp_path, "none", {}, [])) == []


def test_evaluation_and_saves_do_not_count_as_slow_training(tmp_path: Path) -> None:
    slow = [interval(1, 10, 100), interval(1, 20, 50, evaluation=0.3, saving=0.2)]
    [speed] = measured(made(tmp_path, "train", {1: (1, 1)}, slow))
    assert speed.samples_per_s == pytest.approx(100)


def test_attempts_with_as_many_ranks_and_nodes_are_one_row(tmp_path: Path) -> None:
    rates = [interval(life, clock, rate) for life, rate in ((1, 100), (2, 100), (3, 200)) for clock in (10, 20)]
    run = made(tmp_path, "train", {1: (2, 1), 2: (1, 1), 3: (2, 1)}, rates)
    assert [(speed.ranks, speed.samples_per_s) for speed in measured(run)] == [(2, 150), (1, 100)]
    assert "150      1.50" in speeds(run)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"loss": 1.0}],
        [{"clock_s": 10.0, "samples_per_s": "fast"}, {"clock_s": None, "samples_per_s": 1.0}],
        [interval(7, 10, 100)],
        [interval(1, 10, 0.0)],
        [{**interval(1, 10, 100), "life": "x"}],
    ],
)
def test_a_run_of_one_size_or_without_speeds_has_no_such_table(tmp_path: Path, records: list[dict[str, object]]) -> None:
    run = made(tmp_path, "train", {1: (1, 1), 2: (2, 1)}, records)
    assert (speeds(run), measured(run)) == ("", [])
    assert speeds(made(tmp_path, "one", {1: (4, 1)}, SLOW)) == ""


def test_several_runs_are_compared_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path, "two", {1: (2, 1)}, [interval(1, 10, 120, **{"all-reduce": 0.5})])
    made(tmp_path, "one", {1: (1, 1)}, [interval(1, 10, 100)])
    print_report(["two", "one"])
    assert capsys.readouterr().out.splitlines() == [
        "run  ranks  nodes  samples/s  speed-up  per rank  all-reduce  data wait",
        "one      1      1        100      1.00    100.0%        0.0%       0.0%",
        "two      2      1        120      1.20     60.0%       50.0%       0.0%",
        "2 ranks on 1 node (two): 1.20 times as fast as 1 rank on 1 node (one), ideal is",
        "  2; the lost time is 100% all-reduce",
    ]


def test_a_run_that_did_not_record_its_speed_cannot_be_compared(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path, "own", {1: (1, 1)}, [{"loss": 1.0}])
    with pytest.raises(RunDirError, match=r"runs/own has no samples_per_s in its metrics.jsonl"):
        compare(["own", "own"])
    with pytest.raises(RunDirError, match="there is no run x"):
        compare(["x", "own"])
