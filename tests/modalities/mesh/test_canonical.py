"""A mesh is written down in one way only: whole numbers in one order, whatever order and size it
came in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.errors import UnreadableFile
from tessera.modalities.mesh.canonical import Canonical, back, canonical
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.synthetic import imagine


def random_mesh(seed: int, corners: int = 3, count: int = 30) -> Mesh:
    """Vertices on a coarse lattice, in cubes of all proportions, so that many fall together and lie
    on lines."""
    rng = np.random.default_rng(seed)
    vertices = rng.integers(0, 7, (count, 3)) * rng.uniform(0.01, 5, 3) + rng.normal(size=3) * 10
    return Mesh(vertices, np.array([rng.permutation(count)[:corners] for _ in range(count)]))


def same(one: Canonical, other: Canonical) -> bool:
    return np.array_equal(one.vertices, other.vertices) and np.array_equal(one.faces, other.faces)


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.sampled_from([3, 4]), st.sampled_from([2, 3, 8, 63, 64, 128]))
def test_what_has_been_written_down_is_written_down_again_as_it_is(seed, corners, bins):
    try:
        written = canonical(random_mesh(seed, corners), bins)
    except UnreadableFile:
        return
    assert same(written, canonical(Mesh(written.vertices, written.faces), bins))
    assert same(written, canonical(Mesh(back(written.vertices, bins), written.faces), bins))


@given(st.integers(0, 10**6))
def test_neither_order_nor_size_nor_place_matters(seed):
    mesh, rng = random_mesh(seed), np.random.default_rng(seed + 1)
    order = rng.permutation(len(mesh.vertices))
    where = np.argsort(order)
    turned = np.stack([np.roll(face, rng.integers(3)) for face in where[mesh.faces]])
    # Powers of two keep every bit, so that nothing falls to the other side of a step.
    shuffled = Mesh(mesh.vertices[order] * 4, turned[rng.permutation(len(turned))])
    assert same(canonical(mesh, 64), canonical(shuffled, 64))


def test_vertices_are_sorted_by_height_then_depth_then_width():
    written = canonical(random_mesh(3), 64)
    rows = written.vertices[:, ::-1].tolist()
    assert rows == sorted(rows) and len({tuple(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("corners", [3, 4])
def test_faces_begin_with_their_lowest_vertex_and_are_sorted(corners):
    faces = canonical(random_mesh(3, corners), 64).faces
    assert (faces[:, 0] == faces.min(axis=1)).all() and faces.tolist() == sorted(faces.tolist())
    assert len({tuple(sorted(face)) for face in faces.tolist()}) == len(faces)
    assert set(faces.ravel()) == set(range(faces.max() + 1)), "every vertex belongs to a face"


def test_a_face_is_turned_but_never_turned_over():
    mesh = Mesh(np.array([[0.0, 0, 1], [1, 0, 0], [0, 1, 0]]), np.array([[0, 1, 2]]))
    for faces in ([[0, 1, 2]], [[1, 2, 0]], [[2, 0, 1]]):
        written = canonical(Mesh(mesh.vertices, np.array(faces)), 8)
        one, two, three = written.vertices[written.faces[0]]
        assert (np.cross(two - one, three - one) > 0).all()


def test_the_longest_side_fills_the_cube_and_the_others_are_centred():
    for bins in (8, 9, 128):
        written = canonical(
            Mesh(
                np.array([[0.0, 0, 0], [10, 0, 0], [10, 4, 0], [0, 4, 1]]),
                np.array([[0, 1, 2], [0, 2, 3]]),
            ),
            bins,
        )
        low, high = written.vertices.min(axis=0), written.vertices.max(axis=0)
        assert (low[0], high[0]) == (0, bins - 1) and (low + high)[1] == bins - 1
        assert abs((high - low)[1] - 0.4 * (bins - 1)) <= 1


@pytest.mark.parametrize("bins", [127, 128])
def test_what_lies_between_two_steps_goes_outward_however_its_last_bits_were_rounded(bins):
    width = (
        10 if bins % 2 == 0 else 11
    )  # of so many steps, the ends of which lie between two when they are centred
    for offset in np.arange(100) / 10:
        corners = np.array([[0, 0], [bins - 1, 0], [bins - 1, width], [0, width]]) / 10 + offset
        vertices = np.column_stack([corners, np.zeros(4)])
        depth = canonical(Mesh(vertices, np.array([[0, 1, 2], [0, 2, 3]])), bins).vertices[:, 1]
        assert (depth.min() + depth.max(), np.ptp(depth)) == (bins - 1, width + 1)


def test_every_coordinate_is_within_half_a_step_of_where_it_was():
    toy = imagine(0, 5).mesh
    written = canonical(toy, 128)
    low, high = toy.vertices.min(axis=0), toy.vertices.max(axis=0)
    exact = (toy.vertices - (low + high) / 2) / (high - low).max() * 127 + 63.5
    nearest = abs(exact[:, None] - written.vertices[None]).max(axis=2).min(axis=1)
    assert nearest.max() <= 0.5 + 1e-5


def test_what_collapses_repeats_or_has_no_area_goes():
    vertices = np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0.001, 0, 0], [0.5, 0, 0], [1, 1, 1]])
    faces = np.array([[0, 1, 2], [0, 3, 2], [0, 4, 1], [1, 0, 2], [3, 1, 2], [1, 5, 2]])
    written = canonical(Mesh(vertices, faces), 16)
    assert len(written.faces) == 2 and len(written.vertices) == 4


def test_what_is_left_has_the_whole_cube_to_itself():
    """A sliver a hundred times as long as the rest collapses, and would otherwise keep the rest
    small for ever."""
    vertices = np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [100, 0, 0], [100, 0.001, 0]])
    written = canonical(Mesh(vertices, np.array([[0, 1, 2], [1, 3, 4]])), 300)
    assert len(written.faces) == 1 and written.vertices.max() == 299


def test_a_mesh_of_which_nothing_is_left_is_refused():
    line = Mesh(np.array([[0.0, 0, 0], [1, 1, 1], [2, 2, 2]]), np.array([[0, 1, 2]]))
    with pytest.raises(UnreadableFile, match="its faces are too small for 64 steps: none is left"):
        canonical(line, 64)


def test_a_shift_moves_as_far_as_there_is_room():
    mesh = imagine(0, 0).mesh
    still = canonical(mesh, 64)
    for shift in ([0.1, -0.1, 0.1], [9.0, 9.0, 9.0], [-9.0, -9.0, -9.0]):
        moved = canonical(mesh, 64, np.array(shift))
        assert (
            np.array_equal(moved.faces, still.faces)
            and 0 <= moved.vertices.min() <= moved.vertices.max() < 64
        )
        assert len(np.unique(moved.vertices - still.vertices, axis=0)) == 1
    assert canonical(mesh, 64, np.full(3, 9.0)).vertices.max(axis=0).tolist() == [63, 63, 63]
