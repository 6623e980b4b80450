"""The command as the user types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rankwise.run.directory import RunDir
from rankwise.schedulers import options

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# It sets a variable before it would import torch, so its rank starts without waiting for this import.
PRINT_ARGUMENTS = "import os\nos.environ['X'] = '1'\nimport json, sys\nprint(json.dumps([sys.argv, os.getcwd()]))\n"

NOT_INSTALLED = """\
from importlib import metadata
def version(name):
    raise metadata.PackageNotFoundError(name)
metadata.version = version
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train it.py"
    path.write_text(PRINT_ARGUMENTS)
    return path


# --- help


@pytest.mark.parametrize(
    ("words", "mentioned"),
    [
        ((), ("run", "report", "--version", "--help")),
        (
            ("run",),
            (
                "SCRIPT.py",
                "--nproc",
                "--nproc-per-node",
                "--nproc_per_node",
                "--gpus",
                "-m",
                "--name",
                "--run-dir",
                "--fresh",
                "--config",
                "--help",
            ),
        ),
        (("run",), ("--max-restarts", "--grace", "--start-method", "--tee", "--stall-warn", "--master-port")),
        (("report",), ("RUN", "--help")),
    ],
)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_mentions_every_option(words: tuple[str, ...], mentioned: tuple[str, ...], option: str, rankwise: Run) -> None:
    done = rankwise(*words, option)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" ".join(["Usage: rankwise", *words]))
    for word in mentioned:
        assert word in done.stdout


def test_what_a_command_does_is_not_cut_in_the_list_of_commands(rankwise: Run) -> None:
    done = rankwise("--help", env={**os.environ, "COLUMNS": "80"})
    listed, _, last = done.stdout.partition("Commands:\n")[2].partition("\n\n")
    commands = listed.splitlines()
    assert [line.split()[0] for line in commands[:3]] == ["run", "status", "logs"]  # in the order of use
    assert last.startswith("  Begin with: rankwise run train.py\n")
    assert all(line.endswith(".") and not line.endswith("...") for line in commands)


def test_help_mentions_every_option_that_there_is() -> None:
    """The lists above and below are complete: if an option is added, this test fails."""
    from rankwise.cli import report, run

    parameters = [parameter for verb in (run, report) for parameter in verb.params]
    options = {option for parameter in parameters for option in parameter.opts}
    assert options == {
        "--nproc", "--nproc-per-node", "--nproc_per_node",
        "-m", "--name", "--run-dir", "--fresh", "--config", "--max-restarts", "--grace", "--start-method",
        "--tee", "--stall-warn", "--master-port", "--master_port", "--allow-independent", "--check-collectives", "argv", "runs",
        "--join-timeout", "--node-wait", "--stop-after", "--checkpoint-scope", "--sync", "--dry-run", "--wait",
    }  # fmt: skip


def test_every_setting_that_only_some_schedulers_know_is_an_option_under_a_heading_of_the_help(rankwise: Run) -> None:
    told = rankwise("run", "--help", env={**os.environ, "COLUMNS": "80"}).stdout
    parts = re.split(r"^(This run|Several nodes|A job in a queue|Slurm|Grid Engine|PBS|LSF):$", told, flags=re.MULTILINE)
    assert parts[1::2] == ["This run", "Several nodes", "A job in a queue", "Slurm", "Grid Engine", "PBS", "LSF"]
    assert all(len(line) <= 80 for line in told.splitlines())
    for option in options().values():
        for spelling in option.words if option.heading != "This run" else ():
            assert len(re.findall(rf"(?<![\w-]){re.escape(spelling)}(?![\w-])", "".join(parts[4::2]))) >= 1, spelling
    for spelling in (
        "--node-rank",
        "--node_rank",
        "--master-addr",
        "--master_addr",
        "--nodes",
        "--nnodes",
        "--host",
        "--hosts",
    ):
        assert spelling in parts[4]


def test_the_module_is_the_same_command() -> None:
    command = str(Path(sys.executable).with_name("rankwise"))
    for words in (["--help"], ["run", "--help"], ["report", "--help"], ["--version"], ["run", "nowhere.py"]):
        both = [
            subprocess.run([*start, *words], capture_output=True, text=True)
            for start in ([command], [sys.executable, "-m", "rankwise"])
        ]
        assert both[0].stdout == both[1].stdout
        assert both[0].stderr == both[1].stderr
        assert both[0].returncode == both[1].returncode


def test_the_version_is_that_of_the_package(rankwise: Run) -> None:
    from importlib.metadata import version

    assert rankwise("--version").stdout == f"rankwise {version('rankwise')}\n"


