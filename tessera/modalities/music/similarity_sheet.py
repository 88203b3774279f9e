"""Show the similarities of captions and examples as an image of their matrix and as text.

In the image a row is a caption and a column an example, in the same order, so that for a good model
the diagonal is the brightest. The rank of the correct example is at the end of each row. The text
lists the most similar examples for each caption.

N examples, D dimension of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from tessera.data.files import resolve_suffix
from tessera.data.notebook import figures_to_html
from tessera.modalities.audio.plot import COLORMAP
from tessera.modalities.image.media import Image

if TYPE_CHECKING:
    from tessera.engine.task import Media, TrackedMedia

CELL, CAPTION_WIDTH, MARGIN, FONT_SIZE = 26, 640, 14, 13  # pixels
MAX_CAPTION_LEN = 96
"""The number of characters of a caption that are shown."""
NUM_BEST = 3
"""The number of examples that are listed for each caption."""


@dataclass(eq=False, repr=False)
class SimilarityRow:
    """An example and its caption, with the embeddings of both."""

    name: str
    caption: str
    media: Media
    """The example as an object with a `save` method."""
    media_D: np.ndarray
    """The embedding of the example."""
    text_D: np.ndarray
    """The embedding of the caption."""

    def __repr__(self) -> str:
        return f"SimilarityRow(name={self.name!r}, caption={self.caption!r}, media={self.media!r})"

    def _repr_html_(self) -> str:
        return figures_to_html([self.media], [self.caption])

    def to_tracker(self) -> TrackedMedia:
        from tessera.engine.task import Trackable

        assert isinstance(self.media, Trackable)
        return self.media.to_tracker()

    def save(self, path: str | Path) -> Path:
        """Save the example, and next to it a text file with the caption; return the path of the
        example."""
        saved = Path(self.media.save(path))
        saved.with_suffix(".txt").write_text(self.caption + "\n", encoding="utf-8")
        return saved

    @classmethod
    def sheet(cls, items: Sequence[SimilarityRow], labels: Sequence[str] = ()) -> SimilarityMatrix:
        """Compute the similarities of all captions and all examples, which have names already."""
        return SimilarityMatrix(
            [item.name for item in items],
            [item.caption for item in items],
            np.stack([item.text_D for item in items])
            @ np.stack([item.media_D for item in items]).T,
        )


@dataclass(eq=False, repr=False)
class SimilarityMatrix:
    """The similarity of each caption (row) and each example (column)."""

    names: list[str]
    captions: list[str]
    similarity_NN: np.ndarray

    def __repr__(self) -> str:
        return f"SimilarityMatrix(examples={len(self.names)})"

    def _repr_png_(self) -> bytes:
        return self.render().to_png()

    def to_tracker(self) -> TrackedMedia:
        return self.render().to_tracker()

    def ranks(self) -> list[int]:
        """Return the rank of the correct example for each caption, from 1."""
        own = self.similarity_NN.diagonal()[:, None]
        return (1 + (self.similarity_NN > own).sum(1)).tolist()

    def save(self, path: str | Path) -> Path:
        """Save a PNG, and next to it a text file with the best matches; return the path of the
        PNG."""
        target = resolve_suffix(path, ".png", (".png",))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.with_suffix(".txt").write_text("\n".join(self.lines()) + "\n", encoding="utf-8")
        return self.render().save(target)

    def lines(self) -> list[str]:
        """List the most similar examples for each caption, with an asterisk at the correct one."""
        lines = []
        for row, (caption, rank) in enumerate(zip(self.captions, self.ranks(), strict=True)):
            lines.append(f"{row:3}  {caption}   (correct: {ordinal(rank)} of {len(self.names)})")
            for column in np.argsort(-self.similarity_NN[row], kind="stable")[:NUM_BEST]:
                marker = "*" if column == row else " "
                similarity = self.similarity_NN[row, column]
                lines.append(
                    f"    {marker} {similarity:6.3f}  {self.names[column]}: {self.captions[column]}"
                )
        return lines

    def render(self) -> Image:
        """Draw the matrix with captions and ranks."""
        count = len(self.names)
        width = 2 * MARGIN + CAPTION_WIDTH + (count + 2) * CELL
        height = 2 * MARGIN + (count + 2) * CELL
        page = PIL.Image.new("RGB", (width, height), "white")
        pen, font = PIL.ImageDraw.Draw(page), PIL.ImageFont.load_default(FONT_SIZE)
        left, top = MARGIN + CAPTION_WIDTH, MARGIN + CELL
        colours = apply_colormap(self.similarity_NN)
        for row, (caption, rank) in enumerate(zip(self.captions, self.ranks(), strict=True)):
            middle = top + (row + 0.5) * CELL
            label = f"{shorten(caption)}  {row}"
            pen.text((left - 8, middle), label, "black", font, anchor="rm")
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
                    (*corner, corner[0] + CELL - 2, corner[1] + CELL - 2),
                    tuple(colours[row, column]),
                    frame,
                    2,
                )
        for column in range(count):
            pen.text(
                (left + (column + 0.5) * CELL, MARGIN + CELL / 2),
                str(column),
                "black",
                font,
                anchor="mm",
            )
        pen.text((left + (count + 1) * CELL, MARGIN + CELL / 2), "rank", "black", font, anchor="mm")
        low, high = float(self.similarity_NN.min()), float(self.similarity_NN.max())
        legend = (
            f"rows: captions; columns: examples; similarity from {low:.2f} (dark) to {high:.2f} "
            "(bright); framed: correct"
        )
        pen.text(
            (left - 8 + count * CELL, top + (count + 0.5) * CELL),
            legend,
            "#555555",
            font,
            anchor="rm",
        )
        return Image(np.asarray(page))


def apply_colormap(similarity_NN: np.ndarray) -> np.ndarray:
    """Return (N, N, 3) uint8: from dark for the lowest to bright for the highest similarity."""
    span = float(similarity_NN.max() - similarity_NN.min())
    heights = (similarity_NN - similarity_NN.min()) / (span or 1.0) * (len(COLORMAP) - 1)
    below = np.minimum(heights.astype(int), len(COLORMAP) - 2)
    fraction = (heights - below)[..., None]
    mixed = COLORMAP[below] * (1 - fraction) + COLORMAP[below + 1] * fraction
    return np.rint(mixed).astype(np.uint8)


def shorten(caption: str) -> str:
    """Replace characters that the font does not have, and truncate to MAX_CAPTION_LEN."""
    printable = caption.encode("latin-1", "replace").decode("latin-1")
    if len(printable) <= MAX_CAPTION_LEN:
        return printable
    return printable[: MAX_CAPTION_LEN - 3] + "..."


def ordinal(number: int) -> str:
    suffix = (
        "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{suffix}"
