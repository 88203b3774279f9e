"""The spectrogram transformer: patches of a log-mel spectrogram, read as an image transformer reads
an image (Gong 2021, arXiv 2104.01778), and one vector for the whole segment.

- A patch is normalized before and after its projection (Kumar 2023, 2302.01327). The first norm
  removes the loudness of a patch, which matters in music, so its mean and standard deviation are
  projected separately and added.
- The position of a patch is encoded by rotary embeddings along time and frequency, and its band by
  a learned vector that is added, since pitch is perceived absolutely and time is not.
- In training a fraction of the patches is dropped (Li 2022, 2212.00794), and the spectrogram is
  stretched and masked (SpecAugment, Park 2019, 1904.08779). The random numbers of a segment come
  from its own generator.
- Padding after a segment has no influence: it is silent, masked in attention, and excluded from the
  mean.

B segments, N samples, M mel bands, F frames, P patches of V values, K patches that are kept, W
`dim`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tessera.engine.device import can_read, copy_to_device
from tessera.losses.spectrogram import MIN_MAGNITUDE, log_mel_spectrogram
from tessera.nn.transformer import Norm, Rotary, Transformer, grid_positions, linear, rope_cache

if TYPE_CHECKING:
    from tessera.modalities.audio.dataset import AudioDataConfig

SILENCE = math.log(MIN_MAGNITUDE)
MEAN, STD = -6.0, 3.0
"""The approximate mean and standard deviation of log-mel magnitudes of music; the norms do the
rest."""


@dataclass(frozen=True, kw_only=True)
class SpecAugmentConfig:
    """Time stretching, and masking of bands and of time."""

    stretch: float = 0.1
    """The maximum change of tempo, at the same pitch, as a fraction; 0 turns time stretching
    off."""
    band_masks: int = 1
    """The number of masks along frequency."""
    max_band_fraction: float = 0.15
    """The maximum fraction of the bands that one mask covers."""
    time_masks: int = 1
    """The number of masks along time."""
    max_time_fraction: float = 0.15
    """The maximum fraction of a segment that one mask covers."""

    def __post_init__(self) -> None:
        for name in ("stretch", "max_band_fraction", "max_time_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 0 and less than 1, got {getattr(self, name)}."
                )
        for name in ("band_masks", "time_masks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")

    @property
    def num_random(self) -> int:
        """The number of random values per segment: the tempo, and width and position of each
        mask."""
        return 1 + 2 * (self.band_masks + self.time_masks)

    def draw(
        self,
        frames_B: Tensor,
        count: int,
        generators: Sequence[Generator],
        dtype: torch.dtype = torch.float32,
    ) -> SpecAugmentDraws:
        """Draw the random numbers of each segment, and their frames after time stretching."""
        rows = [torch.rand(self.num_random, generator=generator) for generator in generators]
        random_BC = torch.stack(rows).to(dtype)
        if not self.stretch:
            return SpecAugmentDraws(random_BC, None, frames_B)
        slowest, ratio = 1 - self.stretch, (1 + self.stretch) / (1 - self.stretch)
        tempo_B = slowest * ratio ** random_BC[:, 0]
        return SpecAugmentDraws(random_BC, tempo_B, stretched_frames(frames_B, tempo_B, count))


@dataclass(frozen=True, kw_only=True)
class SpectrogramTransformerConfig:
    rate_hz: int = 16_000
    """The sampling rate of the audio, which must be that of the data."""
    window: int = 1024
    """The number of samples of one frame of the spectrogram: 64 ms at 16 kHz, enough to resolve two
    semitones."""
    hop: int = 256
    """The number of samples from one frame to the next."""
    bands: int = 64
    """The number of mel bands."""
    patch: tuple[int, int] = (16, 8)
    """The number of bands and frames of a patch."""
    dim: int = 128
    """The embedding dimension of the transformer."""
    depth: int = 4
    """The number of transformer blocks."""
    heads: int = 4
    """The number of attention heads."""
    drop: float = 0.25
    """The fraction of the patches of a segment that is dropped at each training step."""
    augment: SpecAugmentConfig | None = field(default_factory=SpecAugmentConfig)
    """The augmentation of spectrograms in training, or none."""

    def __post_init__(self) -> None:
        bands, frames = self.patch
        if bands < 1 or frames < 1 or self.bands % bands:
            raise ValueError(
                f"{self.bands} mel bands cannot be divided into patches of {bands} bands and "
                f"{frames} frames: both must be at least 1, and the bands of a patch must divide "
                "the mel bands."
            )
        if not 1 <= self.hop <= self.window:
            raise ValueError(
                f"hop must be at least 1 and at most the window of {self.window} samples, got "
                f"{self.hop}."
            )
        if self.depth < 1:
            raise ValueError(f"depth must be at least 1, got {self.depth}.")
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop must be at least 0 and less than 1, got {self.drop}.")

    def validate_data(self, data: AudioDataConfig) -> None:
        """Raise ValueError if the data is stereo or has another sampling rate."""
        data.check_mono("This model")
        if data.rate_hz != self.rate_hz:
            raise ValueError(
                f"The audio has a sampling rate of {data.rate_hz:,} Hz, but the model expects "
                f"{self.rate_hz:,} Hz: use --data.rate-hz {self.rate_hz}, or "
                f"--task.model.audio.rate-hz {data.rate_hz}."
            )

    def build(self) -> SpectrogramTransformer:
        return SpectrogramTransformer(self)


@dataclass
class SpecAugmentDraws:
    """The random numbers of an augmentation of spectrograms."""

    random_BC: Tensor
    """The tempo, and width and position of each mask, as uniform numbers."""
    tempo_B: Tensor | None
    """The tempo of each segment; None if nothing is stretched."""
    frames_B: Tensor
    """The number of real frames of each segment at that tempo."""


@dataclass
class AugmentationDraws:
    """Everything that is random about the input of a training step, drawn on the CPU."""

    augmentation: SpecAugmentDraws | None
    kept: tuple[Tensor, Tensor] | None
    """The indices (B, K) of the patches that are kept, and their number (B,)."""


@dataclass
class Spectrogram:
    """A padded batch of log-mel spectrograms."""

    values_BMF: Tensor
    frames_B: Tensor
    """The number of real frames of each segment."""


@dataclass
class Patches:
    values_BPV: Tensor
    """Frame by frame and within frames from the lowest band up, so that the real ones come
    first."""
    real_B: Tensor
    """The number of real patches of each segment."""
    grid: tuple[int, int]
    """The number of patches along time and along frequency."""


class SpectrogramTransformer(nn.Module):
    def __init__(self, config: SpectrogramTransformerConfig):
        super().__init__()
        self.config, self.dim = config, config.dim
        bands, frames = config.patch
        self.patch_norm, self.token_norm = Norm(bands * frames), Norm(config.dim)
        self.project_patch = linear(bands * frames, config.dim)
        self.project_stats = linear(2, config.dim)
        self.band_embedding = nn.Parameter(0.02 * torch.randn(config.bands // bands, config.dim))
        self.transformer = Transformer(config.dim, config.depth, config.heads)

    def forward(
        self,
        samples_BN: Tensor,
        lengths_B: Tensor,
        draws: AugmentationDraws | None = None,
        layers: Sequence[int] = (),
    ) -> list[Tensor]:
        """Return the mean (B, W) of each segment's states after each of `layers` blocks and, last,
        after all blocks and the final norm.

        In training the input is augmented and patches are dropped as `draws` say; without them it
        is not.
        """
        spectrogram = self.compute_spectrogram(samples_BN, lengths_B)
        draws = draws if self.training else None
        if draws is not None and draws.augmentation is not None and self.config.augment is not None:
            spectrogram = augment_spectrogram(spectrogram, self.config.augment, draws.augmentation)
        patches = self.patchify(spectrogram)
        positions_NA = grid_positions(patches.grid).to(patches.values_BPV.dtype)
        rope = rope_cache(
            copy_to_device(positions_NA, samples_BN.device), self.transformer.head_dim
        )
        band_P = torch.arange(patches.grid[1], device=samples_BN.device).repeat(patches.grid[0])
        if draws is not None and draws.kept is not None:
            kept_BK, real_B = draws.kept
            values_BKV = patches.values_BPV.gather(
                1, kept_BK[..., None].expand(-1, -1, patches.values_BPV.shape[2])
            )
            patches = replace(patches, values_BPV=values_BKV, real_B=real_B)
            band_P = band_P[kept_BK]
            rope = Rotary(rope.cos[kept_BK].unsqueeze(1), rope.sin[kept_BK].unsqueeze(1))
        tokens_BPW = self.embed_patches(patches.values_BPV) + self.band_embedding[band_P]
        index_P = torch.arange(tokens_BPW.shape[1], device=tokens_BPW.device)
        mask_BP = index_P < patches.real_B[:, None]
        # Faster without a mask, but on a device it would have to be read.
        is_full = can_read(mask_BP) and bool(mask_BP.all())
        attention_mask = None if is_full else mask_BP
        return [
            masked_mean(states, mask_BP)
            for states in self.transformer.hidden_states(
                tokens_BPW, rope, attention_mask, at=layers
            )
        ]

    def draw(
        self, lengths_B: Tensor, num_samples: int, generators: Sequence[Generator]
    ) -> AugmentationDraws:
        """Draw the augmentation and the patches that are kept, from lengths on the CPU."""
        config = self.config
        count, frames_B = -(-num_samples // config.hop), -(-lengths_B // config.hop)
        augmentation = kept = None
        if config.augment is not None:
            dtype = self.band_embedding.dtype
            augmentation = config.augment.draw(frames_B, count, generators, dtype)
            frames_B = augmentation.frames_B
        if config.drop:
            kept = sample_patches(self.count_patches(frames_B), config.drop, generators)
        return AugmentationDraws(augmentation, kept)

    def count_patches(self, frames_B: Tensor) -> Tensor:
        """Return the number of real patches of segments with this number of frames."""
        bands, frames = self.config.patch
        return (-(-frames_B // frames) * (self.config.bands // bands)).clamp_min(1)

    def compute_spectrogram(self, samples_BN: Tensor, lengths_B: Tensor) -> Spectrogram:
        """Compute the log-mel spectrograms, with silence after the real samples."""
        config = self.config
        values_BMF = log_mel_spectrogram(
            samples_BN,
            rate_hz=config.rate_hz,
            window=config.window,
            hop=config.hop,
            bands=config.bands,
            min_magnitude=MIN_MAGNITUDE,
        ).to(self.band_embedding.dtype)
        frames_B = -(-lengths_B // config.hop)
        return Spectrogram(silence_padding(values_BMF, frames_B), frames_B)

    def patchify(self, spectrogram: Spectrogram) -> Patches:
        """Divide normalized spectrograms into patches."""
        bands, frames = self.config.patch
        count = spectrogram.values_BMF.shape[2]
        padded = F.pad(spectrogram.values_BMF, (0, -count % frames), value=SILENCE)
        # (B, bands of patches, bands, times of patches, frames) -> times and bands of patches first
        patches = padded.unflatten(2, (-1, frames)).unflatten(1, (-1, bands))
        patches = patches.permute(0, 3, 1, 2, 4)
        grid = (patches.shape[1], patches.shape[2])
        values_BPV = ((patches - MEAN) / STD).flatten(3).flatten(1, 2)
        return Patches(values_BPV, self.count_patches(spectrogram.frames_B), grid)

    def embed_patches(self, values_BPV: Tensor) -> Tensor:
        """Return the token (B, P, W) of each patch."""
        mean = values_BPV.mean(2)
        # torch.std_mean takes 0.85 ms instead of 0.05.
        std = (values_BPV.square().mean(2) - mean.square()).clamp_min(0).sqrt()
        tokens = self.project_patch(self.patch_norm(values_BPV)) + self.project_stats(
            torch.stack([mean, std], dim=-1)
        )
        return self.token_norm(tokens)


def masked_mean(states_BPW: Tensor, mask_BP: Tensor) -> Tensor:
    """Return the mean (B, W) over the positions where the mask is True."""
    weights = mask_BP.to(states_BPW.dtype)
    return (states_BPW * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def silence_padding(values_BMF: Tensor, frames_B: Tensor) -> Tensor:
    """Set all frames after the last real one to silence, including those whose window still reaches
    real samples."""
    if can_read(frames_B) and int(frames_B.min()) >= values_BMF.shape[2]:
        return values_BMF
    real_BF = torch.arange(values_BMF.shape[2], device=values_BMF.device) < frames_B[:, None]
    return values_BMF.masked_fill(~real_BF[:, None], SILENCE)


# ---- augmentation


def augment_spectrogram(
    spectrogram: Spectrogram, config: SpecAugmentConfig, draws: SpecAugmentDraws
) -> Spectrogram:
    """Stretch spectrograms in time and mask bands and frames."""
    random_BC = draws.random_BC
    if draws.tempo_B is not None:
        spectrogram = time_stretch(spectrogram, draws.tempo_B, draws.frames_B)
    values_BMF, frames_B = spectrogram.values_BMF, spectrogram.frames_B
    bands, frames = values_BMF.shape[1:]
    mask_BMF = torch.zeros_like(values_BMF, dtype=torch.bool)
    all_bands_B = torch.full_like(frames_B, bands)
    pairs = iter(random_BC[:, 1:].split(2, dim=1))
    for _ in range(config.band_masks):
        mask_BMF |= span_mask(all_bands_B, bands, config.max_band_fraction, next(pairs))[..., None]
    for _ in range(config.time_masks):
        mask_BMF |= span_mask(frames_B, frames, config.max_time_fraction, next(pairs))[:, None]
    masked_BMF = torch.where(mask_BMF, MEAN, values_BMF)
    return Spectrogram(silence_padding(masked_BMF, frames_B), frames_B)


def stretched_frames(frames_B: Tensor, tempo_B: Tensor, count: int) -> Tensor:
    """Return the number of frames at another tempo; what does not fit in `count` is cut off."""
    return (frames_B / tempo_B).ceil().clamp(1, count).to(frames_B)


def time_stretch(spectrogram: Spectrogram, tempo_B: Tensor, frames_B: Tensor) -> Spectrogram:
    """Change the tempo by a factor to `frames_B` frames, with linear interpolation between them."""
    values_BMF = spectrogram.values_BMF
    bands, count = values_BMF.shape[1:]
    source_BF = torch.arange(count, device=values_BMF.device) * tempo_B[:, None]
    left_BF = source_BF.long().clamp_max(count - 1)
    right_BF = (left_BF + 1).clamp_max(count - 1)
    left, right = (
        values_BMF.gather(2, index[:, None].expand(-1, bands, -1)) for index in (left_BF, right_BF)
    )
    stretched_BMF = torch.lerp(left, right, (source_BF - left_BF)[:, None])
    return Spectrogram(silence_padding(stretched_BMF, frames_B), frames_B)


def span_mask(real_B: Tensor, count: int, max_fraction: float, random_B2: Tensor) -> Tensor:
    """Return (B, count) bool: a span of at most `max_fraction` of the real positions."""
    width_B = random_B2[:, 0] * max_fraction * real_B
    start_B = random_B2[:, 1] * (real_B - width_B)
    positions = torch.arange(count, device=real_B.device)
    return (positions >= start_B[:, None]) & (positions + 1 <= (start_B + width_B)[:, None])


def sample_patches(
    real_B: Tensor, drop: float, generators: Sequence[Generator]
) -> tuple[Tensor, Tensor]:
    """Sample the patches that are kept, on the CPU.

    Returns their sorted indices (B, K), padded with 0, and how many there are of each segment.
    """
    rows = []
    for real, generator in zip(real_B.tolist(), generators, strict=True):
        keep = max(1, round(real * (1 - drop)))
        rows.append(torch.randperm(real, generator=generator)[:keep].sort().values)
    kept_BK = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return kept_BK, torch.tensor([len(row) for row in rows])
