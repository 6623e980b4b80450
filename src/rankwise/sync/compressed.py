"""Gradients in smaller messages: the one message of flat.py, sent by a codec, and its tail in a separate, exact message.

reduction = CompressedReduction(parameters, "int8");   reduction.memory
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from rankwise.host.text import size
from rankwise.sync.codecs import codec_of
from rankwise.sync.flat import FlatReduction


class Memory(NamedTuple):
    """What compressed messages keep from step to step, by the id of the parameter; views of the codecs' tensors."""

    errors: dict[int, torch.Tensor]
    """What this rank's messages have lost so far, flat."""

    rights: dict[int, torch.Tensor]
    """Where the iterations of PowerSGD continue; equal on all ranks."""

    def put(self, other: Memory) -> None:
        """Continue with the values of `other`. Entries for parameters that are not trained here are ignored."""
        for mine, theirs in ((self.errors, other.errors), (self.rights, other.rights)):
            for key in mine.keys() & theirs.keys():
                if mine[key].shape == theirs[key].shape:
                    mine[key].copy_(theirs[key])

    def scale(self, factor: float) -> None:
        """From now on gradients have another scale."""
        for error in self.errors.values():
            error.mul_(factor)


class CompressedReduction(FlatReduction):
    """A Reduction of several ranks. `compress`: a name from codecs.py."""

    def __init__(self, parameters: Sequence[nn.Parameter], compress: str) -> None:
        super().__init__(parameters, together=True, apart=True)
        self._compress = compress
        self._codecs = [codec_of(compress, buffer.flat, [p.shape for p in buffer.parameters]) for buffer in self._buffers]
        self.memory = Memory({}, {})
        for buffer, codec in zip(self._buffers, self._codecs, strict=True):
            ids = [id(p) for p in buffer.parameters]
            self.memory.errors.update(zip(ids, torch.split(codec.error, [p.numel() for p in buffer.parameters]), strict=True))
            self.memory.rights.update({ids[place]: right for place, right in codec.rights.items()})

    def _exchange(self, changed: bool) -> None:
        for buffer, codec in zip(self._buffers, self._codecs, strict=True):
            codec.sum_(buffer.flat)

    def applied(self, unused: Sequence[int]) -> None:
        errors = [self.memory.errors[id(self.parameters[index])] for index in unused]
        before = [error.clone() for error in errors]  # the message has sent them, and the step does not use it
        for codec in self._codecs:
            codec.remember()
        for error, kept in zip(errors, before, strict=True):
            error.copy_(kept)

    def _gradient_bytes(self) -> int:
        return sum(codec.sent_bytes(buffer.flat) for buffer, codec in zip(self._buffers, self._codecs, strict=True))

    def describe(self) -> str:
        return f"{size(self._gradient_bytes())} per step ({self._compress}; {size(super()._gradient_bytes())} uncompressed)"
