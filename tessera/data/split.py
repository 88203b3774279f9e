"""The choice of held-out examples by a hash of their names.

It depends on the name alone, so a folder can grow without moving a held-out file to the training
set.
"""

from __future__ import annotations

import ctypes
import hashlib
import unicodedata
from array import array
from collections.abc import Sequence

import numpy as np


def split_names(
    names: Sequence[str], val_fraction: float, seed: int = 0
) -> tuple[array[int], array[int]]:
    """Return the indices of the training set and of the held-out set.

    Equal names, as those of groups, are on the same side. Where the hash leaves a side empty, as in
    a folder of a few files, the file with the lowest hash is held out or the one with the highest
    is trained on. With a fraction of 0, or a single name, both sets contain everything.
    """
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction must be at least 0 and below 1, got {val_fraction}.")
    # Arrays: a list of a million numbers takes 40 MB, of which Python returns nothing when freed.
    hashes = np.fromiter((hash_name(name, seed) for name in names), np.float64, len(names))
    if val_fraction == 0 or not len(names) or hashes.min() == hashes.max():
        indices = array("q", range(len(names)))
        return indices, indices
    is_held_out = hashes < val_fraction
    if not is_held_out.any():
        is_held_out = hashes == hashes.min()
    if is_held_out.all():
        is_held_out = hashes < hashes.max()
    train, held_out = (np.flatnonzero(one).astype("q") for one in (~is_held_out, is_held_out))
    return array("q", train.tobytes()), array("q", held_out.tobytes())


def release_freed_memory() -> None:
    """Return memory that was freed to the system, which glibc keeps for itself.

    After a list of files was read and split, that was half of what the process had taken for it.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def hash_name(name: str, seed: int = 0) -> float:
    """Hash a name to [0, 1); accents are normalised, since file systems differ in their form."""
    normalised = unicodedata.normalize("NFC", name).encode("utf-8", "surrogateescape")
    salt = seed.to_bytes(8, "big", signed=True)
    digest = hashlib.blake2b(normalised, digest_size=8, salt=salt).digest()
    return int.from_bytes(digest, "big") / 2**64
