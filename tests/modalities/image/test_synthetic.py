"""Tests of synthetic images: reproducibility, variety and correct captions."""

from __future__ import annotations

import hashlib
import math
import pickle
import re
from collections import Counter

import numpy as np
import pytest

from tessera.data.dataset import FIRST_HELD_OUT
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.synthetic import (
    BACKGROUND_KINDS,
    BACKGROUNDS,
    COLOURS,
    KINDS,
    PLAIN_BACKGROUNDS,
    TEXTURES,
    Background,
    Scene,
    Shape,
    SyntheticImages,
    describe_position,
    draw,
    draw_coverage,
    sample_scene,
)

SCENES = [sample_scene(0, number) for number in range(400)]
RNG = np.random.default_rng(0)

NOUN = (
    r"an? (?:(?P<size>small|large) )?(?:(?P<texture>striped|dotted|checkered|shaded) )?"
    rf"(?P<colour>{'|'.join(COLOURS)}) (?P<kind>{'|'.join(KINDS)})"
)


def nouns(caption: str) -> list[dict[str, str | None]]:
    return [match.groupdict() for match in re.finditer(NOUN, caption)]


def test_image_depends_only_on_seed_and_number():
    one, other = (
        SyntheticImages(count=20, size=32, seed=5),
        SyntheticImages(count=3, size=32, seed=5, first=7),
    )
    first, second = one.item(9, np.random.default_rng(1)), other.item(2, np.random.default_rng(2))
    assert one.name(9) == other.name(2) == "synthetic-000009"
    assert first.caption == second.caption
    assert np.array_equal(first.pixels, second.pixels)
    assert not np.array_equal(
        first.pixels, SyntheticImages(count=20, size=32, seed=6).item(9, RNG).pixels
    )


def test_first_scene_is_unchanged():
    """A change here is a new dataset, and metrics are no longer comparable across versions."""
    scene = sample_scene(0, 0)
    assert (
        scene.caption
        == "a large shaded purple ring left of a small purple star on a dark blue background"
    )
    assert draw(scene, 64).pixels.mean() == pytest.approx(57.7, abs=0.5)


def test_scenes_and_captions_are_unchanged():
    """Floats are rounded, since the last digits may differ between machines."""
    digest = hashlib.sha256()
    for number in range(300):
        scene = sample_scene(0, number)
        background = scene.background
        digest.update(
            f"{scene.caption}|{background.kind}|{background.rgb}|{background.noise_seed}".encode()
        )
        for s in scene.shapes:
            floats = [round(value, 6) for value in (*s.centre, s.radius, s.rotation)]
            digest.update(f"{s.kind}|{s.size}|{s.texture}|{s.rgb}|{s.second_rgb}|{floats}".encode())
    assert digest.hexdigest()[:16] == "f69e5a4c6cc4e0f3"


@pytest.mark.parametrize("max_shapes", [1, 2, 3])
def test_scenes_have_up_to_max_shapes(max_shapes):
    dataset = SyntheticImages(count=200, size=16, max_shapes=max_shapes)
    scenes = [dataset.scene(i) for i in range(len(dataset))]
    assert {len(scene.shapes) for scene in scenes} == set(range(1, max_shapes + 1))
    for scene in scenes:
        assert [(noun["colour"], noun["kind"]) for noun in nouns(scene.caption)] == [
            (s.colour, s.kind) for s in scene.shapes
        ]


def test_max_shapes_does_not_change_scenes_of_one_shape():
    few = SyntheticImages(count=200, size=16, max_shapes=2)
    same = [few.scene(i) == scene for i, scene in enumerate(SCENES[:200]) if len(scene.shapes) == 1]
    assert len(same) > 40 and all(same)


@pytest.mark.parametrize("max_shapes", [1, 2])
def test_all_splits_respect_max_shapes(max_shapes):
    config = ImageDataConfig(
        size=16, num_synthetic=60, val_fraction=0.5, synthetic_max_shapes=max_shapes
    )
    split = config.build()
    for source in (split.train, split.validation, config.full()):
        assert max(len(source.scene(i).shapes) for i in range(len(source))) == max_shapes


