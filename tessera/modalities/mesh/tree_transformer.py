"""A causal transformer over the positions of `modalities/mesh/tree.py`.

The tokens so far determine which edge is continued next, and the model receives that edge and its
surroundings as an input of every position, as in TreeMeshGPT (Lionar 2025, arXiv 2503.11629,
section 3.2): the coordinates of NUM_ROLES points. Most coordinates of furniture repeat one of these
points, so that the logit of a coordinate is raised by a predicted amount if one of the points has
it (a pointer, as in Merity 2016, arXiv 1609.07843, with logits instead of a mixture).

The transformer takes one step for a position. The first token of a position is predicted from its
state, and the second and third coordinate of a vertex by a feed-forward layer that also gets the
coordinates before them (TreeMeshGPT, section 3.3).

B meshes, N positions, S tokens of a position, W `dim`, E embedding of a coordinate, C numbers of a
context, R roles, M predicted tokens, V vocabulary; token id V is the end of the sequence. Tokens
are (B, N, S), with -1 after the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.engine.device import move_tensors
from tessera.modalities.mesh import tree
from tessera.modalities.mesh.next_token import (
    NextTokenPredictions,
    RowPadding,
    TextConditionedTransformer,
)
from tessera.modalities.mesh.tree_context import NUM_ROLES, read_context
from tessera.nn.causal_transformer import KVCache, build_feed_forward_step, build_norm_step
from tessera.nn.precision import to_fp32
from tessera.nn.transformer import FeedForward, Norm, States, linear
from tessera.text.learned import LearnedTextConfig
from tessera.text.pretrained import PretrainedTextConfig

COORDINATE_DIM = 24
"""The embedding dimension of a coordinate: sines and cosines of 12 frequencies at first."""
GROUP_SIZE = 4
"""The number of examples that the transformer processes together in training."""
CONTEXT_SIZE = 1 + 3 * NUM_ROLES
"""The slot, and the coordinates of the points."""


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
    max_len: int = 1024
    """The maximum number of positions of a mesh, about 1.3 for each triangle; longer meshes are cut
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
        if self.bins < tree.MIN_BINS:
            raise ValueError(f"bins must be at least {tree.MIN_BINS}, got {self.bins}.")
        if self.max_len < 3:
            raise ValueError(
                f"max_len must be at least 3, the positions of one triangle, got {self.max_len}."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}.")

    def build(self) -> TreeTransformer:
        return TreeTransformer(self)


@dataclass
class TreeInputs:
    """What the prediction of a batch needs beside its tokens, made on the CPU."""

    dropout_LBW: Tensor | None
    context_BNC: Tensor
    """The context of each position and of the end."""
    groups: list[tuple[Tensor, int]]
    """Examples of similar length, and the number of positions of the longest."""
    row_M: Tensor
    """The position of each token to predict, into the flattened (B x (N + 1))."""
    number_M: Tensor
    """The number of each token in its position."""
    later_K: Tensor
    """The tokens that are not the first of their position."""
    position_MS: Tensor
    """All tokens of the position of each token."""
    targets_M: Tensor
    example_M: Tensor
    """The row of the batch that each token belongs to."""
    count_B: Tensor
    """The number of tokens to predict of each mesh."""


