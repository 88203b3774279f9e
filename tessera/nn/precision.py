"""Arithmetic that half precision would spoil: distances, entropies, losses, and code assignment.

Under autocast a network multiplies in bfloat16, whose 8 significant bits cannot distinguish two
neighboring codes. Autocast is disabled inside `full_precision`. It does not convert tensors back,
so `to_fp32` converts half precision to float32 first. float64 stays float64.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

HAS_AUTOCAST = {
    name: torch.amp.is_autocast_available(name) for name in ("cpu", "cuda", "mps", "xpu")
}
"""Looked up once: torch.compile cannot trace the question."""


def full_precision(device_type: str) -> AbstractContextManager[object]:
    """Disable autocast on this type of device."""
    if not HAS_AUTOCAST.get(device_type, False):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def to_fp32(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32, unless it has a higher precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
