"""Tests of the contrastive losses against loops over all pairs."""

from __future__ import annotations

import math

import pytest
import torch

from tessera.losses.contrastive import (
    decoupled_contrastive_loss,
    loss_over_chance,
    negative_mask,
    sigmoid_contrastive_loss,
    softmax_contrastive_loss,
)

LOSSES = [softmax_contrastive_loss, decoupled_contrastive_loss, sigmoid_contrastive_loss]
every_loss = pytest.mark.parametrize("loss", LOSSES)
CAPTION_IDS = torch.tensor([1, 2, 2, 3, 4])


def random_logits(n: int = 5) -> torch.Tensor:
    return 4 * torch.randn(n, n, dtype=torch.float64)


def one_direction(logits: list[list[float]], caption_ids: list[int], with_positive: bool) -> float:
    """Return the mean cross-entropy of the rows, computed in a loop."""
    losses = []
    for i, row in enumerate(logits):
        candidates = [j for j in range(len(row)) if caption_ids[i] != caption_ids[j]]
        if candidates or with_positive:
            total = sum(math.exp(row[j]) for j in candidates + ([i] if with_positive else []))
            losses.append(math.log(total) - row[i])
        else:
            losses.append(0.0)
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("loss", "with_positive"),
    [(softmax_contrastive_loss, True), (decoupled_contrastive_loss, False)],
)
@pytest.mark.parametrize(
    "caption_ids",
    [CAPTION_IDS, torch.arange(5), torch.zeros(5)],
    ids=["two equal", "all different", "all equal"],
)
def test_softmax_losses_match_a_loop(loss, with_positive, caption_ids):
    logits = random_logits()
    expected = [
        one_direction(rows.tolist(), caption_ids.tolist(), with_positive)
        for rows in (logits, logits.T)
    ]
    assert float(loss(logits, negative_mask(caption_ids))) == pytest.approx(
        sum(expected) / 2, rel=1e-12, abs=1e-12
    )


def test_sigmoid_loss_matches_a_loop():
    logits = random_logits()
    total = 0.0
    for i in range(5):
        for j in range(5):
            if i == j or CAPTION_IDS[i] != CAPTION_IDS[j]:
                total += math.log1p(math.exp(-float(logits[i, j]) * (1 if i == j else -1)))
    loss = sigmoid_contrastive_loss(logits, negative_mask(CAPTION_IDS))
    assert float(loss) == pytest.approx(total / 5, rel=1e-12)


@every_loss
def test_losses_are_finite_in_float32_at_large_scales(loss):
    cosines = torch.nn.functional.normalize(
        torch.randn(16, 8), dim=-1
    ) @ torch.nn.functional.normalize(torch.randn(8, 16), dim=0)
    cosines.requires_grad_()
    value = loss(math.exp(10) * cosines, negative_mask(torch.arange(16)))
    value.backward()
    assert value.isfinite() and cosines.grad.isfinite().all() and cosines.grad.abs().sum() > 0


@every_loss
def test_half_precision_is_computed_in_float32(loss):
    logits = random_logits().half()
    assert float(loss(logits, negative_mask(CAPTION_IDS))) == pytest.approx(
        float(loss(logits.float(), negative_mask(CAPTION_IDS))), rel=1e-6
    )


@every_loss
def test_examples_with_the_same_caption_are_no_negatives(loss):
    logits = random_logits().requires_grad_()
    loss(logits, negative_mask(CAPTION_IDS)).backward()
    assert logits.grad[1, 2] == logits.grad[2, 1] == 0
    assert (logits.grad[negative_mask(CAPTION_IDS)] > 0).all()
    assert (logits.grad.diagonal() < 0).all()


def test_several_captions_per_example_must_all_differ():
    ids = torch.tensor([[1, 2], [3, 2], [4, 5]])
    different = [[False, False, True], [False, False, True], [True, True, False]]
    assert negative_mask(ids).tolist() == different
    assert negative_mask(ids[:1], ids).tolist() == different[:1]


@every_loss
def test_single_pair_has_no_negatives(loss):
    logits = torch.full((1, 1), 2.0, requires_grad=True)
    value = loss(logits, negative_mask(torch.zeros(1)))
    value.backward()
    is_sigmoid = loss is sigmoid_contrastive_loss
    expected = -torch.nn.functional.logsigmoid(torch.tensor(2.0)) if is_sigmoid else 0.0
    assert float(value.detach()) == pytest.approx(float(expected), abs=1e-7)
    assert logits.grad.isfinite().all()


def test_constant_logits_are_at_chance_level():
    negatives = negative_mask(torch.arange(7))
    assert float(loss_over_chance(torch.full((7, 7), 3.0), negatives)) == pytest.approx(1.0)
    assert float(loss_over_chance(10 * torch.eye(7), negatives)) < 0.01
    assert float(loss_over_chance(torch.ones(1, 1), negative_mask(torch.arange(1)))) == 0
