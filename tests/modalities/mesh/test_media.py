"""Meshes: saving and loading in every format, and quick errors with a reason for other files."""

from __future__ import annotations

import json
import struct
import sys
import time
from base64 import b64encode
from types import SimpleNamespace

import numpy as np
import pytest
import trimesh

from tessera.data.errors import UnreadableFile
from tessera.modalities.image.media import Image
from tessera.modalities.mesh.io import detect_format
from tessera.modalities.mesh.media import Mesh

CORNERS = np.array([[x, y, z] for x in (0.0, 1.0) for y in (0.0, 2.0) for z in (0.0, 0.5)])
SIDES = np.array(
    [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]]
)


def box() -> Mesh:
    """Return a box of quads, 1 wide, 2 deep and 0.5 high, with outward faces."""
    return Mesh(CORNERS, SIDES)


def corner_positions(mesh: Mesh) -> np.ndarray:
    """Return (F, K, 3): the positions of the corners, whatever their indices are."""
    return mesh.vertices[mesh.faces]


def write_file(path, text: str):
    path.write_text(text)
    return path


def write_scene(path, **parts):
    path.write_text(json.dumps({"asset": {"version": "2.0"}, **parts}))
    return path


def write_triangle_scene(path, uri: str, nodes=({"mesh": 0},)):
    """Write a scene of one triangle, whose data is in the buffer at `uri`."""
    return write_scene(
        path,
        buffers=[{"uri": uri, "byteLength": 42}],
        bufferViews=[
            {"buffer": 0, "byteLength": 36},
            {"buffer": 0, "byteOffset": 36, "byteLength": 6},
        ],
        accessors=[
            {"bufferView": 0, "componentType": 5126, "count": 3, "type": "VEC3"},
            {"bufferView": 1, "componentType": 5123, "count": 3, "type": "SCALAR"},
        ],
        meshes=[{"primitives": [{"attributes": {"POSITION": 0}, "indices": 1}]}],
        nodes=list(nodes),
        scenes=[{"nodes": list(range(len(nodes)))}],
        scene=0,
    )


TRIANGLE = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0]], np.float32).tobytes() + struct.pack(
    "<3H", 0, 1, 2
)


# ---- saving and loading


def test_a_path_without_suffix_gives_a_glb_and_an_obj(tmp_path):
    path = box().save(tmp_path / "deep" / "epoch-0.5")
    assert path == tmp_path / "deep" / "epoch-0.5.glb" and path.is_file()
    glb, text = Mesh.load(path), Mesh.load(tmp_path / "deep" / "epoch-0.5.obj")
    expected = CORNERS[box().triangles()]
    assert np.array_equal(corner_positions(glb), expected) and np.array_equal(
        corner_positions(text), expected
    )


@pytest.mark.parametrize("suffix", [".glb", ".obj", ".ply", ".stl", ".STL"])
def test_a_known_suffix_chooses_the_format(tmp_path, suffix):
    path = box().save(tmp_path / f"a{suffix}")
    assert path == tmp_path / f"a{suffix}" and [file.name for file in tmp_path.iterdir()] == [
        path.name
    ]
    assert detect_format(path.read_bytes()) == suffix.removeprefix(".").upper()
    assert np.array_equal(corner_positions(Mesh.load(path)), CORNERS[box().triangles()])


@pytest.mark.parametrize("suffix", [".off", ".png", ".gltf"])
def test_another_suffix_raises_an_error_with_those_allowed(tmp_path, suffix):
    with pytest.raises(ValueError, match=r"\.glb, \.obj, \.ply, \.stl"):
        box().save(tmp_path / f"a{suffix}")
    assert not list(tmp_path.iterdir())


def test_repr_is_short():
    assert repr(box()) == "Mesh(vertices=8, faces=6)"


@pytest.mark.parametrize("suffix", ["glb", "obj"])
def test_saved_quads_are_loaded_as_quads(tmp_path, suffix):
    box().save(tmp_path / "a")
    assert np.array_equal(
        corner_positions(Mesh.load(tmp_path / f"a.{suffix}", polygons="quads")), CORNERS[SIDES]
    )


