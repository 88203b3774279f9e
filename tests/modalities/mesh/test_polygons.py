"""However a polygon is bent, its triangles cover it once, reach nowhere outside, and are turned as
it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.data.errors import UnreadableFile
from tessera.modalities.mesh.polygons import MOST_CLIPPED, beginning_inward, quads_of, triangles_of


def areas(vertices: np.ndarray, triangles: np.ndarray, normal=(0.0, 0.0, 1.0)) -> np.ndarray:
    one, two, three = vertices[triangles].transpose(1, 0, 2)
    return np.cross(two - one, three - one) @ np.array(normal) / 2


def flat(*points) -> np.ndarray:
    return np.array([[x, y, 0.0] for x, y in points])


def outline_area(vertices: np.ndarray) -> float:
    x, y = vertices[:, 0], vertices[:, 1]
    return float((x * np.roll(y, -1) - np.roll(x, -1) * y).sum() / 2)


@given(st.integers(0, 10**6), st.integers(4, 14))
def test_a_star_shaped_polygon_is_covered_once(seed, corners):
    rng = np.random.default_rng(seed)
    angles = (np.arange(corners) + rng.uniform(0.1, 0.9, corners)) * 2 * np.pi / corners
    radii = rng.uniform(0.2, 1.0, corners)
    vertices = flat(*zip(radii * np.cos(angles), radii * np.sin(angles)))
    found = areas(vertices, triangles_of(vertices, np.arange(corners)[None]))
    assert len(found) == corners - 2 and (found > -1e-9).all()
    assert found.sum() == pytest.approx(outline_area(vertices))


@given(st.integers(0, 10**6), st.integers(3, 8))
def test_it_does_not_matter_how_a_polygon_lies_in_space(seed, corners):
    rng = np.random.default_rng(seed)
    angles = (np.arange(corners) + 0.5) * 2 * np.pi / corners
    radii = rng.uniform(0.3, 1.0, corners)
    lying = flat(*zip(radii * np.cos(angles), radii * np.sin(angles)))
    turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    turn *= np.linalg.det(turn)  # no mirror
    vertices = lying @ turn.T + rng.normal(size=3)
    found = areas(vertices, triangles_of(vertices, np.arange(corners)[None]), turn[:, 2])
    assert (found > -1e-9).all() and found.sum() == pytest.approx(outline_area(lying))


@pytest.mark.parametrize("start", range(4))
def test_an_arrowhead_begins_at_the_corner_that_points_inward(start):
    vertices = flat((0, 0), (2, -1), (0.5, 0), (2, 1))
    quad = np.roll([0, 1, 2, 3], start)[None]
    assert beginning_inward(vertices, quad).tolist() == [[2, 3, 0, 1]]
    found = areas(vertices, triangles_of(vertices, quad))
    assert (found > 0).all() and found.sum() == pytest.approx(outline_area(vertices))


def test_convex_polygons_stay_as_they_are_written():
    vertices = flat((0, 0), (1, 0), (1, 1), (0, 1))
    quads = np.array([[0, 1, 2, 3], [1, 2, 3, 0]])
    assert np.array_equal(beginning_inward(vertices, quads), quads)
    assert triangles_of(vertices, quads).tolist() == [[0, 1, 2], [0, 2, 3], [1, 2, 3], [1, 3, 0]]


def test_a_comb_is_cut_into_its_teeth():
    comb = flat(
        (0, 0),
        (5, 0),
        (5, 3),
        (4, 3),
        (4, 1),
        (3, 1),
        (3, 3),
        (2, 3),
        (2, 1),
        (1, 1),
        (1, 3),
        (0, 3),
    )
    found = areas(comb, triangles_of(comb, np.arange(12)[None]))
    assert (found >= 0).all() and found.sum() == pytest.approx(outline_area(comb)) == pytest.approx(
        11
    )


def test_a_polygon_without_sense_still_gives_as_many_triangles_and_ends():
    crossing = np.random.default_rng(0).normal(size=(9, 3))
    for vertices in (crossing, np.zeros((9, 3)), flat(*[(n, 0) for n in range(9)])):
        assert triangles_of(vertices, np.arange(9)[None]).shape == (7, 3)
    huge = MOST_CLIPPED + 1
    assert triangles_of(
        np.random.default_rng(0).normal(size=(huge, 3)), np.arange(huge)[None]
    ).shape == (huge - 2, 3)


def test_even_polygons_are_ladders_of_quads_and_odd_ones_are_refused():
    assert quads_of(np.arange(8)[None]).tolist() == [[0, 1, 6, 7], [1, 2, 5, 6], [2, 3, 4, 5]]
    assert quads_of(np.array([[0, 1, 2], [0, 2, 3]])).tolist() == [[0, 1, 2, 3]]
    for others in (np.arange(5)[None], np.array([[0, 1, 2]]), np.array([[0, 1, 2], [3, 4, 5]])):
        with pytest.raises(UnreadableFile, match="quads are asked for"):
            quads_of(others)
