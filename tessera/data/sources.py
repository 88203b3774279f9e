"""A folder of files, or the built-in toys: what the configurations of all media have in common.

A medium says how a folder becomes a source, and how toys do, and what it is without augmentation. From these three follow what
is learnt from, what is held out, and all of it in order. The fields stand in the class of each medium, with the medium's own
between them, since their order is that of the flags and of config.json; here they are only named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Self

from tessera.data.files import Files
from tessera.data.split import Split, divide
from tessera.data.toys.source import Toys
from tessera.folder import Refused

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
