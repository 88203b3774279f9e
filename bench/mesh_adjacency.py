"""Time and memory of finding the pairs of faces that share an edge, for meshes of growing size.

The meshes are tori of triangles, in which every face has three neighbors, so there are 3 F ordered
pairs; another count means that a result is wrong. Faces and vertices are shuffled, so that sorting
gets no input that is sorted already.

Our memory is the peak that `tracemalloc` records, which is exact even where it is far below the
growth of a process. Theirs allocates with torch, which `tracemalloc` does not record; there it is
the growth of a fresh process (`memory.py`).
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

GRIDS = {1_000: (20, 25), 5_000: (50, 50), 20_000: (100, 100)}
"""Number of faces -> quads around the torus in both directions; each quad is two faces."""
THEIR_SIZES = (1_000, 5_000)
"""The sizes that theirs is measured on: its memory grows with the square of the number of faces, to
many gigabytes at 20,000."""
REPEATS = 20


@dataclass(frozen=True)
class AdjacencyCost:
    """The cost of one call."""

    seconds: float
    mb: float
    """Peak memory beyond what was allocated before, in units of 2^20 bytes."""
    pairs: int


def measure_ours(faces: int) -> AdjacencyCost:
    from tessera.modalities.mesh.adjacency import find_adjacent_faces

    mesh = build_torus(faces)
    find_adjacent_faces(mesh)
    seconds = median(time_call(lambda: find_adjacent_faces(mesh)) for _ in range(REPEATS))
    tracemalloc.start()
    found = find_adjacent_faces(mesh)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return AdjacencyCost(seconds, peak / 2**20, len(found))


def measure_theirs(faces: int) -> AdjacencyCost:
    """Measure memory first: that call must need more memory than anything before it."""
    from peers import shims

    shims.install()
    import torch
    from meshgpt_pytorch.data import derive_face_edges_from_faces

    mesh = torch.from_numpy(build_torus(faces))

    def derive() -> Any:
        return derive_face_edges_from_faces(mesh, include_self=False)

    use = memory.measure_memory(lambda: len(derive()))
    return AdjacencyCost(median(time_call(derive) for _ in range(3)), use.mb, int(use.outcome))


def time_call(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def build_torus(faces: int) -> Any:
    """Return the faces of a torus, (F, 3) int64."""
    import numpy as np

    along, around = GRIDS[faces]
    i, j = (
        grid.ravel() for grid in np.meshgrid(np.arange(along), np.arange(around), indexing="ij")
    )
    here, right, up, across = (
        (i + di) % along * around + (j + dj) % around for di, dj in ((0, 0), (0, 1), (1, 0), (1, 1))
    )
    triangles = np.concatenate(
        [np.stack([here, right, across], axis=1), np.stack([here, across, up], axis=1)]
    )
    rng = np.random.default_rng(faces)
    return rng.permutation(along * around)[triangles[rng.permutation(len(triangles))]].astype(
        np.int64
    )


def growth_exponent(sizes: Sequence[int], amounts: Sequence[float]) -> float:
    """Fit amount ~ size^exponent by least squares of the logarithms; 1 is linear growth."""
    x, y = [log(size) for size in sizes], [log(amount) for amount in amounts]
    mean_x, mean_y = fmean(x), fmean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )
