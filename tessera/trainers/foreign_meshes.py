"""The contracts of meshgpt-pytorch: models that are called with vertices and faces by name.

    autoencoder(vertices=..., faces=..., return_loss_breakdown=True)  -> loss, (recon, commit)
    transformer(vertices=..., faces=..., texts=...)                   -> loss

`pad_id` fills up meshes that are smaller than the largest of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tessera.data.errors import UnreadableFile
from tessera.data.source import Items
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, BestMetric
from tessera.run.errors import UserError
from tessera.trainers.foreign import (
    ForeignDataset,
    ForeignLoss,
    SingleLossTask,
    check_contract,
    pad_rows,
    to_tensor,
)
from tessera.trainers.in_memory_meshes import get_field_names, parse_fields

TEXT_FIELDS = ("texts", "text_embeds")
ForeignMesh = dict[str, Tensor | str]
"""Vertices, faces and other values by name; a text is a string."""


class ForeignMeshAutoencoderTask(SingleLossTask):
    best_metric = BestMetric(name="recon_loss", higher_is_better=False)
    optimizer_keys = {"model": "optimizer"}

    def __init__(self, model: object, optimizer: OptimizerConfig):
        checked = check_contract(
            model,
            trainer="MeshAutoencoderTrainer",
            ours="a MeshAutoencoder of MeshAutoencoderConfig",
            parameters=("vertices", "faces", "return_loss_breakdown"),
            attributes=("pad_id",),
        )
        super().__init__(checked, optimizer)

    def call(self, batch: Batch) -> ForeignLoss:
        total, (recon, commit) = self.model(**batch.examples.data, return_loss_breakdown=True)
        return ForeignLoss(total, {"recon_loss": recon, "commit_loss": commit.sum()})


class ForeignMeshTransformerTask(SingleLossTask):
    optimizer_keys = {"model": "optimizer"}

    def __init__(self, model: object, optimizer: OptimizerConfig):
        checked = check_contract(
            model,
            trainer="MeshTransformerTrainer",
            ours="a model of MeshTransformerConfig(...).build(...)",
            parameters=("vertices", "faces"),
            attributes=("pad_id",),
        )
        super().__init__(checked, optimizer)

    def call(self, batch: Batch) -> ForeignLoss:
        return ForeignLoss(self.model(**batch.examples.data))


def build_meshes(
    dataset: Items, data_kwargs: Sequence[str], pad_id: int, *, texts: bool
) -> ForeignDataset:
    """Return meshes as dictionaries or tuples; without `texts` their texts are left out."""
    field_names = get_field_names(dataset, data_kwargs)
    parse = partial(parse_mesh, field_names=field_names, texts=texts)
    return ForeignDataset(dataset, MeshCollate(pad_id), parse=parse)


def parse_mesh(item: object, field_names: Sequence[str], texts: bool) -> ForeignMesh:
    """Return vertices (V, 3), faces (F, 3 or 4) and the other values of an item by name."""
    fields = parse_fields(item, field_names)
    vertices, faces = (to_tensor(f"its {name}", fields.pop(name)) for name in ("vertices", "faces"))
    if faces.is_floating_point() or faces.ndim != 2 or vertices.ndim != 2:
        raise UnreadableFile(
            f"its faces are {faces.dtype} of shape {tuple(faces.shape)} and its vertices of shape "
            f"{tuple(vertices.shape)}, but faces must be integers (faces, corners) and vertices "
            "(vertices, 3): name the values of a tuple with data_kwargs"
        )
    mesh: ForeignMesh = {"vertices": vertices, "faces": faces}
    for name, value in fields.items():
        if texts or name not in TEXT_FIELDS:
            mesh[name] = value if isinstance(value, str) else to_tensor(f"its {name}", value)
    return mesh


@dataclass(frozen=True)
class MeshCollate:
    pad_id: int

    def __call__(self, meshes: Sequence[ForeignMesh]) -> dict[str, object]:
        data: dict[str, object] = {}
        for name in {name: None for mesh in meshes for name in mesh}:
            if any(name not in mesh for mesh in meshes):
                raise UserError(
                    f"Some items of the dataset have {name!r} and others have not: give it to all "
                    "of them or to none."
                )
            values = [mesh[name] for mesh in meshes]
            tensors = [value for value in values if isinstance(value, Tensor)]
            data[name] = pad_rows(tensors, self.pad_id) if tensors else values
        return data
