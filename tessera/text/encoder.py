"""The interface of text encoders: texts in; a state for each token and a padding mask out.

`LearnedTextEncoder` (learned.py) is small and trained together with the network that it conditions.
`PretrainedTextEncoder` (pretrained.py) wraps a published encoder, frozen and in no checkpoint.
`TokenIdTextEncoder` (token_ids.py) reads texts that are token ids already. The states of a text do
not depend on the other texts of the batch, apart from rounding.

Shape suffixes: B texts, L tokens of the longest text, W dimension of a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tessera.nn.transformer import States


class TextEncoder(nn.Module):
    """Base class of all text encoders."""

    dim: int
    """Dimension of a state."""
    depth: int = 1
    """Number of layers with states: 1 if only the last layer has them."""

    def forward(self, texts: Sequence[str]) -> States:
        raise NotImplementedError

    def hidden_states(self, texts: Sequence[str], at: Sequence[int] = ()) -> list[States]:
        """Return the states after each number of layers in `at`, and the output last."""
        if at:
            raise ValueError(
                f"States after {', '.join(map(str, at))} layers were requested, but this text"
                " encoder provides those of its last layer only: request no others."
            )
        return [self(texts)]

    def prepare_text(self, texts: Iterable[str], cache_dir: Path | None = None) -> None:
        """Process all captions of a run before the first step.

        `cache_dir` is a folder for results that are expensive to compute.
        """
        raise NotImplementedError

    def fits(self, text: str) -> bool:
        """Return whether the whole text is encoded. The end of a longer text is truncated."""
        raise NotImplementedError

    def find_truncated(self, texts: Iterable[str]) -> list[str]:
        """Return the texts that are truncated, each once."""
        return [text for text in dict.fromkeys(texts) if not self.fits(text)]


def check_texts(texts: Sequence[str]) -> None:
    """Raise a TypeError if a single text was given instead of a list."""
    if isinstance(texts, str):
        raise TypeError(
            f"A text encoder takes a list of texts, but got the text {texts[:40]!r}: put it in a"
            " list."
        )


def pad_rows(rows: list[Tensor]) -> States:
    """Pad sequences (l, ...) with zeros to one batch."""
    lengths_B = torch.tensor([len(row) for row in rows])
    mask_BL = torch.arange(int(lengths_B.max())) < lengths_B[:, None]
    return States(pad_sequence(rows, batch_first=True), mask_BL.to(rows[0].device))
