"""Images that are not square, through the data, the tokenizer, the generator and the commands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tessera.api.generator import Generator
from tessera.api.tokenizer import Tokenizer
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.media import Image
from tessera.modalities.image.vqgan import VQGANConfig
from tests.cli_runner import tessera

WIDE = ("--data.size", 16, "--data.aspect", 2)


def write_halves(path: Path, width: int, height: int) -> None:
    """Write an image whose left half is black and whose right half is yellow."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, width // 2 :, :2] = 255
    Image(pixels).save(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for number in range(12):
        write_halves(folder / ("wide" if number % 2 else "tall") / f"{number}.png", 40, 20)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "vqgan"
    choices = ("--adversary", "on", "--perceptual", "on", "--steps", 4)
    arguments = ("--data", folder, *WIDE, *choices, "--out", out)
    tessera("train", "images-vqgan", "--preset", "tiny", *arguments)
    return out


@pytest.mark.parametrize(
    ("size", "aspect", "shape"),
    [
        (64, 1, (64, 64)),
        (64, 1.5, (64, 96)),
        (64, 16 / 9, (64, 112)),
        (64, 0.5, (128, 64)),
        (28, 1.6, (28, 44)),
        (64, 1.01, (64, 64)),
    ],
)
def test_long_side_is_rounded_to_whole_codes(size, aspect, shape):
    config = ImageDataConfig(size=size, aspect=aspect)
    assert config.shape == shape
    assert VQGANConfig(layers=2, blocks=(0, 1)).grid(config) == (shape[0] // 4, shape[1] // 4)


@pytest.mark.parametrize(("width", "height"), [(80, 40), (60, 60), (40, 90)])
def test_centre_of_the_image_fills_the_requested_shape(width, height, tmp_path):
    write_halves(tmp_path / "a.png", width, height)
    config = ImageDataConfig(path=str(tmp_path), size=16, aspect=2, crop="centre")
    pixels = config.full().item(0, np.random.default_rng(0)).pixels
    assert pixels.shape == (3, 16, 32)
    assert (pixels[:2, :, :14] < -0.9).all() and (pixels[:2, :, 18:] > 0.9).all()


def test_random_crops_keep_proportions_and_stay_inside(tmp_path):
    """A column of the gradient is as wide in the crop as the requested shape demands."""
    columns = np.linspace(0, 255, 90).astype(np.uint8)
    PIL.Image.fromarray(np.tile(columns, (60, 1))).save(tmp_path / "a.png")
    config = ImageDataConfig(path=str(tmp_path), size=16, aspect=2, min_scale=0.5, channels=1)
    for seed in range(8):
        row = config.full().item(0, np.random.default_rng(seed)).pixels[0, 8]
        assert row.shape == (32,) and 0.9 < row[-2] - row[1] < 2


def test_small_images_are_skipped_by_both_sides(tmp_path):
    write_halves(tmp_path / "a.png", 24, 24)
    config = ImageDataConfig(path=str(tmp_path), size=16, aspect=2, on_small="skip")
    with pytest.raises(Exception, match="is 24 x 24, smaller than the requested 32 x 16"):
        config.full().item(0, np.random.default_rng(0))


@pytest.mark.parametrize("aspect", [0, -1, 40, float("nan")])
def test_impossible_aspects_are_rejected(aspect):
    with pytest.raises(ValueError, match="aspect must be the width divided by the height"):
        ImageDataConfig(aspect=aspect)


def test_synthetic_images_are_square(tmp_path):
    result = tessera("train", "images-vqgan", "--preset", "tiny", *WIDE, "--out", tmp_path / "run")
    assert result.code != 0 and "Synthetic images are square" in result.err


def test_tokenizer_encodes_and_decodes_the_shape(folder, tokenizer):
    trained = Tokenizer.load(tokenizer)
    codes = trained.encode(str(folder / "wide" / "1.png"))
    assert codes.shape == (1, 4, 8) and trained.decode(codes).shape == (1, 3, 16, 32)


def test_generator_takes_the_aspect_from_its_tokenizer(folder, tokenizer, tmp_path):
    out = tmp_path / "maskgit"
    arguments = ("train", "images-maskgit", "--preset", "tiny", "--data", folder)
    arguments = (*arguments, "--tokenizer", tokenizer, "--out", out, "--steps")
    result = tessera(*arguments, 4)
    assert "--data.aspect 2" in result.out
    assert tessera(*arguments, 6).code == 0  # resumes with the stored aspect
    generated = Generator.load(out).generate(["wide"], count=2)
    assert generated.media[0].pixels.shape == (16, 32, 3)  # type: ignore[attr-defined]
    assert tessera("evaluate", out, "--samples", 4).code == 0


def test_mask_selects_codes_of_the_shape(folder, tokenizer, tmp_path):
    out = tmp_path / "maskgit"
    arguments = ("--data", folder, "--tokenizer", tokenizer, "--steps", 2, "--out", out)
    tessera("train", "images-maskgit", "--preset", "tiny", *arguments)
    write_halves(tmp_path / "mask.png", 40, 20)
    image = folder / "wide" / "1.png"
    mask = ("--mask", tmp_path / "mask.png", "--prompt", "wide", "--out", tmp_path / "inpainted")
    assert tessera("sample", out, "--data", image, *mask).code == 0
    with PIL.Image.open(tmp_path / "inpainted" / "0000.png") as sample:
        inpainted = np.asarray(sample)
    trained = Tokenizer.load(tokenizer)
    codes, expected = trained.encode(inpainted), trained.encode(str(image))
    assert inpainted.shape == (16, 32, 3) and codes.shape == expected.shape
