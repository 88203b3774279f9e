"""A finished tokenizer run in Python.

    tokenizer = Tokenizer.load("runs/images-vqgan")
    codes = tokenizer.encode(pictures)        # (B, 3, H, W) in [-1, 1] -> (B, h, w)
    pictures = tokenizer.decode(codes)

A tokenizer's fingerprint is a hash of its weights and of how examples are prepared for it: codes made by one tokenizer
mean nothing to another, so whoever reads codes compares fingerprints.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tessera.engine.modes import evaluating
from tessera.run.load import Codec, Weights, finished


class Tokenizer(Codec):
    """Encode and decode with the model of a tokenizer run."""

    @classmethod
    def load(cls, run_folder: str | Path, weights: Weights = "average") -> Tokenizer:
        return cls(finished(run_folder, weights))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def encode(self, examples: Tensor) -> Tensor:
        with evaluating(self.network):
            return self.model.encode(examples.to(self.device))

    def decode(self, codes: Tensor) -> Tensor:
        with evaluating(self.network):
            return self.model.decode(codes.to(self.device))
