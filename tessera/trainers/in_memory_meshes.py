"""Meshes in memory as a dataset: tuples or dictionaries of vertices, faces and, optionally, a text.

A mesh is put into canonical form like one from a file (`modalities/mesh/canonical.py`). This
reorders its faces, so given pairs of adjacent faces are not used but computed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tessera.data.dataset import ExampleDataset
from tessera.data.errors import UnreadableFile
from tessera.modalities.mesh.canonical import MeshBatch, MeshExample, collate
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.mesh.media import Mesh
from tessera.run.config import did_you_mean
from tessera.run.errors import UserError

FIELDS = ("vertices", "faces", "face_edges", "texts", "text_embeds")
"""The values that an item may have; `face_edges` and `text_embeds` are accepted and not used."""


def get_field_names(dataset: object, data_kwargs: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the values of a tuple: `dataset.data_kwargs`, or else the argument."""
    names = tuple(getattr(dataset, "data_kwargs", data_kwargs))
    for name in names:
        if name not in FIELDS:
            raise UserError(
                f"data_kwargs has {name!r}, which is not a field of a mesh"
                f"{did_you_mean(name, FIELDS)}"
            )
    if not {"vertices", "faces"} <= set(names):
        raise UserError(
            f"data_kwargs has only {', '.join(names) or 'no names'}, but a mesh needs vertices and "
            "faces: add them."
        )
    return names


@dataclass(frozen=True)
class ParsedMesh:
    """An item in canonical form."""

    example: MeshExample
    signature: str


@dataclass(frozen=True)
class InMemoryMeshes(ExampleDataset):
    """Meshes without augmentation."""

    items: Sequence[object]
    field_names: tuple[str, ...]
    """The names of the values of a tuple."""
    data: MeshDataConfig
    keep_parsed: bool = False
    """Read each item only once, since that may be expensive. For a dataset that is released when
    its meshes are tokenized: their canonical form is kept in memory until then."""
    parsed: dict[int, ParsedMesh | UnreadableFile] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return f"mesh-{index:06d}"

    def all_captions(self, index: int) -> list[str]:
        """Return the text of an item; items are not read if no texts are expected."""
        return [self.parse(index).example.caption] if "texts" in self.field_names else []

    def signature(self, index: int) -> str:
        try:
            return self.parse(index).signature
        except UnreadableFile:
            return "unreadable"

    def item(self, index: int, rng: np.random.Generator) -> MeshExample:
        return self.parse(index).example

    def parse(self, index: int) -> ParsedMesh:
        """Return an item in canonical form, or raise UnreadableFile."""
        found = self.parsed.get(index)
        if found is None:
            try:
                found = self.read(index)
            except UnreadableFile as error:
                found = error
            if self.keep_parsed:
                self.parsed[index] = found
        if isinstance(found, UnreadableFile):
            raise found
        return found

    def read(self, index: int) -> ParsedMesh:
        fields = parse_fields(self.items[index], self.field_names)
        text = fields.get("texts", "") if "texts" in self.field_names else ""
        if not isinstance(text, str):
            raise UnreadableFile(f"its text is a {type(text).__name__}, but must be one string")
        vertices, faces = (to_array(name, fields[name]) for name in ("vertices", "faces"))
        try:
            mesh = self.prepare_mesh(Mesh(vertices, faces))
            example = MeshExample.from_mesh(mesh, self.data.bins, text)
        except UnreadableFile:
            raise
        except ValueError as error:  # of Mesh
            raise UnreadableFile(str(error)) from error
        content = vertices.tobytes() + faces.tobytes()
        return ParsedMesh(example, hashlib.blake2b(content, digest_size=16).hexdigest())

    def collate(self, examples: list[MeshExample]) -> MeshBatch:
        return collate(examples)

    def prepare_mesh(self, mesh: Mesh) -> Mesh:
        """Convert the faces to those of the model; raise UnreadableFile if that is not possible."""
        polygons, max_faces = self.data.polygons, self.data.max_faces
        if not np.isfinite(mesh.vertices).all():
            raise UnreadableFile("some of its vertices are NaN or infinite, but must be finite")
        if polygons == "triangles":
            mesh = Mesh(mesh.vertices, mesh.triangles())
        elif mesh.faces.shape[1] != 4:
            raise UnreadableFile("its faces are triangles, but the model was built for quads")
        if len(mesh.faces) > max_faces:
            raise UnreadableFile(
                f"it has {len(mesh.faces):,} {polygons}, more than max_faces {max_faces:,}: "
                "simplify it first"
            )
        return mesh


def parse_fields(item: object, field_names: Sequence[str]) -> dict[str, object]:
    """Return the values of an item by name, or raise UnreadableFile."""
    if isinstance(item, Mapping):
        fields = dict(item)
    elif isinstance(item, (tuple, list)) and len(item) <= len(field_names):
        fields = dict(zip(field_names, item))
    else:
        found = f"is a {type(item).__name__}"
        if isinstance(item, (tuple, list)):
            found = f"has {len(item)} values"
        raise UnreadableFile(
            f"it {found}, but an item must be a dictionary, or a tuple of at most "
            f"{len(field_names)} values ({', '.join(field_names)}): name its values "
            "with data_kwargs"
        )
    for key in fields:
        if key not in FIELDS:
            raise UnreadableFile(f"it has the unknown key {key!r}{did_you_mean(str(key), FIELDS)}")
    fields = {key: value for key, value in fields.items() if value is not None}
    for required in ("vertices", "faces"):
        if required not in fields:
            raise UnreadableFile(f"it has no {required}, but a mesh needs them")
    if isinstance(fields.get("face_edges"), str):
        raise UnreadableFile(
            "its face_edges are a text, but must be pairs of faces: name its values "
            'with data_kwargs, such as ("vertices", "faces", "texts")'
        )
    return fields


def to_array(name: str, values: object) -> np.ndarray:
    try:
        return torch.as_tensor(values).detach().cpu().numpy()
    except (TypeError, ValueError, RuntimeError):
        raise UnreadableFile(
            f"its {name} are a {type(values).__name__}, but must be a tensor or an array of numbers"
        ) from None
