"""Read audio with PyAV: MP3, OGG, M4A, AAC, WMA, WebM, G.722 and other formats of FFmpeg.

Samples are counted from the first one. Only after a seek is a time stamp used to find the index of
the next sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from tessera.data.errors import UnreadableFile
from tessera.data.files import AnyFile, decoder_input, file_suffix, open_file
from tessera.modalities.audio.io.base import AudioInfo, Block, import_av

if TYPE_CHECKING:
    from av import AudioStream
    from av.container import InputContainer

# Only these formats are opened, whatever the file is called: FFmpeg also supports playlists, which
# refer to other files.
FORMATS = "wav,flac,ogg,mp3,mov,mp4,m4a,3gp,matroska,webm,asf,aac,aiff,caf,au,g722"
OPTIONS = {"format_whitelist": FORMATS, "protocol_whitelist": "file"}
HEADERLESS_FORMATS = {".g722": "g722"}
"""File suffix -> FFmpeg format, for files without a header that identifies the format."""
PREROLL_SECONDS = 0.4
"""How far before the requested sample decoding begins: an MP3 frame may depend on up to ten frames
before it, and AAC and Opus frames overlap."""


@dataclass(frozen=True)
class AudioStreamReader:
    path: AnyFile

    def info(self) -> AudioInfo:
        with open_audio(self.path) as audio:
            first = next(audio.blocks(0), None)
            if first is None:
                raise not_audio(self.path)
            num_samples = audio.stated_num_samples() or sum(
                block.samples.shape[1] for block in [first, *audio.blocks(0)]
            )
            return AudioInfo(
                audio.rate_hz,
                first.samples.shape[0],
                num_samples,
                audio.stream.codec_context.name,
            )

    def blocks(self, start: int) -> Iterator[Block]:
        with open_audio(self.path) as audio:
            blocks = audio.blocks(audio.seek(start))
            first = next(blocks, None)
            # The seek index may point too far, or the computed position may be inexact.
            if first is None or first.start > start:
                blocks = audio.blocks(audio.seek(0))
            else:
                yield first
            yield from blocks


@dataclass(frozen=True)
class OpenAudio:
    """An open PyAV container and its first audio stream."""

    container: InputContainer
    stream: AudioStream

    @property
    def time_base(self) -> Fraction:
        """The unit of the stream's time stamps, in seconds."""
        assert self.stream.time_base is not None  # FFmpeg sets it for every stream of a file
        return self.stream.time_base

    @property
    def rate_hz(self) -> int:
        return int(self.stream.rate or 0)

    @property
    def first_pts(self) -> int:
        """The time stamp of the first sample."""
        return self.stream.start_time or 0

    def stated_num_samples(self) -> int:
        """Return the samples per channel that the header states; 0 if it states none."""
        seconds = (
            float((self.stream.duration or 0) * self.time_base)
            or (self.container.duration or 0) / 1e6
        )
        return round(seconds * self.rate_hz)

    def seek(self, start: int) -> int | None:
        """Seek to a position at or before sample `start`.

        Returns the index of the next sample, or None if only its time stamp determines it.
        """
        seconds = start / self.rate_hz - PREROLL_SECONDS
        if seconds <= 0:
            self.container.seek(self.first_pts, stream=self.stream, backward=True)
            return 0
        self.container.seek(
            self.first_pts + int(seconds / self.time_base), stream=self.stream, backward=True
        )
        return None

    def blocks(self, start: int | None) -> Iterator[Block]:
        """Decode from the current position; `start` is what `seek` returned.

        Samples are converted to interleaved floats: PyAV 18 reads beyond the first planes of a
        planar frame of eight channels or more, which ends the process.
        """
        to_floats = import_av().AudioResampler(format="flt")
        for frame in self.container.decode(self.stream):
            if start is None:
                start = round(
                    float(((frame.pts or 0) - self.first_pts) * self.time_base) * self.rate_hz
                )
            for converted in to_floats.resample(frame):
                channels = converted.layout.nb_channels
                block = Block(start, converted.to_ndarray().reshape(-1, channels).T)
                start = block.end
                yield block


@contextmanager
def open_audio(path: AnyFile) -> Iterator[OpenAudio]:
    """Open a file at its beginning; every FFmpeg error inside the block becomes UnreadableFile."""
    try:
        av = import_av()
    except ModuleNotFoundError as error:
        raise UnreadableFile(f"soundfile cannot read it ({error})") from error
    audio: OpenAudio | None = None
    format_name = HEADERLESS_FORMATS.get(file_suffix(path))
    try:
        # "file:" keeps FFmpeg from reading the name as a URL; tags of any encoding are accepted.
        with (
            decoder_input(path) as content,
            av.open(
                f"file:{content}" if isinstance(content, str) else content,
                format=format_name,
                options=OPTIONS,
                metadata_errors="surrogateescape",
            ) as container,
        ):
            audio = OpenAudio(container, first_audio_stream(container))
            yield audio
    except FileNotFoundError as error:
        raise UnreadableFile("the file cannot be opened (No such file or directory)") from error
    except (av.FFmpegError, ValueError) as error:
        # PyAV raises ValueError where a stream changes its rate or channels half-way.
        if isinstance(error, UnreadableFile):
            raise
        if audio is not None:
            raise UnreadableFile(
                f"it is damaged or truncated ({getattr(error, 'strerror', None) or error})"
            ) from error
        raise not_audio(path) from error


def not_audio(path: AnyFile) -> UnreadableFile:
    with open_file(path) as file:
        head = file.read(8)
    return UnreadableFile(
        "it is not a WAV, FLAC, OGG, MP3, M4A or other supported audio file, or it is truncated "
        f"(it begins with {head!r})"
    )


def first_audio_stream(container: InputContainer) -> AudioStream:
    """Return the first audio stream, if FFmpeg has a decoder for it."""
    if not container.streams.audio:
        raise UnreadableFile(
            "it holds video but no audio" if container.streams.video else "it holds no audio"
        )
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise UnreadableFile("FFmpeg has no decoder for its codec")
    # Several single-threaded readers are faster than one reader with several threads.
    stream.codec_context.thread_count = 1
    return stream
