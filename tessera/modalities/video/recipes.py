"""Recipes for videos: a tokenizer, and generation from text and from given frames."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tessera.recipes.presets import (
    AdversaryChoice,
    CriticChoice,
    MaskGITPreset,
    Preset,
    build_maskgit_run,
    build_perceptual_config,
    build_quantizer_config,
    discriminator_optimizer,
    engine_defaults,
    has_adversary,
    tokenizer_optimizer,
)

if TYPE_CHECKING:
    from tessera.modalities.video.dataset import VideoDataConfig
    from tessera.modalities.video.magvit2 import VideoTokenizerConfig
    from tessera.run.config import Run

VideoQuantizerChoice = Literal["fsq", "lfq", "bsq"]

MAGVIT2 = (
    "MAGVIT-v2 (Yu 2023, arXiv 2310.05737): 17 frames of 128 pixels to 5 x 16 x 16 tokens of a "
    "codebook of 2^18; no published parameter count of its tokenizer was found."
)

MAGVIT = (
    "MAGVIT (Yu 2022, arXiv 2212.05199, section 4.1): 16 frames of 128 pixels, 4 x 16 x 16 tokens, "
    "a BERT transformer of 87 M (B) or 306 M (L) parameters, 12 decoding steps."
)

TINY_LAYERS = ("compress_space", "compress_time", "residual", "compress_time", "attend_time")

SMALL_LAYERS = (
    "compress_space",
    "compress_space",
    "compress_time",
    "compress_time",
    "factorized_residual",
)
SMALL_DECODER_LAYERS = (
    "compress_space",
    "compress_space",
    "factorized_residual",
    "compress_time",
    "factorized_residual",
    "compress_time",
    "factorized_residual:2",
)
"""Most layers are in the decoder, as in the image tokenizer, and at the lowest resolution.

