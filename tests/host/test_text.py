"""How numbers, times, paths and lists are printed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rankwise.host.text import clock, count, folded, in_lines, listed, numbered, rate, rounded, seconds_of, short, size, stamp


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.4, "0.4 s"),
        (59.9, "59.9 s"),
        (59.96, "0:01:00"),
        (61, "0:01:01"),
        (3599.5, "1:00:00"),
        (90061, "25:01:01"),
        (60 * 86400, "1440:00:00"),
        (-3600.0, "0.0 s"),
    ],
)
def test_a_clock_has_hours_minutes_and_seconds(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_large_numbers_have_no_exponent() -> None:
    """A step may take half an hour, or less than a millisecond; a disk has terabytes."""
    assert [rounded(value) for value in (0.0, 7.612, 999.4, 999.6, 1800.0, 1e7)] == [
        "0",
        "7.61",
        "999",
        "1000",
        "1800",
        "10000000",
    ]
    assert (rate(2, 3600.0), rate(12_345, 1.0)) == ("1800 s/step", "12345 steps/s")
    assert (size(1_500_000_000_000), size(999_999_999_999)) == ("1.5 TB", "1000 GB")


def test_a_size_has_a_unit_and_three_digits() -> None:
    assert [size(n) for n in (0, 999, 1000, 2_600_000, 25 << 20, 3 * 10**9)] == [
        "0 B", "999 B", "1 kB", "2.6 MB", "26.2 MB", "3 GB",
    ]  # fmt: skip


def test_a_count_has_its_noun_in_the_plural_unless_it_is_one() -> None:
    assert [count(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


@pytest.mark.parametrize(
    ("items", "given", "text"),
    [
        ([], {}, ""),
        ([], {"most": 2, "last": " and "}, ""),
        (["a"], {"most": 2}, "a"),
        (["a", "b"], {"most": 2}, "a, b"),
        (["a", "b", "c", "d"], {"most": 2}, "a, b and 2 more"),
        ([1, 2, 3], {}, "1, 2, 3"),
        (["a"], {"last": " and "}, "a"),
        (["a", "b"], {"last": " and "}, "a and b"),
        (["a", "b", "c"], {"last": " and "}, "a, b and c"),
        (["a", "b", "c"], {"last": " and ", "most": 2}, "a, b and 1 more"),
        (["a", "b", "c"], {"most": 2, "rest": ", ..."}, "a, b, ..."),
        (["a", "b", "c"], {"most": 2, "joint": "; ", "rest": "; and {} more"}, "a; b; and 1 more"),
        (["{}", "b"], {"most": 1}, "{} and 1 more"),
    ],
)
def test_a_list_names_the_first_items_and_counts_the_others(items: list[object], given: dict[str, object], text: str) -> None:
    assert listed(iter(items), **given) == text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "given", "text"),
    [
        ([3], {}, "rank 3"),
        ([3, 1, 2], {}, "ranks 3, 1, 2"),
        ([0, 1, 2, 3, 4, 5], {"most": 4}, "ranks 0, 1, 2, 3 and 2 more"),
        ([7, 1, 4, 5, 6, 9, 10], {"ranges": True}, "ranks 1, 4-7, 9, 10"),
        ([3], {"ranges": True}, "rank 3"),
    ],
)
def test_numbered_things_have_their_noun_once(numbers: list[int], given: dict[str, int], text: str) -> None:
    assert numbered("rank", iter(numbers), **given) == text  # type: ignore[arg-type]


def test_a_span_of_time_has_a_number_and_a_unit() -> None:
    assert [seconds_of(text) for text in ("90s", " 1.5m ", "2h", "7d", "2w")] == [90, 90, 7200, 604800, 1209600]
    assert [seconds_of(text) for text in ("", "90", "s", "-1s", "1 h", "1y")] == [None] * 6


def test_a_stamp_is_of_this_machines_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.localtime", time.gmtime)
    assert stamp(86399) == "1970-01-01 23:59:59"


def test_a_path_is_shown_from_here_where_it_lies_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short(tmp_path / "runs" / "train") == "runs/train"
    assert short(tmp_path.parent) == str(tmp_path.parent)


def test_a_path_is_shown_whole_where_the_current_folder_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict of a run is printed all the same, and its exit status is that of the run."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path / "scratch")
    (tmp_path / "scratch").rmdir()
    assert short(tmp_path / "runs") == str(tmp_path / "runs")


def test_figures_are_broken_only_between_two_of_them() -> None:
    assert in_lines("step 1/9: loss 2.6, lr 0.1; 6.78 steps/s, 0:01:42 left", 34) == (
        "step 1/9: loss 2.6, lr 0.1;\n  6.78 steps/s, 0:01:42 left"
    )
    assert in_lines("short, lr 0.1") == "short, lr 0.1"


def test_a_message_is_folded_between_words_and_keeps_a_command_on_one_line() -> None:
    assert folded("short", 40) == "short"
    assert folded("short; type: ls", 40) == "short; type:\n  ls"
    text = "rankwise: rank 1 exited with status 3 at step 6 while rank 0 waited for it; to resume, type: run --nproc 2 x.py"
    assert folded(text, 40).splitlines() == [
        "rankwise: rank 1 exited with status 3 at",
        "  step 6 while rank 0 waited for it; to",
        "  resume, type:",
        "  run --nproc 2 x.py",
    ]
    assert folded("all ranks stop after the step, within 120 s; Ctrl-C again kills them", 41).splitlines() == [
        "all ranks stop after the step, within",
        "  120 s; Ctrl-C again kills them",
    ]
    path = "/a/very/long/path/that/is/longer/than/the/line/x.py"
    assert folded(f"cannot write {path}: File too large", 40).splitlines()[1] == f"  {path}:"
    assert folded(f"{path}: syntax error\n    a  b\n    ^", 40).endswith("syntax error\n    a  b\n    ^")
