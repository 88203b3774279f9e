"""Masking of one example, as the masked objective masks those of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.objectives.masking import LevelMaskingConfig, MaskedTokens, MaskingConfig


def mask_example(
    masking: MaskingConfig | LevelMaskingConfig,
    tokens_NS: Tensor,
    mask_token_id: int,
    generator: torch.Generator,
    region_NS: Tensor | None = None,
) -> MaskedTokens:
    shape = (tokens_NS.shape[0], tokens_NS.shape[1])
    drawn = masking.draw(shape, mask_token_id, generator, region_NS)
    return drawn.apply(tokens_NS, mask_token_id)
