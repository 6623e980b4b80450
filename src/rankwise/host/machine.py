"""How many ranks fit this machine, without importing torch."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankwise.errors import ConfigError
from rankwise.host.text import count

_DEV, _PROC, _SYS = Path("/dev"), Path("/proc"), Path("/sys")
_NVIDIA, _INTEL = "0x10de", "0x8086"
_DISPLAY = ("0x0300", "0x0302")  # PCI classes: a graphics card, a card only for computing


@dataclass(frozen=True)
class TorchBuild:
    """The torch of this Python, read without importing it."""

    version: str
    built_for: frozenset[str]
    """Some of cuda, hip (AMD), xpu (Intel)."""


def torch_build() -> TorchBuild | None:
    """None if there is no torch, or its version file cannot be understood."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    version = re.search(r"^__version__ = '(.+)'", text, re.MULTILINE)
    values = dict(re.findall(r"^(cuda|hip|xpu)\b.* = (.+)", text, re.MULTILINE))
    if version is None or not values:
        return None
    return TorchBuild(version[1], frozenset(name for name, value in values.items() if value != "None"))


def gpus(env: Mapping[str, str], dev: Path = _DEV, sys: Path = _SYS) -> int:
    """The number of GPUs that a rank would see: those that CUDA_VISIBLE_DEVICES names, else the device files of this host or
    container.

    Counts NVIDIA GPUs; if there are none, AMD GPUs, if this Python's torch may be built for them. Intel GPUs are not counted:
    how many devices torch sees depends on settings of their driver.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and named(visible) == 0:
        return 0
    there = _nvidia(dev)
    if there == 0 and (amd := _amd(dev, sys)) > 0 and _may_be_built_for("hip"):
        lists = [env.get("ROCR_VISIBLE_DEVICES"), env.get("HIP_VISIBLE_DEVICES", visible)]
        return min([amd, *(named(some) for some in lists if some is not None)])
    return there if visible is None else named(visible)


def named(visible: str) -> int:
    """How many devices a list such as `0,2` or `GPU-8932f937,GPU-5eb` names: CUDA stops reading at the first invalid one."""
    names = [name.strip() for name in visible.split(",")]
    known = [re.match(r"\d|GPU-|MIG-", name) is not None for name in names]
    return known.index(False) if False in known else len(known)


def _nvidia(dev: Path) -> int:
    return len([d for d in dev.glob("nvidia*") if d.name.removeprefix("nvidia").isdecimal()])


def _amd(dev: Path, sys: Path) -> int:
    """GPUs that AMD's driver lists and whose device files this host or container has."""
    if not (dev / "kfd").exists():
        return 0
    found = 0
    for node in sys.glob("class/kfd/kfd/topology/nodes/*/properties"):
        values = dict(line.split()[:2] for line in _read(node).splitlines() if len(line.split()) >= 2)
        is_gpu = values.get("simd_count", "0") != "0"
        found += is_gpu and (dev / "dri" / f"renderD{values.get('drm_render_minor', '')}").exists()
    return found


def _intel(dev: Path, sys: Path) -> int:
    cards = [card for card in sys.glob("class/drm/renderD*") if (dev / "dri" / card.name).exists()]
    return len([card for card in cards if _read(card / "device" / "vendor") == _INTEL])


def _without_driver(sys: Path) -> bool:
    """Whether the PCI bus has an NVIDIA GPU. Called when there is no device file of one."""
    cards = [card.parent for card in sys.glob("bus/pci/devices/*/vendor") if _read(card) == _NVIDIA]
    return any(_read(card / "class").startswith(_DISPLAY) for card in cards)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _may_be_built_for(kind: str) -> bool:
    build = torch_build()
    return build is None or kind in build.built_for


def cores(proc: Path = _PROC, sys: Path = _SYS) -> int:
    """Processors that this process may use: those that it may run on, and not more than the CPU time that its container has
    (`docker run --cpus 2`, a limit of Kubernetes), rounded up."""
    return max(min([len(os.sched_getaffinity(0)), *map(math.ceil, _quotas(proc, sys))]), 1)


def _quotas(proc: Path, sys: Path) -> Iterator[float]:
    """The limits of CPU time, in processors, of the control group of this process and of those above it, as far as they are
    seen in a container. https://docs.kernel.org/admin-guide/cgroup-v2.html, and `cpu.cfs_quota_us` of version 1."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = sys / "fs" / "cgroup" / controllers
        path = mount / group.strip("/")
        for folder in {mount, *(each for each in (path, *path.parents) if each.is_relative_to(mount))}:
            values = _read(folder / "cpu.max").split() or [_read(folder / f"cpu.cfs_{of}_us") for of in ("quota", "period")]
            if len(values) == 2 and all(value.isdecimal() and int(value) > 0 for value in values):
                yield int(values[0]) / int(values[1])


def physical_cores() -> int:
    """Cores that this process may use, a core with two hardware threads counted once."""
    import psutil

    return min(psutil.cpu_count(logical=False) or cores(), cores())


def open_files(at_most: bool = False) -> int:
    """How many files a process may have open (ulimit -n); `at_most`: how many its user may allow it."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1 if at_most else 0]
    return limit if limit >= 0 else 1 << 31


