"""The judges of sound: each hears what the others are deaf to, and says at many places how real it
sounds.

- periods: every p-th sample in a row of its own, for prime p (HiFi-GAN, Kong 2020, arXiv
  2010.05646, section 2.3): what repeats
- scales: the samples themselves, at several rates (MelGAN, Kumar 2019, 1910.06711, section 2.2):
  the shape of the wave
- bands: complex spectra through windows of several lengths, each band of frequencies by layers of
  its own (EnCodec, Defossez 2022, 2210.13438, section 3.4; DAC, Kumar 2023, 2306.06546, section
  3.4): phase, and the highs

A judge is several networks. Called, it gives all their logits in a row, each network's about as
many, so that in a mean they count alike. `discriminate` also gives what their layers saw, for
feature matching (`losses/spectral.py`).

B sounds, N samples, M logits, C channels. Sounds are (B, 1, N) in [-1, 1]. Examples do not see each
other: there is no norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.modalities.image.discriminator import SLOPE, Discriminated
from tessera.nn.init import start
from tessera.nn.precision import full_precision, to_fp32


class AudioDiscriminator(nn.Module):
    """What the judges have in common: networks that each see the sound in their own way."""

    networks: nn.ModuleList

    def forward(self, samples: Tensor) -> Tensor:
        return self.discriminate(samples).logits

    def discriminate(self, samples: Tensor) -> Discriminated:
        if samples.ndim != 3 or samples.shape[1] != 1 or not samples.shape[2]:
            raise ValueError(
                f"Sounds of shape {tuple(samples.shape)} were given; this discriminator judges (B, 1, N)."
            )
        each = [network(samples) for network in self.networks]
        return Discriminated(
            torch.cat([one.logits for one in each], dim=1),
            [seen for one in each for seen in one.features],
        )


class Layers(nn.ModuleList):
    """Convolutions, each followed by an activation; what comes out of each is a feature."""

    def __init__(self, convolutions: Iterable[nn.Conv2d]):
        super().__init__(convolutions)
        for convolution in self:
            start(convolution, gain=nn.init.calculate_gain("leaky_relu", SLOPE))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for convolution in self:
            x = F.leaky_relu(convolution(x), SLOPE)
            features.append(x)
        return features


def to_logit(width: int) -> nn.Conv2d:
    layer = nn.Conv2d(width, 1, (3, 1), padding=(1, 0))
    start(layer, gain=1.0)
    return layer


def refuse_few(what: str, numbers: tuple[int, ...], least: int) -> None:
    if not numbers or min(numbers) < least:
        raise ValueError(
            f"A judge needs one or more {what} of {least} or more, but they are {numbers}."
        )


def refuse_widths(dim: int, max_channels: int, layers: int) -> None:
    if min(dim, max_channels, layers) < 1:
        raise ValueError(
            f"There is no judge with dim {dim}, widest {max_channels} and layers {layers}: each is 1 or more."
        )


# ------------------------------------------------------------------------------------------------------------- periods


@dataclass(frozen=True, kw_only=True)
class PeriodDiscriminatorConfig:
    periods: tuple[int, ...] = (2, 3, 5, 7, 11)
    """In samples; primes, so that no two hear the same."""
    dim: int = 32
    """Channels after the first layer; every further layer doubles them twice."""
    max_channels: int = 512
    """The most channels that this leads to."""
    layers: int = 4
    """How often every three samples of a row become one."""

    def __post_init__(self) -> None:
        refuse_few("periods", self.periods, least=1)
        refuse_widths(self.dim, self.max_channels, self.layers)

    @property
    def stage_channels(self) -> list[int]:
        """Of the layers: one for each that shortens, and one more before the logits."""
        channels = [min(self.dim * 4**layer, self.max_channels) for layer in range(self.layers)]
        return [*channels, channels[-1]]

    def build(self) -> PeriodDiscriminator:
        return PeriodDiscriminator(self)


class PeriodDiscriminator(AudioDiscriminator):
    def __init__(self, config: PeriodDiscriminatorConfig):
        super().__init__()
        self.config = config
        self.networks = nn.ModuleList([OfPeriod(period, config) for period in config.periods])


class OfPeriod(nn.Module):
    def __init__(self, period: int, config: PeriodDiscriminatorConfig):
        super().__init__()
        self.period = period
        *shortened, last = config.stage_channels
        shortening = [
            nn.Conv2d(*pair, (5, 1), stride=(3, 1), padding=(2, 0))
            for pair in pairwise([1, *shortened])
        ]
        self.layers = Layers([*shortening, nn.Conv2d(shortened[-1], last, (5, 1), padding=(2, 0))])
        self.logit = to_logit(last)

    def forward(self, samples: Tensor) -> Discriminated:
        filled = F.pad(samples, (0, -samples.shape[2] % self.period))
        features = self.layers(filled.unflatten(2, (-1, self.period)))
        return Discriminated(self.logit(features[-1]).flatten(1), features)


# -------------------------------------------------------------------------------------------------------------- scales


@dataclass(frozen=True, kw_only=True)
class ScaleDiscriminatorConfig:
    scales: tuple[int, ...] = (1, 2, 4)
    """The sound as it is, with the mean of every two samples for one, and of every four."""
    dim: int = 16
    """Channels after the first layer; every further layer doubles them twice."""
    max_channels: int = 512
    """The most channels that this leads to."""
    layers: int = 3
    """How often every four samples become one."""

    def __post_init__(self) -> None:
        refuse_few("scales", self.scales, least=1)
        refuse_widths(self.dim, self.max_channels, self.layers)

    @property
    def stage_channels(self) -> list[int]:
        """Of the layers: one at full rate, one for each that shortens, and one more before the
        logits."""
        channels = [min(self.dim * 4**layer, self.max_channels) for layer in range(self.layers + 1)]
        return [*channels, channels[-1]]

    def build(self) -> ScaleDiscriminator:
        return ScaleDiscriminator(self)


class ScaleDiscriminator(AudioDiscriminator):
    def __init__(self, config: ScaleDiscriminatorConfig):
        super().__init__()
        self.config = config
        self.networks = nn.ModuleList([OfScale(scale, config) for scale in config.scales])


class OfScale(nn.Module):
    def __init__(self, scale: int, config: ScaleDiscriminatorConfig):
        super().__init__()
        self.scale = scale
        first, *shortened, last = config.stage_channels
        shortening = [self.shortening(*pair) for pair in pairwise([first, *shortened])]
        before, after = (
            nn.Conv2d(1, first, (15, 1), padding=(7, 0)),
            nn.Conv2d(last, last, (5, 1), padding=(2, 0)),
        )
        self.layers = Layers([before, *shortening, after])
        self.logit = to_logit(last)

    def shortening(self, inputs: int, outputs: int) -> nn.Conv2d:
        """In groups of four channels: kernels of 41 samples would else be most of the cost (MelGAN,
        appendix A)."""
        groups = inputs // 4 if inputs % 4 == 0 and outputs % (inputs // 4) == 0 else 1
        return nn.Conv2d(inputs, outputs, (41, 1), stride=(4, 1), padding=(20, 0), groups=groups)

    def forward(self, samples: Tensor) -> Discriminated:
        coarse = F.avg_pool1d(samples, self.scale, ceil_mode=True)
        features = self.layers(coarse.unsqueeze(3))
        logits_BM = self.logit(features[-1]).flatten(1)
        return Discriminated(
            logits_BM.repeat_interleave(self.scale, dim=1), features
        )  # as many as those of the sound itself


# --------------------------------------------------------------------------------------------------------------- bands


@dataclass(frozen=True, kw_only=True)
class BandDiscriminatorConfig:
    windows: tuple[int, ...] = (2048, 1024, 512)
    """In samples; each is moved on by a quarter of itself."""
    bands: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75)
    """Where frequencies are parted, as shares of the highest."""
    dim: int = 32
    """Channels of all layers."""
    layers: int = 3
    """How often frequencies are halved."""

    def __post_init__(self) -> None:
        refuse_few("windows", self.windows, least=2 ** (self.layers + 3))
        refuse_widths(self.dim, self.dim, self.layers)
        edges = (0.0, *self.bands, 1.0)
        if any(low >= high for low, high in pairwise(edges)):
            raise ValueError(
                f"Bands are parted at rising shares between 0 and 1, not at {self.bands}: use 0.25 0.5, say."
            )
        thinnest = min(high - low for low, high in pairwise(edges)) * (min(self.windows) // 2 + 1)
        if thinnest < 2:
            raise ValueError(
                f"The thinnest of the bands at {self.bands} has {thinnest:.1f} of the frequencies of a window of "
                f"{min(self.windows)} samples: use fewer bands or longer windows."
            )

    def build(self) -> BandDiscriminator:
        return BandDiscriminator(self)


class BandDiscriminator(AudioDiscriminator):
    def __init__(self, config: BandDiscriminatorConfig):
        super().__init__()
        self.config = config
        self.networks = nn.ModuleList([OfWindow(window, config) for window in config.windows])


class OfWindow(nn.Module):
    hann: Tensor

    def __init__(self, window: int, config: BandDiscriminatorConfig):
        super().__init__()
        self.window = window
        self.register_buffer("hann", torch.hann_window(window), persistent=False)
        bins = window // 2 + 1
        edges = [0, *(round(share * bins) for share in config.bands), bins]
        self.sizes = [high - low for low, high in pairwise(edges)]
        self.bands = nn.ModuleList([Layers(self.convolutions(config)) for _ in self.sizes])
        self.logit = nn.Conv2d(config.dim, 1, 3, padding=1)
        start(self.logit, gain=1.0)

    def convolutions(self, config: BandDiscriminatorConfig) -> list[nn.Conv2d]:
        """Wide along frequencies, which they halve, and narrow in time (EnCodec, figure 2)."""
        first = nn.Conv2d(2, config.dim, (3, 9), padding=(1, 4))
        halving = [
            nn.Conv2d(config.dim, config.dim, (3, 9), (1, 2), (1, 4)) for _ in range(config.layers)
        ]
        return [first, *halving, nn.Conv2d(config.dim, config.dim, 3, padding=1)]

    def forward(self, samples: Tensor) -> Discriminated:
        parts = self.spectrum(samples).split(self.sizes, dim=3)
        features = [layers(part) for layers, part in zip(self.bands, parts)]
        seen = torch.cat([of_band[-1] for of_band in features], dim=3)
        return Discriminated(
            self.logit(seen).flatten(1), [feature for of_band in features for feature in of_band]
        )

    def spectrum(self, samples: Tensor) -> Tensor:
        """(B, 2, frames, bins): real and imaginary, of the size of the samples whatever the
        window."""
        with full_precision(samples.device.type):
            sound, hop = to_fp32(samples).squeeze(1), self.window // 4
            spectrum = torch.stft(
                sound, self.window, hop, self.window, self.hann.to(sound), pad_mode="constant", normalized=True,
                return_complex=True,
            )  # fmt: skip
            return torch.view_as_real(spectrum).permute(0, 3, 2, 1)
