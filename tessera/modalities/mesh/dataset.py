"""Meshes from a folder, or the built-in toys: faces and vertices in whole numbers and one order,
each mesh with its caption.

A training mesh may be stretched along its three axes, turned about the upright one and moved in its
cube; all of this is drawn from the example's own generator, before the mesh is written down
(`modalities/mesh/canonical.py`). Toys are never changed, since "wide" would become a lie. Which
files are held out depends on their names alone (`data/split.py`), and those are not changed either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal

import numpy as np

from tessera.data.dataset import DataConfig, FileDataset
from tessera.data.discovery import FileSignature, file_signature, find
from tessera.data.errors import UnreadableFile, named
from tessera.modalities.mesh.cache import kept
from tessera.modalities.mesh.canonical import MeshBatch, MeshExample, collate
from tessera.modalities.mesh.io import ENDINGS, MOST_READ, Up
from tessera.modalities.mesh.media import Mesh, Shape, read
from tessera.modalities.mesh.sample_metrics import MeshSampleMetric
from tessera.modalities.mesh.synthetic import FEWEST_FACES, SyntheticMeshes
from tessera.modalities.mesh.trimesh_library import library, simplification

HEADROOM = 4
"""How many times too large a file may claim to be before it is left out unread: faces that stand
there twice do not count."""
KEPT_IN_MEMORY = 1 << 12
"""Meshes that a process keeps: as they were read and simplified, at 800 faces 30 kB each; or, where
they are not changed, as the examples that are made of them, 70 kB each."""


@dataclass(frozen=True, kw_only=True)
class MeshDataConfig(DataConfig):
    path: str | None = None
    """A folder of meshes, with subfolders; or one mesh. None: the built-in toys."""
    bins: int = 128
    """Into how many steps each side of the cube is divided."""
    max_faces: int = 800
    """The largest mesh that is learnt from, in triangles or quads."""
    large: Literal["skip", "decimate"] = "skip"
    """What becomes of larger ones: they are left out, or simplified until they fit."""
    polygons: Literal["triangles", "quads"] = "triangles"
    """What faces are: everything cut into triangles, or quads; meshes that hold anything else are
    then left out."""
    up: Literal["y", "z"] | None = None
    """The upward axis of the files; None takes the usual one of each format: y for OBJ, GLB and
    glTF, z for the others."""
    keep: str | None = None
    """A folder where meshes are kept as they are learnt from, simplified, in order and with which
    faces touch, for later runs;
    None: in memory only."""
    scale: float = 0.0
    """Training meshes are stretched along each axis by up to this share: 0.25 gives 0.75 to 1.25
    times the length."""
    turn: float = 0.0
    """Training meshes are turned about the upright axis by up to so many degrees, either way; 180
    is any way."""
    jitter: float = 0.0
    """Training meshes are moved in their cube along each axis by up to this share of its side, as
    far as there is room."""
    val_fraction: float = 0.05
    """The share held out, chosen by file name; 0 validates on the training meshes themselves."""
    split_seed: int = 0
    """Another seed holds out other files."""
    toys: int = 2000
    """How many toy meshes to learn from; those held out come on top."""
    toy_seed: int = 0
    """Another seed is another set of toys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bins < 2:
            raise ValueError(
                f"A side of the cube is divided into at least 2 steps, but bins is {self.bins}."
            )
        if self.max_faces < 1:
            raise ValueError(f"A mesh has at least 1 face, but max_faces is {self.max_faces}.")
        if self.path is None and self.max_faces < FEWEST_FACES:
            raise ValueError(
                f"Toys need {FEWEST_FACES} faces to be told apart, but max_faces is {self.max_faces}."
            )
        if self.large == "decimate" and self.polygons == "quads":
            raise ValueError(
                'A simplified mesh is made of triangles: large="decimate" does not go with polygons="quads".'
            )
        if not 0 <= self.scale < 1:
            raise ValueError(
                f"scale is a share of the length, at least 0 and below 1, but it is {self.scale}."
            )
        if not 0 <= self.turn <= 180:
            raise ValueError(f"turn is an angle of 0 to 180 degrees, but it is {self.turn}.")
        if not 0 <= self.jitter <= 1:
            raise ValueError(
                f"jitter is a share of the cube's side, 0 to 1, but it is {self.jitter}."
            )

    def synthetic_dataset(self) -> SyntheticMeshes:
        return SyntheticMeshes(
            self.toys,
            bins=self.bins,
            polygons=self.polygons,
            max_faces=self.max_faces,
            seed=self.toy_seed,
        )

    def folder_dataset(self) -> MeshFolderDataset:
        return MeshFolderDataset.of(find(str(self.path), ENDINGS, "meshes"), self)

    def libraries(self) -> tuple[Callable[[], ModuleType], ...]:
        return (library, simplification) if self.large == "decimate" else (library,)

    def preprocessing(self) -> dict[str, Any]:
        """How a mesh is prepared before it is tokenized or measured."""
        return {
            "bins": self.bins,
            "max_faces": self.max_faces,
            "large": self.large,
            "polygons": self.polygons,
            "up": self.up,
        }

    def without_augmentation(self) -> MeshDataConfig:
        return replace(self, scale=0.0, turn=0.0, jitter=0.0)

    def sample_metric(self) -> MeshSampleMetric:
        return MeshSampleMetric(self.without_augmentation().build().train, self.bins)


