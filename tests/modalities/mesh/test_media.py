"""A mesh survives being written and read in every format; what cannot be a mesh is refused quickly,
with the reason."""

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
from tessera.modalities.mesh.io import kind_of
from tessera.modalities.mesh.media import Mesh

CORNERS = np.array([[x, y, z] for x in (0.0, 1.0) for y in (0.0, 2.0) for z in (0.0, 0.5)])
SIDES = np.array(
    [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]]
)


def box() -> Mesh:
    """1 wide, 2 deep and 0.5 high, of quads, all turned outward."""
    return Mesh(CORNERS, SIDES)


def places(mesh: Mesh) -> np.ndarray:
    """(F, K, 3): where the corners of the faces are, whatever number they have."""
    return mesh.vertices[mesh.faces]


def obj(path, text: str):
    path.write_text(text)
    return path


def scene(path, **parts):
    path.write_text(json.dumps({"asset": {"version": "2.0"}, **parts}))
    return path


def triangle_scene(path, uri: str, nodes=({"mesh": 0},)):
    """One triangle, whose numbers stand in the buffer at `uri`."""
    return scene(
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


# ---- what is written and read


def test_a_saved_mesh_is_a_glb_and_an_obj_that_hold_the_same_faces(tmp_path):
    path = box().save(tmp_path / "deep" / "epoch-0.5")
    assert path == tmp_path / "deep" / "epoch-0.5.glb" and path.is_file()
    glb, text = Mesh.load(path), Mesh.load(tmp_path / "deep" / "epoch-0.5.obj")
    expected = CORNERS[box().triangles()]
    assert np.array_equal(places(glb), expected) and np.array_equal(places(text), expected)


@pytest.mark.parametrize("ending", ["glb", "obj"])
def test_saved_quads_come_back_as_quads(tmp_path, ending):
    box().save(tmp_path / "a")
    assert np.array_equal(
        places(Mesh.load(tmp_path / f"a.{ending}", polygons="quads")), CORNERS[SIDES]
    )


@pytest.mark.parametrize("ending", ["obj", "ply", "stl", "glb", "off", "gltf"])
def test_every_format_gives_the_same_faces_again_and_again(tmp_path, ending):
    rng = np.random.default_rng(0)
    vertices = rng.normal(size=(20, 3)).astype(np.float32)
    mesh = Mesh(vertices, np.array([rng.permutation(20)[:3] for _ in range(30)]))
    lying = mesh.to_y_up() if ending in ("obj", "glb", "gltf") else mesh
    exported = trimesh.Trimesh(lying.vertices, lying.faces, process=False).export(file_type=ending)
    if ending == "gltf":
        for name, data in exported.items():
            (tmp_path / name).write_bytes(data)
        (tmp_path / "model.gltf").rename(tmp_path / "a.gltf")
    else:
        (tmp_path / f"a.{ending}").write_bytes(
            exported if isinstance(exported, bytes) else exported.encode()
        )
    first = Mesh.load(tmp_path / f"a.{ending}")
    assert np.allclose(places(first), places(mesh), atol=1e-6)
    first.save(tmp_path / "again")
    for file in ("again.glb", "again.obj"):
        second = Mesh.load(tmp_path / file)
        assert np.array_equal(second.faces, first.faces) and np.allclose(
            second.vertices, first.vertices, atol=1e-6
        )


def test_ascii_files_are_read_too(tmp_path):
    solid = trimesh.Trimesh(CORNERS, box().triangles(), process=False)
    (tmp_path / "a.stl").write_text(solid.export(file_type="stl_ascii"))
    (tmp_path / "a.ply").write_bytes(solid.export(file_type="ply", encoding="ascii"))
    for name in ("a.stl", "a.ply"):
        assert np.allclose(places(Mesh.load(tmp_path / name)), CORNERS[box().triangles()])


def test_y_is_up_in_obj_and_glb_unless_told_otherwise(tmp_path):
    path = obj(tmp_path / "a.obj", "v 0 0 0\nv 1 0 0\nv 0 9 0\nf 1 2 3\n")
    assert Mesh.load(path).vertices[:, 2].max() == 9
    assert Mesh.load(path, up="z").vertices[:, 1].max() == 9
    path = obj(tmp_path / "a.off", "OFF\n3 1 0\n0 0 0\n1 0 0\n0 0 9\n3 0 1 2\n")
    assert Mesh.load(path).vertices[:, 2].max() == 9


def test_the_many_ways_to_write_an_obj_face(tmp_path):
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
    mesh = Mesh.load(obj(tmp_path / "a.obj", text), up="z")
    assert np.array_equal(
        places(mesh)[:, :, :2], [[[0, 0], [1, 0], [1, 1]], [[0, 0], [1, 1], [0, 1]]]
    )


def test_an_off_file_may_hold_colours_comments_and_counts_in_its_first_line(tmp_path):
    text = (
        "OFF4 2 0 # counts\n0 0 0\n1 0 0\n\n1 1 0\n0 1 0\n3 0 1 2 255 0 0\n# the other\n3 0 2 3\n"
    )
    with pytest.raises(UnreadableFile):
        Mesh.load(obj(tmp_path / "not.off", "OFFICE hours\n"))
    mesh = Mesh.load(obj(tmp_path / "a.off", text.replace("OFF4", "OFF 4")))
    assert len(mesh.faces) == 2 and len(mesh.vertices) == 4


def test_the_parts_of_a_scene_are_one_mesh_each_in_its_place(tmp_path):
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


def test_polygons_become_triangles_or_ladders_of_quads(tmp_path):
    ring = [(np.cos(angle), np.sin(angle)) for angle in np.arange(6) * np.pi / 3]
    text = "".join(f"v {x} {y} 0\n" for x, y in ring) + "f 1 2 3 4 5 6\n"
    path = obj(tmp_path / "a.obj", text)
    triangles, quads = Mesh.load(path, up="z"), Mesh.load(path, polygons="quads", up="z")
    assert (len(triangles.faces), len(quads.faces)) == (4, 2)
    for mesh in (triangles, Mesh(quads.vertices, quads.triangles())):
        one, two, three = places(mesh).transpose(1, 0, 2)
        areas = np.cross(two - one, three - one)[:, 2] / 2
        assert (areas > 0).all() and areas.sum() == pytest.approx(1.5 * np.sqrt(3)), (
            "all of it, and none turned over"
        )


def test_quads_are_asked_for_and_there_are_others(tmp_path):
    points = "v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\nv 0 2 1\n"
    with pytest.raises(
        UnreadableFile, match="a.obj: quads are asked for, but 1 of its faces are triangles"
    ):
        Mesh.load(obj(tmp_path / "a.obj", points + "f 1 2 3 4\nf 1 2 5\n"), polygons="quads")
    with pytest.raises(
        UnreadableFile, match="b.obj: quads are asked for, but 1 of its faces have 5 corners"
    ):
        Mesh.load(obj(tmp_path / "b.obj", points + "f 1 2 3 4 5\n"), polygons="quads")
    assert len(Mesh.load(tmp_path / "b.obj").faces) == 3


# ---- repair and refusal


def test_what_stands_there_twice_becomes_one_and_what_is_no_face_goes(tmp_path):
    text = (
        "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 1 0 -0\nv 5 5 5\n"
        + "f 1 2 3\nf 3 1 4\nf 1 3 2\nf 1 1 2\nf 2 4 3\n"
    )
    mesh = Mesh.load(obj(tmp_path / "a.obj", text))
    assert len(mesh.vertices) == 3 and mesh.faces.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"the file is empty \(0 bytes\)"),
        (
            "Dear reader,\nv is a letter, f is another.\n",
            r"it is no OBJ, PLY, STL, GLB, glTF or OFF mesh .*Dear rea",
        ),
        ("v 0 0 0\nv 1 0 0\n", r"it holds no faces \(2 points\)"),
        ("v 0 0 0\nv 1 0 0\nv 1 1 nan\nf 1 2 3\n", r"1 of its 3 vertices are not numbers"),
        ("v 0 0 0\nv 1 0 0\nv 1 1 inf\nf 1 2 3\n", r"1 of its 3 vertices are not numbers"),
        ("v 0 0 0\nv 1 0 0\nf 1 2 2\n", r"all of its 1 faces are degenerate"),
        ("v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 9\n", r"its faces name vertices 1 to 9, but it has 3"),
        ("v 0 0 0\nv 1 0 0\nv 0 1 0\nf 0 1 2\n", r"a face names vertex 0, but OBJ counts from 1"),
        ("v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 x\n", r"it is a damaged or cut OBJ file"),
        ("v 0 0 0\nv 1 0\nv 0 1 0\nf 1 2 3\n", r"it is a damaged or cut OBJ file"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n", r"it is a damaged or cut OFF file"),
        (
            "ply\nformat ascii 1.0\nelement vertex 1\nend_header\n",
            r"ply: |it holds no faces|damaged or cut PLY",
        ),
        ('{"asset": {"version": "2.0"}, "nodes": 3}', r"it is a damaged or cut glTF file"),
    ],
)
def test_what_is_no_mesh_is_refused_with_its_reason(tmp_path, text, reason):
    path = obj(tmp_path / "a.obj", text)
    with pytest.raises(UnreadableFile, match=rf"a\.obj: .*({reason})"):
        Mesh.load(path)


