"""Toy pictures: one to three shapes on a background, drawn afresh for every number, with a caption
that is true.

Toy number `i` of a seed is a pure function of `(seed, i)`, at any size: a `Scene` says what is in
it, in units of the picture's side (x to the right, y down, both from 0 to 1), and `draw` paints it.
The scene stays available, so that a judge can hold a sample against its prompt. Toys are never
mirrored, since "left of" would become a lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, TypeVar

import numpy as np
import PIL.Image
from PIL import ImageDraw, ImageFilter

from tessera.data.dataset import SyntheticDataset
from tessera.modalities.image.media import Image, ImageBatch, ImageExample, collate

Kind = Literal["circle", "square", "triangle", "diamond", "star", "ring", "cross", "heart", "moon"]
Size = Literal["small", "medium", "large"]
Texture = Literal["plain", "striped", "dotted", "checkered", "shaded"]
Ground = Literal["plain", "gradient", "noise"]
RGB = tuple[int, int, int]
Choice = TypeVar("Choice")

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
GROUNDS: tuple[Ground, ...] = ("plain", "gradient", "noise")
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

CONTRAST = 105  # how far apart in RGB a shape and its background must be for the shape to be seen
PLACES = (
    0.375,
    0.5,
    0.625,
)  # of a shape that stands alone, across and down: left, middle and right, or top and bottom
TIDY_RADII: dict[Size, float] = {"medium": 0.18, "large": 0.27}  # which just fit there
TIDY_GROUNDS = ("white", "black", "light blue")
AIR = 0.02  # the least space between two shapes, and between a shape and the edge
CLEARLY = 1.4  # "left of" is said only where the sideways distance is this many times the other one
FINER = 4  # outlines are drawn this many times larger and then reduced, which smooths their edges


@dataclass(frozen=True)
class Shape:
    kind: Kind
    colour: str
    size: Size
    texture: Texture
    centre: tuple[float, float]
    radius: float
    turn: float
    """radians"""
    rgb: RGB
    """the colour as painted, a shade of the one it is called"""
    second: RGB
    """the other colour of a texture"""


@dataclass(frozen=True)
class Background:
    kind: Ground
    colour: str
    rgb: RGB
    angle: float
    """where a gradient leads to, in radians"""
    grain: int
    """the seed of the noise"""


@dataclass(frozen=True)
class Scene:
    shapes: tuple[Shape, ...]
    background: Background
    caption: str


@dataclass(frozen=True)
class SyntheticImages(SyntheticDataset):
    size: int
    most_shapes: int = 3
    """1 to 3; with 3 a toy is what it has always been"""
    plain: bool = False
    """flat colours just as they are called, nothing turned; a shape that stands alone is medium or
    large and has one of nine places, so that all of a picture can be said in a caption"""

    def scene(self, index: int) -> Scene:
        return sample_scene(self.seed, self.number(index), self.most_shapes, self.plain)

    def caption(self, index: int) -> str:
        """What is said about a toy, without drawing it."""
        return self.scene(index).caption

    def signature(self, index: int) -> str:
        """All that a toy depends on beside its number."""
        return f"{self.seed} {self.size} {self.most_shapes} {self.plain}"

    def item(self, index: int, rng: np.random.Generator) -> ImageExample:
        scene = self.scene(index)
        return ImageExample(draw(scene, self.size).floats(), scene.caption)

    def collate(self, examples: list[ImageExample]) -> ImageBatch:
        return collate(examples)


# ---- what is in a picture


def sample_scene(seed: int, number: int, most_shapes: int = 3, plain: bool = False) -> Scene:
    """The scene of one toy."""
    rng = np.random.default_rng([seed, number])
    background = imagine_background(rng, TIDY_GROUNDS) if plain else imagine_background(rng)
    shapes = tuple(imagine_shapes(rng, background, most_shapes))
    if plain:
        background = replace(background, kind="plain", rgb=BACKGROUNDS[background.colour])
        shapes = tuple(
            replace(shape, texture="plain", turn=0.0, rgb=COLOURS[shape.colour]) for shape in shapes
        )
        shapes = (tidied(*shapes),) if len(shapes) == 1 else shapes
    return Scene(shapes, background, describe(rng, shapes, background))


def tidied(shape: Shape) -> Shape:
    """The shape in one of two sizes, at the nearest of nine places."""
    size: Size = "large" if shape.size == "large" else "medium"
    x, y = (min(PLACES, key=lambda place: abs(place - position)) for position in shape.centre)
    return replace(shape, size=size, radius=TIDY_RADII[size], centre=(x, y))


def imagine_background(
    rng: np.random.Generator, colours: tuple[str, ...] = tuple(BACKGROUNDS)
) -> Background:
    colour = pick(rng, colours)
    return Background(
        kind=pick(rng, GROUNDS),
        colour=colour,
        rgb=shade(rng, BACKGROUNDS[colour]),
        angle=float(rng.uniform(0, 2 * math.pi)),
        grain=int(rng.integers(1 << 31)),
    )


def imagine_shapes(rng: np.random.Generator, background: Background, most: int) -> list[Shape]:
    """Different from each other in kind or colour, so that a caption can tell them apart, and
    nowhere overlapping."""
    wanted = min(most, int(rng.choice(3, p=[0.35, 0.45, 0.2])) + 1)
    looks = distinct_looks(rng, wanted, seen_on(background.colour))
    sizes = imagine_sizes(rng, wanted)
    radii = [float(rng.uniform(*RADII[size])) for size in sizes]
    if sizes == ["large"]:
        radii[0] *= float(rng.uniform(1, 1.4))
    centres = places(rng, [radius * reach(kind) for radius, (kind, _) in zip(radii, looks)])
    return [
        imagine_shape(rng, background, kind, colour, size, radius, centre)
        for (kind, colour), size, radius, centre in zip(looks, sizes, radii, centres)
    ]


def imagine_shape(
    rng: np.random.Generator,
    background: Background,
    kind: Kind,
    colour: str,
    size: Size,
    radius: float,
    centre: tuple[float, float],
) -> Shape:
    rgb = shade(rng, COLOURS[colour])
    return Shape(
        kind=kind,
        colour=colour,
        size=size,
        texture=pick(rng, fitting(kind, size)),
        centre=centre,
        radius=radius,
        turn=float(rng.uniform(-0.2, 0.2)),  # more would make a diamond of a square
        rgb=rgb,
        second=second_colour(rgb, background.rgb),
    )


def distinct_looks(
    rng: np.random.Generator, wanted: int, colours: tuple[str, ...]
) -> list[tuple[Kind, str]]:
    looks: list[tuple[Kind, str]] = []
    while len(looks) < wanted:
        look = (pick(rng, KINDS), pick(rng, colours))
        if look not in looks:
            looks.append(look)
    return looks


def imagine_sizes(rng: np.random.Generator, wanted: int) -> list[Size]:
    """At most one large one, which leaves the others little room; one that stands alone is more
    often large."""
    choices: tuple[Size, ...] = (
        ("small", "medium", "large", "large") if wanted == 1 else ("small", "medium", "large")
    )
    sizes = [pick(rng, choices) for _ in range(wanted)]
    while sizes.count("large") > 1:
        sizes[sizes.index("large")] = "medium"
    return sizes


def fitting(kind: Kind, size: Size) -> tuple[Texture, ...]:
    """A pattern on something small or thin is a blur of a few pixels, which no caption should call
    dotted."""
    if size == "small":
        return ("plain", "shaded")
    return ("plain", "striped", "shaded") if kind in ("star", "moon", "ring") else TEXTURES


def places(rng: np.random.Generator, reaches: list[float]) -> list[tuple[float, float]]:
    """Centres that keep the shapes apart; two shapes stand clearly beside or clearly above each
    other.

    Should luck not give room to all of them, the last shape is left out.
    """
    margins = [reach + AIR for reach in reaches]
    for _ in range(200):
        throws = rng.random((len(reaches), 2)).tolist()
        centres = [(m + (1 - 2 * m) * x, m + (1 - 2 * m) * y) for m, (x, y) in zip(margins, throws)]
        if all(roomy(reaches, centres, i, j) for j in range(len(reaches)) for i in range(j)):
            return centres
    return places(rng, reaches[:-1])


def roomy(reaches: list[float], centres: list[tuple[float, float]], i: int, j: int) -> bool:
    apart = math.dist(centres[i], centres[j]) > reaches[i] + reaches[j] + AIR
    return apart and (len(reaches) != 2 or relation(centres[i], centres[j]) != "")


@cache
def reach(kind: Kind) -> float:
    """The farthest point of an outline, in radii."""
    return float(max(np.hypot(*outline.T).max() for outline, ink in OUTLINES[kind] if ink))


@cache
def seen_on(background: str) -> tuple[str, ...]:
    return tuple(
        name for name, rgb in COLOURS.items() if math.dist(rgb, BACKGROUNDS[background]) > CONTRAST
    )


def shade(rng: np.random.Generator, rgb: RGB) -> RGB:
    """A near neighbour of a colour, still deserving its name: lighter or darker, and hardly another
    hue."""
    lighter, *hues = rng.uniform((-10, -3, -3, -3), (10, 3, 3, 3)).tolist()
    red, green, blue = (
        min(255, max(0, round(level + lighter + hue))) for level, hue in zip(rgb, hues)
    )
    return red, green, blue


def second_colour(rgb: RGB, background: RGB) -> RGB:
    """Lighter or darker than the first, whichever is told more easily from both the first and the
    background."""
    choices = [
        mix(rgb, (255, 255, 255), 0.6),
        mix(rgb, (255, 255, 255), 0.35),
        mix(rgb, (0, 0, 0), 0.42),
    ]
    return max(choices, key=lambda other: min(math.dist(other, rgb), math.dist(other, background)))


def mix(one: RGB, other: RGB, share: float) -> RGB:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other))
    return red, green, blue


def pick(rng: np.random.Generator, choices: tuple[Choice, ...]) -> Choice:
    return choices[int(rng.integers(len(choices)))]


# ---- what is said about it


def describe(rng: np.random.Generator, shapes: tuple[Shape, ...], background: Background) -> str:
    """A true sentence, sometimes saying more and sometimes less."""
    says_size, says_texture, says_background, says_place = (
        bool(say) for say in rng.random(4) < (0.7, 0.8, 0.6, 0.6)
    )
    nouns = [noun(shape, says_size, says_texture) for shape in shapes]
    beside = relation(shapes[0].centre, shapes[1].centre) if len(shapes) > 1 else ""
    if len(shapes) == 1:
        sentence = f"{nouns[0]} {whereabouts(shapes[0].centre)}".strip() if says_place else nouns[0]
    elif beside and (says_place or len(shapes) == 2):
        sentence = f"{nouns[0]} {beside} {nouns[1]}" + (
            f", and {nouns[2]}" if len(shapes) == 3 else ""
        )
    else:
        sentence = f"{', '.join(nouns[:-1])} and {nouns[-1]}"
    return f"{sentence} on a {background.colour} background" if says_background else sentence


def noun(shape: Shape, says_size: bool, says_texture: bool) -> str:
    words = [shape.colour, shape.kind]
    if says_texture and shape.texture != "plain":
        words.insert(0, shape.texture)
    if says_size and shape.size != "medium":
        words.insert(0, shape.size)
    return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"


def relation(one: tuple[float, float], other: tuple[float, float]) -> str:
    """Where one centre is, seen from the other; "" where it is too much of both to say."""
    right, down = one[0] - other[0], one[1] - other[1]
    if abs(right) > CLEARLY * abs(down):
        return "right of" if right > 0 else "left of"
    if abs(down) > CLEARLY * abs(right):
        return "below" if down > 0 else "above"
    return ""


def whereabouts(centre: tuple[float, float]) -> str:
    """Where in the picture a centre is; "" where it is between two answers."""
    across, down = side(centre[0], "left", "right"), side(centre[1], "top", "bottom")
    if "between" in (across, down):
        return ""
    where = f"{down} {across}".strip()
    return f"at the {where}" if where else "in the middle"


def side(position: float, low: str, high: str) -> str:
    if position < 0.38 or position > 0.62:
        return low if position < 0.5 else high
    return "" if 0.42 < position < 0.58 else "between"


# ---- how it is painted


def draw(scene: Scene, size: int) -> Image:
    """A scene as a picture of `size` x `size` pixels."""
    steps = (np.arange(size, dtype=np.float32) + 0.5) / size
    x, y = steps[None, :], steps[:, None]
    canvas = paint_background(scene.background, x, y)  # (3, size, size)
    for shape in scene.shapes:
        cover = coverage(shape, size)
        canvas *= 1 - 0.3 * shadow(cover, size)
        canvas += (paint(shape, x, y) - canvas) * (np.asarray(cover, dtype=np.float32) / 255)
    return Image(np.rint(canvas.clip(0, 255)).astype(np.uint8).transpose(1, 2, 0))


def paint_background(ground: Background, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Light and shade in proportion to the colour (and a little on top, for the dark ones), which
    keeps the hue."""
    rgb = column(ground.rgb)
    light: np.ndarray = np.zeros((y.size, x.size), dtype=np.float32)
    if ground.kind == "gradient":
        light = (x - 0.5) * math.cos(ground.angle) + (y - 0.5) * math.sin(ground.angle)
    if ground.kind == "noise":
        light = 0.55 * clouds(ground.grain, x, y)
    return rgb + light * (0.14 * rgb + 14)


