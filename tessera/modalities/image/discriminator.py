"""The patch discriminator of images (PatchGAN; Isola 2017, arXiv 1611.07004, section 3.2.2).

It classifies patches rather than whole images: the pixel loss already preserves the layout, and
what reconstructions lack is texture.

B examples, C channels, h and w patches. Images are (B, C, H, W) in [-1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.nn.discriminator import LEAKY_SLOPE, DiscriminatorOutput, run_layers
from tessera.nn.init import init_fan_in_


@dataclass(frozen=True, kw_only=True)
class PatchDiscriminatorConfig:
    dim: int = 64
    """Channels after the first layer; each further layer doubles them."""
    max_channels: int = 512
    """The maximum number of channels."""
    layers: int = 3
    """The number of downsamplings by two. A patch is 26, 54 or 110 pixels wide with 2, 3 or 4."""
    channels: int = 3
    """Channels of the images."""
    norm: Literal["group", "none"] = "group"
    """The normalization of the hidden layers. Batch norm is not available: it would make examples
    depend on each other, and four micro-batches would differ from one batch."""
    groups: int = 8
    """The number of groups of the group norm."""
    blur: bool = False
    """Blur before downsampling, which reduces the effect of shifts by one pixel, for 1.6 times the
    arithmetic."""

    def build(self) -> PatchDiscriminator:
        """Build the network, or raise a ValueError if the settings contradict each other."""
        if self.layers < 1:
            raise ValueError(f"layers must be at least 1, got {self.layers}.")
        invalid = [channels for channels in self.stage_channels if channels % self.groups]
        if self.norm == "group" and invalid:
            raise ValueError(
                f"{invalid[0]} channels are not divisible into the {self.groups} groups of the "
                f"group norm: make dim ({self.dim}) and max_channels ({self.max_channels}) "
                f"multiples of {self.groups}, or change groups."
            )
        return PatchDiscriminator(self)

    def build_norm(self, channels: int) -> nn.Module:
        """Build the normalization of one layer."""
        return nn.GroupNorm(self.groups, channels) if self.norm == "group" else nn.Identity()

    @property
    def stage_channels(self) -> list[int]:
        """Channels after each downsampling, and after one more layer before the logits."""
        return [min(self.dim * 2**layer, self.max_channels) for layer in range(self.layers + 1)]


Downsampling = Literal["stride", "blur", "none"]


class Layer(nn.Module):
    """Convolution, norm and activation, with downsampling by a stride or by a blur pool.

    The blur comes last, as in Zhang 2019 (arXiv 1904.11486): blurring the input would remove the
    single-pixel artefacts of the decoder before the first layer.
    """

    def __init__(
        self, inputs: int, outputs: int, norm: nn.Module, downsampling: Downsampling
    ) -> None:
        super().__init__()
        if downsampling == "stride":
            self.convolution = nn.Conv2d(inputs, outputs, 4, stride=2, padding=1)
        else:
            self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = norm
        self.pool = BlurPool(outputs) if downsampling == "blur" else nn.Identity()
        init_fan_in_(self.convolution, gain=nn.init.calculate_gain("leaky_relu", LEAKY_SLOPE))

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(F.leaky_relu(self.norm(self.convolution(x)), LEAKY_SLOPE))


class BlurPool(nn.Module):
    """Filter each channel with [1 3 3 1] in both directions and keep every second pixel."""

    kernel: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
        self.register_buffer(
            "kernel", torch.outer(taps, taps).expand(channels, 1, 4, 4).clone(), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, stride=2, padding=1, groups=len(self.kernel))


class PatchDiscriminator(nn.Module):
    """Map images (B, C, H, W) to logits (B, 1, h, w), high for patches classified as real.

    h = H / 2^layers and w = W / 2^layers. The first layer is not normalized, so that brightness and
    contrast remain visible to the network.
    """

    def __init__(self, config: PatchDiscriminatorConfig) -> None:
        super().__init__()
        self.config = config
        *channels, last = config.stage_channels
        downsampling: Downsampling = "blur" if config.blur else "stride"
        self.layers = nn.Sequential(
            Layer(config.channels, channels[0], nn.Identity(), downsampling)
        )
        for inputs, outputs in pairwise(channels):
            self.layers.append(Layer(inputs, outputs, config.build_norm(outputs), downsampling))
        self.layers.append(Layer(channels[-1], last, config.build_norm(last), "none"))
        self.logit = nn.Conv2d(last, 1, 3, padding=1)
        init_fan_in_(self.logit, gain=1.0)

    def forward(self, images: Tensor) -> Tensor:
        return self.discriminate(images).logits

    def discriminate(self, images: Tensor) -> DiscriminatorOutput:
        """Return the logits and the features of every layer."""
        min_size = 2**self.config.layers
        if (
            images.ndim != 4
            or images.shape[1] != self.config.channels
            or min(images.shape[2:]) < min_size
        ):
            raise ValueError(
                f"Images have the shape {tuple(images.shape)}, but this discriminator expects "
                f"(B, {self.config.channels}, H, W) and downsamples {self.config.layers} times, so "
                f"H and W must be at least {min_size}: use larger images or fewer layers."
            )
        return run_layers(self.layers, self.logit, images)
