"""Pairs of faces that share an edge: the right ones, each in both directions, and found in the time
that sorting takes."""

from __future__ import annotations

import math
import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tessera.modalities.mesh.adjacency import MOST_AROUND_AN_EDGE, count_edges, face_pairs


def sides(face) -> set[frozenset[int]]:
    return {frozenset(pair) for pair in zip(face, [*face[1:], face[0]])}


def by_definition(faces) -> list[list[int]]:
    faces = faces.tolist()
    pairs = {
        (a, b) for a, b in combinations(range(len(faces)), 2) if sides(faces[a]) & sides(faces[b])
    }
    return sorted([list(pair) for pair in pairs] + [list(pair[::-1]) for pair in pairs])


def sheet(rows: int, columns: int, corners: int = 3) -> np.ndarray:
    """A flat grid, of quads or of two triangles in each."""
    number = np.arange((rows + 1) * (columns + 1)).reshape(rows + 1, columns + 1)
    quads = np.stack(
        [number[:-1, :-1], number[:-1, 1:], number[1:, 1:], number[1:, :-1]], axis=-1
    ).reshape(-1, 4)
    return quads if corners == 4 else np.concatenate([quads[:, [0, 1, 2]], quads[:, [0, 2, 3]]])


@given(
    arrays(
        np.int64, st.tuples(st.integers(1, 12), st.sampled_from([3, 4])), elements=st.integers(0, 7)
    )
)
def test_pairs_are_those_that_share_an_edge(faces):
    faces = faces[[len(set(face)) == len(face) for face in faces.tolist()]]
    crowd = max(
        [
            sum(side in sides(face) for face in faces.tolist())
            for side in {s for f in faces.tolist() for s in sides(f)}
        ]
        or [0]
    )
    if crowd <= MOST_AROUND_AN_EDGE + 1:
        assert face_pairs(faces).tolist() == by_definition(faces)


@pytest.mark.parametrize("corners", [3, 4])
def test_pairs_are_sorted_go_both_ways_and_never_to_oneself(corners):
    pairs = face_pairs(sheet(5, 7, corners))
    assert pairs.dtype == np.int64 and pairs.tolist() == by_definition(sheet(5, 7, corners))
    assert pairs.tolist() == sorted(pairs.tolist()) and (pairs[:, 0] != pairs[:, 1]).all()
    assert {tuple(pair) for pair in pairs.tolist()} == {
        tuple(pair[::-1]) for pair in pairs.tolist()
    }


def test_faces_that_share_two_edges_are_one_pair():
    assert face_pairs(np.array([[0, 1, 2, 3], [2, 1, 0, 4]])).tolist() == [[0, 1], [1, 0]]


def test_a_face_that_folds_onto_itself_is_not_its_own_neighbour():
    assert face_pairs(np.array([[0, 1, 0], [0, 1, 2]])).tolist() == [[0, 1], [1, 0]]


def test_a_face_alone_has_no_pairs():
    for faces in (
        np.array([[0, 1, 2]]),
        np.array([[0, 1, 2], [2, 3, 4]]),
        np.zeros((0, 3), np.int64),
    ):
        assert face_pairs(faces).shape == (0, 2)


def test_all_faces_around_a_crowded_edge_are_pairs_up_to_a_bound():
    few = np.array([[0, 1, 2 + n] for n in range(MOST_AROUND_AN_EDGE + 1)])
    assert face_pairs(few).tolist() == by_definition(few)
    many = np.array([[0, 1, 2 + n] for n in range(5000)])
    pairs = face_pairs(many)
    assert len(pairs) < 2 * MOST_AROUND_AN_EDGE * len(many)
    assert set(pairs[:, 0]) == set(range(5000)), "nobody is left alone"


def test_edges_are_counted_by_their_faces():
    cube = np.array(
        [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]]
    )
    assert count_edges(cube).watertight and count_edges(cube).shared == 12
    opened = count_edges(cube[:-1])
    assert (opened.open, opened.shared, opened.crowded, opened.watertight) == (4, 8, 0, False)
    winged = count_edges(np.concatenate([cube, [[0, 1, 8, 9]]]))
    assert (winged.open, winged.crowded, winged.watertight) == (3, 1, False)


def test_twenty_thousand_faces_take_well_under_a_second_and_time_grows_like_sorting():
    seconds = {}
    for faces in (sheet(50, 50), sheet(100, 100), sheet(200, 200)):
        taken = []
        for _ in range(5):
            started = time.process_time()
            face_pairs(faces)
            taken.append(time.process_time() - started)
        seconds[len(faces)] = min(taken)
    assert seconds[20_000] < 0.5
    assert math.log(seconds[80_000] / seconds[5_000], 16) < 1.5, "quadratic growth would be 2"
