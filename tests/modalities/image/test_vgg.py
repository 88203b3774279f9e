"""VGG16 against its layers written out one by one, with random weights: the real ones come with no
package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tessera.modalities.image.vgg import VGG16

WIDTHS = [
    64,
    64,
    "pool",
    128,
    128,
    "pool",
    256,
    256,
    256,
    "pool",
    512,
    512,
    512,
    "pool",
    512,
    512,
    512,
    "pool",
]


def layers_one_by_one() -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for width in WIDTHS:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def reference() -> nn.Sequential:
    torch.manual_seed(0)
    return layers_one_by_one()


@pytest.fixture(scope="module")
def named(reference: nn.Sequential) -> dict[str, Tensor]:
    return {f"features.{name}": tensor for name, tensor in reference.state_dict().items()}


@pytest.fixture(scope="module")
def network(named: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> VGG16:
    file = tmp_path_factory.mktemp("vgg") / "vgg16.pth"
    torch.save(named, file)
    return VGG16.load(str(file))


@pytest.fixture
def as_file(tmp_path: Path) -> Callable[[dict[str, Tensor]], str]:
    """Files with the right shapes and one number in each tensor: quickly written, and good enough
    to be refused."""

    def write(content: dict[str, Tensor]) -> str:
        thin = {name: torch.zeros(1).expand(tensor.shape) for name, tensor in content.items()}
        torch.save(thin, tmp_path / "vgg16.pth")
        return str(tmp_path / "vgg16.pth")

    return write


def images(count: int = 2, size: int = 32) -> Tensor:
    return torch.rand(count, 3, size, size) * 2 - 1


def test_the_features_are_those_before_each_pooling_of_an_image_normalised_as_imagenet(
    network, reference
):
    batch = images()
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    hidden = ((batch + 1) / 2 - mean[:, None, None]) / deviation[:, None, None]
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
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_safetensors_file_gives_the_same_network(network, named, tmp_path):
    save_file(named, tmp_path / "vgg16.safetensors")

    assert VGG16.load(str(tmp_path / "vgg16.safetensors")).fingerprint() == network.fingerprint()


def test_the_classifier_may_be_in_the_file_and_is_left_alone(named, as_file):
    file = as_file(
        {**named, "classifier.0.weight": torch.zeros(9, 4), "classifier.6.bias": torch.zeros(1000)}
    )

    assert sum(parameter.numel() for parameter in VGG16.load(file).parameters()) == 14_714_688


def test_a_missing_layer_is_refused_by_name(named, as_file):
    without = {
        name: tensor for name, tensor in named.items() if not name.startswith("features.28.")
    }

    with pytest.raises(
        ValueError, match=r"features\.28\.weight \(512, 512, 3, 3\) is expected and missing"
    ):
        VGG16.load(as_file(without))


@pytest.mark.parametrize(
    "name", ["features.30.weight", "module.features.0.weight", "avgpool.weight"]
)
def test_anything_else_in_the_file_is_refused_by_name(named, as_file, name):
    with pytest.raises(ValueError, match=rf"{name} \(3,\) is not expected"):
        VGG16.load(as_file({**named, name: torch.zeros(3)}))


def test_the_file_of_another_vgg_is_refused(named, as_file):
    """VGG16 with batch norm has other numbers for its layers; here one shape gives it away."""
    with pytest.raises(
        ValueError, match=r"features\.2\.weight is \(128, 64, 3, 3\) where \(64, 64, 3, 3\)"
    ):
        VGG16.load(as_file({**named, "features.2.weight": torch.zeros(128, 64, 3, 3)}))


def test_nothing_in_it_can_be_trained_or_put_in_train_mode(network):
    network.train()

    assert not any(module.training for module in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_gradients_reach_every_pixel(network):
    batch = images(1).requires_grad_()

    sum(feature.square().mean() for feature in network.features(batch)).backward()

    assert batch.grad.isfinite().all()
    assert (batch.grad != 0).float().mean() > 0.99


@pytest.mark.parametrize("shape", [(1, 3, 31, 64), (1, 1, 64, 64), (3, 64, 64)])
def test_images_it_cannot_look_at_are_refused(network, shape):
    with pytest.raises(ValueError, match="at least 32 pixels a side"):
        network.features(torch.zeros(shape))
