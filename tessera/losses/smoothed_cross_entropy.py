"""How far guessed coordinates are from the true ones: as guesses of bins, for which the next bin is
nearly right.

B meshes, F faces, C coordinates of a face, V bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.losses import to_fp32


def smoothed_cross_entropy(logits_BFCV: Tensor, bins_BFC: Tensor, sigma: float) -> Tensor:
    """Against the true bins, each spread over its neighbours by a Gaussian of so many bins (after
    MeshGPT, arXiv 2311.15475).

    -1 is padding. The mean over each mesh and then over meshes: neither padding nor a larger mesh
    beside it changes what a mesh counts.
    """
    if logits_BFCV.shape[:-1] != bins_BFC.shape:
        raise ValueError(
            f"Logits of shape {tuple(logits_BFCV.shape)} need one true bin each, so bins of shape "
            f"{tuple(logits_BFCV.shape[:-1])}, but theirs is {tuple(bins_BFC.shape)}."
        )
    logits, real_BFC = to_fp32(logits_BFCV), bins_BFC >= 0
    share_VV = smoothing(logits.shape[-1], sigma, logits)
    lost_BFC = (
        -(logits.log_softmax(-1) * share_VV[bins_BFC.clamp_min(0)])
        .sum(-1)
        .masked_fill(~real_BFC, 0)
    )
    return (lost_BFC.flatten(1).sum(1) / real_BFC.flatten(1).sum(1).clamp_min(1)).mean()


def smoothing(bins: int, sigma: float, like: Tensor) -> Tensor:
    """(V, V): row v is how the true bin v is spread. Each row sums to 1, those at the border
    too."""
    number_V = torch.arange(bins, device=like.device, dtype=like.dtype)
    if sigma == 0:
        return torch.eye(bins, device=like.device, dtype=like.dtype)
    return (-((number_V[:, None] - number_V) ** 2) / (2 * sigma**2)).softmax(1)
