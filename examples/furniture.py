"""Lays out some 740 pieces of furniture and other things of a house, each with its name, for mesh
recipes to learn from.

    python examples/furniture.py OUT

OUT then holds one OBJ of at most 800 triangles per piece (scopia-bed1.obj), metadata.jsonl with the
captions ("bed, double") and CREDITS.md, which says who made which, under which licence: CC-BY-3.0
or public domain. They are the furniture of Sweet Home 3D, from the Debian package
sweethome3d-furniture: apt-get downloads about 120 MB, and nothing is installed. The archives are
read in memory, entry by entry, and no path in them is ever written to. Some 80 pieces, many of them
plants, cannot be simplified that far, and are named and left out.
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
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path

import numpy as np

from tessera.data.errors import UnreadableFile
from tessera.modalities.mesh.media import Mesh

PACKAGE = "sweethome3d-furniture"
MOST_FACES = 800
NO_CAPTION = {"blend swap", "scpts"}
"""Tags that say where a piece came from, and not what it is."""

Piece = dict[str, str]
"""What the catalogue says of one: name, tags, model, creator, ..."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    out = parser.parse_args().out
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        sys.exit(
            "The furniture comes as a Debian package, but there is no apt-get and dpkg-deb on this machine."
        )
    with tempfile.TemporaryDirectory() as folder:
        written = lay_out(catalogues(download(Path(folder))), out)
    print(
        f"{written:,} pieces of furniture with their names are in {out}: try `tessera train ... --data {out}`"
    )


def download(folder: Path) -> Path:
    """The package, as Debian packed it."""
    print(f"downloading {PACKAGE} ...")
    loaded = subprocess.run(
        ["apt-get", "download", PACKAGE], cwd=folder, capture_output=True, text=True
    )
    packages = list(folder.glob("*.deb"))
    if loaded.returncode != 0 or not packages:
        sys.exit(
            f"apt-get could not download {PACKAGE}:\n{loaded.stderr.strip() or loaded.stdout.strip()}"
        )
    return packages[0]


def catalogues(package: Path) -> Iterator[bytes]:
    """The catalogues in the package: each is a zip file."""
    unpacked = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", str(package)], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(unpacked)) as tar:
        for member in tar:
            file = (
                tar.extractfile(member)
                if member.isfile() and member.name.endswith(".sh3f")
                else None
            )
            if file is not None:
                yield file.read()


def lay_out(catalogues: Iterable[bytes], out: Path) -> int:
    """Writes the pieces that have a name and can be read, then the metadata and the credits;
    returns how many."""
    out.mkdir(parents=True, exist_ok=True)
    lines: dict[str, str] = {}
    credits: dict[str, str] = {}
    for data in catalogues:
        with zipfile.ZipFile(BytesIO(data)) as catalogue:
            licence, pieces = read_catalogue(
                catalogue.read("PluginFurnitureCatalog.properties").decode("latin-1")
            )
            for piece in pieces:
                name, caption = file_name(piece), caption_of(piece)
                if not caption or name in lines:
                    continue
                try:
                    mesh = simplified(catalogue.read(piece["model"].lstrip("/")), piece)
                except (UnreadableFile, KeyError, zipfile.BadZipFile) as error:
                    print(f"left out {name}: {error}")
                    continue
                (out / name).write_text(mesh.to_y_up().as_obj(), encoding="utf-8")
                lines[name] = json.dumps({"file_name": name, "text": caption}, ensure_ascii=False)
                credits[name] = f"- {name}: {piece.get('creator', 'unknown')} ({licence})"
    (out / "metadata.jsonl").write_text(
        "".join(f"{lines[name]}\n" for name in sorted(lines)), encoding="utf-8"
    )
    (out / "CREDITS.md").write_text(
        "".join(f"{credits[name]}\n" for name in sorted(credits)), encoding="utf-8"
    )
    return len(lines)


def read_catalogue(text: str) -> tuple[str, list[Piece]]:
    """The licence of a catalogue, and what it says of each piece: lines like "name#12=Bed", with
    escapes as Java has them."""
    about: dict[str, str] = {}
    pieces: defaultdict[int, Piece] = defaultdict(dict)
    for line in text.replace("\\\r\n", "").replace("\\\n", "").splitlines():
        if match := re.fullmatch(r"\s*(\w+)(?:#(\d+))?\s*=\s*(.*?)\s*", line):
            key, number, value = match.groups()
            said = re.sub(r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), value)
            (pieces[int(number)] if number else about)[key] = said
    return " ".join(about.get("license", "licence unknown").split()), [
        pieces[number] for number in sorted(pieces)
    ]


def file_name(piece: Piece) -> str:
    """Letters, digits and dashes of the catalogue's own name for it, and nothing else: it cannot
    lead anywhere."""
    plain = re.sub(r"[^a-z0-9]+", "-", piece.get("id", "").lower()).strip("-")
    return f"{plain or 'unnamed'}.obj"


def caption_of(piece: Piece) -> str:
    """ "bed, double": the name and what its tags add to it."""
    name = " ".join(piece.get("name", "").lower().split())
    tags = [" ".join(tag.lower().split()) for tag in piece.get("tags", "").split(",")]
    added = dict.fromkeys(tag for tag in tags if tag and tag not in NO_CAPTION and tag not in name)
    return ", ".join([name, *added]) if name else ""


def simplified(data: bytes, piece: Piece) -> Mesh:
    """Turned as the catalogue says, y up, then z up."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "piece.obj"
        file.write_bytes(data)
        mesh = Mesh.load(file, up="z")
    turn = np.array(piece.get("modelRotation", "1 0 0 0 1 0 0 0 1").split(), dtype=float).reshape(
        3, 3
    )
    return Mesh(mesh.vertices @ turn.T, mesh.faces).from_y_up().simplified(MOST_FACES)


if __name__ == "__main__":
    main()
