"""A text encoder for texts that somebody else has written as numbers: captions such as "17 4 256",
one number for each symbol.

For whoever has a tokenizer of their own. It learns with the network that it serves, as
`LearnedText` does, and has no alphabet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tessera.nn.bpe import PADDING
from tessera.nn.transformer import Transformer
from tessera.text.encoder import LearnedText, refuse_one_text


@dataclass(frozen=True, kw_only=True)
class TokenIdTextConfig:
    """Reads texts that come as numbers."""

    tokens: int
    """How many symbols the tokenizer has: numbers are 0 up to below this."""
    dim: int = 128
    depth: int = 2
    """Transformer blocks."""
    heads: int = 4
    max_len: int = 256
    """Symbols of a text that are read."""

    def __post_init__(self) -> None:
        for name in ("symbols", "width", "depth", "heads", "longest"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"A text encoder's {name} is at least 1, but it is {getattr(self, name)}."
                )

    def build(self) -> TokenIdText:
        return TokenIdText(self)


class TokenIdText(LearnedText):
    """Number n is symbol n + 1: symbol 0 is padding."""

    def __init__(self, config: TokenIdTextConfig):
        nn.Module.__init__(
            self
        )  # LearnedText's own makes an alphabet, and here somebody else has one
        self.dim, self.depth, self.max_len = config.dim, config.depth, config.max_len
        self.embedding = nn.Embedding(config.tokens + 1, config.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.transformer = Transformer(config.dim, config.depth, config.heads)

    def tokens(self, texts: Sequence[str]) -> Tensor:
        refuse_one_text(texts)
        spelt = [self.numbers(text)[: self.max_len] for text in texts]
        most = max(map(len, spelt)) if self.training else self.max_len
        rows = [
            [number + 1 for number in numbers] + [PADDING] * (most - len(numbers))
            for numbers in spelt
        ]
        return torch.tensor(rows, device=self.embedding.weight.device)

    def numbers(self, text: str) -> list[int]:
        """A text of nothing is the number 0, so that there is something to read."""
        known = self.embedding.num_embeddings - 1
        numbers = [int(word) if word.isdecimal() else -1 for word in text.split()] or [0]
        if not 0 <= min(numbers) <= max(numbers) < known:
            raise ValueError(
                f"The text {text[:40]!r} came to an encoder that reads numbers from 0 to {known - 1}, such as '17 4 25': "
                "write it with the tokenizer that the others were written with."
            )
        return numbers

    def prepare_text(self, texts: Iterable[str], place: Path | None = None) -> None:
        """There is no alphabet to learn; numbers that it does not know are refused before the first
        step."""
        for text in texts:
            self.numbers(text)

    def fits(self, text: str) -> bool:
        return len(self.numbers(text)) <= self.max_len
