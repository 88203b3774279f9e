"""Images from a folder, or synthetic ones: all of one size, with their captions.

An image is resized until it covers that size and cropped to it, in one antialiased step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import PIL.Image

from tessera.data.arrays import is_array, is_float, to_numpy
from tessera.data.dataset import DataConfig, FileDataset, Proposal
from tessera.data.errors import UnreadableFile
from tessera.modalities.image.media import (
    CHANNELS,
    SUFFIXES,
    Image,
    ImageBatch,
    ImageExample,
    apply_exif_orientation,
    collate,
    convert,
    open_image,
)
from tessera.modalities.image.prompt_match import PromptMatchMetric
from tessera.modalities.image.proposal import propose_settings, read_facts
from tessera.modalities.image.synthetic import SyntheticImages
from tessera.run.errors import UserError, as_user_error

if TYPE_CHECKING:
    from tessera.data.sample_metrics import SampleMetric
    from tessera.modalities.image.reconstruction import ImageTokenizerConfig

LONG_SIDE_STEP = 16
"""The long side of images that are not square is a multiple of this, or of the largest power of two
that divides the short side, if that is smaller: a tokenizer that fits the one fits the other."""


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig(DataConfig):
    batch_ndim: ClassVar[int | None] = 4
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    noun: ClassVar[str] = "images"
    proposes = ("size", "channels", "val_fraction")

    path: str | None = None
    """A folder of images, with subfolders, one image, tar shards, a table or a list of paths; None
    generates synthetic images."""
    size: int = 64
    """The side of the square images in pixels, or the short side with another aspect."""
    aspect: float = 1.0
    """The width of the images divided by their height, for example 1.5 or 0.75. The long side is
    rounded to a multiple of 16 pixels, or of 8, 4 or 2 if 16 does not divide `size`."""
    channels: int = 3
    """The channels of an image: 3 for colour, 1 for grey, or 4 for colour with alpha, which is
    otherwise composited over white."""
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
    group_by: str = "file"
    """What is held out as a whole: file (each image alone), folder, prefix (of the file name, up to
    the first "-", "_" or "."), or a column of the metadata, such as source."""
    balance_by: str = "file"
    """What is drawn equally often in training: file, folder, prefix, or a column of the metadata,
    such as subject. A group of few files is then seen as often as one of many."""
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
        if not 1 / 16 <= self.aspect <= 16:
            raise ValueError(
                "aspect must be the width divided by the height, from 0.0625 to 16, got "
                f"{self.aspect}."
            )
        if self.channels not in CHANNELS:
            raise ValueError(
                f"channels must be 3 for colour, 1 for grey or 4 with alpha, got {self.channels}."
            )
        if not 0 < self.min_scale <= 1:
            raise ValueError(f"min_scale must be above 0 and at most 1, got {self.min_scale}.")
        if not 1 <= self.synthetic_max_shapes <= 3:
            raise ValueError(
                f"synthetic_max_shapes must be 1, 2 or 3, got {self.synthetic_max_shapes}."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the images."""
        step = min(LONG_SIDE_STEP, self.size & -self.size)
        ratio = max(self.aspect, 1 / self.aspect)
        long_side = max(self.size, round(self.size * ratio / step) * step)
        return (self.size, long_side) if self.aspect >= 1 else (long_side, self.size)

    @property
    def decode_size(self) -> int:
        """The short side to which a file may be reduced while decoding.

        It is twice the long side of the images, so that the resize still filters.
        """
        return math.ceil(2 * max(self.shape) / self.min_scale)

    def synthetic_dataset(self) -> SyntheticImages:
        if self.aspect != 1:
            raise UserError(
                f"Synthetic images are square, but aspect is {self.aspect}: leave it out, or give "
                "a folder of images with --data."
            )
        return SyntheticImages(
            self.num_synthetic,
            size=self.size,
            channels=self.channels,
            seed=self.synthetic_seed,
            max_shapes=self.synthetic_max_shapes,
            plain=self.synthetic_plain,
        )

    def folder_dataset(self) -> ImageFolderDataset:
        return ImageFolderDataset(self.find_files(), self)

    def preprocessing(self) -> dict[str, object]:
        square: dict[str, object] = {"size": self.size, "channels": self.channels}
        return square if self.aspect == 1 else square | {"aspect": self.aspect}

    def inherited(self) -> dict[str, object]:
        return {"size": self.size, "channels": self.channels, "aspect": self.aspect}

    def propose(self, task: ImageTokenizerConfig) -> Proposal | None:
        facts = read_facts(self.find_files())
        return propose_settings(facts, self, task.model.stride) if facts is not None else None

    def without_augmentation(self) -> ImageDataConfig:
        return replace(self, crop="centre", min_scale=1.0, flip=False)

    def sample_metrics(self) -> list[SampleMetric]:
        """Compare samples with real images, and synthetic images in colour with their prompts."""
        from tessera.modalities.image.sample_metrics import ImageSetMetric

        metrics: list[SampleMetric] = [ImageSetMetric()]
        if self.path is None and self.channels == 3:
            metrics.insert(0, PromptMatchMetric())
        return metrics

    def collate(self, examples: list[ImageExample]) -> ImageBatch:
        return collate(examples)

    def is_input_shape(self, shape: Sequence[int]) -> bool:
        return super().is_input_shape(shape) and shape[1] == self.channels

    def example_from_media(self, media: object) -> ImageExample:
        """Preprocess an Image, a PIL image or an array (see `Image.from_array`).

        Channels are converted. Floats of the right size are used as they are.
        """
        image = media
        if isinstance(media, PIL.Image.Image):
            image = Image.from_pillow(convert(apply_exif_orientation(media), self.channels))
        elif is_array(media):
            array = to_numpy(media)
            image = Image.from_array(media)
            if is_float(array) and array.shape == (self.channels, *self.shape):
                return ImageExample(array.astype(np.float32), "")
        if not isinstance(image, Image):
            raise UserError(
                "Expected an Image, a path, a PIL image or an array of uint8 or of floats in "
                f"[-1, 1], got a {type(media).__name__}."
            )
        picture = convert(image.to_pillow(), self.channels)
        cropped = crop_image(picture, self.without_augmentation(), np.random.default_rng(0))
        return ImageExample(Image.from_pillow(cropped).to_floats(), "")

    def read_mask(self, path: str) -> np.ndarray:
        """Return which pixels of a mask are white, (H, W), cropped as the image in `self.path`."""
        with as_user_error(UnreadableFile):
            image, mask = open_image(self.find_files().file(0)), open_image(path)
        if mask.size != image.size:
            raise UserError(
                f"The mask {path} is {mask.width} x {mask.height}, but the image is "
                f"{image.width} x {image.height}: give a mask of the same size, white where to "
                "generate."
            )
        cropped = crop_image(mask, self.without_augmentation(), np.random.default_rng(0))
        return np.asarray(cropped.convert("L")) > 127