def test_a_file_is_what_it_holds_and_not_what_it_is_called(tmp_path):
    glb = box().save(tmp_path / "a").read_bytes()
    (tmp_path / "b.obj").write_bytes(glb)
    assert kind_of(glb) == "GLB" and len(Mesh.load(tmp_path / "b.obj").faces) == 12


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("ending", ["glb", "stl", "ply"])
def test_a_file_that_was_cut_short_is_refused(tmp_path, ending, share):
    data = trimesh.Trimesh(CORNERS, box().triangles(), process=False).export(file_type=ending)
    (tmp_path / f"a.{ending}").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UnreadableFile, match=rf"a\.{ending}: "):
        Mesh.load(tmp_path / f"a.{ending}")


def test_a_scene_of_cameras_alone_says_so(tmp_path):
    camera = {"type": "perspective", "perspective": {"yfov": 1.0, "znear": 0.1}}
    path = scene(
        tmp_path / "a.gltf",
        cameras=[camera, camera],
        nodes=[{"camera": 0}, {"camera": 1}],
        scenes=[{"nodes": [0, 1]}],
        scene=0,
    )
    with pytest.raises(UnreadableFile, match=r"a\.gltf: it holds no faces \(2 cameras\)"):
        Mesh.load(path)


def test_two_million_faces_are_refused_by_their_number(tmp_path):
    header = "ply\nformat binary_little_endian 1.0\nelement vertex 3\nproperty float x\nproperty float y\nproperty float z\n"
    header += "element face 2000000\nproperty list uchar int vertex_indices\nend_header\n"
    obj(tmp_path / "a.ply", header)
    (tmp_path / "a.stl").write_bytes(bytes(80) + struct.pack("<I", 2_000_000) + bytes(100_000_000))
    obj(tmp_path / "a.off", "OFF\n3 2000000 0\n")
    obj(tmp_path / "a.obj", "v 0 0 0\nv 1 0 0\nv 0 1 0\n" + "f 1 2 3\n" * 2_000_000)
    triangle_scene(tmp_path / "a.gltf", "nowhere.bin", nodes=[{"mesh": 0}] * 2_000_000)
    for ending in ("ply", "stl", "off", "obj", "gltf"):
        started = time.process_time()
        with pytest.raises(
            UnreadableFile, match=r"it has 2,000,000 faces, and at most 1,000,000 are read"
        ):
            Mesh.load(tmp_path / f"a.{ending}")
        assert time.process_time() - started < 4, f"{ending} was read before it was counted"


