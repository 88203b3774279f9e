"""Tests of the cross-entropy with smoothed targets."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tessera.losses.smoothed_cross_entropy import smooth_targets, smoothed_cross_entropy
from tests.networks import randn_double


def test_sigma_of_zero_is_the_plain_cross_entropy():
    logits, bins = randn_double(2, 3, 9, 8), torch.randint(8, (2, 3, 9))
    assert torch.allclose(
        smoothed_cross_entropy(logits, bins, 0),
        F.cross_entropy(logits.flatten(0, 2), bins.flatten()),
    )


def test_targets_are_gaussians_around_the_true_bin():
    sigma, bins = 0.7, 6
    logits = randn_double(1, 1, 1, bins)
    weights = [math.exp(-((other - 1) ** 2) / (2 * sigma**2)) for other in range(bins)]
    target = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    expected = -(target * logits.flatten().log_softmax(0)).sum()
    assert torch.allclose(smoothed_cross_entropy(logits, torch.tensor([[[1]]]), sigma), expected)


def test_every_target_sums_to_one_also_at_the_border():
    targets = smooth_targets(8, 0.4, randn_double(1))
    assert torch.allclose(targets.sum(1), torch.ones(8, dtype=torch.float64))
    assert (targets.argmax(1) == torch.arange(8)).all()
    assert torch.equal(targets, targets.flip(0, 1))


def test_near_bins_have_a_lower_loss_than_far_ones():
    confident = 5 * F.one_hot(torch.tensor([[[4]]]), 9).double()
    losses = [
        float(smoothed_cross_entropy(confident, torch.tensor([[[bin]]]), 0.6)) for bin in (4, 5, 7)
    ]
    assert losses == sorted(losses) and losses[0] < losses[1] < losses[2]


def test_padding_has_no_effect_and_no_gradient():
    logits, bins = randn_double(2, 4, 9, 8), torch.randint(8, (2, 4, 9))
    bins[1, 2:] = -1
    short = smoothed_cross_entropy(logits[1:, :2], bins[1:, :2], 0.4)
    full = smoothed_cross_entropy(logits[:1], bins[:1], 0.4)
    logits[1, 2:] = 1e3
    logits.requires_grad_()
    loss = smoothed_cross_entropy(logits, bins, 0.4)
    assert torch.allclose(loss, (short + full) / 2)
    loss.backward()
    assert not logits.grad[1, 2:].any() and logits.grad[1, :2].all()


def test_mean_over_micro_batches_of_uneven_meshes_is_that_of_the_batch():
    logits, bins = randn_double(4, 5, 9, 8), torch.randint(8, (4, 5, 9))
    for mesh, faces in enumerate([5, 1, 3, 2]):
        bins[mesh, faces:] = -1
    micro = [smoothed_cross_entropy(logits[i : i + 2], bins[i : i + 2], 0.4) for i in (0, 2)]
    assert torch.allclose(torch.stack(micro).mean(), smoothed_cross_entropy(logits, bins, 0.4))


def test_half_precision_is_computed_in_float32():
    logits, bins = torch.randn(2, 3, 9, 8).bfloat16(), torch.randint(8, (2, 3, 9))
    assert smoothed_cross_entropy(logits, bins, 0.4).dtype == torch.float32


def test_bins_of_another_shape_are_an_error():
    with pytest.raises(ValueError, match=r"need target bins of shape \(1, 2, 9\), got \(1, 2\)"):
        smoothed_cross_entropy(randn_double(1, 2, 9, 8), torch.zeros(1, 2, dtype=torch.long), 0.4)
