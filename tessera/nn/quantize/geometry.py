"""Directions of rows: projection onto the unit sphere, and the rotation of one row onto another.

Rows shorter than `MIN_LENGTH` have no meaningful direction, and a smaller bound would make their
gradients very large.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_LENGTH = 1e-6


def l2_normalize(rows: Tensor) -> Tensor:
    """Project rows onto the unit sphere."""
    return F.normalize(rows, dim=-1, eps=MIN_LENGTH)


def rotate(rows: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Apply to rows the rotation and the scaling that map each source to its target.

    The rotation turns the plane of source and target by the angle between them. As the product of
    two reflections it is I - 2 b b^T + 2 t s^T with the unit vectors s of the source, t of the
    target and b of their sum (arXiv 2410.06424, section 4.2), so no matrix is needed. A row whose
    source has no direction is returned as it is.
    """
    unit_source, unit_target = l2_normalize(source), l2_normalize(target)
    bisector = l2_normalize(unit_source + unit_target)
    rotated = (
        rows
        - 2 * bisector * (bisector * rows).sum(-1, keepdim=True)
        + 2 * unit_target * (unit_source * rows).sum(-1, keepdim=True)
    )
    length, target_length = (row.norm(dim=-1, keepdim=True) for row in (source, target))
    scaled = rotated * (target_length / length.clamp_min(MIN_LENGTH))
    return torch.where(length > MIN_LENGTH, scaled, rows)
