"""Recipes over clips."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tessera.recipes.presets import Preset, engine_defaults, perceptual_of, quantizer_of

if TYPE_CHECKING:
    from tessera.run.config import Run

MAGVIT2 = (
    "MAGVIT-v2 (Yu 2023, arXiv 2310.05737): 17 frames of 128 pixels to 5 x 16 x 16 symbols of a codebook of 2^18; "
    "the sources at hand state no parameter count for its tokenizer."
)


def videos_magvit2(
    preset: Preset = "small",
    quantizer: Literal["fsq", "lfq", "bsq"] = "fsq",
    perceptual: str = "auto",
    adversary: Literal["auto", "on", "off"] = "auto",
) -> Run:
    """A video tokenizer (MAGVIT-v2): clips and pictures to a small grid of symbols in time and
    space, and back.

    Args: preset: tiny (seconds, for tests), small (minutes on a laptop), base (one GPU), paper (as
        published). quantizer: fsq needs no tuning; lfq and bsq scale to huge codebooks (paper takes
        lfq whatever is said here). perceptual: on, off, the path of a VGG16 file, or auto: on for
        base and paper where tessera[perceptual] is installed. adversary: judges of frames and of
        motion: on, off, or auto: on for base and paper.
    """
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
    from tessera.modalities.video.dataset import VideoDataConfig
    from tessera.modalities.video.discriminator import TemporalDiscriminatorConfig
    from tessera.modalities.video.magvit2 import VideoTokenizerConfig
    from tessera.modalities.video.reconstruction import (
        VideoAdversaryConfig,
        VideoReconstructionConfig,
        VideoTokenizerTaskConfig,
    )
    from tessera.run.config import Run

    model = {
        "tiny": VideoTokenizerConfig(
            dim=8, max_channels=32, layers=("compress_space", "compress_time", "residual", "compress_time", "attend_time"),
            quantizer=quantizer_of(quantizer, 6), input_kernel=3, heads=2, head_dim=8,
        ),
        "small": VideoTokenizerConfig(
            dim=16, max_channels=64, layers=SMALL, quantizer=quantizer_of(quantizer, 10), input_kernel=3, heads=4, head_dim=16,
        ),
        "base": VideoTokenizerConfig(dim=64, max_channels=512, quantizer=quantizer_of(quantizer, 14)),
        "paper": VideoTokenizerConfig(dim=128, max_channels=512, layers=PAPER, quantizer=quantizer_of("lfq", 18)),
    }[preset]  # fmt: skip
    engine = engine_defaults(
        preset,
        steps={"tiny": 20, "small": 2000, "base": 200_000, "paper": 1_000_000}[preset],
        batch_size={"tiny": 4, "small": 4, "base": 32, "paper": 256}[preset],
        num_workers=8 if preset in ("base", "paper") else 0,
    )
    data = {
        "tiny": VideoDataConfig(size=16, frames=5, toys=32, val_fraction=0.25),
        "small": VideoDataConfig(size=64, frames=9),
        "base": VideoDataConfig(size=128, frames=17, min_scale=0.7, flip=True),
        "paper": VideoDataConfig(size=128, frames=17, min_scale=0.7, flip=True),
    }[preset]
    warmup = max(10, engine.steps // 50)
    optimizer = OptimizerConfig(
        lr={"tiny": 2e-3, "small": 2e-3, "base": 2e-4, "paper": 1e-4}[preset],
        schedule="cosine",
        warmup_steps=warmup,
        min_lr_ratio=0.05,
    )
    judged = adversary == "on" or (adversary == "auto" and preset in ("base", "paper"))
    dim, layers = {"tiny": (8, 2), "small": (16, 3), "base": (64, 3), "paper": (64, 4)}[preset]
    discriminators = VideoAdversaryConfig(
        frames=PatchDiscriminatorConfig(dim=dim, layers=layers),
        motion=TemporalDiscriminatorConfig(dim=dim, layers=layers),
        start_step=engine.steps // 4,
        warmup_steps=engine.steps // 10,
        optimizer=OptimizerConfig(
            lr=optimizer.lr / 2, betas=(0.5, 0.9), schedule="warmup", warmup_steps=warmup
        ),
    )
    return Run(
        recipe="videos-magvit2",
        task=VideoTokenizerTaskConfig(
            model=model,
            reconstruction=VideoReconstructionConfig(perceptual=perceptual_of(preset, perceptual)),
            adversary=discriminators if judged else None,
            optimizer=optimizer,
        ),
        data=data,
        engine=engine,
        published=MAGVIT2 if preset == "paper" else "",
    )


SMALL = (
    "compress_space",
    "compress_space",
    "residual",
    "compress_time",
    "residual",
    "compress_time",
    "residual",
)
"""No residual before space is compressed twice: one at half the resolution makes a step 1.4 times
as long."""

PAPER = (
    "consecutive_residual:4", "compress_space:256", "consecutive_residual:4", "compress_space:256", "compress_time:256",
    "consecutive_residual:4", "compress_space:512", "compress_time:512", "consecutive_residual:4",
)  # fmt: skip
"""17 x 128 x 128 to 5 x 16 x 16 with four residual layers at each resolution and widths of 128,
256, 256 and 512."""
