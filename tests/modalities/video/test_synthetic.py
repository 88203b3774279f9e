"""The toy clips are the same for everybody, really move, and what is said about them is true."""

from __future__ import annotations

import pickle
import re
from collections import Counter

import numpy as np
import pytest

from tessera.data.dataset import HELD_OUT_TOYS
from tessera.modalities.image.synthetic import BACKGROUNDS, COLOURS, KINDS, Scene, coverage, draw
from tessera.modalities.video.dataset import VideoDataConfig
from tessera.modalities.video.synthetic import SAME_WHEN_TURNED, SyntheticVideos, film, sample_scene

PLAYS = [sample_scene(0, number) for number in range(300)]
MOMENTS = np.linspace(0, 1, 9).tolist()
ANYTHING = np.random.default_rng(0)

ACTOR = (
    r"an? (?:(?P<size>small|large) )?(?:(?P<texture>striped|dotted|checkered|shaded) )?"
    rf"(?P<colour>{'|'.join(COLOURS)}) (?P<kind>{'|'.join(KINDS)})"
    r"(?: (?P<doing>moving|bouncing|turning) (?P<way>left|right|up|down|clockwise|counterclockwise))?"
)
SENTENCE = re.compile(
    rf"(?P<one>{re.sub('[?]P<.*?>', '?:', ACTOR)})"
    rf"(?:(?P<relation> and |, passing in front of |, passing behind )(?P<other>{re.sub('[?]P<.*?>', '?:', ACTOR)}))?"
    rf"(?: on a (?P<background>{'|'.join(BACKGROUNDS)}) background)?"
)


def told(play):
    """The caption's words: the first actor, how it stands to the other, the other, the
    background."""
    match = SENTENCE.fullmatch(play.caption)
    assert match, play.caption
    return match


def actors(play):
    """The actors in the order in which the caption names them."""
    first = re.fullmatch(ACTOR, told(play)["one"])
    return sorted(
        play.actors,
        key=lambda actor: (
            (actor.shape.colour, actor.shape.kind) != (first["colour"], first["kind"])
        ),
    )


def cover(shape) -> np.ndarray:
    return np.asarray(coverage(shape, 64)) > 127


def test_a_toy_depends_on_its_seed_and_number_alone():
    one, other = (
        SyntheticVideos(count=20, size=16, frames=5, seed=5),
        SyntheticVideos(count=3, size=16, frames=5, seed=5, first=7),
    )
    mine, yours = one.item(9, np.random.default_rng(1)), other.item(2, np.random.default_rng(2))
    assert one.name(9) == other.name(2) == "toy-000009"
    assert mine.caption == yours.caption == one.caption(9)
    assert np.array_equal(mine.clip, yours.clip)
    assert not np.array_equal(
        mine.clip, SyntheticVideos(count=20, size=16, frames=5, seed=6).item(9, ANYTHING).clip
    )


def test_the_first_toys_are_those_they_have_always_been():
    """Runs compare numbers with those of last year: a change here is a new data set."""
    assert [play.caption for play in PLAYS[:3]] == [
        "a pink ring bouncing left, passing behind a shaded green circle",
        "a large checkered yellow square turning counterclockwise",
        "a small shaded pink ring moving right and a small shaded red triangle on a dark green background",
    ]
    assert film(PLAYS[0], 32, 9).frames.mean() == pytest.approx(56.0, abs=0.5)


def test_toys_are_clips_as_models_see_them():
    example = SyntheticVideos(count=1, size=24, frames=7).item(0, ANYTHING)
    assert example.clip.shape == (3, 7, 24, 24) and example.clip.dtype == np.float32
    assert example.clip.min() >= -1 and example.clip.max() <= 1 and example.length == 7


@pytest.mark.parametrize("frames", [1, 2, 17])
def test_a_toy_is_the_same_play_at_any_size_and_number_of_frames(frames):
    for play in PLAYS[:5]:
        clip = film(play, 32, frames)
        assert clip.frames.shape == (frames, 32, 32, 3)
        assert np.array_equal(clip.frames[0], draw(play.at(0), 32).pixels)
        assert frames == 1 or np.array_equal(clip.frames[-1], draw(play.at(1), 32).pixels)


