"""The runners of stress/ find mistakes, and exit with 1. Here, what they check is made wrong, one thing at a time."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a runner by its path. After the test, sys.path and sys.modules are as before."""
    modules, path = set(sys.modules), list(sys.path)

    def imported(name: str) -> ModuleType:
        sys.path[:0] = [str((ROOT / name).parent), str(ROOT / "stress")]
        return importlib.import_module(Path(name).stem)

    yield imported
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith((str(ROOT / "stress"), str(ROOT / "benchmarks"))):
            del sys.modules[name]


def test_a_trial_that_raises_is_status_1_and_what_it_started_is_ended(
    runner: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = runner("stress/judge.py")
    left: list[subprocess.Popen[bytes]] = []

    def trial(folder: Path) -> None:
        left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", str(folder)]))
        raise judge.WrongError("a step is lost")

    assert judge.judged(trial, tmp_path) == 1
    assert capsys.readouterr().out == "WRONG: a step is lost\n"
    assert left[0].wait(timeout=120) == -signal.SIGKILL
    assert judge.judged(lambda folder: None, tmp_path) == 0


# --- preemptions


def preempted(runner: Any, folder: Path, began: float) -> tuple[ModuleType, Any]:
    """A training of three ranks that exited with 75 after step 5, as it should."""
    run = runner("stress/preemptions/run.py")
    training = run.Training(run.LAUNCHERS["rankwise"], folder / "training", 10)
    training.attempts = 1
    training.out.write_text("")
    for rank in range(3):
        (training.folder / f"ends-{rank}").write_text(f"75 {began + 0.1} 5\n")
    (training.run.checkpoints / "step-00000005").mkdir(parents=True)
    return run, training


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("", ""),
        ("a rank's status", "ranks left with"),
        ("a rank's step", "ranks left after steps"),
        ("the checkpoint", "the newest checkpoint is of step 6"),
        ("the launcher", "the launcher left with 0"),
        ("the time", "until the last rank knew"),
        ("a last word", "without a last word"),
    ],
)
def test_a_stop_is_judged(wrong: str, says: str, runner: Any, tmp_path: Path) -> None:
    began = time.monotonic()
    run, training = preempted(runner, tmp_path, began)
    last = training.folder / "ends-2"
    if wrong == "a rank's status":
        last.write_text(f"-12 {began + 0.1} 5\n")
    elif wrong == "a rank's step":
        last.write_text(f"75 {began + 0.1} 6\n")
    elif wrong == "the checkpoint":
        (training.run.checkpoints / "step-00000006").mkdir()
    elif wrong == "the time":
        last.write_text(f"75 {began + 2.0} 5\n")
    elif wrong == "a last word":
        last.write_text("")
    status = 0 if wrong == "the launcher" else 75
    if wrong:
        with pytest.raises(run.WrongError, match=says):
            run.check_stop(training, training.launcher, status, began, within_s=1.0)
    else:
        assert run.check_stop(training, training.launcher, status, began, within_s=1.0) == pytest.approx(0.1)


@pytest.mark.parametrize("wrong", ["", "samples", "parameters"])
def test_the_end_of_a_preempted_training_is_judged(wrong: str, runner: Any, tmp_path: Path) -> None:
    run = runner("stress/preemptions/run.py")
    both = [run.Training(run.LAUNCHERS["rankwise"], tmp_path / name, 2) for name in ("preempted", "reference")]
    for training in both:
        for rank in range(3):
            (training.folder / f"samples-{rank}").write_text(f"1: {rank}\n2: {rank + 3}\n")
        torch.save({"weight": torch.ones(2)}, training.folder / "final.pt")
    if wrong == "samples":
        (both[0].folder / "samples-1").write_text("1: 1\n1: 1\n2: 4\n")
    elif wrong == "parameters":
        torch.save({"weight": torch.tensor([1.0, 1.0 + 1e-7])}, both[0].folder / "final.pt")
    if wrong:
        with pytest.raises(run.WrongError):
            run.check_end(*both)
    else:
        run.check_end(*both)


