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
        DemoStep(
            description="All tunes are embedded.",
            command=("index", "{out}/music-mulan", "--out", "{out}/music-index"),
            creates="{out}/music-index/index.json",
        ),
        DemoStep(
            description="The nearest tunes to a text:",
            command=("search", "{out}/music-index", "a slow harp in a minor key", "--top", "5"),
        ),
    ),
    demo_next=("search", "{out}/music-index", "fast drums"),
)
