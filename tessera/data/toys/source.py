"""Toys by number, as a source: what all toys share, whatever the medium.

A medium adds how a toy is imagined and what is said about it: `caption`, `mark`, `item` and `collate`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class Toys:
    """Toys number `first` to `first + count - 1`."""

    count: int
    _: KW_ONLY
    seed: int = 0
    first: int = 0

    def __len__(self) -> int:
        return self.count

    def number(self, index: int) -> int:
        return self.first + index

    def name(self, index: int) -> str:
        return f"toy-{self.number(index):06d}"

    @property
    def captioned(self) -> int:
        """How many of the toys have a caption: all."""
        return self.count
