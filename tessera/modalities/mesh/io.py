"""Files that hold a mesh: what they are, how many faces they claim, and their corners and polygons
as they stand.

OBJ and OFF are read here, because trimesh cuts their quads into triangles before anybody can ask
for them; PLY, STL, GLB and glTF are read by trimesh. What a file is, its first bytes say, whatever
it is called. Faces are counted before anything heavy is done. Nothing outside a file is opened, but
for the buffers of a .gltf, which must lie in its own folder; materials and pictures are never
looked at.

V counts vertices, P polygons of one kind. z is up: in OBJ and glTF files y is, and they are turned
when they are read.
"""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import numpy as np

from tessera.data.errors import UnreadableFile
from tessera.modalities.mesh.trimesh_library import library

Kind = Literal["OBJ", "PLY", "STL", "GLB", "glTF", "OFF"]
Up = Literal["y", "z"]

ENDINGS = (".obj", ".ply", ".stl", ".glb", ".gltf", ".off")
UP: dict[Kind, Up] = {"OBJ": "y", "GLB": "y", "glTF": "y", "PLY": "z", "STL": "z", "OFF": "z"}
"""glTF prescribes y (glTF 2.0 specification, 3.4); OBJ has no rule but this custom, as scans and
prints have theirs."""
MOST_READ = 1_000_000
"""Faces that are read at all: a larger mesh would take minutes and gigabytes, and none is learnt
from at that size."""
MOST_BYTES = 1 << 29


@dataclass(frozen=True)
class Polygons:
    """What stands in a file."""

    vertices: np.ndarray
    """(V, 3) float64"""
    by_corners: dict[int, np.ndarray]
    """number of corners -> (P, corners) int64, in the file's order"""
    kind: Kind
    beside: str = ""
    """what else there is, for a file without faces: "2 cameras" """


def read_polygons(path: str | Path, most: int = MOST_READ) -> Polygons:
    """The corners and polygons of a file, as they stand. A file that claims more than `most` of
    these is not read further."""
    if (size := Path(path).stat().st_size) > MOST_BYTES:
        raise UnreadableFile(
            f"it has {size / 1e6:,.0f} MB, and at most {MOST_BYTES / 1e6:,.0f} MB are read: simplify it first"
        )
    data = Path(path).read_bytes()
    kind = kind_of(data)
    try:
        refuse_more(claimed_faces(data, kind), most)
        polygons = read_as(kind, data, Path(path).parent)
        refuse_more(sum(len(each) for each in polygons.by_corners.values()), most)
        return polygons
    except (UnreadableFile, ModuleNotFoundError):
        raise
    except (
        Exception
    ) as error:  # readers meet damaged bytes with nearly every kind of exception there is
        raise UnreadableFile(
            f"it is a damaged or cut {kind} file ({str(error) or type(error).__name__})"
        ) from error


def refuse_more(faces: int, most: int) -> None:
    if faces > most:
        raise UnreadableFile(
            f"it has {faces:,} faces, and at most {most:,} are read: simplify it first"
        )


def kind_of(data: bytes) -> Kind:
    if not data:
        raise UnreadableFile("the file is empty (0 bytes)")
    start = data[:512].lstrip()
    if data.startswith(b"glTF"):
        return "GLB"
    if start.startswith(b"ply"):
        return "PLY"
    if re.match(rb"(ST)?C?N?OFF\s", start):
        return "OFF"
    if len(data) >= 84 and len(data) == 84 + 50 * triangles_of_binary_stl(data):
        return "STL"
    if start.startswith(b"solid") and b"facet" in data[:4096]:
        return "STL"
    if start.startswith(b"{") and b'"asset"' in data:
        return "glTF"
    if re.search(rb"^\s*v\s+[-+.\d]\S*\s+\S+\s+\S+", data, re.MULTILINE):
        return "OBJ"
    raise UnreadableFile(
        f"it is no OBJ, PLY, STL, GLB, glTF or OFF mesh (it begins with {data[:8]!r})"
    )


def triangles_of_binary_stl(data: bytes) -> int:
    return struct.unpack_from("<I", data, 80)[0]


# ---- counting before reading


def claimed_faces(data: bytes, kind: Kind) -> int:
    match kind:
        case "OBJ":
            return data.count(b"\nf ") + data.count(b"\nf\t")
        case "OFF":
            return off_counts(off_lines(data[:65536].decode("latin-1")))[1]
        case "PLY":
            claim = re.search(rb"element\s+face\s+(\d+)", data[:65536])
            return int(claim[1]) if claim else 0
        case "STL":
            return (
                data.count(b"facet normal")
                if data.startswith(b"solid")
                else triangles_of_binary_stl(data)
            )
        case _:
            return triangles_of_scene(scene_of(data, kind))


def scene_of(data: bytes, kind: Kind) -> dict[str, Any]:
    """The JSON of a glTF scene; in a GLB file it is the first chunk (glTF 2.0 specification,
    4.4)."""
    if kind == "GLB":
        length = struct.unpack_from("<I", data, 12)[0]
        data = data[20 : 20 + length]
    scene = json.loads(data)
    if not isinstance(scene, dict):
        raise ValueError("its scene is no JSON object")
    return scene


