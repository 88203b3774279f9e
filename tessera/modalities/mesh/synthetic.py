"""Synthetic meshes: furniture and tools made of boxes and prisms, each with a caption that is true.

Object number `i` of a seed is a pure function of `(seed, i)` and of the maximum number of faces: an
object with more faces is sampled again. Lengths have no unit; x points right, y back and z up.
Everything is made of quads, in closed parts that touch or slightly intersect, and triangulated if
triangles are requested. A word such as "wide" or "low" has its own range of proportions, which no
object without that word has. Synthetic meshes are never augmented.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from tessera.data.dataset import SyntheticDataset
from tessera.data.synthetic import pick
from tessera.modalities.mesh.canonical import MeshBatch, MeshExample, collate
from tessera.modalities.mesh.media import Mesh

Rng = np.random.Generator
Range = tuple[float, float]

CACHE_SIZE = 1 << 12
"""The number of objects that a process caches: with 200 faces each they take 70 MB."""
MIN_FACES = 64
"""The lowest maximum number of triangles: it still allows tables, benches, shelves, stairs and
more."""
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
ROUND_SIDES = 8  # the number of sides of what is called round


@dataclass(frozen=True)
class SyntheticObject:
    kind: str
    caption: str
    mesh: Mesh
    """A mesh of quads."""


@dataclass(frozen=True)
class SyntheticMeshes(SyntheticDataset):
    bins: int
    polygons: Literal["triangles", "quads"] = "triangles"
    max_faces: int = 800

    def caption(self, index: int) -> str:
        return self.generate(index).caption

    def signature(self, index: int) -> str:
        """Return everything that an object depends on besides its number."""
        return f"{self.seed} {self.bins} {self.polygons} {self.max_faces}"

    def generate(self, index: int) -> SyntheticObject:
        """Generate the object with this index."""
        quads = self.max_faces if self.polygons == "quads" else self.max_faces // 2
        return generate_object(self.seed, self.number(index), quads)

    def item(self, index: int, rng: Rng) -> MeshExample:
        return build_example(self, index)

    def collate(self, examples: list[MeshExample]) -> MeshBatch:
        return collate(examples)


@lru_cache(maxsize=CACHE_SIZE)
def build_example(dataset: SyntheticMeshes, index: int) -> MeshExample:
    """Generate and cache an example; it takes 1 ms, most of it for the canonical form."""
    generated = dataset.generate(index)
    mesh = generated.mesh
    if dataset.polygons == "triangles":
        mesh = Mesh(mesh.vertices, mesh.triangles())
    return MeshExample.from_mesh(mesh, dataset.bins, generated.caption)


def generate_object(seed: int, number: int, max_quads: int = 400) -> SyntheticObject:
    """Generate an object of at most `max_quads` quads."""
    rng = np.random.default_rng([seed, number])
    while True:
        build = KINDS[int(rng.integers(len(KINDS)))]
        plan = build(rng)
        mesh = merge_meshes(plan.parts)
        if len(mesh.faces) <= max_quads:
            return SyntheticObject(build.__name__, plan.caption(build.__name__), mesh)


# ---- captions and proportions


@dataclass
class Plan:
    """The parts of an object and its caption: "a (words) table with (details)"."""

    words: list[str]
    details: list[str]
    parts: list[Mesh]

    def caption(self, kind: str) -> str:
        noun = " ".join([*(word for word in self.words if word), kind])
        article = "" if kind == "stairs" else "an " if noun[0] in "aeiou" else "a "
        *others, last = [*self.details] or [""]
        details = f"{', '.join(others)} and {last}" if others else last
        return f"{article}{noun} with {details}" if details else f"{article}{noun}"


def sample_proportion(rng: Rng, ranges: dict[str, Range]) -> tuple[str, float]:
    """Pick a word and sample a number from its range; the word for an average object is ""."""
    word = pick(rng, tuple(ranges))
    return word, float(rng.uniform(*ranges[word]))


def sample_uniform(rng: Rng, low: float, high: float) -> float:
    return float(rng.uniform(low, high))


def random_bool(rng: Rng, probability: float = 0.5) -> bool:
    return bool(rng.random() < probability)


def count_noun(number: int, noun: str) -> str:
    return f"{NUMBERS[number]} {noun}" + ("" if number == 1 else "s")


# ---- furniture


def table(rng: Rng) -> Plan:
    round_top = random_bool(rng, 0.35)
    shape, ratio = (
        ("round", 1.0)
        if round_top
        else sample_proportion(rng, {"wide": (1.7, 2.4), "": (1.15, 1.5), "square": (1.0, 1.0)})
    )
    word, height = sample_proportion(
        rng, {"low": (0.35, 0.5), "": (0.65, 0.85), "high": (1.0, 1.3)}
    )
    depth, thick = sample_uniform(rng, 0.85, 1.0), sample_uniform(rng, 0.05, 0.11)
    half_x, half_y = depth * ratio / 2, depth / 2
    top = (
        column(half_y, height - thick, height)
        if round_top
        else box(half_x, half_y, height - thick, height)
    )
    support = pick(
        rng,
        ("four legs", "a central leg")
        if round_top
        else ("four legs", "four legs", "a central leg", "side panels"),
    )
    under, reach = height - thick, 0.6 if round_top else 0.86
    if support == "a central leg":
        leg, foot = sample_uniform(rng, 0.05, 0.1), sample_uniform(rng, 0.25, 0.36)
        parts = [column(leg, 0.05, under, sides=6), box(foot, foot, 0.0, 0.05)]
    elif support == "side panels":
        panel = sample_uniform(rng, 0.03, 0.06)
        parts = [box(panel, half_y * 0.9, 0.0, under, x=side * half_x * reach) for side in (-1, 1)]
    else:
        parts = legs(half_x * reach, half_y * reach, sample_uniform(rng, 0.03, 0.07), 0.0, under)
        if random_bool(rng, 0.3):
            level = under * sample_uniform(rng, 0.25, 0.4)
            parts.append(box(half_x * reach * 0.98, half_y * reach * 0.98, level, level + 0.04))
            return Plan([word, shape], [support, "a shelf below"], [top, *parts])
    return Plan([word, shape], [support], [top, *parts])


def chair(rng: Rng) -> Plan:
    word, back = sample_proportion(
        rng, {"low-backed": (0.25, 0.35), "": (0.5, 0.65), "high-backed": (0.85, 1.1)}
    )
    seat, thick, leg = (
        sample_uniform(rng, 0.4, 0.52),
        sample_uniform(rng, 0.05, 0.1),
        sample_uniform(rng, 0.025, 0.045),
    )
    half_x, half_y = sample_uniform(rng, 0.22, 0.3), sample_uniform(rng, 0.22, 0.28)
    parts = [
        box(half_x, half_y, seat - thick, seat),
        *legs(half_x * 0.86, half_y * 0.86, leg, 0.0, seat - thick),
    ]
    details = [pick(rng, ("a solid back", "a slatted back", "a ladder back"))]
    rear = half_y * 0.86
    if details == ["a solid back"]:
        parts.append(box(half_x * 0.95, 0.03, seat, seat + back, y=rear))
    else:
        parts += [
            box(0.03, 0.03, seat, seat + back - 0.07, x=side * half_x * 0.85, y=rear)
            for side in (-1, 1)
        ]
        parts.append(box(half_x * 0.95, 0.035, seat + back - 0.07, seat + back, y=rear))
        count = int(rng.integers(2, 4))
        if details == ["a slatted back"]:
            positions = np.linspace(-0.85, 0.85, count + 2)[1:-1] * half_x
            parts += [
                box(0.022, 0.015, seat, seat + back - 0.07, x=float(x), y=rear) for x in positions
            ]
        else:
            levels = seat + np.linspace(0, back - 0.07, count + 2)[1:-1]
            parts += [
                box(half_x * 0.83, 0.015, float(z) - 0.02, float(z) + 0.02, y=rear) for z in levels
            ]
    if random_bool(rng, 0.4):
        details.append("armrests")
        rest = seat + sample_uniform(rng, 0.16, 0.22)
        for x in (-half_x * 0.9, half_x * 0.9):
            parts += [
                box(0.022, 0.022, seat, rest, x=x, y=-half_y * 0.75),
                box(0.03, half_y * 0.86, rest, rest + 0.035, x=x),
            ]
    return Plan([word], details, parts)


def stool(rng: Rng) -> Plan:
    word, height = sample_proportion(rng, {"low": (0.3, 0.4), "": (0.5, 0.62), "tall": (0.85, 1.1)})
    round_seat, thick, half = (
        random_bool(rng),
        sample_uniform(rng, 0.05, 0.12),
        sample_uniform(rng, 0.22, 0.25),
    )
    under = height - thick
    seat = column(half, under, height) if round_seat else box(half, half, under, height)
    count, leg = int(rng.integers(3, 5)), sample_uniform(rng, 0.025, 0.045)
    reach = (
        half
        * (0.68 if round_seat else 0.78)
        * (1.0 if count == 3 else math.sqrt(2) if not round_seat else 1.0)
    )
    angles = [math.pi / 4 + 2 * math.pi * number / count for number in range(count)]
    leg_parts = [
        box(leg, leg, 0.0, under, x=reach * math.cos(angle), y=reach * math.sin(angle))
        for angle in angles
    ]
    return Plan(
        [word, "round" if round_seat else "square"], [count_noun(count, "leg")], [seat, *leg_parts]
    )


def bench(rng: Rng) -> Plan:
    word, length = sample_proportion(
        rng, {"short": (0.85, 1.05), "": (1.3, 1.6), "long": (2.0, 2.6)}
    )
    seat, thick, half_y = (
        sample_uniform(rng, 0.4, 0.5),
        sample_uniform(rng, 0.05, 0.1),
        sample_uniform(rng, 0.19, 0.22),
    )
    half_x, under = length / 2, seat - thick
    parts, details = [box(half_x, half_y, under, seat)], [pick(rng, ("four legs", "side panels"))]
    if details == ["four legs"]:
        parts += legs(half_x * 0.9, half_y * 0.8, sample_uniform(rng, 0.03, 0.05), 0.0, under)
    else:
        parts += [
            box(sample_uniform(rng, 0.03, 0.06), half_y * 0.9, 0.0, under, x=side * half_x * 0.85)
            for side in (-1, 1)
        ]
    if random_bool(rng):
        details.append("a back")
        parts.append(
            box(half_x * 0.97, 0.03, seat, seat + sample_uniform(rng, 0.35, 0.5), y=half_y * 0.82)
        )
    return Plan([word], details, parts)


def shelf(rng: Rng) -> Plan:
    word, height = sample_proportion(rng, {"low": (0.55, 0.75), "": (1.1, 1.4), "tall": (1.8, 2.2)})
    breadth, width = sample_proportion(
        rng, {"narrow": (0.4, 0.5), "": (0.75, 0.95), "wide": (1.4, 1.8)}
    )
    depth, board, count = (
        sample_uniform(rng, 0.155, 0.18),
        sample_uniform(rng, 0.02, 0.035),
        int(rng.integers(3, 7)),
    )
    half_x = width / 2
    parts = [box(0.025, depth, 0.0, height, x=side * (half_x - 0.025)) for side in (-1, 1)]
    levels = np.linspace(0.06, height - 0.06, count).tolist()
    parts += [box(half_x - 0.04, depth * 0.96, level - board, level + board) for level in levels]
    details = [count_noun(count, "board")]
    if random_bool(rng):
        details.append("a back")
        parts.append(box(half_x - 0.01, 0.015, 0.02, height - 0.02, y=depth + 0.01))
    return Plan([word, breadth], details, parts)


def lamp(rng: Rng) -> Plan:
    word, height = sample_proportion(rng, {"low": (0.5, 0.65), "": (0.9, 1.1), "tall": (1.6, 2.0)})
    round_base, shade = (
        random_bool(rng),
        pick(rng, ("a conical shade", "a straight shade", "a square shade")),
    )
    base, below = sample_uniform(rng, 0.16, 0.22), height - sample_uniform(rng, 0.25, 0.34)
    foot = column(base, 0.0, 0.05) if round_base else box(base, base, 0.0, 0.05)
    half_width = sample_uniform(rng, 0.2, 0.28)
    if shade == "a square shade":
        cover = box(half_width, half_width, below, height)
    else:
        cover = column(
            half_width,
            below,
            height,
            top=half_width * (0.45 if shade == "a conical shade" else 1.0),
        )
    pole = box(0.025, 0.025, 0.05, below)
    return Plan(
        [word], [shade, f"a {'round' if round_base else 'square'} foot"], [foot, pole, cover]
    )


def bed(rng: Rng) -> Plan:
    word, width = sample_proportion(rng, {"narrow": (0.75, 0.9), "wide": (1.4, 1.8)})
    half_x, half_y, frame = width / 2, 1.0, sample_uniform(rng, 0.25, 0.4)
    top = frame + sample_uniform(rng, 0.12, 0.2)
    parts = [box(half_x, half_y, frame - 0.1, frame), box(half_x * 0.94, half_y * 0.94, frame, top)]
    parts += legs(half_x * 0.88, half_y * 0.9, 0.04, 0.0, frame - 0.1)
    board, rise = sample_proportion(
        rng, {"a low headboard": (0.3, 0.4), "a high headboard": (0.65, 0.9)}
    )
    details = [board]
    parts.append(box(half_x * 1.02, 0.04, 0.08, frame + rise, y=half_y + 0.03))
    if random_bool(rng):
        details.append("a footboard")
        parts.append(
            box(
                half_x * 1.02, 0.04, 0.08, frame + sample_uniform(rng, 0.22, 0.27), y=-half_y - 0.03
            )
        )
    if random_bool(rng, 0.6):
        count = 1 if word == "narrow" else 2
        details.append(count_noun(count, "pillow"))
        positions = [0.0] if count == 1 else [-half_x * 0.45, half_x * 0.45]
        parts += [box(0.24, 0.16, top - 0.03, top + 0.07, x=x, y=half_y * 0.7) for x in positions]
    return Plan([word], details, parts)


def sofa(rng: Rng) -> Plan:
    count = int(rng.integers(1, 4))
    width, seat, depth = (
        0.58 * count + sample_uniform(rng, 0.0, 0.1),
        sample_uniform(rng, 0.32, 0.42),
        sample_uniform(rng, 0.36, 0.42),
    )
    word, back = sample_proportion(
        rng, {"low-backed": (0.2, 0.28), "": (0.38, 0.48), "high-backed": (0.65, 0.8)}
    )
    half_x, arm, rest = (
        width / 2,
        sample_uniform(rng, 0.06, 0.1),
        seat + sample_uniform(rng, 0.15, 0.2),
    )
    parts = [
        box(half_x, depth, 0.1, seat - 0.1),
        box(half_x * 0.98, 0.08, seat - 0.1, seat + back, y=depth - 0.1),
    ]
    parts += [
        box(arm, depth + 0.03, 0.08, rest, x=side * (half_x + arm - 0.03)) for side in (-1, 1)
    ]
    positions = (np.arange(count) + 0.5) / count * width - half_x
    cushion = width / count / 2 * 0.93
    parts += [
        box(cushion, depth - 0.11, seat - 0.1, seat + 0.03, x=float(x), y=-0.09) for x in positions
    ]
    parts += legs(half_x * 0.95, depth * 0.85, 0.035, 0.0, 0.1)
    return Plan([word], [count_noun(count, "cushion")], parts)


def cabinet(rng: Rng) -> Plan:
    word, height = sample_proportion(rng, {"low": (0.5, 0.65), "": (0.85, 1.0), "tall": (1.4, 1.8)})
    half_x, half_y, foot = (
        sample_uniform(rng, 0.4, 0.46),
        sample_uniform(rng, 0.22, 0.28),
        sample_uniform(rng, 0.06, 0.14),
    )
    parts = [
        box(half_x, half_y, foot, height),
        *legs(half_x * 0.88, half_y * 0.85, 0.035, 0.0, foot),
    ]
    if random_bool(rng):
        count = int(rng.integers(2, 5))
        edges = np.linspace(foot + 0.03, height - 0.03, count + 1)
        for low, high in zip(edges[:-1] + 0.015, edges[1:] - 0.015):
            parts.append(box(half_x * 0.92, 0.015, float(low), float(high), y=-half_y - 0.012))
            parts.append(
                box(
                    0.05,
                    0.02,
                    float(low + high) / 2 - 0.015,
                    float(low + high) / 2 + 0.015,
                    y=-half_y - 0.04,
                )
            )
        return Plan([word], [count_noun(count, "drawer")], parts)
    for side in (-1, 1):
        parts.append(
            box(
                half_x * 0.45,
                0.015,
                foot + 0.04,
                height - 0.04,
                x=side * half_x * 0.48,
                y=-half_y - 0.012,
            )
        )
        middle = (foot + height) / 2
        parts.append(
            box(0.015, 0.02, middle - 0.05, middle + 0.05, x=side * half_x * 0.14, y=-half_y - 0.04)
        )
    return Plan([word], ["two doors"], parts)


# ---- tools and the like


def mug(rng: Rng) -> Plan:
    word, height = sample_proportion(
        rng, {"low": (0.55, 0.7), "": (0.95, 1.15), "tall": (1.5, 1.9)}
    )
    radius, sides = 0.5, pick(rng, (6, 8, 10, 12))
    below = radius * pick(rng, (1.0, 1.0, 0.75))
    parts = [cup(sides, below, radius, height, sample_uniform(rng, 0.06, 0.1))]
    size, fraction = sample_proportion(
        rng,
        {"no handle": (0.0, 0.0), "a small handle": (0.35, 0.45), "a large handle": (0.65, 0.78)},
    )
    if fraction:
        tall, thick = height * fraction, sample_uniform(rng, 0.07, 0.1)
        reach, low = tall * 0.55, (height - tall) / 2
        start = (below + radius) / 2 * math.cos(math.pi / sides) - 0.04
        xs, zs = (
            [start, start + reach, start + reach + thick],
            [low, low + thick, low + tall - thick, low + tall],
        )
        parts.append(extrude_cells({(0, 0), (1, 0), (1, 1), (1, 2), (0, 2)}, xs, zs, thick * 0.6))
    return Plan([word, "tapered" if below < radius else ""], [size], parts)


def stairs(rng: Rng) -> Plan:
    count = int(rng.integers(3, 8))
    word, slope = sample_proportion(
        rng, {"gentle": (0.35, 0.5), "": (0.75, 0.95), "steep": (1.4, 1.8)}
    )
    breadth, width = sample_proportion(
        rng, {"narrow": (0.4, 0.55), "": (0.85, 1.1), "wide": (1.7, 2.2)}
    )
    xs, zs = np.arange(count + 1) / count * 1.5, np.arange(count + 1) / count * 1.5 * slope
    cells = {(step, level) for step in range(count) for level in range(step + 1)}
    return Plan(
        [word, breadth],
        [count_noun(count, "step")],
        [extrude_cells(cells, xs.tolist(), zs.tolist(), width / 2)],
    )


def ladder(rng: Rng) -> Plan:
    count = int(rng.integers(3, 8))
    word, width = sample_proportion(
        rng, {"narrow": (0.3, 0.36), "": (0.48, 0.56), "wide": (0.75, 0.9)}
    )
    gap, rail = sample_uniform(rng, 0.26, 0.34), sample_uniform(rng, 0.025, 0.04)
    height = gap * (count + 1)
    parts = [box(rail, rail * 1.5, 0.0, height, x=side * width / 2) for side in (-1, 1)]
    parts += [
        box(width / 2 - rail / 2, rail * 0.7, gap * n - rail, gap * n + rail * 0.4)
        for n in range(1, count + 1)
    ]
    return Plan([word], [count_noun(count, "rung")], parts)


def hammer(rng: Rng) -> Plan:
    handle, length = sample_proportion(
        rng, {"a short handle": (0.55, 0.7), "a long handle": (1.2, 1.6)}
    )
    head, half = pick(rng, ("a round head", "a square head")), sample_uniform(rng, 0.24, 0.34)
    thick = sample_uniform(rng, 0.08, 0.13)
    parts = [column(sample_uniform(rng, 0.035, 0.055), 0.0, length, sides=6)]
    if head == "a round head":
        parts.append(lay_along_x(column(thick, -half, half), up=length))
    else:
        parts.append(box(half, thick, length - thick, length + thick))
    return Plan([], [handle, head], parts)


KINDS: tuple[Callable[[Rng], Plan], ...] = (
    table,
    chair,
    stool,
    bench,
    shelf,
    lamp,
    bed,
    sofa,
    cabinet,
    mug,
    stairs,
    ladder,
    hammer,
)


# ---- parts


def box(
    half_x: float, half_y: float, low: float, high: float, *, x: float = 0.0, y: float = 0.0
) -> Mesh:
    outline = np.array(
        [[-half_x, -half_y], [half_x, -half_y], [half_x, half_y], [-half_x, half_y]]
    ) + (x, y)
    return prism(outline, outline, low, high)


def column(
    radius: float, low: float, high: float, *, top: float | None = None, sides: int = ROUND_SIDES
) -> Mesh:
    """Build a vertical prism that approximates a cylinder, or a frustum with the upper radius
    `top`."""
    outline = circle(sides)
    return prism(outline * radius, outline * (radius if top is None else top), low, high)


def legs(half_x: float, half_y: float, half: float, low: float, high: float) -> list[Mesh]:
    """Build four legs, with their outer corners at the corners of a rectangle."""
    return [
        box(half, half, low, high, x=a * (half_x - half), y=b * (half_y - half))
        for a in (-1, 1)
        for b in (-1, 1)
    ]


def circle(sides: int) -> np.ndarray:
    """Return (sides, 2), counterclockwise; each axis passes through a side, not a corner."""
    angles = (np.arange(sides) + 0.5) * 2 * math.pi / sides
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def prism(bottom: np.ndarray, top: np.ndarray, low: float, high: float) -> Mesh:
    """Connect two outlines with the same even number of corners, counterclockwise from above."""
    count = len(bottom)
    vertices = np.concatenate([lift_outline(bottom, low), lift_outline(top, high)])
    return Mesh(
        vertices,
        np.concatenate(
            [ring_quads(count, 0, count), cap_quads(count) + count, cap_quads(count)[:, ::-1]]
        ),
    )


def cup(sides: int, below: float, radius: float, height: float, wall: float) -> Mesh:
    """Build a hollow column that is open at the top."""
    outline = circle(sides)
    rings = [(below, 0.0), (radius, height), (radius - wall, height), (below - wall, wall)]
    vertices = np.concatenate([lift_outline(outline * size, level) for size, level in rings])
    sheets = [ring_quads(sides, ring * sides, (ring + 1) * sides) for ring in range(3)]
    return Mesh(
        vertices, np.concatenate([*sheets, cap_quads(sides) + 3 * sides, cap_quads(sides)[:, ::-1]])
    )


def lift_outline(outline: np.ndarray, level: float) -> np.ndarray:
    """Return (corners, 3): an outline at the height `level`."""
    return np.column_stack([outline, np.full(len(outline), level)])


def ring_quads(count: int, lower: int, upper: int) -> np.ndarray:
    """Return the quads between two rings of vertices that start at these indices."""
    here, following = np.arange(count), (np.arange(count) + 1) % count
    return np.stack([lower + here, lower + following, upper + following, upper + here], axis=1)


def cap_quads(count: int) -> np.ndarray:
    """Return an even polygon as a strip of quads."""
    step = np.arange(count // 2 - 1)
    return np.stack([step, step + 1, count - 2 - step, count - 1 - step], axis=1)


def extrude_cells(
    cells: set[tuple[int, int]], xs: Sequence[float], zs: Sequence[float], half_y: float
) -> Mesh:
    """Extrude cells of a grid in x and z by `half_y` to both sides.

    The result is closed, and no corner lies inside the edge of another face.
    """
    corners: dict[tuple[int, int, int], int] = {}

    def corner(column: int, back: int, row: int) -> int:
        return corners.setdefault((column, back, row), len(corners))

    quads = []
    for i, j in sorted(cells):
        # Counterclockwise as seen from the front.
        ring = [(i, j), (i + 1, j), (i + 1, j + 1), (i, j + 1)]
        quads.append([corner(a, 0, b) for a, b in ring])
        quads.append([corner(a, 1, b) for a, b in reversed(ring)])
        neighbours = [(i, j - 1), (i + 1, j), (i, j + 1), (i - 1, j)]
        for side, neighbour in enumerate(neighbours):
            if neighbour not in cells:
                (a, b), (c, d) = ring[side], ring[(side + 1) % 4]
                quads.append([corner(c, 0, d), corner(a, 0, b), corner(a, 1, b), corner(c, 1, d)])
    vertices = [[xs[column], half_y if back else -half_y, zs[row]] for column, back, row in corners]
    return Mesh(np.array(vertices), np.array(quads))


def lay_along_x(part: Mesh, up: float) -> Mesh:
    """Rotate an upright part to lie along x, and raise it."""
    x, y, z = part.vertices.T
    return Mesh(np.stack([z, y, up - x], axis=1), part.faces)


def merge_meshes(parts: Sequence[Mesh]) -> Mesh:
    """Concatenate meshes."""
    starts = np.cumsum([0, *(len(part.vertices) for part in parts)])
    faces = [part.faces + start for part, start in zip(parts, starts)]
    return Mesh(np.concatenate([part.vertices for part in parts]), np.concatenate(faces))