@pytest.mark.parametrize("suffix", ["obj", "ply", "stl", "glb", "off", "gltf"])
def test_every_format_preserves_the_faces(tmp_path, suffix):
    rng = np.random.default_rng(0)
    vertices = rng.normal(size=(20, 3)).astype(np.float32)
    mesh = Mesh(vertices, np.array([rng.permutation(20)[:3] for _ in range(30)]))
    rotated = mesh.to_y_up() if suffix in ("obj", "glb", "gltf") else mesh
    exported = trimesh.Trimesh(rotated.vertices, rotated.faces, process=False).export(
        file_type=suffix
    )
    if suffix == "gltf":
        for name, data in exported.items():
            (tmp_path / name).write_bytes(data)
        (tmp_path / "model.gltf").rename(tmp_path / "a.gltf")
    else:
        (tmp_path / f"a.{suffix}").write_bytes(
            exported if isinstance(exported, bytes) else exported.encode()
        )
    first = Mesh.load(tmp_path / f"a.{suffix}")
    assert np.allclose(corner_positions(first), corner_positions(mesh), atol=1e-6)
    first.save(tmp_path / "again")
    for file in ("again.glb", "again.obj"):
        second = Mesh.load(tmp_path / file)
        assert np.array_equal(second.faces, first.faces) and np.allclose(
            second.vertices, first.vertices, atol=1e-6
        )


def test_ascii_files_can_be_loaded(tmp_path):
    solid = trimesh.Trimesh(CORNERS, box().triangles(), process=False)
    (tmp_path / "a.stl").write_text(solid.export(file_type="stl_ascii"))
    (tmp_path / "a.ply").write_bytes(solid.export(file_type="ply", encoding="ascii"))
    for name in ("a.stl", "a.ply"):
        assert np.allclose(corner_positions(Mesh.load(tmp_path / name)), CORNERS[box().triangles()])


def test_the_upward_axis_depends_on_the_format_and_on_up(tmp_path):
    path = write_file(tmp_path / "a.obj", "v 0 0 0\nv 1 0 0\nv 0 9 0\nf 1 2 3\n")
    assert Mesh.load(path).vertices[:, 2].max() == 9
    assert Mesh.load(path, up="z").vertices[:, 1].max() == 9
    path = write_file(tmp_path / "a.off", "OFF\n3 1 0\n0 0 0\n1 0 0\n0 0 9\n3 0 1 2\n")
    assert Mesh.load(path).vertices[:, 2].max() == 9


def test_all_notations_of_obj_faces_are_supported(tmp_path):
    text = """# a square, twice, and a line
v 0 0 0 1.0
v 1 0 0
v 1 1 0 0.5 0.5 0.5
vn 0 0 1
o first
f 1/1/1 2//1 3 # corners
g second
v 0 1 0
f -4 -2 \\
  -1
l 1 2
usemtl gold
"""
    mesh = Mesh.load(write_file(tmp_path / "a.obj", text), up="z")
    assert np.array_equal(
        corner_positions(mesh)[:, :, :2], [[[0, 0], [1, 0], [1, 1]], [[0, 0], [1, 1], [0, 1]]]
    )


def test_off_files_may_have_colours_comments_and_counts_after_the_keyword(tmp_path):
    text = (
        "OFF4 2 0 # counts\n0 0 0\n1 0 0\n\n1 1 0\n0 1 0\n3 0 1 2 255 0 0\n# the other\n3 0 2 3\n"
    )
    with pytest.raises(UnreadableFile):
        Mesh.load(write_file(tmp_path / "not.off", "OFFICE hours\n"))
    mesh = Mesh.load(write_file(tmp_path / "a.off", text.replace("OFF4", "OFF 4")))
    assert len(mesh.faces) == 2 and len(mesh.vertices) == 4


def test_the_parts_of_a_scene_become_one_mesh(tmp_path):
    parts = trimesh.Scene()
    solid = trimesh.Trimesh(CORNERS, box().triangles(), process=False)
    parts.add_geometry(solid, geom_name="box")
    for number in (1, 2):
        move = np.eye(4)
        move[1, 3] = 10 * number  # y, which is up
        parts.graph.update(frame_to=f"copy{number}", matrix=move, geometry="box")
    (tmp_path / "a.glb").write_bytes(parts.export(file_type="glb"))
    mesh = Mesh.load(tmp_path / "a.glb")
    assert len(mesh.faces) == 36 and np.allclose(
        np.unique(mesh.vertices[:, 2].round(3)), [0, 2, 10, 12, 20, 22]
    )


