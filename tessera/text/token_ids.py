"""A text encoder for texts that are token ids already: captions such as "17 4 256".

It serves users with their own tokenizer. Like `LearnedTextEncoder`, it is trained together with the
network that it conditions, but it has no vocabulary of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tessera.text.learned import TransformerTextEncoder, check_at_least_one


@dataclass(frozen=True, kw_only=True)
class TokenIdTextConfig:
    """A text encoder for texts that are token ids already."""

    vocab_size: int
    """Vocabulary size of the tokenizer. Ids range from 0 to vocab_size - 1."""
    dim: int = 128
    """Dimension of the transformer and of the states."""
    depth: int = 2
    """Number of transformer blocks."""
    heads: int = 4
    """Number of attention heads."""
    max_len: int = 256
    """Maximum number of tokens of a text."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "vocab_size", "dim", "depth", "heads", "max_len")

    def build(self) -> TokenIdTextEncoder:
        return TokenIdTextEncoder(self)


class TokenIdTextEncoder(TransformerTextEncoder):
    """A transformer on given token ids. Id n is token n + 1, because token 0 is padding."""

    def __init__(self, config: TokenIdTextConfig):
        super().__init__(
            vocab_size=config.vocab_size + 1,
            dim=config.dim,
            depth=config.depth,
            heads=config.heads,
            max_len=config.max_len,
        )
        self.config = config

    def encode_text(self, text: str) -> list[int]:
        return [token_id + 1 for token_id in self.parse_ids(text)]

    def parse_ids(self, text: str) -> list[int]:
        """Return the ids of a text. An empty text has the id 0, so that there is one state."""
        vocab_size = self.config.vocab_size
        ids = [int(word) if word.isdecimal() else -1 for word in text.split()] or [0]
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(
                f"The text {text[:40]!r} was given to an encoder of token ids from 0 to"
                f" {vocab_size - 1}, such as '17 4 25': encode it with the tokenizer of the other"
                " captions."
            )
        return ids

    def prepare_text(self, texts: Iterable[str], cache_dir: Path | None = None) -> None:
        """Check the ids of all texts before the first step."""
        for text in texts:
            self.parse_ids(text)
