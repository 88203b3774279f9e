"""Adjacent faces: the correct pairs in both directions, found in the time that sorting takes."""

from __future__ import annotations

import math
import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tessera.modalities.mesh.adjacency import MAX_FACES_PER_EDGE, count_edges, find_adjacent_faces


def edges_of(face: list[int]) -> set[frozenset[int]]:
    return {frozenset(pair) for pair in zip(face, [*face[1:], face[0]])}


def brute_force(faces_FK: np.ndarray) -> list[list[int]]:
    faces = faces_FK.tolist()
    pairs = {
        (a, b)
        for a, b in combinations(range(len(faces)), 2)
        if edges_of(faces[a]) & edges_of(faces[b])
    }
    return sorted([list(pair) for pair in pairs] + [list(pair[::-1]) for pair in pairs])


def grid_mesh(rows: int, columns: int, corners: int = 3) -> np.ndarray:
    """Return a flat grid of quads, or of two triangles per cell."""
    index = np.arange((rows + 1) * (columns + 1)).reshape(rows + 1, columns + 1)
    quads = np.stack(
        [index[:-1, :-1], index[:-1, 1:], index[1:, 1:], index[1:, :-1]], axis=-1
    ).reshape(-1, 4)
    return quads if corners == 4 else np.concatenate([quads[:, [0, 1, 2]], quads[:, [0, 2, 3]]])


@given(
    arrays(
        np.int64, st.tuples(st.integers(1, 12), st.sampled_from([3, 4])), elements=st.integers(0, 7)
    )
)
def test_pairs_match_a_brute_force_search(faces):
    faces = faces[[len(set(face)) == len(face) for face in faces.tolist()]]
    most_shared = max(
        [
            sum(side in edges_of(face) for face in faces.tolist())
            for side in {edge for face in faces.tolist() for edge in edges_of(face)}
        ]
        or [0]
    )
    if most_shared <= MAX_FACES_PER_EDGE + 1:
        assert find_adjacent_faces(faces).tolist() == brute_force(faces)


@pytest.mark.parametrize("corners", [3, 4])
def test_pairs_are_sorted_symmetric_and_never_reflexive(corners):
    pairs = find_adjacent_faces(grid_mesh(5, 7, corners))
    assert pairs.dtype == np.int64 and pairs.tolist() == brute_force(grid_mesh(5, 7, corners))
    assert pairs.tolist() == sorted(pairs.tolist()) and (pairs[:, 0] != pairs[:, 1]).all()
    assert {tuple(pair) for pair in pairs.tolist()} == {
        tuple(pair[::-1]) for pair in pairs.tolist()
    }


def test_faces_that_share_two_edges_are_one_pair():
    assert find_adjacent_faces(np.array([[0, 1, 2, 3], [2, 1, 0, 4]])).tolist() == [[0, 1], [1, 0]]


def test_a_degenerate_face_is_not_adjacent_to_itself():
    assert find_adjacent_faces(np.array([[0, 1, 0], [0, 1, 2]])).tolist() == [[0, 1], [1, 0]]


def test_faces_without_shared_edges_have_no_pairs():
    for faces in (
        np.array([[0, 1, 2]]),
        np.array([[0, 1, 2], [2, 3, 4]]),
        np.zeros((0, 3), np.int64),
    ):
        assert find_adjacent_faces(faces).shape == (0, 2)


def test_pairs_around_a_non_manifold_edge_are_bounded():
    few = np.array([[0, 1, 2 + n] for n in range(MAX_FACES_PER_EDGE + 1)])
    assert find_adjacent_faces(few).tolist() == brute_force(few)
    many = np.array([[0, 1, 2 + n] for n in range(5000)])
    pairs = find_adjacent_faces(many)
    assert len(pairs) < 2 * MAX_FACES_PER_EDGE * len(many)
    assert set(pairs[:, 0]) == set(range(5000)), "every face has a pair"


def test_edges_are_counted_by_the_number_of_their_faces():
    cube = np.array(
        [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]]
    )
    assert count_edges(cube).watertight and count_edges(cube).shared == 12
    with_hole = count_edges(cube[:-1])
    assert (with_hole.boundary, with_hole.shared, with_hole.non_manifold, with_hole.watertight) == (
        4,
        8,
        0,
        False,
    )
    with_fin = count_edges(np.concatenate([cube, [[0, 1, 8, 9]]]))
    assert (with_fin.boundary, with_fin.non_manifold, with_fin.watertight) == (3, 1, False)


def test_twenty_thousand_faces_are_fast_and_time_is_subquadratic():
    seconds = {}
    for faces in (grid_mesh(50, 50), grid_mesh(100, 100), grid_mesh(200, 200)):
        taken = []
        for _ in range(5):
            started = time.process_time()
            find_adjacent_faces(faces)
            taken.append(time.process_time() - started)
        seconds[len(faces)] = min(taken)
    assert seconds[20_000] < 0.5
    assert math.log(seconds[80_000] / seconds[5_000], 16) < 1.5, "quadratic growth would be 2"
