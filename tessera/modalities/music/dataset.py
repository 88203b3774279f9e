"""Music with captions: examples as in `modalities/audio/dataset.py`, with a random one of their
captions.

An example can have several captions: the lines of its name.txt, a list in metadata.jsonl, or
phrases made from tags. Examples without a caption are left out of training, and the run reports
their number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tessera.data.collection import NO_CAPTION
from tessera.data.dataset import FileDataset, Split, choose_caption
from tessera.modalities.audio.dataset import AudioDataConfig, AudioFolderDataset
from tessera.modalities.audio.media import pad_samples
from tessera.modalities.music.media import MusicBatch, MusicExample, collate
from tessera.modalities.music.synthetic import SyntheticMusic
from tessera.run.errors import UserError

MIN_PAIRS = 2


@dataclass(frozen=True, kw_only=True)
class MusicDataConfig(AudioDataConfig):
    lines: bool = True
    """Whether each line of a name.txt is a caption of its own, or the whole file is one."""

    def synthetic_dataset(self) -> SyntheticMusic:  # type: ignore[override]
        return SyntheticMusic(
            self.num_synthetic,
            samples=self.length,
            rate_hz=self.rate_hz,
            loudness_db=self.loudness_db,
            seed=self.synthetic_seed,
        )

    def folder_dataset(self) -> MusicFolderDataset:
        """Return all files, with and without captions."""
        return MusicFolderDataset(self.find_files(), self)

    def split_files(self, dataset: FileDataset) -> Split:
        """Split the files that have captions."""
        assert isinstance(dataset, MusicFolderDataset)
        captioned = dataset.captioned_indices()
        if len(captioned) < MIN_PAIRS:
            raise UserError(
                f"{self.path} has {len(dataset):,} audio file(s), {len(captioned)} of them with a "
                f"caption, but training needs {MIN_PAIRS} or more: put name.txt beside each file, "
                "or a metadata.jsonl with file_name and text or tags."
            )
        split = super().split_files(dataset.select(captioned))
        missing = len(dataset) - len(captioned)
        assert isinstance(split.train, MusicFolderDataset)
        return Split(replace(split.train, num_without_caption=missing), split.validation)

    def collate(self, examples: list[MusicExample]) -> MusicBatch:  # type: ignore[override]
        longest = max(example.samples.shape[1] for example in examples)
        return collate(
            [replace(one, samples=pad_samples(one.samples, longest)) for one in examples]
        )

    def example_from_media(self, media: object) -> MusicExample:
        return MusicExample(**vars(super().example_from_media(media)))


@dataclass(frozen=True)
class MusicFolderDataset(AudioFolderDataset):
    config: MusicDataConfig
    num_without_caption: int = 0

    def all_captions(self, index: int) -> list[str]:
        return self.files.captions(index, lines=self.config.lines)

    def captioned_indices(self) -> list[int]:
        return [i for i in range(len(self)) if self.files.caption_source(i) != NO_CAPTION]

    def item(self, index: int, rng: np.random.Generator) -> MusicExample:
        """Draw a random number for the start and, if there are several, one for the caption."""
        example = self.load_example(index, rng)
        captions = self.all_captions(index)
        return MusicExample(
            example.samples,
            example.length,
            example.rate_hz,
            choose_caption(captions, rng),
            tags=self.files.tags(index),
            caption_set=tuple(captions),
        )

    def collate(self, examples: list[MusicExample]) -> MusicBatch:  # type: ignore[override]
        return collate(examples)
