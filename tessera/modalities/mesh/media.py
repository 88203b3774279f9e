"""Meshes: any common file in, vertices and faces in the middle, GLB and OBJ out, and a picture to
look at.

V counts vertices, F faces, K the corners of a face: 3, or 4 for quads. z is up. How files are read,
`modalities/mesh/io.py` knows, and how a mesh is drawn, `modalities/mesh/render.py`. Colours,
textures and normals are left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from tessera.data.errors import UnreadableFile, named
from tessera.modalities.image.media import Image
from tessera.modalities.mesh.io import MOST_READ, UP, Polygons, Up, read_polygons
from tessera.modalities.mesh.polygons import beginning_inward, quads_of, triangles_of
from tessera.modalities.mesh.render import draw
from tessera.modalities.mesh.trimesh_library import library, simplification

if TYPE_CHECKING:  # listing, checking and drawing meshes needs no torch
    pass


Shape = Literal["triangles", "quads"]
GRIDS = (None, 256, 128, 64)
"""Steps of the longest side to which vertices are moved before a mesh is simplified, each coarser
one where that stopped too early: loose and nearly touching parts, which cannot be simplified any
further, fall together."""
PASSES = 2
"""A second pass begins with a low threshold again, and gets further where the first one stopped."""
LEAST_SURFACE = 0.5
"""The share of its surface that a simplified mesh must keep: a tree that has lost its leaves is no
tree any more."""


@dataclass(eq=False)
class Mesh:
    vertices: np.ndarray
    """(V, 3) float64"""
    faces: np.ndarray
    """(F, 3) or (F, 4) int64: vertices in the order in which they are seen counterclockwise from
    outside"""

    def __post_init__(self) -> None:
        self.vertices, self.faces = np.asarray(self.vertices, np.float64), np.asarray(self.faces)
        if self.vertices.ndim != 2 or self.vertices.shape[1] != 3:
            raise ValueError(
                f"a Mesh has vertices of the shape (vertices, 3), but was given {self.vertices.shape}"
            )
        if (
            self.faces.ndim != 2
            or self.faces.shape[1] not in (3, 4)
            or not np.issubdtype(self.faces.dtype, np.integer)
        ):
            raise ValueError(
                "a Mesh has faces of the shape (faces, 3) or (faces, 4), whole numbers, but was given "
                f"{self.faces.shape} of {self.faces.dtype}"
            )
        if self.faces.size and not 0 <= self.faces.min() <= self.faces.max() < len(self.vertices):
            raise ValueError(
                f"a Mesh of {len(self.vertices)} vertices has faces that name vertices {self.faces.min()} to "
                f"{self.faces.max()}: they are counted from 0"
            )
        self.faces = self.faces.astype(np.int64, copy=False)

    @classmethod
    def load(
        cls,
        path: str | Path,
        polygons: Shape = "triangles",
        up: Up | None = None,
        most: int = MOST_READ,
    ) -> Mesh:
        """The mesh in a file, repaired, all parts of a scene as one. Raises Unreadable with the
        file and the reason.

        `up` is the file's upward axis, where it is not the usual one of its format. A file of more
        than `most` faces is refused before it is read.
        """
        with named(path):
            return read(path, polygons, up, most)

    def save(self, stem: str | Path) -> Path:
        """A GLB, and beside it an OBJ, which keeps quads; gives back the GLB."""
        path = Path(f"{stem}.glb")  # not with_suffix, which would eat the end of "epoch-0.5"
        path.parent.mkdir(parents=True, exist_ok=True)
        turned = self.to_y_up()
        path.write_bytes(
            library()
            .Trimesh(turned.vertices, turned.triangles(), process=False)
            .export(file_type="glb")
        )
        Path(f"{stem}.obj").write_text(turned.as_obj(), encoding="utf-8")
        return path

    @classmethod
    def sheet(cls, items: Sequence[Mesh], columns: int | None = None) -> Image:
        """A contact sheet of rendered meshes, read like a page."""
        if not items:
            raise ValueError("a sheet of no meshes was asked for: give at least one")
        return Image.sheet([item.picture() for item in items], columns)

    @classmethod
    def beside(cls, left: Mesh, right: Mesh) -> Mesh:
        """Two meshes of cubes with a side of 1 next to each other: an original and its
        reconstruction."""
        apart = right.vertices + np.array([1.2, 0.0, 0.0])
        return cls(
            np.concatenate([left.vertices, apart]),
            np.concatenate([left.faces, right.faces + len(left.vertices)]),
        )

    def picture(self, size: int = 192) -> Image:
        """Seen from the front, the right and above, lit from the left; `size` x `size` pixels."""
        faces = (
            self.faces if self.faces.shape[1] == 3 else beginning_inward(self.vertices, self.faces)
        )
        return draw(self.vertices, faces, size)

    def triangles(self) -> np.ndarray:
        """The faces, each quad as two triangles that follow each other and begin at the same
        vertex."""
        return triangles_of(self.vertices, self.faces)

    def area(self) -> float:
        one, two, three = self.vertices[self.triangles()].transpose(1, 0, 2)
        return float(np.linalg.norm(np.cross(two - one, three - one), axis=1).sum() / 2)

    def simplified(self, most: int) -> Mesh:
        """Triangles, at most that many, by quadric error (Garland and Heckbert 1997). Raises
        Unreadable if that cannot be."""
        to_fp32 = Mesh(self.vertices, self.triangles())
        for steps in GRIDS:
            simpler = to_fp32 if steps is None else to_fp32.on_grid(steps)
            for _ in range(PASSES):
                if len(simpler.faces) > most:
                    found = simplification().simplify(
                        simpler.vertices, simpler.faces, target_count=most
                    )
                    simpler = Mesh(*tidy(*found))
            if len(simpler.faces) <= most and simpler.area() >= LEAST_SURFACE * to_fp32.area():
                return simpler
        left = simpler.area() / max(to_fp32.area(), np.finfo(np.float64).tiny)
        raise UnreadableFile(
            f"its {len(to_fp32.faces):,} triangles cannot be simplified to {most:,}: "
            f"{len(simpler.faces):,} are left, with {left:.0%} of its surface"
        )

    def on_grid(self, steps: int) -> Mesh:
        """Vertices moved to the nearest of so many steps; those at the same place become one."""
        step = np.ptp(self.vertices, axis=0).max() / steps
        return Mesh(*tidy(np.rint(self.vertices / step) * step, self.faces))

    def as_obj(self) -> str:
        """%.9g gives back every float32 as it was."""
        points = "".join(
            "v {:.9g} {:.9g} {:.9g}\n".format(*vertex) for vertex in self.vertices.tolist()
        )
        faces = "".join(f"f {' '.join(map(str, face))}\n" for face in (self.faces + 1).tolist())
        return points + faces

    def from_y_up(self) -> Mesh:
        """From y up to z up: a quarter turn about x."""
        x, y, z = self.vertices.T
        return Mesh(np.stack([x, -z, y], axis=1), self.faces)

    def to_y_up(self) -> Mesh:
        """From z up to y up."""
        x, y, z = self.vertices.T
        return Mesh(np.stack([x, z, -y], axis=1), self.faces)


def read(
    path: str | Path, polygons: Shape = "triangles", up: Up | None = None, most: int = MOST_READ
) -> Mesh:
    """As Mesh.load, with a reason that does not name the file."""
    found = read_polygons(path, most)
    examine(found)
    mesh = repaired(found.vertices, faces_of(found, polygons))
    return mesh.from_y_up() if (up or UP[found.kind]) == "y" else mesh


def examine(found: Polygons) -> None:
    """Refuses what cannot be a mesh, before anything is computed with it."""
    if not found.by_corners:
        points = [f"{len(found.vertices):,} points"] if len(found.vertices) else []
        there = " and ".join([*points, *([found.beside] if found.beside else [])])
        raise UnreadableFile(f"it holds no faces ({there or 'nothing at all'})")
    used = np.unique(np.concatenate([polygons.ravel() for polygons in found.by_corners.values()]))
    count = len(found.vertices)
    if used[0] < 0 or used[-1] >= count:
        raise UnreadableFile(
            f"its faces name vertices {used[0] + 1:,} to {used[-1] + 1:,}, but it has {count:,}"
        )
    if wrong := int((~np.isfinite(found.vertices[used])).any(axis=1).sum()):
        raise UnreadableFile(
            f"{wrong:,} of its {len(used):,} vertices are not numbers (NaN or infinite)"
        )


def faces_of(found: Polygons, wanted: Shape) -> np.ndarray:
    """All polygons as triangles, or all as quads."""
    if wanted == "quads":
        return np.concatenate([quads_of(polygons) for polygons in found.by_corners.values()])
    return np.concatenate(
        [triangles_of(found.vertices, polygons) for polygons in found.by_corners.values()]
    )


def repaired(vertices: np.ndarray, faces: np.ndarray) -> Mesh:
    """Vertices at the same place become one; faces that are no faces, or stand there twice, go."""
    mesh = Mesh(*tidy(vertices, faces))
    if not len(mesh.faces):
        raise UnreadableFile(
            f"all of its {len(faces):,} faces are degenerate: each has corners at the same place"
        )
    return mesh


def tidy(vertices: np.ndarray, faces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each place once, in the order in which faces first name it, and each face once; only what a
    face needs."""
    _, first, same = np.unique(
        vertices + 0.0, axis=0, return_index=True, return_inverse=True
    )  # + 0.0: -0 is 0
    faces = first[same.reshape(-1)][faces]
    faces = faces[whole(faces)]
    faces = faces[np.sort(np.unique(np.sort(faces, axis=1), axis=0, return_index=True)[1])]
    used, first_named, numbers = np.unique(faces, return_index=True, return_inverse=True)
    order = np.argsort(first_named)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return vertices[used[order]], rank[numbers.reshape(faces.shape)]


def whole(faces_FK: np.ndarray) -> np.ndarray:
    """Which faces have as many different corners as they should: (F,) bool."""
    ordered = np.sort(faces_FK, axis=1)
    return (ordered[:, 1:] != ordered[:, :-1]).all(axis=1)
