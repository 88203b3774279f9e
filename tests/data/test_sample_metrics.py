"""Tests of the choice of real examples that samples are compared with."""

from __future__ import annotations

from pathlib import Path

import PIL.Image

from tessera.data.sample_metrics import Reference, are_classes, choose_evenly
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.synthetic import SyntheticImages


def write_classes(folder: Path, counts: dict[str, int]) -> ImageDataConfig:
    for name, count in counts.items():
        (folder / name).mkdir()
        for number in range(count):
            PIL.Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / name / f"{number:03}.png")
    return ImageDataConfig(path=str(folder), size=8, val_fraction=0.3)


def test_captions_are_classes_if_several_examples_share_each():
    assert are_classes(["cat", "dog"] * 5)
    assert not are_classes(["cat", "dog"] * 4)
    assert not are_classes(["cat"] * 20)
    assert not are_classes([""] * 20)


def test_classes_are_chosen_in_turn_even_if_their_sizes_differ(tmp_path):
    dataset = write_classes(tmp_path, {"cat": 60, "dog": 8}).full()
    chosen = choose_evenly(dataset, 10, by_class=True)
    assert sorted(dataset.caption(index) for index in chosen) == ["cat"] * 5 + ["dog"] * 5
    assert chosen[:4] == choose_evenly(dataset, 4, by_class=True)
    assert len(set(choose_evenly(dataset, 1000, by_class=True))) == 68


def test_texts_are_chosen_from_the_whole_set():
    dataset = SyntheticImages(100, size=8)
    chosen = choose_evenly(dataset, 20, by_class=False)
    assert len(set(chosen)) == 20 and min(chosen) < 20 and max(chosen) >= 80


def test_reference_has_both_sets_without_augmentation(tmp_path):
    data = write_classes(tmp_path, {"cat": 20, "dog": 20})
    reference = Reference.choose(data, captions=True, count=6)
    assert reference.has_classes and len(reference.chosen) == 6
    assert reference.train.config.crop == "centre" != data.crop
    assert not Reference.choose(data, captions=False, count=6).has_classes
