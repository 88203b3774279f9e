"""Features of codes, from the vectors that they represent: similar codes have similar features.

A transformer that treats codes as arbitrary ids has to see each of them often before it can relate
code 417 to code 418, which may be two shades of one red. Here a code is described by its vector:
the digits of FSQ and LFQ one-hot encoded (so that a linear layer can prefer a middle value), and
the entries of a learned codebook as they are.

Shape suffixes: L quantizers, V codes, W dimensions, F features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_ONE_HOT_VALUES = 32
"""A dimension with at most this many distinct values is one-hot encoded."""


def code_features(codebooks_LVW: Tensor) -> Tensor:
    """Return features (L, V, F) whose mean square is 1 for each quantizer."""
    features_LVF = torch.stack([describe_codebook(codebook_VW) for codebook_VW in codebooks_LVW])
    scale_L11 = features_LVF.square().mean((1, 2), keepdim=True).sqrt()
    return features_LVF / scale_L11.clamp_min(1e-6)


def describe_codebook(codebook_VW: Tensor) -> Tensor:
    columns = [
        one_hot(column) if len(column.unique()) <= MAX_ONE_HOT_VALUES else column[:, None]
        for column in codebook_VW.T
    ]
    return torch.cat(columns, dim=1).float()


def one_hot(column_V: Tensor) -> Tensor:
    values, indices = column_V.unique(return_inverse=True)
    return F.one_hot(indices, len(values)).to(column_V.dtype)
