"""Synthetic images: one to three shapes on a background, with a caption that describes them.

Image number `i` of a seed is a pure function of `(seed, i)` at any size. A `Scene` lists its
contents in units of the image's side (x to the right, y down, both from 0 to 1), and `draw` renders
it. The scene stays available, so that a sample can be compared with its prompt. Synthetic images
are never flipped, since captions contain "left of" and "right of".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
import PIL.Image
from PIL import ImageDraw, ImageFilter

from tessera.data.dataset import SyntheticDataset
from tessera.data.synthetic import pick
from tessera.modalities.image.media import Image, ImageBatch, ImageExample, collate, convert

Kind = Literal["circle", "square", "triangle", "diamond", "star", "ring", "cross", "heart", "moon"]
Size = Literal["small", "medium", "large"]
Texture = Literal["plain", "striped", "dotted", "checkered", "shaded"]
BackgroundKind = Literal["plain", "gradient", "noise"]
RGB = tuple[int, int, int]

KINDS: tuple[Kind, ...] = (
    "circle",
    "square",
    "triangle",
    "diamond",
    "star",
    "ring",
    "cross",
    "heart",
    "moon",
)
RADII: dict[Size, tuple[float, float]] = {
    "small": (0.085, 0.105),
    "medium": (0.135, 0.165),
    "large": (0.2, 0.235),
}
TEXTURES: tuple[Texture, ...] = ("plain", "striped", "dotted", "checkered", "shaded")
BACKGROUND_KINDS: tuple[BackgroundKind, ...] = ("plain", "gradient", "noise")
COLOURS: dict[str, RGB] = {
    "red": (219, 50, 47),
    "orange": (245, 138, 31),
    "yellow": (250, 210, 48),
    "green": (52, 160, 84),
    "blue": (44, 104, 212),
    "purple": (130, 70, 190),
    "pink": (244, 120, 176),
    "brown": (130, 82, 45),
    "white": (250, 250, 248),
    "black": (30, 30, 34),
}
BACKGROUNDS: dict[str, RGB] = {
    "white": (240, 240, 238),
    "grey": (158, 162, 168),
    "black": (26, 27, 32),
    "cream": (250, 238, 208),
    "light blue": (182, 218, 242),
    "light green": (200, 234, 204),
    "lavender": (216, 206, 242),
    "dark blue": (28, 40, 88),
    "dark green": (24, 70, 56),
}

MIN_CONTRAST = 105
"""Minimum distance in RGB between a shape and its background."""
GRID_POSITIONS = (0.375, 0.5, 0.625)
"""Coordinates of the centre of a single shape in a plain image: left, middle and right, or top,
middle and bottom."""
PLAIN_RADII: dict[Size, float] = {"medium": 0.18, "large": 0.27}
"""Radii of a single shape in a plain image; the larger just fits at the outer positions."""
PLAIN_BACKGROUNDS = ("white", "black", "light blue")
MIN_GAP = 0.02
"""Minimum space between two shapes, and between a shape and the edge of the image."""
RELATION_RATIO = 1.4
"""A caption uses "left of" only if the horizontal distance is at least this many times the vertical
one, and accordingly for the other relations."""
SUPERSAMPLING = 4
"""Outlines are drawn this many times larger and then reduced, which anti-aliases their edges."""


@dataclass(frozen=True)
class Shape:
    """One shape of a scene."""

    kind: Kind
    colour: str
    """The colour's name, a key of COLOURS."""
    size: Size
    texture: Texture
    centre: tuple[float, float]
    radius: float
    rotation: float
    """The rotation in radians, clockwise."""
    rgb: RGB
    """The colour as painted, close to the named one."""
    second_rgb: RGB
    """The second colour of a texture."""


@dataclass(frozen=True)
class Background:
    """The background of a scene."""

    kind: BackgroundKind
    colour: str
    """The colour's name, a key of BACKGROUNDS."""
    rgb: RGB
    angle: float
    """The direction of a gradient in radians."""
    noise_seed: int
    """The seed of the noise."""


@dataclass(frozen=True)
class Scene:
    """The contents of one image and its caption."""

    shapes: tuple[Shape, ...]
    background: Background
    caption: str


