"""Reconstruction of videos: adapter, loss, metrics and discriminators of the tokenizer objective.

Videos are (B, 3, T, H, W) in [-1, 1]. Of an image or a short video only the first frames are valid
(`VideoBatch.lengths`), and the last of them is repeated after it. Repeated frames count neither in
the loss nor in the metrics, so images and videos can be trained on together. The quantizer and the
motion discriminators get the repeated frames too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor

from tessera.engine.device import copy_to_device
from tessera.engine.task import Batch, Frozen
from tessera.metrics.codebook import codebook_bits
from tessera.metrics.image import (
    DATA_RANGE,
    MAX_DECIBELS,
    SSIM_WINDOW,
    chroma_B,
    chroma_error_B,
    colour_differences,
    psnr_B,
    relative_chroma,
    relative_contrast,
    ssim_B,
)
from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
from tessera.modalities.image.perceptual import (
    ALARMS,
    PSNR,
    PerceptualConfig,
    perceptual_term,
)
from tessera.modalities.video.discriminator import TemporalDiscriminatorConfig, subsample_frames
from tessera.modalities.video.io.base import DEFAULT_RATE_HZ
from tessera.modalities.video.magvit2 import VideoTokenizer, VideoTokenizerConfig
from tessera.modalities.video.media import Video, VideoBatch
from tessera.nn.precision import to_fp32
from tessera.objectives.reconstruction import (
    AdversaryConfig,
    Discriminator,
    MediaAdapter,
    ReconstructionConfig,
    ReconstructionLoss,
    TokenizerConfig,
)

if TYPE_CHECKING:
    from tessera.modalities.video.dataset import VideoDataConfig


CHUNK_CODES = 4
"""Latent frames that are decoded at a time."""


class VideoAdapter(MediaAdapter):
    def target(self, examples: VideoBatch) -> Tensor:
        return examples.videos

    def preprocess(self, target: Tensor, data: VideoDataConfig, dtype: torch.dtype) -> Tensor:
        _, _, frames, height, width = target.shape
        if (frames, height, width) != (data.frames, data.size, data.size):
            raise ValueError(
                f"Got videos of {frames} frames of {width} x {height} pixels, but this tokenizer "
                f"was trained on {data.frames} frames of {data.size} x {data.size}."
            )
        return target.to(dtype)

    def bound(self, output: Tensor) -> Tensor:
        return output.clamp(-1, 1)

    def to_media(self, output: Tensor) -> list[Video]:
        return [Video.from_floats(one, DEFAULT_RATE_HZ) for one in output.float().cpu().numpy()]

    def encode_pieces(self, model: VideoTokenizer, pieces: Iterable[VideoBatch]) -> Tensor:
        """Encode a video; its last frame is repeated up to a number of frames that has codes."""
        dtype = next(model.parameters()).dtype

        def chunks() -> Iterator[Tensor]:
            frames, last = 0, None
            for piece in pieces:
                chunk = piece.videos[:, :, : int(piece.lengths[0])].to(dtype)
                frames, last = frames + chunk.shape[2], chunk[:, :, -1:]
                yield chunk
            missing = -(frames - 1) % model.config.time_factor
            if last is not None and missing:
                yield last.expand(-1, -1, missing, -1, -1)

        return torch.cat(list(model.encode_chunks(chunks())), dim=1)[0]

    def decode_pieces(
        self, model: VideoTokenizer, codes: Tensor, length: int, rate_hz: float
    ) -> Iterator[Video]:
        for output in model.decode_chunks(codes[None].split(CHUNK_CODES, dim=1)):
            frames = self.bound(output)[0, :, :length]
            length -= frames.shape[1]
            if frames.shape[1]:
                yield Video.from_floats(frames.float().cpu().numpy(), rate_hz)

    def original(self, examples: VideoBatch) -> Video:
        frames = examples.videos[0, :, : int(examples.lengths[0])]
        return Video.from_floats(frames.float().cpu().numpy(), examples.rates_hz[0])

    def show_pairs(self, output: Tensor, batch: Batch[VideoBatch]) -> list[Video]:
        """Return each original side by side with its reconstruction, at its own frame rate."""
        examples, shown = batch.examples, []
        rows = zip(examples.videos, output, examples.lengths.tolist(), examples.rates_hz)
        for real, made, length, rate_hz in rows:
            cut = (one[:, :length].float().cpu().numpy() for one in (real, made))
            shown.append(Video.side_by_side(*(Video.from_floats(one, rate_hz) for one in cut)))
        return shown


@dataclass(frozen=True, kw_only=True)
class VideoReconstructionConfig(ReconstructionConfig):
    pixel: Literal["l1", "l2"] = "l2"
    """The pixel loss: mean absolute or mean squared difference."""
    chroma_weight: float = 0.0
    """The weight of the squared error of the two colour differences, on top of the pixel loss; 0
    disables it."""
    motion_weight: float = 0.0
    """The weight of the pixel loss of the differences between neighbouring frames, in which flicker
    and smeared motion are large; 0 disables it."""
    perceptual: PerceptualConfig | None = None
    """A loss on pretrained features of one random frame of each video; None disables it."""

    def validate_data(self, data: VideoDataConfig) -> None:
        if data.size < SSIM_WINDOW:
            raise ValueError(
                f"The frame size is {data.size}, but SSIM needs windows of {SSIM_WINDOW} x "
                f"{SSIM_WINDOW} pixels: use --data.size {SSIM_WINDOW + 1} or more."
            )

    def notice(self, data: VideoDataConfig) -> str:
        return "" if self.perceptual is not None else "The perceptual loss is disabled."

    def for_inference(self) -> Self:
        return replace(self, perceptual=None)

    def build(self) -> VideoReconstructionLoss:
        return VideoReconstructionLoss(self)


class VideoReconstructionLoss(ReconstructionLoss):
    best_metric, alarms = PSNR, ALARMS

    def __init__(self, config: VideoReconstructionConfig):
        super().__init__()
        self.config = config
        self.perceptual = (
            Frozen(config.perceptual.build()) if config.perceptual is not None else None
        )

    def losses(self, output: Tensor, batch: Batch[VideoBatch]) -> dict[str, Tensor]:
        target = batch.examples.videos
        terms = {"pixel": mean_over_frames_B(self.pixel_loss_BT(output, target), batch).mean()}
        if self.config.chroma_weight:
            # Squared whatever the pixel loss, for the reason in the reconstruction of images.
            error = colour_differences(output) - colour_differences(target)
            chroma = mean_over_frames_B(error.square().mean((1, 3, 4)), batch).mean()
            terms["chroma"] = self.config.chroma_weight * chroma
        if self.config.motion_weight and target.shape[2] > 1:
            loss_BT = self.pixel_loss_BT(output.diff(dim=2), target.diff(dim=2))
            terms["motion"] = self.config.motion_weight * mean_over_motion_B(loss_BT, batch).mean()
        if self.perceptual is not None and self.config.perceptual is not None:
            made, real = (select_random_frame(videos, batch) for videos in (output, target))
            terms["perceptual"] = perceptual_term(
                self.perceptual, self.config.perceptual, made, real, batch
            )
        return terms

    def pixel_loss_BT(self, output: Tensor, target: Tensor) -> Tensor:
        difference = to_fp32(output) - to_fp32(target)
        loss = difference.abs() if self.config.pixel == "l1" else difference.square()
        return loss.mean((1, 3, 4))

    def train_metrics(
        self, output: Tensor, batch: Batch[VideoBatch]
    ) -> dict[str, Callable[[], Tensor]]:
        return {"contrast": partial(relative_contrast, output, batch.examples.videos)}

    def eval_step(self, output: Tensor, batch: Batch[VideoBatch]) -> dict[str, Tensor]:
        target = batch.examples.videos
        by_frame = {
            "pixel": self.pixel_loss_BT(output, target),
            "psnr": apply_per_frame(psnr_B, output, target),
            "ssim": apply_per_frame(ssim_B, output, target),
            "reconstruction/chroma": apply_per_frame(chroma_B, output),
            "real/chroma": apply_per_frame(chroma_B, target),
            "chroma_error": apply_per_frame(chroma_error_B, output, target),
        }
        sums = {
            name: mean_over_frames_B(value_BT, batch).double().sum()
            for name, value_BT in by_frame.items()
        }
        pixels = torch.tensor(target[:, 0].numel())
        return sums | self.motion_sums(output, target, batch) | {"pixels": pixels}

    def motion_sums(
        self, output: Tensor, target: Tensor, batch: Batch[VideoBatch]
    ) -> dict[str, Tensor]:
        """Return the PSNR of differences of neighbouring frames, in which flicker is visible."""
        lengths_B = batch.examples.lengths
        is_video_B = lengths_B > 1
        if target.shape[2] == 1:
            zero = torch.zeros((), dtype=torch.float64, device=target.device)
            return {"videos": is_video_B.sum(), "motion": zero}
        error = output.clamp(-1, 1).diff(dim=2) - target.diff(dim=2)
        error_BT = error.double().square().mean((1, 3, 4))
        psnr_BT = (10 * torch.log10(DATA_RANGE**2 / error_BT)).clamp(max=MAX_DECIBELS)
        valid_BT = torch.arange(1, target.shape[2], device=target.device) < lengths_B[:, None]
        mean_B = (psnr_BT * valid_BT).sum(1) / valid_BT.sum(1).clamp_min(1)
        return {"videos": is_video_B.sum(), "motion": mean_B[is_video_B].sum()}

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        names = ("psnr", "ssim", "pixel")
        metrics = {name: float(totals[name] / totals["examples"]) for name in names}
        metrics |= relative_chroma(totals)
        if totals["videos"] > 0:
            metrics["frame_difference_psnr"] = float(totals["motion"] / totals["videos"])
        bits = codebook_bits(totals["codes"])
        return metrics | {"bits_per_pixel": float(bits / totals["pixels"])}


def mean_over_frames_B(value_BT: Tensor, batch: Batch[VideoBatch]) -> Tensor:
    """Return the mean over the valid frames of each video, so that all videos count the same."""
    lengths_B = batch.examples.lengths
    valid_BT = torch.arange(value_BT.shape[1], device=value_BT.device) < lengths_B[:, None]
    return (value_BT * valid_BT).sum(1) / lengths_B


def mean_over_motion_B(value_BT: Tensor, batch: Batch[VideoBatch]) -> Tensor:
    """Return the mean over the differences of valid frames; 0 for an image, which has none."""
    lengths_B = batch.examples.lengths
    valid_BT = torch.arange(1, value_BT.shape[1] + 1, device=value_BT.device) < lengths_B[:, None]
    return (value_BT * valid_BT).sum(1) / (lengths_B - 1).clamp_min(1)


def apply_per_frame(metric_B: Callable[..., Tensor], *videos: Tensor) -> Tensor:
    """Apply an image metric to every frame, (B, T)."""
    frames = [one.transpose(1, 2).flatten(0, 1) for one in videos]
    return metric_B(*frames).view(len(videos[0]), -1)


def select_random_frame(videos: Tensor, batch: Batch[VideoBatch]) -> Tensor:
    """Return one valid frame of each video, (B, 3, H, W), the same at each call within a step."""
    u_B = torch.stack([torch.rand((), generator=one) for one in batch.generators()])
    frame_B = (copy_to_device(u_B, videos.device) * batch.examples.lengths).long()
    return videos[torch.arange(len(videos), device=videos.device), :, frame_B]


@dataclass(frozen=True, kw_only=True)
class VideoAdversaryConfig(AdversaryConfig):
    frames: PatchDiscriminatorConfig | None = field(default_factory=PatchDiscriminatorConfig)
    """The frame discriminator, which gets one random frame of each video; None disables it."""
    motion: TemporalDiscriminatorConfig | None = field(default_factory=TemporalDiscriminatorConfig)
    """The motion discriminators, one for each of `rates`, which get whole videos; None disables
    them."""
    rates: tuple[int, ...] = (1, 2)
    """Each motion discriminator gets every n-th frame, to detect flicker and slow drift."""
    motion_weight: float = 1.0
    """The weight of each motion discriminator relative to the frame discriminator."""

    def __post_init__(self) -> None:
        if self.frames is None and (self.motion is None or not self.rates):
            raise ValueError(
                "This adversary has no discriminator: set `frames`, or `motion` and `rates`, or "
                "leave the adversary out."
            )
        if any(rate < 1 for rate in self.rates) or len(set(self.rates)) != len(self.rates):
            raise ValueError(f"rates must be different integers of at least 1, got {self.rates}.")

    def validate_data(self, data: VideoDataConfig) -> None:
        for name, config in (("frame", self.frames), ("motion", self.motion)):
            if config is not None and data.size < 2**config.layers:
                raise ValueError(
                    f"The {name} discriminator halves a frame {config.layers} times, but the frame "
                    f"size is {data.size}: use --data.size {2**config.layers} or more, or fewer "
                    "layers."
                )

    def discriminators(self) -> dict[str, Discriminator]:
        discriminators = {}
        if self.frames is not None:
            frame_network = self.frames.build()
            discriminators["discriminator"] = Discriminator(frame_network, select_random_frame)
        for rate in self.rates if self.motion is not None else ():
            assert self.motion is not None
            view = partial(view_every_nth_frame, rate=rate)
            network = self.motion.build()
            discriminators[f"motion-{rate}"] = Discriminator(network, view, self.motion_weight)
        return discriminators


def view_every_nth_frame(videos: Tensor, batch: Batch[VideoBatch], rate: int) -> Tensor:
    return subsample_frames(videos, rate)


@dataclass(frozen=True, kw_only=True)
class VideoTokenizerTaskConfig(TokenizerConfig):
    model: VideoTokenizerConfig = field(default_factory=VideoTokenizerConfig)
    reconstruction: VideoReconstructionConfig = field(default_factory=VideoReconstructionConfig)
    adversary: VideoAdversaryConfig | None = None
    """Discriminators that are trained with the tokenizer; None disables them."""

    def build_adapter(self) -> VideoAdapter:
        return VideoAdapter()
