"""Features of sets of images, for metrics that compare generated with real ones.

N images, D feature dimension. Images are (N, 3, H, W) in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.data.dataset import ExampleDataset
from tessera.data.loader import EvalLoader
from tessera.modalities.image.efficientnet_lite import EfficientNetLite
from tessera.modalities.image.media import Image, ImageBatch
from tessera.nn.pretrained import MIN_PIXELS

BATCH_SIZE = 32
GRID = 4
"""The side of the grid of features. Linear probes of the mean over the image instead have an
accuracy of 93 % on real digits (with the grid 99 %), and an R@1 of 0.43 on real emoji (0.63)."""
THUMBNAIL_PIXELS = 16
"""The side at which pixels are compared: what a tokenizer loses should not hide a copy."""


@dataclass(frozen=True)
class EmbeddedImages:
    """Features, thumbnails and captions of images, in one order."""

    mean_ND: Tensor
    """Features that are almost independent of positions, for the comparison of sets."""
    grid_ND: Tensor
    """Features with positions, for the comparison of single images."""
    thumbnails_ND: Tensor
    """Pixels, scaled so that the distance of two thumbnails is the root of their mean squared
    difference."""
    captions: list[str]

    def __len__(self) -> int:
        return len(self.captions)

    def captioned(self) -> EmbeddedImages:
        """Return the images that have a caption."""
        rows = [row for row, caption in enumerate(self.captions) if caption]
        captions = [self.captions[row] for row in rows]
        return EmbeddedImages(
            self.mean_ND[rows], self.grid_ND[rows], self.thumbnails_ND[rows], captions
        )


class ImageEmbedder:
    """Embeds images with EfficientNet-Lite0, on a GPU if there is one."""

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.network = EfficientNetLite.load().to(self.device)

    def embed(self, batches: Iterable[ImageBatch]) -> EmbeddedImages:
        parts = [self.embed_batch(batch) for batch in batches]
        if not parts:
            return EmbeddedImages(torch.zeros(0, 1), torch.zeros(0, 1), torch.zeros(0, 1), [])
        return EmbeddedImages(
            torch.cat([part.mean_ND for part in parts]),
            torch.cat([part.grid_ND for part in parts]),
            torch.cat([part.thumbnails_ND for part in parts]),
            [caption for part in parts for caption in part.captions],
        )

    def embed_batch(self, batch: ImageBatch) -> EmbeddedImages:
        maps = self.compute_maps(batch.pixels)
        grid_ND = F.adaptive_avg_pool2d(maps, GRID).flatten(1)
        thumbnails_ND = make_thumbnails(batch.pixels)
        return EmbeddedImages(maps.mean((2, 3)), grid_ND, thumbnails_ND, batch.captions)

    @torch.inference_mode()
    def compute_maps(self, pixels_N3HW: Tensor) -> Tensor:
        """Return the features of all positions, (N, D, h, w)."""
        images, side = pixels_N3HW.to(self.device), min(pixels_N3HW.shape[2:])
        if side < MIN_PIXELS:
            images = F.interpolate(images, scale_factor=-(-MIN_PIXELS // side), mode="bilinear")
        return self.network.embedding_map(images).cpu()


def make_thumbnails(pixels_N3HW: Tensor) -> Tensor:
    thumbnails_ND = F.adaptive_avg_pool2d(pixels_N3HW, THUMBNAIL_PIXELS).flatten(1)
    return thumbnails_ND / thumbnails_ND.shape[1] ** 0.5


def read_batches(dataset: ExampleDataset, indices: Sequence[int]) -> Iterator[ImageBatch]:
    """Yield the images of a dataset that can be read."""
    for batch in EvalLoader(dataset, seed=0, batch_size=BATCH_SIZE).batches(indices=indices):
        if isinstance(batch.examples, ImageBatch):
            yield batch.examples


def collate_media(images: Sequence[Image], captions: Sequence[str]) -> Iterator[ImageBatch]:
    """Yield batches of images of one size."""
    for first in range(0, len(images), BATCH_SIZE):
        rows = slice(first, first + BATCH_SIZE)
        pixels = [torch.from_numpy(image.to_floats()) for image in images[rows]]
        yield ImageBatch(torch.stack(pixels), list(captions[rows]))
