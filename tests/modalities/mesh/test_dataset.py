"""A folder of meshes becomes whole numbers in one order: changed by the example's own generator,
unusable files named."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import trimesh

from tessera.data.errors import UnreadableFile
from tessera.data.loader import TrainLoader
from tessera.modalities.mesh.adjacency import find_adjacent_faces
from tessera.modalities.mesh.canonical import MeshExample, collate
from tessera.modalities.mesh.dataset import MeshDataConfig, load_example
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.synthetic import generate_object
from tessera.run.errors import UserError

PLAIN = np.random.default_rng(0)


def write(path, mesh: Mesh):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(mesh.to_y_up().to_obj())
    return path


def toy(number: int) -> Mesh:
    return generate_object(0, number).mesh


def triangles(mesh: Mesh) -> Mesh:
    return Mesh(mesh.vertices, mesh.triangles())


def ball(rings: int = 20) -> Mesh:
    sphere = trimesh.creation.uv_sphere(count=[rings, rings])
    return Mesh(np.asarray(sphere.vertices), np.asarray(sphere.faces))


@pytest.fixture
def folder(tmp_path):
    for number in range(4):
        write(tmp_path / f"{number}.obj", toy(number))
    return tmp_path


def item(source, index: int = 0, seed: int = 0):
    return source.item(index, np.random.default_rng(seed))


def names(source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


# ---- what comes out


def test_a_mesh_becomes_whole_numbers_with_its_neighbours_and_its_caption(folder):
    (folder / "0.txt").write_text("a ladder\n")
    source = MeshDataConfig(path=str(folder), bins=64).full()
    example = item(source)
    assert example.vertices.dtype == example.faces.dtype == example.edges.dtype == np.int64
    assert example.vertices.shape[1:] == (3,) and example.faces.shape == (2 * len(toy(0).faces), 3)
    assert example.vertices.min() == 0 and example.vertices.max() == 63
    assert np.array_equal(example.edges, find_adjacent_faces(example.faces))
    assert example.caption == source.caption(0) == "a ladder" and source.captioned == 1


def test_quads_are_kept_if_asked(folder):
    example = item(MeshDataConfig(path=str(folder), polygons="quads").full())
    assert example.faces.shape == (len(toy(0).faces), 4)


def test_folder_names_are_classes(tmp_path):
    write(tmp_path / "chair" / "1.obj", toy(0))
    write(tmp_path / "table" / "1.obj", toy(1))
    source = MeshDataConfig(path=str(tmp_path)).full()
    assert source.classes() == ["chair", "table"] and source.caption(1) == "table"


def test_a_batch_is_padded_and_says_how_much_is_real(folder):
    source = MeshDataConfig(path=str(folder), bins=64).full()
    examples = [item(source, index) for index in range(4)]
    batch = source.collate(examples)
    faces = [len(example.faces) for example in examples]
    assert batch.faces.shape == (4, max(faces), 3) and batch.face_counts.tolist() == faces
    assert batch.vertices.shape[2] == 3 and batch.edges.shape[2] == 2
    for place, example in enumerate(examples):
        for padded, count, real in (
            (batch.vertices, batch.vertex_counts, example.vertices),
            (batch.faces, batch.face_counts, example.faces),
            (batch.edges, batch.edge_counts, example.edges),
        ):
            assert padded.dtype == count.dtype == torch.int64 and int(count[place]) == len(real)
            assert (
                np.array_equal(padded[place, : len(real)].numpy(), real)
                and (padded[place, len(real) :] == -1).all()
            )
    moved = batch.to("meta")
    assert {moved.vertices.device.type, moved.edge_counts.device.type} == {
        "meta"
    } and moved.captions == batch.captions


def test_a_batch_of_single_faces_has_no_neighbours(tmp_path):
    write(tmp_path / "a.obj", Mesh(np.eye(3), np.array([[0, 1, 2]])))
    source = MeshDataConfig(path=str(tmp_path)).full()
    batch = collate([item(source)] * 2)
    assert (
        batch.edges.shape == (2, 0, 2)
        and batch.edge_counts.tolist() == [0, 0]
        and batch.faces.tolist() == [[[0, 1, 2]]] * 2
    )


# ---- augmentation


CHANGES = {"scale": {"scale": 0.3}, "turn": {"turn": 180.0}, "jitter": {"jitter": 0.2}}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_training_meshes_are_changed_by_their_own_generator(folder, change):
    source = MeshDataConfig(path=str(folder), val_fraction=0.0, **change).build().train
    np.random.seed(1)
    one = item(source, seed=3)
    np.random.seed(2)
    assert np.array_equal(one.vertices, item(source, seed=3).vertices)
    assert any(
        not np.array_equal(one.vertices, item(source, seed=seed).vertices) for seed in range(4, 8)
    )


def test_without_augmentation_the_generator_does_not_matter(folder):
    source = MeshDataConfig(path=str(folder)).build().train
    assert np.array_equal(item(source, seed=1).vertices, item(source, seed=2).vertices)


def test_every_setting_draws_equally_often_from_the_generator(folder):
    after = set()
    for settings in ({}, *CHANGES.values(), {"polygons": "quads"}):
        for index in range(2):
            rng = np.random.default_rng(0)
            MeshDataConfig(path=str(folder), **settings).folder_dataset().item(index, rng)
            after.add(rng.random())
    assert len(after) == 1


def test_a_stretch_changes_proportions_within_its_range(tmp_path):
    write(tmp_path / "cube.obj", Mesh(*cube()))
    source = MeshDataConfig(path=str(tmp_path), scale=0.25).build().train
    ratios = [np.ptp(item(source, seed=seed).vertices, axis=0) for seed in range(60)]
    shortest = [min(sides) / max(sides) for sides in ratios]
    assert 0.59 < min(shortest) < 0.75 and max(shortest) > 0.85
    assert {int(np.argmax(sides)) for sides in ratios} == {0, 1, 2}


def cube() -> tuple[np.ndarray, np.ndarray]:
    corners = np.array([[x, y, z] for x in (0.0, 1.0) for y in (0.0, 1.0) for z in (0.0, 1.0)])
    return corners, np.array(
        [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]]
    )


def test_a_turn_is_about_the_upright_axis(tmp_path):
    vertices, faces = cube()
    write(tmp_path / "slab.obj", Mesh(vertices * [1, 1, 3], faces))
    source = MeshDataConfig(path=str(tmp_path), turn=45.0).build().train
    seen = [item(source, seed=seed).vertices for seed in range(20)]
    assert all(np.unique(turned[:, 2]).tolist() == [0, 127] for turned in seen), (
        "top and bottom stay level"
    )
    assert len({np.ptp(turned[:, 0]) for turned in seen}) > 5


def test_meshes_held_out_are_never_changed(folder):
    config = MeshDataConfig(path=str(folder), scale=0.3, turn=90.0, jitter=0.1, val_fraction=0.3)
    for source in (config.build().validation, config.full()):
        assert np.array_equal(item(source, seed=1).vertices, item(source, seed=2).vertices)


# ---- large ones and broken ones


def test_a_large_mesh_is_left_out_or_simplified(tmp_path):
    write(tmp_path / "ball.obj", ball())
    with pytest.raises(
        UnreadableFile, match=r"ball.obj: it has 1,\d\d\d triangles, more than the 800 asked for"
    ):
        item(MeshDataConfig(path=str(tmp_path)).full())
    example = item(MeshDataConfig(path=str(tmp_path), on_large="decimate").full())
    assert 300 < len(example.faces) <= 800
    small = item(MeshDataConfig(path=str(tmp_path), on_large="decimate", max_faces=60).full())
    assert 20 < len(small.faces) <= 60


def test_a_far_too_large_mesh_is_left_out_unread(tmp_path):
    write(tmp_path / "ball.obj", ball())
    with pytest.raises(
        UnreadableFile, match=r"ball.obj: it has 1,\d\d\d faces, and at most 400 are read"
    ):
        item(MeshDataConfig(path=str(tmp_path), max_faces=100).full())


def test_a_mesh_that_was_changed_on_disk_is_read_again(tmp_path):
    write(tmp_path / "a.obj", toy(0))
    source = MeshDataConfig(path=str(tmp_path)).full()
    before, signature = item(source), source.signature(0)
    write(tmp_path / "a.obj", toy(1))
    assert (
        len(item(source).faces) == 2 * len(toy(1).faces) != len(before.faces)
        and source.signature(0) != signature
    )


@pytest.mark.parametrize("path", [True, False], ids=["files", "toys"])
def test_what_is_kept_of_an_example_is_what_would_be_derived_again(folder, path):
    """Its canonical form, and which of its faces touch; and nobody who is handed it changes what is
    kept."""
    source = MeshDataConfig(path=str(folder) if path else None, bins=64, num_synthetic=4).full()
    first = [item(source, i) for i in range(4)]
    collate(first)
    for i, example in enumerate(first):
        again = item(source, i)
        assert again.faces is example.faces and again.edges is example.edges
        derived = MeshExample.from_mesh(
            source.mesh(i) if path else triangles(source.generate(i).mesh), 64, source.caption(i)
        )
        for field in ("vertices", "faces", "edges"):
            assert np.array_equal(getattr(again, field), getattr(derived, field))
        assert (
            np.array_equal(again.edges, find_adjacent_faces(again.faces))
            and again.caption == derived.caption
        )


def test_what_is_kept_on_disk_is_what_would_be_derived_and_a_damaged_or_changed_file_is_made_again(
    folder, tmp_path
):
    keep, rng = tmp_path / "kept", np.random.default_rng(0)
    config = MeshDataConfig(path=str(folder), val_fraction=0.0)
    without_augmentation, keeping = (
        config.build().train,
        replace(config, keep=str(keep)).build().train,
    )
    for index in range(len(without_augmentation)):
        derived, first = without_augmentation.item(index, rng), keeping.item(index, rng)
        load_example.cache_clear()  # as in another process
        again = keeping.item(index, rng)
        for name in ("vertices", "faces", "edges"):
            assert np.array_equal(getattr(derived, name), getattr(first, name))
            assert np.array_equal(getattr(derived, name), getattr(again, name))
    files = sorted(keep.iterdir())
    assert len(files) == len(without_augmentation) and {file.suffix for file in files} == {
        ".safetensors"
    }
    files[0].write_bytes(b"no tensors")
    load_example.cache_clear()
    assert (
        all(len(keeping.item(index, rng).faces) for index in range(len(without_augmentation)))
        and len(files[0].read_bytes()) > 100
    )
    os.utime(keeping.path(0), ns=(1, 1))
    load_example.cache_clear()
    assert len(keeping.item(0, rng).faces) and len(list(keep.iterdir())) == len(files) + 1


def test_a_caption_that_changes_is_heard_although_the_mesh_is_kept(folder):
    (folder / "0.txt").write_text("a ladder")
    source = MeshDataConfig(path=str(folder)).full()
    assert item(source).caption == "a ladder"
    (folder / "0.txt").write_text("steps")
    assert item(source).caption == "steps"


def test_a_run_replaces_a_broken_file_and_lists_it(folder):
    (folder / "1.obj").write_text("dear reader")
    (folder / "2.obj").write_text("v 0 0 0\nv 1 0 0\nv 2 0 0\nf 1 2 3\n")
    stream = TrainLoader(
        MeshDataConfig(path=str(folder), val_fraction=0).build().train, seed=0, batch_size=4
    )
    (batch,) = next(stream.micro_batches(0, 1, 0, 1))
    assert dict(batch.rejected).keys() == {"1.obj", "2.obj"} and set(batch.names) == {
        "0.obj",
        "3.obj",
    }
    reasons = " ".join(reason for _, reason in batch.rejected)
    assert "it is no OBJ" in reasons and "its faces are too small for 128 steps" in reasons


def test_a_file_that_is_not_there_is_unreadable(tmp_path):
    (tmp_path / "gone.obj").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UnreadableFile, match="gone.obj: the file cannot be opened"):
        item(MeshDataConfig(path=str(tmp_path)).full())


# ---- what is found and what is refused


def test_a_source_can_be_sent_to_a_worker(folder):
    source = MeshDataConfig(path=str(folder)).build().train
    copy = pickle.loads(pickle.dumps(source))
    assert names(copy) == names(source) and np.array_equal(item(copy).faces, item(source).faces)


def test_the_two_sides_share_no_file_and_leave_none_out(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.glb").touch()
    split = MeshDataConfig(path=str(tmp_path), val_fraction=0.2).build()
    assert sorted(names(split.train) + names(split.validation)) == sorted(
        f"{n}.glb" for n in range(30)
    )


def test_toys_held_out_are_others():
    split = MeshDataConfig(num_synthetic=40, val_fraction=0.1, bins=32).build()
    assert (len(split.train), len(split.validation)) == (40, 4)
    assert not set(names(split.train)) & set(names(split.validation))
    assert len(MeshDataConfig(num_synthetic=7).full()) == 7


def test_a_folder_of_other_things_is_refused_with_what_is_looked_for(tmp_path):
    (tmp_path / "song.mp3").touch()
    with pytest.raises(
        UserError, match=r"holds no meshes: files ending in \.obj, .*there are only 1 \.mp3"
    ):
        MeshDataConfig(path=str(tmp_path)).build()


@pytest.mark.parametrize("path", [None, "meshes"])
@pytest.mark.parametrize(
    ("missing", "settings"), [("trimesh", {}), ("fast_simplification", {"large": "decimate"})]
)
def test_without_the_libraries_a_run_is_refused_at_its_start(monkeypatch, path, missing, settings):
    monkeypatch.setitem(sys.modules, missing, None)
    for open_it in (
        MeshDataConfig(path=path, **settings).build,
        MeshDataConfig(path=path, **settings).full,
    ):
        with pytest.raises(UserError, match=r"Install tessera\[mesh\]"):
            open_it()


@pytest.mark.parametrize(
    "setting",
    [
        {"bins": 1},
        {"max_faces": 0},
        {"max_faces": 20},
        {"scale": 1.0},
        {"scale": -0.1},
        {"turn": 181.0},
        {"turn": float("nan")},
        {"jitter": 1.5},
        {"val_fraction": 1.0},
        {"toys": 0},
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=name):
        MeshDataConfig(**setting)


def test_quads_are_not_simplified():
    with pytest.raises(ValueError, match='large="decimate" does not go with polygons="quads"'):
        MeshDataConfig(on_large="decimate", polygons="quads")


def test_the_transform_says_how_a_mesh_is_prepared():
    config = MeshDataConfig(bins=64, max_faces=100, scale=0.2, turn=10.0, jitter=0.1)
    expected = {"bins": 64, "max_faces": 100, "large": "skip", "polygons": "triangles", "up": None}
    assert config.preprocessing() == config.without_augmentation().preprocessing() == expected
    assert config.without_augmentation() == MeshDataConfig(bins=64, max_faces=100)
