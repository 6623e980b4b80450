"""What a run did, in a text that fits on one screen."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from rankwise.errors import RunDirError
from rankwise.report.table import table
from rankwise.report.terminal import print_report, report
from rankwise.run.directory import Attempt, Failure, RunDir, find_run, write_json


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs" / "train")
    made.prepare(fresh=False)
    return made


def live(run: RunDir, *attempts: Attempt) -> None:
    write_json(run.world, {"lives": [asdict(attempt) for attempt in attempts]})


def attempt(number: int = 1, **changes: object) -> Attempt:
    return Attempt(**{"life": number, "started": 1e9, "host": "h", "ranks": 2, "argv": ("train.py",), **changes})  # type: ignore[arg-type]


def figures(run: RunDir, *records: dict[str, object]) -> None:
    run.metrics.write_text("".join(json.dumps({"life": 1, **record}) + "\n" for record in records))


def sections(run: RunDir) -> list[str]:
    return report(run).split("\n\n")


# --- which run


def test_a_run_is_found_by_its_name_and_by_its_folder(run: RunDir) -> None:
    live(run, attempt())
    for typed in ("train", "runs/train", str(run.path), f"{run.path}/"):
        assert find_run(typed, "report").path.resolve() == run.path


def test_a_folder_here_comes_before_a_name_under_runs(run: RunDir, tmp_path: Path) -> None:
    live(run, attempt())
    here = RunDir(tmp_path / "train")
    here.prepare(fresh=False)
    assert find_run("train", "report").path.resolve() == run.path  # a folder that is not a run is skipped
    live(here, attempt())
    assert find_run("train", "report").path.resolve() == here.path


def test_a_run_that_is_not_there_is_an_error_that_names_those_that_are(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"^there is no run x; the runs here: none$"):
        find_run("x", "report")
    live(run, attempt())
    other = RunDir(tmp_path / "runs" / "b")
    other.prepare(fresh=False)
    live(other, attempt())
    with pytest.raises(RunDirError, match=r"the runs here: b, train$"):
        find_run("x", "report")
    for k in range(10):
        RunDir(tmp_path / "runs" / f"sweep-{k}").prepare(fresh=False)
        live(RunDir(tmp_path / "runs" / f"sweep-{k}"), attempt())
    with pytest.raises(RunDirError, match=r"the runs here: b, sweep-0, .*, sweep-6 and 4 more$"):
        find_run("x", "report")


def test_runs_that_were_moved_aside_are_had_by_name_alone(run: RunDir, tmp_path: Path) -> None:
    live(run, attempt())
    run.prepare(fresh=True)
    live(run, attempt())
    [older] = tmp_path.glob("runs/train.*")
    assert find_run(None, "report").path.resolve() == run.path
    assert find_run(older.name, "report").path.resolve() == older


def test_the_report_is_printed(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    live(run, attempt())
    print_report(["train"])
    assert capsys.readouterr().out == report(find_run("train", "report")) + "\n"


# --- attempts


def test_each_attempt_is_a_line_with_its_time_and_how_it_ended(run: RunDir) -> None:
    live(
        run,
        attempt(1, ended=1e9 + 3723, status=75, outcome="stopped by SIGTERM after step 40"),
        attempt(
            2,
            started=1e9 + 9000,
            ranks=12,
            ended=1e9 + 9005,
            status=0,
            outcome="all ranks exited with status 0",
            argv=("a b", "$x"),
        ),
    )
    title, command, rows = sections(run)
    assert title == f"run train in {run.path}"
    assert command == "'a b' '$x'"  # ready to be typed again; from the newest attempt
    header, first, second = rows.splitlines()
    assert header.split() == ["attempt", "started", "took", "ranks", "how", "it", "ended"]
    assert re.match(r"      1  2001-09-\d\d \d\d:\d\d:\d\d  1:02:03      2  stopped by SIGTERM after step 40$", first)
    assert re.match(r"      2  2001-09-\d\d \d\d:\d\d:\d\d  5.0 s       12  all ranks exited with status 0$", second)


def test_of_hundreds_of_attempts_and_checkpoints_the_report_shows_so_many_that_it_fits_one_screen(run: RunDir) -> None:
    live(run, *(attempt(number, ended=1e9 + 5, outcome="stopped") for number in range(1, 301)))
    for step in range(1, 501):
        (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    assert [line.split()[0] for line in sections(run)[2].splitlines()] == ["attempt", *map(str, range(291, 301))]
    assert sections(run)[-1] == "checkpoints: 500, from step-00000001 to step-00000500"


def test_a_long_end_is_shortened_so_that_its_line_fits_the_terminal(run: RunDir) -> None:
    said = "all 2 ranks raised RuntimeError: " + "its loss is\nnot finite, " * 20
    live(run, attempt(1, ended=1e9 + 5, outcome=said), attempt(2, ended=1e9 + 5, outcome="all ranks exited with status 0"))
    for columns in (60, 80, 120):
        lines = report(run, columns).split("\n\n")[2].splitlines()
        assert len(lines) == 3
        assert len(lines[1]) <= columns
        assert lines[1].endswith("...")
        assert "  all 2 ranks" in lines[1]
        assert columns < 80 or lines[2].endswith("  all ranks exited with status 0")


def test_a_run_that_never_began_has_no_attempt(run: RunDir) -> None:
    live(run)
    assert sections(run) == [f"run train in {run.path}", "no attempt yet"]


def test_a_life_without_an_end_was_killed_unless_its_holder_lives(run: RunDir) -> None:
    live(run, attempt(1), attempt(2))
    assert sections(run)[2].count("killed, or its machine went down") == 2
    lease = run.take()
    holder = run.holder()
    assert holder is not None
    _, first, second = sections(run)[2].splitlines()
    assert first.endswith("killed, or its machine went down")
    assert second.endswith(f"running, pid {holder.pid} on {holder.host}")
    write_json(run.lease, {**asdict(holder), "start_time": holder.start_time - 1})  # this process has exited
    assert "alive" not in report(run)
    write_json(run.lease, asdict(holder))
    lease.release()
    assert "alive" not in report(run)


# --- metrics


def course(run: RunDir) -> list[list[str]]:
    return [line.split() for line in sections(run)[3].splitlines()]


def test_a_short_course_is_shown_whole_with_a_column_for_each_figure(run: RunDir) -> None:
    live(run, attempt())
    figures(
        run,
        {"step": 1, "epoch": 0, "clock_s": 1.0, "share/data": 0.5, "loss": 2.5, "lr": 0.001},
        {"step": 2, "epoch": 0, "clock_s": 2.0, "share/data": 0.5, "loss": 1.23456789, "lr": 0.001},
        {"step": 2, "eval_loss": 1.5},
        {"step": 3, "loss": "nan", "lr": 12345678.0},
        {"step": 4, "loss": 13061.4, "lr": -13061.4},
    )
    assert course(run) == [
        ["step", "loss", "lr", "eval_loss"],
        ["1", "2.5", "0.001"],
        ["2", "1.235", "0.001", "1.5"],
        ["3", "nan", "1.235e+07"],
        ["4", "13061", "-1.306e+04"],
    ]


@pytest.mark.parametrize("columns", [24, 80, 200])
def test_more_figures_than_fit_side_by_side_are_in_several_tables(run: RunDir, columns: int) -> None:
    names = [f"metric_{'x' * (k % 7)}{k}" for k in range(30)]
    figures(run, *({"step": step, **dict.fromkeys(names, 1.5 * step)} for step in (1, 20)))
    text = report(run, columns)
    tables = [section.splitlines() for section in text.split("\n\n") if section.split()[0] == "step"]
    assert [name for lines in tables for name in lines[0].split()[1:]] == names
    assert all(len(line) <= columns for lines in tables for line in lines)
    assert all([line.split()[0] for line in lines] == ["step", "1", "20"] for lines in tables)
    assert len(tables) == {24: 30, 80: 6, 200: 3}[columns]


def test_a_long_course_is_shown_at_eleven_moments_from_the_first_to_the_last(run: RunDir) -> None:
    live(run, attempt())
    figures(run, *({"step": step, "loss": 1 / step} for step in range(1, 1002)))
    assert [int(row[0]) for row in course(run)[1:]] == list(range(1, 1002, 100))


def test_every_moment_with_an_evaluation_is_shown_where_they_are_few(run: RunDir) -> None:
    live(run, attempt())
    figures(run, *({"step": step, "loss": 1.0, **({"eval_loss": 2.0} if step == 37 else {})} for step in range(1, 1002)))
    steps = [int(row[0]) for row in course(run)[1:]]
    assert 37 in steps
    assert len(steps) == 12


def test_many_evaluations_are_thinned_out_and_the_last_is_kept(run: RunDir) -> None:
    live(run, attempt())
    figures(run, *({"step": step, "eval_loss": 2.0} for step in range(1, 1001)))
    steps = [int(row[0]) for row in course(run)[1:]]
    assert steps[0] == 1
    assert steps[-1] == 1000
    assert len(steps) <= 25


def test_a_step_that_a_later_attempt_repeats_is_that_of_the_later_attempt(run: RunDir) -> None:
    live(run, attempt(1), attempt(2))
    figures(run, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"life": 2, "step": 2, "loss": 1.0})
    assert course(run) == [["step", "loss"], ["1", "3"], ["2", "1"]]


def test_half_a_line_of_a_killed_attempt_is_passed_over(run: RunDir) -> None:
    live(run, attempt())
    run.metrics.write_text('{"life": 1, "step": 1, "loss": 3.0}\n{"life": 1, "step": 2, "lo')
    assert course(run) == [["step", "loss"], ["1", "3"]]


# --- time


def test_the_time_is_split_by_the_share_of_each_interval_weighted_with_its_seconds(run: RunDir) -> None:
    live(run, attempt(1), attempt(2))
    figures(
        run,
        {"step": 1, "clock_s": 10.0, "share/data wait": 0.5, "share/checkpoint": 0.0},
        {"step": 2, "clock_s": 90.0, "share/data wait": 0.0, "share/checkpoint": 0.25},
        {"step": 2, "eval_loss": 1.0},  # has no time
        {"life": 2, "step": 3, "clock_s": 10.0, "share/data wait": 1.0},  # a clock that starts again
    )
    assert [re.split(r"\s\s+", line.strip()) for line in sections(run)[-1].splitlines()] == [
        ["time", "share"],
        ["0:01:05", "65.0%", "computing"],
        ["20.0 s", "20.0%", "checkpoint"],
        ["15.0 s", "15.0%", "data wait"],
    ]


def test_figures_without_a_clock_are_said_to_have_none(run: RunDir) -> None:
    live(run, attempt())
    figures(run, {"step": 1, "loss": 1.0})
    assert sections(run)[-1] == "no time was recorded"


# --- checkpoints and failure


def test_checkpoints_and_the_failure_come_last(run: RunDir) -> None:
    live(run, attempt())
    for name in ("step-0000020", "step-0000010", "tmp.abc"):
        (run.checkpoints / name).mkdir(parents=True)
    run.write_failure(Failure(1, "h", "rank 1 was killed by SIGKILL at step 21", 137, log="/runs/train/logs/rank-1.log"))
    assert sections(run)[-2:] == [
        "checkpoints: step-0000010, step-0000020",
        "failed: rank 1 was killed by SIGKILL at step 21\nits output: /runs/train/logs/rank-1.log",
    ]


def test_a_long_failure_is_broken_between_words(run: RunDir) -> None:
    live(run, attempt())
    run.write_failure(
        Failure(
            1, "h", "rank 1 raised TypeError: unhashable type: 'list'" + ", too long" * 20, 1, log="/runs/train/logs/rank-1.log"
        )
    )
    told = sections(run)[-1].splitlines()
    assert len(told) > 2
    assert max(map(len, told)) <= 80
    assert told[0].startswith("failed: rank 1 raised TypeError: unhashable type: 'list'")
    assert told[-1] == "its output: /runs/train/logs/rank-1.log"


# --- table


def test_columns_are_as_wide_as_their_widest_cell_figures_to_the_right_words_to_the_left() -> None:
    rows = [["step", "a", "who"], ["1", "-0.5", "ann"], ["100", "", "b"], ["20", "+12.25", ""]]
    assert table(rows).splitlines() == [
        "step       a  who",
        "   1    -0.5  ann",
        " 100          b",
        "  20  +12.25",
    ]


def test_the_only_run_needs_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunDirError, match=r"there is no run under .*/runs; type: rankwise report PATH$"):
        print_report([])
    for name in ("first", "second"):
        run = RunDir(Path("runs", name))
        run.prepare(fresh=False)
        run.begin_attempt(1, ("train.py",))
        if name == "first":
            print_report([])
            assert "run first in runs/first" in capsys.readouterr().out
    with pytest.raises(RunDirError, match="the runs here: first, second"):
        print_report([])


def test_a_folder_instead_of_the_metrics_file_has_none(run: RunDir) -> None:
    live(run, attempt())
    run.metrics.mkdir()
    assert sections(run)[0] == f"run train in {run.path}"
    assert "step" not in report(run)
