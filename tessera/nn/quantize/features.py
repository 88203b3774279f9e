"""What is known of a quantizer's symbols before anything is learnt about them: symbols that mean
nearly the same look alike.

A transformer that takes symbols for mere names must see each of them often before it knows that 417
and 418 are two shades of one red. Here a symbol is described by what it stands for: the digits of
FSQ and LFQ, each as one of a few kinds (so that a linear layer can prefer a middle one), and the
numbers of a learnt codebook's row.

V symbols, W dimensions, F features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 32
"""A dimension with so many different values, or fewer, is a digit."""


def features(values_VW: Tensor) -> Tensor:
    """(V, F), of mean square 1 along each row."""
    described = [
        digit(column) if len(column.unique()) <= FEW else column[:, None] for column in values_VW.T
    ]
    features_VF = torch.cat(described, dim=1).float()
    return features_VF / features_VF.square().mean(1, keepdim=True).sqrt().clamp_min(1e-6)


def digit(column_V: Tensor) -> Tensor:
    kinds, which = column_V.unique(return_inverse=True)
    return F.one_hot(which, len(kinds)).to(column_V.dtype)
