"""The fraction of generated images that a classifier assigns to the class of their prompt.

    python bench/class_accuracy.py --train digits/train --test digits/test --samples samples

A small convolutional network is trained on folders of real images named by their class, with one
thread, and its accuracy on held-out real images is printed beside that on the samples. `--samples`
is a folder written by `tessera sample RUN --prompt zero one ... --count 20 --out samples`, whose
settings.json has the prompt of each image. Images are read as grey and resized to 28 x 28.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

SIZE, BATCH_SIZE, LEARNING_RATE = 28, 64, 2e-3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, required=True, help="a folder of class folders")
    parser.add_argument("--test", type=Path, required=True, help="held out, in class folders")
    parser.add_argument("--samples", type=Path, required=True, help="written by tessera sample")
    parser.add_argument("--images", type=int, default=20_000, help="training images, at most")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    classes = sorted(path.name for path in arguments.train.iterdir() if path.is_dir())
    per_class = arguments.images // len(classes)
    classifier = train_classifier(*read_classes(arguments.train, classes, per_class), arguments)
    test = read_classes(arguments.test, classes, per_class)
    samples = read_samples(arguments.samples, classes)
    print(f"chance            {1 / len(classes):.3f}")
    print(f"real, held out    {accuracy(classifier, *test):.3f} of {len(test[1]):,}")
    print(f"samples           {accuracy(classifier, *samples):.3f} of {len(samples[1]):,}")


def read_image(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("L").resize((SIZE, SIZE), Image.Resampling.BILINEAR))


def to_tensors(images: list[np.ndarray], labels: list[int]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(np.stack(images))[:, None] / 127.5 - 1, torch.tensor(labels)


def read_classes(folder: Path, classes: list[str], per_class: int) -> tuple[Tensor, Tensor]:
    """Read the first images of each class folder: (N, 1, 28, 28) in [-1, 1] and labels."""
    images: list[np.ndarray] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = sorted(path for path in (folder / name).iterdir() if path.is_file())[:per_class]
        images += [read_image(path) for path in files]
        labels += [label] * len(files)
    return to_tensors(images, labels)


def read_samples(folder: Path, classes: list[str]) -> tuple[Tensor, Tensor]:
    """Read generated images, with the class of their prompt as the label."""
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    prompts = settings["prompts"]
    files = sorted(path for path in folder.glob("[0-9]*.png"))
    if len(prompts) != len(files) or not set(prompts) <= set(classes):
        raise SystemExit(
            f"{folder} has {len(files)} images and {len(prompts)} prompts; each image needs one "
            f"prompt that is one of {', '.join(classes)}."
        )
    labels = [classes.index(prompt) for prompt in prompts]
    return to_tensors([read_image(path) for path in files], labels)


def train_classifier(images: Tensor, labels: Tensor, arguments: argparse.Namespace) -> nn.Module:
    classifier = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 7 * 7, 128), nn.ReLU()),
        nn.Linear(128, int(labels.max()) + 1),
    )
    steps = arguments.epochs * len(images) // BATCH_SIZE
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(len(images), (BATCH_SIZE,))
        loss = F.cross_entropy(classifier(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return classifier.eval()


@torch.no_grad()
def accuracy(classifier: nn.Module, images: Tensor, labels: Tensor) -> float:
    predicted = torch.cat([classifier(part).argmax(1) for part in images.split(256)])
    return (predicted == labels).float().mean().item()


if __name__ == "__main__":
    main()
