"""The device that torch uses here, why it is not the GPU, and whether it is the same on all ranks."""

from __future__ import annotations

import platform
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import scripts_on_ranks

from rankwise.dist import accelerator, joining
from rankwise.dist.world import World
from rankwise.errors import ConfigError, DeviceError, WorldError
from rankwise.host import machine

HERE = platform.node()
CPU = "the CPU (no GPU found)"
CUDA = "NVIDIA GPU (CUDA)"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with GPUs that torch cannot use; torch gives this text as the reason."""

    def fake(said: str | None, count: int = 2) -> None:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        monkeypatch.setattr(machine, "gpus", lambda env: count)
        if said is None:
            monkeypatch.setattr(torch.version, "cuda", None)
            return

        def init() -> None:
            raise RuntimeError(said)

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "init", init)

    return fake


def world(rank: int, size: int) -> World:
    return World(rank, size, rank, size, 0, "test")


def test_without_a_gpu_there_is_none(broken: Any) -> None:
    broken(None, count=0)
    assert accelerator.current({}) is None


def test_torchs_accelerator_is_named_without_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu", 0))
    assert accelerator.current({}) == torch.device("xpu")
    assert accelerator.current({"CUDA_VISIBLE_DEVICES": "0"}) == torch.device("xpu")


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_not_asked_after(broken: Any, hidden: str) -> None:
    broken("it was asked")
    assert accelerator.current({"CUDA_VISIBLE_DEVICES": hidden}) is None


WORDS = {
    "fabric manager": (
        "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
        "might have already set an error? Error 802: system not yet initialized",
        "start the fabric manager: sudo systemctl start nvidia-fabricmanager",
    ),
    "driver mismatch": (
        "Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver "
        "combination",
        "have different versions: reboot this machine",
    ),
    "error state": ("Unexpected error from cudaGetDeviceCount(). Error 999: unknown error", "nvidia-smi may show more"),
    "old driver": (
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading and "
        "installing a new version from the URL: http://www.nvidia.com/Download/index.aspx",
        "index.aspx",
    ),
    "no driver": (
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from\nhttp://...",
        "install or load NVIDIA's driver",
    ),
}


@pytest.mark.parametrize("case", WORDS)
def test_a_gpu_that_torch_cannot_use_is_an_error_with_torchs_own_reason_and_what_to_do(broken: Any, case: str) -> None:
    said, cure = WORDS[case]
    broken(said)
    with pytest.raises(DeviceError) as caught:
        accelerator.current({})
    text = str(caught.value)
    first = said.splitlines()[0].replace(accelerator._ASIDE, "")
    assert text.startswith(f"{HERE} has 2 GPUs, but torch {torch.__version__} cannot use them: {first}")
    assert cure in text
    assert text.endswith("; to train on the CPU, put CUDA_VISIBLE_DEVICES= before the command")
    assert "\n" not in text


def test_a_gpu_that_is_named_and_not_there_is_an_error(broken: Any) -> None:
    broken("No CUDA GPUs are available", count=1)
    with pytest.raises(DeviceError, match=r"^CUDA_VISIBLE_DEVICES=3 names 1 GPU, but torch .* cannot use it: No CUDA GPUs are"):
        accelerator.current({"CUDA_VISIBLE_DEVICES": "3"})


def test_a_torch_for_the_cpu_beside_a_gpu_is_an_error_that_says_so(broken: Any) -> None:
    broken(None)
    with pytest.raises(
        DeviceError, match=r"torch is built without CUDA.*install another torch: https://pytorch\.org/get-started"
    ):
        accelerator.current({})


@pytest.mark.parametrize("words", ["CUDA error: uncorrectable ECC error encountered", "CUDA error: no kernel image"])
def test_a_gpu_that_fails_at_its_first_number_is_named(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def set_device_index(device: torch.device) -> None:
        raise RuntimeError(f"{words}\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.")

    monkeypatch.setattr(torch.accelerator, "set_device_index", set_device_index)
    with pytest.raises(DeviceError) as caught:
        accelerator.use(torch.device("cuda", 3))
    assert str(caught.value).startswith(f"cuda:3 on {HERE} cannot be used: {words} (")
    assert "\n" not in str(caught.value)


# --- the same on all ranks


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([(CUDA, "a", "")] * 4, None),
        ([(CPU, "a", ""), (CPU, "b", "")], None),
        (
            [(CUDA, "a", ""), (CUDA, "a", ""), (CPU, "b", ""), (CPU, "b", "")],
            f"ranks 0, 1 on a: {CUDA}; ranks 2, 3 on b: {CPU}. Repair or exclude",
        ),
        ([(CUDA, "a", ""), ("AMD GPU (ROCm)", "b", "")], f"rank 0 on a: {CUDA}; rank 1 on b: AMD GPU (ROCm). "),
        (
            [(CUDA, "a", ""), (CPU, "b", f"b has 8 GPUs, but ...: Error 802; {accelerator._ON_THE_CPU}")],
            f"rank 0 on a: {CUDA}; rank 1 on b: b has 8 GPUs, but ...: Error 802. Repair",
        ),
        ([(CPU, "a", "why"), (CPU, "a", "why")], "ranks 0, 1 on a: why. "),  # each raises its own error
    ],
)
def test_ranks_whose_devices_differ_are_named_with_their_hosts(told: list[tuple[str, str, str]], said: str | None) -> None:
    text = accelerator.difference(told)
    assert said in text if said else not text


def compared(kinds: list[str], problems: dict[int, DeviceError]) -> list[BaseException | None]:
    """What each rank raises."""
    store, raised = dist.HashStore(), [None] * len(kinds)

    def rank(number: int) -> None:
        try:
            accelerator.compare(store, world(number, len(kinds)), kinds[number], problems.get(number))
        except Exception as error:
            raised[number] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised  # type: ignore[return-value]


def test_ranks_with_the_same_kind_of_device_go_on() -> None:
    assert compared(["cuda"] * 3, {}) == [None] * 3


def test_all_ranks_raise_if_one_has_no_gpu() -> None:
    raised = compared(["cuda", "cuda", "cpu"], {})
    assert [type(error) for error in raised] == [WorldError] * 3
    assert len({str(error) for error in raised}) == 1
    assert f"ranks 0, 1 on {HERE}: {CUDA}; rank 2 on {HERE}: {CPU}" in str(raised[0])


def test_the_rank_that_cannot_use_its_gpu_raises_why_and_the_others_say_which_it_is() -> None:
    why = DeviceError(f"{HERE} has 2 GPUs, but torch cannot use them: Error 802; {accelerator._ON_THE_CPU}")
    raised = compared(["cuda", "cpu"], {1: why})
    assert raised[1] is why
    assert f"rank 1 on {HERE}: {HERE} has 2 GPUs, but torch cannot use them: Error 802. " in str(raised[0])


@pytest.mark.parametrize("launched_by", ["torchrun", "mpirun"])
def test_ranks_of_two_kinds_of_device_end_with_a_message_before_the_first_collective(launched_by: str) -> None:
    """Without this, a node whose driver does not answer would use gloo, and the others would wait for it in NCCL."""
    lines = ["import os, torch, rankwise", "if os.environ['RANK'] == '1':"]
    lines += ["    os.environ.pop('CUDA_VISIBLE_DEVICES', None)"]
    lines += ["    torch.accelerator.current_accelerator = lambda check_available=False: torch.device('cuda')"]
    if launched_by == "mpirun":  # without an address: rank 0 announces its own
        lines += ["rank, size = int(os.environ.pop('RANK')), int(os.environ.pop('WORLD_SIZE'))"]
        lines += ["given = dict(rank=rank, world_size=size, local_rank=rank, local_world_size=size)"]
        lines += ["rdzv = os.environ.pop('MASTER_ADDR') + ':' + os.environ.pop('MASTER_PORT')"]
        lines += ["[os.environ.pop(name, None) for name in ('LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK')]"]
        lines += ["rankwise.init(**given, rdzv=rdzv)"]
    else:
        lines += ["rankwise.init()"]
    Path("train.py").write_text("\n".join([*lines, "print('not reached')"]))
    for done in scripts_on_ranks(2, "train.py"):
        assert done.returncode == 1, done.stdout
        assert f"rank 0 on {HERE}: {CPU}; rank 1 on {HERE}: {CUDA}" in done.stdout
        assert "not reached" not in done.stdout
        assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("kind", "available", "backend"),
    [
        ("cpu", True, "gloo"),
        ("cuda", True, "cpu:gloo,cuda:nccl"),
        ("cuda", False, "gloo"),  # a torch for Windows or Jetson: gloo has collectives for CUDA
        ("xpu", True, "cpu:gloo,xpu:xccl"),
        ("xpu", False, None),
        ("vulkan", True, None),  # other types may be registered by an import of another test
    ],
)
def test_the_backend_is_that_of_the_device(
    kind: str, available: bool, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "current", lambda env: None if kind == "cpu" else torch.device(kind))
    monkeypatch.setattr(accelerator, "compare", lambda *_: None)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: available)
    if backend is None:
        with pytest.raises(ConfigError, match=rf"has no backend for collectives on {kind}; .*rankwise\.init\(backend="):
            joining.agreed_backend(world(0, 2), None)
    else:
        assert joining.agreed_backend(world(0, 2), None) == backend
