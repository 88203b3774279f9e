"""Metrics of sampled meshes: whether they end, are valid and are new.

- `eos_rate`: the fraction that ended with the end token. A mesh with the maximum number of faces
  was cut off.
- `valid_rate`: the fraction that ended, has at least one face, none without area and none twice as
  decoded, before any repair, and in which no edge belongs to more than two faces.
  `training_valid_rate` is the fraction of training meshes that meet the last condition: training
  data is rarely free of defects.
- `novelty`: the fraction of the samples with at least one face that equal no training mesh in
  canonical form.
- `nearest_chamfer_bins`: the distance of each such sample to the nearest training mesh, as the
  median over samples. The distance is the mean, over the vertices of both meshes, of the distance
  to the nearest vertex of the other; both meshes fill the cube.

S samples, N training meshes, V vertices of a mesh, M vertices of many meshes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tessera.data.dataset import ExampleDataset, read_item
from tessera.data.errors import UnreadableFile
from tessera.data.sample_metrics import SampleMetrics, Samples
from tessera.modalities.mesh.adjacency import count_edges
from tessera.modalities.mesh.canonical import CanonicalMesh, MeshExample, canonicalize
from tessera.modalities.mesh.media import Mesh

if TYPE_CHECKING:
    from torch import Tensor

MAX_DISTANCES = 1 << 22
"""The number of distances that are held in memory at a time: 16 MB."""


@dataclass(frozen=True)
class MeshSampleMetric:
    training: ExampleDataset
    """The dataset of training meshes, without augmentation."""
    bins: int
    """The number of bins along each axis."""
    uses_prompts = False
    max_samples = 64

    def __call__(self, samples: Samples) -> SampleMetrics:
        known = list(readable_examples(self.training))
        face_counts = [count_faces(codes) for codes in samples.codes]
        pairs = zip(face_counts, samples.codes, strict=True)
        ended = [count < len(codes) for count, codes in pairs]
        rows = zip(samples.media, face_counts, ended, strict=True)
        valid = [end and is_valid(mesh, count) for mesh, count, end in rows]
        manifold = [is_manifold(example.faces) for example in known]
        values = {
            "eos_rate": float(np.mean(ended)),
            "valid_rate": float(np.mean(valid)),
            "training_valid_rate": float(np.mean(manifold)),
        }
        novelty = compute_novelty(list(self.canonical_forms(samples.media)), known)
        return SampleMetrics(values | novelty)

    def canonical_forms(self, meshes: Sequence[Mesh]) -> Iterator[CanonicalMesh]:
        """Yield the canonical form of each mesh that has faces."""
        for mesh in meshes:
            with contextlib.suppress(UnreadableFile):
                yield canonicalize(mesh, self.bins)


def readable_examples(dataset: ExampleDataset) -> Iterator[MeshExample]:
    """Yield all examples that can be read."""
    for index in range(len(dataset)):
        with contextlib.suppress(UnreadableFile):
            yield read_item(dataset, index, np.random.default_rng(0))


def count_faces(codes: Tensor) -> int:
    """Return the number of real faces of a token grid (faces, corners, ...)."""
    return int((codes.flatten(1)[:, 0] >= 0).sum())


def is_valid(mesh: Mesh, face_count: int) -> bool:
    """Return whether a mesh has faces, kept all `face_count` of them, and is manifold."""
    return 0 < len(mesh.faces) == face_count and is_manifold(mesh.faces)


def is_manifold(faces_FK: np.ndarray) -> bool:
    """Return whether no edge belongs to more than two faces."""
    return count_edges(faces_FK).non_manifold == 0


# ---- novelty


def compute_novelty(
    samples: Sequence[CanonicalMesh], known: Sequence[MeshExample]
) -> dict[str, float]:
    """Compare samples with the training meshes; without samples or training meshes return {}."""
    if not samples or not known:
        return {}
    known_keys = {mesh_key(example) for example in known}
    reference = ReferenceMeshes.from_vertices([example.vertices for example in known])
    nearest = [reference.chamfer(sample.vertices).min() for sample in samples]
    return {
        "novelty": float(np.mean([mesh_key(sample) not in known_keys for sample in samples])),
        "nearest_chamfer_bins": float(np.median(nearest)),
    }


def mesh_key(mesh: CanonicalMesh | MeshExample) -> bytes:
    """Return bytes that are equal for equal meshes in canonical form."""
    return mesh.vertices[mesh.faces].tobytes()


@dataclass(frozen=True)
class ReferenceMeshes:
    """The vertices of many meshes, concatenated."""

    vertices_M3: np.ndarray
    counts_N: np.ndarray

    @classmethod
    def from_vertices(cls, meshes: Sequence[np.ndarray]) -> ReferenceMeshes:
        return cls(
            np.concatenate(meshes).astype(np.float32), np.array([len(mesh) for mesh in meshes])
        )

    def chamfer(self, vertices_V3: np.ndarray) -> np.ndarray:
        """Return (N,): the distance of each reference mesh to another mesh."""
        vertices = vertices_V3.astype(np.float32)
        return np.concatenate(
            [self.chunk_distances(vertices, chunk) for chunk in self.chunks(len(vertices))]
        )

    def chunks(self, vertices: int) -> Iterator[slice]:
        """Yield ranges of meshes whose distances to so many vertices fit in memory, each of at
        least one mesh."""
        first = 0
        while first < len(self.counts_N):
            distances = np.cumsum(self.counts_N[first:]) * vertices
            count = max(1, int(np.searchsorted(distances, MAX_DISTANCES, side="right")))
            yield slice(first, first + count)
            first += count

    def chunk_distances(self, vertices_V3: np.ndarray, chunk: slice) -> np.ndarray:
        ends, counts = np.cumsum(self.counts_N), self.counts_N[chunk]
        begin = ends[chunk.start] - counts[0]
        others_M3 = self.vertices_M3[begin : begin + counts.sum()]
        starts = np.cumsum(counts) - counts
        # Squares of integer coordinates and their sums are exact in float32 up to 2,000 bins.
        squares_VM = (
            (vertices_V3**2).sum(1)[:, None] + (others_M3**2).sum(1) - 2 * vertices_V3 @ others_M3.T
        )
        forward = np.sqrt(np.minimum.reduceat(squares_VM, starts, axis=1)).mean(axis=0)
        backward = np.add.reduceat(np.sqrt(squares_VM.min(axis=0)), starts) / counts
        return (forward + backward) / 2