def test_a_checkout_that_is_not_installed_runs(
    rankwise: Run, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then no metadata of it are found."""
    (tmp_path / "hides").mkdir()
    (tmp_path / "hides" / "sitecustomize.py").write_text(NOT_INSTALLED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hides"))
    done = rankwise("run", "--nproc", "1", str(script))
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert rankwise("--version").stdout.startswith("rankwise ")


# --- errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "nothing to run; type: rankwise run script.py [its arguments]"),
        (["run", "--nproc", "0", "SCRIPT"], "--nproc 0: give a number of ranks, at least 1, or auto"),
        (["run", "--nproc", "x", "SCRIPT"], "--nproc x: give a number of ranks, at least 1, or auto"),
        (["run", "--name", "a/b", "SCRIPT"],
         "--name 'a/b': give the name of one folder, without /; for another place use --run-dir PATH"),
        (["run", "--stop-after", "3", "SCRIPT"], "--stop-after 3: give a number above 0 and a unit: 90s, 30m, 12h, 2d"),
        (["run", "--grace", "0", "SCRIPT"], "--grace 0: give a number of seconds above 0, within which ranks must stop"),
        (["run", "nowhere.py"], "there is no script nowhere.py (in HERE)"),
        (["run", "HERE"], "HERE is a folder; give the script that trains, for example HERE/train.py"),
        (["run", "--run-dir", "SCRIPT/sub", "SCRIPT"],
         "the run directory SCRIPT/sub cannot be created or written (Not a directory: SCRIPT/sub/logs); "
         "choose another with --run-dir PATH"),
        (["report", "other"], "there is no run other; the runs here: none"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_with_status_2_and_leaves_nothing_behind(
    words: list[str], message: str, rankwise: Run, script: Path, tmp_path: Path
) -> None:
    def typed(text: str) -> str:
        return text.replace("SCRIPT", str(script)).replace("HERE", str(tmp_path))

    done = rankwise(*map(typed, words))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"rankwise: {typed(message)}\n"
    assert list(tmp_path.iterdir()) == [script]


def test_a_syntax_error_in_the_script_is_shown_with_status_2(rankwise: Run, script: Path) -> None:
    script.write_text("import torch\nif True\n")
    done = rankwise("run", str(script))
    assert (done.returncode, done.stderr) == (
        2,
        f"rankwise: {script}:2: syntax error: expected ':'\n    if True\n           ^\n",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runn"], "there is no command runn; did you mean run?"),
        (["begin"], "there is no command begin; type: rankwise --help"),
        (["checkpoint", "lst"], "there is no command checkpoint lst; did you mean ls?"),
        (["train.py", "--lr", "1"], "train.py is not a command; type: rankwise run train.py --lr 1"),
        (["--nproc", "2", "train.py"], "--nproc is an option of run; type: rankwise run --nproc 2 train.py"),
        (["--verison"], "there is no option --verison; did you mean --version?"),
        (["run", "--", "-x.py", "1"],
         "there is no command -x.py (it is not on the PATH, or cannot be executed); for a Python script, type: "
         "rankwise run ./-x.py 1"),
        (["run", "--nprocs", "2", "train.py"], "run has no option --nprocs; did you mean --nproc?"),
        (["run", "--lr", "1", "train.py"],
         "run has no option --lr; put options of the script after it; type: rankwise run --help"),
        (["logs", "-x"], "logs has no option -x; type: rankwise logs --help"),
        (["run", "--nproc"], "--nproc: its value is missing"),
        (["run", "--fresh=1", "train.py"], "--fresh: it takes no value"),
        (["run", "--grace", "x", "train.py"], "--grace 'x': it must be a number"),
        (["logs", "--rank", "1.5"], "--rank '1.5': it must be a whole number"),
        (["logs", "--rank", "1", "--all"], "--all and --rank 1: give one of the two"),
        (["status", "a", "bcd"], "bcd: more arguments than status takes; type: rankwise status [RUN]"),
        (["checkpoint", "export"], "--to is missing; type: rankwise checkpoint export --to FILE"),
        (["selftest"], "SCRIPT.py is missing; type: rankwise selftest SCRIPT.py [ITS ARGUMENTS]..."),
    ],
)  # fmt: skip
def test_a_mistyped_command_is_answered_in_one_line_with_what_to_type(words: list[str], message: str, rankwise: Run) -> None:
    done = rankwise(*words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"rankwise: {message}\n")
    assert not list(Path().iterdir())


# --- a run


def test_what_follows_the_script_is_its_own(rankwise: Run, script: Path, tmp_path: Path) -> None:
    """Also options that look like ours, and characters that a shell or a parser would interpret."""
    words = ["--nproc", "7", "--", "--help", "-h", "", "a b", "$(touch x)", "--name=a/b", "größe", "--fresh", "--"]
    done = rankwise("run", "--nproc", "1", "--name", "own", str(script), *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[str(script), *words], str(tmp_path)]
    run = RunDir(tmp_path / "runs" / "own")
    [attempt] = run.attempts()
    assert list(attempt.argv) == [str(script), *words]
    assert (attempt.ranks, attempt.status) == (1, 0)
    assert json.loads(run.config.read_text())["argv"] == [str(script), *words]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", script.name]
    told = rankwise("report", "own")
    assert (told.returncode, told.stderr) == (0, "")
    assert "all ranks exited with status 0" in told.stdout


# --- the time that it takes


@pytest.mark.parametrize("modules", [["rankwise.cli"], ["rankwise.cli", "rankwise.launch.launch", "rankwise.report.terminal"]])
def test_the_command_and_the_launcher_never_import_torch_or_numpy(modules: list[str]) -> None:
    source = f"import sys, {', '.join(modules)}\nprint(sorted({{'torch', 'numpy', 'tqdm'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_modules_of_a_verb_are_loaded_only_when_it_is_called() -> None:
    source = "import sys, rankwise.cli; print(sorted(name for name in sys.modules if name.startswith('rankwise')))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert re.findall(r"rankwise\.([\w.]+)", done.stdout) == [
        "cli", "errors", "host", "host.disk", "host.terminal", "host.text", "launch", "launch.command_line", "stop",
        "stop.early",
    ]  # fmt: skip


def test_the_end_of_an_agent_is_the_launchers_own_to_collect(rankwise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To describe the agent's code may take long, because of its folder: the run has ended by then."""
    script = tmp_path / "train.py"
    script.write_text("import os\nos.environ['X'] = '1'\n")
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text('#!/bin/sh\ntest "$3" = rev-parse && sleep 1\necho 0\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{git.parent}:{os.environ['PATH']}")
    done = rankwise("run", "--nproc", "1", str(script))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_a_caller_that_ignores_the_end_of_its_children_gets_the_status_of_the_run(rankwise: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(5)")
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the command inherits this
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "rankwise", "run", "--nproc", "1", "script.py"], stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGCHLD, before)
    said = process.communicate()[1]
    assert process.returncode == 5, said


def test_pythons_development_mode_shows_no_warnings_of_ours(rankwise: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    done = rankwise("run", "--nproc", "1", "script.py", env={**os.environ, "PYTHONDEVMODE": "1"})
    assert (done.returncode, "Warning" in done.stderr) == (0, False), done.stderr


def test_another_user_of_the_group_can_resume_a_run_in_a_shared_folder(rankwise: Run, tmp_path: Path) -> None:
    """The umask decides who may write in the logs, which each attempt continues."""
    (tmp_path / "script.py").write_text("")
    assert rankwise("run", "--nproc", "2", "script.py", umask=0o002).returncode == 0
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "runs" / "script" / "logs").iterdir()}
    assert modes == dict.fromkeys(("rank-0.log", "rank-1.log", ".rank-0.stacks", ".rank-1.stacks"), 0o664)


