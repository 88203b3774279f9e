"""Tokens of a network: what is known about them, and their embeddings.

B batch, N positions, S tokens per position, M rows, W model dimension, V vocabulary size, L
quantizers, F features of a token.
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
    """(L, V, F): features of each token, see `nn/quantize/features.py`."""
    seconds: float | None = None
    """Duration of one cell of the grid, if known. Two streams are aligned by their durations."""

    def quantizer_features(self, quantizer: int) -> Tensor | None:
        """Return the features of the tokens of one quantizer, (V, F), if there are any."""
        return None if self.features is None else self.features[quantizer]


class TokenEmbedding(nn.Module):
    """The sum of the embeddings of a position's tokens; each of its S slots has its own tables.

    A token's embedding is a learned row plus a projection of its features, if there are any.
    """

    features: Tensor
    feature_offsets: Tensor
    offsets: Tensor

    def __init__(self, rows: int, slots: int, dim: int, features_LVF: Tensor | None):
        super().__init__()
        self.table = nn.Embedding(rows * slots, dim)
        nn.init.normal_(self.table.weight, std=slots**-0.5 if features_LVF is None else 0.02)
        self.register_buffer("offsets", torch.arange(slots) * rows, persistent=False)
        self.from_features = None
        if features_LVF is not None:
            num_quantizers, vocab_size, num_features = features_LVF.shape
            self.from_features = linear(slots * num_features, dim)
            # Ids beyond the vocabulary, the mask token's, have zeros.
            padded_LRF = nn.functional.pad(features_LVF, (0, 0, 0, rows - vocab_size))
            self.register_buffer("features", padded_LRF.flatten(0, 1), persistent=False)
            quantizer_S = torch.arange(slots) % num_quantizers
            self.register_buffer("feature_offsets", quantizer_S * rows, persistent=False)

    def forward(self, tokens_BNS: Tensor) -> Tensor:
        rows = self.table(tokens_BNS + self.offsets)
        learned = rows.sum(2) if rows.shape[2] > 1 else rows.squeeze(2)
        if self.from_features is None:
            return learned
        features_BNSF = self.features[tokens_BNS + self.feature_offsets]
        return learned + self.from_features(features_BNSF.flatten(2))


MIN_ROWS = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 4
"""Some CPUs round matrix products of fewer rows differently: of fewer than 4 with AVX2, of up to 8
with AVX-512."""


def pad_for_batch_invariance(rows_MW: Tensor) -> Tensor:
    """Pad to at least `MIN_ROWS` rows; otherwise the sample of a seed would depend on the batch.

    In training nothing is padded: a compiled network would be compiled again for few rows.
    """
    if torch.is_grad_enabled():
        return rows_MW
    missing = MIN_ROWS - len(rows_MW)
    return rows_MW if missing <= 0 else nn.functional.pad(rows_MW, (0, 0, 0, missing))
