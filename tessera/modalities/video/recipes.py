"""Recipes over clips."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tessera.recipes.presets import Preset, life, perceptual_of, quantizer_of

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
    """A video tokenizer (MAGVIT-v2): clips and pictures to a small grid of symbols in time and space, and back.

    Args:
        preset: tiny (seconds, for tests), small (minutes on a laptop), base (one GPU), paper (as published).
        quantizer: fsq needs no tuning; lfq and bsq scale to huge codebooks (paper takes lfq whatever is said here).
        perceptual: on, off, the path of a VGG16 file, or auto: on for base and paper where tessera[perceptual] is installed.
        adversary: judges of frames and of motion: on, off, or auto: on for base and paper.
    """
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
    from tessera.modalities.video.dataset import Videos
    from tessera.modalities.video.discriminator import TemporalDiscriminatorConfig
    from tessera.modalities.video.magvit2 import VideoTokenizerConfig
    from tessera.modalities.video.reconstruction import TokenizeVideos, VideoFidelityConfig, VideoJudges
    from tessera.run.config import Run

    model = {
        "tiny": VideoTokenizerConfig(
            dim=8, widest=32, layers=("compress_space", "compress_time", "residual", "compress_time", "attend_time"),
            quantizer=quantizer_of(quantizer, 6), input_kernel=3, heads=2, head_width=8,
        ),
        "small": VideoTokenizerConfig(
            dim=16, widest=64, layers=SMALL, quantizer=quantizer_of(quantizer, 10), input_kernel=3, heads=4, head_width=16,
        ),
        "base": VideoTokenizerConfig(dim=64, widest=512, quantizer=quantizer_of(quantizer, 14)),
        "paper": VideoTokenizerConfig(dim=128, widest=512, layers=PAPER, quantizer=quantizer_of("lfq", 18)),
    }[preset]  # fmt: skip
    engine = life(
        preset,
        steps={"tiny": 20, "small": 2000, "base": 200_000, "paper": 1_000_000}[preset],
        batch_size={"tiny": 4, "small": 4, "base": 32, "paper": 256}[preset],
        workers=8 if preset in ("base", "paper") else 0,
    )
    data = {
        "tiny": Videos(size=16, frames=5, toys=32, validation_share=0.25),
        "small": Videos(size=64, frames=9),
        "base": Videos(size=128, frames=17, min_scale=0.7, flip=True),
        "paper": Videos(size=128, frames=17, min_scale=0.7, flip=True),
    }[preset]
    warmup = max(10, engine.steps // 50)
    optimizer = OptimizerConfig(
        rate={"tiny": 2e-3, "small": 2e-3, "base": 2e-4, "paper": 1e-4}[preset], schedule="cosine", warmup=warmup, floor=0.05
    )
    judged = adversary == "on" or (adversary == "auto" and preset in ("base", "paper"))
    dim, layers = {"tiny": (8, 2), "small": (16, 3), "base": (64, 3), "paper": (64, 4)}[preset]
    judges = VideoJudges(
        frames=PatchDiscriminatorConfig(dim=dim, layers=layers),
        motion=TemporalDiscriminatorConfig(dim=dim, layers=layers),
        starts=engine.steps // 4,
        ramp=engine.steps // 10,
        optimizer=OptimizerConfig(rate=optimizer.rate / 2, betas=(0.5, 0.9), schedule="warmup", warmup=warmup),
    )
    return Run(
        recipe="videos-magvit2",
        task=TokenizeVideos(
            model=model,
            fidelity=VideoFidelityConfig(perceptual=perceptual_of(preset, perceptual)),
            adversary=judges if judged else None,
            optimizer=optimizer,
        ),
        data=data,
        engine=engine,
        published=MAGVIT2 if preset == "paper" else "",
    )


SMALL = ("compress_space", "compress_space", "residual", "compress_time", "residual", "compress_time", "residual")
"""No residual before space is compressed twice: one at half the resolution makes a step 1.4 times as long."""

PAPER = (
    "consecutive_residual:4", "compress_space:256", "consecutive_residual:4", "compress_space:256", "compress_time:256",
    "consecutive_residual:4", "compress_space:512", "compress_time:512", "consecutive_residual:4",
)  # fmt: skip
"""17 x 128 x 128 to 5 x 16 x 16 with four residual layers at each resolution and widths of 128, 256, 256 and 512."""
