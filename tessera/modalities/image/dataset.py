"""Pictures from a folder, or the built-in toys: squares of one size, each with its caption
(`data/captions.py`).

The whole picture is resized until its short side fits and then cut to a square; both happen in one
antialiased step. Which files are held out depends on their names alone (`data/split.py`), and those
are never augmented.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import PIL.Image

from tessera.data.dataset import DataConfig, FileDataset
from tessera.data.discovery import find
from tessera.data.errors import UnreadableFile
from tessera.modalities.image.media import ENDINGS, Image, ImageBatch, ImageExample, collate, read
from tessera.modalities.image.prompt_match import PromptMatchMetric
from tessera.modalities.image.synthetic import SyntheticImages
from tessera.run.directory import UserError


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig(DataConfig):
    path: str | None = None
    """A folder of pictures, with subfolders; or one picture. None: the built-in toys."""
    size: int = 64
    """The side of the square pictures, in pixels."""
    crop: Literal["random", "centre"] = "random"
    """Where the square of a training picture is cut from."""
    min_scale: float = 1.0
    """The smallest random square, as a share of the picture's short side; 1 takes as much as there
    is."""
    flip: bool = False
    """Mirror half of the training pictures. Right for tokenizers; wrong where a caption says left
    or right."""
    small: Literal["enlarge", "skip"] = "enlarge"
    """What becomes of pictures smaller than asked for."""
    val_fraction: float = 0.05
    """The share held out, chosen by file name; 0 validates on the training pictures themselves."""
    split_seed: int = 0
    """Another seed holds out other files."""
    toys: int = 2000
    """How many toy pictures to learn from; those held out come on top."""
    toy_seed: int = 0
    """Another seed is another set of toys."""
    toy_shapes: int = 3
    """The most shapes in one toy; fewer are easier to learn."""
    toy_plain: bool = False
    """Toys in flat colours, and alone in one of two sizes and nine places: all of a picture can be
    said, and is soon learnt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1:
            raise ValueError(f"A picture has a side of at least 1 pixel, but size is {self.size}.")
        if not 0 < self.min_scale <= 1:
            raise ValueError(
                f"min_scale is a share of the short side, above 0 and up to 1, not {self.min_scale}."
            )
        if not 1 <= self.toy_shapes <= 3:
            raise ValueError(
                f"A toy holds at most 1, 2 or 3 shapes, but toy_shapes is {self.toy_shapes}."
            )

    def synthetic_dataset(self) -> SyntheticImages:
        return SyntheticImages(
            self.toys,
            size=self.size,
            seed=self.toy_seed,
            most_shapes=self.toy_shapes,
            without_augmentation=self.toy_plain,
        )

    def folder_dataset(self) -> ImageFolderDataset:
        return ImageFolderDataset.of(find(str(self.path), ENDINGS, "pictures"), self)

    def preprocessing(self) -> dict[str, int]:
        """How a picture is prepared before it is tokenized or measured."""
        return {"size": self.size}

    def sample_metric(self) -> PromptMatchMetric | None:
        """What holds made pictures against their prompts; None for a folder, whose captions can say
        anything."""
        return PromptMatchMetric() if self.path is None else None

    def mask(self, path: str) -> np.ndarray:
        """Which pixels of the picture in `self.path` a mask's white covers, cut as that picture is:
        (S, S), True for white."""
        found = find(str(self.path), ENDINGS, "pictures")
        try:
            picture, mask = read(found.root / found.names[0]), read(path)
        except UnreadableFile as error:
            raise UserError(str(error)) from None
        if mask.size != picture.size:
            raise UserError(
                f"The mask {path} is {mask.width} x {mask.height}, but the picture is {picture.width} x {picture.height}: "
                "a mask has the size of its picture, white where it is to be drawn anew."
            )
        return (
            np.asarray(
                cut(mask, self.without_augmentation(), np.random.default_rng(0)).convert("L")
            )
            > 127
        )

    def without_augmentation(self) -> ImageDataConfig:
        return replace(self, crop="centre", min_scale=1.0, flip=False)

    @property
    def enough(self) -> int:
        """The short side at which a file may be decoded; twice what is shown, so that the resize
        still filters."""
        return math.ceil(2 * self.size / self.min_scale)


@dataclass(frozen=True)
class ImageFolderDataset(FileDataset):
    """The source: files of one folder, cut as the configuration says."""

    config: ImageDataConfig

    def item(self, index: int, rng: np.random.Generator) -> ImageExample:
        path = self.path(index)
        picture = read(path, shortest=self.config.enough)
        if self.config.small == "skip" and min(picture.size) < self.config.size:
            size = f"{picture.width} x {picture.height}"
            raise UnreadableFile(
                f"{path}: it is {size}, smaller than the {self.config.size} asked for"
            )
        square = cut(picture, self.config, rng)
        return ImageExample(Image(np.asarray(square)).floats(), self.sample_caption(index, rng))

    def collate(self, examples: list[ImageExample]) -> ImageBatch:
        return collate(examples)


def cut(
    picture: PIL.Image.Image, config: ImageDataConfig, rng: np.random.Generator
) -> PIL.Image.Image:
    """Always four draws, so that what follows from the generator does not depend on the picture or
    the settings."""
    zoom, across, down, mirror = rng.random(4)
    width, height = picture.size
    side = float(min(width, height))
    if config.crop == "random":
        side = max(1.0, side * (config.min_scale + (1 - config.min_scale) * zoom))
    else:
        across = down = 0.5
    left, top = (width - side) * across, (height - side) * down
    square = picture.resize(
        (config.size, config.size),
        PIL.Image.Resampling.BICUBIC,
        box=(left, top, min(left + side, width), min(top + side, height)),
        reducing_gap=3.0,
    )
    return (
        square.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT)
        if config.flip and mirror < 0.5
        else square
    )
