"""Tokens of a network: what is known about them, and their embeddings.

B batch, N positions, S tokens per position, M rows, W model dimension, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.nn.token_layout import Layout
from tessera.nn.transformer import linear


@dataclass(frozen=True)
class TokenSpec:
    """The tokens of a network: vocabulary, layout, and what is known about them."""

    vocab_size: int
    layout: Layout
    features: Tensor | None = None
    """(V, F): features of each token, see `nn/quantize/features.py`."""
    seconds: float | None = None
    """Duration of one cell of the grid, if known. Two streams are aligned by their durations."""


class TokenEmbedding(nn.Module):
    """The sum of the embeddings of a position's tokens; each of its S slots has its own tables.

    A token's embedding is a learned row plus a projection of its features, if there are any.
    """

    def __init__(self, rows: int, slots: int, dim: int, features_VF: Tensor | None):
        super().__init__()
        self.table = nn.Embedding(rows * slots, dim)
        nn.init.normal_(self.table.weight, std=slots**-0.5 if features_VF is None else 0.02)
        self.register_buffer("offsets", torch.arange(slots) * rows, persistent=False)
        self.offsets: Tensor
        self.from_features = (
            linear(slots * features_VF.shape[1], dim) if features_VF is not None else None
        )
        if features_VF is not None:  # ids beyond the vocabulary, the mask token's, have zeros
            padded = torch.cat(
                [features_VF, features_VF.new_zeros(rows - len(features_VF), features_VF.shape[1])]
            )
            self.register_buffer("features", padded, persistent=False)
            self.features: Tensor

    def forward(self, tokens_BNS: Tensor) -> Tensor:
        rows = self.table(tokens_BNS + self.offsets)
        learned = rows.sum(2) if rows.shape[2] > 1 else rows.squeeze(2)
        return (
            learned
            if self.from_features is None
            else learned + self.from_features(self.features[tokens_BNS].flatten(2))
        )


MIN_ROWS = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 4
"""Some CPUs round matrix products of fewer rows differently: of fewer than 4 with AVX2, of up to 8
with AVX-512."""


def pad_for_batch_invariance(rows_MW: Tensor) -> Tensor:
    """Pad to at least `MIN_ROWS` rows; otherwise the sample of a seed would depend on the batch."""
    missing = MIN_ROWS - len(rows_MW)
    return rows_MW if missing <= 0 else nn.functional.pad(rows_MW, (0, 0, 0, missing))
