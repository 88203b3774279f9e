"""FSQ against a scalar reference implementation and against vector-quantize-pytorch."""

from __future__ import annotations

import math
from itertools import product
from math import exp, log

import pytest
import torch
import vector_quantize_pytorch as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.nn.quantize import FSQConfig

random_levels = st.lists(st.integers(2, 9), min_size=1, max_size=5).map(tuple)


def scalar_fsq(z: float, bins: int) -> tuple[int, float]:
    """Return the cell of one number and its center, by comparing with all edges."""
    bounded = 2 / (1 + math.exp(-1.702 * z)) - 1
    edges = [-1 + 2 * i / bins for i in range(1, bins)]
    cell = sum(bounded >= edge for edge in edges)
    return cell, -1 + (2 * cell + 1) / bins


@settings(max_examples=40)
@given(levels=random_levels, seed=st.integers(0, 2**16))
def test_cells_and_codes_equal_the_scalar_reference(levels: tuple[int, ...], seed: int):
    latent = 2 * torch.randn(
        6, len(levels), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    quantized = FSQConfig(levels=levels).build(len(levels)).double()(latent)
    for row, code, value in zip(
        latent.tolist(), quantized.codes.tolist(), quantized.latent.tolist()
    ):
        cells, centers = zip(*(scalar_fsq(z, bins) for z, bins in zip(row, levels)))
        assert code == sum(cell * math.prod(levels[:i]) for i, cell in enumerate(cells))
        assert value == pytest.approx(centers, abs=1e-15)


@pytest.mark.parametrize("bins", [2, 3, 4, 5, 8, 9, 16])
def test_a_dimension_has_as_many_values_as_bins(bins: int):
    quantizer = FSQConfig(levels=(bins,)).build(1)
    values = quantizer(torch.linspace(-9, 9, 10_001).view(1, -1, 1)).latent.unique()
    assert len(values) == bins
    torch.testing.assert_close(values, -values.flip(0))
    torch.testing.assert_close(values.diff(), torch.full((bins - 1,), 2 / bins))


@pytest.mark.parametrize("levels", [(2, 2, 2), (8, 5, 3), (4, 7)])
def test_every_code_is_one_grid_point_and_is_recovered_from_it(levels: tuple[int, ...]):
    quantizer = FSQConfig(levels=levels).build(len(levels)).double()
    codes = torch.arange(quantizer.vocab_size)
    points = quantizer.decode(codes)
    grid = list(product(*([-1 + (2 * i + 1) / n for i in range(n)] for n in reversed(levels))))
    torch.testing.assert_close(points.flip(-1), torch.tensor(grid, dtype=torch.float64))
    assert torch.equal(quantizer(points.atanh() / 0.851).codes, codes)


@pytest.mark.parametrize("scale", [30.0, 1e30, float("inf")])
def test_a_saturated_latent_stays_in_the_outermost_cell(scale: float):
    quantizer = FSQConfig(levels=(8, 5)).build(2)
    assert quantizer(torch.tensor([[scale, scale], [-scale, -scale]])).codes.tolist() == [39, 0]


@pytest.mark.parametrize("levels", [(8, 8, 8), (8, 5, 5, 5), (3, 4, 16)])
def test_gaussian_latents_use_all_codes_almost_evenly(levels: tuple[int, ...]):
    quantizer = FSQConfig(levels=levels).build(len(levels))
    codes = quantizer(torch.randn(1, 200_000, len(levels))).codes
    usage = torch.bincount(codes.flatten(), minlength=quantizer.vocab_size) / codes.numel()
    entropy = -(usage * usage.log()).sum() / math.log(quantizer.vocab_size)
    assert usage.min() > 0
    assert entropy > 0.995


def test_bin_usage_is_more_even_than_with_the_papers_bound():
    latent = torch.randn(1, 100_000, 1)
    for bins in (3, 4, 5, 8, 16):
        ours = FSQConfig(levels=(bins,)).build(1)(latent).codes
        papers = reference.FSQ(levels=[bins])(latent)[1].long()
        rarest = [
            torch.bincount(codes.flatten(), minlength=bins).min() * bins / 100_000
            for codes in (ours, papers)
        ]
        assert rarest[0] > 0.85 and rarest[0] > rarest[1]


@pytest.mark.parametrize("levels", [(8, 8, 8, 8), (8, 5, 5, 5), (2, 3, 7)])
def test_codes_equal_the_reference_given_the_same_bounded_latent(levels: tuple[int, ...]):
    """The reference rounds (n - 1)(x + 1)/2 and FSQ takes the floor of n(u + 1)/2: these are the
    same cell for x = n u / (n - 1)."""
    latent = torch.randn(2, 500, len(levels))
    quantized = FSQConfig(levels=levels).build(len(levels))(latent)
    bins = torch.tensor(levels)
    theirs = reference.FSQ(levels=list(levels), preserve_symmetry=True, bound_hard_clamp=True)
    values, codes = theirs(torch.tanh(0.851 * latent) * bins / (bins - 1))
    assert torch.equal(quantized.codes, codes.long())
    torch.testing.assert_close(quantized.latent, values * (bins - 1) / bins)


def enumerated_entropy(rows_PW: torch.Tensor, levels: tuple[int, ...]) -> float:
    """Return the entropy of the mean soft assignment, computed code by code and row by row."""
    mean_probs = {}
    for code in product(*map(range, levels)):
        probs = []
        for row in torch.tanh(0.851 * rows_PW).tolist():
            prob = 1.0
            for value, cell, bins in zip(row, code, levels, strict=True):
                weights = [
                    exp(-4 * ((value * bins + bins - 1) / 2 - other) ** 2) for other in range(bins)
                ]
                prob *= weights[cell] / sum(weights)
            probs.append(prob)
        mean_probs[code] = sum(probs) / len(probs)
    return -sum(p * log(p) for p in mean_probs.values())


def test_the_diversity_penalty_is_the_gap_to_the_maximum_entropy() -> None:
    levels = (4, 3, 2)
    rows_PW = torch.randn(7, 3, dtype=torch.float64)
    quantized = FSQConfig(levels=levels, diversity=0.3).build(3)(rows_PW)
    assert quantized.penalties["diversity"].item() == pytest.approx(
        0.3 * (log(24) - enumerated_entropy(rows_PW, levels)), abs=1e-12
    )
    assert FSQConfig(levels=levels).build(3)(rows_PW).penalties == {}


def test_the_diversity_penalty_of_micro_batches_equals_that_of_one_batch() -> None:
    torch.manual_seed(2)
    quantizer = FSQConfig(levels=(5, 4, 3), diversity=1.0).build(3).train()
    batch = torch.randn(8, 6, 3, dtype=torch.float64)
    whole = batch.clone().requires_grad_()
    quantizer(whole).penalties["diversity"].backward()
    parts = batch.clone().requires_grad_()
    micros = parts.chunk(4)
    quantizer.set_global_stats(
        torch.stack([quantizer.batch_stats(micro.detach()) for micro in micros]).sum(0)
    )
    losses = [quantizer(micro).penalties["diversity"] for micro in micros]
    (sum(losses) / 4).backward()
    assert torch.allclose(parts.grad, whole.grad, atol=1e-12)
    assert torch.stack(losses).mean().item() == pytest.approx(
        quantizer(whole).penalties["diversity"].item(), abs=1e-12
    )


def test_minimizing_the_diversity_penalty_fills_the_grid() -> None:
    torch.manual_seed(3)
    rows_PW = (0.05 * torch.randn(400, 2)).requires_grad_()
    quantizer = FSQConfig(levels=(4, 4), diversity=1.0).build(2)
    assert len(quantizer(rows_PW).codes.unique()) < 8
    optimizer = torch.optim.Adam([rows_PW], lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        quantizer(rows_PW).penalties["diversity"].backward()
        optimizer.step()
    assert len(quantizer(rows_PW).codes.unique()) == 16


def test_diversity_over_too_many_codes_raises_an_error() -> None:
    with pytest.raises(ValueError, match="at most 65536 codes"):
        FSQConfig(levels=(8, 8, 8, 8, 8, 8), diversity=0.1)
