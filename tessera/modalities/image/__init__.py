"""Images: tokenizers (VQGAN), text to image (MaskGIT, Muse) and super-resolution."""

from __future__ import annotations

from tessera.modalities import DemoStep, Modality, Recipe

MODALITY = Modality(
    name="image",
    suffixes=(".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".tif", ".tiff"),
    media="tessera.modalities.image.media:Image",
    inspect="tessera.modalities.image.inspect:inspect_folder",
    recipes=(
        Recipe(
            build="tessera.modalities.image.recipes:images_vqgan",
            task="tessera.modalities.image.reconstruction:ImageTokenizerConfig",
            data="tessera.modalities.image.dataset:ImageDataConfig",
        ),
        Recipe(
            build="tessera.modalities.image.recipes:images_maskgit",
            task="tessera.modalities.image.generation:ImageGeneratorConfig",
            data="tessera.modalities.image.dataset:ImageDataConfig",
        ),
        Recipe(
            build="tessera.modalities.image.recipes:images_maskgit_superres",
            task="tessera.modalities.image.generation:ImageGeneratorConfig",
            data="tessera.modalities.image.dataset:ImageDataConfig",
        ),
    ),
    demo=(
        DemoStep(
            description="An image tokenizer is trained on 2,000 synthetic images.",
            command=("train", "images-vqgan", "--steps", "1500", "--out", "{out}/images-vqgan"),
        ),
        DemoStep(
            description="A text-to-image transformer is trained on its tokens.",
            command=(
                "train",
                "images-maskgit",
                "--tokenizer",
                "{out}/images-vqgan",
                "--out",
                "{out}/images-maskgit",
            ),
        ),
        DemoStep(
            description="Samples for held-out captions are compared with their captions:",
            command=("evaluate", "{out}/images-maskgit"),
        ),
    ),
)
