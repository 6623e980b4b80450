"""Memory of batches is reused only when nobody holds it."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rankwise
from rankwise.hdf5.buffers import Buffers

SHAPE, KIND = (100, 1000), np.dtype("float32")


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize(
    "hold",
    [
        lambda out: out,
        lambda out: out[3:5],
        lambda out: torch.from_numpy(out),
        lambda out: torch.from_numpy(out)[1:, ::2].t(),
        lambda out: torch.from_numpy(out).untyped_storage(),
        lambda out: torch.from_numpy(out).numpy(),
        lambda out: memoryview(out),
        lambda out: torch.from_numpy(out).requires_grad_().sin(),
    ],
)
def test_what_anybody_holds_is_not_used_again(hold: Callable[[Any], Any]) -> None:
    buffers = Buffers()
    held = hold(buffers.empty(SHAPE, KIND))
    others = [buffers.empty(SHAPE, KIND) for _ in range(6)]
    first = address(buffers._held[0])
    assert first not in [address(other) for other in others]
    assert len({address(other) for other in others}) == 6
    del held, others
    assert address(buffers.empty(SHAPE, KIND)) == first


def test_what_nobody_holds_is_used_again_for_what_fits() -> None:
    buffers = Buffers()
    addresses = {address(buffers.empty((n, 1000), KIND)) for n in range(100, 120)}
    assert len(addresses) == 1
    assert address(buffers.empty((200, 1000), KIND)) not in addresses
    assert len(buffers._held) == 1
    assert buffers.empty((2, 3), KIND).base is None  # too small to be kept


def test_memory_is_not_16_bytes_behind_a_page_where_copies_of_pages_are_slow() -> None:
    buffers = Buffers()
    held = [buffers.empty((n, 1000), KIND) for n in (100, 500, 3000)]
    assert [address(out) % 64 for out in held] == [0, 0, 0]


def test_no_more_than_four_are_kept() -> None:
    buffers = Buffers()
    many = [buffers.empty(SHAPE, KIND) for _ in range(20)]
    assert len({address(one) for one in many}) == 20
    assert len(buffers._held) == 4


def test_threads_get_memory_of_their_own() -> None:
    buffers, wrong = Buffers(), []

    def use(number: int) -> None:
        for _ in range(300):
            out = buffers.empty(SHAPE, KIND)
            out[...] = number
            wrong.extend([number] * (not bool((out == number).all())))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_process_begins_with_none_though_a_thread_held_the_lock() -> None:
    buffers = Buffers()
    many = [buffers.empty(SHAPE, KIND) for _ in range(3)]
    with buffers._lock:
        pid = os.fork()
        if pid == 0:
            made = buffers.empty(SHAPE, KIND)
            os._exit(len(buffers._held) if made.shape == many[0].shape else 9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_batches_that_are_kept_stay_what_they_were(tmp_path: Path) -> None:
    with rankwise.HDF5Writer(tmp_path / "x.h5") as writer:
        for number in range(300):
            writer.add(x=np.full((30, 40 + number % 2, 10), number, "f4")[:, :40], n=np.full(20 + number % 9, number, "f8"))
    dataset = rankwise.HDF5Dataset(tmp_path / "x.h5")
    kept = list(rankwise.Loader(dataset, global_batch_size=32, max_epochs=2, seed=1))
    again = list(rankwise.Loader(pickle.loads(pickle.dumps(dataset)), global_batch_size=32, max_epochs=2, seed=1))
    for (one,), (other,) in zip(kept, again, strict=True):
        assert torch.equal(one["x"], other["x"])
        assert torch.equal(one["x"][:, 0, 0, 0].double(), one["n"][:, 0])


def test_memory_for_objects_has_no_old_bytes_which_would_be_taken_for_addresses() -> None:
    made = Buffers().empty((20_000,), np.dtype(object))
    made[:] = "text"
    assert made.tolist() == ["text"] * 20_000
