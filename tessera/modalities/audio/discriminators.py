"""Discriminators of audio, each of which detects other artefacts.

- periods: every p-th sample, for prime p (multi-period discriminator of HiFi-GAN, Kong 2020, arXiv
  2010.05646, section 2.3): periodic structure
- scales: the waveform at several sampling rates (MelGAN, Kumar 2019, 1910.06711, section 2.2): the
  shape of the waveform
- bands: complex spectrograms with windows of several lengths, with separate layers for each
  frequency band (EnCodec, Defossez 2022, 2210.13438, section 3.4; DAC, Kumar 2023, 2306.06546,
  section 3.4): phase and high frequencies

A discriminator consists of several networks with about the same number of logits each, so that they
have equal weight in a mean over the concatenated logits. `discriminate` also returns the features
of the layers, for feature matching.

There is no normalization over the batch, so examples do not affect each other. Audio is (B, 1, N)
in [-1, 1].

B batch, N samples, M logits, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.discriminator import LEAKY_SLOPE, DiscriminatorOutput
from tessera.nn.init import init_fan_in_
from tessera.nn.precision import full_precision, to_fp32


class AudioDiscriminator(nn.Module):
    """Base class: apply several networks to the same audio."""

    networks: nn.ModuleList

    def forward(self, samples: Tensor) -> Tensor:
        return self.discriminate(samples).logits

    def discriminate(self, samples: Tensor) -> DiscriminatorOutput:
        if samples.ndim != 3 or samples.shape[1] != 1 or not samples.shape[2]:
            raise ValueError(
                "Expected audio of shape (batch, 1, samples) with at least 1 sample, but got shape "
                f"{tuple(samples.shape)}."
            )
        outputs = [network(samples) for network in self.networks]
        return DiscriminatorOutput(
            torch.cat([output.logits for output in outputs], dim=1),
            [feature for output in outputs for feature in output.features],
        )


class ConvStack(nn.ModuleList):
    """Convolutions with leaky ReLUs; returns the output of each as a feature."""

    def __init__(self, convs: Iterable[nn.Conv2d]):
        super().__init__(convs)
        gain = nn.init.calculate_gain("leaky_relu", LEAKY_SLOPE)
        for conv in self:
            init_fan_in_(conv, gain=gain)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for conv in self:
            x = F.leaky_relu(conv(x), LEAKY_SLOPE)
            features.append(x)
        return features


def build_logit_head(dim: int) -> nn.Conv2d:
    layer = nn.Conv2d(dim, 1, (3, 1), padding=(1, 0))
    init_fan_in_(layer, gain=1.0)
    return layer


def check_values(name: str, values: tuple[int, ...], minimum: int) -> None:
    if not values or min(values) < minimum:
        raise ValueError(
            f"{name} must be one or more integers of at least {minimum}, but got {values}."
        )


def check_sizes(dim: int, max_channels: int, layers: int) -> None:
    if min(dim, max_channels, layers) < 1:
        raise ValueError(
            "dim, max_channels and layers must be at least 1, but got "
            f"dim {dim}, max_channels {max_channels} and layers {layers}."
        )


# ----------------------------------------------------------------------------------------- periods


@dataclass(frozen=True, kw_only=True)
class PeriodDiscriminatorConfig:
    periods: tuple[int, ...] = (2, 3, 5, 7, 11)
    """Periods in samples. Primes avoid that two networks receive the same samples."""
    dim: int = 32
    """Channels after the first layer. Each further layer has four times as many."""
    max_channels: int = 512
    """Maximum number of channels."""
    layers: int = 4
    """Number of layers with a stride of 3."""

    def __post_init__(self) -> None:
        check_values("periods", self.periods, minimum=1)
        check_sizes(self.dim, self.max_channels, self.layers)

    @property
    def stage_channels(self) -> list[int]:
        """Output channels of each strided layer, and of one more layer before the logits."""
        channels = [min(self.dim * 4**layer, self.max_channels) for layer in range(self.layers)]
        return [*channels, channels[-1]]

    def build(self) -> PeriodDiscriminator:
        return PeriodDiscriminator(self)


class PeriodDiscriminator(AudioDiscriminator):
    def __init__(self, config: PeriodDiscriminatorConfig):
        super().__init__()
        self.config = config
        self.networks = nn.ModuleList([PeriodNetwork(period, config) for period in config.periods])


class PeriodNetwork(nn.Module):
    """Convolve over rows of (N / period, period), so that a column holds every p-th sample."""

    def __init__(self, period: int, config: PeriodDiscriminatorConfig):
        super().__init__()
        self.period = period
        *channels, last = config.stage_channels
        convs = [
            nn.Conv2d(*pair, (5, 1), stride=(3, 1), padding=(2, 0))
            for pair in pairwise([1, *channels])
        ]
        self.layers = ConvStack([*convs, nn.Conv2d(channels[-1], last, (5, 1), padding=(2, 0))])
        self.logit = build_logit_head(last)

    def forward(self, samples: Tensor) -> DiscriminatorOutput:
        padded = F.pad(samples, (0, -samples.shape[2] % self.period))
        features = self.layers(padded.unflatten(2, (-1, self.period)))
        return DiscriminatorOutput(self.logit(features[-1]).flatten(1), features)


# ------------------------------------------------------------------------------------------ scales


@dataclass(frozen=True, kw_only=True)
class ScaleDiscriminatorConfig:
    scales: tuple[int, ...] = (1, 2, 4)
    """Downsampling factors, by average pooling."""
    dim: int = 16
    """Channels after the first layer. Each further layer has four times as many."""
    max_channels: int = 512
    """Maximum number of channels."""
    layers: int = 3
    """Number of layers with a stride of 4."""

    def __post_init__(self) -> None:
        check_values("scales", self.scales, minimum=1)
        check_sizes(self.dim, self.max_channels, self.layers)

    @property
    def stage_channels(self) -> list[int]:
        """Output channels of the first layer, of each strided layer, and of one more layer before
        the logits."""
        channels = [min(self.dim * 4**layer, self.max_channels) for layer in range(self.layers + 1)]
        return [*channels, channels[-1]]

    def build(self) -> ScaleDiscriminator:
        return ScaleDiscriminator(self)


class ScaleDiscriminator(AudioDiscriminator):
    def __init__(self, config: ScaleDiscriminatorConfig):
        super().__init__()
        self.config = config
        self.networks = nn.ModuleList([ScaleNetwork(scale, config) for scale in config.scales])


class ScaleNetwork(nn.Module):
    """Convolve over the downsampled waveform."""

    def __init__(self, scale: int, config: ScaleDiscriminatorConfig):
        super().__init__()
        self.scale = scale
        first, *channels, last = config.stage_channels
        strided = [self.build_strided_conv(*pair) for pair in pairwise([first, *channels])]
        before, after = (
            nn.Conv2d(1, first, (15, 1), padding=(7, 0)),
            nn.Conv2d(last, last, (5, 1), padding=(2, 0)),
        )
        self.layers = ConvStack([before, *strided, after])
        self.logit = build_logit_head(last)

    def build_strided_conv(self, in_channels: int, out_channels: int) -> nn.Conv2d:
        """Build a convolution in groups of four channels, without which kernels of 41 samples would
        dominate the cost (MelGAN, appendix A)."""
        divisible = in_channels % 4 == 0 and out_channels % (in_channels // 4) == 0
        groups = in_channels // 4 if divisible else 1
        return nn.Conv2d(
            in_channels, out_channels, (41, 1), stride=(4, 1), padding=(20, 0), groups=groups
        )

    def forward(self, samples: Tensor) -> DiscriminatorOutput:
        pooled = F.avg_pool1d(samples, self.scale, ceil_mode=True)
        features = self.layers(pooled.unsqueeze(3))
        logits_BM = self.logit(features[-1]).flatten(1)
        # Repeated to the number of logits of the full rate, for equal weight in a mean.
        return DiscriminatorOutput(logits_BM.repeat_interleave(self.scale, dim=1), features)


# ------------------------------------------------------------------------------------------- bands


@dataclass(frozen=True, kw_only=True)
class BandDiscriminatorConfig:
    windows: tuple[int, ...] = (2048, 1024, 512)
    """STFT window lengths in samples. The hop is a quarter of the window."""
    bands: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75)
    """Boundaries between frequency bands, as fractions of the highest frequency."""
    dim: int = 32
    """Channels of all layers."""
    layers: int = 3
    """Number of layers that halve the frequency resolution."""

    def __post_init__(self) -> None:
        check_values("windows", self.windows, minimum=2 ** (self.layers + 3))
        check_sizes(self.dim, self.dim, self.layers)
        edges = (0.0, *self.bands, 1.0)
        if any(low >= high for low, high in pairwise(edges)):
            raise ValueError(
                f"bands must be increasing fractions between 0 and 1, but got {self.bands}: use "
                "values such as 0.25 0.5."
            )
        narrowest = min(high - low for low, high in pairwise(edges)) * (min(self.windows) // 2 + 1)
        if narrowest < 2:
            raise ValueError(
                f"The narrowest band of {self.bands} has {narrowest:.1f} frequency bins with a "
                f"window of {min(self.windows)} samples, but needs 2: use fewer bands or longer "
                "windows."
            )

    def build(self) -> BandDiscriminator:
        return BandDiscriminator(self)


class BandDiscriminator(AudioDiscriminator):
    def __init__(self, config: BandDiscriminatorConfig):
        super().__init__()
        self.config = config
        self.networks = nn.ModuleList([BandNetwork(window, config) for window in config.windows])


class BandNetwork(nn.Module):
    """Convolve over each frequency band of a complex spectrogram."""

    hann: Tensor

    def __init__(self, window: int, config: BandDiscriminatorConfig):
        super().__init__()
        self.window = window
        self.register_buffer("hann", torch.hann_window(window), persistent=False)
        bins = window // 2 + 1
        edges = [0, *(round(fraction * bins) for fraction in config.bands), bins]
        self.band_sizes = [high - low for low, high in pairwise(edges)]
        self.bands = nn.ModuleList([ConvStack(self.build_convs(config)) for _ in self.band_sizes])
        self.logit = nn.Conv2d(config.dim, 1, 3, padding=1)
        init_fan_in_(self.logit, gain=1.0)

    def build_convs(self, config: BandDiscriminatorConfig) -> list[nn.Conv2d]:
        """Build convolutions that are wide along frequency, which they halve, and narrow in time
        (EnCodec, figure 2)."""
        first = nn.Conv2d(2, config.dim, (3, 9), padding=(1, 4))
        halving = [
            nn.Conv2d(config.dim, config.dim, (3, 9), (1, 2), (1, 4)) for _ in range(config.layers)
        ]
        return [first, *halving, nn.Conv2d(config.dim, config.dim, 3, padding=1)]

    def forward(self, samples: Tensor) -> DiscriminatorOutput:
        bands = self.spectrogram(samples).split(self.band_sizes, dim=3)
        features = [layers(band) for layers, band in zip(self.bands, bands)]
        joined = torch.cat([of_band[-1] for of_band in features], dim=3)
        return DiscriminatorOutput(
            self.logit(joined).flatten(1), [feature for of_band in features for feature in of_band]
        )

    def spectrogram(self, samples: Tensor) -> Tensor:
        """Return (B, 2, frames, bins), real and imaginary parts, at the scale of the samples."""
        with full_precision(samples.device.type):
            samples_BN, hop = to_fp32(samples).squeeze(1), self.window // 4
            spectrum = torch.stft(
                samples_BN,
                self.window,
                hop,
                self.window,
                self.hann.to(samples_BN),
                pad_mode="constant",
                normalized=True,
                return_complex=True,
            )
            return torch.view_as_real(spectrum).permute(0, 3, 2, 1)
