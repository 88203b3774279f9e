"""The masked transformer of MaskGIT and Muse (Chang 2022, arXiv 2202.04200; Chang 2023,
2301.00704).

The input is a batch of token grids in which some tokens are masked, the output logits for the
masked tokens. The network can be conditioned on a text, on other tokens of the same example (those
of a low-resolution image for super-resolution, semantic tokens for audio) and on its own states of
the previous decoding step. Its critic (Lezama 2022, 2209.04439) gets complete token grids and
rates how real each token is. With convolutions (`conformer`) and several quantizers per position it
is SoundStorm's network (Borsos 2023, 2305.09636, section 3.1).

B batch, N positions, S tokens per position, W model dimension, P selected positions, M selected
tokens, V vocabulary size, which is also the id of the mask token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tessera.nn.conformer import ConformerConfig
from tessera.nn.init import zero_init_
from tessera.nn.prefix_encoder import Prefix, PrefixEncoderConfig
from tessera.nn.token_embedding import TokenEmbedding, TokenSpec, pad_for_batch_invariance
from tessera.nn.token_layout import Layout
from tessera.nn.transformer import (
    ContextKV,
    LayerInput,
    Rotary,
    States,
    Transformer,
    grid_positions,
    linear,
    rope_cache,
)
from tessera.text.encoder import TextInputs
from tessera.text.learned import LearnedTextConfig
from tessera.text.pretrained import PretrainedTextConfig


@dataclass(frozen=True, kw_only=True)
class MaskedTransformerConfig:
    dim: int = 192
    """Model dimension."""
    depth: int = 6
    """Number of blocks."""
    heads: int = 6
    """Number of attention heads."""
    text: LearnedTextConfig | PretrainedTextConfig | None = field(default_factory=LearnedTextConfig)
    """The text encoder for captions; none builds a model without prompts."""
    self_condition: bool = False
    """Whether the network also gets its states of the previous decoding step."""
    conformer: ConformerConfig | None = None
    """Conformer blocks, which also have convolutions; none uses plain transformer blocks."""
    prefix: PrefixEncoderConfig | None = None
    """A summary of the beginning of an example that is given, such as a voice prompt, which is
    added to all positions; none leaves a given beginning to attention."""
    absolute_positions: bool = True
    """Whether to add learned absolute position embeddings. Without them positions are only
    relative, and a model can generate more positions than it was trained on, which audio needs and
    images do not."""

    def build(self, tokens: TokenSpec, cond_tokens: TokenSpec | None = None) -> MaskedTransformer:
        return MaskedTransformer(self, tokens, cond_tokens)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    dim: int = 128
    """Model dimension of the critic."""
    depth: int = 3
    """Number of blocks of the critic."""
    heads: int = 4
    """Number of attention heads of the critic."""

    def build(
        self,
        generator: MaskedTransformerConfig,
        tokens: TokenSpec,
        cond_tokens: TokenSpec | None = None,
    ) -> TokenCritic:
        config = replace(
            generator, dim=self.dim, depth=self.depth, heads=self.heads, self_condition=False
        )
        return TokenCritic(config, tokens, cond_tokens)


@dataclass(frozen=True, kw_only=True)
class CriticHeadConfig:
    dim: int = 128
    """Inner dimension of the critic head, a small network on the states of the generator."""

    def build(
        self,
        generator: MaskedTransformerConfig,
        tokens: TokenSpec,
        cond_tokens: TokenSpec | None = None,
    ) -> CriticHead:
        return CriticHead(generator.dim, self.dim, tokens.layout.tokens_per_position)


@dataclass
class Condition:
    """All inputs beside the tokens, computed once and used in every decoding step."""

    context: States | list[ContextKV] | None
    """The encoded texts, or their keys and values in each block."""
    base_embedding: Tensor
    """(W,), (N, W) or (B, N, W): absolute positions plus the embedded condition tokens."""
    prefix_B1W: Tensor | None = None
    """The summary of a given prefix; None without."""


class TokenTransformer(nn.Module):
    """A transformer over tokens and their condition: the backbone of generator and critic."""

    def __init__(
        self, config: MaskedTransformerConfig, tokens: TokenSpec, cond_tokens: TokenSpec | None
    ):
        super().__init__()
        self.config, self.tokens = config, tokens
        layout = tokens.layout
        self.text = config.text.build() if config.text is not None else None
        build = Transformer if config.conformer is None else config.conformer.build
        self.transformer = build(
            config.dim,
            config.depth,
            config.heads,
            context_dim=self.text.dim if self.text is not None else None,
        )
        self.embedding = TokenEmbedding(
            tokens.vocab_size + 1, layout.tokens_per_position, config.dim, tokens.features
        )
        self.token_conditioner = (
            TokenConditioner(cond_tokens, tokens, config.dim) if cond_tokens is not None else None
        )
        self.prefix = None if config.prefix is None else config.prefix.build(tokens, config.dim)
        self.self_cond_proj = (
            zero_init_(linear(config.dim, config.dim)) if config.self_condition else None
        )
        positions_NA = grid_positions(layout.position_grid)
        rope = rope_cache(positions_NA, self.transformer.head_dim)
        self.register_buffer("positions_NA", positions_NA, persistent=False)
        self.register_buffer("rope_cos", rope.cos, persistent=False)
        self.register_buffer("rope_sin", rope.sin, persistent=False)
        self.positions_NA: Tensor
        self.rope_cos: Tensor
        self.rope_sin: Tensor
        sides = layout.position_grid if config.absolute_positions else ()
        self.axis_embeddings = nn.ParameterList(
            [torch.randn(side, config.dim) * 0.5 for side in sides]
        )

    @property
    def mask_token_id(self) -> int:
        """The token id of a masked token: one more than the ids of the vocabulary."""
        return self.tokens.vocab_size

    def condition(
        self,
        texts: Sequence[str] | TextInputs,
        dropped: Sequence[bool] = (),
        cond_codes: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> Condition:
        """Encode texts, condition tokens and a given prefix.

        Texts that are empty or dropped have no context; texts that the encoder prepared already
        state which of them are dropped. A model without a summary ignores the prefix.
        """
        context = None if self.text is None else self.text.encode(texts, dropped)
        base_embedding = self.position_embedding()
        if self.token_conditioner is not None and cond_codes is not None:
            base_embedding = base_embedding + self.token_conditioner(cond_codes)
        elif self.token_conditioner is not None:
            raise ValueError(
                "This model is conditioned on tokens, but got no `cond_codes`: pass those of the "
                "low-resolution images or the semantic tokens that it was trained with."
            )
        elif cond_codes is not None:
            raise ValueError(
                "Got `cond_codes`, but this model is not conditioned on tokens: leave them out."
            )
        prefix_B1W = None
        if self.prefix is not None and prefix is not None:
            prefix_B1W = self.prefix(prefix)
        return Condition(context, base_embedding, prefix_B1W)

    def project_condition(self, condition: Condition) -> Condition:
        """Compute keys and values of the texts in advance, for several decoding steps.

        In training they are computed in their blocks, which may be sharded one by one.
        """
        if not isinstance(condition.context, States):
            return condition
        return replace(condition, context=self.transformer.project_context(condition.context))

    def states(
        self,
        tokens_BNS: Tensor,
        condition: Condition,
        previous_BNW: Tensor | None = None,
        valid_BN: Tensor | None = None,
    ) -> Tensor:
        """Return the states of all positions, (B, N, W).

        Args:
            tokens_BNS: token ids, with `mask_token_id` where masked.
            condition: from `condition`. It may have twice as many rows as there are token grids:
                each grid is then processed under two texts, for guidance.
            previous_BNW: states of the previous decoding step, for self-conditioning.
            valid_BN: True at valid positions; no other position is attended to.
        """
        x_BNW = self.embedding(tokens_BNS) + self.crop_base_embedding(condition, tokens_BNS)
        if self.self_cond_proj is not None and previous_BNW is not None:
            x_BNW = x_BNW.repeat(len(previous_BNW) // len(x_BNW), 1, 1) + self.self_cond_proj(
                previous_BNW
            )
        return self.forward_blocks(x_BNW, condition, valid_BN)

    def crop_base_embedding(self, condition: Condition, tokens_BNS: Tensor) -> Tensor:
        """Return the base embedding for the positions of `tokens_BNS`, with the summary of a
        prefix."""
        base_embedding = condition.base_embedding
        if self.token_conditioner is not None:
            base_embedding = base_embedding[..., : tokens_BNS.shape[1], :]
        if condition.prefix_B1W is not None:
            base_embedding = base_embedding + condition.prefix_B1W
        return base_embedding

    def forward_blocks(
        self,
        x: Tensor | LayerInput,
        condition: Condition,
        valid_BN: Tensor | None,
        select_P: Tensor | None = None,
    ) -> Tensor:
        """Return the states of all positions, (B, N, W), or of the selected ones only, (P, W).

        `select_P` holds indices into the flattened (B x N) positions.
        """
        rope = self.rope((x.x if isinstance(x, LayerInput) else x).shape[1])
        return self.transformer.forward_blocks(
            x, rope, valid_BN, condition.context, select_P=select_P
        )[-1]

    def rope(self, count: int) -> Rotary:
        """Return the rotations of `count` positions: of the grid, or of a row of another length."""
        if count == len(self.positions_NA):
            return Rotary(self.rope_cos, self.rope_sin)
        if self.config.absolute_positions or self.positions_NA.shape[1] > 1:
            raise ValueError(
                f"Got {count} positions, but this model has {len(self.positions_NA)}: only a model "
                "of one axis without absolute positions takes another number."
            )
        positions_N1 = torch.arange(
            count, device=self.positions_NA.device, dtype=self.rope_cos.dtype
        )[:, None]
        return rope_cache(positions_N1, self.transformer.head_dim)

    def position_embedding(self) -> Tensor:
        """Return the absolute position embeddings, (N, W), or zeros, (W,), without them.

        Rotary embeddings encode relative positions only. While all tokens are masked, all positions
        have the same input, and without absolute positions corners and center would be the same.
        """
        if not self.config.absolute_positions:
            return self.embedding.table.weight.new_zeros(self.config.dim)
        rows = [
            table[self.positions_NA[:, axis].long()]
            for axis, table in enumerate(self.axis_embeddings)
        ]
        return torch.stack(rows).sum(0)


class MaskedTransformer(TokenTransformer):
    """Predicts masked tokens."""

    def __init__(
        self,
        config: MaskedTransformerConfig,
        tokens: TokenSpec,
        cond_tokens: TokenSpec | None = None,
    ):
        super().__init__(config, tokens, cond_tokens)
        num_quantizers = tokens.layout.num_quantizers
        cells = tokens.layout.tokens_per_position // num_quantizers
        self.to_cells = (
            nn.Parameter(torch.randn(cells, config.dim, config.dim) * config.dim**-0.5)
            if cells > 1
            else None
        )
        self.heads = nn.ModuleList(
            [
                TokenHead(config.dim, tokens.vocab_size, tokens.quantizer_features(quantizer))
                for quantizer in range(num_quantizers)
            ]
        )

    def logits_at(
        self,
        tokens_BNS: Tensor,
        predict: Tensor | SelectedTokens,
        condition: Condition,
        valid_BN: Tensor | None = None,
        cache: FirstLayerCache | None = None,
    ) -> Tensor:
        """Return logits (M, V) for the tokens to predict, in row-major order.

        `predict` are their indices, or a mask (B, N, S) that is True at these tokens.

        Equal to `logits` of `states`, with less computation. Callers that decode in several steps
        under the same condition pass the same `cache` in each step.
        """
        base_embedding = self.crop_base_embedding(condition, tokens_BNS)
        x: Tensor | LayerInput
        if cache is None:
            x = self.embedding(tokens_BNS) + base_embedding
        else:
            x = cache.first_qkv(self, tokens_BNS, base_embedding)
        selected = self.select_tokens(predict)
        states_PW = self.forward_blocks(x, condition, valid_BN, selected.position_P)
        return self.apply_heads(states_PW, selected)

    def logits(self, states_BNW: Tensor, predict: Tensor | SelectedTokens) -> Tensor:
        """Return logits (M, V) from the states of all positions."""
        selected = self.select_tokens(predict)
        states_PW = states_BNW.flatten(0, 1).index_select(0, selected.position_P)
        return self.apply_heads(states_PW, selected)

    def select_tokens(self, predict: Tensor | SelectedTokens) -> SelectedTokens:
        """Return the indices of the tokens where a mask (B, N, S) is True.

        The number of them is read from the mask: on a device this waits.
        """
        if isinstance(predict, SelectedTokens):
            return predict
        position_P = predict.any(2).flatten().nonzero()[:, 0]
        if predict.shape[2] == 1:
            return SelectedTokens(position_P, position_P)
        token_M = predict.flatten().nonzero()[:, 0]
        row_M, slot_M = predict.flatten(0, 1).index_select(0, position_P).nonzero(as_tuple=True)
        cells, heads = 0 if self.to_cells is None else len(self.to_cells), len(self.heads)
        return SelectedTokens(
            position_P,
            token_M,
            None if len(row_M) == len(position_P) else row_M,
            None if self.to_cells is None else DispatchIndex.build(slot_M // heads, cells),
            None if heads == 1 else DispatchIndex.build(slot_M % heads, heads),
        )

    def apply_heads(self, states_PW: Tensor, selected: SelectedTokens) -> Tensor:
        """Return logits (M, V) for the tokens to predict of the selected positions.

        Each cell of a position has its own projection and each quantizer its own head. In a small
        model this is most of the computation.
        """
        states_MW = states_PW
        if selected.row_M is not None:
            states_MW = states_PW.index_select(0, selected.row_M)
        if self.to_cells is not None and selected.by_cell is not None:
            projections = [matmul_by(matrix) for matrix in self.to_cells]
            states_MW = selected.by_cell.apply(states_MW, projections)
        if selected.by_head is None:
            return self.heads[0](states_MW)
        return selected.by_head.apply(states_MW, list(self.heads))


class FirstLayerCache:
    """Caches the input of the first attention layer between decoding steps.

    It is independent per position and few tokens change from one step to the next, so only the
    changed positions are recomputed.
    """

    def __init__(self) -> None:
        self.tokens_BNS: Tensor | None = None
        self.layer_input: LayerInput | None = None

    def first_qkv(
        self, network: MaskedTransformer, tokens_BNS: Tensor, base_embedding: Tensor
    ) -> LayerInput:
        if self.tokens_BNS is None or self.layer_input is None:
            layer_input = network.transformer.first_qkv(
                network.embedding(tokens_BNS) + base_embedding
            )
        else:
            changed_P = (tokens_BNS != self.tokens_BNS).any(2).flatten().nonzero()[:, 0]
            tokens_PS = tokens_BNS.flatten(0, 1).index_select(0, changed_P)
            base_PW = (
                base_embedding.expand_as(self.layer_input.x)
                .flatten(0, 1)
                .index_select(0, changed_P)
            )
            changed = network.transformer.first_qkv(
                pad_for_batch_invariance(network.embedding(tokens_PS[None])[0] + base_PW)
            )
            layer_input = LayerInput(
                replace_rows(self.layer_input.x, changed_P, changed.x),
                replace_rows(self.layer_input.qkv, changed_P, changed.qkv),
            )
        self.tokens_BNS, self.layer_input = tokens_BNS, layer_input
        return layer_input


def replace_rows(x_BNW: Tensor, index_P: Tensor, new_PW: Tensor) -> Tensor:
    """Replace rows of the flattened (B x N) positions; rows of padding after them are ignored."""
    return x_BNW.flatten(0, 1).index_copy(0, index_P, new_PW[: len(index_P)]).view_as(x_BNW)


class TokenCritic(TokenTransformer):
    """A separate network that is trained to distinguish real tokens from sampled ones."""

    def __init__(
        self,
        config: MaskedTransformerConfig,
        tokens: TokenSpec,
        cond_tokens: TokenSpec | None = None,
    ):
        super().__init__(config, tokens, cond_tokens)
        self.realness_head = linear(config.dim, tokens.layout.tokens_per_position)

    def realness_logits(self, states_BNW: Tensor) -> Tensor:
        """Return logits of each token being real, (B, N, S)."""
        return self.realness_head(states_BNW)


class CriticHead(nn.Module):
    """A critic that is a small network on the generator's own states of the complete tokens."""

    def __init__(self, dim: int, inner: int, tokens_per_position: int):
        super().__init__()
        self.inner = inner
        self.layers = nn.Sequential(
            linear(dim, inner), nn.SiLU(), linear(inner, tokens_per_position)
        )

    def realness_logits(self, states_BNW: Tensor) -> Tensor:
        """Return logits of each token being real, (B, N, S)."""
        return self.layers(states_BNW)


