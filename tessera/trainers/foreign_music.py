"""The contract of musiclm-pytorch's MuLaN: `model(wavs=..., texts=... or raw_texts=...)`.

The model returns the contrastive loss of the pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.data.errors import UnreadableFile
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch
from tessera.run.errors import UserError
from tessera.trainers.foreign import (
    ForeignDataset,
    ForeignLoss,
    SingleLossTask,
    check_contract,
    pad_rows,
    to_tensor,
)
from tessera.trainers.in_memory_music import parse_item

PARAMETERS = ("wavs", "texts", "raw_texts")


class ForeignMuLaNTask(SingleLossTask):
    def __init__(self, model: object, optimizer: OptimizerConfig):
        checked = check_contract(
            model, trainer="MuLaNTrainer", ours="a MuLaN of MuLaNConfig", parameters=PARAMETERS
        )
        super().__init__(checked, optimizer)

    def call(self, batch: Batch) -> ForeignLoss:
        return ForeignLoss(self.model(**batch.examples.data))

    def eval_loss(self, batch: Batch) -> dict[str, Tensor] | None:
        return super().eval_loss(batch) if len(batch) > 1 else None  # nothing to compare with


def build_pairs(dataset: object, max_length: int | None) -> ForeignDataset:
    """Return waveforms with a text or token ids, by name or by type and in any order."""
    return ForeignDataset(dataset, MusicCollate(max_length), parse=parse_pair)


def parse_pair(item: object) -> dict[str, Any]:
    """Return `wavs` and either `texts` or `raw_texts`."""
    fields = parse_item(item)
    pair: dict[str, Any] = {"wavs": to_tensor("its waveform", fields["waveform"]).float()}
    if "token ids" in fields:
        return pair | {"texts": to_tensor("the value of its token ids", fields["token ids"])}
    text = fields["text"]
    if not isinstance(text, str):
        raise UnreadableFile(f"its text is a {type(text).__name__}, but must be one string")
    return pair | {"raw_texts": text}


@dataclass(frozen=True)
class MusicCollate:
    """Cut waveforms to the shortest one, as the research package does, and pad token ids with 0."""

    max_length: int | None

    def __call__(self, pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if any(pair.keys() != pairs[0].keys() for pair in pairs):
            raise UserError(
                "Some items of the dataset have a text and others token ids: give one of them."
            )
        length = min(pair["wavs"].shape[-1] for pair in pairs)
        if self.max_length is not None:
            length = min(length, self.max_length)
        wavs = torch.stack([pair["wavs"][..., :length] for pair in pairs])
        if "texts" in pairs[0]:
            return {"wavs": wavs, "texts": pad_rows([pair["texts"] for pair in pairs], 0)}
        return {"wavs": wavs, "raw_texts": [pair["raw_texts"] for pair in pairs]}
