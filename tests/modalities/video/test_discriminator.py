"""The judge of motion: what it looks at, what it cannot see, and that it can be steadied by its
gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.losses.adversarial import gradient_penalty, hinge_discriminator
from tessera.modalities.video.discriminator import (
    TemporalDiscriminator,
    TemporalDiscriminatorConfig,
    slowed,
)

SMALL = {"dim": 8, "widest": 32, "groups": 4}


def clips(count: int = 2, frames: int = 9, size: int = 16, channels: int = 3) -> Tensor:
    return torch.rand(count, channels, frames, size, size) * 2 - 1


def small(**changes: object) -> TemporalDiscriminator:
    return TemporalDiscriminatorConfig(**{**SMALL, **changes}).build()


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("frames", [1, 2, 5, 9, 17])
def test_there_is_one_logit_for_each_patch_that_is_left_after_halving(layers, frames):
    logits = small(layers=layers)(torch.zeros(2, 3, frames, 16, 24))
    left = -(-frames // 2**layers)
    assert logits.shape == (2, 1, left, 16 // 2**layers, 24 // 2**layers)


@pytest.mark.parametrize(("layers", "frames", "pixels"), [(1, 11, 12), (2, 23, 26), (3, 47, 54)])
def test_a_patch_is_as_long_and_as_wide_as_the_help_says(layers, frames, pixels):
    clip = clips(1, frames=101, size=80).requires_grad_()
    logits = small(layers=layers, norm="none", dim=4, max_channels=4)(clip)
    middle = [side // 2 for side in logits.shape[2:]]
    logits[0, 0, middle[0], middle[1], middle[2]].backward()
    touched = (clip.grad.abs().sum((0, 1)) > 0).nonzero()
    assert (touched.max(0).values - touched.min(0).values + 1).tolist() == [frames, pixels, pixels]


@pytest.mark.parametrize("norm", ["group", "none"])
def test_examples_do_not_see_each_other(norm):
    judge, batch = small(norm=norm), clips(4)
    torch.testing.assert_close(judge(batch)[2:3], judge(batch[2:3]), rtol=1e-4, atol=1e-5)
    assert not any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in judge.modules()
    )


def test_four_micro_batches_are_one_batch_penalty_included():
    """So the gradient of the gradient is there, and every parameter has its share of it."""
    judge, real, fake = (
        small(layers=2).double(),
        clips(4, size=8).double(),
        clips(4, size=8).double(),
    )

    def gradients(parts: int) -> list[Tensor]:
        judge.zero_grad()
        for some_real, some_fake in zip(real.chunk(parts), fake.chunk(parts)):
            told_apart = hinge_discriminator(judge(some_real), judge(some_fake))
            ((told_apart + 10 * gradient_penalty(judge, some_real)) / parts).backward()
        return [parameter.grad.clone() for parameter in judge.parameters()]

    for micro, whole in zip(gradients(4), gradients(1)):
        torch.testing.assert_close(micro, whole, rtol=0, atol=1e-10)
        assert whole.abs().max() > 0


def test_the_gradient_of_the_penalty_is_right():
    judge = small(layers=1, dim=4, max_channels=4, groups=2).double()
    clip, weight = clips(1, frames=3, size=4).double(), judge.layers[0].convolution.weight
    (gradient,) = torch.autograd.grad(gradient_penalty(judge, clip), weight)
    direction, step = torch.randn_like(weight), 1e-6

    def moved(by: float) -> Tensor:
        with torch.no_grad():
            weight.add_(by * direction)
        penalty = gradient_penalty(judge, clip).detach()
        with torch.no_grad():
            weight.sub_(by * direction)
        return penalty

    torch.testing.assert_close(
        (gradient * direction).sum(),
        (moved(step) - moved(-step)) / (2 * step),
        rtol=1e-4,
        atol=1e-7,
    )


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("norm", ["group", "none"])
def test_logits_start_small_and_alive_whatever_the_depth(layers, norm):
    with torch.no_grad():
        logits = small(max_channels=64, layers=layers, norm=norm)(clips(8))
    assert 0.05 < logits.square().mean().sqrt() < 2


def test_it_learns_to_tell_motion_from_the_same_frames_out_of_order():
    """What no judge of single frames could: both kinds of clips are made of the same frames."""
    torch.manual_seed(0)
    judge = small(layers=2)
    optimizer = torch.optim.Adam(judge.parameters(), lr=5e-3)

    def batch() -> tuple[Tensor, Tensor]:
        """A bar that moves by one pixel a frame, and its frames shuffled."""
        begins = torch.randint(16, (8, 1, 1))
        place = (begins + torch.arange(9)[:, None] - torch.arange(16)) % 16
        moving = (place < 3).float()[:, None, :, None].expand(8, 3, 9, 16, 16) * 2 - 1
        return moving, moving[:, :, torch.randperm(9)]

    for _ in range(40):
        real, fake = batch()
        loss = hinge_discriminator(judge(real), judge(fake))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        real, fake = (judge(clip) for clip in batch())
    assert (real > 0).float().mean() > 0.9
    assert (fake < 0).float().mean() > 0.9


def test_a_slowed_clip_has_every_second_or_third_frame_from_the_first_on():
    clip = torch.arange(9.0).view(1, 1, 9, 1, 1)
    assert slowed(clip, 1).flatten().tolist() == list(range(9))
    assert slowed(clip, 2).flatten().tolist() == [0, 2, 4, 6, 8]
    assert slowed(clip, 4).flatten().tolist() == [0, 4, 8]
    assert slowed(clip[:, :, :1], 4).flatten().tolist() == [0]


def test_gradients_reach_only_the_frames_that_a_slowed_judge_saw():
    clip = clips().requires_grad_()
    small(layers=1)(slowed(clip, 2)).sum().backward()
    assert (clip.grad.abs().sum((0, 1, 3, 4)) > 0).tolist() == [True, False] * 4 + [True]


@pytest.mark.parametrize("factor", [0, -1])
def test_a_clip_cannot_be_slowed_by_less_than_nothing(factor):
    with pytest.raises(ValueError, match=f"n of 1 .* or more, not {factor}"):
        slowed(clips(), factor)


@pytest.mark.parametrize("shape", [(1, 3, 9, 7, 64), (1, 1, 9, 64, 64), (3, 9, 64, 64)])
def test_clips_it_cannot_judge_are_refused(shape):
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
        TemporalDiscriminatorConfig(**{**SMALL, **changes})


def test_without_a_norm_any_width_will_do():
    assert small(dim=5, norm="none")(clips()).shape == (2, 1, 2, 2, 2)
