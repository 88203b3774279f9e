"""Which examples are learnt from, and which are held out.

An example's side is a function of its name alone, so that a folder that grows by a million files moves none of those
that were there: what was held out a month ago has still never been learnt from.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Split:
    train: Any
    """a source, augmented as its configuration says"""
    validation: Any
    """a source, never augmented"""


class Some:
    """Some examples of a source, as a source."""

    def __init__(self, source: Any, indices: Iterable[int]):
        self.source = source
        self.indices = [i for i in indices if i < len(source)]

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])

    def caption(self, index: int) -> str:
        return self.source.caption(self.indices[index])

    def sayings(self, index: int) -> list[str]:
        return sayings(self.source, self.indices[index])

    def mark(self, index: int) -> str:
        return self.source.mark(self.indices[index])

    def item(self, index: int, rng: np.random.Generator) -> Any:
        return self.source.item(self.indices[index], rng)

    def collate(self, examples: list[Any]) -> Any:
        return self.source.collate(examples)


def sayings(source: Any, index: int) -> list[str]:
    """All that a source says about an example; of most there is one caption, or none."""
    said = source.sayings(index) if hasattr(source, "sayings") else [source.caption(index)]
    return [caption for caption in said if caption]


def divide(names: Sequence[str], share: float, seed: int = 0) -> tuple[list[int], list[int]]:
    """The indices to learn from and the indices to hold out; another seed holds out others.

    Only where the hash leaves a side empty, as it may in a folder of a few files, is one file moved there: the lowest
    hash is held out, the highest learnt from. That one file can change sides when such a folder grows. With a share of
    0, or a single file, everything is both learnt from and validated on.
    """
    if not 0 <= share < 1:
        raise ValueError(f"The share held out for validation must be at least 0 and below 1, but it is {share}.")
    everything = list(range(len(names)))
    if share == 0 or len(names) < 2:
        return everything, everything
    places = [place(name, seed) for name in names]
    held_out = {i for i in everything if places[i] < share}
    if not held_out:
        held_out = {min(everything, key=places.__getitem__)}
    if len(held_out) == len(names):
        held_out.remove(max(everything, key=places.__getitem__))
    return [i for i in everything if i not in held_out], sorted(held_out)


def place(name: str, seed: int = 0) -> float:
    """A name's fixed place in [0, 1). One spelling of accents, since file systems differ in which they give back."""
    spelt = unicodedata.normalize("NFC", name).encode("utf-8", "surrogateescape")
    salt = seed.to_bytes(8, "big", signed=True)
    return int.from_bytes(hashlib.blake2b(spelt, digest_size=8, salt=salt).digest(), "big") / 2**64
