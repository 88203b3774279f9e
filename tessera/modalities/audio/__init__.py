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
    media="tessera.modalities.audio.media:Sound",
    inspect="tessera.modalities.audio.inspect:check",
    recipes=(
        Recipe(
            build="tessera.modalities.audio.recipes:sounds_codec",
            task="tessera.modalities.audio.reconstruction:TokenizeSounds",
            data="tessera.modalities.audio.dataset:Sounds",
        ),
        Recipe(
            build="tessera.modalities.audio.recipes:sounds_semantic",
            task="tessera.modalities.audio.semantic_reconstruction:TokenizeSemantics",
            data="tessera.modalities.audio.dataset:Sounds",
        ),
        Recipe(
            build="tessera.modalities.audio.recipes:sounds_soundstorm",
            task="tessera.objectives.masked:MaskedConfig",
            data="tessera.modalities.audio.dataset:Sounds",
        ),
    ),
    demo=(
        DemoStep(
            description="An audio codec is trained on 2,000 synthetic voices and instruments.",
            command=("train", "audio-codec", "--out", "{out}/audio-codec"),
        ),
    ),
)
