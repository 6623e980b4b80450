"""Which checkpoints are kept: by recency, age, named steps; which one is the best, and which never is."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from boxes import loaded, of_step
from ranks import on_ranks

from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint.manifest import Manifest
from rankwise.checkpoint.retention import Best, Retention
from rankwise.errors import CheckpointError, ConfigError

NAN = math.nan


def paths(*steps: int) -> list[Path]:
    return [Path(f"step-{step:08d}") for step in steps]


def names(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.iterdir())


@pytest.mark.parametrize(
    ("rule", "gone"),
    [
        (Retention(1), [1, 2, 3, 4]),
        (Retention(3), [1, 2]),
        (Retention(9), []),
        (Retention(1, younger_than_s=30.0), [1, 2]),  # a checkpoint of exactly this age is not younger
        (Retention(1, younger_than_s=30.1), [1]),
        (Retention(1, steps=frozenset({2, 77})), [1, 3, 4]),
        (Retention(2, younger_than_s=31.0, steps=frozenset({1})), []),
    ],
)
def test_what_stays_for_one_reason_stays(rule: Retention, gone: list[int]) -> None:
    ages = dict(zip(paths(1, 2, 3, 4, 5), (40.0, 30.0, 20.0, 10.0, 0.0), strict=True))
    assert rule.find_gone(ages) == paths(*gone)


def test_without_a_rule_for_ages_a_checkpoint_of_this_moment_may_go() -> None:
    assert Retention(1).find_gone(dict.fromkeys(paths(1, 2), 0.0)) == paths(1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"keep_last": 0}, r"keep_last=0\): give a whole number of at least 1"),
        ({"keep_younger_than_s": 0}, r"keep_younger_than_s=0\): give a number of seconds above 0 \(300 for five minutes\)"),
        ({"keep_younger_than_s": float("nan")}, "keep_younger_than_s=nan"),
        ({"at_steps": [3, -1]}, r"at_steps=\[3, -1\]\): give the steps, whole numbers of at least 1"),
        ({"at_steps": ["3"]}, r"at_steps=\['3'\]"),
        ({"keep_steps": [3]}, r"Checkpoints\(keep_steps=...\): it is now at_steps="),
    ],
)
def test_a_rule_that_cannot_be_is_an_error(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        Checkpoints(tmp_path, **settings)


def test_those_of_named_steps_stay_and_a_damaged_one_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, at_steps=(2, 4), background=False)
    for step in range(1, 7):
        checkpoints.save(of_step(step), step)
    assert names(tmp_path) == [2, 4, 6]
    (tmp_path / "step-00000006" / "model.pt").write_bytes(b"")
    (tmp_path / "step-00000004" / "model.pt").write_bytes(b"")
    again = Checkpoints(tmp_path, keep_last=1, at_steps=(2, 4), background=False)
    found = again.find_latest()
    assert found is not None
    assert found[1].step == 2
    again.save(of_step(7), 7)
    assert names(tmp_path) == [2, 7]
    assert loaded(tmp_path) == 7


def aged(path: Path, age_s: float) -> None:
    os.utime(path / "manifest.json", times=(time.time() - age_s,) * 2)


def test_the_young_stay_however_many_they_are(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_younger_than_s=3600.0, background=False)
    for step in range(1, 5):
        checkpoints.save(of_step(step), step)
    assert names(tmp_path) == [1, 2, 3, 4]
    aged(tmp_path / "step-00000001", 3700.0)
    aged(tmp_path / "step-00000003", 3700.0)
    aged(tmp_path / "step-00000004", 3500.0)
    checkpoints.save(of_step(5), 5)
    assert names(tmp_path) == [2, 4, 5]


def test_a_clock_that_was_set_back_removes_nothing_young(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_younger_than_s=60.0, background=False)
    checkpoints.save(of_step(1), 1)
    aged(tmp_path / "step-00000001", -5000.0)
    checkpoints.save(of_step(2), 2)
    assert names(tmp_path) == [1, 2]


def fit_with_named_steps(folder: Path) -> list[int]:
    from test_trainer_checkpoints import fit

    fit(folder, 7, keep_last=1, at_steps=(2, 5))
    return names(folder / "checkpoints")


def test_a_trainer_saves_at_the_steps_that_are_to_stay(tmp_path: Path) -> None:
    assert on_ranks(2, fit_with_named_steps, tmp_path / "run") == [[2, 5, 7]] * 2


# --- the best


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def store(folder: Path, keep_last: int = 1, name: str = "eval_loss", larger: bool | None = None) -> Checkpoints:
    return Checkpoints(folder, keep_last=keep_last, keep_best=name, larger_is_better=larger, background=False)


def save(checkpoints: Checkpoints, values: dict[int, float], name: str = "eval_loss") -> list[int]:
    """Save one checkpoint per step with its metric. Returns the steps that exist at the end."""
    for step, value in values.items():
        checkpoints.save(of_step(step), step, metrics={name: value, "other": 0.0})
    return steps(checkpoints)


def steps(checkpoints: Checkpoints) -> list[int]:
    return [int(path.name[5:13]) for path in checkpoints.all()]


def best_step(checkpoints: Checkpoints) -> int | None:
    path = checkpoints.best()
    return None if path is None else int(path.name[5:13])


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# --- the order


def test_the_direction_is_known_of_a_loss_alone() -> None:
    assert Best.of("eval_loss", None) == Best.of("eval_loss", False) == Best("eval_loss", larger_is_better=False)
    assert Best.of("loss", True) == Best("loss", larger_is_better=True)
    assert Best.of("eval_accuracy", True) == Best("eval_accuracy", larger_is_better=True)
    assert Best.of(None, None) is None
    with pytest.raises(ConfigError, match=r"keep_best='eval_accuracy': is a larger value better\? Give larger_is_better=True"):
        Best.of("eval_accuracy", None)
    with pytest.raises(ConfigError, match="larger_is_better=False needs keep_best"):
        Best.of(None, False)


def test_the_best_comes_first_and_of_equals_the_earlier() -> None:
    measured = {"a": {"x": 2.0}, "b": {"x": 1.0}, "c": {"x": 3.0}, "d": {"x": 1.0}, "e": {"x": 3.0}}
    assert Best("x", larger_is_better=False).order(measured) == ["b", "d", "a", "c", "e"]
    assert Best("x", larger_is_better=True).order(measured) == ["c", "e", "a", "b", "d"]


@pytest.mark.parametrize("larger", [True, False])
def test_what_is_not_finite_or_not_measured_is_never_the_best(larger: bool) -> None:
    best = Best("x", larger)
    assert best.order({"a": {"x": NAN}, "b": {"x": math.inf}, "c": {"x": -math.inf}, "d": {"x": None}, "e": {"y": 1.0}}) == []
    assert best.order({"a": {"x": NAN}, "b": {"x": 5.0}}) == ["b"]


def test_a_figure_that_there_is_not_is_an_error_that_lists_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="keep_best='x': no such metric; the metrics are: a, b"):
        Best("x", larger_is_better=False).check({"b": 1.0, "a": NAN})
    Best("b", larger_is_better=False).check({"b": NAN})


# --- what is kept


def test_the_best_stays_beside_the_last(folder: Path) -> None:
    checkpoints = store(folder)
    assert save(checkpoints, {1: 3.0}) == [1]
    assert save(checkpoints, {2: 1.0}) == [2]
    assert save(checkpoints, {3: 2.0}) == [2, 3]
    assert save(checkpoints, {4: 5.0, 5: 1.5}) == [2, 5]
    assert best_step(checkpoints) == 2
    assert save(checkpoints, {6: 0.5}) == [6]
    assert save(checkpoints, {7: 9.0}) == [6, 7]
    assert best_step(checkpoints) == 6


def test_the_best_among_the_last_takes_no_place_of_another(folder: Path) -> None:
    checkpoints = store(folder, keep_last=3)
    assert save(checkpoints, {1: 1.0, 2: 2.0, 3: 3.0}) == [1, 2, 3]
    assert save(checkpoints, {4: 4.0, 5: 5.0, 6: 6.0}) == [1, 4, 5, 6]
    assert save(checkpoints, {7: 0.0}) == [5, 6, 7]


def test_more_may_be_better(folder: Path) -> None:
    checkpoints = store(folder, name="eval_accuracy", larger=True)
    assert save(checkpoints, {1: 0.5, 2: 0.9, 3: 0.7, 4: 0.8}, "eval_accuracy") == [2, 4]
    assert best_step(checkpoints) == 2


def test_a_tie_keeps_the_earlier(folder: Path) -> None:
    checkpoints = store(folder)
    assert save(checkpoints, {1: 1.0, 2: 1.0, 3: 1.0}) == [1, 3]
    assert best_step(checkpoints) == 1


def test_without_a_finite_figure_there_is_no_best(folder: Path) -> None:
    checkpoints = store(folder)
    assert save(checkpoints, {1: NAN, 2: math.inf, 3: -math.inf}) == [3]
    assert best_step(checkpoints) is None
    assert save(checkpoints, {4: 7.0, 5: NAN}) == [4, 5]
    assert best_step(checkpoints) == 4


def test_a_checkpoint_of_which_the_figure_was_not_measured_is_not_the_best(folder: Path) -> None:
    checkpoints = store(folder)
    save(checkpoints, {1: 5.0})
    checkpoints.save(of_step(2), 2)
    checkpoints.save(of_step(3), 3, metrics={"loss": 0.0})
    assert best_step(checkpoints) == 1
    assert steps(checkpoints) == [1, 3]


def test_the_figures_are_in_the_manifest_as_plain_json(folder: Path) -> None:
    checkpoints = store(folder)
    path = checkpoints.save(of_step(1), 1, metrics={"eval_loss": 0.25, "a": NAN, "b": math.inf, "c": torch.tensor(0.5)})  # type: ignore[dict-item]

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    record = json.loads((path / "manifest.json").read_text(), parse_constant=no_constant)
    assert record["metrics"] == {"eval_loss": 0.25, "a": None, "b": None, "c": 0.5}
    found = checkpoints.find_latest()
    assert found is not None
    assert found[1].metrics == record["metrics"]


# --- later attempts


def test_a_later_attempt_knows_the_best_from_the_manifests(folder: Path) -> None:
    save(store(folder), {1: 1.0, 2: 2.0})
    checkpoints = store(folder)
    assert best_step(checkpoints) == 1
    assert checkpoints.is_best({"eval_loss": 0.9})
    assert not checkpoints.is_best({"eval_loss": 1.0})
    assert not checkpoints.is_best({"eval_loss": NAN})
    assert save(checkpoints, {3: 3.0}) == [1, 3]


def test_an_attempt_that_asks_for_another_figure_keeps_the_best_by_that(folder: Path) -> None:
    save(store(folder, keep_last=9), {1: 1.0, 2: 2.0})
    checkpoints = store(folder, name="eval_accuracy", larger=True)
    assert best_step(checkpoints) is None
    assert save(checkpoints, {3: 0.5, 4: 0.4}, "eval_accuracy") == [3, 4]
    with pytest.raises(ConfigError, match=r"best\(\) needs a metric"):
        Checkpoints(folder, background=False).best()
    assert not Checkpoints(folder, background=False).is_best({})


@pytest.mark.parametrize("name", ["model.pt", "loader.pt", "rng.pt", "manifest.json"])
def test_a_damaged_checkpoint_is_not_the_best(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(store(folder, keep_last=9), {1: 2.0, 2: 1.0, 3: 3.0})
    damage(folder / "step-00000002" / name)
    checkpoints = store(folder)
    assert best_step(checkpoints) == 1
    if name != "manifest.json":
        assert str(folder / "step-00000002" / name) in capsys.readouterr().out
    assert checkpoints.is_best({"eval_loss": 1.5})
    assert save(checkpoints, {4: 4.0})[0] == 1  # and the best of the intact ones is kept


def test_a_best_that_was_found_damaged_goes_when_something_newer_is_whole(folder: Path) -> None:
    save(store(folder), {1: 1.0, 2: 2.0})
    damage(folder / "step-00000001" / "model.pt")
    checkpoints = store(folder)
    assert best_step(checkpoints) == 2
    assert save(checkpoints, {3: 3.0}) == [2, 3]


def refuse(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """From now on, this file cannot be opened, as if the process had too many open files."""
    opened = Path.open

    def refused(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == path:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(self))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)


@pytest.mark.parametrize("name", ["model.pt", "manifest.json"])
def test_a_best_that_cannot_be_read_for_a_while_is_not_removed(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store(folder), {1: 1.0, 2: 2.0})
    checkpoints = store(folder)
    refuse(monkeypatch, folder / "step-00000001" / name)
    assert best_step(checkpoints) == 2
    assert save(checkpoints, {3: 3.0}) == [1, 2, 3]
    monkeypatch.undo()
    assert save(checkpoints, {4: 4.0}) == [1, 4]
    assert best_step(checkpoints) == 1


@pytest.mark.parametrize("name", ["model.pt", "manifest.json"])
def test_a_checkpoint_that_cannot_be_read_is_not_loaded_and_not_removed_as_corrupted(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(store(folder, keep_last=9), {1: 2.0, 2: 1.0})
    checkpoints = store(folder, keep_last=9)
    path = folder / "step-00000002" / name
    refuse(monkeypatch, path)
    assert checkpoints.resume(of_step(0)) == 1
    assert f"skipped a checkpoint: {path} cannot be read (Too many open files)" in capsys.readouterr().out
    monkeypatch.undo()
    assert save(checkpoints, {3: 3.0}) == [1, 2, 3]
    assert best_step(checkpoints) == 2


def test_a_checkpoint_of_a_newer_version_is_not_removed_because_it_may_be_the_best(folder: Path) -> None:
    save(store(folder), {1: 1.0})
    path = folder / "step-00000001" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    checkpoints = store(folder)
    with pytest.raises(CheckpointError, match="use a newer rankwise"):
        checkpoints.resume(of_step(0))
    assert save(checkpoints, {2: 2.0, 3: 3.0}) == [1, 2, 3]


def test_a_step_that_is_saved_again_is_best_by_its_newest_copy_unless_that_is_worse(folder: Path) -> None:
    checkpoints = store(folder)
    save(checkpoints, {1: 1.0})
    save(checkpoints, {1: 1.0})
    assert [path.name for path in checkpoints.all()] == ["step-00000001-2"]
    save(checkpoints, {1: 2.0})
    assert [path.name for path in checkpoints.all()] == ["step-00000001-2", "step-00000001-3"]
    assert checkpoints.best() == folder / "step-00000001-2"


def ask_on_ranks(folder: Path) -> tuple[bool, bool, str]:
    checkpoints = store(folder)
    try:
        checkpoints.is_best({"loss": 1.0})
    except ConfigError as error:
        said = str(error)
    return checkpoints.is_best({"eval_loss": 0.5}), checkpoints.is_best({"eval_loss": 1.5}), said


def test_all_ranks_agree_on_what_is_the_best(folder: Path) -> None:
    save(store(folder), {1: 1.0})
    answers = on_ranks(2, ask_on_ranks, folder)
    assert answers == [(True, False, "keep_best='eval_loss': no such metric; the metrics are: loss")] * 2


AT_THE_END = """\
import torch
from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint.manifest import Manifest

