"""Reconstruction of audio features from semantic tokens: adapter, metrics and images.

Nothing can be played from semantic tokens. The model's output are features as decoded from the
tokens and as computed from the audio, (B, T, 2, D).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tessera.engine.task import Batch, BestMetric, DataSettings
from tessera.metrics.codebook import codebook_bits
from tessera.modalities.audio.ctc import CTCTokenizerConfig
from tessera.modalities.audio.hubert import HubertTokenizerConfig
from tessera.modalities.audio.hubert_task import HubertTask
from tessera.modalities.audio.media import AudioBatch
from tessera.modalities.audio.recognition import CTCTask, RecognitionConfig
from tessera.modalities.audio.reconstruction import WaveformAdapter
from tessera.modalities.audio.semantic import SemanticConfig
from tessera.modalities.image.media import Image
from tessera.objectives.reconstruction import (
    ReconstructionConfig,
    ReconstructionLoss,
    TokenizerConfig,
    TokenizerTask,
)

if TYPE_CHECKING:
    from tessera.modalities.audio.dataset import AudioDataConfig

FRAME_PIXELS, ROW_PIXELS = 4, 8
"""The pixels of one frame and of one feature in an image."""
MAX_DEVIATION = 2.5
"""The number of standard deviations at which a feature is drawn black or white."""


class SemanticAdapter(WaveformAdapter):
    def prepare_inputs(self, examples: AudioBatch) -> dict[str, list[int]]:
        """Return lengths by which examples are grouped, before they are on a device."""
        return {"lengths": examples.lengths.tolist()}

    def to_media(self, output: Tensor) -> list[Image]:
        """Draw features (B, T, D): time from left to right, one row for each feature."""
        features = output.float().cpu().numpy()
        return [draw_features(features_TD, features_TD) for features_TD in features]

    def show_pairs(self, output: Tensor, batch: Batch[AudioBatch]) -> list[Image]:
        """Return the features of each example side by side with those decoded from its tokens."""
        rows = zip(output.detach().float().cpu(), valid_frames(output).cpu(), strict=True)
        features = [pair_T2D[valid_T].numpy() for pair_T2D, valid_T in rows]
        return [
            Image.side_by_side(
                draw_features(one[:, 1], one[:, 1]), draw_features(one[:, 0], one[:, 1])
            )
            for one in features
        ]


@dataclass(frozen=True, kw_only=True)
class SemanticReconstructionConfig(ReconstructionConfig):
    """The loss is the k-means distance, which the model returns as a penalty."""

    def build(self) -> SemanticReconstructionLoss:
        return SemanticReconstructionLoss()


class SemanticReconstructionLoss(ReconstructionLoss):
    best_metric = BestMetric(name="explained_variance")

    def losses(self, output: Tensor, batch: Batch[AudioBatch]) -> dict[str, Tensor]:
        return {}

    def eval_step(self, output: Tensor, batch: Batch[AudioBatch]) -> dict[str, Tensor]:
        """Return the squared errors of each feature and the sums for its variance."""
        decoded_PD, features_PD = output[valid_frames(output)].double().unbind(1)
        examples = batch.examples
        return {
            "frames": torch.tensor(len(features_PD), device=output.device),
            "squared_error": (decoded_PD - features_PD).square().sum(0),
            "sum": features_PD.sum(0),
            "square": features_PD.square().sum(0),
            "seconds": examples.lengths.double().sum() / examples.rate_hz,
        }

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        variance_D = totals["square"] - totals["sum"].square() / totals["frames"]
        explained_D = 1 - totals["squared_error"] / variance_D.clamp_min(1e-12)
        return {
            "explained_variance": float(explained_D.mean()),
            "bits_per_second": float(codebook_bits(totals["codes"]) / totals["seconds"]),
        }


def valid_frames(output: Tensor) -> Tensor:
    """Return which frames hold a valid sample, (B, T); features after the end are not finite."""
    return output[:, :, 1].isfinite().all(-1)


def draw_features(features_TD: np.ndarray, reference_TD: np.ndarray) -> Image:
    """Draw features in grey levels relative to the mean of the reference."""
    std_D = np.maximum(reference_TD.std(0), 1e-6)
    deviation_TD = (features_TD - reference_TD.mean(0)) / std_D / MAX_DEVIATION
    levels_DT = deviation_TD.clip(-1, 1).T
    pixels = levels_DT.repeat(ROW_PIXELS, 0).repeat(FRAME_PIXELS, 1)
    return Image.from_floats(np.broadcast_to(pixels, (3, *pixels.shape)))


@dataclass(frozen=True, kw_only=True)
class SemanticTokenizerConfig(TokenizerConfig):
    model: SemanticConfig | CTCTokenizerConfig | HubertTokenizerConfig = field(
        default_factory=SemanticConfig
    )
    reconstruction: SemanticReconstructionConfig | RecognitionConfig = field(
        default_factory=SemanticReconstructionConfig
    )
    adversary: None = None
    """Semantic tokenizers have no discriminator."""

    @property
    def uses_captions(self) -> bool:
        """A recogniser is trained on captions that are transcripts."""
        return isinstance(self.model, CTCTokenizerConfig)

    def validate_data(self, data: DataSettings) -> None:
        super().validate_data(data)
        if self.uses_captions:
            check_transcripts(data)

    def notice(self, data: DataSettings) -> str:
        rate_hz = self.model.rate_hz / self.model.hop
        tokens = f"{rate_hz:g} tokens per second, vocabulary size {self.model.vocab_size}."
        return f"{tokens} {super().notice(data)}".strip()

    def describe_missing_captions(self, missing: int, total: int) -> str:
        return (
            f"{missing:,} of {total:,} recordings have no transcript: the codebook is trained on "
            "them, and the text is not."
        )

    def build_adapter(self) -> SemanticAdapter:
        return SemanticAdapter()

    def build(self, **dependencies: object) -> TokenizerTask:
        if isinstance(self.model, HubertTokenizerConfig):
            return HubertTask(self)
        return CTCTask(self) if self.uses_captions else TokenizerTask(self)


def check_transcripts(data: AudioDataConfig) -> None:
    """Raise ValueError unless the captions of these data are what is said in the examples."""
    if data.path is None and data.synthetic_content != "speech":
        raise ValueError(
            "The captions of this synthetic audio describe it and are not what is said: use "
            "--data.synthetic-content speech, or recordings with transcripts (--data PATH)."
        )
    if data.path is not None and data.on_long != "skip":
        raise ValueError(
            "A transcript belongs to a whole recording, and longer recordings would be cut: use "
            "--data.on-long skip, and --data.seconds for the length of the longest one."
        )
