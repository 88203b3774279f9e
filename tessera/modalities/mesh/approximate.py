"""Approximate the parts of a mesh by boxes and few triangles, within an error.

Each part, a connected component, is replaced by the cheapest of these shapes that stays near
enough to it: its bounding box, an octagonal column, several boxes that fill it, or fewer triangles
by quadric error. Boxes and columns are preferred, since a model generates them best that was
trained on few meshes after synthetic ones. A rounded cushion becomes a box, and the frame of a sofa
that is one part becomes a seat, a back and arms. Parts that are too small to be seen at this error
are left out, and so are those inside a box.

Errors are fractions of the longest side of the mesh. P counts points.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tessera.modalities.mesh import synthetic
from tessera.modalities.mesh.adjacency import count_edges
from tessera.modalities.mesh.cuboids import fill_with_boxes
from tessera.modalities.mesh.io import require_simplification
from tessera.modalities.mesh.point_clouds import sample_points
from tessera.modalities.mesh.simplify import Part, box_along, join_parts, split_parts

ERRORS = (0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08)
"""The errors to try, the smallest first."""
FACE_COUNTS = (16, 20, 28, 40, 56, 80)
"""The numbers of triangles to try for a part, exceeded by up to a tenth."""
DENSE = 2000
"""A part of more triangles is simplified to so many first."""
MAX_PARTS = 60
"""A mesh with more parts that can be seen is not approximated."""
EXACT = 0.01
"""Below this error of a shape, no further one is tried."""
SMALLEST_PART = 1.5
"""Parts that are shorter than this many times the error are left out."""
FILLED_PART = 0.09
"""Only parts of at least this fraction of the longest side are filled with boxes."""
FILLED_ERROR = 0.04
"""Only parts without a box or a column within this error are filled with boxes."""
BOX_ALLOWANCE, FILLED_ALLOWANCE = 2.5, 1.5
"""How many times the error the box of a solid part, or a column and several boxes, may have."""
BOX_COST, COLUMN_COST = 0.24, 0.4
"""The cost of a triangle of a box along the axes, by the number of its tokens in `meshes-tree`, and
of a column, which is easier to generate than other triangles; these cost 1."""
MAX_COST = 0.25
"""The largest cost of a mesh for each face that it may have: one of boxes can have them all, and
one of other triangles a quarter of them."""
ROUND = (0.8, 1.25)
"""The ratio of the horizontal sides of a part that may become a column."""
BOX_AREAS = (0.6, 1.6)
"""The surface of a solid part as a fraction of that of its box. With less, the part is an open
sheet or a bent tube, and with more it is hollow and no box replaces it."""
ROTATED_AREA = 0.75
"""A box is rotated only if its surface is smaller than this fraction of that along the axes."""
NUM_POINTS, NUM_COMPARED = 2000, 400
"""Points on the surface of a part, and how many of these are compared with those of a shape."""


@dataclass(frozen=True)
class Shape:
    part: Part
    error: float
    """The error divided by the allowance."""
    cost: float
    solid: bool = False
    """Whether it is a box along the axes that hides what is inside."""


@dataclass(frozen=True)
class Choice:
    origin: np.ndarray
    length: float
    """The longest side of the part as a fraction of that of the mesh."""
    shapes: list[Shape]

    def cheapest(self, error: float) -> Shape | None:
        """Return the cheapest shape within an error at its place; None if there is none."""
        exact = [shape for shape in self.shapes if shape.error <= error]
        if not exact:
            return None
        shape = min(exact, key=lambda shape: shape.cost)
        return replace(shape, part=Part(shape.part.vertices + self.origin, shape.part.faces))


def approximate(
    vertices: np.ndarray, faces: np.ndarray, max_faces: int, max_error: float
) -> Part | None:
    """Return the most exact approximation of at most `max_faces` triangles that is not too costly
    to generate; None if its error is larger than `max_error`, or if the mesh has too many parts."""
    choices = find_shapes(vertices, faces)
    for error in ERRORS if choices else ():
        if error > max_error:
            break
        seen = [choice for choice in choices if choice.length >= SMALLEST_PART * error]
        shapes = [shape for choice in seen if (shape := choice.cheapest(error)) is not None]
        is_complete = 0 < len(shapes) == len(seen)
        num_faces = sum(len(shape.part.faces) for shape in shapes)
        is_cheap = sum(shape.cost for shape in shapes) <= MAX_COST * max_faces
        if is_complete and num_faces <= max_faces and is_cheap:
            return join_parts([shape.part for shape in shapes])
    return None


def find_shapes(vertices: np.ndarray, faces: np.ndarray) -> list[Choice]:
    """Return the shapes that may replace each visible part, the largest part first; none if there
    are more than MAX_PARTS."""
    size = float(np.ptp(vertices, axis=0).max())
    parts = sorted(split_parts(vertices, faces), key=lambda part: -two_longest_sides(part))
    known: dict[tuple[bytes, bytes], list[Shape]] = {}
    choices: list[Choice] = []
    solids: list[tuple[np.ndarray, np.ndarray]] = []
    for part in parts:
        low, high = part.vertices.min(axis=0), part.vertices.max(axis=0)
        length = float((high - low).max()) / size
        margin = size * EXACT / 2
        hidden = any(
            (low >= start - margin).all() and (high <= end + margin).all() for start, end in solids
        )
        if hidden or length < SMALLEST_PART * ERRORS[0]:
            continue
        moved = Part(part.vertices - low, part.faces)
        # Rounded, since equal parts at different places differ in their last bits.
        key = (np.rint(moved.vertices / size * 1e3).tobytes(), part.faces.tobytes())
        if key not in known:
            known[key] = list(shapes_of(moved, size))
        if known[key] and known[key][0].solid:
            solids.append((low, high))
        choices.append(Choice(low, length, known[key]))
        if len(choices) > MAX_PARTS:
            return []
    return choices


def two_longest_sides(part: Part) -> float:
    """Return the product of the two longest sides of the bounding box."""
    return float(np.prod(np.sort(np.ptp(part.vertices, axis=0))[1:]))


def shapes_of(part: Part, size: float) -> Iterator[Shape]:
    """Return what may replace a part of a mesh whose longest side is `size`: the box first, if it
    may be one."""
    points = sample_points(part.vertices, part.faces, NUM_POINTS)
    along_axes, box = find_boxes(part)
    fraction = part.area / max(box.area, 1e-12)
    errors = []
    if fraction < BOX_AREAS[1]:
        error = surface_error(points, box, size)
        if fraction > BOX_AREAS[0]:
            error /= BOX_ALLOWANCE
        solid = box is along_axes and fraction > BOX_AREAS[0] and error < EXACT
        cost = BOX_COST if box is along_axes else COLUMN_COST
        yield Shape(box, error, cost * len(box.faces), solid)
        errors.append(error)
        if error < EXACT / BOX_ALLOWANCE:
            return
    column = find_column(points)
    if column is not None:
        error = surface_error(points, column, size) / FILLED_ALLOWANCE
        yield Shape(column, error, COLUMN_COST * len(column.faces))
        errors.append(error)
    long = np.ptp(part.vertices, axis=0).max() >= FILLED_PART * size
    if long and min(errors, default=1.0) > FILLED_ERROR:
        boxes = join_parts(fill_with_boxes(part, size))
        error = surface_error(points, boxes, size) / FILLED_ALLOWANCE
        yield Shape(boxes, error, BOX_COST * len(boxes.faces))
    for simplified in fewer_triangles(part):
        error = surface_error(points, simplified, size)
        yield Shape(simplified, error, len(simplified.faces))
        if error < EXACT:
            break


def find_column(points_P3: np.ndarray) -> Part | None:
    """Return a column or a frustum of eight sides around the vertical axis; None if the part is not
    round from above, or flat."""
    low, high = points_P3.min(axis=0), points_P3.max(axis=0)
    width, depth, height = (high - low).tolist()
    if height <= 0 or depth <= 0 or not ROUND[0] < width / depth < ROUND[1]:
        return None
    centre = (low + high)[:2] / 2
    radius_P = np.linalg.norm(points_P3[:, :2] - centre, axis=1)
    level_P = (points_P3[:, 2] - low[2]) / height
    ends = [radius_P[level_P < 0.15], radius_P[level_P > 0.85]]
    if min(len(end) for end in ends) == 0:
        return None
    bottom, top = (float(np.quantile(end, 0.95)) for end in ends)
    mesh = synthetic.column(bottom, float(low[2]), float(high[2]), top=top)
    return Part(mesh.vertices + [*centre, 0.0], mesh.triangles())


def find_boxes(part: Part) -> tuple[Part, Part]:
    """Return the bounding box along the axes, and the one to use: that one, or the one along the
    axes of the part itself if it is much smaller."""
    _, _, own_axes = np.linalg.svd(part.vertices - part.vertices.mean(axis=0), full_matrices=False)
    along_axes, rotated = (box_along(part.vertices, axes) for axes in (np.eye(3), own_axes))
    return along_axes, rotated if rotated.area < ROTATED_AREA * along_axes.area else along_axes


def fewer_triangles(part: Part) -> Iterator[Part]:
    """Return a part with increasing numbers of triangles, and as it is if it has few; a closed part
    stays closed."""
    closed = count_edges(part.faces).watertight
    simplify = require_simplification().simplify
    if len(part.faces) > DENSE:
        # Once, instead of for each number of triangles.
        part = Part(*simplify(part.vertices, part.faces, target_count=DENSE))
    for count in FACE_COUNTS:
        if len(part.faces) <= count:
            yield part
            return
        smaller = Part(*simplify(part.vertices, part.faces, target_count=count))
        if 0 < len(smaller.faces) <= 1.1 * count and (
            not closed or count_edges(smaller.faces).watertight
        ):
            yield smaller


def surface_error(points_P3: np.ndarray, shape: Part, size: float) -> float:
    """Return the distance that 95 % of the points of either surface keep to the other."""
    shape_points = sample_points(shape.vertices, shape.faces, NUM_POINTS)
    forward, backward = (
        distance_quantile(points_P3, shape_points),
        distance_quantile(shape_points, points_P3),
    )
    return max(forward, backward) / size


def distance_quantile(points_P3: np.ndarray, surface_P3: np.ndarray) -> float:
    compared = points_P3[:: NUM_POINTS // NUM_COMPARED]
    squared = (compared**2).sum(1)[:, None] + (surface_P3**2).sum(1) - 2 * compared @ surface_P3.T
    return float(np.quantile(np.sqrt(np.maximum(squared.min(axis=1), 0)), 0.95))
