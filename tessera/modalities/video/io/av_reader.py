"""Read MP4, MOV, WebM, MKV and AVI files with PyAV.

The rotation in the metadata is applied, and pixels are assumed to be square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image

from tessera.data.budget import PIXEL_BYTES, check_decoded_size, max_decoded_bytes
from tessera.data.errors import UnreadableFile
from tessera.data.files import AnyFile, decoder_input, open_file
from tessera.modalities.image.media import to_rgb
from tessera.modalities.video.io.base import (
    DEFAULT_RATE_HZ,
    Frame,
    Frames,
    VideoInfo,
    downscale,
    downscale_factor,
    import_av,
)

if TYPE_CHECKING:
    from av import Packet, VideoFrame, VideoStream
    from av.container import InputContainer

# Only these formats are enabled, whatever the suffix of a file: FFmpeg also supports playlists,
# which open other files.
OPEN_OPTIONS = {"format_whitelist": "mov,mp4,matroska,webm,avi,gif", "protocol_whitelist": "file"}
ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""Decoders that support transparency, by codec; FFmpeg's own decoders of these codecs ignore it."""
NO_FRAME = "the file contains no frame: the data ends before the first"


@dataclass(frozen=True)
class VideoReader:
    """A `FrameReader` of a file with a video codec."""

    path: AnyFile

    def read_info(self) -> VideoInfo:
        with open_video(self.path) as video:
            first = next(video.frames(None), None)
            if first is None:
                raise UnreadableFile(NO_FRAME)
            height, width, _ = first.pixels().shape
            seconds, declared = video.durations()
            codec = video.stream.codec_context.name
            return VideoInfo(seconds, declared, video.rate_hz, width, height, codec)

    def frames(self, since: float, min_side: int | None) -> Frames:
        with open_video(self.path) as video:
            if since > 0:
                video.seek(since)
            frames = video.frames(min_side)
            first = next(frames, None)
            if first is not None and first.start > since > 0:  # the index of the file is damaged
                video.seek(0.0)
                frames = video.frames(min_side)
            elif first is not None:
                yield first
            yield from frames


@dataclass(frozen=True)
class OpenVideo:
    """An open file: PyAV's container and its video stream."""

    container: InputContainer
    stream: VideoStream
    decode: Callable[[Packet], list[VideoFrame]]
    """Decode the frames of a packet."""

    @property
    def time_base(self) -> Fraction:
        """The unit of the stream's time stamps, in seconds."""
        assert self.stream.time_base is not None  # FFmpeg sets it for every stream of a file
        return self.stream.time_base

    @property
    def rate_hz(self) -> float:
        """The average number of frames per second."""
        return float(self.stream.average_rate or self.stream.guessed_rate or DEFAULT_RATE_HZ)

    @property
    def start_pts(self) -> int:
        """The time stamp of the start of the stream."""
        return self.stream.start_time or 0

    @property
    def start_seconds(self) -> float:
        """The start of the stream in seconds."""
        return float(self.start_pts * self.time_base)

    def to_seconds(self, pts: int) -> float:
        """Convert a time stamp to seconds from the start."""
        return float((pts - self.start_pts) * self.time_base)

    def seek(self, seconds: float) -> None:
        """Seek to the last key frame at or before a time."""
        self.container.seek(
            self.start_pts + int(seconds / self.time_base), stream=self.stream, backward=True
        )

    def frames(self, min_side: int | None) -> Iterator[Frame]:
        """Yield the frames from the current position on.

        A frame without a time stamp starts at the end of the previous one.
        """
        # AVI has no time stamps, and those that FFmpeg guesses are not monotonic
        counted = self.container.format.name == "avi"
        end: float | None = None
        for packet in self.container.demux(self.stream):
            if end is None:
                end = self.to_seconds(packet.dts if packet.dts is not None else self.start_pts)
            for frame in self.decode(packet):
                start = end if counted or frame.pts is None else self.to_seconds(frame.pts)
                duration = float((frame.duration or 0) * self.time_base)
                end = start + (duration or 1 / self.rate_hz)
                yield Frame(start, end, partial(convert_frame, frame, min_side))

    def durations(self) -> tuple[float, float]:
        """Return the end of the last frame and the end that the file declares, in seconds.

        The first is read from the last packets rather than the header, which may describe the
        audio, often longer than the video, or data that is missing.
        """
        declared = float((self.stream.duration or 0) * self.time_base)
        container_seconds = (self.container.duration or 0) / 1e6
        ends = self.last_ends(declared or container_seconds) or self.last_ends(0.0)
        own = ends.get(self.stream.index, 1 / self.rate_hz)
        truncated = max(ends.values(), default=0.0) < container_seconds - 0.5
        return own, max(own, declared, container_seconds if truncated else 0.0)

    def last_ends(self, since: float) -> dict[int, float]:
        """Return the end of each stream by index, or {} if no video follows `since`."""
        ends: dict[int, float] = {}
        with suppress(import_av().FFmpegError):  # use what can be read before an error
            self.seek(since)
            for packet in self.container.demux():
                if packet.pts is not None:
                    end = (
                        float((packet.pts + (packet.duration or 0)) * packet.time_base)
                        - self.start_seconds
                    )
                    ends[packet.stream_index] = max(end, ends.get(packet.stream_index, 0.0))
        return ends if self.stream.index in ends else {}