@dataclass(frozen=True)
class SyntheticImages(SyntheticDataset):
    """A dataset of synthetic images."""

    size: int
    """The side of the square images in pixels."""
    channels: int = 3
    """The channels of the images: 3, 1 for grey or 4 with an opaque alpha."""
    max_shapes: int = 3
    """The maximum number of shapes, 1 to 3."""
    plain: bool = False
    """Use exact flat colours and no rotation; a single shape is medium or large and at one of nine
    positions, so that a caption can describe the whole image."""

    def scene(self, index: int) -> Scene:
        """Return the contents of an image."""
        return sample_scene(self.seed, self.number(index), self.max_shapes, self.plain)

    def caption(self, index: int) -> str:
        """Return the caption of an image without rendering it."""
        return self.scene(index).caption

    def signature(self, index: int) -> str:
        """Return everything that an example depends on besides its number."""
        return f"{self.seed} {self.size} {self.channels} {self.max_shapes} {self.plain}"

    def item(self, index: int, rng: np.random.Generator) -> ImageExample:
        """Render one example; nothing is drawn from `rng`."""
        scene = self.scene(index)
        picture = convert(draw(scene, self.size).to_pillow(), self.channels)
        return ImageExample(Image.from_pillow(picture).to_floats(), scene.caption)

    def collate(self, examples: list[ImageExample]) -> ImageBatch:
        """Stack examples into a batch."""
        return collate(examples)


# ---- contents


def sample_scene(seed: int, number: int, max_shapes: int = 3, plain: bool = False) -> Scene:
    """Sample the contents and the caption of one image."""
    rng = np.random.default_rng([seed, number])
    background = sample_background(rng, PLAIN_BACKGROUNDS) if plain else sample_background(rng)
    shapes = tuple(sample_shapes(rng, background, max_shapes))
    if plain:
        background = replace(background, kind="plain", rgb=BACKGROUNDS[background.colour])
        shapes = tuple(
            replace(shape, texture="plain", rotation=0.0, rgb=COLOURS[shape.colour])
            for shape in shapes
        )
        shapes = (snap_to_grid(*shapes),) if len(shapes) == 1 else shapes
    return Scene(shapes, background, describe(rng, shapes, background))


def snap_to_grid(shape: Shape) -> Shape:
    """Return the shape in one of two sizes, at the nearest of nine positions."""
    size: Size = "large" if shape.size == "large" else "medium"
    x, y = (min(GRID_POSITIONS, key=lambda point: abs(point - value)) for value in shape.centre)
    return replace(shape, size=size, radius=PLAIN_RADII[size], centre=(x, y))


def sample_background(
    rng: np.random.Generator, colours: tuple[str, ...] = tuple(BACKGROUNDS)
) -> Background:
    """Sample a background of one of the given colours."""
    colour = pick(rng, colours)
    return Background(
        kind=pick(rng, BACKGROUND_KINDS),
        colour=colour,
        rgb=jitter_colour(rng, BACKGROUNDS[colour]),
        angle=float(rng.uniform(0, 2 * math.pi)),
        noise_seed=int(rng.integers(1 << 31)),
    )


def sample_shapes(rng: np.random.Generator, background: Background, max_count: int) -> list[Shape]:
    """Sample shapes that do not overlap and differ in kind or colour."""
    count = min(max_count, int(rng.choice(3, p=[0.35, 0.45, 0.2])) + 1)
    looks = sample_distinct_looks(rng, count, find_visible_colours(background.colour))
    sizes = sample_sizes(rng, count)
    radii = [float(rng.uniform(*RADII[size])) for size in sizes]
    if sizes == ["large"]:
        radii[0] *= float(rng.uniform(1, 1.4))
    centres = sample_centres(
        rng, [radius * outline_radius(kind) for radius, (kind, _) in zip(radii, looks)]
    )
    return [
        sample_shape(rng, background, kind, colour, size, radius, centre)
        for (kind, colour), size, radius, centre in zip(looks, sizes, radii, centres)
    ]


def sample_shape(
    rng: np.random.Generator,
    background: Background,
    kind: Kind,
    colour: str,
    size: Size,
    radius: float,
    centre: tuple[float, float],
) -> Shape:
    """Sample the remaining properties of a shape: its texture, rotation and exact colours."""
    rgb = jitter_colour(rng, COLOURS[colour])
    return Shape(
        kind=kind,
        colour=colour,
        size=size,
        texture=pick(rng, allowed_textures(kind, size)),
        centre=centre,
        radius=radius,
        rotation=float(
            rng.uniform(-0.2, 0.2)
        ),  # a larger rotation would turn a square into a diamond
        rgb=rgb,
        second_rgb=choose_second_colour(rgb, background.rgb),
    )


def sample_distinct_looks(
    rng: np.random.Generator, count: int, colours: tuple[str, ...]
) -> list[tuple[Kind, str]]:
    """Sample different pairs of a kind and a colour."""
    looks: list[tuple[Kind, str]] = []
    while len(looks) < count:
        look = (pick(rng, KINDS), pick(rng, colours))
        if look not in looks:
            looks.append(look)
    return looks


