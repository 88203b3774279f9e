"""The `Image` class: read image files, convert to and from model inputs, write PNG, JPEG or WebP.

An `Image` holds (H, W, 3) uint8. Models take float32 of shape (3, H, W) in [-1, 1]; `to_floats` and
`from_floats` convert between the two. Transparent images are composited over white. Colour
profiles are not applied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
from PIL.Image import Transpose

from tessera.data.errors import UnreadableFile
from tessera.data.paths import resolve_suffix

if TYPE_CHECKING:  # listing, inspecting and rendering images must not import torch
    import torch


@dataclass
class ImageExample:
    """One preprocessed image and its caption."""

    pixels: np.ndarray
    """Float32 of shape (3, S, S) in [-1, 1]."""
    caption: str
    """The caption, or "" if there is none."""


@dataclass
class ImageBatch:
    """Several images of one size and their captions."""

    pixels: torch.Tensor
    """Float32 of shape (B, 3, S, S) in [-1, 1]."""
    captions: list[str]
    """One caption per image, "" for none."""

    def to(self, device: torch.device | str) -> ImageBatch:
        """Return the batch with its tensors on `device`."""
        return ImageBatch(self.pixels.to(device), self.captions)


def collate(examples: Sequence[ImageExample]) -> ImageBatch:
    """Stack examples of one size into a batch."""
    import torch

    pixels = torch.from_numpy(np.stack([example.pixels for example in examples]))
    return ImageBatch(pixels, [example.caption for example in examples])


SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""File suffixes that are read."""

SAVE_OPTIONS: dict[str, dict[str, Any]] = {
    ".png": {},
    ".jpg": {"quality": 95},
    ".jpeg": {"quality": 95},
    ".webp": {"lossless": True},
}
"""File suffixes that are written, with the options of Pillow's encoder."""

# Only these decoders are enabled, whatever the suffix of a file: Pillow supports formats that
# start other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")

LABEL_HEIGHT, MIN_LABEL_WIDTH = 14, 72
"""The height of a label on a contact sheet, and the minimum width of a labelled cell, in pixels."""
SHEET_BACKGROUND = 236
"""The light grey between the images of a contact sheet."""

