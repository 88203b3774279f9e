"""Make a folder of tiles cut from about 50 photographs, for the image tokenizer.

    python examples/photos.py OUT

OUT/train and OUT/test get tiles of 128 x 128 pixels; all tiles of a photograph are in the same
folder. Photographs: the wallpapers of the Debian packages mate-backgrounds, ukui-wallpapers and
plasma-workspace-wallpapers (GPL-2+, LGPL-3, CC-BY-SA), a download of 160 MB. The packages are read
in memory, and no path in them is used to write a file.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import debian
import numpy as np
from PIL import Image

PACKAGES = ("mate-backgrounds", "ukui-wallpapers", "plasma-workspace-wallpapers")
TILE = 128
SHORT_SIDE = 6 * TILE
"""Photographs are reduced to this short side first, so that a tile shows more than texture."""
MIN_BYTES = 60_000
MIN_CONTRAST = 6.0
"""Tiles with a smaller standard deviation of the grey values, of 255, are skipped as flat."""
TEST_EVERY = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write to")
    out = parser.parse_args().out
    debian.check_tools()
    count = sum(
        write_tiles(photo, out / ("test" if index % TEST_EVERY == 0 else "train"), f"{index:03d}")
        for index, photo in enumerate(read_photos())
    )
    print(f"{count:,} tiles are in {out}: try `tessera train images-vqgan --data {out / 'train'}`")


def read_photos() -> Iterator[Image.Image]:
    """Read the largest JPEG of each wallpaper; PNG files are drawings for the most part."""
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES:
            largest: dict[str, bytes] = {}
            for path, data in debian.read_entries(debian.download(package, Path(folder))):
                is_photo = path.suffix == ".jpg" and len(data) >= MIN_BYTES
                wallpaper = path.stem if "contents" not in path.parts else path.parts[-4]
                name = wallpaper.split("_")[0]
                if is_photo and len(data) > len(largest.get(name, b"")):
                    largest[name] = data
            for name in sorted(largest):
                yield Image.open(BytesIO(largest[name])).convert("RGB")


def write_tiles(photo: Image.Image, out: Path, stem: str) -> int:
    """Cut a photograph into tiles, write those with contrast, and return their number."""
    out.mkdir(parents=True, exist_ok=True)
    scale = SHORT_SIDE / min(photo.size)
    photo = photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.LANCZOS)
    count = 0
    for top in range(0, photo.height - TILE + 1, TILE):
        for left in range(0, photo.width - TILE + 1, TILE):
            tile = photo.crop((left, top, left + TILE, top + TILE))
            if np.asarray(tile.convert("L"), np.float32).std() >= MIN_CONTRAST:
                tile.save(out / f"{stem}-{top // TILE:02d}-{left // TILE:02d}.png")
                count += 1
    return count


if __name__ == "__main__":
    main()
