"""Tokens of two recordings of one speaker, one after the other.

SoundStorm is trained to continue a prefix of its example in the same voice (Borsos 2023, arXiv
2305.09636, section 3.3). A sample is requested with the tokens of another recording as its prefix,
so that it is trained on such pairs where the speakers are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tessera.data.dataset import ExampleDataset
from tessera.data.tokens import TokenDataset, TokenizedBatch, TokenizedExample


@dataclass(frozen=True)
class JoinedRecordings(ExampleDataset[TokenizedExample]):
    """Each example follows another one of its speaker, which is drawn at each visit."""

    dataset: TokenDataset
    hops: Mapping[str, int]
    """Samples per frame of each tokenizer, by its name."""
    speakers: Mapping[str, str]
    """The speaker of each example, by its name."""
    by_speaker: dict[str, list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for index, name in enumerate(self.dataset.names):
            self.by_speaker.setdefault(self.speakers[name], []).append(index)

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, index: int) -> str:
        return self.dataset.name(index)

    def all_captions(self, index: int) -> list[str]:
        return self.dataset.all_captions(index)

    def item(self, index: int, rng: np.random.Generator) -> TokenizedExample:
        others = self.by_speaker[self.speakers[self.name(index)]]
        position = int(rng.integers(max(1, len(others) - 1)))
        own = self.dataset.item(index, rng)
        others = [other for other in others if other != index]
        if not others:
            return TokenizedExample({n: drop_padding(c) for n, c in own.codes.items()}, own.caption)
        first = self.whole_frames(self.dataset.item(others[position], rng).codes)
        joined = {
            name: torch.cat([first[name], drop_padding(codes)]) for name, codes in own.codes.items()
        }
        return TokenizedExample(joined, own.caption)

    def whole_frames(self, codes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Cut the codes of an example where frames of all tokenizers end."""
        valid = {name: drop_padding(one) for name, one in codes.items()}
        step = math.lcm(*self.hops.values())
        samples = min(len(one) * self.hops[name] for name, one in valid.items()) // step * step
        return {name: one[: samples // self.hops[name]] for name, one in valid.items()}

    def collate(self, examples: list[TokenizedExample]) -> TokenizedBatch:
        codes = {
            name: pad_sequence(
                [example.codes[name] for example in examples], batch_first=True, padding_value=-1
            ).long()
            for name in examples[0].codes
        }
        return TokenizedBatch(codes, [example.caption for example in examples])


def drop_padding(codes: Tensor) -> Tensor:
    """Return the frames of an example before its padding of -1."""
    return (
        codes[: int((codes.flatten(1)[:, 0] >= 0).sum())] if codes.ndim > 1 else codes[codes >= 0]
    )
