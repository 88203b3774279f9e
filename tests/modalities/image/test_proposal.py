"""The size, the channels and the held-out fraction that are proposed for a folder of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tessera.data.discovery import find_files
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.inspect import inspect_folder
from tessera.modalities.image.media import SUFFIXES
from tessera.modalities.image.proposal import (
    ImageFacts,
    choose_size,
    is_grey,
    propose_settings,
    read_facts,
)
from tessera.modalities.image.recipes import images_vqgan

GREY = PIL.Image.linear_gradient("L")
COLOURS = PIL.Image.merge("RGB", (GREY, GREY, GREY.rotate(90)))


def facts_of(folder: Path) -> ImageFacts | None:
    return read_facts(find_files(folder, SUFFIXES, "images"))


@pytest.mark.parametrize(
    ("short_side", "limit", "stride", "size"),
    [
        (28, 64, 4, 28),
        (30, 64, 4, 32),  # enlarged to whole codes rather than reduced
        (72, 64, 4, 72),  # sprites keep their own size
        (81, 64, 4, 64),
        (1000, 64, 4, 64),
        (20, 16, 4, 20),
        (10, 64, 4, 16),  # at least 4 x 4 codes
        (64, 256, 16, 64),
        (28, 256, 16, 64),
    ],
)
def test_size_is_that_of_the_images_up_to_the_preset(short_side, limit, stride, size):
    assert choose_size(short_side, limit, stride) == size


def test_facts_are_the_median_size_and_whether_all_are_grey(tmp_path):
    for number, side in enumerate((20, 90, 100, 500)):
        GREY.resize((side, 2 * side)).save(tmp_path / f"{number}.png")
    (tmp_path / "broken.png").write_bytes(b"not an image")
    assert facts_of(tmp_path) == ImageFacts(count=5, short_side=90, is_grey=True)
    COLOURS.save(tmp_path / "colours.png")
    facts = facts_of(tmp_path)
    assert facts is not None and not facts.is_grey


def test_folder_without_readable_images_has_no_facts(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"not an image")
    assert facts_of(tmp_path) is None


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "P", "CMYK", "I;16", "F"])
def test_grey_is_recognized_in_every_mode(mode):
    sixteen_bit = PIL.Image.fromarray(np.asarray(GREY).astype(np.uint16) * 257)
    assert is_grey(sixteen_bit if mode == "I;16" else GREY.convert(mode))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK"])
def test_colours_are_recognized_in_every_mode(mode):
    assert not is_grey(COLOURS.convert(mode))


def test_large_folders_hold_out_a_few_hundred_images():
    facts = {count: ImageFacts(count, 64, is_grey=False) for count in (1000, 60_000)}
    proposals = {
        count: propose_settings(one, ImageDataConfig(), stride=4).settings
        for count, one in facts.items()
    }
    assert "val_fraction" not in proposals[1000]
    assert 60_000 * proposals[60_000]["val_fraction"] == pytest.approx(500, rel=0.01)


def test_report_of_a_folder_proposes_the_same_settings(tmp_path):
    for number in range(3):
        GREY.convert("RGB").resize((28, 30)).save(tmp_path / f"{number}.png")
    run = images_vqgan()
    data = run.data.__class__(path=str(tmp_path))
    proposal = data.propose(run.task)
    assert proposal is not None and proposal.settings == {"size": 28, "channels": 1}
    assert inspect_folder(tmp_path).propose(data, run.task) == proposal
