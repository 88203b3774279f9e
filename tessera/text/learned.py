"""A small text encoder that is trained together with the network that it conditions.

Shape suffixes: B texts, L tokens of the longest text, W dimension of a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tessera.engine.device import copy_to_device
from tessera.nn.bpe import BPE, PAD_ID, check_vocab_size
from tessera.nn.transformer import States, Transformer
from tessera.text.encoder import TextEncoder, Texts, check_texts


@dataclass(frozen=True, kw_only=True)
class LearnedTextConfig:
    """A small text encoder that is trained together with the network that it conditions."""

    dim: int = 128
    """Dimension of the transformer and of the states."""
    depth: int = 2
    """Number of transformer blocks."""
    heads: int = 4
    """Number of attention heads."""
    vocab_size: int = 512
    """Size of the BPE vocabulary. 258 tokens are fixed (256 of them bytes); the rest are parts of
    words, learned from the training captions."""
    max_len: int = 64
    """Maximum number of tokens of a text, including the token that begins it."""
    casefold: bool = True
    """Whether upper and lower case are equivalent, since prompts are typed in any case."""
    ignore_punctuation: bool = False
    """Whether punctuation between words is ignored, since prompts are typed with and without it."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "dim", "depth", "heads")
        if self.max_len < 2:
            raise ValueError(
                f"`max_len` is {self.max_len}, but it must be at least 2, because every text begins"
                " with a token of its own: use 64, for example."
            )
        check_vocab_size(self.vocab_size)

    def build(self) -> LearnedTextEncoder:
        return LearnedTextEncoder(self)


class TransformerTextEncoder(TextEncoder):
    """An embedding and a transformer. A subclass defines `encode_text`."""

    def __init__(self, *, vocab_size: int, dim: int, depth: int, heads: int, max_len: int):
        super().__init__()
        self.dim, self.depth, self.max_len = dim, depth, max_len
        self.embedding = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.transformer = Transformer(dim, depth, heads)

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text, without truncation or padding."""
        raise NotImplementedError

    def forward(self, texts: Texts) -> States:
        return self.hidden_states(texts)[-1]

    def hidden_states(self, texts: Texts, at: Sequence[int] = ()) -> list[States]:
        assert not isinstance(texts, States)
        tokens_BL = texts if isinstance(texts, Tensor) else self.tokenize(texts)
        mask_BL = tokens_BL != PAD_ID
        layers = self.transformer.hidden_states(self.embedding(tokens_BL), mask_BN=mask_BL, at=at)
        return [States(values_BLW * mask_BL[..., None], mask_BL) for values_BLW in layers]

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Return tokens (B, L) on the device, truncated at `max_len` and padded at the end."""
        return copy_to_device(self.encode_inputs(texts), self.input_device)

    def encode_inputs(self, texts: Sequence[str]) -> Tensor:
        check_texts(texts)
        encoded = [self.encode_text(text)[: self.max_len] for text in texts]
        # In eval mode the padding does not depend on the batch, so not even rounding does.
        length = max(map(len, encoded)) if self.training else self.max_len
        rows = [tokens + [PAD_ID] * (length - len(tokens)) for tokens in encoded]
        return torch.tensor(rows)

    def fits(self, text: str) -> bool:
        return len(self.encode_text(text)) <= self.max_len


class LearnedTextEncoder(TransformerTextEncoder):
    """A transformer on BPE tokens, which are trained on the captions of the run."""

    def __init__(self, config: LearnedTextConfig):
        super().__init__(
            vocab_size=config.vocab_size,
            dim=config.dim,
            depth=config.depth,
            heads=config.heads,
            max_len=config.max_len,
        )
        self.bpe = BPE(
            config.vocab_size,
            casefold=config.casefold,
            ignore_punctuation=config.ignore_punctuation,
        )

    def encode_text(self, text: str) -> list[int]:
        return self.bpe.encode(text)

    def prepare_text(self, texts: Iterable[str], cache_dir: Path | None = None) -> None:
        """Train the BPE vocabulary. The same captions always give the same one, so nothing is
        cached."""
        self.bpe.train_from_iterator(texts)


def check_at_least_one(config: object, *names: str) -> None:
    """Raise a ValueError if one of these fields of a text encoder's config is below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(
                f"{name} of a text encoder is {getattr(config, name)}, but it must be at least 1:"
                " use a larger one."
            )
