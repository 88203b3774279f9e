"""VGG16 (Simonyan & Zisserman 2015, arXiv 1409.1556, table 1, column D): the usual eye of
perceptual losses.

Its weights come with no package, so the user names a file: torchvision's, as .pth or .safetensors.
Only the convolutions are used; there is no dropout, and nothing in it learns.

B examples, C channels, H and W pixels. Images are (B, 3, H, W) in [-1, 1].
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
    read_tensors,
    refuse_other_images,
    refuse_other_tensors,
)

GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""The widths of the convolutions between one pooling and the next."""

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels in [0, 1]: what torchvision's weights were trained on."""


class VGG16(FrozenNetwork):
    """`load(path)` it, then ask for `features`."""

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        channels = [3, *chain.from_iterable(GROUPS)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(*pair, 3, padding=1) for pair in pairwise(channels)
        )
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None], persistent=False)
        self.register_buffer("deviation", torch.tensor(DEVIATION)[:, None, None], persistent=False)
        self.eval().requires_grad_(False)

    @classmethod
    def load(cls, path: str) -> VGG16:
        """With torchvision's names. Its classifier may be in the file and is left alone; nothing
        else may."""
        file = Path(path)
        found = {
            name: tensor
            for name, tensor in read_tensors(file).items()
            if not name.startswith("classifier.")
        }
        network = cls()
        ours = {
            f"features.{number}.{part}": tensor
            for number, convolution in zip(numbers_in_the_file(), network.convolutions)
            for part, tensor in convolution.state_dict().items()
        }
        refuse_other_tensors(
            found, {name: tuple(tensor.shape) for name, tensor in ours.items()}, file
        )
        for name, tensor in ours.items():
            tensor.copy_(found[name])
        return network

    def features(self, images: Tensor) -> list[Tensor]:
        """(B, C, h, w) before each pooling and at the end: the five depths of Zhang 2018 (arXiv
        1801.03924)."""
        refuse_other_images(images)
        hidden = ((images.to(self.mean.dtype) + 1) / 2 - self.mean) / self.deviation
        convolutions = iter(self.convolutions)
        seen: list[Tensor] = []
        for group in GROUPS:
            hidden = F.max_pool2d(hidden, 2) if seen else hidden
            for convolution in islice(convolutions, len(group)):
                hidden = F.relu(convolution(hidden), inplace=True)
            seen.append(hidden)
        return seen


def numbers_in_the_file() -> Iterator[int]:
    """torchvision numbers every layer: a convolution and its ReLU take two numbers, a pooling takes
    one."""
    number = 0
    for group in GROUPS:
        for _ in group:
            yield number
            number += 2
        number += 1
