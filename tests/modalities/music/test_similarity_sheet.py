"""The sheet of matches: who belongs to whom can be seen and read."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.modalities.audio.media import Audio
from tessera.modalities.image.media import Image
from tessera.modalities.music.similarity_sheet import (
    CELL,
    MARGIN,
    WORDS,
    SimilarityMatrix,
    SimilarityRow,
    coloured,
    ordinal,
    shown,
)

TURN = np.array([[1.0, 0.0, 0.0], [0.0, 0.2, 0.9], [0.0, 0.1, 0.8]])


def matrix() -> SimilarityMatrix:
    return SimilarityMatrix(["a.wav", "b.wav", "c.wav"], ["a harp", "a drum", "a bell"], TURN)


def test_the_rank_of_the_right_one_is_its_place_in_its_row() -> None:
    assert matrix().ranks() == [1, 2, 1]


def test_a_good_model_has_a_bright_diagonal() -> None:
    """A row is a caption: the drum's row is brightest in the bell's column, and the frame is where
    it should be."""
    pixels = matrix().picture().pixels.astype(int)
    left, top = MARGIN + WORDS, MARGIN + CELL
    middles = np.array(
        [
            [pixels[top + row * CELL + 12, left + column * CELL + 12].sum() for column in range(3)]
            for row in range(3)
        ]
    )
    assert middles.argmax(1).tolist() == [0, 2, 2]
    assert pixels[top + CELL, left + CELL].tolist() == [0x20, 0xA0, 0x40]


def test_best_matches_are_told_in_words(tmp_path) -> None:
    path = matrix().save(tmp_path / "sheet")
    assert path.name == "sheet.png" and Image.load(path).pixels.shape[2] == 3
    lines = (tmp_path / "sheet.txt").read_text().splitlines()
    assert lines[4:7] == [
        "  1  a drum   (the right one comes 2nd of 3)",
        "       0.900  c.wav: a bell",
        "    *  0.200  b.wav: a drum",
    ]


def test_a_sheet_is_made_of_matches(tmp_path) -> None:
    sound = Audio(np.zeros((1, 800), np.float32), 8000)
    points = np.eye(2, dtype=np.float32)
    items = [
        SimilarityRow(f"{i}.wav", f"number {i}", sound, points[i], points[1 - i]) for i in range(2)
    ]
    assert SimilarityRow.sheet(items).nearness_NN.tolist() == [
        [0, 1],
        [1, 0],
    ] and SimilarityRow.sheet(items).ranks() == [2, 2]
    assert items[0].save(tmp_path / "0000").name == "0000.wav"
    assert (tmp_path / "0000.txt").read_text() == "number 0\n"


def test_a_model_to_which_all_is_one_can_be_drawn() -> None:
    assert (coloured(np.ones((2, 2))) == coloured(np.ones((2, 2)))[0, 0]).all()
    assert SimilarityMatrix(["x"], ["only"], np.ones((1, 1))).picture().pixels.size


def test_letters_that_the_font_lacks_and_long_captions_do_no_harm() -> None:
    assert shown("木 größer") == "? größer" and len(shown("x" * 300)) <= 100


@pytest.mark.parametrize(
    ("number", "word"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (22, "22nd"), (113, "113th")],
)
def test_ordinals(number: int, word: str) -> None:
    assert ordinal(number) == word
