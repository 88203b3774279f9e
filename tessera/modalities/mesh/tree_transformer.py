"""A causal transformer over the tokens of `modalities/mesh/tree.py`.

The tokens so far determine which edge is continued next, and the model receives that edge and its
surroundings as an input of every position, as in TreeMeshGPT (Lionar 2025, arXiv 2503.11629,
section 3.2): the coordinates of NUM_ROLES points. Most coordinates of furniture repeat one of these
points, so that the logit of a coordinate is raised by a predicted amount if one of the points has
it (a pointer, as in Merity 2016, arXiv 1609.07843, with logits instead of a mixture).

B meshes, N tokens, W `dim`, E embedding of a coordinate, R roles, V vocabulary; token id V is the
end of the sequence. Tokens are (B, N, 1), with -1 after the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.modalities.mesh import tree
from tessera.modalities.mesh.transformer import (
    NextTokenPredictions,
    RowPadding,
    encode_texts,
)
from tessera.nn.causal_transformer import CausalTransformer, KVCache
from tessera.nn.precision import to_fp32
from tessera.nn.transformer import ContextKV, linear
from tessera.text.learned import LearnedTextConfig
from tessera.text.pretrained import PretrainedTextConfig

COORDINATE_DIM = 24
"""The embedding dimension of a coordinate: sines and cosines of 12 frequencies at first."""
GROUP_SIZE = 4
"""The number of examples that the transformer processes together in training."""
NUM_POINTERS = tree.NUM_ROLES - 1
"""The points whose coordinates are likely: all but the vertex that is being named."""


@dataclass(frozen=True, kw_only=True)
class TreeTransformerConfig:
    bins: int = 128
    """The number of bins along each axis, equal to that of the data."""
    dim: int = 256
    """The embedding dimension."""
    depth: int = 6
    """The number of blocks."""
    heads: int = 8
    """The number of attention heads."""
    max_len: int = 2048
    """The maximum number of tokens of a mesh, about 2.6 for each triangle; longer meshes are cut
    off in training."""
    dropout: float = 0.1
    """The fraction of channels that are dropped in training."""
    text: LearnedTextConfig | PretrainedTextConfig | None = field(default_factory=LearnedTextConfig)
    """The text encoder for captions; none trains a model without prompts."""

    def __post_init__(self) -> None:
        for name in ("dim", "depth", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} of a mesh transformer must be at least 1, got {getattr(self, name)}."
                )
        if self.bins < 2:
            raise ValueError(f"bins must be at least 2, got {self.bins}.")
        if self.max_len < tree.EDGE:
            raise ValueError(
                f"max_len must be at least {tree.EDGE}, the tokens of one triangle, got "
                f"{self.max_len}."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}.")

    def build(self) -> TreeTransformer:
        return TreeTransformer(self)


class TreeTransformer(nn.Module):
    tokens_per_position = 1

    def __init__(self, config: TreeTransformerConfig):
        super().__init__()
        self.config = config
        self.vocab_size = tree.vocab_size(config.bins)
        self.text = config.text.build() if config.text is not None else None
        context = self.text.dim if self.text is not None else None
        dim, bins = config.dim, config.bins
        self.transformer = CausalTransformer(
            dim, config.depth, config.heads, config.max_len + 1, context_dim=context
        )
        self.token_embedding = nn.Embedding(self.vocab_size + 1, dim)
        self.slot_embedding = nn.Embedding(tree.NUM_SLOTS, dim)
        # One row more for a point that is absent.
        self.coordinate_embedding = nn.Embedding(3 * (bins + 1), COORDINATE_DIM)
        self.to_input = linear(3 * tree.NUM_ROLES * COORDINATE_DIM, dim)
        self.head = linear(dim, self.vocab_size + 1)
        self.pointer = nn.Linear(dim, NUM_POINTERS)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.pointer.weight)
        nn.init.zeros_(self.pointer.bias)
        with torch.no_grad():
            self.coordinate_embedding.weight.copy_(initial_coordinates(bins).repeat(3, 1))
        masks = torch.as_tensor(tree.slot_masks(bins))
        axes = torch.arange(3).repeat(tree.NUM_ROLES)
        self.register_buffer("masks", masks, persistent=False)
        self.register_buffer("axes", axes, persistent=False)
        self.register_buffer("slot_axes", torch.tensor(tree.AXIS), persistent=False)
        self.masks: Tensor
        self.axes: Tensor
        self.slot_axes: Tensor

    @property
    def eos_token_id(self) -> int:
        """The token id of the end of a mesh."""
        return self.vocab_size

    @property
    def max_len(self) -> int:
        """The maximum number of tokens of a mesh."""
        return self.config.max_len

    def condition(self, texts: Sequence[str], dropped: Sequence[bool]) -> list[ContextKV] | None:
        """Encode the texts as keys and values of each block; mask dropped and empty texts."""
        return encode_texts(self.text, self.transformer, texts, dropped)

    # ---- teacher forcing

    def predict(
        self,
        tokens_BNS: Tensor,
        condition: list[ContextKV] | None,
        generators: Sequence[torch.Generator] | None = None,
    ) -> NextTokenPredictions:
        """Predict each token from all earlier ones, with dropout if `generators` are given.

        The end is predicted too, except for a mesh of `max_len` tokens, which was cut off.
        """
        tokens_BN = tokens_BNS[..., 0]
        lengths_B = (tokens_BN >= 0).sum(1)
        contexts = self.read_contexts(tokens_BN.cpu().numpy(), lengths_B.tolist())
        context_BNC = torch.from_numpy(contexts).to(tokens_BN.device)
        inputs_BN = F.pad(tokens_BN, (1, 0), value=self.eos_token_id)
        x_BNW = self.embed(inputs_BN.where(inputs_BN >= 0, 0), context_BNC)
        dropout_LBW = self.transformer.sample_dropout(generators, self.config.dropout)
        targets_BN = F.pad(tokens_BN, (0, 1), value=-1)
        ended_E = (lengths_B < self.max_len).nonzero()[:, 0]
        targets_BN[ended_E, lengths_B[ended_E]] = self.eos_token_id
        example_M, position_M = (targets_BN >= 0).nonzero(as_tuple=True)
        states_BNW = self.states(x_BNW, lengths_B, condition, dropout_LBW)
        logits_MV = self.logits(
            states_BNW[example_M, position_M], context_BNC[example_M, position_M]
        )
        targets_M = targets_BN[example_M, position_M]
        return NextTokenPredictions(logits_MV, targets_M, example_M, len(tokens_BN))

    def states(
        self,
        x_BNW: Tensor,
        lengths_B: Tensor,
        condition: list[ContextKV] | None,
        dropout_LBW: Tensor | None,
    ) -> Tensor:
        """Run the transformer on groups of examples of similar length, with less padding.

        Half of all positions of a batch of 8 synthetic meshes are padding, and a quarter with
        groups of 4.
        """
        states_BNW = torch.zeros_like(x_BNW)
        for rows in lengths_B.argsort(stable=True).split(GROUP_SIZE):
            count = int(lengths_B[rows[-1]]) + 1
            context = None if condition is None else [one.select(rows) for one in condition]
            dropout = None if dropout_LBW is None else dropout_LBW[:, rows]
            states = self.transformer(x_BNW[rows, :count], context, dropout_LBW=dropout)
            padded = F.pad(states, (0, 0, 0, x_BNW.shape[1] - count))
            states_BNW = states_BNW.index_copy(0, rows, padded)
        return states_BNW

    def read_contexts(self, tokens_BN: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """Return (B, N + 1, 1 + 3 R) int64: the context of each token and of the end."""
        batch, count = tokens_BN.shape
        if count > self.max_len:
            raise ValueError(
                f"Got a mesh of {count} tokens, but the maximum of this transformer is "
                f"{self.max_len}: leave out or simplify larger meshes, or build it with a larger "
                "`max_len`."
            )
        contexts = np.full((batch, count + 1, 1 + 3 * tree.NUM_ROLES), -1, dtype=np.int64)
        contexts[..., 0] = 0
        for row, length in enumerate(lengths):
            traversal = tree.Traversal(self.config.bins)
            rows = [traversal.context()]
            for token in tokens_BN[row, :length].tolist():
                traversal.append(token)
                rows.append(traversal.context())
            contexts[row, : length + 1] = rows
        return contexts

    def embed(self, tokens_BN: Tensor, context_BNC: Tensor) -> Tensor:
        """Return the input states: the last token, the slot and the points, (B, N, W)."""
        bins = self.config.bins
        points_BNP = context_BNC[..., 1:]
        rows_BNP = points_BNP.where(points_BNP >= 0, bins) + self.axes * (bins + 1)
        points_BNW = self.to_input(self.coordinate_embedding(rows_BNP).flatten(2))
        slots_BNW = self.slot_embedding(context_BNC[..., 0])
        return self.token_embedding(tokens_BN) + slots_BNW + points_BNW

    def logits(self, states_MW: Tensor, context_MC: Tensor) -> Tensor:
        """Return (M, V + 1) logits, -inf for tokens that a slot cannot have."""
        slots_M = context_MC[:, 0]
        logits_MV = self.head(states_MW)
        bonus_MR = self.pointer(states_MW)
        axis_M = self.slot_axes[slots_M]
        points_MR3 = context_MC[:, 1:].unflatten(1, (tree.NUM_ROLES, 3))[:, :NUM_POINTERS]
        value_MR = points_MR3.gather(2, axis_M[:, None, None].expand(-1, NUM_POINTERS, 1))[..., 0]
        present_MR = value_MR >= 0
        first_M1 = tree.FIRST_COORDINATE + axis_M[:, None] * self.config.bins
        token_MR = first_M1 + value_MR.where(present_MR, 0)
        bonus_MR = bonus_MR.where(present_MR, 0.0).to(logits_MV.dtype)
        logits_MV = logits_MV.scatter_add(1, token_MR, bonus_MR)
        return logits_MV.masked_fill(~self.masks[slots_M], -math.inf)

    # ---- token by token

    @torch.no_grad()
    def start_decoding(
        self, condition: list[ContextKV] | None, prefix_BNS: Tensor
    ) -> TreeDecodingState:
        """Start decoding after these tokens, the same number for each mesh and possibly none."""
        return TreeDecodingState(self, condition, prefix_BNS[..., 0])

    @cached_property
    def numpy_masks(self) -> np.ndarray:
        return self.masks.cpu().numpy()


class TreeDecodingState:
    """Decodes a batch of meshes: called with the tokens just chosen, it returns the next logits.

    Tokens that no well-formed mesh continues with have logit -inf. A row whose token is one of
    these has ended, and its further logits have no meaning.
    """

    def __init__(
        self, model: TreeTransformer, condition: list[ContextKV] | None, prefix_BN: Tensor
    ):
        self.model, self.device = model, prefix_BN.device
        self.padding = RowPadding(len(prefix_BN), prefix_BN.device)
        self.condition = self.padding.pad_context(condition)
        self.cache = KVCache()
        self.traversals = [tree.Traversal(model.config.bins) for _ in range(len(prefix_BN))]
        self.tokens_B = prefix_BN.new_full((len(prefix_BN),), model.eos_token_id)
        self.table = self.fused_table()
        for token_B in prefix_BN.unbind(1):
            self.decode(self.read_contexts())
            self.append(token_B, is_prefix=True)

    @torch.no_grad()
    def __call__(self, tokens_B: Tensor | None) -> Tensor:
        """Return logits (B, V + 1) for the token after `tokens_B`, which is None at first."""
        if tokens_B is not None:
            self.append(tokens_B)
        contexts_BC = self.read_contexts()
        states_BW = self.decode(contexts_BC)
        masks = self.model.numpy_masks
        allowed_BV = np.stack([traversal.allowed(masks) for traversal in self.traversals])
        logits_BV = self.model.logits(states_BW, contexts_BC)
        allowed = torch.from_numpy(allowed_BV).to(self.device)
        return to_fp32(logits_BV).masked_fill(~allowed, -math.inf)

    def append(self, tokens_B: Tensor, is_prefix: bool = False) -> None:
        self.tokens_B = tokens_B
        for traversal, token in zip(self.traversals, tokens_B.tolist(), strict=True):
            try:
                traversal.append(token)
            except tree.InvalidToken as error:
                if is_prefix:
                    raise ValueError(f"The prefix is not a valid mesh. {error}") from None

    def read_contexts(self) -> Tensor:
        contexts = [traversal.context() for traversal in self.traversals]
        return torch.tensor(contexts, device=self.device)

    def decode(self, contexts_BC: Tensor) -> Tensor:
        """Run the transformer on the next position, (B, W)."""
        model = self.model
        points_BP = contexts_BC[:, 1:]
        rows_BP = points_BP.where(points_BP >= 0, model.config.bins) + self.offsets
        x_BW = F.embedding_bag(rows_BP, self.table, mode="sum")
        x_BW = x_BW + model.slot_embedding(contexts_BC[:, 0]) + model.token_embedding(self.tokens_B)
        states_BW = model.transformer.decode_step(
            self.padding.pad(x_BW), self.condition, self.cache
        )
        return states_BW[: len(self.traversals)]

    def fused_table(self) -> Tensor:
        """Return one row of inputs for each coordinate of each point, (3 R (bins + 1), W)."""
        model, rows = self.model, self.model.config.bins + 1
        self.offsets = torch.arange(3 * tree.NUM_ROLES, device=self.device) * rows
        by_axis = model.coordinate_embedding.weight.unflatten(0, (3, rows))
        weights = model.to_input.weight.unflatten(1, (3 * tree.NUM_ROLES, COORDINATE_DIM))
        tables = [by_axis[p % 3] @ weights[:, p].T for p in range(3 * tree.NUM_ROLES)]
        return torch.cat(tables)


def initial_coordinates(bins: int) -> Tensor:
    """Return (bins + 1, E): sines and cosines of the coordinates, so that near ones are similar;
    the last row is 0."""
    # With numpy: torch.linspace ignores the device of a context once torch.compile was imported.
    frequencies = np.pi * np.logspace(0, np.log10(bins / 4), COORDINATE_DIM // 2)
    angles = np.linspace(-1, 1, bins)[:, None] * frequencies
    values = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return torch.as_tensor(np.pad(values, ((0, 1), (0, 0))), dtype=torch.float32)
