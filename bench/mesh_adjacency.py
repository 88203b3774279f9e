"""What it takes to find which faces share an edge, in time and memory, for meshes of growing size.

The meshes are tori of triangles, in which every face has three neighbours, so there are 3 F pairs
in both directions: whoever finds another number has done other work. Faces and vertices are
shuffled, or sorting would be too easy.

Ours tells every byte it takes to `tracemalloc`, so its peak is exact, also where it is far below
what a process grows by. Theirs works in torch, which does not: there it is how far a fresh process
has grown (`memory.py`).
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean, median
from typing import Any

import memory

SIDES = {1_000: (20, 25), 5_000: (50, 50), 20_000: (100, 100)}
"""Faces -> how many quads, each cut in two, go around the torus one way and the other."""
THEIRS = (1_000, 5_000)
"""The sizes that theirs is asked for: it takes memory with the square of the faces, many gigabytes
at 20,000."""
REPEATS = 20


@dataclass(frozen=True)
class Spent:
    seconds: float
    mb: float
    """At its largest, beyond what was there before (2^20 bytes)."""
    pairs: int


def ours(faces: int) -> Spent:
    from tessera.modalities.mesh.adjacency import face_pairs

    mesh = torus(faces)
    face_pairs(mesh)
    seconds = median(timed(lambda: face_pairs(mesh)) for _ in range(REPEATS))
    tracemalloc.start()
    found = face_pairs(mesh)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Spent(seconds, peak / 2**20, len(found))


def theirs(faces: int) -> Spent:
    """By one thread, as all here; the memory first, since the first call must be the largest thing
    the process has done."""
    import peer_adapters  # noqa: F401  # with which the package can be imported
    import torch
    from meshgpt_pytorch.data import derive_face_edges_from_faces

    mesh = torch.from_numpy(torus(faces))

    def derive() -> Any:
        return derive_face_edges_from_faces(mesh, include_self=False)

    used = memory.measured(lambda: len(derive()))
    return Spent(median(timed(derive) for _ in range(3)), used.mb, int(used.outcome))


def timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def torus(faces: int) -> Any:
    """(F, 3) int64."""
    import numpy as np

    along, around = SIDES[faces]
    i, j = (
        grid.ravel() for grid in np.meshgrid(np.arange(along), np.arange(around), indexing="ij")
    )
    here, right, up, across = (
        (i + down) % along * around + (j + beside) % around
        for down, beside in ((0, 0), (0, 1), (1, 0), (1, 1))
    )
    triangles = np.concatenate(
        [np.stack([here, right, across], axis=1), np.stack([here, across, up], axis=1)]
    )
    rng = np.random.default_rng(faces)
    return rng.permutation(along * around)[triangles[rng.permutation(len(triangles))]].astype(
        np.int64
    )


def exponent(sizes: Sequence[int], amounts: Sequence[float]) -> float:
    """Of growth: 1 is linear. The slope through all of them in logarithms, by least squares."""
    x, y = [log(size) for size in sizes], [log(amount) for amount in amounts]
    mean_x, mean_y = fmean(x), fmean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )
