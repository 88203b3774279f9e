"""The spectrogram transformer: a clip's log-mel picture in patches, as an image transformer reads a
picture (Gong 2021, arXiv 2104.01778), and one vector out for the whole clip.

- A patch is normed before and after its projection (Kumar 2023, 2302.01327). The first norm takes
  away how loud a patch is, which in music says something, so its mean and its deviation are given
  beside it.
- Where a patch lies is said by rotation along time and frequency; which band it is, by a vector
  that is added, since pitch is heard absolutely and time is not.
- In training a share of the patches is left out (Li 2022, 2212.00794), and the picture is stretched
  and hidden in part (SpecAugment, Park 2019, 1904.08779). What is drawn for a clip comes from the
  clip's own generator.
- A clip is the same whatever silence is laid behind it: what is not real is quiet, unseen by
  attention, and left out of the mean.

B clips, N samples, M mel bands, F frames, P patches of V numbers, K patches that are kept, W width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tessera.losses.spectra import QUIET, log_mel
from tessera.nn.transformer import Norm, Rotary, Transformer, grid_positions, linear, rope_cache

SILENCE = math.log(QUIET)
CENTRE, SPREAD = -6.0, 3.0
"""About the mean and the deviation of log-mel magnitudes of music; the norms do the rest."""


@dataclass(frozen=True, kw_only=True)
class SpecAugmentConfig:
    """Stretches a clip in time, and hides bands and moments of it."""

    stretch: float = 0.1
    """A clip is played up to this share faster or slower, at its own pitch; 0: at its own tempo."""
    band_masks: int = 1
    band_share: float = 0.15
    """Most of the bands that one mask hides."""
    time_masks: int = 1
    time_share: float = 0.15
    """Most of a clip that one mask hides."""

    def __post_init__(self) -> None:
        for name in ("stretch", "band_share", "time_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is a share, at least 0 and below 1, but it is {getattr(self, name)}."
                )
        for name in ("band_masks", "time_masks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is 0 or more, but it is {getattr(self, name)}.")

    @property
    def draws(self) -> int:
        """Numbers that are drawn for a clip: the tempo, and width and place of each mask."""
        return 1 + 2 * (self.band_masks + self.time_masks)


@dataclass(frozen=True, kw_only=True)
class SpectrogramTransformerConfig:
    rate_hz: int = 16_000
    """Samples a second of what it hears: the data's."""
    window: int = 1024
    """Samples that one frame of the spectrogram looks at: 64 ms at 16 kHz, enough to tell two
    semitones apart."""
    hop: int = 256
    """Samples from one frame to the next."""
    bands: int = 64
    """Mel bands."""
    patch: tuple[int, int] = (16, 8)
    """Bands and frames of a patch."""
    dim: int = 128
    depth: int = 4
    """Transformer blocks."""
    heads: int = 4
    drop: float = 0.25
    """The share of a clip's patches that is left out at each visit in training."""
    augment: SpecAugmentConfig | None = field(default_factory=SpecAugmentConfig)

    def __post_init__(self) -> None:
        bands, frames = self.patch
        if bands < 1 or frames < 1 or self.bands % bands:
            raise ValueError(
                f"{self.bands} mel bands cannot be cut into patches of {bands} bands and {frames} frames: the bands of a patch "
                "divide them, and both are at least 1."
            )
        if not 1 <= self.hop <= self.window:
            raise ValueError(
                f"A hop is at least 1 sample and at most the window, but they are {self.hop} and {self.window}."
            )
        if self.depth < 1:
            raise ValueError(f"A transformer has at least 1 block, but depth is {self.depth}.")
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop is a share, at least 0 and below 1, but it is {self.drop}.")

    def validate_data(self, data: Any) -> None:
        if data.rate_hz != self.rate_hz:
            raise ValueError(
                f"The clips come at {data.rate_hz:,} samples a second, but the network hears {self.rate_hz:,}: "
                f"use --data.rate-hz {self.rate_hz}, or --task.model.audio.rate-hz {data.rate_hz}."
            )

    def build(self) -> SpectrogramTransformer:
        return SpectrogramTransformer(self)


@dataclass
class Heard:
    """Log-mel pictures of some clips, and how many frames of each are real."""

    spectrum_BMF: Tensor
    frames_B: Tensor