def test_every_frame_differs_from_the_one_before():
    for play in PLAYS[:60]:
        frames = film(play, 32, 9).frames.astype(int)
        assert (abs(np.diff(frames, axis=0)).max(axis=(1, 2, 3)) > 20).all(), play.caption


def test_no_two_toys_are_alike():
    assert len({film(play, 16, 2).frames.tobytes() for play in PLAYS}) == len(PLAYS)
    assert len({play.caption for play in PLAYS}) > 0.95 * len(PLAYS)


def test_everything_that_a_toy_may_do_occurs():
    motions = Counter((actor.doing, actor.way) for play in PLAYS for actor in play.actors)
    wanted = [("moving", way) for way in ("left", "right", "up", "down")]
    wanted += [("bouncing", way) for way in ("left", "right")]
    wanted += [("turning", way) for way in ("clockwise", "counterclockwise")] + [("resting", "")]
    assert set(motions) == set(wanted) and min(motions.values()) > 8
    relations = Counter(told(play)["relation"] for play in PLAYS)
    assert min(relations.values()) > 30 and len(relations) == 4
    assert {actor.shape.kind for play in PLAYS for actor in play.actors} == set(KINDS)
    assert {actor.shape.colour for play in PLAYS for actor in play.actors} == set(COLOURS)


def test_captions_name_every_actor_truly_and_what_it_does():
    for play in PLAYS:
        words = told(play)
        said = [
            re.fullmatch(ACTOR, words[name]).groupdict() for name in ("one", "other") if words[name]
        ]
        assert words["background"] in (None, play.background.colour)
        for noun, actor in zip(said, actors(play), strict=True):
            assert (noun["colour"], noun["kind"]) == (actor.shape.colour, actor.shape.kind)
            assert noun["size"] in (None, actor.shape.size) and noun["texture"] in (
                None,
                actor.shape.texture,
            )
            assert (noun["doing"] or "resting", noun["way"] or "") == (actor.doing, actor.way)


def test_what_moves_goes_where_the_caption_says():
    for play in PLAYS:
        for actor in play.actors:
            centres = np.array([actor.at(moment).centre for moment in MOMENTS])
            right, down = (centres[-1] - centres[0]).tolist()
            if actor.doing in ("resting", "turning"):
                assert np.ptp(centres, axis=0).max() == 0
                continue
            way = {"left": -right, "right": right, "up": -down, "down": down}
            assert way[actor.way] > 0.3
            assert (
                abs(np.diff(centres[:, 0 if actor.way in ("left", "right") else 1])).min() > 0.03
            ), "at every frame"
            if actor.doing == "moving":
                assert min(abs(right), abs(down)) == 0


def test_what_bounces_rises_and_comes_back_to_its_floor():
    for play in PLAYS:
        for actor in play.actors:
            if actor.doing == "bouncing":
                heights = actor.shape.centre[1] - np.array(
                    [actor.at(m).centre[1] for m in np.linspace(0, 1, 121)]
                )
                assert heights.min() > -1e-9 and heights.max() > 0.2
                landings = (heights[1:-1] < heights[:-2]) & (heights[1:-1] <= heights[2:])
                assert landings.sum() == actor.hops - 1 >= 1


def test_what_turns_can_be_seen_to_turn_that_way():
    for play in PLAYS:
        for actor in play.actors:
            turn = actor.at(1).turn - actor.at(0).turn
            assert (turn > 1) == (actor.way == "clockwise") and (turn < -1) == (
                actor.way == "counterclockwise"
            )
            assert actor.doing != "turning" or actor.shape.kind not in SAME_WHEN_TURNED


def test_clockwise_is_what_a_clock_does():
    """The tip of a heart points down; a little clockwise, and it is left of the middle."""
    (actor,) = next(
        p.actors
        for p in PLAYS
        if p.actors[0].shape.kind == "heart" and p.actors[0].way == "clockwise"
    )[:1]
    rows_and_columns = [np.argwhere(cover(actor.at(moment))) for moment in (0, 0.4)]
    tips = [where[where[:, 0] == where[:, 0].max(), 1].mean() for where in rows_and_columns]
    assert tips[1] < tips[0] - 1


