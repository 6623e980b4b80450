"""Starting from scratch moves the checkpoints of an older run aside, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from boxes import Box

from rankwise.checkpoint import Checkpoints
from rankwise.errors import RunDirError
from rankwise.run.directory import RunDir


def saved(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder, background=False, keep_last=9)
    for step in steps:
        checkpoints.save({"a": Box(step)}, step)
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".")


def test_a_link_stays_a_link_and_files_of_the_user_stay_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to("scratch")
    (tmp_path / "scratch" / "vocabulary.json").touch()
    saved(tmp_path / "link", 3, 7).start_from_scratch()
    assert capsys.readouterr().out.endswith("the older checkpoints were moved to link/old-1\n")
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "scratch") == ["old-1", "vocabulary.json"]
    assert names(tmp_path / "scratch" / "old-1") == ["step-00000003", "step-00000007"]
    assert Checkpoints(tmp_path / "link" / "old-1").resume({"a": (box := Box())}) == 7
    assert box.state_dict() == Box(7).state_dict()


def test_a_second_start_from_scratch_has_its_own_folder_and_one_of_nothing_has_none(tmp_path: Path) -> None:
    saved(tmp_path, 1).start_from_scratch()
    saved(tmp_path, 1).start_from_scratch()
    saved(tmp_path).start_from_scratch()
    assert names(tmp_path) == ["old-1", "old-2"]


def test_checkpoints_that_cannot_be_moved_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise OSError(30, "Read-only file system")

    checkpoints = saved(tmp_path, 1)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RunDirError, match=r"cannot be moved to .*/old-1 \(Read-only file system\); move them, or give another"):
        checkpoints.start_from_scratch()


def test_a_folder_is_used_first_once_by_a_run_that_was_started_from_scratch(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.prepare(fresh=True)
    run.begin_attempt(1, ("x.py",), fresh=True)
    assert run.is_first_use(tmp_path / "a")
    run.begin_attempt(1, ("x.py",), fresh=True)  # a restart
    assert run.is_first_use(tmp_path / "a")
    run.record_use(tmp_path / "a")
    assert not run.is_first_use(tmp_path / "a")
    assert run.is_first_use(tmp_path / "b")


def test_a_run_without_a_record_of_its_folders_uses_them_first_in_its_first_attempt_from_scratch(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.prepare(fresh=False)
    run.begin_attempt(1, ("x.py",))
    assert not run.is_first_use(tmp_path / "a")
    other = RunDir(tmp_path / "other")
    other.prepare(fresh=True)
    other.begin_attempt(1, ("x.py",), fresh=True)
    other.begun.unlink()  # by a launcher of an earlier version
    assert other.is_first_use(tmp_path / "a")
    other.begin_attempt(1, ("x.py",), fresh=True)
    assert not other.is_first_use(tmp_path / "a")
