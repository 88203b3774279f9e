"""Videos: the MAGVIT-v2 tokenizer, and masked generation (MAGVIT)."""

from __future__ import annotations

from tessera.modalities import DemoStep, Modality, Recipe

PLAIN = (
    "--data.synthetic-plain",
    "--data.num-synthetic",
    "4000",
    "--data.val-fraction",
    "0.02",
)
"""Synthetic videos of one shape, whose captions state direction, speed and what changes."""

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
        Recipe(
            build="tessera.modalities.video.recipes:videos_maskgit",
            task="tessera.modalities.video.generation:VideoGeneratorConfig",
            data="tessera.modalities.video.dataset:VideoDataConfig",
            kind="generator",
            metric="cross_entropy",
            media_inputs=(
                "data",
                "mask",
                "first_frame",
                "last_frame",
                "frames_given",
                "frames",
            ),
        ),
    ),
    demo=(
        DemoStep(
            description="A video tokenizer is trained on 4,000 synthetic videos.",
            command=(
                "train",
                "videos-magvit2",
                *PLAIN,
                "--data.size",
                "32",
                # 46 of 48 held-out videos were recognised from these tokens of 4 x 4 pixels. In 17
                # minutes in all, 86 % of the samples matched; with 1,000 codes and 4,000 steps of
                # the transformer, in 12 minutes, 64 %.
                "--task.model.decoder-layers",
                *("compress_space", "factorized_residual", "compress_space"),
                *("compress_time", "factorized_residual", "compress_time", "factorized_residual"),
                "--task.model.quantizer.levels",
                *("4", "4", "4", "4"),
                "--task.reconstruction.chroma-weight",
                "8",
                "--steps",
                "1800",
                "--out",
                "{out}/videos-magvit2",
            ),
        ),
        DemoStep(
            description="A text-to-video transformer is trained on its tokens.",
            command=(
                "train",
                "videos-maskgit",
                *PLAIN,
                "--tokenizer",
                "{out}/videos-magvit2",
                "--task.max-positions",
                "64",
                "--task.model.depth",
                "3",
                "--steps",
                "7500",
                "--task.sampling.temperature",
                "0.5",
                "--task.sampling.choice-temperature",
                "2",
                "--task.sampling.decoding-steps",
                "16",
                "--task.guidance.scale",
                "2",
                "--out",
                "{out}/videos-maskgit",
            ),
        ),
        DemoStep(
            description="Samples for held-out captions are compared with their captions:",
            command=("evaluate", "{out}/videos-maskgit", "--samples", "64"),
        ),
    ),
    demo_next=(
        "sample",
        "{out}/videos-maskgit",
        "--prompt",
        "a red circle moving left quickly on a white background",
        "a yellow star moving up slowly and growing on a black background",
        "--count",
        "4",
    ),
)