model = torch.nn.Linear(800, 800)
checkpoints = Checkpoints("checkpoints", keep_last=1, keep_best="loss")
if checkpoints.load_latest({"model": model}) is None:
    checkpoints.save({"model": model}, 1, metrics={"loss": 0.1})
    checkpoints.save({"model": model}, 2, metrics={"loss": 0.5})
    checkpoints.wait()
else:
    checkpoints.save({"model": model}, 3, metrics={"loss": 0.4})
"""


@pytest.mark.stress
def test_a_script_that_ends_during_a_save_verifies_the_best_of_an_earlier_attempt() -> None:
    """Python starts no more threads of a pool by then."""
    Path("x.py").write_text(AT_THE_END)
    for kept in (["step-00000001", "step-00000002"], ["step-00000001", "step-00000003"]):
        done = subprocess.run([sys.executable, "x.py"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert sorted(path.name for path in Path("checkpoints").iterdir()) == kept


def test_each_save_reads_only_the_manifest_that_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests of large models have megabytes, and `at_steps` or `keep_younger_than_s` may keep hundreds."""
    read: list[str] = []
    whole = Manifest.read

    def counted(folder: Path) -> Manifest:
        read.append(folder.name)
        return whole(folder)

    monkeypatch.setattr(Manifest, "read", counted)
    checkpoints = Checkpoints(tmp_path, keep_last=9, keep_best="eval_loss", background=False)
    for step in (1, 2, 3, 4):
        assert checkpoints.is_best({"eval_loss": 1.0 / step})
        checkpoints.save(of_step(step), step, metrics={"eval_loss": 1.0 / step})
    assert read == [f"step-{step:08d}" for step in (1, 2, 3, 4)]
    manifest = tmp_path / "step-00000004" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("0.25", "0.35"))  # corrupted since
    assert checkpoints.best() == tmp_path / "step-00000003"
