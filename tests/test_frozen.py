"""What rankwise left on disk at 29eeb0e (frozen/) is loaded, resumed and reported by today's code.

Uses only public names and the command, so that modules can be renamed. If a test fails here, an update would lose a user's run,
checkpoint, queued job or site file: change the code, not the fixture. Texts may change: `python tests/frozen/make.py words`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen import fixtures, train
from frozen.fixtures import CHECKPOINTS, COMMANDS, HERE, OF_CHECKPOINTS, OF_RUNS, PLANS, RUNS, copied, keys_of_files, typed
from ranks import on_ranks, scripts_on_ranks, torchrun

REPORTS = json.loads((HERE / "reports.json").read_text())
RECORDS = json.loads((HERE / "records.json").read_text())
WEIGHTS = json.loads((HERE / "weights.json").read_text())
TWO_NODES = [torchrun(rank, 2, 1) for rank in range(2)]


@pytest.fixture(autouse=True)
def _as_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixtures.scripts(tmp_path)
    monkeypatch.setenv("PATH", f"{fixtures.stand_ins(tmp_path / 'bin')}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "100")


def launched(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100
    )


def rankwise(name: str) -> subprocess.CompletedProcess[str]:
    """The command of this run, typed again."""
    return launched(sys.executable, "-m", "rankwise", *COMMANDS[name])


def assert_weights(ends: list[train.Weights], kind: str, same_ranks: bool = True) -> None:
    """These weights are those of the unbroken training on each rank: bit for bit if nothing else has changed."""
    expected = WEIGHTS[kind] * (len(ends) if len(WEIGHTS[kind]) == 1 else 1)
    here = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if same_ranks and (torch.__version__, here) == (WEIGHTS["torch"], WEIGHTS["machine"]):
        assert ends == expected
        return
    near = 1e-2 if kind == "fp16" else 1e-6  # fp16 rounds to 1e-3
    for end, weights in zip(ends, expected, strict=True):
        assert end.keys() == weights.keys()
        for name, numbers in weights.items():
            assert end[name] == pytest.approx(numbers, rel=near, abs=near), name


def weights_in(name: str) -> train.Weights:
    """The weights in a run's newest checkpoint, exported by the command."""
    status, lines = typed("checkpoint", "export", name, "--to", "weights.pt")
    assert status == 0, lines
    state = torch.load("weights.pt", weights_only=True)
    return {key: value.double().flatten().tolist() for key, value in state.items()}


def attempts(run: Path) -> list[dict[str, Any]]:
    return list(json.loads((run / "world.json").read_text())["lives"])


def keys_as_then(run: Path) -> dict[str, list[str]]:
    """`keys_of_files`, without the parts of the time that later versions measure too."""
    later = ("[].share/actions", "[].share/slower ranks")
    return {file: [key for key in keys if key not in later] for file, keys in keys_of_files(run).items()}


