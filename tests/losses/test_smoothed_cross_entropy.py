from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tessera.losses.smoothed_cross_entropy import smoothed_cross_entropy, smoothing
from tests.networks import doubles


def test_without_smoothing_it_is_the_cross_entropy():
    logits, bins = doubles(2, 3, 9, 8), torch.randint(8, (2, 3, 9))
    assert torch.allclose(
        smoothed_cross_entropy(logits, bins, 0),
        F.cross_entropy(logits.flatten(0, 2), bins.flatten()),
    )


def test_the_true_bin_is_spread_over_its_neighbours_by_a_gaussian():
    sigma, bins = 0.7, 6
    logits = doubles(1, 1, 1, bins)
    weights = [math.exp(-((other - 1) ** 2) / (2 * sigma**2)) for other in range(bins)]
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    by_hand = -(shares * logits.flatten().log_softmax(0)).sum()
    assert torch.allclose(smoothed_cross_entropy(logits, torch.tensor([[[1]]]), sigma), by_hand)


def test_every_bin_is_spread_into_shares_also_at_the_border():
    shares = smoothing(8, 0.4, doubles(1))
    assert torch.allclose(shares.sum(1), torch.ones(8, dtype=torch.float64))
    assert (shares.argmax(1) == torch.arange(8)).all()
    assert torch.equal(shares, shares.flip(0, 1))


def test_the_next_bin_is_a_smaller_mistake_than_a_far_one():
    sure = 5 * F.one_hot(torch.tensor([[[4]]]), 9).double()
    losses = [
        float(smoothed_cross_entropy(sure, torch.tensor([[[bin]]]), 0.6)) for bin in (4, 5, 7)
    ]
    assert losses == sorted(losses) and losses[0] < losses[1] < losses[2]


def test_whatever_stands_at_padding_changes_nothing_and_has_no_gradient():
    logits, bins = doubles(2, 4, 9, 8), torch.randint(8, (2, 4, 9))
    bins[1, 2:] = -1
    short = smoothed_cross_entropy(logits[1:, :2], bins[1:, :2], 0.4)
    whole = smoothed_cross_entropy(logits[:1], bins[:1], 0.4)
    logits[1, 2:] = 1e3
    logits.requires_grad_()
    loss = smoothed_cross_entropy(logits, bins, 0.4)
    assert torch.allclose(loss, (short + whole) / 2)
    loss.backward()
    assert not logits.grad[1, 2:].any() and logits.grad[1, :2].all()


def test_the_mean_over_micro_batches_of_uneven_meshes_is_the_loss_of_the_batch():
    logits, bins = doubles(4, 5, 9, 8), torch.randint(8, (4, 5, 9))
    for mesh, faces in enumerate([5, 1, 3, 2]):
        bins[mesh, faces:] = -1
    micro = [smoothed_cross_entropy(logits[i : i + 2], bins[i : i + 2], 0.4) for i in (0, 2)]
    assert torch.allclose(torch.stack(micro).mean(), smoothed_cross_entropy(logits, bins, 0.4))


def test_half_precision_is_summed_in_float32():
    logits, bins = torch.randn(2, 3, 9, 8).bfloat16(), torch.randint(8, (2, 3, 9))
    assert smoothed_cross_entropy(logits, bins, 0.4).dtype == torch.float32


def test_bins_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"so bins of shape \(1, 2, 9\), but theirs is \(1, 2\)"):
        smoothed_cross_entropy(doubles(1, 2, 9, 8), torch.zeros(1, 2, dtype=torch.long), 0.4)
