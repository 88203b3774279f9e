"""One way to write a mesh down: whole numbers, in the order of MeshGPT (Siddiqui et al. 2024, arXiv
2311.15475, section 3).

The mesh fills a cube, its longest side from end to end and the others centred, and every coordinate
becomes the number of one of `bins` equal steps. Vertices that fall together are one; faces that
collapse, have no area or stand there twice go. Vertices are sorted by z (up), then y, then x. A
face begins with its lowest vertex, turned but never turned over, and faces are sorted by their
vertices. What has been written down is written down again as it is.

V counts vertices, F faces, K the corners of a face.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tessera.data.errors import UnreadableFile
from tessera.modalities.mesh.adjacency import face_pairs
from tessera.modalities.mesh.media import Mesh, whole
from tessera.modalities.mesh.polygons import has_area

if TYPE_CHECKING:  # listing, checking and drawing meshes needs no torch
    import torch

NOWHERE = np.zeros(3)
ROUNDING = 1e-6
"""Of a step. What lies between two steps goes outward, on both sides of the centre alike, however
its last bits were rounded; otherwise a mesh would be off centre by half a step, and move when it is
written down again."""


@dataclass(frozen=True, eq=False)
class Canonical:
    vertices: np.ndarray
    """(V, 3) int64: x, y, z as numbers of steps, 0 to bins - 1"""
    faces: np.ndarray
    """(F, K) int64"""


def canonical(mesh: Mesh, bins: int, shift: np.ndarray = NOWHERE) -> Canonical:
    """Raises Unreadable where nothing is left. `shift` moves it in the cube, by shares of its side,
    as far as there is room."""
    faces = mesh.faces
    while True:
        if not len(faces):
            raise UnreadableFile(f"its faces are too small for {bins} steps: none is left")
        used = np.unique(faces)
        steps = np.zeros(mesh.vertices.shape, np.int64)
        steps[used] = stepped(mesh.vertices[used], bins, shift)
        places = steps @ [
            1,
            bins,
            bins**2,
        ]  # one number for each, sorted by z, then y, then x: faster than rows by rows
        _, first, numbers = np.unique(places, return_index=True, return_inverse=True)
        merged, numbered = steps[first], numbers[faces]
        kept = whole(numbered) & has_area(merged, numbered)
        if kept.all():
            break
        faces = faces[kept]  # what is left may be smaller, and has the whole cube to itself
    present, renumbered = np.unique(numbered, return_inverse=True)
    return Canonical(merged[present], in_order(renumbered.reshape(faces.shape)))


def stepped(vertices: np.ndarray, bins: int, shift: np.ndarray) -> np.ndarray:
    """(V, 3) int64: the nearest steps, in a cube that the longest side fills."""
    low, high = vertices.min(axis=0), vertices.max(axis=0)
    middle, max_len = (bins - 1) / 2, max(float((high - low).max()), np.finfo(np.float64).tiny)
    from_centre = (vertices - (low + high) / 2) / max_len * (bins - 1)
    lattice = middle % 1  # an even number of steps has none in the middle
    away = np.floor(np.abs(from_centre) + ROUNDING + 0.5 - lattice) + lattice
    steps = np.rint(middle + np.where(from_centre < -ROUNDING, -away, away)).astype(np.int64)
    room_below, room_above = steps.min(axis=0), bins - 1 - steps.max(axis=0)
    return steps + np.clip(np.rint(shift * (bins - 1)).astype(np.int64), -room_below, room_above)


def in_order(faces_FK: np.ndarray) -> np.ndarray:
    """Each face once, whichever way round it was, beginning with its lowest vertex; sorted."""
    corners = faces_FK.shape[1]
    turned = (np.argmin(faces_FK, axis=1)[:, None] + np.arange(corners)) % corners
    faces = np.take_along_axis(faces_FK, turned, axis=1)
    faces = faces[np.lexsort(faces.T[::-1])]
    alike = np.sort(faces, axis=1)
    order = np.lexsort(
        alike.T
    )  # those of the same corners beside each other, the first of them first
    again = (alike[order][1:] == alike[order][:-1]).all(axis=1)
    return faces[np.sort(order[np.concatenate([[True], ~again])])]


def back(vertices: np.ndarray, bins: int) -> np.ndarray:
    """Numbers of steps as places in a cube with a side of 1 around the origin."""
    return vertices / (bins - 1) - 0.5


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
