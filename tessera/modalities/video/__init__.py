"""Videos: the MAGVIT-v2 tokenizer."""

from __future__ import annotations

from tessera.modalities import DemoStep, Modality, Recipe

MODALITY = Modality(
    name="video",
    suffixes=(".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi"),
    media="tessera.modalities.video.media:Video",
    inspect="tessera.modalities.video.inspect:inspect_folder",
    measure="tessera.modalities.video.io.files:measure_file",
    recipes=(
        Recipe(
            build="tessera.modalities.video.recipes:videos_magvit2",
            task="tessera.modalities.video.reconstruction:VideoTokenizerTaskConfig",
            data="tessera.modalities.video.dataset:VideoDataConfig",
            kind="tokenizer",
            metric="psnr",
            media_inputs=("data", "start", "seconds"),
        ),
    ),
    demo=(
        DemoStep(
            description="A video tokenizer is trained on 2,000 synthetic videos.",
            command=("train", "videos-magvit2", "--steps", "600", "--out", "{out}/videos-magvit2"),
        ),
    ),
    demo_next=("evaluate", "{out}/videos-magvit2"),
)
