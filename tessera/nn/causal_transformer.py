"""A causal transformer with a key-value cache for decoding position by position.

It consists of the blocks of `nn/transformer.py` under a causal mask. Earlier positions do not
depend on later ones, so a `KVCache` keeps their keys and values, and each new position costs one
position. Padding at the end needs no mask, because no position before it attends to it.

B sequences, N positions, W model dimension, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.transformer import (
    Block,
    ContextKV,
    FeedForward,
    Norm,
    Rotary,
    States,
    Transformer,
    apply_rotary_emb,
    merge_heads,
    rope_cache,
    split_heads,
)

AppendToCache = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""New keys and values of one block -> all of them so far."""
INITIAL_CAPACITY = 32
"""Positions for which a cache first allocates memory; a full cache grows to twice the length."""


@dataclass
class KVCache:
    """Keys and values of the positions so far, by block index: (B, H, capacity, D).

    The first `length` positions are in use.
    """

    length: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    steps: list[BlockStep] = field(default_factory=list)
    """The blocks as functions of one position, of the transformer that fills the cache."""

    def append(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values of one block, and return all of that block so far.

        The length is advanced by the caller, after all blocks.
        """
        return self._append(self.keys, block, keys), self._append(self.values, block, values)

    def _append(self, stored: dict[int, Tensor], block: int, new: Tensor) -> Tensor:
        total = self.length + new.shape[2]
        buffer = stored.get(block)
        if buffer is None or buffer.shape[2] < total:
            larger = new.new_empty(*new.shape[:2], max(INITIAL_CAPACITY, 2 * total), new.shape[3])
            if buffer is not None:
                larger[:, :, : self.length] = buffer[:, :, : self.length]
            buffer = stored[block] = larger
        buffer.narrow(2, self.length, new.shape[2]).copy_(new)
        return buffer.narrow(2, 0, total)


class CausalTransformer(nn.Module):
    """`depth` causal blocks and a final norm, for sequences of at most `max_len` positions.

    With `context_dim`, every block also has cross-attention to states of that dimension.
    """

    blocks: Sequence[CausalBlock]

    def __init__(
        self, dim: int, depth: int, heads: int, max_len: int, *, context_dim: int | None = None
    ):
        super().__init__()
        # Built as a Transformer for its checks, its initialization and its marks for Muon.
        transformer = Transformer(dim, depth, heads, context_dim=context_dim, block=CausalBlock)
        self.blocks, self.norm = transformer.blocks, transformer.norm  # type: ignore[assignment]
        rope = rope_cache(torch.arange(max_len, dtype=torch.float32)[:, None], transformer.head_dim)
        self.register_buffer("rope_cos", rope.cos, persistent=False)
        self.register_buffer("rope_sin", rope.sin, persistent=False)
        self.rope_cos: Tensor
        self.rope_sin: Tensor

    def forward(
        self,
        x_BNW: Tensor,
        context: States | list[ContextKV] | None = None,
        cache: KVCache | None = None,
        dropout_LBW: Tensor | None = None,
    ) -> Tensor:
        """Return the states of N positions, (B, N, W).

        `context` are states for cross-attention, or their keys and values from `project_context`,
        and `dropout_LBW` the factors of `sample_dropout` for each block.

        With a cache the positions follow those in the cache and are added to it: any number to an
        empty cache, later one at a time.
        """
        past, positions = 0 if cache is None else cache.length, x_BNW.shape[1]
        if past and positions > 1:
            raise ValueError(
                f"Got {positions} positions after {past} cached ones: a cache that is not empty "
                "takes one position at a time."
            )
        self.check_length(past + positions)
        if context is None and self.blocks[0].cross_attention is not None:
            raise ValueError(
                "This transformer has cross-attention, but got no context: pass `context`."
            )
        if cache is not None and past:
            kv = self.project_context(context) if isinstance(context, States) else context
            return self.decode_step(x_BNW[:, 0], kv, cache)[:, None]
        rope = Rotary(self.rope_cos[:positions], self.rope_sin[:positions])
        for number, block in enumerate(self.blocks):
            one = context[number] if isinstance(context, list) else context
            dropout_BW = None if dropout_LBW is None else dropout_LBW[number]
            append = None if cache is None else partial(cache.append, number)
            x_BNW = block(x_BNW, rope, one, append, dropout_BW)
        if cache is not None:
            cache.length = positions
        return self.norm(x_BNW)

    def decode_step(
        self, x_BW: Tensor, context_kv: list[ContextKV] | None, cache: KVCache
    ) -> Tensor:
        """Return the state of the next position, (B, W), and add it to the cache.

        The same computation as `forward`, written with few direct calls on weights that are looked
        up once: each does so little work that call overhead dominates.
        """
        self.check_length(cache.length + 1)
        if not cache.steps:
            cache.steps.extend(
                build_block_step(block, number, cache) for number, block in enumerate(self.blocks)
            )
        rope = Rotary(self.rope_cos[cache.length], self.rope_sin[cache.length])
        contexts: Sequence[ContextKV | None] = context_kv or [None] * len(cache.steps)
        for step, kv in zip(cache.steps, contexts, strict=True):
            x_BW = step(x_BW, rope, kv)
        cache.length += 1
        return self.norm(x_BW)

    def sample_dropout(
        self, generators: Sequence[torch.Generator] | None, probability: float
    ) -> Tensor | None:
        """Return factors (blocks, B, W) for the outputs of the layers of each block, on the CPU, or
        None.

        The same channels are dropped at all positions of an example (Gal 2016, arXiv 1512.05287),
        so that an example's factors come from its own generator at little cost.
        """
        if generators is None or probability == 0:
            return None
        shape = (len(self.blocks), 1, self.norm.normalized_shape[0])
        u_LBW = torch.cat([torch.rand(shape, generator=one) for one in generators], dim=1)
        return (u_LBW >= probability).to(self.rope_cos.dtype) / (1 - probability)

    def check_length(self, positions: int) -> None:
        if positions > len(self.rope_cos):
            raise ValueError(
                f"A sequence of {positions} positions is longer than max_len, which is "
                f"{len(self.rope_cos)}: shorten it, or build the network with a larger max_len."
            )

    def project_context(self, context: States) -> list[ContextKV]:
        """Compute each block's keys and values of a context, for use in several forward passes."""
        return [block.project_context(context) for block in self.blocks]


class CausalBlock(Block):
    """A block whose positions attend to themselves and to earlier ones."""

    def forward(  # type: ignore[override]
        self,
        x_BNW: Tensor,
        rope: Rotary,
        context: States | ContextKV | None = None,
        append: AppendToCache | None = None,
        dropout_BW: Tensor | None = None,
    ) -> Tensor:
        """Return the states of all positions, (B, N, W). `append` adds keys and values to a cache
        and returns all of them; `dropout_BW` are factors of the outputs of the layers."""
        drop = partial(apply_dropout, dropout_BW)
        x_BNW = x_BNW + drop(self.attend(x_BNW, rope, append))
        if self.cross_attention is not None and context is not None:
            kv = self.project_context(context) if isinstance(context, States) else context
            x_BNW = x_BNW + drop(self.cross_attention(x_BNW, kv))
        return x_BNW + drop(self.feed_forward(x_BNW))

    def attend(self, x_BNW: Tensor, rope: Rotary, append: AppendToCache | None) -> Tensor:
        attention = self.attention
        qkv = split_heads(attention.to_qkv(attention.norm(x_BNW)), 3, attention.heads)
        q, k = apply_rotary_emb(attention.head_norm(qkv[:2]), rope)
        k, v = (k, qkv[2]) if append is None else append(k, qkv[2])
        return attention.out(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def apply_dropout(dropout_BW: Tensor | None, x_BNW: Tensor) -> Tensor:
    return x_BNW if dropout_BW is None else x_BNW * dropout_BW[:, None]


# ---- one position at a time

BlockStep = Callable[[Tensor, Rotary, ContextKV | None], Tensor]
"""(B, W) inputs, rotation of the position, keys and values of the context -> (B, W) outputs."""
LayerStep = Callable[[Tensor], Tensor]


def build_block_step(block: Block, number: int, cache: KVCache) -> BlockStep:
    attention = block.attention
    norm, head_norm = build_norm_step(attention.norm), build_norm_step(attention.head_norm)
    to_qkv, out = attention.to_qkv.weight, attention.out.weight
    heads, head_dim = attention.heads, attention.head_norm.normalized_shape[0]
    feed_forward, cross_attention = (
        build_feed_forward_step(block.feed_forward),
        block.cross_attention,
    )

    def attend(x_BW: Tensor, rope: Rotary) -> Tensor:
        """Attend from one new position to itself and to all cached ones."""
        qkv = F.linear(norm(x_BW), to_qkv).view(-1, 3, heads, 1, head_dim)
        q, k = apply_rotary_emb(head_norm(qkv.narrow(1, 0, 2)), rope).unbind(1)
        k, v = cache.append(number, k, qkv.select(1, 2))
        return F.linear(F.scaled_dot_product_attention(q, k, v).flatten(1), out)

    def step(x_BW: Tensor, rope: Rotary, context_kv: ContextKV | None) -> Tensor:
        x_BW = x_BW + attend(x_BW, rope)
        if cross_attention is not None and context_kv is not None:
            x_BW = x_BW + cross_attention(x_BW.unsqueeze(1), context_kv).squeeze(1)
        return x_BW + feed_forward(x_BW)

    return step


def build_feed_forward_step(layer: FeedForward) -> LayerStep:
    norm, to_inner, out = build_norm_step(layer.norm), layer.to_inner.weight, layer.out.weight

    def step(x_BW: Tensor) -> Tensor:
        value, gate = F.linear(norm(x_BW), to_inner).chunk(2, dim=-1)
        return F.linear(value * F.silu(gate), out)

    return step


def build_norm_step(norm: Norm) -> LayerStep:
    shape, weight, eps = norm.normalized_shape, norm.weight, norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, None, eps)
