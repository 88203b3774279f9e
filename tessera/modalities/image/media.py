"""Pictures: any common file in, (H, W, 3) bytes in the middle, PNG out.

Models see a picture as float32 of shape (3, H, W) in [-1, 1]; `floats` and `from_floats` are the
only two places that know this. Transparent pictures are laid on white. Colour profiles are not
applied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image
from PIL.Image import Transpose

from tessera.data.errors import UnreadableFile

if TYPE_CHECKING:  # listing, checking and drawing pictures needs no torch
    import torch


@dataclass
class ImageExample:
    pixels: np.ndarray
    """(3, S, S) float32 in [-1, 1]"""
    caption: str
    """"" where nothing is said about the picture"""


@dataclass
class ImageBatch:
    pixels: torch.Tensor
    """(B, 3, S, S) float32 in [-1, 1]"""
    captions: list[str]

    def to(self, device: torch.device | str) -> ImageBatch:
        return ImageBatch(self.pixels.to(device), self.captions)


def collate(examples: Sequence[ImageExample]) -> ImageBatch:
    import torch

    pixels = torch.from_numpy(np.stack([example.pixels for example in examples]))
    return ImageBatch(pixels, [example.caption for example in examples])


ENDINGS = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff")

# Only these decoders may run, whatever a file is called: Pillow knows formats that start other
# programs.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")

PAPER = 236  # the light grey between the pictures of a sheet

ORIENTATION = 0x0112  # the EXIF tag; its values are in the EXIF 2.3 standard, 4.6.4 A
UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}


@dataclass(eq=False)
class Image:
    pixels: np.ndarray
    """(H, W, 3) uint8"""

    def __post_init__(self) -> None:
        if self.pixels.dtype != np.uint8 or self.pixels.ndim != 3 or self.pixels.shape[2] != 3:
            raise ValueError(
                f"an Image holds (height, width, 3) bytes, but was given {self.pixels.shape} of {self.pixels.dtype}; "
                "for (3, height, width) floats in [-1, 1] use Image.from_floats"
            )

    @classmethod
    def load(cls, path: str | Path) -> Image:
        """The first frame of a picture file, upright. Raises Unreadable with the file and the
        reason."""
        return cls(np.array(read(path)))

    def save(self, stem: str | Path) -> Path:
        path = Path(f"{stem}.png")  # not with_suffix, which would eat the end of "epoch-0.5"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(self.pixels).save(path)
        return path

    @classmethod
    def sheet(cls, items: Sequence[Image], columns: int | None = None) -> Image:
        """A contact sheet, read like a page; pictures of different sizes are centred in equal
        cells."""
        if not items:
            raise ValueError("a sheet of no pictures was asked for: give at least one")
        columns = min(columns or math.ceil(math.sqrt(len(items))), len(items))
        rows = math.ceil(len(items) / columns)
        height = max(item.pixels.shape[0] for item in items)
        width = max(item.pixels.shape[1] for item in items)
        gap = max(2, min(height, width) // 16)
        page = np.full(
            (rows * (height + gap) + gap, columns * (width + gap) + gap, 3), PAPER, np.uint8
        )
        for place, item in enumerate(items):
            row, column = divmod(place, columns)
            cell_top, cell_left = gap + row * (height + gap), gap + column * (width + gap)
            lay(item.pixels, on=page[cell_top : cell_top + height, cell_left : cell_left + width])
        return cls(page)

    @classmethod
    def beside(cls, left: Image, right: Image) -> Image:
        """Two pictures with a thin gap between them: an original and its reconstruction."""
        height = max(left.pixels.shape[0], right.pixels.shape[0])
        gap = max(2, height // 32)
        left_width, right_width = left.pixels.shape[1], right.pixels.shape[1]
        page = np.full((height, left_width + gap + right_width, 3), PAPER, np.uint8)
        lay(left.pixels, on=page[:, :left_width])
        lay(right.pixels, on=page[:, left_width + gap :])
        return cls(page)

    def floats(self) -> np.ndarray:
        """(3, H, W) float32 in [-1, 1]: what models see."""
        planes = np.ascontiguousarray(self.pixels.transpose(2, 0, 1)).astype(np.float32)
        return planes / np.float32(127.5) - np.float32(1)

    @classmethod
    def from_floats(cls, array: np.ndarray) -> Image:
        """The nearest bytes; what lies outside [-1, 1] is clipped, and what is no number becomes
        mid-grey."""
        array = np.asarray(array, dtype=np.float32)
        if array.ndim != 3 or array.shape[0] != 3:
            raise ValueError(
                f"a picture of floats has the shape (3, height, width), but this one is {array.shape}"
            )
        levels = np.nan_to_num((array + 1) * 127.5, nan=127.5, posinf=255, neginf=0)
        return cls(
            np.ascontiguousarray(np.rint(levels.clip(0, 255)).astype(np.uint8).transpose(1, 2, 0))
        )


def lay(pixels: np.ndarray, *, on: np.ndarray) -> None:
    top, left = (on.shape[0] - pixels.shape[0]) // 2, (on.shape[1] - pixels.shape[1]) // 2
    on[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels


def read(path: str | Path, shortest: int | None = None) -> PIL.Image.Image:
    """The picture in a file, upright and RGB; `shortest` as in `decode`."""
    try:
        return flatten(decode(Path(path).read_bytes(), shortest))
    except UnreadableFile as error:
        raise UnreadableFile(f"{path}: {error}") from error
    except OSError as error:
        raise UnreadableFile(
            f"{path}: the file cannot be opened ({error.strerror or error})"
        ) from error


def decode(data: bytes, shortest: int | None = None) -> PIL.Image.Image:
    """The picture in these bytes, upright, in the mode that the file has (see `flatten`).

    With `shortest`, a JPEG much larger than that is decoded at a half, a quarter or an eighth of
    its size, which is several times faster; its short side stays at least `shortest`.
    """
    if not data:
        raise UnreadableFile("the file is empty (0 bytes)")
    try:
        picture = PIL.Image.open(BytesIO(data), formats=FORMATS)
        if shortest is not None:
            picture.draft(None, (shortest, shortest))
        picture.load()
    except PIL.UnidentifiedImageError:
        raise UnreadableFile(
            f"it is no PNG, JPEG, WebP, BMP, GIF or TIFF picture (it begins with {data[:8]!r})"
        ) from None
    except PIL.Image.DecompressionBombError as error:
        pixels = re.search(r"\d+", str(error))
        size = f"{int(pixels.group()) / 1e6:,.0f} million" if pixels else "too many"
        raise UnreadableFile(
            f"it claims to hold {size} pixels, more than a picture may: scale it down"
        ) from None
    except (
        Exception
    ) as error:  # decoders meet damaged bytes with nearly every kind of exception there is
        raise UnreadableFile(
            f"it is damaged or cut short ({error or type(error).__name__})"
        ) from error
    return upright(picture)


def upright(picture: PIL.Image.Image) -> PIL.Image.Image:
    """Turned as the camera was held. Read after loading: a PNG may carry its EXIF behind the
    pixels."""
    try:
        turn = UPRIGHT.get(picture.getexif().get(ORIENTATION, 1))
    except (
        Exception
    ):  # damaged EXIF in front of good pixels is common, and no reason to lose the picture
        turn = None
    return picture if turn is None else picture.transpose(turn)


def flatten(picture: PIL.Image.Image) -> PIL.Image.Image:
    """Any mode as RGB, transparency over white."""
    try:
        if picture.mode.startswith("I"):
            return from_deep_grey(picture)
        if picture.mode == "F":
            return from_float_grey(picture)
        if picture.has_transparency_data:
            glass = picture.convert("RGBA")
            return PIL.Image.alpha_composite(
                PIL.Image.new("RGBA", glass.size, "white"), glass
            ).convert("RGB")
        return picture.convert("RGB")
    except ValueError as error:
        raise UnreadableFile(
            f"its colours (mode {picture.mode}) cannot be turned into RGB: {error}"
        ) from error


def from_deep_grey(picture: PIL.Image.Image) -> PIL.Image.Image:
    """16-bit grey. Pillow's own convert("RGB") cuts off at 255 instead of scaling, so that nearly
    all turns white."""
    levels = np.asarray(picture).astype(np.float32) / 257
    return PIL.Image.fromarray(np.rint(levels.clip(0, 255)).astype(np.uint8)).convert("RGB")


def from_float_grey(picture: PIL.Image.Image) -> PIL.Image.Image:
    """Grey as floats has no agreed white: up to 1 it is taken as a share of white, beyond that as 0
    to 255."""
    levels = np.nan_to_num(np.asarray(picture), nan=0, posinf=255, neginf=0)
    levels = levels * 255 if levels.max(initial=0) <= 1 else levels
    return PIL.Image.fromarray(np.rint(levels.clip(0, 255)).astype(np.uint8)).convert("RGB")
