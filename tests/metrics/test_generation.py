"""Tests of precision and recall, and of the search for copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera.metrics.generation import (
    find_nearest,
    fraction_among,
    near_duplicate_distance,
    precision_recall,
)

N, D = 400, 8
CENTRES = 20 * torch.eye(4, D)


def sample_modes(modes: int, count: int = N, seed: int = 0) -> Tensor:
    """Sample from a mixture of the first Gaussians around CENTRES."""
    generator = torch.Generator().manual_seed(seed)
    return CENTRES[torch.arange(count) % modes] + torch.randn(count, D, generator=generator)


REAL = sample_modes(4)


def test_sets_of_one_distribution_have_high_precision_and_recall():
    found = precision_recall(REAL, sample_modes(4, seed=1))
    assert found.precision > 0.8 and found.recall > 0.8


def test_missing_modes_lower_recall_only():
    found = precision_recall(REAL, sample_modes(1, seed=1))
    assert found.precision > 0.75
    assert found.recall < 0.26


def test_repeated_samples_lower_recall_only():
    found = precision_recall(REAL, sample_modes(4, count=20, seed=1).repeat(20, 1))
    assert found.precision > 0.6 and found.recall < 0.1


def test_noise_lowers_precision_only():
    noise = 3 * torch.randn(N, D, generator=torch.Generator().manual_seed(2))
    found = precision_recall(REAL, sample_modes(4, seed=1) + noise)
    assert found.precision < 0.25
    assert found.recall > 0.9


def test_values_are_those_of_the_definition():
    real, fake = REAL[:30], sample_modes(4, count=20, seed=1) * 0.9
    inside = 0
    for one in fake:
        for member in real:
            radius = (real - member).norm(dim=1).sort().values[2]
            if (one - member).norm() <= radius:
                inside += 1
                break
    assert fraction_among(real, fake, neighbours=2) == inside / len(fake)


def test_sets_without_enough_neighbours_are_an_error():
    with pytest.raises(ValueError, match="need more than 3 examples, got 3: use a larger set"):
        precision_recall(REAL, REAL[:3])


def test_nearest_reference_is_found_over_several_blocks():
    queries = REAL[torch.tensor([399, 0, 256])] + 1e-4
    nearest = find_nearest(queries, REAL)
    assert nearest.index_N.tolist() == [399, 0, 256]
    assert (nearest.distance_N < 1e-3).all()


def test_a_set_compared_with_itself_excludes_duplicates():
    rows = torch.tensor([[0.0], [0.0], [3.0], [7.0]]) + 1e3
    nearest = find_nearest(rows, rows, min_distance=1e-3)
    assert nearest.distance_N.tolist() == [3, 3, 3, 4]


def test_near_duplicates_are_the_given_fraction():
    distances = torch.arange(101.0)
    limit = near_duplicate_distance(distances, 0.1)
    assert (distances <= limit).sum() == 11
