"""Videos from a folder, or synthetic ones: square frames of one size and number, with captions.

Images count as videos of a single frame, so both can be trained on together. Where a training video
starts is drawn from the example's generator, and only that part of the file is decoded.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import PIL.Image

from tessera.data.arrays import is_array, is_float, to_numpy
from tessera.data.collection import FileCollection, FolderFiles
from tessera.data.dataset import DataConfig, Extent, FileDataset
from tessera.data.discovery import DEFAULT_OPTIONS, SourceOptions, find_files
from tessera.data.errors import UnreadableFile
from tessera.data.files import AnyFile
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
from tessera.run.errors import UserError, as_user_error

if TYPE_CHECKING:
    from tessera.data.sample_metrics import SampleMetric


@dataclass(frozen=True, kw_only=True)
class VideoDataConfig(DataConfig):
    batch_ndim: ClassVar[int | None] = 5
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    noun: ClassVar[str] = "videos"

    path: str | None = None
    """A folder of videos, with subfolders, one video, tar shards, a table or a list of paths; None
    generates synthetic videos."""
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
    group_by: str = "file"
    """What is held out as a whole: file (each video alone), folder, prefix (of the file name, up to
    the first "-", "_" or "."), or a column of the metadata, such as source."""
    balance_by: str = "file"
    """What is drawn equally often in training: file, folder, prefix, or a column of the metadata,
    such as subject. A group of few files is then seen as often as one of many."""
    num_synthetic: int = 2000
    """The number of synthetic training videos; the held-out ones come on top."""
    synthetic_seed: int = 0
    """The seed of the synthetic videos."""
    synthetic_plain: bool = False
    """Generate videos of one moving shape in a flat colour, whose captions state direction, speed
    and what changes."""

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
            self.num_synthetic,
            size=self.size,
            frames=self.frames,
            seed=self.synthetic_seed,
            plain=self.synthetic_plain,
        )

    def folder_dataset(self) -> VideoFolderDataset:
        return VideoFolderDataset(self.find_files(), self)

    def find_files(self) -> FileCollection:
        options = SourceOptions(self.columns, self.download)
        return find_videos(str(self.path), self.images, self.folders, options)

    def sample_metrics(self) -> list[SampleMetric]:
        """Compare samples with real videos, and synthetic videos with their prompts."""
        from tessera.modalities.video.prompt_match import VideoPromptMatch
        from tessera.modalities.video.sample_metrics import VideoSetMetric

        metrics: list[SampleMetric] = [VideoSetMetric()]
        return metrics if self.path is not None else [VideoPromptMatch(), *metrics]

    def check_libraries(self) -> None:
        import_av()

    def preprocessing(self) -> dict[str, object]:
        """Return the size of the frames; a causal tokenizer takes any number, at any rate."""
        return {"size": self.size}

    def inherited(self) -> dict[str, object]:
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

    def read_beginning(self, path: str, count: int) -> Video:
        """Read the first `count` frames of a file, or fewer, cropped as those of an example.

        An image has one frame.
        """
        with as_user_error(UnreadableFile):
            info = probe(path)
            rate_hz = 1.0 if info.still else self.frame_rate_hz(info.rate_hz)
            config = self.without_augmentation().frame_config()
            video = read_video(path, 0.0, 1 if info.still else count, rate_hz)
        height, width = video.frames.shape[1:3]
        if min(height, width) < self.size:
            raise UserError(
                f"{path} is {width} x {height}, but this model has frames of {self.size} x "
                f"{self.size} pixels: give larger ones."
            )
        return crop_frames(video, config, np.random.default_rng(0))

    def read_mask(self, path: str, clip: str) -> np.ndarray:
        """Return which pixels of a mask are white, (T, S, S), cropped as the frames of a clip.

        An image holds for all frames; a video has one mask for each.
        """
        with as_user_error(UnreadableFile):
            sizes = [read_video(one, 0.0, 1, 1.0).frames.shape[1:3] for one in (path, clip)]
        if sizes[0] != sizes[1]:
            raise UserError(
                f"The mask {path} is {sizes[0][1]} x {sizes[0][0]}, but the video is {sizes[1][1]} "
                f"x {sizes[1][0]}: give a mask of the same size, white where to generate."
            )
        frames = self.read_beginning(path, self.frames).frames
        if len(frames) == 1:
            frames = np.repeat(frames, self.frames, axis=0)
        if len(frames) < self.frames:
            raise UserError(
                f"The mask {path} has {len(frames)} frames, but {self.frames} are generated: give "
                "an image for all frames, or a longer video."
            )
        return frames.mean(3) > 127

    def collate(self, examples: list[VideoExample]) -> VideoBatch:
        return collate(examples)

    def is_input_shape(self, shape: Sequence[int]) -> bool:
        return super().is_input_shape(shape) and shape[1] == 3

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
    options: SourceOptions = DEFAULT_OPTIONS,
) -> FileCollection:
    """Find videos: files and, if requested, folders of frames ("." is the folder itself)."""
    suffixes = IMAGE_SUFFIXES if images == "single" or folders == "videos" else ()
    found = find_files(path, SUFFIXES + suffixes, "videos", options)
    if folders == "images" or Path(path).expanduser().is_file():
        return found
    if not isinstance(found, FolderFiles):
        raise UserError(
            f"{path} is no folder, and only a folder on the disk can hold folders of frames: leave "
            "--data.folders videos out, or unpack it."
        )
    frames = {name for name in found.names if name.lower().endswith(IMAGE_SUFFIXES)}
    frame_folders = {posixpath.dirname(name) or "." for name in frames}
    names = sorted(frame_folders | set(found.names) - frames)
    return FolderFiles(found.root, names, found.other_files)


PIECE_FRAMES = 16
"""Frames of one piece of a whole video, about as many as a training example has."""


@dataclass(frozen=True)
class VideoFolderDataset(FileDataset):
    config: VideoDataConfig
    piece_length: ClassVar[int | None] = PIECE_FRAMES

    def extent(self, index: int) -> Extent:
        info = probe(self.files.file(index))
        if info.still:
            return Extent(1, DEFAULT_RATE_HZ)
        rate_hz = self.config.frame_rate_hz(info.rate_hz)
        last = last_start(info.rate_hz, info.seconds)
        return Extent(max(1, math.floor(last * rate_hz) + 1), rate_hz)

    def load_piece(self, index: int, start: int, count: int) -> VideoExample:
        path, config = self.files.file(index), self.config.without_augmentation().frame_config()
        info = probe(path)
        rate_hz = DEFAULT_RATE_HZ if info.still else self.config.frame_rate_hz(info.rate_hz)
        if info.still:
            video = self.load_image(path)
        else:
            video = read_video(path, start / rate_hz, count, rate_hz, min_side=config.decode_size)
        squares = crop_frames(video, config, np.random.default_rng(0))
        return VideoExample(squares.to_floats(), len(squares.frames), rate_hz, "")

    def item(self, index: int, rng: np.random.Generator) -> VideoExample:
        """Draw five random numbers: one for the start and four for the crop."""
        u = rng.random()
        position = u if self.config.crop == "random" else 0.5
        video = self.load_part(self.files.file(index), position)
        squares = crop_frames(video, self.config.frame_config(), rng)
        return pad_frames(squares, self.config.frames, self.sample_caption(index, rng))

    def load_part(self, path: AnyFile, position: float) -> Video:
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

    def load_image(self, path: AnyFile) -> Video:
        if self.config.images == "skip":
            raise UnreadableFile(f"{path}: it is an image, and images are skipped")
        return read_video(path, 0.0, 1, 1.0, min_side=self.config.frame_config().decode_size)

    def read_part(self, path: AnyFile, info: VideoInfo, position: float) -> Video:
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

    def read_at(self, path: AnyFile, info: VideoInfo, seconds: float, position: float) -> Video:
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
