"""Workers that make batches ahead: their messages, their number, and what remains of them between two loops."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest
import torch
from batches import loaders, steps_of
from test_fetch import Noise, samples_of
from test_stream import ByEpoch
from torch.utils.data import Dataset

from rankwise.data import Loader
from rankwise.data.prefetch import Workers, _Groups, fetched
from rankwise.errors import ConfigError

# --- several small batches in one message


class Squares:
    """Fetches fast."""

    draws_nothing = True

    def __init__(self, fails_at: int = -1) -> None:
        self._fails_at = fails_at

    def __call__(self, request: int, empty: Any = None) -> Any:
        if request == self._fails_at:
            raise KeyError(request)
        return torch.full((4,), request**2)

    here = __call__


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 7, 200])
def test_workers_return_all_batches_in_order_however_many_are_in_a_message(workers: int, count: int) -> None:
    batches = fetched(iter(range(count)), Squares(), Workers(workers))
    assert [batch.tolist() for batch in batches] == [[k**2] * 4 for k in range(count)]


@pytest.mark.parametrize("fails_at", [0, 1, 57, 199])
def test_the_batches_before_an_error_arrive_first(fails_at: int) -> None:
    batches, seen = fetched(iter(range(200)), Squares(fails_at), Workers(2)), []
    with pytest.raises(KeyError, match=str(fails_at)):
        seen.extend(int(batch[0]) for batch in batches)
    assert seen == [k**2 for k in range(fails_at)]


def test_only_batches_that_are_small_and_made_fast_share_a_message() -> None:
    groups = _Groups(iter(range(100)))
    each = iter(groups)
    assert next(each) == (0,)
    assert groups.answered((["a"], 1e-5), 100) == ["a"]
    assert next(each) == tuple(range(1, 9))
    groups.answered((list("abcdefgh"), 8 * 1e-3), 100)  # 1 ms each
    assert next(each) == (9, 10)
    groups.answered((["a"], 1e-5), 400_000)
    assert next(each) == (11,)
    groups.answered((["a"], 0.0), 0)
    assert len(next(each)) == 8
    groups.answered((["a"], 5.0), 100)
    assert len(next(each)) == 1
    alone = _Groups(iter(range(100)), most=1)  # a timeout is for one batch
    alone.answered((["a"], 0.0), 0)
    assert next(iter(alone)) == (0,)


def test_a_batch_is_free_when_the_loop_drops_it_though_others_of_its_message_are_held() -> None:
    import weakref

    batches = fetched(iter(range(100)), Squares(), Workers(1))
    for _ in range(40):
        next(batches)
    dropped = weakref.ref(next(batches))
    assert dropped() is None


# --- more workers than cores


@pytest.mark.parametrize(
    ("workers", "ranks", "mine", "all_cores", "said"),
    [
        (0, 8, 2, 2, None),
        (2, 1, 2, 2, None),
        (4, 4, 16, 16, None),
        (5, 4, 16, 16, "num_workers=5 on each of 4 ranks: 20 workers share 16 cores, .*; try num_workers=3$"),
        (3, 2, 2, 2, "num_workers=3 on each of 2 ranks: 6 workers share 2 cores, .*; try num_workers=0$"),
        (4, 4, 4, 16, None),  # the launcher has given each rank its own cores
        (5, 4, 4, 16, "num_workers=5: 5 workers share 4 cores, .*; try num_workers=3$"),
    ],
)
def test_more_workers_than_cores_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, workers: int, ranks: int, mine: int, all_cores: int, said: str | None
) -> None:
    monkeypatch.setattr("rankwise.host.machine.cores", lambda: mine)
    monkeypatch.setattr("os.cpu_count", lambda: all_cores)
    advice = Workers(workers).advice(ranks)
    assert (advice is None) == (said is None)
    assert said is None or re.match(said, advice or "")


def test_a_loader_says_so_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("rankwise.host.machine.cores", lambda: 1)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr("rankwise.dist.log._warned", set())
    loader = Loader(list(range(8)), global_batch_size=4, num_workers=2, max_epochs=3)
    assert len(list(loader)) == 6
    assert capsys.readouterr().out.count("warning: num_workers=2: 2 workers share 1 core, and slow") == 1


# --- persistent workers


class Pids(Dataset[Any]):
    """Tells which process reads it."""

    def __init__(self, samples: int = 12, broken: int = -1) -> None:
        self._samples, self.broken = samples, broken

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, int]:
        if index == self.broken:
            raise KeyError(index)
        time.sleep(0.002)  # so long that the batches are not in one message, which one worker would get
        return {"x": index, "by": os.getpid()}


def seen(loader: Loader) -> tuple[list[int], set[int]]:
    """(the samples, the processes that read them), of one pass."""
    batches = [batch for step in loader.once() for batch in step]
    return [n for batch in batches for n in batch["x"].tolist()], {n for batch in batches for n in batch["by"].tolist()}


def persistent(dataset: Any, workers: int = 2, **settings: Any) -> Loader:
    [loader] = loaders(dataset, 1, num_workers=workers, persistent_workers=True, shuffle=False, **settings)
    return loader


def test_persistent_workers_read_all_epochs_and_others_one() -> None:
    for keep, count in ((True, 2), (False, 6)):
        [loader] = loaders(Pids(), 1, num_workers=2, persistent_workers=keep, global_batch_size=3, max_epochs=3)
        batches = [batch for step in loader for batch in step]
        assert len({n for batch in batches for n in batch["by"].tolist()}) == count
        assert sorted(n for batch in batches for n in batch["x"].tolist()) == sorted([*range(12)] * 3)


@pytest.mark.parametrize("workers", [1, 2])
def test_persistent_workers_read_what_others_read(workers: int) -> None:
    expected = samples_of(Noise(13), 1, max_epochs=3)
    assert samples_of(Noise(13), 1, max_epochs=3, num_workers=workers, persistent_workers=True) == expected


def test_the_same_workers_read_each_pass_over_an_evaluations_data() -> None:
    loader = persistent(Pids())
    first = seen(loader.of_all())
    assert first == seen(loader.of_all()) == seen(loader)
    assert first[0] == [*range(12)]
    assert os.getpid() not in first[1]


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_loop_that_ended_early_leaves_nothing_to_the_next(taken: int) -> None:
    loader = persistent(Pids(40), global_batch_size=4, max_epochs=None)
    for left in range(5):
        for _ in zip(range(taken), loader, strict=False):
            pass
        assert seen(loader)[0] == [*range(40)], left
    whole = [n for step in steps_of(loader, 20) for batch in step for n in batch]
    assert len(whole) == 80
    assert sorted(whole) == sorted([*range(40)] * 2)


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("taken", [1, 3, 100])
def test_so_it_is_if_a_thread_pins_the_memory_of_batches(
    monkeypatch: pytest.MonkeyPatch, taken: int, persistent_workers: bool
) -> None:
    pinning(monkeypatch)
    settings = {"num_workers": 2, "persistent_workers": persistent_workers, "pin_memory": True, "shuffle": False}
    [loader] = loaders(Pids(40), 1, global_batch_size=4, max_epochs=None, **settings)
    for _ in range(3):
        for _ in zip(range(taken), loader, strict=False):
            pass
        assert seen(loader)[0] == [*range(40)]
    assert "rankwise-prefetch" not in {thread.name for thread in threading.enumerate()}


def pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were an accelerator: its pinned memory is other memory."""
    monkeypatch.setattr("torch.Tensor.pin_memory", torch.Tensor.clone)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 0)
    monkeypatch.setattr("torch.accelerator.set_device_index", lambda index: None)