# ---- polygons


def test_polygons_become_triangles_or_strips_of_quads(tmp_path):
    ring = [(np.cos(angle), np.sin(angle)) for angle in np.arange(6) * np.pi / 3]
    text = "".join(f"v {x} {y} 0\n" for x, y in ring) + "f 1 2 3 4 5 6\n"
    path = write_file(tmp_path / "a.obj", text)
    triangles, quads = Mesh.load(path, up="z"), Mesh.load(path, polygons="quads", up="z")
    assert (len(triangles.faces), len(quads.faces)) == (4, 2)
    for mesh in (triangles, Mesh(quads.vertices, quads.triangles())):
        one, two, three = corner_positions(mesh).transpose(1, 0, 2)
        areas = np.cross(two - one, three - one)[:, 2] / 2
        assert (areas > 0).all() and areas.sum() == pytest.approx(1.5 * np.sqrt(3)), (
            "full coverage with the same orientation"
        )


def test_requesting_quads_from_other_polygons_raises_an_error(tmp_path):
    points = "v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\nv 0 2 1\n"
    with pytest.raises(
        UnreadableFile, match="a.obj: quads were requested, but 1 of its faces are triangles"
    ):
        Mesh.load(write_file(tmp_path / "a.obj", points + "f 1 2 3 4\nf 1 2 5\n"), polygons="quads")
    with pytest.raises(
        UnreadableFile, match="b.obj: quads were requested, but 1 of its faces have 5 corners"
    ):
        Mesh.load(write_file(tmp_path / "b.obj", points + "f 1 2 3 4 5\n"), polygons="quads")
    assert len(Mesh.load(tmp_path / "b.obj").faces) == 3


# ---- repair and errors


def test_duplicate_vertices_are_merged_and_invalid_faces_removed(tmp_path):
    text = (
        "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 1 0 -0\nv 5 5 5\n"
        + "f 1 2 3\nf 3 1 4\nf 1 3 2\nf 1 1 2\nf 2 4 3\n"
    )
    mesh = Mesh.load(write_file(tmp_path / "a.obj", text))
    assert len(mesh.vertices) == 3 and mesh.faces.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"the file is empty \(0 bytes\)"),
        (
            "Dear reader,\nv is a word, f is another.\n",
            r"it is not an OBJ, PLY, STL, GLB, glTF or OFF mesh .*Dear rea",
        ),
        ("v 0 0 0\nv 1 0 0\n", r"it has no faces \(2 points\)"),
        ("v 0 0 0\nv 1 0 0\nv 1 1 nan\nf 1 2 3\n", r"1 of its 3 vertices are not finite"),
        ("v 0 0 0\nv 1 0 0\nv 1 1 inf\nf 1 2 3\n", r"1 of its 3 vertices are not finite"),
        ("v nan 0 0\nv nan 1 0\nv NaN 0 1\nf 1 2 3\n", r"3 of its 3 vertices are not finite"),
        ("v 0 0 0\nv 1 0 0\nf 1 2 2\n", r"all of its 1 faces are degenerate"),
        (
            "v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 9\n",
            r"its faces refer to vertices 1 to 9, but it has 3",
        ),
        (
            "v 0 0 0\nv 1 0 0\nv 0 1 0\nf 0 1 2\n",
            r"a face refers to vertex 0, but OBJ counts from 1",
        ),
        ("v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 x\n", r"it is a damaged or truncated OBJ file"),
        ("v 0 0 0\nv 1 0\nv 0 1 0\nf 1 2 3\n", r"it is a damaged or truncated OBJ file"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n", r"it is a damaged or truncated OFF file"),
        (
            "ply\nformat ascii 1.0\nelement vertex 1\nend_header\n",
            r"ply: |it has no faces|damaged or truncated PLY",
        ),
        ('{"asset": {"version": "2.0"}, "nodes": 3}', r"it is a damaged or truncated glTF file"),
    ],
)
def test_invalid_files_raise_an_error_with_the_reason(tmp_path, text, reason):
    path = write_file(tmp_path / "a.obj", text)
    with pytest.raises(UnreadableFile, match=rf"a\.obj: .*({reason})"):
        Mesh.load(path)


