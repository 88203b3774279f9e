"""A bidirectional transformer, for masked models and for text encoders.

Pre-norm blocks (Xiong 2020, arXiv 2002.04745), normalized queries and keys (Henry 2020,
2010.04245), rotary position embeddings along any number of axes (Su 2021, 2104.09864), a gated
feed-forward layer (Shazeer 2020, 2002.05202), no biases, and zero-initialized output projections.
Attention is `scaled_dot_product_attention`, which selects the fastest available kernel.

B batch, N positions, L context positions, W model dimension, H heads, D head dimension, A axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.init import zero_init_

ROPE_BASE = 1000.0
"""The base of the rotary frequencies. The slowest one makes about one turn in this many positions:
grids here have hundreds of positions along an axis, not thousands."""


@dataclass
class States:
    """A padded batch of vector sequences, such as the output of a text encoder."""

    values: Tensor
    """(B, L, W)."""
    mask: Tensor
    """(B, L), True at valid positions."""
    has_context_idx: Tensor | None = None
    """Indices of the examples with at least one valid position; None if all have one, or if that
    was not computed."""

    def select(self, rows: Tensor) -> States:
        """Return the states of some examples."""
        assert self.has_context_idx is None
        return States(self.values[rows], self.mask[rows])


@dataclass
class Rotary:
    """Cosines and sines of the rotation angles, (N, D) each.

    Element i of a head is paired with element i + D / 2. The sines of the first half are negative.
    """

    cos: Tensor
    sin: Tensor


def rope_cache(positions_NA: Tensor, head_dim: int) -> Rotary:
    """Compute the rotations for given coordinates.

    The D / 2 pairs of a head are divided among the axes; if they cannot be divided evenly, the
    first axes get one more.
    """
    axes, pairs = positions_NA.shape[1], head_dim // 2
    shares = [pairs // axes + (axis < pairs % axes) for axis in range(axes)]
    angles = [
        positions_NA[:, axis, None]
        * ROPE_BASE ** -(torch.arange(share, device=positions_NA.device) / max(1, share))
        for axis, share in enumerate(shares)
    ]
    angles_NP = torch.cat(angles, dim=1)
    return Rotary(
        torch.cat([angles_NP, angles_NP], dim=1).cos(),
        torch.cat([-angles_NP, angles_NP], dim=1).sin(),
    )


def apply_rotary_emb(x: Tensor, rope: Rotary) -> Tensor:
    """Rotate queries or keys, (..., N, D)."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * rope.cos, swapped, rope.sin)


def grid_positions(grid: tuple[int, ...]) -> Tensor:
    """Return the coordinates of all cells of a grid in row-major order, (N, A)."""
    return torch.cartesian_prod(
        *(torch.arange(side, dtype=torch.float32) for side in grid)
    ).reshape(-1, len(grid))


