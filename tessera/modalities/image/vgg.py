"""VGG16 (Simonyan & Zisserman 2015, arXiv 1409.1556, table 1, column D) for perceptual losses.

No package provides the weights, so they are loaded from a file of torchvision's, as .pth or
.safetensors. Only the convolutions are used; there is no dropout, and all weights are frozen.

B examples, C channels, H and W pixels. Images are (B, 3, H, W) in [-1, 1], or in grey or with
alpha.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.nn.pretrained import (
    FrozenNetwork,
    as_rgb,
    check_tensors,
    load_tensors,
)

GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the convolutions between one pooling and the next."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's pixels in [0, 1], as in torchvision's training."""


class VGG16(FrozenNetwork):
    """The frozen convolutions of VGG16; create it with `load(path)`."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        channels = [3, *chain.from_iterable(GROUPS)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(*pair, 3, padding=1) for pair in pairwise(channels)
        )
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(STD)[:, None, None], persistent=False)
        self.eval().requires_grad_(False)

    @classmethod
    def load(cls, path: str) -> VGG16:
        """Load a file with torchvision's tensor names.

        The classifier in the file is ignored; any other additional tensor is an error.
        """
        file = Path(path)
        found = {
            name: tensor
            for name, tensor in load_tensors(file).items()
            if not name.startswith("classifier.")
        }
        network = cls()
        own = {
            f"features.{number}.{part}": tensor
            for number, convolution in zip(torchvision_layer_numbers(), network.convolutions)
            for part, tensor in convolution.state_dict().items()
        }
        check_tensors(found, {name: tuple(tensor.shape) for name, tensor in own.items()}, file)
        for name, tensor in own.items():
            tensor.copy_(found[name])
        return network

    def features(self, images: Tensor) -> list[Tensor]:
        """Return (B, C, h, w) before each pooling, as in Zhang 2018 (arXiv 1801.03924)."""
        images = as_rgb(images)
        hidden = ((images.to(self.mean.dtype) + 1) / 2 - self.mean) / self.std
        convolutions = iter(self.convolutions)
        outputs: list[Tensor] = []
        for group in GROUPS:
            hidden = F.max_pool2d(hidden, 2) if outputs else hidden
            for convolution in islice(convolutions, len(group)):
                hidden = F.relu(convolution(hidden), inplace=True)
            outputs.append(hidden)
        return outputs


def torchvision_layer_numbers() -> Iterator[int]:
    """Yield the numbers of the convolutions in torchvision's names.

    torchvision numbers every layer: two for a convolution and its ReLU, one for a pooling.
    """
    number = 0
    for group in GROUPS:
        for _ in group:
            yield number
            number += 2
        number += 1
