"""A recording as PyAV decodes it: MP3, OGG, M4A, AAC, WMA, WebM, G.722, and whatever else soundfile
does not take.

Samples are counted from the first one on; only after winding does a time stamp say where the count
begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tessera.data.errors import UnreadableFile
from tessera.modalities.audio.io.base import Block, Facts
from tessera.modalities.video.io.pyav import library

# Only these may be opened, whatever a file is called: FFmpeg also knows playlists, which lead it to
# other files.
FORMATS = "wav,flac,ogg,mp3,mov,mp4,m4a,3gp,matroska,webm,asf,aac,aiff,caf,au,g722"
OPTIONS = {"format_whitelist": FORMATS, "protocol_whitelist": "file"}
WITHOUT_HEADER = {".g722": "g722"}
"""Ending -> FFmpeg's format, of files that hold nothing by which they could be known."""
RUN_UP_SECONDS = 0.4
"""So much earlier a decoder begins: a frame of MP3 may lie in up to ten frames before it, and those
of AAC and Opus overlap."""


@dataclass(frozen=True)
class AudioStreamReader:
    path: str

    def facts(self) -> Facts:
        with opened(self.path) as tape:
            first = next(tape.blocks(0), None)
            if first is None:
                raise no_recording(self.path)
            claimed = tape.claimed() or sum(
                block.samples.shape[1] for block in [first, *tape.blocks(0)]
            )
            return Facts(
                tape.rate_hz, first.samples.shape[0], claimed, tape.stream.codec_context.name
            )

    def blocks(self, since: int) -> Iterator[Block]:
        with opened(self.path) as tape:
            blocks = tape.blocks(tape.seek(since))
            first = next(blocks, None)
            if (
                first is None or first.begins > since
            ):  # an index that leads too far, or a count that is only a guess
                blocks = tape.blocks(tape.seek(0))
            else:
                yield first
            yield from blocks


@dataclass(frozen=True)
class OpenAudio:
    """An open recording: PyAV's container, and its first stream of sound."""

    container: Any
    stream: Any

    @property
    def rate_hz(self) -> int:
        return int(self.stream.rate or 0)

    @property
    def first(self) -> int:
        """the time stamp of the beginning"""
        return self.stream.start_time or 0

    def claimed(self) -> int:
        """Samples of each channel; 0 where nothing is said."""
        seconds = (
            float((self.stream.duration or 0) * self.stream.time_base)
            or (self.container.duration or 0) / 1e6
        )
        return round(seconds * self.rate_hz)

    def seek(self, since: int) -> int | None:
        """To some place before a sample. Gives the number of what comes next, or None: its time
        stamp will say."""
        seconds = since / self.rate_hz - RUN_UP_SECONDS
        if seconds <= 0:
            self.container.seek(self.first, stream=self.stream, backward=True)
            return 0
        self.container.seek(
            self.first + int(seconds / self.stream.time_base), stream=self.stream, backward=True
        )
        return None

    def blocks(self, begins: int | None) -> Iterator[Block]:
        """From where the tape is wound to."""
        to_floats = library().AudioResampler(format="fltp")
        for frame in self.container.decode(self.stream):
            if begins is None:
                begins = round(
                    float(((frame.pts or 0) - self.first) * self.stream.time_base) * self.rate_hz
                )
            for converted in to_floats.resample(frame):
                block = Block(begins, converted.to_ndarray())
                begins = block.ends
                yield block


@contextmanager
def opened(path: str) -> Iterator[OpenAudio]:
    """A recording, wound to its beginning; whatever FFmpeg finds wrong with it, now or later, is
    Unreadable."""
    try:
        av = library()
    except ModuleNotFoundError as error:
        raise UnreadableFile(f"soundfile cannot read it ({error})") from error
    tape: OpenAudio | None = None
    form = next(
        (form for ending, form in WITHOUT_HEADER.items() if path.lower().endswith(ending)), None
    )
    try:
        # "file:", so that no name is taken for an address; tags in any encoding are let be
        with av.open(
            f"file:{path}", format=form, options=OPTIONS, metadata_errors="surrogateescape"
        ) as container:
            tape = OpenAudio(container, sound_of(container))
            yield tape
    except FileNotFoundError as error:
        raise UnreadableFile("the file cannot be opened (No such file or directory)") from error
    except (
        av.FFmpegError,
        ValueError,
    ) as error:  # ValueError: a stream that changes its rate or channels half-way
        if isinstance(error, UnreadableFile):
            raise
        if tape is not None:
            raise UnreadableFile(
                f"it is damaged or cut short ({getattr(error, 'strerror', None) or error})"
            ) from error
        raise no_recording(path) from error


def no_recording(path: str) -> UnreadableFile:
    with open(path, "rb") as file:
        begins = file.read(8)
    return UnreadableFile(
        f"it is no WAV, FLAC, OGG, MP3, M4A or other recording, or it is cut short (it begins with {begins!r})"
    )


def sound_of(container: Any) -> Any:
    """The first stream of sound that FFmpeg can decode."""
    if not container.streams.audio:
        raise UnreadableFile(
            "it holds only pictures, and no sound"
            if container.streams.video
            else "it holds no sound"
        )
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise UnreadableFile("its codec is not one that FFmpeg knows")
    stream.codec_context.thread_count = (
        1  # many readers at a time are faster than one with many threads
    )
    return stream
