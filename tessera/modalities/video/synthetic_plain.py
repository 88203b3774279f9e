"""Plain synthetic videos: one shape in a flat colour that moves, and sometimes changes.

A caption states everything but the path across the direction of motion: "a red circle moving left
slowly and growing on a white background", "a black star moving up quickly and becoming pink on a
white background". Distances are in units of the image's side.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from tessera.data.synthetic import pick
from tessera.modalities.image.synthetic import (
    BACKGROUNDS,
    COLOURS,
    PLAIN_BACKGROUNDS,
    describe_shape,
    find_visible_colours,
    sample_background,
    sample_distinct_looks,
    sample_shape,
)
from tessera.modalities.video.synthetic import (
    DIRECTIONS,
    Actor,
    Area,
    CaptionStyle,
    Direction,
    MovingScene,
)

Speed = Literal["slowly", "quickly"]
Change = Literal["", "growing", "shrinking", "becoming"]

DISTANCES: dict[Speed, float] = {"slowly": 0.12, "quickly": 0.3}
"""How far a shape moves from the first to the last frame."""
RADIUS, MAX_RADIUS = 0.2, 0.27
"""The radius of a shape, and at the end that of a growing one."""
CHANGES: tuple[Change, ...] = ("", "", "", "growing", "shrinking", "becoming")
MIN_COLOUR_DISTANCE = 120
"""The distance in RGB between the first and the last colour of a shape."""
ACROSS = (0.35, 0.5, 0.65)
"""The positions across the direction of motion."""


def sample_plain_scene(seed: int, number: int) -> MovingScene:
    """Sample the contents and the caption of one plain video."""
    rng = np.random.default_rng([seed, number])
    background = sample_background(rng, PLAIN_BACKGROUNDS)
    background = replace(background, kind="plain", rgb=BACKGROUNDS[background.colour])
    colours = find_visible_colours(background.colour)
    ((kind, colour),) = sample_distinct_looks(rng, 1, colours)
    change = pick(rng, CHANGES)
    growth = {"growing": MAX_RADIUS / RADIUS, "shrinking": RADIUS / MAX_RADIUS}.get(change, 1.0)
    radius = MAX_RADIUS if change == "shrinking" else RADIUS
    shape = sample_shape(rng, background, kind, colour, "medium", radius, (0.5, 0.5))
    shape = replace(shape, texture="plain", rotation=0.0, rgb=COLOURS[colour])
    others = tuple(name for name in colours if is_different(name, colour))
    final = pick(rng, others) if change == "becoming" else None
    direction, speed = pick(rng, DIRECTIONS["moving"]), pick(rng, tuple(DISTANCES))
    actor = place_actor(rng, Actor(shape, "moving", direction), DISTANCES[speed])
    actor = replace(actor, growth=growth, final_rgb=None if final is None else COLOURS[final])
    clause = f" and {change} {final or ''}".rstrip() if change else ""
    noun = describe_shape(shape, with_size=False, with_texture=False)
    sentence = f"{noun} moving {direction} {speed}{clause}"
    style = CaptionStyle(size=False, texture=False, background=True)
    return MovingScene((actor,), background, style.add_background(sentence, background))


def is_different(one: str, other: str) -> bool:
    return math.dist(COLOURS[one], COLOURS[other]) > MIN_COLOUR_DISTANCE


def place_actor(rng: np.random.Generator, actor: Actor, distance: float) -> Actor:
    """Sample a path of this length within the image."""
    area = Area.inside(replace(actor.shape, radius=MAX_RADIUS))
    begin = float(rng.uniform(area.left, max(area.left, area.right - distance)))
    end, across = begin + distance, pick(rng, ACROSS)
    direction: Direction = actor.direction
    if direction in ("left", "up"):
        begin, end = end, begin
    points = [(begin, across), (end, across)]
    if direction in ("up", "down"):
        points = [(y, x) for x, y in points]
    start, goal = points
    return replace(actor, shape=replace(actor.shape, centre=start), goal=goal)
