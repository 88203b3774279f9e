"""What a model receives about the next position of a `Traversal`: points of which most coordinates
repeat one.

At an edge: u, v, the apex of the triangle behind it, the point that completes a parallelogram with
these, the newest candidates at u and at v, the vertex of the previous part with the same number,
moved as this part is, and the corners of the bounding box of all triangles.

At the first triangle of a part: its vertices so far, the vertex of the previous part with the same
number, its mirror image, that of the part before, the continuation of both, and the last three as
above.

At the lower corner of a box: the lower and the higher corner of the previous part, the lower one of
its mirror image, both corners of the part before, the continuation of the lower ones, and the lower
corner of the first part. At the higher corner: the lower one, the one that gives the box the size
of the previous part, the higher corner of that part, the mirror image of the lower one, the higher
corner of the part before, the one for its size, and the higher corner of the first part. The
corners of the bounding box are the last two of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera.modalities.mesh.boxes import Vertex
from tessera.modalities.mesh.tree import ABSENT, BOX_HIGH, BOX_LOW, EDGE, NUM_SIDE, Traversal

NUM_ROLES = 9
"""The number of points."""


def read_context(traversal: Traversal) -> tuple[int, ...]:
    """Return the slot and the coordinates of NUM_ROLES points; -1 where there is none."""
    if traversal.slot >= BOX_LOW:
        points = box_points(traversal)
    elif traversal.slot >= EDGE:
        points = edge_points(traversal)
    else:
        points = root_points(traversal)
    return (traversal.slot, *points, *traversal.low, *traversal.high)


def box_points(traversal: Traversal) -> tuple[int, ...]:
    """Return the points at a corner of a box, without those of the bounding box."""
    is_high, last = traversal.slot >= BOX_HIGH, traversal.bins - 1
    parts = traversal.earlier_parts if is_high else [*traversal.earlier_parts, traversal.part]
    parts = [part for part in parts if part]
    low, high = part_corners(parts[-1]) if parts else (ABSENT, ABSENT)
    older_low, older_high = part_corners(parts[-2]) if len(parts) > 1 else (ABSENT, ABSENT)
    first_low, first_high = part_corners(parts[0]) if parts else (ABSENT, ABSENT)
    if is_high:
        own = traversal.part[0]
        repeated = combine(traversal, own, high, low) if parts else ABSENT
        like_older = combine(traversal, own, older_high, older_low) if len(parts) > 1 else ABSENT
        mirrored = (high[0], last - own[1], last - own[2])
        return (*own, *repeated, *high, *mirrored, *older_high, *like_older, *first_high)
    mirrored = (low[0], last - high[1], last - high[2]) if parts else ABSENT
    continued = combine(traversal, low, low, older_low) if len(parts) > 1 else ABSENT
    return (*low, *high, *mirrored, *older_low, *older_high, *continued, *first_low)


def edge_points(traversal: Traversal) -> tuple[int, ...]:
    """Return the points at an edge, without those of the bounding box."""
    u, v, apex = traversal.stack[-1]
    at_u, at_v = traversal.candidates[0], traversal.candidates[NUM_SIDE]
    opposite = combine(traversal, u, v, apex)
    repeated = repeated_vertex(traversal, traversal.part, len(traversal.part))
    return (*u, *v, *apex, *opposite, *(at_u or ABSENT), *(at_v or ABSENT), *repeated)


def root_points(traversal: Traversal) -> tuple[int, ...]:
    """Return the points at the first triangle of a part, without those of the bounding box."""
    number = traversal.slot // 3
    part = traversal.part if number else []
    parts = traversal.earlier_parts if number else [*traversal.earlier_parts, traversal.part]
    first = part[0] if part else ABSENT
    second = part[1] if number == 2 else ABSENT
    before = nth_vertex(parts[-1], number) if parts else ABSENT
    older = nth_vertex(parts[-2], number) if len(parts) > 1 else ABSENT
    last = traversal.bins - 1
    mirrored = ABSENT if before is ABSENT else (before[0], last - before[1], last - before[2])
    both = before is not ABSENT and older is not ABSENT
    continued = combine(traversal, before, before, older) if both else ABSENT
    repeated = repeated_vertex(traversal, part, number)
    return (*first, *second, *before, *mirrored, *older, *continued, *repeated)


def repeated_vertex(traversal: Traversal, part: list[Vertex], number: int) -> Vertex:
    """Return the vertex of the previous part, moved by the distance of the first vertices."""
    if not part or not traversal.earlier_parts or number >= len(traversal.earlier_parts[-1]):
        return ABSENT
    before = traversal.earlier_parts[-1]
    return combine(traversal, before[number], part[0], before[0])


def combine(traversal: Traversal, a: Vertex, b: Vertex, c: Vertex) -> Vertex:
    """Return a + b - c, within the grid."""
    last = traversal.bins - 1
    z, y, x = a[0] + b[0] - c[0], a[1] + b[1] - c[1], a[2] + b[2] - c[2]
    return (
        0 if z < 0 else last if z > last else z,
        0 if y < 0 else last if y > last else y,
        0 if x < 0 else last if x > last else x,
    )


def nth_vertex(part: Sequence[Vertex], number: int) -> Vertex:
    """Return a vertex of a part; ABSENT if it has fewer."""
    return part[number] if number < len(part) else ABSENT


def part_corners(part: Sequence[Vertex]) -> tuple[Vertex, Vertex]:
    """Return the lowest and the highest corner of the box around a part."""
    z, y, x = zip(*part)
    return (min(z), min(y), min(x)), (max(z), max(y), max(x))
