"""Reconstruction of audio: adapter, loss, metrics and discriminators of the tokenizer objective.

Audio is (B, C, N) in [-1, 1]. Of a short example only the first `lengths` samples are valid and
silence follows, which counts in no loss and no metric.

Stereo has two channels, left and right. Losses and spectral distances are the mean of both,
discriminators get each of them as an example; SI-SDR and the ratio of levels have the samples of
both as one signal; speech is detected and measured in their average. `side_rms_ratio` is the level
of the side, half of left minus right, in relation to that of the original.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.engine.task import Alarm, Batch, BestMetric
from tessera.losses.spectral import STFT_WINDOWS, mel_distance_B, stft_distance_B
from tessera.metrics.audio import si_sdr_B
from tessera.metrics.codebook import codebook_bits
from tessera.metrics.speech import stoi_B
from tessera.modalities.audio.codec import to_mid_side
from tessera.modalities.audio.discriminators import (
    BandDiscriminatorConfig,
    PeriodDiscriminatorConfig,
    ScaleDiscriminatorConfig,
)
from tessera.modalities.audio.media import Audio, AudioBatch
from tessera.modalities.audio.pretrained_codec import PretrainedCodecConfig
from tessera.modalities.audio.soundstream import SoundStreamConfig
from tessera.modalities.audio.spectral_codec import SpectralCodecConfig
from tessera.modalities.audio.speech_detection import detect_speech
from tessera.modalities.audio.speech_quality import pesq, pesq_available
from tessera.modalities.audio.tokenizer import AudioTokenizer
from tessera.nn.precision import full_precision, to_fp32
from tessera.objectives.reconstruction import (
    AdversaryConfig,
    ChunkedModel,
    Discriminator,
    MediaAdapter,
    ReconstructionConfig,
    ReconstructionLoss,
    TokenizerConfig,
)

if TYPE_CHECKING:
    from tessera.modalities.audio.dataset import AudioDataConfig

MAX_WHOLE_SAMPLES = 10_000_000
"""Models that cannot process chunks encode and decode this much at a time: ten minutes at 16 kHz.
"""
CHUNK_FRAMES = 1500
"""Frames that are decoded at a time: 30 seconds at 50 frames per second."""
MAX_DECAY = 9.0
"""Where a low-pass kernel ends: at exp(-9), a ten-thousandth of its peak."""
MIN_RMS = 1e-3
"""Examples below this root mean square are silent, and SI-SDR is not defined for them."""


class WaveformAdapter(MediaAdapter):
    """The inputs of every model over waveforms."""

    def target(self, examples: AudioBatch) -> Tensor:
        return examples.samples

    def model_kwargs(self, examples: AudioBatch) -> dict[str, Tensor]:
        return {"lengths_B": examples.lengths}

    def num_bytes(self, examples: AudioBatch) -> int:
        """Return the size of the samples with 16 bits."""
        return 2 * examples.samples.shape[1] * int(examples.lengths.sum())

    def encode_pieces(self, model: AudioTokenizer, pieces: Iterable[AudioBatch]) -> Tensor:
        dtype = next(model.parameters()).dtype
        chunks = (one.samples[..., : int(one.lengths[0])].to(dtype) for one in pieces)
        if isinstance(model, ChunkedModel):
            codes = list(model.encode_chunks(chunks))
        else:
            codes = [model.encode(part) for part in join_chunks(chunks, model.hop)]
        return torch.cat(codes, dim=1)[0]


class AudioAdapter(WaveformAdapter):
    def __init__(self, rate_hz: int):
        self.rate_hz = rate_hz

    def bound(self, output: Tensor) -> Tensor:
        return output.clamp(-1, 1)

    def to_media(self, output: Tensor) -> list[Audio]:
        """Convert output to audio; trailing zeros, which a codec writes as padding, are cut."""
        return [self.to_audio(samples_CN, find_end(samples_CN)) for samples_CN in output]

    def to_audio(self, samples_CN: Tensor, length: int) -> Audio:
        return Audio(samples_CN[:, : max(1, length)].detach().float().cpu().numpy(), self.rate_hz)

    def original(self, examples: AudioBatch) -> Audio:
        return self.to_audio(examples.samples[0], int(examples.lengths[0]))

    def decode_pieces(
        self, model: AudioTokenizer, codes: Tensor, length: int, rate_hz: float
    ) -> Iterator[Audio]:
        if isinstance(model, ChunkedModel):
            outputs = model.decode_chunks(codes[None].split(CHUNK_FRAMES, dim=1))
        else:
            frames = max(1, MAX_WHOLE_SAMPLES // model.hop)
            outputs = (model.decode(part) for part in codes[None].split(frames, dim=1))
        for output in outputs:
            samples_CN = self.bound(output)[0, :, :length]
            length -= samples_CN.shape[1]
            if samples_CN.shape[1]:
                yield self.to_audio(samples_CN, samples_CN.shape[1])

    def show_pairs(self, output: Tensor, batch: Batch[AudioBatch]) -> list[Audio]:
        """Return each original followed by its reconstruction."""
        examples = batch.examples
        rows = zip(examples.samples, output, examples.lengths.tolist(), strict=True)
        return [
            Audio.side_by_side(self.to_audio(real, length), self.to_audio(made, length))
            for real, made, length in rows
        ]


def join_chunks(chunks: Iterable[Tensor], hop: int) -> Iterator[Tensor]:
    """Join chunks (1, C, n) to parts of whole frames, of about MAX_WHOLE_SAMPLES."""
    parts: list[Tensor] = []
    for chunk in chunks:
        parts.append(chunk)
        count = sum(part.shape[2] for part in parts)
        if count >= MAX_WHOLE_SAMPLES:
            joined = torch.cat(parts, dim=2)
            whole = count // hop * hop
            yield joined[..., :whole]
            parts = [joined[..., whole:]]
    rest = torch.cat(parts, dim=2) if parts else None
    if rest is not None and rest.shape[2]:
        yield rest


@dataclass(frozen=True, kw_only=True)
class AudioReconstructionConfig(ReconstructionConfig):
    rate_hz: int = 16_000
    """The sampling rate of the data, for the mel bands of the loss."""
    samples: float = 10.0
    """The weight of the mean absolute difference of samples, which determines the phase. With 1,
    four examples were still at -27 dB after 200 steps; with 10 they were at 2.8."""
    samples_cutoff_hz: float | None = None
    """The frequency above which the difference of samples is attenuated, by 6 dB there and by 12 dB
    for each octave above. A few kilobits per second cannot describe the phase of high frequencies,
    and without a cutoff they become silent instead of noise of the right level. None compares all
    frequencies alike."""
    mel: float = 1.0
    """The weight of the multi-resolution mel distance."""
    mel_windows: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    """The window lengths of the mel distance in samples."""
    stft: float = 0.0
    """The weight of the multi-resolution STFT distance."""
    stft_windows: tuple[int, ...] = (512, 1024, 2048)
    """The window lengths of the STFT distance in samples."""
    speech_metrics: Literal["auto", "always", "never"] = "auto"
    """When STOI and PESQ are reported: `auto` reports them for examples that are detected as
    speech."""

    def __post_init__(self) -> None:
        for name in ("samples", "mel", "stft"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"The loss weight {name} must be at least 0, got {getattr(self, name)}."
                )
        if self.samples_cutoff_hz is not None and not self.samples_cutoff_hz > 0:
            raise ValueError(
                f"samples_cutoff_hz must be above 0, or None, got {self.samples_cutoff_hz}."
            )
        if not self.samples + self.mel + self.stft > 0:
            raise ValueError("All loss weights are 0: set samples, mel or stft above 0.")

    def validate_data(self, data: AudioDataConfig) -> None:
        if data.rate_hz != self.rate_hz:
            raise ValueError(
                f"The data have {data.rate_hz} samples per second, but the loss is configured for "
                f"{self.rate_hz}: set --data.rate-hz and --task.reconstruction.rate-hz to the same."
            )

    def build(self) -> AudioReconstructionLoss:
        return AudioReconstructionLoss(self)


def mel_windows(rate_hz: int) -> tuple[int, ...]:
    """Return the windows of the metric `mel_distance`, whatever those of the loss are.

    They are twice as long where the rate is about twice as high.
    """
    scale = 2 if rate_hz > 32_000 else 1
    return tuple(scale * window for window in (64, 128, 256, 512, 1024, 2048))


class AudioReconstructionLoss(ReconstructionLoss):
    best_metric = BestMetric(name="si_sdr")
    alarms = (
        Alarm(
            name="silent output",
            metric="val_ema/rms_ratio",
            below=0.1,
            patience=2,
            after=500,
            hint="Reconstructions are ten times quieter than originals. Raise the learning rate or "
            "the weight of `samples`.",
        ),
        Alarm(
            name="half as loud",
            metric="val_ema/rms_ratio",
            below=0.5,
            patience=2,
            after=500,
            hint="Reconstructions have less than half of the amplitude of originals: what is not "
            "predicted becomes silent. Train longer, use more quantizers, or raise the weight of "
            "`mel`.",
        ),
        Alarm(
            name="no pitch",
            metric="val_ema/si_sdr",
            below=-5.0,
            patience=2,
            after=500,
            hint="Reconstructions have the loudness of originals but not their waveform, so they "
            "sound like noise. Raise the weight of `samples`, use the network `spectral`, or train "
            "longer.",
        ),
    )

    def __init__(self, config: AudioReconstructionConfig):
        super().__init__()
        self.config = config
        cutoff_hz = config.samples_cutoff_hz
        kernel = None if cutoff_hz is None else low_pass_kernel(cutoff_hz, config.rate_hz)
        self.register_buffer("low_pass", kernel, persistent=False)
        self.low_pass: Tensor | None
        self.weights = {"samples": config.samples, "mel": config.mel, "stft": config.stft}

    def losses(self, output: Tensor, batch: Batch[AudioBatch]) -> dict[str, Tensor]:
        config, examples = self.config, batch.examples
        terms = {}
        if config.samples:
            difference_B = sample_difference_B(
                output, examples.samples, examples.lengths, self.low_pass
            )
            terms["samples"] = config.samples * difference_B.mean()
        if config.mel:
            terms["mel"] = config.mel * self.mel_B(output, batch, config.mel_windows).mean()
        if config.stft:
            terms["stft"] = config.stft * self.stft_B(output, batch, config.stft_windows).mean()
        return terms

    def mel_B(self, output: Tensor, batch: Batch[AudioBatch], windows: Sequence[int]) -> Tensor:
        distance_R = mel_distance_B(
            split_channels(output),
            split_channels(batch.examples.samples),
            rate_hz=self.config.rate_hz,
            lengths_B=batch.examples.lengths.repeat_interleave(output.shape[1]),
            windows=windows,
        )
        return mean_over_channels(distance_R, output)

    def stft_B(self, output: Tensor, batch: Batch[AudioBatch], windows: Sequence[int]) -> Tensor:
        distance_R = stft_distance_B(
            split_channels(output),
            split_channels(batch.examples.samples),
            lengths_B=batch.examples.lengths.repeat_interleave(output.shape[1]),
            windows=windows,
        )
        return mean_over_channels(distance_R, output)

    def eval_step(self, output: Tensor, batch: Batch[AudioBatch]) -> dict[str, Tensor]:
        original, lengths_B = batch.examples.samples, batch.examples.lengths
        pair = interleave_channels(output), interleave_channels(original)
        si_sdr = si_sdr_B(*pair, lengths_B=output.shape[1] * lengths_B).double()
        levels = sum_levels(rms(output, lengths_B), rms(original, lengths_B))
        sums = {
            "audible": levels.audible_B.sum(),
            "si_sdr": si_sdr[levels.audible_B].sum(),
            "rms_ratio": levels.ratio,
            "mel": self.mel_B(output, batch, mel_windows(self.config.rate_hz)).double().sum(),
            "stft": self.stft_B(output, batch, STFT_WINDOWS).double().sum(),
            "seconds": lengths_B.double().sum() / self.config.rate_hz,
        }
        if output.shape[1] == 2:
            side = sum_levels(
                *(rms(to_mid_side(one)[:, 1:], lengths_B) for one in (output, original))
            )
            sums |= {"wide": side.audible_B.sum(), "side_rms_ratio": side.ratio}
        return self.speech_sums(output, batch) | sums

    def speech_sums(self, output: Tensor, batch: Batch[AudioBatch]) -> dict[str, Tensor]:
        """Return STOI and, where it is installed and supports the rate, PESQ of speech."""
        lengths_B, rate_hz = batch.examples.lengths, self.config.rate_hz
        made, real = (audio.mean(1, keepdim=True) for audio in (output, batch.examples.samples))
        is_speech = [
            self.is_speech(samples_1N[0, :length])
            for samples_1N, length in zip(real, lengths_B.tolist(), strict=True)
        ]
        chosen = torch.tensor(is_speech, device=output.device)
        if not chosen.any():
            return {}
        made, real, lengths_B = made[chosen], real[chosen], lengths_B[chosen]
        stoi = stoi_B(made, real, rate_hz=rate_hz, lengths_B=lengths_B).double()
        defined = stoi.isfinite()
        sums = {"speech": defined.sum(), "stoi": stoi[defined].sum()}
        if pesq_available(rate_hz):
            rows = zip(real, made, lengths_B.tolist(), strict=True)
            pairs = [
                [one[0, : max(1, length)].float().cpu().numpy() for one in pair]
                for *pair, length in rows
            ]
            scores = [pesq(original, decoded, rate_hz) for original, decoded in pairs]
            known = [score for score in scores if score is not None]
            values = torch.tensor(known, dtype=torch.float64, device=output.device)
            count = torch.tensor(len(values), device=output.device)
            sums |= {"scored": count, "pesq": values.sum()}
        return sums

    def is_speech(self, samples_N: Tensor) -> bool:
        if self.config.speech_metrics != "auto":
            return self.config.speech_metrics == "always"
        return detect_speech(samples_N.float().cpu().numpy(), self.config.rate_hz)

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        audible = totals["audible"].clamp_min(1)
        metrics = {
            "si_sdr": float(totals["si_sdr"] / audible),
            "mel_distance": float(totals["mel"] / totals["examples"]),
            "stft_distance": float(totals["stft"] / totals["examples"]),
            "rms_ratio": float(totals["rms_ratio"] / audible),
        }
        if totals.get("wide", 0) > 0:
            metrics["side_rms_ratio"] = float(totals["side_rms_ratio"] / totals["wide"])
        bits = codebook_bits(totals["codes"])
        metrics["kilobits_per_second"] = float(bits / totals["seconds"] / 1000)
        if totals.get("speech", 0) > 0:
            metrics["stoi"] = float(totals["stoi"] / totals["speech"])
        if totals.get("scored", 0) > 0:
            metrics["pesq"] = float(totals["pesq"] / totals["scored"])
        return metrics


@dataclass
class Levels:
    """Sums over the examples of a batch that are not silent."""

    audible_B: Tensor
    ratio: Tensor


def sum_levels(output_rms_B: Tensor, rms_B: Tensor) -> Levels:
    """Add up the ratios of levels of outputs and originals."""
    audible_B = rms_B > MIN_RMS
    ratio_B = (output_rms_B / rms_B.clamp_min(MIN_RMS)).double()
    return Levels(audible_B, ratio_B[audible_B].sum())


def split_channels(audio_BCN: Tensor) -> Tensor:
    """Return each channel as an example, (B C, 1, N)."""
    return audio_BCN.flatten(0, 1)[:, None]


def mean_over_channels(values_R: Tensor, audio_BCN: Tensor) -> Tensor:
    """Return the mean over the channels of each example, (B,)."""
    return values_R.unflatten(0, audio_BCN.shape[:2]).mean(1)


def interleave_channels(audio_BCN: Tensor) -> Tensor:
    """Return the samples of all channels as one signal, (B, 1, N C); padding stays at the end."""
    return audio_BCN.mT.reshape(len(audio_BCN), 1, -1)


def sample_difference_B(
    a_BCN: Tensor, b_BCN: Tensor, lengths_B: Tensor, kernel_W: Tensor | None = None
) -> Tensor:
    """Return the mean absolute difference of the valid samples, filtered by a kernel if given."""
    valid_B1N = valid_samples(a_BCN, lengths_B)
    difference = (to_fp32(a_BCN) - to_fp32(b_BCN)) * valid_B1N
    if kernel_W is not None:
        channels = difference.shape[1]
        with full_precision(difference.device.type):
            kernel_C1W = kernel_W.to(difference).expand(channels, 1, -1)
            filtered = F.conv1d(difference, kernel_C1W, padding="same", groups=channels)
            difference = filtered * valid_B1N
    return difference.abs().sum((1, 2)) / (difference.shape[1] * lengths_B)


def low_pass_kernel(cutoff_hz: float, rate_hz: int) -> Tensor:
    """Return a kernel with the response 1 / (1 + (f / cutoff)^2), a two-sided exponential, (W,)."""
    decay = 2 * math.pi * cutoff_hz / rate_hz
    reach = math.ceil(MAX_DECAY / decay)
    kernel = torch.exp(-decay * torch.arange(-reach, reach + 1).abs())
    return kernel / kernel.sum()


def rms(audio_BCN: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the root mean square of the valid samples of all channels, (B,)."""
    valid = to_fp32(audio_BCN) * valid_samples(audio_BCN, lengths_B)
    return (valid.square().sum((1, 2)) / (audio_BCN.shape[1] * lengths_B)).sqrt()


