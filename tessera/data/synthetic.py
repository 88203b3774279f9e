"""Helpers that the synthetic data of all modalities share. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


def pick(rng: np.random.Generator, choices: tuple[T, ...]) -> T:
    """Return one of `choices`, all equally likely."""
    return choices[int(rng.integers(len(choices)))]
