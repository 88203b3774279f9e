"""Tests of contact sheets: enlargement, channels, rows of prompts and captions."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.modalities.image.contact_sheet import (
    BACKGROUND,
    ELLIPSIS,
    LINE_HEIGHT,
    LINE_MARGIN,
    MAX_LINES,
    choose_columns,
    draw_sheet,
    load_font,
    place_in_rows,
    wrap_caption,
)

GAP = 12
"""The gap between tiles of 96 pixels."""
RED, GREEN, BLUE = (255, 0, 0), (0, 128, 0), (0, 0, 255)


def plain(height: int, width: int, colour: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.array(colour, np.uint8), (height, width, len(colour)))


def count(page: np.ndarray, colour: tuple[int, ...]) -> int:
    return int((page == colour).all(-1).sum())


# ---- tiles


@pytest.mark.parametrize(
    ("side", "factor"), [(8, 12), (16, 6), (28, 4), (64, 2), (96, 1), (256, 1)]
)
def test_small_images_are_enlarged_by_whole_factors(side: int, factor: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    page = draw_sheet([noise])
    gap = side * factor // 8
    assert page.shape == (side * factor + 2 * gap, side * factor + 2 * gap, 3)
    assert np.array_equal(page[gap:-gap:factor, gap:-gap:factor], noise)
    last = gap + factor - 1
    assert np.array_equal(page[last:-gap:factor, last:-gap:factor], noise), "nearest neighbour"


def test_images_of_different_sizes_are_centred_and_enlarged_alike() -> None:
    page = draw_sheet([plain(10, 20, RED), plain(20, 10, BLUE), plain(24, 24, GREEN)], columns=3)
    assert count(page, RED) == count(page, BLUE) == 200 * 16 and count(page, GREEN) == 576 * 16
    rows, columns = np.nonzero((page == RED).all(-1))
    assert rows.min() - GAP == GAP + 96 - 1 - rows.max() and columns.min() - GAP == 8


def test_grey_and_transparent_images_become_rgb() -> None:
    grey = draw_sheet([plain(96, 96, (70,))])
    assert count(grey, (70, 70, 70)) == 96 * 96
    clear, half = draw_sheet([plain(96, 96, (9, 9, 9, 0)), plain(96, 96, (0, 0, 255, 128))])[
        50, [50, 150]
    ]
    assert clear.tolist() == [255, 255, 255] and half.tolist() == [127, 127, 255]


# ---- rows and columns


def test_every_prompt_with_several_samples_is_a_row() -> None:
    colours = [RED] * 3 + [BLUE] * 3
    page = draw_sheet([plain(96, 96, one) for one in colours], ["red"] * 3 + ["blue"] * 3)
    assert page.shape[1] == 3 * (96 + GAP) + GAP
    top, bottom = np.split(page, 2)
    assert count(top, RED) == count(bottom, BLUE) == 3 * 96 * 96 and not count(top, BLUE)


def test_many_samples_of_a_prompt_continue_in_the_next_row() -> None:
    cells = place_in_rows(["a"] * 9 + ["b"] * 9)
    assert cells is not None and cells[:9] == [(0, i) for i in range(5)] + [
        (1, i) for i in range(4)
    ]
    assert cells[9] == (2, 0), "another prompt starts a row"
    assert place_in_rows(["a"] * 4) == [(0, i) for i in range(4)]


@pytest.mark.parametrize("labels", [["a", "b", "c"], ["a", "a", "b"], ["a"] * 16])
def test_other_samples_fill_a_square(labels: list[str]) -> None:
    assert place_in_rows(labels) is None


@pytest.mark.parametrize(
    ("number", "size", "columns"),
    [
        (1, (96, 96), 1),
        (2, (96, 96), 2),
        (5, (96, 96), 3),
        (8, (96, 96), 4),
        (16, (96, 96), 4),
        (16, (128, 260), 4),
        (16, (184, 772), 2),
        (3, (100, 1000), 1),
    ],
)
def test_sheet_is_about_as_wide_as_high(number: int, size: tuple[int, int], columns: int) -> None:
    assert choose_columns(number, *size) == columns


def test_empty_cells_show_the_background() -> None:
    page = draw_sheet([plain(96, 96, RED)] * 3, columns=2)
    assert (
        count(page, RED) == 3 * 96 * 96
        and (page[96 + 2 * GAP :, 96 + 2 * GAP :] == BACKGROUND).all()
    )


# ---- captions

LONG = "a small shaded orange triangle below a large shaded brown circle on a light background"


def width_of(line: str) -> float:
    return load_font().getlength(line)


def test_captions_are_wrapped_at_words_to_the_width_of_a_tile() -> None:
    lines = wrap_caption(LONG, 160, load_font())
    assert 1 < len(lines) <= MAX_LINES and " ".join(lines) == LONG
    assert all(width_of(line) <= 160 for line in lines)
    assert (
        wrap_caption("  a\n  star ", 160, load_font()) == ["a star"]
        and wrap_caption("", 160, load_font()) == []
    )


def test_long_captions_end_with_an_ellipsis() -> None:
    lines = wrap_caption(LONG * 3, 96, load_font())
    assert len(lines) == MAX_LINES and all(width_of(line) <= 96 for line in lines)
    assert lines[-1].endswith(ELLIPSIS) and LONG.startswith(" ".join(lines)[:40])


def test_long_file_names_keep_their_end() -> None:
    lines = wrap_caption("folder/" * 30 + "photo-0001.png", 96, load_font())
    assert len(lines) == MAX_LINES and all(width_of(line) <= 96 for line in lines)
    assert lines[0].startswith(ELLIPSIS) and lines[-1].endswith("photo-0001.png")


def test_captions_are_drawn_below_their_images() -> None:
    labels = ["a star", "", LONG]
    page = draw_sheet([plain(96, 96, RED)] * 3, labels)
    below = page[GAP + 96 : -GAP]
    assert len(below) == len(wrap_caption(LONG, 96, load_font())) * LINE_HEIGHT + LINE_MARGIN
    ink = [(below[:, GAP + i * (96 + GAP) :][:, :96] == 0).all(-1) for i in range(3)]
    assert not ink[0][2 * LINE_HEIGHT :].any() and not ink[1].any()
    assert 0 < ink[0].sum() < ink[2].sum() and count(page, RED) == 3 * 96 * 96
