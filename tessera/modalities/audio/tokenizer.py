"""What everything has in common that writes sound as symbols: what it says of itself, and what it
refuses.

Sounds are (B, 1, N) in [-1, 1], in one channel; each frame of `hop` samples becomes one or more
symbols, the last one filled with silence. B batch, N samples, T frames.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class AudioTokenizer(nn.Module):
    """A subclass gives `config`, which knows its `hop`, and `quantizer`."""

    config: Any
    quantizer: Any

    @property
    def vocab_size(self) -> int:
        """Symbols of each level."""
        return self.quantizer.vocab_size

    @property
    def levels(self) -> int:
        """Symbols for each frame."""
        return self.quantizer.levels

    @property
    def hop(self) -> int:
        """Samples that one frame stands for."""
        return self.config.hop

    def real(self, lengths_B: Tensor, frames: int) -> Tensor:
        """(B, T): which frames hold a real sample."""
        frames_B = -(-lengths_B // self.hop)
        return torch.arange(frames, device=lengths_B.device) < frames_B[:, None]

    def refuse_codes(self, codes: Tensor) -> None:
        if codes.ndim != 3 or not all(codes.shape) or codes.shape[2] > self.levels:
            raise ValueError(
                f"Codes of shape {tuple(codes.shape)} came to a codec of {self.levels} levels: give (batch, frames, levels), "
                f"with 1 to {self.levels} levels. Codes of more levels are another codec's."
            )


def refuse_no_sounds(samples: Tensor) -> None:
    if samples.ndim != 3 or samples.shape[1] != 1 or not samples.is_floating_point():
        raise ValueError(
            f"A tensor of shape {tuple(samples.shape)} and type {samples.dtype} is no batch of sounds: give floats in "
            "[-1, 1] of shape (batch, 1, samples); several channels become one by their mean."
        )


def refuse_nothing(samples: int) -> None:
    """A letter if there is nothing to hear."""
    if samples < 1:
        raise ValueError(
            f"A sound of {samples} samples came to a tokenizer: there is nothing to write. Leave it out."
        )
