"""Inspect a folder of videos: what it contains, which files are unusable and why.

`inspect_folder(path)` decodes every file once, from start to end, and returns a `VideoReport` with
`lines()` for people and `as_json()` for programs. Imports no torch. A file that can be decoded only
up to some time is listed with that time and counts as usable: training reads the part before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Literal

from tessera.data.discovery import DEFAULT_OPTIONS, SourceOptions
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
from tessera.modalities.video.dataset import VideoDataConfig, find_videos
from tessera.modalities.video.io.files import decode_all, probe


@dataclass(frozen=True, kw_only=True)
class VideoFileReport(FileReport):
    """What was found in one file or folder of frames."""

    seconds: float = 0.0
    """The duration of the part that can be decoded."""
    rate_hz: float = 0.0
    """Frames per second."""
    frames: int = 0
    """The number of frames that can be decoded."""
    codec: str = ""
    """The codec, as in `VideoInfo`."""
    error: str = ""
    """Where and why decoding fails; "" if all frames can be decoded."""


@dataclass(frozen=True)
class Durations:
    """Durations of several videos in seconds, and in frames."""

    min_seconds: float
    median_seconds: float
    max_seconds: float
    total_seconds: float
    min_frames: int
    max_frames: int


@dataclass(frozen=True, kw_only=True)
class VideoReport(Report):
    """What was found in a folder of videos."""

    files: int
    """The number of files, and of folders that are videos."""
    videos: int
    """The number of usable files that are not still images."""
    images: int
    """The number of usable still images, which count as videos of one frame."""
    durations: Durations | None
    """The durations of the videos; None if there are none."""
    rates: list[tuple[float, int]]
    """The most common frame rates, with the number of videos of each."""
    codecs: dict[str, int]
    """The number of usable files per codec."""
    captions_without_video: list[str]
    """File names in the captions that do not exist."""
    partly_readable: list[dict[str, str]]
    """Names of files that cannot be decoded to their end, and the reason."""

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        kinds = f"{count_nouns(self.videos, 'video')} and {count_nouns(self.images, 'image')}"
        return [
            f"{self.path}: {count_nouns(self.files, 'file')}, {self.usable:,} usable ({kinds}), "
            f"{format_megabytes(self.bytes)}",
            *self.duration_lines(),
            *self.size_lines(),
            *count_lines("codecs", self.codecs),
            *self.caption_lines("file"),
            *unmatched_lines("videos", self.captions_without_video),
            *self.duplicate_lines("file"),
            *self.other_lines(),
            *list_problems("partly readable", self.partly_readable, "file", "used up to the error"),
            *self.unusable_lines("file"),
        ]

    def duration_lines(self) -> Iterator[str]:
        """Yield lines with the durations and the frame rates."""
        if self.durations is None:
            return
        found = self.durations
        yield (
            f"durations: {found.min_seconds:.2f} to {found.max_seconds:.2f} s, "
            f"median {found.median_seconds:.2f} s; "
            f"{found.min_frames:,} to {found.max_frames:,} frames; "
            f"total {format_duration(found.total_seconds)}"
        )
        yield "frame rates: " + ", ".join(f"{rate:g} Hz ({n:,})" for rate, n in self.rates)


def inspect_folder(
    path: str | Path,
    *,
    options: SourceOptions = DEFAULT_OPTIONS,
    folders: Literal["images", "videos"] = "images",
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> VideoReport:
    """Decode every video in a folder and report what was found.

    Args:
        path: A folder of videos, one video, shards, a table or a list.
        options: How data that are no folder are read.
        folders: How folders of images are interpreted, as in `VideoDataConfig`.
        num_workers: The number of processes; None for one per CPU.
        progress: Called with the number of finished files and the number of all files.

    Raises:
        UserError: If there is no video or PyAV is not installed.
    """
    VideoDataConfig().require_libraries()
    found = find_videos(path, "single", folders, options)
    scan = scan_folder(found, inspect_file, VideoFileReport, num_workers, progress)
    videos = [file for file in scan.usable if file.codec != "still"]
    return VideoReport(
        **common_fields(path, scan),
        files=len(scan.files),
        videos=len(videos),
        images=len(scan.usable) - len(videos),
        durations=summarize_durations(videos),
        rates=Counter(round(file.rate_hz, 2) for file in videos).most_common(5),
        codecs=dict(Counter(file.codec for file in scan.usable).most_common()),
        captions_without_video=list(scan.found.unmatched_captions()),
        partly_readable=[
            {"name": file.name, "reason": file.error} for file in scan.usable if file.error
        ],
    )


def inspect_file(file: AnyFile) -> VideoFileReport:
    """Decode one file or folder of frames."""
    info, decoded = probe(file), decode_all(file)
    size, digest = hash_file(file)
    return VideoFileReport(
        bytes=size,
        digest=digest,
        width=info.width,
        height=info.height,
        seconds=decoded.seconds,
        rate_hz=info.rate_hz,
        frames=decoded.frames,
        codec=info.codec,
        error=decoded.error,
    )


def summarize_durations(files: Sequence[VideoFileReport]) -> Durations | None:
    """Return the durations of several videos, or None if there are none."""
    if not files:
        return None
    seconds, frames = [file.seconds for file in files], [file.frames for file in files]
    return Durations(
        min(seconds), median_low(seconds), max(seconds), sum(seconds), min(frames), max(frames)
    )
