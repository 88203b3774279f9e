"""Symbols that somebody else's tokenizer wrote: all that has to be known of them to learn from
them.

Nothing can be tokenized or played from here. What there is to see of such symbols is a picture of
their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from tessera.modalities.image.media import Image
from tessera.nn.masked_transformer import TokenSpec
from tessera.nn.token_layout import Layout

LOOSE = 2
"""Frames, of the longer kind, by which two streams of one sound may differ. A speech model that
pads nothing writes one less at the end, and of the last, which is not full, one tokenizer writes a
symbol and another does not."""
STEP, ROW = 4, 8
"""Pixels of one frame and of one level in a picture."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A row of frames, each of which has a symbol in every level."""

    vocab_size: int
    """How many symbols there are."""
    frames: int
    """Of the longest example."""
    seconds: float
    """How long a frame lasts."""
    levels: int = 1
    """Symbols in a frame, the coarsest first."""

    def __post_init__(self) -> None:
        if min(self.vocab_size, self.frames, self.levels) < 1 or not self.seconds > 0:
            raise ValueError(
                f"A stream has 1 or more symbols, frames and levels, and its frames last some time, but here it is {self}."
            )

    @classmethod
    def of(cls, tokens: TokenSpec) -> Stream:
        """What a network was built for."""
        if len(tokens.layout.grid) != 1 or tokens.seconds is None:
            raise ValueError(
                f"The network was built for a grid of {tokens.layout.grid} and {tokens.seconds} seconds to a cell, but a "
                "sound is a row of frames that each last some time."
            )
        [frames] = tokens.layout.grid
        return cls(
            vocab_size=tokens.vocab_size,
            frames=frames,
            seconds=tokens.seconds,
            levels=tokens.layout.levels,
        )

    def tokens(self) -> TokenSpec:
        return TokenSpec(self.vocab_size, Layout((self.frames,), self.levels), seconds=self.seconds)

    def build(self) -> ExternalTokenizer:
        return ExternalTokenizer(self)


@dataclass(frozen=True, kw_only=True)
class Streams:
    """What is heard, and what is said in it: two rows of symbols for the same time."""

    acoustic: Stream
    semantic: Stream

    def __post_init__(self) -> None:
        if self.semantic.levels > 1:
            raise ValueError(
                f"What is said comes with one symbol to a frame, but the semantic stream has {self.semantic.levels}."
            )
        if not self.agree(self.acoustic.frames, self.semantic.frames):
            lasting = self.lasting(self.acoustic.frames, self.semantic.frames)
            raise ValueError(f"Both streams are of the same time, but here they are of {lasting}.")

    def agree(self, heard: int, said: int) -> bool:
        """Whether so many acoustic and so many semantic frames last equally long, as nearly as
        tokenizers write them."""
        longer = max(self.acoustic.seconds, self.semantic.seconds)
        return (
            abs(heard * self.acoustic.seconds - said * self.semantic.seconds)
            <= LOOSE * longer + 1e-9
        )

    def lasting(self, heard: int, said: int) -> str:
        """In words."""
        first, second = heard * self.acoustic.seconds, said * self.semantic.seconds
        return f"{first:.2f} s ({heard} frames) and {second:.2f} s ({said} frames)"


class ExternalTokenizer:
    """Stands where a tokenizer would, for symbols that are there already."""

    features: Tensor | None = None

    def __init__(self, stream: Stream):
        self.network: nn.Module = nn.Identity()
        self.vocab_size, self.levels, self.seconds = (
            stream.vocab_size,
            stream.levels,
            stream.seconds,
        )
        self.grid = (stream.frames,)

    def codes(self, examples: Any) -> Tensor:
        raise ValueError(
            "These examples are no symbols, and there is no codec here that could write them as such."
        )

    def media(self, codes: Tensor) -> list[Image]:
        """Time from left to right and a row for each level; the higher a symbol's number, the
        brighter."""
        rows = codes.reshape(*codes.shape[:2], self.levels).cpu().numpy()
        return [self.picture(tokens_TL[tokens_TL[:, 0] >= 0]) for tokens_TL in rows]

    def picture(self, tokens_TL: np.ndarray) -> Image:
        bright_TL = 2 * tokens_TL / max(1, self.vocab_size - 1) - 1
        tall = bright_TL.T.repeat(ROW, 0).repeat(STEP, 1)
        return Image.from_floats(np.broadcast_to(tall, (3, *tall.shape)))
