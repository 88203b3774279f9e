"""Quantize vertices to a grid without breaking a mesh.

Rounding alone breaks most meshes: a board that is thinner than a bin becomes a sheet with holes
where its sides were, and a narrow triangle becomes a line, which leaves a slit. Here vertices that
round to the same bin keep apart where a free bin is near, and the triangle beside a slit is split
at the vertex that lies on its side. A part that is a box along the axes is quantized as a whole:
its sides get bins, not its corners, so that it stays a box.

V counts vertices, F faces, K the corners of a face, S the places of a box.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np

from tessera.modalities.mesh.adjacency import label_parts

NO_SHIFT = np.zeros(3)
ROUNDING_TOLERANCE = 1e-6
"""In bins. A coordinate halfway between two bins is rounded away from the centre on both sides,
whatever its last bits are; otherwise a mesh would be off centre by half a bin, and would move when
it is quantized again."""
MAX_CROWDED = 20_000
"""A mesh with more vertices that share bins is much finer than the grid, and its vertices are
merged; they would take a second to move."""
NEIGHBOURS = np.array(
    sorted(
        ((x, y, z) for x in (-1, 0, 1) for y in (-1, 0, 1) for z in (-1, 0, 1) if x or y or z),
        key=lambda step: sum(map(abs, step)),
    )
)
"""The 26 bins around a bin, the nearest first."""
BOX_TOLERANCE = 1e-3
"""In bins: how far a corner of a box may be from its sides."""
CORNERS = np.array([[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)])
STEPS = np.array(
    sorted(itertools.product((0, -1, 1), repeat=6), key=lambda step: sum(map(abs, step)))
).reshape(-1, 2, 3)
"""The bins by which the sides of a box may move, few and vertical ones first: things stand on each
other."""


def quantize_vertices(vertices: np.ndarray, faces_FK: np.ndarray, bins: int) -> np.ndarray:
    """Return (V, 3) int64: bins in a cube that the longest side fills, different ones for different
    vertices where that is possible."""
    scaled = scale_to_cube(vertices, bins)
    rounded, exact = round_from_centre(scaled, bins), scaled + (bins - 1) / 2
    fixed_V = quantize_boxes(rounded, exact, faces_FK, bins)
    return separate(rounded, exact, bins, fixed_V)


def round_to_bins(vertices: np.ndarray, bins: int) -> np.ndarray:
    """Return (V, 3) int64: the nearest bins in a cube that the longest side fills."""
    return round_from_centre(scale_to_cube(vertices, bins), bins)


def scale_to_cube(vertices: np.ndarray, bins: int) -> np.ndarray:
    """Return the distances from the centre of the cube, in bins."""
    low, high = vertices.min(axis=0), vertices.max(axis=0)
    longest = max(float((high - low).max()), np.finfo(np.float64).tiny)
    return (vertices - (low + high) / 2) / longest * (bins - 1)


def round_from_centre(from_centre: np.ndarray, bins: int) -> np.ndarray:
    middle = (bins - 1) / 2
    lattice = middle % 1  # an even number of bins has none in the middle
    distance = np.floor(np.abs(from_centre) + ROUNDING_TOLERANCE + 0.5 - lattice) + lattice
    signed = np.where(from_centre < -ROUNDING_TOLERANCE, -distance, distance)
    return np.rint(middle + signed).astype(np.int64)


def shift_in_cube(quantized: np.ndarray, bins: int, shift: np.ndarray) -> np.ndarray:
    """Move vertices by fractions of the cube's side, as far as there is room."""
    room_below, room_above = quantized.min(axis=0), bins - 1 - quantized.max(axis=0)
    offset = np.rint(shift * (bins - 1)).astype(np.int64)
    return quantized + np.clip(offset, -room_below, room_above)


def quantize_boxes(
    rounded: np.ndarray, exact: np.ndarray, faces_FK: np.ndarray, bins: int
) -> np.ndarray:
    """Quantize the parts that are boxes along the axes, in place in `rounded`.

    Opposite sides get different bins. A box that would share a corner with another one, such as
    the upper one of two equal boards, gets sides in the bins beside them if that is enough. Sides
    at the end of the mesh stay, because the mesh would be scaled again without them.

    Returns:
        (V,) bool: the vertices of these boxes.
    """
    fixed_V = np.zeros(len(rounded), dtype=bool)
    boxes = find_box_parts(exact, faces_FK)
    if not boxes:
        return fixed_V
    ends = np.stack([rounded.min(axis=0), rounded.max(axis=0)])
    taken: set[int] = set()
    for members in sorted(boxes, key=lambda members: -np.ptp(exact[members], axis=0).prod()):
        sides = np.stack([exact[members].min(axis=0), exact[members].max(axis=0)])
        low, high = rounded[members].min(axis=0), rounded[members].max(axis=0)
        flat = low == high
        up = flat & ((sides.mean(axis=0) >= low) | (low == 0)) & (low < bins - 1)
        quantized = place_box(np.stack([low - (flat & ~up), high + up]), sides, ends, taken, bins)
        is_high = exact[members] > sides.mean(axis=0)
        rounded[members] = np.where(is_high, quantized[1], quantized[0])
        taken.update(corner_keys(quantized, bins))
        fixed_V[members] = True
    return fixed_V


