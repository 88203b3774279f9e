"""Images: tokenizers (VQGAN), text to image (MaskGIT, Muse) and super-resolution."""

from __future__ import annotations

from tessera.modalities import DemoStep, Modality, Recipe

MODALITY = Modality(
    name="image",
    suffixes=(".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".tif", ".tiff"),
    media="tessera.modalities.image.media:Image",
    inspect="tessera.modalities.image.inspect:inspect_folder",
    measure="tessera.modalities.image.media:measure_file",
    recipes=(
        Recipe(
            build="tessera.modalities.image.recipes:images_vqgan",
            task="tessera.modalities.image.reconstruction:ImageTokenizerConfig",
            data="tessera.modalities.image.dataset:ImageDataConfig",
            kind="tokenizer",
            metric="psnr",
            media_inputs=("data",),
        ),
        Recipe(
            build="tessera.modalities.image.recipes:images_maskgit",
            task="tessera.modalities.image.generation:ImageGeneratorConfig",
            data="tessera.modalities.image.dataset:ImageDataConfig",
            kind="generator",
            metric="cross_entropy",
            media_inputs=("data", "mask"),
        ),
        Recipe(
            build="tessera.modalities.image.recipes:images_maskgit_superres",
            task="tessera.modalities.image.generation:ImageGeneratorConfig",
            data="tessera.modalities.image.dataset:ImageDataConfig",
            kind="generator",
            metric="cross_entropy",
            media_inputs=("data",),
            suggested="never",  # it needs a second tokenizer of larger images
        ),
    ),
    demo=(
        DemoStep(
            description="An image tokenizer is trained on 4,000 synthetic images.",
            command=(
                "train",
                "images-vqgan",
                "--data.num-synthetic",
                "4000",
                "--data.val-fraction",
                "0.02",
                "--data.synthetic-max-shapes",
                "1",
                "--data.synthetic-plain",
                "--steps",
                "3000",
                # The colours are few and flat: 256 codes reconstruct them as well as 1,920, and
                # a training step of the transformer takes two thirds of the time.
                "--task.model.quantizer.levels",
                *("4", "4", "4", "4"),
                "--out",
                "{out}/images-vqgan",
            ),
        ),
        DemoStep(
            description="A text-to-image transformer is trained on its tokens.",
            command=(
                "train",
                "images-maskgit",
                "--tokenizer",
                "{out}/images-vqgan",
                # A caption of these images leaves little open: fewer layers and more steps learn
                # it in the same time, and a low temperature gives even outlines.
                "--task.model.depth",
                "3",
                "--steps",
                "3500",
                "--task.sampling.choice-temperature",
                "2",
                "--task.sampling.temperature",
                "0.5",
                "--task.sampling.decoding-steps",
                "24",
                # Tokens of a shape without a stated position are sampled at several positions at
                # once; masked and sampled again, they become one shape.
                "--task.sampling.remask",
                "0.3",
                "--out",
                "{out}/images-maskgit",
            ),
        ),
        DemoStep(
            description="Samples for held-out captions are compared with their captions:",
            command=("evaluate", "{out}/images-maskgit"),
        ),
    ),
    demo_next=(
        "sample",
        "{out}/images-maskgit",
        "--prompt",
        "a large red star",
        "a blue ring at the top left",
        "--count",
        "4",
    ),
)
