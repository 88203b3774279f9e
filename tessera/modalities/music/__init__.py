"""Music and text: MuLaN, a joint embedding."""

from __future__ import annotations

from tessera.modalities import DemoStep, Modality, Recipe

MODALITY = Modality(
    name="music",
    suffixes=(),
    media="tessera.modalities.audio.media:Audio",
    recipes=(
        Recipe(
            build="tessera.modalities.music.recipes:music_mulan",
            task="tessera.modalities.music.contrastive:MusicContrastiveConfig",
            data="tessera.modalities.music.dataset:MusicDataConfig",
            kind="embedding",
            metric="text_to_media_R@1",
        ),
    ),
    demo=(
        DemoStep(
            description="A joint embedding is trained on 2,048 synthetic tunes and their captions.",
            command=("train", "music-mulan", "--out", "{out}/music-mulan"),
        ),
    ),
    demo_next=("index", "{out}/music-mulan", "--out", "{out}/music-index"),
)
