"""Examples that are already written as symbols, with what is said about them: what a generator learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # listing and reading files needs no torch
    import torch


@dataclass
class CodedBatch:
    codes: dict[str, torch.Tensor]
    """By each tokenizer the run stands on: (B, *grid) whole numbers."""
    captions: list[str]

    def to(self, device: torch.device | str) -> CodedBatch:
        return CodedBatch({name: codes.to(device) for name, codes in self.codes.items()}, self.captions)
