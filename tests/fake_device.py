"""A GPU for tests on a machine without one: its tensors report another device, compute on the CPU, and refuse to be mixed.

    uses = on_a_fake_gpu("examples/02_own_loop.py")
    assert {device for _, device in uses} == {"meta"}

torch reports it as its accelerator, of type `meta`: the only device type other than the CPU that autograd knows in every build
of torch. Here its tensors have values. rankwise's use is recorded with its device: what is passed to a module with parameters,
what an optimizer steps on, and what the script itself reduces or broadcasts.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("meta")


class OnGpu(torch.Tensor):
    """Looks like a tensor on the GPU; `held` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnGpu:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=GPU,
            requires_grad=held.requires_grad,
        )  # fmt: skip

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _context: None, _size: Any, _stride: Any) -> OnGpu:
        return OnGpu(inner["held"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In a file it is a tensor of the CPU: a checkpoint of a GPU's tensors can be read on any machine."""
        return self.held.__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.held.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.held})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(function, args, kwargs or {})


def computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Raises RuntimeError, like a GPU, if tensors of the CPU and the GPU are passed together."""
    device = kwargs.get("device")
    moves = function._schema.name.split("::")[1] in ("_to_copy", "copy_", "_foreach_copy_")
    given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    on_gpu = any(isinstance(tensor, OnGpu) for tensor in given)
    if on_gpu and not moves and any(not isinstance(tensor, OnGpu) and tensor.dim() > 0 for tensor in given):
        raise RuntimeError(f"{function}: expected all tensors to be on the same device, but some are on the CPU")
    to_gpu = on_gpu if device is None else torch.device(device).type == GPU.type
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    held = tree_map(lambda leaf: leaf.held if isinstance(leaf, OnGpu) else leaf, (args, kwargs))
    result = function(*held[0], **held[1])
    if not to_gpu:
        return result
    known = {id(tensor.held if isinstance(tensor, OnGpu) else tensor): tensor for tensor in given}

    def on_its_device(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else OnGpu(leaf)  # in place: the same object

    return tree_map(on_its_device, result)


class _MakesTensors(TorchDispatchMode):
    """For calls that get no tensor, such as `torch.zeros(2, device=...)`, and for moving a tensor from the CPU to the GPU."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(function, args, kwargs or {})


Uses = Counter[tuple[str, str]]
"""How often something was used on a type of device: ("given to a module", "meta")."""


def on_a_fake_gpu(script: str, *words: str) -> Uses:
    """Run a script in this process, a single rank, as on a machine with one GPU."""
    uses: Uses = Counter()
    Path(script).write_text(Path(script).read_text().replace(", fused=True", ""))  # this kernel checks the types of devices
    sys.argv = [script, *words]
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # it would hide this GPU too
    # The variables that torchrun sets for one rank: for a script that reads them itself.
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    with _fake_gpu(), _noting(uses):
        runpy.run_path(script, run_name="__main__")
    return uses


@contextlib.contextmanager
def _fake_gpu() -> Iterator[None]:
    """torch reports one GPU."""
    accelerator = torch.accelerator
    fakes = {
        "current_accelerator": lambda check_available=False: GPU, "is_available": lambda: True, "device_count": lambda: 1,
        "set_device_index": lambda index: None, "synchronize": lambda device=None: None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(accelerator, name, fake))
        for name in ("tensor", "as_tensor"):  # from a list: torch itself creates no values for this type of device
            stack.enter_context(mock.patch.object(torch, name, _moved(getattr(torch, name))))
        # On one rank nothing is sent, and DDP is the module that it wraps.
        stack.enter_context(mock.patch.dict(dist.Backend.default_device_backend_map, {GPU.type: "gloo"}))
        stack.enter_context(mock.patch.object(nn.parallel, "DistributedDataParallel", _DoesNotWrap))
        stack.enter_context(_MakesTensors())
        yield


class _DoesNotWrap:
    """Replaces DDP; a class, because DDP is one."""

    def __new__(cls, model: nn.Module, **_: Any) -> Any:
        return model


def _moved(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return tensor if device is None else tensor.to(device)

    return made


@contextlib.contextmanager
def _noting(uses: Uses) -> Iterator[None]:
    import rankwise

    def note(use: str, value: Any) -> None:
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, torch.Tensor):
                uses[use, leaf.device.type] += 1

    def on_forward(module: nn.Module, args: Any) -> None:
        if next(module.parameters(), None) is not None:
            note("given to a module", args)
            note("parameters of a module", list(module.parameters()))

    def on_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        note("stepped on", [group["params"] for group in optimizer.param_groups])

    def noting(owner: Any, name: str, which: int) -> Any:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[which]
            note(f"given to {name}", list(given.parameters()) if isinstance(given, nn.Module) else given)
            return function(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    iterate = rankwise.Loader.__iter__

    def batches(self: Any) -> Any:
        for micro_batches in iterate(self):
            note("loaded", micro_batches)
            yield micro_batches

    with contextlib.ExitStack() as stack:
        stack.enter_context(nn.modules.module.register_module_forward_pre_hook(on_forward))
        stack.enter_context(register_optimizer_step_pre_hook(on_step))
        stack.enter_context(mock.patch.object(rankwise.Loader, "__iter__", batches))
        stack.enter_context(noting(rankwise, "all_reduce", 0))
        stack.enter_context(noting(rankwise.dist, "broadcast", 0))
        stack.enter_context(noting(rankwise.AllReduce, "attach", 1))
        yield
