"""LFQ and BSQ against the enumeration of all codes and against vector-quantize-pytorch."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import vector_quantize_pytorch as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.nn.quantize import LFQConfig
from tessera.nn.quantize.lfq import split_evenly

both_forms = pytest.mark.parametrize("spherical", [False, True])


def lfq_config(bits: int, **fields) -> LFQConfig:
    return LFQConfig(codebook_size=2**bits, **fields)


@both_forms
@settings(max_examples=25)
@given(bits=st.integers(1, 10), seed=st.integers(0, 2**16))
def test_a_code_consists_of_the_signs(spherical: bool, bits: int, seed: int):
    latent = torch.randn(5, bits, generator=torch.Generator().manual_seed(seed))
    latent[0, 0] = 0.0
    quantized = lfq_config(bits, spherical=spherical).build(bits)(latent)
    bit_value = 1 / math.sqrt(bits) if spherical else 1.0
    for row, code, value in zip(
        latent.tolist(), quantized.codes.tolist(), quantized.latent.tolist()
    ):
        assert code == sum(2**i for i, z in enumerate(row) if z > 0)
        assert value == pytest.approx([bit_value if z > 0 else -bit_value for z in row])


def code_vectors(bits: int, spherical: bool) -> Tensor:
    vectors = torch.tensor(list(product([-1.0, 1.0], repeat=bits)), dtype=torch.float64)
    return vectors / math.sqrt(bits) if spherical else vectors


def entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.log()).sum(-1)


def enumerated_probs(latent: Tensor, config: LFQConfig) -> Tensor:
    """Return the softmax (P, V) of minus the squared distance to every code."""
    rows = latent.reshape(-1, config.bits)
    rows = rows / rows.norm(dim=-1, keepdim=True) if config.spherical else rows
    vectors = code_vectors(config.bits, config.spherical)
    return torch.softmax(-config.inverse_temperature * torch.cdist(rows, vectors).square(), dim=-1)


@both_forms
@pytest.mark.parametrize("bits", [1, 2, 5, 8])
def test_the_entropy_penalty_equals_the_enumeration_of_all_codes(spherical: bool, bits: int):
    config = lfq_config(
        bits, spherical=spherical, diversity=1.7, entropy_weight=0.3, inverse_temperature=0.8
    )
    latent = torch.randn(3, 4, bits, dtype=torch.float64, requires_grad=True)
    penalty = config.build(bits)(latent).penalties["entropy"]
    probs = enumerated_probs(latent, config)
    expected = 0.3 * (entropy(probs).mean() - 1.7 * entropy(probs.mean(0)))
    torch.testing.assert_close(penalty, expected, rtol=1e-10, atol=1e-12)
    ours, theirs = (torch.autograd.grad(value, latent)[0] for value in (penalty, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_entropies_of_groups_are_added_beyond_group_bits():
    config = lfq_config(8, group_bits=3, diversity=1.0, entropy_weight=1.0)
    latent = torch.randn(1, 50, 8, dtype=torch.float64)
    grouped = config.build(8)(latent).penalties["entropy"]
    mean = enumerated_probs(latent, config).mean(0).reshape([2] * 8)
    assert split_evenly(8, 3) == [3, 3, 2]
    marginals = [mean.sum((3, 4, 5, 6, 7)), mean.sum((0, 1, 2, 6, 7)), mean.sum((0, 1, 2, 3, 4, 5))]
    sample_entropy = entropy(enumerated_probs(latent, config)).mean()
    batch_entropy = sum(entropy(marginal.flatten()) for marginal in marginals)
    torch.testing.assert_close(grouped, sample_entropy - batch_entropy)

    exact = lfq_config(8, diversity=1.0, entropy_weight=1.0).build(8)(latent).penalties["entropy"]
    assert grouped < exact, "the sum over groups is an upper bound of the entropy"


@settings(max_examples=50)
@given(bits=st.integers(1, 62), max_bits=st.integers(1, 24))
def test_bits_are_split_into_the_fewest_even_groups(bits: int, max_bits: int):
    groups = split_evenly(bits, max_bits)
    assert sum(groups) == bits and max(groups) <= max_bits
    assert max(groups) - min(groups) <= 1 and len(groups) == math.ceil(bits / max_bits)


@both_forms
def test_codes_entropy_and_commitment_equal_the_reference(spherical: bool):
    """The reference has the first dimension in the highest bit and clamps logarithms at 1e-5, which
    no probability here reaches."""
    theirs = reference.LFQ(
        codebook_size=64, dim=6, spherical=spherical, commitment_loss_weight=1.0
    ).train()
    ours = lfq_config(
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
def test_micro_batches_with_global_stats_equal_one_batch(spherical: bool):
    quantizer = lfq_config(7, spherical=spherical, diversity=2.0).build(5).double()
    latent = torch.randn(8, 6, 5, dtype=torch.float64)

    def penalties_and_gradients(micro_batches: int) -> tuple[Tensor, list[Tensor]]:
        leaf = latent.clone().requires_grad_()
        total = (
            sum(sum(quantizer(part).penalties.values()) for part in leaf.chunk(micro_batches))
            / micro_batches
        )
        return total.detach(), list(
            torch.autograd.grad(total, [leaf, *quantizer.in_proj.parameters()])
        )

    whole, whole_gradients = penalties_and_gradients(1)
    local, local_gradients = penalties_and_gradients(4)
    quantizer.set_global_stats(sum(quantizer.batch_stats(part) for part in latent.chunk(4)))
    shared, shared_gradients = penalties_and_gradients(4)

    torch.testing.assert_close(shared, whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(shared_gradients, whole_gradients, rtol=1e-10, atol=1e-10)
    assert (local - whole).abs() > 1e-4
    assert (local_gradients[0] - whole_gradients[0]).abs().max() > 1e-5


def test_global_stats_give_every_micro_batch_the_entropy_of_the_batch():
    quantizer = (
        lfq_config(4, entropy_weight=1.0, diversity=1.0, commitment_weight=0.0).build(4).double()
    )
    latent = torch.randn(4, 5, 4, dtype=torch.float64)
    batch_entropy = entropy(enumerated_probs(latent, quantizer.config).mean(0))
    quantizer.set_global_stats(sum(quantizer.batch_stats(part) for part in latent.chunk(2)))
    for part in latent.chunk(2):
        sample_entropy = entropy(enumerated_probs(part, quantizer.config)).mean()
        expected = sample_entropy - batch_entropy
        penalty = quantizer(part).penalties["entropy"]
        torch.testing.assert_close(penalty, expected, rtol=1e-10, atol=1e-10)


def test_eval_mode_ignores_the_global_stats_of_a_step():
    quantizer = lfq_config(4).build(4)
    latent, other = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    expected = quantizer.eval()(latent).penalties
    quantizer.set_global_stats(quantizer.batch_stats(other))
    assert quantizer.eval()(latent).penalties == expected
    assert quantizer.train()(latent).penalties["entropy"] != expected["entropy"]


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor that any operation creates."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return output


@pytest.mark.parametrize("group_bits, bound", [(14, 100 * 2**9), (18, 2**18)])
def test_a_large_codebook_needs_no_tensor_of_rows_times_codes(group_bits: int, bound: int):
    quantizer = lfq_config(18, group_bits=group_bits).build(18)
    latent = torch.randn(1, 100, 18, requires_grad=True)
    with LargestTensor() as largest:
        sum(quantizer(latent).penalties.values()).backward()
    assert 0 < largest.numel <= bound < 100 * 2**18


@both_forms
def test_confident_latents_have_finite_gradients(spherical: bool):
    quantizer = lfq_config(14, spherical=spherical, inverse_temperature=100.0).build(14)
    latent = (50 * torch.randn(1, 20, 14)).requires_grad_()
    sum(quantizer(latent).penalties.values()).backward()
    assert latent.grad.isfinite().all()


def test_the_entropy_penalty_spreads_collapsed_latents():
    latent = (torch.ones(1, 256, 4) + 0.5 * torch.randn(1, 256, 4)).requires_grad_()
    quantizer = lfq_config(4, entropy_weight=1.0, commitment_weight=0.0).build(4)
    usage = torch.bincount(quantizer(latent).codes.flatten(), minlength=16) / 256
    assert usage[15] > 0.8 and usage[:15].max() < 0.05
    optimizer = torch.optim.Adam([latent], lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        quantizer(latent).penalties["entropy"].backward()
        optimizer.step()
    usage = torch.bincount(quantizer(latent).codes.flatten(), minlength=16) / 256
    assert usage.min() > 0 and usage.max() < 0.35, (
        "latents that were confident from the start stay, and the others spread"
    )
