"""Find the faces of a mesh that share an edge, in the time that sorting the edges takes.

F counts faces, K the corners of a face, E pairs. 20,000 triangles take 10 ms, about a tenth of the
time that reading them from an OBJ file takes. Which faces remain depends on augmentation, so pairs
are computed whenever an example is made. Examples that are not augmented are made once and cached
together with their pairs: in memory (`modalities/mesh/dataset.py`), and on disk if requested
(`modalities/mesh/cache.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_FACES_PER_EDGE = 8
"""Where many faces share one edge, each is paired with this many of the faces that follow, and not
with all: the number of pairs stays linear in F."""


def find_adjacent_faces(faces_FK: np.ndarray) -> np.ndarray:
    """Return (E, 2) int64: all pairs of different faces that share an edge, in both directions,
    sorted and without duplicates."""
    edges, owners = edge_ids(faces_FK)
    order = np.argsort(edges, kind="stable")
    edges, owners = edges[order], owners[order]
    pairs = []
    for distance in range(1, min(MAX_FACES_PER_EDGE, len(edges) - 1) + 1):
        same = edges[:-distance] == edges[distance:]
        if not same.any():
            break
        pairs.append(np.stack([owners[:-distance][same], owners[distance:][same]], axis=1))
    if not pairs:
        return np.zeros((0, 2), np.int64)
    one, other = np.concatenate(pairs).T
    one, other = one[one != other], other[one != other]
    count = len(faces_FK)
    both = np.unique(np.concatenate([one * count + other, other * count + one]))
    return np.stack(np.divmod(both, count), axis=1)


@dataclass(frozen=True)
class EdgeCounts:
    """The number of edges by how many faces share them."""

    boundary: int
    """Edges of one face."""
    shared: int
    """Edges of two faces, as everywhere on the surface of a solid."""
    non_manifold: int
    """Edges of three or more faces."""

    @property
    def watertight(self) -> bool:
        return self.boundary == 0 and self.non_manifold == 0


def count_edges(faces_FK: np.ndarray) -> EdgeCounts:
    """Count the edges of a mesh by how many faces share them."""
    _, owners = np.unique(edge_ids(faces_FK)[0], return_counts=True)
    return EdgeCounts(
        boundary=int((owners == 1).sum()),
        shared=int((owners == 2).sum()),
        non_manifold=int((owners > 2).sum()),
    )


def label_parts(faces_FK: np.ndarray, num_vertices: int) -> np.ndarray:
    """Return (V,): a label for each vertex, equal for vertices that faces connect: the index of the
    first vertex of their part."""
    labels_V = np.arange(num_vertices)
    while True:
        lowest_F = labels_V[faces_FK].min(axis=1)
        new_V = labels_V.copy()
        np.minimum.at(new_V, faces_FK.ravel(), np.repeat(lowest_F, faces_FK.shape[1]))
        new_V = new_V[new_V]
        if np.array_equal(new_V, labels_V):
            return labels_V
        labels_V = new_V


def edge_ids(faces_FK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the id of each side of each face, equal in both directions, and the index of its face.

    Both are (F * K,).
    """
    count, corners = faces_FK.shape
    following = np.roll(faces_FK, -1, axis=1)
    low, high = np.minimum(faces_FK, following).ravel(), np.maximum(faces_FK, following).ravel()
    return low * (faces_FK.max(initial=0) + 1) + high, np.repeat(np.arange(count), corners)
