"""The contract of musiclm-pytorch's MuLaN: `model(wavs=..., texts=... or raw_texts=...)`.

The model returns the contrastive loss of the pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.data.errors import UnreadableFile
from tessera.data.source import DatasetSource
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, Loss, Update
from tessera.trainers.foreign import (
    MODEL,
    ForeignLoss,
    ForeignTask,
    check_contract,
    pad_rows,
    seed_model,
)

FIELDS = ("wavs", "texts", "raw_texts")


class ForeignMuLaNTask(ForeignTask):
    def __init__(self, model: object, optimizer: OptimizerConfig):
        checked = check_contract(
            model, trainer="MuLaNTrainer", ours="a MuLaN of MuLaNConfig", parameters=FIELDS
        )
        super().__init__(checked)
        self.updates = (
            Update(
                name="model",
                trains=self.model,
                loss=self.contrastive_loss,
                optimizer=optimizer,
                find_unused=True,
            ),
        )

    def contrastive_loss(self, batch: Batch, step: int) -> Loss:
        seed_model(batch, MODEL)
        return ForeignLoss(self.model(**batch.examples.data)).to_loss()

    def eval_loss(self, batch: Batch) -> dict[str, Tensor] | None:
        if len(batch) < 2:  # nothing to compare with
            return None
        return {"loss": self.model(**batch.examples.data)}


def build_pairs(dataset: object, max_length: int | None) -> DatasetSource:
    return DatasetSource(dataset, MusicCollate(max_length))


@dataclass(frozen=True)
class MusicCollate:
    """Cut waveforms to the shortest one, as the research package does, and pad token ids with 0."""

    max_length: int | None

    def __call__(self, items: Sequence[object]) -> dict[str, Any]:
        rows = [parse_pair(item) for item in items]
        names = list(rows[0])
        if any(list(row) != names for row in rows):
            raise UnreadableFile("some items have a text and others token ids: give one of them")
        wavs = [torch.as_tensor(row["wavs"]).float() for row in rows]
        length = min(wave.shape[-1] for wave in wavs)
        if self.max_length is not None:
            length = min(length, self.max_length)
        data: dict[str, Any] = {"wavs": torch.stack([wave[..., :length] for wave in wavs])}
        if "texts" in rows[0]:
            data["texts"] = pad_rows([row["texts"] for row in rows], 0)
        else:
            data["raw_texts"] = [row["raw_texts"] for row in rows]
        return data


def parse_pair(item: object) -> dict[str, Any]:
    """Return `wavs` and either `texts` or `raw_texts`, by name or by type and in any order."""
    values: dict[str, Any] = {}
    if isinstance(item, Mapping):
        values = {name: item[name] for name in FIELDS if name in item}
    elif isinstance(item, (tuple, list)):
        named = {detect_field(value): value for value in item}
        values = {name: named[name] for name in FIELDS if name in named}
    if len(values) != 2 or "wavs" not in values:
        raise UnreadableFile(
            f"an item is a {type(item).__name__} with {', '.join(values) or 'nothing usable'}, but "
            "must have a waveform (floats) and a text (a string, or token ids as integers)"
        )
    return values


def detect_field(value: object) -> str:
    if isinstance(value, str):
        return "raw_texts"
    return "wavs" if torch.as_tensor(value).is_floating_point() else "texts"
