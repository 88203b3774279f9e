"""The interface of metrics that are computed on generated samples.

A data configuration returns its metrics in `sample_metrics()`. The values are documented on the
page of the recipe. Where a metric computes the same value for real examples or for a model that
ignores its prompts, their names end in `_real` and `_chance`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tessera.data.dataset import DataConfig, ExampleDataset

if TYPE_CHECKING:  # datasets can be listed and inspected without torch
    from torch import Tensor

Medium = TypeVar("Medium")

MIN_EXAMPLES_PER_CLASS = 5
"""Captions are classes if on average so many training examples have the same one."""


@dataclass(frozen=True)
class Reference:
    """The real examples that samples are compared with, without augmentation."""

    train: ExampleDataset
    validation: ExampleDataset
    chosen: Sequence[int]
    """The held-out examples whose captions are the prompts of the first samples, in their order."""
    has_classes: bool
    """Whether captions are classes, each of several examples, and not texts."""

    @classmethod
    def choose(cls, data: DataConfig, captions: bool, count: int) -> Reference:
        """Choose up to `count` held-out examples, evenly over the classes if there are any."""
        split = data.without_augmentation().build(captions)
        has_classes = are_classes(list_captions(split.train)) if captions else False
        chosen = choose_evenly(split.validation, count, has_classes)
        return cls(split.train, split.validation, chosen, has_classes)


@dataclass(frozen=True)
class Samples(Generic[Medium]):
    """Generated samples with their prompts and codes, in one order."""

    media: Sequence[Medium]
    prompts: Sequence[str]
    """The prompts; "" for unconditional samples."""
    codes: Sequence[Tensor]
    """The codes of each sample on the grid of its tokenizer, -1 after its end."""
    reference: Reference | None = None


@dataclass(frozen=True)
class SampleMetrics:
    values: dict[str, float]
    protocol: dict[str, object] = field(default_factory=dict)
    """What the values were computed from: numbers of samples and of real examples."""
    notices: list[str] = field(default_factory=list)
    """Sentences for the user, such as why values are missing."""


class SampleMetric(Protocol):
    uses_prompts: bool
    """Whether samples are compared with their prompts."""
    max_samples: int
    """The number of samples that is enough, by default."""

    def __call__(self, samples: Samples) -> SampleMetrics: ...


def list_captions(dataset: ExampleDataset) -> list[str]:
    """Return the first caption of each example."""
    return [dataset.caption(index) for index in range(len(dataset))]


def are_classes(captions: Sequence[str]) -> bool:
    """Return whether there are few different captions, each of several examples."""
    num_different = len(set(captions) - {""})
    return num_different > 1 and len(captions) >= MIN_EXAMPLES_PER_CLASS * num_different


def choose_evenly(dataset: ExampleDataset, count: int, by_class: bool) -> list[int]:
    """Return up to `count` random indices, always the same ones, with the classes in turn.

    The first of them are a smaller choice of the same kind.
    """
    groups: dict[str, list[int]] = {}
    for index in range(len(dataset)):
        groups.setdefault(dataset.caption(index) if by_class else "", []).append(index)
    rng = random.Random(0)
    for indices in groups.values():
        rng.shuffle(indices)
    in_turn = itertools.zip_longest(*groups.values())
    return [index for one in in_turn for index in one if index is not None][:count]
