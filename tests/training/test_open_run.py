"""The run directory of a training: to whom it belongs, and what is printed if nothing is left to train."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rankwise.dist.world import World
from rankwise.errors import ConfigError, RunDirError
from rankwise.run.directory import RunDir
from rankwise.training.open_run import already_done, open_run, run_path, take_folder

ALONE = World(0, 1, 0, 1, 0, "local")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that one attempt has completed, with `train.py --lr 1`."""
    made = RunDir(tmp_path / "run")
    made.prepare(fresh=False)
    made.update_attempt(made.begin_attempt(1, ("train.py", "--lr", "1")), status=0)
    made.metrics.write_text('{"life": 1, "step": 12, "loss": 0.5}\n')
    return made


def test_a_run_that_is_done_says_so_to_the_command_that_has_trained_it(run: RunDir) -> None:
    run.begin_attempt(1, ("/else/where/train.py", "--lr", "1"))
    assert already_done(run, ALONE, 12) == (
        "already done: 12 steps; for more, raise max_steps or max_epochs; for a new run: fit(fresh=True)"
    )


@pytest.mark.parametrize("times", [1, 2])
def test_other_arguments_than_those_that_have_trained_it_are_an_error_however_often_they_are_tried(
    run: RunDir, times: int
) -> None:
    for _ in range(times):
        run.begin_attempt(1, ("train.py", "--lr", "2"))
        with pytest.raises(ConfigError, match=r"with `train.py --lr 1`, and the command is now `train.py --lr 2`.*fresh=True"):
            already_done(run, ALONE, 12)


def test_a_notebook_has_no_arguments(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its kernel are another file each time."""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    for name in ("a", "b"):
        monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", f"/tmp/kernel-{name}.json"])
        _, lease = open_run(run, ALONE, fresh=name == "a")
        assert lease is not None
        lease.release()
        run.update_attempt(run.attempts()[-1], status=0)
    assert already_done(run, ALONE, 12).startswith("already done: 12 steps")


def test_a_script_that_a_notebook_runs_has_arguments(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "2"])
    _, lease = open_run(run, ALONE, fresh=False)
    assert lease is not None
    lease.release()
    with pytest.raises(ConfigError, match=r"with `train.py --lr 1`, and the command is now `train.py --lr 2`"):
        already_done(run, ALONE, 12)


def test_under_a_launcher_its_options_are_what_to_type(run: RunDir) -> None:
    run.begin_attempt(1, ("train.py", "--lr", "2"))
    launched = World(0, 1, 0, 1, 0, "torchrun", run_dir=run.path)
    with pytest.raises(ConfigError, match=r"To train this as a new run: --name NAME\. To start from scratch: --fresh"):
        already_done(run, launched, 12)


def test_arguments_that_have_trained_the_rest_of_it_themselves_are_right(run: RunDir) -> None:
    run.begin_attempt(1, ("train.py", "--lr", "2"))
    with run.metrics.open("a") as file:
        file.write('{"life": 2, "step": 24, "loss": 0.4}\n')
    assert already_done(run, ALONE, 24).startswith("already done: 24 steps")


def test_without_figures_the_last_attempt_that_has_ended_well_is_asked(run: RunDir) -> None:
    run.metrics.unlink()
    run.begin_attempt(1, ("train.py", "--lr", "2"))
    with pytest.raises(ConfigError, match=r"trained with `train.py --lr 1`"):
        already_done(run, ALONE, 12)


def test_a_module_and_the_file_that_it_is_have_the_same_arguments(run: RunDir) -> None:
    run.begin_attempt(1, ("-m", "package.train", "--lr", "1"))
    assert already_done(run, ALONE, 12)


def test_an_attempt_that_cannot_be_recorded_does_not_keep_the_same_process_from_trying_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RunDirError("cannot write world.json: No space left on device")

    monkeypatch.setattr(run, "begin_attempt", fail)
    with pytest.raises(RunDirError, match="No space left"):
        open_run(run, ALONE, fresh=False)
    assert not run.lease.exists()
    monkeypatch.undo()
    attempt, lease = open_run(run, ALONE, fresh=False)
    assert attempt.life == 2
    assert lease is not None
    lease.release()


def test_in_a_job_array_each_task_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = run_path(ALONE, None)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert run_path(ALONE, None) == before.with_name(f"{before.name}-3")
    assert run_path(ALONE, tmp_path) == tmp_path


def test_two_runs_do_not_save_in_one_folder(run: RunDir, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    assert take_folder(run.checkpoints, run) is None  # the run directory has a lease of its own
    lease = take_folder(folder, run)
    assert lease is not None
    with pytest.raises(RunDirError, match=rf"^another run saves its checkpoints in .*saved: pid {os.getpid()} on .* since 2"):
        take_folder(folder, RunDir(tmp_path / "other"))
    lease.release()
    lease = take_folder(folder, RunDir(tmp_path / "other"))
    assert lease is not None
    lease.release()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("new", [True, False])
def test_a_new_run_says_that_it_resumes_from_the_checkpoints_of_another_one(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], new: bool
) -> None:
    (tmp_path / "saved").mkdir()
    for checkpoint in (False, True):
        if checkpoint:
            (tmp_path / "saved" / "step-00000008").mkdir()
        lease = take_folder(tmp_path / "saved", run, new=new)
        assert lease is not None
        lease.release()
        said = " ".join(capsys.readouterr().out.split())
        assert ("is a new run, and resumes from the checkpoints of another run in " in said) == (new and checkpoint)


def test_a_folder_for_checkpoints_that_cannot_be_made_is_an_error_at_the_start(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"^cannot write .*file/saved: Not a directory; give another folder to Checkpoints"):
        take_folder(tmp_path / "file" / "saved", run)
