"""What tasks that learn from symbols share: the tokenizers they stand on, the codes of a batch, and
who hears the captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tessera.data.tokens import TokenizedBatch
from tessera.engine.task import Alarm, Frozen, Task


class TokenizerProtocol(Protocol):
    """A trained tokenizer, as a generator needs it."""

    network: nn.Module
    vocab_size: int
    grid: tuple[int, ...]
    levels: int
    features: Tensor | None
    seconds: float | None

    def tokens(self, examples: Any) -> Tensor: ...
    def media(self, tokens: Tensor) -> list[Any]: ...


@dataclass
class GenerationRequest:
    """What is to be generated: one entry for each example."""

    texts: Sequence[str]
    seeds: Sequence[int]
    negative: Sequence[str] | None = None
    """What to lead away from, instead of from no text at all."""
    tokens: Tensor | None = None
    """(B, *grid): symbols that are there already,"""
    hidden: Tensor | None = None
    """(B, *grid), True where they are to be drawn anew."""
    coarser: Tensor | None = None
    """The symbols that are a condition: of the smaller pictures, for super-resolution; of what is
    said, for sound."""
    lengths: Sequence[int] | None = None
    """How many places of each are real, where they differ."""


class GeneratorTask(Task):
    """A subclass gives `network`, which may read texts, and `generate(wanted, sampling,
    guidance)`."""

    coarser: str | None = None
    """The name of the part whose symbols are a condition, if there is one."""

    def __init__(self, tokenizers: Mapping[str, TokenizerProtocol]):
        super().__init__()
        self.tokenizers = dict(tokenizers)
        self.frozen = nn.ModuleList([Frozen(codec.network) for codec in self.tokenizers.values()])

    @property
    def network(self) -> Any:
        """What guesses symbols; `network.text` reads prompts, or is None."""
        raise NotImplementedError

    def readers(self) -> list[Any]:
        """The networks that read captions."""
        return [self.network] if self.network.text is not None else []

    def prepare_text(self, captions: Sequence[str], place: Path) -> None:
        """Before the first step: the text encoders hear all captions."""
        if self.network.text is None:
            return
        if not any(captions):
            raise ValueError(
                "Not one example has a caption, but this recipe learns from captions: put name.txt beside each file, or a "
                "metadata.jsonl, or sort the files into named folders. For a model without prompts: --text none."
            )
        for reader in self.readers():
            reader.text.prepare_text(captions, place)

    def tokens(self, examples: Any, by: str) -> Tensor:
        """As they were cached, or by the tokenizer here and now."""
        if isinstance(examples, TokenizedBatch):
            return examples.tokens[by]
        with torch.no_grad():
            return self.tokenizers[by].tokens(examples)


def refuse_augmentation(tokens: str, data: Any) -> None:
    """What is another thing at every visit cannot be tokenized once and for all."""
    if tokens != "live" and data != data.without_augmentation():
        raise ValueError(
            "Examples that are changed anew at every visit cannot be tokenized once and for all: leave the augmentation out "
            "(for pictures --data.crop centre, no --data.flip, --data.min-scale 1), or use --task.tokens live."
        )


PROMPT_IGNORED = Alarm(
    name="the prompt changes nothing",
    metric="val_ema/condition_gain",
    below=0.005,
    patience=3,
    after=1000,
    hint="Wrong captions are guessed as well as right ones. Look at the captions (`tessera check`), or train longer.",
)
