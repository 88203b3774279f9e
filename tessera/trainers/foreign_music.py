"""The contract of musiclm-pytorch's MuLaN: `model(wavs=..., texts=... or raw_texts=...)`.

The model returns the contrastive loss of the pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.data.errors import UnreadableFile
from tessera.data.source import Items
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


@dataclass(frozen=True)
class MusicPair:
    waveform: Tensor
    token_ids: Tensor | None
    text: str
    """The text, if it is not given as token ids."""


def build_pairs(dataset: Items, max_length: int | None) -> ForeignDataset:
    """Return waveforms with a text or token ids, by name or by type and in any order."""
    return ForeignDataset(dataset, MusicCollate(max_length), parse=parse_pair)


def parse_pair(item: object) -> MusicPair:
    fields = parse_item(item)
    waveform = to_tensor("its waveform", fields["waveform"]).float()
    if "token ids" in fields:
        return MusicPair(waveform, to_tensor("its list of token ids", fields["token ids"]), "")
    text = fields["text"]
    if not isinstance(text, str):
        raise UnreadableFile(f"its text is a {type(text).__name__}, but must be one string")
    return MusicPair(waveform, None, text)


@dataclass(frozen=True)
class MusicCollate:
    """Cut waveforms to the shortest one, as the research package does, and pad token ids with 0."""

    max_length: int | None

    def __call__(self, pairs: Sequence[MusicPair]) -> dict[str, object]:
        length = min(pair.waveform.shape[-1] for pair in pairs)
        if self.max_length is not None:
            length = min(length, self.max_length)
        wavs = torch.stack([pair.waveform[..., :length] for pair in pairs])
        token_ids = [pair.token_ids for pair in pairs if pair.token_ids is not None]
        if not token_ids:
            return {"wavs": wavs, "raw_texts": [pair.text for pair in pairs]}
        if len(token_ids) < len(pairs):
            raise UserError(
                "Some items of the dataset have a text and others token ids: give one of them."
            )
        return {"wavs": wavs, "texts": pad_rows(token_ids, 0)}
