"""Files that hold a recording: what they say of themselves, what they hold, and the samples of any
part of them.

C counts channels, N samples of each. There are two readers: soundfile for WAV, FLAC and AIFF, and
PyAV for the rest (`modalities/audio/io/stream.py`). A file that breaks half-way is read as far as
it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tessera.data.discovery import FileSignature, file_signature
from tessera.data.errors import UnreadableFile, named
from tessera.modalities.audio.io.base import BLOCK, Block, Facts, Reader
from tessera.modalities.audio.io.libraries import library
from tessera.modalities.audio.io.stream import AudioStreamReader

RECORDINGS = (
    ".wav",
    ".flac",
    ".ogg",
    ".oga",
    ".opus",
    ".mp3",
    ".aiff",
    ".aif",
    ".m4a",
    ".aac",
    ".wma",
    ".mka",
    ".g722",
)
"""Endings of files that hold nothing but sound."""
ENDINGS = (*RECORDINGS, ".webm")

RATES_HZ = (1_000, 768_000)
"""What a rate can be: below it there is no speech, and no converter is faster."""
SHORTEST_SECONDS = 0.01
LOUDEST = 16.0
"""Floats beyond full scale are cut off, but where they reach this far they are whole numbers that
were never scaled."""
SEEKS_WRONG = ("MP3", "OGG")
"""What soundfile reads well from the beginning only: after a seek libsndfile 1.2.2 gives other
samples of an MP3 than before it, and other samples of the last page of an OGG."""


@dataclass(frozen=True)
class Examined:
    """What a file turned out to hold."""

    count: int
    """samples of each channel that can be read"""
    broke: str
    """where the file breaks, and why; "" for one that can be read to its end"""


def probe(path: str | Path) -> Facts:
    """Rate, channels and length, without decoding more than the beginning. Remembered as long as
    the file is the same."""
    with named(path):
        return _probe(file_signature(path))


def examine(path: str | Path) -> Examined:
    """The whole file, block by block, holding one at a time. Remembered as long as the file is the
    same."""
    with named(path):
        return _examine(file_signature(path))


def read_samples(path: str | Path, start: int = 0, count: int | None = None) -> np.ndarray:
    """(C, N) float32 in [-1, 1] from that sample on: `count` of them, all for None, or fewer where
    the file ends or breaks."""
    with named(path):
        _probe(file_signature(path))
        taken = list(part_of(UntilItBreaks(reader_of(str(path)).blocks(start)), start, count))
        if not taken:
            raise UnreadableFile(f"there is no sample to be read from number {start:,} on")
        return np.ascontiguousarray(np.concatenate(taken, axis=1))


def listen(path: str | Path, hear: Callable[[np.ndarray], None]) -> Examined:
    """As `examine`, and every block, (C, n), is given to `hear`."""
    with named(path):
        return _listen(file_signature(path), hear)


def part_of(blocks: Iterable[Block], start: int, count: int | None) -> Iterator[np.ndarray]:
    """From `start` on; a reader may begin before it, and is not asked for more than is needed."""
    end = None if count is None else start + count
    for block in blocks:
        part = block.samples[
            :, max(0, start - block.begins) : None if end is None else max(0, end - block.begins)
        ]
        if part.shape[1]:
            yield examined(part)
        if end is not None and block.ends >= end:
            return


def examined(samples: np.ndarray) -> np.ndarray:
    """Sound as it should be, or why it is none."""
    loudest = float(np.abs(samples).max(initial=0))
    if not np.isfinite(loudest):
        raise UnreadableFile("some of its samples are not numbers (NaN or infinite)")
    if loudest >= LOUDEST:
        raise UnreadableFile(
            f"its samples reach {loudest:,.0f}, where 1 is full scale: divide them before they are saved as floats"
        )
    return samples if loudest <= 1 else samples.clip(-1, 1)


@dataclass
class UntilItBreaks:
    """What can be read of a file; afterwards, why there was no more."""

    blocks: Iterator[Block]
    reason: str = ""

    def __iter__(self) -> Iterator[Block]:
        try:
            yield from self.blocks
        except UnreadableFile as error:
            self.reason = str(error)


@lru_cache(maxsize=1 << 16)
def _probe(state: FileSignature) -> Facts:
    if state.bytes == 0:
        raise UnreadableFile("the file is empty (0 bytes)")
    facts = reader_of(state.path).facts()
    lowest, highest = RATES_HZ
    if not lowest <= facts.rate_hz <= highest:
        raise UnreadableFile(
            f"it claims a rate of {facts.rate_hz:,} Hz, where {lowest:,} to {highest:,} Hz can be sound"
        )
    if facts.seconds < SHORTEST_SECONDS:
        number = "1 sample" if facts.count == 1 else f"{facts.count:,} samples"
        raise UnreadableFile(
            f"it holds {number}: a recording lasts at least {1000 * SHORTEST_SECONDS:g} ms"
        )
    return facts


@lru_cache(maxsize=1 << 16)
def _examine(state: FileSignature) -> Examined:
    return _listen(state, lambda block: None)


def _listen(state: FileSignature, hear: Callable[[np.ndarray], None]) -> Examined:
    facts, count = _probe(state), 0
    read = UntilItBreaks(reader_of(state.path).blocks(0))
    for block in read:
        hear(examined(block.samples))
        count = block.ends
    if not count:
        raise UnreadableFile(f"nothing of it can be read ({read.reason})")
    short = (
        count < facts.count - 0.25 * facts.rate_hz
    )  # a compressed file may claim a little more than it holds
    reason = read.reason or ("the data ends there" if short else "")
    said = f"it breaks at {count / facts.rate_hz:.2f} s of {facts.seconds:.2f} s ({reason})"
    return Examined(count, said if reason else "")


def reader_of(path: str) -> Reader:
    """soundfile's reader where that can read the file, from anywhere on; else PyAV's."""
    try:
        with library().SoundFile(path) as file:
            return AudioStreamReader(path) if file.format in SEEKS_WRONG else SampledFile(path)
    except (library().SoundFileError, TypeError):  # TypeError: a name that ends in .raw
        return AudioStreamReader(path)


@dataclass(frozen=True)
class SampledFile:
    """What soundfile reads."""

    path: str

    def facts(self) -> Facts:
        with opened(self.path) as file:
            return Facts(
                file.samplerate,
                file.channels,
                file.frames,
                f"{file.format} {file.subtype}".replace("_", " "),
            )

    def blocks(self, since: int) -> Iterator[Block]:
        with opened(self.path) as file:
            begins = file.seek(
                min(since, file.frames) // BLOCK * BLOCK
            )  # a broken block is the same wherever reading begins
            while len(samples := file.read(BLOCK, dtype="float32", always_2d=True)):
                yield Block(begins, samples.T)
                begins += len(samples)


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """Whatever libsndfile finds wrong with a file, now or later, is Unreadable."""
    try:
        with library().SoundFile(path) as file:
            yield file
    except library().SoundFileError as error:
        raise UnreadableFile(f"it is damaged or cut short ({error})") from error
