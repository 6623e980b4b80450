"""What all schedulers with jobs have in common."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rankwise.errors import ConfigError
from rankwise.schedulers import job


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("train", "train"),
        ("a/b c", "a-b-c"),
        (";$(touch x)", "touch-x"),
        ("3d", "run-3d"),
        ("ä", "run"),
        ("", "run"),
        ("-x", "x"),
    ],
)
def test_a_name_becomes_one_that_means_nothing_to_a_shell_or_a_scheduler(name: str, plain: str) -> None:
    assert job.slug(name) == plain


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\x00", "\x1b[2J", "a\x7f"])
def test_a_control_character_cannot_be_in_a_line_of_a_jobs_script(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--x {text!r}")):
        job.one_line(text, "--x")


def test_every_other_character_can() -> None:
    assert job.one_line("a b\"'$(x)é", "--x") == "a b\"'$(x)é"


def test_a_scheduler_whose_command_is_not_there_says_what_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # a folder that may not be searched would be the reason
    with pytest.raises(ConfigError, match=r"^nosuch: No such file or directory; type this$"):
        job.call(["nosuch"], "type this")
    with pytest.raises(ConfigError, match=r"^/nosuch: No such file or directory; start the run again$"):
        job.call([sys.executable], "type this", cwd="/nosuch")
    monkeypatch.setattr(job, "_PATIENCE_S", 0.1)
    (tmp_path / "slow").write_text("#!/bin/sh\nwhile :; do :; done\n")
    (tmp_path / "slow").chmod(0o755)
    with pytest.raises(ConfigError, match=r"slow has not answered for 0.1 s; is the scheduler's server up"):
        job.call([str(tmp_path / "slow")], "type this")


def test_an_agent_that_a_job_starts_has_all_variables_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """dash drops those whose names are not identifiers. BASH_ENV is read by the shell of the job, and not again."""
    monkeypatch.setattr(job, "AGENT", (sys.executable, "-c", "import os; print(*sorted(os.environ))"))
    (tmp_path / "env").write_text("echo read\n")
    env = {**dict.fromkeys(("A.B", "x-y", "BASH_FUNC_module%%"), "() { :; }"), "BASH_ENV": str(tmp_path / "env")}
    done = subprocess.run(["bash", "-c", f"exec {job.agent()}"], env=env, capture_output=True, text=True)
    read, *names = done.stdout.split()
    assert {*env} <= {*names}
    assert read not in names


@pytest.mark.parametrize(("out", "err", "line"), [("a\n", "b\n\n", "b"), ("a\n", "", "a"), ("", "", "exit status 3")])
def test_the_last_line_is_of_either_stream(out: str, err: str, line: str) -> None:
    assert job.last_line(subprocess.CompletedProcess([], 3, out, err)) == line