def sample_sizes(rng: np.random.Generator, count: int) -> list[Size]:
    """Sample sizes, of which at most one is large; a single shape is large more often."""
    choices: tuple[Size, ...] = (
        ("small", "medium", "large", "large") if count == 1 else ("small", "medium", "large")
    )
    sizes = [pick(rng, choices) for _ in range(count)]
    while sizes.count("large") > 1:
        sizes[sizes.index("large")] = "medium"
    return sizes


def allowed_textures(kind: Kind, size: Size) -> tuple[Texture, ...]:
    """Return the textures that remain visible on a shape.

    On small or thin shapes a pattern blurs into a few pixels, and a caption should not mention it.
    """
    if size == "small":
        return ("plain", "shaded")
    return ("plain", "striped", "shaded") if kind in ("star", "moon", "ring") else TEXTURES


def sample_centres(rng: np.random.Generator, radii: list[float]) -> list[tuple[float, float]]:
    """Sample centres of shapes that do not touch; two shapes also have a clear relation.

    After 200 unsuccessful attempts the last shape is left out.
    """
    margins = [radius + MIN_GAP for radius in radii]
    for _ in range(200):
        draws = rng.random((len(radii), 2)).tolist()
        centres = [(m + (1 - 2 * m) * x, m + (1 - 2 * m) * y) for m, (x, y) in zip(margins, draws)]
        if all(is_clear(radii, centres, i, j) for j in range(len(radii)) for i in range(j)):
            return centres
    return sample_centres(rng, radii[:-1])


def is_clear(radii: list[float], centres: list[tuple[float, float]], i: int, j: int) -> bool:
    """Return whether shapes i and j do not touch and, if there are only two, have a relation."""
    separate = math.dist(centres[i], centres[j]) > radii[i] + radii[j] + MIN_GAP
    return separate and (len(radii) != 2 or describe_relation(centres[i], centres[j]) != "")


@cache
def outline_radius(kind: Kind) -> float:
    """Return the distance from the centre to the farthest point of an outline, in radii."""
    return float(
        max(np.hypot(*outline.T).max() for outline, value in build_outlines()[kind] if value)
    )


@cache
def find_visible_colours(background: str) -> tuple[str, ...]:
    """Return the colours that have enough contrast with a background."""
    return tuple(
        name
        for name, rgb in COLOURS.items()
        if math.dist(rgb, BACKGROUNDS[background]) > MIN_CONTRAST
    )


def jitter_colour(rng: np.random.Generator, rgb: RGB) -> RGB:
    """Sample a similar colour: slightly lighter or darker, of almost the same hue."""
    lightness, *hues = rng.uniform((-10, -3, -3, -3), (10, 3, 3, 3)).tolist()
    red, green, blue = (
        min(255, max(0, round(level + lightness + hue))) for level, hue in zip(rgb, hues)
    )
    return red, green, blue


def choose_second_colour(rgb: RGB, background: RGB) -> RGB:
    """Return the lighter or darker tint that contrasts most with both colours."""
    choices = [
        mix_colours(rgb, (255, 255, 255), 0.6),
        mix_colours(rgb, (255, 255, 255), 0.35),
        mix_colours(rgb, (0, 0, 0), 0.42),
    ]
    return max(choices, key=lambda other: min(math.dist(other, rgb), math.dist(other, background)))


def mix_colours(one: RGB, other: RGB, weight: float) -> RGB:
    """Interpolate between two colours; weight 0 gives the first, 1 the second."""
    red, green, blue = (round(a + (b - a) * weight) for a, b in zip(one, other))
    return red, green, blue


# ---- captions


def describe(rng: np.random.Generator, shapes: tuple[Shape, ...], background: Background) -> str:
    """Return a caption that mentions a random choice of the properties."""
    with_size, with_texture, with_background, with_position = (
        bool(choice) for choice in rng.random(4) < (0.7, 0.8, 0.6, 0.6)
    )
    nouns = [describe_shape(shape, with_size, with_texture) for shape in shapes]
    relation = describe_relation(shapes[0].centre, shapes[1].centre) if len(shapes) > 1 else ""
    if len(shapes) == 1:
        sentence = (
            f"{nouns[0]} {describe_position(shapes[0].centre)}".strip()
            if with_position
            else nouns[0]
        )
    elif relation and (with_position or len(shapes) == 2):
        sentence = f"{nouns[0]} {relation} {nouns[1]}" + (
            f", and {nouns[2]}" if len(shapes) == 3 else ""
        )
    else:
        sentence = f"{', '.join(nouns[:-1])} and {nouns[-1]}"
    return f"{sentence} on a {background.colour} background" if with_background else sentence


