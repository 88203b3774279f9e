"""A transformer in which no place sees a later one, and which can be asked place by place.

It is built of the blocks of `nn/transformer.py`; what differs is who sees whom. What was computed
for earlier places does not depend on later ones, so a `KVCache` keeps their keys and values, and a
new place costs one place. Padding at the end needs no
mask: whatever stands before it does not see it.

B sequences, N places, W width, H heads, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.transformer import (
    ContextKV,
    FeedForward,
    Norm,
    Rotary,
    SelfAttention,
    States,
    Transformer,
    joined,
    rope_cache,
    split_heads,
)

ROOM = 32
"""Places that a cache first has room for; it doubles when it is full."""


@dataclass
class KVCache:
    """Keys and values of the places so far, for each block: (B, H, room, D), of which the first
    `length` are in use."""

    length: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def add(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, these included."""
        return self.put(self.keys, block, keys), self.put(self.values, block, values)

    def put(self, kept: dict[int, Tensor], block: int, new: Tensor) -> Tensor:
        whole = self.length + new.shape[2]
        room = kept.get(block)
        if room is None or room.shape[2] < whole:
            larger = new.new_empty(*new.shape[:2], max(ROOM, 2 * whole), new.shape[3])
            if room is not None:
                larger[:, :, : self.length] = room[:, :, : self.length]
            room = kept[block] = larger
        room.narrow(2, self.length, new.shape[2]).copy_(new)
        return room.narrow(2, 0, whole)


class CausalTransformer(nn.Module):
    """`depth` blocks, and a last norm. With `context`, each block also looks at states of that
    width."""

    def __init__(
        self, dim: int, depth: int, heads: int, max_len: int, *, context: int | None = None
    ):
        super().__init__()
        whole = Transformer(
            dim, depth, heads, context=context
        )  # its checks, its start, and what it marks for Muon
        self.blocks, self.norm = whole.blocks, whole.norm
        rope = rope_cache(torch.arange(max_len, dtype=torch.float32)[:, None], whole.head_dim)
        self.register_buffer("cosine", rope.cosine, persistent=False)
        self.register_buffer("sine", rope.sine, persistent=False)
        self.cosine: Tensor
        self.sine: Tensor

    def forward(
        self, x_BNW: Tensor, context_kv: list[ContextKV] | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """The states of N places. With a cache they follow those that it holds and are added to it:
        any number to an empty one, later one by one."""
        before, places = 0 if cache is None else cache.length, x_BNW.shape[1]
        if before and places > 1:
            raise ValueError(
                f"{places} places came at once after {before} others: give them one by one."
            )
        self.refuse_longer(before + places)
        if context_kv is None and self.blocks[0].cross is not None:
            raise ValueError("This transformer looks at a context, but was given none.")
        if cache is not None and before:
            return self.one_more(x_BNW[:, 0], context_kv, cache)[:, None]
        rope = Rotary(self.cosine[:places], self.sine[:places])
        for number, block in enumerate(self.blocks):
            x_BNW = x_BNW + attended(block.attention, x_BNW, rope, number, cache)
            if context_kv is not None:
                x_BNW = x_BNW + block.cross(x_BNW, context_kv[number])
            x_BNW = x_BNW + block.feed(x_BNW)
        if cache is not None:
            cache.length = places
        return self.norm(x_BNW)

    def one_more(self, x_BW: Tensor, context_kv: list[ContextKV] | None, cache: KVCache) -> Tensor:
        """The state of the place after those that the cache holds, to which it is added.

        What `forward` does, said in few and plain calls: each has so little to do that beginning it
        takes most of the time. Of 8 meshes of 16 faces at width 128, a sample takes 6 % less than
        if each part were called as a module.
        """
        self.refuse_longer(cache.length + 1)
        rope = Rotary(self.cosine[cache.length], self.sine[cache.length])
        for number, block in enumerate(self.blocks):
            x_BW = x_BW + attended_by_one(block.attention, x_BW, rope, number, cache)
            if context_kv is not None:
                x_BW = x_BW + block.cross(x_BW[:, None], context_kv[number])[:, 0]
            x_BW = x_BW + fed(block.feed, x_BW)
        cache.length += 1
        return normed(self.norm, x_BW)

    def refuse_longer(self, places: int) -> None:
        if places > len(self.cosine):
            raise ValueError(
                f"A sequence of {places} places came to a transformer that knows {len(self.cosine)}."
            )

    def project_context(self, context: States) -> list[ContextKV]:
        """What each block makes of a context, for whoever will need it more than once: it does not
        depend on x."""
        return [block.cross.project_context(context) for block in self.blocks]


def attended(
    attention: SelfAttention, x_BNW: Tensor, rope: Rotary, number: int, cache: KVCache | None
) -> Tensor:
    """What each place sees of itself and of those before it."""
    parts = split_heads(attention.to_query_key_value(attention.norm(x_BNW)), 3, attention.heads)
    q, k = rope(attention.head_norm(parts[:2]))
    k, v = (k, parts[2]) if cache is None else cache.add(number, k, parts[2])
    return attention.out(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def attended_by_one(
    attention: SelfAttention, x_BW: Tensor, rope: Rotary, number: int, cache: KVCache
) -> Tensor:
    """What one place sees of itself and of those before it, which is all that there is."""
    projected = F.linear(normed(attention.norm, x_BW), attention.to_query_key_value.weight)
    parts_B3HD = projected.view(len(x_BW), 3, attention.heads, -1)
    q, k = rope(normed(attention.head_norm, parts_B3HD.narrow(1, 0, 2))).unbind(1)
    k, v = cache.add(number, k.unsqueeze(2), parts_B3HD.select(1, 2).unsqueeze(2))
    return F.linear(
        F.scaled_dot_product_attention(q.unsqueeze(2), k, v).flatten(1), attention.out.weight
    )


def fed(feed: FeedForward, x_BW: Tensor) -> Tensor:
    value, gate = (
        F.linear(normed(feed.norm, x_BW), feed.to_inner.weight).view(len(x_BW), 2, -1).unbind(1)
    )
    return F.linear(value * F.silu(gate), feed.out.weight)


def normed(norm: Norm, x: Tensor) -> Tensor:
    return torch.layer_norm(x, norm.normalized_shape, norm.weight, None, norm.eps)
