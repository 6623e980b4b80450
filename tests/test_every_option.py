"""Every option of every verb x {missing, wrong type, out of range, contradicted}: one message that names the option as typed
and what was given, status 2, no traceback, nothing written."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from rankwise import cli
from rankwise.run.config import option
from rankwise.schedulers import options, queues

Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A script, a run with a checkpoint, and nothing that would start anything."""
    Path("train.py").write_text("print('never')\n")
    Path("hosts").write_text("a slots=2\n")
    Path("runs/train/checkpoints/step-00000001").mkdir(parents=True)
    Path("runs/train/world.json").write_text('{"lives": []}')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("no-configuration")))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was not refused")

    for name in ("launch.launch._run_here", "launch.submit.queue", "launch.submit.dry_run", "checks.script._started"):
        monkeypatch.setattr(f"rankwise.{name}", never)
    monkeypatch.setattr("rankwise.schedulers.ALIASES", {"mpi": lambda: "openmpi"})


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """The answer to these words: one line."""

    def type_(*words: str) -> str:
        before = sorted(map(str, Path().rglob("*")))
        with pytest.raises(SystemExit) as end:
            cli.main([*words], prog_name="rankwise")
        said = capsys.readouterr()
        assert end.value.code == 2, said.err
        assert said.out == ""
        assert "Traceback" not in said.err
        assert sorted(map(str, Path().rglob("*"))) == before
        assert said.err.startswith("rankwise: ")
        assert said.err.count("\n") == 1
        return said.err.rstrip("\n")

    return type_


