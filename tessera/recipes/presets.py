"""Presets, and the choices and defaults that several recipes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from tessera.data.dataset import DataConfig
    from tessera.engine.config import EngineConfig
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.engine.task import TaskConfig
    from tessera.modalities.image.perceptual import PerceptualConfig
    from tessera.nn.masked_transformer import CriticConfig, CriticHeadConfig
    from tessera.nn.quantize import LevelQuantizerConfig
    from tessera.run.config import Run
    from tessera.text.learned import LearnedTextConfig
    from tessera.text.pretrained import PretrainedTextConfig

Preset = Literal["tiny", "small", "base", "paper"]
"""tiny trains in seconds, for tests; small in minutes on a laptop, and is the default; base needs
one GPU; paper has the published size."""

QuantizerChoice = Literal["fsq", "lfq", "bsq", "vq", "simvq"]
"""fsq needs no tuning; lfq and bsq scale to huge codebooks; vq learns its codebook; simvq learns a
linear map of a fixed codebook."""

AdversaryChoice = Literal["auto", "on", "off"]
"""Whether discriminators are trained; auto trains them in base and paper."""

CriticChoice = Literal["off", "head", "own"]
"""The token critic: none, a small network on the hidden states of the model, or a transformer of
its own."""


class _EngineDefaults(NamedTuple):
    log_every: int
    checkpoint_every: int
    """The interval of validation and samples too."""
    ema_decay: float


_ENGINE_DEFAULTS: dict[Preset, _EngineDefaults] = {
    "tiny": _EngineDefaults(log_every=1, checkpoint_every=10, ema_decay=0.9),
    "small": _EngineDefaults(log_every=10, checkpoint_every=500, ema_decay=0.99),
    "base": _EngineDefaults(log_every=50, checkpoint_every=2000, ema_decay=0.999),
    "paper": _EngineDefaults(log_every=50, checkpoint_every=5000, ema_decay=0.9999),
}

_TRANSFORMER_LR: dict[Preset, float] = {"tiny": 2e-3, "small": 2e-3, "base": 1e-3, "paper": 1e-4}

_FSQ_LEVELS = {
    6: (4, 4, 4),
    7: (5, 5, 5),
    8: (8, 6, 5),
    10: (8, 5, 5, 5),
    11: (8, 8, 6, 5),
    12: (8, 8, 8, 8),
    13: (8, 8, 8, 4, 4),
    14: (8, 8, 8, 6, 5),
}
"""FSQ levels by bits, as recommended by Mentzer 2023, section 4.1, or close to that."""


def engine_defaults(
    preset: Preset,
    *,
    steps: int,
    batch_size: int,
    num_workers: int = 0,
    ema_decay: float | None = None,
    sample_count: int = 16,
) -> EngineConfig:
    """Return the engine configuration of a preset.

    Larger presets log and save less often, and average over more steps unless `ema_decay` is given.
    """
    from tessera.engine.config import EngineConfig
    from tessera.engine.ema import EMAConfig

    defaults = _ENGINE_DEFAULTS[preset]
    return EngineConfig(
        steps=steps,
        batch_size=batch_size,
        num_workers=num_workers,
        log_every=defaults.log_every,
        validate_every=defaults.checkpoint_every,
        sample_every=defaults.checkpoint_every,
        sample_count=sample_count,
        checkpoint_every=defaults.checkpoint_every,
        ema=EMAConfig(decay=defaults.ema_decay if ema_decay is None else ema_decay),
    )


def tokenizer_optimizer(lr: float, *, steps: int) -> OptimizerConfig:
    """Return the optimizer of a tokenizer: AdamW with a cosine schedule after a warm-up."""
    from tessera.engine.optim.config import OptimizerConfig

    return OptimizerConfig(
        lr=lr, schedule="cosine", warmup_steps=max(10, steps // 50), min_lr_ratio=0.05
    )


def discriminator_optimizer(
    tokenizer: OptimizerConfig, *, betas: tuple[float, float]
) -> OptimizerConfig:
    """Return the optimizer of discriminators: half the tokenizer's learning rate, no decay."""
    from tessera.engine.optim.config import OptimizerConfig

    return OptimizerConfig(
        lr=tokenizer.lr / 2,
        betas=betas,
        schedule="warmup",
        warmup_steps=tokenizer.warmup_steps,
    )


def transformer_optimizer(preset: Preset, *, warmup_steps: int) -> OptimizerConfig:
    """Return the optimizer of a transformer: Muon, and AdamW in the published configurations."""
    from tessera.engine.optim.config import OptimizerConfig

    return OptimizerConfig(
        name="adamw" if preset == "paper" else "muon",
        lr=_TRANSFORMER_LR[preset],
        betas=(0.9, 0.99),
        weight_decay=0.03,
        schedule="cosine",
        warmup_steps=warmup_steps,
        min_lr_ratio=0.05,
    )


