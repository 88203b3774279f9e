"""Images from a folder, or synthetic ones: squares of one size with their captions.

An image is resized until its short side fits and cropped to a square, in one antialiased step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import PIL.Image

from tessera.data.dataset import DataConfig, FileDataset
from tessera.data.discovery import find_files
from tessera.data.errors import UnreadableFile
from tessera.modalities.image.media import (
    SUFFIXES,
    Image,
    ImageBatch,
    ImageExample,
    collate,
    open_image,
)
from tessera.modalities.image.prompt_match import PromptMatchMetric
from tessera.modalities.image.synthetic import SyntheticImages
from tessera.run.errors import UserError, as_user_error


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig(DataConfig):
    path: str | None = None
    """A folder of images, with subfolders, or one image; None generates synthetic images."""
    size: int = 64
    """The side of the square images in pixels."""
    crop: Literal["random", "centre"] = "random"
    """The position of the crop of a training image."""
    min_scale: float = 1.0
    """The smallest random crop as a fraction of the short side; 1 uses the whole short side."""
    flip: bool = False
    """Mirror half of the training images. Do not use it where captions mention left or right."""
    on_small: Literal["enlarge", "skip"] = "enlarge"
    """What to do with images smaller than `size`."""
    val_fraction: float = 0.05
    """The fraction held out, chosen by file name; 0 validates on the training images."""
    split_seed: int = 0
    """The seed of the choice of held-out files."""
    num_synthetic: int = 2000
    """The number of synthetic training images; the held-out ones come on top."""
    synthetic_seed: int = 0
    """The seed of the synthetic images."""
    synthetic_max_shapes: int = 3
    """The maximum number of shapes in a synthetic image; fewer are easier to train on."""
    synthetic_plain: bool = False
    """Generate shapes in flat colours, in one of two sizes and nine positions, so that a caption
    describes an image completely."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1:
            raise ValueError(f"size must be at least 1 pixel, got {self.size}.")
        if not 0 < self.min_scale <= 1:
            raise ValueError(f"min_scale must be above 0 and at most 1, got {self.min_scale}.")
        if not 1 <= self.synthetic_max_shapes <= 3:
            raise ValueError(
                f"synthetic_max_shapes must be 1, 2 or 3, got {self.synthetic_max_shapes}."
            )

    @property
    def decode_size(self) -> int:
        """The short side to which a file may be reduced while decoding.

        It is twice the size, so that the resize still filters.
        """
        return math.ceil(2 * self.size / self.min_scale)

    def synthetic_dataset(self) -> SyntheticImages:
        return SyntheticImages(
            self.num_synthetic,
            size=self.size,
            seed=self.synthetic_seed,
            max_shapes=self.synthetic_max_shapes,
            plain=self.synthetic_plain,
        )

    def folder_dataset(self, captions: bool = True) -> ImageFolderDataset:
        found = find_files(str(self.path), SUFFIXES, "images")
        return ImageFolderDataset.from_found(found, self, captions)

    def preprocessing(self) -> dict[str, object]:
        return {"size": self.size}

    def without_augmentation(self) -> ImageDataConfig:
        return replace(self, crop="centre", min_scale=1.0, flip=False)

    def sample_metric(self) -> PromptMatchMetric | None:
        """Compare synthetic images with their prompts; captions of a folder can be anything."""
        return PromptMatchMetric() if self.path is None else None

    def collate(self, examples: list[ImageExample]) -> ImageBatch:
        return collate(examples)

    def example_from_media(self, media: object) -> ImageExample:
        """Preprocess an Image, or an array (H, W, 3) of uint8."""
        image = Image(media) if isinstance(media, np.ndarray) else media
        if not isinstance(image, Image):
            raise UserError(
                f"Expected an Image, a path or an array (height, width, 3) of uint8, got a "
                f"{type(media).__name__}."
            )
        picture = PIL.Image.fromarray(image.pixels)
        square = crop_square(picture, self.without_augmentation(), np.random.default_rng(0))
        return ImageExample(Image(np.asarray(square)).to_floats(), "")

    def read_mask(self, path: str) -> np.ndarray:
        """Return which pixels of a mask are white, (S, S), cropped as the image in `self.path`."""
        found = find_files(str(self.path), SUFFIXES, "images")
        with as_user_error(UnreadableFile):
            image, mask = open_image(found.root / found.names[0]), open_image(path)
        if mask.size != image.size:
            raise UserError(
                f"The mask {path} is {mask.width} x {mask.height}, but the image is "
                f"{image.width} x {image.height}: give a mask of the same size, white where to "
                "generate."
            )
        square = crop_square(mask, self.without_augmentation(), np.random.default_rng(0))
        return np.asarray(square.convert("L")) > 127


@dataclass(frozen=True)
class ImageFolderDataset(FileDataset):
    config: ImageDataConfig

    def item(self, index: int, rng: np.random.Generator) -> ImageExample:
        path = self.path(index)
        image = open_image(path, min_side=self.config.decode_size)
        if self.config.on_small == "skip" and min(image.size) < self.config.size:
            raise UnreadableFile(
                f"{path}: the image is {image.width} x {image.height}, smaller than the requested "
                f"{self.config.size}"
            )
        square = crop_square(image, self.config, rng)
        return ImageExample(Image(np.asarray(square)).to_floats(), self.sample_caption(index, rng))

    def collate(self, examples: list[ImageExample]) -> ImageBatch:
        return collate(examples)


def crop_square(
    image: PIL.Image.Image, config: ImageDataConfig, rng: np.random.Generator
) -> PIL.Image.Image:
    """Crop, resize and flip; always four random numbers are drawn, whatever the settings."""
    u_scale, u_x, u_y, u_flip = rng.random(4)
    width, height = image.size
    side = float(min(width, height))
    if config.crop == "random":
        side = max(1.0, side * (config.min_scale + (1 - config.min_scale) * u_scale))
    else:
        u_x = u_y = 0.5
    left, top = (width - side) * u_x, (height - side) * u_y
    square = image.resize(
        (config.size, config.size),
        PIL.Image.Resampling.BICUBIC,
        box=(left, top, min(left + side, width), min(top + side, height)),
        reducing_gap=3.0,
    )
    if config.flip and u_flip < 0.5:
        return square.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT)
    return square
