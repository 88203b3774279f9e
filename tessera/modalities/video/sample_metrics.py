"""Metrics of generated videos: frames, motion, flicker, and agreement with the prompt.

N samples are compared with N held-out videos; N training videos are compared with the same ones for
the values of real videos, whose names end in `_real`.

- `frechet_lite0_frames`: the Frechet distance of features of EfficientNet-Lite0 of FRAMES frames of
  each video.
- `frechet_lite0_motion`: the same of differences between neighbouring frames, as images. Neither is
  the FVD, whose network is trained on videos.
- `motion_energy`: the mean squared difference of neighbouring frames, in (grey levels / 255)^2.
- `flicker`: the mean absolute second difference over time, which a steady motion keeps small.
- `class_accuracy`, where captions are classes, or `caption_R@1` and `caption_R@5`, where they are
  texts: by a linear probe of the middle frames, as for images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tessera.data.dataset import ExampleDataset
from tessera.data.loader import EvalLoader
from tessera.data.sample_metrics import Reference, SampleMetrics, Samples, choose_evenly
from tessera.metrics.image import frechet_distance, moments
from tessera.modalities.image.efficientnet_lite import is_installed
from tessera.modalities.image.embedding import EmbeddedImages, ImageEmbedder
from tessera.modalities.image.media import ImageBatch
from tessera.modalities.image.sample_metrics import NOT_INSTALLED, probe_prompts
from tessera.modalities.video.media import Video, VideoBatch

FRAMES = 3
"""The number of frames, and of differences, of each video whose features are computed."""
MAX_TRAINING = 256
"""The number of training videos that are compared and that probes are fitted on."""
BATCH_SIZE = 8


class VideoSetMetric:
    """The metrics of `tessera evaluate` that compare generated with real videos."""

    uses_prompts = False
    max_samples = 128

    def __call__(self, samples: Samples[Video]) -> SampleMetrics:
        reference = samples.reference
        assert reference is not None
        embedder = ImageEmbedder() if is_installed() else None
        generated = VideoSet.measure(batch_media(samples), embedder)
        held_out = VideoSet.measure(read_batches(reference.validation, reference.chosen), embedder)
        training = VideoSet.measure(
            read_batches(reference.train, choose_training(reference)), embedder
        )
        number = min(len(generated.energy_N), len(held_out.energy_N), len(training.energy_N))
        if number < 2:
            notice = (
                "The comparison of samples with real videos is left out: it needs two of each, "
                f"and there are {len(generated.energy_N)} samples, {len(held_out.energy_N)} "
                f"held-out and {len(training.energy_N)} training videos."
            )
            return SampleMetrics({}, notices=[notice])
        values = {
            "motion_energy": generated.energy_N.mean().item(),
            "motion_energy_real": held_out.energy_N.mean().item(),
            "flicker": generated.flicker_N.mean().item(),
            "flicker_real": held_out.flicker_N.mean().item(),
        }
        notices = [] if embedder is not None else [NOT_INSTALLED]
        if embedder is not None:
            values |= compare_features(generated, held_out, training, number)
            values |= probe_prompts(
                generated.middle, held_out.middle, training.middle, reference.has_classes
            )
        return SampleMetrics(values, {"compared_videos": number}, notices)


@dataclass(frozen=True)
class VideoSet:
    """Measurements of videos, in one order."""

    energy_N: Tensor
    flicker_N: Tensor
    frames_MD: Tensor
    """Features of frames, FRAMES rows for each video; no rows without a feature network."""
    motion_MD: Tensor
    """Features of differences of frames."""
    middle: EmbeddedImages
    """Features of the middle frames."""

    @classmethod
    def measure(cls, batches: Iterator[VideoBatch], embedder: ImageEmbedder | None) -> VideoSet:
        parts = [cls.measure_batch(batch, embedder) for batch in batches]
        if not parts:
            none = torch.zeros(0, 1)
            return cls(none[:, 0], none[:, 0], none, none, EmbeddedImages(none, none, none, []))
        return cls(
            torch.cat([part.energy_N for part in parts]),
            torch.cat([part.flicker_N for part in parts]),
            torch.cat([part.frames_MD for part in parts]),
            torch.cat([part.motion_MD for part in parts]),
            EmbeddedImages(
                torch.cat([part.middle.mean_ND for part in parts]),
                torch.cat([part.middle.grid_ND for part in parts]),
                torch.cat([part.middle.thumbnails_ND for part in parts]),
                [caption for part in parts for caption in part.middle.captions],
            ),
        )

    @classmethod
    def measure_batch(cls, batch: VideoBatch, embedder: ImageEmbedder | None) -> VideoSet:
        videos = batch.videos.float()
        energy_B, flicker_B = motion_energy_B(videos), flicker_of_B(videos)
        if embedder is None:
            none = torch.zeros(len(videos), 1)
            middle = EmbeddedImages(none, none, none, batch.captions)
            return cls(energy_B, flicker_B, none, none, middle)
        middle = embedder.embed_batch(
            ImageBatch(videos[:, :, videos.shape[2] // 2], batch.captions)
        )
        frames = spread_over_time(videos)
        motion = spread_over_time(videos.diff(dim=2) / 2) if videos.shape[2] > 1 else frames
        frames_MD, motion_MD = (embedder.compute_maps(one).mean((2, 3)) for one in (frames, motion))
        return cls(energy_B, flicker_B, frames_MD, motion_MD, middle)


def motion_energy_B(videos_B3THW: Tensor) -> Tensor:
    """Return the mean squared difference of neighbouring frames of each video, for [0, 1]."""
    if videos_B3THW.shape[2] < 2:
        return videos_B3THW.new_zeros(len(videos_B3THW))
    return (videos_B3THW.diff(dim=2) / 2).square().flatten(1).mean(1)


def flicker_of_B(videos_B3THW: Tensor) -> Tensor:
    """Return the mean absolute second difference over time of each video, for [0, 1]."""
    if videos_B3THW.shape[2] < 3:
        return videos_B3THW.new_zeros(len(videos_B3THW))
    return (videos_B3THW.diff(n=2, dim=2) / 2).abs().flatten(1).mean(1)


def spread_over_time(videos_B3THW: Tensor) -> Tensor:
    """Return FRAMES frames of each video, from the first to the last, (B x FRAMES, 3, H, W)."""
    last = videos_B3THW.shape[2] - 1
    numbers = [round(number) for number in np.linspace(0, last, FRAMES).tolist()]
    return videos_B3THW[:, :, numbers].transpose(1, 2).flatten(0, 1)


def compare_features(
    generated: VideoSet, held_out: VideoSet, training: VideoSet, number: int
) -> dict[str, float]:
    """Compare samples and training videos with held-out videos, the same number of each."""
    values: dict[str, float] = {}
    for name in ("frames", "motion"):
        real = moments(getattr(held_out, f"{name}_MD")[: number * FRAMES])
        for suffix, videos in (("", generated), ("_real", training)):
            other = moments(getattr(videos, f"{name}_MD")[: number * FRAMES])
            values[f"frechet_lite0_{name}{suffix}"] = frechet_distance(real, other)
    return values


def choose_training(reference: Reference) -> list[int]:
    """Return training videos that are not among the chosen held-out ones."""
    held_out = {reference.validation.name(index) for index in reference.chosen}
    count = MAX_TRAINING + len(held_out)
    indices = choose_evenly(reference.train, count, reference.has_classes)
    others = [index for index in indices if reference.train.name(index) not in held_out]
    return others[:MAX_TRAINING]


def read_batches(dataset: ExampleDataset, indices: Sequence[int]) -> Iterator[VideoBatch]:
    """Yield the videos of a dataset that can be read."""
    for batch in EvalLoader(dataset, seed=0, batch_size=BATCH_SIZE).batches(indices=indices):
        if isinstance(batch.examples, VideoBatch):
            yield batch.examples


def batch_media(samples: Samples[Video]) -> Iterator[VideoBatch]:
    """Yield the samples in batches."""
    for first in range(0, len(samples.media), BATCH_SIZE):
        media = samples.media[first : first + BATCH_SIZE]
        videos = torch.stack([torch.from_numpy(video.to_floats()) for video in media])
        yield VideoBatch(
            videos,
            torch.full((len(media),), videos.shape[2]),
            [video.rate_hz for video in media],
            list(samples.prompts[first : first + BATCH_SIZE]),
        )
