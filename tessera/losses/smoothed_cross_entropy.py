"""Cross-entropy over bins of coordinates, with targets that are smoothed over neighboring bins.

B meshes, F faces, C coordinates of a face, V bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.nn.precision import to_fp32


def smoothed_cross_entropy(logits_BFCV: Tensor, bins_BFC: Tensor, sigma: float) -> Tensor:
    """Return the cross-entropy with Gaussian-smoothed targets (after MeshGPT, arXiv 2311.15475).

    `sigma` is in bins. Bins of -1 are padding. The loss is the mean over each mesh and then over
    meshes: the weight of a mesh depends neither on padding nor on larger meshes in the batch.
    """
    if logits_BFCV.shape[:-1] != bins_BFC.shape:
        raise ValueError(
            f"Logits of shape {tuple(logits_BFCV.shape)} need target bins of shape "
            f"{tuple(logits_BFCV.shape[:-1])}, got {tuple(bins_BFC.shape)}: pass one bin per "
            "coordinate."
        )
    logits, valid_BFC = to_fp32(logits_BFCV), bins_BFC >= 0
    target_VV = smooth_targets(logits.shape[-1], sigma, logits)
    loss_BFC = (
        -(logits.log_softmax(-1) * target_VV[bins_BFC.clamp_min(0)])
        .sum(-1)
        .masked_fill(~valid_BFC, 0)
    )
    return (loss_BFC.flatten(1).sum(1) / valid_BFC.flatten(1).sum(1).clamp_min(1)).mean()


def smooth_targets(bins: int, sigma: float, like: Tensor) -> Tensor:
    """Return the target distribution of each true bin, (V, V); each row sums to 1.

    Device and precision are those of `like`.
    """
    number_V = torch.arange(bins, device=like.device, dtype=like.dtype)
    if sigma == 0:
        return torch.eye(bins, device=like.device, dtype=like.dtype)
    return (-((number_V[:, None] - number_V) ** 2) / (2 * sigma**2)).softmax(1)