def test_captions_do_not_render_images(monkeypatch):
    dataset = SyntheticImages(count=5, size=16, seed=2, first=3, max_shapes=2)
    captions = [dataset.item(i, RNG).caption for i in range(5)]
    monkeypatch.setattr("tessera.modalities.image.synthetic.draw", None)
    assert [dataset.caption(i) for i in range(5)] == captions


def test_examples_are_float32_in_minus_one_to_one():
    example = SyntheticImages(count=1, size=48).item(0, RNG)
    assert example.pixels.shape == (3, 48, 48) and example.pixels.dtype == np.float32
    assert example.pixels.min() >= -1 and example.pixels.max() <= 1


@pytest.mark.parametrize("size", [1, 2, 17, 64, 128])
def test_scenes_render_at_any_size(size):
    assert all(draw(scene, size).pixels.shape == (size, size, 3) for scene in SCENES[:9])


def test_rendering_is_consistent_across_sizes():
    for scene in SCENES[:20]:
        small, large = draw(scene, 32).pixels.astype(float), draw(scene, 128).pixels.astype(float)
        reduced = large.reshape(32, 4, 32, 4, 3).mean(axis=(1, 3))
        assert abs(small - reduced).mean() < 4


def test_images_are_distinct():
    images = {draw(scene, 32).pixels.tobytes() for scene in SCENES}
    assert len(images) == len(SCENES)
    assert len({scene.caption for scene in SCENES}) > 0.95 * len(SCENES)


def test_all_kinds_colours_textures_and_backgrounds_occur():
    shapes = [shape for scene in SCENES for shape in scene.shapes]
    assert {len(scene.shapes) for scene in SCENES} == {1, 2, 3}
    assert {shape.kind for shape in shapes} == set(KINDS)
    assert {shape.colour for shape in shapes} == set(COLOURS)
    assert {shape.texture for shape in shapes} == set(TEXTURES)
    assert {shape.size for shape in shapes} == {"small", "medium", "large"}
    assert {scene.background.colour for scene in SCENES} == set(BACKGROUNDS)
    assert {scene.background.kind for scene in SCENES} == set(BACKGROUND_KINDS)


def test_captions_name_all_shapes_in_order():
    for scene in SCENES:
        named = nouns(scene.caption)
        assert [(noun["colour"], noun["kind"]) for noun in named] == [
            (s.colour, s.kind) for s in scene.shapes
        ]
        for noun, shape in zip(named, scene.shapes, strict=True):
            assert noun["size"] in (None, shape.size)
            assert noun["texture"] in (None, shape.texture)


def test_captions_state_positions_correctly():
    counts = Counter()
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
            counts[match.group(1)] += 1
        if match := re.search(
            r" (?:at the (top|bottom)? ?(left|right)?|in the middle)\b", scene.caption
        ):
            x, y = scene.shapes[0].centre
            assert {"top": y < 0.4, "bottom": y > 0.6, None: 0.4 < y < 0.6}[match.group(1)]
            assert {"left": x < 0.4, "right": x > 0.6, None: 0.4 < x < 0.6}[match.group(2)]
            counts["position"] += 1
        if match := re.search(r" on a (.*) background$", scene.caption):
            assert match.group(1) == scene.background.colour
            counts["background"] += 1
    keys = ("left of", "right of", "above", "below", "position", "background")
    assert min(counts[key] for key in keys) > 20


def test_shapes_are_distinct_and_pairs_have_a_relation():
    for scene in SCENES:
        assert len({(shape.colour, shape.kind) for shape in scene.shapes}) == len(scene.shapes)
        if len(scene.shapes) == 2:
            assert re.search(r" (left of|right of|above|below) ", scene.caption)


def test_shapes_do_not_overlap_or_leave_the_image():
    for scene in SCENES:
        covers = [np.asarray(draw_coverage(shape, 64), dtype=int) for shape in scene.shapes]
        assert all(cover.max() == 255 for cover in covers)
        assert (np.stack(covers) > 0).sum(axis=0).max() == 1
        for cover in covers:
            assert max(cover[0].max(), cover[-1].max(), cover[:, 0].max(), cover[:, -1].max()) == 0


