"""The settings of a run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import click
import pytest

from rankwise import schedulers
from rankwise.errors import ConfigError
from rankwise.run.config import RunConfig, default_run_dir, option, read_file, site_settings
from rankwise.schedulers.options import counts

OPTIONS = schedulers.options()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"argv": ()}, r"^nothing to run; type: rankwise run script\.py"),
        ({"nproc": "0"}, r"^--nproc 0: give a number of ranks, at least 1, or auto$"),
        ({"nproc": "00"}, "^--nproc 00: "),
        ({"nproc": "-1"}, "^--nproc -1: "),
        ({"nproc": "x"}, "^--nproc x: "),
        ({"nproc": "1.5"}, r"^--nproc 1\.5: "),
        ({"nproc": ""}, "^--nproc : "),
        ({"nproc": "²"}, "^--nproc ²: "),
        ({"name": "a/b"}, r"^--name 'a/b': give the name of one folder, without /; for another place use --run-dir PATH$"),
        ({"name": ""}, "^--name '': "),
        ({"name": "."}, r"^--name '\.': "),
        ({"name": ".."}, r"^--name '\.\.': "),
        ({"name": "a\nb"}, r"^--name 'a\\nb': a newline or control character; remove it$"),
        ({"run_dir": "a\x00"}, r"^--run-dir 'a\\x00': "),
        ({"nproc": "1234567"}, "^--nproc 1234567: "),
        ({"nproc": "9" * 5000}, "^--nproc 999"),
        ({"max_restarts": "3"}, "^--max-restarts '3': it must be a whole number$"),
        ({"grace_s": float("inf")}, "^--grace inf: "),
        ({"grace_s": 0.0}, "^--grace 0: give a number of seconds above 0, within which ranks must stop$"),
        ({"grace_s": -1.5}, r"^--grace -1\.5: "),
        ({"grace_s": float("nan")}, "^--grace nan: "),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_what_to_type(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(**{"argv": ("train.py",), **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("nproc", ["auto", "1", "64"])
def test_nproc_is_a_number_or_auto(nproc: str) -> None:
    assert RunConfig(argv=("train.py",), nproc=nproc).nproc == nproc


def test_a_config_cannot_be_changed_after_its_check() -> None:
    config = RunConfig(argv=("train.py",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.nproc = "0"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({}, "runs/train"),
        ({"name": "other"}, "runs/other"),
        ({"run_dir": "out/x"}, "out/x"),
        ({"run_dir": "out/x", "name": "other"}, "out/x"),
        ({"run_dir": "/abs/x"}, "/abs/x"),
    ],
)
def test_a_run_lives_in_the_folder_given_or_under_runs_by_its_name_or_its_scripts(
    settings: dict[str, object], path: str, tmp_path: Path
) -> None:
    assert RunConfig(**{"argv": ("train.py",), **settings}).path("train") == tmp_path / path  # type: ignore[arg-type]


def test_the_run_directory_is_settled_where_the_command_was_typed(tmp_path: Path) -> None:
    assert default_run_dir("train") == tmp_path / "runs" / "train"
    assert default_run_dir("") == tmp_path / "runs" / "run"


def test_an_empty_run_dir_is_an_error() -> None:
    with pytest.raises(ConfigError):
        RunConfig(argv=("train.py",), run_dir="")


def site(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rankwise.toml").write_text(text)
    return folder


def test_a_site_file_holds_defaults_that_the_users_own_and_then_a_run_override(tmp_path: Path) -> None:
    system = site(tmp_path / "etc", "nproc = 4\ngrace = 60\ntee = 'all'\n")
    user = site(tmp_path / "home", "nproc = 3\n")
    layers = site_settings({"XDG_CONFIG_HOME": str(user), "HOME": "/nowhere"}, OPTIONS, system)
    config = RunConfig.of(OPTIONS, *layers, {"grace_s": 10.0}, {"argv": ("train.py",)})
    assert (config.nproc, config.grace_s, config.tee) == ("3", 10.0, "all")


def test_a_run_turns_off_what_a_site_file_turns_on(tmp_path: Path) -> None:
    system = site(tmp_path / "etc", "requeue = true\nsetup = ['module load a']\npartition = 'gpu'\ncheck-collectives = true\n")
    Path("run.toml").write_text("requeue = false\nsetup = []\ncheck-collectives = false\n")
    layers = [*site_settings({}, OPTIONS, system), read_file("run.toml", OPTIONS), {"argv": ("train.py",)}]
    config = RunConfig.of(OPTIONS, *layers)
    assert (config.site, config.job, config.check_collectives) == ({"partition": "gpu"}, {}, False)


def test_a_dry_run_is_possible_where_a_site_file_says_wait(tmp_path: Path) -> None:
    layers = site_settings({}, OPTIONS, site(tmp_path / "etc", "wait = true\n"))
    assert not RunConfig.of(OPTIONS, *layers, {"argv": ("train.py",), "dry_run": True}).wait


def test_a_settings_file_may_begin_with_the_mark_of_an_editor() -> None:
    Path("run.toml").write_bytes(b"\xef\xbb\xbfnproc = 2\n")
    assert read_file("run.toml", OPTIONS) == {"nproc": "2"}


def test_a_home_that_cannot_even_be_looked_into_has_no_site_file(tmp_path: Path) -> None:
    """As with `sudo -E -u user`, which keeps HOME=/root. Root may enter every folder, so here it is a name that is too long."""
    layers = site_settings({"HOME": f"/{'x' * 300}"}, OPTIONS, tmp_path)
    assert layers == site_settings({"HOME": "/nowhere"}, OPTIONS, tmp_path)


def test_the_users_site_file_is_in_their_home_where_nothing_else_is_said(tmp_path: Path) -> None:
    site(tmp_path / ".config", "nproc = 5\n")
    assert site_settings({"HOME": str(tmp_path)}, OPTIONS, tmp_path / "none") == [{"nproc": "5"}]
    assert site_settings({}, OPTIONS, tmp_path / "none") == []


@pytest.mark.parametrize("text", ["name = 'x'", "fresh = true", "run-dir = 'x'"])
def test_what_belongs_to_one_run_is_refused_in_a_site_file(text: str, tmp_path: Path) -> None:
    system = site(tmp_path / "etc", text)
    with pytest.raises(ConfigError, match=f"^{system}/rankwise.toml: .* belongs to one run; give it on the command line$"):
        site_settings({}, OPTIONS, system)


def test_a_malformed_site_file_is_named(tmp_path: Path) -> None:
    system = site(tmp_path / "etc", "nproc = = 2")
    with pytest.raises(ConfigError, match=f"^{system}/rankwise.toml:1:9: not valid TOML: Invalid value$"):
        site_settings({}, OPTIONS, system)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nproc = 2\n\nnprco = 3\n", ":3: nprco is not a setting of a run; did you mean nproc?"),
        ("# lr = 1\n'lr' = 1\n", ":2: lr is not a setting of a run; they are named like the options; type: "),
        ("[run]\nnproc = 2\n", ":1: run is not a setting of a run; write the settings at the top of the file, without [run]"),
        ("tee = 'all'\nmax-restarts = 'x'\n", ":2: --max-restarts 'x': it must be a whole number"),
        ("nproc = 2\nslots = 0", ":2: --slots 0: give "),
        ("nproc = 2\ntee = x", ":2:7: not valid TOML: Invalid value"),
        ("wait = true\ndry-run = true", ": --wait and --dry-run: "),
        ('"max\\u002drestarts" = "x"', ": --max-restarts 'x': "),
        ("nproc = 2\nnproc_per_node = 3", ":2: nproc and nproc_per_node are the same setting; give one of the two"),
    ],
)
def test_an_error_of_a_settings_file_names_its_line(text: str, message: str) -> None:
    Path("run.toml").write_text(text)
    with pytest.raises(ConfigError, match="^" + re.escape(f"--config run.toml{message}")):
        read_file("run.toml", OPTIONS)


# --- several nodes, and settings that only some schedulers have


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": "0"}, r"^--nodes 0: give a number of nodes, or the minimum and the maximum: 1:4$"),
        ({"nodes": "4:2"}, r"^--nodes 4:2: "),
        ({"nodes": "two"}, r"^--nodes two: "),
        ({"gpus": "9" * 5000}, "^--gpus 999"),
        ({"gpus": "0,0"}, "^--gpus 0,0: give the numbers of GPUs, each once, for example --gpus 0,2$"),
        ({"requeue": "yes"}, "^--requeue 'yes': it must be true or false$"),
        ({"slots": True}, "^--slots True: it must be a whole number$"),
        ({"hosts": "a", "hostfile": "b"}, r"^-H a and --hostfile b: give one of the two$"),
        ({"gpus_per_node": "many"}, r"^--gpus-per-node many: give a number, or a type and a number: a100:4$"),
        ({"cpus_per_task": 0}, r"^--cpus-per-task 0: give a number of at least 1$"),
        ({"slots": -1}, r"^--slots -1: "),
        ({"partition": "a\nb"}, r"^--partition 'a\\nb': give it on one line$"),
        ({"setup": ("module load x", "a\rb")}, r"^--setup 'a\\rb': give it on one line$"),
        ({"sbatch_args": ("",)}, r"^--sbatch-arg '' is empty; give a value, or leave it out$"),
        ({"resources": ("h_rt=1\x00",)}, r"^-l 'h_rt=1\\x00': "),
        ({"wait": True, "dry_run": True}, r"^--wait and --dry-run: "),
    ],
)
def test_a_setting_of_several_nodes_that_cannot_work_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.of(OPTIONS, {"argv": ("train.py",)}, settings)


@pytest.mark.parametrize(("nodes", "both"), [("1", (1, 1)), ("2", (2, 2)), ("1:4", (1, 4)), ("0", (0, 0)), ("4:1", (0, 0))])
def test_nodes_are_a_number_or_the_fewest_and_the_most(nodes: str, both: tuple[int, int]) -> None:
    assert counts(nodes) == both


def test_what_only_some_schedulers_know_stands_apart_in_a_site_file(tmp_path: Path) -> None:
    system = site(tmp_path / "etc", "on = 'slurm'\npartition = 'gpu'\ngpus-per-node = 4\nsetup = ['module load a', 'b']\n")
    user = site(tmp_path / "home", "partition = 'long'\ngrace = 60\nsbatch-arg = '--exclusive'\n")
    layers = site_settings({"XDG_CONFIG_HOME": str(user)}, OPTIONS, system)
    config = RunConfig.of(OPTIONS, *layers, {"argv": ("train.py",)})
    assert (config.on, config.job, config.grace_s) == (None, {}, 60)
    assert config.site == {
        "on": "slurm", "partition": "long", "gpus_per_node": "4", "setup": ("module load a", "b"),
        "sbatch_args": ("--exclusive",),
    }  # fmt: skip


def test_the_file_of_a_run_says_it_as_the_command_line_does(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("on = 'slurm'\nnnodes = 2\ntime = 30\nresource = ['a=1']\nhost = ['a:2', 'b:2']\n")
    assert read_file(str(path), OPTIONS) == {
        "on": "slurm",
        "nodes": "2",
        "time": "30",
        "resources": ("a=1",),
        "hosts": "a:2,b:2",
    }
    path.write_text("setup = [1]\n")
    with pytest.raises(ConfigError, match=r"--setup: 1 is not text; put it in quotes$"):
        read_file(str(path), OPTIONS)


@pytest.mark.parametrize("text", ["array = '0-7'", "node-rank = 1\nnodes = 2", "dependency = 'afterok:1'", "dry-run = true"])
def test_what_belongs_to_one_job_is_refused_in_a_site_file(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"belongs to one run; give it on the command line$"):
        site_settings({}, OPTIONS, site(tmp_path / "etc", text))


def test_settings_are_called_as_they_are_typed() -> None:
    assert [option(name) for name in ("max_restarts", "grace_s")] == ["--max-restarts", "--grace"]
    typed = [OPTIONS[name].typed for name in ("hosts", "sbatch_args", "resources", "cpus_per_task")]
    assert typed == ["-H", "--sbatch-arg", "-l", "--cpus-per-task"]


def test_each_setting_is_typed_as_the_command_takes_it() -> None:
    from rankwise.cli import run

    taken = {spelling for parameter in run.get_params(click.Context(run)) for spelling in parameter.opts}
    untyped = ("argv", "module", "command", "job", "site")
    names = [field.name for field in dataclasses.fields(RunConfig) if field.name not in untyped]
    assert [option(name) for name in names if option(name) not in taken] == []
