"""A check of a folder of meshes counts everything once, and says of each unusable file why."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import trimesh

from tessera.data.errors import UnreadableFile
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.mesh.inspect import check, histogram_of
from tessera.modalities.mesh.synthetic import imagine
from tessera.run.directory import UserError

PLAIN = np.random.default_rng(0)


@pytest.fixture(scope="module")
def hash_seed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    imagine(0, 0).mesh.save(folder / "ladder")
    (folder / "ladder.txt").write_text("a ladder")
    shutil.copy(folder / "ladder.glb", folder / "copy.glb")
    ball = trimesh.creation.uv_sphere(count=[20, 20])
    (folder / "ball.stl").write_bytes(ball.export(file_type="stl"))
    (folder / "open.obj").write_text("v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nf 1 2 3\nf 1 2 4\n")
    (folder / "wings.obj").write_text(
        "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nv 0 1 1\nf 1 2 3\nf 1 2 4\nf 1 2 5\n"
    )
    (folder / "line.obj").write_text("v 0 0 0\nv 1 0 0\nv 2 0 0\nf 1 2 3\n")
    (folder / "empty.ply").touch()
    (folder / "letter.off").write_text("dear reader")
    (folder / "song.mp3").touch()
    return folder


def test_a_check_counts_everything_once(hash_seed):
    report = check(hash_seed)
    assert (report.meshes, report.usable, report.sizes) == (9, 6, None)
    assert report.kinds == {"glb": 2, "obj": 3, "stl": 1}
    fewest, median, most = report.triangles
    assert (fewest, median) == (2, 2 * len(imagine(0, 0).mesh.faces)) and 800 < most < 1600
    assert report.histogram["up to 50"] == 2 and sum(report.histogram.values()) == 6
    assert (report.large, report.watertight, report.crowded) == (1, 4, 1)
    assert report.duplicates == [["copy.glb", "ladder.glb"]]
    assert report.captioned == 2 and report.other_files == "1 .mp3"
    assert [each["name"] for each in report.unusable] == ["empty.ply", "letter.off", "line.obj"]
    assert "too small for 128 steps" in report.unusable[2]["reason"]


def test_what_a_check_calls_usable_is_what_training_can_read(hash_seed):
    unusable = {each["name"] for each in check(hash_seed).unusable}
    source = MeshDataConfig(path=str(hash_seed), large="decimate").full()
    for index in range(len(source)):
        if source.name(index) in unusable:
            with pytest.raises(UnreadableFile):
                source.item(index, PLAIN)
        else:
            assert len(source.item(index, PLAIN).faces) > 0


def test_a_check_asks_what_a_run_would_ask(hash_seed):
    report = check(hash_seed, config=MeshDataConfig(polygons="quads", max_faces=100))
    assert report.usable == 3 and {each["name"] for each in report.unusable} >= {
        "ball.stl",
        "open.obj",
    }
    assert check(hash_seed, config=MeshDataConfig(max_faces=2000)).large == 0


def test_a_check_reads_well_and_as_json(hash_seed):
    report = check(hash_seed)
    text = "\n".join(report.lines())
    assert "9 meshes, 6 usable, " in text
    assert "triangles: 2 to 1," in text and "up to 50: 2, up to " in text
    assert "large: 1 file of more than 800, left out unless large=decimate" in text
    assert "watertight: 4 (67%)" in text
    assert "non-manifold: 1 file with edges that three or more faces share" in text
    assert "formats: " in text and "captions: 2 of 6 usable files (2 in text files)" in text
    assert "  empty.ply: the file is empty (0 bytes)" in text
    assert json.loads(report.as_json())["watertight"] == 4


def test_a_check_of_nothing_usable_says_so_and_does_not_fail(tmp_path):
    (tmp_path / "empty.obj").touch()
    (tmp_path / "lost.obj").symlink_to(tmp_path / "gone.obj")
    report = check(tmp_path)
    assert (report.meshes, report.usable, report.triangles) == (2, 0, None)
    assert report.lines()[0].endswith("2 meshes, 0 usable, 0.0 MB")
    assert "lost.obj: the file cannot be opened" in report.lines()[-1]


def test_a_check_of_one_mesh_is_in_the_singular(tmp_path):
    imagine(0, 0).mesh.save(tmp_path / "a")
    assert (
        check(tmp_path / "a.glb").lines()[0].startswith(f"{tmp_path / 'a.glb'}: 1 mesh, 1 usable")
    )


def test_a_check_of_no_mesh_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no meshes: .*the folder is empty"):
        check(tmp_path)


def test_a_check_tells_how_far_it_is(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.obj").touch()
    steps = []
    check(tmp_path, num_workers=2, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_every_number_of_triangles_has_a_bar():
    bars = histogram_of([1, 50, 51, 800, 801, 100_000, 100_001])
    counts = {bar: number for bar, number in bars.items() if number}
    assert counts == {
        "up to 50": 2,
        "up to 100": 1,
        "up to 800": 1,
        "up to 1,600": 1,
        "up to 100,000": 1,
        "over 100,000": 1,
    }


def test_a_check_needs_no_torch():
    code = "import sys, tessera.modalities.mesh.inspect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