def test_shapes_stay_in_the_picture_and_keep_their_distance_unless_they_pass():
    for play in PLAYS:
        passing = "passing" in play.caption
        for moment in MOMENTS:
            covers = [cover(actor.at(moment)) for actor in play.actors]
            for mask in covers:
                assert mask.any() and not (
                    mask[0].any() or mask[-1].any() or mask[:, 0].any() or mask[:, -1].any()
                )
            assert passing or np.stack(covers).sum(axis=0).max() == 1


def test_who_passes_is_apart_at_both_ends_and_over_or_under_the_other_between():
    seen = Counter()
    for play in PLAYS:
        relation = told(play)["relation"]
        if relation not in (", passing in front of ", ", passing behind "):
            continue
        mover, other = actors(play)
        for moment in (0, 1):
            assert not (cover(mover.at(moment)) & cover(other.at(moment))).any()
        moment = max(
            np.linspace(0, 1, 33).tolist(),
            key=lambda m: (cover(mover.at(m)) & cover(other.at(m))).sum(),
        )
        overlap = cover(mover.at(moment)) & cover(other.at(moment))
        assert overlap.sum() > 20, play.caption
        alone = {
            who: draw(Scene((actor.at(moment),), play.background, ""), 64).pixels.astype(int)
            for who, actor in (("mover", mover), ("other", other))
        }
        inside = draw(play.at(moment), 64).pixels.astype(int)[overlap]
        far = {who: abs(inside - pixels[overlap]).mean() for who, pixels in alone.items()}
        assert min(far, key=far.get) == ("mover" if "front" in relation else "other"), play.caption
        seen[relation] += 1
    assert min(seen.values()) > 30


def test_toys_learnt_from_and_toys_held_out_are_different_ones():
    split = VideoDataConfig(size=16, frames=3, toys=100, val_fraction=0.1).build()
    train = {split.train.name(i) for i in range(len(split.train))}
    held_out = {split.validation.name(i) for i in range(len(split.validation))}
    assert (len(train), len(held_out)) == (100, 10) and not train & held_out
    assert split.validation.first == HELD_OUT_TOYS
    assert split.validation.item(0, ANYTHING).clip.shape == (3, 3, 16, 16)


def test_a_share_of_nothing_validates_on_the_toys_themselves():
    split = VideoDataConfig(size=16, toys=7, val_fraction=0).build()
    assert split.validation == split.train == VideoDataConfig(size=16, toys=7).full()


def test_toys_can_be_sent_to_a_worker_and_come_in_batches():
    toys = pickle.loads(pickle.dumps(SyntheticVideos(count=3, size=16, frames=4)))
    batch = toys.collate([toys.item(i, ANYTHING) for i in range(3)])
    assert batch.clips.shape == (3, 3, 4, 16, 16) and batch.lengths.tolist() == [4, 4, 4]
    assert batch.captions == [toys.caption(i) for i in range(3)] and toys.captioned == 3


def test_the_mark_of_a_toy_is_all_that_it_depends_on():
    toys = [
        SyntheticVideos(count=1, size=16, frames=4, **other)
        for other in ({}, {"seed": 1}, {"first": 5})
    ]
    assert toys[0].signature(0) == toys[2].signature(0) != toys[1].signature(0)
    assert (
        len(
            {
                SyntheticVideos(count=1, size=s, frames=f).signature(0)
                for s, f in ((16, 4), (16, 5), (8, 4))
            }
        )
        == 3
    )


def test_toys_are_never_mirrored():
    without_augmentation, flipped = (
        VideoDataConfig(size=16, frames=2).build().train,
        VideoDataConfig(size=16, frames=2, flip=True).build().train,
    )
    for i in range(6):
        assert np.array_equal(
            without_augmentation.item(i, ANYTHING).clip,
            flipped.item(i, np.random.default_rng(i)).clip,
        )
