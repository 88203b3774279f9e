"""Inspecting a folder of meshes: every file is counted once, and unusable files have a reason."""

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
from tessera.modalities.mesh.grid_report import GridReport, describe_training_grid
from tessera.modalities.mesh.inspect import build_histogram, inspect_folder
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.synthetic import generate_object
from tessera.run.errors import UserError

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def mixed_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    generate_object(0, 0).mesh.save(folder / "ladder")
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
    (folder / "text.off").write_text("dear reader")
    (folder / "song.mp3").touch()
    return folder


def test_every_file_is_counted_once(mixed_folder):
    report = inspect_folder(mixed_folder)
    assert (report.meshes, report.usable, report.sizes) == (9, 6, None)
    assert report.formats == {"glb": 2, "obj": 3, "stl": 1}
    low, median, high = report.triangles
    assert (low, median) == (2, 2 * len(generate_object(0, 0).mesh.faces)) and 800 < high < 1600
    assert report.histogram["up to 50"] == 2 and sum(report.histogram.values()) == 6
    assert (report.large, report.watertight, report.non_manifold) == (1, 4, 1)
    assert report.duplicates == [["copy.glb", "ladder.glb"]]
    assert report.captioned == 2 and report.other_files == "1 .mp3"
    assert [each["name"] for each in report.unusable] == ["empty.ply", "line.obj", "text.off"]
    assert "too small for 128 bins" in report.unusable[1]["reason"]


def test_usable_files_are_those_that_training_can_read(mixed_folder):
    unusable = {each["name"] for each in inspect_folder(mixed_folder).unusable}
    dataset = MeshDataConfig(path=str(mixed_folder), on_large="decimate").full()
    for index in range(len(dataset)):
        if dataset.name(index) in unusable:
            with pytest.raises(UnreadableFile):
                dataset.item(index, RNG)
        else:
            assert len(dataset.item(index, RNG).faces) > 0


def test_the_configuration_of_a_run_is_applied(mixed_folder):
    report = inspect_folder(mixed_folder, config=MeshDataConfig(polygons="quads", max_faces=100))
    assert report.usable == 3 and {each["name"] for each in report.unusable} >= {
        "ball.stl",
        "open.obj",
    }
    assert inspect_folder(mixed_folder, config=MeshDataConfig(max_faces=2000)).large == 0


def test_a_report_has_text_lines_and_json(mixed_folder):
    report = inspect_folder(mixed_folder)
    text = "\n".join(report.lines())
    assert "9 meshes, 6 usable, " in text
    assert "triangles: 2 to 1," in text and "up to 50: 2, up to " in text
    assert "large: 1 file of more than 800, left out unless on_large=decimate" in text
    assert "watertight: 4 (67%)" in text
    assert "non-manifold: 1 file with edges that three or more faces share" in text
    assert "formats: " in text and "captions: 2 of 6 usable files (2 in text files)" in text
    assert "  empty.ply: the file is empty (0 bytes)" in text
    assert json.loads(report.as_json())["watertight"] == 4


def test_a_folder_without_usable_files_is_reported(tmp_path):
    (tmp_path / "empty.obj").touch()
    (tmp_path / "lost.obj").symlink_to(tmp_path / "gone.obj")
    report = inspect_folder(tmp_path)
    assert (report.meshes, report.usable, report.triangles) == (2, 0, None)
    assert report.lines()[0].endswith("2 meshes, 0 usable, 0.0 MB")
    assert "lost.obj: the file cannot be opened" in report.lines()[-1]


def test_one_mesh_is_reported_in_the_singular(tmp_path):
    generate_object(0, 0).mesh.save(tmp_path / "a")
    path = tmp_path / "a.glb"
    assert inspect_folder(path).lines()[0].startswith(f"{path}: 1 mesh, 1 usable")


def test_a_folder_without_meshes_raises_an_error(tmp_path):
    with pytest.raises(UserError, match="has no meshes: expected files ending in .*found no files"):
        inspect_folder(tmp_path)


def test_progress_is_reported(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.obj").touch()
    steps = []
    inspect_folder(
        tmp_path, num_workers=2, progress=lambda done, total: steps.append((done, total))
    )
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_every_number_of_triangles_has_a_histogram_bin():
    histogram = build_histogram([1, 50, 51, 800, 801, 100_000, 100_001])
    counts = {label: number for label, number in histogram.items() if number}
    assert counts == {
        "up to 50": 2,
        "up to 100": 1,
        "up to 800": 1,
        "up to 1,600": 1,
        "up to 100,000": 1,
        "over 100,000": 1,
    }


def test_inspection_imports_no_torch():
    code = "import sys, tessera.modalities.mesh.inspect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_report_compares_numbers_of_bins(mixed_folder):
    report = inspect_folder(mixed_folder)
    text = "\n".join(report.lines())
    for bins in (64, 128, 256):
        assert f"grid: {bins} bins lose " in text
    assert "watertight meshes stay so" in text and json.dumps(report.as_json())


def test_the_grid_report_counts_what_is_lost():
    rng = np.random.default_rng(0)
    fine = Mesh(
        rng.uniform(0, 1, (300, 3)), rng.permuted(np.tile(np.arange(300), (60, 1)), axis=1)[:, :3]
    )
    coarse, exact = (GridReport.measure(fine, bins) for bins in (3, 4096))
    assert coarse.vertices_left < exact.vertices_left == len(np.unique(fine.faces))
    assert coarse.faces_left < exact.faces_left == 60
    total = GridReport.total([coarse, coarse, exact], 3)
    assert (total.meshes, total.faces) == (2, 120)
    assert "3 bins lose" in total.describe() and "watertight" not in total.describe()


def test_training_on_a_folder_describes_its_grid(mixed_folder):
    line = describe_training_grid(MeshDataConfig(path=str(mixed_folder), bins=64))
    assert line.startswith("Grid, on ") and "64 bins lose" in line
    assert describe_training_grid(MeshDataConfig()) == ""
