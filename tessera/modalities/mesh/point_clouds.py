"""Compare sets of meshes by points on their surfaces.

The distance of two meshes is the Chamfer distance of their points: the mean distance of a point to
the nearest one of the other mesh, averaged over both directions. Coverage, minimum matching
distance and 1-nearest-neighbour accuracy are those of Achlioptas 2018 (arXiv 1707.02392) and Yang
2019 (1906.12320, section 5).

N and M count meshes, P points of a mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

NUM_POINTS = 128
NUM_NEIGHBOURS = 5


def sample_points(
    vertices: np.ndarray, triangles_F3: np.ndarray, count: int = NUM_POINTS
) -> np.ndarray:
    """Return (P, 3) points on the surface, spread evenly by area, the same ones at every call."""
    rng = np.random.default_rng(0)
    a, b, c = vertices[triangles_F3].astype(float).transpose(1, 0, 2)
    areas = np.linalg.norm(np.cross(b - a, c - a), axis=1)
    positions = (np.arange(count) + rng.random(count)) / count
    chosen = np.searchsorted(np.cumsum(areas) / areas.sum(), positions).clip(0, len(areas) - 1)
    u, v = rng.random((2, count, 1))
    root = np.sqrt(u)
    points = (1 - root) * a[chosen] + root * (1 - v) * b[chosen] + root * v * c[chosen]
    return points.astype(np.float32)


def chamfer_distances(one_NP3: np.ndarray, other_MP3: np.ndarray) -> np.ndarray:
    """Return (N, M) the Chamfer distances of all pairs."""
    count, points = len(other_MP3), other_MP3.shape[1]
    flat = other_MP3.reshape(-1, 3)
    squared = (flat**2).sum(1)
    rows = []
    for cloud in one_NP3:
        squares = (cloud**2).sum(1)[:, None] + squared - 2 * cloud @ flat.T
        squares = squares.reshape(-1, count, points)
        forward, backward = (np.sqrt(np.maximum(squares.min(axis=axis), 0)) for axis in (2, 0))
        rows.append((forward.mean(axis=0) + backward.mean(axis=1)) / 2)
    return np.array(rows).reshape(len(one_NP3), count)


def compare_sets(samples_NP3: np.ndarray, real_MP3: np.ndarray) -> dict[str, float]:
    """Return coverage, minimum matching distance and 1-nearest-neighbour accuracy."""
    across_NM = chamfer_distances(samples_NP3, real_MP3)
    return {
        "coverage": len(np.unique(across_NM.argmin(axis=1))) / len(real_MP3),
        "min_matching_distance": float(across_NM.min(axis=0).mean()),
        "nearest_neighbour_accuracy": nearest_neighbour_accuracy(
            chamfer_distances(samples_NP3, samples_NP3),
            chamfer_distances(real_MP3, real_MP3),
            across_NM,
        ),
    }


def nearest_neighbour_accuracy(
    samples_NN: np.ndarray, real_MM: np.ndarray, across_NM: np.ndarray
) -> float:
    """Return how often the nearest other mesh is of the same set; 0.5 for sets of the same
    distribution."""
    top = np.concatenate([samples_NN, across_NM], axis=1)
    bottom = np.concatenate([across_NM.T, real_MM], axis=1)
    distances = np.concatenate([top, bottom])
    np.fill_diagonal(distances, np.inf)
    is_sample = np.arange(len(distances)) < len(samples_NN)
    return float((is_sample[distances.argmin(axis=1)] == is_sample).mean())


def classify(distances_NM: np.ndarray, labels_M: Sequence[str]) -> list[str]:
    """Return the most frequent label of the NUM_NEIGHBOURS nearest meshes, the nearest at a tie."""
    nearest = np.argsort(distances_NM, axis=1, kind="stable")[:, :NUM_NEIGHBOURS]
    votes = [[labels_M[index] for index in row] for row in nearest.tolist()]
    return [Counter(row).most_common(1)[0][0] for row in votes]


def head_noun(caption: str) -> str:
    """Return the word that names the object of an English caption: "table" of "a wide table with
    four legs", "sofa" of "rattan sofa, seat"."""
    phrase = caption.lower().partition(",")[0]
    for preposition in (" with ", " of ", " for ", " in ", " on ", " without "):
        phrase = phrase.partition(preposition)[0]
    words = phrase.split()
    return words[-1].strip(".;:!?") if words else ""
