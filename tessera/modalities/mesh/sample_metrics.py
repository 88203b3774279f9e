"""The judge of sampled meshes: do they come to an end, are they whole, and are they new?

- `eos_rate`: the share that ended by themselves. A mesh with as many faces as there may be was
  stopped.
- `valid_rate`: the share that ended, have a face, have none of no extent and none twice, as their
  symbols were read and before anything was mended, and in which no edge belongs to more than two
  faces. `training_valid_rate` is the share of the training meshes of which the last is true: what
  was learnt from is seldom without fault.
- `novelty`: the share of the samples with a face that are none of the training meshes, in canonical
  form.
- `nearest_chamfer_bins`: from each of them to the nearest training mesh, the median over samples.
  As everywhere the distance is the mean, over the vertices of both, of how far the nearest vertex
  of the other is; both fill the cube.

S samples, N training meshes, V vertices of a mesh, M those of many.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.data.errors import UnreadableFile
from tessera.data.sample_metrics import SampleMetrics, Samples
from tessera.modalities.mesh.adjacency import count_edges
from tessera.modalities.mesh.canonical import canonical
from tessera.modalities.mesh.media import Mesh

if TYPE_CHECKING:
    from torch import Tensor

AT_ONCE = 1 << 22
"""Distances that are held in memory at a time: 16 MB."""


@dataclass(frozen=True)
class MeshSampleMetric:
    training: Any
    """the source of the meshes that were learnt from, unaugmented"""
    bins: int
    by_prompt = False

    def __call__(self, shown: Samples) -> SampleMetrics:
        known = list(examples_of(self.training))
        written = [faces_in(codes) for codes in shown.codes]
        ended = [count < len(codes) for count, codes in zip(written, shown.codes, strict=True)]
        rows = zip(shown.media, written, ended, strict=True)
        valid = [end and is_whole(mesh, count) for mesh, count, end in rows]
        numbers = {
            "eos_rate": float(np.mean(ended)),
            "valid_rate": float(np.mean(valid)),
            "training_valid_rate": float(np.mean([is_surface(example.faces) for example in known])),
        }
        return SampleMetrics(
            numbers | newness(list(self.written_down(shown.media)), known), of=len(valid)
        )

    def written_down(self, meshes: Sequence[Mesh]) -> Iterator[Any]:
        """Those of which something is there, in canonical form."""
        for mesh in meshes:
            with contextlib.suppress(UnreadableFile):
                yield canonical(mesh, self.bins)


def examples_of(source: Any) -> Iterator[Any]:
    """All that can be read."""
    for index in range(len(source)):
        with contextlib.suppress(UnreadableFile):
            yield source.item(index, np.random.default_rng(0))


def faces_in(codes: Tensor) -> int:
    """Of a grid (faces, corners, ...)."""
    return int((codes.flatten(1)[:, 0] >= 0).sum())


def is_whole(mesh: Mesh, written: int) -> bool:
    """Whether there is something, nothing had to be taken away of so many faces, and it is a
    surface everywhere."""
    return 0 < len(mesh.faces) == written and is_surface(mesh.faces)


def is_surface(faces_FK: np.ndarray) -> bool:
    return count_edges(faces_FK).crowded == 0


# ---- what is new


def newness(samples: Sequence[Any], known: Sequence[Any]) -> dict[str, float]:
    """Nothing, where there is no sample to speak of."""
    if not samples or not known:
        return {}
    seen = {mark_of(example) for example in known}
    crowd = Crowd.of([example.vertices for example in known])
    return {
        "novelty": float(np.mean([mark_of(sample) not in seen for sample in samples])),
        "nearest_chamfer_bins": float(
            np.median([crowd.chamfer(sample.vertices).min() for sample in samples])
        ),
    }


def mark_of(written: Any) -> bytes:
    """The same for the same mesh in canonical form."""
    return written.vertices[written.faces].tobytes()


@dataclass(frozen=True)
class Crowd:
    """The vertices of many meshes, one mesh below the other."""

    vertices_M3: np.ndarray
    counts_N: np.ndarray

    @classmethod
    def of(cls, meshes: Sequence[np.ndarray]) -> Crowd:
        return cls(
            np.concatenate(meshes).astype(np.float32), np.array([len(mesh) for mesh in meshes])
        )

    def chamfer(self, vertices_V3: np.ndarray) -> np.ndarray:
        """(N,): how far each of them is from another mesh."""
        parts = [
            self.some(vertices_V3.astype(np.float32), few)
            for few in self.handfuls(len(vertices_V3))
        ]
        return np.concatenate(parts)

    def handfuls(self, vertices: int) -> Iterator[slice]:
        """Meshes in a row whose distances to so many vertices fit in memory; one at least."""
        first = 0
        while first < len(self.counts_N):
            fitting = int(
                np.searchsorted(np.cumsum(self.counts_N[first:]) * vertices, AT_ONCE, side="right")
            )
            yield slice(first, first + max(1, fitting))
            first += max(1, fitting)

    def some(self, vertices_V3: np.ndarray, few: slice) -> np.ndarray:
        ends, counts = np.cumsum(self.counts_N), self.counts_N[few]
        there_M3 = self.vertices_M3[
            ends[few.start] - counts[0] : ends[few.start] - counts[0] + counts.sum()
        ]
        starts = np.cumsum(counts) - counts
        # Squares of whole numbers of steps and their sums are exact in float32 up to 2,000 bins.
        squares_VM = (
            (vertices_V3**2).sum(1)[:, None] + (there_M3**2).sum(1) - 2 * vertices_V3 @ there_M3.T
        )
        here = np.sqrt(np.minimum.reduceat(squares_VM, starts, axis=1)).mean(axis=0)
        there = np.add.reduceat(np.sqrt(squares_VM.min(axis=0)), starts) / counts
        return (here + there) / 2
