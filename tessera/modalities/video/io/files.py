"""Probe and read videos: files with a codec, animations, still images and folders of frames.

Frame k of a video is the one displayed at its time, so variable frame rates need no special case.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from tessera.data.errors import UnreadableFile, add_path
from tessera.data.files import AnyFile, FileSignature, StoredFile, file_signature, file_suffix
from tessera.modalities.image import media as image
from tessera.modalities.video.io.animation import Animation
from tessera.modalities.video.io.av_reader import VideoReader
from tessera.modalities.video.io.base import THUMBNAIL, Frame, FrameReader, Frames, VideoInfo
from tessera.modalities.video.io.frame_folder import FrameFolder

VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi")
ANIMATION_SUFFIXES = (".gif", ".webp", ".apng")
SUFFIXES = VIDEO_SUFFIXES + ANIMATION_SUFFIXES
IMAGE_SUFFIXES = tuple(suffix for suffix in image.SUFFIXES if suffix not in ANIMATION_SUFFIXES)


@dataclass(frozen=True)
class DecodeResult:
    """What was found when all frames of a file were decoded."""

    frames: int
    seconds: float
    """The end of the last frame that can be decoded."""
    error: str
    """Where and why decoding fails; "" if all frames can be decoded."""


def probe(path: AnyFile) -> VideoInfo:
    """Return rate, size and duration, decoding at most the first frame of a file with a codec.

    The result is cached as long as the file does not change.
    """
    with add_path(path):
        return _probe(file_signature(path))


def measure_file(path: str | Path) -> dict[str, float]:
    """Return duration and frame size of a file; at most its first frame is decoded."""
    info = probe(path)
    return {"seconds": info.declared_seconds, "pixels": info.width * info.height}


def decode_all(path: AnyFile) -> DecodeResult:
    """Decode all frames of a file, one at a time.

    The result is cached as long as the file does not change.
    """
    with add_path(path):
        return _decode_all(file_signature(path))


def read_frames(
    path: AnyFile, start_seconds: float, count: int, rate_hz: float, min_side: int | None = None
) -> np.ndarray:
    """Return the frames displayed at start, start + 1/rate, ...: (T, H, W, 3) uint8.

    There are `count` frames, or fewer if the file ends or cannot be decoded further. Decoding
    starts at the last key frame before the start and stops after the last frame. With `min_side`,
    much larger frames are reduced one by one; their short side stays at least `min_side`.
    """
    times = display_times(start_seconds, count, rate_hz)
    with add_path(path):
        frames = select_displayed(open_reader(path).frames(times[0], min_side), times)
        if not frames:
            _probe(file_signature(path))  # raises a more specific error if nothing is readable
            raise UnreadableFile(f"no frame can be decoded at {start_seconds:.2f} s")
        if len({pixels.shape for pixels in frames}) > 1:
            sizes = " and ".join(
                sorted({f"{pixels.shape[1]} x {pixels.shape[0]}" for pixels in frames})
            )
            raise UnreadableFile(
                f"the frames have different sizes ({sizes}), but a video needs frames of one size"
            )
    return np.stack(frames)


def display_times(start_seconds: float, count: int, rate_hz: float) -> list[float]:
    """Return start, start + 1/rate, ... with a tolerance for frames that are displayed late.

    Time stamps are rounded to 1 ms in WebM and to 10 ms in GIF.
    """
    tolerance = min(0.25 / rate_hz, 0.01)
    return [start_seconds + number / rate_hz + tolerance for number in range(count)]


def select_displayed(frames: Frames, times: list[float]) -> list[np.ndarray]:
    """Return the frame displayed at each time, until the frames end or cannot be decoded.

    Only these frames are converted to pixels.
    """
    selected: list[np.ndarray] = []
    with suppress(UnreadableFile), closing(frames):
        for frame, end in with_display_ends(until_unreadable(frames)):
            if repeats := sum(time < end for time in times[len(selected) :]):
                selected += [frame.pixels()] * repeats
            if len(selected) == len(times):
                break
    return selected


def until_unreadable(frames: Iterator[Frame]) -> Iterator[Frame]:
    """Yield frames and stop at the first error."""
    with suppress(UnreadableFile):
        yield from frames


def with_display_ends(frames: Iterator[Frame]) -> Iterator[tuple[Frame, float]]:
    """Yield each frame with the start of the next one, and the last with its own end."""
    previous: Frame | None = None
    for frame in frames:
        if previous is not None:
            yield previous, frame.start
        previous = frame
    if previous is not None:
        yield previous, previous.end


@lru_cache(maxsize=1 << 16)
def _probe(signature: FileSignature) -> VideoInfo:
    if signature.bytes == 0:
        raise UnreadableFile("the file is empty (0 bytes)")
    return open_reader(signature.file).read_info()


@lru_cache(maxsize=1 << 16)
def _decode_all(signature: FileSignature) -> DecodeResult:
    info = _probe(signature)
    count, seconds, reason = 0, 0.0, ""
    try:
        for frame in open_reader(signature.file).frames(0.0, THUMBNAIL):
            frame.pixels()
            count, seconds = count + 1, frame.end
    except UnreadableFile as error:
        reason = str(error)
    if not reason and seconds < info.declared_seconds - max(0.25, 1.5 / info.rate_hz):
        reason = "the data ends there"
    of = f" of {info.declared_seconds:.2f} s" if seconds < info.declared_seconds - 0.01 else ""
    return DecodeResult(
        count, seconds, f"readable up to {seconds:.2f} s{of} ({reason})" if reason else ""
    )


def open_reader(file: AnyFile) -> FrameReader:
    """Return the reader of a file or folder, chosen by its suffix."""
    if not isinstance(file, StoredFile) and Path(file).is_dir():
        return FrameFolder(str(file))
    if file_suffix(file) in (*ANIMATION_SUFFIXES, *IMAGE_SUFFIXES):
        return Animation(file)
    return VideoReader(file)
