"""Contrastive losses beside slow ones that are written down word by word; ranks beside sorting."""

from __future__ import annotations

import math

import pytest
import torch

from tessera.losses.contrastive import (
    apart,
    auc,
    decoupled_contrast,
    loss_over_chance,
    ranks,
    recall_by_chance,
    sigmoid_contrast,
    softmax_contrast,
)

LOSSES = [softmax_contrast, decoupled_contrast, sigmoid_contrast]
every_loss = pytest.mark.parametrize("loss", LOSSES)
SAID = torch.tensor([1, 2, 2, 3, 4])


def logits(n: int = 5) -> torch.Tensor:
    return 4 * torch.randn(n, n, dtype=torch.float64)


def one_way(table: list[list[float]], said: list[int], with_own: bool) -> float:
    """Of each row: how sure it is of its own among those that say something else."""
    found = []
    for i, row in enumerate(table):
        candidates = [j for j in range(len(row)) if said[i] != said[j]]
        if candidates or with_own:
            below = sum(math.exp(row[j]) for j in candidates + ([i] if with_own else []))
            found.append(math.log(below) - row[i])
        else:
            found.append(0.0)
    return sum(found) / len(found)


@pytest.mark.parametrize(
    ("loss", "with_own"), [(softmax_contrast, True), (decoupled_contrast, False)]
)
@pytest.mark.parametrize(
    "said", [SAID, torch.arange(5), torch.zeros(5)], ids=["two alike", "all apart", "all alike"]
)
def test_the_losses_are_what_their_papers_say(loss, with_own, said):
    table = logits()
    slow = [one_way(rows.tolist(), said.tolist(), with_own) for rows in (table, table.T)]
    assert float(loss(table, apart(said))) == pytest.approx(sum(slow) / 2, rel=1e-12, abs=1e-12)


def test_the_sigmoid_loss_asks_of_each_pair_by_itself():
    table = logits()
    slow = 0.0
    for i in range(5):
        for j in range(5):
            if i == j or SAID[i] != SAID[j]:
                slow += math.log1p(math.exp(-float(table[i, j]) * (1 if i == j else -1)))
    assert float(sigmoid_contrast(table, apart(SAID))) == pytest.approx(slow / 5, rel=1e-12)


@every_loss
def test_at_a_temperature_of_e_to_the_ten_all_is_finite_in_fp32(loss):
    nearness = torch.nn.functional.normalize(
        torch.randn(16, 8), dim=-1
    ) @ torch.nn.functional.normalize(torch.randn(8, 16), dim=0)
    nearness.requires_grad_()
    found = loss(math.exp(10) * nearness, apart(torch.arange(16)))
    found.backward()
    assert found.isfinite() and nearness.grad.isfinite().all() and nearness.grad.abs().sum() > 0


@every_loss
def test_half_precision_is_summed_in_full(loss):
    table = logits().half()
    assert float(loss(table, apart(SAID))) == pytest.approx(
        float(loss(table.float(), apart(SAID))), rel=1e-6
    )


@every_loss
def test_who_says_the_same_is_not_pushed_away(loss):
    table = logits().requires_grad_()
    loss(table, apart(SAID)).backward()
    assert table.grad[1, 2] == table.grad[2, 1] == 0
    assert (table.grad[apart(SAID)] > 0).all() and (table.grad.diagonal() < 0).all()


@every_loss
def test_a_pair_by_itself_has_nothing_to_be_told_apart_from(loss):
    table = torch.full((1, 1), 2.0, requires_grad=True)
    found = loss(table, apart(torch.zeros(1)))
    found.backward()
    expected = (
        -torch.nn.functional.logsigmoid(torch.tensor(2.0)) if loss is sigmoid_contrast else 0.0
    )
    assert (
        float(found.detach()) == pytest.approx(float(expected), abs=1e-7)
        and table.grad.isfinite().all()
    )


def test_a_model_that_tells_nothing_apart_is_at_chance():
    assert float(
        loss_over_chance(torch.full((7, 7), 3.0), apart(torch.arange(7)))
    ) == pytest.approx(1.0)
    assert float(loss_over_chance(10 * torch.eye(7), apart(torch.arange(7)))) < 0.01
    assert float(loss_over_chance(torch.ones(1, 1), apart(torch.arange(1)))) == 0, (
        "of one there is no chance to speak of"
    )


def test_ranks_are_places_in_a_sorted_list():
    asking, answering = (
        torch.randn(30, 6, dtype=torch.float64),
        torch.randn(30, 6, dtype=torch.float64),
    )
    scores = asking @ answering.T
    sorted_places = [
        int((scores[i].argsort(descending=True) == i).nonzero()) + 1 for i in range(30)
    ]
    assert ranks(asking, answering, torch.arange(30)).tolist() == sorted_places


def test_a_model_to_which_all_is_one_has_the_middle_rank():
    one = torch.ones(9, 4)
    assert ranks(one, one, torch.arange(9)).tolist() == [5.0] * 9


def test_others_who_say_the_same_are_not_in_the_way():
    asking, answering = torch.eye(3), torch.tensor([[0.5, 0, 0], [0.9, 1, 0], [0.8, 0, 1]])
    assert ranks(asking, answering, torch.tensor([1, 2, 3])).tolist() == [3, 1, 1]
    assert ranks(asking, answering, torch.tensor([1, 1, 3])).tolist() == [2, 1, 1]


def test_large_tables_are_looked_at_in_blocks(monkeypatch):
    import tessera.losses.contrastive as contrastive

    asking, answering, said = torch.randn(50, 4), torch.randn(50, 4), torch.arange(50) // 2
    whole = ranks(asking, answering, said), recall_by_chance(said, 5)
    monkeypatch.setattr(contrastive, "AT_ONCE", 7)
    assert ranks(asking, answering, said).equal(whole[0]) and recall_by_chance(said, 5) == whole[1]


def test_chance_is_a_share_of_the_candidates():
    assert float(recall_by_chance(torch.arange(256), 10)) == 10 / 256
    assert float(recall_by_chance(torch.arange(4), 10)) == 1
    assert float(recall_by_chance(torch.tensor([1, 1, 2]), 1)) == pytest.approx(
        (1 / 2 + 1 / 2 + 1 / 3) / 3
    )


def test_auc_counts_pairs_in_the_right_order():
    scores, holds = torch.tensor([0.9, 0.4, 0.4, 0.1]), torch.tensor([True, False, True, False])
    assert float(auc(scores, holds)) == (1 + 1 + 0.5 + 1) / 4
    assert float(auc(-scores, holds)) == 1 - (1 + 1 + 0.5 + 1) / 4
