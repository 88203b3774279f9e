"""Arrays and tensors in place of media: integers as in files, or floats in [-1, 1]."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

if TYPE_CHECKING:  # datasets can be listed and inspected without torch
    from torch import Tensor

TOLERANCE = 1e-4
"""How far floats may exceed the range, for rounding errors."""


def is_array(media: object) -> TypeGuard[np.ndarray | Tensor]:
    """Return whether this is a NumPy array or a tensor."""
    return isinstance(media, np.ndarray) or hasattr(media, "detach")


def to_numpy(array: np.ndarray | Tensor) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.detach().cpu().numpy()


def is_float(array: np.ndarray) -> bool:
    return np.issubdtype(array.dtype, np.floating)


def check_range(array: np.ndarray | Tensor) -> None:
    """Raise ValueError unless all floats are in [-1, 1]."""
    low, high = (float(array.min()), float(array.max())) if len(array) else (0.0, 0.0)
    if not -1 - TOLERANCE <= low <= high <= 1 + TOLERANCE:  # false for NaN too
        raise ValueError(
            f"Floats must be in [-1, 1], got values from {low:g} to {high:g}: scale or clip them "
            "(levels from 0 to 255 are levels / 127.5 - 1), or give integers as in files."
        )


def move_channels_last(
    array: np.ndarray | Tensor, channels: Collection[int], num_dims: int
) -> np.ndarray:
    """Return an array of `num_dims` with the channels at the end, whether they were first or last.

    If both fit, they are last in a NumPy array of integers, as files are decoded, and first in
    floats and tensors, as models take them.
    """
    values = to_numpy(array)
    if values.ndim != num_dims:
        return values
    prefers_first = is_float(values) or not isinstance(array, np.ndarray)
    fits_first, fits_last = values.shape[0] in channels, values.shape[-1] in channels
    is_first = fits_first and (prefers_first or not fits_last)
    return np.moveaxis(values, 0, -1) if is_first else values
