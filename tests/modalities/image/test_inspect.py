"""Tests of the inspection of a folder of images."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

from tessera.data.errors import UnreadableFile
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.inspect import inspect_folder

RNG = np.random.default_rng(0)


def gradient(width: int, height: int) -> PIL.Image.Image:
    """Return an image whose red grows to the right and whose green grows downwards."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)[None, :]
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return PIL.Image.fromarray(pixels)


@pytest.fixture
def folder(tmp_path):
    """A folder of 5 usable images, 3 unusable ones, a caption and another file."""
    (tmp_path / "good").mkdir()
    for number in range(3):
        gradient(20, 10).save(tmp_path / "good" / f"{number:04d}.png")
    gradient(64, 48).convert("L").save(tmp_path / "grey.jpg")
    transparent = gradient(7, 9)
    transparent.putalpha(99)
    transparent.save(tmp_path / "glass.webp", lossless=True)
    (tmp_path / "glass.txt").write_text("a pane of glass")
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("dear reader")
    (tmp_path / "bad words.bmp").write_bytes((tmp_path / "grey.jpg").read_bytes()[:200])
    (tmp_path / "song.mp3").touch()
    return tmp_path


def test_report_counts_every_file_once(folder):
    report = inspect_folder(folder)
    assert (report.images, report.usable) == (8, 5)
    assert report.sizes.smallest == (7, 9) and report.sizes.largest == (64, 48)
    assert report.sizes.median_short_side == 10
    assert report.sizes.common[0] == (20, 10, 3)
    assert report.modes == {"RGB": 3, "RGBA": 1, "L": 1}
    assert report.duplicates == [["good/0000.png", "good/0001.png", "good/0002.png"]]
    assert report.captioned == 1 and report.captions == {"text files": 1}
    assert report.other_files == "1 .mp3"
    assert [each["name"] for each in report.unusable] == ["bad words.bmp", "empty.png", "text.png"]
    assert "dear rea" in report.unusable[2]["reason"]


def test_usable_files_are_those_that_training_can_read(folder):
    report = inspect_folder(folder)
    source = ImageDataConfig(path=str(folder), size=8).full()
    unusable = {each["name"] for each in report.unusable}
    for index in range(len(source)):
        if source.name(index) in unusable:
            with pytest.raises(UnreadableFile):
                source.item(index, RNG)
        else:
            assert source.item(index, RNG).pixels.shape == (3, 8, 8)


def test_alpha_and_aspect_are_reported_with_their_flags(tmp_path):
    for number in range(3):
        image = gradient(60, 24)
        image.putalpha(99 + number)
        image.save(tmp_path / f"{number}.png")
    gradient(30, 30).save(tmp_path / "square.png")
    lines = inspect_folder(tmp_path).lines()
    assert (
        "aspect: 60 x 24 is cropped to a square; --data.aspect 2.5 trains on whole images" in lines
    )
    assert (
        "alpha: 3 images, composited over white; --data.channels 4 trains on colour with alpha"
        in lines
    )
    config = ImageDataConfig(path=str(tmp_path), size=24, aspect=2.5, channels=4)
    assert config.full().item(0, RNG).pixels.shape == (4, 24, 64)


def test_square_images_and_mixed_sizes_have_no_aspect(tmp_path):
    for side in (20, 30, 40):
        gradient(side, 22).save(tmp_path / f"{side}.png")
    assert not any("aspect" in line or "alpha" in line for line in inspect_folder(tmp_path).lines())


def test_report_as_text_and_json(folder):
    report = inspect_folder(folder)
    text = "\n".join(report.lines())
    assert "8 images, 5 usable" in text
    assert "captions: 1 of 5 usable images (1 in text files)" in text
    assert "good/0000.png = good/0001.png" in text
    assert "  empty.png: the file is empty (0 bytes)" in text
    parsed = json.loads(report.as_json())
    assert parsed["usable"] == 5 and parsed["sizes"]["median_short_side"] == 10
    assert {"name": "empty.png", "reason": "the file is empty (0 bytes)"} in parsed["unusable"]


def test_folder_without_usable_files_is_reported(tmp_path):
    (tmp_path / "empty.png").touch()
    report = inspect_folder(tmp_path)
    assert (report.images, report.usable, report.sizes) == (1, 0, None)
    assert report.lines()[0].endswith("1 image, 0 usable, 0.0 MB")
    assert json.loads(report.as_json())["sizes"] is None


def test_images_are_inspected_despite_unusable_captions(tmp_path):
    for number in range(2):
        gradient(12, 12).save(tmp_path / f"{number:04d}.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "../0000.png"}\n')
    report = inspect_folder(tmp_path)
    assert report.usable == 2 and report.captioned == 0
    assert "leads out of the folder" in "\n".join(report.lines())


def test_progress_and_long_lists_are_reported(tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02d}.png").touch()
    steps = []
    report = inspect_folder(
        tmp_path, num_workers=2, progress=lambda done, total: steps.append((done, total))
    )
    assert steps == [(done, 30) for done in range(1, 31)]
    assert report.lines()[-1] == "  and 20 more"
    assert len(report.unusable) == 30


def test_inspection_does_not_import_torch():
    code = "import sys, tessera.modalities.image.inspect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