class TreeTransformer(TextConditionedTransformer):
    tokens_per_position = tree.POSITION_SIZE

    def __init__(self, config: TreeTransformerConfig):
        super().__init__(
            config.text,
            vocab_size=tree.vocab_size(config.bins),
            max_len=config.max_len,
            dim=config.dim,
            depth=config.depth,
            heads=config.heads,
        )
        self.config = config
        dim, bins = config.dim, config.bins
        self.token_embedding = nn.Embedding(self.vocab_size + 1, dim)
        self.slot_embedding = nn.Embedding(tree.NUM_SLOTS, dim)
        # One row more for a point that is absent.
        self.coordinate_embedding = nn.Embedding(3 * (bins + 1), COORDINATE_DIM)
        self.to_input = linear(3 * NUM_ROLES * COORDINATE_DIM, dim)
        self.match_embedding = linear(2 * NUM_ROLES, dim)
        self.coordinate_layer = FeedForward(dim, inner=dim)
        self.coordinate_norm = Norm(dim)
        self.head = linear(dim, self.vocab_size + 1)
        self.pointer = nn.Linear(dim, NUM_ROLES)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.pointer.weight)
        nn.init.zeros_(self.pointer.bias)
        for layer in (self.coordinate_layer.to_inner, self.coordinate_layer.out):
            layer.weight.use_muon = True  # type: ignore[attr-defined]
        with torch.no_grad():
            self.coordinate_embedding.weight.copy_(initial_coordinates(bins).repeat(3, 1))
        masks = torch.as_tensor(tree.slot_masks(bins))
        axes = torch.arange(3).repeat(NUM_ROLES)
        self.register_buffer("masks", masks, persistent=False)
        self.register_buffer("axes", axes, persistent=False)
        self.masks: Tensor
        self.axes: Tensor

    # ---- teacher forcing

    def prepare_inputs(
        self,
        tokens_BNS: Tensor,
        generators: Sequence[torch.Generator] | None = None,
        texts: Sequence[str] = (),
    ) -> TreeInputs:
        """Follow the traversals of tokens on the CPU, and draw dropout if `generators` are given.

        The end is predicted too, except for a mesh of `max_len` positions, which was cut off.
        """
        lengths_B = (tokens_BNS[..., 0] >= 0).sum(1)
        contexts = self.read_contexts(tokens_BNS.numpy(), lengths_B.tolist())
        targets_BNS = F.pad(tokens_BNS, (0, 0, 0, 1), value=-1)
        ended_E = (lengths_B < self.max_len).nonzero()[:, 0]
        targets_BNS[ended_E, lengths_B[ended_E], 0] = self.eos_token_id
        is_token_BNS = (targets_BNS >= 0) & (targets_BNS != tree.PAD)
        example_M, position_M, number_M = is_token_BNS.nonzero(as_tuple=True)
        row_M = example_M * targets_BNS.shape[1] + position_M
        groups = lengths_B.argsort(stable=True).split(GROUP_SIZE)
        return TreeInputs(
            dropout_LBW=self.transformer.sample_dropout(generators, self.config.dropout),
            context_BNC=torch.from_numpy(contexts),
            groups=[(rows, int(lengths_B[rows[-1]]) + 1) for rows in groups],
            row_M=row_M,
            number_M=number_M,
            later_K=number_M.nonzero()[:, 0],
            position_MS=targets_BNS.flatten(0, 1)[row_M],
            targets_M=targets_BNS[example_M, position_M, number_M],
            example_M=example_M,
            count_B=torch.bincount(example_M, minlength=len(tokens_BNS)),
        )

    def predict(
        self,
        tokens_BNS: Tensor,
        condition: States | None,
        inputs: TreeInputs | None = None,
    ) -> NextTokenPredictions:
        """Predict each token from all earlier ones; `inputs` are those of `prepare_inputs`."""
        if inputs is None:
            inputs = move_tensors(self.prepare_inputs(tokens_BNS.cpu()), tokens_BNS.device)
        previous_BNS = F.pad(tokens_BNS, (0, 0, 1, 0), value=self.eos_token_id)
        x_BNW = self.embed(previous_BNS.clamp_min(0), inputs.context_BNC)
        states_BNW = self.states(x_BNW, inputs.groups, condition, inputs.dropout_LBW)
        context_MC = inputs.context_BNC.flatten(0, 1)[inputs.row_M]
        states_MW = self.token_states(
            states_BNW.flatten(0, 1).index_select(0, inputs.row_M), context_MC, inputs
        )
        logits_MV = self.logits(states_MW, context_MC, inputs.number_M)
        return NextTokenPredictions(logits_MV, inputs.targets_M, inputs.example_M, inputs.count_B)

    def states(
        self,
        x_BNW: Tensor,
        groups: Sequence[tuple[Tensor, int]],
        condition: States | None,
        dropout_LBW: Tensor | None,
    ) -> Tensor:
        """Run the transformer on groups of examples of similar length, with less padding.

        Half of all positions of a batch of 8 synthetic meshes are padding, and a quarter with
        groups of 4.
        """
        states_BNW = torch.zeros_like(x_BNW)
        for rows, count in groups:
            context = None if condition is None else condition.select(rows)
            dropout = None if dropout_LBW is None else dropout_LBW[:, rows]
            states = self.transformer(x_BNW[rows, :count], context, dropout_LBW=dropout)
            padded = F.pad(states, (0, 0, 0, x_BNW.shape[1] - count))
            states_BNW = states_BNW.index_copy(0, rows, padded)
        return states_BNW

    def read_contexts(self, tokens_BNS: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """Return (B, N + 1, C) int64: the context of each position and of the end."""
        batch, count, _ = tokens_BNS.shape
        if count > self.max_len:
            raise ValueError(
                f"Got a mesh of {count} positions, but the maximum of this transformer is "
                f"{self.max_len}: leave out or simplify larger meshes, or build it with a larger "
                "`max_len`."
            )
        contexts = np.full((batch, count + 1, CONTEXT_SIZE), -1, dtype=np.int64)
        contexts[..., 0] = 0
        for row, length in enumerate(lengths):
            traversal = tree.Traversal(self.config.bins)
            rows = [read_context(traversal)]
            for position in tokens_BNS[row, :length].tolist():
                for token in position:
                    if token != tree.PAD:
                        traversal.append(token)
                rows.append(read_context(traversal))
            contexts[row, : length + 1] = rows
        return contexts

    def embed(self, previous_BNS: Tensor, context_BNC: Tensor) -> Tensor:
        """Return the input states: the last position, the slot and the points, (B, N, W)."""
        bins = self.config.bins
        points_BNP = context_BNC[..., 1:]
        rows_BNP = points_BNP.where(points_BNP >= 0, bins) + self.axes * (bins + 1)
        points_BNW = self.to_input(self.coordinate_embedding(rows_BNP).flatten(2))
        slots_BNW = self.slot_embedding(context_BNC[..., 0])
        return self.token_embedding(previous_BNS).sum(2) + slots_BNW + points_BNW

    def token_states(self, states_MW: Tensor, context_MC: Tensor, inputs: TreeInputs) -> Tensor:
        """Return the states from which tokens are predicted: that of the position for its first
        token, and for the coordinates after it one that also depends on those before."""
        rows_K = inputs.later_K
        if not len(rows_K):
            return states_MW
        later_KW = self.coordinate_states(
            states_MW.index_select(0, rows_K),
            context_MC[rows_K],
            inputs.position_MS[rows_K],
            inputs.number_M[rows_K],
        )
        return states_MW.index_copy(0, rows_K, later_KW)

    def coordinate_states(
        self, states_KW: Tensor, context_KC: Tensor, position_KS: Tensor, number_K: Tensor
    ) -> Tensor:
        """Return the states of the second and third coordinates of vertices, (K, W).

        Which of the points have the same coordinates so far is an input too.
        """
        first_K, second_K = position_KS[:, 0], position_KS[:, 1]
        second_K = second_K.where(number_K == 2, tree.PAD)
        points_KR3 = context_KC[:, 1:].unflatten(1, (NUM_ROLES, 3))
        offset = tree.FIRST_COORDINATE
        same_z_KR = points_KR3[..., 0] == (first_K - offset)[:, None]
        same_y_KR = points_KR3[..., 1] == (second_K - offset - self.config.bins)[:, None]
        matches_KQ = torch.cat([same_z_KR, same_y_KR], dim=1).to(states_KW.dtype)
        x_KW = states_KW + self.token_embedding(first_K) + self.token_embedding(second_K)
        x_KW = x_KW + self.slot_embedding(context_KC[:, 0] + number_K)
        x_KW = x_KW + self.match_embedding(matches_KQ)
        return self.coordinate_norm(x_KW + self.coordinate_layer(x_KW))

    def logits(self, states_MW: Tensor, context_MC: Tensor, number_M: Tensor) -> Tensor:
        """Return (M, V + 1) logits, -inf for tokens that a slot cannot have."""
        logits_MV = self.head(states_MW)
        bonus_MR = self.pointer(states_MW)
        points_MR3 = context_MC[:, 1:].unflatten(1, (NUM_ROLES, 3))
        axis_MR1 = number_M[:, None, None].expand(-1, NUM_ROLES, 1)
        value_MR = points_MR3.gather(2, axis_MR1)[..., 0]
        present_MR = value_MR >= 0
        first_M1 = tree.FIRST_COORDINATE + number_M[:, None] * self.config.bins
        token_MR = first_M1 + value_MR.where(present_MR, 0)
        bonus_MR = bonus_MR.where(present_MR, 0.0).to(logits_MV.dtype)
        logits_MV = logits_MV.scatter_add(1, token_MR, bonus_MR)
        return logits_MV.masked_fill(~self.masks[context_MC[:, 0] + number_M], -math.inf)

    # ---- token by token

    @torch.no_grad()
    def start_decoding(self, condition: States | None, prefix_BNS: Tensor) -> TreeDecodingState:
        """Start decoding after these positions, as many for each mesh and possibly none."""
        return TreeDecodingState(self, condition, prefix_BNS)


class TreeDecodingState:
    """Decodes a batch of meshes: called with the tokens just chosen, it returns the next logits.

    Tokens that no well-formed mesh continues with have logit -inf. A row whose token is one of
    these has ended, and its further logits have no meaning.

    The same computation as `TreeTransformer.predict`, with embeddings that are summed in advance
    and with few calls: each does so little work that call overhead dominates.
    """

    def __init__(self, model: TreeTransformer, condition: States | None, prefix_BNS: Tensor):
        self.model, self.device = model, prefix_BNS.device
        self.padding = RowPadding(len(prefix_BNS), prefix_BNS.device)
        self.condition = model.project_condition(condition, self.padding)
        self.transformer, self.cache = model.transformer, KVCache()
        self.traversals = [tree.Traversal(model.config.bins) for _ in range(len(prefix_BNS))]
        self.number = 0
        """The number of the next token in its position."""
        self.position_BS = np.full((len(prefix_BNS), tree.POSITION_SIZE), model.eos_token_id)
        """The tokens of the last position, and the first ones of the unfinished one."""
        self.rows_B1 = np.arange(len(prefix_BNS))[:, None] * (model.vocab_size + 1)
        self.tables = DecodingTables(model)
        self.coordinate_layer = build_feed_forward_step(model.coordinate_layer)
        self.coordinate_norm = build_norm_step(model.coordinate_norm)
        for position_BS in prefix_BNS.unbind(1):
            self.step()
            for token_B in position_BS.unbind(1):
                self.append(token_B, is_prefix=True)

    def __call__(self, tokens_B: Tensor | None) -> Tensor:
        """Return logits (B, V + 1) for the token after `tokens_B`, which is None at first."""
        if tokens_B is not None:
            self.append(tokens_B)
        with torch.no_grad():
            if self.number == 0:
                self.step()
            states_BW = self.coordinate_states() if self.number else self.states_BW
            logits_BQ = F.linear(states_BW, *self.tables.heads[self.number])
        logits_BV = self.mask_logits(to_fp32(logits_BQ).cpu().numpy()[: len(self.traversals)])
        return torch.from_numpy(logits_BV).to(self.device)

    def append(self, tokens_B: Tensor, is_prefix: bool = False) -> None:
        tokens = tokens_B.tolist()
        for traversal, token in zip(self.traversals, tokens, strict=True):
            if token == tree.PAD and self.expects_pad(traversal):
                continue
            try:
                traversal.append(token)
            except tree.InvalidToken as error:
                if is_prefix:
                    raise ValueError(f"The prefix is not a valid mesh. {error}") from None
        self.position_BS[:, self.number] = tokens
        self.number = (self.number + 1) % tree.POSITION_SIZE

    def expects_pad(self, traversal: tree.Traversal) -> bool:
        """Return whether the position began with a token that is no coordinate."""
        return self.number > 0 and tree.AXIS[traversal.slot] != self.number

    def step(self) -> None:
        """Run the transformer on the next position."""
        contexts = np.array([read_context(traversal) for traversal in self.traversals])
        self.slots_B, points_BP = contexts[:, 0], contexts[:, 1:]
        self.points_BR3 = points_BP.reshape(len(contexts), NUM_ROLES, 3)
        x_BW = self.tables.sum_inputs(self.slots_B, points_BP, self.position_BS)
        self.states_BW = self.transformer.decode_step(
            self.padding.pad(x_BW), self.condition, self.cache
        )

    def coordinate_states(self) -> Tensor:
        """Return the states from which the second or third coordinates are predicted."""
        same_BQ = np.zeros((len(self.traversals), 2 * NUM_ROLES), dtype=np.int64)
        rows_B3 = np.full((len(self.traversals), 3), tree.PAD)
        rows_B3[:, 2] = self.model.vocab_size + 1 + self.slots_B + self.number
        for axis in range(self.number):
            tokens_B = rows_B3[:, axis] = self.position_BS[:, axis]
            value_B1 = tokens_B[:, None] - self.tables.first_tokens[axis]
            start = axis * NUM_ROLES
            same_BQ[:, start : start + NUM_ROLES] = self.points_BR3[:, :, axis] == value_B1
        inputs_BW = self.tables.sum_coordinates(rows_B3, same_BQ)
        x_BW = self.states_BW + self.padding.pad(inputs_BW)
        return self.coordinate_norm(x_BW + self.coordinate_layer(x_BW))

    def mask_logits(self, logits_BQ: np.ndarray) -> np.ndarray:
        """Add what the pointers predict, and exclude impossible tokens, (B, V + 1)."""
        tables, count = self.tables, logits_BQ.shape[1] - NUM_ROLES
        logits_BV = np.full((len(logits_BQ), self.model.vocab_size + 1), -np.inf, np.float32)
        if self.number:
            first = tables.first_tokens[self.number]
            logits_BV[:, first : first + count] = logits_BQ[:, :count]
        else:  # the end is the last of these tokens
            logits_BV[:, : count - 1] = logits_BQ[:, : count - 1]
            logits_BV[:, -1] = logits_BQ[:, count - 1]
            logits_BV += tables.log_masks[self.slots_B]
        values_BR = self.points_BR3[:, :, self.number]
        bonus_BR = np.where(values_BR >= 0, logits_BQ[:, count:], 0)
        tokens_BR = np.maximum(values_BR, 0) + (tables.first_tokens[self.number] + self.rows_B1)
        bonus_N = np.bincount(tokens_BR.ravel(), bonus_BR.ravel(), logits_BV.size)
        logits_BV += bonus_N.reshape(logits_BV.shape)
        for row_V, traversal in zip(logits_BV, self.traversals, strict=True):
            if self.expects_pad(traversal):
                row_V[:] = -math.inf
                row_V[tree.PAD] = 0
            elif excluded := traversal.excluded():
                row_V[excluded] = -math.inf
        return logits_BV


class DecodingTables:
    """The weights of a model in the form that decoding needs: sums of embeddings by index."""

    def __init__(self, model: TreeTransformer):
        self.device, self.bins = model.token_embedding.weight.device, model.config.bins
        rows, num_points = self.bins + 1, 3 * NUM_ROLES
        by_axis = model.coordinate_embedding.weight.unflatten(0, (3, rows))
        weights = model.to_input.weight.unflatten(1, (NUM_ROLES, 3, COORDINATE_DIM))
        points = torch.einsum("abe,wrae->rabw", by_axis, weights).flatten(0, 2)
        tokens, slots = model.token_embedding.weight, model.slot_embedding.weight
        self.inputs = torch.cat([points, tokens, slots])
        """A row for each coordinate of each point, each token and each slot, (rows, W)."""
        self.point_offsets = np.arange(num_points) * rows
        self.token_offset = num_points * rows
        self.slot_offset = self.token_offset + len(tokens)
        no_match = tokens.new_zeros(1, tokens.shape[1])
        self.coordinates = torch.cat([tokens, slots, no_match, model.match_embedding.weight.T])
        """A row for each token, each slot and each match of a point, (rows, W)."""
        self.match_offset = len(tokens) + len(slots)
        self.match_numbers = np.arange(1, 2 * NUM_ROLES + 1)
        self.log_masks = np.where(model.masks.cpu().numpy(), 0, -np.inf).astype(np.float32)
        """(slots, V + 1): 0, or -inf for tokens that a slot cannot have."""
        self.first_tokens = [tree.FIRST_COORDINATE + axis * self.bins for axis in range(3)]
        self.heads = [self.build_head(model, number) for number in range(3)]
        """Weight and bias that predict the tokens of each number of a position, and pointers."""

    def build_head(self, model: TreeTransformer, number: int) -> tuple[Tensor, Tensor]:
        weight, start = model.head.weight, self.first_tokens[number]
        parts = [weight[start : start + self.bins], model.pointer.weight]
        if number == 0:
            parts = [weight[: start + self.bins], weight[-1:], model.pointer.weight]
        head = torch.cat(parts)
        return head, F.pad(model.pointer.bias, (len(head) - NUM_ROLES, 0))

    def sum_inputs(
        self, slots_B: np.ndarray, points_BP: np.ndarray, position_BS: np.ndarray
    ) -> Tensor:
        """Return the inputs of the transformer, (B, W)."""
        points = np.where(points_BP >= 0, points_BP, self.bins) + self.point_offsets
        slots = self.slot_offset + slots_B[:, None]
        rows = np.concatenate([points, position_BS + self.token_offset, slots], axis=1)
        return self.sum_rows(self.inputs, rows)

    def sum_coordinates(self, rows_B3: np.ndarray, same_BQ: np.ndarray) -> Tensor:
        """Return the inputs of the layer that predicts coordinates, (B, W)."""
        matches = self.match_offset + same_BQ * self.match_numbers
        return self.sum_rows(self.coordinates, np.concatenate([rows_B3, matches], axis=1))

    def sum_rows(self, table: Tensor, rows: np.ndarray) -> Tensor:
        picked = table.index_select(0, torch.from_numpy(rows.ravel()).to(self.device))
        return picked.view(*rows.shape, -1).sum(1)


def initial_coordinates(bins: int) -> Tensor:
    """Return (bins + 1, E): sines and cosines of the coordinates, so that near ones are similar;
    the last row is 0."""
    # With numpy: torch.linspace ignores the device of a context once torch.compile was imported.
    frequencies = np.pi * np.logspace(0, np.log10(bins / 4), COORDINATE_DIM // 2)
    angles = np.linspace(-1, 1, bins)[:, None] * frequencies
    values = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return torch.as_tensor(np.pad(values, ((0, 1), (0, 0))), dtype=torch.float32)
