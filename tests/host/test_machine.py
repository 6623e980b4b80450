"""How many ranks this machine gets."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rankwise.errors import ConfigError
from rankwise.host import machine


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
        ("NoDevFiles", 0),  # Slurm's value for a job without a GPU
        ("0,x,1", 1),
    ],
)
def test_what_is_visible_counts_and_not_what_is_there(visible: str, count: int, dev: Path) -> None:
    assert machine.gpus({"CUDA_VISIBLE_DEVICES": visible}, dev) == count


def trees(tmp_path: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """The folders of a machine's devices: the contents of /dev and /sys."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "dev", tmp_path / "sys"


def amd(cards: int, mapped: int) -> dict[str, str]:
    """A host with `cards` AMD GPUs, as seen in a container that may use `mapped` of them. Node 0 is the processor."""
    nodes = "sys/class/kfd/kfd/topology/nodes"
    files = {"dev/kfd": "", f"{nodes}/0/properties": "cpu_cores_count 64\nsimd_count 0\ndrm_render_minor 0\n"}
    for k in range(1, cards + 1):
        files[f"{nodes}/{k}/properties"] = f"cpu_cores_count 0\nsimd_count 304\ndrm_render_minor {127 + k}\n"
    return files | {f"dev/dri/renderD{127 + k}": "" for k in range(1, mapped + 1)}


