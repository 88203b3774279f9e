"""The interface of text encoders: texts in; a state for each token and a padding mask out.

`LearnedTextEncoder` (learned.py) is small and trained together with the network that it conditions.
`PretrainedTextEncoder` (pretrained.py) wraps a published encoder, frozen and in no checkpoint.
`TokenIdTextEncoder` (token_ids.py) reads texts that are token ids already. The states of a text do
not depend on the other texts of the batch, apart from rounding.

Shape suffixes: B texts, L tokens of the longest text, W dimension of a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tessera.engine.device import move_tensors
from tessera.nn.transformer import States

Texts = Sequence[str] | Tensor | States
"""Texts, or what `encode_inputs` returns for them."""


@dataclass
class TextInputs:
    """The texts of a batch as tensors, made on the CPU and copied to the device with the batch."""

    encoded: Tensor | States
    """What the encoder's forward takes in place of texts, from `encode_inputs`."""
    has_text_B: Tensor
    """Whether each text is used: those that are empty or dropped are not."""
    has_text_idx: Tensor | None
    """The indices of the texts that are used; None if all are."""


class TextEncoder(nn.Module):
    """Base class of all text encoders."""

    dim: int
    """Dimension of a state."""
    depth: int = 1
    """Number of layers with states: 1 if only the last layer has them."""

    def forward(self, texts: Texts) -> States:
        raise NotImplementedError

    def encode_inputs(self, texts: Sequence[str]) -> Tensor | States:
        """Return what `forward` takes in place of these texts, on the CPU."""
        raise NotImplementedError

    def prepare_inputs(self, texts: Sequence[str], dropped: Sequence[bool]) -> TextInputs:
        """Return the texts of a batch as tensors on the CPU."""
        used = [bool(text) and not drop for text, drop in zip(texts, dropped, strict=True)]
        index = [number for number, is_used in enumerate(used) if is_used]
        return TextInputs(
            self.encode_inputs(texts),
            torch.tensor(used),
            None if all(used) else torch.tensor(index, dtype=torch.long),
        )

    def encode(self, texts: Sequence[str] | TextInputs, dropped: Sequence[bool] = ()) -> States:
        """Return the states of texts, with a mask that is empty where a text is not used.

        `dropped` is ignored where the texts were prepared already.
        """
        if not isinstance(texts, TextInputs):
            inputs = self.prepare_inputs(texts, dropped or [False] * len(texts))
            texts = move_tensors(inputs, self.input_device)
        states = self(texts.encoded)
        mask_BL = states.mask & texts.has_text_B[:, None]
        return States(states.values, mask_BL, texts.has_text_idx)

    @property
    def input_device(self) -> torch.device:
        """The device of the encoder's weights."""
        return next(self.parameters()).device

    def hidden_states(self, texts: Texts, at: Sequence[int] = ()) -> list[States]:
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
