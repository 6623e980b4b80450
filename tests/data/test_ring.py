"""Batches that workers send in shared slots: the same as without, valid as long as they are held, and nothing is left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import all_of, flat, loaders, steps_of
from ranks import on_ranks
from torch.utils.data import Dataset

from rankwise.data import ring


class Rows(Dataset[Any]):
    """Sample n has the value n in all elements."""

    def __init__(self, samples: int, width: int = 10_000) -> None:
        self.samples, self.width = samples, width

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), index)


def batches(dataset: Any, **settings: Any) -> Iterator[Any]:
    (loader,) = loaders(dataset, 1, **{"global_batch_size": 4, "shuffle": False, "num_workers": 2, **settings})
    return (batch for step in loader for batch in step)


def first_column(found: Any) -> list[int]:
    return [sample for batch in found for sample in batch[:, 0].tolist()]


def fallen_back(found: list[torch.Tensor]) -> list[bool]:
    """For each, whether it was sent in the way of torch's own queue: in a file of shared memory."""
    return [batch.is_shared() for batch in found]


def test_batches_that_are_kept_stay_what_they_were() -> None:
    kept = list(batches(Rows(200)))
    assert first_column(kept) == list(range(200))
    assert all((batch == batch[:, :1]).all() for batch in kept)
    assert not any(fallen_back(kept))


def test_a_large_first_batch_needs_no_file_in_dev_shm() -> None:
    kept = list(batches(Rows(8, width=1_000_000), num_workers=1))  # 32 MB: a container of Docker has 64 MB there
    assert first_column(kept) == list(range(8))
    assert not any(fallen_back(kept))


def test_a_part_of_a_batch_keeps_its_memory() -> None:
    kept = [batch[1:3, 5].numpy() for batch in batches(Rows(200))]
    assert np.concatenate(kept).tolist() == [n for n in range(200) if n % 4 in (1, 2)]


def test_the_memory_of_batches_that_nobody_holds_is_used_again() -> None:
    places = {batch.data_ptr() for batch in batches(Rows(200), prefetch_factor=2)}
    assert len(places) <= 2 * 2 + 2  # those requested ahead, and those that the loop holds while the next is made


def test_the_memory_of_many_batches_that_were_held_at_once_goes_back() -> None:
    found = batches(Rows(800), prefetch_factor=2)
    held = [next(found) for _ in range(50)]
    kept_bytes = memory_of_slots()
    assert kept_bytes >= sum(batch.nbytes for batch in held)
    held.clear()
    for _ in range(50):
        next(found)
    assert memory_of_slots() < kept_bytes / 2


def memory_of_slots() -> int:
    """The pages of this process's anonymous files that were written."""
    files = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    ours = [file.stat() for file in files if file.is_file() and "rankwise-batches" in str(file.readlink())]
    return sum({file.st_ino: file.st_blocks * 512 for file in ours}.values())


def test_a_batch_that_is_too_large_comes_as_torch_hands_it_over_and_slots_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_FIRST", 4096)
    found = [(batch[:, 0].tolist(), batch.is_shared()) for batch in batches(Rows(200))]
    assert flat([samples for samples, _ in found]) == list(range(200))
    assert found[0][1]
    assert not any(fell_back for _, fell_back in found[-40:])


def test_without_memory_for_slots_all_batches_come_as_torch_hands_them_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.ftruncate", full)
    found = list(batches(Rows(40)))
    assert first_column(found) == list(range(40))
    assert all(fallen_back(found))


class Odd(Rows):
    def __getitems__(self, indices: list[int]) -> Any:
        first = indices[0]
        return {
            "names": [str(n) * 2000 for n in indices],
            "array": np.arange(first, first + 1000),
            "leaf": torch.full((3,), float(first), requires_grad=first >= 20),
            "weight": torch.nn.Parameter(torch.full((2,), float(first))),
            "slice": slice(first, None),
        }


def test_what_is_no_plain_tensor_comes_too_however_long_it_is() -> None:
    for first, batch in zip(range(0, 40, 4), batches(Odd(40)), strict=True):
        assert batch["names"] == [str(n) * 2000 for n in range(first, first + 4)]
        assert batch["array"].tolist() == list(range(first, first + 1000))
        assert batch["leaf"].tolist() == [first] * 3
        assert batch["leaf"].requires_grad == (first >= 20)
        assert batch["weight"].tolist() == [first] * 2
        assert batch["slice"] == slice(first, None)


def test_a_batch_may_have_more_indices_than_a_message_holds() -> None:
    for given in (range(20_000), [list(range(20_000))]):
        settings = {"global_batch_size": 20_000} if given == range(20_000) else {"global_batch_size": None, "batches": given}
        assert flat(all_of(range(20_000), 1, shuffle=False, num_workers=1, **settings)) == list(range(20_000))


def test_more_batches_may_be_asked_for_ahead_than_a_socket_holds() -> None:
    found = batches(range(500), global_batch_size=1, num_workers=1, prefetch_factor=500)  # each has a file descriptor
    assert [int(batch) for batch in found] == list(range(500))


def test_a_loop_that_breaks_off_ends_workers_that_have_much_to_send() -> None:
    found = batches(range(500), global_batch_size=1, num_workers=1, prefetch_factor=500)  # each has a file descriptor
    assert int(next(found)) == 0
    del found
    assert multiprocessing.active_children() == []


def test_an_epoch_leaves_no_open_file_even_before_the_garbage_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            assert len(list(batches(range(400), global_batch_size=1, num_workers=1, prefetch_factor=400))) == 400
        assert len(os.listdir("/proc/self/fd")) - before < 50
    finally:
        gc.enable()


class Unsendable(Rows):
    def __init__(self, error: str) -> None:
        super().__init__(8)
        self._error = error

    def __getitems__(self, indices: list[int]) -> Any:
        return (torch.ones(2), self) if 4 in indices else torch.ones(2)

    def __reduce__(self) -> Any:
        raise RuntimeError(self._error)


@pytest.mark.parametrize("has_slots", [True, False])
def test_a_batch_that_cannot_be_sent_is_an_error_here(has_slots: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_slots:
        monkeypatch.setattr(ring.Ring, "_free", lambda self: None)
    error = "unable to write to file </torch_7>: No space left on device (28)"
    found = batches(Unsendable(error))
    assert next(found).tolist() == [1, 1]
    with pytest.raises(RuntimeError, match=r"unable to write to file .*: No space left on device \(28\)") as caught:
        next(found)
    assert "raised in a loader worker:\nTraceback" in caught.value.__notes__[0]


def test_the_thread_that_pins_memory_takes_batches_out_of_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        threads.add(threading.current_thread())
        return tensor.clone()

    monkeypatch.setattr("torch.Tensor.pin_memory", pinned)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 0)
    monkeypatch.setattr("torch.accelerator.set_device_index", lambda index: None)
    kept = list(batches(Rows(100), pin_memory=True, prefetch_factor=20))
    assert first_column(kept) == list(range(100))
    assert not any(map(torch.Tensor.is_shared, kept))
    assert len(threads) == 1
    assert threading.main_thread() not in threads


def test_no_descriptor_is_left_when_a_loader_is_done() -> None:
    (counts,) = on_ranks(1, descriptors)
    assert counts[0] == counts[1]


def descriptors() -> list[int]:
    (loader,) = loaders(Rows(40), 1, num_workers=2, max_epochs=1)
    steps_of(loader.once(), 1)
    counts = []
    for _ in range(2):
        for batch in batches(Rows(40)):
            del batch
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts
