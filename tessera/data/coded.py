"""Examples as symbols: the source that a generator learns from once its examples are tokenized."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tessera.media.coded import CodedBatch


@dataclass
class CodedExample:
    codes: dict[str, Tensor]
    caption: str


@dataclass(frozen=True)
class CodedSource:
    """One row of codes for each name, by each tokenizer."""

    names: list[str]
    codes: dict[str, Tensor]
    captions: list[str]

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def caption(self, index: int) -> str:
        return self.captions[index]

    def item(self, index: int, rng: np.random.Generator) -> CodedExample:
        return CodedExample({name: codes[index] for name, codes in self.codes.items()}, self.captions[index])

    def collate(self, examples: list[CodedExample]) -> CodedBatch:
        by = examples[0].codes
        codes = {name: torch.stack([example.codes[name] for example in examples]).long() for name in by}
        return CodedBatch(codes, [example.caption for example in examples])