def valid_samples(audio_BCN: Tensor, lengths_B: Tensor) -> Tensor:
    """Return which samples are not padding, (B, 1, N)."""
    return torch.arange(audio_BCN.shape[2], device=audio_BCN.device) < lengths_B[:, None, None]


def find_end(samples_CN: Tensor) -> int:
    """Return the index after the last sample that is not zero in some channel."""
    (nonzero,) = samples_CN.any(0).nonzero(as_tuple=True)
    return int(nonzero[-1]) + 1 if len(nonzero) else 0


def view_valid(audio_BCN: Tensor, batch: Batch[AudioBatch]) -> Tensor:
    """Return the input of the discriminators: each channel, with silence after the end."""
    return split_channels(audio_BCN * valid_samples(audio_BCN, batch.examples.lengths))


DiscriminatorConfig = PeriodDiscriminatorConfig | ScaleDiscriminatorConfig | BandDiscriminatorConfig


@dataclass(frozen=True, kw_only=True)
class AudioAdversaryConfig(AdversaryConfig):
    periods: PeriodDiscriminatorConfig | None = None
    """The multi-period discriminator, which gets every p-th sample; None disables it."""
    scales: ScaleDiscriminatorConfig | None = None
    """The multi-scale discriminator, which gets the waveform at several rates; None disables it."""
    bands: BandDiscriminatorConfig | None = field(default_factory=BandDiscriminatorConfig)
    """The multi-band discriminator, which gets complex spectrograms; None disables it."""

    def __post_init__(self) -> None:
        if not self.configs():
            raise ValueError(
                "This adversary has no discriminator: set periods, scales or bands, or leave the "
                "adversary out."
            )

    def configs(self) -> dict[str, DiscriminatorConfig]:
        configs = {"periods": self.periods, "scales": self.scales, "bands": self.bands}
        return {name: config for name, config in configs.items() if config is not None}

    def discriminators(self) -> dict[str, Discriminator]:
        return {
            name: Discriminator(config.build(), view_valid)
            for name, config in self.configs().items()
        }


@dataclass(frozen=True, kw_only=True)
class AudioTokenizerConfig(TokenizerConfig):
    model: SpectralCodecConfig | SoundStreamConfig | PretrainedCodecConfig = field(
        default_factory=SpectralCodecConfig
    )
    reconstruction: AudioReconstructionConfig = field(default_factory=AudioReconstructionConfig)
    adversary: AudioAdversaryConfig | None = None
    """Discriminators that are trained with the codec; None disables them."""

    def build_adapter(self) -> AudioAdapter:
        return AudioAdapter(self.reconstruction.rate_hz)
