"""Read audio files: their header, their samples, or any part of their samples.

WAV, FLAC and AIFF are read with soundfile, everything else with PyAV (`io/stream.py`). A damaged
file is read up to the damage.

C channels, N samples per channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tessera.data.budget import SAMPLE_BYTES, check_decoded_size
from tessera.data.errors import UnreadableFile, add_path
from tessera.data.files import AnyFile, FileSignature, decoder_input, file_signature
from tessera.modalities.audio import MODALITY
from tessera.modalities.audio.io.base import (
    BLOCK_SAMPLES,
    AudioInfo,
    Block,
    Reader,
    import_soundfile,
    mix_channels,
)
from tessera.modalities.audio.io.stream import AudioStreamReader
from tessera.modalities.audio.io.wav import declared_ratio

SUFFIXES = (*MODALITY.suffixes, ".webm")
"""Suffixes of files that are read as audio; .webm may also be a video."""

RATE_RANGE_HZ = (1_000, 768_000)
"""Accepted sampling rates: below the lower one speech is lost, above the upper one there are no
converters."""
MIN_SECONDS = 0.01
MAX_AMPLITUDE = 16.0
"""Float samples beyond full scale are clipped; samples of this size are integers that were never
scaled to [-1, 1]."""
INEXACT_SEEK_FORMATS = ("MP3", "OGG")
"""Formats that soundfile reads correctly only from the beginning: after a seek, libsndfile 1.2.2
returns other samples of an MP3, and other samples of the last page of an OGG."""


@dataclass(frozen=True)
class AudioScan:
    """What decoding a whole file found."""

    num_samples: int
    """Readable samples per channel."""
    error: str
    """Where and why decoding stopped early; "" if the file is intact."""


@dataclass(frozen=True)
class Level:
    """The level of a whole file, over the channels that are used."""

    rms: float
    peak: float


def probe(path: AnyFile) -> AudioInfo:
    """Read the rate, the channels and the length without decoding more than the beginning.

    Cached until the file changes.
    """
    with add_path(path):
        return _probe(file_signature(path))


def measure_file(path: str | Path) -> dict[str, float]:
    """Return the duration that the header of a file declares."""
    return {"seconds": probe(path).seconds}


def scan_audio(path: AnyFile) -> AudioScan:
    """Decode the whole file, one block at a time. Cached until the file changes."""
    with add_path(path):
        return _scan(file_signature(path))


def scan_blocks(path: AnyFile, on_block: Callable[[np.ndarray], None]) -> AudioScan:
    """Do the same as `scan_audio` and call `on_block` with every block, (C, n)."""
    with add_path(path):
        return _scan_blocks(file_signature(path), on_block)


def measure_level(path: AnyFile, channels: int) -> Level:
    """Decode the whole file and measure the level of 1 or 2 channels, until the file changes."""
    with add_path(path):
        return _measure_level(file_signature(path), channels)


def read_samples(path: AnyFile, start: int = 0, count: int | None = None) -> np.ndarray:
    """Read (C, N) float32 in [-1, 1].

    Args:
        path: An audio file.
        start: The index of the first sample.
        count: How many samples to read; None reads all. Fewer are returned where the file ends or
            is damaged.
    """
    with add_path(path):
        info = _probe(file_signature(path))
        wanted = info.num_samples if count is None else min(count, info.num_samples)
        content = f"{wanted:,} samples of {info.channels} channels"
        check_decoded_size(content, SAMPLE_BYTES * wanted * info.channels)
        blocks = ReadableBlocks(open_reader(path).blocks(start))
        parts = list(crop_blocks(blocks, start, count))
        if not parts:
            raise UnreadableFile(f"no sample can be read from index {start:,} on")
        return np.ascontiguousarray(np.concatenate(parts, axis=1))


def crop_blocks(blocks: Iterable[Block], start: int, count: int | None) -> Iterator[np.ndarray]:
    """Yield the samples of [start, start + count); no more blocks are read than needed."""
    end = None if count is None else start + count
    for block in blocks:
        first = max(0, start - block.start)
        last = None if end is None else max(0, end - block.start)
        part = block.samples[:, first:last]
        if part.shape[1]:
            yield validate_samples(part)
        if end is not None and block.end >= end:
            return


def validate_samples(samples: np.ndarray) -> np.ndarray:
    """Clip to [-1, 1]; raise UnreadableFile if the samples are not finite or were never scaled."""
    peak = float(np.abs(samples).max(initial=0))
    if not np.isfinite(peak):
        raise UnreadableFile("some of its samples are not numbers (NaN or infinite)")
    if peak >= MAX_AMPLITUDE:
        raise UnreadableFile(
            f"its samples reach {peak:,.0f}, but full scale is 1: divide them before saving floats"
        )
    return samples if peak <= 1 else samples.clip(-1, 1)


@dataclass
class ReadableBlocks:
    """Iterate over the blocks before the first damage; afterwards `error` holds its description."""

    blocks: Iterator[Block]
    error: str = ""

    def __iter__(self) -> Iterator[Block]:
        try:
            yield from self.blocks
        except UnreadableFile as error:
            self.error = str(error)


@lru_cache(maxsize=1 << 16)
def _probe(signature: FileSignature) -> AudioInfo:
    if signature.bytes == 0:
        raise UnreadableFile("the file is empty (0 bytes)")
    info = open_reader(signature.file).info()
    lowest, highest = RATE_RANGE_HZ
    if not lowest <= info.rate_hz <= highest:
        raise UnreadableFile(
            f"its header states a rate of {info.rate_hz:,} Hz, but {lowest:,} to {highest:,} Hz "
            "are supported"
        )
    if info.seconds < MIN_SECONDS:
        number = "1 sample" if info.num_samples == 1 else f"{info.num_samples:,} samples"
        raise UnreadableFile(
            f"it holds {number}, but audio must last at least {1000 * MIN_SECONDS:g} ms"
        )
    return info


@lru_cache(maxsize=1 << 16)
def _scan(signature: FileSignature) -> AudioScan:
    return _scan_blocks(signature, lambda block: None)


def _scan_blocks(signature: FileSignature, on_block: Callable[[np.ndarray], None]) -> AudioScan:
    info, num_samples = _probe(signature), 0
    blocks = ReadableBlocks(open_reader(signature.file).blocks(0))
    for block in blocks:
        on_block(validate_samples(block.samples))
        num_samples = block.end
    if not num_samples:
        raise UnreadableFile(f"nothing of it can be read ({blocks.error})")
    declared = round(info.num_samples * declared_ratio(signature))
    # The header of a compressed file may state slightly more than the file holds.
    tolerance = 0 if declared > info.num_samples else 0.25 * info.rate_hz
    truncated = num_samples < declared - tolerance
    reason = blocks.error or ("the data ends there" if truncated else "")
    position = f"{num_samples / info.rate_hz:.2f} s of {declared / info.rate_hz:.2f} s"
    return AudioScan(num_samples, f"it is damaged at {position} ({reason})" if reason else "")


@lru_cache(maxsize=1 << 16)
def _measure_level(signature: FileSignature, channels: int) -> Level:
    count, squares, peak = 0, 0.0, 0.0
    for block in ReadableBlocks(open_reader(signature.file).blocks(0)):
        mixed = mix_channels(validate_samples(block.samples), channels)
        count += mixed.size
        squares += float(np.square(mixed, dtype=np.float64).sum())
        peak = max(peak, float(np.abs(mixed).max(initial=0)))
    return Level((squares / max(1, count)) ** 0.5, peak)


def open_reader(path: AnyFile) -> Reader:
    """Return soundfile's reader if it reads and seeks the file correctly, otherwise PyAV's."""
    soundfile = import_soundfile()
    try:
        with decoder_input(path) as content, soundfile.SoundFile(content) as file:
            inexact = file.format in INEXACT_SEEK_FORMATS
            return AudioStreamReader(path) if inexact else SoundfileReader(path)
    except (soundfile.SoundFileError, TypeError):  # TypeError: a name that ends in .raw
        return AudioStreamReader(path)


@dataclass(frozen=True)
class SoundfileReader:
    """Read a file with soundfile."""

    path: AnyFile

    def info(self) -> AudioInfo:
        with open_soundfile(self.path) as file:
            return AudioInfo(
                file.samplerate,
                file.channels,
                file.frames,
                f"{file.format} {file.subtype}".replace("_", " "),
            )

    def blocks(self, start: int) -> Iterator[Block]:
        with open_soundfile(self.path) as file:
            # Aligned to blocks, so that a damaged block is the same wherever reading begins.
            position = file.seek(min(start, file.frames) // BLOCK_SAMPLES * BLOCK_SAMPLES)
            while len(samples := file.read(BLOCK_SAMPLES, dtype="float32", always_2d=True)):
                yield Block(position, samples.T)
                position += len(samples)


@contextmanager
def open_soundfile(path: AnyFile) -> Iterator[Any]:
    """Open a file; every libsndfile error inside the block becomes UnreadableFile."""
    soundfile = import_soundfile()
    try:
        with decoder_input(path) as content, soundfile.SoundFile(content) as file:
            yield file
    except soundfile.SoundFileError as error:
        raise UnreadableFile(f"it is damaged or truncated ({error})") from error
