"""Tests of the prompt-match metric: prompt parsing, shape detection and the result."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import PIL.Image
import pytest
from PIL import ImageFilter

from tessera.data.sample_metrics import SampleMetrics, Samples
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.media import Image
from tessera.modalities.image.prompt_match import (
    PromptMatchMetric,
    PromptMatchResult,
    ShapeLabel,
    detect_shapes,
    match_prompts,
    matches_prompt,
    parse_prompt,
    satisfies,
)
from tessera.modalities.image.synthetic import (
    BACKGROUNDS,
    COLOURS,
    KINDS,
    Background,
    Scene,
    Shape,
    draw,
    find_visible_colours,
    sample_scene,
)

SCENES = [sample_scene(3, number) for number in range(200)]
IMAGES = [draw(scene, 64) for scene in SCENES]
CAPTIONS = [scene.caption for scene in SCENES]


def labels_of(scene: Scene) -> list[ShapeLabel]:
    return [ShapeLabel(shape.kind, shape.colour) for shape in scene.shapes]


def shape(kind: str, colour: str, x: float = 0.5, y: float = 0.5, radius: float = 0.15) -> Shape:
    return Shape(
        kind, colour, "medium", "plain", (x, y), radius, 0.1, COLOURS[colour], COLOURS[colour]
    )


def render(*shapes: Shape, background: str = "white") -> Image:
    return draw(
        Scene(shapes, Background("plain", background, BACKGROUNDS[background], 0, 0), ""), 64
    )


def blur(image: Image, radius: float) -> Image:
    return Image(
        np.asarray(PIL.Image.fromarray(image.pixels).filter(ImageFilter.GaussianBlur(radius)))
    )


def pairs(prompt: str) -> list[tuple[str, str | None]]:
    return [(label.kind, label.colour) for label in parse_prompt(prompt)]


# ---- prompts


def test_captions_parse_to_the_shapes_of_their_scene():
    for number in range(500):
        scene = sample_scene(11, number)
        assert parse_prompt(scene.caption) == labels_of(scene)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (
            "a small striped red circle left of a blue square on a grey background",
            [("circle", "red"), ("square", "blue")],
        ),
        ("Red Circle, BLUE square!", [("circle", "red"), ("square", "blue")]),
        ("on a white background, a heart and a green star", [("heart", None), ("star", "green")]),
        ("a red heart and a moon", [("heart", "red"), ("moon", None)]),
        ("a dark blue background", []),
        ("a portrait of my aunt in blue", []),
        ("", []),
    ],
)
def test_free_prompts_are_parsed_for_kinds_and_colours(prompt, expected):
    assert pairs(prompt) == expected


# ---- detection


def test_rendered_images_match_their_captions():
    """Currently 198 of 200 match; some tints of white are barely visible on grey."""
    assert sum(map(matches_prompt, IMAGES, CAPTIONS)) >= 194


def test_rendered_images_rarely_show_additional_shapes():
    more = [
        scene
        for scene, image in zip(SCENES, IMAGES)
        if len(detect_shapes(image)) > len(scene.shapes)
    ]
    assert len(more) <= 4


def test_blurred_images_match_their_captions():
    assert (
        sum(matches_prompt(blur(image, 1.0), caption) for image, caption in zip(IMAGES, CAPTIONS))
        >= 190
    )


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_all_kinds_and_colours_are_detected_on_all_backgrounds(background):
    for colour in find_visible_colours(background):
        for kind in KINDS:
            assert detect_shapes(render(shape(kind, colour), background=background)) == [
                ShapeLabel(kind, colour)
            ]


def test_wrong_colour_or_kind_or_missing_shape_does_not_match():
    both = render(shape("circle", "red", x=0.25), shape("star", "blue", x=0.7))
    assert matches_prompt(both, "a red circle left of a blue star")
    assert matches_prompt(both, "a blue star") and matches_prompt(both, "a circle")
    assert not matches_prompt(both, "an orange circle left of a blue star")
    assert not matches_prompt(both, "a red ring left of a blue star")
    assert not matches_prompt(both, "a blue circle left of a red star"), (
        "colours belong to their shapes"
    )
    assert not matches_prompt(both, "a red circle, a blue star and a green heart")


def test_each_shape_satisfies_one_request():
    one = render(shape("circle", "red"))
    two = render(shape("circle", "red", x=0.25), shape("circle", "red", x=0.7))
    assert matches_prompt(one, "a red circle") and matches_prompt(
        two, "a red circle and a red circle"
    )
    assert not matches_prompt(one, "a red circle and a red circle")


def test_requests_of_any_colour_are_assigned_last():
    found = [ShapeLabel("circle", "red"), ShapeLabel("circle", "blue")]
    assert satisfies(found, [ShapeLabel("circle", None), ShapeLabel("circle", "red")])
    assert not satisfies(found, [ShapeLabel("circle", None), ShapeLabel("circle", "green")])


def test_shapes_that_almost_touch_are_separated():
    close = render(
        shape("square", "red", x=0.34), shape("circle", "blue", x=0.65), background="black"
    )
    assert matches_prompt(blur(close, 1.0), "a red square and a blue circle")


@pytest.mark.parametrize("background", ["white", "grey", "dark blue"])
def test_shape_that_touches_the_border_is_detected(background):
    corner = render(shape("square", "orange", x=0.2, y=0.2, radius=0.26), background=background)
    assert detect_shapes(corner) == [ShapeLabel("square", "orange")]


def test_brown_is_not_classified_as_dark_orange():
    # nearer to the segment from orange to its darker tint
    brown = dataclasses.replace(shape("circle", "brown"), rgb=(138, 81, 30))
    assert detect_shapes(render(brown)) == [ShapeLabel("circle", "brown")]


def test_other_outlines_are_not_detected():
    pixels = np.full((64, 64, 3), 240, dtype=np.uint8)
    pixels[28:34, 4:60] = COLOURS["red"]
    assert detect_shapes(pixels) == []
    pixels[10:50, 28:34] = COLOURS["red"]  # a lopsided T with thin arms
    assert detect_shapes(pixels) == []


def test_nothing_is_detected_in_empty_images_and_noise():
    for colour in BACKGROUNDS:
        assert detect_shapes(render(background=colour)) == []
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert detect_shapes(noise) == []


def test_nothing_is_detected_in_uneven_backgrounds():
    backgrounds = [sample_scene(1, number).background for number in range(300)]
    uneven = [draw(Scene((), each, ""), 64) for each in backgrounds if each.kind != "plain"]
    assert len(uneven) > 100 and all(detect_shapes(image) == [] for image in uneven)


@pytest.mark.parametrize("size", [32, 128])
def test_images_of_other_sizes_are_resized(size):
    assert sum(matches_prompt(draw(scene, size), scene.caption) for scene in SCENES[:60]) >= 57


def test_uint8_arrays_are_accepted_and_floats_are_an_error():
    assert detect_shapes(IMAGES[0].pixels) == detect_shapes(IMAGES[0]) != []
    with pytest.raises(ValueError, match=r"uint8 pixels of shape \(height, width, 3\)"):
        detect_shapes(IMAGES[0].to_floats())


# ---- results


def test_result_counts_matches_and_chance():
    red, blue = render(shape("circle", "red")), render(shape("star", "blue"))
    both = render(shape("circle", "red", x=0.25), shape("star", "blue", x=0.7))
    result = match_prompts([red, blue, both], ["a red circle", "a red circle", "a blue star"])
    # chance: red satisfies one of its two other prompts, blue one, both two of two
    assert result == PromptMatchResult(matched=2, total=3, fraction=2 / 3, chance=4 / 6)


def test_chance_equals_the_fraction_of_captions_true_of_other_scenes():
    result = match_prompts(IMAGES, CAPTIONS)
    labels = [labels_of(scene) for scene in SCENES]
    expected = [
        satisfies(found, requested)
        for i, found in enumerate(labels)
        for j, requested in enumerate(labels)
        if i != j
    ]
    assert result.fraction >= 0.97
    assert result.chance == pytest.approx(np.mean(expected), abs=0.001)
    assert result.chance < 0.02


def test_prompts_that_name_no_shape_are_not_counted():
    result = match_prompts(IMAGES[:3], [CAPTIONS[0], "a portrait of my aunt", CAPTIONS[2]])
    assert (result.matched, result.total) == (2, 2)


def test_fractions_of_nothing_are_nan():
    single, empty = match_prompts(IMAGES[:1], CAPTIONS[:1]), match_prompts([], [])
    assert (single.fraction, empty.matched, empty.total) == (1.0, 0, 0)
    assert math.isnan(single.chance) and math.isnan(empty.fraction) and math.isnan(empty.chance)


def test_different_numbers_of_images_and_prompts_are_an_error():
    with pytest.raises(ValueError, match="3 images and 2 prompts: give one prompt per image"):
        match_prompts(IMAGES[:3], CAPTIONS[:2])


def test_only_synthetic_data_has_the_metric(tmp_path):
    metric = ImageDataConfig().sample_metrics()[0]
    result = match_prompts(IMAGES[:5], CAPTIONS[:5])
    assert metric.uses_prompts
    assert metric(Samples(IMAGES[:5], CAPTIONS[:5], [])) == SampleMetrics(
        {"prompt_match": result.fraction, "prompt_match_chance": result.chance},
        {"prompts_with_shapes": 5},
    )
    folder = ImageDataConfig(path=str(tmp_path)).sample_metrics()
    assert not any(isinstance(metric, PromptMatchMetric) for metric in folder)
