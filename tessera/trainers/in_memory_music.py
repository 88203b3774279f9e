"""Music in memory as a dataset: tuples or dictionaries of a waveform and its captions.

The values of a dictionary are identified by their keys, those of a tuple by their types: floats are
a waveform, a string or a list of strings the captions, and integers a caption as token ids.
Waveforms are (samples,) or (channels, samples), of which the mean is taken. They are padded with
silence to one length; captions are not shortened.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from tessera.data.dataset import ExampleDataset, choose_caption
from tessera.data.errors import UnreadableFile
from tessera.modalities.audio.media import pad_samples
from tessera.modalities.music.media import MusicBatch, MusicExample, collate
from tessera.run.config import did_you_mean

MAX_CHANNELS = 16
"""More rows than this are those of a spectrogram."""
Field = Literal["waveform", "text", "token ids"]
Fields = dict[Field, object]
"""The values of an item by their meaning; what they are is checked where they are used."""
FIELDS: dict[str, Field] = {
    "wavs": "waveform",
    "wav": "waveform",
    "wave": "waveform",
    "audio": "waveform",
    "raw_texts": "text",
    "raw_text": "text",
    "text": "text",
    "caption": "text",
    "captions": "text",
    "texts": "token ids",
    "tokens": "token ids",
    "token_ids": "token ids",
}
"""The keys that a dictionary may have, those of the research package among them."""


@dataclass(frozen=True)
class InMemoryMusic(ExampleDataset):
    """Waveforms with captions; longer ones are cropped at a random position or in the middle."""

    items: Sequence[object]
    length: int
    """The number of samples of an example."""
    rate_hz: int
    takes_token_ids: bool
    """Whether the text encoder takes token ids instead of strings."""
    crop: Literal["random", "centre"] = "random"

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return f"clip-{index:06d}"

    def all_captions(self, index: int) -> list[str]:
        fields = parse_item(self.items[index])
        return parse_captions(fields, self.takes_token_ids)

    def item(self, index: int, rng: np.random.Generator) -> MusicExample:
        """Draw a random number for the start and, if there are several captions, one for them."""
        u = rng.random()
        fields = parse_item(self.items[index])
        waveform = to_waveform(fields["waveform"])
        num_later = max(0, waveform.shape[1] - self.length)
        position = u if self.crop == "random" else 0.5
        start = min(num_later, int(position * (num_later + 1)))
        cut = waveform[:, start : start + self.length]
        captions = parse_captions(fields, self.takes_token_ids)
        return MusicExample(
            pad_samples(cut, self.length),
            cut.shape[1],
            self.rate_hz,
            choose_caption(captions, rng),
            caption_set=tuple(captions),
        )

    def collate(self, examples: list[MusicExample]) -> MusicBatch:
        return collate(examples)


def find_max_samples(items: Sequence[object]) -> int:
    """Return the number of samples of the longest waveform.

    Unreadable items are passed over; they are reported when they are loaded.
    """
    lengths = [1]
    for index in range(len(items)):
        try:
            waveform = to_waveform(parse_item(items[index])["waveform"])
        except UnreadableFile:
            continue
        lengths.append(waveform.shape[1])
    return max(lengths)


def parse_item(item: object) -> Fields:
    """Return a waveform and either a text or token ids, or raise UnreadableFile."""
    if isinstance(item, Mapping):
        for key in item:
            if key not in FIELDS:
                raise UnreadableFile(
                    f"it has the unknown key {key!r}{did_you_mean(str(key), FIELDS)}"
                )
        named = [(FIELDS[key], value) for key, value in item.items()]
    elif isinstance(item, (tuple, list)):
        named = [(detect_field(value), value) for value in item]
    else:
        raise UnreadableFile(
            f"it is a {type(item).__name__}, but an item must be a tuple or a dictionary "
            "of a waveform and a text"
        )
    fields: Fields = {}
    for field, value in named:
        if field in fields:
            raise UnreadableFile(
                f"two of its values can be the {field}, but only one is used: give a "
                f"dictionary with one of them as {first_key(field)!r}"
            )
        fields[field] = value
    if "waveform" not in fields or len(fields) < 2:
        raise UnreadableFile(
            f"it has {' and '.join(fields) or 'no values'}, but an item must have a "
            "waveform and a text or token ids"
        )
    if len(fields) == 3:
        raise UnreadableFile(
            "it has a text and token ids, but only one of them is used: leave the other out"
        )
    return fields


def first_key(field: Field) -> str:
    return next(key for key, meaning in FIELDS.items() if meaning == field)


def detect_field(value: object) -> Field:
    """Return what a value of a tuple is, by its type."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, str) for one in value):
        return "text"
    found = f"a {type(value).__name__}"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        tensor = torch.as_tensor(value)
        if tensor.is_floating_point() and tensor.ndim in (1, 2):
            return "waveform"
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.ndim == 1:
            return "token ids"
        found = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
    raise UnreadableFile(
        f"one of its values is {found}, but values must be a waveform (floats, (samples,) "
        "or (channels, samples)), a text (strings) or token ids (integers, (n,))"
    )


def to_waveform(value: object) -> np.ndarray:
    """Return one channel, (1, N) float32 in [-1, 1], or raise UnreadableFile."""
    waveform = torch.as_tensor(value).detach().cpu().float().numpy()
    waveform = waveform[None] if waveform.ndim == 1 else waveform
    if waveform.ndim != 2 or not waveform.size or len(waveform) > waveform.shape[1]:
        raise UnreadableFile(
            f"its waveform has the shape {tuple(waveform.shape)}, but must be (samples,) "
            "or (channels, samples)"
        )
    if len(waveform) > MAX_CHANNELS:
        raise UnreadableFile(
            f"its waveform has {len(waveform)} rows, which looks like a spectrogram, but "
            f"must be (samples,) or (channels, samples) with at most {MAX_CHANNELS} channels: give "
            "the waveform, since the model computes its spectrogram itself"
        )
    if not np.isfinite(waveform).all():
        raise UnreadableFile(
            "its waveform has samples that are NaN or infinite, but must be finite"
        )
    if np.abs(waveform).max() > 1:  # the same text each time, which Python shows once
        warnings.warn(
            "Waveforms have samples beyond [-1, 1], which are clipped: divide them by their peak.",
            ClippedWaveform,
            stacklevel=2,
        )
    return waveform.mean(axis=0, keepdims=True).clip(-1, 1)


class ClippedWaveform(UserWarning):
    """A waveform has samples beyond [-1, 1]."""


def parse_captions(fields: Fields, takes_token_ids: bool) -> list[str]:
    """Return the captions; token ids become a string of numbers without the zeros of padding."""
    if takes_token_ids != ("token ids" in fields):
        found, expected = ("token ids", "strings")
        if takes_token_ids:
            found, expected = expected, found
        raise UnreadableFile(
            f"its text is given as {found}, but the text encoder takes {expected}: give "
            f"{expected}, or build the model with another text encoder"
        )
    if takes_token_ids:
        token_ids = torch.as_tensor(fields["token ids"]).tolist()
        while token_ids and token_ids[-1] == 0:
            token_ids.pop()
        captions = [" ".join(map(str, token_ids))]
    else:
        text = fields["text"]
        texts = text if isinstance(text, (list, tuple)) else [text]
        captions = [one for one in texts if isinstance(one, str)]
        if len(captions) < len(texts):
            raise UnreadableFile("its text must be a string or a list of strings, and is not")
    captions = [" ".join(caption.split()) for caption in captions if caption.strip()]
    if not captions:
        raise UnreadableFile("its text is empty, but training needs a caption")
    return captions
