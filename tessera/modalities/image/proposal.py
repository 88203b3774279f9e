"""Propose settings for the images of a folder: size, channels and the fraction held out."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image

from tessera.data.budget import read_file
from tessera.data.collection import FileCollection
from tessera.data.dataset import Proposal
from tessera.data.errors import UnreadableFile
from tessera.data.files import AnyFile, decoder_input
from tessera.modalities.image.media import FORMATS, decode, to_rgb

if TYPE_CHECKING:
    from tessera.modalities.image.dataset import ImageDataConfig

MAX_READ = 1000
"""The number of files whose headers are read at the start of a run, spread over the folder."""

MAX_ENLARGED = 1.25
"""Images up to this factor larger than the preset's size keep their own size, because resampling
icons and sprites by such factors blurs them."""

MIN_GRID = 4
"""The smallest number of codes along a side of an image."""

GREY_MODES = ("1", "L", "LA", "La", "I", "F")
"""Pillow's modes without colour; those of 16 bits start with I."""

GREY_TOLERANCE = 2
"""The largest difference of red, green and blue in a grey image, of 255: JPEG rounds them."""


MAX_HELD_OUT = 500
"""The number of held-out images of a large folder. Validation computes features of all of them:
with 3,000 images it takes several times as long as the 500 training steps of small before it."""


@dataclass(frozen=True)
class ImageFacts:
    count: int
    """The number of images."""
    short_side: int
    """The median of the short sides, in pixels."""
    is_grey: bool
    """Whether no image has a colour."""


def propose_settings(facts: ImageFacts, preset: ImageDataConfig, stride: int) -> Proposal:
    """Return settings for these images, given those of a preset and codes of `stride` pixels."""
    settings: dict[str, object] = {
        "size": choose_size(facts.short_side, preset.size, stride),
        "channels": 1 if facts.is_grey else 3,
    }
    if facts.count * preset.val_fraction > MAX_HELD_OUT:
        settings["val_fraction"] = round(MAX_HELD_OUT / facts.count, 4)
    grey = ", all grey" if facts.is_grey else ""
    return Proposal(
        settings,
        f"{facts.count:,} images with a median short side of {facts.short_side} pixels{grey}",
    )


def choose_size(short_side: int, limit: int, stride: int) -> int:
    """Return the size of the images in whole codes, or `limit` for much larger images."""
    if short_side > limit * MAX_ENLARGED:
        return limit
    return max(-(-short_side // stride), MIN_GRID) * stride


def read_facts(files: FileCollection) -> ImageFacts | None:
    """Read the headers of some files; only until a colour is found are images decoded.

    Files that cannot be read are left out here, and reported when they are loaded.
    """
    count = min(len(files), MAX_READ)
    indices = np.linspace(0, len(files) - 1, count).round().astype(int)
    chosen = [files.file(int(index)) for index in indices]
    short_sides = []
    for file in chosen:
        with (
            contextlib.suppress(Exception),
            decoder_input(file) as content,
            PIL.Image.open(content, formats=FORMATS) as image,
        ):
            short_sides.append(min(image.size))
    if not short_sides:
        return None
    return ImageFacts(len(files), median_low(short_sides), all(map(has_no_colour, chosen)))


def has_no_colour(file: AnyFile) -> bool:
    """Return whether an image is grey, or cannot be read."""
    try:
        return is_grey(decode(read_file(file)))
    except (UnreadableFile, OSError):
        return True


def is_grey(image: PIL.Image.Image) -> bool:
    """Return whether red, green and blue are equal; of a large image, some pixels are compared."""
    if image.mode.startswith(GREY_MODES):
        return True
    step = max(1, min(image.size) // 256)
    pixels = np.asarray(to_rgb(image))[::step, ::step].astype(np.int16)
    return int((pixels.max(2) - pixels.min(2)).max(initial=0)) <= GREY_TOLERANCE
