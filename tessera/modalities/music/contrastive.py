"""The contrastive objective for music and text."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from tessera.engine.task import Batch
from tessera.modalities.audio.media import Audio
from tessera.modalities.music.media import MusicBatch
from tessera.modalities.music.mulan import MuLaNConfig
from tessera.modalities.music.similarity_sheet import SimilarityRow
from tessera.objectives.contrastive import ContrastiveConfig


@dataclass(frozen=True, kw_only=True)
class MusicContrastiveConfig(ContrastiveConfig):
    model: MuLaNConfig = field(default_factory=MuLaNConfig)

    def show(
        self, batch: Batch[MusicBatch], media_BD: Tensor, text_BD: Tensor
    ) -> list[SimilarityRow]:
        """Return one row of the similarity sheet for each example."""
        examples = batch.examples
        samples, lengths = examples.samples.cpu().float().numpy(), examples.lengths.tolist()
        audio = [
            Audio(one[:, : max(1, length)], examples.rate_hz)
            for one, length in zip(samples, lengths, strict=True)
        ]
        embeddings = (one.cpu().numpy() for one in (media_BD, text_BD))
        rows = zip(batch.names, examples.captions, audio, *embeddings, strict=True)
        return [SimilarityRow(*row) for row in rows]
