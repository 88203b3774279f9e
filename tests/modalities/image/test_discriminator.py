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

SMALL = {"dim": 8, "widest": 32, "groups": 4}


def images(count: int = 2, size: int = 32, channels: int = 3) -> Tensor:
    return torch.rand(count, channels, size, size) * 2 - 1


def small(**changes: object) -> PatchDiscriminator:
    return PatchDiscriminatorConfig(**{**SMALL, **changes}).build()


@pytest.mark.parametrize("blur", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_there_is_one_logit_for_each_place_that_is_left_after_halving(layers, blur):
    judge = small(layers=layers, blur=blur)

    assert judge(images(2, 32)).shape == (2, 1, 32 // 2**layers, 32 // 2**layers)
    assert judge(torch.zeros(1, 3, 48, 16)).shape == (1, 1, 48 // 2**layers, 16 // 2**layers)


def test_other_channels_are_judged_when_they_are_asked_for():
    assert small(channels=1)(images(channels=1)).shape == (2, 1, 4, 4)


@pytest.mark.parametrize(("layers", "pixels"), [(2, 26), (3, 54), (4, 110)])
def test_a_patch_is_as_wide_as_the_help_says(layers, pixels):
    picture = images(1, 160).requires_grad_()
    logits = small(layers=layers, norm="none")(picture)

    logits[0, 0, logits.shape[2] // 2, logits.shape[3] // 2].backward()
    touched = (picture.grad.abs().sum((0, 1)) > 0).nonzero()

    assert (touched.max(0).values - touched.min(0).values + 1).tolist() == [pixels, pixels]


@pytest.mark.parametrize("norm", ["group", "none"])
def test_examples_do_not_see_each_other(norm):
    judge, batch = small(norm=norm), images(4)

    torch.testing.assert_close(judge(batch)[2:3], judge(batch[2:3]), rtol=1e-4, atol=1e-5)
    assert not any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in judge.modules()
    )


@pytest.mark.parametrize("blur", [False, True])
def test_four_micro_batches_are_one_batch_penalty_included(blur):
    judge, real, fake = small(blur=blur).double(), images(8).double(), images(8).double()

    def gradients(parts: int) -> list[Tensor]:
        judge.zero_grad()
        for some_real, some_fake in zip(real.chunk(parts), fake.chunk(parts)):
            told_apart = hinge_discriminator(judge(some_real), judge(some_fake))
            ((told_apart + 10 * gradient_penalty(judge, some_real)) / parts).backward()
        return [parameter.grad.clone() for parameter in judge.parameters()]

    for micro, whole in zip(gradients(4), gradients(1)):
        torch.testing.assert_close(micro, whole, rtol=0, atol=1e-10)
        assert whole.abs().max() > 0


@pytest.mark.parametrize("layers", [1, 3, 5])
@pytest.mark.parametrize("changes", [{}, {"norm": "none"}, {"blur": True}])
def test_logits_start_small_and_alive_whatever_the_depth(layers, changes):
    with torch.no_grad():
        logits = small(max_channels=128, layers=layers, **changes)(images(8, 64))

    assert 0.05 < logits.square().mean().sqrt() < 2


def test_it_learns_to_tell_smooth_pictures_from_grainy_ones():
    judge = small(layers=2)
    optimizer = torch.optim.Adam(judge.parameters(), lr=5e-3)

    def batch() -> tuple[Tensor, Tensor]:
        smooth = nn.functional.interpolate(images(8, 4), size=32, mode="bilinear")
        return smooth, smooth + 0.2 * torch.randn(smooth.shape)

    for _ in range(40):
        real, fake = batch()
        loss = hinge_discriminator(judge(real), judge(fake)) + 1e-3 * gradient_penalty(judge, real)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with torch.no_grad():
        real, fake = (judge(pictures) for pictures in batch())
    assert (real > 0).float().mean() > 0.95
    assert (fake < 0).float().mean() > 0.95


def test_blurring_before_halving_keeps_areas_and_drops_what_would_alias():
    pool = BlurPool(2)
    area = torch.ones(1, 2, 8, 8)
    stripes = torch.tensor([1.0, -1.0]).repeat(4).expand(1, 2, 8, 8)

    torch.testing.assert_close(pool(area)[..., 1:-1, 1:-1], torch.ones(1, 2, 2, 2))
    torch.testing.assert_close(pool(stripes)[..., 1:-1, 1:-1], torch.zeros(1, 2, 2, 2))
    assert pool(area).shape == (1, 2, 4, 4)


def test_the_blur_is_not_a_weight():
    assert set(small(blur=True).state_dict()) == set(small().state_dict())


@pytest.mark.parametrize("shape", [(1, 3, 7, 64), (1, 1, 64, 64), (3, 64, 64)])
def test_images_it_cannot_judge_are_refused(shape):
    with pytest.raises(ValueError, match="halves it 3 times, so H and W must be 8 or more"):
        small()(torch.zeros(shape))


@pytest.mark.parametrize(
    ("changes", "letter"),
    [
        ({"layers": 0}, r"layers \(0\) must be 1 or more"),
        ({"dim": 6}, r"4 equal groups, and 6 channels do not divide so: make dim \(6\)"),
        (
            {"widest": 30},
            r"30 channels do not divide so: make dim \(8\) and widest \(30\) multiples of 4",
        ),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_built(changes, letter):
    with pytest.raises(ValueError, match=letter):
        small(**changes)


def test_without_a_norm_any_width_will_do():
    assert small(dim=5, norm="none")(images()).shape == (2, 1, 4, 4)
