"""The masked transformer of MaskGIT and Muse (Chang 2022, arXiv 2202.04200; Chang 2023, 2301.00704): which symbols are hidden?

It sees a mosaic with some symbols hidden and gives, for the hidden ones that are asked for, how likely each symbol is there.
It may look at a text, at the symbols of a smaller picture (super-resolution) and at its own previous states. Its critic
(Lezama 2022, 2209.04439) sees a whole mosaic and says of each symbol how far it believes it.

B batch, N places, S symbols in a place, W width, M asked symbols, V vocabulary; V itself stands for a hidden symbol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tessera.models.text_encoder import LearnedTextConfig, PretrainedTextConfig
from tessera.nn.layout import Layout
from tessera.nn.transformer import Looked, States, Transformer, Turn, linear, places_of, starting_as_nothing, turn


@dataclass(frozen=True)
class Symbols:
    """What a network reads: how many symbols there are, how they are laid out, and what is known of each."""

    vocabulary: int
    layout: Layout
    features: Tensor | None = None
    """(V, F), see `nn/quantize/features.py`"""


@dataclass(frozen=True, kw_only=True)
class MaskedTransformerConfig:
    width: int = 192
    depth: int = 6
    heads: int = 6
    text: LearnedTextConfig | PretrainedTextConfig | None = field(default_factory=LearnedTextConfig)
    """What reads the captions; none makes a model without prompts."""
    self_condition: bool = False
    """The network also sees its states of the round before."""

    def build(self, symbols: Symbols, smaller: Symbols | None = None) -> MaskedTransformer:
        return MaskedTransformer(self, symbols, smaller)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    width: int = 128
    depth: int = 3
    heads: int = 4

    def build(self, reader: MaskedTransformerConfig, symbols: Symbols, smaller: Symbols | None = None) -> TokenCritic:
        own = replace(reader, width=self.width, depth=self.depth, heads=self.heads, self_condition=False)
        return TokenCritic(own, symbols, smaller)


@dataclass(frozen=True, kw_only=True)
class CriticHeadConfig:
    width: int = 128
    """Inner width of a small network on the states of the model itself."""

    def build(self, reader: MaskedTransformerConfig, symbols: Symbols, smaller: Symbols | None = None) -> CriticHead:
        return CriticHead(reader.width, self.width, symbols.layout.slots)


@dataclass
class Condition:
    """All that a network looks at beside the symbols, made once for as many rounds as there are."""

    looked: list[Looked] | None
    ground: Tensor
    """(N, W) or (B, N, W): where each place is, and what the smaller picture has there"""


class Reader(nn.Module):
    """Symbols and their condition, as states."""

    def __init__(self, config: MaskedTransformerConfig, symbols: Symbols, smaller: Symbols | None):
        super().__init__()
        self.config, self.symbols = config, symbols
        layout = symbols.layout
        self.text = config.text.build() if config.text is not None else None
        self.transformer = Transformer(
            config.width, config.depth, config.heads, context=self.text.width if self.text is not None else None
        )
        self.embedding = Embedding(symbols.vocabulary + 1, layout.slots, config.width, symbols.features)
        self.smaller = Smaller(smaller, layout, config.width) if smaller is not None else None
        self.remembered = starting_as_nothing(linear(config.width, config.width)) if config.self_condition else None
        self.register_buffer("places", places_of(layout.places), persistent=False)
        turned = turn(self.places, self.transformer.head_width)
        self.register_buffer("cosine", turned.cosine, persistent=False)
        self.register_buffer("sine", turned.sine, persistent=False)
        self.axes = nn.ParameterList([torch.randn(side, config.width) * 0.5 for side in layout.places])

    @property
    def hidden(self) -> int:
        """What stands for a hidden symbol."""
        return self.symbols.vocabulary

    def condition(self, texts: Sequence[str], dropped: Sequence[bool], smaller_codes: Tensor | None = None) -> Condition:
        """What the texts say, nothing where they are dropped or empty; and what the smaller pictures show."""
        looked = None
        if self.text is not None:
            states = self.text(texts)
            kept = torch.tensor([bool(text) and not one for text, one in zip(texts, dropped)], device=states.mask.device)
            looked = self.transformer.look(States(states.values, states.mask & kept[:, None]))
        if (self.smaller is None) != (smaller_codes is None):
            raise ValueError("Only a super-resolution model takes the symbols of smaller pictures, and it needs them.")
        ground = self.position()
        return Condition(looked, ground if self.smaller is None else ground + self.smaller(smaller_codes))

    def states(self, symbols_BNS: Tensor, condition: Condition, previous_BNW: Tensor | None = None) -> Tensor:
        """A condition may have twice as many rows as there are mosaics: each is then read under two texts."""
        x_BNW = self.embedding(symbols_BNS) + condition.ground
        if self.remembered is not None and previous_BNW is not None:
            x_BNW = x_BNW.repeat(len(previous_BNW) // len(x_BNW), 1, 1) + self.remembered(previous_BNW)
        return self.transformer(x_BNW, Turn(self.cosine, self.sine), context=condition.looked)

    def position(self) -> Tensor:
        """(N, W): where each place is. Rotations tell how far apart two places are; but while all symbols are hidden every
        place sees the same, and nothing else would tell a corner from the middle."""
        rows = [axis[self.places[:, number].long()] for number, axis in enumerate(self.axes)]
        return torch.stack(rows).sum(0)


class MaskedTransformer(Reader):
    def __init__(self, config: MaskedTransformerConfig, symbols: Symbols, smaller: Symbols | None = None):
        super().__init__(config, symbols, smaller)
        slots = symbols.layout.slots
        self.to_slots = nn.Parameter(torch.randn(slots, config.width, config.width) * config.width**-0.5) if slots > 1 else None
        self.head = Head(config.width, symbols)

    def logits(self, states_BNW: Tensor, asked_BNS: Tensor) -> Tensor:
        """(M, V): only for the symbols that are asked for, in their order. Most of a small model's cost is this table."""
        example, place, slot = asked_BNS.nonzero(as_tuple=True)
        rows_MW = states_BNW[example, place]
        return self.head(rows_MW if self.to_slots is None else by_slot(rows_MW, slot, self.to_slots))


