"""Contact sheets: images in rows, with their captions below them.

Images are (H, W, C) uint8, where C is 1 (grey), 3 (RGB) or 4 (RGBA).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

MIN_TILE = 96
"""Images whose short side has fewer pixels are enlarged by a whole factor."""
MAX_SAMPLES_IN_ROW = 8
"""Of a prompt with more samples, the samples are distributed over several rows."""
BACKGROUND = 236
"""The light grey between the images."""
FONT_SIZE, LINE_HEIGHT, LINE_MARGIN = 12, 14, 3  # pixels
MAX_LINES = 5
"""Captions that need more lines are shortened."""
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def draw_sheet(
    images: Sequence[np.ndarray], labels: Sequence[str] = (), columns: int | None = None
) -> np.ndarray:
    """Return the RGB pixels of a sheet.

    All cells have the size of the largest image; smaller images are centred. Small images are
    enlarged, all by the same factor. Several samples of each prompt (consecutive equal labels) are
    a row of their own; otherwise the sheet is about as wide as high, unless `columns` is given.
    """
    factor = enlargement(images)
    tiles = [enlarge(to_rgb_pixels(image), factor) for image in images]
    height, width = (max(tile.shape[axis] for tile in tiles) for axis in (0, 1))
    gap = min(height, width) // 8  # wider than between an original and its reconstruction
    font = load_font()
    captions = [wrap_caption(label, width, font) for label in labels]
    num_lines = max(map(len, captions), default=0)
    caption_height = num_lines * LINE_HEIGHT + LINE_MARGIN if num_lines else 0
    cells = place_in_rows(labels) if labels and columns is None else None
    if cells is None:
        columns = min(len(tiles), columns or choose_columns(len(tiles), height, width))
        cells = [divmod(number, columns) for number in range(len(tiles))]
    num_rows, num_columns = (1 + max(cell[axis] for cell in cells) for axis in (0, 1))
    step_y, step_x = height + caption_height + gap, width + gap
    page = np.full((num_rows * step_y + gap, num_columns * step_x + gap, 3), BACKGROUND, np.uint8)
    corners = [(gap + row * step_y, gap + column * step_x) for row, column in cells]
    for tile, (top, left) in zip(tiles, corners, strict=True):
        paste_centred(tile, into=page[top : top + height, left : left + width])
    if not num_lines:
        return page
    canvas = PIL.Image.fromarray(page)
    drawing = PIL.ImageDraw.Draw(canvas)
    for lines, (top, left) in zip(captions, corners, strict=True):
        for number, line in enumerate(lines):
            y = top + height + LINE_MARGIN + number * LINE_HEIGHT
            drawing.text((left, y), line, fill=(0, 0, 0), font=font)
    return np.array(canvas)


# ---- tiles


def enlargement(images: Sequence[np.ndarray]) -> int:
    """Return the factor with which the largest image has at least MIN_TILE pixels on each side."""
    short_side = max(min(image.shape[:2]) for image in images)
    return max(1, math.ceil(MIN_TILE / max(1, short_side)))


def enlarge(pixels: np.ndarray, factor: int) -> np.ndarray:
    """Repeat every pixel (nearest neighbour), so that no detail is added or lost."""
    return pixels if factor == 1 else pixels.repeat(factor, axis=0).repeat(factor, axis=1)


def to_rgb_pixels(pixels: np.ndarray) -> np.ndarray:
    """Convert grey to RGB, and composite RGBA over white."""
    channels = pixels.shape[2]
    if channels == 1:
        return pixels.repeat(3, axis=2)
    if channels == 4:
        alpha = pixels[..., 3:].astype(np.float32) / 255
        return np.rint(pixels[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)
    return pixels


def paste_centred(pixels: np.ndarray, *, into: np.ndarray) -> None:
    """Copy pixels into the centre of a larger array, in place."""
    top, left = (into.shape[0] - pixels.shape[0]) // 2, (into.shape[1] - pixels.shape[1]) // 2
    into[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels


# ---- rows and columns


def place_in_rows(labels: Sequence[str]) -> list[tuple[int, int]] | None:
    """Return (row, column) of each sample with a row for each prompt.

    None is returned unless there are several samples, and the same number of them, of each prompt;
    and for many samples of a single prompt, which a square shows better than a row.
    """
    counts = [len(list(group)) for _, group in groupby(labels)]
    count = counts[0]
    if len(set(counts)) > 1 or count == 1 or (len(counts) == 1 and count > MAX_SAMPLES_IN_ROW):
        return None
    rows = math.ceil(count / MAX_SAMPLES_IN_ROW)
    columns = math.ceil(count / rows)
    return [
        (number // count * rows + number % count // columns, number % count % columns)
        for number in range(len(labels))
    ]


def choose_columns(count: int, height: int, width: int) -> int:
    """Return the number of columns of a sheet that is about as wide as high.

    One more is used if it leaves fewer cells empty.
    """
    columns = min(count, math.ceil(math.sqrt(count * height / width)))
    return min((columns, min(count, columns + 1)), key=lambda one: -count % one)


# ---- captions


Font = PIL.ImageFont.FreeTypeFont | PIL.ImageFont.ImageFont


def load_font() -> Font:
    return PIL.ImageFont.load_default(size=FONT_SIZE)


def wrap_caption(text: str, width: int, font: Font) -> list[str]:
    """Break a caption into at most MAX_LINES lines of `width` pixels, at words where possible.

    A text that needs more lines is cut at its end. A single word, such as the name of a file, is
    cut at its start, because files of one folder differ at the end of their names.
    """
    words = text.split()
    lines: list[str] = []
    for word in words:
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines += break_word(word, width, font)
    if len(lines) <= MAX_LINES:
        return lines
    if len(words) == 1:
        tail = lines[-MAX_LINES:]
        return [ELLIPSIS + tail[0][1:], *tail[1:]]
    last = lines[MAX_LINES - 1]
    while last and font.getlength(last + ELLIPSIS) > width:
        last = last[:-1]
    return [*lines[: MAX_LINES - 1], last.rstrip() + ELLIPSIS]


def break_word(word: str, width: int, font: Font) -> list[str]:
    """Break a word that is wider than a line, after a separator where possible."""
    parts = [""]
    for piece in re.findall(r"[^/_-]+[/_-]*|[/_-]+", word):
        if parts[-1] and font.getlength(parts[-1] + piece) > width:
            parts.append("")
        for character in piece:
            if parts[-1] and font.getlength(parts[-1] + character) > width:
                parts.append("")
            parts[-1] += character
    return parts
