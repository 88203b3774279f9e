"""The temporal discriminator of videos, which classifies patches in time and space.

A patch discriminator (modalities/image/discriminator.py) with time as a third dimension, as in
MAGVIT-v2 (arXiv 2310.05737, section 3.2). Single frames are left to the discriminator of images.
Flicker and lag are visible at different frame rates, so a video may have several discriminators,
each at its own rate: `discriminator(subsample_frames(video, 2))`.

B examples, C channels, t, h and w patches. Videos are (B, C, T, H, W) in [-1, 1].
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
class TemporalDiscriminatorConfig:
    dim: int = 64
    """Channels after the first layer; each further layer doubles them."""
    max_channels: int = 512
    """The maximum number of channels."""
    layers: int = 3
    """The number of downsamplings by two, in time and in space. A patch is 26, 54 or 110 pixels
    wide with 2, 3 or 4 layers and 23, 47 or 95 frames long, which is all of most videos."""
    channels: int = 3
    """Channels of the videos."""
    norm: Literal["group", "none"] = "group"
    """The normalization of the hidden layers. Batch norm is not available, since it would make
    examples depend on each other."""
    groups: int = 8
    """The number of groups of the group norm."""

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers must be at least 1, got {self.layers}.")
        invalid = [channels for channels in self.stage_channels if channels % self.groups]
        if self.norm == "group" and invalid:
            raise ValueError(
                f"{invalid[0]} channels are not divisible into the {self.groups} groups of the "
                f"group norm: make dim ({self.dim}) and max_channels ({self.max_channels}) "
                f"multiples of {self.groups}, or change groups."
            )

    @property
    def stage_channels(self) -> list[int]:
        """Channels after each downsampling, and after one more layer before the logits."""
        return [min(self.dim * 2**layer, self.max_channels) for layer in range(self.layers + 1)]

    def build(self) -> TemporalDiscriminator:
        return TemporalDiscriminator(self)

    def build_norm(self, channels: int) -> nn.Module:
        """Build the normalization of one layer."""
        return nn.GroupNorm(self.groups, channels) if self.norm == "group" else nn.Identity()


class Layer(nn.Module):
    """Convolution, norm and activation."""

    def __init__(self, convolution: nn.Conv3d, norm: nn.Module) -> None:
        super().__init__()
        self.convolution, self.norm = convolution, norm
        init_fan_in_(convolution, gain=nn.init.calculate_gain("leaky_relu", LEAKY_SLOPE))

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.norm(self.convolution(x)), LEAKY_SLOPE)


def downsample_2x(inputs: int, outputs: int) -> nn.Conv3d:
    """Build a convolution that halves both sides and reduces T frames to (T + 1) // 2."""
    return nn.Conv3d(inputs, outputs, (3, 4, 4), stride=2, padding=1)


class TemporalDiscriminator(nn.Module):
    """Map videos (B, C, T, H, W) to logits (B, 1, t, h, w), high for patches classified as real.

    The first layer is not normalized, so that brightness and contrast remain visible to the
    network.
    """

    def __init__(self, config: TemporalDiscriminatorConfig) -> None:
        super().__init__()
        self.config = config
        *channels, last = config.stage_channels
        self.layers = nn.Sequential(
            Layer(downsample_2x(config.channels, channels[0]), nn.Identity())
        )
        for inputs, outputs in pairwise(channels):
            self.layers.append(Layer(downsample_2x(inputs, outputs), config.build_norm(outputs)))
        self.layers.append(
            Layer(nn.Conv3d(channels[-1], last, 3, padding=1), config.build_norm(last))
        )
        self.logit = nn.Conv3d(last, 1, 3, padding=1)
        init_fan_in_(self.logit, gain=1.0)

    def forward(self, videos: Tensor) -> Tensor:
        return self.discriminate(videos).logits

    def discriminate(self, videos: Tensor) -> DiscriminatorOutput:
        """Return the logits and the features of every layer."""
        min_size = 2**self.config.layers
        if (
            videos.ndim != 5
            or videos.shape[1] != self.config.channels
            or min(videos.shape[3:]) < min_size
        ):
            raise ValueError(
                f"Videos have the shape {tuple(videos.shape)}, but this discriminator expects "
                f"(B, {self.config.channels}, T, H, W) and downsamples {self.config.layers} times, "
                f"so H and W must be at least {min_size}: use larger frames or fewer layers."
            )
        return run_layers(
            self.layers, self.logit, videos.contiguous(memory_format=torch.channels_last_3d)
        )


def subsample_frames(videos: Tensor, factor: int) -> Tensor:
    """Return every `factor`-th frame of videos (B, C, T, H, W), beginning with the first."""
    if factor < 1:
        raise ValueError(f"factor must be at least 1, got {factor}.")
    return videos[:, :, ::factor]
