"""What is in a folder of meshes, what is unusable and why: every file is read and written down
once, as training would.

`check(path)` gives a Report; its `lines()` are for people, `as_json()` is for programs. Imports no
torch. A mesh of too many faces is usable, and counted: a run leaves it out or simplifies it, as its
configuration says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from tessera.data.captions import Captions
from tessera.data.discovery import find
from tessera.data.errors import UnreadableFile
from tessera.data.inspect import (
    FileReport,
    Progress,
    Report,
    count,
    megabytes,
    scan_folder,
    tallied,
    told_of_all,
    unmatched,
)
from tessera.modalities.mesh.adjacency import count_edges
from tessera.modalities.mesh.canonical import canonical
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.mesh.io import ENDINGS
from tessera.modalities.mesh.media import read
from tessera.modalities.video.inspect import weigh

HISTOGRAM = (50, 100, 200, 400, 800, 1_600, 3_200, 10_000, 100_000)
"""The upper ends of its bars, in triangles; the last bar is what is larger."""


@dataclass(frozen=True, kw_only=True)
class MeshFileReport(FileReport):
    kind: str = ""
    """the ending, without the dot"""
    triangles: int = 0
    watertight: bool = False
    crowded: int = 0
    """edges that three or more faces share"""


@dataclass(frozen=True, kw_only=True)
class MeshReport(Report):
    meshes: int
    kinds: dict[str, int]
    triangles: tuple[int, int, int] | None
    """fewest, median and most; None where nothing is usable"""
    histogram: dict[str, int]
    """ "up to 100", in triangles, and how many usable meshes have that many"""
    large: int
    """usable meshes of more than `max_faces` triangles"""
    max_faces: int
    watertight: int
    crowded: int
    """usable meshes with edges that three or more faces share"""
    captions_without_mesh: list[str]

    def lines(self) -> list[str]:
        meshes = "1 mesh" if self.meshes == 1 else f"{self.meshes:,} meshes"
        return [
            f"{self.path}: {meshes}, {self.usable:,} usable, {megabytes(self.bytes)}",
            *self.triangle_lines(),
            *self.surface_lines(),
            *tallied("formats", self.kinds),
            *self.caption_lines("file"),
            *unmatched("meshes", self.captions_without_mesh),
            *self.duplicate_lines("file"),
            *self.other_lines(),
            *self.unusable_lines("file"),
        ]

    def triangle_lines(self) -> Iterator[str]:
        if self.triangles is None:
            return
        fewest, median, most = self.triangles
        yield f"triangles: {fewest:,} to {most:,}, median {median:,}"
        yield "  " + ", ".join(
            f"{bar}: {number:,}" for bar, number in self.histogram.items() if number
        )
        if self.large:
            yield f"large: {count(self.large, 'file')} of more than {self.max_faces:,}, left out unless large=decimate"

    def surface_lines(self) -> Iterator[str]:
        if self.usable:
            yield f"watertight: {self.watertight:,} ({self.watertight / self.usable:.0%})"
        if self.crowded:
            yield f"non-manifold: {count(self.crowded, 'file')} with edges that three or more faces share"


def check(
    path: str | Path,
    *,
    config: MeshDataConfig | None = None,
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> MeshReport:
    """Looks at every mesh; `progress` is told how many of how many are done. No mesh at all is
    Refused.

    `config` says what a run would ask of them: number of steps, most faces, upward axis.
    """
    asked = config or MeshDataConfig()
    asked.require_libraries()
    looked = scan_folder(
        find(path, ENDINGS, "meshes"),
        lambda root, name, captions: inspect_file(root, name, captions, asked),
        num_workers,
        progress,
    )
    triangles = sorted(look.triangles for look in looked.usable)
    return MeshReport(
        **told_of_all(path, looked) | {"sizes": None},
        meshes=len(looked.looks),
        kinds=dict(Counter(look.kind for look in looked.usable).most_common()),
        triangles=(triangles[0], median_low(triangles), triangles[-1]) if triangles else None,
        histogram=histogram_of(triangles),
        large=sum(number > asked.max_faces for number in triangles),
        max_faces=asked.max_faces,
        watertight=sum(look.watertight for look in looked.usable),
        crowded=sum(look.crowded > 0 for look in looked.usable),
        captions_without_mesh=list(looked.captions.unmatched),
    )


def inspect_file(
    root: Path, name: str, captions: Captions, asked: MeshDataConfig
) -> MeshFileReport:
    path = root / name
    try:
        size, digest = weigh(path)
    except OSError as error:
        return MeshFileReport(
            name=name, reason=f"the file cannot be opened ({error.strerror or error})"
        )
    try:
        mesh = read(path, asked.polygons, asked.up)
        canonical(mesh, asked.bins)
        caption = captions.of(name)
    except UnreadableFile as error:
        return MeshFileReport(name=name, bytes=size, reason=str(error))
    edges = count_edges(mesh.faces)
    return MeshFileReport(
        name=name,
        bytes=size,
        digest=digest,
        caption=caption,
        kind=path.suffix.lower().removeprefix("."),
        triangles=len(mesh.triangles()),
        watertight=edges.watertight,
        crowded=edges.crowded,
    )


def histogram_of(triangles: Sequence[int]) -> dict[str, int]:
    bars = {f"up to {end:,}": 0 for end in HISTOGRAM} | {f"over {HISTOGRAM[-1]:,}": 0}
    for number in triangles:
        end = next((end for end in HISTOGRAM if number <= end), None)
        bars[f"over {HISTOGRAM[-1]:,}" if end is None else f"up to {end:,}"] += 1
    return bars
