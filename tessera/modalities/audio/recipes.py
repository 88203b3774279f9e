"""Recipes for audio: a codec, semantic tokens, and SoundStorm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tessera.recipes.presets import (
    AdversaryChoice,
    CriticChoice,
    Preset,
    build_critic_config,
    discriminator_optimizer,
    engine_defaults,
    has_adversary,
    tokenizer_optimizer,
    transformer_optimizer,
)

if TYPE_CHECKING:
    from tessera.modalities.audio.ctc import CTCTokenizerConfig
    from tessera.modalities.audio.dataset import AudioDataConfig
    from tessera.modalities.audio.features import (
        MFCCFeaturesConfig,
        SpeechFeaturesConfig,
        VoiceFeaturesConfig,
    )
    from tessera.modalities.audio.hubert import HubertTokenizerConfig
    from tessera.run.config import Run

AudioQuantizerChoice = Literal["vq", "fsq", "lfq"]
CodecNetworkChoice = Literal["auto", "spectral", "soundstream"]
SpeakerEmbeddingChoice = Literal["off", "on"]
CodecRateChoice = Literal["preset", "16000", "24000", "44100", "48000"]

SOUNDSTORM = (
    "SoundStorm (Borsos 2023, arXiv 2305.09636): a Conformer of 12 layers, dimension 1,024, 16 "
    "heads and a kernel of 5, 350 M parameters, on 12 levels of SoundStream at 50 frames per "
    "second."
)

SPECTRAL_SAMPLES, SOUNDSTREAM_SAMPLES = 100.0, 10.0
"""The weight of the difference of samples. Spectral network, 51 CPU seconds on telephone prompts:
with 10 a SI-SDR of 3.8 dB, a STOI of 0.64 and a mel distance of 0.45, with 30 6.7 dB, 0.69 and
0.46, with 100 8.0 dB, 0.74 and 0.52."""

SPECTRAL_CUTOFF_HZ, SPECTRAL_MEL = 1_000.0, 6.0
"""Of the spectral network. After 90 CPU seconds on telephone prompts: with a weight of 3 a SI-SDR
of 7.9 dB, a STOI of 0.853 and a PESQ of 1.60, with 6 7.6 dB, 0.870 and 1.63; with 10 and a cutoff
of 500 Hz 6.2 dB, 0.879 and 1.59."""

FROZEN_LR = 1e-15
"""A learning rate that changes no weight: its updates are below the last bit of all that matter."""


# ---- codec


def audio_codec(
    preset: Preset = "small",
    quantizer: AudioQuantizerChoice = "vq",
    adversary: AdversaryChoice = "auto",
    codec: str = "own",
    network: CodecNetworkChoice = "auto",
    rate: CodecRateChoice = "preset",
) -> Run:
    """Train an audio codec (residual quantization as in SoundStream): audio to tokens, and back.

    Args:
        preset: The size of the run: tiny (seconds, for tests), small (minutes on a laptop),
            base (one GPU) or paper (as published).
        quantizer: The quantizer of each level: vq learns its codebooks; fsq and lfq have none to
            learn.
        adversary: The discriminators of periods and of frequency bands: on, off, or auto, which is
            on for base and paper.
        codec: The codec: own trains one; the local folder of a Hugging Face EnCodec or DAC makes a
            run of that codec, unchanged, in one step.
        network: The network: spectral computes on MDCT coefficients at the rate of the frames,
            soundstream on samples; auto is soundstream for base and paper, else spectral.
        rate: The sampling rate of data, network and loss. The spectral network has 50 frames per
            second at any of them; the strides of soundstream are not changed.
    """
    if codec != "own":
        return _build_pretrained_codec_run(codec)
    from tessera.modalities.audio.codec_presets import (
        at_rate,
        codec_preset,
        spectral_mel_windows,
    )
    from tessera.modalities.audio.reconstruction import (
        AudioAdversaryConfig,
        AudioReconstructionConfig,
        AudioTokenizerConfig,
        mel_windows,
    )
    from tessera.run.config import Run

    parts = codec_preset(preset, quantizer)
    if rate != "preset":
        parts = at_rate(parts, int(rate))
    is_spectral = network == "spectral" or (network == "auto" and preset in ("tiny", "small"))
    lr = parts.spectral_lr if is_spectral and parts.spectral_lr is not None else parts.lr
    optimizer = replace(
        tokenizer_optimizer(lr, steps=parts.steps), betas=(0.8, 0.99), max_grad_norm=1.0
    )
    discriminators = None
    if has_adversary(preset, adversary):
        discriminators = AudioAdversaryConfig(
            periods=parts.period_discriminator,
            bands=parts.band_discriminator,
            feature_matching_weight=2.0,
            gp_weight=0.0,
            start_step=parts.steps // 4,
            warmup_steps=parts.steps // 10,
            optimizer=discriminator_optimizer(optimizer, betas=(0.8, 0.99)),
        )
    return Run(
        recipe="audio-codec",
        task=AudioTokenizerConfig(
            model=parts.spectral if is_spectral else parts.soundstream,
            reconstruction=AudioReconstructionConfig(
                rate_hz=parts.data.rate_hz,
                samples=SPECTRAL_SAMPLES if is_spectral else SOUNDSTREAM_SAMPLES,
                samples_cutoff_hz=SPECTRAL_CUTOFF_HZ if is_spectral else None,
                mel=SPECTRAL_MEL if is_spectral else parts.soundstream_mel,
                mel_windows=(spectral_mel_windows if is_spectral else mel_windows)(
                    parts.data.rate_hz
                ),
            ),
            adversary=discriminators,
            optimizer=optimizer,
        ),
        data=parts.data,
        engine=engine_defaults(
            preset,
            steps=parts.steps,
            batch_size=parts.batch_size,
            num_workers=parts.num_workers,
            sample_count=parts.sample_count,
        ),
        reference=parts.reference,
    )


def _build_pretrained_codec_run(folder: str) -> Run:
    """Return a run whose single step stores a pretrained codec unchanged.

    Models that depend on a codec, and commands that use one, can then use the run directory.
    """
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
            optimizer=OptimizerConfig(name="adam", lr=FROZEN_LR, schedule="constant"),
        ),
        data=AudioDataConfig(rate_hz=model.rate_hz, seconds=1.0),
        engine=engine_defaults("small", steps=1, batch_size=4, sample_count=4),
    )


# ---- semantic tokens


def audio_semantic(
    preset: Preset = "small", features: str = "mel", token_rate_hz: float | None = None
) -> Run:
    """Train a semantic tokenizer: one token per frame for what is spoken.

    Args:
        preset: The size of the run: tiny (seconds, for tests), small (minutes on a laptop),
            base (one GPU) or paper (as published).
        features: The features: mel (k-means on MFCC with deltas, without transcripts), ctc (a small
            speech recogniser that is trained on transcripts, whose tokens have less of the
            speaker), hubert (a network that is trained to predict masked speech, without
            transcripts), voice (k-means on a speaker network, needs tessera[voice]), or the local
            folder of a Hugging Face speech model such as HuBERT.
        token_rate_hz: The tokens per second, for mel, ctc and hubert; by default 50, and 100 in
            tiny.
    """
    from tessera.modalities.audio.semantic_presets import semantic_preset

    parts = semantic_preset(preset)
    if features == "ctc":
        return _build_ctc_run(preset, parts.ctc, token_rate_hz)
    if features == "hubert":
        return _build_hubert_run(preset, parts.hubert, token_rate_hz)
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.modalities.audio.features import SpeechFeaturesConfig, VoiceFeaturesConfig
    from tessera.modalities.audio.semantic import SemanticConfig
    from tessera.modalities.audio.semantic_reconstruction import SemanticTokenizerConfig
    from tessera.run.config import Run

    chosen: MFCCFeaturesConfig | VoiceFeaturesConfig | SpeechFeaturesConfig = parts.mfcc
    if features == "voice":
        chosen = VoiceFeaturesConfig()
    elif features != "mel":
        chosen = SpeechFeaturesConfig(path=features)
    if token_rate_hz is not None:
        chosen = _with_token_rate(chosen, token_rate_hz)
    return Run(
        recipe="audio-semantic",
        task=SemanticTokenizerConfig(
            model=SemanticConfig(
                features=chosen,
                vocab_size=parts.vocab_size,
                normalization_steps=parts.normalization_steps,
            ),
            optimizer=OptimizerConfig(
                lr=1e-3, schedule="cosine", warmup_steps=10, min_lr_ratio=0.05
            ),
        ),
        # Pretrained networks have a fixed sample rate, which the codec must then have too.
        data=_build_speech_data(preset, chosen.rate_hz),
        engine=engine_defaults(
            preset,
            steps=parts.steps,
            batch_size=parts.batch_size,
            num_workers=parts.num_workers,
            sample_count=8,
        ),
    )


def _with_token_rate(
    features: MFCCFeaturesConfig | VoiceFeaturesConfig | SpeechFeaturesConfig,
    token_rate_hz: float,
) -> MFCCFeaturesConfig:
    """Return the features with another number of frames per second."""
    from tessera.modalities.audio.features import MFCCFeaturesConfig
    from tessera.run.errors import UserError

    if not isinstance(features, MFCCFeaturesConfig):
        raise UserError(
            "--token-rate-hz is for the features mel, ctc and hubert: the token rate of a "
            "pretrained network is fixed."
        )
    return replace(features, token_rate_hz=token_rate_hz)


def _build_ctc_run(preset: Preset, model: CTCTokenizerConfig, token_rate_hz: float | None) -> Run:
    from tessera.modalities.audio.recognition import RecognitionConfig
    from tessera.modalities.audio.semantic_reconstruction import SemanticTokenizerConfig
    from tessera.run.config import Run

    if token_rate_hz is not None:
        model = replace(model, token_rate_hz=token_rate_hz)
    steps = {"tiny": 20, "small": 2500, "base": 50_000, "paper": 200_000}[preset]
    return Run(
        recipe="audio-semantic",
        task=SemanticTokenizerConfig(
            model=model,
            reconstruction=RecognitionConfig(),
            optimizer=transformer_optimizer(preset, warmup_steps=max(5, steps // 20)),
        ),
        data=_build_transcribed_data(preset, model.rate_hz),
        engine=engine_defaults(
            preset,
            steps=steps,
            batch_size=4 if preset == "tiny" else 16 if preset == "small" else 64,
            num_workers=8 if preset in ("base", "paper") else 0,
            sample_count=8,
        ),
    )


def _build_hubert_run(
    preset: Preset, model: HubertTokenizerConfig, token_rate_hz: float | None
) -> Run:
    from tessera.modalities.audio.semantic_reconstruction import SemanticTokenizerConfig
    from tessera.run.config import Run

    if token_rate_hz is not None:
        model = replace(model, token_rate_hz=token_rate_hz)
    steps = {"tiny": 20, "small": 2500, "base": 50_000, "paper": 200_000}[preset]
    return Run(
        recipe="audio-semantic",
        task=SemanticTokenizerConfig(
            model=model,
            optimizer=transformer_optimizer(preset, warmup_steps=max(5, steps // 20)),
        ),
        data=replace(_build_speech_data(preset, model.rate_hz), crop="random"),
        engine=engine_defaults(
            preset,
            steps=steps,
            batch_size=4 if preset == "tiny" else 16 if preset == "small" else 64,
            num_workers=8 if preset in ("base", "paper") else 0,
            sample_count=8,
        ),
    )


def _build_transcribed_data(preset: Preset, rate_hz: int) -> AudioDataConfig:
    """Return data whose captions are transcripts: whole recordings, of up to some seconds."""
    data = _build_speech_data(preset, rate_hz)
    seconds = {"tiny": 0.8, "small": 4.0}.get(preset, 15.0)
    return replace(data, seconds=seconds, synthetic_content="speech", crop="start", on_long="skip")


def _build_speech_data(preset: Preset, rate_hz: int) -> AudioDataConfig:
    """Return the data of both token streams of SoundStorm: examples long enough for a voice prompt
    and its continuation."""
    from tessera.modalities.audio.dataset import AudioDataConfig

    if preset == "tiny":
        return AudioDataConfig(
            rate_hz=rate_hz, seconds=0.5, crop="centre", num_synthetic=32, val_fraction=0.25
        )
    return AudioDataConfig(
        rate_hz=rate_hz, seconds=2.0 if preset == "small" else 10.0, crop="centre"
    )


# ---- audio from semantic tokens


def audio_soundstorm(
    preset: Preset = "small",
    tokenizer: str = "runs/audio-codec",
    semantic: str = "runs/audio-semantic",
    critic: CriticChoice = "off",
    speaker_embedding: SpeakerEmbeddingChoice = "off",
) -> Run:
    """Train a semantic-to-audio model (SoundStorm): codec tokens in the voice of a prompt.

    Args:
        preset: The size of the run: tiny (seconds, for tests), small (minutes on a laptop),
            base (one GPU) or paper (as published).
        tokenizer: The run directory of the codec whose tokens are generated.
        semantic: The run directory of the semantic tokenizer whose tokens are the condition.
        critic: The token critic, by which sampling can choose the tokens to keep: off, head (a
            small network on the hidden states of the model) or own (a separate transformer).
        speaker_embedding: The summary of the voice prompt as a condition of all frames, by a small
            encoder of its tokens that is trained with the model: on, or off, which leaves the
            prompt to attention.
    """
    from tessera.modalities.audio.soundstorm import SoundStormTaskConfig
    from tessera.nn.conformer import ConformerConfig
    from tessera.nn.masked_transformer import MaskedTransformerConfig
    from tessera.nn.prefix_encoder import PrefixEncoderConfig
    from tessera.objectives.masking import LevelMaskingConfig
    from tessera.run.config import Run
    from tessera.sampling.maskgit import MaskedSampling

    builders = {
        "tiny": _soundstorm_tiny,
        "small": _soundstorm_small,
        "base": _soundstorm_base,
        "paper": _soundstorm_paper,
    }
    parts = builders[preset]()
    optimizer = transformer_optimizer(preset, warmup_steps=max(10, parts.steps // 20))
    return Run(
        recipe="audio-soundstorm",
        task=SoundStormTaskConfig(
            tokenizer=tokenizer,
            semantic=semantic,
            model=MaskedTransformerConfig(
                dim=parts.dim,
                depth=parts.depth,
                heads=parts.heads,
                text=None,
                conformer=ConformerConfig(),
                prefix=PrefixEncoderConfig(dim=parts.dim) if speaker_embedding == "on" else None,
                absolute_positions=False,
            ),
            critic=build_critic_config(critic, parts.dim, parts.depth, parts.heads),
            critic_optimizer=replace(optimizer, name="adamw"),
            masking=LevelMaskingConfig(),
            sampling=MaskedSampling(decoding_steps_per_level=(16, 1), choice_temperature=1.0),
            optimizer=optimizer,
        ),
        data=_build_speech_data(preset, parts.rate_hz),
        engine=engine_defaults(
            preset, steps=parts.steps, batch_size=parts.batch_size, sample_count=8
        ),
        reference=parts.reference,
    )


@dataclass(frozen=True, kw_only=True)
class _SoundStormPreset:
    dim: int
    depth: int
    heads: int
    rate_hz: int
    steps: int
    batch_size: int
    reference: str = ""


def _soundstorm_tiny() -> _SoundStormPreset:
    return _SoundStormPreset(dim=32, depth=2, heads=2, rate_hz=8_000, steps=20, batch_size=4)


def _soundstorm_small() -> _SoundStormPreset:
    return _SoundStormPreset(dim=128, depth=4, heads=4, rate_hz=16_000, steps=2000, batch_size=16)


def _soundstorm_base() -> _SoundStormPreset:
    return _SoundStormPreset(
        dim=512, depth=12, heads=8, rate_hz=24_000, steps=100_000, batch_size=64
    )


def _soundstorm_paper() -> _SoundStormPreset:
    return _SoundStormPreset(
        dim=1024,
        depth=12,
        heads=16,
        rate_hz=24_000,
        steps=500_000,
        batch_size=128,
        reference=SOUNDSTORM,
    )


# ---- semantic tokens from text


def audio_text2semantic(
    preset: Preset = "small",
    tokenizer: str = "runs/audio-semantic",
    soundstorm: str = "runs/audio-soundstorm",
) -> Run:
    """Train text to speech: semantic tokens from text, which SoundStorm turns into a voice.

    Args:
        preset: The size of the run: tiny (seconds, for tests), small (minutes on a laptop),
            base (one GPU) or paper (the size of base, for more steps).
        tokenizer: The run directory of the semantic tokenizer (audio-semantic --features ctc).
        soundstorm: The run directory of SoundStorm with the same semantic tokenizer, which is
            copied into the run so that it can speak; none trains without.
    """
    from tessera.modalities.audio.text_to_semantic import (
        CharacterEncoderConfig,
        TextToSemanticConfig,
    )
    from tessera.modalities.audio.text_to_semantic_task import TextToSemanticTaskConfig
    from tessera.run.config import Run

    size = TextToSemanticConfig()
    if preset == "tiny":
        size = replace(size, dim=32, depth=1, heads=2, text=CharacterEncoderConfig(depth=1))
    elif preset != "small":
        size = replace(size, dim=512, depth=8, heads=8, text=CharacterEncoderConfig(depth=6))
    steps = {"tiny": 20, "small": 2500, "base": 50_000, "paper": 200_000}[preset]
    rate_hz = {"tiny": 8_000, "small": 16_000}.get(preset, 24_000)
    return Run(
        recipe="audio-text2semantic",
        task=TextToSemanticTaskConfig(
            tokenizer=tokenizer,
            soundstorm=None if soundstorm == "none" else soundstorm,
            model=size,
            optimizer=transformer_optimizer(preset, warmup_steps=max(5, steps // 20)),
        ),
        data=_build_transcribed_data(preset, rate_hz),
        engine=engine_defaults(
            preset,
            steps=steps,
            batch_size=4 if preset == "tiny" else 16 if preset == "small" else 64,
            sample_count=8,
        ),
    )
