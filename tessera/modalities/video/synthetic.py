"""Toy clips: one or two shapes that move, bounce, turn and pass each other, drawn afresh for every
number.

Toy number `i` of a seed is a pure function of `(seed, i)`, at any size and any number of frames: a
`Play` says who is in it and what each does from the beginning (progress 0) to the end (progress 1)
of the clip, in units of the picture's side (x to the right, y down), and a still `Scene` of any
moment is painted as a toy picture is. Shapes stay in the picture. What the caption says of kinds,
colours, motions and of who passes in front of whom is true. Toys are never mirrored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tessera.data.dataset import SyntheticDataset
from tessera.modalities.image.synthetic import (
    AIR,
    COLOURS,
    RADII,
    Background,
    Kind,
    Scene,
    Shape,
    Size,
    distinct_looks,
    draw,
    imagine_background,
    imagine_shape,
    noun,
    pick,
    reach,
    seen_on,
)
from tessera.modalities.video.media import Video, VideoBatch, VideoExample, collate

Doing = Literal["resting", "moving", "bouncing", "turning"]
Way = Literal["", "left", "right", "up", "down", "clockwise", "counterclockwise"]
Place = tuple[float, float]

RATE_HZ = 12.0  # at which a toy is shown; what happens in it happens in the whole clip, however many frames that is
SAME_WHEN_TURNED = ("circle", "ring")
TURN = (math.radians(80), math.radians(140))
"""Few enough that 5 frames show which way: a star looks the same after 72 degrees, so a step must
stay below 36."""
HOPS = (2, 3)
HOP_HEIGHT = (0.25, 0.4)
LEEWAY = 0.2
"""How much of the room for a way may be left at each of its ends."""


@dataclass(frozen=True)
class Actor:
    """A shape and what it does: from the centre of `shape` to `goal`, in hops or straight, and
    turning by `turn`."""

    shape: Shape
    doing: Doing
    way: Way = ""
    goal: Place | None = None
    hops: int = 0
    hop_height: float = 0.0
    turn: float = 0.0
    """radians, clockwise"""

    def at(self, progress: float) -> Shape:
        x, y = self.shape.centre
        goal_x, goal_y = self.goal or self.shape.centre
        hop = self.hop_height * abs(math.sin(math.pi * self.hops * progress))
        centre = (x + (goal_x - x) * progress, y + (goal_y - y) * progress - hop)
        return replace(self.shape, centre=centre, turn=self.shape.turn + self.turn * progress)


@dataclass(frozen=True)
class Play:
    actors: tuple[Actor, ...]
    """in the order in which they are painted: the last one is in front"""
    background: Background
    caption: str

    def at(self, progress: float) -> Scene:
        return Scene(
            tuple(actor.at(progress) for actor in self.actors), self.background, self.caption
        )


@dataclass(frozen=True)
class SyntheticVideos(SyntheticDataset):
    size: int
    frames: int

    def caption(self, index: int) -> str:
        return self.play(index).caption

    def signature(self, index: int) -> str:
        """All that a toy depends on beside its number."""
        return f"{self.seed} {self.size} {self.frames}"

    def play(self, index: int) -> Play:
        return sample_scene(self.seed, self.number(index))

    def item(self, index: int, rng: np.random.Generator) -> VideoExample:
        play = self.play(index)
        return VideoExample(
            film(play, self.size, self.frames).floats(), self.frames, RATE_HZ, play.caption
        )

    def collate(self, examples: list[VideoExample]) -> VideoBatch:
        return collate(examples)


def film(play: Play, size: int, frames: int) -> Video:
    """A play as a clip of `frames` frames of `size` x `size` pixels; of a single frame, its
    beginning."""
    moments = np.linspace(0, 1, frames).tolist()
    return Video(np.stack([draw(play.at(moment), size).pixels for moment in moments]), RATE_HZ)


# ---- what happens


def sample_scene(seed: int, number: int) -> Play:
    """The play of one toy."""
    rng = np.random.default_rng([seed, number])
    background = imagine_background(rng)
    says = tuple(bool(say) for say in rng.random(3) < (0.7, 0.8, 0.6))
    plot = (imagine_one, imagine_pair, imagine_passing)[int(rng.choice(3, p=[0.3, 0.25, 0.45]))]
    return plot(rng, background, Words(*says))


@dataclass(frozen=True)
class Words:
    """What a caption chooses to tell."""

    size: bool
    texture: bool
    background: bool

    def of(self, actor: Actor) -> str:
        motion = "" if actor.doing == "resting" else f"{actor.doing} {actor.way}"
        return f"{noun(actor.shape, self.size, self.texture)} {motion}".strip()

    def told(self, sentence: str, background: Background) -> str:
        return f"{sentence} on a {background.colour} background" if self.background else sentence


def imagine_one(rng: np.random.Generator, background: Background, words: Words) -> Play:
    """One shape, moving, bouncing or turning."""
    doing: Doing = pick(rng, ("moving", "bouncing", "turning"))
    size: Size = pick(
        rng, ("small", "medium", "large") if doing == "turning" else ("small", "medium")
    )
    shape = imagine_actor(rng, background, turning_look(rng, background, doing), size)
    actor = set_in_motion(rng, shape, doing, pick(rng, WAYS[doing]), Room.of(shape))
    return Play((actor,), background, words.told(words.of(actor), background))


def imagine_pair(rng: np.random.Generator, background: Background, words: Words) -> Play:
    """Two shapes that keep to their own halves, beside or above each other; one of them may
    rest."""
    upright = bool(rng.integers(2))
    doings: list[Doing] = [
        pick(rng, ("moving", "turning")),
        pick(rng, ("moving", "turning", "resting")),
    ]
    looks = distinct_looks(rng, 2, seen_on(background.colour))
    actors = []
    for half, (doing, look) in enumerate(zip(doings, looks)):
        shape = imagine_actor(rng, background, look, pick(rng, ("small", "medium")))
        room = Room.of(shape).half(half, upright)
        doing = "moving" if doing == "turning" and look[0] in SAME_WHEN_TURNED else doing
        ways: tuple[Way, ...] = (
            WAYS[doing] if doing != "moving" else ("up", "down") if upright else ("left", "right")
        )
        actors.append(set_in_motion(rng, shape, doing, pick(rng, ways), room))
    sentence = f"{words.of(actors[0])} and {words.of(actors[1])}"
    return Play(tuple(actors), background, words.told(sentence, background))


def imagine_passing(rng: np.random.Generator, background: Background, words: Words) -> Play:
    """A small shape crosses the whole picture and passes in front of, or behind, a larger one that
    stays in its place."""
    look, other_look = looks_of_two_colours(rng, background)
    doing: Doing = pick(rng, ("moving", "moving", "bouncing"))
    shape = imagine_actor(rng, background, look, "small")
    mover = set_in_motion(rng, shape, doing, pick(rng, WAYS[doing]), Room.of(shape), leeway=0.0)
    standing = imagine_actor(rng, background, other_look, "medium")
    room = Room.of(standing)
    standing = replace(standing, centre=room.nearest(mover.at(0.5).centre))
    turns = other_look[0] not in SAME_WHEN_TURNED and rng.random() < 0.3
    other_doing: Doing = "turning" if turns else "resting"
    other = set_in_motion(
        rng, standing, other_doing, pick(rng, WAYS[other_doing]), Room.only(standing.centre)
    )
    in_front = bool(rng.integers(2))
    where = "in front of" if in_front else "behind"
    sentence = f"{words.of(mover)}, passing {where} {words.of(other)}"
    return Play(
        (other, mover) if in_front else (mover, other), background, words.told(sentence, background)
    )


WAYS: dict[Doing, tuple[Way, ...]] = {
    "resting": ("",),
    "moving": ("left", "right", "up", "down"),
    "bouncing": ("left", "right"),
    "turning": ("clockwise", "counterclockwise"),
}


def turning_look(
    rng: np.random.Generator, background: Background, doing: Doing
) -> tuple[Kind, str]:
    """A shape whose turning can be seen, if it is to turn."""
    while True:
        (look,) = distinct_looks(rng, 1, seen_on(background.colour))
        if doing != "turning" or look[0] not in SAME_WHEN_TURNED:
            return look


def looks_of_two_colours(
    rng: np.random.Generator, background: Background
) -> list[tuple[Kind, str]]:
    """So that it can be seen which of two shapes covers the other."""
    while True:
        looks = distinct_looks(rng, 2, seen_on(background.colour))
        if math.dist(COLOURS[looks[0][1]], COLOURS[looks[1][1]]) > 60:
            return looks


def imagine_actor(
    rng: np.random.Generator, background: Background, look: tuple[Kind, str], size: Size
) -> Shape:
    radius = float(rng.uniform(*RADII[size]))
    return imagine_shape(rng, background, *look, size, radius, (0.5, 0.5))


@dataclass(frozen=True)
class Room:
    """Where a centre may be: from `left` to `right` and from `top` to `bottom`."""

    left: float
    right: float
    top: float
    bottom: float

    @classmethod
    def of(cls, shape: Shape) -> Room:
        """So that the shape stays in the picture however it turns."""
        margin = shape.radius * reach(shape.kind) + AIR
        return cls(margin, 1 - margin, margin, 1 - margin)

    def half(self, second: int, upright: bool) -> Room:
        """The part of the room in the first or second half of the picture, left and right or else
        above and below."""
        if upright:
            return replace(self, left=self.left + second / 2, right=self.right - (1 - second) / 2)
        return replace(self, top=self.top + second / 2, bottom=self.bottom - (1 - second) / 2)

    @classmethod
    def only(cls, place: Place) -> Room:
        return cls(place[0], place[0], place[1], place[1])

    def nearest(self, place: Place) -> Place:
        return min(max(place[0], self.left), self.right), min(max(place[1], self.top), self.bottom)


def set_in_motion(
    rng: np.random.Generator,
    shape: Shape,
    doing: Doing,
    way: Way,
    room: Room,
    leeway: float = LEEWAY,
) -> Actor:
    x, y = float(rng.uniform(room.left, room.right)), float(rng.uniform(room.top, room.bottom))
    still = replace(shape, centre=(x, y))
    if doing == "turning":
        turn = float(rng.uniform(*TURN))
        return Actor(still, doing, way, turn=turn if way == "clockwise" else -turn)
    if doing == "resting":
        return Actor(still, doing)
    upward = way in ("up", "down")
    low, high = (room.top, room.bottom) if upward else (room.left, room.right)
    near, far = rng.uniform(0, leeway, 2).tolist()
    begin, end = low + (high - low) * near, high - (high - low) * far
    if way in ("left", "up"):
        begin, end = end, begin
    if doing == "bouncing":
        return bouncing(rng, shape, way, begin, end, room)
    start, goal = ((x, begin), (x, end)) if upward else ((begin, y), (end, y))
    return Actor(replace(shape, centre=start), doing, way, goal)


def bouncing(
    rng: np.random.Generator, shape: Shape, way: Way, begin: float, end: float, room: Room
) -> Actor:
    height = float(rng.uniform(*HOP_HEIGHT))
    floor = float(rng.uniform(max(0.6, room.top + height), room.bottom))
    hops = pick(rng, HOPS)
    return Actor(replace(shape, centre=(begin, floor)), "bouncing", way, (end, floor), hops, height)
