"""Measure whether generated videos show what their prompts request, for synthetic videos.

`parse_prompt` returns the shapes that a caption names with their motions, and `read_motion` follows
the shape of a kind and colour through the frames, from pixels alone: shapes are located in some of
the frames as in `modalities/image/prompt_match.py`, without a trained network. From their centres,
areas and colours follow the direction, the speed and what changes.

A video matches its prompt (`prompt_match`) if kind, colour and direction of every shape are as
requested. Prompts with a rotation are not counted, since rotated shapes are not recognised.
Speeds and changes are read of prompts that state them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.data.sample_metrics import SampleMetrics, Samples
from tessera.modalities.image.prompt_match import LocatedShape, locate_shapes
from tessera.modalities.image.synthetic import COLOURS, KINDS, Kind
from tessera.modalities.video.media import Video

NUM_FRAMES = 5
"""The number of frames that are analysed, from the first to the last."""
MIN_FOUND = 0.5
"""The fraction of the analysed frames in which a shape must be found."""
MIN_DISTANCE = 0.07
"""The distance, in units of the image's side, below which a shape rests."""
MAX_SLOW_DISTANCE = 0.21
"""The distance above which a shape moves quickly; between the two of plain synthetic videos."""
DIRECTION_RATIO = 1.4
"""The motion along a direction is at least this many times that across it."""
MIN_AREA_RATIO = 1.25
"""The ratio of the areas at the end and at the start of a growing shape. Areas of two frames at
each end are averaged, after which the ratio of plain synthetic videos is 1.6."""
MOTIONS = ("left", "right", "up", "down")
SPEEDS = ("slowly", "quickly")
PROPERTIES = ("kind", "colour", "direction", "speed", "change")


@dataclass(frozen=True)
class RequestedShape:
    """A shape that a prompt names; properties that it does not name are None."""

    kind: Kind
    colour: str | None = None
    direction: str | None = None
    """left, right, up, down, or "" for a shape at rest."""
    speed: str | None = None
    change: str | None = None
    """growing, shrinking, the name of a colour, or "" for no change."""


def parse_prompt(prompt: str) -> list[RequestedShape] | None:
    """Return the shapes that a prompt names, or None if the prompt cannot be evaluated."""
    text = re.sub(r" on an? [a-z ]+ background", "", prompt.lower())
    if "turning" in text:
        return None
    shapes: list[dict[str, str | None]] = []
    colour: str | None = None
    words = re.findall(r"[a-z]+", text)
    for number, word in enumerate(words):
        if word in COLOURS and words[number - 1] != "becoming":
            colour = word
        elif word in KINDS:
            shapes.append({"kind": word, "colour": colour, "direction": ""})
            colour = None
        elif shapes and word in MOTIONS:
            shapes[-1]["direction"] = word
        elif shapes and word in SPEEDS:
            shapes[-1] |= {"speed": word, "change": ""}  # plain captions name changes too
        elif shapes and word in ("growing", "shrinking"):
            shapes[-1]["change"] = word
        elif shapes and word == "becoming":
            shapes[-1]["change"] = next(iter(words[number + 1 :]), "")
    return [RequestedShape(**one) for one in shapes] or None  # type: ignore[arg-type]


# ---- reading videos


@dataclass(frozen=True)
class ObservedShape:
    """What a video shows of a requested shape."""

    kind: bool
    """Whether a shape of this kind was found in enough frames."""
    colour: bool
    """Whether a shape of this colour was found in enough frames."""
    look: bool
    """Whether a shape of this kind and colour was found in enough frames."""
    direction: str
    speed: str
    change: str


def locate_in_frames(video: Video) -> list[list[LocatedShape]]:
    """Return the shapes in some frames of a video, from the first to the last."""
    numbers = np.linspace(0, len(video.frames) - 1, min(NUM_FRAMES, len(video.frames)))
    return [locate_shapes(video.frames[round(number)]) for number in numbers.tolist()]


