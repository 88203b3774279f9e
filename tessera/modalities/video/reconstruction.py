"""What the tokenizer task has to know of clips: what a good reconstruction is, who judges it, which
networks there are.

Clips are (B, 3, T, H, W) in [-1, 1]. Of a picture or a short clip only the first frames are real
(`VideoBatch.lengths`), and the last of them is repeated after it. What is repeated counts neither
in the difference to the original nor in its measures, so pictures and clips are learnt from
together. The quantizer and the judges of motion see a clip that stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tessera.engine.task import Batch, Frozen
from tessera.losses import to_fp32
from tessera.metrics.image import MOST_DECIBELS, RANGE, SSIM_WINDOW, code_bits, psnr_B, ssim_B
from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
from tessera.modalities.image.perceptual import (
    ALARMS,
    PSNR,
    PerceptualConfig,
    perceptual_difference_B,
    train_metrics,
)
from tessera.modalities.video.discriminator import TemporalDiscriminatorConfig, slowed
from tessera.modalities.video.io.base import CLOCK_HZ
from tessera.modalities.video.magvit2 import VideoTokenizerConfig
from tessera.modalities.video.media import Video
from tessera.objectives.reconstruction import (
    AdversaryConfig,
    Discriminator,
    ReconstructionLoss,
    TokenizerConfig,
)


@dataclass(frozen=True, kw_only=True)
class VideoReconstructionConfig:
    pixel: Literal["l1", "l2"] = "l2"
    """Mean absolute or mean squared difference of the pixels."""
    perceptual: PerceptualConfig | None = None
    """A term on the features that a pretrained network sees in one frame of each clip, drawn anew;
    none leaves it out."""

    def validate_data(self, data: Any) -> None:
        if data.size < SSIM_WINDOW:
            raise ValueError(
                f"Frames of {data.size} x {data.size} are too small to be measured: SSIM looks through windows of "
                f"{SSIM_WINDOW} x {SSIM_WINDOW}. Use {SSIM_WINDOW + 1} or more."
            )

    def notice(self) -> str:
        return "" if self.perceptual is not None else "The perceptual term is off."

    def for_inference(self) -> VideoReconstructionConfig:
        """Without networks that only training needs."""
        return replace(self, perceptual=None)

    def build(self) -> VideoReconstructionLoss:
        return VideoReconstructionLoss(self)


class VideoReconstructionLoss(ReconstructionLoss):
    best_metric, alarms = PSNR, ALARMS

    def __init__(self, config: VideoReconstructionConfig):
        super().__init__()
        self.config = config
        self.features = Frozen(config.perceptual.build()) if config.perceptual is not None else None

    def target(self, examples: Any) -> Tensor:
        return examples.clips

    def preprocess(self, target: Tensor, data: Any, dtype: torch.dtype) -> Tensor:
        """Clips as these data have them; they are never resized here."""
        _, _, frames, high, to_fp32 = target.shape
        if (frames, high, to_fp32) != (data.frames, data.size, data.size):
            raise ValueError(
                f"Clips of {frames} frames of {to_fp32} x {high} were given, but this tokenizer learnt from {data.frames} frames "
                f"of {data.size} x {data.size}."
            )
        return target.to(dtype)

    def media(self, output: Tensor) -> list[Video]:
        return [Video.from_floats(clip, CLOCK_HZ) for clip in output.float().cpu().numpy()]

    # ---- the loss

    def terms(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        target = self.target(batch.examples)
        terms = {"pixel": over_real_frames_B(self.pixel_BT(output, target), batch).mean()}
        if self.features is not None and self.config.perceptual is not None:
            distance = perceptual_difference_B(
                self.features, drawn_frame(output, batch), drawn_frame(target, batch)
            ).mean()
            terms["perceptual"] = self.config.perceptual.weight * distance
        return terms

    def pixel_BT(self, output: Tensor, target: Tensor) -> Tensor:
        difference = to_fp32(output) - to_fp32(target)
        return (difference.abs() if self.config.pixel == "l1" else difference.square()).mean(
            (1, 3, 4)
        )

    def train_metrics(self, output: Tensor, batch: Batch) -> dict[str, Callable[[], Tensor]]:
        return train_metrics(output, self.target(batch.examples))

    # ---- measures

    def eval_step(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        target = self.target(batch.examples)
        frames = {
            "pixel": self.pixel_BT(output, target),
            "psnr": per_frame(psnr_B, output, target),
            "ssim": per_frame(ssim_B, output, target),
        }
        seen = {
            name: over_real_frames_B(value_BT, batch).double().sum()
            for name, value_BT in frames.items()
        }
        return (
            seen
            | self.observe_motion(output, target, batch)
            | {"pixels": torch.tensor(target[:, 0].numel())}
        )

    def observe_motion(self, output: Tensor, target: Tensor, batch: Batch) -> dict[str, Tensor]:
        """How well the differences between neighbouring frames are rebuilt, in clips that have any:
        flicker shows here."""
        moving_B = batch.examples.lengths > 1
        if target.shape[2] == 1:
            return {
                "moving": moving_B.sum(),
                "motion": torch.zeros((), dtype=torch.float64, device=target.device),
            }
        error_BT = (
            (output.clamp(-1, 1).diff(dim=2) - target.diff(dim=2)).double().square().mean((1, 3, 4))
        )
        psnr_BT = (10 * torch.log10(RANGE**2 / error_BT)).clamp(max=MOST_DECIBELS)
        real_BT = (
            torch.arange(1, target.shape[2], device=target.device) < batch.examples.lengths[:, None]
        )
        mean_B = (psnr_BT * real_BT).sum(1) / real_BT.sum(1).clamp_min(1)
        return {"moving": moving_B.sum(), "motion": mean_B[moving_B].sum()}

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        numbers = {
            name: float(totals[name] / totals["examples"]) for name in ("psnr", "ssim", "pixel")
        }
        if totals["moving"] > 0:
            numbers["frame_difference_psnr"] = float(totals["motion"] / totals["moving"])
        return numbers | {"bits_per_pixel": float(code_bits(totals["codes"]) / totals["pixels"])}

    def shown(self, output: Tensor, batch: Batch) -> list[Video]:
        """Each original beside its reconstruction, at its own speed."""
        examples = batch.examples
        shown = []
        for real, rebuilt, length, rate_hz in zip(
            examples.clips, output, examples.lengths.tolist(), examples.rates_hz
        ):
            pair = [
                Video.from_floats(clip[:, :length].float().cpu().numpy(), rate_hz)
                for clip in (real, rebuilt)
            ]
            shown.append(Video.beside(*pair))
        return shown


def over_real_frames_B(value_BT: Tensor, batch: Batch) -> Tensor:
    """The mean of each clip over the frames that it really has: every clip counts the same, in
    whatever batch it is."""
    lengths_B = batch.examples.lengths
    real_BT = torch.arange(value_BT.shape[1], device=value_BT.device) < lengths_B[:, None]
    return (value_BT * real_BT).sum(1) / lengths_B


def per_frame(measure_B: Any, output: Tensor, target: Tensor) -> Tensor:
    """(B, T): a measure of pictures, of every frame."""
    frames = [clips.transpose(1, 2).flatten(0, 1) for clips in (output, target)]
    return measure_B(*frames).view(len(output), -1)


def drawn_frame(clips: Tensor, batch: Batch) -> Tensor:
    """(B, 3, H, W): one real frame of each clip, the same whenever this batch is asked in this
    step."""
    drawn_B = torch.stack(
        [torch.rand((), generator=generator) for generator in batch.generators()]
    ).to(clips.device)
    moment_B = (drawn_B * batch.examples.lengths).long()
    return clips[torch.arange(len(clips), device=clips.device), :, moment_B]


@dataclass(frozen=True, kw_only=True)
class VideoAdversaryConfig(AdversaryConfig):
    frames: PatchDiscriminatorConfig | None = field(default_factory=PatchDiscriminatorConfig)
    """The judge of pictures: sees one frame of each clip, drawn anew at every step. None leaves it
    out."""
    motion: TemporalDiscriminatorConfig | None = field(default_factory=TemporalDiscriminatorConfig)
    """The judges of motion, one for each of `rates`: see whole clips. None leaves them out."""
    rates: tuple[int, ...] = (1, 2)
    """Each judge of motion sees every n-th frame: what flickers and what drags show at different
    speeds."""
    motion_weight: float = 1.0
    """How much the model heeds each of them, beside the judge of pictures."""

    def __post_init__(self) -> None:
        if self.frames is None and (self.motion is None or not self.rates):
            raise ValueError(
                "There is no judge in this adversary: give it `frames`, or `motion` and `rates`, or leave it out."
            )
        if any(rate < 1 for rate in self.rates) or len(set(self.rates)) != len(self.rates):
            raise ValueError(
                f"Each judge of motion sees every n-th frame, with its own n above 0; rates is {self.rates}."
            )

    def validate_data(self, data: Any) -> None:
        for name, judge in (("frames", self.frames), ("motion", self.motion)):
            if judge is not None and data.size < 2**judge.layers:
                raise ValueError(
                    f"The judge of {name} halves a frame {judge.layers} times, and frames of {data.size} x {data.size} are too "
                    f"small for that: use fewer task.adversary.{name}.layers, or frames of {2**judge.layers} or more."
                )

    def discriminators(self) -> dict[str, Discriminator]:
        discriminators = {}
        if self.frames is not None:
            discriminators["discriminator"] = Discriminator(self.frames.build(), drawn_frame)
        for rate in self.rates if self.motion is not None else ():
            discriminators[f"motion-{rate}"] = Discriminator(
                self.motion.build(), partial(every_nth, rate=rate), self.motion_weight
            )
        return discriminators


def every_nth(clips: Tensor, batch: Batch, rate: int) -> Tensor:
    """Pictures are clips that stand still."""
    return slowed(clips, rate)


@dataclass(frozen=True, kw_only=True)
class VideoTokenizerTaskConfig(TokenizerConfig):
    model: VideoTokenizerConfig = field(default_factory=VideoTokenizerConfig)
    reconstruction: VideoReconstructionConfig = field(default_factory=VideoReconstructionConfig)
    adversary: VideoAdversaryConfig | None = None
    """Discriminators that learn to tell reconstructions from originals; none leaves nothing of them
    behind."""
