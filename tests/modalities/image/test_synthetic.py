"""The toys are the same for everybody, all different, and what is said about them is true."""

from __future__ import annotations

import hashlib
import math
import pickle
import re
from collections import Counter

import numpy as np
import pytest

from tessera.data.dataset import HELD_OUT_TOYS
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.synthetic import (
    BACKGROUNDS,
    COLOURS,
    GROUNDS,
    KINDS,
    TEXTURES,
    TIDY_GROUNDS,
    Background,
    Scene,
    Shape,
    SyntheticImages,
    coverage,
    draw,
    sample_scene,
    whereabouts,
)

SCENES = [sample_scene(0, number) for number in range(400)]
ANYTHING = np.random.default_rng(0)

NOUN = (
    r"an? (?:(?P<size>small|large) )?(?:(?P<texture>striped|dotted|checkered|shaded) )?"
    rf"(?P<colour>{'|'.join(COLOURS)}) (?P<kind>{'|'.join(KINDS)})"
)


def nouns(caption: str) -> list[dict[str, str | None]]:
    return [match.groupdict() for match in re.finditer(NOUN, caption)]


def test_a_toy_depends_on_its_seed_and_number_alone():
    one, other = (
        SyntheticImages(count=20, size=32, seed=5),
        SyntheticImages(count=3, size=32, seed=5, first=7),
    )
    mine, yours = one.item(9, np.random.default_rng(1)), other.item(2, np.random.default_rng(2))
    assert one.name(9) == other.name(2) == "toy-000009"
    assert mine.caption == yours.caption
    assert np.array_equal(mine.pixels, yours.pixels)
    assert not np.array_equal(
        mine.pixels, SyntheticImages(count=20, size=32, seed=6).item(9, ANYTHING).pixels
    )


def test_the_first_toy_is_the_one_it_has_always_been():
    """Runs compare numbers with those of last year: a change here is a new data set."""
    scene = sample_scene(0, 0)
    assert (
        scene.caption
        == "a large shaded purple ring left of a small purple star on a dark blue background"
    )
    assert draw(scene, 64).pixels.mean() == pytest.approx(57.7, abs=0.5)


def test_all_toys_are_the_ones_they_have_always_been():
    """Everything that is drawn and said, but for the last digits, which other machines may round
    differently."""
    told = hashlib.sha256()
    for number in range(300):
        scene = sample_scene(0, number)
        told.update(
            f"{scene.caption}|{scene.background.kind}|{scene.background.rgb}|{scene.background.grain}".encode()
        )
        for s in scene.shapes:
            places = [round(value, 6) for value in (*s.centre, s.radius, s.turn)]
            told.update(f"{s.kind}|{s.size}|{s.texture}|{s.rgb}|{s.second}|{places}".encode())
    assert told.hexdigest()[:16] == "f69e5a4c6cc4e0f3"


@pytest.mark.parametrize("most", [1, 2, 3])
def test_there_are_never_more_shapes_than_wanted(most):
    toys = SyntheticImages(count=200, size=16, most_shapes=most)
    scenes = [toys.scene(i) for i in range(len(toys))]
    assert {len(scene.shapes) for scene in scenes} == set(range(1, most + 1))
    for scene in scenes:
        assert [(noun["colour"], noun["kind"]) for noun in nouns(scene.caption)] == [
            (s.colour, s.kind) for s in scene.shapes
        ]


def test_toys_that_have_few_enough_shapes_anyway_stay_as_they_are():
    few = SyntheticImages(count=200, size=16, most_shapes=2)
    same = [few.scene(i) == scene for i, scene in enumerate(SCENES[:200]) if len(scene.shapes) == 1]
    assert len(same) > 40 and all(same)


@pytest.mark.parametrize("most", [1, 2])
def test_every_source_of_toys_keeps_to_the_most_shapes(most):
    config = ImageDataConfig(size=16, toys=60, val_fraction=0.5, toy_shapes=most)
    split = config.build()
    for source in (split.train, split.validation, config.full()):
        assert max(len(source.scene(i).shapes) for i in range(len(source))) == most


def test_a_caption_can_be_had_without_its_picture(monkeypatch):
    toys = SyntheticImages(count=5, size=16, seed=2, first=3, most_shapes=2)
    captions = [toys.item(i, ANYTHING).caption for i in range(5)]
    monkeypatch.setattr("tessera.modalities.image.synthetic.draw", None)
    assert [toys.caption(i) for i in range(5)] == captions


