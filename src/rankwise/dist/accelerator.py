"""The kind of device that torch uses in this process: a GPU, or the CPU if there is no GPU. A GPU that fails is an error.

found = accelerator.current(os.environ)      # torch.device("cuda"), or None for the CPU
accelerator.compare(store, world, ...)       # do all ranks have the same? Before the first collective, which could block
"""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rankwise.dist.world import World
from rankwise.errors import DeviceError, WorldError
from rankwise.host import machine
from rankwise.host.text import count, listed, numbered

_ON_THE_CPU = "to train on the CPU, put CUDA_VISIBLE_DEVICES= before the command"
_CURES = {
    "802": "on a machine with NVSwitch start the fabric manager: sudo systemctl start nvidia-fabricmanager",
    "803": "the driver in the kernel and its libraries have different versions: reboot this machine",
    "804": "LD_LIBRARY_PATH has the libcuda of CUDA's compat package, which this GPU does not support: remove it from there",
    "no kernel image": "this torch is not built for this GPU, which is too old or too new for it: choose another torch on https://pytorch.org/get-started",
    "out of memory": "nvidia-smi shows which process has the memory",
    "busy or unavailable": "nvidia-smi shows which process uses it",
    "no NVIDIA driver": "install or load NVIDIA's driver",
    "too old": "",  # torch's message already says what to do
    "built without": "install another torch: https://pytorch.org/get-started",
}
"""What to do, by a part of torch's error message (the numbers are error codes of CUDA)."""

_ASIDE = " Did you run some cuda functions before calling NumCudaDevices() that might have already set an error?"
"""torch's guess, which it prints before the actual reason."""

_COMPARED = "rankwise/device"
_TELL_S = 5.0  # the store stops when rank 0 exits, so rank 0 waits this long for the others to read


def current(env: Mapping[str, str]) -> torch.device | None:
    """torch's accelerator, without an index; None without a GPU, or if CUDA_VISIBLE_DEVICES hides all of them.

    Raises DeviceError, with torch's own reason, if there is a GPU that torch cannot use.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and machine.named(visible) == 0:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch gives its reason here, and again below
        found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        return torch.device(found.type)
    count = machine.gpus(env)
    if count == 0:
        return None
    reason = _reason()
    there = f"CUDA_VISIBLE_DEVICES={visible} names" if visible is not None else f"{platform.node()} has"
    raise DeviceError(
        f"{there} {gpus(count)}, but torch {torch.__version__} cannot use {'it' if count == 1 else 'them'}: "
        f"{_with_cure(reason)}; {_ON_THE_CPU}"
    )


def use(device: torch.device) -> None:
    """Make `device` the current device, and compute a number on it. Raises DeviceError with torch's reason if this fails."""
    try:
        torch.accelerator.set_device_index(device)
        torch.ones(1, device=device).add_(1)
        torch.accelerator.synchronize(device)
    except RuntimeError as error:  # torch.AcceleratorError is one
        reason = _with_cure(_first_line(error))
        raise DeviceError(f"{device} on {platform.node()} cannot be used: {reason}; {_ON_THE_CPU}") from None


def too_few(count: int, env: Mapping[str, str]) -> str | None:
    """The message if torch can use only `count` GPUs and there are more; None otherwise."""
    there = machine.gpus(env)
    if there <= count:
        return None
    visible = env.get("CUDA_VISIBLE_DEVICES")
    what = f"CUDA_VISIBLE_DEVICES={visible} names" if visible is not None else f"{platform.node()} has"
    return f"{what} {gpus(there)}, but torch can use {count} of them; nvidia-smi shows which has failed"


def compare(store: Any, world: World, kind: str, problem: DeviceError | None) -> None:
    """Collective, before the process group exists. Raises on all ranks unless all use the same kind of device.

    `kind`: "cpu", "cuda", ...; `problem`: why this rank cannot use its GPU. This rank raises `problem` after the other ranks
    have read it; they raise a WorldError that lists the device of each rank. Costs three small messages per rank.
    """
    store.set(f"{_COMPARED}/{world.rank}", json.dumps([_named(kind), platform.node(), str(problem or "")]))
    if store.add(f"{_COMPARED}/came", 1) == world.world_size:
        told = [json.loads(store.get(f"{_COMPARED}/{rank}")) for rank in range(world.world_size)]
        store.set(f"{_COMPARED}/verdict", difference(told))
    verdict = store.get(f"{_COMPARED}/verdict").decode()  # waits until the last rank has written it
    if not verdict:
        return
    heard = store.add(f"{_COMPARED}/heard", 1)
    deadline = time.monotonic() + _TELL_S
    while world.rank == 0 and heard < world.world_size and time.monotonic() < deadline:
        time.sleep(0.01)
        heard = store.add(f"{_COMPARED}/heard", 0)
    if problem is not None:
        raise problem
    raise WorldError(verdict)


def difference(told: Sequence[tuple[str, str, str]]) -> str:
    """`told`: for each rank its kind of device, its host, and why it cannot use its GPU. Empty if all can use the same kind."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, (kind, _, problem) in enumerate(told):
        groups.setdefault(("" if problem else kind, problem), []).append(rank)
    if len(groups) == 1 and not told[0][2]:
        return ""
    parts = []
    for (kind, problem), ranks in groups.items():
        hosts = sorted({told[rank][1] for rank in ranks})
        where = f"{numbered('rank', ranks, ranges=True)} on {listed(hosts, 3, rest=', ...')}"
        parts.append(f"{where}: {problem.partition('; ' + _ON_THE_CPU)[0] or kind}")
    return (
        f"the ranks do not have the same kind of device: {'; '.join(parts)}. Repair or exclude the nodes that differ; "
        f"{_ON_THE_CPU}"
    )


def _named(kind: str) -> str:
    names = {"cpu": "the CPU (no GPU found)", "cuda": "AMD GPU (ROCm)" if torch.version.hip else "NVIDIA GPU (CUDA)"}
    return names.get(kind, kind)


def _reason() -> str:
    """Why torch has no accelerator here, in torch's words."""
    built = [name for name in ("cuda", "hip", "xpu") if getattr(torch.version, name, None)]
    if not built:
        return "torch is built without CUDA"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (torch.xpu if built == ["xpu"] else torch.cuda).init()
    except Exception as error:  # AssertionError, RuntimeError: whatever torch raises here is the reason
        return _first_line(error)
    return "torch finds no device"


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return line.replace(_ASIDE, "")


def _with_cure(reason: str) -> str:
    cure = next((cure for words, cure in _CURES.items() if words in reason), "nvidia-smi may show more")
    return f"{reason} ({cure})" if cure else reason


def gpus(n: int) -> str:
    """`1 GPU`, `8 GPUs`."""
    return count(n, "GPU")
