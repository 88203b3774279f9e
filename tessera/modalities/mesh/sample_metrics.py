"""Metrics of sampled meshes: whether they end, are connected like real ones, look like them, are
what was asked for, and are new.

- `eos_rate`: the fraction that ended with the end token. A mesh of the maximum length was cut off.
- `valid_rate`: the fraction that ended, has faces, and is connected as real meshes are
  (`modalities/mesh/connectivity.py`); `valid_rate_real` is the fraction of other real meshes that
  pass the same test. The means of the statistics behind it have their names, and those of real
  meshes end in `_real`.
- `watertight_rate` and `watertight_rate_real`: the fraction without boundary and non-manifold
  edges.
- `coverage`, `min_matching_distance` and `nearest_neighbour_accuracy`: points on the surfaces of
  samples and of held-out meshes are compared (`modalities/mesh/point_clouds.py`). A distance is in
  sides of the cube. The values of training meshes in place of samples end in `_real`.
- `category_accuracy`: the fraction of samples whose nearest training meshes are mostly of the
  category in the prompt, one of the most frequent MAX_CATEGORIES; `category_accuracy_real` is that
  of held-out meshes and `category_accuracy_chance` that of a guess.
- `novelty`: the fraction of the samples with at least one face that equal no training mesh in
  canonical form.
- `nearest_chamfer_bins`: the distance of each such sample to the nearest training mesh, as the
  median over samples. The distance is the mean, over the vertices of both meshes, of the distance
  to the nearest vertex of the other; both meshes fill the cube.

S samples, N training meshes, V vertices of a mesh, M vertices of many meshes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tessera.data.dataset import ExampleDataset, read_item, spread_indices
from tessera.data.errors import UnreadableFile
from tessera.data.sample_metrics import SampleMetrics, Samples
from tessera.modalities.mesh.adjacency import count_edges
from tessera.modalities.mesh.canonical import CanonicalMesh, MeshExample, canonicalize
from tessera.modalities.mesh.connectivity import (
    STATISTICS,
    RealConnectivity,
    compute_statistics,
)
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.point_clouds import (
    chamfer_distances,
    classify,
    compare_sets,
    head_noun,
    sample_points,
)
from tessera.modalities.mesh.polygons import triangulate

if TYPE_CHECKING:
    from torch import Tensor

MAX_DISTANCES = 1 << 22
"""The number of distances that are held in memory at a time: 16 MB."""
MIN_REAL = 20
"""With fewer held-out meshes, half of the training meshes take their place."""
MAX_REAL = 64
"""The number of real meshes that samples are compared with."""
MAX_LABELLED = 1000
"""The number of training meshes with categories that samples are compared with."""
MAX_CATEGORIES = 8
MIN_CATEGORY_SIZE = 5
"""The number of training meshes that a category must have."""

RealMesh = CanonicalMesh | MeshExample


@dataclass(frozen=True)
class MeshSampleMetric:
    training: ExampleDataset
    """The dataset of training meshes, without augmentation."""
    bins: int
    """The number of bins along each axis."""
    held_out: ExampleDataset | None = None
    """The dataset of held-out meshes."""
    uses_prompts = False
    max_samples = 64

    def __call__(self, samples: Samples) -> SampleMetrics:
        known = list(readable_examples(self.training))
        others = list(readable_examples(self.held_out)) if self.held_out is not None else []
        ended = np.array([has_ended(codes) for codes in samples.codes])
        meshes = [canonicalize_sample(mesh, self.bins) for mesh in samples.media]
        present = [mesh for mesh in meshes if mesh is not None]
        values = {"eos_rate": float(ended.mean())}
        enough = len(others) >= MIN_REAL
        real = choose_real(others if enough else known[::2], MAX_REAL)
        compared = choose_real(known if enough else known[1::2], MAX_REAL)
        if compared:
            values |= self.connectivity(meshes, ended, real, compared)
        if compared and present:
            values |= self.surfaces(present, real, compared)
        prompted = list(zip(meshes, samples.prompts, strict=True))
        if any(samples.prompts) and known:
            categories = Categories.from_examples(known)
            values |= categories.accuracy(prompted, others, self.bins)
        values |= compute_novelty(present, known)
        return SampleMetrics(values, {"real_meshes": len(real)})

    def connectivity(
        self,
        meshes: Sequence[CanonicalMesh | None],
        ended: np.ndarray,
        real: Sequence[RealMesh],
        others: Sequence[RealMesh],
    ) -> dict[str, float]:
        """Compare the statistics of samples with those of real meshes."""
        statistics_real = stack_statistics(real)
        reference = RealConnectivity.from_statistics(statistics_real)
        present = [mesh for mesh in meshes if mesh is not None]
        valid = np.zeros(len(meshes), dtype=bool)
        values: dict[str, float] = {}
        if present:
            statistics = stack_statistics(present)
            index = [number for number, mesh in enumerate(meshes) if mesh is not None]
            valid[index] = reference.are_valid(statistics)
            values |= dict(zip(STATISTICS, statistics.mean(axis=0).tolist(), strict=True))
        names = [f"{name}_real" for name in STATISTICS]
        values |= dict(zip(names, statistics_real.mean(axis=0).tolist(), strict=True))
        return values | {
            "valid_rate": float((valid & ended).mean()),
            "valid_rate_real": float(reference.are_valid(stack_statistics(others)).mean()),
            "watertight_rate": float(np.mean([is_watertight(mesh) for mesh in meshes])),
            "watertight_rate_real": float(np.mean([is_watertight(mesh) for mesh in real])),
        }

    def surfaces(
        self,
        samples: Sequence[CanonicalMesh],
        real: Sequence[RealMesh],
        others: Sequence[RealMesh],
    ) -> dict[str, float]:
        clouds = [stack_points(meshes, self.bins) for meshes in (samples, real, others)]
        values = compare_sets(clouds[0], clouds[1])
        best = compare_sets(clouds[2], clouds[1])
        return values | {f"{name}_real": value for name, value in best.items()}


def has_ended(codes: Tensor) -> bool:
    """Return whether codes on a grid of positions (N, ...) end before the last position."""
    return int((codes.reshape(len(codes), -1)[:, 0] >= 0).sum()) < len(codes)


def canonicalize_sample(mesh: Mesh, bins: int) -> CanonicalMesh | None:
    """Return the canonical form of a mesh, None if it has no faces."""
    with contextlib.suppress(UnreadableFile):
        if len(mesh.faces):
            return canonicalize(mesh, bins)
    return None


def choose_real(meshes: Sequence[MeshExample], count: int) -> list[MeshExample]:
    return [meshes[index] for index in spread_indices(len(meshes), count)]


def triangles_of(mesh: RealMesh) -> np.ndarray:
    return triangulate(mesh.vertices, mesh.faces)


def is_watertight(mesh: RealMesh | None) -> bool:
    return mesh is not None and count_edges(mesh.faces).watertight


def stack_statistics(meshes: Sequence[RealMesh]) -> np.ndarray:
    return np.array([compute_statistics(mesh.vertices, triangles_of(mesh)) for mesh in meshes])


def stack_points(meshes: Sequence[RealMesh], bins: int) -> np.ndarray:
    """Return (N, P, 3) points on the surfaces, in sides of the cube."""
    return np.stack(
        [sample_points(mesh.vertices / (bins - 1), triangles_of(mesh)) for mesh in meshes]
    )


def readable_examples(dataset: ExampleDataset) -> Iterator[MeshExample]:
    """Yield all examples that can be read."""
    for index in range(len(dataset)):
        with contextlib.suppress(UnreadableFile):
            yield read_item(dataset, index, np.random.default_rng(0))


# ---- categories


@dataclass(frozen=True)
class Categories:
    """Training meshes of the most frequent categories."""

    meshes: Sequence[MeshExample]
    labels: Sequence[str]

    @classmethod
    def from_examples(cls, examples: Sequence[MeshExample]) -> Categories:
        counts = Counter(head_noun(example.caption) for example in examples)
        counts.pop("", None)
        frequent = {
            name for name, count in counts.most_common(MAX_CATEGORIES) if count >= MIN_CATEGORY_SIZE
        }
        chosen = [example for example in examples if head_noun(example.caption) in frequent]
        kept = choose_real(chosen, MAX_LABELLED)
        return cls(kept, [head_noun(example.caption) for example in kept])

    def accuracy(
        self,
        prompted: Sequence[tuple[CanonicalMesh | None, str]],
        held_out: Sequence[MeshExample],
        bins: int,
    ) -> dict[str, float]:
        """Classify the samples with a category in their prompt, and held-out meshes; {} if there
        are none."""
        names = sorted(set(self.labels))
        asked = [(mesh, head_noun(prompt)) for mesh, prompt in prompted]
        asked = [(mesh, name) for mesh, name in asked if name in names]
        if not asked or len(names) < 2:
            return {}
        reference = stack_points(self.meshes, bins)
        values = {
            "category_accuracy": self.classify(asked, reference, bins),
            "category_accuracy_chance": 1 / len(names),
        }
        real = [(mesh, head_noun(mesh.caption)) for mesh in held_out]
        if real := [(mesh, name) for mesh, name in real if name in names]:
            values["category_accuracy_real"] = self.classify(real, reference, bins)
        return values

    def classify(
        self, asked: Sequence[tuple[RealMesh | None, str]], reference: np.ndarray, bins: int
    ) -> float:
        present = [(mesh, name) for mesh, name in asked if mesh is not None]
        if not present:
            return 0.0
        clouds = stack_points([mesh for mesh, _ in present], bins)
        found = classify(chamfer_distances(clouds, reference), self.labels)
        pairs = zip(found, [name for _, name in present], strict=True)
        return sum(one == name for one, name in pairs) / len(asked)


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
