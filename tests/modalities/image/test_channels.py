"""Grey images, and images with alpha, through the tokenizer, the generator and the commands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tessera.api.generator import Generator
from tessera.api.tokenizer import Tokenizer
from tessera.cli import flags
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.media import Image
from tessera.modalities.image.recipes import images_vqgan
from tessera.modalities.image.vqgan import VQGANConfig
from tests.cli_runner import tessera


@pytest.fixture(scope="module", params=[1, 4])
def channels(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def folder(channels: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write images in two classes."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, channels), np.uint8)
        Image(pixels).save(folder / ("Dark" if number % 2 else "light") / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def tokenizer(channels: int, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tokenizer with a discriminator and a perceptual loss."""
    out = tmp_path_factory.mktemp("runs") / "vqgan"
    choices = ("--adversary", "on", "--perceptual", "on", "--steps", "8")
    arguments = ("--data", folder, "--data.channels", channels, *choices, "--out", out)
    tessera("train", "images-vqgan", "--preset", "tiny", *arguments)
    return out


def test_images_are_encoded_and_decoded_with_their_channels(channels, folder, tokenizer):
    trained = Tokenizer.load(tokenizer)
    path = folder / "Dark" / "1.png"
    codes = trained.encode(str(path))
    assert trained.decode(codes).shape == (1, channels, 16, 16)
    assert trained.encode(Image.load(path, channels)).equal(codes)
    [image] = trained.to_media(codes)
    assert isinstance(image, Image) and image.pixels.shape == (16, 16, channels)


def test_generator_samples_have_the_channels_of_the_tokenizer(
    channels, folder, tokenizer, tmp_path
):
    arguments = ("--data", folder, "--data.channels", channels, "--tokenizer", tokenizer)
    out = ("--out", tmp_path / "maskgit")
    tessera("train", "images-maskgit", "--preset", "tiny", "--steps", "4", *arguments, *out)
    generated = Generator.load(tmp_path / "maskgit").generate(["light"])
    assert generated.media[0].pixels.shape == (16, 16, channels)  # type: ignore[attr-defined]
    tessera(
        "sample", tmp_path / "maskgit", "--prompt", "light", "--count", 2, "--out", tmp_path / "s"
    )
    with PIL.Image.open(tmp_path / "s" / "0000.png") as sample:
        assert sample.mode == {1: "L", 4: "RGBA"}[channels]
    assert (tmp_path / "s" / "sheet.png").exists()
    result = tessera("evaluate", tmp_path / "maskgit", "--samples", "4")
    assert result.code == 0 and "cross_entropy" in result.out


def test_networks_have_the_channels_of_the_data():
    run = flags.parse(images_vqgan, ["--adversary", "on", "--data.channels", "1"]).run
    assert run.task.model.channels == run.task.adversary.discriminator.channels == 1


def test_models_with_other_channels_are_rejected():
    with pytest.raises(ValueError, match=r"have 1 channel\(s\), but the model has 3"):
        VQGANConfig().validate_data(ImageDataConfig(size=16, channels=1))
    with pytest.raises(ValueError, match="3 for colour, 1 for grey or 4 with alpha, got 2"):
        ImageDataConfig(channels=2)
