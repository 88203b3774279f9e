"""VQGAN: pictures as a small grid of symbols, and back (Esser et al. 2021, arXiv 2012.09841; Muse's
first stage).

A convolutional encoder halves the picture `layers` times, a quantizer names each place of the grid
with one of `V` symbols, and a decoder rebuilds the picture from the names. Pictures are (B, C, H,
W) in [-1, 1]; codes are (B, h, w) with h = H / stride; residual quantizers add a last dimension of
levels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.precision import to_fp32
from tessera.nn.quantize import FSQConfig, LFQConfig, Quantizer, ResidualConfig, VQConfig

HEADS = 4
"""Of attention."""


@dataclass(frozen=True, kw_only=True)
class VQGANConfig:
    channels: int = 3
    """Colour channels of the pictures."""
    dim: int = 32
    """Width at full resolution; it doubles with each halving, up to `max_channels`."""
    max_channels: int = 256
    late: int = 0
    """Halvings before the width begins to double: at dim 32, widest 128 and 3 layers, 1 saves 44 %
    of the arithmetic."""
    layers: int = 3
    """How often the picture is halved: one symbol stands for a square of 2^layers pixels."""
    blocks: tuple[int, ...] = (0, 1, 1)
    """Residual blocks of the decoder after each halving; most cost lies in the first, most capacity
    in the last."""
    encoder_blocks: tuple[int, ...] | None = None
    """Those of the encoder; None: as many. With none at all a symbol tells of its own surroundings
    only, and a generator foretells it more easily."""
    attention: bool = False
    """Self-attention over the grid at the bottleneck."""
    quantizer: FSQConfig | LFQConfig | VQConfig | ResidualConfig = field(default_factory=FSQConfig)

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(
                f"An image tokenizer halves its pictures at least once, but layers is {self.layers}."
            )
        for name, blocks in (("blocks", self.blocks), ("encoder_blocks", self.downward_blocks)):
            if len(blocks) != self.layers:
                raise ValueError(
                    f"`{name}` says how many residual blocks follow each of the {self.layers} halvings, so it needs "
                    f"{self.layers} numbers, but it has {len(blocks)}."
                )
        for name in ("channels", "dim", "widest"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"A picture and every layer have at least 1 channel, but {name} is {getattr(self, name)}."
                )
        deepest = self.stage_channels[-1]
        if self.attention and deepest % HEADS:
            below = deepest // HEADS * HEADS
            raise ValueError(
                f"The {deepest} channels at the bottleneck cannot be shared by {HEADS} heads of attention: use a `max_channels` "
                f"of {f'{below} or ' if below else ''}{below + HEADS}, or no attention."
            )

    @property
    def stage_channels(self) -> list[int]:
        """Channels at full resolution and after each halving."""
        return [
            min(self.dim * 2 ** max(0, level - self.late), self.max_channels)
            for level in range(self.layers + 1)
        ]

    @property
    def downward_blocks(self) -> tuple[int, ...]:
        return self.blocks if self.encoder_blocks is None else self.encoder_blocks

    @property
    def stride(self) -> int:
        """Pixels along a side of the square that one symbol stands for."""
        return 2**self.layers

    def validate_data(self, data: Any) -> None:
        """Refuses data whose pictures this network cannot take."""
        self.refuse_size(data.size)

    def grid(self, data: Any) -> tuple[int, ...]:
        """The sides of the grid of symbols that such pictures become."""
        return (data.size // self.stride, data.size // self.stride)

    def refuse_size(self, size: int) -> None:
        """A letter if pictures of this size do not fit the grid."""
        if size % self.stride:
            below = size // self.stride * self.stride
            works = f"{below} or {below + self.stride}" if below else f"{self.stride}"
            raise ValueError(
                f"Pictures of {size} x {size} do not fit: this tokenizer halves them {self.layers} times, so the size must be "
                f"a multiple of {self.stride}. Use {works}."
            )

    def build(self) -> VQGAN:
        return VQGAN(self)


@dataclass
class Reconstruction:
    output: Tensor
    """The picture rebuilt from its symbols, (B, C, H, W)."""
    codes: Tensor
    """The symbols, (B, h, w)."""
    penalties: dict[str, Tensor]
    """What the quantizer asks to be added to the loss, weighted."""


class VQGAN(nn.Module):
    def __init__(self, config: VQGANConfig):
        super().__init__()
        self.config = config
        self.encoder = encoder(config)
        self.quantizer: Quantizer = config.quantizer.build(config.stage_channels[-1])
        self.decoder = decoder(config)
        self.to(
            memory_format=torch.channels_last
        )  # a fifth faster on a CPU, and what the norm wants

    @property
    def vocab_size(self) -> int:
        return self.quantizer.vocab_size

    @property
    def last_layer(self) -> nn.Parameter:
        """Where the strengths of two losses are compared (Esser 2021, eq. 7)."""
        return self.decoder[-1].weight  # type: ignore[return-value]

    def forward(self, pixels: Tensor, *, num_quantizers_B: Tensor | None = None) -> Reconstruction:
        quantized = self.quantizer(self.latent(pixels), num_quantizers_B=num_quantizers_B)
        return Reconstruction(self.picture(quantized.latent), quantized.codes, quantized.penalties)

    def encode(self, pixels: Tensor) -> Tensor:
        """Pictures to symbols."""
        return self.quantizer(self.latent(pixels)).codes

    def decode(self, codes: Tensor) -> Tensor:
        """Symbols to pictures."""
        return self.picture(self.quantizer.decode(codes))

    def latent(self, pixels: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, h, w, D), before quantization."""
        self.config.refuse_size(pixels.shape[-1])
        self.config.refuse_size(pixels.shape[-2])
        return self.encoder(pixels.contiguous(memory_format=torch.channels_last)).movedim(1, -1)

    def batch_stats(self, pixels: Tensor, *, num_quantizers_B: Tensor | None = None) -> Tensor:
        """Their share of what the quantizer expects; see `Quantizer.batch_stats`."""
        return self.quantizer.batch_stats(self.latent(pixels), num_quantizers_B=num_quantizers_B)

    def picture(self, latent: Tensor) -> Tensor:
        """(B, h, w, D) -> (B, C, H, W)."""
        return to_fp32(self.decoder(latent.movedim(-1, 1)))


