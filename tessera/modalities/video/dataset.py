"""Videos from a folder, or synthetic ones: square frames of one size and number, with captions.

Images count as videos of a single frame, so both can be trained on together. Where a training video
starts is drawn from the example's generator, and only that part of the file is decoded.
"""

from __future__ import annotations

import math
import posixpath
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import PIL.Image

from tessera.data.arrays import is_array, is_float, to_numpy
from tessera.data.dataset import DataConfig, FileDataset
from tessera.data.discovery import Found, find_files
from tessera.data.errors import UnreadableFile
from tessera.modalities.image.dataset import ImageDataConfig, crop_image
from tessera.modalities.video.io.base import DEFAULT_RATE_HZ, VideoInfo, import_av
from tessera.modalities.video.io.files import (
    IMAGE_SUFFIXES,
    SUFFIXES,
    decode_all,
    display_times,
    probe,
)
from tessera.modalities.video.media import Video, VideoBatch, VideoExample, collate, read_video
from tessera.modalities.video.synthetic import SyntheticVideos
from tessera.run.errors import UserError


@dataclass(frozen=True, kw_only=True)
class VideoDataConfig(DataConfig):
    batch_ndim: ClassVar[int | None] = 5

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
    folders: Literal["images", "videos"] = "images"
    """Whether a folder of images holds single images (`images`), or is one video of numbered frames
    at 24 per second (`videos`)."""
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

    def preprocessing(self) -> dict[str, object]:
        return {
            "size": self.size,
            "frames": self.frames,
            "rate_hz": self.rate_hz,
            "stride": self.stride,
        }

    def without_augmentation(self) -> VideoDataConfig:
        return replace(self, crop="centre", min_scale=1.0, flip=False)

    def frame_rate_hz(self, video_rate_hz: float) -> float:
        """Return the number of frames of an example per second of a video."""
        return (self.rate_hz or video_rate_hz) / self.stride

    def part_start(self, video_rate_hz: float, seconds: float, position: float) -> float:
        """Return when a part of a video starts: at one of its frames, all equally likely."""
        span = (self.frames - 1) / self.frame_rate_hz(video_rate_hz)
        last = last_start(video_rate_hz, seconds)
        num_later = max(0, math.floor((last - span) * video_rate_hz))
        return min(num_later, int(position * (num_later + 1))) / video_rate_hz

    def collate(self, examples: list[VideoExample]) -> VideoBatch:
        return collate(examples)

    def example_from_media(self, media: object) -> VideoExample:
        """Preprocess the middle frames of a Video, or of an array (see `Video.from_array`)."""
        video, default_rate_hz = media, self.rate_hz or DEFAULT_RATE_HZ
        if is_array(media):
            video = Video.from_array(media, default_rate_hz)
            floats = to_numpy(media)
            if is_float(floats) and floats.shape == (3, self.frames, self.size, self.size):
                return VideoExample(floats.astype(np.float32), self.frames, default_rate_hz, "")
        if not isinstance(video, Video):
            raise UserError(
                "Expected a Video, a path or an array of uint8 (frames, height, width, 3) or of "
                f"floats in [-1, 1], got a {type(media).__name__}."
            )
        rate_hz = self.frame_rate_hz(video.rate_hz)
        ends = np.arange(1, len(video.frames) + 1) / video.rate_hz
        start = self.part_start(video.rate_hz, float(ends[-1]), 0.5)
        times = [time for time in display_times(start, self.frames, rate_hz) if time < ends[-1]]
        chosen = Video(video.frames[np.searchsorted(ends, times, side="right")], rate_hz)
        config = self.without_augmentation().frame_config()
        squares = crop_frames(chosen, config, np.random.default_rng(0))
        return pad_frames(squares, self.frames, "")


def find_videos(
    path: str | Path,
    images: Literal["single", "skip"] = "single",
    folders: Literal["images", "videos"] = "images",
) -> Found:
    """Find videos: files and, if requested, folders of frames ("." is the folder itself)."""
    suffixes = IMAGE_SUFFIXES if images == "single" or folders == "videos" else ()
    found = find_files(path, SUFFIXES + suffixes, "videos")
    if folders == "images" or Path(path).expanduser().is_file():
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
                f"{path}: it has {len(video.frames)} frames at {video.rate_hz:g} per second, fewer "
                f"than the requested {self.config.frames}"
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
            rate_hz = self.config.frame_rate_hz(info.rate_hz)
            stated = math.floor(last_start(info.rate_hz, info.seconds) * rate_hz) + 1
            if len(video.frames) >= min(self.config.frames, stated):
                return video
        except UnreadableFile:
            pass
        return self.read_at(path, info, decode_all(path).seconds, position)

    def read_at(self, path: str, info: VideoInfo, seconds: float, position: float) -> Video:
        """Read a part of a file that is `seconds` long."""
        config = self.config
        start = config.part_start(info.rate_hz, seconds, position)
        rate_hz = config.frame_rate_hz(info.rate_hz)
        decode_size = config.frame_config().decode_size
        return read_video(path, start, config.frames, rate_hz, min_side=decode_size)


def last_start(rate_hz: float, seconds: float) -> float:
    """Return when the last frame of a video of this length starts, plus a quarter of a frame for
    rounded time stamps."""
    return seconds - 0.75 / rate_hz


def crop_frames(video: Video, config: ImageDataConfig, rng: np.random.Generator) -> Video:
    """Crop all frames alike, with the four random numbers of one image."""
    state = rng.bit_generator.state
    squares = []
    for frame in video.frames:
        rng.bit_generator.state = state
        squares.append(np.asarray(crop_image(PIL.Image.fromarray(frame), config, rng)))
    return Video(np.stack(squares), video.rate_hz)


def pad_frames(video: Video, count: int, caption: str) -> VideoExample:
    """Repeat the last frame up to `count` frames."""
    length = len(video.frames)
    padded = video.to_floats()[:, np.minimum(np.arange(count), length - 1)]
    return VideoExample(padded, length, video.rate_hz, caption)
