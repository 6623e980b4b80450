"""A digest for each tensor: equal digests mean equal bits.

digests(model.state_dict())
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash


def digests(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Only for tensors; other values are skipped."""
    return {name: digest(tensor) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    data: Any = values.view(torch.uint8).numpy() if values.numel() else b""
    return xxhash.xxh3_64_hexdigest(data)
