"""Tests of synthetic videos: reproducibility, motion and correct captions."""

from __future__ import annotations

import pickle
import re
from collections import Counter

import numpy as np
import pytest

from tessera.data.dataset import FIRST_HELD_OUT
from tessera.modalities.image.synthetic import (
    BACKGROUNDS,
    COLOURS,
    KINDS,
    Scene,
    draw,
    draw_coverage,
)
from tessera.modalities.video.dataset import VideoDataConfig
from tessera.modalities.video.synthetic import (
    ROTATION_INVARIANT,
    SyntheticVideos,
    draw_video,
    sample_scene,
)

SCENES = [sample_scene(0, number) for number in range(300)]
STEPS = np.linspace(0, 1, 9).tolist()
RNG = np.random.default_rng(0)

ACTOR = (
    r"an? (?:(?P<size>small|large) )?(?:(?P<texture>striped|dotted|checkered|shaded) )?"
    rf"(?P<colour>{'|'.join(COLOURS)}) (?P<kind>{'|'.join(KINDS)})"
    r"(?: (?P<motion>moving|bouncing|turning)"
    r" (?P<direction>left|right|up|down|clockwise|counterclockwise))?"
)
UNNAMED_ACTOR = re.sub("[?]P<.*?>", "?:", ACTOR)
SENTENCE = re.compile(
    rf"(?P<one>{UNNAMED_ACTOR})"
    r"(?:(?P<relation> and |, passing in front of |, passing behind )"
    rf"(?P<other>{UNNAMED_ACTOR}))?"
    rf"(?: on a (?P<background>{'|'.join(BACKGROUNDS)}) background)?"
)


def parse_caption(scene):
    """Match the parts of a caption: one actor, relation, other actor, background."""
    match = SENTENCE.fullmatch(scene.caption)
    assert match, scene.caption
    return match


def named_actors(scene):
    """Return the actors in the order of the caption."""
    first = re.fullmatch(ACTOR, parse_caption(scene)["one"])
    return sorted(
        scene.actors,
        key=lambda actor: (
            (actor.shape.colour, actor.shape.kind) != (first["colour"], first["kind"])
        ),
    )


def coverage(shape) -> np.ndarray:
    """Return which pixels a shape covers by more than half."""
    return np.asarray(draw_coverage(shape, 64)) > 127


def test_video_depends_only_on_seed_and_number():
    one, other = (
        SyntheticVideos(count=20, size=16, frames=5, seed=5),
        SyntheticVideos(count=3, size=16, frames=5, seed=5, first=7),
    )
    first, second = one.item(9, np.random.default_rng(1)), other.item(2, np.random.default_rng(2))
    assert one.name(9) == other.name(2) == "synthetic-000009"
    assert first.caption == second.caption == one.caption(9)
    assert np.array_equal(first.video, second.video)
    assert not np.array_equal(
        first.video, SyntheticVideos(count=20, size=16, frames=5, seed=6).item(9, RNG).video
    )


def test_first_videos_are_unchanged():
    """A change here is a new dataset, and metrics are no longer comparable across versions."""
    assert [scene.caption for scene in SCENES[:3]] == [
        "a pink ring bouncing left, passing behind a shaded green circle",
        "a large checkered yellow square turning counterclockwise",
        "a small shaded pink ring moving right and a small shaded red triangle"
        " on a dark green background",
    ]
    assert draw_video(SCENES[0], 32, 9).frames.mean() == pytest.approx(56.0, abs=0.5)


def test_examples_are_float32_in_minus_one_to_one():
    example = SyntheticVideos(count=1, size=24, frames=7).item(0, RNG)
    assert example.video.shape == (3, 7, 24, 24) and example.video.dtype == np.float32
    assert example.video.min() >= -1 and example.video.max() <= 1 and example.length == 7


@pytest.mark.parametrize("frames", [1, 2, 17])
def test_motion_spans_any_number_of_frames(frames):
    for scene in SCENES[:5]:
        video = draw_video(scene, 32, frames)
        assert video.frames.shape == (frames, 32, 32, 3)
        assert np.array_equal(video.frames[0], draw(scene.at(0), 32).pixels)
        assert frames == 1 or np.array_equal(video.frames[-1], draw(scene.at(1), 32).pixels)


