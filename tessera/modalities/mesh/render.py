"""Render a mesh with numpy: flat shading, a depth buffer, and edges as thin lines.

The camera is in front (-y), to the right (+x) and above (+z), with an orthographic projection. A
face is lit on both sides, because the faces of downloaded and generated meshes are often inside
out. In the image x points right and y points down, in pixels; depth grows towards the camera.
"""

from __future__ import annotations

import math

import numpy as np
import PIL.Image

from tessera.modalities.image.media import Image

AZIMUTH, ELEVATION = math.radians(32), math.radians(24)
TO_CAMERA = np.array(
    [
        math.sin(AZIMUTH) * math.cos(ELEVATION),
        -math.cos(AZIMUTH) * math.cos(ELEVATION),
        math.sin(ELEVATION),
    ]
)
RIGHT = np.array([math.cos(AZIMUTH), math.sin(AZIMUTH), 0.0])
UPWARD = np.cross(TO_CAMERA, RIGHT)
LIGHT = TO_CAMERA - 0.75 * RIGHT + 0.9 * UPWARD
LIGHT /= np.linalg.norm(LIGHT)

FACE_COLOR = np.array([196.0, 214.0, 238.0])
BACKGROUND = 255
AMBIENT = 0.45  # the brightness of a face parallel to the light
EDGE_DARKENING = 0.42  # how much darker an edge is than its face
# In pixels: edges of triangles of less height are fainter, or a fine mesh would be all lines.
FULL_EDGE_HEIGHT = 14.0
MARGIN = 0.06
SUPERSAMPLING = 2  # the image is rendered this many times larger and reduced, for smooth edges


def render(vertices: np.ndarray, faces: np.ndarray, size: int) -> Image:
    """Render vertices (V, 3) and faces (F, 3 or 4) as a square image of `size` pixels.

    Without faces the image is empty.
    """
    side = size * SUPERSAMPLING
    canvas = np.full((side, side, 3), float(BACKGROUND))
    if len(faces):
        depth_buffer = np.full((side, side), -np.inf)
        projected = project(vertices, side)
        for triangle in zip(*shade_triangles(vertices, projected, faces)):
            rasterize(canvas, depth_buffer, *triangle)
    reduced = PIL.Image.fromarray(np.rint(canvas).astype(np.uint8)).reduce(SUPERSAMPLING)
    return Image(np.asarray(reduced))


def project(vertices: np.ndarray, side: int) -> np.ndarray:
    """Return (V, 3): x and y in pixels, as large as fits, and depth in the same unit."""
    rotated = vertices @ np.stack([RIGHT, -UPWARD, TO_CAMERA], axis=1)
    low, high = rotated.min(axis=0), rotated.max(axis=0)
    scale = side * (1 - 2 * MARGIN) / max(float((high - low)[:2].max()), 1e-12)
    return (rotated - (low + high) / 2) * scale + np.array([side / 2, side / 2, 0.0])


def shade_triangles(
    vertices: np.ndarray, projected: np.ndarray, faces: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return triangles as (T, 3, 3) projected corners, (T, 3) colours, and (T, 3) which of the
    edges opposite each corner are visible."""
    if faces.shape[1] == 3:
        triangles, visible_edges = faces, np.ones((len(faces), 3))
    else:
        triangles = np.concatenate([faces[:, [0, 1, 2]], faces[:, [0, 2, 3]]])
        # The diagonal of a quad is not drawn.
        visible_edges = np.repeat([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]], len(faces), axis=0)
    one, two, three = (vertices[triangles[:, corner]] for corner in range(3))
    normals = np.cross(two - one, three - one)
    normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-30)
    normals *= np.where(normals @ TO_CAMERA < 0, -1.0, 1.0)[:, None]
    brightness = AMBIENT + (1 - AMBIENT) * np.clip(normals @ LIGHT, 0, 1)
    return projected[triangles], FACE_COLOR * brightness[:, None], visible_edges


def rasterize(
    canvas: np.ndarray,
    depth_buffer: np.ndarray,
    corners: np.ndarray,
    colour: np.ndarray,
    visible_edges: np.ndarray,
) -> None:
    """Draw one triangle where nothing nearer was drawn before."""
    low = np.maximum(np.floor(corners[:, :2].min(axis=0)).astype(int), 0)
    high = np.minimum(np.ceil(corners[:, :2].max(axis=0)).astype(int) + 1, len(canvas))
    (ax, ay, _), (bx, by, _), (cx, cy, _) = corners.tolist()
    area = (bx - ax) * (cy - ay) - (by - ay) * (cx - ax)
    if abs(area) < 1e-9 or (high <= low).any():
        return
    x, y = np.arange(low[0], high[0]) + 0.5, np.arange(low[1], high[1])[:, None] + 0.5
    weight_b = ((x - ax) * (cy - ay) - (y - ay) * (cx - ax)) / area
    weight_c = ((y - ay) * (bx - ax) - (x - ax) * (by - ay)) / area
    barycentric = np.stack([1 - weight_b - weight_c, weight_b, weight_c])
    depth = np.tensordot(corners[:, 2], barycentric, axes=1)
    window = np.s_[low[1] : high[1], low[0] : high[0]]
    visible = (barycentric >= -1e-9).all(axis=0) & (depth > depth_buffer[window])
    depth_buffer[window][visible] = depth[visible]
    darkening = edge_darkening(corners, abs(area), barycentric, visible_edges)
    canvas[window][visible] = (colour * (1 - darkening)[..., None])[visible]


def edge_darkening(
    corners: np.ndarray, area: float, barycentric: np.ndarray, visible_edges: np.ndarray
) -> np.ndarray:
    """Return how much darker each pixel is because it is on an edge."""
    opposite = corners[[1, 2, 0], :2] - corners[[2, 0, 1], :2]
    heights = area / np.maximum(np.hypot(*opposite.T), 1e-9)
    near_edge = barycentric * heights[:, None, None] < SUPERSAMPLING * 0.5
    on_edge = near_edge & (visible_edges > 0)[:, None, None]
    strength = min(1.0, float(heights.min()) / (FULL_EDGE_HEIGHT * SUPERSAMPLING))
    return EDGE_DARKENING * strength * on_edge.any(axis=0)
