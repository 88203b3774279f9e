"""What belongs to what, to look at: examples with their captions, and on one sheet how near each
caption is to each example.

The sheet is a table of colours: a row is a caption, a column an example in the same order, so that
in a good model the diagonal is the brightest. At the end of a row stands the rank of the right
example. Beside the picture the same is told in
words: for each caption the nearest examples.

N examples, D numbers of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from tessera.modalities.audio.plot import HEAT
from tessera.modalities.image.media import Image

CELL, WORDS, MARGIN, LETTER = 26, 640, 14, 13  # pixels
LONGEST = 96
"""Letters of a caption that are shown."""
BEST = 3
"""Examples that are told for each caption."""


@dataclass(eq=False)
class SimilarityRow:
    """An example, what is said about it, and where both lie."""

    name: str
    caption: str
    media: Any
    """the example itself: something that knows how to save itself"""
    first_D: np.ndarray
    second_D: np.ndarray

    def save(self, stem: Path) -> Path:
        stem.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{stem}.txt").write_text(self.caption + "\n", encoding="utf-8")
        return self.media.save(stem)

    @classmethod
    def sheet(cls, items: Sequence[SimilarityRow]) -> SimilarityMatrix:
        return SimilarityMatrix(
            [item.name for item in items],
            [item.caption for item in items],
            np.stack([item.second_D for item in items])
            @ np.stack([item.first_D for item in items]).T,
        )


@dataclass(eq=False)
class SimilarityMatrix:
    """How near each caption is to each example."""

    names: list[str]
    captions: list[str]
    nearness_NN: np.ndarray

    def ranks(self) -> list[int]:
        own = self.nearness_NN.diagonal()[:, None]
        return (1 + (self.nearness_NN > own).sum(1)).tolist()

    def save(self, stem: Path) -> Path:
        """A PNG, and beside it a text with the best matches; gives back the PNG."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{stem}.txt").write_text("\n".join(self.lines()) + "\n", encoding="utf-8")
        return self.picture().save(stem)

    def lines(self) -> list[str]:
        """For each caption the nearest examples; the right one is marked."""
        lines = []
        for row, (caption, rank) in enumerate(zip(self.captions, self.ranks(), strict=True)):
            lines.append(
                f"{row:3}  {caption}   (the right one comes {ordinal(rank)} of {len(self.names)})"
            )
            for column in np.argsort(-self.nearness_NN[row], kind="stable")[:BEST]:
                signature = "*" if column == row else " "
                lines.append(
                    f"    {signature} {self.nearness_NN[row, column]:6.3f}  {self.names[column]}: {self.captions[column]}"
                )
        return lines

    def picture(self) -> Image:
        count = len(self.names)
        width, height = 2 * MARGIN + WORDS + (count + 2) * CELL, 2 * MARGIN + (count + 2) * CELL
        page = PIL.Image.new("RGB", (width, height), "white")
        pen, font = PIL.ImageDraw.Draw(page), PIL.ImageFont.load_default(LETTER)
        left, top = MARGIN + WORDS, MARGIN + CELL
        colours = coloured(self.nearness_NN)
        for row, (caption, rank) in enumerate(zip(self.captions, self.ranks(), strict=True)):
            middle = top + (row + 0.5) * CELL
            pen.text((left - 8, middle), f"{shown(caption)}  {row}", "black", font, anchor="rm")
            pen.text(
                (left + (count + 1) * CELL, middle),
                str(rank),
                "black" if rank == 1 else "#b03020",
                font,
                anchor="mm",
            )
            for column in range(count):
                corner = (left + column * CELL, top + row * CELL)
                frame = "#20a040" if column == row else None
                pen.rectangle(
                    (*corner, corner[0] + CELL - 2, corner[1] + CELL - 2), tuple(colours[row, column]), frame, 2
                )  # fmt: skip
        for column in range(count):
            pen.text(
                (left + (column + 0.5) * CELL, MARGIN + CELL / 2),
                str(column),
                "black",
                font,
                anchor="mm",
            )
        pen.text((left + (count + 1) * CELL, MARGIN + CELL / 2), "rank", "black", font, anchor="mm")
        lowest, highest = float(self.nearness_NN.min()), float(self.nearness_NN.max())
        told = f"rows: captions; columns: examples; dark is far ({lowest:.2f}), bright near ({highest:.2f}); framed: the right one"
        pen.text(
            (left - 8 + count * CELL, top + (count + 0.5) * CELL),
            told,
            "#555555",
            font,
            anchor="rm",
        )
        return Image(np.asarray(page))


def coloured(nearness_NN: np.ndarray) -> np.ndarray:
    """(N, N, 3) bytes: from the farthest, dark, to the nearest, bright."""
    span = float(nearness_NN.max() - nearness_NN.min())
    heights = (nearness_NN - nearness_NN.min()) / (span or 1.0) * (len(HEAT) - 1)
    below = np.minimum(heights.astype(int), len(HEAT) - 2)
    share = (heights - below)[..., None]
    return np.rint(HEAT[below] * (1 - share) + HEAT[below + 1] * share).astype(np.uint8)


def shown(caption: str) -> str:
    """What the font has letters for, and no more than fits."""
    plain = caption.encode("latin-1", "replace").decode("latin-1")
    return plain if len(plain) <= LONGEST else plain[: LONGEST - 3] + "..."


def ordinal(number: int) -> str:
    ending = (
        "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{ending}"