@dataclass(frozen=True)
class ImageFolderDataset(FileDataset):
    config: ImageDataConfig

    def item(self, index: int, rng: np.random.Generator) -> ImageExample:
        file = self.files.file(index)
        image = open_image(file, self.config.decode_size, self.config.channels)
        height, width = self.config.shape
        if self.config.on_small == "skip" and (image.width < width or image.height < height):
            raise UnreadableFile(
                f"{file}: the image is {image.width} x {image.height}, smaller than the requested "
                f"{width} x {height}"
            )
        pixels = Image.from_pillow(crop_image(image, self.config, rng)).to_floats()
        return ImageExample(pixels, self.sample_caption(index, rng))


def crop_image(
    image: PIL.Image.Image, config: ImageDataConfig, rng: np.random.Generator
) -> PIL.Image.Image:
    """Crop, resize and flip; always four random numbers are drawn, whatever the settings."""
    u_scale, u_x, u_y, u_flip = rng.random(4)
    height, width = config.shape
    ratio = width / height
    # The largest box of the requested shape in the image.
    box_width = float(min(image.width, image.height * ratio))
    box_height = float(min(image.height, image.width / ratio))
    if config.crop == "random":
        scale = config.min_scale + (1 - config.min_scale) * u_scale
        box_width, box_height = max(1.0, box_width * scale), max(1.0, box_height * scale)
    else:
        u_x = u_y = 0.5
    left, top = (image.width - box_width) * u_x, (image.height - box_height) * u_y
    cropped = image.resize(
        (width, height),
        PIL.Image.Resampling.BICUBIC,
        box=(left, top, min(left + box_width, image.width), min(top + box_height, image.height)),
        reducing_gap=3.0,
    )
    if config.flip and u_flip < 0.5:
        cropped = cropped.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT)
    return whiten_transparent(cropped) if cropped.mode == "RGBA" else cropped


def whiten_transparent(image: PIL.Image.Image) -> PIL.Image.Image:
    """Return an RGBA image whose fully transparent pixels are white.

    Their stored colour is arbitrary. Over white, which is how images are shown, an error in the
    alpha of a white pixel is invisible.
    """
    pixels = np.array(image)
    pixels[pixels[..., 3] == 0, :3] = 255
    return PIL.Image.fromarray(pixels)
