"""Fill a part of a mesh with few boxes along the axes.

The part is divided into cubic cells, of which those on the surface and those enclosed by it are
filled. Boxes grow from random filled cells as long as the layers that they add are mostly filled;
the one that covers most is kept, and so on, until most of the part is covered. X, Y and Z count
cells, P points.
"""

from __future__ import annotations

import itertools

import numpy as np

from tessera.modalities.mesh.point_clouds import sample_points
from tessera.modalities.mesh.simplify import BOX_CORNERS, BOX_TRIANGLES, Part

CELL = 1 / 28
"""The size of a cell as a fraction of the longest side of the mesh."""
NUM_POINTS = 20_000
MAX_BOXES = 6
COVERED = 0.97
"""The fraction of the cells of a part that the boxes cover, unless they would be too many."""
FILLED = 0.85
"""The fraction of a layer of cells that must be filled for a box to grow over it."""
LEAST_GAIN = 0.01
"""A box that covers fewer further cells than this fraction is left out."""
NUM_SEEDS = 5
"""The number of cells from which boxes grow."""
MIN_THICKNESS = 0.008
"""The least side of a box, as a fraction of the longest side of the mesh."""
DIRECTIONS = (
    ((0, -1), (0, 1), (1, -1), (1, 1), (2, -1), (2, 1)),
    ((2, -1), (2, 1), (1, -1), (1, 1), (0, -1), (0, 1)),
)
"""The axes and directions in which a box grows: first to the sides, or first up and down."""

Cell = tuple[int, ...]


def fill_with_boxes(part: Part, size: float) -> list[Part]:
    """Return boxes that cover a part of a mesh whose longest side is `size`."""
    origin = part.vertices.min(axis=0)
    extent = np.ptp(part.vertices, axis=0)
    shape = np.maximum(np.ceil(extent / (CELL * size) - 1e-6).astype(int), 1)
    cell = np.where(extent > 0, extent / shape, CELL * size)
    points = sample_points(part.vertices - origin, part.faces, NUM_POINTS)
    cells_P3 = np.clip((points / cell).astype(int), 0, shape - 1)
    surface = np.zeros(shape, dtype=bool)
    surface[tuple(cells_P3.T)] = True
    boxes = []
    for start, end in cover(fill_inside(surface)):
        low, high = np.array(start) * cell, np.array(end) * cell
        inside = ((cells_P3 >= start) & (cells_P3 < end)).all(axis=1)
        if inside.any():
            # A side on the surface goes through its points instead of between two cells.
            nearest, farthest = points[inside].min(axis=0), points[inside].max(axis=0)
            low = np.where(nearest - low < cell, nearest, low)
            high = np.where(high - farthest < cell, farthest, high)
        high = np.maximum(high, low + MIN_THICKNESS * size)
        boxes.append(Part(origin + low + BOX_CORNERS * (high - low), BOX_TRIANGLES))
    return boxes


def fill_inside(surface_XYZ: np.ndarray) -> np.ndarray:
    """Fill the cells that no path of empty cells connects with the outside."""
    surface = np.pad(surface_XYZ, 1)
    outside = np.pad(np.zeros_like(surface_XYZ), 1, constant_values=True)
    while True:
        grown = outside.copy()
        for axis in range(3):
            one, other = np.moveaxis(grown, axis, 0), np.moveaxis(outside, axis, 0)
            one[1:] |= other[:-1]
            one[:-1] |= other[1:]
        grown &= ~surface
        if (grown == outside).all():
            return ~outside[1:-1, 1:-1, 1:-1]
        outside = grown


def cover(filled_XYZ: np.ndarray) -> list[tuple[Cell, Cell]]:
    """Return the first and the last cell plus one of boxes that cover filled cells."""
    rng = np.random.default_rng(0)
    left, total = filled_XYZ.copy(), int(filled_XYZ.sum())
    filled_sums = cumulative_sums(filled_XYZ)
    boxes: list[tuple[Cell, Cell]] = []
    while left.sum() > (1 - COVERED) * total and len(boxes) < MAX_BOXES:
        left_sums, cells = cumulative_sums(left), np.argwhere(left)
        seeds = cells[rng.choice(len(cells), min(NUM_SEEDS, len(cells)), replace=False)]
        grown = [
            grow(tuple(seed), directions, filled_sums, left_sums)
            for seed, directions in itertools.product(seeds.tolist(), DIRECTIONS)
        ]
        start, end = max(grown, key=lambda box: count_cells(left_sums, *box))
        if boxes and count_cells(left_sums, start, end) < LEAST_GAIN * total:
            break
        left[tuple(slice(a, b) for a, b in zip(start, end))] = False
        boxes.append((start, end))
    return boxes


def grow(
    seed: Cell,
    directions: tuple[tuple[int, int], ...],
    filled_sums: np.ndarray,
    left_sums: np.ndarray,
) -> tuple[Cell, Cell]:
    """Grow a box from a cell, layer by layer, while the layers are mostly filled and cover a cell
    that is left."""
    start, end = list(seed), [one + 1 for one in seed]
    growing = True
    while growing:
        growing = False
        for axis, direction in directions:
            while True:
                low, high = start.copy(), end.copy()
                if direction > 0:
                    low[axis], high[axis] = end[axis], end[axis] + 1
                else:
                    low[axis], high[axis] = start[axis] - 1, start[axis]
                if low[axis] < 0 or high[axis] >= filled_sums.shape[axis]:
                    break
                volume = np.prod(np.subtract(high, low))
                if count_cells(filled_sums, low, high) < FILLED * volume:
                    break
                if count_cells(left_sums, low, high) == 0:
                    break
                if direction > 0:
                    end[axis] += 1
                else:
                    start[axis] -= 1
                growing = True
    return tuple(start), tuple(end)


def cumulative_sums(cells_XYZ: np.ndarray) -> np.ndarray:
    """Return (X + 1, Y + 1, Z + 1) the numbers of cells below each corner."""
    sums = cells_XYZ.astype(np.int64)
    for axis in range(3):
        sums = sums.cumsum(axis)
    return np.pad(sums, ((1, 0), (1, 0), (1, 0)))


def count_cells(sums: np.ndarray, start: Cell | list[int], end: Cell | list[int]) -> int:
    """Return the number of cells in a box, from the cumulative sums."""
    (a, b, c), (x, y, z) = start, end
    above = sums[x, y, z] - sums[a, y, z] - sums[x, b, z] + sums[a, b, z]
    below = sums[x, y, c] - sums[a, y, c] - sums[x, b, c] + sums[a, b, c]
    return int(above - below)
