"""Examples and batches of music: audio with tags and the set of all captions of an example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.modalities.audio import media as audio
from tessera.modalities.audio.media import AudioBatch, AudioExample


@dataclass
class MusicExample(AudioExample):
    tags: tuple[str, ...] = ()
    """Words for the instrument, the tempo, the mood."""
    caption_set: tuple[str, ...] = ()
    """All captions of the example; examples with equal sets are not negatives of each other."""


@dataclass
class MusicBatch(AudioBatch):
    tags: list[tuple[str, ...]] = field(default_factory=list)
    caption_sets: list[tuple[str, ...]] = field(default_factory=list)


def collate(examples: Sequence[MusicExample]) -> MusicBatch:
    return MusicBatch(
        **vars(audio.collate(examples)),
        tags=[example.tags for example in examples],
        caption_sets=[example.caption_set or (example.caption,) for example in examples],
    )