@dataclass
class Patches:
    values_BPV: Tensor
    """frame by frame, and within these from the lowest band up, so that the real ones come first"""
    real_B: Tensor
    """how many of each clip are real"""
    grid: tuple[int, int]
    """along time and along frequency"""


class SpectrogramTransformer(nn.Module):
    def __init__(self, config: SpectrogramTransformerConfig):
        super().__init__()
        self.config, self.dim = config, config.dim
        bands, frames = config.patch
        self.patch_norm, self.token_norm = Norm(bands * frames), Norm(config.dim)
        self.to_token = linear(bands * frames, config.dim)
        self.to_level = linear(2, config.dim)
        self.band = nn.Parameter(0.02 * torch.randn(config.bands // bands, config.dim))
        self.transformer = Transformer(config.dim, config.depth, config.heads)

    def forward(
        self,
        samples_BN: Tensor,
        lengths_B: Tensor,
        chances: Sequence[Generator] | None = None,
        layers: Sequence[int] = (),
    ) -> list[Tensor]:
        """The mean (B, W) of each clip's states after each of `layers` blocks and, last, after all
        of them and the last norm.

        In training something is left out of each clip, as its generator in `chances` says; without
        generators nothing is.
        """
        heard = self.hear(samples_BN, lengths_B)
        if self.training and chances is not None and self.config.augment is not None:
            heard = augmented(heard, self.config.augment, chances)
        patches = self.patches(heard)
        turned = rope_cache(
            grid_positions(patches.grid).to(patches.values_BPV), self.transformer.head_dim
        )
        band_P = torch.arange(patches.grid[1], device=samples_BN.device).repeat(patches.grid[0])
        if self.training and chances is not None and self.config.drop:
            kept_BK, real_B = some_of(patches.real_B, self.config.drop, chances)
            values_BKV = patches.values_BPV.gather(
                1, kept_BK[..., None].expand(-1, -1, patches.values_BPV.shape[2])
            )
            patches, band_P = (
                replace(patches, values_BPV=values_BKV, real_B=real_B),
                band_P[kept_BK],
            )
            turned = Rotary(turned.cosine[kept_BK].unsqueeze(1), turned.sine[kept_BK].unsqueeze(1))
        tokens_BPW = self.tokens(patches.values_BPV) + self.band[band_P]
        mask_BP = (
            torch.arange(tokens_BPW.shape[1], device=tokens_BPW.device) < patches.real_B[:, None]
        )
        seen = None if bool(mask_BP.all()) else mask_BP  # attention without a mask is faster
        return [
            mean_of(states, mask_BP)
            for states in self.transformer.layers(tokens_BPW, turned, seen, at=layers)
        ]

    def hear(self, samples_BN: Tensor, lengths_B: Tensor) -> Heard:
        config = self.config
        spectrum_BMF = log_mel(
            samples_BN,
            rate_hz=config.rate_hz,
            window=config.window,
            hop=config.hop,
            bands=config.bands,
            quiet=QUIET,
        ).to(self.band.dtype)
        frames_B = -(-lengths_B // config.hop)
        return Heard(quiet_after(spectrum_BMF, frames_B), frames_B)

    def patches(self, heard: Heard) -> Patches:
        bands, frames = self.config.patch
        count = heard.spectrum_BMF.shape[2]
        spectrum = F.pad(heard.spectrum_BMF, (0, -count % frames), value=SILENCE)
        cut = spectrum.unflatten(2, (-1, frames)).unflatten(
            1, (-1, bands)
        )  # B, bands of patches, bands, times, frames
        cut = cut.permute(0, 3, 1, 2, 4)
        grid = (cut.shape[1], cut.shape[2])
        real_B = -(-heard.frames_B // frames) * grid[1]
        return Patches(
            ((cut - CENTRE) / SPREAD).flatten(3).flatten(1, 2), real_B.clamp_min(1), grid
        )

    def tokens(self, values_BPV: Tensor) -> Tensor:
        mean = values_BPV.mean(2)
        deviation = (
            (values_BPV.square().mean(2) - mean.square()).clamp_min(0).sqrt()
        )  # std_mean: 0.85 ms, not 0.05
        tokens = self.to_token(self.patch_norm(values_BPV)) + self.to_level(
            torch.stack([mean, deviation], dim=-1)
        )
        return self.token_norm(tokens)


def mean_of(states_BPW: Tensor, mask_BP: Tensor) -> Tensor:
    weights = mask_BP.to(states_BPW.dtype)
    return (states_BPW * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def quiet_after(spectrum_BMF: Tensor, frames_B: Tensor) -> Tensor:
    """Nothing is heard after the last real frame: not even the end of a sound in a window that
    reaches back."""
    if int(frames_B.min()) >= spectrum_BMF.shape[2]:
        return spectrum_BMF
    real_BF = torch.arange(spectrum_BMF.shape[2], device=spectrum_BMF.device) < frames_B[:, None]
    return spectrum_BMF.masked_fill(~real_BF[:, None], SILENCE)


# ---- what is left out in training


def augmented(heard: Heard, config: SpecAugmentConfig, chances: Sequence[Generator]) -> Heard:
    drawn_BC = torch.stack([torch.rand(config.draws, generator=chance) for chance in chances]).to(
        heard.spectrum_BMF
    )
    if config.stretch:
        heard = stretched(
            heard,
            (1 - config.stretch) * ((1 + config.stretch) / (1 - config.stretch)) ** drawn_BC[:, 0],
        )
    spectrum_BMF, number = heard.spectrum_BMF, 1
    hidden_BMF = torch.zeros_like(spectrum_BMF, dtype=torch.bool)
    all_bands_B = torch.full_like(heard.frames_B, spectrum_BMF.shape[1])
    for _ in range(config.band_masks):
        hidden_BMF |= hidden(
            all_bands_B, spectrum_BMF.shape[1], config.band_share, drawn_BC[:, number : number + 2]
        )[..., None]
        number += 2
    for _ in range(config.time_masks):
        hidden_BMF |= hidden(
            heard.frames_B,
            spectrum_BMF.shape[2],
            config.time_share,
            drawn_BC[:, number : number + 2],
        )[:, None]
        number += 2
    return Heard(
        quiet_after(torch.where(hidden_BMF, CENTRE, spectrum_BMF), heard.frames_B), heard.frames_B
    )


def stretched(heard: Heard, tempo_B: Tensor) -> Heard:
    """Played at so many times its tempo: each frame is what lies that much further on, between two
    frames.

    What becomes longer than the picture is cut off.
    """
    spectrum_BMF = heard.spectrum_BMF
    bands, count = spectrum_BMF.shape[1:]
    from_BF = torch.arange(count, device=spectrum_BMF.device) * tempo_B[:, None]
    frames_B = (heard.frames_B / tempo_B).ceil().clamp(1, count).to(heard.frames_B)
    left_BF = from_BF.long().clamp_max(count - 1)
    right_BF = (left_BF + 1).clamp_max(count - 1)
    left, right = (
        spectrum_BMF.gather(2, at[:, None].expand(-1, bands, -1)) for at in (left_BF, right_BF)
    )
    return Heard(
        quiet_after(torch.lerp(left, right, (from_BF - left_BF)[:, None]), frames_B), frames_B
    )


def hidden(real_B: Tensor, count: int, share: float, drawn_B2: Tensor) -> Tensor:
    """(B, count): a stretch of at most `share` of what is real, anywhere in it."""
    width_B = drawn_B2[:, 0] * share * real_B
    start_B = drawn_B2[:, 1] * (real_B - width_B)
    places = torch.arange(count, device=real_B.device)
    return (places >= start_B[:, None]) & (places + 1 <= (start_B + width_B)[:, None])


def some_of(real_B: Tensor, drop: float, chances: Sequence[Generator]) -> tuple[Tensor, Tensor]:
    """(B, K) numbers of the patches that are kept of each clip, in their order, and how many these
    are; the rest of a row is 0."""
    rows = []
    for real, chance in zip(real_B.tolist(), chances, strict=True):
        keep = max(1, round(real * (1 - drop)))
        rows.append(torch.randperm(real, generator=chance)[:keep].sort().values)
    kept_BK = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(real_B.device)
    return kept_BK, torch.tensor([len(row) for row in rows], device=real_B.device)