def test_consecutive_frames_differ():
    for scene in SCENES[:60]:
        frames = draw_video(scene, 32, 9).frames.astype(int)
        assert (abs(np.diff(frames, axis=0)).max(axis=(1, 2, 3)) > 20).all(), scene.caption


def test_videos_are_distinct():
    assert len({draw_video(scene, 16, 2).frames.tobytes() for scene in SCENES}) == len(SCENES)
    assert len({scene.caption for scene in SCENES}) > 0.95 * len(SCENES)


def test_all_motions_relations_kinds_and_colours_occur():
    motions = Counter((actor.motion, actor.direction) for scene in SCENES for actor in scene.actors)
    expected = [("moving", direction) for direction in ("left", "right", "up", "down")]
    expected += [("bouncing", direction) for direction in ("left", "right")]
    expected += [("turning", direction) for direction in ("clockwise", "counterclockwise")]
    expected += [("resting", "")]
    assert set(motions) == set(expected) and min(motions.values()) > 8
    relations = Counter(parse_caption(scene)["relation"] for scene in SCENES)
    assert min(relations.values()) > 30 and len(relations) == 4
    assert {actor.shape.kind for scene in SCENES for actor in scene.actors} == set(KINDS)
    assert {actor.shape.colour for scene in SCENES for actor in scene.actors} == set(COLOURS)


def test_captions_name_all_actors_and_motions():
    for scene in SCENES:
        parts = parse_caption(scene)
        nouns = [
            re.fullmatch(ACTOR, parts[name]).groupdict() for name in ("one", "other") if parts[name]
        ]
        assert parts["background"] in (None, scene.background.colour)
        for noun, actor in zip(nouns, named_actors(scene), strict=True):
            assert (noun["colour"], noun["kind"]) == (actor.shape.colour, actor.shape.kind)
            assert noun["size"] in (None, actor.shape.size) and noun["texture"] in (
                None,
                actor.shape.texture,
            )
            assert (noun["motion"] or "resting", noun["direction"] or "") == (
                actor.motion,
                actor.direction,
            )


def test_actors_move_in_the_stated_direction():
    for scene in SCENES:
        for actor in scene.actors:
            centres = np.array([actor.at(progress).centre for progress in STEPS])
            right, down = (centres[-1] - centres[0]).tolist()
            if actor.motion in ("resting", "turning"):
                assert np.ptp(centres, axis=0).max() == 0
                continue
            distance = {"left": -right, "right": right, "up": -down, "down": down}
            assert distance[actor.direction] > 0.3
            along = centres[:, 0 if actor.direction in ("left", "right") else 1]
            assert abs(np.diff(along)).min() > 0.03, "in every frame"
            if actor.motion == "moving":
                assert min(abs(right), abs(down)) == 0


def test_bouncing_actors_return_to_the_floor():
    for scene in SCENES:
        for actor in scene.actors:
            if actor.motion == "bouncing":
                heights = actor.shape.centre[1] - np.array(
                    [actor.at(m).centre[1] for m in np.linspace(0, 1, 121)]
                )
                assert heights.min() > -1e-9 and heights.max() > 0.2
                landings = (heights[1:-1] < heights[:-2]) & (heights[1:-1] <= heights[2:])
                assert landings.sum() == actor.hops - 1 >= 1


def test_turning_actors_rotate_visibly_in_the_stated_direction():
    for scene in SCENES:
        for actor in scene.actors:
            rotation = actor.at(1).rotation - actor.at(0).rotation
            assert (rotation > 1) == (actor.direction == "clockwise") and (rotation < -1) == (
                actor.direction == "counterclockwise"
            )
            assert actor.motion != "turning" or actor.shape.kind not in ROTATION_INVARIANT


