"""Music that a caller has in memory, as a source: tuples or dictionaries with a wave and what is
said about it.

What a value is, its name tells, or its type: floats are a wave, a string (or a list of them) is
what is said, whole numbers are the same as somebody's tokenizer wrote it. Waves are (samples,) or
(channels, samples), whose mean is taken. They are padded with silence to one length, and captions
are never cut to one another's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from tessera.data.errors import UnreadableFile
from tessera.modalities.audio.media import pad_samples
from tessera.modalities.music.media import MusicBatch, MusicExample, collate
from tessera.run.config import did_you_mean

Field = Literal["wave", "text", "numbers"]
NAMES: dict[str, Field] = {
    "wavs": "wave",
    "wav": "wave",
    "wave": "wave",
    "audio": "wave",
    "raw_texts": "text",
    "raw_text": "text",
    "text": "text",
    "caption": "text",
    "captions": "text",
    "texts": "numbers",
    "tokens": "numbers",
    "token_ids": "numbers",
}
"""What the values of a dictionary may be called, the names of the research code among them."""


@dataclass(frozen=True)
class InMemoryMusic:
    """The source: somebody's own clips. A longer one is cut at a place that is drawn at each visit,
    or in its middle."""

    items: Sequence[Any]
    length: int
    """samples of a clip"""
    rate_hz: int
    reads_numbers: bool
    """whether the network reads what a tokenizer wrote, or words"""
    crop: Literal["random", "centre"] = "random"

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return f"clip-{index:06d}"

    def caption(self, index: int) -> str:
        return next(iter(self.all_captions(index)), "")

    def all_captions(self, index: int) -> list[str]:
        return said(
            fields_of(self.items[index], self.name(index)), self.reads_numbers, self.name(index)
        )

    def item(self, index: int, rng: np.random.Generator) -> MusicExample:
        """A draw for the beginning, and one for the caption where there are several."""
        moment, fields = rng.random(), fields_of(self.items[index], self.name(index))
        wave = wave_of(fields["wave"], self.name(index))
        later = max(0, wave.shape[1] - self.length)
        start = min(later, int((moment if self.crop == "random" else 0.5) * (later + 1)))
        cut = wave[:, start : start + self.length]
        captions = said(fields, self.reads_numbers, self.name(index))
        caption = captions[int(rng.integers(len(captions)))] if len(captions) > 1 else captions[0]
        return MusicExample(pad_samples(cut, self.length), cut.shape[1], self.rate_hz, caption)

    def collate(self, examples: list[MusicExample]) -> MusicBatch:
        return collate(examples)


def max_len(items: Sequence[Any]) -> int:
    """Samples of the longest clip; what is no clip is met, and told, when it is drawn."""
    lengths = [1]
    for index in range(len(items)):
        try:
            lengths.append(
                wave_of(fields_of(items[index], f"clip-{index:06d}")["wave"], "").shape[1]
            )
        except UnreadableFile:
            continue
    return max(lengths)


def fields_of(item: Any, name: str) -> dict[Field, Any]:
    """A wave and what is said about it, each once."""
    if isinstance(item, Mapping):
        for key in item:
            if key not in NAMES:
                raise UnreadableFile(f"{name}: it has {key!r}{did_you_mean(str(key), NAMES)}")
        named = [(NAMES[key], value) for key, value in item.items()]
    elif isinstance(item, (tuple, list)):
        named = [(kind_of(value, name), value) for value in item]
    else:
        raise UnreadableFile(
            f"{name}: it is a {type(item).__name__}, but an item is a wave and a text, as a tuple or a dictionary"
        )
    fields: dict[Field, Any] = {}
    for kind, value in named:
        if kind in fields:
            raise UnreadableFile(
                f"{name}: two of its values could be the {kind}: give a dictionary, with one of them as {one_name(kind)}"
            )
        fields[kind] = value
    if "wave" not in fields or len(fields) < 2:
        raise UnreadableFile(
            f"{name}: it has {' and '.join(fields) or 'nothing'}, but an item is a wave and what is said about it"
        )
    if len(fields) == 3:
        raise UnreadableFile(
            f"{name}: it has a text in words and one in numbers: which is it to be? Leave one out"
        )
    return fields


def one_name(kind: Field) -> str:
    return repr(next(name for name, meant in NAMES.items() if meant == kind))


def kind_of(value: Any, name: str) -> Field:
    if isinstance(value, str) or (
        isinstance(value, (list, tuple)) and value and all(isinstance(one, str) for one in value)
    ):
        return "text"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        tensor = torch.as_tensor(value)
        if tensor.is_floating_point() and tensor.ndim in (1, 2):
            return "wave"
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.ndim == 1:
            return "numbers"
        raise UnreadableFile(
            f"{name}: nobody knows what {tensor.dtype} of shape {tuple(tensor.shape)} is: waves are floats, texts ids (n,)"
        )
    raise UnreadableFile(
        f"{name}: nobody knows what a {type(value).__name__} is: waves are tensors of floats, texts strings or ids"
    )


def wave_of(value: Any, name: str) -> np.ndarray:
    """(1, N) float32 in [-1, 1]"""
    wave = torch.as_tensor(value).detach().cpu().float().numpy()
    wave = wave[None] if wave.ndim == 1 else wave
    if wave.ndim != 2 or not wave.size or len(wave) > wave.shape[1]:
        raise UnreadableFile(
            f"{name}: its wave is {tuple(wave.shape)}, but a wave is (samples,) or (channels, samples)"
        )
    if not np.isfinite(wave).all():
        raise UnreadableFile(f"{name}: some of its samples are not numbers (NaN or infinite)")
    return wave.mean(axis=0, keepdims=True).clip(-1, 1)


def said(fields: Mapping[Field, Any], reads_numbers: bool, name: str) -> list[str]:
    """The captions; numbers as words that an encoder of numbers reads, without the zeros that pad
    them."""
    if reads_numbers != ("numbers" in fields):
        met, reads = (
            ("numbers", "words")
            if "numbers" in fields
            else ("words", "numbers, of somebody's tokenizer")
        )
        raise UnreadableFile(
            f"{name}: its text is in {met}, but the network reads {reads}: give the other, or build it with another text"
        )
    if reads_numbers:
        numbers = torch.as_tensor(fields["numbers"]).tolist()
        while numbers and numbers[-1] == 0:
            numbers.pop()
        captions = [" ".join(map(str, numbers))]
    else:
        captions = [fields["text"]] if isinstance(fields["text"], str) else list(fields["text"])
    captions = [" ".join(caption.split()) for caption in captions if caption.strip()]
    if not captions:
        raise UnreadableFile(f"{name}: nothing is said about it")
    return captions