class TokenCritic(Reader):
    """A network of its own that was shown what is real and what was drawn."""

    def __init__(self, config: MaskedTransformerConfig, symbols: Symbols, smaller: Symbols | None = None):
        super().__init__(config, symbols, smaller)
        self.belief = linear(config.width, symbols.layout.slots)

    def beliefs(self, states_BNW: Tensor) -> Tensor:
        """(B, N, S): the higher, the more it takes the symbol for real."""
        return self.belief(states_BNW)


class CriticHead(nn.Module):
    """The critic as a small network on the model's own states of the whole mosaic."""

    def __init__(self, width: int, inner: int, slots: int):
        super().__init__()
        self.layers = nn.Sequential(linear(width, inner), nn.SiLU(), linear(inner, slots))

    def beliefs(self, states_BNW: Tensor) -> Tensor:
        return self.layers(states_BNW)


class Embedding(nn.Module):
    """The sum of one vector for each symbol in a place: its own, and what its features make. Each slot has its own tables."""

    def __init__(self, rows: int, slots: int, width: int, features_VF: Tensor | None):
        super().__init__()
        self.table = nn.Embedding(rows * slots, width)
        nn.init.normal_(self.table.weight, std=slots**-0.5 if features_VF is None else 0.02)
        self.register_buffer("offsets", torch.arange(slots) * rows, persistent=False)
        self.from_features = linear(slots * features_VF.shape[1], width) if features_VF is not None else None
        if features_VF is not None:  # a symbol beyond the vocabulary, a hidden one, has none
            padded = torch.cat([features_VF, features_VF.new_zeros(rows - len(features_VF), features_VF.shape[1])])
            self.register_buffer("features", padded, persistent=False)

    def forward(self, symbols_BNS: Tensor) -> Tensor:
        own = self.table(symbols_BNS + self.offsets).sum(2)
        return own if self.from_features is None else own + self.from_features(self.features[symbols_BNS].flatten(2))


