"""What makes a message smaller: 16 bits, 8 bits or few columns per matrix; what a message loses is added to the next one.

codec = codec_of("int8", flat);   total = codec.sum(flat)        # collective: of all ranks' `flat`, as far as it is sent

Error feedback: Karimireddy et al. 2019, arXiv:1901.09847. PowerSGD: Vogels et al. 2019, arXiv:1905.13727.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rankwise.dist import comm, log
from rankwise.errors import ConfigError
from rankwise.host.arguments import Argument, one_of

_BLOCK = 2048  # elements that share one scale
_NEAR = 0.9 * 65504


def _is_powersgd(name: Any) -> bool:
    kind, _, number = name.partition(":") if isinstance(name, str) else ("", "", "")
    return kind == "powersgd" and number.isdecimal() and int(number) > 0


CODEC = one_of("bf16", "fp16", "int8")
CODEC_OF_MATRICES = CODEC.or_(Argument(_is_powersgd, "'powersgd:RANK' (powersgd:2, for example)"))


def codec_of(name: str, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Codec:
    """By its name, for messages like `flat`, in which tensors of these shapes lie end to end. Raises ConfigError where nothing
    would be saved."""
    if name.startswith("powersgd"):
        return PowerSGD(flat, int(name.partition(":")[2]), shapes)
    if name == "int8":
        return Int8(flat)
    return Half(flat, torch.bfloat16 if name == "bf16" else torch.float16)


class Codec:
    """One message's."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.error = torch.zeros_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
        """What this rank's messages have lost so far; written in place."""
        self.rights: dict[int, torch.Tensor] = {}
        """PowerSGD's, by the matrix's place among the shapes; written in place. Equal on all ranks."""

    def sum(self, flat: torch.Tensor, remember: bool = True) -> torch.Tensor:
        """Collective. The sum over ranks of `flat` plus `error`, as far as it was sent; the rest is the error from now on.
        Without `remember`, and where what was sent is not finite, nothing of this is kept."""
        wanted = flat + self.error
        total, lost, rights = self._sum(wanted)
        if remember and bool(torch.isfinite(lost.sum())):
            self.error.copy_(lost)
        if remember and all(bool(torch.isfinite(right).all()) for right in rights):  # the same on all ranks
            for mine, right in zip(self.rights.values(), rights, strict=True):
                mine.copy_(right)
        return total

    def _sum(self, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Collective. (the sum of what was sent, what this rank's message has lost, the new `rights`)."""
        raise NotImplementedError

    def sent_bytes(self, flat: torch.Tensor) -> int:
        """What this rank hands over for one message."""
        raise NotImplementedError


class Half(Codec):
    """Each element in 16 bits; ranks add up in 16 bits too."""

    def __init__(self, flat: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(flat)
        self._dtype = dtype
        self._told = False

    def _sum(self, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        small = wanted.to(self._dtype)
        lost = wanted - small
        if self._dtype is torch.float16 and not self._told and float(wanted.abs().max()) > _NEAR:
            self._told = True
            log.warn("gradients come near 65504, the largest number of fp16, and steps may be skipped: bf16 has room")
        if not comm.is_alone():
            dist.all_reduce(small, group=comm.group_for(small.device))
        return small, lost, []

    def sent_bytes(self, flat: torch.Tensor) -> int:
        return 2 * flat.numel()


class Int8(Codec):
    """Each element in 8 bits, a multiple of its block's scale. Every rank gets every other's message, so that sums are exact:
    for few ranks."""

    def _sum(self, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        n = len(wanted)
        blocks = torch.nn.functional.pad(wanted.float(), (0, -n % _BLOCK)).view(-1, _BLOCK)
        scales = blocks.abs().amax(1, keepdim=True).div_(127)
        codes = blocks.div(scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        lost = wanted - _decoded(codes, scales, n)
        message = torch.cat([codes.view(torch.uint8).reshape(-1), scales.view(torch.uint8).reshape(-1)])
        total = torch.zeros_like(wanted)
        for one in _gathered(message):
            theirs, factors = one[: codes.numel()].view(torch.int8), one[codes.numel() :].view(torch.float32)
            total += _decoded(theirs.view(-1, _BLOCK), factors.view(-1, 1), n)
        return total, lost, []

    def sent_bytes(self, flat: torch.Tensor) -> int:
        return -(-flat.numel() // _BLOCK) * (_BLOCK + 4)


def _decoded(codes: torch.Tensor, scales: torch.Tensor, length: int) -> torch.Tensor:
    return (codes * scales).reshape(-1)[:length]


def _gathered(message: torch.Tensor) -> list[torch.Tensor]:
    """Collective. Each rank's."""
    if comm.is_alone():
        return [message]
    told = [torch.empty_like(message) for _ in range(comm.world_size())]
    dist.all_gather(told, message, group=comm.group_for(message.device))
    return told


class PowerSGD(Codec):
    """Of each matrix that is worth it the best `columns` directions, found by one power iteration a step that begins where the
    last one ended; all else is sent whole."""

    def __init__(self, flat: torch.Tensor, columns: int, shapes: Sequence[torch.Size]) -> None:
        super().__init__(flat)
        self._columns = columns
        self._sizes = [shape.numel() for shape in shapes]
        matrices = {i: (s[0], s.numel() // s[0]) for i, s in enumerate(shapes) if len(s) > 1 and s.numel()}
        self._matrices = {i: (m, k) for i, (m, k) in matrices.items() if columns * (m + k) < m * k}
        self._whole = [i for i in range(len(shapes)) if i not in self._matrices]
        if not self._matrices:
            raise ConfigError(
                f"compress='powersgd:{columns}': no parameter is a matrix that {columns} columns make smaller; "
                "choose bf16 or int8, or fewer columns"
            )
        for i, (_, k) in self._matrices.items():
            generator = torch.Generator().manual_seed(i)
            self.rights[i] = torch.randn(k, columns, generator=generator).to(self.error)

    def _sum(self, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        total, lost = torch.empty_like(wanted), torch.zeros_like(wanted)
        pieces, sums, rests = (torch.split(t, self._sizes) for t in (wanted, total, lost))
        matrices = [pieces[i].view(shape) for i, shape in self._matrices.items()]
        whole = [pieces[i] for i in self._whole]
        first = _summed([*(a @ right for a, right in zip(matrices, self.rights.values(), strict=True)), *whole])
        for i, piece in zip(self._whole, first[len(matrices) :], strict=True):
            sums[i].copy_(piece)
        bases = [_orthogonal(left) for left in first[: len(matrices)]]
        rights = _summed([a.t() @ base for a, base in zip(matrices, bases, strict=True)])
        for (i, shape), base, right, matrix in zip(self._matrices.items(), bases, rights, matrices, strict=True):
            torch.mm(base, right.t(), out=sums[i].view(shape))
            torch.sub(matrix, sums[i].view(shape), alpha=1 / comm.world_size(), out=rests[i].view(shape))
        return total, lost, rights

    def sent_bytes(self, flat: torch.Tensor) -> int:
        small = sum(self._columns * (m + k) for m, k in self._matrices.values())
        return (small + sum(self._sizes[i] for i in self._whole)) * self.error.element_size()


def _summed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Collective. One message."""
    message = torch.cat([tensor.reshape(-1) for tensor in tensors])
    if not comm.is_alone():
        dist.all_reduce(message, group=comm.group_for(message.device))
    pieces = torch.split(message, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Its columns made orthonormal; what is not finite stays so, for the step to be judged."""
    return torch.linalg.qr(matrix)[0] if bool(torch.isfinite(matrix).all()) else matrix * torch.nan
