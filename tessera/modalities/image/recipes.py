"""Recipes for pictures: what was found to work, by size of machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from tessera.recipes.presets import (
    Critic,
    Kind,
    Preset,
    critic_of,
    engine_defaults,
    for_transformer,
    perceptual_of,
    quantizer_of,
    text_of,
)

if TYPE_CHECKING:
    from tessera.modalities.image.reconstruction import ImageReconstructionConfig
    from tessera.run.config import Run

MUSE = (
    "Muse (Chang 2023, arXiv 2301.00704): 256 pixels to 16 x 16 symbols of a codebook of 8,192; "
    "the sources at hand state no parameter count for its tokenizer."
)


MASKGIT = (
    "MaskGIT (Chang 2022, arXiv 2202.04200, section 4.1): 24 layers, 8 heads, width 768, 227 M parameters without text; "
    "Muse (Chang 2023) has 900 M and 3 B, and reads its captions with a frozen T5-XXL."
)


def images_vqgan(
    preset: Preset = "small",
    quantizer: Kind = "fsq",
    perceptual: str = "auto",
    adversary: Literal["auto", "on", "off"] = "auto",
) -> Run:
    """An image tokenizer (VQGAN): pictures to a small grid of symbols, and back.

    Args: preset: tiny (seconds, for tests), small (minutes on a laptop), base (one GPU), paper (as
        published). quantizer: fsq needs no tuning; lfq and bsq scale to huge codebooks; vq learns
        its codebook. perceptual: on, off, the path of a VGG16 file, or auto: on for base and paper
        where tessera[perceptual] is installed. adversary: a discriminator: on, off, or auto: on for
        base and paper.
    """
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.modalities.image.dataset import ImageDataConfig
    from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
    from tessera.modalities.image.reconstruction import ImageAdversaryConfig, ImageTokenizerConfig
    from tessera.modalities.image.vqgan import VQGANConfig
    from tessera.run.config import Run

    model = {
        "tiny": VQGANConfig(
            dim=16, max_channels=32, layers=2, blocks=(0, 1), quantizer=quantizer_of(quantizer, 6)
        ),
        "small": VQGANConfig(
            dim=16,
            max_channels=64,
            layers=2,
            blocks=(0, 2),
            encoder_blocks=(0, 0),
            quantizer=quantizer_of(quantizer, 7, diversity=0.0),
        ),
        "base": VQGANConfig(
            dim=128,
            max_channels=512,
            layers=4,
            blocks=(2, 2, 2, 2),
            quantizer=quantizer_of(quantizer, 14),
        ),
        # Muse's first stage: 256 pixels, 16 x 16 symbols of a codebook of 8192, here 2^13 (Chang
        # 2023, section 2.2).
        "paper": VQGANConfig(
            dim=128,
            max_channels=512,
            layers=4,
            blocks=(2, 2, 2, 2),
            attention=True,
            quantizer=quantizer_of(quantizer, 13),
        ),
    }[preset]
    engine = engine_defaults(
        preset,
        steps={"tiny": 20, "small": 2500, "base": 200_000, "paper": 1_000_000}[preset],
        batch_size={"tiny": 8, "small": 8, "base": 64, "paper": 256}[preset],
        num_workers=8 if preset in ("base", "paper") else 0,
    )
    data = {
        "tiny": ImageDataConfig(size=16, toys=64, val_fraction=0.25),
        "small": ImageDataConfig(size=64),
        "base": ImageDataConfig(size=256, min_scale=0.7, flip=True),
        "paper": ImageDataConfig(size=256, min_scale=0.7, flip=True),
    }[preset]
    warmup = max(10, engine.steps // 50)
    optimizer = OptimizerConfig(
        lr={"tiny": 2e-3, "small": 2e-3, "base": 2e-4, "paper": 1e-4}[preset],
        schedule="cosine",
        warmup_steps=warmup,
        min_lr_ratio=0.05,
    )
    judged = adversary == "on" or (adversary == "auto" and preset in ("base", "paper"))
    judge = ImageAdversaryConfig(
        discriminator=PatchDiscriminatorConfig(dim=32 if preset in ("tiny", "small") else 64),
        start_step=engine.steps // 4,
        warmup_steps=engine.steps // 10,
        optimizer=OptimizerConfig(
            lr=optimizer.lr / 2, betas=(0.5, 0.9), schedule="warmup", warmup_steps=warmup
        ),
    )
    return Run(
        recipe="images-vqgan",
        task=ImageTokenizerConfig(
            model=model,
            reconstruction=_reconstruction(preset, perceptual),
            adversary=judge if judged else None,
            optimizer=optimizer,
        ),
        data=data,
        engine=engine,
        published=MUSE if preset == "paper" else "",
    )


def images_maskgit(
    preset: Preset = "small",
    tokenizer: str = "runs/images-vqgan",
    text: str = "learned",
    critic: Critic = "off",
) -> Run:
    """Text to image (MaskGIT, Muse): pictures for prompts, from a tokenizer's symbols.

    Args: preset: tiny (seconds, for tests), small (minutes on a laptop), base (one GPU), paper (as
        published). tokenizer: the run folder of the tokenizer whose symbols are learnt. text:
        learned (from the captions, no downloads), none (no prompts), or a Hugging Face encoder: a
        local path or a hub id. critic: off, a head on the model's own states, or a network of its
        own, by which sampling may choose what to keep.
    """
    return _masked("images-maskgit", preset, tokenizer, None, text, critic)


def images_maskgit_superres(
    preset: Preset = "small",
    tokenizer: str = "runs/images-vqgan",
    smaller: str = "runs/images-vqgan-smaller",
    text: str = "learned",
    critic: Critic = "off",
) -> Run:
    """Super-resolution (Muse): the symbols of a larger picture from those of a smaller one, and the
    prompt.

    Args: preset: tiny (seconds, for tests), small (minutes on a laptop), base (one GPU), paper (as
        published). tokenizer: the run folder of the tokenizer of the larger pictures. smaller: the
        run folder of the tokenizer of the smaller pictures, whose symbols are the condition. text:
        learned (from the captions, no downloads), none (no prompts), or a Hugging Face encoder: a
        local path or a hub id. critic: off, a head on the model's own states, or a network of its
        own, by which sampling may choose what to keep.
    """
    return _masked("images-maskgit-superres", preset, tokenizer, smaller, text, critic)


def _masked(
    recipe: str, preset: Preset, tokenizer: str, smaller: str | None, text: str, critic: Critic
) -> Run:
    from tessera.modalities.image.dataset import ImageDataConfig
    from tessera.nn.masked_transformer import MaskedTransformerConfig
    from tessera.objectives.masked import MaskedConfig
    from tessera.run.config import Run
    from tessera.sampling.guidance import Guidance
    from tessera.sampling.maskgit import MaskedSampling

    dim, depth, heads = {
        "tiny": (32, 2, 2),
        "small": (128, 5, 4),
        "base": (768, 12, 12),
        "paper": (768, 24, 8),
    }[preset]
    engine = engine_defaults(
        preset,
        steps={"tiny": 20, "small": 2200, "base": 200_000, "paper": 1_000_000}[preset],
        batch_size={"tiny": 8, "small": 16, "base": 128, "paper": 512}[preset],
        ema={"tiny": 0.9, "small": 0.998, "base": 0.9999, "paper": 0.9999}[preset],
    )
    alone, larger = {"tiny": (16, 32), "small": (64, 64), "base": (256, 512), "paper": (256, 512)}[
        preset
    ]
    size = alone if smaller is None else larger
    toys, held_out = (64, 0.25) if preset == "tiny" else (4000, 0.02)
    data = ImageDataConfig(
        size=size,
        crop="centre",
        toys=toys,
        val_fraction=held_out,
        toy_shapes=1 if preset == "small" else 3,
        toy_plain=preset == "small",
    )
    optimizer = for_transformer(preset, warmup=max(10, engine.steps // 20))
    return Run(
        recipe=recipe,
        task=MaskedConfig(
            tokenizer=tokenizer,
            smaller=smaller,
            places={"tiny": None, "small": 64, "base": 256, "paper": 256}[preset],
            model=MaskedTransformerConfig(
                dim=dim, depth=depth, heads=heads, text=text_of(preset, text)
            ),
            critic=critic_of(critic, dim, depth, heads),
            critic_optimizer=replace(optimizer, name="adamw"),
            sampling=MaskedSampling(
                decoding_steps=4 if preset == "tiny" else 12,
                choice_temperature=1.0 if preset == "small" else 4.5,
            ),
            guidance=Guidance(
                scale=1.5 if preset == "small" else 3.0
            ),  # a small model that is led too far falls apart
            optimizer=optimizer,
        ),
        data=data,
        engine=engine,
        published=MASKGIT if preset == "paper" else "",
    )


def _reconstruction(preset: Preset, perceptual: str) -> ImageReconstructionConfig:
    from tessera.modalities.image.efficientnet_lite import installed
    from tessera.modalities.image.reconstruction import ImageReconstructionConfig

    return ImageReconstructionConfig(
        pixel="l2"
        if preset == "small"
        else "l1",  # what PSNR measures, for a run of minutes; blur is the price
        perceptual=perceptual_of(preset, perceptual),
        measure_features=installed() and preset != "tiny",
    )
