"""The masked transformer of MaskGIT and Muse (Chang 2022, arXiv 2202.04200; Chang 2023,
2301.00704): which symbols are hidden?

It sees a mosaic with some symbols hidden and gives, for the hidden ones that are asked for, how
likely each symbol is there. It may look at a text, at coarser symbols of the same example (those of
a smaller picture for super-resolution; what is said, for a sound) and at its own previous states.
Its critic (Lezama 2022, 2209.04439) sees a whole mosaic and says of each symbol how far it believes
it. With convolutions (`conformer`) and several levels to a place it is SoundStorm's network (Borsos
2023, 2305.09636, section 3.1).

B batch, N places, S symbols in a place, W width, M asked symbols, V vocabulary; V itself stands for
a hidden symbol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tessera.nn.conformer import ConformerConfig
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
    zero_init_,
)
from tessera.text.encoder import LearnedTextConfig, PretrainedTextConfig


@dataclass(frozen=True)
class TokenSpec:
    """What a network reads: how many symbols there are, how they are laid out, and what is known of
    each."""

    vocab_size: int
    layout: Layout
    features: Tensor | None = None
    """(V, F), see `nn/quantize/features.py`"""
    seconds: float | None = None
    """How long one cell of the grid lasts, where that is known: two streams are then brought
    together by their rates"""


@dataclass(frozen=True, kw_only=True)
class MaskedTransformerConfig:
    dim: int = 192
    depth: int = 6
    heads: int = 6
    text: LearnedTextConfig | PretrainedTextConfig | None = field(default_factory=LearnedTextConfig)
    """What reads the captions; none makes a model without prompts."""
    self_condition: bool = False
    """The network also sees its states of the round before."""
    conformer: ConformerConfig | None = None
    """Blocks that also look at their neighbours by convolution; none: plain transformer blocks."""
    absolute_positions: bool = True
    """Each place knows where in the grid it is. Without it a place only knows how far others are:
    then a model can be asked for more places than it learnt from, which pictures do not need and
    sounds do."""

    def build(self, tokens: TokenSpec, smaller: TokenSpec | None = None) -> MaskedTransformer:
        return MaskedTransformer(self, tokens, smaller)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    dim: int = 128
    depth: int = 3
    heads: int = 4

    def build(
        self, reader: MaskedTransformerConfig, tokens: TokenSpec, smaller: TokenSpec | None = None
    ) -> TokenCritic:
        own = replace(
            reader, dim=self.dim, depth=self.depth, heads=self.heads, self_condition=False
        )
        return TokenCritic(own, tokens, smaller)


@dataclass(frozen=True, kw_only=True)
class CriticHeadConfig:
    dim: int = 128
    """Inner width of a small network on the states of the model itself."""

    def build(
        self, reader: MaskedTransformerConfig, tokens: TokenSpec, smaller: TokenSpec | None = None
    ) -> CriticHead:
        return CriticHead(reader.dim, self.dim, tokens.layout.slots)


@dataclass
class Condition:
    """All that a network looks at beside the symbols, made once for as many rounds as there are."""

    context_kv: list[ContextKV] | None
    base_embedding: Tensor
    """(N, W) or (B, N, W): where each place is, and what the coarser symbols have there"""


class TokenTransformer(nn.Module):
    """Symbols and their condition, as states."""

    def __init__(
        self, config: MaskedTransformerConfig, tokens: TokenSpec, smaller: TokenSpec | None
    ):
        super().__init__()
        self.config, self.tokens = config, tokens
        layout = tokens.layout
        self.text = config.text.build() if config.text is not None else None
        body = Transformer if config.conformer is None else config.conformer.build
        self.transformer = body(
            config.dim,
            config.depth,
            config.heads,
            context=self.text.dim if self.text is not None else None,
        )
        self.embedding = Embedding(tokens.vocab_size + 1, layout.slots, config.dim, tokens.features)
        self.smaller = (
            TokenConditioner(smaller, tokens, config.dim) if smaller is not None else None
        )
        self.self_cond_proj = (
            zero_init_(linear(config.dim, config.dim)) if config.self_condition else None
        )
        self.register_buffer("places", grid_positions(layout.places), persistent=False)
        rope = rope_cache(self.places, self.transformer.head_dim)
        self.register_buffer("cosine", rope.cosine, persistent=False)
        self.register_buffer("sine", rope.sine, persistent=False)
        sides = layout.places if config.absolute_positions else ()
        self.axes = nn.ParameterList([torch.randn(side, config.dim) * 0.5 for side in sides])

    @property
    def hidden(self) -> int:
        """What stands for a hidden symbol."""
        return self.tokens.vocab_size

    def condition(
        self, texts: Sequence[str], dropped: Sequence[bool], smaller_codes: Tensor | None = None
    ) -> Condition:
        """What the texts say, nothing where they are dropped or empty; and what the coarser symbols
        say."""
        context_kv = None
        if self.text is not None:
            states = self.text(texts)
            kept = [bool(text) and not one for text, one in zip(texts, dropped)]
            mask = states.mask & torch.tensor(kept, device=states.mask.device)[:, None]
            told = [number for number, one in enumerate(kept) if one]
            context_kv = self.transformer.project_context(States(states.values, mask, told))
        if (self.smaller is None) != (smaller_codes is None):
            raise ValueError(
                "Only a model that learnt from two kinds of symbols takes the coarser ones, and it needs them."
            )
        base_embedding = self.position()
        return Condition(
            context_kv,
            base_embedding
            if self.smaller is None
            else base_embedding + self.smaller(smaller_codes),
        )

    def states(
        self,
        tokens_BNS: Tensor,
        condition: Condition,
        previous_BNW: Tensor | None = None,
        real_BN: Tensor | None = None,
    ) -> Tensor:
        """A condition may have twice as many rows as there are mosaics: each is then read under two
        texts. What is not `real` is seen by nobody."""
        x_BNW = self.embedding(tokens_BNS) + self.base_embedding(condition, tokens_BNS)
        if self.self_cond_proj is not None and previous_BNW is not None:
            x_BNW = x_BNW.repeat(len(previous_BNW) // len(x_BNW), 1, 1) + self.self_cond_proj(
                previous_BNW
            )
        return self.looking_around(self.transformer.first_qkv(x_BNW), condition, real_BN)

    def base_embedding(self, condition: Condition, tokens_BNS: Tensor) -> Tensor:
        return (
            condition.base_embedding
            if self.smaller is None
            else condition.base_embedding[..., : tokens_BNS.shape[1], :]
        )

    def looking_around(
        self,
        layer_input: LayerInput,
        condition: Condition,
        real_BN: Tensor | None,
        asked_P: Tensor | None = None,
    ) -> Tensor:
        """The states of all places, or of those only that are asked for, numbered through the whole
        batch: (P, W)."""
        rope = self.rope(layer_input.x.shape[1])
        return self.transformer.forward_blocks(
            layer_input, rope, real_BN, condition.context_kv, asked_P=asked_P
        )[-1]

    def rope(self, count: int) -> Rotary:
        """The rotations of so many places: those of the grid, or of a row of another length."""
        if count == len(self.places):
            return Rotary(self.cosine, self.sine)
        if self.config.absolute_positions or self.places.shape[1] > 1:
            raise ValueError(f"This model knows {len(self.places)} places, but was shown {count}.")
        places_N1 = torch.arange(count, device=self.places.device, dtype=self.cosine.dtype)[:, None]
        return rope_cache(places_N1, self.transformer.head_dim)

    def position(self) -> Tensor:
        """(N, W): where each place is. Rotations tell how far apart two places are; but while all
        symbols are hidden every place sees the same, and nothing else would tell a corner from the
        middle."""
        if not self.config.absolute_positions:
            return self.embedding.table.weight.new_zeros(self.config.dim)
        rows = [axis[self.places[:, number].long()] for number, axis in enumerate(self.axes)]
        return torch.stack(rows).sum(0)


class MaskedTransformer(TokenTransformer):
    def __init__(
        self, config: MaskedTransformerConfig, tokens: TokenSpec, smaller: TokenSpec | None = None
    ):
        super().__init__(config, tokens, smaller)
        levels = tokens.layout.levels
        cells = tokens.layout.slots // levels
        self.to_cells = (
            nn.Parameter(torch.randn(cells, config.dim, config.dim) * config.dim**-0.5)
            if cells > 1
            else None
        )
        self.heads = nn.ModuleList([Head(config.dim, tokens) for _ in range(levels)])

    def logits_at(
        self,
        tokens_BNS: Tensor,
        asked_BNS: Tensor,
        condition: Condition,
        real_BN: Tensor | None = None,
        last: FirstLayerCache | None = None,
    ) -> Tensor:
        """(M, V): how likely each symbol is, only for those that are asked for, in their order, and
        by the shortest way. Whoever asks round after round, with other symbols under the same
        condition, gives the same `last` each time."""
        layer_input = (last or FirstLayerCache()).first_qkv(
            self, tokens_BNS, self.base_embedding(condition, tokens_BNS)
        )
        asked_P = asked_places(asked_BNS)
        rows_PW = self.looking_around(layer_input, condition, real_BN, asked_P)
        return self.read(rows_PW, asked_BNS.flatten(0, 1).index_select(0, asked_P))

    def logits(self, states_BNW: Tensor, asked_BNS: Tensor) -> Tensor:
        """(M, V): the same for whoever has the states of all places."""
        asked_P = asked_places(asked_BNS)
        rows_PW, asked_PS = (
            each.flatten(0, 1).index_select(0, asked_P) for each in (states_BNW, asked_BNS)
        )
        return self.read(rows_PW, asked_PS)

    def read(self, rows_PW: Tensor, asked_PS: Tensor) -> Tensor:
        """From places of which something is asked. Most of a small model's cost is this table.

        Each cell of a place has a matrix of its own, and each level, whose symbols mean other
        things, a head.
        """
        if asked_PS.shape[1] == 1:
            return self.heads[0](rows_PW)
        row_M, slot_M = asked_PS.nonzero(as_tuple=True)
        rows_MW = rows_PW if len(row_M) == len(rows_PW) else rows_PW.index_select(0, row_M)
        if self.to_cells is not None:
            rows_MW = apart(
                rows_MW, slot_M // len(self.heads), [by_matrix(matrix) for matrix in self.to_cells]
            )
        return (
            apart(rows_MW, slot_M % len(self.heads), list(self.heads))
            if len(self.heads) > 1
            else self.heads[0](rows_MW)
        )


class FirstLayerCache:
    """What each place became by itself, before any looked at another: from one round to the next
    few symbols change, and only these places are begun anew."""

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
            ground_PW = (
                base_embedding.expand_as(self.layer_input.x)
                .flatten(0, 1)
                .index_select(0, changed_P)
            )
            anew = network.transformer.first_qkv(
                pad_for_batch_invariance(network.embedding(tokens_PS[None])[0] + ground_PW)
            )
            layer_input = LayerInput(
                put(self.layer_input.x, changed_P, anew.x),
                put(self.layer_input.parts, changed_P, anew.parts),
            )
        self.tokens_BNS, self.layer_input = tokens_BNS, layer_input
        return layer_input


def put(all_BNW: Tensor, places_P: Tensor, new_PW: Tensor) -> Tensor:
    return all_BNW.flatten(0, 1).index_copy(0, places_P, new_PW[: len(places_P)]).view_as(all_BNW)


def asked_places(asked_BNS: Tensor) -> Tensor:
    """The numbers of the places of which something is asked, counted through the whole batch."""
    return asked_BNS.any(2).flatten().nonzero()[:, 0]


class TokenCritic(TokenTransformer):
    """A network of its own that was shown what is real and what was drawn."""

    def __init__(
        self, config: MaskedTransformerConfig, tokens: TokenSpec, smaller: TokenSpec | None = None
    ):
        super().__init__(config, tokens, smaller)
        self.belief = linear(config.dim, tokens.layout.slots)

    def realness_logits(self, states_BNW: Tensor) -> Tensor:
        """(B, N, S): the higher, the more it takes the symbol for real."""
        return self.belief(states_BNW)


class CriticHead(nn.Module):
    """The critic as a small network on the model's own states of the whole mosaic."""

    def __init__(self, dim: int, inner: int, slots: int):
        super().__init__()
        self.inner = inner
        self.layers = nn.Sequential(linear(dim, inner), nn.SiLU(), linear(inner, slots))

    def realness_logits(self, states_BNW: Tensor) -> Tensor:
        return self.layers(states_BNW)


