"""The contract of soundstorm-pytorch: `model(acoustic, cond_semantic_token_ids=...)`.

The model returns a loss and a pair of the generator's and the critic's loss, of which either may be
None. Acoustic tokens are (B, T, L), semantic tokens (B, t).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
from tessera.trainers.in_memory_audio import FIELDS

PARAMETERS = ("cond_semantic_token_ids", "only_train_generator", "only_train_critic")


class ForeignSoundStormTask(ForeignTask):
    def __init__(
        self,
        model: object,
        optimizer: OptimizerConfig,
        *,
        only_train_generator: bool,
        only_train_critic: bool,
    ):
        ours = "a model of SoundStormConfig(...).build(...)"
        checked = check_contract(
            model, trainer="SoundStormTrainer", ours=ours, parameters=PARAMETERS
        )
        super().__init__(checked)
        self.kwargs = {
            "only_train_generator": only_train_generator,
            "only_train_critic": only_train_critic,
        }
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
        return self.call(batch).to_loss()

    def call(self, batch: Batch) -> ForeignLoss:
        data = dict(batch.examples.data)
        acoustic = data.pop("acoustic").clone()  # the published model writes masks into its input
        total, parts = self.model(acoustic, **data, **self.kwargs)
        names = ("generator_loss", "critic_loss")
        breakdown = {name: part for name, part in zip(names, parts) if isinstance(part, Tensor)}
        return ForeignLoss(total, breakdown)

    def eval_loss(self, batch: Batch) -> dict[str, Tensor]:
        loss = self.call(batch)
        return {"loss": loss.total, **loss.breakdown}


def build_pairs(dataset: object, model: nn.Module) -> DatasetSource:
    """Return pairs of semantic and acoustic tokens, padded as the model expects."""
    return DatasetSource(dataset, TokenPairCollate(model))


class TokenPairCollate:
    """Pad pairs of tokens; frames after the end of an example are masked where some are shorter."""

    def __init__(self, model: nn.Module):
        self.semantic_pad = getattr(model, "semantic_pad_id", -1)
        pad_id = getattr(model, "pad_id", None)
        self.acoustic_pad = 0 if pad_id is None else pad_id

    def __call__(self, items: Sequence[object]) -> dict[str, Tensor]:
        pairs = [parse_pair(item) for item in items]
        lengths = torch.tensor([len(pair["acoustic"]) for pair in pairs])
        data = {
            "acoustic": pad_rows([pair["acoustic"] for pair in pairs], self.acoustic_pad),
            "cond_semantic_token_ids": pad_rows(
                [pair["semantic"] for pair in pairs], self.semantic_pad
            ),
        }
        if len(lengths.unique()) > 1:
            data["mask"] = torch.arange(int(lengths.max())) < lengths[:, None]
        return data


def parse_pair(item: object) -> dict[str, Any]:
    """Return semantic tokens (t,) and acoustic tokens (T, L), in any order or by name."""
    values: dict[str, Any] = {}
    if isinstance(item, Mapping):
        values = {FIELDS[key]: value for key, value in item.items() if key in FIELDS}
    elif isinstance(item, (tuple, list)) and len(item) == 2:
        for value in item:
            values["semantic" if torch.as_tensor(value).ndim == 1 else "acoustic"] = value
    if len(values) != 2:
        raise UnreadableFile(
            f"an item is a {type(item).__name__}, but must be a pair of semantic tokens (frames,) "
            f"and acoustic tokens (frames, quantizers), or a dictionary with {', '.join(FIELDS)}"
        )
    return values
