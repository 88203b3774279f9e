"""The judge of images: says of every patch how real it looks (Isola 2017, arXiv 1611.07004, section
3.2.2).

Patches and not whole images: the layout is held by the pixel loss, and what a reconstruction lacks
is texture.

B examples, C channels, h and w patches. Images are (B, C, H, W) in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.nn.init import start

SLOPE = 0.2
"""Of the leaky ReLU below zero."""


@dataclass(frozen=True, kw_only=True)
class PatchDiscriminatorConfig:
    dim: int = 64
    """Channels after the first layer; every further layer doubles them."""
    max_channels: int = 512
    """The most channels that doubling leads to."""
    layers: int = 3
    """How often the image is halved. A patch is 26, 54 or 110 pixels wide with 2, 3 or 4 layers."""
    channels: int = 3
    """Of the images."""
    norm: Literal["group", "none"] = "group"
    """What steadies the hidden layers. Batch norm is not offered: under it examples see each other,
    and four micro-batches are not one batch."""
    groups: int = 8
    """Groups of the group norm."""
    blur: bool = False
    """Smooth before halving, so that a shift by one pixel changes little (takes 1.6 times the
    arithmetic)."""

    def build(self) -> PatchDiscriminator:
        if self.layers < 1:
            raise ValueError(
                f"A patch discriminator halves the image, so layers ({self.layers}) must be 1 or more."
            )
        unfit = [width for width in self.stage_channels() if width % self.groups]
        if self.norm == "group" and unfit:
            raise ValueError(
                f"Group norm divides channels into {self.groups} equal groups, and {unfit[0]} channels do not divide "
                f"so: make dim ({self.dim}) and widest ({self.max_channels}) multiples of {self.groups}, or change groups."
            )
        return PatchDiscriminator(self)

    def build_norm(self, width: int) -> nn.Module:
        return nn.GroupNorm(self.groups, width) if self.norm == "group" else nn.Identity()

    def stage_channels(self) -> list[int]:
        """Of the layers: one for each halving, and one more before the logits."""
        return [min(self.dim * 2**layer, self.max_channels) for layer in range(self.layers + 1)]


Halved = Literal["stride", "blur", "nothing"]


class Layer(nn.Module):
    """Convolution, norm, activation; halves the image by its stride, or by blurring and leaving out
    every other pixel.

    The blur comes last, as in Zhang 2019 (arXiv 1904.11486): blurring what comes in would take from
    the first layer the single pixels that betray a decoder.
    """

    def __init__(self, inputs: int, outputs: int, norm: nn.Module, halved_by: Halved) -> None:
        super().__init__()
        if halved_by == "stride":
            self.convolution = nn.Conv2d(inputs, outputs, 4, stride=2, padding=1)
        else:
            self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = norm
        self.pool = BlurPool(outputs) if halved_by == "blur" else nn.Identity()
        start(self.convolution, gain=nn.init.calculate_gain("leaky_relu", SLOPE))

    def forward(self, image: Tensor) -> Tensor:
        return self.pool(F.leaky_relu(self.norm(self.convolution(image)), SLOPE))


class BlurPool(nn.Module):
    """Smooths each channel with [1 3 3 1] both ways, and keeps every other pixel."""

    kernel: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        bell = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
        self.register_buffer(
            "kernel", torch.outer(bell, bell).expand(channels, 1, 4, 4).clone(), persistent=False
        )

    def forward(self, image: Tensor) -> Tensor:
        return F.conv2d(image, self.kernel, stride=2, padding=1, groups=len(self.kernel))


@dataclass
class Discriminated:
    logits: Tensor
    """High where it looks (or sounds) real."""
    features: list[Tensor]
    """(B, C, ...) of every layer, in an order that is always the same: for feature matching."""


class PatchDiscriminator(nn.Module):
    """From (B, C, H, W) to logits (B, 1, h, w), high where a patch looks real: H and W halved
    `layers` times.

    The first layer is not normalised: brightness and contrast are among the things that are judged.
    """

    def __init__(self, config: PatchDiscriminatorConfig) -> None:
        super().__init__()
        self.config = config
        first, *halved, last = config.stage_channels()
        halved_by: Halved = "blur" if config.blur else "stride"
        self.layers = nn.Sequential(Layer(config.channels, first, nn.Identity(), halved_by))
        for inputs, outputs in pairwise([first, *halved]):
            self.layers.append(Layer(inputs, outputs, config.build_norm(outputs), halved_by))
        self.layers.append(Layer([first, *halved][-1], last, config.build_norm(last), "nothing"))
        self.logit = nn.Conv2d(last, 1, 3, padding=1)
        start(self.logit, gain=1.0)

    def forward(self, images: Tensor) -> Tensor:
        return self.discriminate(images).logits

    def discriminate(self, images: Tensor) -> Discriminated:
        smallest = 2**self.config.layers
        if (
            images.ndim != 4
            or images.shape[1] != self.config.channels
            or min(images.shape[2:]) < smallest
        ):
            raise ValueError(
                f"Images of shape {tuple(images.shape)} were given; this discriminator judges "
                f"(B, {self.config.channels}, H, W) and halves it {self.config.layers} times, so H and W must be "
                f"{smallest} or more. Use larger images or fewer layers."
            )
        return through(self.layers, self.logit, images)


def through(layers: Iterable[nn.Module], logit: nn.Module, seen: Tensor) -> Discriminated:
    """One layer after the other, and then the logits."""
    features = []
    for layer in layers:
        seen = layer(seen)
        features.append(seen)
    return Discriminated(logit(seen), features)
