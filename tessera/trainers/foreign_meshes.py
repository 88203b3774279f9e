"""The contracts of meshgpt-pytorch: models that are called with vertices and faces by name.

    autoencoder(vertices=..., faces=..., return_loss_breakdown=True)  -> loss, (recon, commit)
    transformer(vertices=..., faces=..., texts=...)                   -> loss

`pad_id` fills up meshes that are smaller than the largest of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.data.errors import UnreadableFile
from tessera.data.source import DatasetSource
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, BestMetric, Loss, Update
from tessera.trainers.foreign import (
    MODEL,
    ForeignLoss,
    ForeignTask,
    check_contract,
    name_fields,
    pad_rows,
    seed_model,
)

TEXT_FIELDS = ("texts", "text_embeds")


class ForeignMeshAutoencoderTask(ForeignTask):
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
        super().__init__(checked)
        self.updates = (
            Update(
                name="model",
                trains=self.model,
                loss=self.reconstruction_loss,
                optimizer=optimizer,
                find_unused=True,
            ),
        )

    def reconstruction_loss(self, batch: Batch, step: int) -> Loss:
        seed_model(batch, MODEL)
        return self.call(batch).to_loss()

    def call(self, batch: Batch) -> ForeignLoss:
        total, (recon, commit) = self.model(**batch.examples.data, return_loss_breakdown=True)
        return ForeignLoss(total, {"recon_loss": recon, "commit_loss": commit.sum()})

    def eval_loss(self, batch: Batch) -> dict[str, Tensor]:
        loss = self.call(batch)
        return {"loss": loss.total, **loss.breakdown}


class ForeignMeshTransformerTask(ForeignTask):
    optimizer_keys = {"model": "optimizer"}

    def __init__(self, model: object, optimizer: OptimizerConfig):
        checked = check_contract(
            model,
            trainer="MeshTransformerTrainer",
            ours="a model of MeshTransformerConfig(...).build(...)",
            parameters=("vertices", "faces"),
            attributes=("pad_id",),
        )
        super().__init__(checked)
        self.updates = (
            Update(
                name="model",
                trains=self.model,
                loss=self.token_loss,
                optimizer=optimizer,
                find_unused=True,
            ),
        )

    def token_loss(self, batch: Batch, step: int) -> Loss:
        seed_model(batch, MODEL)
        return ForeignLoss(self.model(**batch.examples.data)).to_loss()

    def eval_loss(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.model(**batch.examples.data)}


def build_meshes(
    dataset: object, data_kwargs: Sequence[str], pad_id: int, *, texts: bool
) -> DatasetSource:
    """Return meshes as dictionaries or tuples; without `texts` their texts are left out."""
    names = getattr(dataset, "data_kwargs", None) or data_kwargs
    return DatasetSource(dataset, MeshCollate(tuple(names), pad_id, texts))


@dataclass(frozen=True)
class MeshCollate:
    names: tuple[str, ...]
    pad_id: int
    texts: bool

    def __call__(self, items: Sequence[object]) -> dict[str, Any]:
        rows = [name_fields(item, self.names) for item in items]
        data: dict[str, Any] = {}
        for name in rows[0]:
            if name in TEXT_FIELDS and not self.texts:
                continue
            if any(name not in row for row in rows):
                raise UnreadableFile(f"some items have {name!r} and others have not")
            values = [row[name] for row in rows]
            is_tensor = isinstance(values[0], Tensor)
            data[name] = pad_rows(values, self.pad_id) if is_tensor else as_list(values)
        return data


def as_list(values: list[Any]) -> Any:
    """Return arrays as one tensor and strings as a list."""
    return values if isinstance(values[0], str) else torch.as_tensor(values)
