"""Read mesh files: detect their format, count their faces and return vertices and polygons.

OBJ and OFF are parsed here, because trimesh cuts quads into triangles; PLY, STL, GLB and glTF are
read by trimesh. The format is detected from the content of a file, not from its name. Faces are
counted before a file is parsed. No other file is opened, except for the buffers of a .gltf file,
which must be in its own folder; materials and textures are never read.

V counts vertices, P polygons with the same number of corners. z is up: OBJ and glTF files, in which
y is up, are rotated after reading.
"""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.parse import unquote

import numpy as np

from tessera._optional import require
from tessera.data.budget import check_decoded_size, read_file
from tessera.data.errors import UnreadableFile, is_defect
from tessera.data.files import AnyFile, StoredFile

MeshFormat = Literal["OBJ", "PLY", "STL", "GLB", "glTF", "OFF"]
Up = Literal["y", "z"]
Scene = dict[str, Any]
"""The JSON of a glTF scene, or an object in it."""

SUFFIXES = (".obj", ".ply", ".stl", ".glb", ".gltf", ".off")
UP_AXIS: dict[MeshFormat, Up] = {
    "OBJ": "y",
    "GLB": "y",
    "glTF": "y",
    "PLY": "z",
    "STL": "z",
    "OFF": "z",
}
"""glTF prescribes y (glTF 2.0 specification, 3.4); for the other formats this is convention."""
OBJECT_BYTES = 160
"""The memory of a vertex while a text file is parsed: a list of three numbers."""
ELEMENT_BYTES = 64
"""The memory of a vertex or face of a PLY file, with normals and colours."""
ACCESSOR_SIZES = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4, "MAT2": 4, "MAT3": 9, "MAT4": 16}
"""The components of a row of a glTF accessor (glTF 2.0 specification, 3.6.2.2)."""
MAX_FACES = 1_000_000
"""The largest file that is read, in faces: a larger one would take minutes and gigabytes, and no
model is trained on meshes of that size."""


def require_trimesh() -> ModuleType:
    """Import trimesh, or raise ModuleNotFoundError with the command that installs it."""
    return require("trimesh", extra="mesh", purpose="Reading and writing meshes")


def require_simplification() -> ModuleType:
    """Import fast_simplification, or raise ModuleNotFoundError with the command that installs
    it."""
    return require("fast_simplification", extra="mesh", purpose="Simplifying meshes")


@dataclass(frozen=True)
class Polygons:
    """The content of a mesh file."""

    vertices: np.ndarray
    """(V, 3) float64."""
    by_corners: dict[int, np.ndarray]
    """Number of corners -> (P, corners) int64, in the order of the file."""
    format: MeshFormat
    other_content: str = ""
    """What a file without faces contains, such as "2 cameras"."""


def read_polygons(path: AnyFile, max_faces: int = MAX_FACES) -> Polygons:
    """Return the vertices and polygons of a file.

    Raises:
        UnreadableFile: If the file is damaged or in another format, is too large, or has more than
            `max_faces` polygons; these are counted before the file is parsed.
    """
    data = read_file(path)
    mesh_format = detect_format(data)
    try:
        check_face_count(count_declared_faces(data, mesh_format), max_faces)
        check_declared_size(data, mesh_format)
        polygons = parse(
            mesh_format, data, None if isinstance(path, StoredFile) else Path(path).parent
        )
        check_face_count(sum(len(each) for each in polygons.by_corners.values()), max_faces)
        return polygons
    except (UnreadableFile, ModuleNotFoundError):
        raise
    except Exception as error:  # damaged bytes raise nearly every type of exception in parsers
        if is_defect(error):
            raise
        raise UnreadableFile(
            f"it is a damaged or truncated {mesh_format} file "
            f"({str(error) or type(error).__name__})"
        ) from error


def measure_file(path: str | Path) -> dict[str, float]:
    """Return the number of faces that a file declares, without parsing it."""
    data = read_file(path)
    return {"faces": count_declared_faces(data, detect_format(data))}


def check_face_count(faces: int, max_faces: int) -> None:
    if faces > max_faces:
        raise UnreadableFile(
            f"it has {faces:,} faces, and at most {max_faces:,} are read: simplify it first"
        )


def detect_format(data: bytes) -> MeshFormat:
    """Return the format of a file by its content."""
    if not data:
        raise UnreadableFile("the file is empty (0 bytes)")
    start = data[:512].lstrip()
    if data.startswith(b"glTF"):
        return "GLB"
    if start.startswith(b"ply"):
        return "PLY"
    if re.match(rb"(ST)?C?N?OFF\s", start):
        return "OFF"
    if len(data) >= 84 and len(data) == 84 + 50 * count_binary_stl_triangles(data):
        return "STL"
    if start.startswith(b"solid") and b"facet" in data[:4096]:
        return "STL"
    if start.startswith(b"{") and b'"asset"' in data:
        return "glTF"
    # Only blanks within a line: with \s, the time grew with the square of the empty lines.
    number = rb"[ \t]+[-+]?(?:[.\d]\S*|nan\S*|inf\S*)"
    if re.search(rb"^[ \t]*v" + 3 * number, data, re.MULTILINE | re.IGNORECASE):
        return "OBJ"
    raise UnreadableFile(
        f"it is not an OBJ, PLY, STL, GLB, glTF or OFF mesh (it starts with {data[:8]!r})"
    )


