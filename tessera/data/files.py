"""Numbered files of one folder, with what is said about them: what all sources of files share, whatever the medium.

A medium adds how a file is read: `item` and `collate`, as its configuration says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from tessera.data.captions import Captions, read_captions
from tessera.data.folders import Found
from tessera.media.state import state_of


@dataclass(frozen=True)
class Files:
    root: str
    names: list[str]
    captions: Captions
    config: Any

    @classmethod
    def of(cls, found: Found, config: Any) -> Self:
        """All that was found, with its captions."""
        return cls(found.root.as_posix(), found.names, read_captions(found.root, found.names, found.beside), config)

    def __len__(self) -> int:
        return len(self.names)

    def only(self, indices: Iterable[int]) -> Self:
        return replace(self, names=[self.names[index] for index in indices])

    def name(self, index: int) -> str:
        return self.names[index]

    def path(self, index: int) -> str:
        return f"{self.root}/{self.names[index]}"

    def caption(self, index: int) -> str:
        """What is said about a file, without opening it; "" where nothing is."""
        return self.captions.of(self.names[index])

    def sayings(self, index: int) -> list[str]:
        """All that is said about a file."""
        return self.captions.all_of(self.names[index])

    def said(self, index: int, rng: np.random.Generator) -> str:
        """One of its captions; drawn, where there are several, and else nothing is drawn."""
        sayings = self.sayings(index)
        return sayings[int(rng.integers(len(sayings)))] if len(sayings) > 1 else "".join(sayings)

    @property
    def captioned(self) -> int:
        """How many of the files have a caption."""
        return sum(self.captions.counts(self.names).values())

    def classes(self) -> list[str]:
        """The names of the folders, if those are the captions."""
        return sorted({self.captions.of(name) for name in self.names} - {""}) if self.captions.by_folder else []

    def mark(self, index: int) -> str:
        """Changes when the file does; of a folder that is one clip, when any of its frames does."""
        try:
            state = state_of(self.path(index))
        except OSError:
            return "not there"
        return f"{state.bytes} {state.changed_ns}"
