"""Sample metrics of meshes: unfinished, invalid and memorized samples are recognized."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tessera.data.dataset import ExampleDataset
from tessera.data.sample_metrics import Samples
from tessera.modalities.mesh import sample_metrics
from tessera.modalities.mesh.canonical import MeshExample
from tessera.modalities.mesh.connectivity import intersecting_rate
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.point_clouds import head_noun
from tessera.modalities.mesh.reconstruction import chamfer_distance
from tessera.modalities.mesh.sample_metrics import MeshSampleMetric, ReferenceMeshes
from tessera.modalities.mesh.synthetic import generate_object

BINS, ROOM = 64, 400
DATASET = MeshDataConfig(bins=BINS, num_synthetic=6).full()
LARGER = MeshDataConfig(bins=BINS, num_synthetic=60).full()


def training_mesh(index: int) -> Mesh:
    return DATASET.item(index, np.random.default_rng(0)).to_mesh(BINS)


def new_mesh(number: int) -> Mesh:
    mesh = generate_object(1, number).mesh
    return Mesh(mesh.vertices, mesh.triangles())


def codes(faces: int, room: int = ROOM) -> torch.Tensor:
    """Return the codes of a mesh with this many faces in a grid for `room` faces."""
    grid = torch.full((room, 3, 2), -1)
    grid[:faces] = 7
    return grid


def compute(
    meshes: list[Mesh],
    tokens: list[torch.Tensor] | None = None,
    prompts: list[str] | None = None,
    dataset: ExampleDataset = DATASET,
) -> dict[str, float]:
    tokens = tokens or [codes(len(mesh.faces)) for mesh in meshes]
    samples = Samples(meshes, prompts or [""] * len(meshes), tokens)
    return MeshSampleMetric(dataset, BINS)(samples).values


def corners(example: MeshExample) -> torch.Tensor:
    return torch.from_numpy(example.vertices[example.faces]).flatten(1)


EMPTY = Mesh(np.zeros((0, 3)), np.zeros((0, 3), np.int64))


def break_apart(mesh: Mesh) -> Mesh:
    """Return the same triangles, none of which shares a vertex with another."""
    corners = mesh.vertices[mesh.triangles()]
    centres = corners.mean(axis=1, keepdims=True)
    shrunk = centres + (corners - centres) * 0.8
    return Mesh(shrunk.reshape(-1, 3), np.arange(3 * len(corners)).reshape(-1, 3))


def test_a_mesh_that_fills_the_grid_did_not_end_and_is_invalid():
    mesh = new_mesh(1)
    full = codes(len(mesh.faces), room=len(mesh.faces))
    numbers = compute([mesh, mesh], [codes(len(mesh.faces)), full], dataset=LARGER)
    assert numbers["eos_rate"] == 0.5 and numbers["valid_rate"] == 0.5


def test_loose_triangles_in_the_shape_of_a_real_mesh_are_invalid():
    mesh = new_mesh(1)
    numbers = compute([mesh, break_apart(mesh), EMPTY], dataset=LARGER)
    assert numbers["valid_rate"] == pytest.approx(1 / 3) and numbers["valid_rate_real"] > 0.8
    assert numbers["small_parts"] == 0.5 and numbers["small_parts_real"] == 0
    assert numbers["boundary"] == 0.5 and numbers["watertight_rate"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("defect", ["missing", "flipped", "doubled"])
def test_defects_that_real_meshes_lack_make_a_mesh_invalid(defect):
    mesh = new_mesh(1)
    vertices, faces = mesh.vertices, mesh.faces.copy()
    if defect == "missing":
        faces = faces[4:]
    elif defect == "flipped":
        faces[:4] = faces[:4, ::-1]
    else:  # a fin on every edge of some faces
        apex = vertices.mean(axis=0)
        vertices = np.concatenate([vertices, [apex]])
        fins = [[a, b, len(vertices) - 1] for a, b, _ in faces[:6].tolist()]
        faces = np.concatenate([faces, fins])
    assert compute([Mesh(vertices, faces), mesh], dataset=LARGER)["valid_rate"] == 0.5


def test_the_category_of_a_prompt_is_recognized_and_a_wrong_one_counted():
    dataset = MeshDataConfig(bins=BINS, num_synthetic=120).full()
    made = [generate_object(1, number) for number in range(24)]
    meshes = [Mesh(one.mesh.vertices, one.mesh.triangles()) for one in made]
    prompts = [one.caption for one in made]
    right = compute(meshes, prompts=prompts, dataset=dataset)
    wrong = compute(meshes, prompts=prompts[1:] + prompts[:1], dataset=dataset)
    assert right["category_accuracy"] > 0.6 > 0.4 > wrong["category_accuracy"]
    assert right["category_accuracy_chance"] == 1 / 8


def test_real_meshes_are_hard_to_tell_apart_and_copies_of_one_cover_little():
    real = [new_mesh(number) for number in range(24)]
    likely, same = compute(real, dataset=LARGER), compute([real[0]] * 24, dataset=LARGER)
    assert likely["coverage"] > 4 * same["coverage"]
    assert likely["min_matching_distance"] < same["min_matching_distance"]
    assert likely["nearest_neighbour_accuracy"] < 0.8 < same["nearest_neighbour_accuracy"]


@pytest.mark.parametrize(
    ("caption", "noun"),
    [
        ("a wide table with four legs", "table"),
        ("rattan sofa, seat, couch", "sofa"),
        ("stairs", "stairs"),
        ("", ""),
        ("  ,", ""),
    ],
)
def test_the_head_noun_of_a_caption(caption, noun):
    assert head_noun(caption) == noun


def test_crossing_faces_are_counted_and_touching_ones_are_not():
    flat = np.array([[[0.0, 0, 0], [4, 0, 0], [0, 4, 0]]])
    through = np.array([[[1.0, 1, -1], [1, 1, 1], [2, 1, 1]]])
    beside = np.array([[[4.0, 0, 0], [0, 4, 0], [4, 4, 3]]])
    assert intersecting_rate(np.concatenate([flat, through])) > 0
    assert intersecting_rate(np.concatenate([flat, beside])) == 0


def test_a_training_mesh_is_not_new_whatever_its_scale_and_position():
    known = training_mesh(2)
    moved = Mesh(known.vertices * 3 + 1, known.faces[::-1])
    numbers = compute([known, moved])
    assert numbers["novelty"] == 0 and numbers["nearest_chamfer_bins"] == 0


def test_an_unseen_mesh_is_new_at_the_expected_chamfer_distance():
    mesh = new_mesh(3)
    sample = MeshExample.from_mesh(mesh, BINS, "")
    examples = [DATASET.item(i, np.random.default_rng(0)) for i in range(len(DATASET))]
    expected = [float(chamfer_distance(corners(sample), corners(example))) for example in examples]
    numbers = compute([mesh])
    assert numbers["novelty"] == 1
    assert (
        numbers["nearest_chamfer_bins"] == pytest.approx(min(expected), rel=1e-5)
        and min(expected) > 0.5
    )


def test_novelty_is_a_fraction_and_the_distance_a_median():
    single = [compute([new_mesh(number)])["nearest_chamfer_bins"] for number in (3, 4)]
    numbers = compute([training_mesh(0), training_mesh(1), new_mesh(3), new_mesh(4)])
    assert numbers["novelty"] == 0.5
    assert numbers["nearest_chamfer_bins"] == pytest.approx(min(single) / 2)


def test_without_any_faces_only_real_meshes_are_reported():
    numbers = compute([EMPTY, EMPTY])
    assert numbers["eos_rate"] == 1 and numbers["valid_rate"] == 0
    assert "novelty" not in numbers and "coverage" not in numbers and "boundary" not in numbers


def test_samples_without_a_face_do_not_count_as_new():
    assert compute([EMPTY, training_mesh(0)])["novelty"] == 0


def test_open_training_meshes_make_open_samples_valid(tmp_path):
    """What is valid depends on the data, and unreadable files are left out."""
    for number in range(24):
        mesh = new_mesh(number)
        (tmp_path / f"{number}.obj").write_text(Mesh(mesh.vertices, mesh.faces[4:]).to_obj())
    (tmp_path / "broken.obj").write_text("no mesh")
    data = MeshDataConfig(path=str(tmp_path), bins=BINS, val_fraction=0.0, scale=0.3)
    [metric] = data.sample_metrics()
    sample = Mesh(new_mesh(1).vertices, new_mesh(1).faces[4:])
    values = metric(Samples([sample], [""], [codes(2)])).values
    assert values["valid_rate"] == 1 and values["watertight_rate_real"] == 0


def test_distances_do_not_depend_on_the_chunk_size(monkeypatch):
    meshes = [DATASET.item(i, np.random.default_rng(0)).vertices for i in range(len(DATASET))]
    reference, vertices = ReferenceMeshes.from_vertices(meshes), training_mesh(0).vertices * BINS
    expected = reference.chamfer(vertices)
    for room in (1, 5000):
        monkeypatch.setattr(sample_metrics, "MAX_DISTANCES", room)
        assert len(list(reference.chunks(len(vertices)))) > 1
        assert np.allclose(reference.chamfer(vertices), expected)
    assert len(expected) == 6
