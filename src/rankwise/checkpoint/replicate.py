"""Copying a checkpoint to nodes whose file system does not have it, through the process group.

copy_to_ranks(folder, source=0, to=[4, 8])       # complete or not at all; to the same path on those nodes
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

import xxhash

from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.folders import put
from rankwise.dist import comm
from rankwise.dist.guards import agreed, settle
from rankwise.errors import CheckpointError

_CHUNK = 32 << 20  # bytes; also the memory that ranks use which only forward the data


def group_by_folder(folder: Path) -> list[list[int]]:
    """Collective. The ranks grouped by the folder that they see under this path; the group of rank 0 is the first. Creates the
    folder if it is missing. Raises CheckpointError on all ranks if this fails."""
    group = comm.patient()
    mine = next(ranks[0] for ranks in comm.nodes() if comm.rank() in ranks)
    probe = f"tmp.{uuid.uuid4().hex}"
    with agreed():
        try:
            if comm.rank() == mine:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / probe).touch()
        except OSError as problem:
            raise CheckpointError(f"{folder} cannot be written on rank {comm.rank()} ({problem.strerror})") from None
    probes = comm.all_gather_object(probe, group)
    names = set(os.listdir(folder)) if comm.rank() == mine else set()
    seen = comm.all_gather_object(
        [rank for rank, name in enumerate(probes) if name in names], group
    )  # now all ranks have looked
    if comm.rank() == mine:
        (folder / probe).unlink(missing_ok=True)
    groups: dict[int, list[int]] = {}
    for ranks in comm.nodes():
        groups.setdefault(min(seen[ranks[0]], default=ranks[0]), []).extend(ranks)
    return [sorted(ranks, key=lambda rank: (rank != first, rank)) for first, ranks in sorted(groups.items())]


def copy_to_ranks(folder: Path, source: int, to: Collection[int]) -> None:
    """Collective. Copy the checkpoint `folder` of rank `source` to the ranks `to`, one per node. Replaces one of the same name.

    The copy is not verified here, but when it is loaded. Raises CheckpointError on all ranks if a rank cannot read or write it;
    a node on which it could not be written completely then has no copy.
    """
    group = comm.patient()
    sent = _parts_of(folder) if comm.rank() == source else iter(())
    writer = _Receiver(folder) if comm.rank() in to else None
    while (part := comm.broadcast_object(next(sent, None), source, group)) is not None:
        if writer is not None:
            writer.take(*part)
    if writer is not None:
        writer.finish()
    settle(writer.error if writer is not None else None, group)


def digest_manifest(folder: Path) -> str:
    """A digest of the manifest: equal digests mean equal checkpoints. Empty if there is no manifest."""
    try:
        return xxhash.xxh3_128_hexdigest((folder / manifests.NAME).read_bytes())
    except OSError:
        return ""


def _parts_of(folder: Path) -> Iterator[tuple[str, bytes, str]]:
    """(file, its next bytes, an error that ends the copy), the manifest last."""
    try:
        files = sorted(folder.iterdir(), key=lambda path: (path.name == manifests.NAME, path.name))
        for path in files:
            yield path.name, b"", ""
            with path.open("rb") as file:
                while part := file.read(_CHUNK):
                    yield path.name, part, ""
    except OSError as error:
        yield "", b"", f"{folder} cannot be read on rank {comm.rank()} ({error.strerror})"


class _Receiver:
    """Receives all parts even after an error, because the other ranks continue to send."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._temporary = folder.with_name(f"tmp.{uuid.uuid4().hex}")
        self.error: CheckpointError | None = None
        try:
            self._temporary.mkdir(parents=True)
        except OSError as error:
            self._fail(error)

    def take(self, name: str, part: bytes, problem: str) -> None:
        if problem:
            self.error = CheckpointError(problem)
        if self.error is not None:
            return
        try:
            with (self._temporary / name).open("ab") as file:
                file.write(part)
        except OSError as error:
            self._fail(error)

    def finish(self) -> None:
        try:
            if self.error is None:
                put(self._temporary, self._folder)
        except OSError as error:
            self._fail(error)
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _fail(self, error: OSError) -> None:
        self.error = CheckpointError(f"{self._folder} cannot be written on rank {comm.rank()} ({error.strerror})")