@pytest.mark.parametrize("workers", [0, 2])
def test_only_the_device_of_a_thread_that_pins_is_set(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    pinning(monkeypatch)
    devices = []
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 3)
    monkeypatch.setattr("torch.accelerator.set_device_index", lambda index: devices.append((index, threading.get_ident())))
    [loader] = loaders(list(range(12)), 1, num_workers=workers, pin_memory=True)
    assert len(list(loader)) == 3
    assert {index for index, _ in devices} == ({3} if workers else set())
    assert threading.get_ident() not in {thread for _, thread in devices}


class Pinnable:
    """A batch that knows how it is pinned, as torch's DataLoader allows."""

    def __init__(self, samples: list[int]) -> None:
        self.samples, self.is_pinned = samples, False

    def pin_memory(self) -> Pinnable:
        self.is_pinned = True
        return self


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_may_know_itself_how_it_is_pinned(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    pinning(monkeypatch)
    [loader] = loaders(range(12), 1, num_workers=workers, collate_fn=Pinnable, pin_memory=True, shuffle=False)
    found = [batch for step in loader for batch in step]
    assert [n for batch in found for n in batch.samples] == [*range(12)]
    assert all(batch.is_pinned for batch in found)


class NoSuchFileError(Exception):
    pass


def opens_nothing(worker: int) -> None:
    raise NoSuchFileError(f"of worker {worker}")


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_of_the_function_that_begins_a_worker_arrives_with_its_type(workers: int) -> None:
    [loader] = loaders(Pids(), 1, num_workers=workers, worker_init_fn=opens_nothing)
    with pytest.raises(NoSuchFileError, match="of worker 0") as caught:
        next(iter(loader))
    assert "raised in a loader worker:\nTraceback" in caught.value.__notes__[0]
    assert "in opens_nothing" in caught.value.__notes__[0]


def test_two_loops_at_the_same_time_do_not_share_workers() -> None:
    loader = persistent(Pids(40), global_batch_size=4)
    outer: list[int] = []
    workers: set[int] = set()
    for number, step in enumerate(loader):
        outer += [n for batch in step for n in batch["x"].tolist()]
        workers |= {n for batch in step for n in batch["by"].tolist()}
        if number % 3 == 0:
            within, others = seen(loader)
            assert within == [*range(40)]
            assert not workers & others
    assert outer == [*range(40)]


def test_after_an_error_of_the_dataset_the_next_loop_works() -> None:
    dataset = Pids(broken=7)
    loader = persistent(dataset, global_batch_size=2)
    for _ in range(2):
        with pytest.raises(KeyError, match="7"):
            seen(loader)
    dataset.broken = -1
    assert seen(loader)[0] == [*range(12)]


def test_persistent_workers_read_a_stream_in_each_epoch() -> None:
    whole = steps_of(loaders(ByEpoch(13), 1, max_epochs=3)[0])
    for workers in (1, 2):
        assert steps_of(loaders(ByEpoch(13), 1, max_epochs=3, num_workers=workers, persistent_workers=True)[0]) == whole


def test_a_loaded_state_needs_no_new_loop_of_persistent_workers() -> None:
    loader = persistent(Pids(40), global_batch_size=4, max_epochs=2)
    plain = loaders(Pids(40), 1, global_batch_size=4, max_epochs=2, shuffle=False)[0]
    state = {}
    for one in (loader, plain):
        assert len(steps_of(one, 3)) == 3
        state = one.state_dict()
        assert len(steps_of(one, 9)) == 9
    for one in (loader, plain):
        one.load_state_dict(state)
    assert steps_of(loader) == steps_of(plain)


def read_while_killing(pid: int, loader: Loader) -> None:
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        seen(loader)


def test_if_a_worker_is_killed_the_loop_fails_and_the_next_has_others() -> None:
    loader = persistent(Pids())
    before = seen(loader)[1]
    with pytest.raises(RuntimeError, match=r"killed|exited unexpectedly"):
        read_while_killing(min(before), loader)
    samples, after = seen(loader)
    assert samples == [*range(12)]
    assert not before & after


def test_persistent_workers_without_workers_are_an_error() -> None:
    with pytest.raises(ConfigError, match="persistent_workers=True works only with workers; give num_workers, or remove"):
        Loader(Pids(), batch_size=2, persistent_workers=True)


_SCRIPT = """
import os, rankwise, torch
class Pids(torch.utils.data.Dataset):
    def __len__(self): return 12
    def __getitem__(self, index): return os.getpid()
held = [rankwise.Loader(Pids(), batch_size=2, num_workers=2, persistent_workers=True)]
print(*{pid for batch in held[0].once() for pid in batch[0].tolist()})
held.append(held)  # freed by nobody but the interpreter's end
"""


def test_persistent_workers_end_with_the_script() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not any(map(psutil.pid_exists, map(int, done.stdout.split())))


def test_a_forked_process_starts_its_own_workers() -> None:
    loader = persistent(Pids())
    expected = seen(loader)
    if (pid := os.fork()) == 0:
        samples, pids = seen(loader)
        os._exit(0 if samples == expected[0] and not pids & expected[1] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert seen(loader) == expected
