"""Captions for tests of text encoders."""

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


def unpadded_states(encoder: TextEncoder, texts: list[str], index: int = 0) -> Tensor:
    """Return the states of one text of a batch, without padding."""
    states = encoder(texts)
    return states.values[index][states.mask[index]]
