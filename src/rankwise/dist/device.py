"""The device of this rank, and moving batches to it.

device = local_device(world);  batch = to_device(batch, device)
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from rankwise.dist import accelerator, comm
from rankwise.dist.world import World, ranks_of_one_agent
from rankwise.errors import DeviceError, WorldError
from rankwise.host.arguments import Argument


def _is_device(value: Any) -> bool:
    try:
        return isinstance(value, torch.device) or (isinstance(value, str) and bool(torch.device(value)))
    except RuntimeError:
        return False


DEVICE = Argument(_is_device, 'a device: "cpu", "cuda:0"')


def local_device(world: World | None = None) -> torch.device:
    """The GPU of this rank, or the CPU if there is no GPU (or CUDA_VISIBLE_DEVICES hides all). If a rank sees only one GPU, it
    uses that one. Call this after `init`.

    Raises DeviceError with torch's reason if there is a GPU that torch cannot use: the CPU would be slow without notice.
    """
    world = world if world is not None else comm.world()
    found = accelerator.current(os.environ)
    if found is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    index = 0 if count == 1 else world.local_rank
    if index >= count or (count == 1 and ranks_of_one_agent(world) > 1):
        failed = accelerator.too_few(count, os.environ)
        if failed is not None:
            raise DeviceError(f"{world.local_world_size} ranks on this node: {failed}; or type --nproc {count}")
        raise WorldError(
            f"{world.local_world_size} ranks on this node, but {accelerator.gpus(count)} visible; type --nproc {count}, "
            "or use the CPU: CUDA_VISIBLE_DEVICES= rankwise run ..."
        )
    device = torch.device(found.type, index)
    accelerator.use(device)
    return device


def to_device(batch: Any, device: torch.device) -> Any:
    """The same nested tuples, lists and mappings with every tensor on `device`. Tensors already there are not copied. Other
    objects are moved by their method `to`, if they have one: graphs of PyG and DGL, batches of SpeechBrain."""

    def move(value: Any) -> Any:
        if callable(getattr(value, "to", None)):
            with contextlib.suppress(TypeError, ValueError):  # the `to` of a quantity with a unit
                moved = value.to(device)
                return value if moved is None else moved  # None: it has moved itself
        return value

    return each_tensor(batch, lambda tensor: tensor.to(device, non_blocking=True), move)


def each_tensor(
    batch: Any, change: Callable[[torch.Tensor], torch.Tensor], other: Callable[[Any], Any] = lambda value: value
) -> Any:
    """The same nested tuples, lists and mappings, with `change` applied to each tensor, and `other` to everything else in
    them."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return with_values(batch, {key: each_tensor(value, change, other) for key, value in batch.items()})
    if isinstance(batch, PackedSequence):  # its batch_sizes stay on the CPU
        indices = [None if index is None else change(index) for index in (batch.sorted_indices, batch.unsorted_indices)]
        return PackedSequence(change(batch.data), batch.batch_sizes, *indices)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(each_tensor(value, change, other) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(each_tensor(value, change, other) for value in batch)
    return other(batch)


def with_values(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the class of `batch` with these values; a dict if the class does not allow this."""
    kind: Any = type(batch)
    if kind is dict:
        return values
    try:
        if not (isinstance(batch, dict | UserDict) or hasattr(kind, "__copy__")):  # a copy would share its items
            return kind(values)
        made: Any = copy.copy(batch)
        for key, value in values.items():  # not update: a Counter adds
            made[key] = value
    except Exception:  # a class with rules of its own
        return values
    return made


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested mappings, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_in(value)


def is_dense(parameter: torch.Tensor) -> bool:
    """Whether the elements are in memory without gap or overlap, in any order. Only then autograd gives the gradient the same
    layout as the parameter."""
    expected = 1
    for size, stride in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
