"""The model alone, out of one checkpoint or as the mean of several, for other programs: safetensors, or plain torch.

write(model_of(path), Path("model.safetensors"))              # load_file(...) gives a state dict
write(average([path_a, path_b, path_c]), Path("mean.pt"))     # torch.load("mean.pt", weights_only=True)
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rankwise.checkpoint import sharding
from rankwise.checkpoint.best import Best, best_by
from rankwise.checkpoint.folders import checkpoints_in, fsync
from rankwise.checkpoint.manifest import Manifest
from rankwise.errors import CheckpointError, ConfigError

_WRAPPERS = ("module.", "_orig_mod.")  # DDP's, torch.compile's
KINDS = (".pt", ".safetensors")

State = dict[str, Any]


def check_target(path: Path, force: bool) -> None:
    """Before anything is read. Raises ConfigError when it could not be written."""
    if path.suffix not in KINDS:
        raise ConfigError(
            f"--to {path}: the name's end says the kind of file; type --to {path.name or 'model'}{KINDS[0]}, or {KINDS[1]}"
        )
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    if path.exists() and (not force or path.is_dir()):
        raise ConfigError(f"{path} is there already; choose another name{', or type --force' * (not path.is_dir())}")
    if path.suffix == ".safetensors":
        _safetensors()


def model_of(path: Path, part: str = "model") -> State:
    """The state of one part of a checkpoint, names as the bare module has them. Raises CheckpointError when it is damaged."""
    manifest = Manifest.read(path)
    if part not in sharding.parts_of(manifest):
        raise ConfigError(f"{path} has no part {part}; choose one with --part: {', '.join(sharding.parts_of(manifest))}")
    try:
        state = sharding.read_part(path, manifest, part)
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error.strerror})") from None
    if not isinstance(state, dict):
        raise ConfigError(f"the part {part} of {path} is a {type(state).__name__}, not a module's state")
    return _bare(state)


def _bare(state: State) -> State:
    names = list(state)
    for wrapper in (prefix for _ in _WRAPPERS for prefix in _WRAPPERS):  # one may be in the other
        if names and all(isinstance(name, str) and name.startswith(wrapper) for name in names):
            names = [name.removeprefix(wrapper) for name in names]
    return dict(zip(names, state.values(), strict=True))


# --- the mean of several


def choose(folder: Path, last: int | None, best: int | None, by: Best | None) -> list[Path]:
    """The last or the best so many, the best by `by`, else by the figure that their run chose by.

    Raises ConfigError when there are fewer, CheckpointError when one that could be among the best has a damaged manifest.
    """
    if (last is None) == (best is None):
        raise ConfigError("of which checkpoints? Type one of --last N and --best N")
    option, n = ("--last", last) if last is not None else ("--best", best)
    if n is not None and n < 1:
        raise ConfigError(f"{option} {n}: give a whole number from 1 up")
    paths = checkpoints_in(folder)
    if last is not None:
        return _enough(paths[-last:], last, f"in {folder}", option)
    assert best is not None
    found = {path: Manifest.read(path) for path in paths}
    by = by or best_by(list(found.values()))
    return _enough(
        by.order({path: each.metrics for path, each in found.items()})[:best], best, f"with {by.name} in {folder}", option
    )


def _enough(found: list[Path], n: int, where: str, option: str) -> list[Path]:
    if len(found) < n:
        cure = f"; type {option} {len(found)}" if found else ""
        raise ConfigError(f"{option} {n}: {n} checkpoints asked for, {len(found)} there {where}{cure}")
    return found


def average(paths: Sequence[Path], part: str = "model") -> State:
    """The mean of each floating tensor, summed in float64; all else (counts, masks) is the newest's.

    Raises ConfigError when they are not of one model, CheckpointError when one is damaged.
    """
    newest = max(paths, key=lambda path: Manifest.read(path).step)
    state = model_of(newest, part)
    sums = {name: _wide(value) for name, value in state.items() if _is_averaged(value)}
    for path in paths:
        if path == newest:
            continue
        other = model_of(path, part)
        for name in state.keys() ^ other.keys():
            raise ConfigError(f"{path} and {newest} are not of one model: {name} is in one of them alone")
        for name, total in sums.items():
            if other[name].shape != total.shape:
                raise ConfigError(f"{path} and {newest} are not of one model: {name} has another shape")
            total += _wide(other[name])
    return {name: (sums[name] / len(paths)).to(value.dtype) if name in sums else value for name, value in state.items()}


def _is_averaged(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


# --- writing


def write(state: State, to: Path) -> None:
    """As the name's end says: .pt or .safetensors. Raises CheckpointError when it cannot be written."""
    temporary = to.with_name(f".{to.name}.{uuid.uuid4().hex}")
    try:
        if to.suffix == ".safetensors":
            _save_safetensors(*_apart(state), temporary)
        else:
            with open(temporary, "wb") as file:
                torch.save(state, file)
        fsync(temporary)
        os.replace(temporary, to)
        fsync(to.absolute().parent)
    except (OSError, RuntimeError) as error:  # RuntimeError: what torch makes of an OSError
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"cannot write {to}: {why}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _save_safetensors(state: Mapping[str, torch.Tensor], tied: Mapping[str, str], to: Path) -> None:
    try:
        _safetensors().save_file(state, to, {"format": "pt", **tied})
    except ConfigError:
        raise
    except Exception as error:  # of a type of its own
        raise RuntimeError(str(error)) from None


def _apart(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What safetensors takes: (tensors, none of which shares memory with another; of those that are one tensor under several
    names all names but the first, with that). Its load_model, and the libraries that use it, look for them so."""
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"{name} is a {type(value).__name__}, and safetensors holds tensors alone; write a .pt instead")
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
        raise ConfigError("safetensors is not installed: pip install 'rankwise[safetensors]', or type --to model.pt") from None
    return found
