"""The interface of metrics that are computed on generated samples.

A data configuration returns its metric in `sample_metric()`, or None. The values are documented on
the page of the recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:  # datasets can be listed and inspected without torch
    from torch import Tensor

Medium = TypeVar("Medium")


@dataclass(frozen=True)
class Samples(Generic[Medium]):
    """Generated samples with their prompts and codes, in one order."""

    media: Sequence[Medium]
    prompts: Sequence[str]
    """The prompts; "" for unconditional samples."""
    codes: Sequence[Tensor]
    """The codes of each sample on the grid of its tokenizer, -1 after its end."""


@dataclass(frozen=True)
class SampleMetrics:
    values: dict[str, float]
    num_samples: int
    """The number of samples that the values are computed from."""


class SampleMetric(Protocol):
    uses_prompts: bool
    """Whether samples are compared with their prompts."""

    def __call__(self, samples: Samples) -> SampleMetrics: ...