def observe(frames: list[list[LocatedShape]], request: RequestedShape) -> ObservedShape:
    """Follow the shape that fits a request best through the frames."""
    colours = {request.colour, request.change} - {None, ""}

    def has_colour(shape: LocatedShape) -> bool:
        # Between two colours anything may be recognised.
        changes = request.change in COLOURS
        return not colours or shape.label.colour in colours or changes

    def has_kind(shape: LocatedShape) -> bool:
        return shape.label.kind == request.kind

    def is_found(test: Sequence[bool]) -> bool:
        return bool(test) and sum(test) >= MIN_FOUND * len(test)

    def fit(shape: LocatedShape) -> tuple[bool, bool, float]:
        return has_kind(shape) and has_colour(shape), has_kind(shape), shape.area

    followed = [max(shapes, key=fit) for shapes in frames if shapes]
    centres = [shape.centre for shape in followed]
    direction, distance = "", 0.0
    if len(followed) > 1:
        right, down = (end - start for start, end in zip(centres[0], centres[-1]))
        direction, distance = name_direction(right, down), max(abs(right), abs(down))
    looks = [any(has_kind(one) and has_colour(one) for one in shapes) for shapes in frames]
    starts_right = not followed or request.colour in (None, followed[0].label.colour)
    return ObservedShape(
        kind=is_found([any(has_kind(one) for one in shapes) for shapes in frames]),
        colour=starts_right and is_found([any(map(has_colour, shapes)) for shapes in frames]),
        look=starts_right and is_found(looks),
        direction=direction,
        speed="slowly" if distance < MAX_SLOW_DISTANCE else "quickly",
        change=name_change(followed),
    )


def name_direction(right: float, down: float) -> str:
    """Return the direction of a motion, "" for none or "unclear"."""
    if max(abs(right), abs(down)) < MIN_DISTANCE:
        return ""
    if abs(right) > DIRECTION_RATIO * abs(down):
        return "right" if right > 0 else "left"
    if abs(down) > DIRECTION_RATIO * abs(right):
        return "down" if down > 0 else "up"
    return "unclear"


def name_change(followed: list[LocatedShape]) -> str:
    """Return how a shape changes: growing, shrinking, its last colour, or ""."""
    if len(followed) < 2:
        return ""
    if followed[0].label.colour != followed[-1].label.colour:
        return followed[-1].label.colour or ""
    start, end = (np.mean([one.area for one in part]) for part in (followed[:2], followed[-2:]))
    if end > MIN_AREA_RATIO * start:
        return "growing"
    return "shrinking" if start > MIN_AREA_RATIO * end else ""


# ---- metric


def match(
    frames: list[list[LocatedShape]], requests: list[RequestedShape]
) -> dict[str, bool | None]:
    """Return which properties of a video are as requested; None for those not requested."""
    observed = [observe(frames, request) for request in requests]
    result: dict[str, bool | None] = {
        "kind": all(one.kind for one in observed),
        "colour": all(one.colour for one in observed),
    }
    for name in ("direction", "speed", "change"):
        wanted = [getattr(request, name) for request in requests]
        found = [getattr(one, name) for one in observed]
        pairs = [(one, other) for one, other in zip(wanted, found) if one is not None]
        result[name] = all(one == other for one, other in pairs) if pairs else None
    looks = all(one.look for one in observed)
    return result | {"prompt": looks and bool(result["direction"])}


def match_prompts(videos: Sequence[Video], prompts: Sequence[str]) -> dict[str, float]:
    """Return the fraction of videos that match, by property, and the same at chance.

    At chance each video is compared with the prompts of all others, as a model that ignores its
    prompts would be.
    """
    requested = [parse_prompt(prompt) for prompt in prompts]
    pairs = [
        (locate_in_frames(video), request)
        for video, request in zip(videos, requested, strict=True)
        if request is not None
    ]
    own = [match(frames, request) for frames, request in pairs]
    others = [
        match(frames, request)
        for i, (frames, _) in enumerate(pairs)
        for j, (_, request) in enumerate(pairs)
        if i != j
    ]
    values: dict[str, float] = {}
    for name in ("prompt", *PROPERTIES):
        if any(one[name] is not None for one in own):
            values[f"{name}_match"] = fraction(own, name)
            values[f"{name}_match_chance"] = fraction(others, name)
    return values


def fraction(results: list[dict[str, bool | None]], name: str) -> float:
    """Return the mean of a property over the results that have it, or NaN."""
    values = [one[name] for one in results if one[name] is not None]
    return sum(map(bool, values)) / len(values) if values else math.nan


class VideoPromptMatch:
    """The metric of `tessera evaluate` for synthetic videos."""

    uses_prompts = True
    max_samples = 256

    def __call__(self, samples: Samples[Video]) -> SampleMetrics:
        """Compare samples, and the held-out videos with the same captions, with their prompts."""
        values = match_prompts(samples.media, samples.prompts)
        counted = [prompt for prompt in samples.prompts if parse_prompt(prompt) is not None]
        if samples.reference is not None and values:
            real = [
                samples.reference.validation.item(index, np.random.default_rng(0))
                for index in samples.reference.chosen[: len(samples.media)]
            ]
            videos = [Video.from_floats(one.video, one.rate_hz) for one in real]
            of_real = match_prompts(videos, [one.caption for one in real])
            values |= {
                f"{name}_real": value
                for name, value in of_real.items()
                if not name.endswith("_chance")
            }
        return SampleMetrics(values, {"evaluated_prompts": len(counted)})
