"""Recipes for music: a joint embedding of music and text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tessera.recipes.presets import (
    Preset,
    build_text_config,
    engine_defaults,
    transformer_optimizer,
)

if TYPE_CHECKING:
    from tessera.modalities.music.dataset import MusicDataConfig
    from tessera.modalities.music.spectrogram_transformer import SpectrogramTransformerConfig
    from tessera.run.config import Run

MULAN = (
    "MuLan (Huang 2022, arXiv 2208.12415): 10 s of log-mel at 16 kHz, an audio transformer and "
    "BERT, embeddings of 128 dimensions, 44 M recordings; no published parameter count was found."
)


def music_mulan(
    preset: Preset = "small",
    text: str = "learned",
    loss: Literal["softmax", "decoupled", "sigmoid"] = "decoupled",
) -> Run:
    """Train a joint embedding of music and text (MuLan), for search and as a condition.

    Args:
        preset: The size of the run: tiny (seconds, for tests), small (minutes on a laptop),
            base (one GPU) or paper (as published).
        text: The text encoder: learned (trained on the captions, without downloads), or the local
            path or hub id of a Hugging Face encoder.
        loss: The contrastive loss: softmax, decoupled (better in small batches) or sigmoid (each
            pair is independent of the others).
    """
    from tessera.modalities.music.contrastive import MusicContrastiveConfig
    from tessera.modalities.music.mulan import MuLaNConfig
    from tessera.run.config import Run

    text_encoder = build_text_config(preset, text)
    if text_encoder is None:
        raise ValueError(
            f"The text encoder is {text!r}, but MuLan compares music with text: use --text "
            "learned, or the path or hub id of a Hugging Face encoder."
        )
    builders = {
        "tiny": _mulan_tiny,
        "small": _mulan_small,
        "base": _mulan_base,
        "paper": _mulan_paper,
    }
    parts = builders[preset]()
    return Run(
        recipe="music-mulan",
        task=MusicContrastiveConfig(
            model=MuLaNConfig(audio=parts.audio, text=text_encoder),
            loss=loss,
            optimizer=transformer_optimizer(preset, warmup_steps=max(10, parts.steps // 10)),
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
class _MuLanPreset:
    audio: SpectrogramTransformerConfig
    data: MusicDataConfig
    steps: int
    batch_size: int
    num_workers: int = 0
    reference: str = ""


def _mulan_tiny() -> _MuLanPreset:
    from tessera.modalities.music.dataset import MusicDataConfig
    from tessera.modalities.music.spectrogram_transformer import SpectrogramTransformerConfig

    return _MuLanPreset(
        audio=SpectrogramTransformerConfig(
            rate_hz=8_000,
            window=512,
            hop=128,
            bands=32,
            patch=(16, 8),
            dim=32,
            depth=2,
            heads=2,
        ),
        data=MusicDataConfig(rate_hz=8_000, seconds=0.5, num_synthetic=64, val_fraction=0.25),
        steps=20,
        batch_size=8,
    )


def _mulan_small() -> _MuLanPreset:
    from tessera.modalities.music.dataset import MusicDataConfig
    from tessera.modalities.music.spectrogram_transformer import SpectrogramTransformerConfig

    return _MuLanPreset(
        audio=SpectrogramTransformerConfig(
            rate_hz=8_000,
            window=512,
            hop=128,
            bands=64,
            patch=(16, 16),
            dim=128,
            depth=4,
            heads=4,
        ),
        data=MusicDataConfig(rate_hz=8_000, seconds=2.0, num_synthetic=2048, val_fraction=0.125),
        steps=300,
        batch_size=64,
    )


def _mulan_base() -> _MuLanPreset:
    from tessera.modalities.music.dataset import MusicDataConfig
    from tessera.modalities.music.spectrogram_transformer import SpectrogramTransformerConfig

    return _MuLanPreset(
        audio=SpectrogramTransformerConfig(
            rate_hz=16_000,
            window=1024,
            hop=256,
            bands=128,
            patch=(16, 16),
            dim=512,
            depth=12,
            heads=8,
        ),
        data=MusicDataConfig(rate_hz=16_000, seconds=10.0, num_synthetic=20_000, val_fraction=0.02),
        steps=100_000,
        batch_size=512,
        num_workers=8,
    )


def _mulan_paper() -> _MuLanPreset:
    base = _mulan_base()
    return replace(
        base,
        audio=replace(base.audio, dim=768, heads=12),
        steps=500_000,
        batch_size=4096,
        reference=MULAN,
    )
