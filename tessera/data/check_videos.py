"""What is in a folder of clips, what is unusable and why: every file is decoded once, from its beginning to its end.

`check(path)` gives a Report; `Report.lines()` is for people, `Report.as_json()` for programs. Imports no torch. A file
that breaks half-way is listed with the place, and counts as usable: a run takes its clips from what can be read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from typing import Literal

from tessera.data.captions import Captions
from tessera.data.check_images import (
    Look,
    Sizes,
    captions_or_why_not,
    count,
    duplicates_of,
    indented,
    megabytes,
    sizes_of,
    some,
)
from tessera.data.folders import tally
from tessera.data.videos import find_clips, require_library
from tessera.media.errors import Unreadable
from tessera.media.video import examine, probe


@dataclass(frozen=True, kw_only=True)
class ClipLook(Look):
    """What one file turned out to be."""

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
    longest: float
    total: float
    """seconds"""
    fewest_frames: int
    most_frames: int


@dataclass(frozen=True)
class Report:
    path: str
    files: int
    clips: int
    """usable ones of more than a single picture"""
    pictures: int
    """usable still pictures, which count as clips of one frame"""
    usable: int
    bytes: int
    lengths: Lengths | None
    """of the clips; None where there is none"""
    rates: list[tuple[float, int]]
    """frames a second, and how many clips have them"""
    sizes: Sizes | None
    """of clips and pictures; None where none is usable"""
    codecs: dict[str, int]
    captioned: int
    """usable files about which something is said"""
    captions: dict[str, int]
    """where captions stand"""
    captions_refused: str
    """why the captions as a whole cannot be used; "" if they can"""
    captions_without_clip: list[str]
    duplicates: list[list[str]]
    """groups of files that are the same byte for byte"""
    broken: list[dict[str, str]]
    """name, and where and why the file breaks; what comes before is used"""
    unusable: list[dict[str, str]]
    """name and reason"""
    other_files: str
    """what else lies there, neither clip nor caption"""

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    def lines(self) -> list[str]:
        kinds = f"{count(self.clips, 'clip')} and {count(self.pictures, 'picture')}"
        return [
            f"{self.path}: {count(self.files, 'file')}, {self.usable:,} usable ({kinds}), {megabytes(self.bytes)}",
            *self.length_lines(),
            *self.size_lines(),
            *self.caption_lines(),
            *self.duplicate_lines(),
            *([f"other files: {self.other_files}"] if self.other_files else []),
            *listed("broken", self.broken, "of which the part before is used"),
            *listed("unusable", self.unusable, "left out when a run meets them"),
        ]

    def length_lines(self) -> Iterator[str]:
        if self.lengths is None:
            return
        shortest, median, longest = self.lengths.shortest, self.lengths.median, self.lengths.longest
        frames = f"{self.lengths.fewest_frames:,} to {self.lengths.most_frames:,} frames"
        yield f"lengths: {shortest:.2f} to {longest:.2f} s, median {median:.2f} s; {frames}; in all {clock(self.lengths.total)}"
        yield "rates: " + ", ".join(f"{rate:g} a second ({n:,})" for rate, n in self.rates)

    def size_lines(self) -> Iterator[str]:
        if self.sizes is None:
            return
        smallest, largest = (f"{width} x {height}" for width, height in (self.sizes.smallest, self.sizes.largest))
        span = f"all {smallest}" if len(self.sizes.common) == 1 else f"{smallest} to {largest}"
        yield f"sizes: {span}; median short side {self.sizes.median_short_side}"
        yield "codecs: " + ", ".join(f"{codec} ({n:,})" for codec, n in self.codecs.items())

    def caption_lines(self) -> Iterator[str]:
        if self.captions_refused:
            yield f"captions: unusable. {self.captions_refused}"
        elif self.captions:
            where = ", ".join(f"{n:,} in {place}" for place, n in self.captions.items())
            yield f"captions: {self.captioned:,} of {count(self.usable, 'usable file')} ({where})"
        else:
            yield "captions: none"
        if self.captions_without_clip:
            yield f"captions for clips that are not there: {some(self.captions_without_clip)}"

    def duplicate_lines(self) -> Iterator[str]:
        if self.duplicates:
            copies = sum(len(group) - 1 for group in self.duplicates)
            verb = "is a copy of another" if copies == 1 else "are copies of others"
            yield f"duplicates: {count(copies, 'file')} {verb}; one may be learnt from and the other held out"
            yield from indented([" = ".join(group) for group in self.duplicates])


def check(
    path: str | Path,
    *,
    folders: Literal["pictures", "clips"] = "pictures",
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Looks through every clip; `progress` is told how many of how many are done. No clip at all is Refused.

    `folders` says what a folder of pictures is, as in `Videos`.
    """
    require_library()
    found = find_clips(path, "single", folders)
    captions, refusal = captions_or_why_not(found)
    looks: list[ClipLook] = []
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as threads:  # decoders work outside the interpreter's lock
        for look in threads.map(lambda name: look_at(found.root, name, captions), found.names):
            looks.append(look)
            if progress is not None:
                progress(len(looks), len(found.names))
    usable = [look for look in looks if not look.reason]
    clips = [look for look in usable if look.codec != "still"]
    return Report(
        path=str(path),
        files=len(looks),
        clips=len(clips),
        pictures=len(usable) - len(clips),
        usable=len(usable),
        bytes=sum(look.bytes for look in looks),
        lengths=lengths_of(clips),
        rates=Counter(round(look.rate_hz, 2) for look in clips).most_common(5),
        sizes=sizes_of(usable),
        codecs=dict(Counter(look.codec for look in usable).most_common()),
        captioned=sum(bool(look.caption) for look in usable),
        captions=captions.counts(found.names),
        captions_refused=refusal,
        captions_without_clip=list(captions.strangers),
        duplicates=duplicates_of(usable),
        broken=[{"name": look.name, "reason": look.broke} for look in usable if look.broke],
        unusable=[{"name": look.name, "reason": look.reason} for look in looks if look.reason],
        other_files=tally(captions.unrelated(found.names, found.beside)),
    )


def look_at(root: Path, name: str, captions: Captions) -> ClipLook:
    path = root / name
    try:
        size, digest = weigh(path)
    except OSError as error:
        return ClipLook(name, reason=f"the file cannot be opened ({error.strerror or error})")
    try:
        facts, examined, caption = probe(path), examine(path), captions.of(name)
    except Unreadable as error:
        return ClipLook(name, size, reason=str(error).removeprefix(f"{path}: "))
    return ClipLook(
        name,
        size,
        digest,
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
    """Bytes and digest of a file, or of the files of a folder; in pieces, since films do not fit into memory."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "blake2b").digest())
    return sum(file.stat().st_size for file in files), digest.hexdigest()


def lengths_of(looks: Sequence[ClipLook]) -> Lengths | None:
    if not looks:
        return None
    seconds, frames = [look.seconds for look in looks], [look.frames for look in looks]
    return Lengths(min(seconds), median_low(seconds), max(seconds), sum(seconds), min(frames), max(frames))


def clock(seconds: float) -> str:
    """ "1:02:03": hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def listed(what: str, entries: Sequence[dict[str, str]], fate: str) -> Iterator[str]:
    if entries:
        yield f"{what}: {count(len(entries), 'file')}, {fate}"
        yield from indented([f"{each['name']}: {each['reason']}" for each in entries])
