"""The `Image` class: read image files, convert to and from model inputs, write PNG, JPEG or WebP.

An `Image` holds (H, W, C) uint8, where C is 3, 1 for grey images or 4 for images with alpha. Models
take float32 of shape (C, H, W) in [-1, 1]; `to_floats` and `from_floats` convert between the two.
Without an alpha channel, transparent images are composited over white. Colour profiles are not
applied.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import PIL.Image
from PIL.Image import Transpose

from tessera.data.arrays import check_range, is_float, move_channels_last
from tessera.data.budget import MAX_TURNS, PIXEL_BYTES, check_decoded_size, read_file
from tessera.data.errors import UnreadableFile, add_path, is_defect
from tessera.data.files import AnyFile, resolve_suffix
from tessera.modalities.image.contact_sheet import (
    BACKGROUND,
    draw_sheet,
    enlarge,
    enlargement,
    paste_centred,
    to_rgb_pixels,
)

if TYPE_CHECKING:  # listing, inspecting and rendering images must not import torch
    import torch

    from tessera.engine.task import TrackedMedia


@dataclass
class ImageExample:
    """One preprocessed image and its caption."""

    pixels: np.ndarray
    """Float32 of shape (C, S, S) in [-1, 1]."""
    caption: str
    """The caption, or "" if there is none."""


@dataclass
class ImageBatch:
    """Several images of one size and their captions."""

    pixels: torch.Tensor
    """Float32 of shape (B, C, S, S) in [-1, 1]."""
    captions: list[str]
    """One caption per image, "" for none."""

    def to(self, device: torch.device | str) -> ImageBatch:
        """Return the batch with its tensors on `device`."""
        from tessera.engine.device import move_tensors

        return move_tensors(self, device)


def collate(examples: Sequence[ImageExample]) -> ImageBatch:
    """Stack examples of one size into a batch."""
    import torch

    pixels = torch.from_numpy(np.stack([example.pixels for example in examples]))
    return ImageBatch(pixels, [example.caption for example in examples])


CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}
"""The supported numbers of channels, with Pillow's mode of such images."""

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
    """An image in colour, in grey, or in colour with alpha."""

    pixels: np.ndarray
    """Uint8 of shape (H, W, C), where C is 1, 3 or 4."""
    suffixes: ClassVar[tuple[str, ...]] = tuple(SAVE_OPTIONS)
    """The formats that can be written, the default first."""

    def __post_init__(self) -> None:
        shape = self.pixels.shape
        if self.pixels.dtype != np.uint8 or len(shape) != 3 or shape[2] not in CHANNELS:
            raise ValueError(
                "Image expects uint8 pixels of shape (height, width, 3), or 1 or 4 channels, got "
                f"{self.pixels.dtype} of shape {shape}: for floats in [-1, 1] of shape (3, height, "
                "width) use Image.from_floats; several grey images need an axis for the channel, "
                "(count, height, width, 1)"
            )

    def __repr__(self) -> str:
        height, width, channels = self.pixels.shape
        shown = "" if channels == 3 else f", channels={channels}"
        return f"Image(width={width}, height={height}{shown})"

    @classmethod
    def from_pillow(cls, picture: PIL.Image.Image) -> Image:
        """Return the pixels of a Pillow image of mode L, RGB or RGBA."""
        return cls(np.array(picture).reshape(picture.height, picture.width, -1))

    def to_pillow(self) -> PIL.Image.Image:
        """Return a Pillow image of mode L, RGB or RGBA."""
        pixels = self.pixels[..., 0] if self.pixels.shape[2] == 1 else self.pixels
        return PIL.Image.fromarray(pixels)

    @classmethod
    def from_array(cls, array: np.ndarray | torch.Tensor) -> Image:
        """Convert uint8, or floats in [-1, 1], of shape (H, W), (H, W, C) or (C, H, W)."""
        values = move_channels_last(array, CHANNELS, num_dims=3)
        if values.ndim == 2:
            values = values[..., None]
        if not is_float(values):
            return cls(np.ascontiguousarray(values))
        check_range(values)
        return cls.from_floats(np.moveaxis(values, -1, 0))

    @classmethod
    def load(cls, path: str | Path, channels: int = 3) -> Image:
        """Read the first frame of an image file, with its EXIF orientation applied.

        Raises:
            UnreadableFile: With the path and the reason.
        """
        return cls.from_pillow(open_image(path, channels=channels))

    def save(self, path: str | Path) -> Path:
        """Write the image and return the path written.

        The suffix selects the format: .png, .jpg, .jpeg or .webp. Without one of these, .png is
        appended. Missing folders are created.
        """
        path = resolve_suffix(path, ".png", self.suffixes)
        path.parent.mkdir(parents=True, exist_ok=True)
        suffix = path.suffix.lower()
        picture = self.to_pillow()
        if picture.mode == "RGBA" and suffix in (".jpg", ".jpeg"):  # JPEG has no alpha
            picture = to_rgb(picture)
        picture.save(path, **SAVE_OPTIONS[suffix])
        return path

    def to_png(self) -> bytes:
        """Return the content of a PNG file."""
        buffer = BytesIO()
        self.to_pillow().save(buffer, "PNG")
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        """Show the image in notebooks; small ones are enlarged by a whole factor."""
        return Image(enlarge(self.pixels, enlargement([self.pixels]))).to_png()

    def to_tracker(self) -> TrackedMedia:
        import torch

        from tessera.engine.task import TrackedMedia

        return TrackedMedia(
            kind="image",
            array=torch.tensor(self.pixels),
            content=self.to_png(),
            suffix=".png",
        )

    @classmethod
    def sheet(
        cls, items: Sequence[Image], labels: Sequence[str] = (), *, columns: int | None = None
    ) -> Image:
        """Arrange images on a contact sheet, with labels below them (see `draw_sheet`)."""
        if not items:
            raise ValueError("a contact sheet needs at least one image, got none")
        return cls(draw_sheet([item.pixels for item in items], labels, columns))

    @classmethod
    def side_by_side(cls, left: Image, right: Image) -> Image:
        """Join two images with a thin gap between them: an original and its reconstruction."""
        height = max(left.pixels.shape[0], right.pixels.shape[0])
        gap = max(1, height // 32)
        left_width, right_width = left.pixels.shape[1], right.pixels.shape[1]
        page = np.full((height, left_width + gap + right_width, 3), BACKGROUND, np.uint8)
        paste_centred(to_rgb_pixels(left.pixels), into=page[:, :left_width])
        paste_centred(to_rgb_pixels(right.pixels), into=page[:, left_width + gap :])
        return cls(page)

    def to_floats(self) -> np.ndarray:
        """Return the model input: float32 of shape (C, H, W) in [-1, 1]."""
        planes = np.ascontiguousarray(self.pixels.transpose(2, 0, 1)).astype(np.float32)
        return planes / np.float32(127.5) - np.float32(1)

    @classmethod
    def from_floats(cls, array: np.ndarray) -> Image:
        """Round (C, H, W) floats in [-1, 1] to the nearest bytes.

        Values outside the range are clipped, and NaN becomes mid-grey.
        """
        array = np.asarray(array, dtype=np.float32)
        if array.ndim != 3 or array.shape[0] not in CHANNELS:
            raise ValueError(
                "Image.from_floats expects the shape (3, height, width), or 1 or 4 channels, got "
                f"{array.shape}"
            )
        levels = np.nan_to_num((array + 1) * 127.5, nan=127.5, posinf=255, neginf=0)
        return cls(
            np.ascontiguousarray(np.rint(levels.clip(0, 255)).astype(np.uint8).transpose(1, 2, 0))
        )


def open_image(path: AnyFile, min_side: int | None = None, channels: int = 3) -> PIL.Image.Image:
    """Read an image file upright with 1, 3 or 4 channels; for `min_side` see `decode`.

    Raises:
        UnreadableFile: With the path and the reason.
    """
    with add_path(path):
        return convert(decode(read_file(path), min_side), channels)


def measure_file(path: str | Path) -> dict[str, float]:
    """Return the number of pixels that the header of a file declares."""
    try:
        with PIL.Image.open(path, formats=FORMATS) as image:
            return {"pixels": image.width * image.height}
    except PIL.Image.DecompressionBombError:
        return {"pixels": math.inf}
    except OSError as error:  # which includes files of other formats
        raise UnreadableFile(f"not an image that can be read ({error})") from None


def decode(data: bytes, min_side: int | None = None) -> PIL.Image.Image:
    """Decode an image, apply its EXIF orientation and keep its mode (see `to_rgb`).

    With `min_side`, a much larger JPEG is decoded at a half, a quarter or an eighth of its size,
    which is several times faster; its short side stays at least `min_side`.
    """
    if not data:
        raise UnreadableFile("the file is empty (0 bytes)")
    try:
        image = open_header(data)
        if min_side is not None:
            image.draft(None, (min_side, min_side))
        check_image_size(image)
        image.load()
    except UnreadableFile:
        raise
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
        if is_defect(error):
            raise
        raise UnreadableFile(
            f"the data is damaged or truncated ({error or type(error).__name__})"
        ) from error
    return apply_exif_orientation(image)


def open_header(data: bytes) -> PIL.Image.Image:
    """Read the header of an image; its size is checked by `check_image_size`."""
    with no_size_warnings():
        return PIL.Image.open(BytesIO(data), formats=FORMATS)


@contextmanager
def no_size_warnings() -> Iterator[None]:
    """Suppress the warnings of Pillow about large images; `check_image_size` has its own limit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
        yield


def check_image_size(image: PIL.Image.Image, frames: int = 1) -> None:
    """Raise UnreadableFile if an image, or all frames of an animation, are too large."""
    content = f"{image.width} x {image.height} pixels"
    check_decoded_size(content, PIXEL_BYTES * image.width * image.height)
    if frames > 1:
        total = PIXEL_BYTES * frames * image.width * image.height
        check_decoded_size(f"{frames:,} frames of {content}", total, MAX_TURNS)


def apply_exif_orientation(image: PIL.Image.Image) -> PIL.Image.Image:
    """Rotate or flip an image as its EXIF orientation specifies.

    Call this after loading: a PNG may store its EXIF after the pixels.
    """
    try:
        transpose = TRANSPOSE_BY_ORIENTATION.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF data is common and does not make the pixels unusable
        transpose = None
    return image if transpose is None else image.transpose(transpose)


def convert(image: PIL.Image.Image, channels: int) -> PIL.Image.Image:
    """Convert any mode to 1 channel (L), 3 (RGB) or 4 (RGBA); see `to_rgb`."""
    if channels == 4 and image.has_transparency_data:
        return image.convert("RGBA")
    rgb = to_rgb(image)
    return rgb if channels == 3 else rgb.convert(CHANNELS[channels])


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
