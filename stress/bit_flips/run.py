"""Does rankwise find every corruption of a checkpoint, name the file and the tensor, and use the checkpoint before it?

    python stress/bit_flips/run.py [--draws 300] [--seed 0] [--folder /dev/shm]

In --draws trials, flips single bits, zeroes holes (1 B to 64 kB) and truncates, at random places of random files of a
checkpoint, including the manifest: half of the draws choose the file, half the byte. For comparison, does the same to one file
of torch.save (read completely, and mapped) and of safetensors, if it is installed: does it raise, load what was saved, or load
something else? Exits with 1 if a corruption was not found or not named, or the checkpoint was used.
"""

import argparse
import collections
import contextlib
import io
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.manifest import Manifest
from rankwise.errors import CheckpointError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from judge import WrongError, judged

KINDS = ("flip", "hole", "truncation")
draw = random.Random()  # separate, because loading a checkpoint restores the global one


def damaged(data: bytes, kind: str) -> tuple[bytes, int, int]:
    """(the bytes after the damage, where it starts, where it ends); the result always differs from `data`."""
    while True:
        at = draw.randrange(len(data))
        if kind == "truncation":
            return data[:at], at, len(data)
        changed = bytearray(data)
        if kind == "flip":
            changed[at] ^= 1 << draw.randrange(8)
            return bytes(changed), at, at + 1
        end = min(len(data), at + int(2 ** draw.uniform(0, 16)))
        changed[at:end] = bytes(end - at)
        if changed != data:
            differ = [i for i in range(at, end) if data[i]]
            return bytes(changed), differ[0], differ[-1] + 1


def parts(step: int) -> dict[str, nn.Module | torch.optim.Optimizer]:
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(100, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 50))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 100)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def state_of(things: dict) -> dict[str, torch.Tensor]:
    return {f"{name}/{path}": t for name, part in things.items() for path, t in manifests.tensors(part.state_dict())}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    same = one.keys() == other.keys()
    return same and all(
        t.shape == other[n].shape and manifests.tensor_sum(t) == manifests.tensor_sum(other[n]) for n, t in one.items()
    )


# --- ours


def draw_file(files: list[Path]) -> Path:
    if draw.random() < 0.5:
        return draw.choice(files)
    return draw.choices(files, [file.stat().st_size for file in files])[0]


def hit(folder: Path, file: Path, data: bytes, changed: bytes, begin: int, end: int) -> list[str]:
    """The tensors of which a byte has changed, or is missing."""
    record = manifests.Manifest.read(folder).files[file.name]
    found = []
    for name, at in record.layout.items():
        low, high = max(begin, at.offset), min(end, at.offset + at.bytes)
        if low < high and data[low:high] != changed[low:high]:
            found.append(name)
    return found


def check(folder: Path, file: Path, kind: str) -> str:
    """Damage the file, check what rankwise does, and repair it. Returns where the damage was. Raises WrongError."""
    newest = Checkpoints(folder, background=False).all()[-1]
    data = file.read_bytes()
    changed, begin, end = damaged(data, kind)
    names = hit(newest, file, data, changed, begin, end) if file.name != manifests.NAME else []
    what = f"{kind} at {begin} to {end} of {file}"
    file.write_bytes(changed)
    try:
        text = damage_of(newest)
        if text is None:
            raise WrongError(f"not found: {what}")
        if not text.startswith(str(file)):
            raise WrongError(f"the file is not named: {what}: {text}")
        if names and not (names[0] in text and ("in tensor" in text or "before tensors" in text)):
            raise WrongError(f"tensor {names[0]} is not named: {what}: {text}")
        fresh = parts(99)
        with contextlib.redirect_stdout(io.StringIO()):
            manifest = Checkpoints(folder, background=False).load_latest(fresh)
        if manifest is None or manifest.step != 1 or not equal(state_of(fresh), state_of(parts(1))):
            raise WrongError(f"the checkpoint before was not used: {what}")
    finally:
        file.write_bytes(data)
    return "in tensors" if names else "in the manifest" if file.name == manifests.NAME else "between tensors"


def damage_of(folder: Path) -> str | None:
    try:
        manifests.verify(folder)
    except CheckpointError as error:
        return str(error)
    return None


def ours(folder: Path, draws: int) -> Iterator[str]:
    checkpoints = Checkpoints(folder, background=False)
    for step in (1, 2):
        newest = checkpoints.save(parts(step), step)
    files = sorted(newest.iterdir())
    for kind in KINDS:
        places = collections.Counter(check(folder, draw_file(files), kind) for _ in range(draws))
        where = ", ".join(f"{n} {place}" for place, n in sorted(places.items()))
        yield f"rankwise       {kind:11} {draws} of {draws} found and named, the one before used ({where})"
    assert Manifest.read(newest) == manifests.verify(newest)


# --- other libraries


def others(folder: Path) -> Iterator[tuple[str, Path, Callable[[Path], dict[str, torch.Tensor]]]]:
    state = {name: tensor.clone() for name, tensor in state_of(parts(2)).items()}
    torch.save(state, folder / "state.pt")
    yield "torch.save", folder / "state.pt", lambda path: torch.load(path, weights_only=True)
    yield "torch, mapped", folder / "state.pt", lambda path: torch.load(path, weights_only=True, mmap=True)
    with contextlib.suppress(ImportError):
        from safetensors.torch import load_file, save_file

        save_file(state, folder / "state.safetensors")
        yield "safetensors", folder / "state.safetensors", load_file


def other(name: str, path: Path, load: Callable[[Path], dict[str, torch.Tensor]], draws: int) -> Iterator[str]:
    data = path.read_bytes()
    copy = path.with_stem("copy")
    whole = load(path)
    for kind in KINDS:
        ends: collections.Counter[str] = collections.Counter()
        for number in range(draws):
            copy = path.with_stem(f"copy-{number}")  # a mapped file must not change
            copy.write_bytes(damaged(data, kind)[0])
            try:
                ends["load what was saved" if equal(load(copy), whole) else "load something else, silently"] += 1
            except Exception:  # of many types
                ends["raise"] += 1
            copy.unlink()
        yield f"{name:14} {kind:11} of {draws}: {', '.join(f'{n} {end}' for end, n in ends.most_common())}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    draw.seed(options.seed)
    torch.set_num_threads(1)

    def trial(folder: Path) -> None:
        for line in ours(folder / "checkpoints", options.draws):
            print(line, flush=True)
        for name, path, load in others(folder):
            for line in other(name, path, load, options.draws):
                print(line, flush=True)

    return judged(trial, options.folder)


if __name__ == "__main__":
    sys.exit(main())
