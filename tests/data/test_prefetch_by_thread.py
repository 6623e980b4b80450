"""A thread that fetches ahead: the same batches, only for data that draws nothing, and it ends with the loop."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from batches import loaders
from torch.utils.data import Dataset, Subset, TensorDataset

from rankwise.data import Loader
from rankwise.errors import ConfigError


class Noted(Dataset[Any]):
    """Records which batches were read, and by which thread."""

    draws_nothing = True

    def __init__(self, samples: int, broken: int = -1, delay_s: float = 0.0) -> None:
        self._samples, self._broken, self._delay_s = samples, broken, delay_s
        self.read: list[list[int]] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        raise AssertionError("it makes whole batches")

    def read_batch(self, indices: Any) -> torch.Tensor:
        assert indices.dtype == np.int64
        time.sleep(self._delay_s)
        if self._broken in indices:
            raise ValueError("no such sample")
        self.threads.add(threading.current_thread().name)
        self.read.append(indices.tolist())
        return torch.from_numpy(indices * 10)


def prefetching() -> list[str]:
    gc.collect()  # a loader of another test
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rankwise-prefetch")]


def test_a_dataset_that_draws_nothing_may_make_whole_batches_of_an_array() -> None:
    dataset = Noted(10)
    (loader,) = loaders(dataset, 1, global_batch_size=4, max_epochs=1, shuffle=False)
    assert [batch.tolist() for step in loader for batch in step] == [[0, 10, 20, 30], [40, 50, 60, 70], [80, 90]]
    assert dataset.threads == {"MainThread"}


def test_a_part_of_such_a_dataset_makes_whole_batches_too() -> None:
    inner = Subset(Noted(20), [19, 3, 5, 7, 1])
    for part, expected in ((inner, [190, 30, 50, 70, 10]), (Subset(inner, [4, 0, 1]), [10, 190, 30])):
        (loader,) = loaders(part, 1, global_batch_size=9, max_epochs=1, shuffle=False)
        assert [batch.tolist() for step in loader for batch in step] == [expected]


@pytest.mark.parametrize("ahead", [1, 4, 100])
@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_are_the_same_and_read_by_another_thread(ahead: int, world_size: int) -> None:
    def batches(**ways: Any) -> tuple[list[Any], Noted]:
        dataset = Noted(101)
        found = []
        for loader in loaders(dataset, world_size, global_batch_size=8, max_epochs=3, **ways):
            found.append([[batch.tolist() for batch in step] for step in loader])
        return found, dataset

    plain, _ = batches()
    ahead_of, dataset = batches(prefetch_factor=ahead)
    assert ahead_of == plain
    assert all(name.startswith("rankwise-prefetch") for name in dataset.threads)
    assert prefetching() == []


def test_no_more_is_read_ahead_than_asked_for() -> None:
    dataset = Noted(100)
    (loader,) = loaders(dataset, 1, global_batch_size=5, max_epochs=1, prefetch_factor=3)
    for taken, _ in enumerate(loader, 1):
        time.sleep(0.01)
        assert len(dataset.read) <= taken + 3
    assert len(dataset.read) == 20


class Stuck(Noted):
    """One batch takes as long as the loop needs for the batch before."""

    def __init__(self, samples: int, at: int) -> None:
        super().__init__(samples)
        self._at, self.goes_on = at, threading.Event()

    def read_batch(self, indices: Any) -> torch.Tensor:
        if self._at in indices:
            self.goes_on.wait()
        return super().read_batch(indices)


@pytest.mark.parametrize("ahead", [1, 4, 50])
@pytest.mark.parametrize("at", [1, 2, 3, 40, 99])
def test_a_batch_that_is_ready_does_not_wait_for_a_slow_one_behind_it(ahead: int, at: int) -> None:
    dataset = Stuck(100, at)
    (loader,) = loaders(dataset, 1, global_batch_size=1, max_epochs=1, prefetch_factor=ahead, shuffle=False)
    taken = []
    for (batch,) in loader:
        taken += batch.tolist()
        if len(taken) == at:
            dataset.goes_on.set()
    assert taken == list(range(0, 1000, 10))


def test_a_loop_that_breaks_off_leaves_no_thread_and_goes_on_where_it_was() -> None:
    (loader,) = loaders(Noted(100, delay_s=0.001), 1, global_batch_size=5, max_epochs=1, prefetch_factor=4, shuffle=False)
    steps = iter(loader)
    assert [next(steps)[0].tolist()[0] for _ in range(3)] == [0, 50, 100]
    steps.close()  # type: ignore[attr-defined]
    assert prefetching() == []
    state = loader.state_dict()
    assert state["position"] == 15
    (again,) = loaders(Noted(100), 1, global_batch_size=5, max_epochs=1, prefetch_factor=4, shuffle=False)
    again.load_state_dict(state)
    assert next(iter(again))[0].tolist()[0] == 150


class Locked(Noted):
    """Reads under a lock, as h5py does."""

    lock = threading.RLock()

    def read_batch(self, indices: Any) -> torch.Tensor:
        with self.lock:
            return super().read_batch(indices)


def test_an_abandoned_loop_may_be_collected_in_a_call_that_holds_the_lock_of_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rankwise.data.prefetch._LAST_READ_S", 0.1)
    dataset = Locked(1000)
    (loader,) = loaders(dataset, 1, global_batch_size=5, max_epochs=1, prefetch_factor=20)
    steps: list[Any] = [iter(loader)]
    next(steps[0])
    steps.append(steps)
    gc.disable()
    try:
        with Locked.lock:
            del steps
            gc.collect()
            assert len(dataset.read) < 200
    finally:
        gc.enable()
    while prefetching():
        time.sleep(0.01)


def test_an_error_comes_with_its_own_step_and_names_its_samples() -> None:
    (loader,) = loaders(Noted(50, broken=27), 1, global_batch_size=5, max_epochs=1, prefetch_factor=4, shuffle=False)
    steps = iter(loader)
    assert [next(steps)[0].tolist()[0] for _ in range(5)] == [0, 50, 100, 150, 200]
    with pytest.raises(ValueError, match="no such sample") as caught:
        next(steps)
    assert caught.value.__notes__ == ["in samples 25, 26, 27, 28, 29 of Noted"]
    assert prefetching() == []


def test_the_random_streams_of_the_training_are_its_own() -> None:
    def drawn(**ways: Any) -> list[float]:
        torch.manual_seed(3)
        (loader,) = loaders(TensorDataset(torch.arange(200.0)), 1, global_batch_size=2, max_epochs=2, **ways)
        return [torch.rand(()).item() for _ in loader]

    assert drawn() == drawn(prefetch_factor=4)


class Draws(Dataset[Any]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


@pytest.mark.parametrize(
    ("dataset", "ways"), [(Draws(), {}), (list(range(9)), {"collate_fn": torch.tensor})], ids=["may draw", "a collate function"]
)
def test_what_may_draw_is_not_read_by_a_thread(dataset: Any, ways: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="prefetch_factor=2 works only with workers; give num_workers, or remove prefetch_factor"
    ):
        Loader(dataset, global_batch_size=2, prefetch_factor=2, **ways)


def test_a_run_that_began_with_streams_of_batches_reads_by_itself() -> None:
    (loader,) = loaders(list(range(40)), 1, global_batch_size=4, max_epochs=1, prefetch_factor=4)
    expected = [step[0].tolist() for step in loader.once()]
    state = {name: value for name, value in loader.state_dict().items() if name != "keyed by sample"}
    loader.load_state_dict(state)
    assert [step[0].tolist() for step in loader] == expected
    assert not loader._fetch.draws_nothing
