"""Report what quantization to a grid does to meshes: faces and vertices that it removes, and meshes
that are watertight before and after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.data.dataset import spread_indices
from tessera.data.errors import UnreadableFile
from tessera.modalities.mesh.adjacency import count_edges
from tessera.modalities.mesh.canonical import canonicalize
from tessera.modalities.mesh.media import Mesh

if TYPE_CHECKING:
    from tessera.modalities.mesh.dataset import MeshDataConfig

REPORTED_BINS = (64, 128, 256)
"""The numbers of bins that `tessera check` compares."""
MAX_FACES = 2000
"""Larger meshes are left out of the comparison: they are simplified before they are quantized."""
MAX_FILES = 32
"""The number of files that are read for the line that a training prints."""


@dataclass(frozen=True, kw_only=True)
class GridReport:
    """Sums over meshes, for one number of bins."""

    bins: int
    meshes: int = 0
    faces: int = 0
    faces_left: int = 0
    vertices: int = 0
    vertices_left: int = 0
    watertight: int = 0
    """The number of meshes that are watertight before they are quantized."""
    still_watertight: int = 0

    @classmethod
    def measure(cls, mesh: Mesh, bins: int) -> GridReport:
        faces = mesh.triangles()
        try:
            canonical = canonicalize(Mesh(mesh.vertices, faces), bins)
        except UnreadableFile:
            return cls(bins=bins, meshes=1, faces=len(faces), vertices=len(mesh.vertices))
        watertight = count_edges(faces).watertight
        return cls(
            bins=bins,
            meshes=1,
            faces=len(faces),
            faces_left=min(len(faces), len(canonical.faces)),
            vertices=len(mesh.vertices),
            vertices_left=len(canonical.vertices),
            watertight=int(watertight),
            still_watertight=int(watertight and count_edges(canonical.faces).watertight),
        )

    @classmethod
    def total(cls, reports: Iterable[GridReport], bins: int) -> GridReport:
        rows = [vars(report) for report in reports if report.bins == bins]
        names = [name for name in cls.__dataclass_fields__ if name != "bins"]
        return cls(bins=bins, **{name: sum(row[name] for row in rows) for name in names})

    def describe(self) -> str:
        """Return a phrase such as "64 bins lose 0.7 % of the faces"."""
        faces = 1 - self.faces_left / max(1, self.faces)
        vertices = 1 - self.vertices_left / max(1, self.vertices)
        closed = (
            f", and {self.still_watertight:,} of {self.watertight:,} watertight meshes stay so"
            if self.watertight
            else ""
        )
        return (
            f"{self.bins} bins lose {faces:.1%} of the faces and merge {vertices:.1%} of the "
            f"vertices{closed}"
        )


def measure_grids(mesh: Mesh) -> tuple[GridReport, ...]:
    """Quantize a mesh to each of REPORTED_BINS; nothing for one of more than MAX_FACES faces."""
    if len(mesh.faces) > MAX_FACES:
        return ()
    return tuple(GridReport.measure(mesh, bins) for bins in REPORTED_BINS)


def describe_grids(reports: Sequence[GridReport]) -> list[str]:
    """Return one line for each number of bins."""
    present = sorted({report.bins for report in reports})
    totals = [GridReport.total(reports, bins) for bins in present]
    return [f"grid: {total.describe()}" for total in totals]


def describe_training_grid(data: MeshDataConfig) -> str:
    """Return a sentence about the effect of the grid on some meshes of a folder, or "" for
    synthetic data."""
    from tessera.modalities.mesh.dataset import load_mesh_of

    if data.path is None:
        return ""
    dataset = data.without_augmentation().folder_dataset()
    reports = []
    for index in spread_indices(len(dataset), MAX_FILES):
        with contextlib.suppress(UnreadableFile, OSError):
            reports.append(GridReport.measure(load_mesh_of(dataset, index), data.bins))
    total = GridReport.total(reports, data.bins)
    return f"Grid, on {total.meshes} meshes: {total.describe()}." if reports else ""