class Embedding(nn.Module):
    """The sum of one vector for each symbol in a place: its own, and what its features make. Each
    slot has its own tables."""

    def __init__(self, rows: int, slots: int, dim: int, features_VF: Tensor | None):
        super().__init__()
        self.table = nn.Embedding(rows * slots, dim)
        nn.init.normal_(self.table.weight, std=slots**-0.5 if features_VF is None else 0.02)
        self.register_buffer("offsets", torch.arange(slots) * rows, persistent=False)
        self.from_features = (
            linear(slots * features_VF.shape[1], dim) if features_VF is not None else None
        )
        if features_VF is not None:  # a symbol beyond the vocabulary, a hidden one, has none
            padded = torch.cat(
                [features_VF, features_VF.new_zeros(rows - len(features_VF), features_VF.shape[1])]
            )
            self.register_buffer("features", padded, persistent=False)

    def forward(self, tokens_BNS: Tensor) -> Tensor:
        rows = self.table(tokens_BNS + self.offsets)
        own = rows.sum(2) if rows.shape[2] > 1 else rows.squeeze(2)
        return (
            own
            if self.from_features is None
            else own + self.from_features(self.features[tokens_BNS].flatten(2))
        )


class Head(nn.Module):
    """How likely each symbol is: by a row of its own, and by its features, which are soon
    learnt."""

    def __init__(self, dim: int, tokens: TokenSpec):
        super().__init__()
        self.own = linear(dim, tokens.vocab_size)
        nn.init.normal_(self.own.weight, std=0.02)  # nearly even, but for no two symbols the same
        self.to_features = None
        if tokens.features is not None:
            self.to_features = zero_init_(linear(dim, tokens.features.shape[1]))
            self.register_buffer("features", tokens.features, persistent=False)

    def forward(self, rows_MW: Tensor) -> Tensor:
        count, rows_MW = len(rows_MW), pad_for_batch_invariance(rows_MW)
        logits_MV = self.own(rows_MW)
        if self.to_features is not None:
            logits_MV = logits_MV + self.to_features(rows_MW) @ self.features.T.to(rows_MW.dtype)
        return logits_MV[:count]


