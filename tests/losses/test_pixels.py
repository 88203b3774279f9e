"""Tests of the pixel losses."""

from __future__ import annotations

import pytest
import torch

from tessera.losses.pixels import clip_overshoot, l1, l2


def test_losses_are_mean_absolute_and_mean_squared_error():
    a = torch.tensor([[[[0.0, 1.0]]]])
    b = torch.tensor([[[[0.5, -1.0]]]])

    assert l1(a, b).item() == pytest.approx((0.5 + 2.0) / 2)
    assert l2(a, b).item() == pytest.approx((0.25 + 4.0) / 2)


@pytest.mark.parametrize("loss", [l1, l2])
def test_mean_over_micro_batches_is_the_loss_of_the_batch(loss):
    a, b = torch.rand(2, 8, 3, 5, 7, dtype=torch.float64)

    micro = torch.stack([loss(a[i : i + 2], b[i : i + 2]) for i in range(0, 8, 2)]).mean()

    torch.testing.assert_close(micro, loss(a, b), rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", [l1, l2])
def test_half_precision_is_computed_in_float32_and_float64_stays_float64(loss):
    a, b = torch.rand(2, 4, 3, 16, 16).bfloat16()

    assert loss(a, b).dtype == torch.float32
    torch.testing.assert_close(loss(a, b), loss(a.double(), b.double()).float(), rtol=1e-6, atol=0)
    assert loss(a.double(), b.double()).dtype == torch.float64


@pytest.mark.parametrize("loss", [l1, l2])
def test_shapes_that_would_be_broadcast_are_errors(loss):
    with pytest.raises(ValueError, match=r"\(2, 3, 4, 4\) and \(1, 3, 4, 4\)"):
        loss(torch.zeros(2, 3, 4, 4), torch.zeros(1, 3, 4, 4))


def test_overshoot_of_white_and_black_targets_is_no_error_and_has_no_gradient():
    target = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.5, 253 / 127.5 - 1])
    output = torch.tensor([1.3, -1.3, 0.7, -0.7, 1.3, 1.3], requires_grad=True)

    error = clip_overshoot(output, target) - target

    torch.testing.assert_close(error.detach(), torch.tensor([0, 0, -0.3, 0.3, 0.8, 0]))
    error.abs().sum().backward()
    assert output.grad is not None and output.grad.tolist() == [0, 0, -1, 1, 1, 0]
