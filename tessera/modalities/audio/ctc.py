"""Semantic tokens of a speech recogniser: the quantized inner layer of a small CTC network.

The network is trained on recordings with transcripts to predict their characters. Between its two
parts is a vector quantizer, as in the supervised semantic tokens of CosyVoice (Du 2024, arXiv
2407.05407, section 2.1), so that a token has what determines the text and little of the speaker.
The first part has convolutions and a Conformer with the context of the recording, the second the
rest of the Conformer, if any, and the characters. Clusters of later layers have less of the speaker
(`bench/speech_clusters.py`), so by default nothing but the characters follows. The input are
log-mel bands that are normalized over each recording, which removes loudness and the colour of the
recording. For the first steps the second part gets the latents themselves, and the codebook is
initialized only when these describe speech.

Audio is (B, 1, N), codes are (B, T) with T = N / hop, rounded up, and -1 in frames of padding.
`decode` returns the logits of characters, so that text can be read from tokens alone.

B batch, N samples, T frames, M mel bands, W model dimension, V characters with the blank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from tessera.losses.ctc import BLANK, most_likely_labels
from tessera.modalities.audio.normalized_mel import (
    MEL_FRAMES_PER_TOKEN,
    MelTokenizer,
    MelTokenizerConfig,
)
from tessera.modalities.audio.semantic import masked_mean_B
from tessera.nn.conformer import Conformer, ConformerConfig, ConvolutionBlock
from tessera.nn.delayed_start import DelayedStart
from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.quantize import VQ, VQConfig
from tessera.nn.quantize.geometry import l2_normalize
from tessera.nn.reconstruction import Reconstruction
from tessera.nn.transformer import Norm, linear
from tessera.text.characters import CharacterVocab

PADDING_LOGIT = 30.0
"""The logit of the blank in frames of padding, where all others are 0."""


@dataclass(frozen=True, kw_only=True)
class CTCTokenizerConfig(MelTokenizerConfig):
    dim: int = 128
    """Dimension of all layers."""
    encoder_depth: int = 3
    """Number of convolution blocks before the quantizer."""
    encoder_kernel: int = 5
    """Frames of a convolution before the quantizer."""
    encoder_context_depth: int = 2
    """Number of Conformer blocks before the quantizer, after the convolution blocks. The closer the
    quantizer is to the characters, the less of the speaker is in its tokens."""
    context_depth: int = 0
    """Number of Conformer blocks after the quantizer."""
    context_kernel: int = 15
    """Frames of a convolution of a Conformer block."""
    heads: int = 4
    """Number of attention heads of a Conformer block."""
    vocab_size: int = 64
    """Number of tokens."""
    code_dim: int = 8
    """Dimension in which tokens are looked up."""
    commitment_weight: float = 0.25
    """Weight of the squared distance between a latent and its code."""
    codebook_start: int = 500
    """The step after which the codebook is initialized and used."""
    noise_db: tuple[float, float] | None = (5.0, 45.0)
    """The range of the signal-to-noise ratio that is drawn for each example in training, once for
    noise that follows the amplitude, as that of a codec does (ITU-T P.810), and once for steady
    noise; none adds no noise. Without it, speech that a codec has reconstructed is not
    recognised."""
    warp: float = 0.15
    """In training the frequencies of each example are scaled by a factor that is drawn between
    1 / (1 + warp) and 1 + warp, as by a shorter or longer vocal tract (Jaitly and Hinton 2013); 0
    leaves them unchanged."""
    max_characters: int = 64
    """The maximum number of different characters of the transcripts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dim", "encoder_depth", "heads", "max_characters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("encoder_context_depth", "context_depth", "codebook_start"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")
        if not 0 <= self.warp < 1:
            raise ValueError(f"warp must be at least 0 and below 1, got {self.warp}.")
        if self.noise_db is not None and self.noise_db[0] > self.noise_db[1]:
            raise ValueError(f"noise_db must be a range from low to high, got {self.noise_db}.")
        self.vq_config()

    def vq_config(self) -> VQConfig:
        # The commitment is computed here, as a mean over examples of any length.
        return VQConfig(
            codebook_size=self.vocab_size, code_dim=self.code_dim, commitment_weight=0.0
        )

    def build_context(self, depth: int) -> Conformer | FrameNorm:
        """Build Conformer blocks and a norm after them."""
        if depth == 0:
            return FrameNorm(self.dim)
        return ConformerConfig(kernel=self.context_kernel).build(self.dim, depth, self.heads)

    def build(self) -> CTCTokenizer:
        return CTCTokenizer(self)


@dataclass
class CharacterReconstruction(Reconstruction):
    """`output` are the logits of characters, (B, T, V)."""

    frames_B: Tensor
    """The number of frames with real samples."""


class CTCTokenizer(MelTokenizer):
    config: CTCTokenizerConfig

    def __init__(self, config: CTCTokenizerConfig):
        super().__init__()
        self.config = config
        self.vocab = CharacterVocab(config.max_characters)
        self.to_states = linear(MEL_FRAMES_PER_TOKEN * config.bands, config.dim)
        self.encoder = nn.ModuleList(
            ConvolutionBlock(config.encoder_kernel, config.dim) for _ in range(config.encoder_depth)
        )
        self.encoder_context = config.build_context(config.encoder_context_depth)
        self.to_code = linear(config.dim, config.code_dim)
        self.quantizer: VQ = config.vq_config().build(config.code_dim)
        self.start = DelayedStart(config.codebook_start)
        self.from_code = linear(config.code_dim, config.dim)
        self.context = config.build_context(config.context_depth)
        self.head = linear(config.dim, self.vocab.num_labels)

    def forward(
        self,
        samples: Tensor,
        lengths_B: Tensor | None = None,
        *,
        longest: int | None = None,
        noise: Tensor | None = None,
        warp_B: Tensor | None = None,
    ) -> CharacterReconstruction:
        """Return logits of characters, codes and the commitment penalty.

        Samples after `longest` are padding of the whole batch; it need not be read from a device.
        In training, `noise` is added to the samples, and frequencies are scaled by `warp_B`.
        """
        if noise is not None:
            samples = samples + noise
        latent_BTC, mask_BT = self.encode_latents(samples, lengths_B, longest, warp_B)
        with full_precision(samples.device.type):
            quantized = self.quantizer(latent_BTC, mask_BT)
            self.start.note_step()
            code_BTC, penalties = latent_BTC, {}
            if not self.start.is_reached:
                self.quantizer.rollback()
            elif self.quantizer.is_initialized:
                code_BTC = quantized.latent
                distance_BT = (latent_BTC - code_BTC.detach()).square().mean(-1)
                commitment = masked_mean_B(distance_BT, mask_BT).mean()
                penalties["commitment"] = self.config.commitment_weight * commitment
        logits_BTV = self.character_logits(code_BTC, mask_BT)
        codes_BT = quantized.codes.masked_fill(~mask_BT, -1)
        return CharacterReconstruction(logits_BTV, codes_BT, penalties, mask_BT.sum(1))

    def decode(self, codes: Tensor) -> Tensor:
        """Decode (B, T) to the logits of characters (B, T, V); -1 marks padding."""
        self.check_codes(codes)
        mask_BT = codes >= 0
        logits_BTV = self.character_logits(self.quantizer.decode(codes.clamp_min(0)), mask_BT)
        return logits_BTV.masked_fill(~mask_BT[..., None], 0.0) + self.blank_logits(mask_BT)

    def recognize(self, codes: Tensor) -> list[str]:
        """Return the text that codes (B, T) are most likely to be, by the most likely labels."""
        labels = most_likely_labels(self.decode(codes), (codes >= 0).sum(1))
        return [self.vocab.decode(one) for one in labels]

    def encode_latents(
        self,
        samples: Tensor,
        lengths_B: Tensor | None,
        longest: int | None = None,
        warp_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return latents (B, T, C) on the unit sphere and the mask (B, T) of real frames."""
        if longest is None and lengths_B is not None:
            longest = int(lengths_B.max())
        mel_BTM, mask_BT = self.compute_mel(samples[..., :longest], lengths_B, warp_B)
        x_BTW = self.to_states(mel_BTM)
        for block in self.encoder:
            x_BTW = block(x_BTW, mask_BT)
        x_BTW = self.encoder_context(x_BTW, mask_BN=mask_BT)
        with full_precision(samples.device.type):
            return l2_normalize(self.to_code(to_fp32(x_BTW))), mask_BT

    def blank_logits(self, mask_BT: Tensor) -> Tensor:
        """Return logits by which padding has no character, (B, T, V)."""
        logits_BTV = self.head.weight.new_zeros(*mask_BT.shape, self.vocab.num_labels)
        logits_BTV[..., BLANK] = PADDING_LOGIT * ~mask_BT
        return logits_BTV

    def character_logits(self, code_BTC: Tensor, mask_BT: Tensor) -> Tensor:
        x_BTW = self.from_code(code_BTC.to(self.from_code.weight.dtype) * mask_BT[..., None])
        return self.head(self.context(x_BTW, mask_BN=mask_BT))

    def labels(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the labels of the characters of texts."""
        return [self.vocab.encode(text) for text in texts]


class FrameNorm(Norm):
    """A norm of each frame, with the arguments of a Conformer."""

    def forward(self, x_BTW: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        return super().forward(x_BTW)
