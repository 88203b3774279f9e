"""What every source of meshes gives: one mesh with its caption, and a batch of them.

V counts vertices, F faces, E pairs of faces that share an edge, K the corners of a face, B examples. Vertices are numbers of
steps in a cube (`data/canonical.py`). The meshes of a batch are as long as the longest, and padded with -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tessera.data.adjacency import face_pairs
from tessera.data.canonical import NOWHERE, back, canonical
from tessera.media.mesh import Mesh

if TYPE_CHECKING:  # listing, checking and drawing meshes needs no torch
    import torch

PADDING = -1


@dataclass
class MeshExample:
    vertices: np.ndarray
    """(V, 3) int64: x, y and z (up), as numbers of steps"""
    faces: np.ndarray
    """(F, K) int64"""
    edges: np.ndarray
    """(E, 2) int64: pairs of faces that share an edge, in both directions, sorted"""
    caption: str
    """"" where nothing is said about the mesh"""

    @classmethod
    def of(cls, mesh: Mesh, bins: int, caption: str, shift: np.ndarray = NOWHERE) -> MeshExample:
        """A mesh as it is learnt from; `shift` as in `canonical`."""
        written = canonical(mesh, bins, shift)
        return cls(written.vertices, written.faces, face_pairs(written.faces), caption)

    def mesh(self, bins: int) -> Mesh:
        """To look at, in a cube with a side of 1."""
        return Mesh(back(self.vertices, bins), self.faces)


@dataclass
class MeshBatch:
    vertices: torch.Tensor
    """(B, V, 3) int64"""
    faces: torch.Tensor
    """(B, F, K) int64"""
    edges: torch.Tensor
    """(B, E, 2) int64"""
    vertex_counts: torch.Tensor
    """(B,) int64: how many vertices of each mesh are real"""
    face_counts: torch.Tensor
    edge_counts: torch.Tensor
    captions: list[str]

    def to(self, device: torch.device | str) -> MeshBatch:
        return replace(
            self,
            vertices=self.vertices.to(device),
            faces=self.faces.to(device),
            edges=self.edges.to(device),
            vertex_counts=self.vertex_counts.to(device),
            face_counts=self.face_counts.to(device),
            edge_counts=self.edge_counts.to(device),
        )


def collate(examples: Sequence[MeshExample]) -> MeshBatch:
    vertices, vertex_counts = padded([example.vertices for example in examples])
    faces, face_counts = padded([example.faces for example in examples])
    edges, edge_counts = padded([example.edges for example in examples])
    captions = [example.caption for example in examples]
    return MeshBatch(vertices, faces, edges, vertex_counts, face_counts, edge_counts, captions)


def padded(rows: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, longest, ...) with the padding at the end, and (B,) how many rows of each are real."""
    import torch

    counts = [len(each) for each in rows]
    page = np.full((len(rows), max(counts), *rows[0].shape[1:]), PADDING, np.int64)
    for place, each in zip(page, rows):
        place[: len(each)] = each
    return torch.from_numpy(page), torch.tensor(counts)
