"""Tests of sampling from logits: frequencies, and the candidates of top-k and top-p."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera.sampling.logits import filter_top_k_p, sample_from_logits, topk_indices

VOCABULARY = 11


def sample_frequencies(
    logits_V: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    count: int = 40_000,
) -> Tensor:
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(7))
    candidates = filter_top_k_p(logits_V.expand(count, -1), top_k, top_p)
    tokens = candidates.token_ids(sample_from_logits(candidates.logits_MK, uniform, temperature))
    return torch.bincount(tokens, minlength=len(logits_V)) / count


def candidate_mask(logits_MV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return which tokens can be sampled, (M, V)."""
    candidates = filter_top_k_p(logits_MV, top_k, top_p)
    if candidates.tokens_MK is None:
        return torch.ones_like(logits_MV, dtype=torch.bool)
    return torch.zeros_like(logits_MV, dtype=torch.bool).scatter(
        1, candidates.tokens_MK, candidates.logits_MK.isfinite()
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_probabilities(temperature):
    logits = torch.randn(VOCABULARY)
    assert torch.allclose(
        sample_frequencies(logits, temperature), (logits / temperature).softmax(-1), atol=0.01
    )


def test_uniform_number_selects_by_the_cumulative_distribution():
    logits = torch.tensor([0.2, 0.0, 0.5, 0.3]).log().expand(6, 4)
    uniform = torch.tensor([0.0, 0.19, 0.2001, 0.69, 0.71, 1 - 2**-24])
    assert sample_from_logits(logits, uniform, 1.0).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_impossible_tokens_at_either_end_are_never_sampled(dtype):
    logits = torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf], dtype=dtype).expand(2, 4)
    assert sample_from_logits(logits, torch.tensor([0.0, 1 - 2**-24]), 1.0).tolist() == [1, 2]


def test_largest_uniform_number_selects_a_possible_token():
    logits = torch.cat(
        [torch.randn(5000, VOCABULARY) * 3, torch.full((5000, 1), -torch.inf)], dim=1
    )
    assert (sample_from_logits(logits, torch.full((5000,), 1 - 2**-24), 1.0) < VOCABULARY).all()


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_top_k_samples_from_the_renormalized_most_likely(top_k):
    logits = torch.randn(VOCABULARY)
    best = logits.topk(top_k).indices
    expected = torch.zeros(VOCABULARY).scatter(0, best, logits[best].softmax(-1))
    frequencies = sample_frequencies(logits, top_k=top_k)
    assert torch.allclose(frequencies, expected, atol=0.01)
    assert (frequencies[expected == 0] == 0).all()


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.01, [1]),
        (0.39, [1]),
        (0.5, [1, 3]),
        (0.69, [1, 3]),
        (0.75, [1, 3, 4]),
        (0.999, [0, 1, 2, 3, 4]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    logits = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log()
    assert candidate_mask(logits[None], 0, top_p)[0].nonzero()[:, 0].tolist() == kept
    assert sample_frequencies(logits, top_p=top_p).nonzero()[:, 0].tolist() == kept


def test_top_p_applies_to_the_tokens_left_by_top_k():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[None]
    assert candidate_mask(logits, 2, 0.5).tolist() == [[True, False, False, False]], (
        "0.4 of 0.7 is more than half"
    )
    assert candidate_mask(logits, 2, 0.6).tolist() == [[True, True, False, False]]
    assert candidate_mask(logits, 0, 1.0).all() and candidate_mask(logits, 9, 1.0).all()


def test_top_k_keeps_exactly_k_tokens_among_ties():
    assert candidate_mask(torch.zeros(1, 6), 2, 1.0).sum() == 2


@pytest.mark.parametrize("count", [1, 3, 150, 300])
@pytest.mark.parametrize("ties", [False, True])
def test_topk_indices_select_the_values_of_torch_topk(count, ties):
    logits = torch.randint(4, (40, 300)).float() if ties else torch.randn(40, 300)
    columns = topk_indices(logits, count)
    assert all(len(set(row)) == count for row in columns.tolist()), "no index twice"
    assert torch.equal(
        logits.gather(1, columns).sort(descending=True).values, logits.topk(count).values
    )


def test_temperature_near_zero_takes_the_most_likely_token():
    logits = torch.randn(40, VOCABULARY)
    assert torch.equal(sample_from_logits(logits, torch.rand(40), 1e-30), logits.argmax(-1))