def describe_shape(shape: Shape, with_size: bool, with_texture: bool) -> str:
    """Return a noun phrase: "a large striped red circle"."""
    words = [shape.colour, shape.kind]
    if with_texture and shape.texture != "plain":
        words.insert(0, shape.texture)
    if with_size and shape.size != "medium":
        words.insert(0, shape.size)
    return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"


def describe_relation(one: tuple[float, float], other: tuple[float, float]) -> str:
    """Return where one centre is relative to the other, or "" if that is ambiguous."""
    right, down = one[0] - other[0], one[1] - other[1]
    if abs(right) > RELATION_RATIO * abs(down):
        return "right of" if right > 0 else "left of"
    if abs(down) > RELATION_RATIO * abs(right):
        return "below" if down > 0 else "above"
    return ""


def describe_position(centre: tuple[float, float]) -> str:
    """Return where in the image a centre is, or "" if that is ambiguous."""
    across = describe_side(centre[0], "left", "right")
    down = describe_side(centre[1], "top", "bottom")
    if "between" in (across, down):
        return ""
    position = f"{down} {across}".strip()
    return f"at the {position}" if position else "in the middle"


def describe_side(position: float, low: str, high: str) -> str:
    """Return `low`, `high`, "" for the middle or "between" for the ambiguous ranges."""
    if position < 0.38 or position > 0.62:
        return low if position < 0.5 else high
    return "" if 0.42 < position < 0.58 else "between"


# ---- rendering


def draw(scene: Scene, size: int) -> Image:
    """Render a scene as an image of `size` x `size` pixels."""
    steps = (np.arange(size, dtype=np.float32) + 0.5) / size
    x, y = steps[None, :], steps[:, None]
    canvas = paint_background(scene.background, x, y)  # (3, size, size)
    for shape in scene.shapes:
        cover = draw_coverage(shape, size)
        canvas *= 1 - 0.3 * draw_shadow(cover, size)
        canvas += (paint_shape(shape, x, y) - canvas) * (np.asarray(cover, dtype=np.float32) / 255)
    return Image(np.rint(canvas.clip(0, 255)).astype(np.uint8).transpose(1, 2, 0))