def build_quantizer_config(
    choice: QuantizerChoice, bits: int, diversity: float = 0.01
) -> LevelQuantizerConfig:
    """Return a quantizer with about 2^bits codes.

    `diversity` applies to FSQ. It keeps large codebooks in use, but makes tokens harder to predict
    for a generator: on synthetic images, 1,000 codes with 0.01 reach a reconstruction of 29.1 dB
    with a codebook perplexity of 973, and 125 codes with 0 reach 28.4 dB with 58.
    """
    from tessera.nn.quantize import FSQConfig, LFQConfig, SimVQConfig, VQConfig

    if choice == "fsq":
        return FSQConfig(levels=_FSQ_LEVELS[bits], diversity=diversity)
    if choice == "vq":
        return VQConfig(codebook_size=2**bits)
    if choice == "simvq":
        return SimVQConfig(codebook_size=2**bits)
    return LFQConfig(codebook_size=2**bits, spherical=choice == "bsq")


def build_perceptual_config(
    choice: str, *, auto: bool, weight: float = 1.0, fraction: float = 1.0
) -> PerceptualConfig | None:
    """Return the perceptual loss for on, off, auto or the path of a VGG16 file.

    The choice auto is on if `auto` is true and the package of its network is installed. It is
    resolved here, so that the run's config.json has the loss that was used.
    """
    from tessera.modalities.image.efficientnet_lite import is_installed
    from tessera.modalities.image.perceptual import PerceptualConfig

    if choice == "auto":
        choice = "on" if auto and is_installed() else "off"
    if choice == "off":
        return None
    return PerceptualConfig(
        weight=weight, fraction=fraction, vgg=None if choice == "on" else choice
    )


def has_adversary(preset: Preset, choice: AdversaryChoice) -> bool:
    """Return whether discriminators are trained."""
    return choice == "on" or (choice == "auto" and preset in ("base", "paper"))


def build_critic_config(
    choice: CriticChoice, dim: int, depth: int, heads: int
) -> CriticConfig | CriticHeadConfig | None:
    """Return the token critic of a transformer of this size."""
    from tessera.nn.masked_transformer import CriticConfig, CriticHeadConfig

    if choice == "off":
        return None
    if choice == "head":
        return CriticHeadConfig(dim=dim)
    if choice == "own":
        return CriticConfig(dim=dim, depth=depth // 2, heads=heads)
    raise ValueError(f"The critic is {choice!r}, which is unknown: use off, head or own.")


def build_text_config(preset: Preset, text: str) -> LearnedTextConfig | PretrainedTextConfig | None:
    """Return the text encoder for learned, none or the name of a Hugging Face encoder."""
    from tessera.text.learned import LearnedTextConfig
    from tessera.text.pretrained import PretrainedTextConfig

    if text == "none":
        return None
    if text != "learned":
        return PretrainedTextConfig(name=text)
    if preset == "tiny":
        return LearnedTextConfig(dim=32, depth=1, heads=2, vocab_size=300, ignore_punctuation=True)
    if preset == "small":
        return LearnedTextConfig(
            dim=128, depth=1, heads=4, vocab_size=1024, ignore_punctuation=True
        )
    return LearnedTextConfig(dim=512, depth=6, heads=8, vocab_size=8192, ignore_punctuation=True)


@dataclass(frozen=True, kw_only=True)
class MaskGITPreset:
    """A masked generator of one size; a modality may add fields."""

    dim: int
    depth: int
    heads: int
    max_positions: int | None
    data: DataConfig
    steps: int
    batch_size: int
    ema_decay: float
    decoding_steps: int = 12
    guidance: float = 3.0
    """The scale of classifier-free guidance."""
    reference: str = ""


def build_maskgit_run(
    recipe: str,
    preset: Preset,
    parts: MaskGITPreset,
    task: Callable[..., TaskConfig],
    text: str,
    critic: CriticChoice,
    **tokenizers: str,
) -> Run:
    """Return the run of a masked generator; `task` is the class of its configuration."""
    from tessera.nn.masked_transformer import MaskedTransformerConfig
    from tessera.run.config import Run
    from tessera.sampling.guidance import Guidance
    from tessera.sampling.maskgit import MaskedSampling

    optimizer = transformer_optimizer(preset, warmup_steps=max(10, parts.steps // 20))
    return Run(
        recipe=recipe,
        task=task(
            **tokenizers,
            max_positions=parts.max_positions,
            model=MaskedTransformerConfig(
                dim=parts.dim,
                depth=parts.depth,
                heads=parts.heads,
                text=build_text_config(preset, text),
            ),
            critic=build_critic_config(critic, parts.dim, parts.depth, parts.heads),
            critic_optimizer=replace(optimizer, name="adamw"),
            sampling=MaskedSampling(decoding_steps=parts.decoding_steps),
            guidance=Guidance(scale=parts.guidance),
            optimizer=optimizer,
        ),
        data=parts.data,
        engine=engine_defaults(
            preset, steps=parts.steps, batch_size=parts.batch_size, ema_decay=parts.ema_decay
        ),
        reference=parts.reference,
    )
