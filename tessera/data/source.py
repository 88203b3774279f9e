"""An object with a length and items as a dataset: a `torch.utils.data.Dataset`, a list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from torch.utils.data import default_collate

from tessera.data.dataset import ExampleDataset
from tessera.engine.modes import seed
from tessera.engine.task import TensorExamples
from tessera.run.errors import UserError


class Items(Protocol):
    """A sequence of items; its type states nothing else about them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


@dataclass(frozen=True)
class DatasetSource(ExampleDataset[object]):
    """Items of an object, collated by a function.

    Items that are drawn at random (crops, flips) are drawn from the seed of the example, since the
    global generators are seeded before each of them.
    """

    items: Items
    collate_items: Callable[..., object] = default_collate

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return f"item-{index:06d}"

    def item(self, index: int, rng: np.random.Generator) -> object:
        seed(int(rng.integers(1 << 62)))
        return self.items[index]

    def collate(self, examples: list[object]) -> TensorExamples:
        return TensorExamples(self.collate_items(examples))


def require_items(data: object) -> Items:
    """Return an object that has a length and items by index, or raise UserError."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise UserError(
            f"The data are a {type(data).__name__}, but must have a length and items by index, so "
            "that a run can be resumed at any step: give a map-style dataset, or store the "
            "examples of a stream first."
        )
    return cast(Items, data)
