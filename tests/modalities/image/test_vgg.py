"""Tests of VGG16 against a sequential reference with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tessera.modalities.image.vgg import VGG16

POOL = 0
LAYERS = [64] * 2 + [POOL] + [128] * 2 + [POOL] + [256] * 3 + [POOL] + ([512] * 3 + [POOL]) * 2


def build_reference() -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for channels in LAYERS:
        if channels == POOL:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU()]
            inputs = channels
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def reference() -> nn.Sequential:
    torch.manual_seed(0)
    return build_reference()


@pytest.fixture(scope="module")
def weights(reference: nn.Sequential) -> dict[str, Tensor]:
    return {f"features.{name}": tensor for name, tensor in reference.state_dict().items()}


@pytest.fixture(scope="module")
def network(weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> VGG16:
    file = tmp_path_factory.mktemp("vgg") / "vgg16.pth"
    torch.save(weights, file)
    return VGG16.load(str(file))


@pytest.fixture
def save_zeros(tmp_path: Path) -> Callable[[dict[str, Tensor]], str]:
    """Return a function that writes expanded zeros of the given shapes, which is fast."""

    def write(content: dict[str, Tensor]) -> str:
        zeros = {name: torch.zeros(1).expand(tensor.shape) for name, tensor in content.items()}
        torch.save(zeros, tmp_path / "vgg16.pth")
        return str(tmp_path / "vgg16.pth")

    return write


def images(count: int = 2, size: int = 32) -> Tensor:
    return torch.rand(count, 3, size, size) * 2 - 1


def test_features_are_the_reference_activations_before_each_pooling(network, reference):
    batch = images()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    hidden = ((batch + 1) / 2 - mean[:, None, None]) / std[:, None, None]
    expected = []
    with torch.no_grad():
        for layer in reference:
            if isinstance(layer, nn.MaxPool2d):
                expected.append(hidden)
            hidden = layer(hidden)

    found = network.features(batch)

    assert [feature.shape[1:3] for feature in found] == [
        (64, 32),
        (128, 16),
        (256, 8),
        (512, 4),
        (512, 2),
    ]
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-6)


def test_safetensors_file_gives_the_same_network(network, weights, tmp_path):
    save_file(weights, tmp_path / "vgg16.safetensors")

    assert VGG16.load(str(tmp_path / "vgg16.safetensors")).fingerprint() == network.fingerprint()


def test_classifier_in_the_file_is_ignored(weights, save_zeros):
    file = save_zeros(
        {
            **weights,
            "classifier.0.weight": torch.zeros(9, 4),
            "classifier.6.bias": torch.zeros(1000),
        }
    )

    assert sum(parameter.numel() for parameter in VGG16.load(file).parameters()) == 14_714_688


def test_missing_layer_is_an_error(weights, save_zeros):
    without = {
        name: tensor for name, tensor in weights.items() if not name.startswith("features.28.")
    }

    with pytest.raises(
        ValueError, match=r"features\.28\.weight \(512, 512, 3, 3\) is expected and missing"
    ):
        VGG16.load(save_zeros(without))


@pytest.mark.parametrize(
    "name", ["features.30.weight", "module.features.0.weight", "avgpool.weight"]
)
def test_unexpected_tensor_is_an_error(weights, save_zeros, name):
    with pytest.raises(ValueError, match=rf"{name} \(3,\) is not expected"):
        VGG16.load(save_zeros({**weights, name: torch.zeros(3)}))


def test_weights_of_another_vgg_are_an_error(weights, save_zeros):
    """VGG16 with batch norm numbers its layers differently, so that a shape differs."""
    with pytest.raises(
        ValueError, match=r"features\.2\.weight is \(128, 64, 3, 3\) where \(64, 64, 3, 3\)"
    ):
        VGG16.load(save_zeros({**weights, "features.2.weight": torch.zeros(128, 64, 3, 3)}))


def test_network_stays_frozen_and_in_eval_mode(network):
    network.train()

    assert not any(module.training for module in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_gradients_reach_every_pixel(network):
    batch = images(1).requires_grad_()

    sum(feature.square().mean() for feature in network.features(batch)).backward()

    assert batch.grad.isfinite().all()
    assert (batch.grad != 0).float().mean() > 0.99


@pytest.mark.parametrize("shape", [(1, 3, 15, 64), (1, 2, 64, 64), (3, 64, 64)])
def test_images_of_invalid_shape_are_an_error(network, shape):
    with pytest.raises(ValueError, match="at least 16 pixels a side"):
        network.features(torch.zeros(shape))
