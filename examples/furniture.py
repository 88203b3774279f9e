"""Make a folder of about 740 meshes of furniture and household items with captions, for the mesh
recipes.

    python examples/furniture.py OUT [--max-faces 200] [--only table chair] [--max-error 0.1]

OUT gets one OBJ of at most 800 triangles per piece (scopia-bed1.obj), metadata.jsonl with the
captions ("bed, double"), and CREDITS.md with the author and the license of each: CC-BY-3.0 or
public domain. The meshes are the furniture of Sweet Home 3D, from the Debian package
sweethome3d-furniture: apt-get downloads about 120 MB, and nothing is installed. The archives are
read in memory, and no path in them is used to write a file. About 80 pieces, many of them plants,
cannot be simplified that far; they are listed and skipped.

Few triangles cannot show every piece: a swivel chair of 150 triangles is a tilted box, while a door
needs 12. `--max-error` gives each piece the fewest triangles with which its surface moves by at
most this fraction of its longest side, and skips those for which `--max-faces` are too few.
`--only` keeps those whose captions name one of these objects; `--only furniture` is such a list.
"""

from __future__ import annotations

import argparse
import contextlib
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
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.point_clouds import head_noun, sample_points
from tessera.modalities.mesh.simplify import BOX_FACES

PACKAGE = "sweethome3d-furniture"
MAX_FACES = 800
FURNITURE = (
    *("table", "chair", "cabinet", "lamp", "door", "bed", "sofa", "armchair", "desk", "bench"),
    *("bookcase", "stool", "couch", "shelves", "wardrobe", "rack", "stand", "vanity", "cupboard"),
    *("shelf", "dresser", "nightstand", "ottoman", "chest", "unit", "window", "light"),
)
"""What `--only furniture` stands for."""
NUM_POINTS, NUM_COMPARED = 4000, 500
"""Points on the surface of a mesh, and how many of these are compared with those of the other."""
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
        help="objects to keep, by the noun of their captions; furniture for a list of 27",
    )
    parser.add_argument(
        "--max-error",
        type=float,
        default=math.inf,
        help="how far the surface of a simplified piece may be from the original, as a fraction of "
        "its longest side: a piece gets as few triangles as possible, and is left out if "
        "--max-faces are too few (default: any distance, with --max-faces)",
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
                lines[name] = json.dumps({"file_name": name, "text": caption}, ensure_ascii=False)
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
    """Simplify to the fewest triangles that keep the surface within `max_error`, in steps of a
    factor of the square root of 2.

    Raises:
        UnreadableFile: If `max_faces` triangles are too few.
    """
    largest = original.simplify(max_faces)
    if max_error == math.inf:
        return largest
    if (error := surface_error(original, largest)) > max_error:
        raise UnreadableFile(f"{max_faces} triangles move its surface by {error:.2f} of its length")
    for count in face_counts(max_faces):
        with contextlib.suppress(UnreadableFile):
            smaller = original.simplify(count)
            if surface_error(original, smaller) <= max_error:
                return smaller
    return largest


def face_counts(max_faces: int) -> list[int]:
    """Return the numbers of triangles to try below `max_faces`, the smallest first: at least those
    of a box."""
    counts = [round(max_faces / 2 ** (number / 2)) for number in range(1, 20)]
    return [count for count in reversed(counts) if count >= BOX_FACES]


def surface_error(original: Mesh, simplified: Mesh) -> float:
    """Return the distance that 98 % of the points of either surface keep to the other, as a
    fraction of the longest side."""
    size = np.ptp(original.vertices, axis=0).max()
    one, other = (
        sample_points(mesh.vertices / size, mesh.triangles(), NUM_POINTS)
        for mesh in (original, simplified)
    )
    return float(max(distance_quantile(one, other), distance_quantile(other, one)))


def distance_quantile(points: np.ndarray, surface: np.ndarray) -> float:
    compared = points[:: NUM_POINTS // NUM_COMPARED]
    squared = (compared**2).sum(1)[:, None] + (surface**2).sum(1) - 2 * compared @ surface.T
    return float(np.quantile(np.sqrt(np.maximum(squared.min(axis=1), 0)), 0.98))


if __name__ == "__main__":
    main()