def verbs(group: click.Group = cli.main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from verbs(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


OPTIONS = [
    (verb, p) for verb, command in verbs() for p in command.get_params(click.Context(command))
    if isinstance(p, click.Option) and "--help" not in p.opts
]  # fmt: skip
SPELLED = [pytest.param(verb, p, s, id=f"{verb} {s}") for verb, p in OPTIONS for s in p.opts]


def words_of(verb: str, *options: str) -> list[str]:
    """The verb with these options, and with what it requires in addition."""
    also = ["--to", "x.pt"] if verb in ("checkpoint export", "checkpoint average") and "--to" not in " ".join(options) else []
    also += ["--last", "1"] if verb == "checkpoint average" and "--to" in " ".join(options) else []
    return [*verb.split(), *also, *options, *(["train.py"] if verb in ("run", "selftest") else ["train"] * (verb != "explain"))]


# --- missing


@pytest.mark.parametrize(("verb", "parameter", "spelling"), [row for row in SPELLED if not row.values[1].is_flag])
def test_an_option_without_its_value_is_named(verb: str, parameter: click.Option, spelling: str, refused: Refused) -> None:
    assert refused(*verb.split(), spelling) == f"rankwise: {spelling}: its value is missing"


@pytest.mark.parametrize(("parameter", "spelling"), [row.values[1:] for row in SPELLED if row.values[0] == "run"])
def test_an_option_that_takes_the_script_for_its_value_is_named(
    parameter: click.Option, spelling: str, refused: Refused
) -> None:
    if parameter.is_flag:
        assert refused("run", spelling) == "rankwise: nothing to run; type: rankwise run script.py [its arguments]"
        return
    said = refused("run", spelling, "train.py")
    assert spelling in said
    assert "train.py" in said


@pytest.mark.parametrize(("verb", "parameter", "spelling"), [row for row in SPELLED if row.values[1].is_flag])
def test_a_switch_takes_no_value(verb: str, parameter: click.Option, spelling: str, refused: Refused) -> None:
    if spelling.startswith("--"):
        assert refused(*words_of(verb, f"{spelling}=x")) == f"rankwise: {spelling}: it takes no value"


# --- wrong type, out of range

NUMBER, COUNT = ["x", "", "1,5"], ["x", "", "1.5", "0", "-1"]
SECONDS = [*NUMBER, "-1", "nan", "inf", "1e999"]
LINE = ["", " ", "a\nb", "a\x7f"]
BAD: dict[str, list[str]] = {
    "run nproc": [*COUNT, "²", "1234567", "9" * 5000],
    "run gpus": ["x", "", "0,0", "0,,1", "-1", "999999", "9" * 5000],
    "run master_port": ["x", "", "1.5", "-1", "65536"],
    "run name": ["", ".", "..", "a/b", "a\nb", "\x1b[1m"],
    "run run_dir": ["", "a\nb"],
    "run config": ["", "nowhere.toml", "hosts", "."],
    "run max_restarts": ["x", "", "1.5", "-1"],
    "run stop_after": ["x", "", "3", "0s", "-1h", "1y"],
    "run checkpoint_scope": ["x", "", "MAIN"],
    "run sync": ["x", "", "local-sgd:0", "diloco:1.5", "all-reduce:int4"],
    "run grace_s": [*SECONDS, "0"],
    "run stall_warn_s": SECONDS,
    "run join_timeout_s": SECONDS,
    "run node_wait_s": SECONDS,
    "run start_method": ["x", ""],
    "run tee": ["x", "", "0"],
    "run on": ["x", "", "Slurm"],
    "run hosts": ["", ",", "a,", "a:0", "a:x", "a b", "a,a", "-a", "$(a)"],
    "run hostfile": ["", "nowhere", ".", "train.py"],
    "run nodes": [*COUNT, "2:1", "0:2", "1:", "2"],
    "run gpus_per_node": ["x", "", "-1", "1.5", "a:b:1"],
    "run node_rank": ["x", "", "-1", "1"],
    "run master_addr": LINE,
    "run cpus_per_task": COUNT,
    "run slots": COUNT,
    "run time": [*LINE, "x", "-5", "0", "1:2:3:4"],
    "run array": [*LINE, "x", "1-", "0-99999999"],
    "run sbatch_args": [*LINE, "x y", "--=1"],
    "run qsub_args": LINE,
    "run bsub_args": LINE,
    **{f"run {name}": LINE for name in (
        "partition", "nodelist", "mem", "account", "qos", "constraint", "dependency", "setup", "pe", "resources", "queue")},
    "selftest ranks": ["x", "", "0", "1,,2", "-1", "1.5"],
    "selftest timeout_s": [*SECONDS, "0"],
    "logs rank": ["x", "", "1.5", "-1"],
    "checkpoint show name": ["x", "", "7"],
    "checkpoint verify name": ["x", "", "7"],
    "checkpoint export name": ["x", "", "7"],
    "checkpoint export to": ["", "x.zip", "runs"],
    "checkpoint average to": ["", "x.zip", "runs"],
    "checkpoint average last": COUNT,
    "checkpoint average best": COUNT,
    "checkpoint prune keep_last": COUNT,
    "checkpoint prune keep_best": COUNT,
    "checkpoint prune older_than": ["x", "", "3", "-1h"],
    "checkpoint prune keep": ["x", ""],
}  # fmt: skip
"""For each verb and setting, values that it must refuse."""

ANY_TEXT = {"checkpoint export part", "checkpoint average part", "checkpoint average by", "checkpoint prune by"}
"""Names in a checkpoint: any text is allowed."""

FOR = {"time": "--on slurm", "array": "--on slurm", "sbatch_args": "--on slurm"}


def test_every_option_that_takes_a_value_is_in_the_table() -> None:
    assert {f"{verb} {p.name}" for verb, p in OPTIONS if not p.is_flag} == BAD.keys() | ANY_TEXT


ROWS = [
    pytest.param(verb, p, s, value, id=f"{verb} {s} {value[:12]!r}")
    for verb, p in OPTIONS for s in p.opts for value in BAD.get(f"{verb} {p.name}", ())
]  # fmt: skip


@pytest.mark.parametrize(("verb", "parameter", "spelling", "value"), ROWS)
def test_a_value_that_cannot_be_is_refused_by_the_name_that_was_typed(
    verb: str, parameter: click.Option, spelling: str, value: str, refused: Refused
) -> None:
    also = FOR.get(str(parameter.name), "").split() if verb == "run" else []
    said = refused(*words_of(verb, *also, *([f"{spelling}={value}"] if spelling.startswith("--") else [spelling, value])))
    assert spelling in said
    given = value.strip()[:40]
    assert given in said or repr(given)[1:-1] in said or (given in ("1e999",) and "inf" in said)


# --- contradicted

VALUES = {
    "hosts": "a:2", "hostfile": "hosts", "nodes": "2", "node_rank": "0", "gpus_per_node": "4", "time": "60", "array": "0-3",
    "cpus_per_task": "4", "slots": "4", "sbatch_args": "--exclusive", "resources": "h_rt=1:0:0",
}  # fmt: skip
STRANGERS = [
    pytest.param(on, name, s, id=f"{on} {s}")
    for on, queue in queues().items() for name, option_ in options().items() if option_ not in queue.options and name != "gpus"
    for s in next(p for verb, p in OPTIONS if verb == "run" and p.name == name).opts
]  # fmt: skip


@pytest.mark.parametrize(("on", "name", "spelling"), STRANGERS)
def test_an_option_that_a_scheduler_does_not_know_is_refused_with_those_that_do(
    on: str, name: str, spelling: str, refused: Refused
) -> None:
    flag = name == "requeue"
    said = refused(*words_of("run", "--on", on, spelling, *([] if flag else [VALUES.get(name, "x")])))
    assert spelling in said
    assert on in said or on == "local"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("-H a --hostfile hosts", ("-H a", "--hostfile hosts")),
        ("--hosts a --hostfile hosts", ("--hosts a", "--hostfile hosts")),
        ("-H a:2,b:2 --nodes 3", ("--nodes 3", "2 hosts")),
        ("--wait --dry-run", ("--wait", "--dry-run")),
        ("--node-rank 0", ("--node-rank 0", "--nodes")),
        ("--nodes 2 --node-rank 2", ("--node-rank 2", "--nodes 2")),
        ("--nodes 2 --node-rank 0", ("--node-rank 0", "--master-addr")),
        ("--nnodes 2", ("--nnodes 2", "-H")),
        ("--on sge --slots 8", ("--slots 8", "--pe")),
        ("--on sge --pe mpi", ("--pe mpi", "--slots")),
        ("--on slurm -t x", ("-t x",)),
        ("--config both.toml", ("both.toml", "-H a", "--hostfile b")),
        ("--config typed.toml", ("typed.toml", "--max-restarts 'x'")),
        ("--config other.toml", ("other.toml", "lr")),
    ],
)
def test_options_that_contradict_each_other_are_both_named(words: str, named: tuple[str, ...], refused: Refused) -> None:
    Path("both.toml").write_text("hosts = 'a'\nhostfile = 'b'\n")
    Path("typed.toml").write_text("max-restarts = 'x'\n")
    Path("other.toml").write_text("lr = 1\n")
    said = refused(*words_of("run", *shlex.split(words)))
    assert [name for name in named if name not in said] == []


def test_logs_of_one_rank_and_of_all_are_one_too_many(refused: Refused) -> None:
    assert "--all and --rank 1" in refused("logs", "--all", "--rank", "1", "train")


@pytest.mark.parametrize("name", [str(p.name) for verb, p in OPTIONS if verb == "run" and p.name != "config"])
def test_an_option_is_spelled_in_errors_as_the_command_takes_it(name: str) -> None:
    typed = options()[name].typed if name in options() else option(name) if name != "module" else "-m"
    assert typed in next(p for verb, p in OPTIONS if verb == "run" and p.name == name).opts
