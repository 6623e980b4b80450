"""HDF5 files at a URL, read directly or copied to this machine once: the same batches as from local files."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from file_server import FileServer, serving
from fsspec.implementations.http import HTTPFileSystem
from h5py._objects import phil
from launched import wait_for
from ranks import on_ranks
from torch.utils.data import DataLoader

import rankwise
from rankwise.errors import DataError
from rankwise.files import remote
from rankwise.hdf5 import HDF5Dataset, HDF5Writer, remote_file

N = 150


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    """Three files of samples of different lengths, and a compressed file."""
    folder = tmp_path / "there"
    folder.mkdir()
    for first in range(0, N, 50):
        with HDF5Writer(folder / f"train-{first:03}.h5", variable=["x"]) as writer:
            for number in range(first, first + 50):
                writer.add(x=np.full((number % 13, 40), number, "f4"), number=number, tag=f"sample {number}")
    with h5py.File(folder / "gzip.h5", "w") as file:
        file.create_dataset("x", data=np.arange(200_000.0).reshape(1000, 200), chunks=(7, 200), compression="gzip")
    with serving(folder) as found:
        yield found


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(one[k], other[k]) if isinstance(one[k], torch.Tensor) else one[k] == other[k] for k in other)


@pytest.mark.parametrize("cached", [False, True])
def test_batches_are_those_of_the_local_files(tmp_path: Path, server: FileServer, cached: bool) -> None:
    where: Any = {"cache": tmp_path / "here"} if cached else {}
    local = HDF5Dataset(server.folder / "train-*.h5")
    there = HDF5Dataset(server.url("train-*.h5"), **where)
    chance = np.random.default_rng(0)
    for _ in range(5):
        some = chance.permutation(N)[:20]
        assert same(there[some], local[some])
    assert same(there[-1], local[-1])
    assert there.verify() == local.verify() > 0
    if not cached:
        [mine, theirs] = [HDF5Dataset(path)[[999, 0]] for path in (server.url("gzip.h5"), server.folder / "gzip.h5")]
        assert same(mine, theirs)


@pytest.mark.parametrize("stored", [{}, {"chunks": (3, 7, 40)}, {"chunks": (3, 2, 9), "compression": "gzip"}])
def test_a_file_whose_samples_happen_to_be_of_one_length_belongs_to_others(server: FileServer, stored: dict[str, Any]) -> None:
    with h5py.File(server.folder / "train-999.h5", "w") as file:
        rows = np.arange(20 * 7)[:, None] + np.zeros((1, 40))
        file.create_dataset("x", data=rows.reshape(20, 7, 40).astype("f4"), **stored)
    for path in (server.url("train-*.h5"), server.folder / "train-*.h5"):
        dataset = HDF5Dataset(path, fields="x")
        assert len(dataset) == N + 20
        batch = dataset[[155, 3, 150, 169]]
        assert batch[0, :, 0].tolist() == [*range(35, 42)]
        assert batch[1, :, 39].tolist() == [3] * 3 + [0] * 4
        assert [batch[k, 0, 5].item() for k in (2, 3)] == [0, 133]


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.one_in(2)
def test_workers_read_it_too_forked_and_spawned(context: str, server: FileServer) -> None:
    dataset = HDF5Dataset(server.url("train-*.h5"), fields=["number", "x"])
    dataset[3]
    loader = DataLoader(dataset, 50, num_workers=2, collate_fn=dataset.collate, multiprocessing_context=context)
    assert [number.tolist() for number, _ in loader] == [list(range(at, at + 50)) for at in range(0, N, 50)]


def epoch(folder: str, port: int) -> list[int]:
    dataset = HDF5Dataset(f"http://127.0.0.1:{port}/train-*.h5", cache=folder)
    loader = rankwise.Loader(dataset, global_batch_size=20, max_epochs=1)
    return [int(k) for step in loader for batch in step for k in batch["number"]]


def test_four_ranks_copy_each_file_once_and_read_each_sample_once(tmp_path: Path, server: FileServer) -> None:
    found = on_ranks(4, epoch, str(tmp_path / "here"), server.server_address[1])
    assert sorted(k for each in found for k in each) == list(range(N))
    for path in server.folder.glob("train-*.h5"):
        assert path.stat().st_size <= server.sent[path.name] < 1.5 * path.stat().st_size + (1 << 18)


def test_a_cache_that_cannot_be_used_is_a_warning_and_the_files_are_read_there(
    tmp_path: Path, server: FileServer, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").touch()
    dataset = HDF5Dataset(server.url("train-*.h5"), cache=tmp_path / "here")
    assert dataset[[7, 149]]["number"].tolist() == [7, 149]
    [line] = capfd.readouterr().out.splitlines()
    assert line.startswith(
        f"warning: cache='{tmp_path / 'here'}': Not a directory; 3 files of 3 are read without a copy: http://"
    )


def test_an_error_of_a_copy_names_the_file_it_is_of(tmp_path: Path, server: FileServer) -> None:
    os.truncate(server.folder / "train-050.h5", 9000)
    for where in ({}, {"cache": tmp_path / "here"}):
        with pytest.raises(DataError, match=r"^http://127.0.0.1:\d+/train-050.h5 is truncated; copy it or create it again"):
            HDF5Dataset(server.url("train-*.h5"), **where)  # type: ignore[arg-type]


def test_of_a_corrupted_copy_its_own_path_is_reported(tmp_path: Path) -> None:
    with HDF5Writer(tmp_path / "x.h5") as writer:
        writer.add(x=np.zeros(1000))
    dataset = HDF5Dataset(tmp_path / "x.h5", cache=tmp_path / "here")
    [copy] = (tmp_path / "here").glob("*/x-*.h5")
    content = copy.read_bytes()
    copy.write_bytes(content[:5000] + b"?" + content[5001:])
    with pytest.raises(DataError) as caught:
        dataset.verify()
    assert str(caught.value).startswith(f"{copy} is corrupted: bytes ")
    assert str(caught.value).endswith(f"this is the copy of {tmp_path / 'x.h5'}: delete it, and the next run makes another")


def test_a_read_that_stalls_is_an_error_that_names_the_file(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = HDF5Dataset(server.url("gzip.h5"))
    monkeypatch.setattr(remote, "STALLED_S", 0.5)  # not before: a loaded machine may take longer to open the file
    server.stalls_after = sum(server.sent.values())
    with pytest.raises(DataError, match=r"^http://127.0.0.1:\d+/gzip.h5 has stalled"):
        dataset[np.arange(1000)]


def test_no_garbage_is_collected_while_h5py_reads_for_it_would_need_h5pys_lock(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage that holds a file of h5py is collected in any thread: also in one that fetches, and between two fetches."""
    cycles: list[list[Any]] = [[h5py.File(server.folder / "gzip.h5")] for _ in range(20)]
    for cycle in cycles:
        cycle.append(cycle)
    piece, readinto = remote.RemoteFile._piece, remote.RemoteFile.readinto
    collected, between = [], []

    def a_piece_with_a_collection(file: remote.RemoteFile, at: int, wanted: int) -> bytes:
        if wanted:  # otherwise it is opened, without h5py
            del cycles[-1:]
            if gc.isenabled():
                collected.append(gc.collect())
        return piece(file, at, wanted)

    def read(file: remote.RemoteFile, buffer: Any) -> int:
        size = readinto(file, buffer)
        between.append(gc.isenabled())
        return size

    monkeypatch.setattr(remote.RemoteFile, "_piece", a_piece_with_a_collection)
    monkeypatch.setattr(remote.RemoteFile, "readinto", read)
    monkeypatch.setattr(remote, "STALLED_S", 10.0)
    assert len(HDF5Dataset(server.url("gzip.h5"))[[0, 999]]["x"]) == 2
    assert (collected, set(between)) == ([], {False})
    assert len(cycles) < 20
    wait_for(gc.isenabled, "the collector")
    cycles.clear()
    gc.collect()


