"""The similarity sheet: ranks, image and text of the matches."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.modalities.audio.media import Audio
from tessera.modalities.image.media import Image
from tessera.modalities.music.similarity_sheet import (
    CAPTION_WIDTH,
    CELL,
    MARGIN,
    SimilarityMatrix,
    SimilarityRow,
    apply_colormap,
    ordinal,
    shorten,
)

SIMILARITY = np.array([[1.0, 0.0, 0.0], [0.0, 0.2, 0.9], [0.0, 0.1, 0.8]])


def matrix() -> SimilarityMatrix:
    return SimilarityMatrix(["a.wav", "b.wav", "c.wav"], ["a harp", "a drum", "a bell"], SIMILARITY)


def test_ranks_are_those_of_the_diagonal() -> None:
    assert matrix().ranks() == [1, 2, 1]


def test_the_highest_similarity_is_brightest_and_the_diagonal_is_framed() -> None:
    """Rows are captions: the row of the drum is brightest in the column of the bell."""
    pixels = matrix().render().pixels.astype(int)
    left, top = MARGIN + CAPTION_WIDTH, MARGIN + CELL
    centres = np.array(
        [
            [pixels[top + row * CELL + 12, left + column * CELL + 12].sum() for column in range(3)]
            for row in range(3)
        ]
    )
    assert centres.argmax(1).tolist() == [0, 2, 2]
    assert pixels[top + CELL, left + CELL].tolist() == [0x20, 0xA0, 0x40]


def test_saving_writes_an_image_and_a_text_of_the_best_matches(tmp_path) -> None:
    path = matrix().save(tmp_path / "sheet")
    assert path.name == "sheet.png" and Image.load(path).pixels.shape[2] == 3
    lines = (tmp_path / "sheet.txt").read_text().splitlines()
    assert lines[4:7] == [
        "  1  a drum   (correct: 2nd of 3)",
        "       0.900  c.wav: a bell",
        "    *  0.200  b.wav: a drum",
    ]


def test_a_sheet_is_computed_from_rows(tmp_path) -> None:
    audio = Audio(np.zeros((1, 800), np.float32), 8000)
    embeddings = np.eye(2, dtype=np.float32)
    items = [
        SimilarityRow(f"{i}.wav", f"number {i}", audio, embeddings[i], embeddings[1 - i])
        for i in range(2)
    ]
    assert SimilarityRow.sheet(items).similarity_NN.tolist() == [
        [0, 1],
        [1, 0],
    ] and SimilarityRow.sheet(items).ranks() == [2, 2]
    assert items[0].save(tmp_path / "0000").name == "0000.wav"
    assert (tmp_path / "0000.txt").read_text() == "number 0\n"


def test_equal_similarities_can_be_rendered() -> None:
    assert (apply_colormap(np.ones((2, 2))) == apply_colormap(np.ones((2, 2)))[0, 0]).all()
    assert SimilarityMatrix(["x"], ["only"], np.ones((1, 1))).render().pixels.size


def test_unsupported_characters_are_replaced_and_long_captions_truncated() -> None:
    assert shorten("木 größer") == "? größer" and len(shorten("x" * 300)) <= 100


@pytest.mark.parametrize(
    ("number", "word"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (22, "22nd"), (113, "113th")],
)
def test_ordinals(number: int, word: str) -> None:
    assert ordinal(number) == word
