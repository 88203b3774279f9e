"""Clips of music with what is said about them: as sound (`modalities/audio/examples.py`), and with
tags beside the caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.modalities.audio import media as sound_examples
from tessera.modalities.audio.media import AudioBatch, AudioExample


@dataclass
class MusicExample(AudioExample):
    tags: tuple[str, ...] = ()
    """single words that hold: instrument, tempo, mood"""


@dataclass
class MusicBatch(AudioBatch):
    tags: list[tuple[str, ...]]


def collate(examples: Sequence[MusicExample]) -> MusicBatch:
    sounds = sound_examples.collate(examples)
    return MusicBatch(**vars(sounds), tags=[example.tags for example in examples])