def count_binary_stl_triangles(data: bytes) -> int:
    return struct.unpack_from("<I", data, 80)[0]


# ---- counting before parsing


def count_declared_faces(data: bytes, mesh_format: MeshFormat) -> int:
    """Return the number of faces that a file declares, without parsing it."""
    match mesh_format:
        case "OBJ":
            return data.count(b"\nf ") + data.count(b"\nf\t")
        case "OFF":
            return parse_off_counts(iterate_off_lines(data[:65536].decode("latin-1")))[1]
        case "PLY":
            declared = re.search(rb"element\s+face\s+(\d+)", data[:65536])
            return int(declared[1]) if declared else 0
        case "STL":
            return (
                data.count(b"facet normal")
                if data.startswith(b"solid")
                else count_binary_stl_triangles(data)
            )
        case _:
            return count_scene_triangles(parse_scene(data, mesh_format))


def check_declared_size(data: bytes, mesh_format: MeshFormat) -> None:
    """Raise UnreadableFile if the arrays that a file declares are too large for the memory."""
    match mesh_format:
        case "OBJ":
            count = data.count(b"\nv") + data.count(b"\rv") + 1
            check_decoded_size(f"{count:,} vertices", OBJECT_BYTES * count)
        case "PLY":
            declared = re.findall(rb"element[ \t]+\w+[ \t]+(\d{1,18})", data[:65536])
            count = sum(map(int, declared))
            check_decoded_size(f"{count:,} elements", ELEMENT_BYTES * count)
        case "GLB" | "glTF":
            for count, components in list_arrays(parse_scene(data, mesh_format)):
                check_decoded_size(f"an array of {count:,} rows", 8 * count * components)


def parse_scene(data: bytes, mesh_format: MeshFormat) -> Scene:
    """Return the JSON of a glTF scene; in a GLB file it is the first chunk (glTF 2.0 specification,
    4.4)."""
    if mesh_format == "GLB":
        length = struct.unpack_from("<I", data, 12)[0]
        data = data[20 : 20 + length]
    scene = json.loads(data)
    if not isinstance(scene, dict):
        raise ValueError("its scene is not a JSON object")
    return scene


