"""Sounds that a caller has in memory, as sources: waves, or pairs of symbols that are written
already.

A pair is a tuple (semantic, acoustic) or a dictionary: whole numbers (t,) that say what is said,
and (T, L), the symbols of a codec, the coarsest level first. Either may end in -1, which is
padding. What was given is read and never written to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tessera.data.errors import UnreadableFile
from tessera.data.tokens import TokenizedBatch, TokenizedExample, collate
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.external_tokens import TokenStream, TokenStreams
from tessera.modalities.audio.media import AudioBatch, AudioExample, normalize_loudness, pad_samples
from tessera.modalities.audio.media import collate as collate_sounds
from tessera.run.config import did_you_mean
from tessera.trainers.in_memory_music import wave_of

Field = Literal["semantic", "acoustic"]
NAMES: dict[str, Field] = {
    "semantic": "semantic",
    "semantic_token_ids": "semantic",
    "cond_semantic_token_ids": "semantic",
    "acoustic": "acoustic",
    "acoustic_token_ids": "acoustic",
}
"""What the values of a dictionary may be called, the names of the research code among them."""


@dataclass(frozen=True)
class InMemoryTokenPairs:
    """The source: somebody's own symbols. Where a sound has ended they are -1, up to the length of
    the longest."""

    items: Sequence[Any]
    streams: TokenStreams

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return f"pair-{index:06d}"

    def caption(self, index: int) -> str:
        return ""

    def item(self, index: int, rng: np.random.Generator) -> TokenizedExample:
        fields, name = fields_of(self.items[index], self.name(index)), self.name(index)
        semantic_t = token_spec(
            fields["semantic"], self.streams.semantic, f"{name}: its semantic symbols"
        )
        acoustic_TL = token_spec(
            fields["acoustic"], self.streams.acoustic, f"{name}: its acoustic symbols"
        )
        heard, said, max_len = len(acoustic_TL), len(semantic_t), self.streams.acoustic.frames
        if not self.streams.same_duration(heard, said):
            raise UnreadableFile(
                f"{name}: its two streams are not of the same time, acoustic and semantic symbols last "
                f"{self.streams.describe_durations(heard, said)}: cut both where the sound ends, or say how long a frame of each lasts"
            )
        if heard > max_len:
            raise UnreadableFile(
                f"{name}: it has {heard} frames, but the model was built for at most {max_len}: cut it, or build for more"
            )
        codes = {
            "tokenizer": ended(acoustic_TL, max_len),
            "semantic": ended(semantic_t, self.streams.semantic.frames),
        }
        return TokenizedExample(codes, "")

    def collate(self, examples: list[TokenizedExample]) -> TokenizedBatch:
        return collate(examples)


def fields_of(item: Any, name: str) -> dict[Field, Any]:
    """Both streams of a pair, under their names."""
    if isinstance(item, Mapping):
        for key in item:
            if key not in NAMES:
                raise UnreadableFile(f"{name}: it has {key!r}{did_you_mean(str(key), NAMES)}")
        fields = {NAMES[key]: value for key, value in item.items()}
    elif isinstance(item, (tuple, list)) and len(item) == 2:
        fields = {"semantic": item[0], "acoustic": item[1]}
    else:
        met = (
            f"{len(item)} values" if isinstance(item, (tuple, list)) else f"a {type(item).__name__}"
        )
        raise UnreadableFile(
            f"{name}: it is {met}, but an item is a pair, (semantic, acoustic). For waves, say which runs write them as "
            "symbols: tokenizer=RUN, semantic=RUN"
        )
    for field in ("semantic", "acoustic"):
        if field not in fields:
            raise UnreadableFile(f"{name}: it has no {field} symbols")
    return fields


def token_spec(value: Any, stream: TokenStream, whose: str) -> Tensor:
    """(T,), or (T, L) of a stream with levels, without the -1 at its end."""
    try:
        tokens = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnreadableFile(f"{whose} are no tensor of whole numbers: {error}") from None
    wanted = "(frames,)" if stream.num_quantizers == 1 else f"(frames, {stream.num_quantizers})"
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise UnreadableFile(f"{whose} are {tokens.dtype}, but symbols are whole numbers {wanted}")
    if stream.num_quantizers == 1 and tokens.ndim == 2 and tokens.shape[1] == 1:
        tokens = tokens[:, 0]
    if tokens.ndim != (1 if stream.num_quantizers == 1 else 2) or tokens.shape[1:] != (
        (stream.num_quantizers,) if stream.num_quantizers > 1 else ()
    ):
        turned = ": turn it over" if tokens.ndim == 2 and tokens.shape[0] == stream.num_quantizers else ""
        raise UnreadableFile(
            f"{whose} are {tuple(tokens.shape)}, but the model was built for {wanted}{turned}"
        )
    real = (tokens >= 0).reshape(len(tokens), -1).any(1).nonzero()
    tokens = tokens[: int(real[-1]) + 1 if len(real) else 0].long()
    if not len(tokens):
        raise UnreadableFile(f"{whose} are none at all")
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= stream.vocab_size:
        raise UnreadableFile(
            f"{whose} are numbers from {lowest} to {highest}, but there are those from 0 to {stream.vocab_size - 1}"
        )
    return tokens


def ended(tokens: Tensor, frames: int) -> Tensor:
    """Of so many frames: -1 where there are no more, or the last ones cut off."""
    whole = tokens.new_full((frames, *tokens.shape[1:]), -1)
    whole[: len(tokens)] = tokens[:frames]
    return whole


@dataclass(frozen=True)
class InMemoryWaves:
    """The source: somebody's own waves, (samples,) or (channels, samples) at the codec's rate; of
    longer ones the middle."""

    items: Sequence[Any]
    data: AudioDataConfig

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return f"wave-{index:06d}"

    def caption(self, index: int) -> str:
        return ""

    def signature(self, index: int) -> str:
        """Changes when the wave does."""
        try:
            samples = self.item(index, np.random.default_rng(0)).samples
        except UnreadableFile:
            return "unusable"
        return hashlib.blake2b(samples.tobytes(), digest_size=16).hexdigest()

    def item(self, index: int, rng: np.random.Generator) -> AudioExample:
        item, name = self.items[index], self.name(index)
        value = item[0] if isinstance(item, (tuple, list)) and len(item) == 1 else item
        if (
            not isinstance(value, (Tensor, np.ndarray))
            or not torch.as_tensor(value).is_floating_point()
        ):
            met = (
                str(value.dtype)
                if isinstance(value, (Tensor, np.ndarray))
                else type(value).__name__
            )
            raise UnreadableFile(
                f"{name}: it is {met}, but a wave is a tensor of floats. For pairs of symbols leave tokenizer and semantic out"
            )
        wave = wave_of(value, name)
        first = max(0, wave.shape[1] - self.data.length) // 2
        cut = normalize_loudness(wave[:, first : first + self.data.length], self.data.loudness_db)
        return AudioExample(pad_samples(cut, self.data.length), cut.shape[1], self.data.rate_hz, "")

    def collate(self, examples: list[AudioExample]) -> AudioBatch:
        return collate_sounds(examples)
