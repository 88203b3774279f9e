"""A folder of files, or the built-in toys: what the configurations of all media have in common.

A medium says how a folder becomes a source, and how toys do, and what it is without augmentation. From these three follow what
is learnt from, what is held out, and all of it in order. The fields stand in the class of each medium, with the medium's own
between them, since their order is that of the flags and of config.json; here they are only named.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from types import ModuleType
from typing import Any, Self

import numpy as np

from tessera.data.captions import Captions, read_captions
from tessera.data.discovery import Found, state_of
from tessera.run.directory import Refused


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


HELD_OUT_TOYS = 1 << 32
"""The first toy held out: beyond all that are learnt from, so that asking for more of those moves none."""


class FilesOrToys:
    path: str | None
    """where the files lie; None: the built-in toys"""
    validation_share: float
    split_seed: int
    toys: int

    def __post_init__(self) -> None:
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share must be at least 0 and below 1, but it is {self.validation_share}.")
        if self.toys < 1:
            raise ValueError(f"There must be at least 1 toy to learn from, but toys is {self.toys}.")

    def folder_source(self) -> Files:
        """All of the path, in order, prepared as this configuration says."""
        raise NotImplementedError

    def toy_source(self) -> Toys:
        """The toys to learn from."""
        raise NotImplementedError

    def plain(self) -> Self:
        """The same without augmentation."""
        raise NotImplementedError

    def libraries(self) -> tuple[Callable[[], ModuleType], ...]:
        """What gives the libraries that a run needs beyond the core, or says how to get them."""
        return ()

    def build(self) -> Split:
        self.require_libraries()
        return self.toy_split() if self.path is None else self.folder_split()

    def everything(self) -> Files | Toys:
        """All of it in order, each example once and unaugmented: to tokenize, to evaluate, to look at."""
        self.require_libraries()
        return self.toy_source() if self.path is None else self.plain().folder_source()

    def folder_split(self) -> Split:
        return self.split_of(self.folder_source())

    def split_of(self, folder: Files) -> Split:
        train, validation = divide(folder.names, self.validation_share, self.split_seed)
        return Split(train=folder.only(train), validation=replace(folder.only(validation), config=self.plain()))

    def toy_split(self) -> Split:
        train = self.toy_source()
        if self.validation_share == 0:
            return Split(train, train)
        held_out = max(1, round(self.toys * self.validation_share))
        return Split(train, replace(train, count=held_out, first=HELD_OUT_TOYS))

    def require_libraries(self) -> None:
        """Asked for at the start, and by toys too: a run would otherwise miss them when it first shows what it makes."""
        try:
            for library in self.libraries():
                library()
        except ModuleNotFoundError as error:
            raise Refused(str(error)) from error
