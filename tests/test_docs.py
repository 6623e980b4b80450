"""Everything that the documentation shows is run here."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from ranks import scripts_on_ranks

import rankwise
from rankwise import actions

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


PYTHON = [block for text in DOCUMENTS for block in blocks("python", text)]


def launched(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rankwise", "run", *words], capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("number", range(len(PYTHON)))
@pytest.mark.one_in(2)
def test_the_documents_python_runs_on_two_ranks_and_on_one(number: int) -> None:
    Path("readme.py").write_text(PYTHON[number])
    for ranks in (2, 1):
        for done in scripts_on_ranks(ranks, "readme.py"):
            assert done.returncode == 0, done.stdout
        shutil.rmtree("runs", ignore_errors=True)  # those of a Trainer, which would resume


@pytest.mark.stress
@pytest.mark.parametrize(
    ("page", "module", "last"),
    [("functions", "cloudpickle", "[(0, "), ("submitit", "submitit", "[0, 1]")],
)
def test_the_documents_functions_run_from_a_plain_script(
    page: str, module: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # ranks that need torch are forked
    pytest.importorskip(module, reason=f"{module} is not installed (pip install 'rankwise[functions,submitit]')")
    Path("readme.py").write_text(blocks("py", (ROOT / "docs" / f"{page}.md").read_text())[0])
    done = subprocess.run([sys.executable, "readme.py"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(last)


EXAMPLES: dict[str, tuple[tuple[str, ...], str]] = {
    "01_torchrun_script.py": ((), "epoch 10: rank 0 of 2"),
    "02_own_loop.py": ((), "done after 290 steps"),
    "03_trainer_digits.py": ((), "done: 480 steps"),
    "04_gpt.py": (("--steps", "3", "--batch=8", "--local-rank=0"), "--- a sample ---"),  # like torch.distributed.launch
    "05_ranks.py": ((), "done: 3.1"),
    "06_figures.py": ((), "done: 150 steps, accuracy 0.8"),
    "07_evaluation.py": ((), "macro F1 0.8"),
    "08_parts.py": ((), "accuracy of the averaged model 0.9"),
}
"""The arguments of each, and a text that it prints."""


BY_THE_COMMAND = ("01_torchrun_script.py", "04_gpt.py")
"""The README's demo, and before it a script that destroys its process group, after which a separate process sometimes aborts in
gloo. The other scripts differ only in what they train: their ranks are forked."""


@pytest.mark.parametrize("example", [name for name in EXAMPLES if name not in BY_THE_COMMAND])
@pytest.mark.one_in(len(EXAMPLES))
def test_an_example_runs_on_two_ranks(example: str) -> None:
    words, said = EXAMPLES[example]
    main, _ = scripts_on_ranks(2, str(ROOT / "examples" / example), *words)
    assert main.returncode == 0, main.stdout
    assert said in main.stdout


@pytest.mark.parametrize("example", [name for name in reversed(EXAMPLES) if name not in BY_THE_COMMAND])
@pytest.mark.one_in(len(EXAMPLES))
def test_an_example_runs_as_plain_python(example: str) -> None:
    words, said = EXAMPLES[example]
    [done] = scripts_on_ranks(1, str(ROOT / "examples" / example), *words)
    assert done.returncode == 0, done.stdout
    assert said in done.stdout


@pytest.mark.parametrize("example", BY_THE_COMMAND)
@pytest.mark.one_in(2)
def test_an_example_runs_by_the_readmes_command(example: str) -> None:
    words, said = EXAMPLES[example]
    done = launched("--nproc", "2", "--start-method", "fork", str(ROOT / "examples" / example), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout


def test_every_example_is_run_here_and_together_they_show_every_public_part() -> None:
    paths = sorted((ROOT / "examples").glob("*.py"))
    assert [path.name for path in paths] == list(EXAMPLES)
    shown = {name for path in paths for name in re.findall(r"rankwise\.(\w+)", path.read_text())}
    apart = {
        "RankwiseError",
        "Stopped",
        "run_function",
        "selftest",
        "LengthBatches",
        "LocalSGD",
        "DiLoCo",
        "HDF5Dataset",
        "HDF5Writer",
        "Precision",
    }
    assert set(rankwise.__all__) - shown <= apart


def test_the_readme_shows_every_example() -> None:
    for example in (ROOT / "examples").glob("*.py"):
        assert f"rankwise run examples/{example.name}" in README


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200
    assert len(re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE).split()) <= 1200


def test_every_page_is_reached_from_the_readme() -> None:
    reached = {ROOT / "README.md", ROOT / "docs" / "index.md"}  # the site starts with the second
    new = set(reached)
    while new:
        links = {(page.parent / link).resolve() for page in new for link in re.findall(r"\]\(([^)#:]+\.md)", page.read_text())}
        new = links - reached
        reached |= new
    assert [path.name for path in (ROOT / "docs").glob("*.md") if path not in reached] == []


def test_the_reference_has_every_public_name_and_each_has_a_docstring() -> None:
    named = re.findall(r"^::: [\w.]+\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    public = {name: getattr(module, name) for module in (actions, rankwise) for name in module.__all__}
    assert sorted(named) == sorted(public)
    assert [name for name in named if not inspect.getdoc(public[name])] == []


def test_names_as_the_documents_write_them_need_no_import_but_that_of_rankwise() -> None:
    names = sorted({name for text in DOCUMENTS for name in re.findall(r"(?<!::: )\brankwise\.[a-z0-9]+\.[A-Z]\w+", text)})
    assert "rankwise.data.Blocks" in names
    done = subprocess.run([sys.executable, "-c", "import rankwise\n" + "\n".join(names)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_page_is_on_the_site() -> None:
    pages = re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


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
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for link in re.findall(r"\]\(([^)#:]+\.md)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_every_argument_of_the_trainer_is_in_its_document() -> None:
    text = (ROOT / "docs" / "trainer.md").read_text()
    given = [name for name in inspect.signature(rankwise.Trainer).parameters if name not in ("model", "optimizer", "step_fn")]
    assert [name for name in given if not re.search(rf"^\|[^|]*`{name}\b", text, re.MULTILINE)] == []


def test_the_documents_name_only_options_that_exist() -> None:
    help_text = launched("--help").stdout
    for text in DOCUMENTS:
        for command in re.findall(r"`(--[a-z-]+)", text):
            assert command in help_text, command


# --- migration from other launchers

MIGRATION = (ROOT / "docs" / "migration.md").read_text().replace("\\|", "\0")
ROWS = [
    [re.findall(r"`([^`]+)`", cell.replace("\0", "|")) for cell in line.split("|")[1:-1]]
    for line in MIGRATION.splitlines()
    if line.startswith("| ")
]
"""The code in each cell of each row."""
README_LINES = re.findall(r"`(rankwise run [^`]+train\.py)`", README)
NEW_LINES = sorted({*README_LINES, *(span for row in ROWS for span in row[1] if span.startswith("rankwise run "))})


def words_of(line: str) -> list[str]:
    return shlex.split(line)[2:]


@pytest.mark.parametrize("line", NEW_LINES)
def test_a_line_to_type_now_is_taken_as_it_stands(line: str) -> None:
    from rankwise import cli, schedulers
    from rankwise.launch.scheduler_choice import choose
    from rankwise.run.config import RunConfig
    from rankwise.run.options import is_given

    given = cli.run.make_context("run", words_of(line)).params
    settings = {name: value for name, value in given.items() if is_given(value) or name == "argv"}
    config = RunConfig.of(schedulers.options(), settings)
    assert config.argv[0].endswith(".py")
    choice = choose(config, {})
    if config.on is not None or "node_rank" in config.job:  # the text of a job needs no scheduler
        Path(config.argv[0]).write_text("")
        done = launched("--dry-run", *words_of(line))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("#!/bin/bash\n" if config.on is not None else "#!/bin/sh\n")
        assert choice.name == (config.on or "manual")


def test_what_was_typed_so_far_is_answered_with_the_line_to_type_now() -> None:
    from rankwise import cli
    from rankwise.launch.foreign_options import translated

    parameters = cli.run.get_params(click.Context(cli.run))
    ours = {name: not getattr(p, "is_flag", False) for p in parameters for name in p.opts if name.startswith("-")}
    known = re.compile(r"(python -m torch\.distributed\.launch|torchrun|horovodrun|mpirun|accelerate launch) ")
    pairs = [(row[0][0], row[1][0]) for row in ROWS if len(row) > 1 and row[0] and row[1] and known.match(row[0][0])]
    answered = [(old, new) for old, new in pairs if new.startswith("rankwise run")]
    assert len(answered) >= 9
    for old, new in answered:
        found = translated(shlex.split(old), ours)
        assert found is not None, old
        assert list(found.words[: len(words_of(new))]) == words_of(new)
        assert translated(words_of(new), ours) is None
