"""Networks with weights of others: read safely and whole, or refused with both sides named; and
never trained."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

SMALLEST_PIXELS = 32


class FrozenNetwork(nn.Module):
    """A network with weights of others: nothing in it learns, and it is always in eval mode."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def fingerprint(self) -> str:
        """A hash of the weights that compute, so that a number can say which network it was taken
        with."""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        return digest.hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The named tensors of a .safetensors file, or of a PyTorch file that holds nothing but
    tensors."""
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file {path}: give the path of a .safetensors or .pth file of weights."
        )
    try:
        found = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, "cpu", weights_only=True)
        )
    except (
        Exception
    ) as problem:  # each format has errors of its own, and none of them names the file
        raise ValueError(
            f"{path} could not be read as a file of tensors. It may be cut short, or hold Python objects, which are "
            f"never loaded. Fetch it again, or save the network's state_dict() alone. The reader said: {problem}"
        ) from problem
    if not isinstance(found, Mapping) or not all(
        isinstance(value, Tensor) for value in found.values()
    ):
        raise ValueError(
            f"{path} holds a {type(found).__name__} in which not every value is a tensor. Save the network's "
            "state_dict() alone, without optimizer, counters or a wrapper around it."
        )
    return dict(found)


def refuse_other_tensors(
    found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], file: Path
) -> None:
    """Every name and shape must agree: a network loaded by half still gives numbers, and they mean
    nothing."""
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
            f"{file} does not hold the weights of this network:\n  "
            + "\n  ".join(problems[:10])
            + (f"\n  and {len(problems) - 10} more" if len(problems) > 10 else "")
            + "\nGive the file of exactly this network, with the names it was published with."
        )


def refuse_other_images(images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < SMALLEST_PIXELS:
        raise ValueError(
            f"Images of shape {tuple(images.shape)} were given; this network looks at (B, 3, H, W): red, green and "
            f"blue in [-1, 1], with at least {SMALLEST_PIXELS} pixels a side. Enlarge smaller images first."
        )
