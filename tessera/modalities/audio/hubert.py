"""Semantic tokens of a network that is trained to predict masked speech, without transcripts.

As in HuBERT (Hsu 2021, arXiv 2106.07447), k-means over MFCC gives each frame a target, spans of
frames are masked at the input, and a network predicts the targets of the masked frames from the
others. To do so it must model how speech continues, and its inner layer, clustered in turn, has
more of what is said and less of how it sounds than the MFCC. Here both clusterings are codebooks of
one training (`nn/quantize/vq.py`): that of the targets is fixed after its first steps, that of the
inner layer starts later, when the layer describes speech. Instead of samples the input are log-mel
bands that are normalized over each recording.

Audio is (B, 1, N), codes are (B, T) with T = N / hop, rounded up, and -1 in frames of padding.
`decode` returns MFCC, which a small convolution predicts from the tokens, for metrics and samples.

B batch, N samples, T frames, M mel bands, W model dimension, D dimension of the MFCC, K targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.modalities.audio.features import MFCCFeatures, MFCCFeaturesConfig
from tessera.modalities.audio.normalized_mel import (
    MEL_FRAMES_PER_TOKEN,
    WINDOW_SECONDS,
    MelTokenizer,
    MelTokenizerConfig,
)
from tessera.modalities.audio.semantic import (
    FeatureNormalizer,
    FeatureReconstruction,
    masked_mean_B,
)
from tessera.nn.conformer import ConformerConfig, ConvolutionBlock
from tessera.nn.delayed_start import DelayedStart
from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.quantize import VQ, VQConfig
from tessera.nn.quantize.geometry import l2_normalize
from tessera.nn.transformer import linear

FEATURE_CONTEXT = 5
"""Frames whose tokens predict the MFCC of the middle one."""


@dataclass(frozen=True, kw_only=True)
class HubertTokenizerConfig(MelTokenizerConfig):
    dim: int = 128
    """Dimension of all layers."""
    encoder_depth: int = 2
    """Number of convolution blocks."""
    encoder_kernel: int = 5
    """Frames of a convolution of these blocks."""
    context_depth: int = 4
    """Number of Conformer blocks after them."""
    context_kernel: int = 15
    """Frames of a convolution of a Conformer block."""
    heads: int = 4
    """Number of attention heads."""
    layer: int = 3
    """The number of Conformer blocks before the layer that is clustered. Later ones are closer to
    the targets."""
    num_targets: int = 100
    """Number of clusters of MFCC that are predicted."""
    normalization_steps: int = 20
    """Steps over which the mean and the standard deviation of the MFCC are measured."""
    target_steps: int = 200
    """Steps after which the clusters of MFCC are fixed."""
    mask_fraction: float = 0.5
    """The fraction of frames that are masked in training, about."""
    mask_seconds: float = 0.2
    """The length of a masked span."""
    vocab_size: int = 256
    """Number of tokens."""
    codebook_start: int = 1000
    """The step after which the inner layer is clustered."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dim", "context_depth", "heads", "normalization_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("encoder_depth", "target_steps", "codebook_start"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")
        if not 1 <= self.layer <= self.context_depth:
            raise ValueError(
                f"layer must be 1 to {self.context_depth}, the number of Conformer blocks, got "
                f"{self.layer}."
            )
        if not 0 < self.mask_fraction < 1:
            raise ValueError(f"mask_fraction must be between 0 and 1, got {self.mask_fraction}.")
        if not self.mask_seconds > 0:
            raise ValueError(f"mask_seconds must be above 0, got {self.mask_seconds}.")
        self.vq_config()
        self.target_config()

    @property
    def mask_frames(self) -> int:
        """Frames of a masked span."""
        return max(1, round(self.mask_seconds * self.token_rate_hz))

    def vq_config(self) -> VQConfig:
        return VQConfig(codebook_size=self.vocab_size, code_dim=self.dim, commitment_weight=0.0)

    def target_config(self) -> VQConfig:
        dim = 3 * self.mfcc_config().coefficients
        return VQConfig(
            codebook_size=self.num_targets, code_dim=dim, normalised=False, commitment_weight=0.0
        )

    def mfcc_config(self) -> MFCCFeaturesConfig:
        return MFCCFeaturesConfig(
            rate_hz=self.rate_hz,
            token_rate_hz=self.token_rate_hz,
            window_seconds=max(WINDOW_SECONDS, 1 / self.token_rate_hz),
        )

    def build(self) -> HubertTokenizer:
        return HubertTokenizer(self)


