"""Inspect a folder of images: what it contains, which files are unusable and why.

`inspect_folder(path)` decodes every file once, as training does, and returns an `ImageReport` with
`lines()` for people and `as_json()` for programs. Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.data.budget import read_file
from tessera.data.discovery import DEFAULT_OPTIONS, SourceOptions, find_files
from tessera.data.files import AnyFile
from tessera.data.inspect import (
    FileReport,
    Progress,
    Report,
    common_fields,
    count_lines,
    count_nouns,
    format_megabytes,
    scan_folder,
    unmatched_lines,
)
from tessera.modalities.image.media import SUFFIXES, decode, to_rgb
from tessera.modalities.image.proposal import ImageFacts, is_grey, propose_settings

if TYPE_CHECKING:
    from tessera.data.dataset import Proposal
    from tessera.modalities.image.dataset import ImageDataConfig
    from tessera.modalities.image.reconstruction import ImageTokenizerConfig


ALPHA_MODES = ("RGBA", "RGBa", "LA", "La", "PA")
"""Pillow's modes with an alpha channel."""

MAX_CROPPED = 1.15
"""The ratio of the sides up to which the square crop of an image is not worth a notice."""


@dataclass(frozen=True, kw_only=True)
class ImageFileReport(FileReport):
    """What was found in one image file."""

    mode: str = ""
    """Pillow's colour mode of the stored image: RGB, L (grey), P (palette), RGBA, ..."""
    is_grey: bool = False
    """Whether no pixel has a colour."""


@dataclass(frozen=True, kw_only=True)
class ImageReport(Report):
    """What was found in a folder of images."""

    images: int
    """The number of image files."""
    modes: dict[str, int]
    """The number of usable files per colour mode."""
    grey: int
    """The number of usable files without colours, whatever their mode."""
    captions_without_image: list[str]
    """File names in the captions that do not exist."""

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        return [
            f"{self.path}: {count_nouns(self.images, 'image')}, {self.usable:,} usable, "
            f"{format_megabytes(self.bytes)}",
            *self.size_lines(),
            *self.common_size_lines(),
            *self.aspect_lines(),
            *self.colour_lines(),
            *self.alpha_lines(),
            *self.caption_lines("image"),
            *unmatched_lines("images", self.captions_without_image),
            *self.duplicate_lines("image"),
            *self.other_lines(),
            *self.unusable_lines("image"),
        ]

    def colour_lines(self) -> Iterator[str]:
        """Yield the colour modes, and how many images are grey."""
        shown = f"; {self.grey:,} grey" if self.grey else ""
        yield from (f"{line}{shown}" for line in count_lines("colours", self.modes))

    def alpha_lines(self) -> Iterator[str]:
        """Yield how images with an alpha channel are trained on."""
        count = sum(self.modes.get(mode, 0) for mode in ALPHA_MODES)
        if count:
            yield (
                f"alpha: {count_nouns(count, 'image')}, composited over white; --data.channels 4 "
                "trains on colour with alpha"
            )

    def aspect_lines(self) -> Iterator[str]:
        """Yield the aspect if at least half of the images have one size that is no square."""
        if self.sizes is None:
            return
        width, height, count = self.sizes.common[0]
        if 2 * count >= self.usable and max(width, height) > MAX_CROPPED * min(width, height):
            yield (
                f"aspect: {width} x {height} is cropped to a square; --data.aspect "
                f"{width / height:.3g} trains on whole images"
            )

    def propose(self, data: ImageDataConfig, task: ImageTokenizerConfig) -> Proposal | None:
        if self.sizes is None:
            return None
        facts = ImageFacts(self.usable, self.sizes.median_short_side, self.grey == self.usable)
        return propose_settings(facts, data, task.model.stride)

    def common_size_lines(self) -> Iterator[str]:
        """Yield a line with the most common sizes if there are several."""
        if self.sizes is not None and len(self.sizes.common) > 1:
            yield "common sizes: " + ", ".join(
                f"{width} x {height} ({n:,})" for width, height, n in self.sizes.common
            )


def inspect_folder(
    path: str | Path,
    *,
    options: SourceOptions = DEFAULT_OPTIONS,
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> ImageReport:
    """Decode every image in a folder and report what was found.

    Args:
        path: A folder of images, one image, shards, a table or a list.
        options: How data that are no folder are read.
        num_workers: The number of processes; None for one per CPU.
        progress: Called with the number of finished files and the number of all files.

    Raises:
        UserError: If there is no image.
    """
    found = find_files(path, SUFFIXES, "images", options)
    scan = scan_folder(found, inspect_file, ImageFileReport, num_workers, progress)
    return ImageReport(
        **common_fields(path, scan),
        images=len(scan.files),
        modes=dict(Counter(file.mode for file in scan.usable).most_common()),
        grey=sum(file.is_grey for file in scan.usable),
        captions_without_image=list(scan.found.unmatched_captions()),
    )


def inspect_file(file: AnyFile) -> ImageFileReport:
    """Decode one image file."""
    data = read_file(file)
    image = decode(data)
    return ImageFileReport(
        bytes=len(data),
        digest=hashlib.blake2b(data, digest_size=16).hexdigest(),
        width=image.width,
        height=image.height,
        mode=image.mode,
        is_grey=is_grey(to_rgb(image)),
    )
