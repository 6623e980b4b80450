"""The command that resumes a run: in a shell, it means the same run again."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from rankwise import cli, schedulers
from rankwise.launch.outcome import _resume_command
from rankwise.launch.script import Program
from rankwise.launch.status import called
from rankwise.launch.submit import compare_with_earlier_attempts
from rankwise.run.config import RunConfig, misplaced, option
from rankwise.run.directory import RunDir
from rankwise.run.options import is_given

HOSTILE = "-a $(touch X) 'b\"; `id` *"

OTHERS: dict[str, Any] = {
    "nproc": "3", "gpus": "0,2", "stop_after": "12h", "checkpoint_scope": "node", "start_method": "spawn", "tee": "all",
    "nodes": "1:4", "gpus_per_node": "a100:4", "node_rank": 0,
}  # fmt: skip
"""Settings that are not free text."""

NOT_TYPED = ("argv", "job", "site", "fresh")
OPTIONS = schedulers.options()


def settings() -> list[tuple[str, Any]]:
    """Each setting with a value that is not its default, hostile if any text is allowed."""
    found = []
    for field in dataclasses.fields(RunConfig):
        value = OTHERS.get(field.name, {"bool": True, "float": 7.5, "int": 7}.get(str(field.type), HOSTILE))
        if field.name not in NOT_TYPED:
            found.append((field.name, value))
    for name, option_ in OPTIONS.items():
        kinds: dict[type, Any] = {bool: True, int: 7, list: (HOSTILE, "-b")}
        found.append((name, OTHERS.get(name, kinds.get(option_.kind, HOSTILE))))
    return found


def parsed(line: str) -> RunConfig:
    """The configuration that the command reads from this line."""
    words = shlex.split(line)
    assert words[:2] == ["rankwise", "run"]
    context = click.Context(cli.main)
    options = cli.run.make_context("run", words[2:], parent=context).params
    options.pop("config")
    return RunConfig.of(OPTIONS, {name: value for name, value in options.items() if is_given(value) or name == "argv"})


@pytest.mark.parametrize(("name", "value"), settings(), ids=[name for name, _ in settings()])
def test_the_command_that_goes_on_asks_for_the_same_whatever_the_words(name: str, value: Any) -> None:
    config = RunConfig.of(OPTIONS, {"argv": ("./-lead $(touch X).py", "--nproc", "7", "a b"), name: value})
    assert parsed(_resume_command(config)) == config


def test_every_setting_is_tried() -> None:
    names = {field.name for field in dataclasses.fields(RunConfig)}
    assert names - {name for name, _ in settings()} == set(NOT_TYPED)
    assert option("fresh") not in _resume_command(RunConfig(argv=("x.py",), fresh=True))


@pytest.mark.parametrize("name", ["train", "-lead", "a b", "$(touch X)"])
def test_a_run_is_called_by_what_finds_it(name: str) -> None:
    run = RunDir(Path("runs") / name)
    run.prepare(fresh=False)
    run.begin_attempt(1, ("x.py",))
    word = called(run)
    assert not word.startswith("-")
    from rankwise.run.directory import find_run

    assert find_run(word, "status").path.samefile(run.path)


# --- options of ours after the script


@pytest.mark.parametrize(
    ("words", "ours", "rest"),
    [
        ("--nproc 2", "--nproc 2", ""),
        ("--lr 1 --nproc=2 --fresh a --max-restarts 3", "--nproc=2 --fresh --max-restarts 3", "--lr 1 a"),
        ("--nproc_per_node 2 --nnodes 1 --grace 3", "--nproc_per_node 2 --nnodes 1 --grace 3", ""),
        ("--nproc", "--nproc", ""),
        ("a -- --nproc 2", "", "a -- --nproc 2"),
        ("--lr 1 --site x --argv y -m", "", "--lr 1 --site x --argv y -m"),
    ],
)
def test_options_of_ours_are_told_from_the_scripts_own(words: str, ours: str, rest: str) -> None:
    assert misplaced(words.split(), OPTIONS) == (ours.split(), rest.split())


PARSES = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr')\np.add_argument('--name')\np.parse_args()\n"


def test_a_script_that_dies_of_an_option_of_ours_is_told_with_the_command_that_was_meant(rankwise: Any) -> None:
    Path("a b.py").write_text(PARSES)
    done = rankwise("run", "--tee", "all", "a b.py", "--nproc", "2", "--lr", "1")
    assert done.returncode == 2
    said = "--nproc after a b.py is an option of the script; for rankwise, type: "
    meant = "rankwise run --nproc 2 --start-method spawn --tee all 'a b.py' --lr 1"  # the site file of these tests sets spawn
    assert f"rankwise: {said}{meant}\n" in done.stderr
    assert "exited with status 2" in done.stderr.splitlines()[-2]


def test_a_script_that_knows_the_option_and_dies_of_something_else_is_told_nothing_of_it(rankwise: Any) -> None:
    Path("x.py").write_text(PARSES + "raise SystemExit(2)")
    done = rankwise("run", "--nproc", "1", "x.py", "--name", "2")
    assert (done.returncode, "meant for rankwise" in done.stderr) == (2, False)


# --- another command for the same run


@pytest.mark.parametrize("saved", [False, True])
def test_other_arguments_are_said_and_checkpoints_are_spoken_of_only_where_there_are_any(
    saved: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(Path("runs/x"))
    run.prepare(fresh=False)
    run.begin_attempt(1, ("x.py",))
    if saved:
        (run.checkpoints / "step-00000004").mkdir(parents=True)
    compare_with_earlier_attempts(run, Program(("python",), ("x.py", "a b")))
    said = capsys.readouterr().err
    assert "was last started as `x.py`, now as `x.py 'a b'`" in said
    assert ("it resumes from its checkpoints" in said) == saved
    assert said.endswith("To start a new run: --name NAME or --fresh\n")


def test_a_start_that_asked_for_help_or_was_refused_is_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(Path("runs/x"))
    run.prepare(fresh=False)
    for argv, status in ((("x.py", "--lr", "1"), 0), (("x.py", "-h"), 0), (("x.py", "--lrr"), 2)):
        run.update_attempt(run.begin_attempt(1, argv), ended=1.0, status=status, outcome="")
    compare_with_earlier_attempts(run, Program(("python",), ("x.py", "--lr", "1")))
    compare_with_earlier_attempts(run, Program(("python",), ("x.py", "--help")))
    assert capsys.readouterr().err == ""
    compare_with_earlier_attempts(run, Program(("python",), ("x.py", "--lr", "2")))
    assert "was last started as `x.py --lr 1`, now as `x.py --lr 2`" in capsys.readouterr().err