def torch_for(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    build = machine.TorchBuild("2.13.0+x", frozenset(kinds))
    monkeypatch.setattr(machine, "torch_build", lambda: build)


@pytest.mark.parametrize(
    ("env", "count"),
    [
        ({}, 4),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "2"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0"}, 1),
        ({"HIP_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_amds_gpus_count_with_a_torch_for_them(
    env: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_for(monkeypatch, "hip")
    assert machine.gpus(env, *trees(tmp_path, amd(cards=8, mapped=4))) == count


def test_amds_gpus_do_not_count_for_another_torch_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_for(monkeypatch, "cuda")
    folders = trees(tmp_path, amd(cards=2, mapped=2))
    assert machine.gpus({}, *folders) == 0
    ranks, why = machine.ranks_for("auto", {}, *folders)
    assert ranks == machine.physical_cores()
    assert why == "torch 2.13.0+x is not built for the AMD GPU here: one per physical core"


def test_amds_driver_without_a_gpu_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_for(monkeypatch, "hip")
    assert machine.gpus({}, *trees(tmp_path, amd(cards=0, mapped=0))) == 0


def test_chosen_gpus_of_amd_are_chosen_by_amds_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_for(monkeypatch, "hip")
    assert machine.visible("1,3", {}, *trees(tmp_path, amd(cards=4, mapped=4))) == {"HIP_VISIBLE_DEVICES": "1,3"}
    assert machine.visible("0", {}, *trees(tmp_path / "b", {"dev/nvidia0": ""})) == {"CUDA_VISIBLE_DEVICES": "0"}


def test_a_list_of_other_gpus_that_is_replaced_is_known() -> None:
    for before, replaced in (("4,5", "CUDA_VISIBLE_DEVICES=4,5"), ("0,1", None), ("", None)):
        assert machine.replaced({"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": before}) == replaced
    assert machine.replaced({"CUDA_VISIBLE_DEVICES": "0"}, {}) is None
    assert machine.replaced({}, {"CUDA_VISIBLE_DEVICES": "4"}) is None


def test_intels_gpus_are_refused_by_auto_with_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"dev/dri/renderD128": "", "sys/class/drm/renderD128/device/vendor": "0x8086\n"}
    folders = trees(tmp_path, files)
    torch_for(monkeypatch, "xpu")
    with pytest.raises(ConfigError, match=r"--nproc auto: .*Intel.*--nproc N.*torch\.xpu\.device_count"):
        machine.ranks_for("auto", {}, *folders)
    assert machine.ranks_for("4", {}, *folders) == (4, "--nproc")
    assert machine.ranks_for("auto", {"CUDA_VISIBLE_DEVICES": ""}, *folders)[0] == machine.physical_cores()
    torch_for(monkeypatch)  # a laptop's GPU, on which nobody wants to train
    assert machine.ranks_for("auto", {}, *folders)[1] == "no GPU found: one per physical core"


def test_a_gpu_whose_driver_is_not_loaded_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel was updated, and NVIDIA's module is not built for it: /dev/nvidia0 is missing, but the card is on the bus."""
    card = "sys/bus/pci/devices/0000:17:00.0"
    folders = trees(tmp_path, {"dev/null": "", f"{card}/vendor": "0x10de\n", f"{card}/class": "0x030200\n"})
    why = "the NVIDIA GPU here has no driver (no /dev/nvidia0): one per physical core"
    assert machine.ranks_for("auto", {}, *folders) == (machine.physical_cores(), why)
    (tmp_path / card / "class").write_text("0x040300\n")  # the sound device of its HDMI
    assert machine.ranks_for("auto", {}, *folders)[1] == "no GPU found: one per physical core"


def test_hidden_gpus_are_said_to_be_hidden(dev: Path) -> None:
    why = machine.ranks_for("auto", {"CUDA_VISIBLE_DEVICES": ""}, dev)[1]
    assert why == "CUDA_VISIBLE_DEVICES= hides every GPU: one per physical core"


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
    assert machine.ranks_for("3", {"CUDA_VISIBLE_DEVICES": "0"}) == (3, "--nproc")


def test_auto_is_a_rank_for_each_gpu() -> None:
    assert machine.ranks_for("auto", {"CUDA_VISIBLE_DEVICES": "2,5"}) == (2, "one per GPU")


def test_auto_without_a_gpu_is_a_rank_for_each_physical_core() -> None:
    count, why = machine.ranks_for("auto", {"CUDA_VISIBLE_DEVICES": ""})
    assert count == machine.physical_cores()
    assert why == f"{'CUDA_VISIBLE_DEVICES= hides every GPU' if machine.gpus({}) else 'no GPU found'}: one per physical core"


def test_without_a_device_file_of_any_vendor_there_is_no_gpu(tmp_path: Path) -> None:
    assert machine.why_not_nccl({}, (), tmp_path) == "this machine has no GPU"
    assert machine.why_not_nccl({"CUDA_VISIBLE_DEVICES": "0"}, (), tmp_path) == "this machine has no GPU"
    for name in ("nvidia0", "kfd", "dxg", "nvhost-gpu"):
        (tmp_path / name).touch()
        assert machine.why_not_nccl({}, (), tmp_path) is None
        (tmp_path / name).unlink()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_no_place_for_nccl(tmp_path: Path, hidden: str) -> None:
    (tmp_path / "nvidia0").touch()
    assert (
        machine.why_not_nccl({"CUDA_VISIBLE_DEVICES": hidden}, (), tmp_path) == f"CUDA_VISIBLE_DEVICES={hidden} hides every GPU"
    )


def test_a_torch_without_cuda_is_named_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('it is not imported')")
    version = tmp_path / "torch" / "version.py"
    version.write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    said = "the installed torch 2.13.0+cpu is built without CUDA"
    assert machine.why_not_nccl({}, (sys.executable, "-u"), tmp_path) == said
    assert machine.why_not_nccl({}, ("/other/python",), tmp_path) is None
    version.write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n")
    assert machine.why_not_nccl({}, (sys.executable,), tmp_path) is None


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("0::/", {"cpu.max": "200000 100000"}, 2),  # in a container
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "10000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, 9),
        ("0::/", {}, 9),
        ("0::/job/step", {"job/cpu.max": "300000 100000", "job/step/cpu.max": "max 100000"}, 3),
        ("0::/job/step", {"job/cpu.max": "300000 100000", "job/step/cpu.max": "100000 100000"}, 1),
        ("0::/../elsewhere", {"cpu.max": "400000 100000"}, 4),
        ("4:memory:/x\n3:cpu,a:/x", {"cpu,a/x/cpu.cfs_quota_us": "200000", "cpu,a/x/cpu.cfs_period_us": "50000"}, 4),
        ("3:cpu:/docker/1f", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 9),
        ("0::/", {"cpu.max": "nonsense"}, 9),
        ("", {"cpu.max": "200000 100000"}, 9),
    ],
)  # fmt: skip
def test_a_container_has_as_many_cores_as_its_limit_of_cpu_time(
    group: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    _, sys_there = trees(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    trees(tmp_path, {"proc/self/cgroup": group})
    assert machine.cores(tmp_path / "proc", sys_there) == cores
