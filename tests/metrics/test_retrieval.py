"""Tests of the retrieval metrics: ranks against sorting, and chance levels."""

from __future__ import annotations

import pytest
import torch

import tessera.metrics.retrieval as retrieval
from tessera.metrics.retrieval import auc, recall_at_chance, retrieval_ranks


def test_ranks_are_positions_in_the_sorted_list():
    queries, keys = (
        torch.randn(30, 6, dtype=torch.float64),
        torch.randn(30, 6, dtype=torch.float64),
    )
    scores = queries @ keys.T
    expected = [int((scores[i].argsort(descending=True) == i).nonzero()) + 1 for i in range(30)]
    assert retrieval_ranks(queries, keys, torch.arange(30)).tolist() == expected


def test_constant_embeddings_have_the_middle_rank():
    constant = torch.ones(9, 4)
    assert retrieval_ranks(constant, constant, torch.arange(9)).tolist() == [5.0] * 9


def test_examples_with_the_same_caption_are_not_candidates():
    queries, keys = torch.eye(3), torch.tensor([[0.5, 0, 0], [0.9, 1, 0], [0.8, 0, 1]])
    assert retrieval_ranks(queries, keys, torch.tensor([1, 2, 3])).tolist() == [3, 1, 1]
    assert retrieval_ranks(queries, keys, torch.tensor([1, 1, 3])).tolist() == [2, 1, 1]


def test_blocks_give_the_result_of_the_full_matrix(monkeypatch):
    queries, keys, caption_ids = torch.randn(50, 4), torch.randn(50, 4), torch.arange(50) // 2
    ranks, recall = retrieval_ranks(queries, keys, caption_ids), recall_at_chance(caption_ids, 5)
    monkeypatch.setattr(retrieval, "ROWS_PER_BLOCK", 7)
    assert retrieval_ranks(queries, keys, caption_ids).equal(ranks)
    assert recall_at_chance(caption_ids, 5) == recall


def test_recall_at_chance_is_k_over_the_candidates():
    assert float(recall_at_chance(torch.arange(256), 10)) == 10 / 256
    assert float(recall_at_chance(torch.arange(4), 10)) == 1
    assert float(recall_at_chance(torch.tensor([1, 1, 2]), 1)) == pytest.approx(
        (1 / 2 + 1 / 2 + 1 / 3) / 3
    )


def test_auc_is_the_fraction_of_pairs_in_the_right_order():
    scores, positive = torch.tensor([0.9, 0.4, 0.4, 0.1]), torch.tensor([True, False, True, False])
    assert float(auc(scores, positive)) == (1 + 1 + 0.5 + 1) / 4
    assert float(auc(-scores, positive)) == 1 - (1 + 1 + 0.5 + 1) / 4