class Transformer(nn.Module):
    """`depth` blocks and a final norm.

    With `context_dim`, every block also has cross-attention to states of that dimension.
    """

    blocks: Sequence[Block]

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        *,
        context_dim: int | None = None,
        block: Callable[[int, int, int | None], Block] | None = None,
    ):
        super().__init__()
        if dim % heads or dim // heads % 2:
            valid_dim = dim // (2 * heads) * 2 * heads or 2 * heads
            raise ValueError(
                f"A dim of {dim} cannot be split into {heads} heads of even size: use a dim of "
                f"{valid_dim} or {valid_dim + 2 * heads}, or another number of heads."
            )
        self.dim = dim
        self.head_dim = dim // heads
        self.blocks = nn.ModuleList(  # type: ignore[assignment]
            [(block or Block)(dim, heads, context_dim) for _ in range(depth)]
        )
        self.norm = Norm(dim)
        for module in self.modules():
            if isinstance(module, nn.Linear):  # the mark that the Muon optimizer selects by
                module.weight.use_muon = True  # type: ignore[attr-defined]

    def forward(
        self,
        x_BNW: Tensor,
        positions_NA: Tensor | Rotary | None = None,
        mask_BN: Tensor | None = None,
        context: States | list[ContextKV] | None = None,
    ) -> Tensor:
        """Return the final states, (B, N, W).

        Args:
            x_BNW: input states.
            positions_NA: coordinates of the positions, or precomputed rotations; 0, 1, 2, ... if
                None.
            mask_BN: True at valid positions; no other position is attended to.
            context: states for cross-attention, or their keys and values from `project_context`. A
                context may have a multiple of B rows: each example is then processed once per
                context, and the result has as many rows as the context.
        """
        return self.hidden_states(x_BNW, positions_NA, mask_BN, context)[-1]

    def hidden_states(
        self,
        x_BNW: Tensor,
        positions_NA: Tensor | Rotary | None = None,
        mask_BN: Tensor | None = None,
        context: States | list[ContextKV] | None = None,
        at: Sequence[int] = (),
    ) -> list[Tensor]:
        """Return the states after each number of blocks in `at`, and last the final states.

        The intermediate states are not normalized; the final ones are.
        """
        if positions_NA is None:
            positions_NA = torch.arange(x_BNW.shape[1], device=x_BNW.device, dtype=torch.float32)[
                :, None
            ]
        rope = (
            positions_NA
            if isinstance(positions_NA, Rotary)
            else rope_cache(positions_NA.to(x_BNW.dtype), self.head_dim)
        )
        return self.forward_blocks(x_BNW, rope, mask_BN, context, at)

    def first_qkv(self, x: Tensor) -> LayerInput:
        """Compute the input of the first attention layer, which is independent per position."""
        return self.blocks[0].pre_attn(x)

    def forward_blocks(
        self,
        x: Tensor | LayerInput,
        rope: Rotary,
        mask_BN: Tensor | None = None,
        context: States | list[ContextKV] | None = None,
        at: Sequence[int] = (),
        select_P: Tensor | None = None,
    ) -> list[Tensor]:
        """Run all blocks on states or on the result of `first_qkv`, and return the result of
        `hidden_states`.

        With `select_P`, indices into the flattened (B x N) positions, the final states are those of
        the selected positions only, (P, W): the feed-forward layer of the last block is skipped for
        all others. (Restricting the queries of the last attention layer as well was measured to be
        slower: selecting their rows took longer than it saved.)
        """
        outputs: list[Tensor] = []
        mask = mask_BN[:, None, None, :] if mask_BN is not None else None
        last = len(self.blocks)
        states = x.x if isinstance(x, LayerInput) else x
        for number, block in enumerate(self.blocks, start=1):
            if mask is not None and len(mask) < len(states):  # repeated for each context
                mask = torch.cat([mask] * (len(states) // len(mask)))
            x = states = block(
                x,
                rope,
                mask,
                context[number - 1] if isinstance(context, list) else context,
                select_P if number == last else None,
            )
            if number in at:
                outputs.append(states)
        return [*outputs, self.norm(states)]

    def project_context(self, context: States) -> list[ContextKV]:
        """Compute each block's keys and values of a context, for use in several forward passes."""
        return [block.project_context(context) for block in self.blocks]


@dataclass
class LayerInput:
    """The input of an attention layer: states, (..., W), and their projections, (..., 3 W)."""

    x: Tensor
    qkv: Tensor


class Block(nn.Module):
    """Self-attention, optional cross-attention, and a feed-forward layer, in three steps.

    `pre_attn` and `mlp` act on each position independently; only `attn` mixes positions.
    """

    is_block = True
    """Whether --shard and --checkpoint-activations treat such modules one by one."""

    def __init__(self, dim: int, heads: int, context_dim: int | None):
        super().__init__()
        self.attention = SelfAttention(dim, heads)
        self.cross_attention = (
            CrossAttention(dim, heads, context_dim) if context_dim is not None else None
        )
        self.feed_forward = FeedForward(dim)

    def forward(
        self,
        x: Tensor | LayerInput,
        rope: Rotary,
        mask: Tensor | None = None,
        context: States | ContextKV | None = None,
        select_P: Tensor | None = None,
    ) -> Tensor:
        """Return the states after this block: of all positions, or of the selected ones, (P, W)."""
        layer_input = x if isinstance(x, LayerInput) else self.pre_attn(x)
        kv = self.project_context(context) if isinstance(context, States) else context
        states = self.attn(layer_input, rope, mask, kv)
        if select_P is not None:
            states = states.flatten(0, 1).index_select(0, select_P)
        return self.mlp(states)

    def pre_attn(self, x: Tensor) -> LayerInput:
        return LayerInput(x, self.attention.project_qkv(x))

    def attn(
        self,
        layer_input: LayerInput,
        rope: Rotary,
        mask: Tensor | None,
        context_kv: ContextKV | None,
    ) -> Tensor:
        x = layer_input.x + self.attention(layer_input.qkv, rope, mask)
        if self.cross_attention is not None:
            if context_kv is None:
                raise ValueError(
                    "This transformer has cross-attention, but got no context: pass `context`."
                )
            if context_kv.batch_size > len(x):  # several contexts per example: repeat from here on
                x = torch.cat([x] * (context_kv.batch_size // len(x)))
            x = x + self.cross_attention(x, context_kv)
        return x

    def mlp(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(x)

    def project_context(self, context: States) -> ContextKV:
        if self.cross_attention is None:
            raise ValueError(
                "Got a context, but this transformer has no cross-attention: build it with "
                "`context_dim`, or leave the context out."
            )
        return self.cross_attention.project_context(context)


class SelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = Norm(dim)
        self.to_qkv = linear(dim, 3 * dim)
        # One norm for queries and keys: only the product of their scales matters.
        self.head_norm = Norm(dim // heads)
        self.out = zero_init_(linear(dim, dim))

    def project_qkv(self, x: Tensor) -> Tensor:
        """Project states to queries, keys and values, (..., W) -> (..., 3 W)."""
        return self.to_qkv(self.norm(x))

    def forward(self, qkv_BN3W: Tensor, rope: Rotary, mask: Tensor | None) -> Tensor:
        qkv = split_heads(qkv_BN3W, 3, self.heads)
        q, k = apply_rotary_emb(self.head_norm(qkv[:2]), rope)
        return self.out(merge_heads(F.scaled_dot_product_attention(q, k, qkv[2], attn_mask=mask)))


@dataclass
class ContextKV:
    """Keys and values of a context for one block, (B, H, L, D), computed once and reused.

    `mask` is added to the attention scores, (B, 1, 1, L): 0 at valid positions, -inf elsewhere.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor
    null_context: NullContext | None = None
    """Set if the tensors hold only the examples that have a context; None if they hold all."""

    @property
    def batch_size(self) -> int:
        return len(self.keys) if self.null_context is None else self.null_context.batch_size

    def select(self, rows: Tensor) -> ContextKV:
        """Return the context of some examples; all must have one."""
        assert self.null_context is None
        return ContextKV(self.keys[rows], self.values[rows], self.mask[rows])

    def first(self, count: int) -> ContextKV:
        """Return the context of the first `count` examples."""
        if self.null_context is None:
            return ContextKV(self.keys[:count], self.values[:count], self.mask[:count])
        null = self.null_context
        index = null.has_context_idx[null.has_context_idx < count]
        kept = ContextKV(
            self.keys[: len(index)], self.values[: len(index)], self.mask[: len(index)]
        )
        if len(index) == count:
            return kept
        return replace(kept, null_context=replace(null, has_context_idx=index, batch_size=count))


@dataclass
class NullContext:
    """What a batch needs in which some examples have no context but the learned null position."""

    has_context_idx: Tensor
    """Indices of the examples that have a context."""
    batch_size: int
    """Number of all examples."""
    output: Tensor
    """(W,): the cross-attention output of the others. It does not depend on their queries."""


class CrossAttention(nn.Module):
    """Attention to a context, to which a learned null position is always prepended.

    With it an empty context leaves something to attend to.
    """

    def __init__(self, dim: int, heads: int, context_dim: int):
        super().__init__()
        self.heads = heads
        self.norm = Norm(dim)
        self.context_norm = Norm(context_dim)
        self.to_q = linear(dim, dim)
        self.to_kv = linear(context_dim, 2 * dim)
        self.query_norm, self.key_norm = Norm(dim // heads), Norm(dim // heads)
        self.null_kv = nn.Parameter(torch.randn(2, heads, 1, dim // heads))
        self.out = zero_init_(linear(dim, dim))

    def project_context(self, context: States) -> ContextKV:
        """Compute keys and values, only for the examples that have a context if these are given."""
        index = context.has_context_idx
        if index is None or len(index) == len(context.mask):
            return self.project_kv(context)
        kept = self.project_kv(
            States(context.values.index_select(0, index), context.mask.index_select(0, index))
        )
        null_output = self.out(self.null_kv[1].flatten())
        return replace(kept, null_context=NullContext(index, len(context.mask), null_output))

    def project_kv(self, context: States) -> ContextKV:
        keys, values = split_heads(self.to_kv(self.context_norm(context.values)), 2, self.heads)
        null_key, null_value = (
            self.null_kv.to(keys.dtype).unsqueeze(1).expand(2, keys.shape[0], -1, -1, -1)
        )
        keys = torch.cat([null_key, keys], dim=2)
        valid = F.pad(context.mask, (1, 0), value=True)
        mask = torch.zeros(valid.shape, dtype=keys.dtype, device=valid.device).masked_fill(
            ~valid, -math.inf
        )
        return ContextKV(
            self.key_norm(keys), torch.cat([null_value, values], dim=2), mask[:, None, None, :]
        )

    def forward(self, x_BNW: Tensor, context_kv: ContextKV) -> Tensor:
        """Attend to the context; examples without one get a constant.

        Under guidance these are half of all examples, and they take no computation here.
        """
        null = context_kv.null_context
        if null is None:
            return self.cross_attend(x_BNW, context_kv)
        # Also with zero rows: DDP waits for a gradient of every parameter.
        attended = self.cross_attend(x_BNW.index_select(0, null.has_context_idx), context_kv)
        return null.output.expand_as(x_BNW).index_copy(0, null.has_context_idx, attended)

    def cross_attend(self, x_BNW: Tensor, context_kv: ContextKV) -> Tensor:
        [q] = split_heads(self.to_q(self.norm(x_BNW)), 1, self.heads)
        attended = F.scaled_dot_product_attention(
            self.query_norm(q), context_kv.keys, context_kv.values, attn_mask=context_kv.mask
        )
        return self.out(merge_heads(attended))


class FeedForward(nn.Module):
    """SwiGLU with an inner size of 8/3 of the model dimension, rounded up to a multiple of 16.

    It costs as much as an ungated layer with an inner size of four times the model dimension.
    `inner` is another inner size.
    """

    def __init__(self, dim: int, inner: int | None = None):
        super().__init__()
        inner = inner or (8 * dim // 3 + 15) // 16 * 16
        self.norm = Norm(dim)
        self.to_inner = linear(dim, 2 * inner)
        self.out = zero_init_(linear(inner, dim))

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.to_inner(self.norm(x)).chunk(2, dim=-1)
        return self.out(value * F.silu(gate))


class Norm(nn.LayerNorm):
    """Layer norm without a bias.

    An RMS norm would serve as well, but torch has no fused backward for it on CPUs, where it takes
    three times as long.
    """

    def __init__(self, dim: int):
        super().__init__(dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.layer_norm(x, self.normalized_shape, self.weight, eps=self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Build a linear layer without a bias whose output has the scale of its input."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def split_heads(x_BNW: Tensor, parts: int, heads: int) -> Tensor:
    """(B, N, parts x W) -> (parts, B, H, N, D)."""
    batch, positions, dim = x_BNW.shape
    return x_BNW.view(batch, positions, parts, heads, dim // parts // heads).permute(2, 0, 3, 1, 4)


def merge_heads(x_BHND: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, W)."""
    return x_BHND.transpose(1, 2).flatten(2)
