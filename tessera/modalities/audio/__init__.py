"""Audio: neural codecs, semantic tokens and SoundStorm."""

from __future__ import annotations

from tessera.modalities import DemoStep, Modality, Recipe

MODALITY = Modality(
    name="audio",
    suffixes=(
        ".wav",
        ".flac",
        ".ogg",
        ".oga",
        ".opus",
        ".mp3",
        ".aiff",
        ".aif",
        ".m4a",
        ".aac",
        ".wma",
        ".mka",
        ".g722",
    ),
    media="tessera.modalities.audio.media:Audio",
    inspect="tessera.modalities.audio.inspect:inspect_folder",
    measure="tessera.modalities.audio.io.files:measure_file",
    recipes=(
        Recipe(
            build="tessera.modalities.audio.recipes:audio_codec",
            task="tessera.modalities.audio.reconstruction:AudioTokenizerConfig",
            data="tessera.modalities.audio.dataset:AudioDataConfig",
            kind="tokenizer",
            metric="si_sdr",
            media_inputs=("data", "start", "seconds"),
        ),
        Recipe(
            build="tessera.modalities.audio.recipes:audio_semantic",
            task="tessera.modalities.audio.semantic_reconstruction:SemanticTokenizerConfig",
            data="tessera.modalities.audio.dataset:AudioDataConfig",
            kind="tokenizer",
            metric="explained_variance",
            media_inputs=("data",),
        ),
        Recipe(
            build="tessera.modalities.audio.recipes:audio_soundstorm",
            task="tessera.modalities.audio.soundstorm:SoundStormTaskConfig",
            data="tessera.modalities.audio.dataset:AudioDataConfig",
            kind="generator",
            metric="cross_entropy",
            media_inputs=("like", "prompt_audio", "seconds"),
        ),
        Recipe(
            build="tessera.modalities.audio.recipes:audio_text2semantic",
            task="tessera.modalities.audio.text_to_semantic_task:TextToSemanticTaskConfig",
            data="tessera.modalities.audio.dataset:AudioDataConfig",
            kind="generator",
            metric="cross_entropy",
            is_suggested=False,
        ),
    ),
    demo=(
        DemoStep(
            description="An audio codec is trained on 2,000 synthetic voices and instruments.",
            command=("train", "audio-codec", "--out", "{out}/audio-codec"),
        ),
    ),
    demo_next=("train", "audio-semantic", "--out", "{out}/audio-semantic"),
)