@dataclass
class MaskedPrediction:
    """The prediction of the targets of masked frames, as means over them, (B,) each."""

    cross_entropy_B: Tensor
    accuracy_B: Tensor


@dataclass
class HubertReconstruction(FeatureReconstruction):
    """`output` are the MFCC that are predicted from the tokens and the MFCC, (B, T, 2, D)."""

    prediction: MaskedPrediction | None = None
    """None without masked frames, or before there are targets."""


class HubertTokenizer(MelTokenizer):
    config: HubertTokenizerConfig

    def __init__(self, config: HubertTokenizerConfig):
        super().__init__()
        self.config = config
        self.mfcc: MFCCFeatures = config.mfcc_config().build()
        dim = self.mfcc.dim
        self.normalizer = FeatureNormalizer(dim, config.normalization_steps)
        self.targets: VQ = config.target_config().build(dim)
        self.targets_fixed = DelayedStart(config.target_steps)
        self.to_states = linear(MEL_FRAMES_PER_TOKEN * config.bands, config.dim)
        self.mask_embedding = nn.Parameter(torch.randn(config.dim) * 0.5)
        self.encoder = nn.ModuleList(
            ConvolutionBlock(config.encoder_kernel, config.dim) for _ in range(config.encoder_depth)
        )
        self.context = ConformerConfig(kernel=config.context_kernel).build(
            config.dim, config.context_depth, config.heads
        )
        self.head = linear(config.dim, config.num_targets)
        self.quantizer: VQ = config.vq_config().build(config.dim)
        self.start = DelayedStart(config.codebook_start)
        self.to_features = nn.Conv1d(config.dim, dim, FEATURE_CONTEXT, padding=FEATURE_CONTEXT // 2)

    def forward(
        self,
        samples: Tensor,
        lengths_B: Tensor | None = None,
        *,
        lengths: Sequence[int] | None = None,
        masked_BT: Tensor | None = None,
    ) -> HubertReconstruction:
        """Tokenize a batch, and predict the targets of masked frames if these are given.

        Args:
            samples: (B, 1, N).
            lengths_B: Number of real samples of each example.
            lengths: The same as numbers of Python, which need not be read from a device.
            masked_BT: True for frames to mask and predict.
        """
        mel_BTM, mask_BT = self.compute_mel(samples, lengths_B)
        rows_BTD, target_BT = self.compute_targets(samples, lengths_B, lengths, mask_BT)
        with torch.no_grad():
            latent_BTW = self.clustered_layer(mel_BTM, mask_BT)
        with full_precision(samples.device.type):
            quantized = self.quantizer(latent_BTW, mask_BT)
            self.start.note_step()
            if not self.start.is_reached:
                self.quantizer.rollback()
            predicted_BTD = self.predict_features(quantized.latent.detach() * mask_BT[..., None])
            distance_BT = (predicted_BTD - rows_BTD).square().mean(-1)
            distance_B = masked_mean_B(distance_BT, mask_BT)
        penalties, prediction = {"distance": distance_B.mean()}, None
        if masked_BT is not None:
            prediction = self.predict_targets(mel_BTM, mask_BT, masked_BT, target_BT)
            # The clusters of the first steps are random.
            weight = float(self.targets.is_initialized)
            penalties["masked_prediction"] = weight * prediction.cross_entropy_B.mean()
        features_BTD = self.normalizer.denormalize(rows_BTD)
        target_BTD = features_BTD.masked_fill(~mask_BT[..., None], torch.nan)
        output_BT2D = torch.stack([self.normalizer.denormalize(predicted_BTD), target_BTD], dim=2)
        codes_BT = quantized.codes.masked_fill(~mask_BT, -1)
        return HubertReconstruction(
            output_BT2D, codes_BT, penalties, distance_B.detach(), prediction
        )

    def encode_latents(self, samples: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        mel_BTM, mask_BT = self.compute_mel(samples, lengths_B)
        return self.clustered_layer(mel_BTM, mask_BT), mask_BT

    def decode(self, codes: Tensor) -> Tensor:
        """Decode (B, T) to MFCC (B, T, D); -1 marks padding."""
        self.check_codes(codes)
        with full_precision(codes.device.type):
            latent_BTW = self.quantizer.decode(codes.clamp_min(0)) * (codes >= 0).unsqueeze(-1)
            return self.normalizer.denormalize(self.predict_features(latent_BTW))

    def compute_targets(
        self,
        samples: Tensor,
        lengths_B: Tensor | None,
        lengths: Sequence[int] | None,
        mask_BT: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return normalized MFCC (B, T, D) and their clusters (B, T)."""
        features_BTD = self.mfcc(samples, lengths_B if lengths is None else lengths)
        with full_precision(samples.device.type), torch.no_grad():
            self.normalizer.accumulate_stats(features_BTD, mask_BT)
            rows_BTD = self.normalizer(features_BTD)
            targets = self.targets(rows_BTD, mask_BT)
            self.targets_fixed.note_step()
            is_fixed = self.targets.is_initialized and self.targets_fixed.is_reached
            if is_fixed or not self.normalizer.is_ready:
                self.targets.rollback()
        return rows_BTD, targets.codes

    # ---- the network

    def hidden_states(
        self, mel_BTM: Tensor, mask_BT: Tensor, masked_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the states of the layer that is clustered and the final ones, (B, T, W) each."""
        x_BTW = self.to_states(mel_BTM)
        if masked_BT is not None:
            x_BTW = torch.where(masked_BT[..., None], self.mask_embedding.to(x_BTW.dtype), x_BTW)
        for block in self.encoder:
            x_BTW = block(x_BTW, mask_BT)
        inner_BTW, final_BTW = self.context.hidden_states(
            x_BTW, mask_BN=mask_BT, at=(self.config.layer,)
        )
        return inner_BTW, final_BTW

    def clustered_layer(self, mel_BTM: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the states that are clustered, on the unit sphere, (B, T, W)."""
        inner_BTW, _ = self.hidden_states(mel_BTM, mask_BT)
        with full_precision(mel_BTM.device.type):
            return l2_normalize(F.layer_norm(to_fp32(inner_BTW), inner_BTW.shape[2:]))

    def predict_targets(
        self, mel_BTM: Tensor, mask_BT: Tensor, masked_BT: Tensor, target_BT: Tensor
    ) -> MaskedPrediction:
        """Predict the targets of masked frames from the others."""
        masked_BT = masked_BT & mask_BT
        _, final_BTW = self.hidden_states(mel_BTM, mask_BT, masked_BT)
        logits_BTK = to_fp32(self.head(final_BTW))
        loss_BT = F.cross_entropy(logits_BTK.mT, target_BT, reduction="none")
        correct_BT = (logits_BTK.detach().argmax(-1) == target_BT).to(loss_BT.dtype)
        return MaskedPrediction(
            masked_mean_B(loss_BT, masked_BT), masked_mean_B(correct_BT, masked_BT)
        )

    def predict_features(self, latent_BTW: Tensor) -> Tensor:
        """Predict normalized MFCC from the tokens of neighbouring frames."""
        return self.to_features(to_fp32(latent_BTW).mT).mT


def draw_spans(frames: int, fraction: float, span: int, generator: torch.Generator) -> Tensor:
    """Draw spans of masked frames, (T,), that cover about this fraction; at least one span.

    Spans may overlap: with a fraction f of masked frames, a span starts at a frame with the
    probability 1 - (1 - f)^(1 / span).
    """
    probability = 1 - (1 - fraction) ** (1 / span)
    starts_T = torch.rand(frames, generator=generator) < probability
    first = int(torch.randint(frames, (), generator=generator))
    if not starts_T.any():
        starts_T[first] = True
    reach_T = F.pad(starts_T.double(), (span - 1, 0)).unfold(0, span, 1).sum(1)
    return reach_T > 0
