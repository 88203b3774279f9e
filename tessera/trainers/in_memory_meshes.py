"""Meshes that a caller has in memory, as a source: tuples or dictionaries with vertices, faces and
maybe a text.

A mesh is written down as one from a file would be (`modalities/mesh/canonical.py`): it fills its
cube and comes in the canonical order. Its faces have other numbers then, so pairs of neighbouring
faces that came with it are not used but found anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tessera.data.errors import UnreadableFile
from tessera.modalities.mesh.canonical import MeshBatch, MeshExample, collate
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.mesh.media import Mesh
from tessera.run.config import did_you_mean
from tessera.run.errors import UserError

FIELDS = ("vertices", "faces", "face_edges", "texts", "text_embeds")
"""What an item may hold. Embeddings of texts may be there, for other readers, and are not looked
at."""


def names_of(dataset: Any, data_kwargs: Sequence[str]) -> tuple[str, ...]:
    """What the values of a tuple are: as the dataset itself says, or else as the trainer was
    told."""
    names = tuple(getattr(dataset, "data_kwargs", data_kwargs))
    for name in names:
        if name not in FIELDS:
            raise UserError(
                f"data_kwargs has {name!r}, which is nothing that a mesh has here{did_you_mean(name, FIELDS)}"
            )
    if not {"vertices", "faces"} <= set(names):
        raise UserError(
            f"A mesh is made of vertices and faces, but data_kwargs names only {', '.join(names) or 'nothing'}."
        )
    return names


@dataclass(frozen=True)
class InMemoryMeshes:
    """The source: somebody's own meshes, neither stretched nor turned."""

    items: Sequence[Any]
    names: tuple[str, ...]
    data: MeshDataConfig

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return f"mesh-{index:06d}"

    def caption(self, index: int) -> str:
        """Nothing is read where no text is to be expected."""
        if "texts" not in self.names:
            return ""
        text = self.fields(index).get("texts", "")
        if not isinstance(text, str):
            raise UnreadableFile(
                f"{self.name(index)}: its text is {type(text).__name__}, but it should be one string"
            )
        return text

    def signature(self, index: int) -> str:
        """Changes when the mesh does."""
        try:
            example = self.item(index, np.random.default_rng(0))
        except UnreadableFile:
            return "unusable"
        return hashlib.blake2b(
            example.vertices.tobytes() + example.faces.tobytes(), digest_size=16
        ).hexdigest()

    def item(self, index: int, rng: np.random.Generator) -> MeshExample:
        fields, caption = self.fields(index), self.caption(index)
        try:
            mesh = self.fitting(Mesh(array(fields["vertices"]), array(fields["faces"])))
            return MeshExample.from_mesh(mesh, self.data.bins, caption)
        except ValueError as error:  # Mesh's own, or Unreadable
            raise UnreadableFile(f"{self.name(index)}: {error}") from error

    def collate(self, examples: list[MeshExample]) -> MeshBatch:
        return collate(examples)

    def fields(self, index: int) -> dict[str, Any]:
        """An item's values under their names."""
        item = self.items[index]
        if isinstance(item, Mapping):
            fields = dict(item)
        elif isinstance(item, (tuple, list)) and len(item) <= len(self.names):
            fields = dict(zip(self.names, item))
        else:
            met = (
                f"{len(item)} values"
                if isinstance(item, (tuple, list))
                else f"a {type(item).__name__}"
            )
            raise UnreadableFile(
                f"{self.name(index)}: it is {met}, but an item is a dictionary, or a tuple of at most {len(self.names)} "
                f"({', '.join(self.names)}): say what its values are with data_kwargs"
            )
        if strange := [name for name in fields if name not in FIELDS]:
            raise UnreadableFile(
                f"{self.name(index)}: it has {strange[0]!r}{did_you_mean(str(strange[0]), FIELDS)}"
            )
        for name in ("vertices", "faces"):
            if name not in fields:
                raise UnreadableFile(f"{self.name(index)}: it has no {name}")
        if isinstance(fields.get("face_edges"), str):
            raise UnreadableFile(
                f"{self.name(index)}: a text stands where face_edges are expected: say what the values are, as in "
                'data_kwargs=("vertices", "faces", "texts")'
            )
        return fields

    def fitting(self, mesh: Mesh) -> Mesh:
        """Of the faces that are asked for, and not too many of them."""
        if not np.isfinite(mesh.vertices).all():
            raise UnreadableFile("some of its vertices are not numbers (NaN or infinite)")
        if self.data.polygons == "triangles":
            mesh = Mesh(mesh.vertices, mesh.triangles())
        elif mesh.faces.shape[1] != 4:
            raise UnreadableFile("its faces are triangles, but this network is one of quads")
        if len(mesh.faces) > self.data.max_faces:
            raise UnreadableFile(
                f"it has {len(mesh.faces):,} {self.data.polygons}, more than the {self.data.max_faces:,} allowed"
            )
        return mesh


def array(values: Any) -> np.ndarray:
    return torch.as_tensor(values).detach().cpu().numpy()
