"""Triangulation covers any polygon exactly once, stays inside it and keeps its orientation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.data.errors import UnreadableFile
from tessera.modalities.mesh.polygons import (
    MAX_EAR_CLIPPING_CORNERS,
    build_quads,
    start_at_reflex_corner,
    triangulate,
)


def signed_areas(vertices: np.ndarray, triangles: np.ndarray, normal=(0.0, 0.0, 1.0)) -> np.ndarray:
    one, two, three = vertices[triangles].transpose(1, 0, 2)
    return np.cross(two - one, three - one) @ np.array(normal) / 2


def in_plane(*points) -> np.ndarray:
    return np.array([[x, y, 0.0] for x, y in points])


def outline_area(vertices: np.ndarray) -> float:
    x, y = vertices[:, 0], vertices[:, 1]
    return float((x * np.roll(y, -1) - np.roll(x, -1) * y).sum() / 2)


@given(st.integers(0, 10**6), st.integers(4, 14))
def test_a_star_shaped_polygon_is_covered_exactly_once(seed, corners):
    rng = np.random.default_rng(seed)
    angles = (np.arange(corners) + rng.uniform(0.1, 0.9, corners)) * 2 * np.pi / corners
    radii = rng.uniform(0.2, 1.0, corners)
    vertices = in_plane(*zip(radii * np.cos(angles), radii * np.sin(angles)))
    found = signed_areas(vertices, triangulate(vertices, np.arange(corners)[None]))
    assert len(found) == corners - 2 and (found > -1e-9).all()
    assert found.sum() == pytest.approx(outline_area(vertices))


@given(st.integers(0, 10**6), st.integers(3, 8))
def test_the_orientation_in_space_does_not_matter(seed, corners):
    rng = np.random.default_rng(seed)
    angles = (np.arange(corners) + 0.5) * 2 * np.pi / corners
    radii = rng.uniform(0.3, 1.0, corners)
    plane = in_plane(*zip(radii * np.cos(angles), radii * np.sin(angles)))
    rotation, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    rotation *= np.linalg.det(rotation)  # no reflection
    vertices = plane @ rotation.T + rng.normal(size=3)
    found = signed_areas(vertices, triangulate(vertices, np.arange(corners)[None]), rotation[:, 2])
    assert (found > -1e-9).all() and found.sum() == pytest.approx(outline_area(plane))


@pytest.mark.parametrize("start", range(4))
def test_a_concave_quad_starts_at_its_reflex_corner(start):
    vertices = in_plane((0, 0), (2, -1), (0.5, 0), (2, 1))
    quad = np.roll([0, 1, 2, 3], start)[None]
    assert start_at_reflex_corner(vertices, quad).tolist() == [[2, 3, 0, 1]]
    found = signed_areas(vertices, triangulate(vertices, quad))
    assert (found > 0).all() and found.sum() == pytest.approx(outline_area(vertices))


def test_convex_polygons_are_not_changed():
    vertices = in_plane((0, 0), (1, 0), (1, 1), (0, 1))
    quads = np.array([[0, 1, 2, 3], [1, 2, 3, 0]])
    assert np.array_equal(start_at_reflex_corner(vertices, quads), quads)
    assert triangulate(vertices, quads).tolist() == [[0, 1, 2], [0, 2, 3], [1, 2, 3], [1, 3, 0]]


def test_a_comb_shaped_polygon_is_covered():
    comb = in_plane(
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
    found = signed_areas(comb, triangulate(comb, np.arange(12)[None]))
    assert (found >= 0).all() and found.sum() == pytest.approx(outline_area(comb)) == pytest.approx(
        11
    )


def test_degenerate_polygons_give_the_usual_number_of_triangles():
    crossing = np.random.default_rng(0).normal(size=(9, 3))
    for vertices in (crossing, np.zeros((9, 3)), in_plane(*[(n, 0) for n in range(9)])):
        assert triangulate(vertices, np.arange(9)[None]).shape == (7, 3)
    huge = MAX_EAR_CLIPPING_CORNERS + 1
    assert triangulate(
        np.random.default_rng(0).normal(size=(huge, 3)), np.arange(huge)[None]
    ).shape == (huge - 2, 3)


def test_even_polygons_become_quads_and_odd_ones_raise_errors():
    assert build_quads(np.arange(8)[None]).tolist() == [[0, 1, 6, 7], [1, 2, 5, 6], [2, 3, 4, 5]]
    assert build_quads(np.array([[0, 1, 2], [0, 2, 3]])).tolist() == [[0, 1, 2, 3]]
    for others in (np.arange(5)[None], np.array([[0, 1, 2]]), np.array([[0, 1, 2], [3, 4, 5]])):
        with pytest.raises(UnreadableFile, match="quads were requested"):
            build_quads(others)
