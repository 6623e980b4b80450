"""`rankwise checkpoint ls, show, verify`: what checkpoints there are, what is in one, and whether every byte of it is whole.

print(listed(find("train"), verify=False));  print(shown(pick(find("train"), None)))
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.best import Best
from rankwise.checkpoint.folders import checkpoints_in
from rankwise.checkpoint.manifest import FileRecord, Manifest, saved_at
from rankwise.errors import CheckpointError
from rankwise.host.terminal import short, size, stamp
from rankwise.report.terminal import table

# --- ls


def listed(folder: Path, verify: bool) -> str:
    """One line a checkpoint, the oldest first. Without `verify` no more than the files' sizes is looked at."""
    manifests_of = {path: _read(path) for path in checkpoints_in(folder)}
    good = {path: found for path, found in manifests_of.items() if isinstance(found, Manifest)}
    best = next((Best(**found.best) for found in reversed(good.values()) if found.best), None)
    figures = dict.fromkeys(name for found in good.values() for name in found.metrics)
    first = next(iter(best.order({path: found.metrics for path, found in good.items()})), None) if best else None
    rows = [["checkpoint", "step", "saved", "size", "ranks", *figures, ""]]
    for path, found in manifests_of.items():
        if isinstance(found, Manifest):
            cells = [_figure(found.metrics.get(name)) for name in figures]
            saved = [stamp(saved_at(path)), size(found.bytes), str(found.world_size)]
            state = _state(path, found, verify) + (f", the best {best.name}" if best and path == first else "")
            rows.append([path.name, str(found.step), *saved, *cells, state])
        else:
            rows.append([path.name, *[""] * (4 + len(figures)), f"damaged: {found}"])
    return table(rows)


def _read(path: Path) -> Manifest | str:
    """Or what is wrong with it."""
    try:
        return Manifest.read(path)
    except CheckpointError as error:
        return str(error)


def _state(path: Path, manifest: Manifest, verify: bool) -> str:
    if verify:
        return "; ".join(["damaged", *found]) if (found := list(manifests.damages(path, manifest))) else "verified"
    for name, record in manifest.files.items():
        try:
            if (path / name).stat().st_size == record.bytes:
                continue
            return f"damaged: {name} is not as long as it was"
        except OSError as error:
            return f"damaged: {name}: {error.strerror}"
    return "sizes fit"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


# --- show


def shown(path: Path) -> str:
    """Its figures, its parts, and every tensor. Raises CheckpointError when the manifest is damaged."""
    manifest = Manifest.read(path)
    head = f"{short(path)}: step {manifest.step}, saved {stamp(saved_at(path))} by {manifest.world_size} rank"
    lines = [head + f"{'s' * (manifest.world_size != 1)} with torch {manifest.torch}, {size(manifest.bytes)}"]
    for title, pairs in (("metrics", manifest.metrics), ("made with", manifest.info)):
        if pairs:
            lines.append(f"{title}: " + ", ".join(f"{name} {_word(value)}" for name, value in pairs.items()))
    parts = [["part", "size", "tensors"]]
    parts += [[_part(name), size(file.bytes), str(len(file.tensors))] for name, file in manifest.files.items()]
    rows = [
        ["tensor", "type", "shape", "size"],
        *(row for name, file in manifest.files.items() for row in _tensors(name, file)),
    ]
    return "\n".join(lines) + f"\n\n{table(parts)}\n\n{table(rows)}"


def _tensors(name: str, file: FileRecord) -> Iterator[list[str]]:
    for path in file.tensors:
        at = file.layout.get(path)
        cells = [at.dtype, " x ".join(map(str, at.shape)) or "scalar", size(at.bytes)] if at is not None else ["", "", ""]
        yield [f"{_part(name)}/{path}", *cells]


def _part(file: str) -> str:
    return Path(file).stem


def _word(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def shown_as_json(path: Path) -> str:
    """The manifest, with the name and the time: name, path, saved, step, world_size, torch, files, info, metrics, best."""
    manifest = Manifest.read(path)
    return json.dumps({"name": path.name, "path": str(path.absolute()), "saved": saved_at(path), **asdict(manifest)}, indent=1)


# --- verify


def verified(paths: list[Path]) -> Iterator[tuple[Path, list[str]]]:
    """(checkpoint, what is damaged in it), one after the other as they are read."""
    for path in paths:
        try:
            yield path, list(manifests.damages(path, Manifest.read(path)))
        except CheckpointError as error:
            yield path, [str(error)]
