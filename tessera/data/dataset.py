"""A folder of files, or the built-in toys: what the configurations of all media have in common.

A medium says how a folder becomes a source, and how toys do, and what it is without augmentation.
From these three follow what is learnt from, what is held out, and all of it in order. The fields
stand in the class of each medium, with the medium's own between them, since their order is that of
the flags and of config.json; here they are only named.
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
from tessera.data.discovery import Found, file_signature
from tessera.run.directory import UserError


@dataclass(frozen=True)
class Split:
    train: Any
    """a source, augmented as its configuration says"""
    validation: Any
    """a source, never augmented"""


class Subset:
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

    def all_captions(self, index: int) -> list[str]:
        return all_captions(self.source, self.indices[index])

    def signature(self, index: int) -> str:
        return self.source.signature(self.indices[index])

    def item(self, index: int, rng: np.random.Generator) -> Any:
        return self.source.item(self.indices[index], rng)

    def collate(self, examples: list[Any]) -> Any:
        return self.source.collate(examples)


def all_captions(source: Any, index: int) -> list[str]:
    """All that a source says about an example; of most there is one caption, or none."""
    sample_caption = (
        source.all_captions(index) if hasattr(source, "sayings") else [source.caption(index)]
    )
    return [caption for caption in sample_caption if caption]


def divide(names: Sequence[str], share: float, seed: int = 0) -> tuple[list[int], list[int]]:
    """The indices to learn from and the indices to hold out; another seed holds out others.

    Only where the hash leaves a side empty, as it may in a folder of a few files, is one file moved
    there: the lowest hash is held out, the highest learnt from. That one file can change sides when
    such a folder grows. With a share of 0, or a single file, everything is both learnt from and
    validated on.
    """
    if not 0 <= share < 1:
        raise ValueError(
            f"The share held out for validation must be at least 0 and below 1, but it is {share}."
        )
    full = list(range(len(names)))
    if share == 0 or len(names) < 2:
        return full, full
    places = [place(name, seed) for name in names]
    held_out = {i for i in full if places[i] < share}
    if not held_out:
        held_out = {min(full, key=places.__getitem__)}
    if len(held_out) == len(names):
        held_out.remove(max(full, key=places.__getitem__))
    return [i for i in full if i not in held_out], sorted(held_out)


def place(name: str, seed: int = 0) -> float:
    """A name's fixed place in [0, 1). One spelling of accents, since file systems differ in which
    they give back."""
    spelt = unicodedata.normalize("NFC", name).encode("utf-8", "surrogateescape")
    salt = seed.to_bytes(8, "big", signed=True)
    return int.from_bytes(hashlib.blake2b(spelt, digest_size=8, salt=salt).digest(), "big") / 2**64


@dataclass(frozen=True)
class FileDataset:
    root: str
    names: list[str]
    captions: Captions
    config: Any

    @classmethod
    def of(cls, found: Found, config: Any) -> Self:
        """All that was found, with its captions."""
        return cls(
            found.root.as_posix(),
            found.names,
            read_captions(found.root, found.names, found.beside),
            config,
        )

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

    def all_captions(self, index: int) -> list[str]:
        """All that is said about a file."""
        return self.captions.all_of(self.names[index])

    def sample_caption(self, index: int, rng: np.random.Generator) -> str:
        """One of its captions; drawn, where there are several, and else nothing is drawn."""
        all_captions = self.all_captions(index)
        return (
            all_captions[int(rng.integers(len(all_captions)))]
            if len(all_captions) > 1
            else "".join(all_captions)
        )

    @property
    def captioned(self) -> int:
        """How many of the files have a caption."""
        return sum(self.captions.counts(self.names).values())

    def classes(self) -> list[str]:
        """The names of the folders, if those are the captions."""
        return (
            sorted({self.captions.of(name) for name in self.names} - {""})
            if self.captions.by_folder
            else []
        )

    def signature(self, index: int) -> str:
        """Changes when the file does; of a folder that is one clip, when any of its frames does."""
        try:
            state = file_signature(self.path(index))
        except OSError:
            return "not there"
        return f"{state.bytes} {state.changed_ns}"


@dataclass(frozen=True)
class SyntheticDataset:
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
"""The first toy held out: beyond all that are learnt from, so that asking for more of those moves
none."""


class DataConfig:
    path: str | None
    """where the files lie; None: the built-in toys"""
    val_fraction: float
    split_seed: int
    toys: int

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise ValueError(
                f"val_fraction must be at least 0 and below 1, but it is {self.val_fraction}."
            )
        if self.toys < 1:
            raise ValueError(
                f"There must be at least 1 toy to learn from, but toys is {self.toys}."
            )

    def folder_dataset(self) -> FileDataset:
        """All of the path, in order, prepared as this configuration says."""
        raise NotImplementedError

    def synthetic_dataset(self) -> SyntheticDataset:
        """The toys to learn from."""
        raise NotImplementedError

    def without_augmentation(self) -> Self:
        """The same without augmentation."""
        raise NotImplementedError

    def libraries(self) -> tuple[Callable[[], ModuleType], ...]:
        """What gives the libraries that a run needs beyond the core, or says how to get them."""
        return ()

    def build(self) -> Split:
        self.require_libraries()
        return self.synthetic_split() if self.path is None else self.folder_split()

    def full(self) -> FileDataset | SyntheticDataset:
        """All of it in order, each example once and unaugmented: to tokenize, to evaluate, to look
        at."""
        self.require_libraries()
        return (
            self.synthetic_dataset()
            if self.path is None
            else self.without_augmentation().folder_dataset()
        )

    def folder_split(self) -> Split:
        return self.split_of(self.folder_dataset())

    def split_of(self, folder: FileDataset) -> Split:
        train, validation = divide(folder.names, self.val_fraction, self.split_seed)
        return Split(
            train=folder.only(train),
            validation=replace(folder.only(validation), config=self.without_augmentation()),
        )

    def synthetic_split(self) -> Split:
        train = self.synthetic_dataset()
        if self.val_fraction == 0:
            return Split(train, train)
        held_out = max(1, round(self.toys * self.val_fraction))
        return Split(train, replace(train, count=held_out, first=HELD_OUT_TOYS))

    def require_libraries(self) -> None:
        """Asked for at the start, and by toys too: a run would otherwise miss them when it first
        shows what it makes."""
        try:
            for library in self.libraries():
                library()
        except ModuleNotFoundError as error:
            raise UserError(str(error)) from error
