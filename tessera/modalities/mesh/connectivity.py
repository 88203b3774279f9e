"""Statistics of how the faces of a mesh are connected, and whether a mesh has those of real ones.

All are rates or logarithms, independent of the size of a mesh, and are computed from triangles in
canonical form:

- `small_parts`: the fraction of faces in connected parts of at most MAX_SMALL_PART faces;
- `log2_parts`: the logarithm of the number of parts;
- `boundary`: the fraction of edges that one face has;
- `non_manifold`: the fraction of edges that three or more faces have;
- `flipped`: the fraction of edges of two faces that both have in the same direction, so that their
  normals are inconsistent;
- `intersecting`: the fraction of faces, of up to MAX_TESTED, that another face of the mesh passes
  through.

A mesh is valid if its distance from real meshes is not larger than that of real meshes: the largest
difference of a statistic from the mean, in standard deviations of the real meshes, must be at most
the 95th percentile of those meshes. A statistic that is equal in all of them, such as `boundary` of
closed meshes, has the standard deviation MIN_STD.

F counts faces, S statistics, N meshes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.modalities.mesh.adjacency import count_edges, edge_ids, label_parts

STATISTICS = (
    "small_parts",
    "log2_parts",
    "boundary",
    "non_manifold",
    "flipped",
    "intersecting",
)
MAX_SMALL_PART = 3
MAX_TESTED = 64
PERCENTILE = 95
MIN_STD = np.array([0.01, 0.25, 0.01, 0.01, 0.01, 0.02])


def compute_statistics(vertices: np.ndarray, faces_F3: np.ndarray) -> np.ndarray:
    """Return (S,) the statistics of a mesh, in the order of STATISTICS."""
    parts, sizes = part_sizes(faces_F3, len(vertices))
    edges = count_edges(faces_F3)
    total = edges.boundary + edges.shared + edges.non_manifold
    return np.array(
        [
            sizes[sizes <= MAX_SMALL_PART].sum() / len(faces_F3),
            np.log2(parts),
            edges.boundary / total,
            edges.non_manifold / total,
            flipped_rate(faces_F3),
            intersecting_rate(vertices[faces_F3].astype(float)),
        ]
    )


def part_sizes(faces_F3: np.ndarray, num_vertices: int) -> tuple[int, np.ndarray]:
    """Return the number of connected parts and the number of faces of each."""
    labels_F = label_parts(faces_F3, num_vertices)[faces_F3[:, 0]]
    _, sizes = np.unique(labels_F, return_counts=True)
    return len(sizes), sizes


def flipped_rate(faces_F3: np.ndarray) -> float:
    """Return the fraction of edges of two faces that both have in the same direction."""
    ids, _ = edge_ids(faces_F3)
    forward = (faces_F3 < np.roll(faces_F3, -1, axis=1)).ravel()
    _, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    directions = np.bincount(inverse, weights=np.where(forward, 1, -1))
    shared = counts == 2
    return float((directions[shared] != 0).mean()) if shared.any() else 0.0


# ---- intersections


def intersecting_rate(triangles_F33: np.ndarray) -> float:
    """Return the fraction of faces that an edge of another face passes through, of up to MAX_TESTED
    faces spread over the mesh."""
    count = len(triangles_F33)
    tested = np.unique(np.linspace(0, count - 1, min(count, MAX_TESTED)).astype(int))
    low, high = triangles_F33.min(axis=1), triangles_F33.max(axis=1)
    overlap = (low[tested, None] <= high[None]).all(2) & (high[tested, None] >= low[None]).all(2)
    one, other = np.nonzero(overlap)
    one = tested[one]
    pairs = one != other
    one, other = one[pairs], other[pairs]
    if not len(one):
        return 0.0
    hits = np.zeros(len(one), dtype=bool)
    for corner in range(3):
        start, end = triangles_F33[other, corner], triangles_F33[other, (corner + 1) % 3]
        hits |= segments_cross(start, end, triangles_F33[one])
    return len(np.unique(one[hits])) / len(tested)


def segments_cross(start: np.ndarray, end: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """Return (P,) bool: which segments pass through the inside of their triangle (Möller 1997,
    doi.org/10.1080/10867651.1997.10487468); touching does not count."""
    a, b, c = triangles.transpose(1, 0, 2)
    direction, one, two = end - start, b - a, c - a
    across = np.cross(direction, two)
    determinant = np.einsum("pc,pc->p", one, across)
    parallel = np.abs(determinant) < 1e-9
    scale = 1 / np.where(parallel, 1.0, determinant)
    offset = start - a
    u = np.einsum("pc,pc->p", offset, across) * scale
    turned = np.cross(offset, one)
    v = np.einsum("pc,pc->p", direction, turned) * scale
    along = np.einsum("pc,pc->p", two, turned) * scale
    margin = 1e-6
    inside = (u > margin) & (v > margin) & (u + v < 1 - margin)
    return ~parallel & inside & (along > margin) & (along < 1 - margin)


# ---- validity


@dataclass(frozen=True)
class RealConnectivity:
    """The mean and the spread of the statistics of real meshes."""

    mean_S: np.ndarray
    std_S: np.ndarray
    max_distance: float

    @classmethod
    def from_statistics(cls, statistics_NS: np.ndarray) -> RealConnectivity:
        mean_S = statistics_NS.mean(axis=0)
        std_S = np.maximum(statistics_NS.std(axis=0), MIN_STD)
        distances_N = np.abs((statistics_NS - mean_S) / std_S).max(axis=1)
        return cls(mean_S, std_S, float(np.percentile(distances_N, PERCENTILE)))

    def are_valid(self, statistics_NS: np.ndarray) -> np.ndarray:
        """Return (N,) bool: which meshes are as near to the mean as real meshes are."""
        distances_N = np.abs((statistics_NS - self.mean_S) / self.std_S).max(axis=1)
        return distances_N <= max(self.max_distance, 1.0)