def paint_background(background: Background, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the background at every pixel, (3, size, size).

    Light and shade are almost proportional to the colour, which preserves the hue.
    """
    rgb = to_column(background.rgb)
    light: np.ndarray = np.zeros((y.size, x.size), dtype=np.float32)
    if background.kind == "gradient":
        light = (x - 0.5) * math.cos(background.angle) + (y - 0.5) * math.sin(background.angle)
    if background.kind == "noise":
        light = 0.55 * sample_noise(background.noise_seed, x, y)
    return rgb + light * (0.14 * rgb + 14)


def sample_noise(seed: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Sum a few plane waves in random directions.

    cos(a + b) = cos a cos b - sin a sin b, so each wave is two outer products.
    """
    across, down, phase = (
        np.random.default_rng(seed).normal(scale=(9, 9, 3), size=(8, 3)).astype(np.float32).T
    )
    a, b = across[:, None] * x + phase[:, None], down[:, None] * y.T
    return (np.cos(b).T @ np.cos(a) - np.sin(b).T @ np.sin(a)) / 4


def draw_coverage(shape: Shape, size: int) -> PIL.Image.Image:
    """Render how much of each pixel the shape covers, 0 to 255."""
    mask = PIL.Image.new("L", (size * SUPERSAMPLING, size * SUPERSAMPLING))
    pen = ImageDraw.Draw(mask)
    matrix = np.array(
        [
            [math.cos(shape.rotation), math.sin(shape.rotation)],
            [-math.sin(shape.rotation), math.cos(shape.rotation)],
        ]
    )
    for outline, value in build_outlines()[shape.kind]:
        points = ((outline @ matrix) * shape.radius + shape.centre) * (size * SUPERSAMPLING) - 0.5
        pen.polygon(points.ravel().tolist(), fill=value)
    return mask.reduce(SUPERSAMPLING)


def draw_shadow(cover: PIL.Image.Image, size: int) -> np.ndarray:
    """Return a soft shadow, offset a little to the bottom right, 0 to 1."""
    blurred = np.asarray(cover.filter(ImageFilter.BoxBlur(size * 0.025)), dtype=np.float32) / 255
    shift = max(1, round(size * 0.02))
    shadow = np.zeros_like(blurred)
    shadow[shift:, shift:] = blurred[:-shift, :-shift] if shift < size else 0
    return shadow


def paint_shape(shape: Shape, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the colour of a shape at every pixel: (3, size, size), or (3, 1, 1) if plain."""
    first, second = to_column(shape.rgb), to_column(shape.second_rgb)
    if shape.texture == "plain":
        return first
    return first + (second - first) * draw_texture(shape, x, y)


def to_column(rgb: RGB) -> np.ndarray:
    """Return a colour as an array of shape (3, 1, 1)."""
    return np.array(rgb, dtype=np.float32)[:, None, None]


def draw_texture(shape: Shape, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the weight of the second colour at every pixel, 0 to 1.

    Edges are one pixel wide, which anti-aliases them at any size. u and v are the axes of the
    texture in radii; they are rotated so that patterns do not align with the pixel grid.
    """
    angle = (
        shape.rotation
        + {"striped": 0.7, "dotted": 0.35, "checkered": 0.3, "shaded": 1.2}[shape.texture]
    )
    right, down = (x - shape.centre[0]) / shape.radius, (y - shape.centre[1]) / shape.radius
    u, v = (
        right * math.cos(angle) + down * math.sin(angle),
        down * math.cos(angle) - right * math.sin(angle),
    )
    pixels = shape.radius * x.size  # per radius
    if shape.texture == "striped":
        return (0.5 + pixels * 0.62 * (0.25 - triangle_wave(u, 0.62))).clip(0, 1)
    if shape.texture == "dotted":
        return (
            0.5 + pixels * (0.19 - 0.58 * np.hypot(triangle_wave(u, 0.58), triangle_wave(v, 0.58)))
        ).clip(0, 1)
    if shape.texture == "checkered":
        stripes, others = (
            (2 * pixels * 0.9 * (0.25 - triangle_wave(t, 0.9))).clip(-1, 1) for t in (u, v)
        )
        return 0.5 + 0.5 * stripes * others
    return (0.5 - 0.5 * u).clip(0, 1) * 0.75


def triangle_wave(t: np.ndarray, period: float) -> np.ndarray:
    """Return the distance to the nearest multiple of the period, in periods: 0 to 0.5."""
    t = t / period
    return np.abs(t - np.rint(t))


def make_circle(right: float = 0.0, down: float = 0.0, radius: float = 1.0) -> np.ndarray:
    """Return a circle as a polygon of 64 vertices."""
    angles = np.linspace(0, 2 * math.pi, 64, endpoint=False)
    return np.stack([right + radius * np.cos(angles), down + radius * np.sin(angles)], axis=1)


def make_polygon(radii: list[float]) -> np.ndarray:
    """Return vertices at these distances from the centre, clockwise from the top."""
    angles = np.arange(len(radii)) * 2 * math.pi / len(radii)
    return np.array(radii)[:, None] * np.stack([np.sin(angles), -np.cos(angles)], axis=1)


def make_heart() -> np.ndarray:
    """Return a heart as a polygon of 64 vertices."""
    t = np.linspace(0, 2 * math.pi, 64, endpoint=False)
    right = 16 * np.sin(t) ** 3
    up = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([right / 16, -(up + 2.5) / 15], axis=1)


CROSS = [(-0.34, -1), (0.34, -1), (0.34, -0.34), (1, -0.34), (1, 0.34), (0.34, 0.34)]
CROSS += [(0.34, 1), (-0.34, 1), (-0.34, 0.34), (-1, 0.34), (-1, -0.34), (-0.34, -0.34)]


@cache
def build_outlines() -> dict[Kind, list[tuple[np.ndarray, int]]]:
    """Return the outlines of each kind of shape, with the value that fills them: 0 cuts a hole."""
    return {
        "circle": [(make_circle(), 255)],
        "square": [(np.array([(-0.84, -0.84), (0.84, -0.84), (0.84, 0.84), (-0.84, 0.84)]), 255)],
        "triangle": [(make_polygon([1.15] * 3) + [0, 0.15], 255)],
        "diamond": [(make_polygon([1.18, 0.82, 1.18, 0.82]), 255)],
        "star": [(make_polygon([1.15, 0.54] * 5) + [0, 0.05], 255)],
        "ring": [(make_circle(), 255), (make_circle(radius=0.55), 0)],
        "cross": [(np.array(CROSS), 255)],
        "heart": [(make_heart(), 255)],
        "moon": [(make_circle(), 255), (make_circle(right=0.5, down=-0.2, radius=0.82), 0)],
    }


"""Polygons of unit radius that are filled in order: 255 covers, 0 cuts out."""
