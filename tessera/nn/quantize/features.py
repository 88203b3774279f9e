"""Features of codes, from the vectors that they represent: similar codes have similar features.

A transformer that treats codes as arbitrary ids has to see each of them often before it can relate
code 417 to code 418, which may be two shades of one red. Here a code is described by its vector:
the digits of FSQ and LFQ one-hot encoded (so that a linear layer can prefer a middle value), and
the entries of a learned codebook as they are.

Shape suffixes: V codes, W dimensions, F features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_ONE_HOT_VALUES = 32
"""A dimension with at most this many distinct values is one-hot encoded."""


def code_features(codebook_VW: Tensor) -> Tensor:
    """Return features (V, F) with a mean square of 1 along each row."""
    columns = [
        one_hot(column) if len(column.unique()) <= MAX_ONE_HOT_VALUES else column[:, None]
        for column in codebook_VW.T
    ]
    features_VF = torch.cat(columns, dim=1).float()
    return features_VF / features_VF.square().mean(1, keepdim=True).sqrt().clamp_min(1e-6)


def one_hot(column_V: Tensor) -> Tensor:
    values, indices = column_V.unique(return_inverse=True)
    return F.one_hot(indices, len(values)).to(column_V.dtype)
