"""Simplify a mesh part by part, so that no part disappears and none becomes an open shard.

A part is a connected component. The triangles are shared out by size, and every part is simplified
separately by quadric error (Garland and Heckbert 1997). A part that gets too few triangles, or that
would lose its shape, is replaced by its bounding box along its own axes. Equal parts, such as the
legs of a table, are simplified once. Parts of which even the boxes are too many are left out, the
smallest first.

V counts vertices, F faces, P parts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from tessera.modalities.mesh.adjacency import count_edges, label_parts
from tessera.modalities.mesh.io import require_simplification

BOX_FACES = 12
MAX_AREA_CHANGE = 0.35
"""The fraction of its surface that a part may gain or lose when it is simplified."""
MAX_BOX_GROWTH = 2.5
"""How much more surface than a part its box may have; a box of a bent tube would fill a room."""
FLAT = 1e-3
"""A part is flat if it is thinner than this fraction of its length."""
BOX_CORNERS = np.array([[x, y, z] for z in (0, 1) for y in (0, 1) for x in (0, 1)])
BOX_TRIANGLES = np.array(
    [
        *([0, 2, 1], [1, 2, 3], [4, 5, 7], [4, 7, 6], [0, 1, 5], [0, 5, 4]),
        *([1, 3, 7], [1, 7, 5], [3, 2, 6], [3, 6, 7], [2, 0, 4], [2, 4, 6]),
    ]
)
"""The diagonals are those of the boxes of synthetic meshes, so that a model trained on these
generates such boxes already."""


@dataclass(frozen=True)
class Part:
    vertices: np.ndarray
    """(V, 3)."""
    faces: np.ndarray
    """(F, 3) indices into the vertices of the part."""

    @property
    def area(self) -> float:
        a, b, c = self.vertices[self.faces].transpose(1, 0, 2)
        return float(np.linalg.norm(np.cross(b - a, c - a), axis=1).sum() / 2)


def simplify_parts(vertices: np.ndarray, faces: np.ndarray, max_faces: int) -> Part | None:
    """Simplify triangles to at most `max_faces`; None if there is only one part, or nothing is
    left."""
    parts = sorted(split_parts(vertices, faces), key=lambda part: -part.area)
    if len(parts) < 2:
        return None
    parts = parts[: max(1, max_faces // BOX_FACES)]
    simplifier = PartSimplifier()
    budgets = share_out(parts, max_faces)
    shapes = [simplifier.simplify(part, budget) for part, budget in zip(parts, budgets)]
    for number, part in enumerate(parts):
        # What boxes have saved goes to the parts that they replaced, the largest first.
        others = sum(len(one.faces) for i, one in enumerate(shapes) if one and i != number)
        if is_box(shapes[number]) and max_faces - others > budgets[number]:
            larger = simplifier.simplify(part, max_faces - others)
            shapes[number] = larger or shapes[number]
    kept = [
        Part(shape.vertices + part.vertices.min(axis=0), shape.faces)
        for part, shape in zip(parts, shapes)
        if shape is not None
    ]
    return join_parts(kept) if kept else None


class PartSimplifier:
    """Simplifies parts moved to the origin, and equal ones only once."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, bytes, bytes], Part | None] = {}

    def simplify(self, part: Part, budget: int) -> Part | None:
        moved = part.vertices - part.vertices.min(axis=0)
        # Rounded, since equal parts at different places differ in their last bits.
        scale = max(float(moved.max()), np.finfo(np.float64).tiny)
        key = (budget, np.rint(moved / scale * 1e4).tobytes(), part.faces.tobytes())
        if key not in self.known:
            self.known[key] = simplify_part(Part(moved, part.faces), budget)
        return self.known[key]


def is_box(shape: Part | None) -> bool:
    return shape is None or shape.faces is BOX_TRIANGLES


def split_parts(vertices: np.ndarray, faces: np.ndarray) -> list[Part]:
    """Return the connected components of a mesh: faces that share vertices."""
    labels = label_parts(faces, len(vertices))
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for number, label in enumerate(labels[faces[:, 0]].tolist()):
        groups[label].append(number)
    parts = []
    for members in groups.values():
        used, indices = np.unique(faces[members], return_inverse=True)
        parts.append(Part(vertices[used], indices.reshape(-1, 3)))
    return parts


def share_out(parts: list[Part], max_faces: int) -> list[int]:
    """Return the maximum number of triangles of each part: BOX_FACES or all it has, and more in
    proportion to the square root of its area, as far as it has more."""
    limits = np.array([len(part.faces) for part in parts])
    weights = np.sqrt([max(part.area, 1e-12) for part in parts])
    budgets = np.minimum(limits, BOX_FACES).astype(float)
    for _ in range(8):
        left = max_faces - budgets.sum()
        open_parts = budgets < limits
        if left < 1 or not open_parts.any():
            break
        added = np.where(open_parts, weights, 0.0)
        budgets = np.minimum(limits, budgets + left * added / added.sum())
    return np.floor(budgets + 1e-6).astype(int).tolist()


def simplify_part(part: Part, budget: int) -> Part | None:
    """Return a part with at most `budget` triangles, or None if it is too complex for its box."""
    if len(part.faces) <= budget:
        return part
    area = part.area
    if budget > BOX_FACES:
        smaller = Part(
            *require_simplification().simplify(part.vertices, part.faces, target_count=budget)
        )
        change = abs(smaller.area - area) / max(area, 1e-12) if len(smaller.faces) else 1.0
        closed = count_edges(part.faces).watertight
        still_closed = not closed or (
            len(smaller.faces) > 0 and count_edges(smaller.faces).watertight
        )
        if len(smaller.faces) <= budget and change < MAX_AREA_CHANGE and still_closed:
            return smaller
    box = bounding_box(part)
    return box if len(box.faces) <= budget and box.area < MAX_BOX_GROWTH * area else None


def bounding_box(part: Part) -> Part:
    """Return the bounding box along the axes, or along the part's own if that one is smaller; a
    flat part becomes two triangles."""
    centre = part.vertices.mean(axis=0)
    _, _, own_axes = np.linalg.svd(part.vertices - centre, full_matrices=False)
    boxes = [box_along(part.vertices, axes) for axes in (np.eye(3), own_axes)]
    return min(boxes, key=lambda box: box.area)


def box_along(vertices: np.ndarray, axes: np.ndarray) -> Part:
    if np.linalg.det(axes) < 0:
        axes = axes * np.array([[1.0], [1.0], [-1.0]])
    rotated = vertices @ axes.T
    low, high = rotated.min(axis=0), rotated.max(axis=0)
    extent = high - low
    corners = (low + BOX_CORNERS * extent) @ axes
    thin = int(extent.argmin())
    if extent[thin] >= FLAT * extent.max():
        return Part(corners, BOX_TRIANGLES)
    ring = [[0, 2, 6, 4], [0, 4, 5, 1], [0, 1, 3, 2]][thin]
    return Part(corners[ring], np.array([[0, 1, 2], [0, 2, 3]]))


def join_parts(parts: list[Part]) -> Part:
    starts = np.cumsum([0, *(len(part.vertices) for part in parts)])
    faces = [part.faces + start for part, start in zip(parts, starts)]
    return Part(np.concatenate([part.vertices for part in parts]), np.concatenate(faces))
