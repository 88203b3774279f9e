"""Make a folder of about 740 meshes of furniture and household items with captions, for the mesh
recipes.

    python examples/furniture.py OUT [--max-faces 200] [--only table chair] [--max-error 0.1]

OUT gets one OBJ of at most 800 triangles per piece (scopia-bed1.obj), metadata.jsonl with the
captions ("bed, double"), and CREDITS.md with the author and the license of each: CC-BY-3.0 or
public domain. The meshes are the furniture of Sweet Home 3D, from the Debian package
sweethome3d-furniture: apt-get downloads about 120 MB, and nothing is installed. The archives are
read in memory, and no path in them is used to write a file. About 80 pieces, many of them plants,
cannot be simplified that far; they are listed and skipped.

Few triangles cannot show every piece: a swivel chair of 150 triangles is a tilted box.
`--max-error` replaces each part by a box, several boxes or few triangles that are within this
fraction of the longest side, as exactly as `--max-faces` permit, and skips the pieces for which
they are too few and those that become one box. Boxes are preferred: at most a quarter of
`--max-faces` may belong to other shapes.
`--only` keeps those whose captions name one of these objects, and adds the noun as a second
caption; `--only furniture` is a list of nouns.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from debian import check_tools, download, read_entries

from tessera.data.errors import UnreadableFile
from tessera.modalities.mesh.approximate import approximate
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.point_clouds import head_noun
from tessera.modalities.mesh.simplify import BOX_FACES

PACKAGE = "sweethome3d-furniture"
MAX_FACES = 800
FURNITURE = (
    *("table", "chair", "cabinet", "lamp", "door", "bed", "sofa", "armchair", "desk", "bench"),
    *("bookcase", "stool", "wardrobe", "rack", "stand", "vanity", "dresser", "nightstand"),
    *("ottoman", "chest", "unit", "window", "light"),
)
"""What `--only furniture` stands for."""
SYNONYMS = {"couch": "sofa", "shelves": "bookcase", "shelf": "bookcase", "cupboard": "wardrobe"}
"""Nouns that are replaced by another one, so that few words name many pieces."""
SOURCE_TAGS = {"blend swap", "scpts"}
"""Tags that name the source of a piece instead of describing it."""

Piece = dict[str, str]
"""The properties of a piece in its catalog: name, tags, model, creator, ..."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write to")
    parser.add_argument(
        "--max-faces", type=int, default=MAX_FACES, help="the number of triangles of a piece"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NOUN",
        help="objects to keep, by the noun of their captions; furniture for a list of 23",
    )
    parser.add_argument(
        "--max-error",
        type=float,
        default=math.inf,
        help="how far the surface of a simplified part may be from the original, as a fraction of "
        "the longest side of the piece, up to 0.08: parts become boxes where that is near enough, "
        "and a piece is left out if --max-faces are too few (default: any distance)",
    )
    arguments = parser.parse_args()
    out = arguments.out
    nouns = FURNITURE if arguments.only == ["furniture"] else arguments.only
    check_tools()
    with tempfile.TemporaryDirectory() as folder:
        catalogs = read_catalogs(download(PACKAGE, Path(folder)))
        count = write_dataset(catalogs, out, arguments.max_faces, nouns, arguments.max_error)
    print(
        f"{count:,} pieces of furniture with captions are in {out}: "
        f"try `tessera train ... --data {out}`"
    )


def read_catalogs(package: Path) -> Iterator[bytes]:
    """Read the catalogs in the package; each is a zip file."""
    return (data for path, data in read_entries(package) if path.suffix == ".sh3f")


