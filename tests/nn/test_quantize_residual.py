"""Residual quantizers: the codes of each level, decoding of the first levels, and quantizer
dropout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessera.nn.quantize import (
    FSQConfig,
    LFQConfig,
    ResidualConfig,
    ResidualQuantizer,
    SimVQConfig,
    VQConfig,
)

FSQ = ResidualConfig(quantizer=FSQConfig(levels=(5, 4, 3)), num_quantizers=4, dropout=0.5)
LFQ = ResidualConfig(quantizer=LFQConfig(codebook_size=8), num_quantizers=4, dropout=0.5)
BSQ = ResidualConfig(
    quantizer=LFQConfig(codebook_size=8, spherical=True), num_quantizers=4, dropout=0.5
)
VQ = ResidualConfig(quantizer=VQConfig(codebook_size=32, code_dim=3), num_quantizers=4, dropout=0.5)
SIMVQ = ResidualConfig(
    quantizer=SimVQConfig(codebook_size=64, code_dim=3), num_quantizers=4, dropout=0.5
)

KINDS = {"fsq": FSQ, "lfq": LFQ, "bsq": BSQ, "vq": VQ, "simvq": SIMVQ}
every_kind = pytest.mark.parametrize("kind", KINDS)


SINGLE_PROCESS = SimpleNamespace(
    all_reduce_sum=lambda tensor: tensor, all_gather_rows=lambda tensor: tensor
)


def build(kind: str, dim: int = 3) -> ResidualQuantizer:
    """Build a quantizer with initialized or trained codebooks."""
    torch.manual_seed(0)
    quantizer = KINDS[kind].build(dim)
    if kind == "simvq":
        train(quantizer)
    for step in range(quantizer.num_quantizers):
        quantizer(torch.randn(16, 64, dim))
        for level in quantizer.quantizers:
            if hasattr(level, "commit"):
                level.commit(SINGLE_PROCESS, step)
    return quantizer.double()


def train(quantizer: ResidualQuantizer) -> None:
    """Train the linear maps of SimVQ."""
    optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.02)
    for _ in range(100):
        optimizer.zero_grad()
        quantizer(torch.randn(4, 64, quantizer.dim)).penalties["codebook"].backward()
        optimizer.step()
    optimizer.zero_grad()


def latents(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@settings(max_examples=20)
@given(seed=st.integers(0, 2**16))
def test_residual_fsq_expands_the_bounded_latent_in_base_n(seed: int):
    """The position of u in (-1, 1) has n bins as its base, most significant digit first."""
    quantizer = FSQ.build(3).double()
    latent = latents(5, seed=seed)
    codes = quantizer(latent).codes
    for row, row_codes in zip(torch.tanh(0.851 * latent).tolist(), codes.tolist()):
        for dimension, (u, bins) in enumerate(zip(row, (5, 4, 3))):
            position = (u + 1) / 2
            radix = (1, 5, 20)[dimension]
            for code in row_codes:
                position *= bins
                assert code // radix % bins == int(position)
                position -= int(position)


@pytest.mark.parametrize("kind", ["lfq", "bsq"])
def test_residual_lfq_halves_the_bit_value_at_each_level(kind: str):
    quantizer = build(kind)
    latent = latents(2, 6)
    remainder = latent / latent.norm(dim=-1, keepdim=True) if kind == "bsq" else latent.clone()
    total = torch.zeros_like(latent)
    codes = quantizer(latent).codes
    for level in range(4):
        bit_value = 0.5**level / (3**0.5 if kind == "bsq" else 1.0)
        bits = remainder > 0
        assert torch.equal(codes[..., level], (bits * torch.tensor([1, 2, 4])).sum(-1))
        quantized = torch.where(bits, bit_value, -bit_value).double()
        remainder, total = remainder - quantized, total + quantized
    torch.testing.assert_close(quantizer(latent).latent, total)


@torch.no_grad()
def squared_error(quantizer: ResidualQuantizer, latent: Tensor, codes: Tensor) -> float:
    return float((quantizer.decode(codes) - quantizer.bound(latent)).square().mean())


@every_kind
def test_quality_grows_with_the_number_of_quantizers(kind: str):
    quantizer = build(kind).eval()
    latent = latents(16, 64)
    codes = quantizer(latent).codes
    errors = [squared_error(quantizer, latent, codes[..., :count]) for count in range(1, 5)]
    assert all(finer < 0.6 * coarser for coarser, finer in zip(errors, errors[1:])), errors


@pytest.mark.parametrize("kind", ["fsq", "lfq", "bsq"])
def test_each_level_of_a_fixed_grid_uses_its_codes_evenly(kind: str):
    """A level whose range did not fit the remainders would use few of its codes."""
    quantizer = build(kind)
    codes = quantizer(latents(16, 256)).codes
    for level in range(quantizer.num_quantizers):
        counts = torch.bincount(codes[..., level].flatten(), minlength=quantizer.vocab_size)
        usage = counts / (16 * 256)
        entropy = (
            -(usage * usage.clamp_min(1e-12).log()).sum() / torch.tensor(quantizer.vocab_size).log()
        )
        assert entropy > 0.98, level


@every_kind
def test_decoding_the_first_codes_equals_quantizing_with_the_first_quantizers(kind: str):
    quantizer = build(kind)
    latent = latents(3, 5)
    whole = quantizer(latent)
    for count in range(1, 5):
        short = quantizer(latent, num_quantizers_B=torch.full((3,), count))
        assert torch.equal(short.codes[..., :count], whole.codes[..., :count])
        assert torch.equal(short.latent, quantizer.decode(whole.codes[..., :count]))


@every_kind
def test_each_example_has_its_own_number_of_quantizers(kind: str):
    quantizer = build(kind)
    latent, num_quantizers_B = latents(4, 2, 3), torch.tensor([2, 4, 1, 3])
    quantized = quantizer(latent, num_quantizers_B=num_quantizers_B)
    for example, count in enumerate(num_quantizers_B.tolist()):
        one = slice(example, example + 1)
        alone = quantizer(latent[one], num_quantizers_B=num_quantizers_B[one])
        assert torch.equal(quantized.codes[example], alone.codes[0])
        assert torch.equal(quantized.latent[example], alone.latent[0])
        assert not quantized.codes[example, ..., count:].any()
    decoded = quantizer.decode(quantized.codes, num_quantizers_B=num_quantizers_B)
    assert torch.equal(decoded, quantized.latent)
    assert not torch.equal(quantizer.decode(quantized.codes), quantized.latent), (
        "without num_quantizers_B, code 0 is decoded"
    )


@every_kind
def test_quantizer_dropout_and_masks_can_be_combined(kind: str):
    quantizer = build(kind)
    latent, num_quantizers_B = latents(4, 6), torch.tensor([2, 4, 1, 3])
    mask = torch.rand(4, 6) < 0.5
    quantized = quantizer(latent, mask, num_quantizers_B=num_quantizers_B)
    unmasked = quantizer(latent, num_quantizers_B=num_quantizers_B)
    assert torch.equal(quantized.latent[mask], unmasked.latent[mask])
    assert torch.equal(quantized.codes[mask], unmasked.codes[mask])
    assert not quantized.latent[~mask].any() and not quantized.codes[~mask].any()


@pytest.mark.parametrize("kind", ["lfq", "bsq", "vq", "simvq"])
def test_micro_batches_with_quantizer_dropout_equal_one_batch(kind: str):
    quantizer = build(kind)
    latent, num_quantizers_B = latents(8, 6), torch.tensor([1, 1, 1, 2, 4, 4, 3, 4])

    def gradient(micro_batches: int) -> Tensor:
        leaf = latent.clone().requires_grad_()
        parts = zip(leaf.chunk(micro_batches), num_quantizers_B.chunk(micro_batches))
        for part, part_num_B in parts:
            quantized = quantizer(part, num_quantizers_B=part_num_B)
            (sum(quantized.penalties.values()) / micro_batches).backward()
        return leaf.grad

    whole = gradient(1)
    if quantizer.needs_global_stats:
        assert (gradient(4) - whole).abs().max() > 1e-6, "the comparison below would prove nothing"
        stats = [
            quantizer.batch_stats(part, num_quantizers_B=part_num_B)
            for part, part_num_B in zip(latent.chunk(4), num_quantizers_B.chunk(4))
        ]
        quantizer.set_global_stats(sum(stats))
    torch.testing.assert_close(gradient(4), whole, rtol=1e-10, atol=1e-12)


def test_penalties_are_averaged_over_levels_with_gradients_from_each():
    quantizer = build("lfq")
    latent = latents(3, 5).requires_grad_()
    remainder, penalties = latent, []
    for level in quantizer.quantizers:
        quantized = level(remainder)
        penalties.append(quantized.penalties)
        remainder = remainder - quantized.latent.detach()
    for name, penalty in quantizer(latent).penalties.items():
        expected = sum(level_penalties[name] for level_penalties in penalties) / 4
        torch.testing.assert_close(penalty, expected)
        ours, theirs = (
            torch.autograd.grad(value, latent, retain_graph=True)[0]
            for value in (penalty, expected)
        )
        torch.testing.assert_close(ours, theirs)


def test_the_entropy_penalty_is_scale_invariant_across_levels():
    rows = latents(1, 50)
    penalties = [
        level(rows * 0.5**n).penalties["entropy"] for n, level in enumerate(build("lfq").quantizers)
    ]
    torch.testing.assert_close(torch.stack(penalties), penalties[0].expand(4))


def test_the_number_of_quantizers_is_uniform_under_dropout():
    quantizer = ResidualConfig(
        quantizer=LFQConfig(codebook_size=8), num_quantizers=4, dropout=0.8
    ).build(3)
    num_quantizers_B = quantizer.sample_num_quantizers(torch.arange(1000) / 1000)
    assert torch.bincount(num_quantizers_B).tolist() == [0, 200, 200, 200, 400], (
        "a fifth of the examples is never dropped, the others are uniform"
    )
    without_dropout = ResidualConfig(quantizer=LFQConfig(codebook_size=8), num_quantizers=4).build(
        3
    )
    assert (without_dropout.sample_num_quantizers(torch.rand(100)) == 4).all()


def test_invalid_numbers_of_quantizers_and_codes_raise_an_error():
    quantizer = build("fsq")
    for counts in ([1, 5], [0, 1], [1, 1, 1]):
        with pytest.raises(ValueError, match="from 1 to 4"):
            quantizer(latents(2, 3), num_quantizers_B=torch.tensor(counts))
    with pytest.raises(ValueError, match="5 codes per position.*4 quantizers"):
        quantizer.decode(torch.zeros(2, 3, 5, dtype=torch.long))
