"""The canonical form: integer coordinates in one order, whatever the input's order and size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.errors import UnreadableFile
from tessera.modalities.mesh.adjacency import count_edges
from tessera.modalities.mesh.canonical import CanonicalMesh, canonicalize, dequantize_vertices
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.simplify import BOX_CORNERS, BOX_TRIANGLES
from tessera.modalities.mesh.synthetic import generate_object


def random_mesh(seed: int, corners: int = 3, count: int = 30) -> Mesh:
    """Return a mesh on a coarse lattice of random proportions, so that many vertices coincide or
    are collinear."""
    rng = np.random.default_rng(seed)
    vertices = rng.integers(0, 7, (count, 3)) * rng.uniform(0.01, 5, 3) + rng.normal(size=3) * 10
    return Mesh(vertices, np.array([rng.permutation(count)[:corners] for _ in range(count)]))


def box(width: float, depth: float, height: float) -> Mesh:
    return Mesh(BOX_CORNERS * [width, depth, height], BOX_TRIANGLES)


def equal(one: CanonicalMesh, other: CanonicalMesh) -> bool:
    return np.array_equal(one.vertices, other.vertices) and np.array_equal(one.faces, other.faces)


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.sampled_from([3, 4]), st.sampled_from([2, 3, 8, 63, 64, 128]))
def test_canonicalization_is_idempotent(seed, corners, bins):
    try:
        canonical = canonicalize(random_mesh(seed, corners), bins)
    except UnreadableFile:
        return
    assert equal(canonical, canonicalize(Mesh(canonical.vertices, canonical.faces), bins))
    assert equal(
        canonical,
        canonicalize(Mesh(dequantize_vertices(canonical.vertices, bins), canonical.faces), bins),
    )


@given(st.integers(0, 10**6))
def test_order_and_scale_of_the_input_do_not_matter(seed):
    mesh, rng = random_mesh(seed), np.random.default_rng(seed + 1)
    order = rng.permutation(len(mesh.vertices))
    inverse = np.argsort(order)
    rotated = np.stack([np.roll(face, rng.integers(3)) for face in inverse[mesh.faces]])
    # A power of two keeps every bit, so no coordinate moves to another bin.
    shuffled = Mesh(mesh.vertices[order] * 4, rotated[rng.permutation(len(rotated))])
    assert equal(canonicalize(mesh, 64), canonicalize(shuffled, 64))


def test_vertices_are_sorted_by_z_then_y_then_x():
    canonical = canonicalize(random_mesh(3), 64)
    rows = canonical.vertices[:, ::-1].tolist()
    assert rows == sorted(rows) and len({tuple(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("corners", [3, 4])
def test_faces_start_at_their_lowest_vertex_and_are_sorted(corners):
    faces = canonicalize(random_mesh(3, corners), 64).faces
    assert (faces[:, 0] == faces.min(axis=1)).all() and faces.tolist() == sorted(faces.tolist())
    assert len({tuple(sorted(face)) for face in faces.tolist()}) == len(faces)
    assert set(faces.ravel()) == set(range(faces.max() + 1)), "every vertex belongs to a face"


def test_a_face_keeps_its_orientation():
    mesh = Mesh(np.array([[0.0, 0, 1], [1, 0, 0], [0, 1, 0]]), np.array([[0, 1, 2]]))
    for faces in ([[0, 1, 2]], [[1, 2, 0]], [[2, 0, 1]]):
        canonical = canonicalize(Mesh(mesh.vertices, np.array(faces)), 8)
        one, two, three = canonical.vertices[canonical.faces[0]]
        assert (np.cross(two - one, three - one) > 0).all()


def test_the_longest_side_fills_the_cube_and_the_others_are_centred():
    for bins in (8, 9, 128):
        canonical = canonicalize(
            Mesh(
                np.array([[0.0, 0, 0], [10, 0, 0], [10, 4, 0], [0, 4, 1]]),
                np.array([[0, 1, 2], [0, 2, 3]]),
            ),
            bins,
        )
        low, high = canonical.vertices.min(axis=0), canonical.vertices.max(axis=0)
        assert (low[0], high[0]) == (0, bins - 1) and (low + high)[1] == bins - 1
        assert abs((high - low)[1] - 0.4 * (bins - 1)) <= 1


@pytest.mark.parametrize("bins", [127, 128])
def test_coordinates_between_two_bins_are_rounded_away_from_the_centre(bins):
    # Centred, the ends of a side of this many bins are between two bins.
    width = 10 if bins % 2 == 0 else 11
    for offset in np.arange(100) / 10:
        corners = np.array([[0, 0], [bins - 1, 0], [bins - 1, width], [0, width]]) / 10 + offset
        vertices = np.column_stack([corners, np.zeros(4)])
        depth = canonicalize(Mesh(vertices, np.array([[0, 1, 2], [0, 2, 3]])), bins).vertices[:, 1]
        assert (depth.min() + depth.max(), np.ptp(depth)) == (bins - 1, width + 1)


def test_every_coordinate_moves_by_at_most_half_a_bin():
    mesh = generate_object(0, 5).mesh
    canonical = canonicalize(mesh, 128)
    low, high = mesh.vertices.min(axis=0), mesh.vertices.max(axis=0)
    exact = (mesh.vertices - (low + high) / 2) / (high - low).max() * 127 + 63.5
    nearest = abs(exact[:, None] - canonical.vertices[None]).max(axis=2).min(axis=1)
    assert nearest.max() <= 0.5 + 1e-5


def test_degenerate_duplicate_and_empty_faces_are_removed():
    vertices = np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0], [0.5, 0, 0], [1, 1, 1]])
    faces = np.array([[0, 1, 2], [0, 3, 2], [0, 1, 1], [1, 0, 2], [3, 1, 2], [1, 5, 2]])
    canonical = canonicalize(Mesh(vertices, faces), 16)
    assert len(canonical.faces) == 2 and len(canonical.vertices) == 4


def test_remaining_faces_are_scaled_to_the_whole_cube():
    """A removed sliver, a hundred times as long as the rest, does not affect the scale."""
    vertices = np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [50, 0, 0], [100, 0, 0]])
    canonical = canonicalize(Mesh(vertices, np.array([[0, 1, 2], [1, 3, 4]])), 300)
    assert len(canonical.faces) == 1 and canonical.vertices.max() == 299


def test_a_board_thinner_than_a_bin_stays_a_closed_board():
    board = box(1.0, 0.7, 0.002)
    canonical = canonicalize(board, 64)
    assert len(canonical.vertices) == 8 and count_edges(canonical.faces).watertight
    heights = canonical.vertices[:, 2]
    assert np.ptp(heights) == 1 and len(canonical.faces) == 12


def test_near_vertices_keep_apart_unless_the_grid_is_full():
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 1, (60, 3)) * 0.1 + 0.45
    vertices = np.concatenate([points, [[0, 0, 0], [1, 1, 1]]])
    faces = np.array([[i, i + 1, 60 + i % 2] for i in range(59)])
    assert len(canonicalize(Mesh(vertices, faces), 64).vertices) == 62
    assert len(canonicalize(Mesh(vertices, faces), 4).vertices) < 62


def test_vertices_at_the_same_position_are_merged():
    twice = Mesh(np.repeat(box(1, 1, 1).vertices, 2, axis=0), box(1, 1, 1).faces * 2 + 1)
    both = Mesh(twice.vertices, np.concatenate([twice.faces[:6], twice.faces[6:] - 1]))
    assert len(canonicalize(both, 16).vertices) == 8


def test_the_slit_of_a_flat_triangle_is_closed_by_its_neighbour():
    """The side of a box is cut by a needle whose middle vertex rounds onto its long side."""
    vertices = np.array(
        [[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0.5, 0.001, 0], [0.5, 0.5, 1]]
    )
    base = [[0, 4, 3], [4, 1, 2], [4, 2, 3], [0, 1, 4]]
    sides = [[1, 0, 5], [2, 1, 5], [3, 2, 5], [0, 3, 5]]
    mesh = Mesh(vertices, np.array([face[::-1] for face in base] + [face[::-1] for face in sides]))
    assert count_edges(mesh.faces).watertight
    canonical = canonicalize(mesh, 33)
    assert count_edges(canonical.faces).watertight


def test_a_mesh_without_remaining_faces_raises_an_error():
    line = Mesh(np.array([[0.0, 0, 0], [1, 1, 1], [2, 2, 2]]), np.array([[0, 1, 2]]))
    with pytest.raises(UnreadableFile, match="its faces are too small for 64 bins: none is left"):
        canonicalize(line, 64)


def test_a_shift_is_limited_by_the_cube():
    mesh = generate_object(0, 0).mesh
    original = canonicalize(mesh, 64)
    for shift in ([0.1, -0.1, 0.1], [9.0, 9.0, 9.0], [-9.0, -9.0, -9.0]):
        moved = canonicalize(mesh, 64, np.array(shift))
        assert (
            np.array_equal(moved.faces, original.faces)
            and 0 <= moved.vertices.min() <= moved.vertices.max() < 64
        )
        assert len(np.unique(moved.vertices - original.vertices, axis=0)) == 1
    assert canonicalize(mesh, 64, np.full(3, 9.0)).vertices.max(axis=0).tolist() == [63, 63, 63]
