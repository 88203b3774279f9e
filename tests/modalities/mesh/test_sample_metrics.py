"""The judge of meshes is not blind: what has not ended, is torn, or was learnt by heart is called
so, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tessera.data.sample_metrics import Samples
from tessera.modalities.mesh import sample_metrics as mesh_judge
from tessera.modalities.mesh.canonical import MeshExample
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.reconstruction import chamfer
from tessera.modalities.mesh.sample_metrics import Crowd, MeshSampleMetric, is_whole
from tessera.modalities.mesh.synthetic import imagine

BINS, ROOM = 64, 400
SOURCE = MeshDataConfig(bins=BINS, toys=6).full()


def learnt(index: int) -> Mesh:
    return SOURCE.item(index, np.random.default_rng(0)).mesh(BINS)


def unseen(number: int) -> Mesh:
    mesh = imagine(1, number).mesh
    return Mesh(mesh.vertices, mesh.triangles())


def codes(faces: int, room: int = ROOM) -> torch.Tensor:
    """Of a mesh of so many faces, in a grid of so many."""
    grid = torch.full((room, 3, 2), -1)
    grid[:faces] = 7
    return grid


def says(meshes: list[Mesh], written: list[torch.Tensor] | None = None) -> dict[str, float]:
    tokens = written or [codes(len(mesh.faces)) for mesh in meshes]
    found = MeshSampleMetric(SOURCE, BINS)(Samples(meshes, [""] * len(meshes), tokens))
    assert found.of == len(meshes)
    return found.numbers


def corners(example: MeshExample) -> torch.Tensor:
    return torch.from_numpy(example.vertices[example.faces]).flatten(1)


EMPTY = Mesh(np.zeros((0, 3)), np.zeros((0, 3), np.int64))
CORNERS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, -1, 0.0]])
CROWDED = Mesh(CORNERS, np.array([[0, 1, 2], [0, 1, 3], [0, 1, 4]]))
OPEN = Mesh(CORNERS, CROWDED.faces[:2])


def test_a_mesh_that_fills_the_room_was_stopped_and_is_not_valid():
    mesh = unseen(0)
    numbers = says(
        [mesh, mesh], [codes(len(mesh.faces)), codes(len(mesh.faces), room=len(mesh.faces))]
    )
    assert numbers["eos_rate"] == 0.5 and numbers["valid_rate"] == 0.5


def test_a_mesh_of_which_a_face_had_to_be_taken_away_is_not_valid():
    mesh = unseen(0)
    numbers = says([mesh, mesh], [codes(len(mesh.faces)), codes(len(mesh.faces) + 1)])
    assert numbers["eos_rate"] == 1 and numbers["valid_rate"] == 0.5


@pytest.mark.parametrize(
    ("mesh", "whole"),
    [(EMPTY, False), (CROWDED, False), (OPEN, True)],
    ids=["empty", "crowded", "open"],
)
def test_a_mesh_is_a_surface_that_may_be_open(mesh, whole):
    assert is_whole(mesh, len(mesh.faces)) == whole
    assert says([mesh])["valid_rate"] == float(whole)


def test_what_was_learnt_by_heart_is_not_new_however_large_it_is_and_wherever_it_stands():
    known = learnt(2)
    moved = Mesh(known.vertices * 3 + 1, known.faces[::-1])
    numbers = says([known, moved])
    assert numbers["novelty"] == 0 and numbers["nearest_chamfer_bins"] == 0


def test_what_was_never_seen_is_new_and_as_far_away_as_the_measure_of_the_task_says():
    mesh = unseen(3)
    sample = MeshExample.of(mesh, BINS, "")
    examples = [SOURCE.item(i, np.random.default_rng(0)) for i in range(len(SOURCE))]
    by_hand = [float(chamfer(corners(sample), corners(example))) for example in examples]
    numbers = says([mesh])
    assert numbers["novelty"] == 1
    assert (
        numbers["nearest_chamfer_bins"] == pytest.approx(min(by_hand), rel=1e-5)
        and min(by_hand) > 0.5
    )


def test_the_nearest_is_the_median_over_samples_and_a_half_known_set_is_half_new():
    alone = [says([unseen(number)])["nearest_chamfer_bins"] for number in (3, 4)]
    numbers = says([learnt(0), learnt(1), unseen(3), unseen(4)])
    assert numbers["novelty"] == 0.5
    assert numbers["nearest_chamfer_bins"] == pytest.approx(min(alone) / 2)


def test_where_there_is_no_mesh_at_all_nothing_is_said_of_what_is_new():
    assert says([EMPTY, EMPTY]) == {"eos_rate": 1.0, "valid_rate": 0.0, "training_valid_rate": 1.0}


def test_samples_without_a_face_do_not_count_as_new():
    assert says([EMPTY, learnt(0)])["novelty"] == 0


def test_the_training_meshes_own_faults_are_told_and_those_that_cannot_be_read_are_passed_over(
    tmp_path,
):
    for name, mesh in (("crowded", CROWDED), ("open", OPEN)):
        (tmp_path / f"{name}.obj").write_text(mesh.as_obj())
    (tmp_path / "broken.obj").write_text("no mesh")
    judge = MeshDataConfig(path=str(tmp_path), bins=BINS, val_fraction=0.0, scale=0.3).judge()
    assert judge(Samples([OPEN], [""], [codes(2)])).numbers["training_valid_rate"] == 0.5


def test_however_few_distances_fit_in_memory_they_are_the_same(monkeypatch):
    meshes = [SOURCE.item(i, np.random.default_rng(0)).vertices for i in range(len(SOURCE))]
    crowd, vertices = Crowd.of(meshes), learnt(0).vertices * BINS
    whole = crowd.chamfer(vertices)
    for room in (1, 5000):
        monkeypatch.setattr(mesh_judge, "AT_ONCE", room)
        assert len(list(crowd.handfuls(len(vertices)))) > 1
        assert np.allclose(crowd.chamfer(vertices), whole)
    assert len(whole) == 6
