"""A transformer that reads all places at once: for masked models, and for text.

Before each part a norm (Xiong 2020, arXiv 2002.04745), queries and keys of unit size (Henry 2020, 2010.04245), positions by
rotation along any number of axes (Su 2021, 2104.09864), gated feed-forward (Shazeer 2020, 2002.05202), no biases, and
residual parts that start as nothing. Attention is torch's own, which picks the fastest kernel a machine has.

B batch, N places, L places of the context, W width, H heads, D width of a head, A axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SLOWEST = 1000.0
"""Places until the slowest rotation has gone once around, or nearly: our grids are hundreds of places long, not thousands."""


@dataclass
class States:
    """A sequence of vectors for each example, and which of them are real."""

    values: Tensor
    """(B, L, W)"""
    mask: Tensor
    """(B, L), True where there is something"""


@dataclass
class Turn:
    """The rotation of each place, as cosine and sine of each pair's angle, (N, D) each."""

    cosine: Tensor
    sine: Tensor

    def __call__(self, heads: Tensor) -> Tensor:
        """(..., N, D)"""
        one, other = heads.chunk(2, dim=-1)
        return heads * self.cosine + torch.cat([-other, one], dim=-1) * self.sine


def turn(places_NA: Tensor, head_width: int) -> Turn:
    """Each axis turns its share of a head's pairs; where the pairs cannot be shared evenly the first axes have one more."""
    axes, pairs = places_NA.shape[1], head_width // 2
    shares = [pairs // axes + (axis < pairs % axes) for axis in range(axes)]
    angles = [
        places_NA[:, axis, None] * SLOWEST ** -(torch.arange(share, device=places_NA.device) / max(1, share))
        for axis, share in enumerate(shares)
    ]
    angles_ND = torch.cat(angles, dim=1).repeat(1, 2)
    return Turn(angles_ND.cos(), angles_ND.sin())


def places_of(grid: tuple[int, ...]) -> Tensor:
    """The coordinates of all places of a grid, row by row: (N, A)."""
    return torch.cartesian_prod(*(torch.arange(side, dtype=torch.float32) for side in grid)).reshape(-1, len(grid))


class Transformer(nn.Module):
    """`depth` blocks over N places, and a last norm. With `context`, each block also looks at states of that width."""

    def __init__(self, width: int, depth: int, heads: int, *, context: int | None = None):
        super().__init__()
        if width % heads or width // heads % 2:
            fitting = width // (2 * heads) * 2 * heads or 2 * heads
            raise ValueError(
                f"A width of {width} cannot be shared by {heads} heads of an even size: use a width of {fitting} or "
                f"{fitting + 2 * heads}, or another number of heads."
            )
        self.width = width
        self.head_width = width // heads
        self.blocks = nn.ModuleList([Block(width, heads, context) for _ in range(depth)])
        self.norm = Norm(width)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                module.weight.between_states = True  # type: ignore[assignment]  # what engine/optimizer.py's Muon asks for

    def forward(
        self,
        x_BNW: Tensor,
        places_NA: Tensor | Turn | None = None,
        mask_BN: Tensor | None = None,
        context: States | list[Looked] | None = None,
    ) -> Tensor:
        """`places` are the coordinates of each place, or their rotations for whoever has them; else 0, 1, 2, ...

        What `mask` leaves out is seen by nobody.
        """
        return self.layers(x_BNW, places_NA, mask_BN, context)[-1]

    def layers(
        self,
        x_BNW: Tensor,
        places_NA: Tensor | Turn | None = None,
        mask_BN: Tensor | None = None,
        context: States | list[Looked] | None = None,
        at: Sequence[int] = (),
    ) -> list[Tensor]:
        """The states after each of `at` blocks, as they are, and last the result: after all blocks, and normed."""
        passed = []
        if places_NA is None:
            places_NA = torch.arange(x_BNW.shape[1], device=x_BNW.device, dtype=torch.float32)[:, None]
        turned = places_NA if isinstance(places_NA, Turn) else turn(places_NA.to(x_BNW.dtype), self.head_width)
        seen = self.look(context) if isinstance(context, States) else context
        mask = mask_BN[:, None, None, :] if mask_BN is not None else None
        for i, block in enumerate(self.blocks):
            if mask is not None and len(mask) < len(x_BNW):  # each example now stands there once for every context
                mask = mask.repeat(len(x_BNW) // len(mask), 1, 1, 1)
            x_BNW = block(x_BNW, turned, mask, seen[i] if seen is not None else None)
            if i + 1 in at:
                passed.append(x_BNW)
        return [*passed, self.norm(x_BNW)]

    def look(self, context: States) -> list[Looked]:
        """What each block makes of a context, for whoever will need it more than once: it does not depend on x."""
        return [block.cross.look(context) for block in self.blocks]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, context: int | None):
        super().__init__()
        self.attention = SelfAttention(width, heads)
        self.cross = CrossAttention(width, heads, context) if context is not None else None
        self.feed = FeedForward(width)

    def forward(self, x: Tensor, turned: Turn, mask: Tensor | None, looked: Looked | None) -> Tensor:
        x = x + self.attention(x, turned, mask)
        if self.cross is not None:
            if looked is None:
                raise ValueError("This transformer looks at a context, but was given none.")
            if len(looked.keys) > len(x):  # several contexts for each: until here they had everything in common
                x = x.repeat(len(looked.keys) // len(x), 1, 1)
            x = x + self.cross(x, looked)
        return x + self.feed(x)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = Norm(width)
        self.to_query_key_value = linear(width, 3 * width)
        self.head_norm = Norm(width // heads)  # of queries and keys alike: what counts is the product of their scales
        self.out = starting_as_nothing(linear(width, width))

    def forward(self, x_BNW: Tensor, turned: Turn, mask: Tensor | None) -> Tensor:
        parts = split_heads(self.to_query_key_value(self.norm(x_BNW)), 3, self.heads)
        q, k = turned(self.head_norm(parts[:2]))
        return self.out(joined(F.scaled_dot_product_attention(q, k, parts[2], attn_mask=mask)))


@dataclass
class Looked:
    """Keys and values of a context, (B, H, L, D), and which of them are real, (B, 1, 1, L)."""

    keys: Tensor
    values: Tensor
    mask: Tensor


class CrossAttention(nn.Module):
    """Looks at a context. A first, learnt place is always there: a text of nothing leaves something to look at."""

    def __init__(self, width: int, heads: int, context: int):
        super().__init__()
        self.heads = heads
        self.norm = Norm(width)
        self.context_norm = Norm(context)
        self.to_query = linear(width, width)
        self.to_key_value = linear(context, 2 * width)
        self.query_norm, self.key_norm = Norm(width // heads), Norm(width // heads)
        self.nothing = nn.Parameter(torch.randn(2, heads, 1, width // heads))
        self.out = starting_as_nothing(linear(width, width))

    def look(self, context: States) -> Looked:
        keys, values = split_heads(self.to_key_value(self.context_norm(context.values)), 2, self.heads)
        batch = keys.shape[0]
        key, value = self.nothing.to(keys.dtype).unsqueeze(1).expand(2, batch, -1, -1, -1)
        keys = torch.cat([key, keys], dim=2)
        mask = F.pad(context.mask, (1, 0), value=True)
        return Looked(self.key_norm(keys), torch.cat([value, values], dim=2), mask[:, None, None, :])

    def forward(self, x_BNW: Tensor, looked: Looked) -> Tensor:
        [q] = split_heads(self.to_query(self.norm(x_BNW)), 1, self.heads)
        seen = F.scaled_dot_product_attention(self.query_norm(q), looked.keys, looked.values, attn_mask=looked.mask)
        return self.out(joined(seen))


class FeedForward(nn.Module):
    """SwiGLU with two thirds of the usual inner width, so that it costs what an ungated one of four times the width does."""

    def __init__(self, width: int):
        super().__init__()
        inner = (8 * width // 3 + 15) // 16 * 16
        self.norm = Norm(width)
        self.to_inner = linear(width, 2 * inner)
        self.out = starting_as_nothing(linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.to_inner(self.norm(x)).chunk(2, dim=-1)
        return self.out(value * F.silu(gate))


class Norm(nn.LayerNorm):
    """Layer norm without a bias. An RMS norm would do, but has no backward of its own on CPUs: three times as long."""

    def __init__(self, width: int):
        super().__init__(width, bias=False)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def starting_as_nothing(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    return layer


def split_heads(x_BNW: Tensor, parts: int, heads: int) -> Tensor:
    """(B, N, parts x W) -> (parts, B, H, N, D)."""
    batch, places, width = x_BNW.shape
    return x_BNW.view(batch, places, parts, heads, width // parts // heads).permute(2, 0, 3, 1, 4)


def joined(heads_BHND: Tensor) -> Tensor:
    return heads_BHND.transpose(1, 2).flatten(2)
