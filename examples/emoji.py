"""Lays out some 3,400 shaded emoji, each with its name, as a folder that image recipes can learn
from.

    python examples/emoji.py OUT

OUT then holds one 256 x 256 picture per emoji (1f600.png) and metadata.jsonl with the captions
("grinning face").
Pictures: Microsoft's Fluent 3D emoji, MIT, from the npm package @lobehub/fluent-emoji-3d. Names:
emoji-datasource, MIT. npm downloads about 40 MB, and OUT takes about 110 MB. The archives are read
in memory, entry by entry, and no path in them is ever written to.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from tessera.data.errors import UnreadableFile
from tessera.modalities.image.media import Image, decode, flatten

PICTURES = "@lobehub/fluent-emoji-3d"
NAMES = "emoji-datasource"
CODE_POINT = re.compile(r"[0-9a-f]{2,6}(-[0-9a-f]{2,6})*")
SKIN = {
    "1F3FB": "light skin tone",
    "1F3FC": "medium-light skin tone",
    "1F3FD": "medium skin tone",
    "1F3FE": "medium-dark skin tone",
    "1F3FF": "dark skin tone",
}

LayOut = Callable[[Path, dict[str, str], Path], int]
"""archive, names by code point, and the folder to fill; gives back how many emoji it wrote"""
Write = Callable[[bytes, Path], Path | None]
"""one file of the archive, and where to write it, without an ending; None for one that is left
out"""


def main() -> None:
    make_folder("emoji", PICTURES, lay_out, __doc__)


def make_folder(what: str, package: str, lay_out: LayOut, about: str | None) -> None:
    """The script: names and an archive from npm, laid out in the folder that the command line
    names."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    out = parser.parse_args().out
    if shutil.which("npm") is None:
        sys.exit(
            "The emoji come as npm packages, but there is no npm on this machine: install Node.js first."
        )
    with tempfile.TemporaryDirectory() as folder:
        names = read_names(download(NAMES, Path(folder)))
        written = lay_out(download(package, Path(folder)), names, out)
    print(f"{written:,} {what} with their names are in {out}: try `tessera train ... --data {out}`")


def download(package: str, folder: Path) -> Path:
    """The package's archive, as npm packed it."""
    print(f"downloading {package} ...")
    packed = subprocess.run(
        ["npm", "pack", "--silent", "--pack-destination", str(folder), package],
        capture_output=True,
        text=True,
    )
    if packed.returncode != 0:
        sys.exit(
            f"npm could not download {package}:\n{packed.stderr.strip() or packed.stdout.strip()}"
        )
    return folder / packed.stdout.strip().splitlines()[-1]


def read_names(archive: Path) -> dict[str, str]:
    """Code point, as files are called ("1f44b-1f3fb"), to name ("waving hand, light skin tone")."""
    (data,) = (
        data
        for path, data in entries(archive)
        if path.name == "emoji.json" and len(path.parts) == 2
    )
    names: dict[str, str] = {}
    for emoji in json.loads(data):
        name = one_spelling(emoji["name"] or emoji["short_name"].replace("_", " "))
        names |= dict.fromkeys(code_points(emoji), name)
        for tones, variant in emoji.get("skin_variations", {}).items():
            skins = " and ".join(dict.fromkeys(SKIN[tone] for tone in tones.split("-")))
            names |= dict.fromkeys(code_points(variant), f"{name}, {skins}")
    return names


def code_points(emoji: dict[str, Any]) -> list[str]:
    """With and without the invisible marks for "show as a picture", which sets of emoji write or
    leave out at will."""
    spellings = [emoji["unified"].lower(), (emoji.get("non_qualified") or emoji["unified"]).lower()]
    return [*spellings, without_marks(spellings[0])]


def without_marks(code_point: str) -> str:
    return "-".join(part for part in code_point.split("-") if part != "fe0f")


def one_spelling(name: str) -> str:
    return " ".join(name.lower().split())


def lay_out(archive: Path, names: dict[str, str], out: Path) -> int:
    """Writes the pictures that have a name, then the metadata; returns how many."""
    return write_named(archive, names, out, picture)


def picture(data: bytes, stem: Path) -> Path:
    return Image(np.array(flatten(decode(data)))).save(stem)


def write_named(archive: Path, names: dict[str, str], out: Path, write: Write) -> int:
    """Of the archive's pictures those that have a name and that `write` takes, then the metadata;
    returns how many."""
    out.mkdir(parents=True, exist_ok=True)
    lines: dict[str, str] = {}
    for path, data in entries(archive):
        name = names.get(path.stem) or names.get(without_marks(path.stem))
        if path.suffix != ".webp" or name is None or not CODE_POINT.fullmatch(path.stem):
            continue
        try:
            file = write(data, out / path.stem)
        except UnreadableFile as error:
            print(f"left out {path.name}: {error}")
            continue
        if file is not None:
            lines[file.name] = json.dumps(
                {"file_name": file.name, "text": name}, ensure_ascii=False
            )
    (out / "metadata.jsonl").write_text(
        "".join(f"{lines[file]}\n" for file in sorted(lines)), encoding="utf-8"
    )
    return len(lines)


def entries(archive: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                yield PurePosixPath(member.name), file.read()


if __name__ == "__main__":
    main()
