"""Count generated images that are copies of training images.

The nearest training image of an image is found by thumbnails. The image is a copy if the two are as
near as *near-duplicates* among the training images, in thumbnails and in features: the tenth of the
training images with the nearest other one. Identical training images are not counted for this.

N images, M training images, D feature dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.data.dataset import ExampleDataset, Subset
from tessera.data.loader import EvalLoader
from tessera.metrics.generation import find_nearest, near_duplicate_distance
from tessera.modalities.image.embedding import (
    BATCH_SIZE,
    EmbeddedImages,
    ImageEmbedder,
    make_thumbnails,
    read_batches,
)
from tessera.modalities.image.media import ImageBatch

IDENTICAL = 1e-3
"""Training images whose thumbnails differ by less than this are the same image."""


@dataclass(frozen=True)
class CopySearch:
    """Training images, and the distances up to which an image is a copy of one of them."""

    embedder: ImageEmbedder
    images: ExampleDataset
    """The training images that can be read."""
    thumbnails_MD: Tensor
    max_distance: float = 0.0
    """The largest distance of near-duplicates in thumbnails."""
    max_feature_distance: float = 0.0
    """The largest distance of near-duplicates in features."""

    @classmethod
    def fit(
        cls,
        embedder: ImageEmbedder,
        dataset: ExampleDataset,
        indices: Sequence[int],
        examples: EmbeddedImages,
    ) -> CopySearch:
        """Measure the distances of near-duplicates.

        Args:
            embedder: the feature network.
            dataset: the training images.
            indices: which of them are searched.
            examples: some of the training images, whose nearest other ones are compared.
        """
        names, thumbnails = [], []
        for batch in EvalLoader(dataset, seed=0, batch_size=BATCH_SIZE).batches(indices=indices):
            if isinstance(batch.examples, ImageBatch):
                names += batch.names
                thumbnails.append(make_thumbnails(batch.examples.pixels))
        index_of = {dataset.name(index): index for index in indices}
        images = Subset(dataset, [index_of[name] for name in names])
        search = cls(embedder, images, torch.cat(thumbnails))
        nearest = find_nearest(examples.thumbnails_ND, search.thumbnails_MD, IDENTICAL)
        max_distance = near_duplicate_distance(nearest.distance_N)
        near_N = nearest.distance_N <= max_distance
        distances = search.feature_distances(examples.grid_ND[near_N], nearest.index_N[near_N])
        return cls(
            embedder, search.images, search.thumbnails_MD, max_distance, distances.max().item()
        )

    def find_copies(self, images: EmbeddedImages) -> Tensor:
        """Return which images are copies, (N,)."""
        nearest = find_nearest(images.thumbnails_ND, self.thumbnails_MD)
        copies_N = nearest.distance_N <= self.max_distance
        if copies_N.any():  # features are computed only where they decide
            grid, index = images.grid_ND[copies_N], nearest.index_N[copies_N]
            copies_N[copies_N.clone()] = (
                self.feature_distances(grid, index) <= self.max_feature_distance
            )
        return copies_N

    def feature_distances(self, grid_ND: Tensor, index_N: Tensor) -> Tensor:
        """Return the distances of images to training images in features, (N,)."""
        others = self.embedder.embed(read_batches(self.images, index_N.tolist()))
        return (grid_ND - others.grid_ND).norm(dim=1)