def clouds(grain: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A few plane waves in random directions. cos(a + b) = cos a cos b - sin a sin b, so each is
    two outer products."""
    across, down, phase = (
        np.random.default_rng(grain).normal(scale=(9, 9, 3), size=(8, 3)).astype(np.float32).T
    )
    a, b = across[:, None] * x + phase[:, None], down[:, None] * y.T
    return (np.cos(b).T @ np.cos(a) - np.sin(b).T @ np.sin(a)) / 4


def coverage(shape: Shape, size: int) -> PIL.Image.Image:
    """How much of each pixel the shape covers, 0 to 255."""
    mask = PIL.Image.new("L", (size * FINER, size * FINER))
    pen = ImageDraw.Draw(mask)
    turn = np.array(
        [
            [math.cos(shape.turn), math.sin(shape.turn)],
            [-math.sin(shape.turn), math.cos(shape.turn)],
        ]
    )
    for outline, ink in OUTLINES[shape.kind]:
        points = ((outline @ turn) * shape.radius + shape.centre) * (size * FINER) - 0.5
        pen.polygon(points.ravel().tolist(), fill=ink)
    return mask.reduce(FINER)


def shadow(cover: PIL.Image.Image, size: int) -> np.ndarray:
    """Soft, and a little below and to the right: it lifts the shape from the page."""
    blurred = np.asarray(cover.filter(ImageFilter.BoxBlur(size * 0.025)), dtype=np.float32) / 255
    shift = max(1, round(size * 0.02))
    fallen = np.zeros_like(blurred)
    fallen[shift:, shift:] = blurred[:-shift, :-shift] if shift < size else 0
    return fallen


def paint(shape: Shape, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The colour of the shape at every pixel: (3, size, size), or (3, 1, 1) for a plain one."""
    own, second = column(shape.rgb), column(shape.second)
    return own if shape.texture == "plain" else own + (second - own) * texture(shape, x, y)


def column(rgb: RGB) -> np.ndarray:
    return np.array(rgb, dtype=np.float32)[:, None, None]


def texture(shape: Shape, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The second colour's share, 0 to 1, at every pixel. Edges are one pixel wide, hence smooth at
    any size.

    u and v are the shape's own axes in radii, standing askew so that patterns do not fall in step
    with the pixels.
    """
    askew = (
        shape.turn
        + {"striped": 0.7, "dotted": 0.35, "checkered": 0.3, "shaded": 1.2}[shape.texture]
    )
    right, down = (x - shape.centre[0]) / shape.radius, (y - shape.centre[1]) / shape.radius
    u, v = (
        right * math.cos(askew) + down * math.sin(askew),
        down * math.cos(askew) - right * math.sin(askew),
    )
    pixels = shape.radius * x.size  # to one radius
    if shape.texture == "striped":
        return (0.5 + pixels * 0.62 * (0.25 - wave(u, 0.62))).clip(0, 1)
    if shape.texture == "dotted":
        return (0.5 + pixels * (0.19 - 0.58 * np.hypot(wave(u, 0.58), wave(v, 0.58)))).clip(0, 1)
    if shape.texture == "checkered":
        stripes, others = ((2 * pixels * 0.9 * (0.25 - wave(t, 0.9))).clip(-1, 1) for t in (u, v))
        return 0.5 + 0.5 * stripes * others
    return (0.5 - 0.5 * u).clip(0, 1) * 0.75


def wave(t: np.ndarray, period: float) -> np.ndarray:
    """The distance to the nearest multiple of the period, in periods: 0 to 0.5 and back."""
    t = t / period
    return np.abs(t - np.rint(t))


def ellipse(right: float = 0.0, down: float = 0.0, radius: float = 1.0) -> np.ndarray:
    angles = np.linspace(0, 2 * math.pi, 64, endpoint=False)
    return np.stack([right + radius * np.cos(angles), down + radius * np.sin(angles)], axis=1)


def corners(radii: list[float]) -> np.ndarray:
    """A polygon around the centre, first corner at the top, then clockwise."""
    angles = np.arange(len(radii)) * 2 * math.pi / len(radii)
    return np.array(radii)[:, None] * np.stack([np.sin(angles), -np.cos(angles)], axis=1)


def heart() -> np.ndarray:
    t = np.linspace(0, 2 * math.pi, 64, endpoint=False)
    right = 16 * np.sin(t) ** 3
    up = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([right / 16, -(up + 2.5) / 15], axis=1)


CROSS = [(-0.34, -1), (0.34, -1), (0.34, -0.34), (1, -0.34), (1, 0.34), (0.34, 0.34)]
CROSS += [(0.34, 1), (-0.34, 1), (-0.34, 0.34), (-1, 0.34), (-1, -0.34), (-0.34, -0.34)]

# Unit outlines, each with its ink: 255 covers, 0 cuts out again.
OUTLINES: dict[Kind, list[tuple[np.ndarray, int]]] = {
    "circle": [(ellipse(), 255)],
    "square": [(np.array([(-0.84, -0.84), (0.84, -0.84), (0.84, 0.84), (-0.84, 0.84)]), 255)],
    "triangle": [(corners([1.15] * 3) + [0, 0.15], 255)],
    "diamond": [(corners([1.18, 0.82, 1.18, 0.82]), 255)],
    "star": [(corners([1.15, 0.54] * 5) + [0, 0.05], 255)],
    "ring": [(ellipse(), 255), (ellipse(radius=0.55), 0)],
    "cross": [(np.array(CROSS), 255)],
    "heart": [(heart(), 255)],
    "moon": [(ellipse(), 255), (ellipse(right=0.5, down=-0.2, radius=0.82), 0)],
}
