"""The contract of soundstorm-pytorch: `model(acoustic, cond_semantic_token_ids=...)`.

The model returns a loss and a pair of the generator's and the critic's loss, of which either may be
None. Acoustic tokens are (B, T, L), semantic tokens (B, t).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tessera.data.errors import UnreadableFile
from tessera.data.source import Items
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch
from tessera.trainers.foreign import (
    ForeignDataset,
    ForeignLoss,
    SingleLossTask,
    check_contract,
    pad_rows,
    to_tensor,
)
from tessera.trainers.in_memory_audio import parse_pair

PARAMETERS = ("cond_semantic_token_ids", "only_train_generator", "only_train_critic")


class ForeignSoundStormTask(SingleLossTask):
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
        super().__init__(checked, optimizer)
        self.kwargs = {
            "only_train_generator": only_train_generator,
            "only_train_critic": only_train_critic,
        }

    def call(self, batch: Batch) -> ForeignLoss:
        data = dict(batch.examples.data)
        acoustic = data.pop("acoustic").clone()  # the published model writes masks into its input
        total, parts = self.model(acoustic, **data, **self.kwargs)
        names = ("generator_loss", "critic_loss")
        breakdown = {name: part for name, part in zip(names, parts) if isinstance(part, Tensor)}
        return ForeignLoss(total, breakdown)


def build_pairs(dataset: Items, model: nn.Module) -> ForeignDataset:
    """Return pairs of semantic and acoustic tokens, padded as the model expects."""
    return ForeignDataset(dataset, TokenPairCollate(model), parse=parse_token_pair)


def parse_token_pair(item: object) -> dict[str, Tensor]:
    """Return semantic tokens (t,) and acoustic tokens (T, L)."""
    pair: dict[str, Tensor] = {}
    for (name, value), ndim in zip(sorted(parse_pair(item).items()), (2, 1), strict=True):
        tokens = to_tensor(f"the value of its {name} tokens", value)
        if tokens.ndim != ndim or tokens.is_floating_point():
            raise UnreadableFile(
                f"its {name} tokens are {tokens.dtype} of shape {tuple(tokens.shape)}, but must be "
                f"integers of shape {'(frames, quantizers)' if ndim == 2 else '(frames,)'}"
            )
        pair[name] = tokens
    return pair


class TokenPairCollate:
    """Pad pairs of tokens; frames after the end of an example are masked where some are shorter."""

    def __init__(self, model: nn.Module):
        self.semantic_pad = getattr(model, "semantic_pad_id", -1)
        pad_id = getattr(model, "pad_id", None)
        self.acoustic_pad = 0 if pad_id is None else pad_id

    def __call__(self, pairs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
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