@contextmanager
def open_video(path: AnyFile) -> Iterator[OpenVideo]:
    """Open a file at its start.

    All errors of FFmpeg, on opening and within the context, become UnreadableFile.
    """
    av = import_av()
    video: OpenVideo | None = None
    try:
        # "file:" prevents names from being parsed as URLs; tags may have any encoding
        with (
            decoder_input(path) as content,
            av.open(
                f"file:{content}" if isinstance(content, str) else content,
                options=OPEN_OPTIONS,
                metadata_errors="surrogateescape",
            ) as container,
        ):
            stream = find_video_stream(container)
            video = OpenVideo(container, stream, build_decoder(stream))
            yield video
    except FileNotFoundError as error:
        raise UnreadableFile("the file cannot be opened (No such file or directory)") from error
    except av.FFmpegError as error:
        reason = error.strerror or str(error)
        if video is not None:
            raise UnreadableFile(f"the data is damaged or truncated ({reason})") from error
        if isinstance(error, EOFError):
            raise UnreadableFile(NO_FRAME) from error
        with open_file(path) as file:
            head = file.read(8)
        raise UnreadableFile(
            "not an MP4, MOV, WebM, MKV or AVI file, or truncated "
            f"({reason}; the data starts with {head!r})"
        ) from error


def find_video_stream(container: InputContainer) -> VideoStream:
    """Return the first video stream; cover art of an audio file does not count."""
    cover = import_av().stream.Disposition.attached_pic
    streams = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not streams:
        content = "only audio" if container.streams.audio else "neither video nor audio"
        raise UnreadableFile(f"the file contains {content}, but a video stream is needed")
    stream = streams[0]
    if stream.codec_context is None:
        raise UnreadableFile("FFmpeg does not support the codec of the file")
    width, height = stream.codec_context.width, stream.codec_context.height
    check_decoded_size(f"frames of {width} x {height} pixels", PIXEL_BYTES * width * height)
    # The size inside the stream may differ from the header, and FFmpeg allocates it.
    stream.codec_context.options = {"max_pixels": str(max_decoded_bytes() // PIXEL_BYTES)}
    stream.codec_context.thread_count = 1  # several readers in parallel are faster than threads
    return stream


def build_decoder(stream: VideoStream) -> Callable[[Packet], list[VideoFrame]]:
    """Return a function that decodes a packet, with transparency where the stream has it."""
    av = import_av()
    name = ALPHA_DECODERS.get(stream.codec_context.name)
    if name is None or stream.metadata.get("alpha_mode") != "1" or name not in av.codecs_available:
        return lambda packet: packet.decode()
    context = av.CodecContext.create(name, "r")
    return context.decode


def convert_frame(frame: VideoFrame, min_side: int | None) -> np.ndarray:
    """Convert a frame of PyAV to upright RGB pixels."""
    factor = downscale_factor(frame.width, frame.height, min_side)
    if any(component.is_alpha for component in frame.format.components):
        pixels = downscale(to_rgb(PIL.Image.fromarray(frame.to_ndarray(format="rgba"))), min_side)
    else:
        width, height = frame.width // factor, frame.height // factor
        pixels = frame.to_ndarray(format="rgb24", interpolation="AREA", width=width, height=height)
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
