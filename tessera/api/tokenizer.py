"""A finished tokenizer run in Python.

    tokenizer = Tokenizer.load("runs/images-vqgan")
    codes = tokenizer.encode(pictures)        # (B, 3, H, W) in [-1, 1] -> (B, h, w)
    pictures = tokenizer.decode(codes)

A tokenizer's fingerprint is a hash of its weights and of how examples are prepared for it: codes
made by one tokenizer mean nothing to another, so whoever reads codes compares fingerprints.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tessera.engine.modes import eval_mode
from tessera.run.load import Tokenizer, Weights, load_run


class Tokenizer(Tokenizer):
    """Encode and decode with the model of a tokenizer run."""

    @classmethod
    def load(cls, run_folder: str | Path, weights: Weights = "ema") -> Tokenizer:
        return cls(load_run(run_folder, weights))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def encode(self, examples: Tensor) -> Tensor:
        with eval_mode(self.network):
            return self.model.encode(examples.to(self.device))

    def decode(self, codes: Tensor) -> Tensor:
        with eval_mode(self.network):
            return self.model.decode(codes.to(self.device))