def test_toys_are_pictures_as_models_see_them():
    example = SyntheticImages(count=1, size=48).item(0, ANYTHING)
    assert example.pixels.shape == (3, 48, 48) and example.pixels.dtype == np.float32
    assert example.pixels.min() >= -1 and example.pixels.max() <= 1


@pytest.mark.parametrize("size", [1, 2, 17, 64, 128])
def test_a_toy_can_be_drawn_at_any_size(size):
    assert all(draw(scene, size).pixels.shape == (size, size, 3) for scene in SCENES[:9])


def test_a_toy_is_the_same_scene_at_every_size():
    for scene in SCENES[:20]:
        small, large = draw(scene, 32).pixels.astype(float), draw(scene, 128).pixels.astype(float)
        reduced = large.reshape(32, 4, 32, 4, 3).mean(axis=(1, 3))
        assert abs(small - reduced).mean() < 4


def test_no_two_toys_are_alike():
    pictures = {draw(scene, 32).pixels.tobytes() for scene in SCENES}
    assert len(pictures) == len(SCENES)
    assert len({scene.caption for scene in SCENES}) > 0.95 * len(SCENES)


def test_everything_that_a_toy_may_be_occurs():
    shapes = [shape for scene in SCENES for shape in scene.shapes]
    assert {len(scene.shapes) for scene in SCENES} == {1, 2, 3}
    assert {shape.kind for shape in shapes} == set(KINDS)
    assert {shape.colour for shape in shapes} == set(COLOURS)
    assert {shape.texture for shape in shapes} == set(TEXTURES)
    assert {shape.size for shape in shapes} == {"small", "medium", "large"}
    assert {scene.background.colour for scene in SCENES} == set(BACKGROUNDS)
    assert {scene.background.kind for scene in SCENES} == set(GROUNDS)


def test_captions_name_every_shape_truly_and_in_order():
    for scene in SCENES:
        said = nouns(scene.caption)
        assert [(noun["colour"], noun["kind"]) for noun in said] == [
            (s.colour, s.kind) for s in scene.shapes
        ]
        for noun, shape in zip(said, scene.shapes, strict=True):
            assert noun["size"] in (None, shape.size)
            assert noun["texture"] in (None, shape.texture)


def test_captions_place_shapes_truly():
    told = Counter()
    for scene in SCENES:
        if match := re.search(r" (left of|right of|above|below) ", scene.caption):
            (x, y), (other_x, other_y) = scene.shapes[0].centre, scene.shapes[1].centre
            distance = {
                "left of": other_x - x,
                "right of": x - other_x,
                "above": other_y - y,
                "below": y - other_y,
            }
            assert distance[match.group(1)] > 1.3 * sorted(abs(d) for d in distance.values())[0]
            assert distance[match.group(1)] > 0.1
            told[match.group(1)] += 1
        if match := re.search(
            r" (?:at the (top|bottom)? ?(left|right)?|in the middle)\b", scene.caption
        ):
            x, y = scene.shapes[0].centre
            assert {"top": y < 0.4, "bottom": y > 0.6, None: 0.4 < y < 0.6}[match.group(1)]
            assert {"left": x < 0.4, "right": x > 0.6, None: 0.4 < x < 0.6}[match.group(2)]
            told["place"] += 1
        if match := re.search(r" on a (.*) background$", scene.caption):
            assert match.group(1) == scene.background.colour
            told["background"] += 1
    assert (
        min(told[key] for key in ("left of", "right of", "above", "below", "place", "background"))
        > 20
    )


def test_two_shapes_are_always_related_and_never_the_same():
    for scene in SCENES:
        assert len({(shape.colour, shape.kind) for shape in scene.shapes}) == len(scene.shapes)
        if len(scene.shapes) == 2:
            assert re.search(r" (left of|right of|above|below) ", scene.caption)


def test_shapes_neither_touch_each_other_nor_leave_the_picture():
    for scene in SCENES:
        covers = [np.asarray(coverage(shape, 64), dtype=int) for shape in scene.shapes]
        assert all(cover.max() == 255 for cover in covers)
        assert (np.stack(covers) > 0).sum(axis=0).max() == 1
        for cover in covers:
            assert max(cover[0].max(), cover[-1].max(), cover[:, 0].max(), cover[:, -1].max()) == 0


