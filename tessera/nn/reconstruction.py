"""The output of a tokenizer's forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Reconstruction:
    """What a tokenizer returns for a batch: decoded output, codes and the quantizer's penalties."""

    output: Tensor
    """The reconstructed batch, in the shape of the input: (B, C, H, W) for images."""
    codes: Tensor
    """The codes, for example (B, h, w) for images."""
    penalties: dict[str, Tensor]
    """The quantizer's loss terms by name, already weighted."""