def test_the_format_is_detected_by_content_not_by_suffix(tmp_path):
    glb = box().save(tmp_path / "a").read_bytes()
    (tmp_path / "b.obj").write_bytes(glb)
    assert detect_format(glb) == "GLB" and len(Mesh.load(tmp_path / "b.obj").faces) == 12


@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("suffix", ["glb", "stl", "ply"])
def test_a_truncated_file_raises_an_error(tmp_path, suffix, fraction):
    data = trimesh.Trimesh(CORNERS, box().triangles(), process=False).export(file_type=suffix)
    (tmp_path / f"a.{suffix}").write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(UnreadableFile, match=rf"a\.{suffix}: "):
        Mesh.load(tmp_path / f"a.{suffix}")


def test_a_scene_without_meshes_reports_its_cameras(tmp_path):
    camera = {"type": "perspective", "perspective": {"yfov": 1.0, "znear": 0.1}}
    path = write_scene(
        tmp_path / "a.gltf",
        cameras=[camera, camera],
        nodes=[{"camera": 0}, {"camera": 1}],
        scenes=[{"nodes": [0, 1]}],
        scene=0,
    )
    with pytest.raises(UnreadableFile, match=r"a\.gltf: it has no faces \(2 cameras\)"):
        Mesh.load(path)


def test_too_many_faces_raise_an_error_before_parsing(tmp_path):
    header = "ply\nformat binary_little_endian 1.0\nelement vertex 3\n"
    header += "property float x\nproperty float y\nproperty float z\n"
    header += "element face 2000000\nproperty list uchar int vertex_indices\nend_header\n"
    write_file(tmp_path / "a.ply", header)
    (tmp_path / "a.stl").write_bytes(bytes(80) + struct.pack("<I", 2_000_000) + bytes(100_000_000))
    write_file(tmp_path / "a.off", "OFF\n3 2000000 0\n")
    write_file(tmp_path / "a.obj", "v 0 0 0\nv 1 0 0\nv 0 1 0\n" + "f 1 2 3\n" * 2_000_000)
    write_triangle_scene(tmp_path / "a.gltf", "nowhere.bin", nodes=[{"mesh": 0}] * 2_000_000)
    for suffix in ("ply", "stl", "off", "obj", "gltf"):
        started = time.process_time()
        with pytest.raises(
            UnreadableFile, match=r"it has 2,000,000 faces, and at most 1,000,000 are read"
        ):
            Mesh.load(tmp_path / f"a.{suffix}")
        assert time.process_time() - started < 4, (
            f"{suffix} was parsed before its faces were counted"
        )


def test_max_faces_can_be_set(tmp_path):
    box().save(tmp_path / "a")
    with pytest.raises(UnreadableFile, match="it has 12 faces, and at most 11 are read"):
        Mesh.load(tmp_path / "a.glb", max_faces=11)
    assert len(Mesh.load(tmp_path / "a.glb", max_faces=12).faces) == 12


# ---- no access outside the file


def test_gltf_buffers_may_be_in_the_folder_or_embedded(tmp_path):
    (tmp_path / "some numbers.bin").write_bytes(TRIANGLE)
    external = Mesh.load(write_triangle_scene(tmp_path / "a.gltf", "some%20numbers.bin"))
    embedded = "data:application/octet-stream;base64," + b64encode(TRIANGLE).decode()
    assert np.array_equal(
        corner_positions(external),
        corner_positions(Mesh.load(write_triangle_scene(tmp_path / "b.gltf", embedded))),
    )


@pytest.mark.parametrize("uri", ["../secret.bin", "%2e%2e/secret.bin", "SECRET", "link.bin"])
def test_no_buffer_is_read_from_outside_the_folder(tmp_path, uri):
    folder = tmp_path / "folder"
    folder.mkdir()
    secret = tmp_path / "secret.bin"
    secret.write_bytes(TRIANGLE)
    (folder / "link.bin").symlink_to(secret)
    path = write_triangle_scene(folder / "a.gltf", str(secret) if uri == "SECRET" else uri)
    with pytest.raises(UnreadableFile, match="which is outside its folder"):
        Mesh.load(path)


def test_no_buffer_is_downloaded(tmp_path):
    with pytest.raises(UnreadableFile, match="cannot be opened"):
        Mesh.load(write_triangle_scene(tmp_path / "a.gltf", "https://doi.org/a.bin"))


