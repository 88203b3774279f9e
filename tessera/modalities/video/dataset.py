"""Videos from a folder, or synthetic ones: square frames of one size and number, with captions.

Images count as videos of a single frame, so both can be trained on together. Where a training video
starts is drawn from the example's generator, and only that part of the file is decoded.
"""

from __future__ import annotations

import math
import posixpath
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL.Image

from tessera.data.dataset import DataConfig, FileDataset
from tessera.data.discovery import Found, find_files
from tessera.data.errors import UnreadableFile
from tessera.modalities.image.dataset import ImageDataConfig, crop_square
from tessera.modalities.video.io.base import VideoInfo, import_av
from tessera.modalities.video.io.files import IMAGE_SUFFIXES, SUFFIXES, decode_all, probe
from tessera.modalities.video.media import Video, VideoBatch, VideoExample, collate, read_video
from tessera.modalities.video.synthetic import SyntheticVideos
from tessera.run.errors import UserError


@dataclass(frozen=True, kw_only=True)
class VideoDataConfig(DataConfig):
    path: str | None = None
    """A folder of videos, with subfolders, or one video; None generates synthetic videos."""
    size: int = 64
    """The side of the square frames in pixels."""
    frames: int = 17
    """The number of frames of an example."""
    rate_hz: float | None = None
    """The number of frames per second; None uses the rate of each file."""
    stride: int = 1
    """Use every n-th frame only."""
    crop: Literal["random", "centre"] = "random"
    """The position of the crop of a training video, in time and space."""
    min_scale: float = 1.0
    """The smallest random crop as a fraction of the short side; 1 uses the whole short side."""
    flip: bool = False
    """Mirror half of the training videos. Do not use it where captions mention left or right."""
    on_short: Literal["pad", "skip"] = "pad"
    """What to do with videos of fewer frames: repeat the last frame, or skip them."""
    images: Literal["single", "skip"] = "single"
    """Whether images in the folder are videos of a single frame or are skipped."""
    folders: Literal["pictures", "clips"] = "pictures"
    """Whether a folder of images holds single images (`pictures`), or is one video of numbered frames
    at 24 per second (`clips`)."""
    val_fraction: float = 0.05
    """The fraction held out, chosen by file name; 0 validates on the training videos."""
    split_seed: int = 0
    """The seed of the choice of held-out files."""
    num_synthetic: int = 2000
    """The number of synthetic training videos; the held-out ones come on top."""
    synthetic_seed: int = 0
    """The seed of the synthetic videos."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.frame_config()  # checks the fields that images have too
        if self.frames < 1:
            raise ValueError(f"frames must be at least 1, got {self.frames}.")
        if self.rate_hz is not None and not 0 < self.rate_hz < math.inf:
            raise ValueError(
                f"rate_hz must be above 0, or None for the rate of each file, got {self.rate_hz}."
            )
        if self.stride < 1:
            raise ValueError(f"stride must be at least 1, got {self.stride}.")

    def frame_config(self) -> ImageDataConfig:
        """Return the configuration by which each frame is cropped."""
        return ImageDataConfig(
            size=self.size, crop=self.crop, min_scale=self.min_scale, flip=self.flip
        )

    def synthetic_dataset(self) -> SyntheticVideos:
        return SyntheticVideos(
            self.num_synthetic, size=self.size, frames=self.frames, seed=self.synthetic_seed
        )

    def folder_dataset(self, captions: bool = True) -> VideoFolderDataset:
        found = find_videos(str(self.path), self.images, self.folders)
        return VideoFolderDataset.from_found(found, self, captions)

    def check_libraries(self) -> None:
        import_av()

    def preprocessing(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "frames": self.frames,
            "rate_hz": self.rate_hz,
            "stride": self.stride,
        }

    def without_augmentation(self) -> VideoDataConfig:
        return replace(self, crop="centre", min_scale=1.0, flip=False)

    def collate(self, examples: list[VideoExample]) -> VideoBatch:
        return collate(examples)

    def example_from_media(self, media: Any) -> VideoExample:
        """Preprocess a Video, or an array (T, H, W, 3) of uint8: its middle frames."""
        video = Video(media, self.rate_hz or 24.0) if isinstance(media, np.ndarray) else media
        if not isinstance(video, Video):
            raise UserError(
                "Expected a Video, a path or an array (frames, height, width, 3) of uint8, got a "
                f"{type(media).__name__}."
            )
        step = video.rate_hz / (self.rate_hz or video.rate_hz) * self.stride
        count = min(self.frames, max(1, math.floor((len(video.frames) - 1) / step) + 1))
        first = (len(video.frames) - 1 - (count - 1) * step) / 2
        indices = [round(first + i * step) for i in range(count)]
        chosen = Video(video.frames[indices], video.rate_hz / step)
        config = self.without_augmentation().frame_config()
        squares = crop_frames(chosen, config, np.random.default_rng(0))
        return pad_frames(squares, self.frames, "")


def find_videos(
    path: str | Path,
    images: Literal["single", "skip"] = "single",
    folders: Literal["pictures", "clips"] = "pictures",
) -> Found:
    """Find videos: files and, if requested, folders of frames ("." is the folder itself)."""
    suffixes = IMAGE_SUFFIXES if images == "single" or folders == "clips" else ()
    found = find_files(path, SUFFIXES + suffixes, "videos")
    if folders == "pictures" or Path(path).expanduser().is_file():
        return found
    frames = {name for name in found.names if name.lower().endswith(IMAGE_SUFFIXES)}
    frame_folders = {posixpath.dirname(name) or "." for name in frames}
    names = sorted(frame_folders | set(found.names) - frames)
    return Found(found.root, names, found.other_files)


@dataclass(frozen=True)
class VideoFolderDataset(FileDataset):
    config: VideoDataConfig

    def item(self, index: int, rng: np.random.Generator) -> VideoExample:
        """Draw five random numbers: one for the start and four for the crop."""
        u = rng.random()
        position = u if self.config.crop == "random" else 0.5
        video = self.load_part(self.path(index), position)
        squares = crop_frames(video, self.config.frame_config(), rng)
        return pad_frames(squares, self.config.frames, self.sample_caption(index, rng))

    def collate(self, examples: list[VideoExample]) -> VideoBatch:
        return collate(examples)

    def load_part(self, path: str, position: float) -> Video:
        """Load the part that starts at `position`: 0 is the first possible start, 1 the last."""
        info = probe(path)
        if info.still:
            return self.load_image(path)
        video = self.read_part(path, info, position)
        if len(video.frames) < self.config.frames and self.config.on_short == "skip":
            raise UnreadableFile(
                f"{path}: it has {len(video.frames)} frames at {video.rate_hz:g} per second, fewer than "
                f"the requested {self.config.frames}"
            )
        return video

    def load_image(self, path: str) -> Video:
        if self.config.images == "skip":
            raise UnreadableFile(f"{path}: it is an image, and images are skipped")
        return read_video(path, 0.0, 1, 1.0, min_side=self.config.frame_config().decode_size)

    def read_part(self, path: str, info: VideoInfo, position: float) -> Video:
        """Read with the length that the file states, or, if that is wrong, with the decoded one."""
        try:
            video = self.read_at(path, info, info.seconds, position)
            stated = math.floor(last_start(info, info.seconds) * self.rate_hz(info)) + 1
            if len(video.frames) >= min(self.config.frames, stated):
                return video
        except UnreadableFile:
            pass
        return self.read_at(path, info, decode_all(path).seconds, position)

    def read_at(self, path: str, info: VideoInfo, seconds: float, position: float) -> Video:
        """Read from the start of a frame of the file; all frames are equally likely."""
        span = (self.config.frames - 1) / self.rate_hz(info)
        num_later = max(0, math.floor((last_start(info, seconds) - span) * info.rate_hz))
        start = min(num_later, int(position * (num_later + 1))) / info.rate_hz
        decode_size = self.config.frame_config().decode_size
        return read_video(
            path, start, self.config.frames, self.rate_hz(info), min_side=decode_size
        )

    def rate_hz(self, info: VideoInfo) -> float:
        return (self.config.rate_hz or info.rate_hz) / self.config.stride


def last_start(info: VideoInfo, seconds: float) -> float:
    """Return when the last frame of a file of this length starts, plus a quarter of a frame for
    rounded time stamps."""
    return seconds - 0.75 / info.rate_hz


def crop_frames(video: Video, config: ImageDataConfig, rng: np.random.Generator) -> Video:
    """Crop all frames alike, with the four random numbers of one image."""
    state = rng.bit_generator.state
    squares = []
    for frame in video.frames:
        rng.bit_generator.state = state
        squares.append(np.asarray(crop_square(PIL.Image.fromarray(frame), config, rng)))
    return Video(np.stack(squares), video.rate_hz)


def pad_frames(video: Video, count: int, caption: str) -> VideoExample:
    """Repeat the last frame up to `count` frames."""
    length = len(video.frames)
    padded = video.to_floats()[:, np.minimum(np.arange(count), length - 1)]
    return VideoExample(padded, length, video.rate_hz, caption)
