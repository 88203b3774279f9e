"""Captions, and what a text encoder makes of them."""

from __future__ import annotations

from torch import Tensor

from tessera.text.encoder import TextEncoder

CAPTIONS = [
    "a red circle",
    "a blue square",
    "two red squares",
    "a small circle above a blue square",
    "",
]


def real(encoder: TextEncoder, texts: list[str], number: int = 0) -> Tensor:
    """The states of one text of a batch, without padding."""
    states = encoder(texts)
    return states.values[number][states.mask[number]]
