"""Synthetic videos: one or two shapes that move, bounce, turn and pass each other, with captions.

Video number `i` of a seed is a pure function of `(seed, i)` at any size and any number of frames. A
`MovingScene` lists its shapes and their motions from the start (progress 0) to the end (progress 1)
of the video, in units of the image's side (x to the right, y down). The still `Scene` at any
progress is rendered like a synthetic image. Shapes never leave the image, and captions state kinds,
colours, motions and occlusion correctly. Synthetic videos are never flipped.

Plain videos have one shape in a flat colour that moves, and may grow, shrink or change its colour;
their captions state also how fast it moves (`modalities/video/synthetic_plain.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tessera.data.dataset import SyntheticDataset
from tessera.data.synthetic import pick
from tessera.modalities.image.synthetic import (
    COLOURS,
    MIN_GAP,
    RADII,
    RGB,
    Background,
    Kind,
    Scene,
    Shape,
    Size,
    describe_shape,
    draw,
    find_visible_colours,
    mix_colours,
    outline_radius,
    sample_background,
    sample_distinct_looks,
    sample_shape,
)
from tessera.modalities.video.media import Video, VideoBatch, VideoExample, collate

Motion = Literal["resting", "moving", "bouncing", "turning"]
Direction = Literal["", "left", "right", "up", "down", "clockwise", "counterclockwise"]
Point = tuple[float, float]

RATE_HZ = 12.0
"""The frame rate of synthetic videos. Motions take the whole video, however many frames it has."""
ROTATION_INVARIANT = ("circle", "ring")
"""Kinds whose rotation is not visible."""
ROTATION_RANGE = (math.radians(80), math.radians(140))
"""Total rotation in radians; small enough for its direction to be visible in 5 frames: a star is
symmetric under 72 degrees, so a step must stay below 36."""
HOP_COUNTS = (2, 3)
HOP_HEIGHT = (0.25, 0.4)
MAX_MARGIN = 0.2
"""The maximum fraction of the available path that a motion leaves unused at each end."""


@dataclass(frozen=True)
class Actor:
    """A shape and its motion from the centre of `shape` to `goal`, straight or in hops."""

    shape: Shape
    motion: Motion
    direction: Direction = ""
    goal: Point | None = None
    """The centre at the end; None for the centre of `shape`."""
    hops: int = 0
    hop_height: float = 0.0
    rotation: float = 0.0
    """The total rotation in radians, clockwise."""
    growth: float = 1.0
    """The radius at the end as a multiple of that at the start."""
    final_rgb: RGB | None = None
    """The colour at the end; None for the colour of `shape`."""

    def at(self, progress: float) -> Shape:
        """Return the shape at a progress from 0 to 1."""
        x, y = self.shape.centre
        goal_x, goal_y = self.goal or self.shape.centre
        hop = self.hop_height * abs(math.sin(math.pi * self.hops * progress))
        centre = (x + (goal_x - x) * progress, y + (goal_y - y) * progress - hop)
        rotation = self.shape.rotation + self.rotation * progress
        shape = replace(self.shape, centre=centre, rotation=rotation)
        if self.growth != 1:
            shape = replace(shape, radius=shape.radius * (1 + (self.growth - 1) * progress))
        if self.final_rgb is not None:
            shape = replace(shape, rgb=mix_colours(shape.rgb, self.final_rgb, progress))
        return shape


@dataclass(frozen=True)
class MovingScene:
    """The contents of one video and its caption."""

    actors: tuple[Actor, ...]
    """The moving shapes in the order of painting: the last one is in front."""
    background: Background
    caption: str

    def at(self, progress: float) -> Scene:
        """Return the contents of the frame at a progress from 0 to 1."""
        return Scene(
            tuple(actor.at(progress) for actor in self.actors), self.background, self.caption
        )


@dataclass(frozen=True)
class SyntheticVideos(SyntheticDataset):
    """A dataset of synthetic videos."""

    size: int
    """The side of the square frames in pixels."""
    frames: int
    """The number of frames of each video."""
    plain: bool = False
    """Use one moving shape in a flat colour."""

    def scene(self, index: int) -> MovingScene:
        """Return the contents of a video."""
        if self.plain:
            from tessera.modalities.video.synthetic_plain import sample_plain_scene

            return sample_plain_scene(self.seed, self.number(index))
        return sample_scene(self.seed, self.number(index))

    def caption(self, index: int) -> str:
        """Return the caption of a video without rendering it."""
        return self.scene(index).caption

    def signature(self, index: int) -> str:
        """Return everything that an example depends on besides its number."""
        return f"{self.seed} {self.size} {self.frames} {self.plain}"

    def item(self, index: int, rng: np.random.Generator) -> VideoExample:
        """Render one example; nothing is drawn from `rng`."""
        scene = self.scene(index)
        video = draw_video(scene, self.size, self.frames)
        return VideoExample(video.to_floats(), self.frames, RATE_HZ, scene.caption)

    def collate(self, examples: list[VideoExample]) -> VideoBatch:
        """Stack examples into a batch."""
        return collate(examples)


def draw_video(scene: MovingScene, size: int, frames: int) -> Video:
    """Render a video of `size` x `size` pixels; a single frame shows the start."""
    steps = np.linspace(0, 1, frames).tolist()
    return Video(np.stack([draw(scene.at(progress), size).pixels for progress in steps]), RATE_HZ)


# ---- contents


def sample_scene(seed: int, number: int) -> MovingScene:
    """Sample the contents and the caption of one video."""
    rng = np.random.default_rng([seed, number])
    background = sample_background(rng)
    choices = tuple(bool(choice) for choice in rng.random(3) < (0.7, 0.8, 0.6))
    sample = (sample_single, sample_pair, sample_passing)[int(rng.choice(3, p=[0.3, 0.25, 0.45]))]
    return sample(rng, background, CaptionStyle(*choices))


@dataclass(frozen=True)
class CaptionStyle:
    """Which properties a caption mentions."""

    size: bool
    texture: bool
    background: bool

    def describe_actor(self, actor: Actor) -> str:
        """Return a noun phrase: "a small red circle moving left"."""
        motion = "" if actor.motion == "resting" else f"{actor.motion} {actor.direction}"
        return f"{describe_shape(actor.shape, self.size, self.texture)} {motion}".strip()

    def add_background(self, sentence: str, background: Background) -> str:
        """Append the background to a sentence if the style includes it."""
        return f"{sentence} on a {background.colour} background" if self.background else sentence


def sample_single(
    rng: np.random.Generator, background: Background, style: CaptionStyle
) -> MovingScene:
    """Sample one shape that moves, bounces or turns."""
    motion: Motion = pick(rng, ("moving", "bouncing", "turning"))
    size: Size = pick(
        rng, ("small", "medium", "large") if motion == "turning" else ("small", "medium")
    )
    shape = sample_actor_shape(rng, background, sample_look(rng, background, motion), size)
    actor = sample_actor(rng, shape, motion, pick(rng, DIRECTIONS[motion]), Area.inside(shape))
    caption = style.add_background(style.describe_actor(actor), background)
    return MovingScene((actor,), background, caption)


def sample_pair(
    rng: np.random.Generator, background: Background, style: CaptionStyle
) -> MovingScene:
    """Sample two shapes in separate halves of the image; one of them may rest."""
    left_right = bool(rng.integers(2))
    motions: list[Motion] = [
        pick(rng, ("moving", "turning")),
        pick(rng, ("moving", "turning", "resting")),
    ]
    looks = sample_distinct_looks(rng, 2, find_visible_colours(background.colour))
    actors = []
    for half, (motion, look) in enumerate(zip(motions, looks)):
        shape = sample_actor_shape(rng, background, look, pick(rng, ("small", "medium")))
        area = Area.inside(shape).half(half, left_right)
        motion = "moving" if motion == "turning" and look[0] in ROTATION_INVARIANT else motion
        directions = DIRECTIONS[motion]
        if motion == "moving":
            directions = ("up", "down") if left_right else ("left", "right")
        actors.append(sample_actor(rng, shape, motion, pick(rng, directions), area))
    sentence = f"{style.describe_actor(actors[0])} and {style.describe_actor(actors[1])}"
    return MovingScene(tuple(actors), background, style.add_background(sentence, background))


def sample_passing(
    rng: np.random.Generator, background: Background, style: CaptionStyle
) -> MovingScene:
    """Sample a small shape that crosses the image in front of or behind a larger one."""
    look, other_look = sample_contrasting_looks(rng, background)
    motion: Motion = pick(rng, ("moving", "moving", "bouncing"))
    shape = sample_actor_shape(rng, background, look, "small")
    direction = pick(rng, DIRECTIONS[motion])
    mover = sample_actor(rng, shape, motion, direction, Area.inside(shape), max_margin=0.0)
    other_shape = sample_actor_shape(rng, background, other_look, "medium")
    centre = Area.inside(other_shape).nearest(mover.at(0.5).centre)
    turns = other_look[0] not in ROTATION_INVARIANT and rng.random() < 0.3
    other_motion: Motion = "turning" if turns else "resting"
    other = sample_actor(
        rng,
        replace(other_shape, centre=centre),
        other_motion,
        pick(rng, DIRECTIONS[other_motion]),
        Area.point(centre),
    )
    in_front = bool(rng.integers(2))
    relation = "in front of" if in_front else "behind"
    sentence = f"{style.describe_actor(mover)}, passing {relation} {style.describe_actor(other)}"
    return MovingScene(
        (other, mover) if in_front else (mover, other),
        background,
        style.add_background(sentence, background),
    )


DIRECTIONS: dict[Motion, tuple[Direction, ...]] = {
    "resting": ("",),
    "moving": ("left", "right", "up", "down"),
    "bouncing": ("left", "right"),
    "turning": ("clockwise", "counterclockwise"),
}


def sample_look(
    rng: np.random.Generator, background: Background, motion: Motion
) -> tuple[Kind, str]:
    """Sample a kind and a colour; the rotation of a turning shape must be visible."""
    while True:
        (look,) = sample_distinct_looks(rng, 1, find_visible_colours(background.colour))
        if motion != "turning" or look[0] not in ROTATION_INVARIANT:
            return look


def sample_contrasting_looks(
    rng: np.random.Generator, background: Background
) -> list[tuple[Kind, str]]:
    """Sample the looks of two shapes whose colours differ enough to show which one is in front."""
    while True:
        looks = sample_distinct_looks(rng, 2, find_visible_colours(background.colour))
        if math.dist(COLOURS[looks[0][1]], COLOURS[looks[1][1]]) > 60:
            return looks


def sample_actor_shape(
    rng: np.random.Generator, background: Background, look: tuple[Kind, str], size: Size
) -> Shape:
    """Sample a shape in the centre of the image."""
    radius = float(rng.uniform(*RADII[size]))
    return sample_shape(rng, background, *look, size, radius, (0.5, 0.5))


@dataclass(frozen=True)
class Area:
    """A rectangle in which a centre may be."""

    left: float
    right: float
    top: float
    bottom: float

    @classmethod
    def inside(cls, shape: Shape) -> Area:
        """Return the area in which a shape stays inside the image at any rotation."""
        margin = shape.radius * outline_radius(shape.kind) + MIN_GAP
        return cls(margin, 1 - margin, margin, 1 - margin)

    @classmethod
    def point(cls, point: Point) -> Area:
        """Return the area that contains only a point."""
        return cls(point[0], point[0], point[1], point[1])

    def half(self, second: int, left_right: bool) -> Area:
        """Return the part in the first (0) or second (1) half of the image.

        The halves are left and right, or top and bottom.
        """
        if left_right:
            return replace(self, left=self.left + second / 2, right=self.right - (1 - second) / 2)
        return replace(self, top=self.top + second / 2, bottom=self.bottom - (1 - second) / 2)

    def nearest(self, point: Point) -> Point:
        """Return the nearest point of the area."""
        return min(max(point[0], self.left), self.right), min(max(point[1], self.top), self.bottom)


def sample_actor(
    rng: np.random.Generator,
    shape: Shape,
    motion: Motion,
    direction: Direction,
    area: Area,
    max_margin: float = MAX_MARGIN,
) -> Actor:
    """Sample the path of a shape within an area."""
    x, y = float(rng.uniform(area.left, area.right)), float(rng.uniform(area.top, area.bottom))
    placed = replace(shape, centre=(x, y))
    if motion == "turning":
        angle = float(rng.uniform(*ROTATION_RANGE))
        rotation = angle if direction == "clockwise" else -angle
        return Actor(placed, motion, direction, rotation=rotation)
    if motion == "resting":
        return Actor(placed, motion)
    vertical = direction in ("up", "down")
    low, high = (area.top, area.bottom) if vertical else (area.left, area.right)
    near, far = rng.uniform(0, max_margin, 2).tolist()
    begin, end = low + (high - low) * near, high - (high - low) * far
    if direction in ("left", "up"):
        begin, end = end, begin
    if motion == "bouncing":
        return sample_bouncing_actor(rng, shape, direction, begin, end, area)
    start, goal = ((x, begin), (x, end)) if vertical else ((begin, y), (end, y))
    return Actor(replace(shape, centre=start), motion, direction, goal)


def sample_bouncing_actor(
    rng: np.random.Generator,
    shape: Shape,
    direction: Direction,
    begin: float,
    end: float,
    area: Area,
) -> Actor:
    """Sample the height and the number of hops from x = `begin` to `end`."""
    height = float(rng.uniform(*HOP_HEIGHT))
    floor = float(rng.uniform(max(0.6, area.top + height), area.bottom))
    hops = pick(rng, HOP_COUNTS)
    start, goal = (begin, floor), (end, floor)
    return Actor(replace(shape, centre=start), "bouncing", direction, goal, hops, height)