def encoder(config: VQGANConfig) -> nn.Sequential:
    channels = config.stage_channels
    layers: list[nn.Module] = [nn.Conv2d(config.channels, channels[0], 5, padding=2)]
    for level in range(config.layers):
        layers += [
            nn.SiLU(),
            nn.Conv2d(channels[level], channels[level + 1], 4, stride=2, padding=1),
        ]
        layers += [Residual(channels[level + 1]) for _ in range(config.downward_blocks[level])]
    if config.attention:
        layers.append(Attention(channels[-1]))
    return nn.Sequential(
        *layers, Norm(channels[-1]), nn.SiLU(), nn.Conv2d(channels[-1], channels[-1], 1)
    )


def decoder(config: VQGANConfig) -> nn.Sequential:
    channels = config.stage_channels
    layers: list[nn.Module] = [nn.Conv2d(channels[-1], channels[-1], 3, padding=1)]
    if config.attention:
        layers.append(Attention(channels[-1]))
    for level in reversed(range(config.layers)):
        layers += [Residual(channels[level + 1]) for _ in range(config.blocks[level])]
        layers += [
            nn.ConvTranspose2d(channels[level + 1], channels[level], 4, stride=2, padding=1),
            nn.SiLU(),
        ]
    return nn.Sequential(*layers, nn.Conv2d(channels[0], config.channels, 3, padding=1))


class Norm(nn.LayerNorm):
    """Over the channels of each place by itself: neither other examples nor other places change
    what a symbol says.

    A norm over the whole picture makes the symbols of a flat background depend on what stands in
    the foreground, and nobody can foretell them. Of 80 plain toys, rebuilt after 1,500 steps, a
    judge recognised 91 % with such a norm and 100 % with this one, at the same PSNR. In the
    channels-last layout torch's own kernel does it.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def zero_init_(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)


class Residual(nn.Module):
    """x + f(x), where f starts as nothing, so that a deep net starts as a shallow one."""

    def __init__(self, width: int):
        super().__init__()
        self.change = nn.Sequential(
            Norm(width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1),
            Norm(width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1),
        )  # fmt: skip
        zero_init_(self.change[-1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(x)


class Attention(nn.Module):
    """Every place of the grid looks at every other."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = Norm(width)
        self.query_key_value = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)
        zero_init_(self.out)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, high, to_fp32 = x.shape
        q, k, v = (
            self.query_key_value(self.norm(x))
            .view(batch, 3, HEADS, width // HEADS, high * to_fp32)
            .mT.unbind(1)
        )
        seen = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(seen.mT.reshape(batch, width, high, to_fp32))
