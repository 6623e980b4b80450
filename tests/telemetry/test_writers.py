"""Metrics on disk."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rankwise.errors import ConfigError
from rankwise.run.directory import RunDir
from rankwise.telemetry.writers import JsonlWriter, TensorBoard, Writer
from rankwise.training.state import TrainState


def lines(path: Path) -> list[dict[str, Any]]:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=no_constant) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_each_line_is_json_and_says_its_attempt_and_step(path: Path) -> None:
    writer = JsonlWriter(path, 1)
    writer.write(1, {"loss": 0.1 + 0.2, "epoch": 0})
    assert lines(path) == [{"life": 1, "step": 1, "loss": 0.1 + 0.2, "epoch": 0}]  # it can be read while it is written
    writer.write(2, {"eval_loss": 1e-300})
    writer.close()
    second = JsonlWriter(path, 2)
    second.write(2, {"ä": 3.0})
    second.close()
    assert [(r["life"], r["step"]) for r in lines(path)] == [(1, 1), (1, 2), (2, 2)]
    assert lines(path)[2]["ä"] == 3.0


def test_what_is_not_finite_is_a_word(path: Path) -> None:
    writer = JsonlWriter(path, 1)
    writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    writer.close()
    assert lines(path) == [{"life": 1, "step": 1, "a": "nan", "b": "inf", "c": "-inf"}]
    assert math.isnan(float(lines(path)[0]["a"]))


def test_half_a_line_of_a_killed_attempt_stays_by_itself(path: Path) -> None:
    path.write_text('{"life": 1, "step": 1}\n{"life": 1, "st')
    writer = JsonlWriter(path, 2)
    writer.write(7, {"loss": 1.0})
    writer.close()
    text = path.read_text().splitlines()
    assert text[1] == '{"life": 1, "st'
    assert json.loads(text[2]) == {"life": 2, "step": 7, "loss": 1.0}


def test_a_whole_last_line_gets_no_empty_line_below(path: Path) -> None:
    path.write_text('{"life": 1, "step": 1}\n')
    writer = JsonlWriter(path, 2)
    writer.write(2, {})
    writer.close()
    assert len(path.read_text().splitlines()) == 2


def test_tensorboard_reads_the_events_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard()
    assert writer.open(RunDir(tmp_path))
    for step in (1, 2, 5):
        writer.write(step, {"loss": 1.0 / step, "share/data wait": 0.5})
    writer.close()
    events = EventAccumulator(str(tmp_path / "telemetry"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= {"loss"}
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5), (5, 0.2)]


def test_a_full_disk_costs_the_figures_and_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    writer = JsonlWriter(Path("/dev/full"), 1)
    for step in range(3):
        writer.write(step, {"loss": 1.0})
    writer.close()
    assert capsys.readouterr().out == ("warning: metrics are lost: /dev/full cannot be written: No space left on device\n")


class Noted(Writer):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[int, dict[str, float]]] = []

    def open(self, run: RunDir) -> bool:
        return True

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self.written.append((step, dict(figures)))


def test_a_writer_is_given_each_figure_once_though_it_is_called_again_in_the_same_step(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    writer = Noted()
    writer.attach(SimpleNamespace(run=RunDir(tmp_path)))
    writer.begin(state)
    for step in (1, 2, 3):
        state.step = step
        if step != 2:
            state.measure({"loss": float(step)})
        writer(state)
        writer(state)  # before a save
        if step == 3:
            state.measure({"eval_loss": 0.5})
            state.note({"lr": 0.1})
            writer(state)
    writer.close()
    writer(state)
    assert writer.written == [(1, {"loss": 1.0}), (3, {"loss": 3.0}), (3, {"eval_loss": 0.5, "lr": 0.1})]


def test_a_disk_that_is_full_when_tensorboard_writes_costs_the_metrics_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    writer = TensorBoard()
    with open("/dev/full", "wb") as full:
        monkeypatch.setattr("rankwise.telemetry.writers.open", lambda *_: full, raising=False)
        assert writer.open(RunDir(tmp_path))
        writer.write(1, {"loss": 1.0})
        writer.write(2, {"loss": 1.0})
        writer.close()
    assert capsys.readouterr().out == (
        f"warning: metrics are lost: {tmp_path / 'telemetry'} cannot be written: No space left on device\n"
    )


def test_tensorboard_reads_what_was_written_before_and_after_the_disk_was_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard()
    assert writer.open(RunDir(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer.write(1, {"loss": 1.0})
    [file] = (tmp_path / "telemetry").iterdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 5, limits[1]))
    try:
        writer.write(2, {"loss": 2.0})  # 5 bytes of it
        writer.write(3, {"loss": 3.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.write(4, {"loss": 4.0})
    writer.close()
    events = EventAccumulator(str(tmp_path / "telemetry"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert capsys.readouterr().out.count("warning: metrics are lost") == 1


def test_the_events_of_a_writer_that_was_killed_are_in_the_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    child = os.fork()
    if not child:
        writer = TensorBoard()
        writer.open(RunDir(tmp_path))
        writer.write(1, {"loss": 0.5})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    events = EventAccumulator(str(tmp_path / "telemetry"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.5)]


def test_metrics_that_cannot_be_opened_are_lost_and_training_continues(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.mkdir()
    writer = JsonlWriter(path, 1)
    writer.write(1, {"loss": 1.0})
    writer.close()
    assert capsys.readouterr().out == f"warning: metrics are lost: {path} cannot be written: Is a directory\n"


def test_a_metric_with_the_name_of_a_key_of_each_line_is_refused() -> None:
    model = nn.Linear(1, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for add in (state.measure, state.note):
        with pytest.raises(
            ConfigError,
            match=r"^a metric cannot be called 'step': each line of metrics\.jsonl has this key; give it another name$",
        ):
            add({"step": 3.0})


def test_a_metric_whose_name_is_a_number_is_refused_where_it_is_measured() -> None:
    model = torch.nn.Linear(1, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"^the name of the metric 3 is not a string; give a name, such as 'class_3'$"):
        state.measure({3: 0.5})  # type: ignore[dict-item]
