"""Convert polygons to triangles or to quads. P counts polygons, N the corners of each, V vertices.

Convex polygons, which are nearly all, become fans. In a concave polygon a fan would reach outside:
a quad then starts at its reflex corner, and a larger polygon is cut by ear clipping (Meisters 1975,
doi.org/10.2307/2319703).
"""

from __future__ import annotations

import numpy as np

from tessera.data.errors import UnreadableFile

REFLEX_THRESHOLD = -1e-6
"""A corner is reflex if its turn, as a fraction of the polygon's area, is below this value."""
MAX_EAR_CLIPPING_CORNERS = 128
"""The number of corners of the largest polygon that is cut by ear clipping: the time grows with its
cube."""


def triangulate(vertices: np.ndarray, polygons_PN: np.ndarray) -> np.ndarray:
    """Return (P * (N - 2), 3): the triangles of each polygon after each other.

    The two triangles of a quad start at the same vertex.
    """
    corners = polygons_PN.shape[1]
    polygons_PN = start_at_reflex_corner(vertices, polygons_PN) if corners == 4 else polygons_PN
    fans = np.stack(
        [polygons_PN[:, [0, second, second + 1]] for second in range(1, corners - 1)], axis=1
    )
    if 4 < corners <= MAX_EAR_CLIPPING_CORNERS:
        concave = (corner_turns(vertices, polygons_PN) < REFLEX_THRESHOLD).any(axis=1)
        for index in np.flatnonzero(concave):
            polygon = polygons_PN[index]
            fans[index] = polygon[clip_ears(project_to_plane(vertices[polygon]))]
    return fans.reshape(-1, 3)


def build_quads(polygons_PN: np.ndarray) -> np.ndarray:
    """Convert polygons with an even number of corners to strips of quads.

    GLB files have triangles only: there, a quad is two of them that start at the same vertex.
    """
    count, corners = polygons_PN.shape
    if corners == 3:
        first, second = polygons_PN[0 : count - count % 2 : 2], polygons_PN[1::2]
        if count % 2 or not np.array_equal(first[:, [0, 2]], second[:, :2]):
            raise UnreadableFile(
                f"quads were requested, but {count:,} of its faces are triangles that do not form "
                "pairs"
            )
        return np.concatenate([first, second[:, 2:]], axis=1)
    if corners % 2:
        raise UnreadableFile(
            f"quads were requested, but {count:,} of its faces have {corners} corners"
        )
    strip = [
        [step, step + 1, corners - 2 - step, corners - 1 - step] for step in range(corners // 2 - 1)
    ]
    return polygons_PN[:, strip].reshape(-1, 4)


def start_at_reflex_corner(vertices: np.ndarray, quads_P4: np.ndarray) -> np.ndarray:
    """Rotate concave quads to start at their reflex corner; leave the others as they are."""
    turns = corner_turns(vertices, quads_P4)
    start = np.where(turns.min(axis=1) < REFLEX_THRESHOLD, turns.argmin(axis=1), 0)
    return np.take_along_axis(quads_P4, (start[:, None] + np.arange(4)) % 4, axis=1)


def corner_turns(vertices: np.ndarray, polygons_PN: np.ndarray) -> np.ndarray:
    """Return (P, N): how far each corner turns in the orientation of its polygon, as a fraction of
    the polygon's area; negative at reflex corners."""
    positions = vertices[polygons_PN]
    sides = np.roll(positions, -1, axis=1) - positions
    products = np.cross(np.roll(sides, 1, axis=1), sides)
    normals = compute_normals(positions)
    return (
        np.einsum("pnc,pc->pn", products, normals)
        / np.maximum(np.einsum("pc,pc->p", normals, normals), 1e-300)[:, None]
    )


def has_area(quantized: np.ndarray, polygons_PN: np.ndarray) -> np.ndarray:
    """Return (P,) bool: whether some three consecutive corners are not collinear.

    Exact for vertices with integer coordinates.
    """
    corners = quantized[polygons_PN]
    sides = np.roll(corners, -1, axis=1) - corners
    return np.asarray(np.cross(sides, np.roll(sides, -1, axis=1)).any(axis=(1, 2)))


def compute_normals(positions_PN3: np.ndarray) -> np.ndarray:
    """Return (P, 3) normals whose length is twice the area, by Newell's sum (Sutherland, Sproull
    and Schumacker 1974, doi.org/10.1145/356625.356626)."""
    arms = positions_PN3 - positions_PN3[:, :1]
    return np.cross(arms[:, 1:-1], arms[:, 2:]).sum(axis=1)


def project_to_plane(positions_N3: np.ndarray) -> np.ndarray:
    """Return (N, 2): the polygon projected along the largest axis of its normal,
    counterclockwise."""
    (normal,) = compute_normals(positions_N3[None])
    axis = int(np.abs(normal).argmax())
    flat = np.delete(positions_N3, axis, axis=1)
    return flat[:, ::-1] if (normal[axis] > 0) == (axis == 1) else flat


def clip_ears(flat_N2: np.ndarray) -> list[list[int]]:
    """Return the triangles of a polygon as corner indices.

    The rest of a polygon that intersects itself becomes a fan.
    """
    left, triangles = list(range(len(flat_N2))), []
    while len(left) > 3:
        ear = next((index for index in range(len(left)) if is_ear(flat_N2, left, index)), None)
        if ear is None:
            break
        triangles.append([left[ear - 1], left[ear], left[(ear + 1) % len(left)]])
        del left[ear]
    fan = [[left[0], left[second], left[second + 1]] for second in range(1, len(left) - 1)]
    return triangles + fan


def is_ear(flat_N2: np.ndarray, left: list[int], index: int) -> bool:
    """Return whether a corner can be cut off: it is convex, and its triangle contains no other
    corner."""
    before, here, after = left[index - 1], left[index], left[(index + 1) % len(left)]
    corners = flat_N2[[before, here, after]]
    if doubled_area(*corners) <= 0:
        return False
    others = flat_N2[[number for number in left if number not in (before, here, after)]]
    inside = [
        doubled_area(one, other, others.T) > 0
        for one, other in zip(corners, np.roll(corners, -1, axis=0))
    ]
    return not np.logical_and.reduce(inside).any()


def doubled_area(one: np.ndarray, two: np.ndarray, three: np.ndarray) -> np.ndarray:
    """Return twice the signed area of a triangle, positive if it is counterclockwise."""
    return (two[0] - one[0]) * (three[1] - one[1]) - (two[1] - one[1]) * (three[0] - one[0])