def steps(run: Path) -> list[tuple[int, int]]:
    """(attempt, step) of each line of metrics.jsonl."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(record["life"], record["step"]) for record in records]


# --- checkpoints


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [*((kind, ranks) for kind, ranks in train.RANKS.items() if kind != "node"), ("alone", 2), ("sharded", 1)],
)
@pytest.mark.one_in(2)
def test_a_training_goes_on_from_its_checkpoint_to_the_weights_of_the_unbroken_one(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    run = copied(tmp_path, f"checkpoints/{kind}")
    before = keys_as_then(run)["metrics.jsonl"], fixtures.keys(fixtures.manifest_of(run))
    saved = fixtures.manifest_of(run)["step"]
    assert 0 < saved < 20
    ends = on_ranks(ranks, train.fit, kind, run)
    assert_weights(ends, kind, same_ranks=ranks == train.RANKS[kind])
    trained = [step for attempt, step in steps(run) if attempt == 2]
    assert saved < min(trained)
    if ranks == train.RANKS[kind]:
        assert (keys_as_then(run)["metrics.jsonl"], fixtures.keys(fixtures.manifest_of(run))) == before


@pytest.mark.parametrize("lost", [None, "0", "1"], ids=["both disks", "the first lost its disk", "the second lost its disk"])
def test_nodes_with_disks_of_their_own_go_on_from_what_is_left_of_their_checkpoints(lost: str | None, tmp_path: Path) -> None:
    saved = fixtures.manifest_of(HERE / "checkpoints" / "node")["step"]
    for disk in "01":
        if disk != lost:
            copied(tmp_path, "checkpoints/node", f"disks/{disk}")
    ends = on_ranks(2, train.fit, "node", tmp_path / "disks", own_disk=True, environ=TWO_NODES)
    assert_weights(ends, "node")
    here = 1 if lost == "0" else 2  # the first attempt of this disk
    assert min(step for attempt, step in steps(tmp_path / "disks" / "0") if attempt == here) > saved


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_is_verified_listed_and_shown_as_it_was(kind: str, tmp_path: Path) -> None:
    run = copied(tmp_path, f"checkpoints/{kind}", f"runs/{kind}")
    for verb in OF_CHECKPOINTS:
        assert list(typed(*verb, kind)) == REPORTS[f"checkpoints/{kind}"][" ".join(verb)]
    assert fixtures.shown(run) == RECORDS[f"checkpoints/{kind}"]


# --- runs


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_told_in_the_words_and_by_the_keys_that_it_was(name: str, tmp_path: Path) -> None:
    run = copied(tmp_path, f"runs/{name}")
    assert fixtures.answered("status", "--json", name) == RECORDS[f"runs/{name}"]
    for verb in OF_RUNS:
        assert list(typed(*verb, name)) == REPORTS[f"runs/{name}"][" ".join(verb)], verb
    logs = sorted((run / "logs").glob("rank-*.log"))
    for rank, log in enumerate(logs):
        said = [fixtures.masked(line) for line in log.read_text().splitlines()]
        assert typed("logs", "--rank", str(rank), name) == (0, said)
    if not logs:
        assert list(typed("logs", name)) == REPORTS[f"runs/{name}"]["logs"]


def test_a_run_that_is_done_has_nothing_left_to_train(tmp_path: Path) -> None:
    run = copied(tmp_path, "runs/done", "runs/train")  # the script's own default folder
    before = keys_of_files(run)
    [done] = scripts_on_ranks(1, "train.py", "alone")
    assert done.returncode == 0, done.stdout
    assert "already done: 20 steps" in done.stdout
    assert [attempt["status"] for attempt in attempts(run)] == [0, 0]
    assert {attempt for attempt, _ in steps(run)} == {1}
    assert keys_of_files(run) == before
    assert_weights([weights_in("train")], "alone")


def test_a_run_that_was_stopped_goes_on_to_the_weights_of_the_unbroken_one(tmp_path: Path) -> None:
    run = copied(tmp_path, "runs/stopped")
    before = keys_as_then(run)
    saved = fixtures.manifest_of(run)["step"]
    done = rankwise("stopped")
    assert done.returncode == 0, done.stdout
    assert [attempt["status"] for attempt in attempts(run)] == [75, 0]
    assert min(step for attempt, step in steps(run) if attempt == 2) > saved
    assert keys_as_then(run) == before
    assert_weights([weights_in("stopped")], "sharded")


def test_a_run_that_failed_starts_again(tmp_path: Path) -> None:
    run = copied(tmp_path, "runs/failed")
    before = keys_of_files(run)
    for source, status in (("raise ValueError('loss is nan')", 1), ("", 0)):
        (tmp_path / "train.py").write_text(f"import os\nos.environ['X'] = '1'\n{source}\n")  # does not import torch
        done = rankwise("failed")
        assert done.returncode == status, done.stdout
        assert (run / "failure.json").exists() == (status != 0)
        found = keys_of_files(run)
        assert found == {name: before[name] for name in found}
    assert [attempt["status"] for attempt in attempts(run)] == [1, 1, 0]


def test_a_run_that_waits_in_a_queue_is_not_started_beside_its_job(tmp_path: Path) -> None:
    run = copied(tmp_path, "runs/queued")
    assert list(typed(*COMMANDS["queued"])) == REPORTS["runs/queued"]["run"]
    assert not (run / "world.json").exists()


# --- plans, jobs, site files


@pytest.mark.parametrize("name", ["queued", "local", "ssh"])
def test_a_plan_and_its_job_that_were_left_there_are_carried_out(name: str, tmp_path: Path) -> None:
    run = copied(tmp_path, f"{'runs' if name == 'queued' else 'plans'}/{name}", f"runs/{name}")
    (run / "logs").mkdir(exist_ok=True)
    done = launched("sh", str(run / "job.sh"))
    assert done.returncode == 0, done.stdout
    assert [(attempt["ranks"], attempt["status"]) for attempt in attempts(run)] == [(2, 0)]
    for rank in range(2):
        assert (run / "logs" / f"rank-{rank}.log").read_text() == f"rank {rank} of 2 says hello\n"


@pytest.mark.parametrize("change", [{"version": 3}, {"new_key": 1}, {"nproc": None}], ids=lambda change: next(iter(change)))
def test_a_plan_of_another_version_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    run = copied(tmp_path, "plans/local", "runs/local")
    plan = {**json.loads((run / "plan.json").read_text()), **change}
    (run / "plan.json").write_text(json.dumps({key: value for key, value in plan.items() if value is not None}))
    done = launched("sh", str(run / "job.sh"))
    assert done.returncode == 2
    assert "was not written by this version of rankwise; start the run again" in done.stdout
    assert not (run / "world.json").exists()


@pytest.mark.parametrize("name", [*PLANS, "queued"])
def test_the_same_command_leaves_the_same_plan_settings_and_job(name: str, tmp_path: Path) -> None:
    run = copied(tmp_path, f"{'runs' if name == 'queued' else 'plans'}/{name}", f"runs/{name}")
    (run / "job.json").unlink(missing_ok=True)
    before = {path.name: path.read_text() for path in run.glob("*.*")}
    shutil.rmtree(run)
    if name == "site":
        os.environ["XDG_CONFIG_HOME"] = str(fixtures.site_file(tmp_path / "config"))
    words = COMMANDS[name] if name != "queued" else (*COMMANDS[name][:-1], "--dry-run", COMMANDS[name][-1])
    assert typed(*words)[0] == 0
    # Since then the agent is started with -P: it must not import a secrets.py of the folder. And by bash, which keeps all
    # variables of the environment.
    then = before["job.sh"].replace("-m rankwise.agent", "-P -m rankwise.agent").replace("/bin/sh -c", "/bin/bash -p -c")
    then = then.replace(
        "saved, to go on. Slurm ends this script as soon as it is asked.",
        "saved. Slurm kills this script as soon as it gets the request, so this comes last.",
    )
    assert run.joinpath("job.sh").read_text() == then.replace('exec "$@"\' sh', 'exec "$@"\' bash')
    for file, of_each in (("plan.json", "run_id"), ("config.json", "dry_run")):
        then, now = (json.loads(text) for text in (before[file], (run / file).read_text()))
        for record in (then, now):
            if "interpreter" in record:
                record["interpreter"] = record["interpreter"][:1]  # not the flags of the Python that runs the tests
        new = now.keys() - then.keys() if file == "config.json" else set()  # a later version may have more settings
        assert all(now.pop(name) in (None, False, []) for name in new)
        assert then.keys() == now.keys()
        assert {**then, of_each: None} == {**now, of_each: None}


@pytest.mark.parametrize("line", REPORTS["site.toml"])
def test_a_site_file_with_a_mistake_is_the_error_that_it_was(line: str, tmp_path: Path) -> None:
    os.environ["XDG_CONFIG_HOME"] = str(fixtures.site_file(tmp_path / "config", line))
    assert list(typed(*COMMANDS["site"])) == REPORTS["site.toml"][line]
    assert not (tmp_path / "runs").exists()


def test_explain_has_the_keys_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fixtures.EXPLAINED.items():
        monkeypatch.setenv(name, value)
    assert fixtures.explained() == RECORDS["explain"]
