"""The Mesh class: load common mesh files, hold vertices and faces, save and render them.

V counts vertices, F faces, K the corners of a face: 3, or 4 for quads. z is up. Files are parsed in
`modalities/mesh/io.py`, and meshes are rendered in `modalities/mesh/render.py`. Colours, textures
and normals are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from tessera.data.errors import UnreadableFile, add_path
from tessera.data.files import AnyFile, resolve_suffix
from tessera.modalities.image.media import Image
from tessera.modalities.mesh.io import (
    MAX_FACES,
    UP_AXIS,
    Polygons,
    Up,
    read_polygons,
    require_simplification,
    require_trimesh,
)
from tessera.modalities.mesh.polygons import build_quads, start_at_reflex_corner, triangulate
from tessera.modalities.mesh.render import render
from tessera.modalities.mesh.simplify import simplify_parts

if TYPE_CHECKING:  # reading and rendering meshes must not import torch
    from tessera.engine.task import TrackedMedia

FaceType = Literal["triangles", "quads"]
SAVED_SUFFIXES = (".glb", ".obj", ".ply", ".stl")
GRIDS = (None, 256, 128, 64)
"""Before a mesh is simplified its vertices are snapped to a grid with this many cells along the
longest side, each coarser grid only where the one before did not suffice: separate and nearly
touching parts, which cannot be simplified further, are merged."""
PASSES = 2
"""A second pass starts with a low threshold again, and gets further where the first stopped."""
MIN_SURFACE_FRACTION = 0.5
"""The fraction of its surface that a simplified mesh must keep: a tree must not lose its leaves."""


@dataclass(eq=False, repr=False)
class Mesh:
    vertices: np.ndarray
    """(V, 3) float64."""
    faces: np.ndarray
    """(F, 3) or (F, 4) int64: vertex indices, counterclockwise as seen from outside."""
    suffixes: ClassVar[tuple[str, ...]] = SAVED_SUFFIXES
    """The formats that can be written, the default first."""

    def __post_init__(self) -> None:
        self.vertices, self.faces = np.asarray(self.vertices, np.float64), np.asarray(self.faces)
        if self.vertices.ndim != 2 or self.vertices.shape[1] != 3:
            raise ValueError(
                f"The vertices of a Mesh must have shape (vertices, 3), got {self.vertices.shape}."
            )
        if (
            self.faces.ndim != 2
            or self.faces.shape[1] not in (3, 4)
            or not np.issubdtype(self.faces.dtype, np.integer)
        ):
            raise ValueError(
                "The faces of a Mesh must be integers of shape (faces, 3) or (faces, 4), got "
                f"{self.faces.shape} of {self.faces.dtype}."
            )
        if self.faces.size and not 0 <= self.faces.min() <= self.faces.max() < len(self.vertices):
            raise ValueError(
                f"The faces of a Mesh of {len(self.vertices)} vertices must refer to vertices 0 to "
                f"{len(self.vertices) - 1}, got {self.faces.min()} to {self.faces.max()}."
            )
        self.faces = self.faces.astype(np.int64, copy=False)

    def __repr__(self) -> str:
        return f"Mesh(vertices={len(self.vertices)}, faces={len(self.faces)})"

    @classmethod
    def load(
        cls,
        path: str | Path,
        polygons: FaceType = "triangles",
        up: Up | None = None,
        max_faces: int = MAX_FACES,
    ) -> Mesh:
        """Load and repair the mesh in a file; all parts of a scene become one mesh.

        Args:
            polygons: Whether faces are converted to triangles or to quads.
            up: The upward axis of the file; None takes the usual one of its format.
            max_faces: A file with more faces is not parsed.

        Raises:
            UnreadableFile: With the file name and the reason.
        """
        with add_path(path):
            return read_mesh(path, polygons, up, max_faces)

    def save(self, path: str | Path) -> Path:
        """Save as .glb, .obj, .ply or .stl and return the path.

        A path without a suffix becomes a .glb file, with an .obj file next to it. Only .obj keeps
        quads; in the other formats they become triangles.

        Raises:
            ValueError: If the suffix belongs to another format.
        """
        target = resolve_suffix(path, ".glb", SAVED_SUFFIXES)
        target.parent.mkdir(parents=True, exist_ok=True)
        suffix = target.suffix.lower()
        if suffix == ".obj":
            target.write_text(self.to_y_up().to_obj(), encoding="utf-8")
            return target
        rotated = self.to_y_up() if suffix == ".glb" else self
        exported = require_trimesh().Trimesh(rotated.vertices, rotated.triangles(), process=False)
        target.write_bytes(exported.export(file_type=suffix.removeprefix(".")))
        if target != Path(path):
            target.with_suffix(".obj").write_text(self.to_y_up().to_obj(), encoding="utf-8")
        return target

    def _repr_png_(self) -> bytes:
        """Show the rendered mesh in notebooks."""
        return self.render().to_png()

    def to_tracker(self) -> TrackedMedia:
        import torch

        from tessera.engine.task import TrackedMedia

        return TrackedMedia(
            kind="mesh",
            array=torch.tensor(self.vertices),
            content=self.to_y_up().to_obj().encode(),
            suffix=".obj",
            faces=torch.tensor(self.triangles()),
        )

    @classmethod
    def sheet(
        cls, items: Sequence[Mesh], labels: Sequence[str] = (), *, columns: int | None = None
    ) -> Image:
        """Return a contact sheet of rendered meshes, row by row."""
        if not items:
            raise ValueError("A contact sheet needs at least one mesh, got none.")
        return Image.sheet([item.render() for item in items], labels, columns=columns)

    @classmethod
    def side_by_side(cls, left: Mesh, right: Mesh) -> Mesh:
        """Return two meshes of unit cubes next to each other: an original and its
        reconstruction."""
        shifted = right.vertices + np.array([1.2, 0.0, 0.0])
        return cls(
            np.concatenate([left.vertices, shifted]),
            np.concatenate([left.faces, right.faces + len(left.vertices)]),
        )

    def render(self, size: int = 192) -> Image:
        """Render the mesh from the front, right and above; `size` x `size` pixels."""
        is_quad = self.faces.shape[1] == 4
        faces = start_at_reflex_corner(self.vertices, self.faces) if is_quad else self.faces
        return render(self.vertices, faces, size)

    def triangles(self) -> np.ndarray:
        """Return the faces, each quad as two consecutive triangles that start at the same
        vertex."""
        return triangulate(self.vertices, self.faces)

    def area(self) -> float:
        """Return the surface area."""
        one, two, three = self.vertices[self.triangles()].transpose(1, 0, 2)
        return float(np.linalg.norm(np.cross(two - one, three - one), axis=1).sum() / 2)

    def simplify(self, max_faces: int) -> Mesh:
        """Reduce to at most `max_faces` triangles, part by part (`modalities/mesh/simplify.py`), or
        as a whole by quadric error (Garland and Heckbert 1997) if that leaves more of the surface.

        Raises:
            UnreadableFile: If that is impossible, or if too little of the surface is left.
        """
        original = Mesh(self.vertices, self.triangles())
        if len(original.faces) <= max_faces:
            return original
        parts = simplify_parts(original.vertices, original.faces, max_faces)
        if parts is not None and len(parts.faces) <= max_faces:
            simpler = Mesh(*clean_mesh(parts.vertices, parts.faces))
            if simpler.area() >= MIN_SURFACE_FRACTION * original.area():
                return simpler
        for cells in GRIDS:
            simpler = original if cells is None else original.snap_to_grid(cells)
            for _ in range(PASSES):
                if len(simpler.faces) > max_faces:
                    reduced = require_simplification().simplify(
                        simpler.vertices, simpler.faces, target_count=max_faces
                    )
                    simpler = Mesh(*clean_mesh(*reduced))
            large_enough = simpler.area() >= MIN_SURFACE_FRACTION * original.area()
            if len(simpler.faces) <= max_faces and large_enough:
                return simpler
        left = simpler.area() / max(original.area(), np.finfo(np.float64).tiny)
        raise UnreadableFile(
            f"its {len(original.faces):,} triangles cannot be simplified to {max_faces:,}: "
            f"{len(simpler.faces):,} are left, with {left:.0%} of its surface"
        )

    def snap_to_grid(self, cells: int) -> Mesh:
        """Move vertices to a grid with so many cells along the longest side, and merge those that
        coincide."""
        cell = np.ptp(self.vertices, axis=0).max() / cells
        return Mesh(*clean_mesh(np.rint(self.vertices / cell) * cell, self.faces))

    def to_obj(self) -> str:
        """Return the content of an OBJ file; %.9g preserves every float32."""
        vertices = "".join(
            "v {:.9g} {:.9g} {:.9g}\n".format(*vertex) for vertex in self.vertices.tolist()
        )
        faces = "".join(f"f {' '.join(map(str, face))}\n" for face in (self.faces + 1).tolist())
        return vertices + faces

    def from_y_up(self) -> Mesh:
        """Rotate from y up to z up: a quarter turn about x."""
        x, y, z = self.vertices.T
        return Mesh(np.stack([x, -z, y], axis=1), self.faces)

    def to_y_up(self) -> Mesh:
        """Rotate from z up to y up."""
        x, y, z = self.vertices.T
        return Mesh(np.stack([x, z, -y], axis=1), self.faces)


def read_mesh(
    path: AnyFile,
    polygons: FaceType = "triangles",
    up: Up | None = None,
    max_faces: int = MAX_FACES,
) -> Mesh:
    """Load a mesh as `Mesh.load` does, with errors that do not name the file."""
    content = read_polygons(path, max_faces)
    validate_polygons(content)
    mesh = repair(content.vertices, build_faces(content, polygons))
    return mesh.from_y_up() if (up or UP_AXIS[content.format]) == "y" else mesh


def validate_polygons(content: Polygons) -> None:
    """Raise UnreadableFile if there are no faces, or if they have missing or non-finite
    vertices."""
    if not any(polygons.size for polygons in content.by_corners.values()):
        points = [f"{len(content.vertices):,} points"] if len(content.vertices) else []
        others = [content.other_content] if content.other_content else []
        present = " and ".join([*points, *others])
        raise UnreadableFile(f"it has no faces ({present or 'nothing at all'})")
    used = np.unique(np.concatenate([polygons.ravel() for polygons in content.by_corners.values()]))
    count = len(content.vertices)
    if used[0] < 0 or used[-1] >= count:
        raise UnreadableFile(
            f"its faces refer to vertices {used[0] + 1:,} to {used[-1] + 1:,}, but it has {count:,}"
        )
    if wrong := int((~np.isfinite(content.vertices[used])).any(axis=1).sum()):
        raise UnreadableFile(
            f"{wrong:,} of its {len(used):,} vertices are not finite (NaN or infinite)"
        )


def build_faces(content: Polygons, polygons: FaceType) -> np.ndarray:
    """Convert all polygons to triangles, or all to quads."""
    if polygons == "quads":
        return np.concatenate([build_quads(each) for each in content.by_corners.values()])
    return np.concatenate(
        [triangulate(content.vertices, each) for each in content.by_corners.values()]
    )


def repair(vertices: np.ndarray, faces: np.ndarray) -> Mesh:
    """Merge vertices that coincide, and remove degenerate and duplicate faces."""
    mesh = Mesh(*clean_mesh(vertices, faces))
    if not len(mesh.faces):
        raise UnreadableFile(
            f"all of its {len(faces):,} faces are degenerate: each has corners at the same position"
        )
    return mesh


def clean_mesh(vertices: np.ndarray, faces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge vertices that coincide, and remove degenerate faces, duplicate faces and unused
    vertices; vertices are in the order in which faces first refer to them."""
    # Adding 0.0 turns -0 into 0.
    _, first, same = np.unique(vertices + 0.0, axis=0, return_index=True, return_inverse=True)
    faces = first[same.reshape(-1)][faces]
    faces = faces[has_distinct_corners(faces)]
    faces = faces[np.sort(np.unique(np.sort(faces, axis=1), axis=0, return_index=True)[1])]
    used, first_use, indices = np.unique(faces, return_index=True, return_inverse=True)
    order = np.argsort(first_use)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return vertices[used[order]], rank[indices.reshape(faces.shape)]


def has_distinct_corners(faces_FK: np.ndarray) -> np.ndarray:
    """Return (F,) bool: which faces have no vertex twice."""
    ordered = np.sort(faces_FK, axis=1)
    return (ordered[:, 1:] != ordered[:, :-1]).all(axis=1)