def test_a_limit_of_ones_own(tmp_path):
    box().save(tmp_path / "a")
    with pytest.raises(UnreadableFile, match="it has 12 faces, and at most 11 are read"):
        Mesh.load(tmp_path / "a.glb", most=11)
    assert len(Mesh.load(tmp_path / "a.glb", most=12).faces) == 12


# ---- nothing outside the file


def test_the_buffers_of_a_gltf_may_lie_beside_it_or_in_it(tmp_path):
    (tmp_path / "some numbers.bin").write_bytes(TRIANGLE)
    beside = Mesh.load(triangle_scene(tmp_path / "a.gltf", "some%20numbers.bin"))
    inside = "data:application/octet-stream;base64," + b64encode(TRIANGLE).decode()
    assert np.array_equal(
        places(beside), places(Mesh.load(triangle_scene(tmp_path / "b.gltf", inside)))
    )


@pytest.mark.parametrize("uri", ["../secret.bin", "%2e%2e/secret.bin", "SECRET", "link.bin"])
def test_no_buffer_is_read_from_outside_the_folder(tmp_path, uri):
    folder = tmp_path / "folder"
    folder.mkdir()
    secret = tmp_path / "secret.bin"
    secret.write_bytes(TRIANGLE)
    (folder / "link.bin").symlink_to(secret)
    path = triangle_scene(folder / "a.gltf", str(secret) if uri == "SECRET" else uri)
    with pytest.raises(UnreadableFile, match="which leads out of its folder"):
        Mesh.load(path)


