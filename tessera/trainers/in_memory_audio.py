"""Audio in memory as datasets: waveforms, or pairs of tokens that were computed elsewhere.

A pair is a tuple (semantic, acoustic), or in the other order if their dimensions differ, or a
dictionary. Semantic tokens are integers (t,), acoustic tokens are the codes of a codec (T, L), the
coarsest quantizer first. Both may end in -1, which is padding. The given objects are never
modified.

T frames, L quantizers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.data.dataset import ExampleDataset
from tessera.data.errors import UnreadableFile
from tessera.data.tokens import TokenizedBatch, TokenizedExample, collate
from tessera.modalities.audio import media
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.external_tokens import TokenStream, TokenStreams
from tessera.modalities.audio.media import AudioBatch, AudioExample, normalize_loudness, pad_samples
from tessera.run.config import did_you_mean
from tessera.trainers.in_memory_music import to_waveform

Field = Literal["semantic", "acoustic"]
FIELDS: dict[str, Field] = {
    "semantic": "semantic",
    "semantic_token_ids": "semantic",
    "cond_semantic_token_ids": "semantic",
    "acoustic": "acoustic",
    "acoustic_token_ids": "acoustic",
}
"""The keys that a dictionary may have, those of the research package among them."""


@dataclass(frozen=True)
class InMemoryTokenPairs(ExampleDataset):
    """Pairs of semantic and acoustic tokens, padded with -1 to the length of their streams."""

    items: Sequence[object]
    streams: TokenStreams

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return f"pair-{index:06d}"

    def item(self, index: int, rng: np.random.Generator) -> TokenizedExample:
        streams = self.streams
        fields = parse_pair(self.items[index])
        semantic_t = parse_tokens(fields["semantic"], streams.semantic, "the semantic tokens")
        acoustic_TL = parse_tokens(fields["acoustic"], streams.acoustic, "the acoustic tokens")
        frames, max_frames = len(acoustic_TL), streams.acoustic.frames
        if not streams.same_duration(frames, len(semantic_t)):
            durations = streams.describe_durations(frames, len(semantic_t))
            raise UnreadableFile(
                f"the acoustic and the semantic tokens have different durations, {durations}: cut "
                "both where the audio ends, or correct the seconds per frame of their streams"
            )
        if frames > max_frames:
            raise UnreadableFile(
                f"it has {frames} frames, but the model was built for at most "
                f"{max_frames}: cut it, or build the model for more"
            )
        codes = {
            "tokenizer": fit_frames(acoustic_TL, max_frames),
            "semantic": fit_frames(semantic_t, streams.semantic.frames),
        }
        return TokenizedExample(codes, "")

    def collate(self, examples: list[TokenizedExample]) -> TokenizedBatch:
        return collate(examples)


def parse_pair(item: object) -> dict[Field, object]:
    """Return both fields of a pair, or raise UnreadableFile."""
    fields: dict[Field, object]
    if isinstance(item, Mapping):
        for key in item:
            if key not in FIELDS:
                raise UnreadableFile(
                    f"it has the unknown key {key!r}{did_you_mean(str(key), FIELDS)}"
                )
        fields = {FIELDS[key]: value for key, value in item.items()}
    elif isinstance(item, (tuple, list)) and len(item) == 2:
        semantic, acoustic = item
        if np.ndim(semantic) == 2 and np.ndim(acoustic) == 1:
            semantic, acoustic = acoustic, semantic
        fields = {"semantic": semantic, "acoustic": acoustic}
    else:
        found = f"is a {type(item).__name__}"
        if isinstance(item, (tuple, list)):
            found = f"has {len(item)} value(s)"
        raise UnreadableFile(
            f"it {found}, but an item must be a pair (semantic, acoustic): give pairs, or "
            "for waveforms the runs that tokenize them (tokenizer=RUN, semantic=RUN)"
        )
    for field in ("semantic", "acoustic"):
        if field not in fields:
            raise UnreadableFile(f"it has no {field} tokens, but a pair needs both")
    return fields


def parse_tokens(value: object, stream: TokenStream, subject: str) -> Tensor:
    """Return token ids (T,), or (T, L) of a stream with several quantizers, without padding.

    `subject` starts the message of the UnreadableFile that is raised for anything else.
    """
    try:
        tokens = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnreadableFile(f"{subject} are not a tensor of integers: {error}") from None
    num_quantizers = stream.num_quantizers
    expected = "(frames,)" if num_quantizers == 1 else f"(frames, {num_quantizers})"
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise UnreadableFile(
            f"{subject} have the type {tokens.dtype}, but must be integers of shape {expected}"
        )
    if num_quantizers == 1 and tokens.ndim == 2 and tokens.shape[1] == 1:
        tokens = tokens[:, 0]
    ndim, last = (1, ()) if num_quantizers == 1 else (2, (num_quantizers,))
    if tokens.ndim != ndim or tokens.shape[1:] != last:
        is_transposed = tokens.ndim == 2 and tokens.shape[0] == num_quantizers
        raise UnreadableFile(
            f"{subject} have the shape {tuple(tokens.shape)}, but the model was built for "
            f"{expected}{': transpose them' if is_transposed else ''}"
        )
    valid = (tokens >= 0).reshape(len(tokens), -1).any(1).nonzero()
    tokens = tokens[: int(valid[-1]) + 1 if len(valid) else 0].long()
    if not len(tokens):
        raise UnreadableFile(f"{subject} are empty, but must have at least one frame")
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= stream.vocab_size:
        raise UnreadableFile(
            f"{subject} range from {lowest} to {highest}, but must be between 0 and "
            f"{stream.vocab_size - 1}"
        )
    return tokens


def fit_frames(tokens: Tensor, frames: int) -> Tensor:
    """Pad tokens (T, ...) at the end with -1, or cut them, to `frames` frames."""
    kept = tokens[:frames]
    return F.pad(kept, (0, 0) * (tokens.ndim - 1) + (0, frames - len(kept)), value=-1)


@dataclass(frozen=True)
class InMemoryWaveforms(ExampleDataset):
    """Waveforms (samples,) or (channels, samples) at the codec's rate, cut to their middle."""

    items: Sequence[object]
    data: AudioDataConfig

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return f"wave-{index:06d}"

    def signature(self, index: int) -> str:
        try:
            samples = self.item(index, np.random.default_rng(0)).samples
        except UnreadableFile:
            return "unreadable"
        return hashlib.blake2b(samples.tobytes(), digest_size=16).hexdigest()

    def item(self, index: int, rng: np.random.Generator) -> AudioExample:
        item, data = self.items[index], self.data
        value = item[0] if isinstance(item, (tuple, list)) and len(item) == 1 else item
        found, is_waveform = type(value).__name__, False
        if isinstance(value, (Tensor, np.ndarray)):
            found, is_waveform = str(value.dtype), torch.as_tensor(value).is_floating_point()
        if not is_waveform:
            raise UnreadableFile(
                f"its type is {found}, but a waveform must be a tensor of floats: give "
                "waveforms, or for pairs of tokens leave out `tokenizer` and `semantic`"
            )
        waveform = to_waveform(value)
        start = max(0, waveform.shape[1] - data.length) // 2
        cut = normalize_loudness(waveform[:, start : start + data.length], data.loudness_db)
        return AudioExample(pad_samples(cut, data.length), cut.shape[1], data.rate_hz, "")

    def collate(self, examples: list[AudioExample]) -> AudioBatch:
        return media.collate(examples)
