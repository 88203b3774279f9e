"""Music with what is said about it: clips as `modalities/audio/dataset.py` cuts them, each with one
of its captions, drawn at each visit.

A clip may have several captions: the lines of its name.txt, or a list in metadata.jsonl; and tags,
which become captions as well (`data/captions.py`). What has no caption is not learnt from, and the
run says how many these are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tessera.data.dataset import Split
from tessera.data.discovery import find
from tessera.modalities.audio.dataset import AudioDataConfig, AudioFolderDataset
from tessera.modalities.audio.io.files import ENDINGS
from tessera.modalities.music.media import MusicBatch, MusicExample, collate
from tessera.modalities.music.synthetic import SyntheticMusic
from tessera.run.directory import UserError

FEWEST_PAIRS = 2


@dataclass(frozen=True, kw_only=True)
class MusicDataConfig(AudioDataConfig):
    lines: bool = True
    """Each line of a name.txt is a caption of its own; off: the whole file is one."""

    def synthetic_dataset(self) -> SyntheticMusic:
        return SyntheticMusic(
            self.toys,
            samples=self.length,
            rate_hz=self.rate_hz,
            loudness_db=self.loudness_db,
            seed=self.toy_seed,
        )

    def folder_dataset(self) -> MusicFolderDataset:
        """All clips, with captions and without."""
        return MusicFolderDataset.of(find(str(self.path), ENDINGS, "recordings"), self)

    def folder_split(self) -> Split:
        folder = self.folder_dataset()
        told = folder.told()
        if len(told) < FEWEST_PAIRS:
            raise UserError(
                f"Of {len(folder):,} recording(s) in {self.path} {len(told)} has a caption, and what belongs to what can be "
                f"learnt from {FEWEST_PAIRS} or more: put name.txt beside each file, or a metadata.jsonl with file_name and "
                "text or tags."
            )
        split = (
            super().folder_split() if len(told) == len(folder) else self.split_of(folder.only(told))
        )
        return Split(
            replace(split.train, without_caption=len(folder) - len(told)), split.validation
        )


@dataclass(frozen=True)
class MusicFolderDataset(AudioFolderDataset):
    config: MusicDataConfig
    without_caption: int = 0
    """clips that were left out because nothing is said about them"""

    def all_captions(self, index: int) -> list[str]:
        return self.captions.all_of(self.names[index], lines=self.config.lines)

    def told(self) -> list[int]:
        """The clips about which something is said."""
        return [
            index for index, name in enumerate(self.names) if self.captions.where(name) != "nowhere"
        ]

    def item(self, index: int, rng: np.random.Generator) -> MusicExample:
        """A draw for the beginning, and one for the caption where there are several."""
        sound = super().item(index, rng)
        return MusicExample(**vars(sound), tags=self.captions.tags.get(self.names[index], ()))

    def collate(self, examples: list[MusicExample]) -> MusicBatch:
        return collate(examples)
