"""The images of the rows vqgan and maskgit: the same files for all sides.

`prepare` writes the images of a folder at 64 x 64 pixels to two folders, `train` and `held-out`,
by the split of the recipes. No side has to resize anything, and no side trains on held-out images.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZE = 64


@dataclass(frozen=True)
class ImageFolder:
    path: Path

    @property
    def metadata(self) -> Path:
        return self.path / "metadata.jsonl"

    def records(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self.metadata.read_text("utf-8").splitlines()]

    def captions(self) -> list[str]:
        return [record["text"] for record in self.records()]

    def pixels(self) -> Any:
        """Load all images as bytes, (N, 3, S, S)."""
        import numpy as np
        import PIL.Image

        images = [PIL.Image.open(self.path / one["file_name"]) for one in self.records()]
        return np.stack([np.asarray(image.convert("RGB")).transpose(2, 0, 1) for image in images])


def train_folder(work: Path) -> ImageFolder:
    return ImageFolder(work / "images" / "train")


def held_out_folder(work: Path) -> ImageFolder:
    return ImageFolder(work / "images" / "held-out")


def lite0_weights(work: Path) -> Path:
    """Return the weights of EfficientNet-Lite0, for processes that do not have its package."""
    return work / "efficientnet-lite0.pth"


def prepare(data: Path, work: Path) -> None:
    """Write both folders and the weights, unless that has been done."""
    from tessera.modalities.image.dataset import ImageDataConfig
    from tessera.modalities.image.efficientnet_lite import find_weights

    if not lite0_weights(work).exists():
        shutil.copyfile(find_weights(), lite0_weights(work))
    split = ImageDataConfig(path=str(data), size=SIZE, crop="centre").build()
    for dataset, folder in (
        (split.train, train_folder(work)),
        (split.validation, held_out_folder(work)),
    ):
        if not folder.metadata.exists():
            write_images(dataset, folder)


def write_images(dataset: Any, folder: ImageFolder) -> None:
    """Write PNG files and, as the sign that the folder is complete, the captions."""
    import numpy as np

    from tessera.modalities.image.media import Image

    folder.path.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(len(dataset)):
        example = dataset.item(index, np.random.default_rng(0))
        file = Image.from_floats(example.pixels).save(folder.path / f"{index:05d}.png")
        lines.append(json.dumps({"file_name": file.name, "text": example.caption}))
    folder.metadata.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def to_floats(pixels: Any) -> Any:
    """Convert bytes to a float tensor in [-1, 1]."""
    import torch

    return torch.from_numpy(pixels).float() / 127.5 - 1


def to_bytes(images: Any) -> Any:
    """Convert a float tensor in [-1, 1] to bytes, as a file would have them."""
    import torch

    scaled = ((images.clamp(-1, 1) + 1) * 127.5).round()
    return scaled.to(torch.uint8).cpu().numpy()
