"""The canonical form of a mesh: integer coordinates, vertices and faces in the order of MeshGPT
(Siddiqui et al. 2024, arXiv 2311.15475, section 3).

The mesh is scaled into a cube, which its longest side fills and in which the other sides are
centred, and each coordinate is quantized to one of `bins` equally spaced values. Vertices that
would coincide are moved to a free bin beside them, so that thin parts stay closed, and merged where
there is none (`modalities/mesh/quantize.py`). Degenerate faces and duplicate faces are removed, and
the gap that a triangle without area leaves is closed by its neighbour. Vertices are sorted by z
(up), then y, then x. A face starts at its lowest vertex and keeps its orientation, and faces are
sorted by their vertices. A mesh in canonical form is mapped to itself.

V counts vertices, F faces, K the corners of a face.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tessera.data.errors import UnreadableFile
from tessera.modalities.mesh.adjacency import find_adjacent_faces
from tessera.modalities.mesh.media import Mesh, has_distinct_corners
from tessera.modalities.mesh.polygons import has_area
from tessera.modalities.mesh.quantize import (
    NO_SHIFT,
    close_gaps,
    quantize_vertices,
    round_to_bins,
    shift_in_cube,
)

if TYPE_CHECKING:  # listing, inspecting and rendering meshes needs no torch
    import torch


@dataclass(frozen=True, eq=False)
class CanonicalMesh:
    vertices: np.ndarray
    """(V, 3) int64: x, y and z as bin indices, 0 to bins - 1."""
    faces: np.ndarray
    """(F, K) int64."""


def canonicalize(mesh: Mesh, bins: int, shift: np.ndarray = NO_SHIFT) -> CanonicalMesh:
    """Return the canonical form of a mesh.

    `shift` moves the mesh in the cube, in fractions of its side, as far as there is room.

    Raises:
        UnreadableFile: If no face is left.
    """
    vertices, faces = mesh.vertices, mesh.faces
    while True:
        vertices, faces = quantize_mesh(vertices, faces, bins)
        # Moved vertices and lost faces change the extent, and the mesh is scaled to the cube again.
        if np.array_equal(vertices, round_to_bins(vertices, bins)):
            break
    order = np.argsort(vertices @ [1, bins, bins**2])
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return CanonicalMesh(shift_in_cube(vertices[order], bins, shift), sort_faces(rank[faces]))


def quantize_mesh(
    vertices: np.ndarray, faces: np.ndarray, bins: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the used vertices as bin indices, without two at the same place, and the faces that
    are left."""
    if not len(faces):
        raise UnreadableFile("it has no faces: none is left")
    corners = vertices[faces].reshape(-1, 3)
    positions, indices = np.unique(corners, axis=0, return_inverse=True)
    quantized = quantize_vertices(positions, indices.reshape(faces.shape), bins)
    # One key for each vertex: faster than comparing rows.
    keys = quantized @ [1, bins, bins**2]
    _, first, merged = np.unique(keys, return_index=True, return_inverse=True)
    positions, faces = quantized[first], merged[indices.reshape(faces.shape)]
    # Sorted, so that the result does not depend on the order of the faces.
    faces = close_gaps(positions, sort_faces(faces[has_distinct_corners(faces)]))
    faces = faces[has_area(positions, faces)]
    if not len(faces):
        raise UnreadableFile(f"its faces are too small for {bins} bins: none is left")
    used, indices = np.unique(faces, return_inverse=True)
    return positions[used], indices.reshape(faces.shape)


def sort_faces(faces_FK: np.ndarray) -> np.ndarray:
    """Rotate each face to start at its lowest vertex, sort the faces and drop duplicates, whichever
    way round they are."""
    corners = faces_FK.shape[1]
    rotation = (np.argmin(faces_FK, axis=1)[:, None] + np.arange(corners)) % corners
    faces = np.take_along_axis(faces_FK, rotation, axis=1)
    faces = faces[np.lexsort(faces.T[::-1])]
    vertex_sets = np.sort(faces, axis=1)
    order = np.lexsort(vertex_sets.T)  # groups equal sets, the first in the order of faces first
    duplicate = (vertex_sets[order][1:] == vertex_sets[order][:-1]).all(axis=1)
    return faces[np.sort(order[np.concatenate([[True], ~duplicate])])]


def dequantize_vertices(vertices: np.ndarray, bins: int) -> np.ndarray:
    """Map bin indices to coordinates in a cube with a side of 1 around the origin."""
    return vertices / (bins - 1) - 0.5


PADDING = -1


@dataclass
class MeshExample:
    vertices: np.ndarray
    """(V, 3) int64: x, y and z (up) as bin indices."""
    faces: np.ndarray
    """(F, K) int64."""
    edges: np.ndarray
    """(E, 2) int64: pairs of faces that share an edge, in both directions, sorted."""
    caption: str
    """The caption, or "" if there is none."""

    @classmethod
    def from_mesh(
        cls, mesh: Mesh, bins: int, caption: str, shift: np.ndarray = NO_SHIFT
    ) -> MeshExample:
        """Prepare a mesh for training; `shift` as in `canonicalize`."""
        canonical = canonicalize(mesh, bins, shift)
        edges = find_adjacent_faces(canonical.faces)
        return cls(canonical.vertices, canonical.faces, edges, caption)

    def to_mesh(self, bins: int) -> Mesh:
        """Return the mesh in a cube with a side of 1."""
        return Mesh(dequantize_vertices(self.vertices, bins), self.faces)


@dataclass
class MeshBatch:
    vertices: torch.Tensor
    """(B, V, 3) int64."""
    faces: torch.Tensor
    """(B, F, K) int64."""
    edges: torch.Tensor
    """(B, E, 2) int64."""
    vertex_counts: torch.Tensor
    """(B,) int64: how many vertices of each mesh are real."""
    face_counts: torch.Tensor
    """(B,) int64: how many faces of each mesh are real."""
    edge_counts: torch.Tensor
    """(B,) int64: how many pairs of each mesh are real."""
    captions: list[str]
    """One caption per mesh."""

    def to(self, device: torch.device | str) -> MeshBatch:
        from tessera.engine.device import move_tensors

        return move_tensors(self, device)


def collate(examples: Sequence[MeshExample]) -> MeshBatch:
    """Pad examples to a batch."""
    vertices, vertex_counts = pad_rows([example.vertices for example in examples])
    faces, face_counts = pad_rows([example.faces for example in examples])
    edges, edge_counts = pad_rows([example.edges for example in examples])
    captions = [example.caption for example in examples]
    return MeshBatch(vertices, faces, edges, vertex_counts, face_counts, edge_counts, captions)


def pad_rows(arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B, longest, ...) with the padding at the end, and (B,) the number of real rows."""
    import torch

    counts = [len(array) for array in arrays]
    padded = np.full((len(arrays), max(counts), *arrays[0].shape[1:]), PADDING, np.int64)
    for row, array in zip(padded, arrays):
        row[: len(array)] = array
    return torch.from_numpy(padded), torch.tensor(counts)
