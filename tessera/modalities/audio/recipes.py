"""Recipes over sound."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from tessera.recipes.presets import (
    Critic,
    Preset,
    critic_of,
    engine_defaults,
    for_transformer,
    quantizer_of,
)

if TYPE_CHECKING:
    from tessera.modalities.audio.dataset import AudioDataConfig
    from tessera.run.config import Run

SOUNDSTREAM = (
    "SoundStream (Zeghidour 2021, arXiv 2107.03312): 24 kHz, strides 2, 4, 5 and 8, 8 levels of 1,024 symbols at 75 frames a "
    "second, 6 kbit/s; 8.4 M parameters."
)


NO_RATE = 1e-15
"""A rate at which no weight moves: less than the last bit of any that matters."""


def audio_codec(
    preset: Preset = "small",
    quantizer: Literal["vq", "fsq", "lfq"] = "vq",
    adversary: Literal["auto", "on", "off"] = "auto",
    codec: str = "own",
) -> Run:
    """A sound codec (SoundStream with DAC's lessons): recordings to a few symbols for each short
    frame, and back.

    Args: preset: tiny (seconds, for tests), small (minutes on a laptop), base (one GPU), paper (as
        published). quantizer: vq learns its codebooks; fsq and lfq need none. adversary: judges
        that hear periods and bands of frequencies: on, off, or auto: on for base and paper. codec:
        own, or the local folder of a Hugging Face EnCodec or DAC, which is taken over as it is, in
        one step.
    """
    if codec != "own":
        return adopted(codec)
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.modalities.audio.codec import AudioCodecConfig
    from tessera.modalities.audio.dataset import AudioDataConfig
    from tessera.modalities.audio.discriminators import (
        BandDiscriminatorConfig,
        PeriodDiscriminatorConfig,
    )
    from tessera.modalities.audio.reconstruction import (
        AudioAdversaryConfig,
        AudioReconstructionConfig,
        AudioTokenizerConfig,
    )
    from tessera.nn.quantize import ResidualConfig, VQConfig
    from tessera.run.config import Run

    bits, num_quantizers = {"tiny": (6, 2), "small": (8, 8), "base": (10, 8), "paper": (10, 8)}[
        preset
    ]
    kind = (
        VQConfig(codebook_size=2**bits, code_dim=8 if preset == "tiny" else 32)
        if quantizer == "vq"
        else quantizer_of(quantizer, bits)
    )
    cascade = ResidualConfig(
        quantizer=kind, num_quantizers=num_quantizers, dropout=0.25 if preset == "small" else 0.5
    )
    model = {
        "tiny": AudioCodecConfig(
            dim=4,
            max_channels=16,
            strides=(4, 5),
            dilations=(1,),
            plain_stages=1,
            quantizer=cascade,
        ),
        "small": AudioCodecConfig(
            dim=16, max_channels=128, strides=(8, 5, 4, 2), plain_stages=1, quantizer=cascade
        ),
        "base": AudioCodecConfig(dim=32, max_channels=512, strides=(2, 4, 5, 8), quantizer=cascade),
        "paper": AudioCodecConfig(
            dim=32, max_channels=512, strides=(2, 4, 5, 8), activation="elu", quantizer=cascade
        ),
    }[preset]
    engine = engine_defaults(
        preset,
        steps={"tiny": 20, "small": 1200, "base": 200_000, "paper": 1_000_000}[preset],
        batch_size={"tiny": 4, "small": 8, "base": 32, "paper": 64}[preset],
        num_workers=8 if preset in ("base", "paper") else 0,
        sample_count=4 if preset == "tiny" else 8,
    )
    rate_hz = {"tiny": 8_000, "small": 16_000, "base": 24_000, "paper": 24_000}[preset]
    data = {
        "tiny": AudioDataConfig(rate_hz=rate_hz, seconds=0.5, num_synthetic=24, val_fraction=0.25),
        "small": AudioDataConfig(rate_hz=rate_hz, seconds=1.0),
        "base": AudioDataConfig(rate_hz=rate_hz, seconds=1.0),
        "paper": AudioDataConfig(rate_hz=rate_hz, seconds=2.0),
    }[preset]
    warmup = max(10, engine.steps // 50)
    optimizer = OptimizerConfig(
        lr={"tiny": 2e-3, "small": 1e-3, "base": 3e-4, "paper": 1e-4}[preset],
        betas=(0.8, 0.99),
        schedule="cosine",
        warmup_steps=warmup,
        min_lr_ratio=0.05,
        max_grad_norm=1.0,
    )
    judged = adversary == "on" or (adversary == "auto" and preset in ("base", "paper"))
    dim = {"tiny": 4, "small": 8, "base": 32, "paper": 32}[preset]
    discriminators = AudioAdversaryConfig(
        periods=PeriodDiscriminatorConfig(
            periods=(2, 3, 5, 7, 11) if preset in ("base", "paper") else (2, 5),
            dim=dim,
            max_channels=16 * dim,
        ),
        bands=BandDiscriminatorConfig(dim=dim)
        if preset in ("base", "paper")
        else BandDiscriminatorConfig(dim=dim, windows=(256,)),
        feature_matching_weight=2.0,
        gp_weight=0.0,
        start_step=engine.steps // 4,
        warmup_steps=engine.steps // 10,
        optimizer=OptimizerConfig(
            lr=optimizer.lr / 2, betas=(0.8, 0.99), schedule="warmup", warmup_steps=warmup
        ),
    )
    return Run(
        recipe="audio-codec",
        task=AudioTokenizerConfig(
            model=model,
            # A short run must find the phase before spectra are worth much: with 1, toys stayed at
            # -35 dB for 1,200 steps.
            reconstruction=AudioReconstructionConfig(
                rate_hz=rate_hz, mel=0.3 if preset == "small" else 1.0
            ),
            adversary=discriminators if judged else None,
            optimizer=optimizer,
        ),
        data=data,
        engine=engine,
        reference=SOUNDSTREAM if preset == "paper" else "",
    )


def adopted(folder: str) -> Run:
    """Somebody else's codec as a run of ours: what stands on a codec can stand on it, and what uses
    one can use it."""
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.modalities.audio.dataset import AudioDataConfig
    from tessera.modalities.audio.pretrained_codec import PretrainedCodecConfig
    from tessera.modalities.audio.reconstruction import (
        AudioReconstructionConfig,
        AudioTokenizerConfig,
    )
    from tessera.run.config import Run

    model = PretrainedCodecConfig(path=folder)
    return Run(
        recipe="audio-codec",
        task=AudioTokenizerConfig(
            model=model,
            reconstruction=AudioReconstructionConfig(rate_hz=model.rate_hz),
            optimizer=OptimizerConfig(name="adam", lr=NO_RATE, schedule="constant"),
        ),
        data=AudioDataConfig(rate_hz=model.rate_hz, seconds=1.0),
        engine=engine_defaults("small", steps=1, batch_size=4, sample_count=4),
    )


def audio_semantic(preset: Preset = "small", features: str = "mel") -> Run:
    """Semantic tokens: what is said in a recording, one symbol for each frame, by k-means over
    features.

    Args: preset: tiny (seconds, for tests), small (minutes on a laptop), base (one GPU), paper (as
        published). features: mel (MFCC with deltas, no downloads), voice (a speaker network,
        tessera[voice]), or the local folder of a Hugging Face speech model such as HuBERT.
    """
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.modalities.audio.features import (
        MFCCFeaturesConfig,
        SpeechFeaturesConfig,
        VoiceFeaturesConfig,
    )
    from tessera.modalities.audio.semantic import SemanticConfig
    from tessera.modalities.audio.semantic_reconstruction import SemanticTokenizerConfig
    from tessera.run.config import Run

    rate_hz = {"tiny": 8_000, "small": 16_000, "base": 24_000, "paper": 24_000}[preset]
    heard: MFCCFeaturesConfig | VoiceFeaturesConfig | SpeechFeaturesConfig = MFCCFeaturesConfig(
        rate_hz=rate_hz, window=rate_hz // 40, hop=rate_hz // (100 if preset == "tiny" else 50)
    )
    if features != "mel":  # networks of others know one rate, and the codec must then have it too
        heard = (
            VoiceFeaturesConfig() if features == "voice" else SpeechFeaturesConfig(path=features)
        )
        rate_hz = heard.rate_hz
    engine = engine_defaults(
        preset,
        steps={"tiny": 20, "small": 400, "base": 10_000, "paper": 50_000}[preset],
        batch_size={"tiny": 4, "small": 16, "base": 64, "paper": 64}[preset],
        num_workers=8 if preset in ("base", "paper") else 0,
        sample_count=8,
    )
    return Run(
        recipe="audio-semantic",
        task=SemanticTokenizerConfig(
            model=SemanticConfig(
                features=heard,
                vocab_size={"tiny": 16, "small": 256, "base": 512, "paper": 1024}[preset],
                normalization_steps={"tiny": 3, "small": 20, "base": 100, "paper": 100}[preset],
            ),
            optimizer=OptimizerConfig(
                lr=1e-3, schedule="cosine", warmup_steps=10, min_lr_ratio=0.05
            ),
        ),
        data=clips(preset, rate_hz),
        engine=engine,
    )


def clips(preset: Preset, rate_hz: int) -> AudioDataConfig:
    """What both of SoundStorm's streams are made of: a few seconds, in which there is a voice to go
    on in."""
    from tessera.modalities.audio.dataset import AudioDataConfig

    if preset == "tiny":
        return AudioDataConfig(
            rate_hz=rate_hz, seconds=0.5, crop="centre", num_synthetic=32, val_fraction=0.25
        )
    return AudioDataConfig(
        rate_hz=rate_hz, seconds=2.0 if preset == "small" else 10.0, crop="centre"
    )


def audio_soundstorm(
    preset: Preset = "small",
    tokenizer: str = "runs/audio-codec",
    semantic: str = "runs/audio-semantic",
    critic: Critic = "off",
) -> Run:
    """Sound from semantic tokens (SoundStorm): all frames at once and level by level, in the voice
    of a recording.

    Args: preset: tiny (seconds, for tests), small (minutes on a laptop), base (one GPU), paper (as
        published). tokenizer: the run folder of the codec whose symbols are learnt. semantic: the
        run folder of the semantic tokens that say what is to be heard. critic: off, or what learns
        to tell drawn symbols from real ones: a head on the model, or a network of its own.
    """
    from tessera.nn.conformer import ConformerConfig
    from tessera.nn.masked_transformer import MaskedTransformerConfig
    from tessera.modalities.audio.soundstorm import SoundStormTaskConfig
    from tessera.objectives.masking import LevelMaskingConfig
    from tessera.run.config import Run
    from tessera.sampling.maskgit import MaskedSampling

    dim, depth, heads = {
        "tiny": (32, 2, 2),
        "small": (128, 4, 4),
        "base": (512, 12, 8),
        "paper": (1024, 12, 16),
    }[preset]
    engine = engine_defaults(
        preset,
        steps={"tiny": 20, "small": 2000, "base": 100_000, "paper": 500_000}[preset],
        batch_size={"tiny": 4, "small": 16, "base": 64, "paper": 128}[preset],
        sample_count=8,
    )
    rate_hz = {"tiny": 8_000, "small": 16_000, "base": 24_000, "paper": 24_000}[preset]
    optimizer = for_transformer(preset, warmup=max(10, engine.steps // 20))
    return Run(
        recipe="audio-soundstorm",
        task=SoundStormTaskConfig(
            tokenizer=tokenizer,
            semantic=semantic,
            model=MaskedTransformerConfig(
                dim=dim,
                depth=depth,
                heads=heads,
                text=None,
                conformer=ConformerConfig(),
                absolute_positions=False,
            ),
            critic=critic_of(critic, dim, depth, heads),
            critic_optimizer=replace(optimizer, name="adamw"),
            masking=LevelMaskingConfig(),
            sampling=MaskedSampling(decoding_steps_per_level=(16, 1), choice_temperature=1.0),
            optimizer=optimizer,
        ),
        data=clips(preset, rate_hz),
        engine=engine,
        reference=SOUNDSTORM if preset == "paper" else "",
    )


SOUNDSTORM = (
    "SoundStorm (Borsos 2023, arXiv 2305.09636): a Conformer of 12 layers, width 1,024, 16 heads and a kernel of 5, 350 M "
    "parameters, on 12 levels of SoundStream at 50 frames a second."
)
