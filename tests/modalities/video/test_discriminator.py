"""Tests of the temporal discriminator of videos."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.losses.adversarial import gradient_penalty, hinge_discriminator
from tessera.modalities.video.discriminator import (
    TemporalDiscriminator,
    TemporalDiscriminatorConfig,
    subsample_frames,
)

SMALL = {"dim": 8, "max_channels": 32, "groups": 4}


def videos(count: int = 2, frames: int = 9, size: int = 16, channels: int = 3) -> Tensor:
    return torch.rand(count, channels, frames, size, size) * 2 - 1


def build_small(**changes: object) -> TemporalDiscriminator:
    return TemporalDiscriminatorConfig(**{**SMALL, **changes}).build()


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("frames", [1, 2, 5, 9, 17])
def test_there_is_one_logit_per_downsampled_position(layers, frames):
    logits = build_small(layers=layers)(torch.zeros(2, 3, frames, 16, 24))
    remaining = -(-frames // 2**layers)
    assert logits.shape == (2, 1, remaining, 16 // 2**layers, 24 // 2**layers)


@pytest.mark.parametrize(("layers", "frames", "pixels"), [(1, 11, 12), (2, 23, 26), (3, 47, 54)])
def test_receptive_field_has_the_documented_size(layers, frames, pixels):
    video = videos(1, frames=101, size=80).requires_grad_()
    logits = build_small(layers=layers, norm="none", dim=4, max_channels=4)(video)
    middle = [side // 2 for side in logits.shape[2:]]
    logits[0, 0, middle[0], middle[1], middle[2]].backward()
    touched = (video.grad.abs().sum((0, 1)) > 0).nonzero()
    assert (touched.max(0).values - touched.min(0).values + 1).tolist() == [frames, pixels, pixels]


@pytest.mark.parametrize("norm", ["group", "none"])
def test_examples_are_independent(norm):
    discriminator, batch = build_small(norm=norm), videos(4)
    torch.testing.assert_close(
        discriminator(batch)[2:3], discriminator(batch[2:3]), rtol=1e-4, atol=1e-5
    )
    assert not any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in discriminator.modules()
    )


def test_micro_batches_give_the_gradients_of_one_batch():
    """This includes the second derivatives of the gradient penalty."""
    discriminator, real, fake = (
        build_small(layers=2).double(),
        videos(4, size=8).double(),
        videos(4, size=8).double(),
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


def test_gradient_of_the_penalty_matches_finite_differences():
    discriminator = build_small(layers=1, dim=4, max_channels=4, groups=2).double()
    video, weight = videos(1, frames=3, size=4).double(), discriminator.layers[0].convolution.weight
    (gradient,) = torch.autograd.grad(gradient_penalty(discriminator, video), weight)
    direction, step = torch.randn_like(weight), 1e-6

    def penalty_at(offset: float) -> Tensor:
        with torch.no_grad():
            weight.add_(offset * direction)
        penalty = gradient_penalty(discriminator, video).detach()
        with torch.no_grad():
            weight.sub_(offset * direction)
        return penalty

    torch.testing.assert_close(
        (gradient * direction).sum(),
        (penalty_at(step) - penalty_at(-step)) / (2 * step),
        rtol=1e-4,
        atol=1e-7,
    )


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("norm", ["group", "none"])
def test_initial_logits_have_moderate_scale_at_any_depth(layers, norm):
    with torch.no_grad():
        logits = build_small(max_channels=64, layers=layers, norm=norm)(videos(8))
    assert 0.05 < logits.square().mean().sqrt() < 2


def test_training_separates_motion_from_shuffled_frames():
    """Both kinds of videos consist of the same frames, so single frames do not suffice."""
    torch.manual_seed(0)
    discriminator = build_small(layers=2)
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=5e-3)

    def batch() -> tuple[Tensor, Tensor]:
        """Return videos of a bar that moves by one pixel per frame, in order and shuffled."""
        start = torch.randint(16, (8, 1, 1))
        position = (start + torch.arange(9)[:, None] - torch.arange(16)) % 16
        moving = (position < 3).float()[:, None, :, None].expand(8, 3, 9, 16, 16) * 2 - 1
        return moving, moving[:, :, torch.randperm(9)]

    for _ in range(40):
        real, fake = batch()
        loss = hinge_discriminator(discriminator(real), discriminator(fake))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        real, fake = (discriminator(video) for video in batch())
    assert (real > 0).float().mean() > 0.9
    assert (fake < 0).float().mean() > 0.9


def test_subsampling_keeps_every_nth_frame_from_the_first():
    video = torch.arange(9.0).view(1, 1, 9, 1, 1)
    assert subsample_frames(video, 1).flatten().tolist() == list(range(9))
    assert subsample_frames(video, 2).flatten().tolist() == [0, 2, 4, 6, 8]
    assert subsample_frames(video, 4).flatten().tolist() == [0, 4, 8]
    assert subsample_frames(video[:, :, :1], 4).flatten().tolist() == [0]


def test_gradients_reach_only_the_subsampled_frames():
    video = videos().requires_grad_()
    build_small(layers=1)(subsample_frames(video, 2)).sum().backward()
    assert (video.grad.abs().sum((0, 1, 3, 4)) > 0).tolist() == [True, False] * 4 + [True]


@pytest.mark.parametrize("factor", [0, -1])
def test_subsampling_factor_below_one_is_an_error(factor):
    with pytest.raises(ValueError, match=f"factor must be at least 1, got {factor}"):
        subsample_frames(videos(), factor)


@pytest.mark.parametrize("shape", [(1, 3, 9, 7, 64), (1, 1, 9, 64, 64), (3, 9, 64, 64)])
def test_videos_of_invalid_shape_are_an_error(shape):
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
        TemporalDiscriminatorConfig(**{**SMALL, **changes})


def test_any_dim_is_allowed_without_norm():
    assert build_small(dim=5, norm="none")(videos()).shape == (2, 1, 2, 2, 2)
