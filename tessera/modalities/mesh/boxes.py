"""Find the boxes along the axes among the triangles of a mesh.

Much of what people model is made of boxes: boards, legs, drawers, steps. A box along the axes is
determined by two corners and by the diagonals that divide its six sides into triangles, so that
`modalities/mesh/tree.py` needs 7 tokens for its 12 triangles, and a box that is generated from them
is closed and has right angles.

Vertices are tuples (z, y, x) of bin indices. A side is numbered 2 * axis, or 2 * axis + 1 at the
higher end of the axis. Its diagonal is 0 if it joins the corner with both lower coordinates to the
one with both higher ones, and 1 otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

Vertex = tuple[int, int, int]
Face = tuple[Vertex, Vertex, Vertex]

NUM_SIDES = 6
NUM_DIAGONALS = 2**NUM_SIDES
"""The number of ways to divide all sides of a box."""


class Box(NamedTuple):
    low: Vertex
    high: Vertex
    diagonals: int
    """The diagonals of the six sides as bits, that of side 0 first."""


class FoundBox(NamedTuple):
    box: Box
    numbers: tuple[int, ...]
    """The numbers of its 12 triangles."""


class Rectangle(NamedTuple):
    """A side of a box: two triangles that face away from the box."""

    side: int
    level: int
    """The coordinate along the axis of the side."""
    spans: tuple[int, int, int, int]
    """The ends along the two other axes."""
    diagonal: int


Rectangles = dict[tuple[int, tuple[int, int, int, int]], dict[int, tuple[int, ...]]]
"""The rectangles of a side and of spans by their level: the diagonal, and the numbers of both
triangles."""


def box_faces(box: Box) -> list[Face]:
    """Return the 12 triangles of a box, with their normals to the outside."""
    faces: list[Face] = []
    for side in range(NUM_SIDES):
        axis = side // 2
        level = box.high[axis] if side % 2 else box.low[axis]
        spans = side_spans(box.low, box.high, axis)
        diagonal = box.diagonals >> side & 1
        faces.extend(rectangle_faces(Rectangle(side, level, spans, diagonal)))
    return faces


def other_axes(axis: int) -> tuple[int, int]:
    return (1, 2) if axis == 0 else (0, 2) if axis == 1 else (0, 1)


def rectangle_faces(rectangle: Rectangle) -> tuple[Face, Face]:
    """Return the two triangles of a side, each from its lowest vertex on."""
    axis, is_high = divmod(rectangle.side, 2)
    one, other = other_axes(axis)
    low_one, high_one, low_other, high_other = rectangle.spans

    def corner(a: int, b: int) -> Vertex:
        vertex = [rectangle.level] * 3
        vertex[one], vertex[other] = a, b
        return (vertex[0], vertex[1], vertex[2])

    ring = [
        corner(low_one, low_other),
        corner(high_one, low_other),
        corner(high_one, high_other),
        corner(low_one, high_other),
    ]
    if is_outward(axis) != bool(is_high):
        ring = [ring[0], ring[3], ring[2], ring[1]]
    a, b, c, d = ring
    if rectangle.diagonal:
        return from_lowest((a, b, d)), from_lowest((b, c, d))
    return from_lowest((a, b, c)), from_lowest((a, c, d))


def is_outward(axis: int) -> bool:
    """Return whether the normal points up the axis if a triangle turns from the first to the second
    of the other axes; they are in the order z, y, x, which is left-handed."""
    return axis == 1


def from_lowest(face: Face) -> Face:
    """Rotate a triangle so that its lowest vertex is the first."""
    a, b, c = face
    return (b, c, a) if b < a and b < c else (c, a, b) if c < a and c < b else face


def find_boxes(faces: Sequence[Face]) -> list[FoundBox]:
    """Return boxes that share no triangle."""
    rectangles = collect_rectangles(faces)
    boxes: list[FoundBox] = []
    used: set[int] = set()
    for (side, spans), bottoms in rectangles.items():
        tops = rectangles.get((1, spans), {}) if side == 0 else {}
        for low_z in bottoms:
            for high_z in sorted(level for level in tops if level > low_z):
                low_y, high_y, low_x, high_x = spans
                low, high = (low_z, low_y, low_x), (high_z, high_y, high_x)
                sides = [
                    rectangles.get((2 * axis + end, side_spans(low, high, axis)), {}).get(
                        corner[axis]
                    )
                    for axis in range(3)
                    for end, corner in enumerate((low, high))
                ]
                if (found_box := join_sides(low, high, sides)) is None:
                    continue
                if used.isdisjoint(found_box.numbers):
                    used.update(found_box.numbers)
                    boxes.append(found_box)
                break
    return boxes


def collect_rectangles(faces: Sequence[Face]) -> Rectangles:
    numbers = {from_lowest(face): number for number, face in enumerate(faces)}
    rectangles: Rectangles = defaultdict(dict)
    for face in numbers:
        rectangle = find_rectangle(face)
        if rectangle is None:
            continue
        pair = tuple(numbers.get(one, -1) for one in rectangle_faces(rectangle))
        if min(pair) >= 0:
            found = rectangles[rectangle.side, rectangle.spans]
            found.setdefault(rectangle.level, (rectangle.diagonal, *pair))
    return rectangles


def side_spans(low: Vertex, high: Vertex, axis: int) -> tuple[int, int, int, int]:
    one, other = other_axes(axis)
    return (low[one], high[one], low[other], high[other])


def join_sides(
    low: Vertex, high: Vertex, sides: Sequence[tuple[int, ...] | None]
) -> FoundBox | None:
    """Return the box of six sides, each a diagonal and two numbers; None if one is missing."""
    diagonals, numbers = 0, list[int]()
    for side, found in enumerate(sides):
        if found is None:
            return None
        diagonals |= found[0] << side
        numbers.extend(found[1:])
    return FoundBox(Box(low, high, diagonals), tuple(numbers))


def find_rectangle(face: Face) -> Rectangle | None:
    """Return the rectangle along the axes of which a triangle is one half; None if it is none."""
    a, b, c = face
    for axis in range(3):
        if a[axis] == b[axis] == c[axis]:
            break
    else:
        return None
    one, other = other_axes(axis)
    low_one, high_one = ends(a[one], b[one], c[one])
    low_other, high_other = ends(a[other], b[other], c[other])
    if low_one == high_one or low_other == high_other:
        return None
    corners = {(vertex[one], vertex[other]) for vertex in face}
    diagonal = 0 if {(low_one, low_other), (high_one, high_other)} <= corners else 1
    if diagonal and not {(low_one, high_other), (high_one, low_other)} <= corners:
        return None
    turn = (b[one] - a[one]) * (c[other] - a[other]) - (b[other] - a[other]) * (c[one] - a[one])
    side = 2 * axis + (is_outward(axis) == (turn > 0))
    return Rectangle(side, a[axis], (low_one, high_one, low_other, high_other), diagonal)


def ends(a: int, b: int, c: int) -> tuple[int, int]:
    return min(a, b, c), max(a, b, c)
