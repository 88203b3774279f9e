"""Meshes from a folder, or synthetic ones: quantised vertices and ordered faces, with captions.

A training mesh may be warped, mirrored, scaled along its axes, rotated about the vertical one and
moved in its cube, before it is quantised (`modalities/mesh/canonical.py`), and the order of its
parts may be shuffled. Synthetic meshes are not augmented, since a caption such as "wide" would
become wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np

from tessera.data.dataset import DataConfig, FileDataset
from tessera.data.errors import UnreadableFile, add_path
from tessera.data.files import FileSignature, file_signature
from tessera.modalities.mesh.adjacency import find_adjacent_faces, label_parts
from tessera.modalities.mesh.cache import load_or_create
from tessera.modalities.mesh.canonical import MeshBatch, MeshExample, collate
from tessera.modalities.mesh.io import (
    MAX_FACES,
    SUFFIXES,
    Up,
    require_simplification,
    require_trimesh,
)
from tessera.modalities.mesh.media import FaceType, Mesh, read_mesh, repair
from tessera.modalities.mesh.sample_metrics import MeshSampleMetric
from tessera.modalities.mesh.synthetic import MIN_FACES, SyntheticMeshes
from tessera.run.errors import UserError

OnLarge = Literal["skip", "decimate"]

HEADROOM = 4
"""A file that states more than this many times too many faces is skipped unread; duplicate faces do
not count."""
CACHED_MESHES = 1 << 12
"""The number of meshes that a process keeps in memory: 30 kB each as read, at 800 faces, or 70 kB
each as examples."""
NUM_PIECES = 5
"""The number of pieces of a warped axis; x and y have as many on either side of the centre."""


@dataclass(frozen=True, kw_only=True)
class MeshDataConfig(DataConfig):
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    noun: ClassVar[str] = "meshes"

    path: str | None = None
    """A folder of meshes, with subfolders, one mesh, tar shards, a table or a list of paths; None
    generates synthetic meshes."""
    bins: int = 128
    """The number of steps into which each side of the cube is quantised."""
    max_faces: int = 800
    """The maximum number of faces of a mesh, in triangles or quads."""
    on_large: OnLarge = "skip"
    """What to do with larger meshes: skip them, or simplify them."""
    polygons: FaceType = "triangles"
    """The kind of faces: everything as triangles, or quads; meshes with other faces are skipped."""
    up: Up | None = None
    """The upward axis of the files; None uses that of each format: y for OBJ, GLB and glTF, z for
    the others."""
    cache_dir: str | None = None
    """A folder that caches simplified and quantised meshes for later runs; None caches in
    memory."""
    scale: float = 0.0
    """The maximum random scaling of each axis of a training mesh: 0.25 scales by 0.75 to 1.25."""
    warp: float = 0.0
    """The strength of a random piecewise-linear warp of each axis of a training mesh, which changes
    the proportions of its parts: the standard deviation of the logarithm of the scale of a piece,
    0.5 for example. Left and right, and front and back, are warped alike."""
    rotation: float = 0.0
    """The maximum random rotation about the vertical axis in degrees; 180 allows any."""
    jitter: float = 0.0
    """The maximum random shift along each axis as a fraction of the cube, as far as there is
    room."""
    mirror: bool = False
    """Mirror half of the training meshes, left to right."""
    shuffle_parts: bool = False
    """Put the parts of a training mesh in random order instead of from the bottom up, for
    meshes-tree."""
    val_fraction: float = 0.05
    """The fraction held out, chosen by file name; 0 validates on the training meshes."""
    split_seed: int = 0
    """The seed of the choice of held-out files."""
    group_by: str = "file"
    """What is held out as a whole: file (each mesh alone), folder, prefix (of the file name, up to
    the first "-", "_" or "."), or a column of the metadata, such as source."""
    balance_by: str = "file"
    """What is drawn equally often in training: file, folder, prefix, or a column of the metadata,
    such as category. A group of few files is then seen as often as one of many."""
    num_synthetic: int = 2000
    """The number of synthetic training meshes; the held-out ones come on top."""
    synthetic_seed: int = 0
    """The seed of the synthetic meshes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bins < 2:
            raise ValueError(f"bins must be at least 2, got {self.bins}.")
        if self.max_faces < 1:
            raise ValueError(f"max_faces must be at least 1, got {self.max_faces}.")
        if self.path is None and self.max_faces < MIN_FACES:
            raise ValueError(
                f"Synthetic meshes need max_faces of at least {MIN_FACES}, got {self.max_faces}."
            )
        if self.on_large == "decimate" and self.polygons == "quads":
            raise ValueError(
                "Simplified meshes consist of triangles: on_large decimate cannot be combined with "
                "polygons quads."
            )
        if not 0 <= self.scale < 1:
            raise ValueError(f"scale must be at least 0 and below 1, got {self.scale}.")
        if not 0 <= self.warp <= 2:
            raise ValueError(f"warp must be 0 to 2, got {self.warp}.")
        if not 0 <= self.rotation <= 180:
            raise ValueError(f"rotation must be 0 to 180 degrees, got {self.rotation}.")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be 0 to 1, got {self.jitter}.")

    def synthetic_dataset(self) -> SyntheticMeshes:
        return SyntheticMeshes(
            self.num_synthetic,
            bins=self.bins,
            polygons=self.polygons,
            max_faces=self.max_faces,
            seed=self.synthetic_seed,
        )

    def folder_dataset(self) -> MeshFolderDataset:
        return MeshFolderDataset(self.find_files(), self)

    def check_libraries(self) -> None:
        require_trimesh()
        if self.on_large == "decimate":
            require_simplification()

    def reading(self) -> tuple[FaceType, Up | None, int, OnLarge]:
        """Return the settings with which a file is read."""
        return self.polygons, self.up, self.max_faces, self.on_large

    def preprocessing(self) -> dict[str, object]:
        return {
            "bins": self.bins,
            "max_faces": self.max_faces,
            "on_large": self.on_large,
            "polygons": self.polygons,
            "up": self.up,
        }

    def without_augmentation(self) -> MeshDataConfig:
        return replace(
            self, scale=0.0, warp=0.0, rotation=0.0, jitter=0.0, mirror=False, shuffle_parts=False
        )

    def sample_metrics(self) -> list[MeshSampleMetric]:
        split = self.without_augmentation().build(captions=True)
        held_out = split.validation if split.validation is not split.train else None
        return [MeshSampleMetric(split.train, self.bins, held_out)]

    def collate(self, examples: list[MeshExample]) -> MeshBatch:
        return collate(examples)

    def example_from_media(self, media: object) -> MeshExample:
        """Preprocess a Mesh, or a pair of arrays: vertices (V, 3) and faces (F, 3) or (F, 4)."""
        mesh = Mesh(*media) if isinstance(media, tuple) and len(media) == 2 else media
        if not isinstance(mesh, Mesh):
            raise UserError(
                "Expected a Mesh, a path or a pair of arrays (vertices, faces), got a "
                f"{type(media).__name__}."
            )
        if not np.isfinite(mesh.vertices).all():
            raise UserError("The mesh has vertices that are not finite (NaN or infinite).")
        if self.polygons == "quads" and mesh.faces.shape[1] != 4:
            raise UserError("The mesh has triangles, but the model supports quads only.")
        faces = mesh.triangles() if self.polygons == "triangles" else mesh.faces
        mesh = repair(mesh.vertices, faces)
        if len(mesh.faces) > self.max_faces and self.on_large == "decimate":
            mesh = mesh.simplify(self.max_faces)
        if len(mesh.faces) > self.max_faces:
            raise UserError(
                f"The mesh has {len(mesh.faces):,} faces, but the model supports "
                f"{self.max_faces:,}: simplify it first (Mesh.simplify)."
            )
        return MeshExample.from_mesh(mesh, self.bins, "")


