"""What the tokenizer task has to know of sounds: what a good reconstruction is, who judges it,
which networks there are.

Sounds are (B, 1, N) in [-1, 1]. Of a short recording only the first `lengths` samples are real, and
silence follows: it counts in no term and no measure, and the judges hear it as silence on both
sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tessera.engine.task import Alarm, Batch, BestMetric
from tessera.losses import to_fp32
from tessera.losses.spectral import mel_distance_B, si_sdr_B, stft_distance_B
from tessera.metrics.image import code_bits
from tessera.metrics.speech import stoi_B
from tessera.modalities.audio.codec import AudioCodecConfig
from tessera.modalities.audio.discriminators import (
    BandDiscriminatorConfig,
    PeriodDiscriminatorConfig,
    ScaleDiscriminatorConfig,
)
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.pretrained_codec import PretrainedCodecConfig
from tessera.modalities.audio.speech_quality import can_be_measured, pesq
from tessera.objectives.reconstruction import (
    AdversaryConfig,
    Discriminator,
    ReconstructionLoss,
    TokenizerConfig,
)

AUDIBLE = 1e-3
"""A recording whose root mean square is below this is silent: how well it was rebuilt cannot be
said in decibels."""


@dataclass(frozen=True, kw_only=True)
class AudioReconstructionConfig:
    rate_hz: int = 16_000
    """Of the recordings, after resampling: mel bands are made for it, and it is what is written."""
    samples: float = 10.0
    """Weight of the mean absolute difference of the samples: it holds the phase, which spectra do
    not see. With 1, four clips were still at -27 dB after 200 steps; with 10 they were at 2.8."""
    mel: float = 1.0
    """Weight of the distance of mel spectra through windows of several lengths."""
    mel_windows: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    """In samples."""
    stft: float = 0.0
    """Weight of the distance of linear spectra."""
    stft_windows: tuple[int, ...] = (512, 1024, 2048)
    """In samples."""

    def __post_init__(self) -> None:
        for name in ("samples", "mel", "stft"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"The weight `{name}` of a codec's loss is 0 or more, but it is {getattr(self, name)}."
                )
        if not self.samples + self.mel + self.stft > 0:
            raise ValueError(
                "All weights of a codec's loss are 0, so it would learn nothing: raise samples, mel or stft."
            )

    def validate_data(self, data: Any) -> None:
        if data.rate_hz != self.rate_hz:
            raise ValueError(
                f"The data have {data.rate_hz} samples a second, but the loss is made for {self.rate_hz}: set both, "
                f"--data.rate-hz and --task.reconstruction.rate-hz, to the same."
            )

    def notice(self) -> str:
        return ""

    def for_inference(self) -> AudioReconstructionConfig:
        return self

    def build(self) -> AudioReconstructionLoss:
        return AudioReconstructionLoss(self)


class WaveformReconstructionLoss(ReconstructionLoss):
    """Of whatever is made from recordings: each has its own length."""

    def target(self, examples: Any) -> Tensor:
        return examples.samples

    def model_kwargs(self, examples: Any) -> dict[str, Tensor]:
        return {"lengths_B": examples.lengths}

    def preprocess(self, target: Tensor, data: Any, dtype: torch.dtype) -> Tensor:
        return target.to(dtype)


class AudioReconstructionLoss(WaveformReconstructionLoss):
    best_metric = BestMetric(metric="si_sdr")
    alarms = (
        Alarm(
            name="nothing but silence",
            metric="val_ema/rms_ratio",
            below=0.1,
            patience=2,
            after=500,
            hint="Reconstructions are ten times as quiet as their originals. Raise the rate or the weight of `samples`.",
        ),
    )

    def __init__(self, config: AudioReconstructionConfig):
        super().__init__()
        self.config = config
        self.weights = {"samples": config.samples, "mel": config.mel, "stft": config.stft}

    def media(self, output: Tensor) -> list[Audio]:
        """Zeros at the end are nothing at all: a codec writes them after the last symbol, and never
        by itself."""
        return [self.sound(samples_1N, ends(samples_1N)) for samples_1N in output]

    def sound(self, samples_1N: Tensor, length: int) -> Audio:
        return Audio(
            samples_1N[:, : max(1, length)].detach().float().cpu().numpy(), self.config.rate_hz
        )

    def terms(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        config, original, lengths_B = self.config, batch.examples.samples, batch.examples.lengths
        terms = {}
        if config.samples:
            terms["samples"] = config.samples * apart_B(output, original, lengths_B).mean()
        if config.mel:
            terms["mel"] = config.mel * self.mel_B(output, batch).mean()
        if config.stft:
            distance_B = stft_distance_B(
                output, original, lengths_B=lengths_B, windows=config.stft_windows
            )
            terms["stft"] = config.stft * distance_B.mean()
        return terms

    def mel_B(self, output: Tensor, batch: Batch) -> Tensor:
        return mel_distance_B(
            output,
            batch.examples.samples,
            rate_hz=self.config.rate_hz,
            lengths_B=batch.examples.lengths,
            windows=self.config.mel_windows,
        )

    def eval_step(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        original, lengths_B = batch.examples.samples, batch.examples.lengths
        loud_B, rebuilt_B = (loudness_B(sound, lengths_B) for sound in (original, output))
        heard_B = loud_B > AUDIBLE
        understood_B = stoi_B(
            output, original, rate_hz=self.config.rate_hz, lengths_B=lengths_B
        ).double()
        speech_B = understood_B.isfinite()
        return self.observe_quality(output, batch) | {
            "speech": speech_B.sum(),
            "stoi": understood_B[speech_B].sum(),
            "audible": heard_B.sum(),
            "si_sdr": si_sdr_B(output, original, lengths_B=lengths_B).double()[heard_B].sum(),
            "rms_ratio": (rebuilt_B / loud_B.clamp_min(AUDIBLE)).double()[heard_B].sum(),
            "mel": self.mel_B(output, batch).double().sum(),
            "stft": stft_distance_B(output, original, lengths_B=lengths_B).double().sum(),
            "seconds": lengths_B.double().sum() / self.config.rate_hz,
        }

    def observe_quality(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """PESQ, where it is installed and knows the rate."""
        if not can_be_measured(self.config.rate_hz):
            return {}
        pairs = zip(batch.examples.samples, output, batch.examples.lengths.tolist(), strict=True)
        sounds = [
            (self.sound(real, length), self.sound(made, length)) for real, made, length in pairs
        ]
        scores = [
            pesq(real.samples[0], made.samples[0], self.config.rate_hz) for real, made in sounds
        ]
        told = torch.tensor(
            [score for score in scores if score is not None],
            dtype=torch.float64,
            device=output.device,
        )
        return {"scored": torch.tensor(len(told), device=output.device), "pesq": told.sum()}

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        audible = totals["audible"].clamp_min(1)
        numbers = {
            "si_sdr": float(totals["si_sdr"] / audible),
            "mel_distance": float(totals["mel"] / totals["examples"]),
            "stft_distance": float(totals["stft"] / totals["examples"]),
            "rms_ratio": float(totals["rms_ratio"] / audible),
            "stoi": float(totals["stoi"] / totals["speech"].clamp_min(1)),
            "kilobits_per_second": float(code_bits(totals["codes"]) / totals["seconds"] / 1000),
        }
        if "pesq" in totals:
            numbers["pesq"] = float(totals["pesq"] / totals["scored"].clamp_min(1))
        return numbers

    def shown(self, output: Tensor, batch: Batch) -> list[Audio]:
        """Each original, and its reconstruction after it."""
        pairs = zip(batch.examples.samples, output, batch.examples.lengths.tolist(), strict=True)
        return [
            Audio.beside(self.sound(real, length), self.sound(rebuilt, length))
            for real, rebuilt, length in pairs
        ]


def apart_B(a_B1N: Tensor, b_B1N: Tensor, lengths_B: Tensor) -> Tensor:
    """The mean absolute difference of the samples that are real."""
    return (to_fp32(a_B1N) - to_fp32(b_B1N)).mul(real_B1N(a_B1N, lengths_B)).abs().sum(
        (1, 2)
    ) / lengths_B


def loudness_B(sounds_B1N: Tensor, lengths_B: Tensor) -> Tensor:
    """The root of the mean square."""
    return (
        (to_fp32(sounds_B1N) * real_B1N(sounds_B1N, lengths_B)).square().sum((1, 2)) / lengths_B
    ).sqrt()


def real_B1N(sounds_B1N: Tensor, lengths_B: Tensor) -> Tensor:
    """Which samples are real."""
    return torch.arange(sounds_B1N.shape[2], device=sounds_B1N.device) < lengths_B[:, None, None]


def ends(samples_1N: Tensor) -> int:
    """Where the last sample is that is not zero, and one more."""
    (sounding,) = samples_1N[0].nonzero(as_tuple=True)
    return int(sounding[-1]) + 1 if len(sounding) else 0


def as_long(sounds_B1N: Tensor, batch: Batch) -> Tensor:
    """What a judge hears: silence after the end, whatever was made there."""
    return sounds_B1N * real_B1N(sounds_B1N, batch.examples.lengths)


@dataclass(frozen=True, kw_only=True)
class AudioAdversaryConfig(AdversaryConfig):
    periods: PeriodDiscriminatorConfig | None = None
    """Hears every p-th sample; none leaves it out."""
    scales: ScaleDiscriminatorConfig | None = None
    """Hears the wave at several rates."""
    bands: BandDiscriminatorConfig | None = field(default_factory=BandDiscriminatorConfig)
    """Hears complex spectra, band by band."""

    def __post_init__(self) -> None:
        if not self.judges_asked():
            raise ValueError(
                "Of periods, scales and bands not one is to judge: choose one, or no adversary at all."
            )

    def judges_asked(self) -> dict[str, Any]:
        asked = {"periods": self.periods, "scales": self.scales, "bands": self.bands}
        return {name: config for name, config in asked.items() if config is not None}

    def discriminators(self) -> dict[str, Discriminator]:
        return {
            name: Discriminator(config.build(), as_long)
            for name, config in self.judges_asked().items()
        }


@dataclass(frozen=True, kw_only=True)
class AudioTokenizerConfig(TokenizerConfig):
    model: AudioCodecConfig | PretrainedCodecConfig = field(default_factory=AudioCodecConfig)
    reconstruction: AudioReconstructionConfig = field(default_factory=AudioReconstructionConfig)
    adversary: AudioAdversaryConfig | None = None
    """Discriminators that learn to tell reconstructions from originals; none leaves nothing of them
    behind."""
