"""Recipes for images: a tokenizer, text to image, and super-resolution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tessera.recipes.presets import (
    AdversaryChoice,
    CriticChoice,
    MaskGITPreset,
    Preset,
    QuantizerChoice,
    build_maskgit_run,
    build_perceptual_config,
    build_quantizer_config,
    discriminator_optimizer,
    engine_defaults,
    has_adversary,
    tokenizer_optimizer,
)

if TYPE_CHECKING:
    from tessera.modalities.image.dataset import ImageDataConfig
    from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
    from tessera.modalities.image.vqgan import VQGANConfig
    from tessera.run.config import Run

MUSE = (
    "Muse (Chang 2023, arXiv 2301.00704): 256 pixels to 16 x 16 tokens of a codebook of 8,192; "
    "no published parameter count of its tokenizer was found."
)

MASKGIT = (
    "MaskGIT (Chang 2022, arXiv 2202.04200, section 4.1): 24 layers, 8 heads, dimension 768, 227 M "
    "parameters without text; Muse (Chang 2023) has 900 M and 3 B, and encodes captions with a "
    "frozen T5-XXL."
)


# ---- tokenizer


def images_vqgan(
    preset: Preset = "small",
    quantizer: QuantizerChoice = "fsq",
    perceptual: str = "auto",
    adversary: AdversaryChoice = "auto",
) -> Run:
    """Train an image tokenizer (VQGAN): images to a small grid of tokens, and back.

    Args:
        preset: The size of the run: tiny (seconds, for tests), small (minutes on a laptop),
            base (one GPU) or paper (as published).
        quantizer: The quantizer: fsq needs no tuning; lfq and bsq scale to huge codebooks; vq
            learns its codebook; simvq learns a linear map of a fixed codebook.
        perceptual: The perceptual loss: on, off, the path of a VGG16 file, or auto, which is on if
            tessera[perceptual] is installed, except for tiny.
        adversary: The discriminator: on, off, or auto, which is on for base and paper.
    """
    from tessera.modalities.image.efficientnet_lite import is_installed
    from tessera.modalities.image.reconstruction import (
        ImageAdversaryConfig,
        ImageReconstructionConfig,
        ImageTokenizerConfig,
    )
    from tessera.run.config import Run

    builders = {
        "tiny": _vqgan_tiny,
        "small": _vqgan_small,
        "base": _vqgan_base,
        "paper": _vqgan_paper,
    }
    parts = builders[preset](quantizer)
    optimizer = tokenizer_optimizer(parts.lr, steps=parts.steps)
    discriminator = None
    if has_adversary(preset, adversary):
        discriminator = ImageAdversaryConfig(
            discriminator=parts.discriminator,
            start_step=parts.steps // 4,
            warmup_steps=parts.steps // 10,
            optimizer=discriminator_optimizer(optimizer, betas=(0.5, 0.9)),
        )
    return Run(
        recipe="images-vqgan",
        task=ImageTokenizerConfig(
            model=parts.model,
            reconstruction=ImageReconstructionConfig(
                chroma_weight=0.0 if preset == "tiny" else 8.0,
                perceptual=build_perceptual_config(
                    perceptual,
                    auto=preset != "tiny",
                    weight=parts.perceptual_weight,
                    fraction=parts.perceptual_fraction,
                ),
                measure_features=preset != "tiny" and is_installed(),
            ),
            adversary=discriminator,
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
class _VQGANPreset:
    model: VQGANConfig
    discriminator: PatchDiscriminatorConfig
    data: ImageDataConfig
    steps: int
    batch_size: int
    lr: float
    perceptual_weight: float = 1.0
    perceptual_fraction: float = 1.0
    num_workers: int = 0
    reference: str = ""


def _vqgan_tiny(quantizer: QuantizerChoice) -> _VQGANPreset:
    from tessera.modalities.image.dataset import ImageDataConfig
    from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
    from tessera.modalities.image.vqgan import VQGANConfig

    return _VQGANPreset(
        model=VQGANConfig(
            dim=16,
            max_channels=32,
            layers=2,
            blocks=(0, 1),
            quantizer=build_quantizer_config(quantizer, 6),
        ),
        discriminator=PatchDiscriminatorConfig(dim=32),
        data=ImageDataConfig(size=16, num_synthetic=64, val_fraction=0.25),
        steps=20,
        batch_size=8,
        lr=2e-3,
    )


def _vqgan_small(quantizer: QuantizerChoice) -> _VQGANPreset:
    from tessera.modalities.image.dataset import ImageDataConfig
    from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
    from tessera.modalities.image.vqgan import VQGANConfig

    return _VQGANPreset(
        model=VQGANConfig(
            dim=16,
            max_channels=64,
            layers=2,
            blocks=(0, 2),
            encoder_blocks=(0, 0),
            quantizer=build_quantizer_config(quantizer, 11, diversity=0.003),
        ),
        discriminator=PatchDiscriminatorConfig(dim=32),
        data=ImageDataConfig(size=64),
        steps=4000,
        batch_size=4,  # at equal time better than 8: twice as many steps
        lr=2e-3,
        # The features of an example cost five times what its reconstruction costs, and a quarter of
        # the examples serves as well (docs/experiments-images-vqgan.md).
        perceptual_weight=0.4,
        perceptual_fraction=0.25,
    )


def _vqgan_base(quantizer: QuantizerChoice) -> _VQGANPreset:
    from tessera.modalities.image.dataset import ImageDataConfig
    from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
    from tessera.modalities.image.vqgan import VQGANConfig

    return _VQGANPreset(
        model=VQGANConfig(
            dim=128,
            max_channels=512,
            layers=4,
            blocks=(2, 2, 2, 2),
            quantizer=build_quantizer_config(quantizer, 14),
        ),
        discriminator=PatchDiscriminatorConfig(dim=64),
        data=ImageDataConfig(size=256, min_scale=0.7, flip=True),
        steps=200_000,
        batch_size=64,
        lr=2e-4,
        num_workers=8,
    )


def _vqgan_paper(quantizer: QuantizerChoice) -> _VQGANPreset:
    """Return the first stage of Muse: 256 pixels to 16 x 16 tokens of a codebook of 8,192, here
    2^13 (Chang 2023, section 2.2)."""
    base = _vqgan_base(quantizer)
    codes = build_quantizer_config(quantizer, 13)
    return replace(
        base,
        model=replace(base.model, attention=True, quantizer=codes),
        steps=1_000_000,
        batch_size=256,
        lr=1e-4,
        reference=MUSE,
    )


# ---- text to image and super-resolution


def images_maskgit(
    preset: Preset = "small",
    tokenizer: str = "runs/images-vqgan",
    text: str = "learned",
    critic: CriticChoice = "off",
) -> Run:
    """Train a text-to-image model (MaskGIT, Muse) on the tokens of an image tokenizer.

    Args:
        preset: The size of the run: tiny (seconds, for tests), small (minutes on a laptop),
            base (one GPU) or paper (as published).
        tokenizer: The run directory of the tokenizer whose tokens are generated.
        text: The text encoder: learned (trained on the captions, without downloads), none (without
            prompts), or the local path or hub id of a Hugging Face encoder.
        critic: The token critic, by which sampling can choose the tokens to keep: off, head (a
            small network on the hidden states of the model) or own (a separate transformer).
    """
    from tessera.modalities.image.generation import ImageGeneratorConfig

    return build_maskgit_run(
        "images-maskgit",
        preset,
        _choose_maskgit(preset),
        ImageGeneratorConfig,
        text,
        critic,
        tokenizer=tokenizer,
    )


def images_maskgit_superres(
    preset: Preset = "small",
    tokenizer: str = "runs/images-vqgan",
    low_res_tokenizer: str = "runs/images-vqgan-low-res",
    text: str = "learned",
    critic: CriticChoice = "off",
) -> Run:
    """Train a super-resolution model (Muse): tokens of large images from those of small ones.

    Args:
        preset: The size of the run: tiny (seconds, for tests), small (minutes on a laptop),
            base (one GPU) or paper (as published).
        tokenizer: The run directory of the tokenizer of the large images.
        low_res_tokenizer: The run directory of the tokenizer of the small images, whose tokens are
            the condition.
        text: The text encoder: learned (trained on the captions, without downloads), none (without
            prompts), or the local path or hub id of a Hugging Face encoder.
        critic: The token critic, by which sampling can choose the tokens to keep: off, head (a
            small network on the hidden states of the model) or own (a separate transformer).
    """
    from tessera.modalities.image.generation import ImageGeneratorConfig

    parts = _choose_maskgit(preset)
    return build_maskgit_run(
        "images-maskgit-superres",
        preset,
        replace(parts, data=replace(parts.data, size=parts.superres_size)),
        ImageGeneratorConfig,
        text,
        critic,
        tokenizer=tokenizer,
        low_res_tokenizer=low_res_tokenizer,
    )


def _choose_maskgit(preset: Preset) -> _MaskGITPreset:
    builders = {
        "tiny": _maskgit_tiny,
        "small": _maskgit_small,
        "base": _maskgit_base,
        "paper": _maskgit_paper,
    }
    return builders[preset]()


@dataclass(frozen=True, kw_only=True)
class _MaskGITPreset(MaskGITPreset):
    data: ImageDataConfig
    superres_size: int
    """The image size of super-resolution, instead of that of `data`."""


def _maskgit_tiny() -> _MaskGITPreset:
    from tessera.modalities.image.dataset import ImageDataConfig

    return _MaskGITPreset(
        dim=32,
        depth=2,
        heads=2,
        max_positions=None,
        data=ImageDataConfig(size=16, crop="centre", num_synthetic=64, val_fraction=0.25),
        superres_size=32,
        decoding_steps=4,
        steps=20,
        batch_size=8,
        ema_decay=0.9,
    )


def _maskgit_small() -> _MaskGITPreset:
    from tessera.modalities.image.dataset import ImageDataConfig

    return _MaskGITPreset(
        dim=128,
        depth=5,
        heads=4,
        max_positions=64,
        data=ImageDataConfig(
            size=64,
            crop="centre",
            num_synthetic=4000,
            val_fraction=0.02,
            synthetic_max_shapes=1,
            synthetic_plain=True,
        ),
        superres_size=64,
        guidance=1.5,  # a larger scale makes the samples of a small model incoherent
        steps=2200,
        batch_size=16,
        ema_decay=0.998,
    )


def _maskgit_base() -> _MaskGITPreset:
    from tessera.modalities.image.dataset import ImageDataConfig

    return _MaskGITPreset(
        dim=768,
        depth=12,
        heads=12,
        max_positions=256,
        data=ImageDataConfig(size=256, crop="centre", num_synthetic=4000, val_fraction=0.02),
        superres_size=512,
        steps=200_000,
        batch_size=128,
        ema_decay=0.9999,
    )


def _maskgit_paper() -> _MaskGITPreset:
    return replace(
        _maskgit_base(), depth=24, heads=8, steps=1_000_000, batch_size=512, reference=MASKGIT
    )