def test_no_buffer_is_fetched(tmp_path):
    with pytest.raises(UnreadableFile, match="cannot be opened"):
        Mesh.load(triangle_scene(tmp_path / "a.gltf", "https://doi.org/a.bin"))


def test_materials_and_pictures_are_not_even_looked_for(tmp_path, monkeypatch):
    asked = []
    for way in ("get", "__getitem__"):
        monkeypatch.setattr(
            f"tessera.modalities.mesh.io.Beside.{way}", lambda self, name: asked.append(name)
        )
    text = "mtllib ../../secret.mtl\nv 0 0 0\nv 1 0 0\nv 0 1 0\nusemtl gold\nf 1 2 3\n"
    assert len(Mesh.load(obj(tmp_path / "a.obj", text)).faces) == 1
    path = triangle_scene(
        tmp_path / "a.gltf", "data:application/octet-stream;base64," + b64encode(TRIANGLE).decode()
    )
    told = json.loads(path.read_text())
    told |= {
        "images": [{"uri": "../../secret.png"}],
        "textures": [{"source": 0}],
        "materials": [{"pbrMetallicRoughness": {"baseColorTexture": {"index": 0}}}],
    }
    told["meshes"][0]["primitives"][0]["material"] = 0
    path.write_text(json.dumps(told))
    assert len(Mesh.load(path).faces) == 1 and not asked


def test_a_scene_that_leads_back_to_itself_ends(tmp_path):
    uri = "data:application/octet-stream;base64," + b64encode(TRIANGLE).decode()
    path = triangle_scene(
        tmp_path / "a.gltf", uri, nodes=[{"mesh": 0, "children": [1]}, {"children": [0]}]
    )
    try:
        assert len(Mesh.load(path).faces) == 1
    except UnreadableFile as error:
        assert "a.gltf" in str(error)


def test_without_trimesh_a_sentence_says_what_to_install(tmp_path, monkeypatch):
    path = box().save(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "trimesh", None)
    for need in (lambda: Mesh.load(path), lambda: box().save(tmp_path / "b")):
        with pytest.raises(ModuleNotFoundError, match=r"Install tessera\[mesh\]"):
            need()


# ---- simpler meshes


def ball(rings: int) -> Mesh:
    sphere = trimesh.creation.uv_sphere(count=[rings, rings])
    return Mesh(np.asarray(sphere.vertices), np.asarray(sphere.faces))


def test_a_simplified_mesh_has_fewer_faces_and_the_same_shape():
    fine = ball(40)
    simple = fine.simplified(200)
    assert 100 < len(simple.faces) <= 200 < len(fine.faces)
    assert np.allclose(np.linalg.norm(simple.vertices, axis=1), 1, atol=0.1)


def test_a_mesh_that_is_small_enough_stays_as_it_is():
    assert np.array_equal(box().simplified(12).faces, box().triangles())


def test_where_simplifying_stops_too_early_nearby_vertices_fall_together_or_the_mesh_is_refused(
    monkeypatch,
):
    stuck = SimpleNamespace(simplify=lambda vertices, faces, target_count: (vertices, faces))
    monkeypatch.setattr("tessera.modalities.mesh.media.simplification", lambda: stuck)
    rng = np.random.default_rng(0)
    dust = rng.uniform(size=(4000, 1, 3)) + rng.normal(size=(4000, 3, 3)) * 0.004
    loose = Mesh(dust.reshape(-1, 3), np.arange(12000).reshape(-1, 3))
    counts = [len(loose.on_grid(steps).faces) for steps in (256, 128, 64)]
    assert counts == sorted(counts, reverse=True) and counts[0] < 4000
    assert len(loose.simplified(counts[1]).faces) == counts[1], "no coarser than it must be"
    with pytest.raises(
        UnreadableFile,
        match=rf"its 4,000 triangles cannot be simplified to 1: {counts[2]:,} are left",
    ):
        loose.simplified(1)


def test_a_mesh_that_loses_most_of_its_surface_is_refused():
    rng = np.random.default_rng(0)
    leaves = rng.uniform(size=(4000, 1, 3)) + rng.normal(size=(4000, 3, 3)) * 0.02
    tree = Mesh(leaves.reshape(-1, 3), np.arange(12000).reshape(-1, 3))
    with pytest.raises(
        UnreadableFile,
        match=r"its 4,000 triangles cannot be simplified to 100: \d+ are left, with \d+% of its",
    ):
        tree.simplified(100)