def test_clockwise_rotation_is_clockwise_in_the_image():
    """The tip of a heart points down and moves to the left."""
    (actor,) = next(
        p.actors
        for p in SCENES
        if p.actors[0].shape.kind == "heart" and p.actors[0].direction == "clockwise"
    )[:1]
    pixels = [np.argwhere(coverage(actor.at(progress))) for progress in (0, 0.4)]
    tips = [each[each[:, 0] == each[:, 0].max(), 1].mean() for each in pixels]
    assert tips[1] < tips[0] - 1


def test_shapes_stay_inside_and_overlap_only_when_passing():
    for scene in SCENES:
        passing = "passing" in scene.caption
        for progress in STEPS:
            covers = [coverage(actor.at(progress)) for actor in scene.actors]
            for mask in covers:
                assert mask.any() and not (
                    mask[0].any() or mask[-1].any() or mask[:, 0].any() or mask[:, -1].any()
                )
            assert passing or np.stack(covers).sum(axis=0).max() == 1


def test_passing_shapes_overlap_in_the_stated_order():
    counts = Counter()
    for scene in SCENES:
        relation = parse_caption(scene)["relation"]
        if relation not in (", passing in front of ", ", passing behind "):
            continue
        mover, other = named_actors(scene)
        for progress in (0, 1):
            assert not (coverage(mover.at(progress)) & coverage(other.at(progress))).any()
        progress = max(
            np.linspace(0, 1, 33).tolist(),
            key=lambda m: (coverage(mover.at(m)) & coverage(other.at(m))).sum(),
        )
        overlap = coverage(mover.at(progress)) & coverage(other.at(progress))
        assert overlap.sum() > 20, scene.caption
        single = {
            name: draw(Scene((actor.at(progress),), scene.background, ""), 64).pixels.astype(int)
            for name, actor in (("mover", mover), ("other", other))
        }
        inside = draw(scene.at(progress), 64).pixels.astype(int)[overlap]
        errors = {name: abs(inside - each[overlap]).mean() for name, each in single.items()}
        assert min(errors, key=errors.get) == ("mover" if "front" in relation else "other"), (
            scene.caption
        )
        counts[relation] += 1
    assert min(counts.values()) > 30


def test_train_and_validation_videos_are_disjoint():
    split = VideoDataConfig(size=16, frames=3, num_synthetic=100, val_fraction=0.1).build()
    train = {split.train.name(i) for i in range(len(split.train))}
    held_out = {split.validation.name(i) for i in range(len(split.validation))}
    assert (len(train), len(held_out)) == (100, 10) and not train & held_out
    assert split.validation.first == FIRST_HELD_OUT
    assert split.validation.item(0, RNG).video.shape == (3, 3, 16, 16)


def test_val_fraction_zero_validates_on_training_videos():
    split = VideoDataConfig(size=16, num_synthetic=7, val_fraction=0).build()
    assert split.validation == split.train == VideoDataConfig(size=16, num_synthetic=7).full()


def test_dataset_can_be_pickled_and_collated():
    dataset = pickle.loads(pickle.dumps(SyntheticVideos(count=3, size=16, frames=4)))
    batch = dataset.collate([dataset.item(i, RNG) for i in range(3)])
    assert batch.videos.shape == (3, 3, 4, 16, 16) and batch.lengths.tolist() == [4, 4, 4]
    assert batch.captions == [dataset.caption(i) for i in range(3)]
    assert all(dataset.all_captions(i) == [dataset.caption(i)] for i in range(3))


def test_signature_depends_on_everything_but_the_number():
    default, other_seed, other_first = (
        SyntheticVideos(count=1, size=16, frames=4, **changes).signature(0)
        for changes in ({}, {"seed": 1}, {"first": 5})
    )
    assert default == other_first != other_seed
    signatures = {
        SyntheticVideos(count=1, size=size, frames=frames).signature(0)
        for size, frames in ((16, 4), (16, 5), (8, 4))
    }
    assert len(signatures) == 3


def test_synthetic_videos_are_never_flipped():
    default, flipped = (
        VideoDataConfig(size=16, frames=2).build().train,
        VideoDataConfig(size=16, frames=2, flip=True).build().train,
    )
    for i in range(6):
        assert np.array_equal(
            default.item(i, RNG).video,
            flipped.item(i, np.random.default_rng(i)).video,
        )
