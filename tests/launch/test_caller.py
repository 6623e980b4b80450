"""What users and programs learn about the run that they have started."""

from __future__ import annotations

import pytest

from rankwise.launch.caller import CODE, PERSON, caller_of
from rankwise.run.config import WORKER, RunConfig


@pytest.mark.parametrize(
    ("config", "caller", "name"),
    [
        (RunConfig(argv=("train.py", "--lr", "1")), PERSON, "train.py"),
        (RunConfig(argv=("package.train", "--lr", "1"), module=True), PERSON, "package.train"),
        (RunConfig(argv=("bash", "-c", "true"), command=True), PERSON, "bash"),
        (RunConfig(argv=(WORKER, "train", "1"), module=True), CODE, "train"),
        (RunConfig(argv=(WORKER,)), PERSON, WORKER),
    ],
)
def test_what_was_started_has_the_name_that_its_caller_gave_it(config: RunConfig, caller: object, name: str) -> None:
    assert caller_of(config.words) is caller
    assert caller_of(config.words).name_of(config.words) == name


def test_code_calls_again_and_a_person_types_the_command() -> None:
    assert PERSON.how_to_continue("rankwise run train.py") == "type: rankwise run train.py"
    assert CODE.how_to_continue("rankwise run train.py") == "call it again"
    assert (PERSON.reads, CODE.reads) == (True, False)


def test_two_functions_are_two_runs_and_their_arguments_are_not_looked_at() -> None:
    assert CODE.identity(("-m", WORKER, "train", "1")) == CODE.identity(("-m", WORKER, "train", "2"))
    assert CODE.identity(("-m", WORKER, "train")) != CODE.identity(("-m", WORKER, "test"))
    assert PERSON.identity(("-m", "package.train", "1")) == ("-m", "package.train")
