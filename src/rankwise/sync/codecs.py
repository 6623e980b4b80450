"""Codecs that make a message smaller: 16 bits, 8 bits or few columns per matrix. What a message loses is added to the next one.

    codec = codec_of("int8", flat);   codec.sum_(flat)        # collective: the sum over all ranks, without what is lost
    codec.remember()                                         # if the sum is used

Error feedback: Karimireddy et al. 2019, arXiv:1901.09847. PowerSGD: Vogels et al. 2019, arXiv:1905.13727.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rankwise.dist import comm, log
from rankwise.errors import ConfigError
from rankwise.host.arguments import Argument, one_of

_BLOCK = 2048  # elements that share one scale
_SCALE_BYTES = 4
_PIECE = 128 * _BLOCK  # elements of a message that are sent at once
_NEAR = 0.9 * 65504


def _is_powersgd(name: Any) -> bool:
    kind, _, number = name.partition(":") if isinstance(name, str) else ("", "", "")
    return kind == "powersgd" and number.isdecimal() and int(number) > 0


CODEC = one_of("bf16", "fp16", "int8")
CODEC_OF_MATRICES = CODEC.or_(Argument(_is_powersgd, "'powersgd:RANK' (powersgd:2, for example)"))


def codec_of(name: str, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Codec:
    """The codec of this name, for messages like `flat`, which holds tensors of these shapes one after the other. Raises
    ConfigError if the message would not be smaller."""
    if name.startswith("powersgd"):
        return PowerSGD(flat, int(name.partition(":")[2]), shapes)
    if name == "int8":
        return Int8(flat)
    return Half(flat, torch.bfloat16 if name == "bf16" else torch.float16)


class Codec:
    """The codec of one message."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.error = torch.zeros_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
        """What this rank's messages have lost so far; written in place."""
        self._work = torch.empty_like(self.error)
        self.rights: dict[int, torch.Tensor] = {}
        """The right factors of PowerSGD, by the index of the matrix's shape; written in place. Equal on all ranks."""
        self._new_rights: list[torch.Tensor] = []

    @property
    def held_bytes(self) -> int:
        """The memory that the codec uses between two messages."""
        return sum(tensor.nbytes for tensor in (self.error, self._work, *self.rights.values()))

    def sum_(self, flat: torch.Tensor) -> torch.Tensor:
        """Collective. Send `flat` plus `error`: `flat` becomes the sum over ranks of what was sent. Returns `flat`. Call
        `remember` before the next message if this sum is used."""
        # A buffer that is kept: to allocate the pages of a new one costs more than the copy into it.
        wanted = torch.add(flat, self.error, out=self._work)
        total = flat if flat.dtype == wanted.dtype else torch.empty_like(wanted)
        self._new_rights = self._sum(wanted, total)
        if total is not flat:
            flat.copy_(total)
        return flat

    def remember(self) -> None:
        """`error` becomes what the last message has lost, and `rights` continue from it, if they are finite. Without this call,
        as if the message had not been sent."""
        if bool(torch.isfinite(self._work.sum())):
            self.error.copy_(self._work)
        if all(bool(torch.isfinite(right).all()) for right in self._new_rights):  # all ranks decide the same
            for mine, right in zip(self.rights.values(), self._new_rights, strict=True):
                mine.copy_(right)

    def _sum(self, wanted: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
        """Collective. `total` becomes the sum over ranks of what was sent of `wanted`, and `wanted` what this rank's message
        has lost. Returns the new `rights`."""
        raise NotImplementedError

    def sent_bytes(self, flat: torch.Tensor) -> int:
        """The bytes of one message that this rank sends."""
        raise NotImplementedError


class Half(Codec):
    """Each element in 16 bits. The ranks also add in 16 bits."""

    def __init__(self, flat: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(flat)
        self._small = torch.empty_like(flat, dtype=dtype)
        self._told = False

    def _sum(self, wanted: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
        small = self._small.copy_(wanted)
        if small.dtype is torch.float16 and not self._told and max(map(abs, map(float, torch.aminmax(wanted)))) > _NEAR:
            self._told = True
            log.warn("gradients are close to 65504, the largest fp16 number, so steps may be skipped; use bf16")
        wanted -= small
        if not comm.is_alone():
            comm.add(small)
        total.copy_(small)
        return []

    def sent_bytes(self, flat: torch.Tensor) -> int:
        return 2 * flat.numel()


class Int8(Codec):
    """Each element in 8 bits, as a multiple of the scale of its block. Every rank gets the messages of all ranks, so adding
    them loses nothing; for few ranks."""

    def _sum(self, wanted: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
        # One piece is sent while the next is encoded; gloo sends a large message in one direction at a time.
        gathering = [_gather(_encoded(piece)) for piece in torch.split(wanted, _PIECE)]
        for gathered, piece_sum in zip(gathering, torch.split(total.zero_(), _PIECE), strict=True):
            for message in gathered():
                piece_sum += _decoded(message, len(piece_sum))
        return []

    def sent_bytes(self, flat: torch.Tensor) -> int:
        return -(-flat.numel() // _BLOCK) * (_BLOCK + _SCALE_BYTES)


def _encoded(piece: torch.Tensor) -> torch.Tensor:
    """The codes of all elements and then the scales of their blocks, as bytes. `piece` becomes what the message has lost."""
    blocks = torch.nn.functional.pad(piece.float(), (0, -len(piece) % _BLOCK)).view(-1, _BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).div_(127)
    codes = blocks.div(scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    message = torch.cat([codes.view(torch.uint8).reshape(-1), scales.view(torch.uint8).reshape(-1)])
    piece -= _decoded(message, len(piece))
    return message


def _decoded(message: torch.Tensor, length: int) -> torch.Tensor:
    blocks = len(message) // (_BLOCK + _SCALE_BYTES)
    codes, scales = torch.split(message, [blocks * _BLOCK, blocks * _SCALE_BYTES])
    return (codes.view(torch.int8).view(-1, _BLOCK) * scales.view(torch.float32).view(-1, 1)).reshape(-1)[:length]


def _gather(message: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """Collective. Start to gather; the returned function waits, and returns the message of each rank."""
    if comm.is_alone():
        return lambda: [message]
    told = [torch.empty_like(message) for _ in range(comm.world_size())]
    work: Any = dist.all_gather(told, message, group=comm.group_for(message.device), async_op=True)

    def gathered() -> list[torch.Tensor]:
        work.wait()
        return told

    return gathered


class PowerSGD(Codec):
    """For each matrix that becomes smaller, the best `columns` directions. Each step does one power iteration, which continues
    that of the last step. Everything else is sent as it is."""

    def __init__(self, flat: torch.Tensor, columns: int, shapes: Sequence[torch.Size]) -> None:
        super().__init__(flat)
        self._columns = columns
        self._sizes = [shape.numel() for shape in shapes]
        matrices = {i: (s[0], s.numel() // s[0]) for i, s in enumerate(shapes) if len(s) > 1 and s.numel()}
        self._matrices = {i: (m, k) for i, (m, k) in matrices.items() if columns * (m + k) < m * k}
        self._whole = [i for i in range(len(shapes)) if i not in self._matrices]
        if not self._matrices:
            raise ConfigError(
                f"compress='powersgd:{columns}': no matrix parameter becomes smaller with {columns} columns; "
                "choose bf16 or int8, or fewer columns"
            )
        for i, (_, k) in self._matrices.items():
            generator = torch.Generator().manual_seed(i)
            self.rights[i] = torch.randn(k, columns, generator=generator, device="cpu").to(self.error)

    def _sum(self, wanted: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
        pieces, sums = torch.split(wanted, self._sizes), torch.split(total, self._sizes)
        matrices = [pieces[i].view(shape) for i, shape in self._matrices.items()]
        whole = [pieces[i] for i in self._whole]
        first = _summed([*(a @ right for a, right in zip(matrices, self.rights.values(), strict=True)), *whole])
        for i, piece in zip(self._whole, first[len(matrices) :], strict=True):
            sums[i].copy_(piece)
            pieces[i].zero_()
        bases = [_orthogonal(left) for left in first[: len(matrices)]]
        rights = _summed([a.t() @ base for a, base in zip(matrices, bases, strict=True)])
        for (i, shape), base, right, matrix in zip(self._matrices.items(), bases, rights, matrices, strict=True):
            torch.mm(base, right.t(), out=sums[i].view(shape))
            matrix.sub_(sums[i].view(shape), alpha=1 / comm.world_size())
        return rights

    def sent_bytes(self, flat: torch.Tensor) -> int:
        small = sum(self._columns * (m + k) for m, k in self._matrices.values())
        return (small + sum(self._sizes[i] for i in self._whole)) * self.error.element_size()


def _summed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Collective. The sum of each tensor over ranks, in one message."""
    message = torch.cat([tensor.reshape(-1) for tensor in tensors])
    if not comm.is_alone():
        comm.add(message)
    pieces = torch.split(message, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with orthonormal columns. Values that are not finite remain so, so that the step is skipped."""
    return torch.linalg.qr(matrix)[0] if bool(torch.isfinite(matrix).all()) else matrix * torch.nan
