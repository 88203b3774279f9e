"""LFQ and BSQ against the enumeration of all symbols, and against vector-quantize-pytorch."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import vector_quantize_pytorch as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.nn.quantize import LFQConfig
from tessera.nn.quantize.lfq import even_groups

both_forms = pytest.mark.parametrize("spherical", [False, True])


def config_of(bits: int, **fields) -> LFQConfig:
    return LFQConfig(codebook_size=2**bits, **fields)


@both_forms
@settings(max_examples=25)
@given(bits=st.integers(1, 10), seed=st.integers(0, 2**16))
def test_a_code_is_the_word_of_signs(spherical: bool, bits: int, seed: int):
    latent = torch.randn(5, bits, generator=torch.Generator().manual_seed(seed))
    latent[0, 0] = 0.0
    quantized = config_of(bits, spherical=spherical).build(bits)(latent)
    reach = 1 / math.sqrt(bits) if spherical else 1.0
    for row, code, value in zip(
        latent.tolist(), quantized.codes.tolist(), quantized.latent.tolist()
    ):
        assert code == sum(2**i for i, z in enumerate(row) if z > 0)
        assert value == pytest.approx([reach if z > 0 else -reach for z in row])


def all_symbols(bits: int, spherical: bool) -> Tensor:
    tokens = torch.tensor(list(product([-1.0, 1.0], repeat=bits)), dtype=torch.float64)
    return tokens / math.sqrt(bits) if spherical else tokens


def entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * probabilities.log()).sum(-1)


def slow_probabilities(latent: Tensor, config: LFQConfig) -> Tensor:
    """(P, V): the softmax of minus the squared distance to every symbol."""
    rows = latent.reshape(-1, config.bits)
    rows = rows / rows.norm(dim=-1, keepdim=True) if config.spherical else rows
    tokens = all_symbols(config.bits, config.spherical)
    return torch.softmax(-config.inverse_temperature * torch.cdist(rows, tokens).square(), dim=-1)


@both_forms
@pytest.mark.parametrize("bits", [1, 2, 5, 8])
def test_the_entropy_penalty_equals_the_enumeration_of_all_symbols(spherical: bool, bits: int):
    config = config_of(
        bits, spherical=spherical, diversity=1.7, entropy_weight=0.3, inverse_temperature=0.8
    )
    latent = torch.randn(3, 4, bits, dtype=torch.float64, requires_grad=True)
    penalty = config.build(bits)(latent).penalties["entropy"]
    probabilities = slow_probabilities(latent, config)
    expected = 0.3 * (entropy(probabilities).mean() - 1.7 * entropy(probabilities.mean(0)))
    torch.testing.assert_close(penalty, expected, rtol=1e-10, atol=1e-12)
    ours, theirs = (torch.autograd.grad(value, latent)[0] for value in (penalty, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_beyond_group_bits_the_entropies_of_groups_are_added():
    config = config_of(8, group_bits=3, diversity=1.0, entropy_weight=1.0)
    latent = torch.randn(1, 50, 8, dtype=torch.float64)
    grouped = config.build(8)(latent).penalties["entropy"]
    mean = slow_probabilities(latent, config).mean(0).reshape([2] * 8)
    assert even_groups(8, 3) == [3, 3, 2]
    marginals = [mean.sum((3, 4, 5, 6, 7)), mean.sum((0, 1, 2, 6, 7)), mean.sum((0, 1, 2, 3, 4, 5))]
    doubt = entropy(slow_probabilities(latent, config)).mean()
    torch.testing.assert_close(grouped, doubt - sum(entropy(part.flatten()) for part in marginals))

    exact = config_of(8, diversity=1.0, entropy_weight=1.0).build(8)(latent).penalties["entropy"]
    assert grouped < exact, "the sum over groups bounds the entropy from above"


@settings(max_examples=50)
@given(bits=st.integers(1, 62), most=st.integers(1, 24))
def test_groups_are_few_and_even(bits: int, most: int):
    groups = even_groups(bits, most)
    assert sum(groups) == bits and max(groups) <= most
    assert max(groups) - min(groups) <= 1 and len(groups) == math.ceil(bits / most)


@both_forms
def test_codes_entropy_and_commitment_equal_those_of_the_oracle(spherical: bool):
    """The oracle has the first dimension in the highest bit, and floors logarithms at 1e-5: nothing
    here is so rare."""
    theirs = oracle.LFQ(
        codebook_size=64, dim=6, spherical=spherical, commitment_loss_weight=1.0
    ).train()
    ours = config_of(
        6, spherical=spherical, entropy_weight=1.0, commitment_weight=1.0, inverse_temperature=0.2
    )
    latent = torch.randn(2, 40, 6).clamp(-2, 2)
    result, breakdown = theirs(latent.flip(-1), inv_temperature=0.2, return_loss_breakdown=True)
    quantized = ours.build(6)(latent)
    assert torch.equal(quantized.codes, result.indices.long())
    torch.testing.assert_close(quantized.latent, result.quantized.flip(-1))
    torch.testing.assert_close(quantized.penalties["commitment"], breakdown.commitment)
    expected = breakdown.per_sample_entropy - breakdown.batch_entropy
    torch.testing.assert_close(quantized.penalties["entropy"], expected, rtol=1e-5, atol=1e-5)


@both_forms
def test_four_micro_batches_that_observed_are_one_batch(spherical: bool):
    quantizer = config_of(7, spherical=spherical, diversity=2.0).build(5).double()
    latent = torch.randn(8, 6, 5, dtype=torch.float64)

    def penalties_and_gradients(micro_batches: int) -> tuple[Tensor, list[Tensor]]:
        seen = latent.clone().requires_grad_()
        total = (
            sum(sum(quantizer(part).penalties.values()) for part in seen.chunk(micro_batches))
            / micro_batches
        )
        return total.detach(), list(
            torch.autograd.grad(total, [seen, *quantizer.project_in.parameters()])
        )

    whole, gradients = penalties_and_gradients(1)
    alone, alone_gradients = penalties_and_gradients(4)
    quantizer.set_global_stats(sum(quantizer.batch_stats(part) for part in latent.chunk(4)))
    together, together_gradients = penalties_and_gradients(4)

    torch.testing.assert_close(together, whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(together_gradients, gradients, rtol=1e-10, atol=1e-10)
    assert (alone - whole).abs() > 1e-4 and (alone_gradients[0] - gradients[0]).abs().max() > 1e-5


def test_the_expected_total_gives_every_micro_batch_the_entropy_of_the_whole():
    quantizer = (
        config_of(4, entropy_weight=1.0, diversity=1.0, commitment_weight=0.0).build(4).double()
    )
    latent = torch.randn(4, 5, 4, dtype=torch.float64)
    use = -entropy(slow_probabilities(latent, quantizer.config).mean(0))
    quantizer.set_global_stats(sum(quantizer.batch_stats(part) for part in latent.chunk(2)))
    for part in latent.chunk(2):
        doubt = entropy(slow_probabilities(part, quantizer.config)).mean()
        torch.testing.assert_close(
            quantizer(part).penalties["entropy"], doubt + use, rtol=1e-10, atol=1e-10
        )


def test_validation_does_not_meet_the_total_of_a_step():
    quantizer = config_of(4).build(4)
    latent, other = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    alone = quantizer.eval()(latent).penalties
    quantizer.set_global_stats(quantizer.batch_stats(other))
    assert quantizer.eval()(latent).penalties == alone
    assert quantizer.train()(latent).penalties["entropy"] != alone["entropy"]


class Widest(TorchDispatchMode):
    """The size of the largest tensor that anything made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return made


