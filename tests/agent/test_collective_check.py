"""Compares what the ranks ask of each other."""

from __future__ import annotations

import pytest

from rankwise.agent import collective_notes
from rankwise.agent.collective_check import SLOTS, Comparison, Ledger, Mismatch, Note, Rings


def note(what: str = "all_reduce(sum, float32[4])", site: str = "/home/me/train.py:31", number: int = 1, size: int = 3) -> Note:
    return Note("0", number, size, what, site)


def compared(*notes: Note) -> str | None:
    comparison = Comparison(len(notes))
    for rank, one in enumerate(notes):
        comparison.add(rank, one)
    return comparison.mismatch().summary if comparison.differs else None


def test_the_minority_is_what_differs() -> None:
    odd = note("all_reduce(sum, int32[4])", "/home/me/train.py:29")
    assert compared(note(), odd, note()) == (
        "the ranks do not match in collective 1: rank 1 calls all_reduce(sum, int32[4]) at train.py:29, but "
        "ranks 0, 2 call all_reduce(sum, float32[4]) at train.py:31"
    )
    assert compared(odd, note(), note()) is not None
    assert "rank 0 calls all_reduce(sum, int32[4])" in str(compared(odd, note(), note()))


def test_of_two_that_differ_the_one_that_is_not_rank_0_is_named() -> None:
    comparison = Comparison(2)
    comparison.add(0, note("barrier()", size=2))
    comparison.add(1, note(size=2))
    assert comparison.mismatch().rank == 1


def test_the_same_reduction_from_another_line_is_another_reduction() -> None:
    said = compared(note(), note(site="/home/me/train.py:40"))
    assert said == (
        "the ranks do not match in collective 1: rank 1 calls all_reduce(sum, float32[4]) at train.py:40, but rank 0 calls it "
        "at train.py:31: these are two different calls"
    )


@pytest.mark.parametrize("what", ["barrier()", "broadcast(float32[4], src 0)", "broadcast_object_list(src 0)", "gather(src 0)"])
def test_a_root_or_a_barrier_may_have_a_line_of_its_own(what: str) -> None:
    assert compared(note(what), note(what, site="/home/me/train.py:40")) is None


def test_ranks_may_be_far_ahead_of_each_other() -> None:
    comparison = Comparison(2)
    for number in range(1, 1000):
        comparison.add(0, note(number=number, size=2))
    for number in range(1, 999):
        comparison.add(1, note(number=number, size=2))
    assert not comparison.differs
    comparison.add(1, note("barrier()", number=999, size=2))
    assert comparison.differs


def test_a_group_whose_other_ranks_are_elsewhere_does_not_fill_the_memory() -> None:
    comparison = Comparison(2)
    for number in range(5 * SLOTS):
        comparison.add(0, note(number=number, size=16))
    assert len(comparison._open) <= 2 * SLOTS + 1


def notes_of(rings: Rings, rank: int) -> collective_notes.Notes:
    return collective_notes.Notes(**rings.place(rank))


def after_reading(rings: Rings, ledger: Ledger) -> Mismatch | None:
    ledger.add(rings.read())
    return ledger.look(at_end=True)


def test_what_a_rank_notes_reaches_the_agent() -> None:
    rings, ledger = Rings(ranks=2), Ledger(ranks=2)
    writers = [notes_of(rings, rank) for rank in range(2)]
    for _ in range(3 * SLOTS):
        for writer in writers:
            writer.add("0", 2, "all_reduce(sum, float32[4])", "/home/me/train.py:31")
        assert after_reading(rings, ledger) is None
    writers[0].add("0", 2, "all_reduce(sum, float32[4])", "/home/me/train.py:31")
    writers[1].add("0", 2, "all_reduce(max, float32[4])", "/home/me/train.py:31")
    found = after_reading(rings, ledger)
    assert found is not None
    assert found.summary.startswith(f"the ranks do not match in collective {3 * SLOTS + 1}: rank 1 calls all_reduce(max")
    rings.close()


def test_a_reader_that_was_late_goes_on_with_the_newest() -> None:
    rings, ledger = Rings(ranks=2), Ledger(ranks=2)
    writers = [notes_of(rings, rank) for rank in range(2)]
    for _ in range(3 * SLOTS):
        for writer in writers:
            writer.add("0", 2, "all_reduce(sum, float32[4])", "/home/me/train.py:31")
    assert after_reading(rings, ledger) is None
    writers[0].add("0", 2, "barrier()", "/home/me/train.py:32")
    writers[1].add("0", 2, "broadcast(float32[4], src 1)", "/home/me/train.py:32")
    assert after_reading(rings, ledger) is not None
    rings.close()


@pytest.mark.parametrize("folder", ["folder/" * 60, "caf\udce9/"])
def test_a_path_that_is_long_or_not_utf_8_is_noted_and_keeps_its_end(folder: str) -> None:
    rings, ledger = Rings(ranks=2), Ledger(ranks=2)
    for rank in range(2):
        notes_of(rings, rank).add("0", 2, f"all_reduce(sum, float32[{rank}])", f"/{folder}train.py:31")
    found = after_reading(rings, ledger)
    assert found is not None
    assert "at train.py:31" in found.summary
    rings.close()


def test_a_note_that_cannot_be_read_is_passed_over() -> None:
    rings, ledger = Rings(ranks=2), Ledger(ranks=2)
    for rank in range(2):
        notes_of(rings, rank).add("0", 2, "barrier()", "/home/me/my\tscript.py:31")
        notes_of(rings, rank).add("0", 2, "barrier()", "/home/me/train.py:32")
    assert after_reading(rings, ledger) is None
    rings.close()
