"""Workers that make batches ahead: their messages, their number."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from rankwise.data import Loader
from rankwise.data.prefetch import Workers, _Groups, fetched

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
