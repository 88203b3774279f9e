"""A picture of a mesh, drawn with numpy: each face in its shade, the nearest on top, its edges as
thin lines.

The eye stands in front (-y), to the right (+x) and above (+z), infinitely far away, so that
parallel edges stay parallel. A face is as bright as its normal is turned to the light, on both of
its sides, since faces of found and made meshes are often turned inside out. In the picture x goes
to the right and y down, in pixels; depth grows towards the eye.
"""

from __future__ import annotations

import math

import numpy as np
import PIL.Image

from tessera.modalities.image.media import Image

TURN, RAISE = math.radians(32), math.radians(24)
EYE = np.array(
    [math.sin(TURN) * math.cos(RAISE), -math.cos(TURN) * math.cos(RAISE), math.sin(RAISE)]
)
RIGHT = np.array([math.cos(TURN), math.sin(TURN), 0.0])
UPWARD = np.cross(EYE, RIGHT)
LIGHT = EYE - 0.75 * RIGHT + 0.9 * UPWARD
LIGHT /= np.linalg.norm(LIGHT)

CLAY = np.array([196.0, 214.0, 238.0])
GROUND = 255
SHADOW = 0.45  # how bright a face is that the light only grazes
LINE = 0.42  # how much darker an edge is than its face
ROOM_FOR_LINES = (
    14.0  # pixels: edges of lower triangles are fainter, or a fine mesh would be all lines
)
MARGIN = 0.06
FINER = 2  # drawn this many times larger and then reduced, which smooths the edges


def draw(vertices: np.ndarray, faces: np.ndarray, size: int) -> Image:
    """(V, 3) and (F, 3 or 4) as a square picture of `size` pixels; of no faces, an empty one."""
    side = size * FINER
    canvas = np.full((side, side, 3), float(GROUND))
    if len(faces):
        nearest = np.full((side, side), -np.inf)
        seen = on_screen(vertices, side)
        for corners, colour, lines in zip(*painted(vertices, seen, faces)):
            paint(canvas, nearest, corners, colour, lines)
    drawn = PIL.Image.fromarray(np.rint(canvas).astype(np.uint8)).reduce(FINER)
    return Image(np.asarray(drawn))


def on_screen(vertices: np.ndarray, side: int) -> np.ndarray:
    """(V, 3): x and y in pixels, as large as fits, and depth in the same unit."""
    seen = vertices @ np.stack([RIGHT, -UPWARD, EYE], axis=1)
    low, high = seen.min(axis=0), seen.max(axis=0)
    scale = side * (1 - 2 * MARGIN) / max(float((high - low)[:2].max()), 1e-12)
    return (seen - (low + high) / 2) * scale + np.array([side / 2, side / 2, 0.0])


def painted(
    vertices: np.ndarray, seen: np.ndarray, faces: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Triangles as (T, 3, 3) places on the screen, (T, 3) colours, and (T, 3) which of the edges
    opposite a corner show."""
    if faces.shape[1] == 3:
        triangles, shows = faces, np.ones((len(faces), 3))
    else:
        triangles = np.concatenate([faces[:, [0, 1, 2]], faces[:, [0, 2, 3]]])
        shows = np.repeat(
            [[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]], len(faces), axis=0
        )  # not the diagonal
    one, two, three = (vertices[triangles[:, corner]] for corner in range(3))
    normals = np.cross(two - one, three - one)
    normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-30)
    normals *= np.where(normals @ EYE < 0, -1.0, 1.0)[:, None]
    brightness = SHADOW + (1 - SHADOW) * np.clip(normals @ LIGHT, 0, 1)
    return seen[triangles], CLAY * brightness[:, None], shows


def paint(
    canvas: np.ndarray,
    nearest: np.ndarray,
    corners: np.ndarray,
    colour: np.ndarray,
    shows: np.ndarray,
) -> None:
    """One triangle, where nothing nearer was painted before."""
    low = np.maximum(np.floor(corners[:, :2].min(axis=0)).astype(int), 0)
    high = np.minimum(np.ceil(corners[:, :2].max(axis=0)).astype(int) + 1, len(canvas))
    (ax, ay, _), (bx, by, _), (cx, cy, _) = corners.tolist()
    area = (bx - ax) * (cy - ay) - (by - ay) * (cx - ax)
    if abs(area) < 1e-9 or (high <= low).any():
        return
    x, y = np.arange(low[0], high[0]) + 0.5, np.arange(low[1], high[1])[:, None] + 0.5
    # Barycentric coordinates: how near a pixel is to each corner, 1 there and 0 on the edge
    # opposite.
    near_b = ((x - ax) * (cy - ay) - (y - ay) * (cx - ax)) / area
    near_c = ((y - ay) * (bx - ax) - (x - ax) * (by - ay)) / area
    near = np.stack([1 - near_b - near_c, near_b, near_c])
    depth = np.tensordot(corners[:, 2], near, axes=1)
    place = np.s_[low[1] : high[1], low[0] : high[0]]
    visible = (near >= -1e-9).all(axis=0) & (depth > nearest[place])
    nearest[place][visible] = depth[visible]
    canvas[place][visible] = (colour * (1 - shade(corners, abs(area), near, shows))[..., None])[
        visible
    ]


def shade(corners: np.ndarray, area: float, near: np.ndarray, shows: np.ndarray) -> np.ndarray:
    """How much darker each pixel is for lying on an edge."""
    opposite = corners[[1, 2, 0], :2] - corners[[2, 0, 1], :2]
    heights = area / np.maximum(np.hypot(*opposite.T), 1e-9)
    on_edge = (near * heights[:, None, None] < FINER * 0.5) & (shows > 0)[:, None, None]
    return LINE * min(1.0, float(heights.min()) / (ROOM_FOR_LINES * FINER)) * on_edge.any(axis=0)