def test_a_large_shape_is_larger_than_a_medium_one_and_that_than_a_small_one():
    radii = {
        size: [s.radius for scene in SCENES for s in scene.shapes if s.size == size]
        for size in ("small", "medium", "large")
    }
    assert max(radii["small"]) < 0.85 * min(radii["medium"])
    assert max(radii["medium"]) < 0.85 * min(radii["large"])


def test_a_shape_has_the_colour_it_is_said_to_have():
    for scene in SCENES:
        pixels = draw(scene, 64).pixels
        for shape in scene.shapes:
            inside = pixels[np.asarray(coverage(shape, 64)) == 255].astype(float)
            if shape.texture == "plain" and len(inside) > 8:
                mean = tuple(inside.mean(axis=0))
                nearest = min(COLOURS, key=lambda name: math.dist(COLOURS[name], mean))
                assert nearest == shape.colour


def test_a_textured_shape_shows_two_tones_and_a_plain_one_a_single_one():
    for texture in TEXTURES:
        shape = Shape(
            "square", "red", "large", texture, (0.5, 0.5), 0.3, 0.1, (219, 50, 47), (240, 170, 170)
        )
        pixels = draw(
            Scene((shape,), Background("plain", "white", (240, 240, 238), 0, 0), ""), 64
        ).pixels
        spread = pixels[np.asarray(coverage(shape, 64)) == 255][:, 1].std()
        assert (spread == 0) if texture == "plain" else (spread > 20)


def test_outlines_are_smooth():
    shape = next(
        s for scene in SCENES for s in scene.shapes if s.kind == "circle" and s.size == "large"
    )
    edge = np.asarray(coverage(shape, 64))
    assert len(np.unique(edge)) > 8


def test_toys_learnt_from_and_toys_held_out_are_different_ones():
    split = ImageDataConfig(size=16, toys=100, val_fraction=0.1).build()
    more = ImageDataConfig(size=16, toys=100_000, val_fraction=0.0001).build()
    train = {split.train.name(i) for i in range(len(split.train))}
    held_out = {split.validation.name(i) for i in range(len(split.validation))}
    assert (len(train), len(held_out)) == (100, 10)
    assert not train & held_out
    assert {more.validation.name(i) for i in range(len(more.validation))} == held_out
    assert len(more.train) < HELD_OUT_TOYS


def test_a_share_of_nothing_validates_on_the_toys_themselves():
    split = ImageDataConfig(size=16, toys=7, val_fraction=0).build()
    assert split.validation == split.train


def test_toys_can_be_sent_to_a_worker_and_come_in_batches():
    toys = pickle.loads(pickle.dumps(SyntheticImages(count=4, size=16)))
    batch = toys.collate([toys.item(i, ANYTHING) for i in range(4)])
    assert batch.pixels.shape == (4, 3, 16, 16)
    assert batch.captions == [toys.scene(i).caption for i in range(4)]


def test_toys_are_never_mirrored():
    without_augmentation, flipped = (
        ImageDataConfig(size=16).build().train,
        ImageDataConfig(size=16, flip=True).build().train,
    )
    assert all(
        np.array_equal(
            without_augmentation.item(i, ANYTHING).pixels,
            flipped.item(i, np.random.default_rng(i)).pixels,
        )
        for i in range(8)
    )


# ----------------------------------------------------------------------------------------------------------- plain toys


def test_all_of_a_plain_toy_of_one_shape_can_be_said():
    """Two sizes, nine places, three grounds; wherever it stands it is wholly in the picture, and
    its caption says where."""
    toys = SyntheticImages(count=400, size=64, most_shapes=1, without_augmentation=True)
    scenes = [toys.scene(number) for number in range(len(toys))]
    shapes = [scene.shapes[0] for scene in scenes]
    assert {len(scene.shapes) for scene in scenes} == {1}
    assert {shape.size for shape in shapes} == {"medium", "large"}
    assert len({shape.centre for shape in shapes}) == 9
    assert {(scene.background.kind, scene.background.colour) for scene in scenes} == {
        ("plain", name) for name in TIDY_GROUNDS
    }
    assert {shape.texture for shape in shapes} == {"plain"} and {
        shape.turn for shape in shapes
    } == {0.0}
    for scene, shape in zip(scenes, shapes):
        cover = np.asarray(coverage(shape, 64))
        assert cover.max() == 255
        assert not np.concatenate([cover[0], cover[-1], cover[:, 0], cover[:, -1]]).any()
        said = whereabouts(shape.centre)
        assert said and (said in scene.caption or " at the " not in scene.caption)
