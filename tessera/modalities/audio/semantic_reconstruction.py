"""What the tokenizer task has to know of semantic tokens: how much of what was heard the symbols
tell, and how to show it.

Nothing can be played from them. What the model gives are features, as told by its symbols and as
heard: (B, T, 2, D).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.engine.task import Batch, BestMetric
from tessera.metrics.image import code_bits
from tessera.modalities.audio.reconstruction import WaveformReconstructionLoss
from tessera.modalities.audio.semantic import SemanticConfig
from tessera.modalities.image.media import Image
from tessera.objectives.reconstruction import TokenizerConfig

STEP, ROW = 4, 8
"""Pixels of one frame and of one feature in a picture."""
SPREAD = 2.5
"""How many standard deviations a feature may lie from its mean before it is drawn black or
white."""


@dataclass(frozen=True, kw_only=True)
class SemanticReconstructionConfig:
    """All there is to lose is the distance of k-means, which the model itself knows."""

    def validate_data(self, data: Any) -> None:
        """Sounds of any length can be measured."""

    def notice(self) -> str:
        return ""

    def for_inference(self) -> SemanticReconstructionConfig:
        return self

    def build(self) -> SemanticReconstructionLoss:
        return SemanticReconstructionLoss()


class SemanticReconstructionLoss(WaveformReconstructionLoss):
    best_metric = BestMetric(metric="explained_variance")

    def media(self, output: Tensor) -> list[Image]:
        """Features (B, T, D) as pictures: time from left to right, a row for each feature."""
        return [picture(features_TD, features_TD) for features_TD in output.float().cpu().numpy()]

    def terms(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """None beside the model's own."""
        return {}

    def eval_step(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """For each feature: the squares of what symbols miss, and what its variance over all frames
        is made of."""
        told_PD, heard_PD = output[real_frames(output, batch)].double().unbind(1)
        return {
            "frames": torch.tensor(len(heard_PD), device=output.device),
            "missed": (told_PD - heard_PD).square().sum(0),
            "sum": heard_PD.sum(0),
            "square": heard_PD.square().sum(0),
            "seconds": batch.examples.lengths.double().sum() / batch.examples.rate_hz,
        }

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        variance_D = totals["square"] - totals["sum"].square() / totals["frames"]
        explained_D = 1 - totals["missed"] / variance_D.clamp_min(1e-12)
        return {
            "explained_variance": float(explained_D.mean()),
            "bits_per_second": float(code_bits(totals["codes"]) / totals["seconds"]),
        }

    def shown(self, output: Tensor, batch: Batch) -> list[Image]:
        """What was heard beside what the symbols tell of it."""
        pairs = zip(output.detach().float().cpu(), real_frames(output, batch).cpu(), strict=True)
        features = [pair_T2D[real_T].numpy() for pair_T2D, real_T in pairs]
        return [
            Image.beside(picture(one[:, 1], one[:, 1]), picture(one[:, 0], one[:, 1]))
            for one in features
        ]


def real_frames(output: Tensor, batch: Batch) -> Tensor:
    """(B, T): which frames hold a real sample. Where a sound has ended, nothing was heard."""
    return output[:, :, 1].isfinite().all(-1)


def picture(features_TD: np.ndarray, like_TD: np.ndarray) -> Image:
    """Grey where a feature is at its mean over `like`, brighter above and darker below."""
    spread_D = np.maximum(like_TD.std(0), 1e-6)
    level_TD = ((features_TD - like_TD.mean(0)) / spread_D / SPREAD).clip(-1, 1)
    return Image.from_floats(
        np.broadcast_to(
            level_TD.T.repeat(ROW, 0).repeat(STEP, 1),
            (3, ROW * level_TD.shape[1], STEP * len(level_TD)),
        )
    )


@dataclass(frozen=True, kw_only=True)
class SemanticTokenizerConfig(TokenizerConfig):
    model: SemanticConfig = field(default_factory=SemanticConfig)
    reconstruction: SemanticReconstructionConfig = field(
        default_factory=SemanticReconstructionConfig
    )
    adversary: None = None
    """Nobody judges features: how far they are from what was heard can be counted."""
