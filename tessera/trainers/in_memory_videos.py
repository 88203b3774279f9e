"""Videos in memory as a dataset: tensors (3, T, H, W), or images (3, H, W), of floats in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tessera.data.dataset import ExampleDataset
from tessera.data.errors import UnreadableFile
from tessera.modalities.video.io.base import DEFAULT_RATE_HZ
from tessera.modalities.video.media import VideoBatch, VideoExample, collate


@dataclass(frozen=True)
class InMemoryVideos(ExampleDataset):
    """Videos that are neither cropped nor mirrored; shorter ones repeat their last frame."""

    videos: Sequence[Tensor]
    size: int
    """The side of the square frames in pixels."""
    frames: int
    """The number of frames of an example."""

    def __len__(self) -> int:
        return len(self.videos)

    def name(self, index: int) -> str:
        return f"clip-{index:06d}"

    def item(self, index: int, rng: np.random.Generator) -> VideoExample:
        video = torch.as_tensor(self.videos[index]).detach().cpu()
        video = video.unsqueeze(1) if video.ndim == 3 else video
        self.check_video(video)
        length = video.shape[1]
        padded = video[:, torch.arange(self.frames).clamp_max(length - 1)]
        return VideoExample(padded.float().numpy() * 2 - 1, length, DEFAULT_RATE_HZ, "")

    def collate(self, examples: list[VideoExample]) -> VideoBatch:
        return collate(examples)

    def check_video(self, video: Tensor) -> None:
        """Raise UnreadableFile for a wrong shape, type or range."""
        size = self.size
        has_shape = video.ndim == 4 and video.shape[0] == 3 and video.shape[2:] == (size, size)
        if not has_shape or not 1 <= video.shape[1] <= self.frames:
            raise UnreadableFile(
                f"its shape is {tuple(video.shape)}, but videos must be (3, frames, {size}, "
                f"{size}) with 1 to {self.frames} frames: resize or cut it"
            )
        lowest, highest = video.aminmax()
        if not video.is_floating_point() or lowest < 0 or highest > 1:
            raise UnreadableFile(
                f"it has values of {video.dtype} from {lowest:g} to {highest:g}, but videos must "
                "be floats from 0 to 1: rescale it"
            )
