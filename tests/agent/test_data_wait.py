"""How long a rank waits for torch's DataLoader, as its wrappers measure it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launched import launch, wait_for
from torch.utils.data import DataLoader, Dataset, IterableDataset, dataloader

from rankwise.agent import data_wait
from rankwise.data import Loader
from rankwise.host import wait_cost
from rankwise.ipc.shared_page import Page, Row

__all__ = ["launch"]  # a fixture

SLEEP_S = 0.02


class Slow(Dataset):
    def __init__(self, samples: int = 4, sleep_s: float = SLEEP_S) -> None:
        self.samples, self.sleep_s = samples, sleep_s

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_s)
        return torch.tensor(index)


class OfLoader(Dataset):
    """A dataset that reads another DataLoader."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return list(DataLoader(Slow(3)))


class SlowStream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        for i in range(3):
            time.sleep(SLEEP_S)
            yield i


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Row:
    """The row of a page into which this process writes its waits, until the test ends."""
    for owner, name in ((DataLoader, "__iter__"), (dataloader._BaseDataLoaderIter, "__next__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored after the test
    page = Page.create(1)
    row = page.row(0)
    data_wait.DataWait(page.path, row.data_wait_offset).prepare()
    monkeypatch.setattr(sys.modules[__name__], "_page", page, raising=False)  # so that it lives as long as the test
    return row


def seconds_of(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def test_the_waits_of_the_loop_are_counted_and_its_other_work_is_not(row: Row) -> None:
    for _ in DataLoader(Slow()):
        time.sleep(5 * SLEEP_S)
    assert 4 * SLEEP_S <= row.data_wait_s < 4 * SLEEP_S + 3 * 5 * SLEEP_S
    assert (row.batches, row.loader_workers) == (4, 0)


def test_the_start_of_workers_is_a_wait_and_workers_themselves_report_nothing(row: Row) -> None:
    elapsed_s = seconds_of(lambda: list(DataLoader(Slow(), num_workers=2)))
    assert 2 * SLEEP_S <= row.data_wait_s <= elapsed_s
    assert row.data_wait_s > 0.5 * elapsed_s
    assert 0 < row.epoch_wait_s < row.data_wait_s - 2 * SLEEP_S
    assert (row.batches, row.loader_workers) == (4, 2)
    list(DataLoader(OfLoader(), num_workers=1, batch_size=None))
    assert (row.batches, row.loader_workers) == (4 + 2, 1)


def test_the_start_and_end_of_an_epoch_are_counted_apart(row: Row) -> None:
    keeps = DataLoader(Slow(), num_workers=2, persistent_workers=True)
    list(keeps)
    once_s = row.epoch_wait_s
    for _ in range(5):
        list(keeps)
    kept_s, before = (row.epoch_wait_s - once_s) / 5, row.epoch_wait_s
    for _ in range(5):
        list(DataLoader(Slow(), num_workers=2))
    assert (row.epoch_wait_s - before) / 5 > 1.5 * kept_s


def test_a_loader_inside_a_dataset_is_not_counted_twice(row: Row) -> None:
    elapsed_s = seconds_of(lambda: list(DataLoader(OfLoader(), batch_size=None)))
    assert 6 * SLEEP_S <= row.data_wait_s <= elapsed_s
    assert row.batches == 2


def test_streams_and_loaders_that_are_used_again_are_counted(row: Row) -> None:
    loader = DataLoader(SlowStream())
    assert [int(x) for _ in range(2) for x in loader] == [0, 1, 2, 0, 1, 2]
    assert row.data_wait_s >= 6 * SLEEP_S
    assert row.batches == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_the_waits_of_our_loader_are_counted_once_with_the_start_of_its_workers(
    row: Row, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr("rankwise.data.waits.row_for_waits", lambda world: row)
    loader = Loader(Slow(8), global_batch_size=2, max_epochs=1, num_workers=workers)
    elapsed_s = 0.0
    batches = iter(loader)
    for _ in range(4):
        elapsed_s += seconds_of(lambda: next(batches))
        time.sleep(2 * SLEEP_S)
    assert 2 * SLEEP_S <= row.data_wait_s <= elapsed_s
    assert row.data_wait_s > 0.5 * elapsed_s
    assert (row.epoch_wait_s > 0) == (workers > 0)
    assert (row.batches, row.loader_workers) == (4, workers)


def test_a_loader_inside_the_dataset_of_our_loader_is_not_counted_twice(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.data.waits.row_for_waits", lambda world: row)
    elapsed_s = seconds_of(lambda: list(Loader(OfLoader(), global_batch_size=1, max_epochs=1)))
    assert 6 * SLEEP_S <= row.data_wait_s <= elapsed_s


def test_while_the_gpu_has_work_a_wait_for_our_loader_costs_nothing(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.data.waits.row_for_waits", lambda world: row)
    gpu = SimpleNamespace(is_initialized=lambda: True, current_stream=lambda: SimpleNamespace(query=lambda: False))
    monkeypatch.setitem(sys.modules, "torch.cuda", gpu)
    batches = iter(Loader(Slow(4), global_batch_size=1, max_epochs=1, num_workers=1))
    next(batches)
    before = row.data_wait_s
    assert before >= SLEEP_S
    assert len(list(batches)) == 3
    assert row.data_wait_s == before


def test_another_thread_that_reads_ahead_does_not_make_the_loop_wait(row: Row) -> None:
    thread = threading.Thread(target=lambda: list(DataLoader(Slow())))
    thread.start()
    thread.join()
    assert (row.data_wait_s, row.batches) == (0, 0)


def test_a_wait_that_raises_is_counted_and_the_next_one_too(row: Row) -> None:
    class Fails(Slow):
        def __getitem__(self, index: int) -> torch.Tensor:
            super().__getitem__(index)
            raise KeyError(index)

    for times in (1, 2):
        with pytest.raises(KeyError):
            list(DataLoader(Fails()))
        assert row.data_wait_s >= times * SLEEP_S


def test_a_process_that_the_script_forks_reports_nothing(row: Row) -> None:
    pid = os.fork()
    if pid == 0:
        list(DataLoader(Slow(1)))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert row.batches == 0


@pytest.mark.parametrize(
    ("busy_before", "busy_after", "counted"), [(False, False, 1.0), (True, False, 0.5), (True, True, 0.0)],
    ids=["the GPU was idle", "the GPU became idle", "the GPU still had work"],
)  # fmt: skip
def test_on_a_gpu_only_what_it_had_no_work_for_is_counted(
    row: Row, monkeypatch: pytest.MonkeyPatch, busy_before: bool, busy_after: bool, counted: float
) -> None:
    asked = []

    def query() -> bool:
        asked.append(1)
        return not (busy_before if len(asked) % 2 else busy_after)

    gpu = SimpleNamespace(is_initialized=lambda: True, current_stream=lambda: SimpleNamespace(query=query))
    monkeypatch.setitem(sys.modules, "torch.cuda", gpu)
    batches = iter(DataLoader(Slow(5, sleep_s=0.05)))
    monkeypatch.setattr(wait_cost, "_MAY_BE_HIDDEN_NS", 10**15)
    next(batches)
    assert not asked  # the last wait was short, so the GPU is not asked
    monkeypatch.setattr(wait_cost, "_MAY_BE_HIDDEN_NS", 0)
    before = row.data_wait_s
    elapsed_s = seconds_of(lambda: [next(batches) for _ in range(3)])
    assert len(asked) == 6
    assert counted * 0.15 <= row.data_wait_s - before <= counted * elapsed_s


def test_a_gpu_with_an_error_of_an_earlier_kernel_leaves_the_error_to_the_script(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    def query() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    gpu = SimpleNamespace(is_initialized=lambda: True, current_stream=lambda: SimpleNamespace(query=query))
    monkeypatch.setitem(sys.modules, "torch.cuda", gpu)
    assert len(list(DataLoader(Slow()))) == 4
    assert row.data_wait_s >= 4 * SLEEP_S


SCRIPT = """
import pathlib, time
import torch
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        time.sleep(0.03)
        return index
READ
pathlib.Path("read").touch()
while not pathlib.Path("end").exists():
    time.sleep(0.01)
"""


TORCHS = "list(torch.utils.data.DataLoader(Slow(), batch_size=2))"
OURS = "import rankwise\nlist(rankwise.Loader(Slow(), global_batch_size=2, max_epochs=1))"
BY_WORKERS = OURS.replace("max_epochs", "num_workers=1, max_epochs")
TRAINED = """
import rankwise
model = torch.nn.Linear(1, 1)
def step(model, batch):
    return model(batch[:, None].float()).sum(), len(batch)
rankwise.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), step, Slow(), batch_size=2, max_epochs=1).fit()
"""


@pytest.mark.parametrize(
    ("read", "method"),
    [(TORCHS, "fork"), (TORCHS, "spawn"), (OURS, "fork"), (BY_WORKERS, "fork")],
    ids=["torch's", "torch's, spawned", "ours", "ours, by a worker"],
)
@pytest.mark.one_in(4)
def test_the_agent_sees_the_waits_of_any_script(launch, tmp_path: Path, read: str, method: str) -> None:
    run = launch(SCRIPT.replace("READ", read), options=("--nproc", "1", "--start-method", method))
    wait_for((tmp_path / "read").exists, "the data", run.output)
    row = Page.open(run.run.attempts()[-1].parts[0].page).row(0)
    assert row.batches == 3
    assert row.data_wait_s >= 6 * 0.03
    assert not row.explains
    (tmp_path / "end").touch()
    assert run.wait() == 0


def test_a_trainer_reports_its_waits_itself(launch, tmp_path: Path) -> None:
    run = launch(SCRIPT.replace("READ", TRAINED), options=("--nproc", "1"))
    wait_for((tmp_path / "read").exists, "the data", run.output)
    row = Page.open(run.run.attempts()[-1].parts[0].page).row(0)
    assert row.explains
    assert row.batches == 0
    (tmp_path / "end").touch()
    assert run.wait() == 0


FAILS = """
import torch
class Fails(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        raise KeyError("sample 0")
list(torch.utils.data.DataLoader(Fails()))
"""


def test_the_traceback_of_a_dataset_has_none_of_our_frames(launch) -> None:
    run = launch(FAILS, options=("--nproc", "1"))
    assert run.wait() == 1
    assert "line 8, in <module>\n    list(torch.utils.data.DataLoader(Fails()))\n" in run.output()
    assert "KeyError: 'sample 0' (script.py:7), on " in run.output()
    assert "in rankwise" not in run.output()
    assert "data_wait" not in run.output()


@pytest.mark.gpu
def test_a_wait_during_which_the_gpu_has_work_costs_nothing(row: Row) -> None:
    torch.zeros(1, device="cuda")
    batches = iter(DataLoader(Slow(5, sleep_s=0.05)))
    next(batches)
    before = row.data_wait_s
    assert before >= 0.05
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    next(batches)
    assert row.data_wait_s == before
    torch.cuda.synchronize()
    next(batches)
    assert row.data_wait_s >= before + 0.05
