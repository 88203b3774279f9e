"""The Conformer (Gulati 2020, arXiv 2005.08100): a transformer whose blocks also look at their
neighbours by convolution.

SoundStorm's network (Borsos 2023, arXiv 2305.09636, section 3.1). It is called as
`nn/transformer.py`'s Transformer is, can take its place, and has its habits: positions by rotation,
norms first, no biases, parts that start as nothing. Padding is seen by nobody, neither by attention
nor by a convolution, so that a sound is the same alone and in a batch.

B batch, N places, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn import transformer
from tessera.nn.init import start
from tessera.nn.transformer import (
    ContextKV,
    FeedForward,
    LayerInput,
    Norm,
    Rotary,
    Transformer,
    linear,
    zero_init_,
)


@dataclass(frozen=True, kw_only=True)
class ConformerConfig:
    kernel: int = 5
    """Places that a convolution looks at, its own in their middle. SoundStorm has 5; 31 is usual
    where speech is recognised."""

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(
                f"A convolution looks equally far to both sides, so the kernel is odd, not {self.kernel}: use 5."
            )

    def build(self, dim: int, depth: int, heads: int, *, context: int | None = None) -> Conformer:
        return Conformer(self, dim, depth, heads, context=context)


class Conformer(Transformer):
    """`depth` blocks over N places, and a last norm. With `context`, each block also looks at
    states of that width."""

    def __init__(
        self,
        config: ConformerConfig,
        dim: int,
        depth: int,
        heads: int,
        *,
        context: int | None = None,
    ):
        super().__init__(dim, depth, heads, context=context, block=partial(Block, config))
        self.config = config


class Block(transformer.Block):
    """Half a feed-forward part, attention, convolution, and the other half (Gulati 2020, eq. 1)."""

    def __init__(self, config: ConformerConfig, dim: int, heads: int, context: int | None):
        super().__init__(dim, heads, context)
        self.feed_before = FeedForward(dim)
        self.convolution = Convolution(config.kernel, dim)

    def before(self, x: Tensor) -> LayerInput:
        return super().before(torch.add(x, self.feed_before(x), alpha=0.5))

    def attn(
        self,
        layer_input: LayerInput,
        rope: Rotary,
        mask: Tensor | None,
        context_kv: ContextKV | None,
    ) -> Tensor:
        x_BNW = super().attn(layer_input, rope, mask, context_kv)
        if mask is not None and len(mask) < len(
            x_BNW
        ):  # each example now stands there once for every context
            mask = torch.cat([mask] * (len(x_BNW) // len(mask)))
        return x_BNW + self.convolution(x_BNW, mask)

    def after(self, x: Tensor) -> Tensor:
        return torch.add(x, self.feed(x), alpha=0.5)


class Convolution(nn.Module):
    """Each channel looks at its neighbours by itself, between two mixtures of all channels (Gulati
    2020, figure 2).

    Normed by layer and not by batch: neither other examples nor padding change what a place
    becomes.
    """

    def __init__(self, kernel: int, dim: int):
        super().__init__()
        self.norm, self.inner_norm = Norm(dim), Norm(dim)
        self.to_inner = linear(dim, 2 * dim)
        # Two-dimensional, of height 1, for the sake of the channels-last layout: of 4 x 128 places
        # of width 128, with a kernel of 31, forward and backward took 1.0 ms so and 3.2 ms as
        # Conv1d.
        self.neighbours = nn.Conv2d(
            dim, dim, (1, kernel), padding=(0, kernel // 2), groups=dim, bias=False
        )
        start(self.neighbours, gain=1.0)
        self.out = zero_init_(linear(dim, dim))

    def forward(self, x_BNW: Tensor, mask: Tensor | None) -> Tensor:
        inner_BNW = F.glu(self.to_inner(self.norm(x_BNW)), dim=-1)
        if mask is not None:  # as nothing, which is what lies beyond either end
            inner_BNW = inner_BNW * mask[:, 0, 0, :, None]
        # By way of (W, kernel), so that the gradient has the strides of the weight, also along
        # sides of 1: DDP asks for that.
        weight = self.neighbours.weight.flatten(1)[:, None, None]
        inner_BW1N = inner_BNW.mT.unsqueeze(2)
        around_BW1N = F.conv2d(
            inner_BW1N, weight, padding=(0, weight.shape[3] // 2), groups=len(weight)
        )
        return self.out(F.silu(self.inner_norm(around_BW1N.squeeze(2).mT)))
