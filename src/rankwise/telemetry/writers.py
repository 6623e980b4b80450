"""Metrics on disk: metrics.jsonl for programs, and TensorBoard events. Actions of a Trainer; the main rank writes.

writers = [JsonLines(), TensorBoard()]
for writer in writers: writer.attach(trainer); writer.begin(state)
writer(state)                                   # after each step: its new metrics
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from rankwise.dist import comm, log
from rankwise.host.arguments import takes
from rankwise.run.directory import RunDir


class Writer:
    """Writes each metric of a step once. A subclass has `write`, `close`, and `open` (on the main rank)."""

    def __init__(self) -> None:
        self._run: RunDir | None = None
        self._is_open = False
        self._step = -1
        self._names: set[str] = set()

    def attach(self, trainer: Any) -> None:
        self._run = trainer.run

    def begin(self, state: Any) -> None:
        if comm.is_main() and self._run is not None:
            self._step = -1
            self._is_open = self.open(self._run)

    def __call__(self, state: Any) -> None:
        """Write the metrics of this step that an earlier call has not written."""
        if not self._is_open or not (figures := state.new_metrics):
            return
        if state.step != self._step:
            self._step, self._names = state.step, set()
        fresh = {name: value for name, value in figures.items() if name not in self._names}
        if fresh:
            self._names |= fresh.keys()
            self.write(state.step, fresh)

    def open(self, run: RunDir) -> bool:
        """Open the output; returns whether there is one."""
        raise NotImplementedError

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._is_open = False


class JsonLines(Writer):
    """metrics.jsonl in the run directory: one JSON object for each step with new metrics. Each attempt appends to the file, and
    each line has the number of its attempt."""

    @takes()
    def __init__(self) -> None:
        super().__init__()
        self._writer: JsonlWriter | None = None

    def open(self, run: RunDir) -> bool:
        self._writer = JsonlWriter(run.metrics, run.attempts()[-1].life)
        return True

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        if self._writer is not None:
            self._writer.write(step, figures)

    def close(self) -> None:
        super().close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class TensorBoard(Writer):
    """Events for `tensorboard --logdir RUN`. Requires `rankwise[tensorboard]`; without it, prints a line and writes nothing."""

    _disk_errors: _DiskErrors

    @takes()
    def __init__(self) -> None:
        super().__init__()
        self._records: Any = None

    def open(self, run: RunDir) -> bool:
        if find_spec("tensorboard") is None:
            log.say(
                "TensorBoard is not installed: metrics go only to metrics.jsonl; for both, type: "
                "pip install 'rankwise[tensorboard]'"
            )
            return False
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._disk_errors = _DiskErrors(run.telemetry)
        with self._disk_errors.reported_once():
            run.telemetry.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files with such names; the last number tells apart two of this process.
            name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
            self._records = RecordWriter(open(run.telemetry / name, "wb"))  # noqa: SIM115  # closed by close()
        self._add(file_version="brain.Event:2")
        return self._records is not None

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all metrics: SummaryWriter.add_scalar writes one for each, and takes four times as long.
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in figures.items()]
        self._add(step=step, summary=Summary(value=values))

    def _add(self, **of_event: Any) -> None:
        """Append an event. Not by torch's SummaryWriter: each time that it wakes its thread, the loop loses a millisecond."""
        from tensorboard.compat.proto.event_pb2 import Event

        if self._records is not None:
            with self._disk_errors.reported_once():
                self._records.write(Event(wall_time=time.time(), **of_event).SerializeToString())
                self._records.flush()  # what does not fit on a full disk is written when there is room again

    def close(self) -> None:
        super().close()
        if self._records is not None:
            with self._disk_errors.reported_once():
                self._records.close()
            self._records = None


class _DiskErrors:
    """If the disk is full, metrics are lost, but training continues."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reported = False

    @contextlib.contextmanager
    def reported_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._reported:
                self._reported = True
                log.warn(f"metrics are lost: {self._path} cannot be written: {error.strerror}")


class JsonlWriter:
    """One JSON object per line. Each attempt appends to the file, and each line has the number of its attempt."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._attempt = attempt
        self._disk_errors = _DiskErrors(path)
        self._file: TextIO | None = None
        with self._disk_errors.reported_once():
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  # closed by close()
            if path.stat().st_size and not _ends_with_newline(path):
                self._file.write("\n")  # so that an incomplete line of a killed writer remains separate

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        record = {"life": self._attempt, "step": step, **{k: _plain(v) for k, v in figures.items()}}
        if self._file is not None:
            with self._disk_errors.reported_once():
                self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        if self._file is not None:
            with self._disk_errors.reported_once():
                self._file.close()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _plain(value: float) -> float | int | str:
    """JSON has no nan and no infinity, so these become strings."""
    return value if math.isfinite(value) else str(value)