ORIENTATION = 0x0112  # the EXIF tag; its values are defined in the EXIF 2.3 standard, 4.6.4 A
TRANSPOSE_BY_ORIENTATION = {
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
    """An RGB image."""

    pixels: np.ndarray
    """Uint8 of shape (H, W, 3)."""

    def __post_init__(self) -> None:
        if self.pixels.dtype != np.uint8 or self.pixels.ndim != 3 or self.pixels.shape[2] != 3:
            raise ValueError(
                "Image expects uint8 pixels of shape (height, width, 3), got "
                f"{self.pixels.dtype} of shape {self.pixels.shape}: for floats in [-1, 1] of "
                "shape (3, height, width) use Image.from_floats"
            )

    def __repr__(self) -> str:
        height, width, _ = self.pixels.shape
        return f"Image(width={width}, height={height})"

    @classmethod
    def load(cls, path: str | Path) -> Image:
        """Read the first frame of an image file, with its EXIF orientation applied.

        Raises:
            UnreadableFile: With the path and the reason.
        """
        return cls(np.array(open_image(path)))

    def save(self, path: str | Path) -> Path:
        """Write the image and return the path written.

        The suffix selects the format: .png, .jpg, .jpeg or .webp. Without one of these, .png is
        appended. Missing folders are created.
        """
        path = resolve_suffix(path, ".png", tuple(SAVE_OPTIONS))
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(self.pixels).save(path, **SAVE_OPTIONS[path.suffix.lower()])
        return path

    @classmethod
    def sheet(
        cls, items: Sequence[Image], labels: Sequence[str] = (), *, columns: int | None = None
    ) -> Image:
        """Arrange images on a contact sheet, row by row.

        All cells have the size of the largest image; smaller images are centred. Labels are drawn
        below the images and shortened to the width of a cell.
        """
        if not items:
            raise ValueError("a contact sheet needs at least one image, got none")
        columns = min(columns or math.ceil(math.sqrt(len(items))), len(items))
        rows = math.ceil(len(items) / columns)
        height = max(item.pixels.shape[0] for item in items)
        width = max(item.pixels.shape[1] for item in items)
        gap = max(2, min(height, width) // 16)
        label_height = LABEL_HEIGHT if labels else 0
        if labels:
            width = max(width, MIN_LABEL_WIDTH)
        row_height = height + label_height + gap
        page = np.full(
            (rows * row_height + gap, columns * (width + gap) + gap, 3), SHEET_BACKGROUND, np.uint8
        )
        corners = [
            (gap + index // columns * row_height, gap + index % columns * (width + gap))
            for index in range(len(items))
        ]
        for item, (top, left) in zip(items, corners, strict=True):
            paste_centred(item.pixels, into=page[top : top + height, left : left + width])
        if labels:
            positions = [(left, top + height) for top, left in corners]
            page = draw_labels(page, labels, positions, width)
        return cls(page)

    @classmethod
    def side_by_side(cls, left: Image, right: Image) -> Image:
        """Join two images with a thin gap between them: an original and its reconstruction."""
        height = max(left.pixels.shape[0], right.pixels.shape[0])
        gap = max(2, height // 32)
        left_width, right_width = left.pixels.shape[1], right.pixels.shape[1]
        page = np.full((height, left_width + gap + right_width, 3), SHEET_BACKGROUND, np.uint8)
        paste_centred(left.pixels, into=page[:, :left_width])
        paste_centred(right.pixels, into=page[:, left_width + gap :])
        return cls(page)

    def to_floats(self) -> np.ndarray:
        """Return the model input: float32 of shape (3, H, W) in [-1, 1]."""
        planes = np.ascontiguousarray(self.pixels.transpose(2, 0, 1)).astype(np.float32)
        return planes / np.float32(127.5) - np.float32(1)

    @classmethod
    def from_floats(cls, array: np.ndarray) -> Image:
        """Round (3, H, W) floats in [-1, 1] to the nearest bytes.

        Values outside the range are clipped, and NaN becomes mid-grey.
        """
        array = np.asarray(array, dtype=np.float32)
        if array.ndim != 3 or array.shape[0] != 3:
            raise ValueError(
                f"Image.from_floats expects the shape (3, height, width), got {array.shape}"
            )
        levels = np.nan_to_num((array + 1) * 127.5, nan=127.5, posinf=255, neginf=0)
        return cls(
            np.ascontiguousarray(np.rint(levels.clip(0, 255)).astype(np.uint8).transpose(1, 2, 0))
        )


def draw_labels(
    page: np.ndarray, labels: Sequence[str], positions: Sequence[tuple[int, int]], width: int
) -> np.ndarray:
    """Draw one label at each position (left, top); the start of a long label is cut off."""
    canvas = PIL.Image.fromarray(page)
    drawing, font = PIL.ImageDraw.Draw(canvas), PIL.ImageFont.load_default(size=10)
    for label, position in zip(labels, positions, strict=True):
        shown = label
        while shown and drawing.textlength(shown, font=font) > width:
            shown = shown[1:]
        drawing.text(position, shown, fill=(0, 0, 0), font=font)
    return np.array(canvas)


def paste_centred(pixels: np.ndarray, *, into: np.ndarray) -> None:
    """Copy pixels into the centre of a larger array, in place."""
    top, left = (into.shape[0] - pixels.shape[0]) // 2, (into.shape[1] - pixels.shape[1]) // 2
    into[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels


def open_image(path: str | Path, min_side: int | None = None) -> PIL.Image.Image:
    """Read an image file as upright RGB; for `min_side` see `decode`.

    Raises:
        UnreadableFile: With the path and the reason.
    """
    try:
        return to_rgb(decode(Path(path).read_bytes(), min_side))
    except UnreadableFile as error:
        raise UnreadableFile(f"{path}: {error}") from error
    except OSError as error:
        raise UnreadableFile(
            f"{path}: the file cannot be opened ({error.strerror or error})"
        ) from error


def decode(data: bytes, min_side: int | None = None) -> PIL.Image.Image:
    """Decode an image, apply its EXIF orientation and keep its mode (see `to_rgb`).

    With `min_side`, a much larger JPEG is decoded at a half, a quarter or an eighth of its size,
    which is several times faster; its short side stays at least `min_side`.
    """
    if not data:
        raise UnreadableFile("the file is empty (0 bytes)")
    try:
        image = PIL.Image.open(BytesIO(data), formats=FORMATS)
        if min_side is not None:
            image.draft(None, (min_side, min_side))
        image.load()
    except PIL.UnidentifiedImageError:
        raise UnreadableFile(
            f"not a PNG, JPEG, WebP, BMP, GIF or TIFF image (the data starts with {data[:8]!r})"
        ) from None
    except PIL.Image.DecompressionBombError as error:
        pixels = re.search(r"\d+", str(error))
        size = f"{int(pixels.group()) / 1e6:,.0f} million" if pixels else "too many"
        raise UnreadableFile(
            f"the header declares {size} pixels, which is above the limit: downscale the image"
        ) from None
    except Exception as error:  # decoders raise almost any exception type for damaged data
        raise UnreadableFile(
            f"the data is damaged or truncated ({error or type(error).__name__})"
        ) from error
    return apply_exif_orientation(image)


def apply_exif_orientation(image: PIL.Image.Image) -> PIL.Image.Image:
    """Rotate or flip an image as its EXIF orientation specifies.

    Call this after loading: a PNG may store its EXIF after the pixels.
    """
    try:
        transpose = TRANSPOSE_BY_ORIENTATION.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF data is common and does not make the pixels unusable
        transpose = None
    return image if transpose is None else image.transpose(transpose)


def to_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """Convert any mode to RGB, with transparent pixels composited over white."""
    try:
        if image.mode.startswith("I"):
            return convert_16_bit(image)
        if image.mode == "F":
            return convert_float(image)
        if image.has_transparency_data:
            rgba = image.convert("RGBA")
            return PIL.Image.alpha_composite(
                PIL.Image.new("RGBA", rgba.size, "white"), rgba
            ).convert("RGB")
        return image.convert("RGB")
    except ValueError as error:
        raise UnreadableFile(
            f"colours of mode {image.mode} cannot be converted to RGB: {error}"
        ) from error


def convert_16_bit(image: PIL.Image.Image) -> PIL.Image.Image:
    """Scale 16-bit grey to 8-bit RGB.

    Pillow's convert("RGB") clips at 255 instead, so that almost every pixel becomes white.
    """
    levels = np.asarray(image).astype(np.float32) / 257
    return PIL.Image.fromarray(np.rint(levels.clip(0, 255)).astype(np.uint8)).convert("RGB")


def convert_float(image: PIL.Image.Image) -> PIL.Image.Image:
    """Convert float grey to RGB.

    Floats have no standard white level: a maximum of up to 1 means the range [0, 1], otherwise
    [0, 255].
    """
    levels = np.nan_to_num(np.asarray(image), nan=0, posinf=255, neginf=0)
    levels = levels * 255 if levels.max(initial=0) <= 1 else levels
    return PIL.Image.fromarray(np.rint(levels.clip(0, 255)).astype(np.uint8)).convert("RGB")