def test_a_folder_whose_name_is_no_utf_8_is_no_traceback(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/a\xff"
    Path(os.fsdecode(folder)).mkdir()
    with open(folder + b"/train.py", "w") as file:
        file.write("print(1)")
    done = subprocess.run(
        [sys.executable, "-m", "rankwise", "run", "--nproc", "1", "train.py"], cwd=folder, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr, done.stderr[-200:]


@pytest.mark.parametrize("spelling", ["--nproc-per-node", "--nproc_per_node"])
def test_torchruns_own_name_of_the_option_works(spelling: str, rankwise: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; print('one of', os.environ['WORLD_SIZE'])")
    told = rankwise("run", spelling, "2", "script.py")
    assert told.returncode == 0
    assert "one of 2" in told.stdout


def test_a_site_file_spares_the_user_an_option(rankwise: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; print('one of', os.environ['WORLD_SIZE'])")
    (tmp_path / "configuration").mkdir()
    (tmp_path / "configuration" / "rankwise.toml").write_text("nproc = 3")
    told = rankwise("run", "script.py", env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "configuration")})
    assert "one of 3" in told.stdout


def test_without_torch_in_this_python_a_script_that_needs_it_is_refused_here_and_warned_of_elsewhere(
    rankwise: Run, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\nclass No:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n            raise ModuleNotFoundError(name)\nsys.meta_path.insert(0, No())\n"
    )
    Path("train.py").write_text("import torch\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    here = rankwise("run", "--nproc", "1", "train.py", env=env)
    assert (here.returncode, here.stdout) == (2, "")
    assert "which runs rankwise, has none; use the Python that has it: rankwise run -- /path/to/python train.py" in here.stderr
    there = rankwise("run", "--on", "slurm", "--dry-run", "train.py", env=env)
    assert there.returncode == 0
    assert there.stderr.startswith("rankwise: warning: train.py, line 1: it imports torch, but ")
