"""Tests of folders of meshes: canonical form, augmentation, caches, and errors."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh

from tessera.data.dataset import ExampleDataset
from tessera.data.errors import UnreadableFile
from tessera.data.loader import TrainLoader
from tessera.modalities.mesh.adjacency import find_adjacent_faces
from tessera.modalities.mesh.canonical import MeshExample, collate
from tessera.modalities.mesh.dataset import NUM_PIECES, MeshDataConfig, load_example, warp
from tessera.modalities.mesh.media import Mesh, read_mesh
from tessera.modalities.mesh.synthetic import generate_object
from tessera.run.errors import UserError

FIELDS = ("vertices", "faces", "edges")


def write(path: Path, mesh: Mesh) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(mesh.to_y_up().to_obj())
    return path


def make_mesh(number: int) -> Mesh:
    return generate_object(0, number).mesh


def to_triangles(mesh: Mesh) -> Mesh:
    return Mesh(mesh.vertices, mesh.triangles())


def make_sphere(rings: int = 20) -> Mesh:
    sphere = trimesh.creation.uv_sphere(count=[rings, rings])
    return Mesh(np.asarray(sphere.vertices), np.asarray(sphere.faces))


def make_cube() -> Mesh:
    corners = np.array([[x, y, z] for x in (0.0, 1.0) for y in (0.0, 1.0) for z in (0.0, 1.0)])
    faces = [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]]
    return Mesh(corners, np.array(faces))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(4):
        write(tmp_path / f"{number}.obj", make_mesh(number))
    return tmp_path


def load(dataset: ExampleDataset, index: int = 0, seed: int = 0) -> MeshExample:
    return dataset.item(index, np.random.default_rng(seed))


def names(dataset: ExampleDataset) -> list[str]:
    return [dataset.name(i) for i in range(len(dataset))]


def assert_equal(one: MeshExample, other: MeshExample) -> None:
    for field in FIELDS:
        assert np.array_equal(getattr(one, field), getattr(other, field))


# ---- examples and batches


def test_example_consists_of_integers_edges_and_caption(folder):
    (folder / "0.txt").write_text("a ladder\n")
    dataset = MeshDataConfig(path=str(folder), bins=64).full()
    example = load(dataset)
    assert example.vertices.dtype == example.faces.dtype == example.edges.dtype == np.int64
    assert example.vertices.shape[1:] == (3,)
    assert example.faces.shape == (2 * len(make_mesh(0).faces), 3)
    assert example.vertices.min() == 0 and example.vertices.max() == 63
    assert np.array_equal(example.edges, find_adjacent_faces(example.faces))
    assert example.caption == dataset.caption(0) == "a ladder"
    assert dataset.files.count_captions() == {"text files": 1}


def test_quads_are_kept_if_requested(folder):
    example = load(MeshDataConfig(path=str(folder), polygons="quads").full())
    assert example.faces.shape == (len(make_mesh(0).faces), 4)


def test_folder_names_are_classes(tmp_path):
    write(tmp_path / "chair" / "1.obj", make_mesh(0))
    write(tmp_path / "table" / "1.obj", make_mesh(1))
    dataset = MeshDataConfig(path=str(tmp_path)).full()
    assert dataset.classes() == ["chair", "table"] and dataset.caption(1) == "table"


def test_batch_is_padded_and_has_the_counts(folder):
    dataset = MeshDataConfig(path=str(folder), bins=64).full()
    examples = [load(dataset, index) for index in range(4)]
    batch = dataset.collate(examples)
    faces = [len(example.faces) for example in examples]
    assert batch.faces.shape == (4, max(faces), 3) and batch.face_counts.tolist() == faces
    assert batch.vertices.shape[2] == 3 and batch.edges.shape[2] == 2
    for row, example in enumerate(examples):
        for padded, count, real in (
            (batch.vertices, batch.vertex_counts, example.vertices),
            (batch.faces, batch.face_counts, example.faces),
            (batch.edges, batch.edge_counts, example.edges),
        ):
            assert padded.dtype == count.dtype == torch.int64 and int(count[row]) == len(real)
            assert np.array_equal(padded[row, : len(real)].numpy(), real)
            assert (padded[row, len(real) :] == -1).all()
    moved = batch.to("meta")
    assert {moved.vertices.device.type, moved.edge_counts.device.type} == {"meta"}
    assert moved.captions == batch.captions


def test_batch_of_single_faces_has_no_edges(tmp_path):
    write(tmp_path / "a.obj", Mesh(np.eye(3), np.array([[0, 1, 2]])))
    dataset = MeshDataConfig(path=str(tmp_path)).full()
    batch = collate([load(dataset)] * 2)
    assert batch.edges.shape == (2, 0, 2) and batch.edge_counts.tolist() == [0, 0]
    assert batch.faces.tolist() == [[[0, 1, 2]]] * 2


# ---- augmentation


AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.3},
    "warp": {"warp": 0.5},
    "rotation": {"rotation": 180.0},
    "jitter": {"jitter": 0.2},
}


ORDER = {"mirror": True, "shuffle_parts": True}


@pytest.mark.parametrize("augmentation", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_augmentation_depends_on_the_generator_of_the_example_only(folder, augmentation):
    dataset = MeshDataConfig(path=str(folder), val_fraction=0.0, **augmentation).build().train
    np.random.seed(1)
    first = load(dataset, seed=3)
    np.random.seed(2)
    assert np.array_equal(first.vertices, load(dataset, seed=3).vertices)
    others = [load(dataset, seed=seed) for seed in range(4, 8)]
    assert any(not np.array_equal(first.vertices, other.vertices) for other in others)


def test_generator_has_no_influence_without_augmentation(folder):
    dataset = MeshDataConfig(path=str(folder)).build().train
    assert np.array_equal(load(dataset, seed=1).vertices, load(dataset, seed=2).vertices)


def test_all_settings_draw_the_same_number_of_random_numbers(folder):
    following = set()
    for settings in ({}, *AUGMENTATIONS.values(), ORDER, {"polygons": "quads"}):
        for index in range(2):
            rng = np.random.default_rng(0)
            MeshDataConfig(path=str(folder), **settings).folder_dataset().item(index, rng)
            following.add(rng.random())
    assert len(following) == 1


def test_scaling_changes_proportions_within_its_range(tmp_path):
    write(tmp_path / "cube.obj", make_cube())
    dataset = MeshDataConfig(path=str(tmp_path), scale=0.25).build().train
    sizes = [np.ptp(load(dataset, seed=seed).vertices, axis=0) for seed in range(60)]
    ratios = [min(size) / max(size) for size in sizes]
    assert 0.59 < min(ratios) < 0.75 and max(ratios) > 0.85
    assert {int(np.argmax(size)) for size in sizes} == {0, 1, 2}


def test_warping_keeps_the_box_symmetry_and_equal_coordinates(tmp_path):
    mesh = generate_object(0, 3).mesh
    write(tmp_path / "one.obj", Mesh(mesh.vertices, mesh.triangles()))
    plain = MeshDataConfig(path=str(tmp_path), val_fraction=0.0).build().train
    dataset = MeshDataConfig(path=str(tmp_path), val_fraction=0.0, warp=0.5).build().train
    original = load(plain)
    warped = [load(dataset, seed=seed) for seed in range(6)]
    assert len({one.vertices.tobytes() for one in warped}) == 6
    for one in warped:
        assert np.array_equal(one.faces, original.faces)
        for axis in range(3):
            before, after = original.vertices[:, axis], one.vertices[:, axis]
            pairs = sorted(set(zip(before.tolist(), after.tolist(), strict=True)))
            assert len(pairs) == len(np.unique(before)), "a coordinate is mapped to one other"
            assert (np.diff([value for _, value in pairs]) >= 0).all(), "their order stays"
            assert np.ptp(before) == np.ptp(after)


def test_warping_is_the_same_on_either_side():
    sides = np.linspace(-1, 1, 9)
    log_scales = np.random.default_rng(0).normal(size=(3, NUM_PIECES))
    x, y, z = warp(np.stack([sides, sides, sides], axis=1), log_scales).T
    assert np.allclose(x, -x[::-1]) and np.allclose(y, -y[::-1])
    assert not np.allclose(z, -z[::-1]) and not np.allclose(x, sides)


def test_rotation_is_about_the_vertical_axis(tmp_path):
    cube = make_cube()
    write(tmp_path / "slab.obj", Mesh(cube.vertices * [1, 1, 3], cube.faces))
    dataset = MeshDataConfig(path=str(tmp_path), rotation=45.0).build().train
    rotated = [load(dataset, seed=seed).vertices for seed in range(20)]
    heights = [np.unique(vertices[:, 2]).tolist() for vertices in rotated]
    assert heights == [[0, 127]] * 20, "top and bottom stay level"
    assert len({np.ptp(vertices[:, 0]) for vertices in rotated}) > 5


def test_mirrored_meshes_keep_their_outside_and_half_of_them_are(tmp_path):
    mesh = generate_object(0, 2).mesh
    (tmp_path / "one.obj").write_text(Mesh(mesh.vertices, mesh.triangles()).to_y_up().to_obj())
    dataset = MeshDataConfig(path=str(tmp_path), mirror=True, val_fraction=0.0).build().train
    plain = MeshDataConfig(path=str(tmp_path), val_fraction=0.0).build().train
    original = plain.item(0, np.random.default_rng(0))
    seen = [dataset.item(0, np.random.default_rng(seed)) for seed in range(40)]
    volumes = [signed_volume(one) for one in seen]
    assert np.allclose(volumes, signed_volume(original)) and signed_volume(original) > 0
    same = [np.array_equal(one.vertices, original.vertices) for one in seen]
    assert 8 < sum(same) < 32 or np.array_equal(seen[0].vertices, original.vertices)
    for one in seen:
        reflected = one.vertices * [-1, 1, 1] + [127, 0, 0]
        rows = {tuple(row) for row in one.vertices.tolist()}
        expected = {tuple(row) for row in original.vertices.tolist()}
        assert rows == expected or {tuple(row) for row in reflected.tolist()} == expected


def signed_volume(example):
    a, b, c = example.vertices[example.faces].transpose(1, 0, 2).astype(float)
    return float((np.cross(a, b) * c).sum() / 6)


def test_shuffled_parts_have_the_same_faces_in_another_order(tmp_path):
    mesh = generate_object(0, 2).mesh
    (tmp_path / "one.obj").write_text(Mesh(mesh.vertices, mesh.triangles()).to_y_up().to_obj())
    plain, shuffled = (
        MeshDataConfig(path=str(tmp_path), val_fraction=0.0, shuffle_parts=shuffle).build().train
        for shuffle in (False, True)
    )
    original = plain.item(0, np.random.default_rng(0))
    orders = [shuffled.item(0, np.random.default_rng(seed)).faces for seed in range(6)]
    assert len({order.tobytes() for order in orders}) > 1
    for faces in orders:
        assert sorted(faces.tolist()) == original.faces.tolist()


def test_held_out_meshes_are_not_augmented(folder):
    config = MeshDataConfig(
        path=str(folder), scale=0.3, rotation=90.0, jitter=0.1, val_fraction=0.3
    )
    for dataset in (config.build().validation, config.full()):
        assert np.array_equal(load(dataset, seed=1).vertices, load(dataset, seed=2).vertices)


# ---- large and unreadable meshes


def test_large_mesh_is_skipped_or_simplified(tmp_path):
    write(tmp_path / "sphere.obj", make_sphere())
    message = r"sphere.obj: it has 1,\d\d\d triangles, more than max_faces 800"
    with pytest.raises(UnreadableFile, match=message):
        load(MeshDataConfig(path=str(tmp_path)).full())
    example = load(MeshDataConfig(path=str(tmp_path), on_large="decimate").full())
    assert 300 < len(example.faces) <= 800
    small = load(MeshDataConfig(path=str(tmp_path), on_large="decimate", max_faces=60).full())
    assert 20 < len(small.faces) <= 60


def test_far_too_large_mesh_is_skipped_without_parsing(tmp_path):
    write(tmp_path / "sphere.obj", make_sphere())
    message = r"sphere.obj: it has 1,\d\d\d faces, and at most 400 are read"
    with pytest.raises(UnreadableFile, match=message):
        load(MeshDataConfig(path=str(tmp_path), max_faces=100).full())


def test_changed_file_is_read_again(tmp_path):
    write(tmp_path / "a.obj", make_mesh(0))
    dataset = MeshDataConfig(path=str(tmp_path)).full()
    before, signature = load(dataset), dataset.signature(0)
    write(tmp_path / "a.obj", make_mesh(1))
    assert len(load(dataset).faces) == 2 * len(make_mesh(1).faces) != len(before.faces)
    assert dataset.signature(0) != signature


@pytest.mark.parametrize("has_path", [True, False], ids=["files", "synthetic"])
def test_cached_example_equals_a_newly_computed_one(folder, has_path):
    path = str(folder) if has_path else None
    dataset = MeshDataConfig(path=path, bins=64, num_synthetic=4).full()
    first = [load(dataset, i) for i in range(4)]
    collate(first)
    for i, example in enumerate(first):
        cached = load(dataset, i)
        assert cached.faces is example.faces and cached.edges is example.edges
        mesh = (
            read_mesh(dataset.files.file(i)) if has_path else to_triangles(dataset.generate(i).mesh)
        )
        computed = MeshExample.from_mesh(mesh, 64, dataset.caption(i))
        assert_equal(cached, computed)
        assert np.array_equal(cached.edges, find_adjacent_faces(cached.faces))
        assert cached.caption == computed.caption


def test_cache_on_disk_equals_the_files_and_corrupt_entries_are_replaced(folder, tmp_path):
    cache_dir, rng = tmp_path / "cache", np.random.default_rng(0)
    config = MeshDataConfig(path=str(folder), val_fraction=0.0)
    computing = config.build().train
    caching = replace(config, cache_dir=str(cache_dir)).build().train
    for index in range(len(computing)):
        computed, first = computing.item(index, rng), caching.item(index, rng)
        load_example.cache_clear()  # as in another process
        assert_equal(computed, first)
        assert_equal(computed, caching.item(index, rng))
    files = sorted(cache_dir.iterdir())
    assert len(files) == len(computing)
    assert {file.suffix for file in files} == {".safetensors"}
    files[0].write_bytes(b"no tensors")
    load_example.cache_clear()
    assert all(len(caching.item(index, rng).faces) for index in range(len(computing)))
    assert len(files[0].read_bytes()) > 100
    os.utime(caching.files.file(0), ns=(1, 1))
    load_example.cache_clear()
    assert len(caching.item(0, rng).faces) and len(list(cache_dir.iterdir())) == len(files) + 1


def test_changed_caption_is_read_although_the_mesh_is_cached(folder):
    (folder / "0.txt").write_text("a ladder")
    dataset = MeshDataConfig(path=str(folder)).full()
    assert load(dataset).caption == "a ladder"
    (folder / "0.txt").write_text("steps")
    assert load(dataset).caption == "steps"


def test_training_replaces_and_reports_unreadable_files(folder):
    (folder / "1.obj").write_text("dear reader")
    (folder / "2.obj").write_text("v 0 0 0\nv 1 0 0\nv 2 0 0\nf 1 2 3\n")
    dataset = MeshDataConfig(path=str(folder), val_fraction=0).build().train
    (batch,) = next(TrainLoader(dataset, seed=0, batch_size=4).micro_batches(0, 1, 0, 1))
    assert dict(batch.rejected).keys() == {"1.obj", "2.obj"}
    assert set(batch.names) == {"0.obj", "3.obj"}
    reasons = " ".join(reason for _, reason in batch.rejected)
    assert "it is not an OBJ" in reasons and "its faces are too small for 128 bins" in reasons


def test_missing_file_is_unreadable(tmp_path):
    (tmp_path / "gone.obj").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UnreadableFile, match="gone.obj: the file cannot be opened"):
        load(MeshDataConfig(path=str(tmp_path)).full())


# ---- meshes in memory


@pytest.mark.parametrize("polygons", ["triangles", "quads"])
def test_mesh_in_memory_is_preprocessed_like_its_file(folder, polygons):
    config = MeshDataConfig(bins=64, polygons=polygons, scale=0.2, rotation=90.0, jitter=0.1)
    for number in range(4):
        mesh = make_mesh(number)
        expected = config.example_from_file(str(folder / f"{number}.obj"))
        for media in (
            Mesh.load(folder / f"{number}.obj", polygons),
            mesh,
            (mesh.vertices, mesh.faces),
        ):
            example = config.example_from_media(media)
            assert_equal(example, expected)
            assert example.caption == ""


def test_duplicate_faces_in_memory_are_removed_as_in_a_file(tmp_path):
    cube = to_triangles(make_cube())
    faces = np.concatenate([cube.faces, cube.faces[:, ::-1], [[0, 0, 1]]])
    path = write(tmp_path / "a.obj", Mesh(cube.vertices, faces))
    config = MeshDataConfig(path="unused", max_faces=12)
    example = config.example_from_media((cube.vertices, faces))
    assert len(example.faces) == 12
    assert_equal(example, config.example_from_file(str(path)))


def test_large_mesh_in_memory_is_simplified_or_rejected(tmp_path):
    sphere = make_sphere()
    path = write(tmp_path / "sphere.obj", sphere)
    with pytest.raises(UserError, match=r"has 1,\d\d\d faces, but the model supports 800: simpl"):
        MeshDataConfig().example_from_media(sphere)
    config = MeshDataConfig(on_large="decimate")
    example = config.example_from_media(Mesh.load(path))
    assert 300 < len(example.faces) <= 800
    assert_equal(example, config.example_from_file(str(path)))


@pytest.mark.parametrize("media", [None, 3, [1, 2], (1, 2, 3), np.zeros((4, 3))])
def test_other_types_than_meshes_and_pairs_of_arrays_are_rejected(media):
    message = rf"Expected a Mesh, a path or a pair of arrays .*, got a {type(media).__name__}\."
    with pytest.raises(UserError, match=message):
        MeshDataConfig().example_from_media(media)


def test_triangles_in_memory_are_rejected_where_quads_are_expected():
    with pytest.raises(UserError, match="has triangles, but the model supports quads only"):
        MeshDataConfig(polygons="quads").example_from_media(to_triangles(make_cube()))


def test_vertices_in_memory_must_be_finite():
    cube = make_cube()
    cube.vertices[3, 1] = np.nan
    with pytest.raises(UserError, match="vertices that are not finite"):
        MeshDataConfig().example_from_media(cube)


# ---- configuration


def test_dataset_can_be_pickled_for_a_worker(folder):
    dataset = MeshDataConfig(path=str(folder)).build().train
    copy = pickle.loads(pickle.dumps(dataset))
    assert names(copy) == names(dataset)
    assert np.array_equal(load(copy).faces, load(dataset).faces)


def test_split_is_disjoint_and_complete(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.glb").touch()
    split = MeshDataConfig(path=str(tmp_path), val_fraction=0.2).build()
    expected = sorted(f"{number}.glb" for number in range(30))
    assert sorted(names(split.train) + names(split.validation)) == expected


def test_held_out_synthetic_meshes_are_not_in_the_training_set():
    split = MeshDataConfig(num_synthetic=40, val_fraction=0.1, bins=32).build()
    assert (len(split.train), len(split.validation)) == (40, 4)
    assert not set(names(split.train)) & set(names(split.validation))
    assert len(MeshDataConfig(num_synthetic=7).full()) == 7


def test_folder_of_other_files_is_rejected_with_the_expected_suffixes(tmp_path):
    (tmp_path / "song.mp3").touch()
    message = r"has no meshes: expected files ending in \.obj, .*found only 1 \.mp3"
    with pytest.raises(UserError, match=message):
        MeshDataConfig(path=str(tmp_path)).build()


@pytest.mark.parametrize("path", [None, "meshes"])
@pytest.mark.parametrize(
    ("missing", "settings"), [("trimesh", {}), ("fast_simplification", {"on_large": "decimate"})]
)
def test_missing_library_is_reported_at_the_start(monkeypatch, path, missing, settings):
    monkeypatch.setitem(sys.modules, missing, None)
    config = MeshDataConfig(path=path, **settings)
    for open_dataset in (config.build, config.full):
        with pytest.raises(UserError, match=r"not installed .*pip install \"tessera\[mesh\]"):
            open_dataset()


@pytest.mark.parametrize(
    "setting",
    [
        {"bins": 1},
        {"max_faces": 0},
        {"max_faces": 20},
        {"scale": 1.0},
        {"scale": -0.1},
        {"warp": -0.1},
        {"warp": 3.0},
        {"rotation": 181.0},
        {"rotation": float("nan")},
        {"jitter": 1.5},
        {"val_fraction": 1.0},
        {"num_synthetic": 0},
    ],
)
def test_invalid_setting_is_rejected_by_name(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=name):
        MeshDataConfig(**setting)


def test_quads_cannot_be_simplified():
    message = "on_large decimate cannot be combined with polygons quads"
    with pytest.raises(ValueError, match=message):
        MeshDataConfig(on_large="decimate", polygons="quads")


def test_preprocessing_does_not_include_augmentation():
    config = MeshDataConfig(bins=64, max_faces=100, scale=0.2, warp=0.5, rotation=10.0, jitter=0.1)
    expected = {
        "bins": 64,
        "max_faces": 100,
        "on_large": "skip",
        "polygons": "triangles",
        "up": None,
    }
    assert config.preprocessing() == config.without_augmentation().preprocessing() == expected
    assert config.without_augmentation() == MeshDataConfig(bins=64, max_faces=100)