class TokenHead(nn.Module):
    """Logits from a learned row per token plus, if there are any, its features.

    The features are shared between tokens, so this part is learned early in training.
    """

    features: Tensor

    def __init__(self, dim: int, vocab_size: int, features_VF: Tensor | None):
        super().__init__()
        self.to_logits = linear(dim, vocab_size)
        nn.init.normal_(self.to_logits.weight, std=0.02)  # nearly uniform, but without ties
        self.to_features = None
        if features_VF is not None:
            self.to_features = zero_init_(linear(dim, features_VF.shape[1]))
            self.register_buffer("features", features_VF, persistent=False)

    def forward(self, states_MW: Tensor) -> Tensor:
        count, states_MW = len(states_MW), pad_for_batch_invariance(states_MW)
        logits_MV = self.to_logits(states_MW)
        if self.to_features is not None:
            feature_logits_MV = self.to_features(states_MW) @ self.features.T.to(states_MW.dtype)
            logits_MV = logits_MV + feature_logits_MV
        return logits_MV[:count]


class TokenConditioner(nn.Module):
    """Embeds condition tokens and aligns them with the positions of the tokens to generate.

    Grids (those of a low-resolution image) are aligned by their sides, streams in time (semantic
    tokens) by their durations: a position gets the condition token at the middle of its time span,
    whether or not one rate is a multiple of the other. Codes of -1 are padding and embed to zero.
    """

    def __init__(self, cond_tokens: TokenSpec, tokens: TokenSpec, dim: int):
        super().__init__()
        self.cond_tokens, self.tokens = cond_tokens, tokens
        self.timed = None not in (cond_tokens.seconds, tokens.seconds)
        self.layout = (
            cond_tokens.layout
            if self.timed
            else self.nest_layout(cond_tokens.layout, tokens.layout)
        )
        self.embedding = TokenEmbedding(
            cond_tokens.vocab_size, self.layout.tokens_per_position, dim, cond_tokens.features
        )

    def nest_layout(self, cond: Layout, target: Layout) -> Layout:
        """Return the layout of the condition whose position grid divides that of the target.

        Where the condition has more cells than the target has positions, its cells are grouped
        into patches, one for each position.
        """
        factors = [
            side / cond_side
            for side, cond_side in zip(target.position_grid, cond.grid, strict=True)
        ]
        coarser = all(factor.is_integer() for factor in factors)
        if not coarser and not all(
            (1 / factor).is_integer() and factor == factors[0] for factor in factors
        ):
            raise ValueError(
                f"The condition has a grid of {cond.grid} tokens and the target one of "
                f"{target.position_grid} positions: the sides of one must be a whole multiple of "
                "those of the other. Change the image size or the patch size."
            )
        return Layout(cond.grid, cond.num_quantizers, 1 if coarser else round(1 / factors[0]))

    def forward(self, codes: Tensor) -> Tensor:
        """Return embeddings aligned with the target positions, (B, N, W)."""
        if self.timed:
            return self.align_in_time(codes)
        x = self.embedding(self.layout.patchify(codes)).unflatten(1, self.layout.position_grid)
        for axis, (side, cond_side) in enumerate(
            zip(self.tokens.layout.position_grid, self.layout.position_grid, strict=True), start=1
        ):
            x = x.repeat_interleave(side // cond_side, dim=axis)
        return x.flatten(1, -2)

    @property
    def rate_ratio(self) -> float:
        """The number of condition frames in the time span of one position."""
        return self.tokens.seconds / self.cond_tokens.seconds  # type: ignore[operator]

    def num_positions(self, count: int) -> int:
        """Return the number of positions that last as long as `count` condition frames."""
        return (
            round(count / self.rate_ratio)
            if (count,) != self.layout.grid
            else self.tokens.layout.num_positions
        )

    def align_in_time(self, codes: Tensor) -> Tensor:
        """Return an embedding for every position that starts before the codes end."""
        codes_BTS = (
            codes.unflatten(1, (codes.shape[1], 1)) if self.layout.num_quantizers == 1 else codes
        )
        x_BTW = self.embedding(codes_BTS.clamp_min(0)) * (codes_BTS[..., :1] >= 0)
        count = math.ceil(codes.shape[1] / self.rate_ratio)
        middles_N = torch.arange(count, device=codes.device) + 0.5
        return x_BTW[:, (middles_N * self.rate_ratio).long().clamp_max(codes.shape[1] - 1)]


@dataclass
class DispatchIndex:
    """Which of several functions each row is passed to."""

    counts: list[int]
    """The number of rows of each function."""
    order_M: Tensor
    """The rows sorted by function."""
    inverse_M: Tensor
    """The place of each row in that order."""

    @classmethod
    def build(cls, index_M: Tensor, functions: int) -> DispatchIndex:
        """Sort rows by the index of their function."""
        counts = torch.bincount(index_M, minlength=functions).tolist()
        order_M = index_M.argsort(stable=True)
        return cls(counts, order_M, order_M.argsort())

    def apply(self, rows_MW: Tensor, functions: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """Pass each row to its function, with one call per function on sorted rows."""
        # A single call is enough where all rows have one index, as in decoding level by level.
        if not torch.is_grad_enabled() and max(self.counts) == len(rows_MW):
            return functions[self.counts.index(len(rows_MW))](rows_MW)
        # Also called with zero rows: DDP waits for a gradient of every parameter.
        parts = [
            function(rows)
            for rows, function in zip(
                rows_MW[self.order_M].split(self.counts), functions, strict=True
            )
        ]
        return torch.cat(parts)[self.inverse_M]


@dataclass
class SelectedTokens:
    """The tokens to predict as indices, made on the CPU in training.

    Counting or finding them in a mask on a device would make the host wait for it.
    """

    position_P: Tensor
    """Positions with a token to predict, into the flattened (B x N)."""
    token_M: Tensor
    """The tokens to predict, into the flattened (B x N x S)."""
    row_M: Tensor | None = None
    """The row of `position_P` of each token; None if each position has one token to predict."""
    by_cell: DispatchIndex | None = None
    """The cell of each token; None if a position is one cell."""
    by_head: DispatchIndex | None = None
    """The quantizer of each token; None if there is one."""


def matmul_by(matrix_WW: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a batch-invariant function that multiplies rows by a matrix."""
    return lambda rows_MW: (pad_for_batch_invariance(rows_MW) @ matrix_WW)[: len(rows_MW)]


class MaskedModel(nn.Module):
    """The generator and its critic, if it has one: what is published."""

    def __init__(self, network: MaskedTransformer, critic: TokenCritic | CriticHead | None):
        super().__init__()
        self.network = network
        self.critic = critic

    @property
    def critic_backbone(self) -> TokenTransformer:
        """The network whose states the critic gets: its own, or the generator for a head."""
        return self.critic if isinstance(self.critic, TokenTransformer) else self.network
