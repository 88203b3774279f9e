"""Semantic tokens: one token per frame for what is said, by k-means over audio features.

See HuBERT (Hsu 2021, arXiv 2106.07447, section II-A) and AudioLM (Borsos 2022, arXiv 2209.03143,
section III-B). The centroids are the codebook of a VQ layer (`nn/quantize/vq.py`), which is
initialized by k-means and then updated by exponential moving averages. This is k-means over all
batches, with the guarantees that the engine gives for codebooks. Only a small convolution is
trained by gradient descent: it predicts the features of a frame from the centroids of the frame and
its neighbours, which indicate where in its cell a frame lies. It is initialized to the identity.

The distances of k-means depend on the scale of each feature, so features are first normalized to
mean 0 and standard deviation 1. Both are measured over the first steps and then fixed. The codebook
is initialized only after that, so no centroid moves because the scale changed.

Audio is (B, 1, N), codes are (B, T) with T = N / hop, rounded up, and -1 in frames of padding.
`decode` returns features, not audio; a generator of audio uses the tokens as its condition.

B batch, N samples, T frames, D feature dimension, P frames with real samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor, nn

from tessera.modalities.audio.features import (
    AudioFeatures,
    MFCCFeaturesConfig,
    SpeechFeaturesConfig,
    VoiceFeaturesConfig,
    num_frames,
)
from tessera.modalities.audio.tokenizer import (
    AudioTokenizer,
    FrameConfig,
    check_audio_batch,
    check_not_empty,
)
from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.quantize import VQ, ProcessGroup, VQConfig
from tessera.nn.reconstruction import Reconstruction

if TYPE_CHECKING:
    from tessera.modalities.audio.dataset import AudioDataConfig


@dataclass(frozen=True, kw_only=True)
class SemanticConfig:
    features: MFCCFeaturesConfig | SpeechFeaturesConfig | VoiceFeaturesConfig = field(
        default_factory=MFCCFeaturesConfig
    )
    """The features that are clustered."""
    vocab_size: int = 256
    """Number of centroids: the k of k-means."""
    normalization_steps: int = 20
    """Steps over which the mean and the standard deviation of the features are measured before the
    codebook is initialized."""
    context: int = 5
    """Number of frames whose centroids predict the features of the middle frame. It must be odd; 1
    uses only the centroid of the frame itself."""
    decay: float = 0.99
    """Decay of the exponential moving average of the centroids."""
    expire_below: float = 0.1
    """Replace centroids that are used less than this fraction of an even share; 0 never replaces
    them."""

    def __post_init__(self) -> None:
        if self.normalization_steps < 1:
            raise ValueError(
                f"normalization_steps must be at least 1, but got {self.normalization_steps}."
            )
        if self.context < 1 or self.context % 2 == 0:
            raise ValueError(f"context must be an odd number of frames, but got {self.context}.")
        self.vq_config(1)

    @property
    def hop(self) -> int:
        """Samples per token."""
        return self.features.hop

    @property
    def rate_hz(self) -> int:
        """Sampling rate of the audio."""
        return self.features.rate_hz

    def vq_config(self, dim: int) -> VQConfig:
        return VQConfig(
            codebook_size=self.vocab_size,
            code_dim=dim,
            normalised=False,
            decay=self.decay,
            commitment_weight=0.0,
            expire_below=self.expire_below,
        )

    def validate_data(self, data: AudioDataConfig) -> None:
        """Raise ValueError unless the examples are mono, of this rate, and at least a frame."""
        data.check_mono("A semantic tokenizer")
        if data.rate_hz != self.rate_hz:
            raise ValueError(
                f"The data has a rate of {data.rate_hz} Hz, but the features need {self.rate_hz} "
                f"Hz: use --data.rate-hz {self.rate_hz}."
            )
        if data.length < self.hop:
            raise ValueError(
                f"Examples of {data.length} samples are shorter than one frame of {self.hop} "
                "samples: use longer examples."
            )

    def fit_data(self, data: AudioDataConfig) -> Self:
        """Return the configuration at the rate of the data; the token rate stays the same.

        Pretrained features have a fixed sampling rate.
        """
        if not isinstance(self.features, MFCCFeaturesConfig):
            return self
        return replace(self, features=replace(self.features, rate_hz=data.rate_hz))

    def grid(self, data: AudioDataConfig) -> tuple[int, ...]:
        """Return the shape of the token grid of one example: (frames,)."""
        return (num_frames(data.length, self.hop),)

    def build(self) -> SemanticTokenizer:
        return SemanticTokenizer(self)


@dataclass
class FeatureReconstruction(Reconstruction):
    """`output` is (B, T, 2, D): features predicted from the tokens, and the features themselves,
    which are NaN in frames of padding."""

    distance_B: Tensor
    """Mean squared error over the real frames, in normalized features. With a single centroid it
    would be about 1."""


class RateConfig(FrameConfig, Protocol):
    """A configuration with a frame size and a sampling rate."""

    @property
    def rate_hz(self) -> int: ...


class FrameTokenizer(AudioTokenizer):
    """Base class of semantic tokenizers, which have one token for each frame.

    A subclass defines `encode_latents`, whose result its codebook quantizes.
    """

    config: RateConfig
    quantizer: VQ

    @property
    def rate_hz(self) -> int:
        return self.config.rate_hz

    def encode_latents(self, samples: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return latents (B, T, C) and the mask (B, T) of frames with real samples."""
        raise NotImplementedError

    @torch.no_grad()
    def encode(self, samples: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Encode (B, 1, N) as codes (B, T), with -1 in frames of padding."""
        latent_BTC, mask_BT = self.encode_latents(samples, lengths_B)
        with full_precision(samples.device.type):
            codes_BT = torch.full(mask_BT.shape, -1, device=samples.device)
            codes_BT[mask_BT] = self.quantizer.nearest(latent_BTC[mask_BT])
        return codes_BT

    def check_codes(self, codes: Tensor) -> None:
        """Raise ValueError unless codes are (B, T)."""
        if codes.ndim != 2:
            raise ValueError(
                "Codes of a semantic tokenizer have the shape (batch, frames), but got "
                f"{tuple(codes.shape)}."
            )


class SemanticTokenizer(FrameTokenizer):
    config: SemanticConfig

    def __init__(self, config: SemanticConfig):
        super().__init__()
        self.config = config
        self.features: AudioFeatures = config.features.build()
        dim = self.features.dim
        self.normalizer = FeatureNormalizer(dim, config.normalization_steps)
        self.quantizer: VQ = config.vq_config(dim).build(dim)
        self.context_conv = nn.Conv1d(dim, dim, config.context, padding=config.context // 2)
        nn.init.dirac_(self.context_conv.weight)
        nn.init.zeros_(self.context_conv.bias)  # type: ignore[arg-type]

    def forward(
        self,
        samples: Tensor,
        lengths_B: Tensor | None = None,
        *,
        lengths: Sequence[int] | None = None,
    ) -> FeatureReconstruction:
        """Tokenize a batch; the only loss term is the mean of `distance_B`.

        Args:
            samples: (B, 1, N).
            lengths_B: Number of real samples of each example.
            lengths: The same as numbers of Python, which need not be read from a device.
        """
        features_BTD, mask_BT = self.extract_features(samples, lengths_B, lengths)
        with full_precision(samples.device.type):
            self.normalizer.accumulate_stats(features_BTD, mask_BT)
            rows_BTD = self.normalizer(features_BTD)
            quantized = self.quantizer(rows_BTD, mask_BT)
            if not self.normalizer.is_ready:
                # Rows at another scale must not initialize the codebook.
                self.quantizer.rollback()
            predicted_BTD = self.predict(quantized.latent)
            distance_BT = (predicted_BTD - rows_BTD).square().mean(-1)
            distance_B = masked_mean_B(distance_BT, mask_BT)
        codes_BT = quantized.codes.masked_fill(~mask_BT, -1)
        target_BTD = features_BTD.masked_fill(~mask_BT[..., None], torch.nan)
        output_BT2D = torch.stack([self.normalizer.denormalize(predicted_BTD), target_BTD], dim=2)
        return FeatureReconstruction(
            output_BT2D, codes_BT, {"distance": distance_B.mean()}, distance_B.detach()
        )

    def encode_latents(self, samples: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        features_BTD, mask_BT = self.extract_features(samples, lengths_B)
        return self.normalizer(features_BTD), mask_BT

    def decode(self, codes: Tensor) -> Tensor:
        """Decode (B, T) to features (B, T, D); -1 marks padding."""
        self.check_codes(codes)
        with full_precision(codes.device.type):
            latent_BTD = self.quantizer.decode(codes.clamp_min(0)) * (codes >= 0).unsqueeze(-1)
            return self.normalizer.denormalize(self.predict(latent_BTD))

    def extract_features(
        self, samples: Tensor, lengths_B: Tensor | None, lengths: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return features (B, T, D) and the mask (B, T) of frames with real samples."""
        check_audio_batch(samples)
        check_not_empty(samples.shape[2])
        features_BTD = self.features(samples, lengths_B if lengths is None else lengths)
        if lengths_B is None:
            lengths_B = torch.full(samples.shape[:1], samples.shape[2])
        return features_BTD, self.frame_mask(lengths_B.to(samples.device), features_BTD.shape[1])

    def predict(self, latent_BTD: Tensor) -> Tensor:
        """Predict normalized features from the centroids of neighbouring frames."""
        return self.context_conv(to_fp32(latent_BTD).mT).mT


def masked_mean_B(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Average over the frames of each example, so that examples of all lengths count equally."""
    return (values_BT * mask_BT).sum(1) / mask_BT.sum(1).clamp_min(1)


class FeatureNormalizer(nn.Module):
    """Normalize features by their mean and standard deviation over the first training steps.

    Like a codebook, `forward` and `accumulate_stats` leave the state unchanged; `commit` adds the
    statistics of all processes.
    """

    def __init__(self, dim: int, steps: int):
        super().__init__()
        self.steps = steps
        self.stats: Tensor | None = None
        self._is_ready = False
        self.register_buffer("steps_done", torch.zeros((), dtype=torch.long))
        self.register_buffer("totals", torch.zeros(3, dim))
        self.steps_done: Tensor
        self.totals: Tensor
        """Number of frames, sum and sum of squares of each feature."""

    @property
    def is_ready(self) -> bool:
        """Whether the statistics are final; read until they are, since reading waits."""
        if self.steps_done.is_meta:  # of a plan, which has no values
            return True
        self._is_ready = self._is_ready or int(self.steps_done) >= self.steps
        return self._is_ready

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._is_ready = False

    def forward(self, features: Tensor) -> Tensor:
        mean_D, std_D = self.mean_and_std()
        return (features - mean_D) / std_D

    def denormalize(self, rows: Tensor) -> Tensor:
        mean_D, std_D = self.mean_and_std()
        return rows * std_D + mean_D

    def mean_and_std(self) -> tuple[Tensor, Tensor]:
        """Return 0 and 1 before the first commit; the variance is at least 1e-6 after it."""
        count_D, sum_D, square_D = to_fp32(self.totals)
        mean_D = sum_D / count_D.clamp_min(1)
        variance_D = square_D / count_D.clamp_min(1) - mean_D.square()
        return mean_D, torch.where(count_D > 0, variance_D.clamp_min(1e-6).sqrt(), 1.0)

    def accumulate_stats(self, features_BTD: Tensor, mask_BT: Tensor) -> None:
        """Add the features of frames where the mask is True."""
        if not self.training or self.is_ready:
            return
        mask_BT1 = mask_BT[..., None]
        masked_BTD = features_BTD.where(mask_BT1, features_BTD.new_zeros(()))
        count_D = mask_BT.sum().to(features_BTD).expand(features_BTD.shape[2])
        stats = torch.stack([count_D, masked_BTD.sum((0, 1)), masked_BTD.square().sum((0, 1))])
        self.stats = stats if self.stats is None else self.stats + stats

    def rollback(self) -> None:
        """Discard the statistics of a skipped step."""
        self.stats = None

    @torch.no_grad()
    def commit(self, dist: ProcessGroup, step: int) -> None:
        """Add the statistics of all processes."""
        if self.stats is None:
            return
        self.totals += dist.all_reduce_sum(self.stats).to(self.totals)
        self.steps_done += 1
        self.rollback()
