"""Clips from a folder, or the built-in toys: equal numbers of square frames, each clip with its
caption.

Where a clip begins and how its squares are cut is drawn once for all of its frames, from the
example's own generator. Every frame is resized until its short side fits and then cut, in one
antialiased step, as `modalities/image/dataset.py` does it. Pictures in the same folder are clips of
one frame (`modalities/video/examples.py` tells how they share a batch with others). Which files are
held out depends on their names alone (`data/split.py`), and those are never augmented.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import PIL.Image

from tessera.data.dataset import DataConfig, FileDataset
from tessera.data.discovery import Found, find
from tessera.data.errors import UnreadableFile
from tessera.modalities.image.dataset import ImageDataConfig, cut
from tessera.modalities.video.io.base import Facts
from tessera.modalities.video.io.files import ENDINGS, PICTURES, examine, probe
from tessera.modalities.video.io.pyav import library
from tessera.modalities.video.media import Video, VideoBatch, VideoExample, collate, read_clip
from tessera.modalities.video.synthetic import SyntheticVideos


@dataclass(frozen=True, kw_only=True)
class VideoDataConfig(DataConfig):
    path: str | None = None
    """A folder of clips, with subfolders; or one clip. None: the built-in toys."""
    size: int = 64
    """The side of the square frames, in pixels."""
    frames: int = 17
    """How many frames a clip has."""
    rate_hz: float | None = None
    """Frames a second, whatever the file's own rate is; None takes the file's. Toys have no
    rate."""
    stride: int = 1
    """Take every n-th of those frames."""
    crop: Literal["random", "centre"] = "random"
    """Where a training clip is cut from, in time and in space; centre is the middle of both."""
    min_scale: float = 1.0
    """The smallest random square, as a share of the frame's short side; 1 takes as much as there
    is."""
    flip: bool = False
    """Mirror half of the training clips. Right for tokenizers; wrong where a caption says left or
    right."""
    short: Literal["pad", "skip"] = "pad"
    """What becomes of clips with fewer frames: the last one is repeated, or they are left out."""
    images: Literal["single", "skip"] = "single"
    """Pictures in the folder count as clips of a single frame, or are left out."""
    folders: Literal["pictures", "clips"] = "pictures"
    """What a folder of pictures is: so many pictures, or one clip, its frames in the order of their
    numbers (24 a second)."""
    val_fraction: float = 0.05
    """The share held out, chosen by file name; 0 validates on the training clips themselves."""
    split_seed: int = 0
    """Another seed holds out other files."""
    toys: int = 2000
    """How many toy clips to learn from; those held out come on top."""
    toy_seed: int = 0
    """Another seed is another set of toys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.squares()  # refuses what cannot be of the fields that both have
        if self.frames < 1:
            raise ValueError(f"A clip has at least 1 frame, but frames is {self.frames}.")
        if self.rate_hz is not None and not 0 < self.rate_hz < math.inf:
            raise ValueError(
                f"rate_hz is a number of frames a second, above 0, or None for the file's; not {self.rate_hz}."
            )
        if self.stride < 1:
            raise ValueError(
                f"A stride of 1 takes every frame and of 2 every second one, but stride is {self.stride}."
            )

    def synthetic_dataset(self) -> SyntheticVideos:
        return SyntheticVideos(self.toys, size=self.size, frames=self.frames, seed=self.toy_seed)

    def folder_dataset(self) -> VideoFolderDataset:
        return VideoFolderDataset.of(find_clips(str(self.path), self.images, self.folders), self)

    def libraries(self) -> tuple[Callable[[], ModuleType], ...]:
        return (library,)

    def preprocessing(self) -> dict[str, Any]:
        """How a clip is prepared before it is tokenized or measured."""
        return {
            "size": self.size,
            "frames": self.frames,
            "rate_hz": self.rate_hz,
            "stride": self.stride,
        }

    def without_augmentation(self) -> VideoDataConfig:
        return replace(self, crop="centre", min_scale=1.0, flip=False)

    def sample_metric(self) -> None:
        """Nothing here can tell whether a clip shows what its prompt says."""

    def squares(self) -> ImageDataConfig:
        """How each frame is cut: as a picture would be."""
        return ImageDataConfig(
            size=self.size, crop=self.crop, min_scale=self.min_scale, flip=self.flip
        )