def test_size_classes_do_not_overlap():
    radii = {
        size: [s.radius for scene in SCENES for s in scene.shapes if s.size == size]
        for size in ("small", "medium", "large")
    }
    assert max(radii["small"]) < 0.85 * min(radii["medium"])
    assert max(radii["medium"]) < 0.85 * min(radii["large"])


def test_shapes_have_the_named_colour():
    for scene in SCENES:
        pixels = draw(scene, 64).pixels
        for shape in scene.shapes:
            inside = pixels[np.asarray(draw_coverage(shape, 64)) == 255].astype(float)
            if shape.texture == "plain" and len(inside) > 8:
                mean = tuple(inside.mean(axis=0))
                nearest = min(COLOURS, key=lambda name: math.dist(COLOURS[name], mean))
                assert nearest == shape.colour


def test_only_textured_shapes_have_two_tones():
    for texture in TEXTURES:
        shape = Shape(
            "square", "red", "large", texture, (0.5, 0.5), 0.3, 0.1, (219, 50, 47), (240, 170, 170)
        )
        pixels = draw(
            Scene((shape,), Background("plain", "white", (240, 240, 238), 0, 0), ""), 64
        ).pixels
        spread = pixels[np.asarray(draw_coverage(shape, 64)) == 255][:, 1].std()
        assert (spread == 0) if texture == "plain" else (spread > 20)


def test_outlines_are_antialiased():
    shape = next(
        s for scene in SCENES for s in scene.shapes if s.kind == "circle" and s.size == "large"
    )
    edge = np.asarray(draw_coverage(shape, 64))
    assert len(np.unique(edge)) > 8


def test_train_and_validation_images_are_disjoint():
    split = ImageDataConfig(size=16, num_synthetic=100, val_fraction=0.1).build()
    more = ImageDataConfig(size=16, num_synthetic=100_000, val_fraction=0.0001).build()
    train = {split.train.name(i) for i in range(len(split.train))}
    held_out = {split.validation.name(i) for i in range(len(split.validation))}
    assert (len(train), len(held_out)) == (100, 10)
    assert not train & held_out
    assert {more.validation.name(i) for i in range(len(more.validation))} == held_out
    assert len(more.train) < FIRST_HELD_OUT


def test_val_fraction_zero_validates_on_training_images():
    split = ImageDataConfig(size=16, num_synthetic=7, val_fraction=0).build()
    assert split.validation == split.train


def test_dataset_can_be_pickled_and_collated():
    dataset = pickle.loads(pickle.dumps(SyntheticImages(count=4, size=16)))
    batch = dataset.collate([dataset.item(i, RNG) for i in range(4)])
    assert batch.pixels.shape == (4, 3, 16, 16)
    assert batch.captions == [dataset.scene(i).caption for i in range(4)]


def test_synthetic_images_are_never_flipped():
    default, flipped = (
        ImageDataConfig(size=16).build().train,
        ImageDataConfig(size=16, flip=True).build().train,
    )
    assert all(
        np.array_equal(
            default.item(i, RNG).pixels,
            flipped.item(i, np.random.default_rng(i)).pixels,
        )
        for i in range(8)
    )


# ---- plain images


def test_captions_can_describe_plain_images_of_one_shape_fully():
    """There are two sizes, nine positions and three backgrounds, and the shape is always inside."""
    dataset = SyntheticImages(count=400, size=64, max_shapes=1, plain=True)
    scenes = [dataset.scene(number) for number in range(len(dataset))]
    shapes = [scene.shapes[0] for scene in scenes]
    assert {len(scene.shapes) for scene in scenes} == {1}
    assert {shape.size for shape in shapes} == {"medium", "large"}
    assert len({shape.centre for shape in shapes}) == 9
    assert {(scene.background.kind, scene.background.colour) for scene in scenes} == {
        ("plain", name) for name in PLAIN_BACKGROUNDS
    }
    assert {shape.texture for shape in shapes} == {"plain"} and {
        shape.rotation for shape in shapes
    } == {0.0}
    for scene, shape in zip(scenes, shapes):
        cover = np.asarray(draw_coverage(shape, 64))
        assert cover.max() == 255
        assert not np.concatenate([cover[0], cover[-1], cover[:, 0], cover[:, -1]]).any()
        position = describe_position(shape.centre)
        assert position and (position in scene.caption or " at the " not in scene.caption)
