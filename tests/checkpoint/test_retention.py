"""Which checkpoints stay: by recency, age, named steps; the rule, and a folder to which it is applied."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from boxes import loaded, of_step

from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint.retention import Retention, age_s, prunable
from rankwise.errors import ConfigError


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
        (Retention(1, younger_than_s=30.0), [1, 2]),  # as old as that is not younger
        (Retention(1, younger_than_s=30.1), [1]),
        (Retention(1, steps=frozenset({2, 77})), [1, 3, 4]),
        (Retention(2, younger_than_s=31.0, steps=frozenset({1})), []),
    ],
)
def test_what_stays_for_one_reason_stays(rule: Retention, gone: list[int]) -> None:
    ages = dict(zip(paths(1, 2, 3, 4, 5), (40.0, 30.0, 20.0, 10.0, 0.0), strict=True))
    assert rule.gone(ages) == paths(*gone)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("1.5h", 5400.0), ("7d", 604800.0), ("2w", 1209600.0), ("5m", 300.0)]
)
def test_an_age_has_a_unit(text: str, seconds: float) -> None:
    assert age_s(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-7d", "7 days", "7y", "nand"])
def test_what_is_no_age_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="is no age; type a number and a unit"):
        age_s(text)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"keep_last": 0}, "keep_last=0"),
        ({"keep_younger_than_s": 0}, "keep_younger_than_s=0: give seconds"),
        ({"keep_younger_than_s": float("nan")}, "keep_younger_than_s=nan"),
        ({"keep_steps": [3, -1]}, "-1 is no step"),
        ({"keep_steps": ["3"]}, "'3' is no step"),
    ],
)
def test_a_rule_that_cannot_be_is_an_error(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        Checkpoints(tmp_path, **settings)


def test_those_of_named_steps_stay_and_a_damaged_one_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_steps=(2, 4))
    for step in range(1, 7):
        checkpoints.save(of_step(step), step)
    assert names(tmp_path) == [2, 4, 6]
    (tmp_path / "step-00000006" / "model.pt").write_bytes(b"")
    (tmp_path / "step-00000004" / "model.pt").write_bytes(b"")
    again = Checkpoints(tmp_path, keep_last=1, keep_steps=(2, 4))
    found = again.find_latest()
    assert found is not None
    assert found[1].step == 2
    again.save(of_step(7), 7)
    assert names(tmp_path) == [2, 7]
    assert loaded(tmp_path) == 7


def aged(path: Path, age_s: float) -> None:
    os.utime(path / "manifest.json", times=(time.time() - age_s,) * 2)


def test_the_young_stay_however_many_they_are(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_younger_than_s=3600.0)
    for step in range(1, 5):
        checkpoints.save(of_step(step), step)
    assert names(tmp_path) == [1, 2, 3, 4]
    aged(tmp_path / "step-00000001", 3700.0)
    aged(tmp_path / "step-00000003", 3700.0)
    aged(tmp_path / "step-00000004", 3500.0)
    checkpoints.save(of_step(5), 5)
    assert names(tmp_path) == [2, 4, 5]


def test_a_clock_that_was_set_back_removes_nothing_young(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_younger_than_s=60.0)
    checkpoints.save(of_step(1), 1)
    aged(tmp_path / "step-00000001", -5000.0)
    checkpoints.save(of_step(2), 2)
    assert names(tmp_path) == [1, 2]


def test_a_checkpoint_that_a_faster_clock_has_saved_is_not_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    saved = [checkpoints.save(of_step(step), step) for step in (1, 2, 3)]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    for path, age in zip(saved, (0.0, -0.5, 0.0), strict=True):
        os.utime(path / "manifest.json", times=(now - age,) * 2)
    assert prunable(tmp_path, keep_last=1) == [saved[0]]


def fit_with_named_steps(folder: Path) -> list[int]:
    from test_trainer_checkpoints import fit

    fit(folder, 7, keep_last=1, keep_steps=(2, 5))
    return names(folder / "checkpoints")


def test_a_trainer_saves_at_the_steps_that_are_to_stay(tmp_path: Path) -> None:
    from ranks import on_ranks

    assert on_ranks(2, fit_with_named_steps, tmp_path / "run") == [[2, 5, 7]] * 2