def find_box_parts(exact: np.ndarray, faces_FK: np.ndarray) -> list[np.ndarray]:
    """Return the vertices of each part that is a box along the axes."""
    labels_V = label_parts(faces_FK, len(exact))
    is_candidate_V = np.bincount(labels_V, minlength=len(exact))[labels_V] == len(CORNERS)
    candidates = np.flatnonzero(is_candidate_V)
    by_part = candidates[np.argsort(labels_V[candidates], kind="stable")]
    boxes = []
    for members in by_part.reshape(-1, len(CORNERS)):
        corners = exact[members]
        low, high = corners.min(axis=0), corners.max(axis=0)
        is_high = corners > (low + high) / 2
        off = np.abs(corners - np.where(is_high, high, low)).max()
        if off < BOX_TOLERANCE and len(np.unique(is_high @ [1, 2, 4])) == len(CORNERS):
            boxes.append(members)
    return boxes


def place_box(
    quantized: np.ndarray, sides: np.ndarray, ends: np.ndarray, taken: set[int], bins: int
) -> np.ndarray:
    """Return the box (2, 3), or the nearest one without a corner in `taken` if moving its sides by
    one bin is enough."""
    if taken.isdisjoint(corner_keys(quantized, bins)):
        return quantized
    moved_S23 = quantized + STEPS[~((STEPS != 0) & (quantized == ends)).any(axis=(1, 2))]
    low_S3, high_S3 = moved_S23.transpose(1, 0, 2)
    moved_S23 = moved_S23[((low_S3 >= 0) & (low_S3 < high_S3) & (high_S3 < bins)).all(axis=1)]
    distances = np.abs(moved_S23 - sides).sum(axis=(1, 2)).round(6)
    for moved in moved_S23[np.argsort(distances, kind="stable")]:
        if taken.isdisjoint(corner_keys(moved, bins)):
            return moved
    return quantized


def corner_keys(quantized: np.ndarray, bins: int) -> list[int]:
    """Return a number for each corner of a box (2, 3)."""
    corners = np.where(CORNERS, quantized[1], quantized[0])
    return (corners @ [1, bins, bins**2]).tolist()


def separate(rounded: np.ndarray, exact: np.ndarray, bins: int, fixed_V: np.ndarray) -> np.ndarray:
    """Move vertices that share a bin to the free neighbour that is nearest to their exact position.

    In each bin a fixed vertex or the one nearest to its centre stays. Where no neighbour is free,
    vertices keep their bin and are merged later.
    """
    keys = rounded @ [1, bins, bins**2]
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    crowded = np.flatnonzero(counts[inverse] > 1)
    if not 0 < len(crowded) <= MAX_CROWDED:
        return rounded
    errors = np.where(fixed_V, -1, np.abs(exact - rounded).sum(axis=1))
    order = crowded[np.lexsort((*exact[crowded].T, errors[crowded].round(6), keys[crowded]))]
    taken, result, previous = set(keys.tolist()), rounded.copy(), -1
    for vertex in order.tolist():
        key = int(keys[vertex])
        if key != previous or fixed_V[vertex]:  # the first of its bin stays
            previous = key
            continue
        options = rounded[vertex] + NEIGHBOURS
        options = options[((options >= 0) & (options < bins)).all(axis=1)]
        distances = np.abs(options - exact[vertex]).sum(axis=1).round(6)
        for option in options[np.argsort(distances, kind="stable")].tolist():
            moved = option[0] + option[1] * bins + option[2] * bins**2
            if moved not in taken:
                taken.add(moved)
                result[vertex] = option
                break
    return result


def close_gaps(vertices: np.ndarray, faces_FK: np.ndarray) -> np.ndarray:
    """Remove triangles without area, and split the neighbour along their longest side at the vertex
    in its middle; quads are left as they are."""
    if faces_FK.shape[1] != 3:
        return faces_FK
    a, b, c = vertices[faces_FK].transpose(1, 0, 2)
    flat = ~np.cross(b - a, c - a).any(axis=1)
    if not flat.any():
        return faces_FK
    faces = [tuple(face) for face in faces_FK.tolist()]
    by_edge: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    alive = [True] * len(faces)

    def add(number: int) -> None:
        u, v, w = faces[number]
        for edge in ((u, v), (v, w), (w, u)):
            by_edge[edge].append(number)

    for number in range(len(faces)):
        add(number)
    queue, limit = np.flatnonzero(flat).tolist(), 4 * len(faces)
    while queue and len(faces) < limit:
        number = queue.pop()
        if not alive[number]:
            continue
        alive[number] = False
        start, middle, end = order_along(vertices, faces[number])
        neighbour = next((n for n in by_edge[end, start] if alive[n]), None)
        if neighbour is None:
            continue
        third = next(v for v in faces[neighbour] if v not in (start, end))
        alive[neighbour] = False
        if third == middle:
            continue
        for face in ((end, middle, third), (middle, start, third)):
            faces.append(face)
            alive.append(True)
            add(len(faces) - 1)
            one, two, three = vertices[list(face)]
            if not np.cross(two - one, three - one).any():
                queue.append(len(faces) - 1)
    left = [face for face, kept in zip(faces, alive) if kept]
    return np.array(left, dtype=np.int64).reshape(-1, 3)


def order_along(vertices: np.ndarray, face: tuple[int, ...]) -> tuple[int, int, int]:
    """Return start, middle and end of a triangle without area, whose long side runs from start to
    end in the orientation of the face."""
    u, v, w = face
    sides = [(u, v, w), (v, w, u), (w, u, v)]
    lengths = [np.square(vertices[end] - vertices[start]).sum() for start, end, _ in sides]
    start, end, middle = sides[int(np.argmax(lengths))]
    return start, middle, end
