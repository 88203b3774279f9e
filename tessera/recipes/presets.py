"""What recipes share: the sizes in which they come, and choices that several of them offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tessera.engine.engine import EngineConfig
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.modalities.image.perceptual import PerceptualConfig
    from tessera.nn.masked_transformer import CriticConfig, CriticHeadConfig
    from tessera.nn.quantize import FSQConfig, LFQConfig, VQConfig
    from tessera.text.encoder import LearnedTextConfig, PretrainedTextConfig

Preset = Literal["tiny", "small", "base", "paper"]
"""tiny: seconds, for tests. small: minutes on a laptop, the default. base: one GPU. paper: as
published."""

Kind = Literal["fsq", "lfq", "bsq", "vq"]
"""fsq needs no tuning; lfq and bsq scale to huge codebooks; vq learns its codebook."""


Critic = Literal["off", "head", "own"]
"""What tells drawn symbols from real ones: nothing, a small network on the model's states, or a
network of its own."""


def engine_defaults(
    preset: Preset,
    *,
    steps: int,
    batch_size: int,
    num_workers: int = 0,
    ema: float | None = None,
    sample_count: int = 16,
) -> EngineConfig:
    """The life of a run of this size: a larger one reports more seldom, and averages over more
    steps unless told otherwise."""
    from tessera.engine.ema import EMAConfig
    from tessera.engine.engine import EngineConfig

    often = {"tiny": 10, "small": 500, "base": 2000, "paper": 5000}[preset]
    usual = {"tiny": 0.9, "small": 0.99, "base": 0.999, "paper": 0.9999}[preset]
    return EngineConfig(
        steps=steps,
        batch_size=batch_size,
        num_workers=num_workers,
        log_every={"tiny": 1, "small": 10, "base": 50, "paper": 50}[preset],
        validate_every=often,
        sample_every=often,
        sample_count=sample_count,
        checkpoint_every=often,
        ema=EMAConfig(decay=usual if ema is None else ema),
    )


def for_transformer(preset: Preset, *, warmup: int) -> OptimizerConfig:
    """What transformers learn by: Muon, and in the published configurations AdamW."""
    from tessera.engine.optim.config import OptimizerConfig

    return OptimizerConfig(
        name="adamw" if preset == "paper" else "muon",
        lr={"tiny": 2e-3, "small": 2e-3, "base": 1e-3, "paper": 1e-4}[preset], betas=(0.9, 0.99), weight_decay=0.03,
        schedule="cosine", warmup_steps=warmup, min_lr_ratio=0.05,
    )  # fmt: skip


def quantizer_of(
    kind: Kind, bits: int, diversity: float = 0.01
) -> FSQConfig | LFQConfig | VQConfig:
    """About 2^bits symbols; FSQ's levels are those its authors recommend (Mentzer 2023, section
    4.1), or near them.

    `diversity` is FSQ's. It keeps large alphabets in use, and makes symbols harder to foretell,
    which a generator pays for: with 1,000 symbols and 0.01 toys are rebuilt at 29.1 dB with a
    perplexity of 973, with 125 and none at 28.4 dB with 58.
    """
    from tessera.nn.quantize import FSQConfig, LFQConfig, VQConfig

    levels = {
        6: (4, 4, 4),
        7: (5, 5, 5),
        8: (8, 6, 5),
        10: (8, 5, 5, 5),
        13: (8, 8, 8, 4, 4),
        14: (8, 8, 8, 6, 5),
    }
    if kind == "fsq":
        return FSQConfig(levels=levels[bits], diversity=diversity)
    if kind == "vq":
        return VQConfig(codebook_size=2**bits)
    return LFQConfig(codebook_size=2**bits, spherical=kind == "bsq")


def perceptual_of(preset: Preset, choice: str) -> PerceptualConfig | None:
    """on, off, the path of a VGG16 file, or auto: on for base and paper where its network is
    installed.

    `auto` is settled here and now, so that the run's config says what was used and not what might
    have been.
    """
    from tessera.modalities.image.efficientnet_lite import installed
    from tessera.modalities.image.perceptual import PerceptualConfig

    if choice == "auto":
        choice = "on" if installed() and preset in ("base", "paper") else "off"
    return None if choice == "off" else PerceptualConfig(vgg=None if choice == "on" else choice)


def critic_of(
    choice: Critic, dim: int, depth: int, heads: int
) -> CriticConfig | CriticHeadConfig | None:
    """Beside a model of this size."""
    from tessera.nn.masked_transformer import CriticConfig, CriticHeadConfig

    own = CriticConfig(dim=dim, depth=depth // 2, heads=heads)
    return {"off": None, "head": CriticHeadConfig(dim=dim), "own": own}[choice]


def text_of(preset: Preset, text: str) -> LearnedTextConfig | PretrainedTextConfig | None:
    """What reads captions: an encoder that is learnt with the model, nothing, or one of Hugging
    Face's."""
    from tessera.text.encoder import LearnedTextConfig, PretrainedTextConfig

    if text == "none":
        return None
    if text != "learned":
        return PretrainedTextConfig(name=text)
    dim, depth, heads = {
        "tiny": (32, 1, 2),
        "small": (128, 1, 4),
        "base": (512, 6, 8),
        "paper": (512, 6, 8),
    }[preset]
    tokens = {"tiny": 300, "small": 1024, "base": 8192, "paper": 8192}[preset]
    return LearnedTextConfig(dim=dim, depth=depth, heads=heads, tokens=tokens)
