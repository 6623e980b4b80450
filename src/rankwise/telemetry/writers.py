"""Figures on disk: metrics.jsonl for programs, TensorBoard's events for eyes. The main rank writes."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rankwise.dist import log
from rankwise.run.directory import RunDir


class Writer(Protocol):
    """Takes the reduced figures of one moment."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlWriter:
    """One JSON object a line; a life goes on below the one before, and each line says whose it is."""

    def __init__(self, path: Path, life: int) -> None:
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  # closed by close()
        if path.stat().st_size and not _ends_with_newline(path):
            self._file.write("\n")  # a killed writer's half line stays by itself
        self._life = life
        self._path = path
        self._told = False

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        record = {"life": self._life, "step": step, **{k: _plain(v) for k, v in figures.items()}}
        with self._told_once():
            self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        with self._told_once():
            self._file.close()

    @contextlib.contextmanager
    def _told_once(self) -> Iterator[None]:
        """A full disk costs figures, not the training."""
        try:
            yield
        except OSError as error:
            if not self._told:
                self._told = True
                log.warn(f"figures are lost: {self._path} cannot be written: {error.strerror}")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _plain(value: float) -> float | int | str:
    """JSON has no nan and no infinity: they are words."""
    return value if math.isfinite(value) else str(value)


class TensorBoardWriter:
    """Events for `tensorboard --logdir RUN`; needs the extra `rankwise[tensorboard]`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def open_writers(run: RunDir, life: int) -> list[Writer]:
    """Those of one life of a run."""
    writers: list[Writer] = [JsonlWriter(run.metrics, life)]
    if find_spec("tensorboard") is not None:
        writers.append(TensorBoardWriter(run.telemetry))
    else:
        log.say("no TensorBoard events: pip install 'rankwise[tensorboard]' to have them; metrics.jsonl is written")
    return writers
