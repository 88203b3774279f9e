"""examples/furniture.py, with small catalogs instead of the downloaded package."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
import trimesh

from tessera.modalities.mesh.media import Mesh

EXAMPLE = Path(__file__).parents[2] / "examples" / "furniture.py"
TRIANGLE = "v 0 0 0\nv 1 0 0\nv 0 2 0\nf 1 2 3\n"
BALL = trimesh.creation.uv_sphere(count=[20, 20]).export(file_type="obj")


@pytest.fixture
def furniture(monkeypatch):
    """The example as a module; it imports examples/debian.py, as the script does."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    spec = importlib.util.spec_from_file_location("furniture_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def catalog(properties: str, **files: str) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("PluginFurnitureCatalog.properties", properties.encode("latin-1"))
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def piece(number: int, identity: str, name: str, model: str, **more: str) -> str:
    properties = {"id": identity, "name": name, "model": model, **more}
    return "".join(f"{key}#{number}={value}\n" for key, value in properties.items())


def test_pieces_become_simplified_meshes_with_captions_and_credits(tmp_path, furniture):
    properties = "# a comment\nlicense=Creative  Commons\n"
    properties += piece(
        1, "Maker#bed1", "Bed", "/maker/bed1.obj", tags="Double, Bedroom\\u00e9", creator="Ann"
    )
    properties += piece(2, "Maker#ball", "Round  Ball", "/maker/ball.obj", tags="SCPTS, Ball")
    properties += piece(3, "Maker#gone", "Gone", "/maker/gone.obj") + piece(
        4, "Maker#odd", "Odd", "/maker/odd.obj"
    )
    data = catalog(
        properties,
        **{"maker/bed1.obj": TRIANGLE, "maker/ball.obj": BALL, "maker/odd.obj": "nothing"},
    )
    assert furniture.write_dataset([data], tmp_path / "out") == 2
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "CREDITS.md",
        "maker-ball.obj",
        "maker-bed1.obj",
        "metadata.jsonl",
    ]
    assert [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()] == [
        {"file_name": "maker-ball.obj", "text": "round ball"},
        {"file_name": "maker-bed1.obj", "text": "bed, double, bedroomé"},
    ]
    assert (out / "CREDITS.md").read_text().splitlines() == [
        "- maker-ball.obj: unknown (Creative Commons)",
        "- maker-bed1.obj: Ann (Creative Commons)",
    ]
    assert 400 < len(Mesh.load(out / "maker-ball.obj").faces) <= 800
    assert Mesh.load(out / "maker-bed1.obj").vertices[:, 2].max() == 2, "y was up"


def test_a_piece_that_cannot_be_read_is_skipped_with_a_message(tmp_path, furniture, capsys):
    properties = (
        piece(1, "a", "Bed", "/bed.obj")
        + piece(2, "b", "Chair", "/chair.obj")
        + piece(3, "c", "Sofa", "/sofa.obj")
    )
    data = catalog(properties, **{"bed.obj": "no mesh", "sofa.obj": TRIANGLE})
    assert furniture.write_dataset([data], tmp_path / "out") == 1
    output = capsys.readouterr().out
    assert "skipped a.obj: " in output and "it is not an OBJ" in output
    assert "skipped b.obj: " in output


def test_pieces_of_other_kinds_or_of_another_shape_are_skipped(tmp_path, furniture, capsys):
    properties = piece(1, "A#ball", "Round Ball", "ball.obj") + piece(2, "A#bed", "Bed", "bed.obj")
    data = catalog(properties, **{"ball.obj": BALL, "bed.obj": TRIANGLE})
    write = furniture.write_dataset
    assert write([data], tmp_path / "beds", nouns=["bed"]) == 1
    assert (tmp_path / "beds" / "a-bed.obj").exists()
    assert write([data], tmp_path / "coarse", max_faces=160, max_error=0.08) == 2
    assert write([data], tmp_path / "exact", max_faces=160, max_error=0.015) == 1
    assert "skipped a-ball.obj: 160 triangles are too few" in capsys.readouterr().out


def test_a_piece_that_becomes_one_box_is_skipped(tmp_path, furniture, capsys):
    plain = trimesh.creation.box().export(file_type="obj")
    data = catalog(piece(1, "A#chest", "Chest", "a.obj"), **{"a.obj": plain})
    assert furniture.write_dataset([data], tmp_path / "out", max_faces=40, max_error=0.08) == 0
    assert "skipped a-chest.obj: nothing but a box is left of it" in capsys.readouterr().out


def test_selected_pieces_have_their_noun_as_a_second_caption(tmp_path, furniture):
    properties = piece(1, "A#couch", "Corner Couch", "a.obj", tags="Sofa, Seat") + piece(
        2, "A#bed", "Bed", "a.obj"
    )
    data = catalog(properties, **{"a.obj": TRIANGLE})
    assert furniture.write_dataset([data], tmp_path / "out", nouns=["sofa", "bed"]) == 2
    lines = (tmp_path / "out" / "metadata.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["bed", ["corner sofa, seat", "sofa"]]


def test_a_piece_is_rotated_as_in_its_catalog(tmp_path, furniture):
    properties = piece(1, "a", "Post", "/a.obj", modelRotation="1 0 0 0 0 1 0 -1 0")
    furniture.write_dataset(
        [catalog(properties, **{"a.obj": "v 0 0 0\nv 1 0 0\nv 0 0 3\nf 1 2 3\n"})],
        tmp_path / "out",
    )
    post = Mesh.load(tmp_path / "out" / "a.obj").vertices
    assert (post.min(axis=0).tolist(), post.max(axis=0).tolist()) == ([0, 0, 0], [1, 0, 3])


def test_an_archive_cannot_write_outside_the_folder(tmp_path, furniture):
    names = ["../../evil", "/evil", "..\\evil", "", "CON/../../x"]
    properties = "".join(
        piece(number, name, "Evil", "/a.obj") for number, name in enumerate(names, start=1)
    )
    furniture.write_dataset(
        [catalog(properties, **{"a.obj": TRIANGLE, "../../b.obj": TRIANGLE})],
        tmp_path / "deep" / "out",
    )
    written = {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    }
    inside = {"evil.obj", "unnamed.obj", "con-x.obj", "metadata.jsonl", "CREDITS.md"}
    assert written == {f"deep/out/{name}" for name in inside}
