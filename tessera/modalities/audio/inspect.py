"""What is in a folder of recordings, what is unusable and why: every file is decoded once, from its
beginning to its end.

`check(path)` gives a Report; its `lines()` are for people, `as_json()` is for programs. Imports no
torch. What is silent, clipped or off centre is listed, and usable: a run learns from it as it is.
So is what breaks half-way, as far as it goes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low

import numpy as np

from tessera.data.captions import Captions
from tessera.data.discovery import find
from tessera.data.errors import UnreadableFile
from tessera.data.inspect import (
    FileReport,
    Progress,
    Report,
    count,
    listed,
    megabytes,
    scan_folder,
    tallied,
    told_of_all,
    unmatched,
)
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.io.files import ENDINGS, listen, probe
from tessera.modalities.video.inspect import clock, weigh

SILENT = 1e-3
"""The deviation of a recording in which nothing is heard: 60 dB below full scale."""
AT_THE_TOP = 0.999
IN_A_ROW = 3
"""So many samples at full scale are no peak but a wave whose top was cut off."""
MOST_CLIPPED = 1e-4
"""The share of clipped samples from which on a recording is said to be clipped."""
OFF_CENTRE = 0.02
"""The mean from which on a recording is said to be off centre."""


@dataclass
class Heard:
    """What the samples of a file come to, over all of its channels."""

    number: int = 0
    total: float = 0.0
    squares: float = 0.0
    at_the_top: int = 0
    """samples in rows at full scale"""

    def hear(self, block: np.ndarray) -> None:
        self.number += block.size
        self.total += float(block.sum(dtype=np.float64))
        self.squares += float(np.square(block, dtype=np.float64).sum())
        self.at_the_top += in_rows(np.abs(block) >= AT_THE_TOP)

    @property
    def mean(self) -> float:
        return self.total / self.number

    @property
    def deviation(self) -> float:
        return math.sqrt(max(0.0, self.squares / self.number - self.mean**2))

    @property
    def clipped(self) -> float:
        return self.at_the_top / self.number


@dataclass(frozen=True, kw_only=True)
class AudioFileReport(FileReport):
    seconds: float = 0.0
    """as far as it can be read"""
    rate_hz: int = 0
    channels: int = 0
    codec: str = ""
    heard: Heard = field(default_factory=Heard)
    broke: str = ""
    """where it breaks, and why; "" for a recording that can be read to its end"""


@dataclass(frozen=True)
class Lengths:
    shortest: float
    median: float
    max_len: float
    total: float
    """seconds"""


@dataclass(frozen=True, kw_only=True)
class AudioReport(Report):
    recordings: int
    lengths: Lengths | None
    """None where nothing is usable"""
    rates: dict[str, int]
    """samples a second, and how many recordings have them"""
    channels: dict[str, int]
    codecs: dict[str, int]
    captions_without_recording: list[str]
    silent: list[dict[str, str]]
    """name and how loud it is"""
    clipped: list[dict[str, str]]
    """name and how much of it"""
    off_centre: list[dict[str, str]]
    """name and its mean"""
    broken: list[dict[str, str]]
    """name, and where and why the file breaks; what comes before is used"""

    def lines(self) -> list[str]:
        return [
            f"{self.path}: {count(self.recordings, 'recording')}, {self.usable:,} usable, {megabytes(self.bytes)}",
            *self.length_lines(),
            *tallied("rates", self.rates),
            *tallied("channels", self.channels),
            *tallied("codecs", self.codecs),
            *self.caption_lines("recording"),
            *unmatched("recordings", self.captions_without_recording),
            *self.duplicate_lines("recording"),
            *self.other_lines(),
            *listed("silent", self.silent, "recording", "in which nothing is to be learnt"),
            *listed("clipped", self.clipped, "recording", "whose loudest parts are cut off"),
            *listed("off centre", self.off_centre, "recording", "whose mean is not 0"),
            *listed("broken", self.broken, "recording", "of which the part before is used"),
            *self.unusable_lines("recording"),
        ]

    def length_lines(self) -> Iterator[str]:
        if self.lengths is not None:
            shortest, median, max_len = (
                self.lengths.shortest,
                self.lengths.median,
                self.lengths.max_len,
            )
            span = f"{shortest:.2f} to {max_len:.2f} s, median {median:.2f} s"
            yield f"lengths: {span}; in all {clock(self.lengths.total)}"


def check(
    path: str | Path, *, num_workers: int | None = None, progress: Progress | None = None
) -> AudioReport:
    """Listens to every recording; `progress` is told how many of how many are done. No recording at
    all is Refused."""
    AudioDataConfig().require_libraries()
    looked = scan_folder(find(path, ENDINGS, "recordings"), inspect_file, num_workers, progress)
    usable = looked.usable
    return AudioReport(
        **told_of_all(path, looked) | {"sizes": None},
        recordings=len(looked.looks),
        lengths=lengths_of(usable),
        rates=most_common(f"{look.rate_hz:,} Hz" for look in usable),
        channels=most_common(
            {1: "mono", 2: "stereo"}.get(look.channels, str(look.channels)) for look in usable
        ),
        codecs=most_common(look.codec for look in usable),
        captions_without_recording=list(looked.captions.unmatched),
        silent=[
            named(look, loudness(look.heard)) for look in usable if look.heard.deviation < SILENT
        ],
        clipped=[
            named(look, f"{look.heard.clipped:.2%} of it")
            for look in usable
            if look.heard.clipped > MOST_CLIPPED
        ],
        off_centre=[
            named(look, f"a mean of {look.heard.mean:.3f}")
            for look in usable
            if abs(look.heard.mean) > OFF_CENTRE
        ],
        broken=[named(look, look.broke) for look in usable if look.broke],
    )


def most_common(words: Iterator[str]) -> dict[str, int]:
    return dict(Counter(words).most_common())


def named(look: AudioFileReport, reason: str) -> dict[str, str]:
    return {"name": look.name, "reason": reason}


def loudness(heard: Heard) -> str:
    if heard.deviation < 1e-6:
        return f"all of its samples are {heard.mean:.3g}"
    return f"its loudness is {20 * math.log10(heard.deviation):.0f} dB of full scale"


def inspect_file(root: Path, name: str, captions: Captions) -> AudioFileReport:
    path, heard = root / name, Heard()
    try:
        size, digest = weigh(path)
    except OSError as error:
        return AudioFileReport(
            name=name, reason=f"the file cannot be opened ({error.strerror or error})"
        )
    try:
        facts, examined, caption = probe(path), listen(path, heard.hear), captions.of(name)
    except UnreadableFile as error:
        return AudioFileReport(name=name, bytes=size, reason=str(error).removeprefix(f"{path}: "))
    return AudioFileReport(
        name=name,
        bytes=size,
        digest=digest,
        caption=caption,
        seconds=examined.count / facts.rate_hz,
        rate_hz=facts.rate_hz,
        channels=facts.channels,
        codec=facts.codec,
        heard=heard,
        broke=examined.broke,
    )


def in_rows(marked: np.ndarray) -> int:
    """How many of the marked samples, (C, n), belong to IN_A_ROW or more marked ones that follow
    each other."""
    if not marked.any() or marked.shape[1] < IN_A_ROW:
        return 0
    begins = np.lib.stride_tricks.sliding_window_view(marked, IN_A_ROW, axis=1).all(axis=2)
    belongs = np.zeros_like(marked)
    for offset in range(IN_A_ROW):
        belongs[:, offset : offset + begins.shape[1]] |= begins
    return int(belongs.sum())


def lengths_of(looks: Sequence[AudioFileReport]) -> Lengths | None:
    if not looks:
        return None
    seconds = [look.seconds for look in looks]
    return Lengths(min(seconds), median_low(seconds), max(seconds), sum(seconds))
