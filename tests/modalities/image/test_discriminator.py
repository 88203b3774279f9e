"""Tests of the patch discriminator of images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.losses.adversarial import gradient_penalty, hinge_discriminator
from tessera.modalities.image.discriminator import (
    BlurPool,
    PatchDiscriminator,
    PatchDiscriminatorConfig,
)

SMALL = {"dim": 8, "max_channels": 32, "groups": 4}


def images(count: int = 2, size: int = 32, channels: int = 3) -> Tensor:
    return torch.rand(count, channels, size, size) * 2 - 1


def build_small(**changes: object) -> PatchDiscriminator:
    return PatchDiscriminatorConfig(**{**SMALL, **changes}).build()


@pytest.mark.parametrize("blur", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_there_is_one_logit_per_downsampled_position(layers, blur):
    discriminator = build_small(layers=layers, blur=blur)

    assert discriminator(images(2, 32)).shape == (2, 1, 32 // 2**layers, 32 // 2**layers)
    assert discriminator(torch.zeros(1, 3, 48, 16)).shape == (
        1,
        1,
        48 // 2**layers,
        16 // 2**layers,
    )


def test_number_of_channels_is_configurable():
    assert build_small(channels=1)(images(channels=1)).shape == (2, 1, 4, 4)


@pytest.mark.parametrize(("layers", "pixels"), [(2, 26), (3, 54), (4, 110)])
def test_receptive_field_has_the_documented_size(layers, pixels):
    image = images(1, 160).requires_grad_()
    logits = build_small(layers=layers, norm="none")(image)

    logits[0, 0, logits.shape[2] // 2, logits.shape[3] // 2].backward()
    touched = (image.grad.abs().sum((0, 1)) > 0).nonzero()

    assert (touched.max(0).values - touched.min(0).values + 1).tolist() == [pixels, pixels]


@pytest.mark.parametrize("norm", ["group", "none"])
def test_examples_are_independent(norm):
    discriminator, batch = build_small(norm=norm), images(4)

    torch.testing.assert_close(
        discriminator(batch)[2:3], discriminator(batch[2:3]), rtol=1e-4, atol=1e-5
    )
    assert not any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in discriminator.modules()
    )


@pytest.mark.parametrize("blur", [False, True])
def test_micro_batches_give_the_gradients_of_one_batch(blur):
    discriminator, real, fake = (
        build_small(blur=blur).double(),
        images(8).double(),
        images(8).double(),
    )

    def gradients(parts: int) -> list[Tensor]:
        discriminator.zero_grad()
        for part_real, part_fake in zip(real.chunk(parts), fake.chunk(parts)):
            loss = hinge_discriminator(discriminator(part_real), discriminator(part_fake))
            ((loss + 10 * gradient_penalty(discriminator, part_real)) / parts).backward()
        return [parameter.grad.clone() for parameter in discriminator.parameters()]

    for micro, whole in zip(gradients(4), gradients(1)):
        torch.testing.assert_close(micro, whole, rtol=0, atol=1e-10)
        assert whole.abs().max() > 0


@pytest.mark.parametrize("layers", [1, 3, 5])
@pytest.mark.parametrize("changes", [{}, {"norm": "none"}, {"blur": True}])
def test_initial_logits_have_moderate_scale_at_any_depth(layers, changes):
    with torch.no_grad():
        logits = build_small(max_channels=128, layers=layers, **changes)(images(8, 64))

    assert 0.05 < logits.square().mean().sqrt() < 2


def test_training_separates_smooth_from_noisy_images():
    discriminator = build_small(layers=2)
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=5e-3)

    def batch() -> tuple[Tensor, Tensor]:
        smooth = nn.functional.interpolate(images(8, 4), size=32, mode="bilinear")
        return smooth, smooth + 0.2 * torch.randn(smooth.shape)

    for _ in range(40):
        real, fake = batch()
        loss = hinge_discriminator(
            discriminator(real), discriminator(fake)
        ) + 1e-3 * gradient_penalty(discriminator, real)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with torch.no_grad():
        real, fake = (discriminator(images) for images in batch())
    assert (real > 0).float().mean() > 0.95
    assert (fake < 0).float().mean() > 0.95


def test_blur_pool_preserves_constants_and_removes_aliasing():
    pool = BlurPool(2)
    area = torch.ones(1, 2, 8, 8)
    stripes = torch.tensor([1.0, -1.0]).repeat(4).expand(1, 2, 8, 8)

    torch.testing.assert_close(pool(area)[..., 1:-1, 1:-1], torch.ones(1, 2, 2, 2))
    torch.testing.assert_close(pool(stripes)[..., 1:-1, 1:-1], torch.zeros(1, 2, 2, 2))
    assert pool(area).shape == (1, 2, 4, 4)


def test_blur_adds_no_parameters():
    assert set(build_small(blur=True).state_dict()) == set(build_small().state_dict())


@pytest.mark.parametrize("shape", [(1, 3, 7, 64), (1, 1, 64, 64), (3, 64, 64)])
def test_images_of_invalid_shape_are_an_error(shape):
    with pytest.raises(ValueError, match="downsamples 3 times, so H and W must be at least 8"):
        build_small()(torch.zeros(shape))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"dim": 6}, r"6 channels are not divisible into the 4 groups .*: make dim \(6\)"),
        (
            {"max_channels": 30},
            r"30 channels .*: make dim \(8\) and max_channels \(30\) multiples of 4",
        ),
    ],
)
def test_invalid_settings_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        build_small(**changes)


def test_any_dim_is_allowed_without_norm():
    assert build_small(dim=5, norm="none")(images()).shape == (2, 1, 4, 4)
