"""Recipes for music and texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tessera.recipes.presets import Preset, engine_defaults, for_transformer, text_of

if TYPE_CHECKING:
    from tessera.run.config import Run

MULAN = (
    "MuLan (Huang 2022, arXiv 2208.12415): 10 s of log-mel at 16 kHz, an audio transformer and BERT, points of 128 numbers, "
    "44 M recordings; the sources at hand state no parameter count."
)


def music_mulan(
    preset: Preset = "small",
    text: str = "learned",
    loss: Literal["softmax", "decoupled", "sigmoid"] = "decoupled",
) -> Run:
    """Music and text in one space (MuLan): which text belongs to which music, for search and as a
    condition.

    Args: preset: tiny (seconds, for tests), small (minutes on a laptop), base (one GPU), paper (as
        published). text: learned (from the captions, no downloads), or a Hugging Face encoder: a
        local path or a hub id. loss: softmax, decoupled (better in small batches), or sigmoid (each
        pair by itself).
    """
    from tessera.modalities.music.contrastive import MusicContrastiveConfig
    from tessera.modalities.music.dataset import MusicDataConfig
    from tessera.modalities.music.mulan import MuLaNConfig
    from tessera.modalities.music.spectrogram_transformer import SpectrogramTransformerConfig
    from tessera.run.config import Run

    reader = text_of(preset, text)
    if reader is None:
        raise ValueError(
            "Music is held against texts here, so something must read them: --text learned, or a Hugging Face encoder."
        )
    dim, depth, heads = {
        "tiny": (32, 2, 2),
        "small": (128, 4, 4),
        "base": (512, 12, 8),
        "paper": (768, 12, 12),
    }[preset]
    rate_hz, window, hop = (8_000, 512, 128) if preset in ("tiny", "small") else (16_000, 1024, 256)
    audio = SpectrogramTransformerConfig(
        rate_hz=rate_hz,
        window=window,
        hop=hop,
        bands=32 if preset == "tiny" else 64 if preset == "small" else 128,
        patch=(16, 8) if preset == "tiny" else (16, 16),
        dim=dim,
        depth=depth,
        heads=heads,
    )
    engine = engine_defaults(
        preset,
        steps={"tiny": 20, "small": 300, "base": 100_000, "paper": 500_000}[preset],
        batch_size={"tiny": 8, "small": 64, "base": 512, "paper": 4096}[preset],
        num_workers=8 if preset in ("base", "paper") else 0,
    )
    data = {
        "tiny": MusicDataConfig(rate_hz=rate_hz, seconds=0.5, num_synthetic=64, val_fraction=0.25),
        "small": MusicDataConfig(rate_hz=rate_hz, seconds=2.0, num_synthetic=2048, val_fraction=0.125),
        "base": MusicDataConfig(rate_hz=rate_hz, seconds=10.0, num_synthetic=20_000, val_fraction=0.02),
        "paper": MusicDataConfig(rate_hz=rate_hz, seconds=10.0, num_synthetic=20_000, val_fraction=0.02),
    }[preset]
    optimizer = for_transformer(preset, warmup=max(10, engine.steps // 10))
    return Run(
        recipe="music-mulan",
        task=MusicContrastiveConfig(
            model=MuLaNConfig(audio=audio, text=reader), loss=loss, optimizer=optimizer
        ),
        data=data,
        engine=engine,
        reference=MULAN if preset == "paper" else "",
    )