def test_a_worker_that_is_forked_while_h5py_reads_collects_its_garbage() -> None:
    with phil:  # as in a read: the thread that turns the collector on again waits
        remote_file._collect_nothing_until_free(phil)
        assert not gc.isenabled()
        if (worker := os.fork()) == 0:
            os._exit(gc.isenabled())
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 1
    wait_for(gc.isenabled, "the collector")


def test_a_forked_worker_closes_no_connection_of_its_parent(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec would wait a second for each, because the thread that could close them is not in the worker."""
    closed: list[Any] = []
    here, close = os.getpid(), HTTPFileSystem.close_session

    def closes(loop: Any, session: Any) -> None:
        closed.append(session)
        if os.getpid() == here:
            close(loop, session)

    monkeypatch.setattr(HTTPFileSystem, "close_session", staticmethod(closes))
    dataset = [HDF5Dataset(server.url("gzip.h5"))]
    dataset[0][3]
    gc.collect()
    closed.clear()
    if (worker := os.fork()) == 0:
        dataset.clear()
        gc.collect()
        os._exit(len(closed))
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0
    dataset.clear()
    gc.collect()
    assert len(closed) > 0  # it does so here


def test_a_server_without_parts_of_files_needs_a_cache(tmp_path: Path, server: FileServer) -> None:
    server.parts = False
    with pytest.raises(DataError, match="cannot send a part of the file; give cache="):
        HDF5Dataset(server.url("gzip.h5"))
    assert len(HDF5Dataset(server.url("gzip.h5"), cache=tmp_path / "here")) == 1000


@pytest.mark.stress
def test_a_process_may_end_with_a_remote_file_open(server: FileServer) -> None:
    script = "import sys, rankwise; dataset = rankwise.HDF5Dataset(sys.argv[1]); print(dataset[1]['number'])"
    done = subprocess.run(
        [sys.executable, "-c", script, server.url("train-000.h5")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "tensor(1)\n", "")


def test_no_descriptor_of_a_copy_is_left_when_the_dataset_is_gone(tmp_path: Path, server: FileServer) -> None:
    def open_here() -> list[str]:
        files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return [path for path in files if path.startswith(str(tmp_path / "here"))]

    dataset = HDF5Dataset(server.url("train-*.h5"), cache=tmp_path / "here", fields="number")
    dataset[[1, 100]]
    assert len(open_here()) >= 3
    del dataset
    gc.collect()
    assert open_here() == []
