"""Make a folder of about 3,400 shaded emoji with captions, for the image recipes.

    python examples/emoji.py OUT [--noto] [--exclude 1f600 ...]

OUT gets one 256 x 256 image per emoji (1f600.png), and metadata.jsonl with the captions ("grinning
face") and the subjects, which are the captions without skin tones, for --data.balance-by subject.
Images: Microsoft's Fluent 3D emoji, MIT, from the npm package @lobehub/fluent-emoji-3d. Names:
emoji-datasource, MIT. npm downloads about 40 MB, and OUT takes about 110 MB. --noto adds about
3,800 flat drawings of 64 x 64, mostly of the same subjects (noto-1f600.png, "grinning face, flat"):
Google's Noto emoji, Apache-2.0, from the npm package emoji-datasource-google, another 74 MB. The
archives are read in memory, and no path in them is used to write a file.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from tessera.data.errors import UnreadableFile
from tessera.modalities.image.media import Image, decode, to_rgb

IMAGES = "@lobehub/fluent-emoji-3d"
NOTO_IMAGES = "emoji-datasource-google"
NOTO_PREFIX = "noto-"
NAMES = "emoji-datasource"
CODE_POINT = re.compile(r"[0-9a-f]{2,6}(-[0-9a-f]{2,6})*")
SKIN_TONES = {
    "1F3FB": "light skin tone",
    "1F3FC": "medium-light skin tone",
    "1F3FD": "medium skin tone",
    "1F3FE": "medium-dark skin tone",
    "1F3FF": "dark skin tone",
}
SKIN_TONE_SUFFIX = re.compile(r", [a-z-]+ skin tone( and [a-z-]+ skin tone)*$")

Record = dict[str, str]
"""The fields of a line of metadata.jsonl."""
WriteFiles = Callable[[Path, dict[str, str], Path], list[Record]]
"""Takes an archive, names by code point and an output folder; writes the emoji that have a name,
and returns a record of each."""
WriteEmoji = Callable[[bytes, Path], Path | None]
"""Takes the content of a file and an output path without suffix; returns the path written to, or
None if the emoji is skipped."""


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument(
        "--noto", action="store_true", help="add flat drawings of the same subjects"
    )
    args = parser.parse_args()
    noto = {NOTO_IMAGES: write_noto_images} if args.noto else {}
    run_example("emoji", {IMAGES: write_images, **noto}, args)


def build_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write to")
    parser.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="CODE",
        help="leave out emoji that begin with these code points, in all their variants",
    )
    return parser


def run_example(noun: str, packages: dict[str, WriteFiles], args: argparse.Namespace) -> None:
    """Download names and archives from npm, and write the files of each archive and the
    metadata."""
    out: Path = args.out
    if shutil.which("npm") is None:
        sys.exit("The emoji are in npm packages, but npm is not installed: install Node.js first.")
    with tempfile.TemporaryDirectory() as folder:
        names = exclude(read_names(download(NAMES, Path(folder))), args.exclude)
        records = [
            record
            for package, write_files in packages.items()
            for record in write_files(download(package, Path(folder)), names, out)
        ]
    write_metadata(records, out)
    print(
        f"{len(records):,} {noun} with captions are in {out}: try `tessera train ... --data {out}`"
    )


def download(package: str, folder: Path) -> Path:
    """Download a package with npm and return its archive."""
    print(f"downloading {package} ...")
    done = subprocess.run(
        ["npm", "pack", "--silent", "--pack-destination", str(folder), package],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        output = done.stderr.strip() or done.stdout.strip()
        sys.exit(f"npm could not download {package}:\n{output}")
    return folder / done.stdout.strip().splitlines()[-1]


def read_names(archive: Path) -> dict[str, str]:
    """Return code point, as in file names ("1f44b-1f3fb") -> name ("waving hand, light skin
    tone")."""
    (data,) = (
        data
        for path, data in read_entries(archive)
        if path.name == "emoji.json" and len(path.parts) == 2
    )
    names: dict[str, str] = {}
    for emoji in json.loads(data):
        name = normalize(emoji["name"] or emoji["short_name"].replace("_", " "))
        names |= dict.fromkeys(code_points(emoji), name)
        for tones, variant in emoji.get("skin_variations", {}).items():
            skin = " and ".join(dict.fromkeys(SKIN_TONES[tone] for tone in tones.split("-")))
            names |= dict.fromkeys(code_points(variant), f"{name}, {skin}")
    return names


def exclude(names: dict[str, str], excluded: Iterable[str]) -> dict[str, str]:
    """Return the names of the emoji that do not begin with one of some code points."""
    first = {code_point.lower() for code_point in excluded}
    return {key: name for key, name in names.items() if key.split("-")[0] not in first}


def code_points(emoji: dict[str, Any]) -> list[str]:
    """Return the code points with and without variation selectors, which not all emoji sets use."""
    qualified = emoji["unified"].lower()
    non_qualified = (emoji.get("non_qualified") or emoji["unified"]).lower()
    return [qualified, non_qualified, strip_selectors(qualified)]


def strip_selectors(code_point: str) -> str:
    """Remove U+FE0F, which requests the display as an image."""
    return "-".join(part for part in code_point.split("-") if part != "fe0f")


def normalize(name: str) -> str:
    return " ".join(name.lower().split())


def write_images(archive: Path, names: dict[str, str], out: Path) -> list[Record]:
    """Write the images that have a name on white; return their records."""
    return write_named(archive, names, out, write_image)


def write_noto_images(archive: Path, names: dict[str, str], out: Path) -> list[Record]:
    """Write Noto emoji with a prefix; their captions, but not their subjects, name the style."""

    def write(data: bytes, stem: Path) -> Path:
        return write_image(data, stem.with_name(f"{NOTO_PREFIX}{stem.name}"))

    records = write_named(archive, names, out, write, suffix=".png")
    return [{**record, "text": f"{record['text']}, flat"} for record in records]


def write_image(data: bytes, stem: Path) -> Path:
    return Image(np.array(to_rgb(decode(data)))).save(stem)


def write_named(
    archive: Path, names: dict[str, str], out: Path, write: WriteEmoji, suffix: str = ".webp"
) -> list[Record]:
    """Write the files of an archive that have a name and that `write` accepts; return their
    records."""
    out.mkdir(parents=True, exist_ok=True)
    records: dict[str, Record] = {}
    for path, data in read_entries(archive):
        name = names.get(path.stem) or names.get(strip_selectors(path.stem))
        if path.suffix != suffix or name is None or not CODE_POINT.fullmatch(path.stem):
            continue
        try:
            file = write(data, out / path.stem)
        except UnreadableFile as error:
            print(f"skipped {path.name}: {error}")
            continue
        if file is not None:
            subject = find_subject(name)
            records[file.name] = {"file_name": file.name, "text": name, "subject": subject}
    return [records[file] for file in sorted(records)]


def write_metadata(records: Iterable[Record], out: Path) -> None:
    lines = (json.dumps(record, ensure_ascii=False) for record in records)
    (out / "metadata.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def find_subject(name: str) -> str:
    """Return the name without skin tones, which the variants of an emoji have in common."""
    return SKIN_TONE_SUFFIX.sub("", name)


def read_entries(archive: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Read the files in an archive, in memory: yields path and content."""
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                yield PurePosixPath(member.name), file.read()


if __name__ == "__main__":
    main()