@contextmanager
def scene_errors() -> Iterator[None]:
    """Turn the errors of JSON values of other types than glTF has into ValueError."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        raise ValueError(f"its scene has a value of a wrong type: {error}") from error


@scene_errors()
def list_arrays(scene: Scene) -> list[tuple[int, int]]:
    """Return the rows and the components of a row of all arrays that a scene declares."""
    return [
        (int(accessor["count"]), ACCESSOR_SIZES.get(accessor["type"], 16))
        for accessor in scene.get("accessors", [])
    ]


@scene_errors()
def count_cameras(scene: Scene) -> int:
    return len(scene.get("cameras", []))


@scene_errors()
def count_scene_triangles(scene: Scene) -> int:
    """Count the triangles of all nodes: a mesh with a thousand instances counts a thousand
    times."""
    sizes = [
        sum(count_primitive_triangles(scene, primitive) for primitive in mesh["primitives"])
        for mesh in scene.get("meshes", [])
    ]
    return sum(sizes[node["mesh"]] for node in scene.get("nodes", []) if "mesh" in node)


def count_primitive_triangles(scene: Scene, primitive: Scene) -> int:
    indexed = "indices" in primitive
    accessor = primitive["indices"] if indexed else primitive["attributes"]["POSITION"]
    return int(scene["accessors"][accessor]["count"]) // 3


# ---- parsing


def parse(mesh_format: MeshFormat, data: bytes, folder: Path | None) -> Polygons:
    """Parse the content of a file; `folder` is where the buffers of a .gltf file are, if it is in
    one."""
    if mesh_format == "OBJ":
        return parse_obj(data.decode("latin-1"))
    if mesh_format == "OFF":
        return parse_off(data.decode("latin-1"))
    return parse_with_trimesh(mesh_format, data, folder)


def parse_obj(text: str) -> Polygons:
    """Return the vertices and faces of all objects and groups as one mesh, without lines, curves,
    normals and materials."""
    vertices: list[list[float]] = []
    polygons: defaultdict[int, list[list[int]]] = defaultdict(list)
    # Not splitlines, which would split names at \x85.
    for line in re.sub(r"\r\n?", "\n", text).replace("\\\n", " ").split("\n"):
        keyword, *values = line.split() or [""]
        if keyword == "v":
            vertices.append(parse_vertex(values))
        elif keyword == "f":
            corners = values[: values.index("#")] if "#" in values else values
            indices = [parse_obj_index(corner, len(vertices)) for corner in corners]
            polygons[len(corners)].append(indices)
    return Polygons(np.array(vertices, dtype=np.float64), stack_polygons(polygons), "OBJ")


def parse_vertex(values: list[str]) -> list[float]:
    """Return the three coordinates of a vertex; further values are colours or weights."""
    if len(values) < 3:
        raise ValueError(f"a vertex has {len(values)} coordinates instead of 3")
    return [float(value) for value in values[:3]]


def parse_obj_index(corner: str, vertex_count: int) -> int:
    """Return the vertex index of a corner: "3/1/2" and "3" are the third vertex, "-1" is the last
    of the `vertex_count` vertices so far."""
    number = int(corner.partition("/")[0])
    if number == 0:
        raise ValueError("a face refers to vertex 0, but OBJ counts from 1")
    return number - 1 if number > 0 else vertex_count + number


def parse_off(text: str) -> Polygons:
    lines = iterate_off_lines(text)
    vertex_count, face_count = parse_off_counts(lines)
    vertices = [parse_vertex(next(lines).split()) for _ in range(vertex_count)]
    polygons: defaultdict[int, list[list[int]]] = defaultdict(list)
    for _ in range(face_count):
        corners, *indices = map(int, next(lines).split())
        if corners < 0 or len(indices) < corners:
            raise ValueError(f"a face of {corners} corners has {len(indices)} indices")
        polygons[corners].append(indices[:corners])
    return Polygons(np.array(vertices, dtype=np.float64), stack_polygons(polygons), "OFF")


def iterate_off_lines(text: str) -> Iterator[str]:
    """Yield the lines after the keyword OFF, without comments and empty lines.

    In some files of ModelNet the counts follow the keyword on the same line.
    """
    rest = re.sub(r"^\s*(ST)?C?N?OFF", "", text, count=1)
    lines = (line.partition("#")[0].strip() for line in rest.splitlines())
    return (line for line in lines if line)


def parse_off_counts(lines: Iterator[str]) -> tuple[int, int]:
    vertices, faces, *_ = next(lines).split()
    return int(vertices), int(faces)


def stack_polygons(polygons: dict[int, list[list[int]]]) -> dict[int, np.ndarray]:
    """Convert lists to arrays, without faces of fewer than three corners."""
    return {
        corners: np.array(indices, dtype=np.int64)
        for corners, indices in polygons.items()
        if corners >= 3
    }


def parse_with_trimesh(mesh_format: MeshFormat, data: bytes, folder: Path | None) -> Polygons:
    trimesh = require_trimesh()
    try:
        scene = trimesh.load_scene(
            BytesIO(data),
            file_type=mesh_format.lower(),
            resolver=FolderResolver(folder),
            process=False,
            skip_materials=True,
        )
    except ImportError as error:  # of packages for rare content, such as compressed buffers
        raise ValueError(str(error)) from error
    is_gltf = mesh_format in ("GLB", "glTF")
    cameras = count_cameras(parse_scene(data, mesh_format)) if is_gltf else 0
    other_content = f"{cameras} {'camera' if cameras == 1 else 'cameras'}" if cameras else ""
    if not any(len(getattr(geometry, "faces", ())) for geometry in scene.geometry.values()):
        points = sum(len(getattr(geometry, "vertices", ())) for geometry in scene.geometry.values())
        return Polygons(np.zeros((points, 3)), {}, mesh_format, other_content)
    if not scene.graph.nodes_geometry:
        raise UnreadableFile("its meshes are in no node of the scene")
    mesh = scene.to_mesh()
    vertices = np.asarray(mesh.vertices, dtype=np.float64)
    faces = np.asarray(mesh.faces, dtype=np.int64)
    return Polygons(vertices, {3: faces}, mesh_format, other_content)


class FolderResolver:
    """Gives trimesh the buffers of a .gltf file from the file's own folder, and no other files."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder.resolve() if folder is not None else None

    def get(self, name: str) -> bytes:
        if self.folder is None:
            raise UnreadableFile(
                f"it refers to {name!r}, but a mesh in an archive or a table must be complete: "
                "save it as GLB"
            )
        file = (self.folder / unquote(name)).resolve()
        if not file.is_relative_to(self.folder):
            raise UnreadableFile(
                f"it refers to {name!r}, which is outside its folder: the buffers of a scene must "
                "be in the same folder"
            )
        try:
            return read_file(file)
        except OSError as error:
            raise UnreadableFile(
                f"it refers to {name!r}, which cannot be opened ({error.strerror or error})"
            ) from error

    __getitem__ = get
