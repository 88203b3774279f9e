"""The Conformer (Gulati 2020, arXiv 2005.08100): a transformer whose blocks also have convolutions.

It is the backbone of SoundStorm (Borsos 2023, arXiv 2305.09636, section 3.1). It has the interface
and the conventions of the Transformer in `nn/transformer.py` and can replace it: rotary positions,
pre-norm blocks, no biases, zero-initialized output projections. Padding is excluded from attention
and from the convolutions, so that an example has the same states alone and in a padded batch.

B batch, N positions, W model dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn import transformer
from tessera.nn.init import init_fan_in_, zero_init_
from tessera.nn.transformer import (
    ContextKV,
    FeedForward,
    LayerInput,
    Norm,
    Rotary,
    Transformer,
    linear,
)


@dataclass(frozen=True, kw_only=True)
class ConformerConfig:
    kernel: int = 5
    """Kernel size of the convolutions in positions, an odd number. SoundStorm has 5; 31 is common
    in speech recognition."""

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(
                f"kernel must be odd and at least 1, so that it is centered, got {self.kernel}: "
                "use 5."
            )

    def build(
        self, dim: int, depth: int, heads: int, *, context_dim: int | None = None
    ) -> Conformer:
        return Conformer(self, dim, depth, heads, context_dim=context_dim)


class Conformer(Transformer):
    """`depth` Conformer blocks and a final norm.

    With `context_dim`, every block also has cross-attention to states of that dimension.
    """

    def __init__(
        self,
        config: ConformerConfig,
        dim: int,
        depth: int,
        heads: int,
        *,
        context_dim: int | None = None,
    ):
        super().__init__(dim, depth, heads, context_dim=context_dim, block=partial(Block, config))
        self.config = config


class Block(transformer.Block):
    """Half a feed-forward layer, attention, convolution, and half another (Gulati 2020, eq. 1)."""

    def __init__(self, config: ConformerConfig, dim: int, heads: int, context_dim: int | None):
        super().__init__(dim, heads, context_dim)
        self.first_feed_forward = FeedForward(dim)
        self.convolution = Convolution(config.kernel, dim)

    def pre_attn(self, x: Tensor) -> LayerInput:
        return super().pre_attn(torch.add(x, self.first_feed_forward(x), alpha=0.5))

    def attn(
        self,
        layer_input: LayerInput,
        rope: Rotary,
        mask: Tensor | None,
        context_kv: ContextKV | None,
    ) -> Tensor:
        x_BNW = super().attn(layer_input, rope, mask, context_kv)
        if mask is not None and len(mask) < len(x_BNW):  # repeated for each context
            mask = torch.cat([mask] * (len(x_BNW) // len(mask)))
        return x_BNW + self.convolution(x_BNW, mask)

    def mlp(self, x: Tensor) -> Tensor:
        return torch.add(x, self.feed_forward(x), alpha=0.5)


class ConvolutionBlock(nn.Module):
    """A convolution over positions and a feed-forward layer, each added to its input."""

    def __init__(self, kernel: int, dim: int):
        super().__init__()
        self.convolution = Convolution(kernel, dim)
        self.feed_forward = FeedForward(dim)

    def forward(self, x_BNW: Tensor, mask_BN: Tensor) -> Tensor:
        x_BNW = x_BNW + self.convolution(x_BNW, mask_BN[:, None, None, :])
        return x_BNW + self.feed_forward(x_BNW)


class Convolution(nn.Module):
    """A depthwise convolution between two pointwise ones (Gulati 2020, figure 2).

    With layer norm instead of batch norm: neither other examples nor padding change a position.
    """

    def __init__(self, kernel: int, dim: int):
        super().__init__()
        self.norm, self.inner_norm = Norm(dim), Norm(dim)
        self.to_inner = linear(dim, 2 * dim)
        # Conv2d of height 1, for its channels-last kernels: with 4 x 128 positions, dim 128 and a
        # kernel of 31, forward and backward took 1.0 ms, and 3.2 ms with Conv1d.
        self.depthwise = nn.Conv2d(
            dim, dim, (1, kernel), padding=(0, kernel // 2), groups=dim, bias=False
        )
        init_fan_in_(self.depthwise, gain=1.0)
        self.out = zero_init_(linear(dim, dim))

    def forward(self, x_BNW: Tensor, mask: Tensor | None) -> Tensor:
        inner_BNW = F.glu(self.to_inner(self.norm(x_BNW)), dim=-1)
        if mask is not None:  # zeros, like the padding of the convolution
            inner_BNW = inner_BNW * mask[:, 0, 0, :, None]
        # Reshaped by way of (W, kernel), so that the gradient has the strides of the weight, along
        # dimensions of size 1 too: DDP requires that.
        weight = self.depthwise.weight.flatten(1)[:, None, None]
        inner_BW1N = inner_BNW.mT.unsqueeze(2)
        mixed_BW1N = F.conv2d(
            inner_BW1N, weight, padding=(0, weight.shape[3] // 2), groups=len(weight)
        )
        return self.out(F.silu(self.inner_norm(mixed_BW1N.squeeze(2).mT)))
