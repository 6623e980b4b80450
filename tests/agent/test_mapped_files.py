"""Which of the files that a process has mapped was truncated."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankwise.agent.mapped_files import MappedFiles

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize(
    ("length", "cut_to", "said"),
    [(10 * PAGE + 5, 9 * PAGE, True), (10 * PAGE + 5, 10 * PAGE, True), (10 * PAGE + 5, 10 * PAGE + 1, False), (PAGE, 0, True)],
)
def test_a_file_that_lost_a_mapped_page_is_named(tmp_path: Path, length: int, cut_to: int, said: bool) -> None:
    for name in ("whole", "a file"):
        (tmp_path / name).write_bytes(b"x" * length)
    files = MappedFiles()
    with (tmp_path / "whole").open("rb") as one, (tmp_path / "a file").open("rb") as other:
        maps = [mmap.mmap(each.fileno(), 0, access=mmap.ACCESS_READ) for each in (one, other)]
        files.look([os.getpid()])
        assert files.cut(os.getpid()) is None
        os.truncate(tmp_path / "a file", cut_to)
        found = files.cut(os.getpid())
        for each in maps:
            each.close()
    assert (found is not None) == said
    if found is not None:
        assert found.startswith(f"{tmp_path / 'a file'} was truncated to ")
        assert found.endswith("B while it was mapped")
    (tmp_path / "a file").unlink()
    assert files.cut(os.getpid()) is None


def test_looks_become_rare() -> None:
    now_s, looks = 0.0, []
    files = MappedFiles(clock=lambda: now_s)
    while now_s < 200:
        before = files._next
        files.look([])
        if files._next != before:
            looks.append(now_s)
        now_s += 0.5
    assert looks[:6] == [0, 1, 3, 7, 15, 31]
    assert looks[-1] - looks[-2] == 30


def test_a_process_that_is_gone_is_passed_over() -> None:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    files = MappedFiles()
    files.look([int(child.stdout)])
    assert files.cut(int(child.stdout)) is None