OTHER_FILES = 256
"""That a process has open at most, besides its data: libraries, sockets, logs."""


def allow_open_files(number: int) -> None:
    """Let this process have so many files open at once, as far as its user may: many systems allow 1024 at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < number:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (number if hard < 0 else min(number, hard), hard))


def processes(kernel: Path = Path("/proc/sys/kernel")) -> int:
    """How many processes the kernel can hold, of all users."""
    limits = []
    for name in ("pid_max", "threads-max"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((kernel / name).read_text()))
    return min(limits, default=1 << 31)


def visible(wanted: str | None, env: Mapping[str, str], dev: Path = _DEV, sys: Path = _SYS) -> dict[str, str]:
    """The variables that --gpus 0,2 adds to the environment of the ranks. Raises ConfigError for a GPU that does not exist."""
    if wanted is None:
        return {}
    there = gpus({}, dev, sys)
    numbers = [int(n) for n in wanted.split(",")]
    if max(numbers) >= there:
        found = f"has {count(there, 'GPU')} (0 to {there - 1})" if there else "has no GPU"
        raise ConfigError(f"--gpus {wanted}: this machine {found}; leave --gpus out, or give numbers of GPUs that exist")
    # On AMD, its own variable has priority over CUDA_VISIBLE_DEVICES.
    name = "CUDA_VISIBLE_DEVICES" if _nvidia(dev) else "HIP_VISIBLE_DEVICES"
    return {name: ",".join(map(str, numbers))}


def replaced(chosen: Mapping[str, str], env: Mapping[str, str]) -> str | None:
    """A list of GPUs in the environment that `chosen` replaces by another one, for a warning: a scheduler may have set it."""
    name = next((name for name, value in chosen.items() if env.get(name) not in (None, "", value)), None)
    return f"{name}={env[name]}" if name is not None else None


def why_not_nccl(env: Mapping[str, str], interpreter: Sequence[str], dev: Path = _DEV) -> str | None:
    """Why no rank can use NCCL here; None if a rank may."""
    if env.get("CUDA_VISIBLE_DEVICES") is not None and gpus(env, dev) == 0:
        return f"CUDA_VISIBLE_DEVICES={env['CUDA_VISIBLE_DEVICES']} hides every GPU"
    # The device files of AMD, of Jetson and of WSL have other names than /dev/nvidia0.
    if not any(any(dev.glob(name)) for name in ("nvidia*", "nvhost*", "nvmap", "kfd", "dxg")):
        return "this machine has no GPU"
    build = torch_build() if interpreter[:1] == (sys.executable,) else None
    if build is None or build.built_for & {"cuda", "hip"}:
        return None
    return f"the installed torch {build.version} is built without CUDA"


def ranks_for(nproc: str, env: Mapping[str, str], dev: Path = _DEV, sys: Path = _SYS) -> tuple[int, str]:
    """(ranks on this machine, why this number), for a number or `auto`. Raises ConfigError for GPUs that only torch can
    count."""
    if nproc != "auto":
        return int(nproc), "--nproc"
    count = gpus(env, dev, sys)
    if count > 0:
        return count, "one per GPU"
    return physical_cores(), f"{_why_no_gpu(env, dev, sys)}: one per physical core"


def _why_no_gpu(env: Mapping[str, str], dev: Path, sys: Path) -> str:
    """Why `gpus` has found none: there may be a GPU that cannot be used."""
    hidden = env.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden} hides every GPU" if _nvidia(dev) else "no GPU found"
    build = torch_build()
    if build is not None and "xpu" in build.built_for and _intel(dev, sys):
        raise ConfigError(
            "--nproc auto: only torch can count the devices of this machine's Intel GPUs (ZE_FLAT_DEVICE_HIERARCHY and "
            "ZE_AFFINITY_MASK change their number); type --nproc N, with the number that this prints: "
            'python -c "import torch; print(torch.xpu.device_count())"'
        )
    if build is not None and _amd(dev, sys):
        return f"torch {build.version} is not built for the AMD GPU here"
    return "the NVIDIA GPU here has no driver (no /dev/nvidia0)" if _without_driver(sys) else "no GPU found"
