"""A weighted average of tensors over ranks, in one message per dtype and device, and the numbers that ranks exchange before it.

rows = gather_numbers([weight, 1.0])                              # every rank's numbers, on every rank
average([p.data for p in parameters], weight / sum(row[0] for row in rows))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rankwise.dist import comm

_CARRIERS = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""The dtype in which a tensor is sent, if its own dtype has too few digits for a sum."""


def gather_numbers(numbers: Sequence[float]) -> list[list[float]]:
    """Collective. Returns the numbers of every rank, in the order of ranks, as float64. All ranks give equally many."""
    table = torch.zeros(comm.world_size(), len(numbers), dtype=torch.float64, device="cpu")
    table[comm.rank()] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    if not comm.is_alone():
        comm.all_reduce(table)
    return table.tolist()


def payload_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """The bytes that each rank passes to the all-reduce for one average of these tensors."""
    return sum(t.numel() * torch.empty(0, dtype=_CARRIERS.get(t.dtype, t.dtype), device="cpu").element_size() for t in tensors)


def common_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collective. The buffers that all ranks have with the same shape and dtype, by name, in the same order. Others, such as a
    table that grows with the longest sequence, stay as they are on each rank; so do sparse ones."""
    named = {name: buffer for name, buffer in model.named_buffers() if buffer.layout == torch.strided}
    ranks = comm.all_gather_object({name: (tuple(b.shape), str(b.dtype)) for name, b in named.items()})
    return {name: named[name] for name, kind in ranks[0].items() if all(theirs.get(name) == kind for theirs in ranks)}


@torch.no_grad()
def average(tensors: Sequence[torch.Tensor], share: float) -> float:
    """Collective. Each tensor becomes the sum over ranks of (the rank's `share` times its tensor); the shares add up to 1. A
    share of 0 adds nothing, whatever this rank's values are. Floating tensors of any shape and stride, the same on all ranks.
    Returns the square of the distance between this rank's tensors and the average, over all tensors."""
    if comm.is_alone() and share == 1.0:
        return 0.0
    apart = 0.0
    for kind in _kinds(tensors):
        flat = _pack(kind)
        flat = flat.mul_(share) if share else flat.zero_()
        if not comm.is_alone():
            comm.all_reduce(flat)
        for tensor, piece in zip(kind, torch.split(flat, [t.numel() for t in kind]), strict=True):
            apart += assign(tensor, piece.view(tensor.shape))
    return apart


def assign(tensor: torch.Tensor, value: torch.Tensor) -> float:
    """Write `value` into `tensor`. Returns the square of the distance between the old value and the new."""
    norm = torch.linalg.vector_norm(tensor.detach() - value, dtype=torch.float64)
    tensor.copy_(value)
    return float(norm) ** 2


def _kinds(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups of tensors that are sent in one message: the same dtype and device."""
    found: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())


def _pack(kind: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all tensors, one after the other."""
    carrier = _CARRIERS.get(kind[0].dtype, kind[0].dtype)
    return torch.cat([tensor.detach().reshape(-1).to(carrier) for tensor in kind])
