"""What there is to lose, and what there is to measure: pure functions of tensors, which know no
network."""

from __future__ import annotations

import torch
from torch import Tensor


def to_fp32(tensor: Tensor) -> Tensor:
    """In float32 or better: what a loss sums must not be rounded to the eight bits of bfloat16."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
