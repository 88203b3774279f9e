"""The sizes of semantic tokenizers: features, networks and training of each preset."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.modalities.audio.ctc import CTCTokenizerConfig
from tessera.modalities.audio.features import MFCCFeaturesConfig
from tessera.modalities.audio.hubert import HubertTokenizerConfig
from tessera.recipes.presets import Preset


@dataclass(frozen=True, kw_only=True)
class SemanticPreset:
    mfcc: MFCCFeaturesConfig
    """The features of `mel`, in windows of 25 ms."""
    ctc: CTCTokenizerConfig
    """The recogniser of `ctc`."""
    hubert: HubertTokenizerConfig
    """The network of `hubert`."""
    vocab_size: int
    normalization_steps: int
    steps: int
    batch_size: int
    num_workers: int = 0


def semantic_preset(preset: Preset) -> SemanticPreset:
    if preset == "tiny":
        return SemanticPreset(
            mfcc=MFCCFeaturesConfig(rate_hz=8_000, token_rate_hz=100.0),
            ctc=CTCTokenizerConfig(
                rate_hz=8_000,
                token_rate_hz=100.0,
                bands=16,
                dim=32,
                encoder_depth=1,
                encoder_context_depth=1,
                context_kernel=5,
                heads=2,
                vocab_size=16,
                codebook_start=3,
            ),
            hubert=HubertTokenizerConfig(
                rate_hz=8_000,
                token_rate_hz=100.0,
                bands=16,
                dim=32,
                encoder_depth=1,
                context_depth=2,
                context_kernel=5,
                heads=2,
                layer=1,
                num_targets=16,
                normalization_steps=2,
                target_steps=4,
                mask_seconds=0.05,
                vocab_size=16,
                codebook_start=5,
            ),
            vocab_size=16,
            normalization_steps=3,
            steps=20,
            batch_size=4,
        )
    if preset == "small":
        return SemanticPreset(
            mfcc=MFCCFeaturesConfig(rate_hz=16_000),
            ctc=CTCTokenizerConfig(rate_hz=16_000, codebook_start=1000),
            hubert=HubertTokenizerConfig(rate_hz=16_000),
            vocab_size=256,
            normalization_steps=20,
            steps=400,
            batch_size=16,
        )
    return SemanticPreset(
        mfcc=MFCCFeaturesConfig(rate_hz=24_000),
        ctc=CTCTokenizerConfig(
            rate_hz=24_000,
            bands=80,
            dim=512,
            encoder_depth=6,
            encoder_context_depth=8,
            heads=8,
            vocab_size=256,
            code_dim=16,
            codebook_start=20_000,
        ),
        hubert=HubertTokenizerConfig(
            rate_hz=24_000,
            bands=80,
            dim=512,
            context_depth=12,
            heads=8,
            layer=9,
            num_targets=500,
            normalization_steps=100,
            target_steps=1000,
            vocab_size=1024,
            codebook_start=20_000,
        ),
        vocab_size=512 if preset == "base" else 1024,
        normalization_steps=100,
        steps=10_000 if preset == "base" else 50_000,
        batch_size=64,
        num_workers=8,
    )
