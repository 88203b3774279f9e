"""A transformer that reads all places at once: for masked models, and for text.

Before each part a norm (Xiong 2020, arXiv 2002.04745), queries and keys of unit size (Henry 2020,
2010.04245), positions by rotation along any number of axes (Su 2021, 2104.09864), gated
feed-forward (Shazeer 2020, 2002.05202), no biases, and residual parts that start as nothing.
Attention is torch's own, which picks the fastest kernel a machine has.

B batch, N places, L places of the context, W width, H heads, D width of a head, A axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_BASE = 1000.0
"""Places until the slowest rotation has gone once around, or nearly: our grids are hundreds of
places long, not thousands."""


@dataclass
class States:
    """A sequence of vectors for each example, and which of them are real."""

    values: Tensor
    """(B, L, W)"""
    mask: Tensor
    """(B, L), True where there is something"""
    told: list[int] | None = None
    """The numbers of those examples that have anything; None: all may have."""


@dataclass
class Rotary:
    """The rotation of each place, as cosine and sine of each pair's angle, (N, D) each. A pair lies
    half a head apart; the sines of its first halves are negative."""

    cosine: Tensor
    sine: Tensor

    def __call__(self, heads: Tensor) -> Tensor:
        """(..., N, D)"""
        others = heads.roll(heads.shape[-1] // 2, dims=-1)
        return torch.addcmul(heads * self.cosine, others, self.sine)


def rope_cache(places_NA: Tensor, head_dim: int) -> Rotary:
    """Each axis turns its share of a head's pairs; where the pairs cannot be shared evenly the
    first axes have one more."""
    axes, pairs = places_NA.shape[1], head_dim // 2
    shares = [pairs // axes + (axis < pairs % axes) for axis in range(axes)]
    angles = [
        places_NA[:, axis, None]
        * ROPE_BASE ** -(torch.arange(share, device=places_NA.device) / max(1, share))
        for axis, share in enumerate(shares)
    ]
    angles_NP = torch.cat(angles, dim=1)
    return Rotary(
        torch.cat([angles_NP, angles_NP], dim=1).cos(),
        torch.cat([-angles_NP, angles_NP], dim=1).sin(),
    )


def grid_positions(grid: tuple[int, ...]) -> Tensor:
    """The coordinates of all places of a grid, row by row: (N, A)."""
    return torch.cartesian_prod(
        *(torch.arange(side, dtype=torch.float32) for side in grid)
    ).reshape(-1, len(grid))


class Transformer(nn.Module):
    """`depth` blocks over N places, and a last norm. With `context`, each block also looks at
    states of that width."""

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        *,
        context: int | None = None,
        block: Callable[[int, int, int | None], Block] | None = None,
    ):
        super().__init__()
        if dim % heads or dim // heads % 2:
            fitting = dim // (2 * heads) * 2 * heads or 2 * heads
            raise ValueError(
                f"A width of {dim} cannot be shared by {heads} heads of an even size: use a width of {fitting} or "
                f"{fitting + 2 * heads}, or another number of heads."
            )
        self.dim = dim
        self.head_dim = dim // heads
        self.blocks = nn.ModuleList([(block or Block)(dim, heads, context) for _ in range(depth)])
        self.norm = Norm(dim)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                module.weight.use_muon = True  # type: ignore[assignment]  # what engine/optim/config.py's Muon asks for

    def forward(
        self,
        x_BNW: Tensor,
        places_NA: Tensor | Rotary | None = None,
        mask_BN: Tensor | None = None,
        context: States | list[ContextKV] | None = None,
    ) -> Tensor:
        """`places` are the coordinates of each place, or their rotations for whoever has them; else
        0, 1, 2, ...

        What `mask` leaves out is seen by nobody.
        """
        return self.layers(x_BNW, places_NA, mask_BN, context)[-1]

    def layers(
        self,
        x_BNW: Tensor,
        places_NA: Tensor | Rotary | None = None,
        mask_BN: Tensor | None = None,
        context: States | list[ContextKV] | None = None,
        at: Sequence[int] = (),
    ) -> list[Tensor]:
        """The states after each of `at` blocks, as they are, and last the result: after all blocks,
        and normed."""
        if places_NA is None:
            places_NA = torch.arange(x_BNW.shape[1], device=x_BNW.device, dtype=torch.float32)[
                :, None
            ]
        rope = (
            places_NA
            if isinstance(places_NA, Rotary)
            else rope_cache(places_NA.to(x_BNW.dtype), self.head_dim)
        )
        seen = self.project_context(context) if isinstance(context, States) else context
        return self.forward_blocks(self.first_qkv(x_BNW), rope, mask_BN, seen, at)

    def first_qkv(self, x: Tensor) -> LayerInput:
        """What each place becomes by itself, before any has looked at another."""
        return self.blocks[0].before(x)

    def forward_blocks(
        self,
        layer_input: LayerInput,
        rope: Rotary,
        mask_BN: Tensor | None = None,
        seen: list[ContextKV] | None = None,
        at: Sequence[int] = (),
        asked_P: Tensor | None = None,
    ) -> list[Tensor]:
        """All that comes after `first_qkv`, as `layers` gives it. With `asked`, numbers of places,
        counted through the whole batch, the result is theirs only, (P, W): the last part of the
        last block, which looks at no other place, is left out for the rest. (That only they look
        around in it was tried too: choosing their rows took longer than it saved.)"""
        passed, mask = [], mask_BN[:, None, None, :] if mask_BN is not None else None
        x = layer_input.x
        for number, block in enumerate(self.blocks, start=1):
            layer_input = layer_input if number == 1 else block.before(x)
            if mask is not None and len(mask) < len(
                layer_input.x
            ):  # each example now stands there once for every context
                mask = torch.cat([mask] * (len(layer_input.x) // len(mask)))
            x = block.attn(layer_input, rope, mask, seen[number - 1] if seen is not None else None)
            if asked_P is not None and number == len(self.blocks):
                x = x.flatten(0, 1).index_select(0, asked_P)
            x = block.after(x)
            if number in at:
                passed.append(x)
        return [*passed, self.norm(x)]

    def project_context(self, context: States) -> list[ContextKV]:
        """What each block makes of a context, for whoever will need it more than once: it does not
        depend on x."""
        return [block.cross.project_context(context) for block in self.blocks]


@dataclass
class LayerInput:
    """Places before they look around: what they are, (..., W), and their queries, keys and values,
    (..., 3 W)."""

    x: Tensor
    parts: Tensor


class Block(nn.Module):
    """A place may think by itself, then it looks at others, then it thinks by itself again."""

    def __init__(self, dim: int, heads: int, context: int | None):
        super().__init__()
        self.attention = SelfAttention(dim, heads)
        self.cross = CrossAttention(dim, heads, context) if context is not None else None
        self.feed = FeedForward(dim)

    def before(self, x: Tensor) -> LayerInput:
        return LayerInput(x, self.attention.parts(x))

    def attn(
        self,
        layer_input: LayerInput,
        rope: Rotary,
        mask: Tensor | None,
        context_kv: ContextKV | None,
    ) -> Tensor:
        x = layer_input.x + self.attention(layer_input.parts, rope, mask)
        if self.cross is not None:
            if context_kv is None:
                raise ValueError("This transformer looks at a context, but was given none.")
            if context_kv.count > len(
                x
            ):  # several contexts for each: until here they had everything in common
                x = torch.cat([x] * (context_kv.count // len(x)))
            x = x + self.cross(x, context_kv)
        return x

    def after(self, x: Tensor) -> Tensor:
        return x + self.feed(x)


class SelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = Norm(dim)
        self.to_query_key_value = linear(dim, 3 * dim)
        self.head_norm = Norm(
            dim // heads
        )  # of queries and keys alike: what counts is the product of their scales
        self.out = zero_init_(linear(dim, dim))

    def parts(self, x: Tensor) -> Tensor:
        """Queries, keys and values, which each place has by itself."""
        return self.to_query_key_value(self.norm(x))

    def forward(self, parts_BN3W: Tensor, rope: Rotary, mask: Tensor | None) -> Tensor:
        parts = split_heads(parts_BN3W, 3, self.heads)
        q, k = rope(self.head_norm(parts[:2]))
        return self.out(joined(F.scaled_dot_product_attention(q, k, parts[2], attn_mask=mask)))


@dataclass
class ContextKV:
    """Keys and values of a context, (B, H, L, D), and what is added to how well they match, (B, 1,
    1, L): -inf where there is nothing. As numbers, since they are asked for again and again, and
    made once."""

    keys: Tensor
    values: Tensor
    mask: Tensor
    untold: NullContext | None = None
    """None: these are all examples"""

    @property
    def count(self) -> int:
        """Of examples."""
        return len(self.keys) if self.untold is None else self.untold.count

    def first(self, count: int) -> ContextKV:
        """Of so many examples."""
        if self.untold is None:
            return ContextKV(self.keys[:count], self.values[:count], self.mask[:count])
        told = self.untold.told[self.untold.told < count]
        some = ContextKV(self.keys[: len(told)], self.values[: len(told)], self.mask[: len(told)])
        return (
            some
            if len(told) == count
            else replace(some, untold=replace(self.untold, told=told, count=count))
        )


@dataclass
class NullContext:
    """Examples that have nothing to look at but the learnt place, beside others that have."""

    told: Tensor
    """The numbers of those others"""
    count: int
    """Of all"""
    seen: Tensor
    """(W,): what the untold see, whatever they look for"""


class CrossAttention(nn.Module):
    """Looks at a context. A first, learnt place is always there: a text of nothing leaves something
    to look at."""

    def __init__(self, dim: int, heads: int, context: int):
        super().__init__()
        self.heads = heads
        self.norm = Norm(dim)
        self.context_norm = Norm(context)
        self.to_query = linear(dim, dim)
        self.to_key_value = linear(context, 2 * dim)
        self.query_norm, self.key_norm = Norm(dim // heads), Norm(dim // heads)
        self.nothing = nn.Parameter(torch.randn(2, heads, 1, dim // heads))
        self.out = zero_init_(linear(dim, dim))

    def project_context(self, context: States) -> ContextKV:
        if context.told is None or len(context.told) == len(context.mask):
            return self.context_kv(context)
        told = torch.tensor(context.told, dtype=torch.long, device=context.mask.device)
        some = self.context_kv(
            States(context.values.index_select(0, told), context.mask.index_select(0, told))
        )
        return replace(
            some, untold=NullContext(told, len(context.mask), self.out(self.nothing[1].flatten()))
        )

    def context_kv(self, context: States) -> ContextKV:
        keys, values = split_heads(
            self.to_key_value(self.context_norm(context.values)), 2, self.heads
        )
        key, value = self.nothing.to(keys.dtype).unsqueeze(1).expand(2, keys.shape[0], -1, -1, -1)
        keys = torch.cat([key, keys], dim=2)
        real = F.pad(context.mask, (1, 0), value=True)
        mask = torch.zeros(real.shape, dtype=keys.dtype, device=real.device).masked_fill(
            ~real, -math.inf
        )
        return ContextKV(
            self.key_norm(keys), torch.cat([value, values], dim=2), mask[:, None, None, :]
        )

    def forward(self, x_BNW: Tensor, context_kv: ContextKV) -> Tensor:
        """Under guidance half of all examples are untold, and cost nothing here."""
        if context_kv.untold is None:
            return self.seen(x_BNW, context_kv)
        # Also if nobody is told: a parameter that takes no part would leave the processes of a run
        # waiting.
        seen = self.seen(x_BNW.index_select(0, context_kv.untold.told), context_kv)
        return context_kv.untold.seen.expand_as(x_BNW).index_copy(0, context_kv.untold.told, seen)

    def seen(self, x_BNW: Tensor, context_kv: ContextKV) -> Tensor:
        [q] = split_heads(self.to_query(self.norm(x_BNW)), 1, self.heads)
        seen = F.scaled_dot_product_attention(
            self.query_norm(q), context_kv.keys, context_kv.values, attn_mask=context_kv.mask
        )
        return self.out(joined(seen))


class FeedForward(nn.Module):
    """SwiGLU with two thirds of the usual inner width, so that it costs what an ungated one of four
    times the width does."""

    def __init__(self, dim: int):
        super().__init__()
        inner = (8 * dim // 3 + 15) // 16 * 16
        self.norm = Norm(dim)
        self.to_inner = linear(dim, 2 * inner)
        self.out = zero_init_(linear(inner, dim))

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.to_inner(self.norm(x)).chunk(2, dim=-1)
        return self.out(value * F.silu(gate))


class Norm(nn.LayerNorm):
    """Layer norm without a bias. An RMS norm would do, but has no backward of its own on CPUs:
    three times as long."""

    def __init__(self, dim: int):
        super().__init__(dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.layer_norm(x, self.normalized_shape, self.weight, eps=self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def zero_init_(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    return layer


def split_heads(x_BNW: Tensor, parts: int, heads: int) -> Tensor:
    """(B, N, parts x W) -> (parts, B, H, N, D)."""
    batch, places, dim = x_BNW.shape
    return x_BNW.view(batch, places, parts, heads, dim // parts // heads).permute(2, 0, 3, 1, 4)


def joined(heads_BHND: Tensor) -> Tensor:
    return heads_BHND.transpose(1, 2).flatten(2)
