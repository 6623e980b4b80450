"""How many ranks this machine is for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankwise import machine


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """The device files of a host with three GPUs; one of them has a number of two digits."""
    folder = tmp_path / "dev"
    (folder / "nvidia-caps").mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "null"):
        (folder / name).touch()
    return folder


def test_each_device_file_of_a_gpu_is_one_and_its_helpers_are_none(dev: Path, tmp_path: Path) -> None:
    assert machine.gpus({}, dev) == 3
    assert machine.gpus({}, tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("0", 1),
        ("0,1", 2),
        ("3,0,2,1", 4),
        ("", 0),
        ("-1", 0),
        (" ", 0),
        ("0, 1", 2),
        ("GPU-8932f937,GPU-5eb", 2),
        ("MIG-1", 1),
    ],
)
def test_what_is_visible_counts_and_not_what_is_there(visible: str, count: int, dev: Path) -> None:
    assert machine.gpus({"CUDA_VISIBLE_DEVICES": visible}, dev) == count


def test_cores_are_those_that_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert machine.cores() == 1
        assert machine.physical_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert machine.cores() == len(before)
    assert 1 <= machine.physical_cores() <= machine.cores()


def test_a_number_of_ranks_is_obeyed() -> None:
    assert machine.ranks_for("3", {"CUDA_VISIBLE_DEVICES": "0"}) == (3, "as asked")


def test_auto_is_a_rank_for_each_gpu() -> None:
    assert machine.ranks_for("auto", {"CUDA_VISIBLE_DEVICES": "2,5"}) == (2, "auto: one a GPU")


def test_auto_without_a_gpu_is_a_rank_for_each_physical_core() -> None:
    count, why = machine.ranks_for("auto", {"CUDA_VISIBLE_DEVICES": ""})
    assert count == machine.physical_cores()
    assert why == "auto: no GPU here, so one a physical core"
