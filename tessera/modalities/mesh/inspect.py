"""Inspect a folder of meshes: which files are usable, and why the others are not.

Every file is read and canonicalized once, as in training. `inspect_folder(path)` returns a report;
its `lines()` are for people and `as_json()` is for programs. Meshes with too many faces are usable
and counted separately: a run leaves them out or simplifies them, depending on its configuration.
Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median_low

from tessera.data.discovery import DEFAULT_OPTIONS, SourceOptions, find_files
from tessera.data.files import AnyFile, file_suffix
from tessera.data.inspect import (
    FileReport,
    Progress,
    Report,
    common_fields,
    count_lines,
    count_nouns,
    format_megabytes,
    hash_file,
    scan_folder,
    unmatched_lines,
)
from tessera.modalities.mesh.adjacency import count_edges
from tessera.modalities.mesh.canonical import canonicalize
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.mesh.grid_report import GridReport, describe_grids, measure_grids
from tessera.modalities.mesh.io import SUFFIXES
from tessera.modalities.mesh.media import read_mesh

HISTOGRAM = (50, 100, 200, 400, 800, 1_600, 3_200, 10_000, 100_000)
"""The upper limits of the histogram's bins, in triangles; one more bin counts larger meshes."""


@dataclass(frozen=True, kw_only=True)
class MeshFileReport(FileReport):
    format: str = ""
    """The file name suffix without the dot."""
    triangles: int = 0
    watertight: bool = False
    non_manifold: int = 0
    """The number of edges that three or more faces share."""
    grids: tuple[GridReport, ...] = ()
    """The effect of each of some numbers of bins."""


@dataclass(frozen=True, kw_only=True)
class MeshReport(Report):
    meshes: int
    formats: dict[str, int]
    """The number of usable files of each format."""
    triangles: tuple[int, int, int] | None
    """The minimum, median and maximum number of triangles; None if no mesh is usable."""
    histogram: dict[str, int]
    """The number of usable meshes by their number of triangles, such as "up to 100"."""
    large: int
    """The number of usable meshes with more than `max_faces` triangles."""
    max_faces: int
    watertight: int
    """The number of usable watertight meshes."""
    non_manifold: int
    """The number of usable meshes with edges that three or more faces share."""
    grids: list[str]
    """One line for each of some numbers of bins: what quantization to so many does."""
    captions_without_mesh: list[str]
    """Names in the metadata for which there is no file."""

    def lines(self) -> list[str]:
        meshes = "1 mesh" if self.meshes == 1 else f"{self.meshes:,} meshes"
        return [
            f"{self.path}: {meshes}, {self.usable:,} usable, {format_megabytes(self.bytes)}",
            *self.triangle_lines(),
            *self.surface_lines(),
            *count_lines("formats", self.formats),
            *self.caption_lines("file"),
            *unmatched_lines("meshes", self.captions_without_mesh),
            *self.duplicate_lines("file"),
            *self.other_lines(),
            *self.unusable_lines("file"),
        ]

    def triangle_lines(self) -> Iterator[str]:
        if self.triangles is None:
            return
        low, median, high = self.triangles
        yield f"triangles: {low:,} to {high:,}, median {median:,}"
        yield "  " + ", ".join(
            f"{label}: {number:,}" for label, number in self.histogram.items() if number
        )
        if self.large:
            yield (
                f"large: {count_nouns(self.large, 'file')} of more than {self.max_faces:,}, "
                "left out unless on_large=decimate"
            )

    def surface_lines(self) -> Iterator[str]:
        if self.usable:
            yield f"watertight: {self.watertight:,} ({self.watertight / self.usable:.0%})"
        if self.non_manifold:
            files = count_nouns(self.non_manifold, "file")
            yield f"non-manifold: {files} with edges that three or more faces share"
        yield from self.grids


def inspect_folder(
    path: str | Path,
    *,
    options: SourceOptions = DEFAULT_OPTIONS,
    config: MeshDataConfig | None = None,
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> MeshReport:
    """Inspect every mesh of a folder.

    Args:
        options: How data that are no folder are read.
        config: The requirements of a run: number of bins, maximum number of faces, upward axis.
        progress: Called with the number of inspected files and the number of all files.

    Raises:
        UserError: If there is no mesh at all.
    """
    settings = config or MeshDataConfig()
    settings.require_libraries()
    scan = scan_folder(
        find_files(path, SUFFIXES, "meshes", options),
        partial(inspect_file, config=settings),
        MeshFileReport,
        num_workers,
        progress,
    )
    triangles = sorted(file.triangles for file in scan.usable)
    return MeshReport(
        **common_fields(path, scan) | {"sizes": None},
        meshes=len(scan.files),
        formats=dict(Counter(file.format for file in scan.usable).most_common()),
        triangles=(triangles[0], median_low(triangles), triangles[-1]) if triangles else None,
        histogram=build_histogram(triangles),
        large=sum(number > settings.max_faces for number in triangles),
        max_faces=settings.max_faces,
        watertight=sum(file.watertight for file in scan.usable),
        non_manifold=sum(file.non_manifold > 0 for file in scan.usable),
        grids=describe_grids([grid for file in scan.usable for grid in file.grids]),
        captions_without_mesh=list(scan.found.unmatched_captions()),
    )


def inspect_file(file: AnyFile, config: MeshDataConfig) -> MeshFileReport:
    """Read one file as training would, and report what it contains."""
    mesh = read_mesh(file, config.polygons, config.up)
    canonicalize(mesh, config.bins)
    edges = count_edges(mesh.faces)
    size, digest = hash_file(file)
    return MeshFileReport(
        bytes=size,
        digest=digest,
        format=file_suffix(file).removeprefix("."),
        triangles=len(mesh.triangles()),
        watertight=edges.watertight,
        non_manifold=edges.non_manifold,
        grids=measure_grids(mesh),
    )


def build_histogram(triangles: Sequence[int]) -> dict[str, int]:
    """Count meshes by the bins of HISTOGRAM."""
    last = f"over {HISTOGRAM[-1]:,}"
    counts = {f"up to {limit:,}": 0 for limit in HISTOGRAM} | {last: 0}
    for number in triangles:
        limit = next((limit for limit in HISTOGRAM if number <= limit), None)
        counts[last if limit is None else f"up to {limit:,}"] += 1
    return counts
