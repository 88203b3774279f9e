"""Arithmetic that half precision would spoil: distances, entropies, and whatever decides which
symbol is written.

Autocast lets a network multiply in bfloat16, whose 8 significant bits cannot tell two neighbouring
symbols apart. What runs inside `full_precision` is left alone by autocast, and `to_fp32` brings a
half precision tensor to float32 beforehand (autocast being off widens nothing by itself). float64
stays float64.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full_precision(device_type: str) -> AbstractContextManager[object]:
    """Autocast off on this kind of device, whatever was on outside."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def to_fp32(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if that is what it was."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