At equal CPU time (45 s on animated emoji, 64 x 64, one seed) this was 1.9 dB ahead of 3 x 3 x 3
convolutions in encoder and decoder with 1,000 codes and batches of 4; of these, 0.9 dB are 4,096
codes and batches of 2, and 1.0 dB the layers."""

PAPER_LAYERS = (
    "consecutive_residual:4",
    "compress_space:256",
    "consecutive_residual:4",
    "compress_space:256",
    "compress_time:256",
    "consecutive_residual:4",
    "compress_space:512",
    "compress_time:512",
    "consecutive_residual:4",
)
"""17 x 128 x 128 pixels to 5 x 16 x 16 tokens, with four residual layers at each resolution and
128, 256, 256 and 512 channels."""


def videos_magvit2(
    preset: Preset = "small",
    quantizer: VideoQuantizerChoice = "fsq",
    perceptual: str = "auto",
    adversary: AdversaryChoice = "auto",
) -> Run:
    """Train a video tokenizer (MAGVIT-v2): videos and images to a grid of tokens, and back.

    Args:
        preset: The size of the run: tiny (seconds, for tests), small (minutes on a laptop),
            base (one GPU) or paper (as published).
        quantizer: The quantizer: fsq needs no tuning; lfq and bsq scale to huge codebooks. The
            preset paper always uses lfq.
        perceptual: The perceptual loss: on, off, the path of a VGG16 file, or auto, which is on for
            base and paper if tessera[perceptual] is installed.
        adversary: The discriminators of frames and of motion: on, off, or auto, which is on for
            base and paper.
    """
    from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
    from tessera.modalities.video.discriminator import TemporalDiscriminatorConfig
    from tessera.modalities.video.reconstruction import (
        VideoAdversaryConfig,
        VideoReconstructionConfig,
        VideoTokenizerTaskConfig,
    )
    from tessera.run.config import Run

    builders = {
        "tiny": _magvit2_tiny,
        "small": _magvit2_small,
        "base": _magvit2_base,
        "paper": _magvit2_paper,
    }
    parts = builders[preset](quantizer)
    optimizer = tokenizer_optimizer(parts.lr, steps=parts.steps)
    discriminators = None
    if has_adversary(preset, adversary):
        dim, layers = parts.discriminator_dim, parts.discriminator_layers
        discriminators = VideoAdversaryConfig(
            frames=PatchDiscriminatorConfig(dim=dim, layers=layers),
            motion=TemporalDiscriminatorConfig(dim=dim, layers=layers),
            start_step=parts.steps // 4,
            warmup_steps=parts.steps // 10,
            optimizer=discriminator_optimizer(optimizer, betas=(0.5, 0.9)),
        )
    return Run(
        recipe="videos-magvit2",
        task=VideoTokenizerTaskConfig(
            model=parts.model,
            reconstruction=VideoReconstructionConfig(
                chroma_weight=parts.chroma_weight,
                motion_weight=parts.motion_weight,
                perceptual=build_perceptual_config(perceptual, auto=preset in ("base", "paper")),
            ),
            adversary=discriminators,
            optimizer=optimizer,
        ),
        data=parts.data,
        engine=engine_defaults(
            preset,
            steps=parts.steps,
            batch_size=parts.batch_size,
            num_workers=parts.num_workers,
        ),
        reference=parts.reference,
    )


@dataclass(frozen=True, kw_only=True)
class _MAGVIT2Preset:
    model: VideoTokenizerConfig
    discriminator_dim: int
    discriminator_layers: int
    data: VideoDataConfig
    steps: int
    batch_size: int
    lr: float
    chroma_weight: float = 0.0
    motion_weight: float = 0.0
    num_workers: int = 0
    reference: str = ""


def _magvit2_tiny(quantizer: VideoQuantizerChoice) -> _MAGVIT2Preset:
    from tessera.modalities.video.dataset import VideoDataConfig
    from tessera.modalities.video.magvit2 import VideoTokenizerConfig

    return _MAGVIT2Preset(
        model=VideoTokenizerConfig(
            dim=8,
            max_channels=32,
            layers=TINY_LAYERS,
            quantizer=build_quantizer_config(quantizer, 6),
            input_kernel=3,
            heads=2,
            head_dim=8,
        ),
        discriminator_dim=8,
        discriminator_layers=2,
        data=VideoDataConfig(size=16, frames=5, num_synthetic=32, val_fraction=0.25),
        steps=20,
        batch_size=4,
        lr=2e-3,
    )


def _magvit2_small(quantizer: VideoQuantizerChoice) -> _MAGVIT2Preset:
    from tessera.modalities.video.dataset import VideoDataConfig
    from tessera.modalities.video.magvit2 import VideoTokenizerConfig

    return _MAGVIT2Preset(
        model=VideoTokenizerConfig(
            dim=16,
            max_channels=64,
            layers=SMALL_LAYERS,
            decoder_layers=SMALL_DECODER_LAYERS,
            overlapping_upsample=True,
            quantizer=build_quantizer_config(quantizer, 12, diversity=0.003),
            input_kernel=3,
            heads=4,
            head_dim=16,
        ),
        discriminator_dim=16,
        discriminator_layers=3,
        data=VideoDataConfig(size=64, frames=9),
        steps=4000,
        batch_size=2,
        lr=2e-3,
        chroma_weight=0.5,
        motion_weight=0.5,
    )


def _magvit2_base(quantizer: VideoQuantizerChoice) -> _MAGVIT2Preset:
    from tessera.modalities.video.dataset import VideoDataConfig
    from tessera.modalities.video.magvit2 import VideoTokenizerConfig

    return _MAGVIT2Preset(
        model=VideoTokenizerConfig(
            dim=64, max_channels=512, quantizer=build_quantizer_config(quantizer, 14)
        ),
        discriminator_dim=64,
        discriminator_layers=3,
        data=VideoDataConfig(size=128, frames=17, min_scale=0.7, flip=True),
        steps=200_000,
        batch_size=32,
        lr=2e-4,
        num_workers=8,
    )


def _magvit2_paper(quantizer: VideoQuantizerChoice) -> _MAGVIT2Preset:
    """Return the published model, whose quantizer is LFQ; the choice of `quantizer` is ignored."""
    from tessera.modalities.video.dataset import VideoDataConfig
    from tessera.modalities.video.magvit2 import VideoTokenizerConfig

    return _MAGVIT2Preset(
        model=VideoTokenizerConfig(
            dim=128,
            max_channels=512,
            layers=PAPER_LAYERS,
            quantizer=build_quantizer_config("lfq", 18),
        ),
        discriminator_dim=64,
        discriminator_layers=4,
        data=VideoDataConfig(size=128, frames=17, min_scale=0.7, flip=True),
        steps=1_000_000,
        batch_size=256,
        lr=1e-4,
        num_workers=8,
        reference=MAGVIT2,
    )


# ---- generation


def videos_maskgit(
    preset: Preset = "small",
    tokenizer: str = "runs/videos-magvit2",
    text: str = "learned",
    critic: CriticChoice = "off",
) -> Run:
    """Train a video generator (MAGVIT): text to video, prediction from frames, and inpainting.

    Args:
        preset: The size of the run: tiny (seconds, for tests), small (minutes on a laptop),
            base (one GPU) or paper (as published).
        tokenizer: The run directory of the tokenizer whose tokens are generated.
        text: The text encoder: learned (trained on the captions, without downloads), none (without
            prompts), or the local path or hub id of a Hugging Face encoder.
        critic: The token critic, by which sampling can choose the tokens to keep: off, head (a
            small network on the hidden states of the model) or own (a separate transformer).
    """
    from tessera.modalities.video.generation import VideoGeneratorConfig

    builders = {
        "tiny": _maskgit_tiny,
        "small": _maskgit_small,
        "base": _maskgit_base,
        "paper": _maskgit_paper,
    }
    return build_maskgit_run(
        "videos-maskgit",
        preset,
        builders[preset](),
        VideoGeneratorConfig,
        text,
        critic,
        tokenizer=tokenizer,
    )


def _maskgit_tiny() -> MaskGITPreset:
    from tessera.modalities.video.dataset import VideoDataConfig

    return MaskGITPreset(
        dim=32,
        depth=2,
        heads=2,
        max_positions=None,
        data=VideoDataConfig(size=16, frames=5, crop="centre", num_synthetic=32, val_fraction=0.25),
        decoding_steps=4,
        steps=20,
        batch_size=4,
        ema_decay=0.9,
    )


def _maskgit_small() -> MaskGITPreset:
    from tessera.modalities.video.dataset import VideoDataConfig

    return MaskGITPreset(
        dim=128,
        depth=5,
        heads=4,
        max_positions=320,  # 17 frames of 8 x 8 positions of 2 x 2 tokens
        data=VideoDataConfig(size=64, frames=9, crop="centre", num_synthetic=4000),
        guidance=1.5,
        steps=2000,
        batch_size=16,
        ema_decay=0.998,
    )


def _maskgit_base() -> MaskGITPreset:
    from tessera.modalities.video.dataset import VideoDataConfig

    return MaskGITPreset(
        dim=768,
        depth=12,
        heads=12,
        max_positions=1280,
        data=VideoDataConfig(size=128, frames=17, crop="centre"),
        steps=200_000,
        batch_size=128,
        ema_decay=0.9999,
    )


def _maskgit_paper() -> MaskGITPreset:
    """Return a transformer of the size of MAGVIT-L (24 layers, 16 heads, dimension 1,024)."""
    return replace(
        _maskgit_base(),
        dim=1024,
        depth=24,
        heads=16,
        steps=1_000_000,
        batch_size=256,
        reference=MAGVIT,
    )