def test_a_mesh_without_any_surface_stays_as_it_is_if_it_is_small():
    line = Mesh(np.array([[0.0, 0, 0], [1, 0, 0], [2, 0, 0]]), np.array([[0, 1, 2]]))
    assert len(line.simplified(5).faces) == 1


def test_the_area_of_a_box_is_that_of_its_sides():
    assert box().area() == pytest.approx(2 * (1 * 2 + 1 * 0.5 + 2 * 0.5))


# ---- pictures


def test_a_picture_shows_the_mesh_in_shades_on_white():
    pixels = box().picture(96).pixels.astype(int)
    assert pixels.shape == (96, 96, 3) and (pixels[0, 0] == 255).all()
    shades = {tuple(pixels[y, x]) for y, x in ((40, 40), (60, 30), (60, 75))}
    ink = (pixels < 250).any(axis=2)
    assert len(shades) == 3, "top, front and right side are lit differently"
    assert 0.2 < ink.mean() < 0.8
    assert (
        ink[:, :3].sum() == ink[:, -3:].sum() == 0 and max(np.ptp(np.nonzero(ink), axis=1)) > 78
    ), "as large as fits"


def test_what_is_nearer_hides_what_is_behind():
    def square(y: float, half: float) -> np.ndarray:
        return np.array([[-half, y, -half], [half, y, -half], [half, y, half], [-half, y, half]])

    def seen(*squares: np.ndarray) -> np.ndarray:
        frame = np.array(
            [[-3.0, 0, -3], [3, 0, 3], [3, 0, 3.01]]
        )  # so that all are drawn at one scale
        faces = np.concatenate(
            [
                [[0, 1, 2]],
                *(
                    [[3 + 4 * n, 4 + 4 * n, 5 + 4 * n], [3 + 4 * n, 5 + 4 * n, 6 + 4 * n]]
                    for n in range(len(squares))
                ),
            ]
        )
        return Mesh(np.concatenate([frame, *squares]), faces).picture(64).pixels

    small, large = square(0.5, 0.4), square(-0.5, 2.0)
    assert np.array_equal(seen(large, small), seen(small, large)), "whatever is drawn first"
    assert abs(seen(large).astype(int) - seen(large, small)).sum() == 0, (
        "the small one is behind the large one"
    )
    assert abs(seen(large).astype(int) - seen(large, square(-1.5, 0.4))).sum() > 0


def test_faces_that_are_turned_inside_out_look_the_same():
    inside_out = Mesh(CORNERS, SIDES[:, ::-1]).picture(64).pixels.astype(int)
    assert abs(box().picture(64).pixels - inside_out).mean() < 0.5, "but for pixels on an edge"


def test_a_sheet_holds_a_picture_of_each():
    page = Mesh.sheet([box()] * 5)
    assert isinstance(page, Image) and page.pixels.shape[0] < page.pixels.shape[1]
    pair = Mesh.beside(box(), box())
    assert (len(pair.vertices), len(pair.faces)) == (2 * len(box().vertices), 2 * len(box().faces))
    with pytest.raises(ValueError, match="a sheet of no meshes"):
        Mesh.sheet([])


def test_a_mesh_of_nothing_and_of_one_flat_face_can_be_shown():
    assert (Mesh(np.zeros((0, 3)), np.zeros((0, 3), int)).picture(32).pixels == 255).all()
    assert Mesh(np.eye(3), np.array([[0, 1, 2]])).picture(32).pixels.min() < 200


@pytest.mark.parametrize(
    ("vertices", "faces", "says"),
    [
        (np.zeros((3, 2)), np.zeros((1, 3), int), r"vertices of the shape \(vertices, 3\)"),
        (np.zeros((3, 3)), np.zeros((1, 5), int), r"\(faces, 3\) or \(faces, 4\)"),
        (np.zeros((3, 3)), np.zeros((1, 3)), "whole numbers"),
        (
            np.zeros((3, 3)),
            np.array([[0, 1, 3]]),
            "a Mesh of 3 vertices has faces that name vertices 0 to 3",
        ),
        (np.zeros((3, 3)), np.array([[0, 1, -1]]), "name vertices -1 to 1"),
    ],
)
def test_what_cannot_be_a_mesh_is_refused(vertices, faces, says):
    with pytest.raises(ValueError, match=says):
        Mesh(vertices, faces)