@dataclass(frozen=True)
class MeshFolderDataset(FileDataset):
    """The source: files of one folder, prepared as the configuration says."""

    config: MeshDataConfig

    def item(self, index: int, rng: np.random.Generator) -> MeshExample:
        """Always seven draws: three for the axes, one for the turn, three for the place."""
        stretch, (turn,), place = np.split(rng.uniform(-1, 1, 7), [3, 4])
        caption = self.sample_caption(index, rng)
        if self.config == self.config.without_augmentation():
            return replace(self.unchanged(index), caption=caption)
        mesh = self.mesh(index)
        moved = Mesh(
            augmented(mesh.vertices, stretch * self.config.scale, turn * self.config.turn),
            mesh.faces,
        )
        with named(self.path(index)):
            return MeshExample.of(moved, self.config.bins, caption, place * self.config.jitter)

    def collate(self, examples: list[MeshExample]) -> MeshBatch:
        return collate(examples)

    def mesh(self, index: int) -> Mesh:
        """As it stands in the file, or simplified; of the size and in the place that it has
        there."""
        with named(self.path(index)):
            state, config = file_signature(self.path(index)), self.config
            return fitting_kept(state, config.polygons, config.up, config.max_faces, config.large)

    def unchanged(self, index: int) -> MeshExample:
        """As it is learnt from without augmentation, and without its caption, which may change
        while the file does not."""
        with named(self.path(index)):
            state, config = file_signature(self.path(index)), self.config
            return prepared(
                state,
                config.polygons,
                config.up,
                config.max_faces,
                config.large,
                config.bins,
                config.keep,
            )


@lru_cache(maxsize=KEPT_IN_MEMORY)
def prepared(
    state: FileSignature,
    polygons: Shape,
    up: Up | None,
    most: int,
    large: Literal["skip", "decimate"],
    bins: int,
    keep: str | None,
) -> MeshExample:
    """The mesh in a file in canonical form, and which of its faces touch. Remembered as long as the
    file is the same."""

    def make() -> MeshExample:
        return MeshExample.of(fitting(state, polygons, up, most, large), bins, caption="")

    return (
        make() if keep is None else kept(keep, [vars(state), polygons, up, most, large, bins], make)
    )


def fitting(
    state: FileSignature,
    polygons: Shape,
    up: Up | None,
    most: int,
    large: Literal["skip", "decimate"],
) -> Mesh:
    """The mesh in a file, of at most so many faces."""
    if large == "decimate":
        return read(state.path, polygons, up).simplified(most)
    mesh = read(state.path, polygons, up, most=min(MOST_READ, HEADROOM * most))
    if len(mesh.faces) > most:
        raise UnreadableFile(
            f"it has {len(mesh.faces):,} {polygons}, more than the {most:,} asked for: "
            "leave it out, raise max_faces, or let it be simplified (large=decimate)"
        )
    return mesh


fitting_kept = lru_cache(maxsize=KEPT_IN_MEMORY)(fitting)
"""The same, remembered as long as the file is the same."""


def augmented(vertices: np.ndarray, stretch: np.ndarray, degrees: float) -> np.ndarray:
    """Stretched, then turned about z."""
    x, y, z = (vertices * (1 + stretch)).T
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.stack([x * cosine - y * sine, x * sine + y * cosine, z], axis=1)
