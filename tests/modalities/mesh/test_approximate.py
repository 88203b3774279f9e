"""Approximation part by part: boxes where they are near enough, and nothing that misleads."""

from __future__ import annotations

import numpy as np
import pytest
import trimesh

from tessera.modalities.mesh.adjacency import label_parts
from tessera.modalities.mesh.approximate import approximate
from tessera.modalities.mesh.cuboids import cover, fill_inside, fill_with_boxes
from tessera.modalities.mesh.point_clouds import sample_points
from tessera.modalities.mesh.simplify import BOX_CORNERS, BOX_TRIANGLES, Part, join_parts
from tessera.modalities.mesh.synthetic import box as synthetic_box
from tessera.modalities.mesh.synthetic import column, extrude_cells

ROUND = trimesh.creation.icosphere(subdivisions=3)


def box(low: tuple[float, float, float], high: tuple[float, float, float]) -> Part:
    return Part(np.array(low) + BOX_CORNERS * np.subtract(high, low), BOX_TRIANGLES)


def cushion(centre: tuple[float, float, float], sides: tuple[float, float, float]) -> Part:
    """A rounded box: a superellipsoid."""
    vertices = np.sign(ROUND.vertices) * np.abs(ROUND.vertices) ** 0.35
    return Part(vertices * np.array(sides) / 2 + centre, np.asarray(ROUND.faces))


def u_shape() -> Part:
    """A seat of 10 x 3 x 2 with two arms up to 4, as one closed part."""
    cells = {(0, 0), (1, 0), (2, 0), (0, 1), (2, 1)}
    mesh = extrude_cells(cells, [0.0, 1.0, 9.0, 10.0], [0.0, 2.0, 4.0], half_y=1.5)
    return Part(mesh.vertices, mesh.triangles())


def count_parts(part: Part) -> int:
    return len(np.unique(label_parts(part.faces, len(part.vertices))[part.faces]))


def test_cushions_become_boxes_with_their_sides():
    sofa = join_parts(
        [box((-5, -2, 0), (5, 2, 1)), cushion((-2.4, 0, 1.7), (4.6, 3.8, 1.4))]
        + [cushion((2.4, 0, 1.7), (4.6, 3.8, 1.4))]
    )
    simple = approximate(sofa.vertices, sofa.faces, max_faces=100, max_error=0.03)
    assert simple is not None and len(simple.faces) == 36 and count_parts(simple) == 3
    np.testing.assert_allclose(simple.vertices.max(axis=0), sofa.vertices.max(axis=0), atol=1e-6)


def test_a_round_part_becomes_a_column_of_eight_sides():
    shade = column(1.0, 0.0, 1.5, top=0.5, sides=32)
    simple = approximate(shade.vertices, shade.triangles(), max_faces=100, max_error=0.06)
    assert simple is not None and len(simple.faces) == 28
    radius = np.linalg.norm(simple.vertices[:, :2], axis=1)
    np.testing.assert_allclose(radius[simple.vertices[:, 2] < 0.1], 1.0, atol=0.06)
    np.testing.assert_allclose(radius[simple.vertices[:, 2] > 1.4], 0.5, atol=0.1)


def test_the_most_exact_approximation_that_fits_is_returned():
    ball = Part(np.asarray(ROUND.vertices), np.asarray(ROUND.faces))
    counts = [
        len(simple.faces)
        for limit in (176, 352)
        if (simple := approximate(ball.vertices, ball.faces, limit, max_error=0.08)) is not None
    ]
    assert len(counts) == 2 and counts[0] < counts[1] <= 88, "a quarter, since they are no boxes"
    assert approximate(ball.vertices, ball.faces, 160, max_error=0.015) is None


def test_a_hollow_part_is_not_replaced_by_its_box():
    shelves = u_shape()
    simple = approximate(shelves.vertices, shelves.faces, max_faces=400, max_error=0.05)
    assert simple is not None
    heights = sample_points(simple.vertices, simple.faces, 2000)[:, 2]
    assert (np.abs(heights - 2) < 0.3).mean() > 0.15, "the top of the seat is a surface"


def test_small_and_hidden_parts_are_left_out():
    visible, hidden = box((0, 0, 0), (10, 10, 10)), box((2, 2, 2), (5, 5, 5))
    knob = box((10, 5, 5), (10.1, 5.1, 5.1))
    handle = box((10, 2, 2), (11, 3, 6))
    mesh = join_parts([visible, hidden, knob, handle])
    simple = approximate(mesh.vertices, mesh.faces, max_faces=100, max_error=0.03)
    assert simple is not None and count_parts(simple) == 2
    assert simple.vertices[:, 0].max() == pytest.approx(11)


def test_too_many_parts_are_not_approximated():
    posts = join_parts([box((i, 0, 0), (i + 0.5, 1, 60)) for i in range(61)])
    assert approximate(posts.vertices, posts.faces, 10_000, max_error=0.08) is None


def test_boxes_fill_a_bent_part():
    boxes = fill_with_boxes(u_shape(), size=10.0)
    assert 3 <= len(boxes) <= 6
    volume = sum(float(np.prod(np.ptp(one.vertices, axis=0))) for one in boxes)
    # Two arms and a seat; boxes overlap where they meet.
    assert 72 * 0.9 < volume < 72 * 1.3
    together = join_parts(boxes).vertices
    np.testing.assert_allclose(together.min(axis=0), [0, -1.5, 0], atol=0.05)
    np.testing.assert_allclose(together.max(axis=0), [10, 1.5, 4], atol=0.05)


def test_the_inside_of_a_closed_surface_is_filled_and_an_open_one_is_not():
    shell = np.ones((5, 5, 5), dtype=bool)
    shell[1:4, 1:4, 1:4] = False
    assert fill_inside(shell).all()
    shell[2, 2, 0] = False
    assert fill_inside(shell).sum() == shell.sum()


def test_cells_are_covered_by_the_largest_boxes():
    cells = np.zeros((8, 8, 8), dtype=bool)
    cells[:, :, :2] = True
    cells[:2, :, :] = True
    boxes = cover(cells)
    assert len(boxes) == 2
    covered = np.zeros_like(cells)
    for start, end in boxes:
        covered[tuple(slice(a, b) for a, b in zip(start, end))] = True
    assert (covered == cells).all()


def test_boxes_have_the_diagonals_of_synthetic_boxes():
    synthetic = synthetic_box(0.5, 0.5, 0.0, 1.0)
    expected = {
        frozenset(map(tuple, corners))
        for corners in (synthetic.vertices + [0.5, 0.5, 0.0])[synthetic.triangles()].tolist()
    }
    found = {
        frozenset(map(tuple, corners))
        for corners in BOX_CORNERS[BOX_TRIANGLES].astype(float).tolist()
    }
    assert found == expected
