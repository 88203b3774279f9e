"""Polygons as triangles or as quads. P counts polygons, N the corners that each of them has, V
vertices.

Convex polygons, which nearly all are, become fans. In one that is not, a fan would reach outside: a
quad then begins at the corner that points inward, and of a larger one ears are cut until nothing is
left (Meisters 1975, doi.org/10.2307/2319703).
"""

from __future__ import annotations

import numpy as np

from tessera.data.errors import UnreadableFile

INWARD = -1e-6
"""What a corner has to fall short of to point inward; its turn is measured in shares of the
polygon's area."""
MOST_CLIPPED = 128
"""Corners of the largest polygon whose ears are cut: the time grows with their cube."""


def triangles_of(vertices: np.ndarray, polygons_PN: np.ndarray) -> np.ndarray:
    """(P * (N - 2), 3), those of a polygon after each other; the two of a quad begin at the same
    vertex."""
    corners = polygons_PN.shape[1]
    polygons_PN = beginning_inward(vertices, polygons_PN) if corners == 4 else polygons_PN
    fans = np.stack(
        [polygons_PN[:, [0, second, second + 1]] for second in range(1, corners - 1)], axis=1
    )
    if 4 < corners <= MOST_CLIPPED:
        for number in np.flatnonzero((turns(vertices, polygons_PN) < INWARD).any(axis=1)):
            polygon = polygons_PN[number]
            fans[number] = polygon[ears(flattened(vertices[polygon]))]
    return fans.reshape(-1, 3)


def quads_of(polygons_PN: np.ndarray) -> np.ndarray:
    """An even polygon is a ladder of quads. GLB knows triangles only: a quad is two of them that
    begin at one vertex."""
    count, corners = polygons_PN.shape
    if corners == 3:
        first, second = polygons_PN[0 : count - count % 2 : 2], polygons_PN[1::2]
        if count % 2 or not np.array_equal(first[:, [0, 2]], second[:, :2]):
            raise UnreadableFile(
                f"quads are asked for, but {count:,} of its faces are triangles, and not pairs that make quads"
            )
        return np.concatenate([first, second[:, 2:]], axis=1)
    if corners % 2:
        raise UnreadableFile(
            f"quads are asked for, but {count:,} of its faces have {corners} corners"
        )
    rungs = [
        [step, step + 1, corners - 2 - step, corners - 1 - step] for step in range(corners // 2 - 1)
    ]
    return polygons_PN[:, rungs].reshape(-1, 4)


def beginning_inward(vertices: np.ndarray, quads_P4: np.ndarray) -> np.ndarray:
    """Quads with a corner that points inward begin there; the others as they did."""
    turned = turns(vertices, quads_P4)
    start = np.where(turned.min(axis=1) < INWARD, turned.argmin(axis=1), 0)
    return np.take_along_axis(quads_P4, (start[:, None] + np.arange(4)) % 4, axis=1)


def turns(vertices: np.ndarray, polygons_PN: np.ndarray) -> np.ndarray:
    """(P, N): how far each corner turns the way its polygon does, as a share of the polygon's area;
    below 0 the other way."""
    places = vertices[polygons_PN]
    after = np.roll(places, -1, axis=1) - places
    turned = np.cross(np.roll(after, 1, axis=1), after)
    normals = normals_of(places)
    return (
        np.einsum("pnc,pc->pn", turned, normals)
        / np.maximum(np.einsum("pc,pc->p", normals, normals), 1e-300)[:, None]
    )


def has_area(steps: np.ndarray, polygons_PN: np.ndarray) -> np.ndarray:
    """(P,) bool: whether any three neighbouring corners do not lie on a line. Exact, for vertices
    in whole numbers."""
    corners = steps[polygons_PN]
    sides = np.roll(corners, -1, axis=1) - corners
    return np.cross(sides, np.roll(sides, -1, axis=1)).any(axis=(1, 2))


def normals_of(places_PN3: np.ndarray) -> np.ndarray:
    """(P, 3): twice the area long. Newell's sum (Sutherland, Sproull and Schumacker 1974,
    doi.org/10.1145/356625.356626)."""
    arms = places_PN3 - places_PN3[:, :1]
    return np.cross(arms[:, 1:-1], arms[:, 2:]).sum(axis=1)


def flattened(places_N3: np.ndarray) -> np.ndarray:
    """(N, 2): seen along the axis to which the polygon is turned most, counterclockwise."""
    (normal,) = normals_of(places_N3[None])
    axis = int(np.abs(normal).argmax())
    flat = np.delete(places_N3, axis, axis=1)
    return flat[:, ::-1] if (normal[axis] > 0) == (axis == 1) else flat


def ears(flat_N2: np.ndarray) -> list[list[int]]:
    """Corners of the triangles, by number. What is left of a polygon that crosses itself becomes a
    fan."""
    left, found = list(range(len(flat_N2))), []
    while len(left) > 3:
        ear = next((place for place in range(len(left)) if is_ear(flat_N2, left, place)), None)
        if ear is None:
            break
        found.append([left[ear - 1], left[ear], left[(ear + 1) % len(left)]])
        del left[ear]
    return found + [[left[0], left[second], left[second + 1]] for second in range(1, len(left) - 1)]


def is_ear(flat_N2: np.ndarray, left: list[int], place: int) -> bool:
    """Whether a corner can be cut off: it points outward, and no other corner lies in what would
    go."""
    before, here, after = left[place - 1], left[place], left[(place + 1) % len(left)]
    corners = flat_N2[[before, here, after]]
    if area(*corners) <= 0:
        return False
    others = flat_N2[[number for number in left if number not in (before, here, after)]]
    inside = [
        area(one, other, others.T) > 0 for one, other in zip(corners, np.roll(corners, -1, axis=0))
    ]
    return not np.logical_and.reduce(inside).any()


def area(one: np.ndarray, two: np.ndarray, three: np.ndarray) -> np.ndarray:
    """Twice that of a triangle, above 0 if it is counterclockwise."""
    return (two[0] - one[0]) * (three[1] - one[1]) - (two[1] - one[1]) * (three[0] - one[0])
