"""What is in a folder of clips, what is unusable and why: every file is decoded once, from its
beginning to its end.

`check(path)` gives a Report; its `lines()` are for people, `as_json()` is for programs. Imports no
torch. A file that breaks half-way is listed with the place, and counts as usable: a run takes its
clips from what can be read.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Literal

from tessera.data.captions import Captions
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
from tessera.modalities.video.dataset import VideoDataConfig, find_clips
from tessera.modalities.video.io.files import examine, probe


@dataclass(frozen=True, kw_only=True)
class VideoFileReport(FileReport):
    seconds: float = 0.0
    """as far as it can be read"""
    rate_hz: float = 0.0
    frames: int = 0
    codec: str = ""
    broke: str = ""
    """where it breaks, and why; "" for a clip that can be read to its end"""


@dataclass(frozen=True)
class Lengths:
    shortest: float
    median: float
    max_len: float
    total: float
    """seconds"""
    fewest_frames: int
    most_frames: int


@dataclass(frozen=True, kw_only=True)
class VideoReport(Report):
    files: int
    clips: int
    """usable ones of more than a single picture"""
    pictures: int
    """usable still pictures, which count as clips of one frame"""
    lengths: Lengths | None
    """of the clips; None where there is none"""
    rates: list[tuple[float, int]]
    """frames a second, and how many clips have them"""
    codecs: dict[str, int]
    captions_without_clip: list[str]
    broken: list[dict[str, str]]
    """name, and where and why the file breaks; what comes before is used"""

    def lines(self) -> list[str]:
        kinds = f"{count(self.clips, 'clip')} and {count(self.pictures, 'picture')}"
        return [
            f"{self.path}: {count(self.files, 'file')}, {self.usable:,} usable ({kinds}), {megabytes(self.bytes)}",
            *self.length_lines(),
            *self.size_lines(),
            *tallied("codecs", self.codecs),
            *self.caption_lines("file"),
            *unmatched("clips", self.captions_without_clip),
            *self.duplicate_lines("file"),
            *self.other_lines(),
            *listed("broken", self.broken, "file", "of which the part before is used"),
            *self.unusable_lines("file"),
        ]

    def length_lines(self) -> Iterator[str]:
        if self.lengths is None:
            return
        shortest, median, max_len = self.lengths.shortest, self.lengths.median, self.lengths.max_len
        frames = f"{self.lengths.fewest_frames:,} to {self.lengths.most_frames:,} frames"
        yield f"lengths: {shortest:.2f} to {max_len:.2f} s, median {median:.2f} s; {frames}; in all {clock(self.lengths.total)}"
        yield "rates: " + ", ".join(f"{rate:g} a second ({n:,})" for rate, n in self.rates)


def check(
    path: str | Path,
    *,
    folders: Literal["pictures", "clips"] = "pictures",
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> VideoReport:
    """Looks through every clip; `progress` is told how many of how many are done. No clip at all is
    Refused.

    `folders` says what a folder of pictures is, as in `VideoDataConfig`.
    """
    VideoDataConfig().require_libraries()
    looked = scan_folder(find_clips(path, "single", folders), inspect_file, num_workers, progress)
    clips = [look for look in looked.usable if look.codec != "still"]
    return VideoReport(
        **told_of_all(path, looked),
        files=len(looked.looks),
        clips=len(clips),
        pictures=len(looked.usable) - len(clips),
        lengths=lengths_of(clips),
        rates=Counter(round(look.rate_hz, 2) for look in clips).most_common(5),
        codecs=dict(Counter(look.codec for look in looked.usable).most_common()),
        captions_without_clip=list(looked.captions.unmatched),
        broken=[{"name": look.name, "reason": look.broke} for look in looked.usable if look.broke],
    )


def inspect_file(root: Path, name: str, captions: Captions) -> VideoFileReport:
    path = root / name
    try:
        size, digest = weigh(path)
    except OSError as error:
        return VideoFileReport(
            name=name, reason=f"the file cannot be opened ({error.strerror or error})"
        )
    try:
        facts, examined, caption = probe(path), examine(path), captions.of(name)
    except UnreadableFile as error:
        return VideoFileReport(name=name, bytes=size, reason=str(error).removeprefix(f"{path}: "))
    return VideoFileReport(
        name=name,
        bytes=size,
        digest=digest,
        width=facts.width,
        height=facts.height,
        caption=caption,
        seconds=examined.seconds,
        rate_hz=facts.rate_hz,
        frames=examined.frames,
        codec=facts.codec,
        broke=examined.broke,
    )


def weigh(path: Path) -> tuple[int, str]:
    """Bytes and digest of a file, or of the files of a folder; in pieces, since films do not fit
    into memory."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "blake2b").digest())
    return sum(file.stat().st_size for file in files), digest.hexdigest()


def lengths_of(looks: Sequence[VideoFileReport]) -> Lengths | None:
    if not looks:
        return None
    seconds, frames = [look.seconds for look in looks], [look.frames for look in looks]
    return Lengths(
        min(seconds), median_low(seconds), max(seconds), sum(seconds), min(frames), max(frames)
    )


def clock(seconds: float) -> str:
    """ "1:02:03": hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
