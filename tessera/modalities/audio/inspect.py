"""Inspect a folder of audio files: what it holds, which files are unusable, and why.

Every file is decoded once from beginning to end. Silent, clipped, off-centre and damaged files are
listed but usable: a run trains on them as they are, and on a damaged file up to the damage.

Imports no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low

import numpy as np

from tessera.data.discovery import DEFAULT_OPTIONS, SourceOptions, find_files
from tessera.data.files import AnyFile
from tessera.data.inspect import (
    FileReport,
    Progress,
    Report,
    common_fields,
    count_lines,
    count_nouns,
    format_duration,
    format_megabytes,
    hash_file,
    list_problems,
    scan_folder,
    unmatched_lines,
)
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.io.files import SUFFIXES, probe, scan_blocks

SILENCE_STD = 1e-3
"""Standard deviation below which a file is reported as silent: 60 dB below full scale."""
CLIP_LEVEL = 0.999
MIN_CLIP_SAMPLES = 3
"""Consecutive samples at full scale that count as clipping; fewer are a peak."""
MAX_CLIPPED_FRACTION = 1e-4
"""Fraction of clipped samples above which a file is reported as clipped."""
MAX_DC_OFFSET = 0.02
"""Absolute mean above which a file is reported as off centre."""


@dataclass
class SampleStats:
    """Running statistics of the samples of a file, over all channels."""

    count: int = 0
    total: float = 0.0
    total_squares: float = 0.0
    num_clipped: int = 0

    def update(self, block: np.ndarray) -> None:
        self.count += block.size
        self.total += float(block.sum(dtype=np.float64))
        self.total_squares += float(np.square(block, dtype=np.float64).sum())
        self.num_clipped += count_in_runs(np.abs(block) >= CLIP_LEVEL)

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def std(self) -> float:
        return math.sqrt(max(0.0, self.total_squares / self.count - self.mean**2))

    @property
    def clipped_fraction(self) -> float:
        return self.num_clipped / self.count


@dataclass(frozen=True, kw_only=True)
class AudioFileReport(FileReport):
    seconds: float = 0.0
    """Length of the readable part."""
    rate_hz: int = 0
    channels: int = 0
    codec: str = ""
    stats: SampleStats = field(default_factory=SampleStats)
    damage: str = ""
    """Where and why decoding stopped early; "" if the file is intact."""


@dataclass(frozen=True)
class Lengths:
    """Lengths in seconds."""

    min: float
    median: float
    max: float
    total: float


@dataclass(frozen=True, kw_only=True)
class AudioReport(Report):
    files: int
    lengths: Lengths | None
    """None if no file is usable."""
    rates: dict[str, int]
    """Sampling rate -> number of files."""
    channels: dict[str, int]
    codecs: dict[str, int]
    captions_without_file: list[str]
    silent: list[dict[str, str]]
    """Name and level."""
    clipped: list[dict[str, str]]
    """Name and clipped fraction."""
    off_centre: list[dict[str, str]]
    """Name and mean."""
    damaged: list[dict[str, str]]
    """Name, and where and why decoding stopped; the part before is used."""

    def lines(self) -> list[str]:
        summary = f"{count_nouns(self.files, 'audio file')}, {self.usable:,} usable"
        return [
            f"{self.path}: {summary}, {format_megabytes(self.bytes)}",
            *self.length_lines(),
            *count_lines("rates", self.rates),
            *count_lines("channels", self.channels),
            *self.channel_lines(),
            *count_lines("codecs", self.codecs),
            *self.caption_lines("audio file"),
            *unmatched_lines("audio files", self.captions_without_file),
            *self.duplicate_lines("audio file"),
            *self.other_lines(),
            *list_problems("silent", self.silent, "audio file", "with nothing to learn from"),
            *list_problems("clipped", self.clipped, "audio file", "cut off at full scale"),
            *list_problems("off centre", self.off_centre, "audio file", "with a DC offset"),
            *list_problems("damaged", self.damaged, "audio file", "used up to the damage"),
            *self.unusable_lines("audio file"),
        ]

    def channel_lines(self) -> Iterator[str]:
        if self.channels.keys() - {"mono"}:
            yield "  several channels are averaged, unless a codec has --data.channels 2"

    def length_lines(self) -> Iterator[str]:
        if self.lengths is not None:
            shortest, longest = self.lengths.min, self.lengths.max
            span = f"{shortest:.2f} to {longest:.2f} s, median {self.lengths.median:.2f} s"
            yield f"lengths: {span}; total {format_duration(self.lengths.total)}"


def inspect_folder(
    path: str | Path,
    *,
    options: SourceOptions = DEFAULT_OPTIONS,
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> AudioReport:
    """Decode every audio file of a folder and report what was found.

    Args:
        path: A folder, with subfolders, one file, shards, a table or a list.
        options: How data that are no folder are read.
        num_workers: The number of processes; None for one per CPU.
        progress: Called with the number of inspected files and the number of all files.

    Raises:
        UserError: If there is no audio file.
    """
    AudioDataConfig().require_libraries()
    found = find_files(path, SUFFIXES, "audio files", options)
    scan = scan_folder(found, inspect_file, AudioFileReport, num_workers, progress)
    usable = scan.usable
    return AudioReport(
        **common_fields(path, scan) | {"sizes": None},
        files=len(scan.files),
        lengths=summarize_lengths(usable),
        rates=count_values(f"{file.rate_hz:,} Hz" for file in usable),
        channels=count_values(
            {1: "mono", 2: "stereo"}.get(file.channels, str(file.channels)) for file in usable
        ),
        codecs=count_values(file.codec for file in usable),
        captions_without_file=list(scan.found.unmatched_captions()),
        silent=[
            entry(file, describe_level(file.stats))
            for file in usable
            if file.stats.std < SILENCE_STD
        ],
        clipped=[
            entry(file, f"{file.stats.clipped_fraction:.2%} of its samples")
            for file in usable
            if file.stats.clipped_fraction > MAX_CLIPPED_FRACTION
        ],
        off_centre=[
            entry(file, f"a mean of {file.stats.mean:.3f}")
            for file in usable
            if abs(file.stats.mean) > MAX_DC_OFFSET
        ],
        damaged=[entry(file, file.damage) for file in usable if file.damage],
    )


def count_values(values: Iterable[str]) -> dict[str, int]:
    """Count equal values, the most common first."""
    return dict(Counter(values).most_common())


def entry(file: AudioFileReport, reason: str) -> dict[str, str]:
    return {"name": file.name, "reason": reason}


def describe_level(stats: SampleStats) -> str:
    if stats.std < 1e-6:
        return f"all of its samples are {stats.mean:.3g}"
    return f"its level is {20 * math.log10(stats.std):.0f} dB of full scale"


def inspect_file(file: AnyFile) -> AudioFileReport:
    stats = SampleStats()
    info, scan = probe(file), scan_blocks(file, stats.update)
    size, digest = hash_file(file)
    return AudioFileReport(
        bytes=size,
        digest=digest,
        seconds=scan.num_samples / info.rate_hz,
        rate_hz=info.rate_hz,
        channels=info.channels,
        codec=info.codec,
        stats=stats,
        damage=scan.error,
    )


def count_in_runs(marked: np.ndarray) -> int:
    """Count the marked samples, (C, n), in runs of MIN_CLIP_SAMPLES or more."""
    if not marked.any() or marked.shape[1] < MIN_CLIP_SAMPLES:
        return 0
    starts = np.lib.stride_tricks.sliding_window_view(marked, MIN_CLIP_SAMPLES, axis=1).all(axis=2)
    in_run = np.zeros_like(marked)
    for offset in range(MIN_CLIP_SAMPLES):
        in_run[:, offset : offset + starts.shape[1]] |= starts
    return int(in_run.sum())


def summarize_lengths(files: Sequence[AudioFileReport]) -> Lengths | None:
    if not files:
        return None
    seconds = [file.seconds for file in files]
    return Lengths(min(seconds), median_low(seconds), max(seconds), sum(seconds))
