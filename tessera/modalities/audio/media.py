"""One piece of audio in memory: load it from any common file, convert it, plot it and save it.

Models receive audio as float32 of shape (C, N) in [-1, 1], where 1 is full scale and C is 1, or 2
for stereo. Files are read in `io/files.py`, and plots are drawn in `plot.py`.

C channels, N samples per channel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Protocol, Self

import numpy as np

from tessera.data.errors import UnreadableFile
from tessera.data.files import AnyFile, resolve_suffix
from tessera.data.notebook import data_uri, to_html
from tessera.modalities.audio.io.base import import_soundfile, import_soxr, mix_channels
from tessera.modalities.audio.io.files import probe, read_samples
from tessera.modalities.audio.plot import plot_audio
from tessera.modalities.image.media import Image

if TYPE_CHECKING:  # listing, inspecting and plotting audio needs no torch
    import torch

    from tessera.engine.task import TrackedMedia

SUBTYPES = {".wav": "PCM_16", ".flac": "PCM_16", ".ogg": "VORBIS", ".mp3": "MPEG_LAYER_III"}
"""Suffixes that can be written -> libsndfile's encoding. MP3 needs libsndfile 1.1 or newer."""
MAX_OGG_RATE_HZ = 192_000
"""Above 200 kHz libsndfile 1.2.2 crashes when it writes Vorbis."""
WRITE_SAMPLES = 1 << 16
"""Samples per channel that are written at a time: libsndfile 1.2.2 crashes when it writes minutes
of Vorbis at once."""

MAX_GAIN_DB = 30.0
"""Maximum amplification of quiet audio, so that background noise does not become loud."""
SILENCE_RMS = 1e-4
"""Below this level audio is not amplified; the last of 16 bits is 3e-5."""

RESAMPLE_MARGIN = 512
"""Half the length of soxr's filter, in samples at the lower of the two rates: a segment that is
read with this margin on both sides is resampled exactly as within the whole file."""

PAUSE_SECONDS = 0.4
"""Silence between an original and its reconstruction."""


@dataclass
class AudioExample:
    samples: np.ndarray
    """(C, N) float32 in [-1, 1]."""
    length: int
    """Number of real samples; padding follows them."""
    rate_hz: int
    caption: str
    """"" if there is no caption."""


@dataclass
class AudioBatch:
    samples: torch.Tensor
    """(B, C, N) float32 in [-1, 1]."""
    lengths: torch.Tensor
    """(B,) int64: number of real samples of each example."""
    rate_hz: int
    captions: list[str]

    def to(self, device: torch.device | str) -> Self:
        from tessera.engine.device import move_tensors

        return move_tensors(self, device)


def collate(examples: Sequence[AudioExample]) -> AudioBatch:
    import torch

    (rate_hz,) = {example.rate_hz for example in examples}  # one dataset has one rate
    samples = torch.from_numpy(np.stack([example.samples for example in examples]))
    lengths = torch.tensor([example.length for example in examples])
    return AudioBatch(samples, lengths, rate_hz, [example.caption for example in examples])


def pad_samples(samples: np.ndarray, count: int) -> np.ndarray:
    """Pad (C, n) with zeros at the end to (C, count)."""
    return np.pad(samples, ((0, 0), (0, count - samples.shape[1])))


def normalize_loudness(samples: np.ndarray, loudness_db: float | None) -> np.ndarray:
    """Scale to a root mean square of `loudness_db` decibels of full scale; None changes nothing."""
    if loudness_db is None:
        return samples
    rms = float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))
    gain = loudness_gain(rms, float(np.abs(samples).max()), loudness_db)
    return samples if gain == 1 else (samples * np.float32(gain)).clip(-1, 1)


def loudness_gain(rms: float, peak: float, loudness_db: float) -> float:
    """Return the factor by which audio of this level is scaled.

    It is limited to MAX_GAIN_DB and so that no sample exceeds full scale, and 1 for audio below
    SILENCE_RMS.
    """
    if rms < SILENCE_RMS:
        return 1.0
    return min(10 ** (loudness_db / 20) / rms, 10 ** (MAX_GAIN_DB / 20), 1 / peak)