def triangles_of_scene(scene: dict[str, Any]) -> int:
    """What all places show together: a mesh that stands in a thousand places counts a thousand
    times."""
    sizes = [
        sum(triangles_of_part(scene, part) for part in mesh["primitives"])
        for mesh in scene.get("meshes", [])
    ]
    return sum(sizes[node["mesh"]] for node in scene.get("nodes", []) if "mesh" in node)


def triangles_of_part(scene: dict[str, Any], part: dict[str, Any]) -> int:
    accessor = part["indices"] if "indices" in part else part["attributes"]["POSITION"]
    return int(scene["accessors"][accessor]["count"]) // 3


# ---- reading


def read_as(kind: Kind, data: bytes, folder: Path) -> Polygons:
    if kind == "OBJ":
        return read_obj(data.decode("latin-1"))
    if kind == "OFF":
        return read_off(data.decode("latin-1"))
    return read_by_trimesh(kind, data, folder)


def read_obj(text: str) -> Polygons:
    """Vertices and faces of all objects and groups, as one mesh; lines, curves, normals and
    materials are passed over."""
    vertices: list[list[float]] = []
    polygons: defaultdict[int, list[list[int]]] = defaultdict(list)
    for line in (
        re.sub(r"\r\n?", "\n", text).replace("\\\n", " ").split("\n")
    ):  # splitlines would cut names at \x85
        word, *values = line.split() or [""]
        if word == "v":
            vertices.append([float(value) for value in values[:3]])
        elif word == "f":
            corners = values[: values.index("#")] if "#" in values else values
            polygons[len(corners)].append([obj_index(corner, len(vertices)) for corner in corners])
    return Polygons(np.array(vertices, dtype=np.float64), as_arrays(polygons), "OBJ")


def obj_index(corner: str, so_far: int) -> int:
    """ "3/1/2" and "3" are the third vertex, and "-1" is the last one so far."""
    number = int(corner.partition("/")[0])
    if number == 0:
        raise ValueError("a face names vertex 0, but OBJ counts from 1")
    return number - 1 if number > 0 else so_far + number


def read_off(text: str) -> Polygons:
    lines = off_lines(text)
    vertex_count, face_count = off_counts(lines)
    vertices = [[float(value) for value in next(lines).split()[:3]] for _ in range(vertex_count)]
    polygons: defaultdict[int, list[list[int]]] = defaultdict(list)
    for _ in range(face_count):
        corners, *indices = next(lines).split()
        polygons[int(corners)].append([int(index) for index in indices[: int(corners)]])
    return Polygons(np.array(vertices, dtype=np.float64), as_arrays(polygons), "OFF")


def off_lines(text: str) -> Iterator[str]:
    """What is said after the word OFF; in some files of ModelNet the counts stand right behind it,
    in the same line."""
    rest = re.sub(r"^\s*(ST)?C?N?OFF", "", text, count=1)
    lines = (line.partition("#")[0].strip() for line in rest.splitlines())
    return (line for line in lines if line)


def off_counts(lines: Iterator[str]) -> tuple[int, int]:
    vertices, faces, *_ = next(lines).split()
    return int(vertices), int(faces)


def as_arrays(polygons: dict[int, list[list[int]]]) -> dict[int, np.ndarray]:
    """Points and lines that call themselves faces are left out."""
    return {
        corners: np.array(found, dtype=np.int64)
        for corners, found in polygons.items()
        if corners >= 3
    }


def read_by_trimesh(kind: Kind, data: bytes, folder: Path) -> Polygons:
    scene = library().load_scene(
        BytesIO(data),
        file_type=kind.lower(),
        resolver=Beside(folder),
        process=False,
        skip_materials=True,
    )
    cameras = len(scene_of(data, kind).get("cameras", [])) if kind in ("GLB", "glTF") else 0
    beside = f"{cameras} {'camera' if cameras == 1 else 'cameras'}" if cameras else ""
    if not any(len(getattr(geometry, "faces", ())) for geometry in scene.geometry.values()):
        points = sum(len(getattr(geometry, "vertices", ())) for geometry in scene.geometry.values())
        return Polygons(np.zeros((points, 3)), {}, kind, beside)
    mesh = scene.to_mesh()
    vertices, faces = (
        np.asarray(mesh.vertices, dtype=np.float64),
        np.asarray(mesh.faces, dtype=np.int64),
    )
    return Polygons(vertices, {3: faces}, kind, beside)


class Beside:
    """What trimesh asks for the buffers of a .gltf: files of the same folder, and nothing else on
    this machine or another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def get(self, name: str) -> bytes:
        file = (self.folder / unquote(name)).resolve()
        if not file.is_relative_to(self.folder):
            raise UnreadableFile(
                f"it asks for {name!r}, which leads out of its folder: a scene's buffers must lie beside it"
            )
        try:
            return file.read_bytes()
        except OSError as error:
            raise UnreadableFile(
                f"it asks for {name!r}, which cannot be opened ({error.strerror or error})"
            ) from error

    __getitem__ = get
