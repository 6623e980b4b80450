"""Checkpoints that a Trainer writes and finds: each corruption of each file, and the best checkpoint."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from boxes import background, small_disk
from ranks import on_ranks
from torch import nn
from torch.utils.data import TensorDataset
from trainers import trainer_of

import rankwise
from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint import manifest as manifests
from rankwise.run.directory import RunDir, write_json
from rankwise.run.lease import Holder
from rankwise.telemetry import writers
from rankwise.training.state import TrainState

__all__ = ["background", "small_disk"]  # fixtures

PARTS = ("settings", "model", "optimizer", "scheduler", "loader", "log", "sync", "train", "rng")
FILES = ["manifest.json", *(f"{name}.pt" for name in PARTS)]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(32, 3, generator=generator))


def step_fn(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    return model(batch[0]).square().sum(), len(batch[0])


def fit(folder: Path, max_steps: int, said: io.StringIO | None = None, **settings: Any) -> tuple[list[float], str]:
    """(the final parameters, what was printed). In a separate process."""
    writers.find_spec = lambda name: None  # type: ignore[assignment, misc]  # importing TensorBoard takes longer than the test
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"global_batch_size": 8, "log_every": 1, "every_s": 1e9, **settings}
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    with contextlib.redirect_stdout(said or io.StringIO()) as out:
        state = trainer_of(
            model, optimizer, step_fn, data(), scheduler=scheduler, max_steps=max_steps, run_dir=folder, **settings
        ).fit()
    return torch.cat([p.detach().reshape(-1) for p in state.model.parameters()]).tolist(), out.getvalue()


# --- damage

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda whole: b"",
    "truncated": lambda whole: whole[: len(whole) * 9 // 10],
    "without its last bytes": lambda whole: whole[:-2],
    "a flipped bit": lambda whole: whole[:150] + bytes([whole[150] ^ 1]) + whole[151:],
    "a hole of zeros": lambda whole: whole[: len(whole) // 3] + bytes(64) + whole[len(whole) // 3 + 64 :],
    "longer": lambda whole: whole + b"\0",
}


def damaged_and_resumed(folder: Path, name: str) -> tuple[list[float], dict[str, tuple[list[float], str, str]]]:
    """Stopped at 5 and at 7 of 10 steps. The result if this file of the checkpoint of step 7 is corrupted."""
    unbroken, _ = fit(folder / "unbroken", 10)
    fit(folder / "run", 5)
    fit(folder / "run", 7)
    ends = {}
    for damage, spoil in DAMAGES.items():
        shutil.copytree(folder / "run", folder / damage)
        path = folder / damage / "checkpoints" / "step-00000007" / name
        path.write_bytes(spoil(path.read_bytes()))
        ends[damage] = (*fit(folder / damage, 10), str(path))
    return unbroken, ends


@pytest.mark.parametrize("name", FILES)
@pytest.mark.one_in(3)
def test_a_trainer_goes_on_from_the_checkpoint_before_one_with_a_damaged_file(name: str, tmp_path: Path) -> None:
    [(unbroken, ends)] = on_ranks(1, damaged_and_resumed, tmp_path, name)
    assert set(ends) == set(DAMAGES)
    for damage, (parameters, said, path) in ends.items():
        assert f"warning: skipped a checkpoint: {path}" in said, damage
        assert "resuming from step 5" in said, damage
        assert parameters == unbroken, damage
        left = [p.name for p in (Path(path).parents[1]).iterdir()]
        assert sorted(left) == ["step-00000005", "step-00000010"], damage  # the corrupted one was removed


def saved_files(folder: Path) -> list[str]:
    fit(folder, 1)
    return sorted(p.name for p in (folder / "checkpoints" / "step-00000001").iterdir())


def test_the_files_that_are_damaged_here_are_all_that_there_are(tmp_path: Path) -> None:
    assert on_ranks(1, saved_files, tmp_path) == [sorted(FILES)]


# --- a disk that is full


def end_each_save() -> None:
    """Also a background save has ended, or failed, when the loop continues. In a separate process."""
    save = Checkpoints.save

    def save_now(self: Checkpoints, *args: Any) -> Path:
        path = save(self, *args)
        self._background.join()
        return path

    Checkpoints.save = save_now  # type: ignore[method-assign]


def fit_on_a_full_disk(disk: Path, freed_at: int, background: bool) -> tuple[str, str]:
    """(the error, what was printed). 5 steps, each saved; the disk is full from step 2 until space is freed."""
    filler = disk / "filler"
    end_each_save()

    def fill(state: TrainState) -> None:
        if state.step == 2 and not filler.exists() and rankwise.init().is_main:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            os.truncate(filler, filler.stat().st_size - 4 * 4096)  # the run's records are small; a checkpoint is not
        if state.step == freed_at and rankwise.init().is_main:
            filler.unlink()

    out = io.StringIO()
    kind, text = error_of(fit, disk / "run", 5, every_s=0, log_every=1, actions=[fill], said=out, background=background)
    return f"{kind}: {text}", out.getvalue()


@pytest.mark.parametrize("n", [1, 2])
def test_a_full_disk_is_a_warning_until_there_is_room_again(n: int, background: bool, small_disk: Path) -> None:
    for rank, (error, said) in enumerate(on_ranks(n, fit_on_a_full_disk, small_disk, 4, background)):
        assert error == ": "
        if rank == 0:
            assert said.count("B are free; training continues") == 2
            assert "step-00000003: it needs" in said
    assert sorted(p.name for p in (small_disk / "run" / "checkpoints").iterdir()) == names(4, 5)


@pytest.mark.parametrize("n", [1, 2])
def test_a_disk_that_stays_full_is_an_error_on_every_rank_and_the_last_checkpoint_stays(
    n: int, background: bool, small_disk: Path
) -> None:
    for error, _ in on_ranks(n, fit_on_a_full_disk, small_disk, 99, background):
        assert error.startswith("CheckpointError: cannot write ")
        assert "step-00000005: it needs" in error
    folder = small_disk / "run" / "checkpoints"
    assert [p.name for p in folder.iterdir()] == names(1)
    assert manifests.verify(folder / "step-00000001").step == 1


# --- a writer that was considered dead


def fit_though_taken_over(folder: Path, background: bool) -> tuple[str, str]:
    def take_over(state: TrainState) -> None:
        if state.step == 2 and rankwise.init().is_main:
            write_json(RunDir(folder).lease, asdict(replace(Holder.this_process(), host="node7", token="another's")))

    return error_of(fit, folder, 5, every_s=0, log_every=1, actions=[take_over], background=background)


@pytest.mark.parametrize("n", [1, 2])
def test_once_another_run_has_taken_over_none_of_its_checkpoints_is_made_final(
    n: int, background: bool, tmp_path: Path
) -> None:
    for kind, text in on_ranks(n, fit_though_taken_over, tmp_path / "run", background):
        assert kind == "RunDirError"
        assert f"the run in {tmp_path / 'run'} was taken over by pid " in text
        assert text.endswith("this process stops")
    found = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert found in ([], names(1), names(1, 2))  # what was being written at step 2 has no name either
    assert (tmp_path / "run" / "lease.json").exists()


# --- the best

Said = tuple[str, list[str]]
"""What a Trainer printed, and the checkpoints that exist at the end."""

LOSSES = {2: 5.0, 4: 3.0, 6: 4.0, 8: float("nan"), 10: 3.0, 12: 3.5}


def scripted(figures: dict[int, float], state: list[TrainState]) -> Callable[[Any, Any], dict[str, Any]]:
    """An eval_fn whose metric depends on the step."""
    return lambda model, batch: {"loss": (figures[state[0].step] * len(batch[0]), len(batch[0]))}


def fit_scripted(
    folder: Path, max_steps: int = 12, figures: dict[int, float] = LOSSES, **settings: Any
) -> tuple[str, list[str]]:
    state: list[TrainState] = []
    settings = {"keep_last": 1, "keep_best": "eval_loss", "eval_every": 2, **settings}
    remember = lambda now: None  # noqa: E731
    writers.find_spec = lambda name: None  # type: ignore[assignment, misc]
    model = nn.Linear(3, 1)
    trainer = trainer_of(
        model, torch.optim.SGD(model.parameters(), 0.01), step_fn, data(), eval_data=data(), eval_fn=scripted(figures, state),
        global_batch_size=8, max_steps=max_steps, run_dir=folder, actions=[remember], **{"every_s": 1e9, **settings},
    )  # fmt: skip
    state.append(trainer.state)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer.fit()
    return out.getvalue(), sorted(p.name for p in (folder / "checkpoints").iterdir())


def names(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


@pytest.mark.parametrize("n", [1, 2])
def test_a_trainer_keeps_the_checkpoint_of_its_best_evaluation(n: int, tmp_path: Path) -> None:
    for said, there in on_ranks(n, fit_scripted, tmp_path / "run"):
        assert there == names(4, 12)  # 10 is only equal
        if said:
            assert "best eval_loss: " in said
            assert "step-00000004\n" in said
    manifest = manifests.verify(tmp_path / "run" / "checkpoints" / "step-00000004")
    assert manifest.metrics["eval_loss"] == pytest.approx(3.0)


def fit_in_two_attempts(folder: Path) -> list[str]:
    fit_scripted(folder, 6)
    return fit_scripted(folder, 12)[1]


def test_a_later_attempt_of_a_trainer_knows_the_best_of_the_earlier(tmp_path: Path) -> None:
    assert on_ranks(1, fit_in_two_attempts, tmp_path / "run") == [names(4, 12)]


def test_a_figure_of_an_earlier_step_is_not_taken_for_that_of_a_checkpoint(tmp_path: Path) -> None:
    """Saved at each step, evaluated at every fifth: the checkpoints in between have no metric."""
    figures = {5: 3.0, 7: 1.0}
    on_ranks(1, fit_scripted, tmp_path / "run", 7, figures, eval_every=5, every_s=0, log_every=1, keep_last=9)
    found = {p.name: manifests.verify(p).metrics.get("eval_loss") for p in (tmp_path / "run" / "checkpoints").iterdir()}
    assert found == dict(zip(names(*range(1, 8)), [None, None, None, None, 3.0, None, 1.0], strict=True))


def fit_by_training_loss(folder: Path) -> tuple[str, list[str]]:
    said = fit(folder, 6, keep_best="loss", keep_last=1, every_s=0)[1]
    return said, [p.name for p in (folder / "checkpoints").iterdir()]


def test_the_loss_of_training_can_choose_the_best_of_what_is_saved_anyway(tmp_path: Path) -> None:
    [(said, there)] = on_ranks(1, fit_by_training_loss, tmp_path)
    assert "best loss: " in said
    assert 1 <= len(there) <= 2


def measured_by_an_action(folder: Path) -> list[str]:
    def measure(state: TrainState) -> None:
        state.measure({"errors": {1: 4.0, 2: 2.0, 3: 3.0}[state.step]})

    fit(folder, 3, keep_best="errors", larger_is_better=False, keep_last=1, actions=[measure])
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def test_a_figure_of_ones_own_action_can_choose_the_best(tmp_path: Path) -> None:
    assert on_ranks(1, measured_by_an_action, tmp_path) == [names(2, 3)]


def error_of(function: Callable[..., Any], *args: Any, **settings: Any) -> tuple[str, str]:
    try:
        function(*args, **settings)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"keep_last": 0}, "keep_last=0"),
        ({"keep_best": "eval_loss"}, "keep_best='eval_loss' needs an evaluation: give evaluate=...;"),
        ({"keep_best": "los", "larger_is_better": False}, "keep_best='los' needs an evaluation"),
        (
            {"keep_best": "accuracy", "larger_is_better": True, "eval_data": data()},
            "keep_best='accuracy': nothing measures this metric; those of the evaluations are called eval_...",
        ),
        (
            {"keep_best": "eval_x", "larger_is_better": True, "eval_data": data()},
            "Evaluate without a function measures only eval_loss",
        ),
        ({"keep_best": "eval_accuracy", "eval_data": data(), "eval_fn": len}, "is a larger value better"),
        ({"larger_is_better": True}, "larger_is_better=True needs keep_best"),
    ],
)
def test_a_figure_that_cannot_be_is_an_error_at_once(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    [(kind, text)] = on_ranks(1, error_of, fit, tmp_path / "run", 2, **settings)
    assert kind == "ConfigError"
    assert said in text
    assert not (tmp_path / "run").exists()


def test_a_figure_that_there_is_not_is_an_error_after_the_first_evaluation(tmp_path: Path) -> None:
    answers = on_ranks(2, error_of, fit_scripted, tmp_path / "run", keep_best="eval_los", larger_is_better=False)
    for kind, said in answers:
        assert kind == "ConfigError"
        assert "keep_best='eval_los': no such metric; the metrics are: eval_loss" in said
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("eval_loss") == 1
