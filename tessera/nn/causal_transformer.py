"""A transformer in which no place sees a later one, and which can be asked place by place.

It is built of the blocks of `nn/transformer.py`; what differs is who sees whom. What was computed for earlier places does not
depend on later ones, so a `Cache` keeps their keys and values, and a new place costs one place. Padding at the end needs no
mask: whatever stands before it does not see it.

B sequences, N places, W width, H heads, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.transformer import Looked, SelfAttention, States, Transformer, Turn, joined, split_heads, turn

ROOM = 32
"""Places that a cache first has room for; it doubles when it is full."""


@dataclass
class Cache:
    """Keys and values of the places so far, for each block: (B, H, room, D), of which the first `length` are in use."""

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
        room[:, :, self.length : whole] = new
        return room[:, :, :whole]


class CausalTransformer(nn.Module):
    """`depth` blocks, and a last norm. With `context`, each block also looks at states of that width."""

    def __init__(self, width: int, depth: int, heads: int, longest: int, *, context: int | None = None):
        super().__init__()
        whole = Transformer(width, depth, heads, context=context)  # its checks, its start, and what it marks for Muon
        self.blocks, self.norm = whole.blocks, whole.norm
        turned = turn(torch.arange(longest, dtype=torch.float32)[:, None], whole.head_width)
        self.register_buffer("cosine", turned.cosine, persistent=False)
        self.register_buffer("sine", turned.sine, persistent=False)
        self.cosine: Tensor
        self.sine: Tensor

    def forward(self, x_BNW: Tensor, looked: list[Looked] | None = None, cache: Cache | None = None) -> Tensor:
        """The states of N places. With a cache they follow those that it holds and are added to it: any number to an empty one,
        later one by one."""
        before = 0 if cache is None else cache.length
        places = slice(before, before + x_BNW.shape[1])
        if before and x_BNW.shape[1] > 1:
            raise ValueError(f"{x_BNW.shape[1]} places came at once after {before} others: give them one by one.")
        if places.stop > len(self.cosine):
            raise ValueError(f"A sequence of {places.stop} places came to a transformer that knows {len(self.cosine)}.")
        turned = Turn(self.cosine[places], self.sine[places])
        for number, block in enumerate(self.blocks):
            x_BNW = x_BNW + attended(block.attention, x_BNW, turned, number, cache)
            if block.cross is not None:
                if looked is None:
                    raise ValueError("This transformer looks at a context, but was given none.")
                x_BNW = x_BNW + block.cross(x_BNW, looked[number])
            x_BNW = x_BNW + block.feed(x_BNW)
        if cache is not None:
            cache.length = places.stop
        return self.norm(x_BNW)

    def look(self, context: States) -> list[Looked]:
        """What each block makes of a context, for whoever will need it more than once: it does not depend on x."""
        return [block.cross.look(context) for block in self.blocks]


def attended(attention: SelfAttention, x_BNW: Tensor, turned: Turn, number: int, cache: Cache | None) -> Tensor:
    """What each place sees of itself and of those before it."""
    parts = split_heads(attention.to_query_key_value(attention.norm(x_BNW)), 3, attention.heads)
    q, k = turned(attention.head_norm(parts[:2]))
    k, v = (k, parts[2]) if cache is None else cache.add(number, k, parts[2])
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=x_BNW.shape[1] > 1)  # one place may see all that there is
    return attention.out(joined(seen))