def test_materials_and_textures_are_never_opened(tmp_path, monkeypatch):
    opened = []
    for method in ("get", "__getitem__"):
        monkeypatch.setattr(
            f"tessera.modalities.mesh.io.FolderResolver.{method}",
            lambda self, name: opened.append(name),
        )
    text = "mtllib ../../secret.mtl\nv 0 0 0\nv 1 0 0\nv 0 1 0\nusemtl gold\nf 1 2 3\n"
    assert len(Mesh.load(write_file(tmp_path / "a.obj", text)).faces) == 1
    path = write_triangle_scene(
        tmp_path / "a.gltf", "data:application/octet-stream;base64," + b64encode(TRIANGLE).decode()
    )
    content = json.loads(path.read_text())
    content |= {
        "images": [{"uri": "../../secret.png"}],
        "textures": [{"source": 0}],
        "materials": [{"pbrMetallicRoughness": {"baseColorTexture": {"index": 0}}}],
    }
    content["meshes"][0]["primitives"][0]["material"] = 0
    path.write_text(json.dumps(content))
    assert len(Mesh.load(path).faces) == 1 and not opened


def test_a_scene_with_a_cycle_terminates(tmp_path):
    uri = "data:application/octet-stream;base64," + b64encode(TRIANGLE).decode()
    path = write_triangle_scene(
        tmp_path / "a.gltf", uri, nodes=[{"mesh": 0, "children": [1]}, {"children": [0]}]
    )
    try:
        assert len(Mesh.load(path).faces) == 1
    except UnreadableFile as error:
        assert "a.gltf" in str(error)


def test_without_trimesh_the_error_names_the_extra(tmp_path, monkeypatch):
    path = box().save(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "trimesh", None)
    message = r'meshes needs the Python package trimesh, .*pip install "tessera\[mesh\]"'
    for action in (lambda: Mesh.load(path), lambda: box().save(tmp_path / "b")):
        with pytest.raises(ModuleNotFoundError, match=message):
            action()


# ---- simplification


def ball(rings: int) -> Mesh:
    sphere = trimesh.creation.uv_sphere(count=[rings, rings])
    return Mesh(np.asarray(sphere.vertices), np.asarray(sphere.faces))


def test_simplification_reduces_faces_and_keeps_the_shape():
    original = ball(40)
    simplified = original.simplify(200)
    assert 100 < len(simplified.faces) <= 200 < len(original.faces)
    assert np.allclose(np.linalg.norm(simplified.vertices, axis=1), 1, atol=0.1)


def test_a_mesh_with_few_faces_is_not_simplified():
    assert np.array_equal(box().simplify(12).faces, box().triangles())


def test_vertices_are_merged_on_coarser_grids_when_simplification_stops_early(monkeypatch):
    no_progress = SimpleNamespace(simplify=lambda vertices, faces, target_count: (vertices, faces))
    monkeypatch.setattr("tessera.modalities.mesh.media.require_simplification", lambda: no_progress)
    rng = np.random.default_rng(0)
    dust = rng.uniform(size=(4000, 1, 3)) + rng.normal(size=(4000, 3, 3)) * 0.004
    loose = Mesh(dust.reshape(-1, 3), np.arange(12000).reshape(-1, 3))
    counts = [len(loose.snap_to_grid(cells).faces) for cells in (256, 128, 64)]
    assert counts == sorted(counts, reverse=True) and counts[0] < 4000
    assert len(loose.simplify(counts[1]).faces) == counts[1], "no coarser than necessary"
    with pytest.raises(
        UnreadableFile,
        match=rf"its 4,000 triangles cannot be simplified to 1: {counts[2]:,} are left",
    ):
        loose.simplify(1)


def test_losing_most_of_the_surface_raises_an_error():
    rng = np.random.default_rng(0)
    leaves = rng.uniform(size=(4000, 1, 3)) + rng.normal(size=(4000, 3, 3)) * 0.02
    tree = Mesh(leaves.reshape(-1, 3), np.arange(12000).reshape(-1, 3))
    with pytest.raises(
        UnreadableFile,
        match=r"its 4,000 triangles cannot be simplified to 100: \d+ are left, with \d+% of its",
    ):
        tree.simplify(100)


