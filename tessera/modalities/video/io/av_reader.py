"""A film has a codec: MP4, MOV, WebM, MKV, AVI, as PyAV decodes them.

The way a camera was held is undone, and pixels are taken to be square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import PIL.Image

from tessera.data.errors import UnreadableFile
from tessera.modalities.image.media import flatten
from tessera.modalities.video.io.base import CLOCK_HZ, Facts, Frame, Frames, reduced, reduction
from tessera.modalities.video.io.pyav import library

# Only these may be opened, whatever a file is called: FFmpeg also knows playlists, which lead it to
# other files.
CONTAINERS = {"format_whitelist": "mov,mp4,matroska,webm,avi,gif", "protocol_whitelist": "file"}
SEES_THROUGH = {
    "vp8": "libvpx",
    "vp9": "libvpx-vp9",
}  # FFmpeg's own decoders of these leave transparency out
NO_FRAME = "it holds no frame: it ends before the first"
MOST_PIXELS = 100_000_000  # 8K has 33 million in a frame


@dataclass(frozen=True)
class VideoReader:
    path: str

    def facts(self) -> Facts:
        with opened(self.path) as reel:
            first = next(reel.frames(None), None)
            if first is None:
                raise UnreadableFile(NO_FRAME)
            height, width, _ = first.pixels().shape
            seconds, claimed = reel.lengths()
            return Facts(
                seconds, claimed, reel.rate_hz, width, height, reel.stream.codec_context.name
            )

    def frames(self, since: float, shortest: int | None) -> Frames:
        with opened(self.path) as reel:
            if since > 0:
                reel.seek(since)
            frames = reel.frames(shortest)
            first = next(frames, None)
            if first is not None and first.begins > since > 0:  # a damaged index leads too far
                reel.seek(0.0)
                frames = reel.frames(shortest)
            elif first is not None:
                yield first
            yield from frames


@dataclass(frozen=True)
class OpenVideo:
    """An open film: PyAV's container, and the one stream of it that moves."""

    container: Any
    stream: Any
    decode: Callable[[Any], list[Any]]
    """a packet's frames"""

    @property
    def rate_hz(self) -> float:
        return float(self.stream.average_rate or self.stream.guessed_rate or CLOCK_HZ)

    @property
    def first(self) -> int:
        """the time stamp of the beginning"""
        return self.stream.start_time or 0

    @property
    def time_of_first(self) -> float:
        return float(self.first * self.stream.time_base)

    def time(self, stamp: int) -> float:
        return float((stamp - self.first) * self.stream.time_base)

    def seek(self, seconds: float) -> None:
        """To the last key frame before."""
        self.container.seek(
            self.first + int(seconds / self.stream.time_base), stream=self.stream, backward=True
        )

    def frames(self, shortest: int | None) -> Iterator[Frame]:
        """From where the film is wound to. A frame without a time stamp follows on the one
        before."""
        counted = (
            self.container.format.name == "avi"
        )  # has no time stamps; those that FFmpeg guesses jump to and fro
        ends: float | None = None
        for packet in self.container.demux(self.stream):
            if ends is None:
                ends = self.time(packet.dts if packet.dts is not None else self.first)
            for picture in self.decode(packet):
                begins = ends if counted or picture.pts is None else self.time(picture.pts)
                ends = begins + (
                    float((picture.duration or 0) * self.stream.time_base) or 1 / self.rate_hz
                )
                yield Frame(begins, ends, partial(converted, picture, shortest))

    def lengths(self) -> tuple[float, float]:
        """Where the last frame ends, and where it is said to end.

        The last packets are asked and not the header: it may speak of the sound, which often lasts
        longer, or of data that is no longer there.
        """
        said = float((self.stream.duration or 0) * self.stream.time_base)
        whole = (self.container.duration or 0) / 1e6
        ends = self.last_ends(said or whole) or self.last_ends(0.0)
        own = ends.get(self.stream.index, 1 / self.rate_hz)
        cut_short = max(ends.values(), default=0.0) < whole - 0.5
        return own, max(own, said, whole if cut_short else 0.0)

    def last_ends(self, since: float) -> dict[int, float]:
        """Where each stream ends, by its number; nothing if there is no picture from there on."""
        ends: dict[int, float] = {}
        with suppress(library().FFmpegError):  # as far as it can be read
            self.seek(since)
            for packet in self.container.demux():
                if packet.pts is not None:
                    end = (
                        float((packet.pts + (packet.duration or 0)) * packet.time_base)
                        - self.time_of_first
                    )
                    ends[packet.stream_index] = max(end, ends.get(packet.stream_index, 0.0))
        return ends if self.stream.index in ends else {}


@contextmanager
def opened(path: str) -> Iterator[OpenVideo]:
    """A film, wound to its beginning; whatever FFmpeg finds wrong with it, now or later, is
    Unreadable."""
    av = library()
    reel: OpenVideo | None = None
    try:
        # "file:", so that no name is taken for an address; tags in any encoding are let be
        with av.open(
            f"file:{path}", options=CONTAINERS, metadata_errors="surrogateescape"
        ) as container:
            stream = moving_stream(container)
            reel = OpenVideo(container, stream, decoder_of(stream))
            yield reel
    except FileNotFoundError as error:
        raise UnreadableFile("the file cannot be opened (No such file or directory)") from error
    except av.FFmpegError as error:
        reason = error.strerror or str(error)
        if reel is not None:
            raise UnreadableFile(f"it is damaged or cut short ({reason})") from error
        if isinstance(error, EOFError):
            raise UnreadableFile(NO_FRAME) from error
        with open(path, "rb") as file:
            begins = file.read(8)
        raise UnreadableFile(
            f"it is no MP4, MOV, WebM, MKV or AVI, or it is cut short ({reason}; it begins with {begins!r})"
        ) from error


def moving_stream(container: Any) -> Any:
    """The first stream of moving pictures; the cover of a record is none."""
    cover = library().stream.Disposition.attached_pic
    streams = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not streams:
        sound = (
            "it holds only sound"
            if container.streams.audio
            else "it holds neither pictures nor sound"
        )
        raise UnreadableFile(f"{sound}, and no video")
    stream = streams[0]
    if stream.codec_context is None:
        raise UnreadableFile("its codec is not one that FFmpeg knows")
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > MOST_PIXELS:
        raise UnreadableFile(
            f"its frames are {width} x {height}, more pixels than a frame may have: scale it down"
        )
    stream.codec_context.thread_count = (
        1  # many readers at a time are faster than one with many threads
    )
    return stream


def decoder_of(stream: Any) -> Callable[[Any], list[Any]]:
    av = library()
    name = SEES_THROUGH.get(stream.codec_context.name)
    if name is None or stream.metadata.get("alpha_mode") != "1" or name not in av.codecs_available:
        return lambda packet: packet.decode()
    context = av.CodecContext.create(name, "r")
    return context.decode


def converted(picture: Any, shortest: int | None) -> np.ndarray:
    """PyAV's frame as pixels, upright."""
    divisor = reduction(picture.width, picture.height, shortest)
    if any(component.is_alpha for component in picture.format.components):
        pixels = reduced(flatten(PIL.Image.fromarray(picture.to_ndarray(format="rgba"))), shortest)
    else:
        size = {"width": picture.width // divisor, "height": picture.height // divisor}
        pixels = picture.to_ndarray(format="rgb24", interpolation="AREA", **size)
    return np.ascontiguousarray(np.rot90(pixels, round(picture.rotation / 90)))