@pytest.mark.parametrize(
    ("wrong", "line"), [(False, "1.0 3 1 3"), (True, "1.0 4 1 4"), (True, "1.0 3 2 3"), (True, "1.0 3 1 2")]
)
def test_a_stop_of_a_loop_is_judged(wrong: bool, line: str, runner: Any, tmp_path: Path) -> None:
    loops = runner("stress/preemptions/loops.py")
    run = loops.Run(tmp_path / "run", "none")
    for rank, value in enumerate(loops.serial("none", 3)):
        own = line.split() if rank == 0 else ["1.0", "3", "1", "3"]
        own[2] = str(value if own[2] == "1" else value + 1)
        (run.folder / f"ends-{rank}").write_text(f"{' '.join(own)}\n")
    if wrong:
        with pytest.raises(loops.WrongError):
            run._check(0.0)
    else:
        assert run._check(0.0) == 1.0


# --- kills, curves, agents


@pytest.mark.parametrize("wrong", ["", "a loss", "a step again", "a checkpoint lost"])
def test_an_attempt_after_a_kill_is_judged(wrong: str, runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner("stress/kill_anywhere/run.py")
    training = run.Training(tmp_path / "training", 4, [])
    losses = {1: [(1, 1.0), (2, 0.5)], 2: [(2 if wrong == "a step again" else 3, 0.26 if wrong == "a loss" else 0.25)]}
    monkeypatch.setattr(training, "losses", lambda: losses)
    monkeypatch.setattr(training, "newest", lambda: 2)
    training.saved.write_text("3\n" if wrong == "a checkpoint lost" else "2\n")
    reference = {1: 1.0, 2: 0.5, 3: 0.25}
    if wrong:
        with pytest.raises(run.WrongError):
            run.check(training, 1, 2, reference)
    else:
        run.check(training, 1, 2, reference)


@pytest.mark.parametrize(
    ("found", "right"), [("step 9", True), ("step 6", False), ("torn [6.0, 9.0]", False), ("nothing", False)]
)
def test_what_resumes_after_a_kill_is_judged(found: str, right: bool, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner("stress/kill_savers/run.py")
    monkeypatch.setattr(run, "save_seconds", lambda *_: (0.1, 0.2))
    monkeypatch.setattr(run, "kill_once", lambda *_: (12, 9, found, ""))
    assert run.kills(run.Ours, SimpleNamespace(base=Path("/")), 3, limit_s=10.0)[1] is right
    assert not run.kills(run.Ours, SimpleNamespace(base=Path("/")), 3, limit_s=-1.0)[1]  # no kill at all


def test_damage_that_is_not_found_is_wrong(runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner("stress/bit_flips/run.py")
    monkeypatch.setattr(run, "damage_of", lambda folder: None)
    with pytest.raises(run.WrongError, match="not found"):
        list(run.ours(tmp_path / "checkpoints", 1))


@pytest.mark.parametrize(
    ("other", "right"),
    [
        ({10: 2.0, 20: 1.00000001}, True),
        ({10: 2.0, 20: 1.001}, False),
        ({10: 2.0}, False),
        ({10: float("nan"), 20: 1.0}, False),
    ],
)
def test_curves_are_judged(
    other: dict[int, float], right: bool, runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner("stress/same_curve/run.py")
    monkeypatch.setattr(run, "losses", lambda ranks, *_: other if ranks == 2 else {10: 2.0, 20: 1.0})
    monkeypatch.setattr(sys, "argv", ["run.py", "20", "1", "2"])
    assert run.main() == (0 if right else 1)


@pytest.mark.parametrize(("status", "lost"), [(0, 0), (1, 0), (0, 1)])
def test_agents_are_judged(status: int, lost: int, runner: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    bench = runner("benchmarks/many_agents/bench.py")
    monkeypatch.setattr(bench, "measure", lambda agents: {"agents": agents, "status": status, "lost": lost})
    monkeypatch.setattr(bench.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["bench.py", "3"])
    assert bench.main() == (1 if status or lost else 0)
    assert json.loads(capsys.readouterr().out)["agents"] == 3
