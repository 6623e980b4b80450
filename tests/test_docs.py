"""What the documentation shows is run here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def launched(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rankwise", "run", *words], capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_readmes_python_runs_on_two_ranks_and_on_one(number: int, tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(blocks("python")[number])
    two = launched("--nproc", "2", str(script))
    assert two.returncode == 0, two.stdout + two.stderr
    one = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert one.returncode == 0, one.stderr


@pytest.mark.parametrize(
    ("example", "words", "said"),
    [
        ("01_torchrun_script.py", (), "epoch 10: rank 0 of 2"),
        ("02_own_loop.py", (), "done after 290 steps"),
        ("03_trainer_digits.py", (), "done: 480 steps"),
        ("04_gpt.py", ("--steps", "6"), "--- a sample ---"),
    ],
)
def test_an_example_runs_on_two_ranks(example: str, words: tuple[str, ...], said: str) -> None:
    done = launched("--nproc", "2", str(ROOT / "examples" / example), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout


def test_the_readme_shows_every_example() -> None:
    for example in (ROOT / "examples").glob("*.py"):
        assert f"rankwise run examples/{example.name}" in README


def test_the_readmes_commands_use_the_one_constraints_file() -> None:
    for command in blocks("sh"):
        if "pip install" in command:
            assert "-c constraints.txt" in command
    assert "torch==" in (ROOT / "constraints.txt").read_text()
    assert "torch==" not in (ROOT / "pyproject.toml").read_text()


def test_ci_runs_the_readmes_test_command() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert "$(readme_command test)" in ci
    assert "<!-- test -->\n```sh\n" in README
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_links_between_documents_lead_somewhere() -> None:
    for text in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#]+\.md)\)", text):
            assert (ROOT / link).exists(), link


def test_the_documents_name_only_options_that_exist() -> None:
    help_text = launched("--help").stdout
    for text in DOCUMENTS:
        for command in re.findall(r"`(--[a-z-]+)", text):
            assert command in help_text, command
