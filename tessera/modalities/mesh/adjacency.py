"""Which faces of a mesh share an edge, in the time that sorting the edges takes.

F counts faces, K the corners of a face, E pairs. 20,000 triangles take 10 ms, about a tenth of what
reading them from an OBJ file takes; and which faces are left depends on how a mesh was stretched
and turned. So pairs are found whenever an example is made. One that is not changed is made once and
kept, pairs and all: in memory (`modalities/mesh/dataset.py`), and on disk where somebody asks for
it (`modalities/mesh/cache.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST_AROUND_AN_EDGE = 8
"""Where hundreds of faces share one edge, each is paired with this many after it, and not with all:
pairs stay linear in F."""


def face_pairs(faces_FK: np.ndarray) -> np.ndarray:
    """(E, 2) int64: all pairs of faces that share an edge, in both directions, sorted, none with
    itself and none twice."""
    edges, owners = edge_numbers(faces_FK)
    order = np.argsort(edges, kind="stable")
    edges, owners = edges[order], owners[order]
    pairs = []
    for apart in range(1, min(MOST_AROUND_AN_EDGE, len(edges) - 1) + 1):
        together = edges[:-apart] == edges[apart:]
        if not together.any():
            break
        pairs.append(np.stack([owners[:-apart][together], owners[apart:][together]], axis=1))
    if not pairs:
        return np.zeros((0, 2), np.int64)
    one, other = np.concatenate(pairs).T
    one, other = one[one != other], other[one != other]
    count = len(faces_FK)
    both = np.unique(np.concatenate([one * count + other, other * count + one]))
    return np.stack(np.divmod(both, count), axis=1)


@dataclass(frozen=True)
class Edges:
    """How many edges belong to how many faces."""

    open: int
    """to one: the mesh ends there"""
    shared: int
    """to two, as everywhere on the surface of a solid"""
    crowded: int
    """to three or more: the mesh is no surface there"""

    @property
    def watertight(self) -> bool:
        return self.open == 0 and self.crowded == 0


def count_edges(faces_FK: np.ndarray) -> Edges:
    _, owners = np.unique(edge_numbers(faces_FK)[0], return_counts=True)
    return Edges(
        open=int((owners == 1).sum()),
        shared=int((owners == 2).sum()),
        crowded=int((owners > 2).sum()),
    )


def edge_numbers(faces_FK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(F * K,) each: a number for each side of each face, the same in both directions, and the face
    that it belongs to."""
    count, corners = faces_FK.shape
    following = np.roll(faces_FK, -1, axis=1)
    low, high = np.minimum(faces_FK, following).ravel(), np.maximum(faces_FK, following).ravel()
    return low * (faces_FK.max(initial=0) + 1) + high, np.repeat(np.arange(count), corners)
