"""What is printed at the end of a run: what happened, whether something is saved, and what to type."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rankwise.launch.outcome import conclude
from rankwise.run.config import RunConfig
from rankwise.run.directory import Failure, RunDir

CONFIG = RunConfig(argv=("train.py", "--lr", "1"), nproc="2", fresh=True)


def printed(capsys: pytest.CaptureFixture[str], status: int, outcome: str, failure: Failure | None, saved: bool) -> list[str]:
    run = RunDir(Path("runs/train"))
    run.prepare(fresh=False)
    attempt = run.begin_attempt(2, ("train.py",))
    run.update_attempt(attempt, ended=time.time(), status=status, outcome=outcome)
    run.write_failure(failure)
    if saved:
        (run.checkpoints / "step-00000007").mkdir(parents=True)
    assert conclude(run, status, 0, CONFIG) == status
    return capsys.readouterr().err.splitlines()


def test_a_failure_ends_with_the_checkpoint_and_the_command_that_resumes_from_it_without_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    failure = Failure(
        1, "vm", "rank 1 exited with status 3 at step 9", 3, exit_code=3, step=9, log="runs/train/logs/rank-1.log"
    )
    assert printed(capsys, 3, failure.summary, failure, saved=True)[-1] == (
        "rankwise: saved: step-00000007; to resume, type: rankwise run --nproc 2 train.py --lr 1"
    )
    assert printed(capsys, 3, failure.summary, failure, saved=False)[-1].startswith("rankwise: saved")  # of the attempt before


def test_a_failure_before_the_first_checkpoint_says_that_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    failure = Failure(
        1, "vm", "rank 1 exited with status 3 at step 9", 3, exit_code=3, step=9, log="runs/train/logs/rank-1.log"
    )
    assert printed(capsys, 3, failure.summary, failure, saved=False)[-1] == (
        "rankwise: nothing was saved yet: the same command starts from the beginning"
    )


@pytest.mark.parametrize("message", ["x" * 3_000_000, "one number\n" * 100_000], ids=["a long line", "many lines"])
def test_a_message_of_megabytes_does_not_move_the_cause_off_the_screen(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f'Traceback (most recent call last):\n  File "train.py", line 5, in <module>\nValueError: {message}\nthe end\n'
    failure = Failure(1, "vm", "rank 1 raised ValueError", 1, exit_code=1, traceback=text, log="runs/train/logs/rank-1.log")
    lines = printed(capsys, 1, failure.summary, failure, saved=False)
    assert lines[1:3] == ["Traceback (most recent call last):", '  File "train.py", line 5, in <module>']
    assert lines[-3:-1] == ["the end", "rankwise: rank 1 raised ValueError, on vm"]
    assert len(lines) < 130
    assert max(map(len, lines)) < 1010
    assert len(lines) < 10 or "... 99884 lines, which are in runs/train/logs/rank-1.log" in lines


def write_log(text: str) -> None:
    """That of rank 1."""
    run = RunDir(Path("runs/train"))
    run.prepare(fresh=False)
    run.log(1).write_text(text)


def test_of_a_progress_bar_only_what_was_visible_last_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log("started\n" + "".join(f"\r{n}%|\x1b[32m##\x1b[0m" for n in range(1000)))
    failure = Failure(1, "vm", "rank 1 exited with status 3", 3, exit_code=3, log="runs/train/logs/rank-1.log")
    assert printed(capsys, 3, failure.summary, failure, saved=False)[1:3] == ["  started", "  999%|##"]


def test_a_rank_that_printed_nothing_is_reported_without_empty_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log("")
    failure = Failure(1, "vm", "rank 1 was killed by SIGKILL", 137, signal="SIGKILL", log="runs/train/logs/rank-1.log")
    assert printed(capsys, 137, failure.summary, failure, saved=False)[:2] == ["", f"rankwise: {failure.summary}, on vm"]


def test_a_run_that_was_killed_says_which_checkpoint_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = "killed by a second Ctrl-C, without saving"
    assert printed(capsys, 130, outcome, None, saved=True) == [
        f"rankwise: {outcome}",
        "rankwise: saved: step-00000007; to resume, type: rankwise run --nproc 2 train.py --lr 1",
    ]


LONG = "a setting that cannot work, " * 20


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (LONG, [f"rankwise: rank 1 raised ConfigError: {LONG}, on vm"]),
        ("one\ntwo", ["error: one", "two", "  at train.py:3", "rankwise: rank 1 raised ConfigError: one, on vm"]),
    ],
)
def test_an_error_of_rankwise_is_printed_once_and_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: str, told: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    summary = f"rank 1 raised ConfigError: {error.splitlines()[0]}"
    failure = Failure(1, "vm", summary, 2, 2, traceback=f"error: {error}\n  at train.py:3\n", log="runs/train/logs/rank-1.log")
    assert printed(capsys, 2, summary, failure, saved=False)[1:-1] == told


@pytest.mark.parametrize(("by", "lines"), [("the launcher of the agents (slurm)", 1), ("the agent", 0)])
def test_a_launcher_that_is_not_installed_is_told_with_what_to_type(
    by: str, lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container within a job of Slurm has its variables, and often no srun: the shell has printed the name."""
    assert conclude(RunDir(tmp_path / "run"), 127, 0, CONFIG, by) == 127
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all(line.startswith(f"rankwise: {by} was not found: ") and line.endswith(": --on local") for line in said)
