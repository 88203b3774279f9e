"""Simplification part by part: no part becomes a shard, and equal parts stay equal."""

from __future__ import annotations

import numpy as np
import pytest
import trimesh

from tessera.modalities.mesh.adjacency import count_edges, label_parts
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.simplify import (
    BOX_CORNERS,
    BOX_TRIANGLES,
    Part,
    bounding_box,
    share_out,
    simplify_parts,
    split_parts,
)


def ball(centre: tuple[float, float, float], radius: float, count: int = 16) -> Part:
    sphere = trimesh.creation.uv_sphere(radius=radius, count=[count, count])
    return Part(np.asarray(sphere.vertices) + centre, np.asarray(sphere.faces))


def merge(*parts: Part) -> Mesh:
    starts = np.cumsum([0, *(len(part.vertices) for part in parts)])
    faces = [part.faces + start for part, start in zip(parts, starts)]
    return Mesh(np.concatenate([part.vertices for part in parts]), np.concatenate(faces))


def count_parts(mesh: Mesh) -> int:
    return len(np.unique(label_parts(mesh.faces, len(mesh.vertices))[mesh.faces]))


@pytest.mark.parametrize("max_faces", [40, 80, 200])
def test_every_part_remains_and_stays_closed(max_faces):
    mesh = merge(ball((0, 0, 0), 1.0), ball((3, 0, 0), 0.5), ball((0, 3, 0), 0.2))
    simple = mesh.simplify(max_faces)
    assert len(simple.faces) <= max_faces and count_parts(simple) == 3
    assert count_edges(simple.faces).watertight


def test_equal_parts_are_simplified_alike():
    places = [(0.0, 0.0, 0.0), (4.0, 0.0, 0.0), (0.0, 4.0, 1.0), (4.0, 4.0, 0.5)]
    simple = merge(*(ball(place, 1.0) for place in places)).simplify(160)
    shapes = [
        part.vertices - part.vertices.min(0) for part in split_parts(simple.vertices, simple.faces)
    ]
    assert len(shapes) == 4
    for shape in shapes[1:]:
        np.testing.assert_allclose(np.sort(shape, axis=0), np.sort(shapes[0], axis=0), atol=1e-6)


def test_large_parts_get_more_triangles_and_small_ones_are_boxes():
    big, small = ball((0, 0, 0), 5.0), ball((20, 0, 0), 0.5)
    budgets = share_out([big, small], 100)
    assert sum(budgets) <= 100 and budgets[0] > budgets[1] >= 12
    simple = simplify_parts(merge(big, small).vertices, merge(big, small).faces, 30)
    assert simple is not None and len(simple.faces) <= 30


def test_a_slanted_part_gets_a_box_along_its_own_axes():
    angle = np.radians(35)
    turn = np.array(
        [[np.cos(angle), 0, -np.sin(angle)], [0, 1, 0], [np.sin(angle), 0, np.cos(angle)]]
    )
    leg = Part((BOX_CORNERS * [0.2, 0.3, 5.0]) @ turn.T, BOX_TRIANGLES)
    assert bounding_box(leg).area == pytest.approx(leg.area, rel=1e-6)
    outward = count_edges(bounding_box(leg).faces)
    assert outward.watertight


def test_a_flat_part_becomes_two_triangles():
    xs, ys = np.meshgrid(np.linspace(0, 2, 9), np.linspace(0, 1, 9))
    vertices = np.column_stack([xs.ravel(), ys.ravel(), np.zeros(81)])
    quads = [(i, i + 1, i + 10, i + 9) for i in range(72) if i % 9 < 8]
    faces = np.array([t for a, b, c, d in quads for t in ((a, b, c), (a, c, d))])
    box = bounding_box(Part(vertices, faces))
    assert len(box.faces) == 2 and box.area == pytest.approx(2.0)


def test_too_many_parts_keep_the_largest():
    parts = [ball((3.0 * number, 0, 0), 1 / (number + 1), count=6) for number in range(20)]
    mesh = merge(*parts)
    simple = simplify_parts(mesh.vertices, mesh.faces, 60)
    assert simple is not None and len(simple.faces) <= 60
    assert simple.vertices[:, 0].max() < 20


def test_a_single_part_is_left_to_the_whole_mesh():
    one = ball((0, 0, 0), 1.0)
    assert simplify_parts(one.vertices, one.faces, 50) is None
    assert len(Mesh(one.vertices, one.faces).simplify(50).faces) <= 50