def write_dataset(
    catalogs: Iterable[bytes],
    out: Path,
    max_faces: int = MAX_FACES,
    nouns: Sequence[str] | None = None,
    max_error: float = math.inf,
) -> int:
    """Write the pieces that have a name and can be read, then metadata and credits; return their
    number."""
    out.mkdir(parents=True, exist_ok=True)
    lines: dict[str, str] = {}
    credits: dict[str, str] = {}
    for data in catalogs:
        with zipfile.ZipFile(BytesIO(data)) as catalog:
            license_name, pieces = parse_catalog(
                catalog.read("PluginFurnitureCatalog.properties").decode("latin-1")
            )
            for piece in pieces:
                name, caption = file_name(piece), build_caption(piece)
                if not caption or name in lines:
                    continue
                if nouns is not None and head_noun(caption) not in nouns:
                    continue
                try:
                    data = catalog.read(piece["model"].lstrip("/"))
                    mesh = load_simplified(data, piece, max_faces, max_error)
                except (UnreadableFile, KeyError, zipfile.BadZipFile) as error:
                    print(f"skipped {name}: {error}")
                    continue
                (out / name).write_text(mesh.to_y_up().to_obj(), encoding="utf-8")
                captions = [caption] if nouns is None else [caption, head_noun(caption)]
                text = caption if len(set(captions)) == 1 else captions
                lines[name] = json.dumps({"file_name": name, "text": text}, ensure_ascii=False)
                credits[name] = f"- {name}: {piece.get('creator', 'unknown')} ({license_name})"
    (out / "metadata.jsonl").write_text(
        "".join(f"{lines[name]}\n" for name in sorted(lines)), encoding="utf-8"
    )
    (out / "CREDITS.md").write_text(
        "".join(f"{credits[name]}\n" for name in sorted(credits)), encoding="utf-8"
    )
    return len(lines)


def parse_catalog(text: str) -> tuple[str, list[Piece]]:
    """Return the license of a catalog and the properties of its pieces.

    Lines have the form "name#12=Bed", with the escapes of Java's properties files.
    """
    general: dict[str, str] = {}
    pieces: defaultdict[int, Piece] = defaultdict(dict)
    for line in text.replace("\\\r\n", "").replace("\\\n", "").splitlines():
        if match := re.fullmatch(r"\s*(\w+)(?:#(\d+))?\s*=\s*(.*?)\s*", line):
            key, number, escaped = match.groups()
            value = re.sub(r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), escaped)
            (pieces[int(number)] if number else general)[key] = value
    license_name = " ".join(general.get("license", "license unknown").split())
    return license_name, [pieces[number] for number in sorted(pieces)]


def file_name(piece: Piece) -> str:
    """Build a file name of a-z, 0-9 and dashes from the id of a piece, so that it cannot be a
    path."""
    plain = re.sub(r"[^a-z0-9]+", "-", piece.get("id", "").lower()).strip("-")
    return f"{plain or 'unnamed'}.obj"


def build_caption(piece: Piece) -> str:
    """Join the name and those tags that it does not contain: "bed, double"."""
    name = " ".join(piece.get("name", "").lower().split())
    *words, noun = name.split() or [""]
    name = " ".join([*words, SYNONYMS.get(noun, noun)])
    tags = [" ".join(tag.lower().split()) for tag in piece.get("tags", "").split(",")]
    added = dict.fromkeys(tag for tag in tags if tag and tag not in SOURCE_TAGS and tag not in name)
    return ", ".join([name, *added]) if name else ""


def load_simplified(
    data: bytes, piece: Piece, max_faces: int = MAX_FACES, max_error: float = math.inf
) -> Mesh:
    """Load a mesh, apply the rotation of its catalog, where y is up, and simplify it with z up."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "piece.obj"
        file.write_bytes(data)
        mesh = Mesh.load(file, up="z")
    values = piece.get("modelRotation", "1 0 0 0 1 0 0 0 1").split()
    rotation = np.array(values, dtype=float).reshape(3, 3)
    original = Mesh(mesh.vertices @ rotation.T, mesh.faces).from_y_up()
    return simplify_within(original, max_faces, max_error)


def simplify_within(original: Mesh, max_faces: int, max_error: float) -> Mesh:
    """Simplify to at most `max_faces` triangles, part by part within `max_error` if it is finite.

    Raises:
        UnreadableFile: If `max_faces` triangles are too few, or one box is left.
    """
    if max_error == math.inf:
        return original.simplify(max_faces)
    simplified = approximate(original.vertices, original.triangles(), max_faces, max_error)
    if simplified is None:
        raise UnreadableFile(
            f"{max_faces} triangles are too few to keep its parts within {max_error:g} of its "
            "longest side"
        )
    if len(simplified.faces) == BOX_FACES:
        raise UnreadableFile("nothing but a box is left of it")
    return Mesh(simplified.vertices, simplified.faces)


if __name__ == "__main__":
    main()
