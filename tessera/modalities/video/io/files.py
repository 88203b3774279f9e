"""Files and folders that hold a clip: what they say of themselves, what they hold, and the frames
of any part of them.

There are three kinds, with a reader each: films, animations (still pictures among them), and
folders of frames. Frame k of a clip is what is on the screen at its time, so variable frame rates
need no case.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from tessera.data.discovery import FileSignature, file_signature
from tessera.data.errors import UnreadableFile, named
from tessera.modalities.image import media as image
from tessera.modalities.video.io.animation import Animation
from tessera.modalities.video.io.av_reader import VideoReader
from tessera.modalities.video.io.base import THUMBNAIL, Facts, Frame, Frames, Reader
from tessera.modalities.video.io.frame_folder import FrameFolder

FILMS = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi")
ANIMATIONS = (".gif", ".webp", ".apng")
ENDINGS = FILMS + ANIMATIONS
PICTURES = tuple(ending for ending in image.ENDINGS if ending not in ANIMATIONS)


@dataclass(frozen=True)
class Examined:
    """What a file turned out to hold."""

    frames: int
    seconds: float
    """where the last frame that can be read ends"""
    broke: str
    """where the file breaks, and why; "" for one that can be read to its end"""


def probe(path: str | Path) -> Facts:
    """Rate, size and length, without decoding a film but for its first frame. Remembered as long as
    the file is the same."""
    with named(path):
        return _probe(file_signature(path))


def examine(path: str | Path) -> Examined:
    """The whole file, frame by frame, holding one at a time. Remembered as long as the file is the
    same."""
    with named(path):
        return _examine(file_signature(path))


def read_frames(
    path: str | Path, start_seconds: float, count: int, rate_hz: float, shortest: int | None = None
) -> np.ndarray:
    """The frames on the screen at start, start + 1/lr, ...: `count` of them, or fewer where the
    file ends or breaks.

    A film is decoded from the last key frame before the start to the end of the clip, and no
    further. With `shortest`, frames much larger than that are reduced one by one; their short side
    stays at least `shortest`. (T, H, W, 3) uint8.
    """
    late = min(
        0.25 / rate_hz, 0.01
    )  # that a frame may be: time stamps are rounded, to 1 ms in WebM and 10 ms in GIF
    moments = [start_seconds + number / rate_hz + late for number in range(count)]
    with named(path):
        taken = on_screen(reader_of(str(path)).frames(moments[0], shortest), moments)
        if not taken:
            _probe(file_signature(path))  # has a better reason if it is the whole file
            raise UnreadableFile(f"there is no frame to be read at {start_seconds:.2f} s")
        if len({pixels.shape for pixels in taken}) > 1:
            sizes = " and ".join(
                sorted({f"{pixels.shape[1]} x {pixels.shape[0]}" for pixels in taken})
            )
            raise UnreadableFile(
                f"its frames have different sizes ({sizes}): a clip needs frames of one size"
            )
    return np.stack(taken)


def on_screen(frames: Frames, moments: list[float]) -> list[np.ndarray]:
    """The frame at each moment, until the frames end or break; what nobody asked for is not even
    converted."""
    taken: list[np.ndarray] = []
    with suppress(UnreadableFile), closing(frames):
        for frame, until in lasting(until_it_breaks(frames)):
            if due := sum(moment < until for moment in moments[len(taken) :]):
                taken += [frame.pixels()] * due
            if len(taken) == len(moments):
                break
    return taken


def until_it_breaks(frames: Iterator[Frame]) -> Iterator[Frame]:
    with suppress(UnreadableFile):
        yield from frames


def lasting(frames: Iterator[Frame]) -> Iterator[tuple[Frame, float]]:
    """Each frame and until when it is shown: until the next one, and the last until its own end."""
    shown: Frame | None = None
    for frame in frames:
        if shown is not None:
            yield shown, frame.begins
        shown = frame
    if shown is not None:
        yield shown, shown.ends


@lru_cache(maxsize=1 << 16)
def _probe(state: FileSignature) -> Facts:
    if state.bytes == 0:
        raise UnreadableFile("the file is empty (0 bytes)")
    return reader_of(state.path).facts()


@lru_cache(maxsize=1 << 16)
def _examine(state: FileSignature) -> Examined:
    facts = _probe(state)
    count, seconds, reason = 0, 0.0, ""
    try:
        for frame in reader_of(state.path).frames(0.0, THUMBNAIL):
            frame.pixels()
            count, seconds = count + 1, frame.ends
    except UnreadableFile as error:
        reason = str(error)
    if not reason and seconds < facts.claimed_seconds - max(0.25, 1.5 / facts.rate_hz):
        reason = "the data ends there"
    of = f" of {facts.claimed_seconds:.2f} s" if seconds < facts.claimed_seconds - 0.01 else ""
    return Examined(
        count, seconds, f"it breaks at {seconds:.2f} s{of} ({reason})" if reason else ""
    )


def reader_of(path: str) -> Reader:
    if Path(path).is_dir():
        return FrameFolder(path)
    return Animation(path) if path.lower().endswith((*ANIMATIONS, *PICTURES)) else VideoReader(path)
