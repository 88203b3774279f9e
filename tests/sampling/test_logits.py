"""One symbol for each row of logits: as often as the model says, and never one that was left
out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera.sampling.logits import filter_top_k_p, largest, sample_from_logits

VOCABULARY = 11


def frequencies(
    logits_V: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    many: int = 40_000,
) -> Tensor:
    chance = torch.rand(many, generator=torch.Generator().manual_seed(7))
    choice = filter_top_k_p(logits_V.expand(many, -1), top_k, top_p)
    tokens = choice.tokens(sample_from_logits(choice.logits_MK, chance, temperature))
    return torch.bincount(tokens, minlength=len(logits_V)) / many


def narrowed(logits_MV: Tensor, top_k: int, top_p: float) -> Tensor:
    """(M, V): which symbols may still be drawn."""
    choice = filter_top_k_p(logits_MV, top_k, top_p)
    if choice.tokens_MK is None:
        return torch.ones_like(logits_MV, dtype=torch.bool)
    return torch.zeros_like(logits_MV, dtype=torch.bool).scatter(
        1, choice.tokens_MK, choice.logits_MK.isfinite()
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_symbols_are_drawn_as_often_as_the_model_says(temperature):
    logits = torch.randn(VOCABULARY)
    assert torch.allclose(
        frequencies(logits, temperature), (logits / temperature).softmax(-1), atol=0.01
    )


def test_one_number_draws_one_symbol_where_the_sum_of_probabilities_passes_it():
    logits = torch.tensor([0.2, 0.0, 0.5, 0.3]).log().expand(6, 4)
    chances = torch.tensor([0.0, 0.19, 0.2001, 0.69, 0.71, 1 - 2**-24])
    assert sample_from_logits(logits, chances, 1.0).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_impossible_symbols_are_never_drawn_at_either_end(dtype):
    logits = torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf], dtype=dtype).expand(2, 4)
    assert sample_from_logits(logits, torch.tensor([0.0, 1 - 2**-24]), 1.0).tolist() == [1, 2]


def test_the_largest_uniform_number_draws_no_symbol_beyond_the_last_possible_one():
    logits = torch.cat(
        [torch.randn(5000, VOCABULARY) * 3, torch.full((5000, 1), -torch.inf)], dim=1
    )
    assert (sample_from_logits(logits, torch.full((5000,), 1 - 2**-24), 1.0) < VOCABULARY).all()


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_top_k_draws_from_the_likeliest_so_many_as_often_as_they_deserve(top_k):
    logits = torch.randn(VOCABULARY)
    best = logits.topk(top_k).indices
    expected = torch.zeros(VOCABULARY).scatter(0, best, logits[best].softmax(-1))
    seen = frequencies(logits, top_k=top_k)
    assert torch.allclose(seen, expected, atol=0.01) and (seen[expected == 0] == 0).all()


def test_top_p_keeps_the_fewest_that_together_reach_it():
    logits = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log()
    for top_p, kept in [
        (0.01, [1]),
        (0.39, [1]),
        (0.5, [1, 3]),
        (0.69, [1, 3]),
        (0.75, [1, 3, 4]),
        (0.999, [0, 1, 2, 3, 4]),
    ]:
        left = narrowed(logits[None], 0, top_p)[0].nonzero()[:, 0].tolist()
        assert left == kept, top_p
        seen = frequencies(logits, top_p=top_p)
        assert seen.nonzero()[:, 0].tolist() == kept


def test_top_k_and_top_p_hold_together():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[None]
    assert narrowed(logits, 2, 0.5).tolist() == [[True, False, False, False]], (
        "0.4 of 0.7 is more than half"
    )
    assert narrowed(logits, 2, 0.6).tolist() == [[True, True, False, False]]
    assert narrowed(logits, 0, 1.0).all() and narrowed(logits, 9, 1.0).all()


def test_top_k_among_equals_still_keeps_so_many():
    assert narrowed(torch.zeros(1, 6), 2, 1.0).sum() == 2


@pytest.mark.parametrize("count", [1, 3, 150, 300])
@pytest.mark.parametrize("equals", [False, True])
def test_the_largest_are_as_large_as_those_that_torch_finds(count, equals):
    logits = torch.randint(4, (40, 300)).float() if equals else torch.randn(40, 300)
    columns = largest(logits, count)
    assert all(len(set(row)) == count for row in columns.tolist()), "none twice"
    assert torch.equal(
        logits.gather(1, columns).sort(descending=True).values, logits.topk(count).values
    )


def test_a_temperature_of_nearly_nothing_takes_the_likeliest():
    logits = torch.randn(40, VOCABULARY)
    assert torch.equal(sample_from_logits(logits, torch.rand(40), 1e-30), logits.argmax(-1))
