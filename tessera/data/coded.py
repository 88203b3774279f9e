"""Examples as symbols: the source that a generator learns from once its examples are tokenized."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    sayings_by_index: dict[int, list[str]] = field(default_factory=dict)
    """all captions of those examples that have several"""

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def caption(self, index: int) -> str:
        return self.captions[index]

    def sayings(self, index: int) -> list[str]:
        return self.sayings_by_index.get(index, [self.captions[index]])

    def item(self, index: int, rng: np.random.Generator) -> CodedExample:
        """A draw for the caption, where there are several."""
        said = self.sayings(index)
        caption = said[int(rng.integers(len(said)))] if len(said) > 1 else said[0]
        return CodedExample({name: codes[index] for name, codes in self.codes.items()}, caption)

    def collate(self, examples: list[CodedExample]) -> CodedBatch:
        return collate(examples)


def collate(examples: list[CodedExample]) -> CodedBatch:
    by = examples[0].codes
    codes = {name: torch.stack([example.codes[name] for example in examples]).long() for name in by}
    return CodedBatch(codes, [example.caption for example in examples])