def test_a_small_mesh_without_area_is_not_simplified():
    line = Mesh(np.array([[0.0, 0, 0], [1, 0, 0], [2, 0, 0]]), np.array([[0, 1, 2]]))
    assert len(line.simplify(5).faces) == 1


def test_the_area_of_a_box_is_the_sum_of_its_sides():
    assert box().area() == pytest.approx(2 * (1 * 2 + 1 * 0.5 + 2 * 0.5))


# ---- rendering


def test_rendering_shades_the_faces_on_a_white_background():
    pixels = box().render(96).pixels.astype(int)
    assert pixels.shape == (96, 96, 3) and (pixels[0, 0] == 255).all()
    shades = {tuple(pixels[y, x]) for y, x in ((40, 40), (60, 30), (60, 75))}
    ink = (pixels < 250).any(axis=2)
    assert len(shades) == 3, "top, front and right side are lit differently"
    assert 0.2 < ink.mean() < 0.8
    assert (
        ink[:, :3].sum() == ink[:, -3:].sum() == 0 and max(np.ptp(np.nonzero(ink), axis=1)) > 78
    ), "as large as fits"


def test_nearer_faces_occlude_those_behind():
    def square(y: float, half: float) -> np.ndarray:
        return np.array([[-half, y, -half], [half, y, -half], [half, y, half], [-half, y, half]])

    def rendered(*squares: np.ndarray) -> np.ndarray:
        # The frame fixes the scale.
        frame = np.array([[-3.0, 0, -3], [3, 0, 3], [3, 0, 3.01]])
        faces = np.concatenate(
            [
                [[0, 1, 2]],
                *(
                    [[3 + 4 * n, 4 + 4 * n, 5 + 4 * n], [3 + 4 * n, 5 + 4 * n, 6 + 4 * n]]
                    for n in range(len(squares))
                ),
            ]
        )
        return Mesh(np.concatenate([frame, *squares]), faces).render(64).pixels

    small, large = square(0.5, 0.4), square(-0.5, 2.0)
    assert np.array_equal(rendered(large, small), rendered(small, large)), (
        "the order does not matter"
    )
    assert abs(rendered(large).astype(int) - rendered(large, small)).sum() == 0, (
        "the small one is behind the large one"
    )
    assert abs(rendered(large).astype(int) - rendered(large, square(-1.5, 0.4))).sum() > 0


def test_inside_out_faces_are_rendered_the_same():
    inside_out = Mesh(CORNERS, SIDES[:, ::-1]).render(64).pixels.astype(int)
    assert abs(box().render(64).pixels - inside_out).mean() < 0.5, "except for pixels on an edge"


def test_contact_sheets_and_pairs_contain_all_meshes():
    page = Mesh.sheet([box()] * 5)
    assert isinstance(page, Image) and page.pixels.shape[0] < page.pixels.shape[1]
    pair = Mesh.side_by_side(box(), box())
    assert (len(pair.vertices), len(pair.faces)) == (2 * len(box().vertices), 2 * len(box().faces))
    with pytest.raises(ValueError, match="at least one mesh"):
        Mesh.sheet([])


def test_empty_and_flat_meshes_can_be_rendered():
    assert (Mesh(np.zeros((0, 3)), np.zeros((0, 3), int)).render(32).pixels == 255).all()
    assert Mesh(np.eye(3), np.array([[0, 1, 2]])).render(32).pixels.min() < 200


@pytest.mark.parametrize(
    ("vertices", "faces", "message"),
    [
        (
            np.zeros((3, 2)),
            np.zeros((1, 3), int),
            r"vertices of a Mesh must have shape \(vertices, 3\)",
        ),
        (np.zeros((3, 3)), np.zeros((1, 5), int), r"\(faces, 3\) or \(faces, 4\)"),
        (np.zeros((3, 3)), np.zeros((1, 3)), "must be integers"),
        (
            np.zeros((3, 3)),
            np.array([[0, 1, 3]]),
            "of a Mesh of 3 vertices must refer to vertices 0 to 2, got 0 to 3",
        ),
        (np.zeros((3, 3)), np.array([[0, 1, -1]]), "got -1 to 1"),
    ],
)
def test_invalid_arrays_raise_an_error(vertices, faces, message):
    with pytest.raises(ValueError, match=message):
        Mesh(vertices, faces)