def find_clips(
    path: str | Path,
    images: Literal["single", "skip"] = "single",
    folders: Literal["pictures", "clips"] = "pictures",
) -> Found:
    """The clips of a folder: its files, and, where they are asked for, its folders of pictures ("."
    is the folder itself)."""
    pictures = PICTURES if images == "single" or folders == "clips" else ()
    found = find(path, ENDINGS + pictures, "clips")
    if folders == "pictures" or Path(path).expanduser().is_file():
        return found
    frames = {name for name in found.names if name.lower().endswith(PICTURES)}
    clips = {posixpath.dirname(name) or "." for name in frames}
    return Found(found.root, sorted(clips | set(found.names) - frames), found.beside)


@dataclass(frozen=True)
class VideoFolderDataset(FileDataset):
    """The source: files of one folder, cut as the configuration says."""

    config: VideoDataConfig

    def item(self, index: int, rng: np.random.Generator) -> VideoExample:
        """Always five draws: one for the beginning and four for the squares."""
        drawn = rng.random()
        moment = drawn if self.config.crop == "random" else 0.5
        video = self.clip(self.path(index), moment)
        squares = cut_alike(video, self.config.squares(), rng)
        length = len(squares.frames)
        padded = squares.floats()[:, np.minimum(np.arange(self.config.frames), length - 1)]
        return VideoExample(padded, length, video.rate_hz, self.sample_caption(index, rng))

    def collate(self, examples: list[VideoExample]) -> VideoBatch:
        return collate(examples)

    def clip(self, path: str, moment: float) -> Video:
        """The part of a file that begins at `moment`, 0 for the earliest beginning to 1 for the
        last."""
        facts = probe(path)
        if facts.still:
            return self.picture(path)
        video = self.part(path, facts, moment)
        if len(video.frames) < self.config.frames and self.config.short == "skip":
            raise UnreadableFile(
                f"{path}: it gives {len(video.frames)} frames at {video.rate_hz:g} a second, "
                f"fewer than the {self.config.frames} asked for"
            )
        return video

    def picture(self, path: str) -> Video:
        if self.config.images == "skip":
            raise UnreadableFile(f"{path}: it is a still picture, and only clips are asked for")
        return read_clip(path, 0.0, 1, 1.0, shortest=self.config.squares().enough)

    def part(self, path: str, facts: Facts, moment: float) -> Video:
        """From the length that the file claims; where that does not hold, from what can be read of
        it."""
        try:
            video = self.part_of(path, facts, facts.seconds, moment)
            promised = math.floor(last_beginning(facts, facts.seconds) * self.rate(facts)) + 1
            if len(video.frames) >= min(self.config.frames, promised):
                return video
        except UnreadableFile:
            pass
        return self.part_of(path, facts, examine(path).seconds, moment)

    def part_of(self, path: str, facts: Facts, seconds: float, moment: float) -> Video:
        """The beginning is that of a frame of the file, each as likely as the others."""
        span = (self.config.frames - 1) / self.rate(facts)
        later = max(0, math.floor((last_beginning(facts, seconds) - span) * facts.rate_hz))
        start = min(later, int(moment * (later + 1))) / facts.rate_hz
        return read_clip(
            path, start, self.config.frames, self.rate(facts), shortest=self.config.squares().enough
        )

    def rate(self, facts: Facts) -> float:
        return (self.config.rate_hz or facts.rate_hz) / self.config.stride


def last_beginning(facts: Facts, seconds: float) -> float:
    """When the last frame of a file begins that ends at `seconds`; and a quarter of a frame more,
    for rounded stamps."""
    return seconds - 0.75 / facts.rate_hz


def cut_alike(video: Video, squares: ImageDataConfig, rng: np.random.Generator) -> Video:
    """Every frame is cut with the same four draws: each time the generator is as it was before the
    first."""
    before = rng.bit_generator.state
    cuts = []
    for frame in video.frames:
        rng.bit_generator.state = before
        cuts.append(np.asarray(cut(PIL.Image.fromarray(frame), squares, rng)))
    return Video(np.stack(cuts), video.rate_hz)
