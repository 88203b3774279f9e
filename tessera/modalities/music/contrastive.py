"""What the contrastive task has to know of music: which networks it can be, and how a clip is
shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tessera.modalities.audio.media import Audio
from tessera.modalities.music.mulan import MuLaNConfig
from tessera.objectives.contrastive import ContrastiveConfig


@dataclass(frozen=True, kw_only=True)
class MusicContrastiveConfig(ContrastiveConfig):
    model: MuLaNConfig = field(default_factory=MuLaNConfig)

    def shown(self, examples: Any) -> list[Audio]:
        """Of each clip what is real."""
        samples = examples.samples.cpu().float().numpy()
        lengths = examples.lengths.tolist()
        return [
            Audio(one[:, : max(1, length)], examples.rate_hz)
            for one, length in zip(samples, lengths, strict=True)
        ]
