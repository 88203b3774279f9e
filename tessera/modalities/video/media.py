"""The `Video` class: read videos, animations and folders of frames, write MP4 and GIF.

A `Video` holds (T, H, W, 3) uint8, with T frames. Models take float32 of shape (3, T, H, W) in
[-1, 1], converted as in `modalities/image/media.py`. `modalities/video/io/files.py` reads files and
`modalities/video/io/writer.py` writes them. Transparent videos are composited over white.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tessera.data.arrays import check_range, is_float, move_channels_last
from tessera.data.files import AnyFile, resolve_suffix
from tessera.data.notebook import data_uri
from tessera.modalities.image.contact_sheet import enlargement
from tessera.modalities.image.media import Image
from tessera.modalities.video.io.files import probe, read_frames
from tessera.modalities.video.io.writer import write_gif, write_mp4, write_mp4_pieces

if TYPE_CHECKING:  # listing, inspecting and rendering videos must not import torch
    import torch

    from tessera.engine.task import TrackedMedia


SAVE_SUFFIXES = (".mp4", ".gif")
"""File suffixes that are written."""
STRIP_FRAMES = 6
"""The number of frames of each video on a contact sheet of frames."""


@dataclass
class VideoExample:
    """One preprocessed video and its caption."""

    video: np.ndarray
    """Float32 of shape (3, T, S, S) in [-1, 1]."""
    length: int
    """The number of frames without padding; 1 for an image."""
    rate_hz: float
    """Frames per second, for playback."""
    caption: str
    """The caption, or "" if there is none."""


@dataclass
class VideoBatch:
    """Several videos of one size, padded to one length, and their captions."""

    videos: torch.Tensor
    """Float32 of shape (B, 3, T, S, S) in [-1, 1]."""
    lengths: torch.Tensor
    """The number of frames of each video without padding, (B,) int64."""
    rates_hz: list[float]
    """Frames per second of each video."""
    captions: list[str]
    """One caption per video, "" for none."""

    def to(self, device: torch.device | str) -> VideoBatch:
        """Return the batch with its tensors on `device`."""
        from tessera.engine.device import move_tensors

        return move_tensors(self, device)


def collate(examples: Sequence[VideoExample]) -> VideoBatch:
    """Stack examples of one size and length into a batch."""
    import torch

    videos = torch.from_numpy(np.stack([example.video for example in examples]))
    lengths = torch.tensor([example.length for example in examples])
    return VideoBatch(
        videos,
        lengths,
        [example.rate_hz for example in examples],
        [example.caption for example in examples],
    )


@dataclass(eq=False)
class Video:
    """An RGB video without audio."""

    frames: np.ndarray
    """Uint8 of shape (T, H, W, 3)."""
    rate_hz: float
    """Frames per second."""
    suffixes: ClassVar[tuple[str, ...]] = SAVE_SUFFIXES
    """The formats that can be written, the default first."""

    def __post_init__(self) -> None:
        if (
            self.frames.dtype != np.uint8
            or self.frames.ndim != 4
            or self.frames.shape[3] != 3
            or not len(self.frames)
        ):
            raise ValueError(
                "Video expects uint8 frames of shape (frames, height, width, 3), got "
                f"{self.frames.dtype} of shape {self.frames.shape}: for floats in [-1, 1] of "
                "shape (3, frames, height, width) use Video.from_floats"
            )
        if not 0 < self.rate_hz < math.inf:
            raise ValueError(f"rate_hz must be positive and finite, got {self.rate_hz}")

    def __repr__(self) -> str:
        count, height, width, _ = self.frames.shape
        return f"Video(frames={count}, width={width}, height={height}, rate_hz={self.rate_hz:g})"

    @classmethod
    def from_array(cls, array: np.ndarray | torch.Tensor, rate_hz: float) -> Video:
        """Convert uint8, or floats in [-1, 1], of shape (T, H, W, 3) or (3, T, H, W)."""
        values = move_channels_last(array, (3,), num_dims=4)
        if not is_float(values):
            return cls(np.ascontiguousarray(values), rate_hz)
        check_range(values)
        return cls.from_floats(np.moveaxis(values, -1, 0), rate_hz)

    @classmethod
    def load(cls, path: str | Path) -> Video:
        """Read all frames of a file that can be decoded, at its average frame rate.

        Raises:
            UnreadableFile: With the path and the reason.
        """
        info = probe(path)
        return read_video(path, 0.0, info.frames, info.rate_hz)

    def save(self, path: str | Path) -> Path:
        """Write the video and return the path written.

        The suffix selects the format, .mp4 or .gif. Without one of these, both files are written,
        since a GIF can be displayed almost anywhere, and the path of the MP4 is returned. Missing
        folders are created.
        """
        resolved = resolve_suffix(path, ".mp4", SAVE_SUFFIXES)
        resolved.parent.mkdir(parents=True, exist_ok=True)
        if resolved.suffix.lower() == ".gif":
            write_gif(self, resolved)
            return resolved
        write_mp4(self, resolved)
        if resolved != Path(path):  # the suffix was appended
            write_gif(self, Path(f"{path}.gif"))
        return resolved

    @classmethod
    def write_pieces(cls, pieces: Iterable[Video], path: str | Path) -> Path:
        """Write a video that arrives in pieces of one size and rate; return the path.

        An MP4 is written in bounded memory; a GIF is joined first.
        """
        resolved = resolve_suffix(path, ".mp4", cls.suffixes)
        resolved.parent.mkdir(parents=True, exist_ok=True)
        if resolved.suffix.lower() == ".gif":
            videos = list(pieces)
            joined = cls(np.concatenate([one.frames for one in videos]), videos[0].rate_hz)
            write_gif(joined, resolved)
        else:
            write_mp4_pieces(pieces, resolved)
        return resolved

    def to_gif(self) -> bytes:
        """Return the content of a GIF file."""
        buffer = BytesIO()
        write_gif(self, buffer)
        return buffer.getvalue()

    def _repr_html_(self) -> str:
        """Show the video in notebooks; small ones are enlarged."""
        width = self.frames.shape[2] * enlargement([self.frames[0]])
        source = data_uri(self.to_gif(), "image/gif")
        return f'<img src="{source}" width="{width}" style="image-rendering: pixelated">'

    def to_tracker(self) -> TrackedMedia:
        import torch

        from tessera.engine.task import TrackedMedia

        return TrackedMedia(
            kind="video",
            array=torch.tensor(self.frames),
            content=self.to_gif(),
            suffix=".gif",
            rate_hz=self.rate_hz,
        )

    @classmethod
    def sheet(
        cls, items: Sequence[Video], labels: Sequence[str] = (), *, columns: int | None = None
    ) -> VideoSheet:
        """Arrange videos on a contact sheet, as long as the longest of them.

        Shorter videos hold their last frame.
        """
        if not items:
            raise ValueError("a contact sheet needs at least one video, got none")
        sheet = cls.combine(items, lambda images: Image.sheet(images, labels, columns=columns))
        return VideoSheet(sheet.frames, sheet.rate_hz, list(items), list(labels))

    def strip(self, count: int = STRIP_FRAMES) -> Image:
        """Return up to `count` frames from the first to the last, side by side."""
        numbers = np.linspace(0, len(self.frames) - 1, min(count, len(self.frames)))
        frames = [Image(self.frames[round(number)]) for number in numbers.tolist()]
        return reduce(Image.side_by_side, frames)

    @classmethod
    def side_by_side(cls, left: Video, right: Video) -> Video:
        """Join two videos with a thin gap between them: an original and its reconstruction."""
        return cls.combine([left, right], lambda images: Image.side_by_side(*images))

    @classmethod
    def combine(cls, items: Sequence[Video], arrange: Callable[[list[Image]], Image]) -> Video:
        """Combine videos frame by frame at the highest frame rate, each at its own speed."""
        rate = max(item.rate_hz for item in items)
        count = max(round(len(item.frames) * rate / item.rate_hz) for item in items)
        pages = [arrange([item.frame_at(index / rate) for item in items]) for index in range(count)]
        return cls(np.stack([page.pixels for page in pages]), rate)

    def frame_at(self, seconds: float) -> Image:
        """Return the frame displayed at a time; after the end, the last frame."""
        number = int(seconds * self.rate_hz + 0.01)  # 0.01 of a frame against rounding errors
        return Image(self.frames[min(number, len(self.frames) - 1)])

    def to_floats(self) -> np.ndarray:
        """Return the model input: float32 of shape (3, T, H, W) in [-1, 1]."""
        count, height, width, _ = self.frames.shape
        column = Image(self.frames.reshape(count * height, width, 3))  # all frames as one image
        return column.to_floats().reshape(3, count, height, width)

    @classmethod
    def from_floats(cls, array: np.ndarray, rate_hz: float) -> Video:
        """Round (3, T, H, W) floats in [-1, 1] to bytes, as `Image.from_floats` does."""
        array = np.asarray(array)
        if array.ndim != 4 or array.shape[0] != 3:
            raise ValueError(
                f"Video.from_floats expects the shape (3, frames, height, width), got {array.shape}"
            )
        _, count, height, width = array.shape
        column = Image.from_floats(array.reshape(3, count * height, width))
        return cls(column.pixels.reshape(count, height, width, 3), rate_hz)


@dataclass(eq=False, repr=False)
class VideoSheet(Video):
    """A contact sheet of videos that plays; its folder also gets one of frames."""

    items: list[Video] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def save(self, path: str | Path) -> Path:
        """Write the video, and without a suffix also frames.png with the frames of each item."""
        written = super().save(path)
        if Path(path).suffix.lower() not in SAVE_SUFFIXES:
            strips = [item.strip() for item in self.items]
            Image.sheet(strips, self.labels, columns=1).save(written.with_name("frames.png"))
        return written


def read_video(
    path: AnyFile, start_seconds: float, count: int, rate_hz: float, min_side: int | None = None
) -> Video:
    """Read `count` frames from `start_seconds` on, or fewer; see `read_frames`."""
    return Video(read_frames(path, start_seconds, count, rate_hz, min_side), rate_hz)