@dataclass(frozen=True)
class MeshFolderDataset(FileDataset):
    config: MeshDataConfig

    def item(self, index: int, rng: np.random.Generator) -> MeshExample:
        """Draw nine random numbers: three scales, a rotation, three shifts, a reflection and an
        order; then those of the caption and of the warp."""
        config = self.config
        scale, (rotation,), shift, (side, order) = np.split(rng.uniform(-1, 1, 9), [3, 4, 7])
        caption = self.sample_caption(index, rng)
        log_scales = config.warp * rng.standard_normal((3, NUM_PIECES))
        file = self.files.file(index)
        with add_path(str(file)):
            signature, settings = file_signature(file), config.reading()
            if config == config.without_augmentation():
                example = load_example(signature, *settings, config.bins, config.cache_dir)
                return replace(example, caption=caption)
            mesh = load_mesh_cached(signature, *settings)
            vertices = warp(mesh.vertices, log_scales) if config.warp else mesh.vertices
            vertices = augment(vertices, scale * config.scale, rotation * config.rotation)
            moved = Mesh(vertices, mesh.faces)
            if config.mirror and side < 0:
                moved = mirror(moved)
            example = MeshExample.from_mesh(moved, config.bins, caption, shift * config.jitter)
            return shuffle_parts(example, order) if config.shuffle_parts else example