@dataclass(eq=False, repr=False)
class Audio:
    samples: np.ndarray
    """(C, N) float32 in [-1, 1]."""
    rate_hz: int
    suffixes: ClassVar[tuple[str, ...]] = tuple(SUBTYPES)
    """The formats that can be written, the default first."""

    def __post_init__(self) -> None:
        if self.samples.dtype != np.float32 or self.samples.ndim != 2 or not self.samples.size:
            raise ValueError(
                "Audio needs samples of shape (channels, samples) and type float32, but got shape "
                f"{self.samples.shape} and type {self.samples.dtype}."
            )
        if not self.rate_hz > 0:
            raise ValueError(f"rate_hz must be greater than 0, but got {self.rate_hz}.")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(seconds={self.seconds:.2f}, channels={len(self.samples)}, "
            f"rate_hz={self.rate_hz})"
        )

    @property
    def seconds(self) -> float:
        return self.samples.shape[1] / self.rate_hz

    @classmethod
    def load(cls, path: str | Path) -> Audio:
        """Load all readable samples of a file at its own rate.

        Raises UnreadableFile with the path and the reason.
        """
        return cls(read_samples(path), probe(path).rate_hz)

    def save(self, path: str | Path) -> Path:
        """Write an audio file and a PNG plot of the same name next to it.

        The suffix of `path` selects the format (.wav, .flac, .ogg, .mp3); without a suffix, .wav is
        appended. Missing folders are created. Returns the path of the audio file.
        """
        path = resolve_suffix(path, ".wav", self.suffixes)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write(path)
        self.plot().save(path.with_suffix(".png"))
        return path

    def write(self, path: str | Path) -> Path:
        """Write only the audio file, in the format that `save` describes.

        WAV and FLAC have 16 bits. Samples outside [-1, 1] are clipped, and NaN becomes silence.
        """
        path = resolve_suffix(path, ".wav", self.suffixes)
        check_format(path, len(self.samples), self.rate_hz)
        content = BytesIO()  # in memory, since libsndfile hides the reason of a failed write
        self.encode(content, path.suffix.lower())
        path.write_bytes(content.getvalue())
        return path

    def encode(self, file: Path | BinaryIO, suffix: str) -> None:
        """Write the format of a suffix to a path or to a file in memory."""
        with open_writer(file, suffix, len(self.samples), self.rate_hz) as output:
            self.write_to(output)

    def write_to(self, output: SampleWriter) -> None:
        """Append to an open file."""
        finite = np.nan_to_num(self.samples, nan=0.0, posinf=1.0, neginf=-1.0).clip(-1, 1).T
        for start in range(0, len(finite), WRITE_SAMPLES):
            output.write(finite[start : start + WRITE_SAMPLES])

    @classmethod
    def write_pieces(cls, pieces: Iterable[Audio], path: str | Path) -> Path:
        """Write audio that arrives in pieces of one rate, in bounded memory; return the path.

        The format is that of `write`.
        """
        path = resolve_suffix(path, ".wav", cls.suffixes)
        path.parent.mkdir(parents=True, exist_ok=True)
        remaining = iter(pieces)
        first = next(remaining)
        check_format(path, len(first.samples), first.rate_hz)
        with open_writer(path, path.suffix.lower(), len(first.samples), first.rate_hz) as output:
            for piece in itertools.chain([first], remaining):
                piece.write_to(output)
        return path

    def to_wav(self) -> bytes:
        """Return the content of a WAV file."""
        buffer = BytesIO()
        self.encode(buffer, ".wav")
        return buffer.getvalue()

    def _repr_html_(self) -> str:
        """Show a plot and a player in notebooks."""
        player = f'<audio controls src="{data_uri(self.to_wav(), "audio/wav")}"></audio>'
        return f"<div>{to_html(self.plot())}<br>{player}</div>"

    def to_tracker(self) -> TrackedMedia:
        import torch

        from tessera.engine.task import TrackedMedia

        return TrackedMedia(
            kind="audio",
            array=torch.tensor(self.samples),
            content=self.to_wav(),
            suffix=".wav",
            rate_hz=self.rate_hz,
        )

    @classmethod
    def sheet(
        cls, items: Sequence[Audio], labels: Sequence[str] = (), *, columns: int | None = None
    ) -> Image:
        """Arrange the plots of several items on a contact sheet, row by row."""
        if not items:
            raise ValueError("A contact sheet needs at least one item, but got none.")
        return Image.sheet([item.plot() for item in items], labels, columns=columns)

    @classmethod
    def side_by_side(cls, left: Audio, right: Audio) -> Audio:
        """Join an original and its reconstruction: one after the other, with plots side by side.

        Both are stereo, or else both are mono.
        """
        channels = 2 if len(left.samples) == len(right.samples) == 2 else 1
        left, right = left.to_channels(channels), right.to_channels(channels)
        right = right.resample(left.rate_hz)
        pause = np.zeros((channels, round(PAUSE_SECONDS * left.rate_hz)), np.float32)
        return AudioPair(
            np.concatenate([left.samples, pause, right.samples], axis=1), left.rate_hz, left, right
        )

    def plot(self) -> Image:
        """Plot the waveform above a mel spectrogram."""
        return plot_audio(self.to_mono().samples[0], self.rate_hz)

    def to_mono(self) -> Audio:
        """Average the channels."""
        return self.to_channels(1)

    def to_channels(self, channels: int) -> Audio:
        """Convert to mono or stereo: another number of channels is averaged, and repeated."""
        if len(self.samples) == channels:
            return self
        return Audio(mix_channels(self.samples, channels), self.rate_hz)

    def resample(self, rate_hz: int) -> Audio:
        """Convert to another sampling rate."""
        if rate_hz == self.rate_hz:
            return self
        samples = import_soxr().resample(self.samples.T, self.rate_hz, rate_hz).T
        return Audio(np.ascontiguousarray(samples.clip(-1, 1)), rate_hz)


