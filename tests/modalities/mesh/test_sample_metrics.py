"""Sample metrics of meshes: unfinished, invalid and memorized samples are recognized."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tessera.data.sample_metrics import Samples
from tessera.modalities.mesh import sample_metrics
from tessera.modalities.mesh.canonical import MeshExample
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.reconstruction import chamfer_distance
from tessera.modalities.mesh.sample_metrics import MeshSampleMetric, ReferenceMeshes, is_valid
from tessera.modalities.mesh.synthetic import generate_object

BINS, ROOM = 64, 400
DATASET = MeshDataConfig(bins=BINS, num_synthetic=6).full()


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


def compute(meshes: list[Mesh], tokens: list[torch.Tensor] | None = None) -> dict[str, float]:
    tokens = tokens or [codes(len(mesh.faces)) for mesh in meshes]
    found = MeshSampleMetric(DATASET, BINS)(Samples(meshes, [""] * len(meshes), tokens))
    return found.values


def corners(example: MeshExample) -> torch.Tensor:
    return torch.from_numpy(example.vertices[example.faces]).flatten(1)


EMPTY = Mesh(np.zeros((0, 3)), np.zeros((0, 3), np.int64))
CORNERS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, -1, 0.0]])
NON_MANIFOLD = Mesh(CORNERS, np.array([[0, 1, 2], [0, 1, 3], [0, 1, 4]]))
OPEN = Mesh(CORNERS, NON_MANIFOLD.faces[:2])


def test_a_mesh_that_fills_the_grid_did_not_end_and_is_invalid():
    mesh = new_mesh(0)
    numbers = compute(
        [mesh, mesh], [codes(len(mesh.faces)), codes(len(mesh.faces), room=len(mesh.faces))]
    )
    assert numbers["eos_rate"] == 0.5 and numbers["valid_rate"] == 0.5


def test_a_mesh_with_a_removed_face_is_invalid():
    mesh = new_mesh(0)
    numbers = compute([mesh, mesh], [codes(len(mesh.faces)), codes(len(mesh.faces) + 1)])
    assert numbers["eos_rate"] == 1 and numbers["valid_rate"] == 0.5


@pytest.mark.parametrize(
    ("mesh", "valid"),
    [(EMPTY, False), (NON_MANIFOLD, False), (OPEN, True)],
    ids=["empty", "non-manifold", "open"],
)
def test_a_valid_mesh_is_manifold_and_may_be_open(mesh, valid):
    assert is_valid(mesh, len(mesh.faces)) == valid
    assert compute([mesh])["valid_rate"] == float(valid)


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


def test_without_any_faces_novelty_is_not_reported():
    assert compute([EMPTY, EMPTY]) == {
        "eos_rate": 1.0,
        "valid_rate": 0.0,
        "training_valid_rate": 1.0,
    }


def test_samples_without_a_face_do_not_count_as_new():
    assert compute([EMPTY, training_mesh(0)])["novelty"] == 0


def test_defects_of_readable_training_meshes_are_reported(tmp_path):
    for name, mesh in (("non-manifold", NON_MANIFOLD), ("open", OPEN)):
        (tmp_path / f"{name}.obj").write_text(mesh.to_obj())
    (tmp_path / "broken.obj").write_text("no mesh")
    data = MeshDataConfig(path=str(tmp_path), bins=BINS, val_fraction=0.0, scale=0.3)
    [metric] = data.sample_metrics()
    assert metric(Samples([OPEN], [""], [codes(2)])).values["training_valid_rate"] == 0.5


def test_distances_do_not_depend_on_the_chunk_size(monkeypatch):
    meshes = [DATASET.item(i, np.random.default_rng(0)).vertices for i in range(len(DATASET))]
    reference, vertices = ReferenceMeshes.from_vertices(meshes), training_mesh(0).vertices * BINS
    expected = reference.chamfer(vertices)
    for room in (1, 5000):
        monkeypatch.setattr(sample_metrics, "MAX_DISTANCES", room)
        assert len(list(reference.chunks(len(vertices)))) > 1
        assert np.allclose(reference.chamfer(vertices), expected)
    assert len(expected) == 6