class Head(nn.Module):
    """How likely each symbol is: by a row of its own, and by its features, which are soon learnt."""

    def __init__(self, width: int, symbols: Symbols):
        super().__init__()
        self.own = linear(width, symbols.vocabulary)
        nn.init.normal_(self.own.weight, std=0.02)  # nearly even, but for no two symbols the same
        self.to_features = None
        if symbols.features is not None:
            self.to_features = starting_as_nothing(linear(width, symbols.features.shape[1]))
            self.register_buffer("features", symbols.features, persistent=False)

    def forward(self, rows_MW: Tensor) -> Tensor:
        count, rows_MW = len(rows_MW), steady(rows_MW)
        logits_MV = self.own(rows_MW)
        if self.to_features is not None:
            logits_MV = logits_MV + self.to_features(rows_MW) @ self.features.T.to(rows_MW.dtype)
        return logits_MV[:count]


class Smaller(nn.Module):
    """The symbols of a smaller picture, each brought to the places it lies under."""

    def __init__(self, smaller: Symbols, layout: Layout, width: int):
        super().__init__()
        self.factors = [side / below for side, below in zip(layout.places, smaller.layout.grid, strict=True)]
        coarser = all(factor.is_integer() for factor in self.factors)
        finer = all((1 / factor).is_integer() and factor == self.factors[0] for factor in self.factors)
        if not coarser and not finer:
            raise ValueError(
                f"The smaller picture has {smaller.layout.grid} symbols and the larger one {layout.places} places: one must be "
                "a whole multiple of the other."
            )
        patch = 1 if coarser else round(1 / self.factors[0])
        self.layout = Layout(smaller.layout.grid, smaller.layout.levels, patch)
        self.repeats = [max(1, round(factor)) for factor in self.factors]
        self.embedding = Embedding(smaller.vocabulary, self.layout.slots, width, smaller.features)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embedding(self.layout.folded(codes)).unflatten(1, self.layout.places)
        for axis, repeat in enumerate(self.repeats, start=1):
            x = x.repeat_interleave(repeat, dim=axis)
        return x.flatten(1, -2)


def by_slot(rows_MW: Tensor, slot_M: Tensor, matrices_SWW: Tensor) -> Tensor:
    """Each row times its slot's matrix: sorted by slot, so that each matrix is used once."""
    order = slot_M.argsort(stable=True)
    counts = torch.bincount(slot_M, minlength=len(matrices_SWW)).tolist()
    sorted_rows = rows_MW[order].split(counts)
    parts = [(steady(rows) @ matrix)[: len(rows)] for rows, matrix in zip(sorted_rows, matrices_SWW, strict=True)]
    return torch.cat(parts)[order.argsort()]


def steady(rows_MW: Tensor) -> Tensor:
    """At least four rows: some CPUs round products of fewer otherwise, and a seed's picture would depend on the batch."""
    return rows_MW if len(rows_MW) >= 4 else nn.functional.pad(rows_MW, (0, 0, 0, 4 - len(rows_MW)))


class MaskedModel(nn.Module):
    """What is published: the network, and its critic if it has one."""

    def __init__(self, network: MaskedTransformer, critic: TokenCritic | CriticHead | None):
        super().__init__()
        self.network = network
        self.critic = critic

    @property
    def reader(self) -> Reader:
        """Whose states the critic judges: its own, or those of the network it is a head of."""
        return self.critic if isinstance(self.critic, Reader) else self.network
