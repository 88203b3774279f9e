"""Networks with published weights: loaded safely and completely, and never trained."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

MIN_PIXELS = 16
"""The smallest side of an image. VGG16 halves the resolution four times; EfficientNet-Lite0
enlarges small images, and its Frechet distance still separates sets at this size: see
`ENLARGED_PIXELS`."""


class FrozenNetwork(nn.Module):
    """A network with pretrained weights that is always in eval mode."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def fingerprint(self) -> str:
        """Return a hash of the weights, which identifies the network that computed a metric."""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        return digest.hexdigest()


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load the named tensors of a .safetensors file, or of a PyTorch file with tensors only."""
    if not path.is_file():
        raise FileNotFoundError(
            f"The file {path} does not exist: give the path of a .safetensors or .pth file of"
            " weights."
        )
    try:
        found = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, "cpu", weights_only=True)
        )
    except Exception as error:  # each format has its own errors, and none of them names the file
        raise ValueError(
            f"{path} could not be read as a file of tensors: it may be truncated, or contain Python"
            " objects, which are never loaded. Download it again, or save only the network's"
            f" state_dict(). The original error: {error}"
        ) from error
    if not isinstance(found, Mapping) or not all(
        isinstance(value, Tensor) for value in found.values()
    ):
        raise ValueError(
            f"{path} contains a {type(found).__name__} in which not every value is a tensor. Save"
            " only the network's state_dict(), without optimizer, counters or a wrapper around it."
        )
    return dict(found)


def check_tensors(
    found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], file: Path
) -> None:
    """Raise a ValueError unless all names and shapes match.

    A partly loaded network would still compute numbers, but meaningless ones.
    """
    problems = [
        f"{name} {shape} is expected and missing"
        for name, shape in expected.items()
        if name not in found
    ]
    problems += [
        f"{name} {tuple(found[name].shape)} is not expected"
        for name in found
        if name not in expected
    ]
    problems += [
        f"{name} is {tuple(found[name].shape)} where {shape} is expected"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    if problems:
        raise ValueError(
            f"{file} does not contain the weights of this network:\n  "
            + "\n  ".join(problems[:10])
            + (f"\n  and {len(problems) - 10} more" if len(problems) > 10 else "")
            + "\nGive the file of exactly this network, with the published names."
        )


def as_rgb(images: Tensor) -> Tensor:
    """Return images (B, C, H, W) with three channels, or raise a ValueError.

    A grey channel is repeated, and colours with alpha are composited over white.
    """
    fits = images.ndim == 4 and min(images.shape[2:]) >= MIN_PIXELS
    if not fits or images.shape[1] not in (1, 3, 4):
        raise ValueError(
            f"Images have the shape {tuple(images.shape)}, but this network takes (B, 3, H, W):"
            " red, green and blue in [-1, 1] (or one grey channel, or a fourth with alpha), with"
            f" at least {MIN_PIXELS} pixels a side. Enlarge smaller images first."
        )
    if images.shape[1] == 4:
        opacity = (images[:, 3:] + 1) / 2
        return images[:, :3] * opacity + (1 - opacity)
    return images if images.shape[1] == 3 else images.expand(-1, 3, -1, -1)
