"""The judge of motion: says of every patch of a clip, in time and space, how real it looks.

A patch discriminator (modalities/image/discriminator.py) with time as a third direction, as
MAGVIT-v2 judges whole clips (arXiv 2310.05737, section 3.2). Single frames are left to the judge of
images. What flickers and what drags show at different speeds, so several judges may look at a clip,
each at its own frame rate: `judge(slowed(clip, 2))`.

B examples, C channels, t, h and w patches. Clips are (B, C, T, H, W) in [-1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.modalities.image.discriminator import SLOPE, Discriminated, through
from tessera.nn.init import start


@dataclass(frozen=True, kw_only=True)
class TemporalDiscriminatorConfig:
    dim: int = 64
    """Channels after the first layer; every further layer doubles them."""
    max_channels: int = 512
    """The most channels that doubling leads to."""
    layers: int = 3
    """How often the clip is halved, in time and in space. A patch is 26, 54 or 110 pixels wide with
    2, 3 or 4 layers, and 23, 47 or 95 frames long: of most clips it sees the whole length."""
    channels: int = 3
    """Of the clips."""
    norm: Literal["group", "none"] = "group"
    """What steadies the hidden layers; batch norm would let examples see each other."""
    groups: int = 8
    """Groups of the group norm."""

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(
                f"A temporal discriminator halves the clip, so layers ({self.layers}) must be 1 or more."
            )
        unfit = [width for width in self.stage_channels if width % self.groups]
        if self.norm == "group" and unfit:
            raise ValueError(
                f"Group norm divides channels into {self.groups} equal groups, and {unfit[0]} channels do not divide "
                f"so: make dim ({self.dim}) and widest ({self.max_channels}) multiples of {self.groups}, or change groups."
            )

    @property
    def stage_channels(self) -> list[int]:
        """Of the layers: one for each halving, and one more before the logits."""
        return [min(self.dim * 2**layer, self.max_channels) for layer in range(self.layers + 1)]

    def build(self) -> TemporalDiscriminator:
        return TemporalDiscriminator(self)

    def build_norm(self, width: int) -> nn.Module:
        return nn.GroupNorm(self.groups, width) if self.norm == "group" else nn.Identity()


class Layer(nn.Module):
    """Convolution, norm, activation."""

    def __init__(self, convolution: nn.Conv3d, norm: nn.Module) -> None:
        super().__init__()
        self.convolution, self.norm = convolution, norm
        start(convolution, gain=nn.init.calculate_gain("leaky_relu", SLOPE))

    def forward(self, clip: Tensor) -> Tensor:
        return F.leaky_relu(self.norm(self.convolution(clip)), SLOPE)


def halving(inputs: int, outputs: int) -> nn.Conv3d:
    """T frames become (T + 1) // 2, so that a single one is left alone; sides are halved."""
    return nn.Conv3d(inputs, outputs, (3, 4, 4), stride=2, padding=1)


class TemporalDiscriminator(nn.Module):
    """From (B, C, T, H, W) to logits (B, 1, t, h, w), high where a patch looks real.

    The first layer is not normalised: brightness and contrast are among the things that are judged.
    """

    def __init__(self, config: TemporalDiscriminatorConfig) -> None:
        super().__init__()
        self.config = config
        *halved, last = config.stage_channels
        self.layers = nn.Sequential(Layer(halving(config.channels, halved[0]), nn.Identity()))
        for inputs, outputs in pairwise(halved):
            self.layers.append(Layer(halving(inputs, outputs), config.build_norm(outputs)))
        self.layers.append(
            Layer(nn.Conv3d(halved[-1], last, 3, padding=1), config.build_norm(last))
        )
        self.logit = nn.Conv3d(last, 1, 3, padding=1)
        start(self.logit, gain=1.0)

    def forward(self, clips: Tensor) -> Tensor:
        return self.discriminate(clips).logits

    def discriminate(self, clips: Tensor) -> Discriminated:
        smallest = 2**self.config.layers
        if (
            clips.ndim != 5
            or clips.shape[1] != self.config.channels
            or min(clips.shape[3:]) < smallest
        ):
            raise ValueError(
                f"Clips of shape {tuple(clips.shape)} were given; this discriminator judges "
                f"(B, {self.config.channels}, T, H, W) and halves it {self.config.layers} times, so H and W must be "
                f"{smallest} or more. Use larger frames or fewer layers."
            )
        return through(
            self.layers, self.logit, clips.contiguous(memory_format=torch.channels_last_3d)
        )


def slowed(clips: Tensor, factor: int) -> Tensor:
    """Every `factor`-th frame of clips (B, C, T, H, W), the first among them: the same motion at a
    lower frame rate."""
    if factor < 1:
        raise ValueError(
            f"A clip is slowed by taking every n-th frame, with n of 1 (all of them) or more, not {factor}."
        )
    return clips[:, :, ::factor]
