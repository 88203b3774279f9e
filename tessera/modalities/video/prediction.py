"""Prediction of frames: how near generated frames are to those of held-out videos.

The first frames of held-out videos are given with their captions, and the PSNR of the generated
ones is reported by their distance from the last given frame (`prediction_psnr_1` and so on, of up
to MAX_DISTANCE frames), beside that of a copy of the last given frame (`copy_psnr_1`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tessera.metrics.image import psnr_B
from tessera.modalities.video.media import VideoBatch

FRAMES_GIVEN = 4
"""The number of first frames that are given, or fewer in shorter videos."""
MAX_DISTANCE = 8
MAX_VIDEOS = 64


def frames_to_give(frames: int, time_factor: int) -> int:
    """Return how many frames of a video are given so that some are left to predict."""
    return FRAMES_GIVEN if frames > FRAMES_GIVEN + time_factor else 1


def repeat_first(videos_B3THW: Tensor, time_factor: int, num_given: int) -> tuple[Tensor, int]:
    """Return the videos delayed so that the given frames fill whole latent frames.

    The first frame is repeated, and as many frames are left out at the end.
    """
    skip = -(num_given - 1) % time_factor
    repeated = videos_B3THW[:, :, :1].expand(-1, -1, skip, -1, -1)
    return torch.cat([repeated, videos_B3THW], dim=2)[:, :, : videos_B3THW.shape[2]], skip


def measure_prediction(
    real: Sequence[VideoBatch], generated: Sequence[Tensor], num_given: int
) -> dict[str, float]:
    """Return the PSNR of generated videos (B, 3, T, H, W), which may be shorter, by distance."""
    sums: dict[str, float] = {}
    count = sum(len(batch.videos) for batch in real)
    last = min(generated[0].shape[2], num_given + MAX_DISTANCE)
    for batch, made in zip(real, generated, strict=True):
        copied = batch.videos[:, :, num_given - 1]
        for number in range(num_given, last):
            target, distance = batch.videos[:, :, number], number - num_given + 1
            for name, frame in (("prediction", made[:, :, number]), ("copy", copied)):
                key = f"{name}_psnr_{distance}"
                value = psnr_B(frame.to(target), target).double().sum().item()
                sums[key] = sums.get(key, 0.0) + value / count
    return sums
