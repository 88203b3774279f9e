"""What the autoregressive transformers of meshes have in common: text prompts, predictions of the
next token, and batches of at least MIN_ROWS rows in decoding.

B meshes, M predicted tokens, V vocabulary; token id V is the end of a mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.causal_transformer import CausalTransformer
from tessera.nn.precision import to_fp32
from tessera.nn.token_embedding import MIN_ROWS
from tessera.nn.transformer import ContextKV, States
from tessera.text.encoder import TextEncoder, TextInputs


@dataclass
class NextTokenPredictions:
    """The logits and targets of all M tokens of a batch, ends included and padding excluded."""

    logits_MV: Tensor
    """(M, V + 1); tokens that are impossible have logit -inf."""
    targets_M: Tensor
    """The true token ids."""
    example_M: Tensor
    """The row of the batch that each token belongs to."""
    count_B: Tensor
    """The number of tokens of each mesh."""

    def cross_entropy_B(self) -> Tensor:
        """Return the mean cross-entropy over the tokens of each mesh."""
        loss_M = F.cross_entropy(to_fp32(self.logits_MV), self.targets_M, reduction="none")
        total_B = loss_M.new_zeros(len(self.count_B)).index_add(0, self.example_M, loss_M)
        return total_B / self.count_B


class TextConfig(Protocol):
    def build(self) -> TextEncoder: ...


class TextConditionedTransformer(nn.Module):
    """Base class of transformers over meshes whose prompts are texts.

    A text is cross-attended to by all blocks of one causal transformer; without a text encoder
    there are no prompts.
    """

    text: TextEncoder | None

    def __init__(
        self,
        text: TextConfig | None,
        *,
        vocab_size: int,
        max_len: int,
        dim: int,
        depth: int,
        heads: int,
    ):
        super().__init__()
        self.vocab_size, self.max_len = vocab_size, max_len
        self.text = text.build() if text is not None else None
        context = self.text.dim if self.text is not None else None
        self.transformer = CausalTransformer(dim, depth, heads, max_len + 1, context_dim=context)

    @property
    def eos_token_id(self) -> int:
        """The token id of the end of a mesh."""
        return self.vocab_size

    def condition(
        self, texts: Sequence[str] | TextInputs, dropped: Sequence[bool] = ()
    ) -> States | None:
        """Encode the texts; dropped and empty ones are masked."""
        if self.text is None:
            return None
        states = self.text.encode(texts, dropped)
        return States(states.values, states.mask)

    def project_condition(
        self, condition: States | None, padding: RowPadding
    ) -> list[ContextKV] | None:
        """Compute the keys and values of each block, for decoding."""
        if condition is None:
            return None
        return self.transformer.project_context(padding.pad_context(condition))


class RowPadding:
    """Repeats rows of a small batch until there are MIN_ROWS."""

    def __init__(self, count: int, device: torch.device):
        self.count = count
        self.index = torch.arange(MIN_ROWS, device=device).clamp_max(count - 1)

    def pad(self, rows: Tensor) -> Tensor:
        return rows if self.count >= MIN_ROWS else rows[self.index]

    def pad_context(self, condition: States) -> States:
        return condition if self.count >= MIN_ROWS else condition.select(self.index)
