"""The `rankwise checkpoint` commands: list, show, verify, export, average, prune. Listing and verifying need no torch.

print(list_all(find("train"), verify=False));  print(show(pick(find("train"), None)))
write_model(read_model(path), Path("model.safetensors"))               # load_file(...) gives a state dict
write_model(average([path_a, path_b, path_c]), Path("mean.pt"))        # torch.load("mean.pt", weights_only=True)
find_prunable(folder, keep_last=2, older_than="7d")                    # reads those that remain, so that one is intact
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.folders import checkpoints_in, order, pick, remove
from rankwise.checkpoint.manifest import FileRecord, Manifest, saved_at
from rankwise.checkpoint.retention import Best, find_best_figure
from rankwise.errors import CheckpointError, ConfigError
from rankwise.host.disk import fsync
from rankwise.host.text import count, seconds_of, short, size, stamp
from rankwise.report.table import table

if TYPE_CHECKING:
    import torch

_WRAPPERS = ("module.", "_orig_mod.")  # DDP's, torch.compile's
KINDS = (".pt", ".safetensors")

State = dict[str, Any]

# --- ls


def list_all(folder: Path, verify: bool) -> str:
    """One line per checkpoint, the oldest first. Without `verify` only the sizes of the files are checked."""
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
            rows.append([path.name, *[""] * (4 + len(figures)), f"corrupted: {found}"])
    return table(rows)


def _read(path: Path) -> Manifest | str:
    """The manifest, or what is wrong with it."""
    try:
        return Manifest.read(path)
    except CheckpointError as error:
        return str(error)


def _state(path: Path, manifest: Manifest, verify: bool) -> str:
    if verify:
        try:
            return "; ".join(["corrupted", *found]) if (found := list(manifests.damages(path, manifest))) else "verified"
        except CheckpointError as error:
            return str(error)
    for name, record in manifest.files.items():
        try:
            length = (path / name).stat().st_size
            if length != record.bytes:
                return f"corrupted: {name} has {length} of {record.bytes} bytes"
        except OSError as error:
            return f"corrupted: {name}: {error.strerror}"
    return "sizes match"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


# --- show


def show(path: Path) -> str:
    """Metrics, parts, and every tensor. Raises CheckpointError if the manifest is corrupted."""
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


def show_as_json(path: Path) -> str:
    """The manifest, with the name and the time: name, path, saved, step, world_size, torch, files, info, metrics, best."""
    manifest = Manifest.read(path)
    return json.dumps({"name": path.name, "path": str(path.absolute()), "saved": saved_at(path), **asdict(manifest)}, indent=1)


# --- verify


def verify(paths: list[Path]) -> Iterator[tuple[Path, list[str]]]:
    """For each checkpoint, as soon as it was read: (checkpoint, what is corrupted in it)."""
    for path in paths:
        try:
            yield path, list(manifests.damages(path, Manifest.read(path)))
        except CheckpointError as error:
            yield path, [str(error)]


# --- export: the model alone, for other programs


def check_target(path: Path, force: bool) -> None:
    """Raises ConfigError if the file cannot be written. Called before anything is read."""
    if path.suffix not in KINDS:
        raise ConfigError(f"--to {path}: the name must end in {' or '.join(KINDS)}; type --to {path.name or 'model'}{KINDS[0]}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    if path.exists() and (not force or path.is_dir()):
        raise ConfigError(f"{path} exists already; choose another name{', or type --force' * (not path.is_dir())}")
    if path.suffix == ".safetensors":
        _safetensors()


def read_model(path: Path, part: str = "model") -> State:
    """The state of one part of a checkpoint, with the names of the bare module. Raises CheckpointError if it is corrupted."""
    from rankwise.checkpoint import sharding

    manifest = Manifest.read(path)
    if part not in sharding.parts_of(manifest):
        raise ConfigError(f"{path} has no part {part}; choose one with --part: {', '.join(sharding.parts_of(manifest))}")
    try:
        state = sharding.read_part(path, manifest, part)
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error.strerror})") from None
    if not isinstance(state, dict):
        raise ConfigError(f"the part {part} of {path} is a {type(state).__name__}, not a model; choose another with --part")
    return _bare(state)


def _bare(state: State) -> State:
    names = list(state)
    for wrapper in (prefix for _ in _WRAPPERS for prefix in _WRAPPERS):  # each wrapper may be inside the other
        if names and all(isinstance(name, str) and name.startswith(wrapper) for name in names):
            names = [name.removeprefix(wrapper) for name in names]
    return dict(zip(names, state.values(), strict=True))


# --- the mean of several


def choose_for_average(
    folder: Path, last: int | None, best: int | None, by: str | None, larger_is_better: bool | None
) -> list[Path]:
    """The last N or the best N; the best by the metric `by`, or by the metric of the run.

    Raises ConfigError if there are fewer, CheckpointError if one that could be among the best has a corrupted manifest.
    """
    if (last is None) == (best is None):
        raise ConfigError("which checkpoints should be averaged? Type --last N or --best N")
    option, n = ("--last", last) if last is not None else ("--best", best)
    if n is not None and n < 1:
        raise ConfigError(f"{option} {n}: give a whole number of at least 1")
    paths = checkpoints_in(folder)
    if last is not None:
        return _enough(paths[-last:], last, f"in {folder}", option)
    assert best is not None
    found = {path: Manifest.read(path) for path in paths}
    figure = find_best_figure(list(found.values()), by, larger_is_better)
    ordered = figure.order({path: each.metrics for path, each in found.items()})
    return _enough(ordered[:best], best, f"with {figure.name} in {folder}", option)


def _enough(found: list[Path], n: int, where: str, option: str) -> list[Path]:
    if len(found) < n:
        cure = f"; type {option} {len(found)}" if found else ""
        raise ConfigError(f"{option} {n}: found only {count(len(found), 'checkpoint')} {where}{cure}")
    return found


def average(paths: Sequence[Path], part: str = "model") -> State:
    """The mean of each floating-point tensor, summed in float64, also in nested states. Everything else (counts, masks) is
    that of the newest.

    Raises ConfigError if there is none or the checkpoints have different models, CheckpointError if one is corrupted.
    """
    newest = max(paths, key=lambda path: Manifest.read(path).step)
    state = read_model(newest, part)
    here = dict(_tensors_in(state))
    sums = {place: _wide(tensor) for place, tensor in here.items() if tensor.is_floating_point() or tensor.is_complex()}
    if not sums:
        raise ConfigError(f"the part {part} of {newest} has no floating-point tensors to average; give another --part")
    for path in paths:
        if path == newest:
            continue
        other = dict(_tensors_in(read_model(path, part)))
        for place in here.keys() ^ other.keys():
            raise ConfigError(f"{path} and {newest} are of different models: only one of them has {_name(place)}")
        for place, total in sums.items():
            if other[place].shape != total.shape:
                raise ConfigError(f"{path} and {newest} are of different models: {_name(place)} has different shapes")
            total += _wide(other[place])
    means = {place: (total / len(paths)).to(here[place].dtype) for place, total in sums.items()}
    return {key: _with(means, value, (key,)) for key, value in state.items()}


def _tensors_in(state: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """(its keys and indices, the tensor) for every tensor in nested dicts, lists and tuples."""
    import torch

    if isinstance(state, torch.Tensor):
        yield place, state
    elif isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _tensors_in(value, (*place, key))


def _with(means: Mapping[tuple[Any, ...], torch.Tensor], state: Any, place: tuple[Any, ...]) -> Any:
    """The nested state with the tensors of `means` at their places."""
    if place in means:
        return means[place]
    if isinstance(state, dict):
        changed = copy.copy(state)  # keeps the versions of modules
        for key, value in state.items():
            changed[key] = _with(means, value, (*place, key))
        return changed
    if isinstance(state, list | tuple):
        return type(state)(_with(means, value, (*place, index)) for index, value in enumerate(state))
    return state


def _name(place: tuple[Any, ...]) -> str:
    return "/".join(map(str, place))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


# --- writing


def write_model(state: State, to: Path) -> None:
    """Write .pt or .safetensors; the end of the name decides. Raises CheckpointError if this fails."""
    temporary = to.with_name(f".{to.name}.{uuid.uuid4().hex}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode & 0o777  # as the umask says; safetensors replaces the file by one of mode 0600
        if to.suffix == ".safetensors":
            _save_safetensors(*_apart(state), temporary)
        else:
            import torch

            with open(temporary, "wb") as file:
                torch.save(state, file)
        temporary.chmod(mode)
        fsync(temporary)
        os.replace(temporary, to)
        fsync(to.absolute().parent)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's form of an OSError
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"cannot write {to}: {why}") from None
    finally:
        with contextlib.suppress(OSError):  # for a reason that is already an error above
            temporary.unlink(missing_ok=True)


def _save_safetensors(state: Mapping[str, torch.Tensor], tied: Mapping[str, str], to: Path) -> None:
    try:
        _safetensors().save_file(state, to, {"format": "pt", **tied})
    except ConfigError:
        raise
    except Exception as error:  # safetensors has its own exception type
        raise RuntimeError(str(error)) from None


def _apart(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What safetensors requires: (tensors that do not share memory, {other name: first name} for a tensor with several names).
    Its load_model, and the libraries that use it, expect this."""
    import torch

    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"{name} is a {type(value).__name__}, and a .safetensors file holds only tensors; type --to model.pt"
            )
    seen: set[int] = set()
    first: dict[Any, str] = {}
    apart, tied = {}, {}
    for name, tensor in state.items():
        address = tensor.untyped_storage().data_ptr()
        whole = (address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and first.setdefault(whole, name) != name:
            tied[name] = first[whole]
            continue
        apart[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return {name: tensor.contiguous() for name, tensor in apart.items()}, tied


def _safetensors() -> Any:
    try:
        import safetensors.torch as found
    except ImportError:
        raise ConfigError(
            "safetensors is not installed; give --to model.pt, or type: pip install 'rankwise[safetensors]'"
        ) from None
    return found


# --- prune


def parse_age(text: str) -> float:
    """Seconds of `90s`, `30m`, `12h`, `7d`, `2w`. Raises ConfigError for anything else."""
    if (found := seconds_of(text)) is None:
        raise ConfigError(f"--older-than {text!r} is not an age; type a number and a unit: 90s, 30m, 12h, 7d, 2w")
    return found


def find_prunable(
    folder: Path,
    keep_last: int | None = None,
    keep_best: int | None = None,
    by: str | None = None,
    larger_is_better: bool | None = None,
    older_than: str | None = None,
    keep: Sequence[str] = (),
) -> list[Path]:
    """Those that can be removed, the oldest first. Not among them: the last intact ones (at least one), the best, the named,
    the young.

    Reads every byte of the newest checkpoints, until it has found as many intact ones as should be kept. Corrupted ones do not
    count, and stay if they are newer than all intact ones. Raises ConfigError if no rule is given, or a rule is wrong.
    """
    for option, n in (("--keep-last", keep_last), ("--keep-best", keep_best)):
        if n is not None and n < 1:
            raise ConfigError(f"{option} {n}: give a whole number of at least 1")
    if not (keep_last or keep_best or older_than is not None or keep):
        raise ConfigError(
            "which checkpoints should be kept? Type for example --keep-last 2, --keep-best 1, --older-than 7d or --keep 400"
        )
    older_than_s = parse_age(older_than) if older_than is not None else 0.0
    paths = checkpoints_in(folder)
    named = {pick(folder, name, "--keep") for name in keep}
    whole = _first_whole(reversed(paths), keep_last or 1)
    if not whole:
        raise CheckpointError(f"no checkpoint in {folder} is intact, so none is removed")
    older = [path for path in paths if order(path) < order(whole[0])]
    kept = {*whole, *named}
    if keep_best is not None:
        found = {path: manifest for path in paths if isinstance(manifest := _read(path), Manifest)}
        figure = find_best_figure(list(found.values()), by, larger_is_better)
        kept.update(_first_whole(figure.order({path: each.metrics for path, each in found.items()}), keep_best))
    now = time.time()
    return [path for path in older if path not in kept and now - saved_at(path) >= older_than_s]


def remove_one(path: Path) -> str:
    """Remove the checkpoint, and return the line to print."""
    if not remove(path):
        raise CheckpointError(f"{path} cannot be removed")
    return f"removed {path}"


def _first_whole(paths: Iterable[Path], n: int) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if len(found) == n:
            break
        with contextlib.suppress(CheckpointError):  # corrupted, or removed in the meantime
            manifests.verify(path)
            found.append(path)
    return found