@pytest.mark.parametrize("group_bits, bound", [(14, 100 * 2**9), (18, 2**18)])
def test_two_to_the_eighteen_symbols_need_no_row_that_wide(group_bits: int, bound: int):
    quantizer = config_of(18, group_bits=group_bits).build(18)
    latent = torch.randn(1, 100, 18, requires_grad=True)
    with Widest() as max_channels:
        sum(quantizer(latent).penalties.values()).backward()
    assert 0 < max_channels.numbers <= bound < 100 * 2**18


@both_forms
def test_sure_latents_have_finite_gradients(spherical: bool):
    quantizer = config_of(14, spherical=spherical, inverse_temperature=100.0).build(14)
    latent = (50 * torch.randn(1, 20, 14)).requires_grad_()
    sum(quantizer(latent).penalties.values()).backward()
    assert latent.grad.isfinite().all()


def test_the_penalty_spreads_latents_that_had_collapsed():
    latent = (torch.ones(1, 256, 4) + 0.5 * torch.randn(1, 256, 4)).requires_grad_()
    quantizer = config_of(4, entropy_weight=1.0, commitment_weight=0.0).build(4)
    share = torch.bincount(quantizer(latent).codes.flatten(), minlength=16) / 256
    assert share[15] > 0.8 and share[:15].max() < 0.05
    optimizer = torch.optim.Adam([latent], lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        quantizer(latent).penalties["entropy"].backward()
        optimizer.step()
    share = torch.bincount(quantizer(latent).codes.flatten(), minlength=16) / 256
    assert share.min() > 0 and share.max() < 0.35, (
        "those that were sure from the start stay; the rest spreads"
    )
