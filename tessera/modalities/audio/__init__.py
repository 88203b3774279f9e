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
    recipes=(
        Recipe(
            build="tessera.modalities.audio.recipes:audio_codec",
            task="tessera.modalities.audio.reconstruction:AudioTokenizerConfig",
            data="tessera.modalities.audio.dataset:AudioDataConfig",
        ),
        Recipe(
            build="tessera.modalities.audio.recipes:audio_semantic",
            task="tessera.modalities.audio.semantic_reconstruction:SemanticTokenizerConfig",
            data="tessera.modalities.audio.dataset:AudioDataConfig",
        ),
        Recipe(
            build="tessera.modalities.audio.recipes:audio_soundstorm",
            task="tessera.modalities.audio.soundstorm:SoundStormTaskConfig",
            data="tessera.modalities.audio.dataset:AudioDataConfig",
        ),
    ),
    demo=(
        DemoStep(
            description="An audio codec is trained on 2,000 synthetic voices and instruments.",
            command=("train", "audio-codec", "--out", "{out}/audio-codec"),
        ),
    ),
)