@lru_cache(maxsize=CACHED_MESHES)
def load_example(
    signature: FileSignature,
    polygons: FaceType,
    up: Up | None,
    max_faces: int,
    on_large: OnLarge,
    bins: int,
    cache_dir: str | None,
) -> MeshExample:
    """Load a mesh in canonical form, without its caption."""

    def create() -> MeshExample:
        mesh = load_mesh(signature, polygons, up, max_faces, on_large)
        return MeshExample.from_mesh(mesh, bins, caption="")

    if cache_dir is None:
        return create()
    depends_on = [signature.as_text(), polygons, up, max_faces, on_large, bins]
    return load_or_create(cache_dir, depends_on, create)


def load_mesh(
    signature: FileSignature,
    polygons: FaceType,
    up: Up | None,
    max_faces: int,
    on_large: OnLarge,
) -> Mesh:
    """Load a mesh of at most `max_faces` faces; simplify or reject larger ones."""
    if on_large == "decimate":
        return read_mesh(signature.file, polygons, up).simplify(max_faces)
    limit = min(MAX_FACES, HEADROOM * max_faces)
    mesh = read_mesh(signature.file, polygons, up, max_faces=limit)
    if len(mesh.faces) > max_faces:
        raise UnreadableFile(
            f"it has {len(mesh.faces):,} {polygons}, more than max_faces {max_faces:,}: raise "
            "max_faces, or simplify large meshes (on_large=decimate)"
        )
    return mesh


load_mesh_cached = lru_cache(maxsize=CACHED_MESHES)(load_mesh)
"""`load_mesh`, cached while the file stays the same."""


def load_mesh_of(dataset: MeshFolderDataset, index: int) -> Mesh:
    """Load a mesh of a dataset as it is before it is quantised."""
    return load_mesh_cached(file_signature(dataset.files.file(index)), *dataset.config.reading())


def warp(vertices: np.ndarray, log_scales: np.ndarray) -> np.ndarray:
    """Stretch pieces of each axis by the exponentials of (3, NUM_PIECES) numbers, within the same
    bounding box (PolyGen, Nash 2020, arXiv 2002.10880).

    Equal coordinates stay equal, so that boards stay flat and boxes stay boxes. The pieces of x and
    y are mirrored at the centre, so that a symmetric mesh stays symmetric.
    """
    low, high = vertices.min(axis=0), vertices.max(axis=0)
    warped = []
    for axis, lengths in enumerate(np.exp(log_scales)):
        if axis < 2:
            lengths = np.concatenate([lengths, lengths[::-1]])
        ends = np.concatenate([[0.0], np.cumsum(lengths)]) / lengths.sum()
        start, extent = low[axis], high[axis] - low[axis]
        knots = start + extent * np.linspace(0, 1, len(ends))
        warped.append(np.interp(vertices[:, axis], knots, start + extent * ends))
    return np.stack(warped, axis=1)


def augment(vertices: np.ndarray, scale: np.ndarray, degrees: float) -> np.ndarray:
    """Scale along the axes, then rotate about z."""
    x, y, z = (vertices * (1 + scale)).T
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.stack([x * cosine - y * sine, x * sine + y * cosine, z], axis=1)


def mirror(mesh: Mesh) -> Mesh:
    """Exchange left and right; faces are turned round, so that they keep their outside."""
    return Mesh(mesh.vertices * np.array([-1.0, 1.0, 1.0]), mesh.faces[:, ::-1])


def shuffle_parts(example: MeshExample, order: float) -> MeshExample:
    """Put the connected parts of an example in an order that a number of -1 to 1 determines; the
    faces of a part stay in order."""
    rng = np.random.default_rng(int((order + 1) * 2**31))
    labels_F = label_parts(example.faces, len(example.vertices))[example.faces[:, 0]]
    rank = rng.permutation(len(example.vertices))
    faces = example.faces[np.argsort(rank[labels_F], kind="stable")]
    return replace(example, faces=faces, edges=find_adjacent_faces(faces))
