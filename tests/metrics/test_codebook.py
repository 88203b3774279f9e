"""Tests of the codebook metrics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera.metrics.codebook import (
    codebook_bits,
    codebook_histogram,
    codebook_perplexity,
    codebook_usage,
)


def test_usage_is_the_fraction_of_codes_that_occur():
    assert codebook_usage(torch.tensor([5, 0, 1, 0])).item() == 0.5
    assert codebook_usage(torch.tensor([[1, 1], [0, 9]])).tolist() == [1.0, 0.5]


def test_perplexity_is_the_exponential_of_the_entropy():
    counts = torch.tensor([6, 3, 1, 0])
    entropy = -(0.6 * math.log(0.6) + 0.3 * math.log(0.3) + 0.1 * math.log(0.1))

    assert codebook_perplexity(counts).item() == pytest.approx(math.exp(entropy), rel=1e-12)


def test_uniform_and_empty_counts_have_maximum_and_minimum_perplexity():
    counts = torch.stack([torch.full((64,), 10_000_000), torch.zeros(64, dtype=torch.int64)])

    assert codebook_perplexity(counts).tolist() == pytest.approx([64, 1])
    assert codebook_usage(counts).tolist() == [1, 0]


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=40))
def test_perplexity_is_between_one_and_the_number_of_used_codes(counts):
    used = max(sum(count > 0 for count in counts), 1)

    assert 1 - 1e-9 <= codebook_perplexity(torch.tensor(counts)).item() <= used + 1e-9


def test_bits_are_the_codes_times_the_logarithm_of_the_codebook():
    assert codebook_bits(torch.tensor([[3, 0, 1, 0], [1, 1, 1, 1]])).item() == 8 * 2


def test_a_histogram_begins_with_the_most_frequent_codes():
    counts = torch.tensor([[1, 5, 0, 2], [0, 0, 0, 8]])
    assert codebook_histogram(counts).tolist() == [[5, 2, 1, 0], [8, 0, 0, 0]]
    assert codebook_histogram(counts, bins=2).tolist() == [[3.5, 0.5], [4, 0]]
