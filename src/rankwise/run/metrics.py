"""The records of a run's metrics.jsonl.

read(run.metrics)[-1]["loss"]
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def read(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The lines that have a step; skips others, such as an incomplete line of a killed attempt. There are none if it is a
    folder: then training has lost its metrics. `last_bytes`: only complete lines in so many bytes at the end."""
    records: list[dict[str, Any]] = []
    if path.is_file():
        with path.open("rb") as file:
            skipped = file.seek(max(file.seek(0, os.SEEK_END) - last_bytes, 0) if last_bytes is not None else 0)
            data = file.read().partition(b"\n")[2] if skipped else file.read()
        for line in data.decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and type(record.get("step")) is int:
                    records.append(record)
    return records