class SampleWriter(Protocol):
    """An open file of soundfile."""

    def write(self, samples: np.ndarray) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> SampleWriter: ...
    def __exit__(self, *args: object) -> None: ...


def open_writer(file: Path | BinaryIO, suffix: str, channels: int, rate_hz: int) -> SampleWriter:
    """Open a file, or a file in memory, for writing in the format of a suffix."""
    format_name, subtype = suffix[1:].upper(), SUBTYPES[suffix]
    writer: SampleWriter = import_soundfile().SoundFile(
        file, "w", rate_hz, channels, format=format_name, subtype=subtype
    )
    return writer


def check_format(path: Path, channels: int, rate_hz: int) -> None:
    """Raise ValueError unless the format of a path can hold this audio."""
    suffix, soundfile = path.suffix.lower(), import_soundfile()
    try:
        if suffix == ".ogg" and rate_hz > MAX_OGG_RATE_HZ:
            raise soundfile.SoundFileError(f"{MAX_OGG_RATE_HZ:,} Hz are supported at most")
        open_writer(BytesIO(), suffix, channels, rate_hz).close()
    except soundfile.SoundFileError as error:
        raise ValueError(
            f"{path} cannot hold {channels} channel(s) at {rate_hz:,} Hz ({error}): use .wav, "
            "another rate or fewer channels."
        ) from error


@dataclass(eq=False, repr=False)
class AudioPair(Audio):
    """Two pieces of audio with a pause between them."""

    left: Audio
    right: Audio

    def plot(self) -> Image:
        return Image.side_by_side(self.left.plot(), self.right.plot())


def read_segment(
    path: AnyFile, start_seconds: float, count: int, rate_hz: int, channels: int = 1
) -> Audio:
    """Read `count` samples at `rate_hz` of 1 or 2 channels; fewer where the file ends.

    Only the segment and the margin of the resampling filter are decoded, and the samples equal
    those of the resampled whole file. For this, reading begins at a sample that lies on the time
    grids of both rates.
    """
    file_rate_hz = probe(path).rate_hz
    start = round(start_seconds * rate_hz)
    common = math.gcd(file_rate_hz, rate_hz)
    file_step, step = file_rate_hz // common, rate_hz // common
    margin = 0 if file_rate_hz == rate_hz else math.ceil(RESAMPLE_MARGIN / min(file_step, step))
    first = max(0, start // step - margin)
    end = -(-(start + count) // step) + margin
    samples = read_samples(path, first * file_step, (end - first) * file_step)
    segment = Audio(samples, file_rate_hz).to_channels(channels).resample(rate_hz)
    skip = start - first * step
    if skip >= segment.samples.shape[1]:
        raise UnreadableFile(f"{path}: it ends before {start_seconds:.2f} s")
    return Audio(segment.samples[:, skip : skip + count], rate_hz)