class TokenConditioner(nn.Module):
    """Coarser symbols, each brought to the places it lies under: those of a smaller picture, or of
    what is said in a sound.

    Two streams in time come together by their rates: a place has the symbol that is there in the
    middle of its time, whether or not one rate is a multiple of the other. Where a sound has ended
    its symbols are -1, and say nothing.
    """

    def __init__(self, smaller: TokenSpec, tokens: TokenSpec, dim: int):
        super().__init__()
        self.smaller, self.tokens = smaller, tokens
        self.timed = None not in (smaller.seconds, tokens.seconds)
        self.layout = smaller.layout if self.timed else self.nested(smaller.layout, tokens.layout)
        self.embedding = Embedding(smaller.vocab_size, self.layout.slots, dim, smaller.features)

    def nested(self, below: Layout, above: Layout) -> Layout:
        """With as many symbols to a place as lie under one place above, where there are more of
        them than places."""
        factors = [side / under for side, under in zip(above.places, below.grid, strict=True)]
        coarser = all(factor.is_integer() for factor in factors)
        if not coarser and not all(
            (1 / factor).is_integer() and factor == factors[0] for factor in factors
        ):
            raise ValueError(
                f"The smaller picture has {below.grid} symbols and the larger one {above.places} places: one must be "
                "a whole multiple of the other."
            )
        return Layout(below.grid, below.levels, 1 if coarser else round(1 / factors[0]))

    def forward(self, codes: Tensor) -> Tensor:
        """(B, N, W)"""
        if self.timed:
            return self.in_step(codes)
        x = self.embedding(self.layout.patchify(codes)).unflatten(1, self.layout.places)
        for axis, (side, under) in enumerate(
            zip(self.tokens.layout.places, self.layout.places, strict=True), start=1
        ):
            x = x.repeat_interleave(side // under, dim=axis)
        return x.flatten(1, -2)

    @property
    def pace(self) -> float:
        """How many coarser symbols come in the time of one place."""
        return self.tokens.seconds / self.smaller.seconds  # type: ignore[operator]

    def places(self, count: int) -> int:
        """How many places last as long as so many coarser symbols in a row."""
        return (
            round(count / self.pace) if (count,) != self.layout.grid else self.tokens.layout.count
        )

    def in_step(self, codes: Tensor) -> Tensor:
        """Of as many places as last as long as the codes do, the last of which may not be
        filled."""
        seen = codes.unflatten(1, (codes.shape[1], 1)) if self.layout.levels == 1 else codes
        x_BTW = self.embedding(seen.clamp_min(0)) * (seen[..., :1] >= 0)
        middles = torch.arange(math.ceil(codes.shape[1] / self.pace), device=codes.device) + 0.5
        return x_BTW[:, (middles * self.pace).long().clamp_max(codes.shape[1] - 1)]


def apart(rows_MW: Tensor, kind_M: Tensor, through: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """Each row through what is for its kind: sorted by kind, so that each is used once."""
    counts = torch.bincount(kind_M, minlength=len(through)).tolist()
    if not torch.is_grad_enabled() and max(counts) == len(
        kind_M
    ):  # all of a kind, as where a level is laid after the other
        return through[counts.index(len(kind_M))](rows_MW)
    order = kind_M.argsort(stable=True)
    # Also those for which there is no row: a parameter that takes no part would leave the processes
    # of a run waiting.
    parts = [one(rows) for rows, one in zip(rows_MW[order].split(counts), through, strict=True)]
    return torch.cat(parts)[order.argsort()]


def by_matrix(matrix_WW: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda rows_MW: (pad_for_batch_invariance(rows_MW) @ matrix_WW)[: len(rows_MW)]


def pad_for_batch_invariance(rows_MW: Tensor) -> Tensor:
    """At least four rows: some CPUs round products of fewer otherwise, and a seed's picture would
    depend on the batch."""
    return rows_MW if len(rows_MW) >= 4 else nn.functional.pad(rows_MW, (0, 0, 0, 4 - len(rows_MW)))


class MaskedModel(nn.Module):
    """What is published: the network, and its critic if it has one."""

    def __init__(self, network: MaskedTransformer, critic: TokenCritic | CriticHead | None):
        super().__init__()
        self.network = network
        self.critic = critic

    @property
    def reader(self) -> TokenTransformer:
        """Whose states the critic judges: its own, or those of the network it is a head of."""
        return self.critic if isinstance(self.critic, TokenTransformer) else self.network
