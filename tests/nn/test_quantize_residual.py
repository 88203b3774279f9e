"""The residual form: what each level writes, what fewer levels mean, and examples that keep only
some."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessera.nn.quantize import FSQConfig, LFQConfig, ResidualConfig, ResidualQuantizer, VQConfig

FSQ = ResidualConfig(quantizer=FSQConfig(levels=(5, 4, 3)), levels=4, dropout=0.5)
LFQ = ResidualConfig(quantizer=LFQConfig(codebook_size=8), levels=4, dropout=0.5)
BSQ = ResidualConfig(quantizer=LFQConfig(codebook_size=8, spherical=True), levels=4, dropout=0.5)
VQ = ResidualConfig(quantizer=VQConfig(codebook_size=32, code_dim=3), levels=4, dropout=0.5)

KINDS = {"fsq": FSQ, "lfq": LFQ, "bsq": BSQ, "vq": VQ}
every_kind = pytest.mark.parametrize("kind", KINDS)


ALONE = SimpleNamespace(sum=lambda tensor: tensor, rows=lambda tensor: tensor)
"""The meeting of one process."""


def build(kind: str, dim: int = 3) -> ResidualQuantizer:
    """Tables have started, on the data of the tests."""
    torch.manual_seed(0)
    quantizer = KINDS[kind].build(dim)
    for step in range(quantizer.levels):
        quantizer(torch.randn(16, 64, dim))
        for level in quantizer.cascade:
            if hasattr(level, "settle"):
                level.commit(ALONE, step)
    return quantizer.double()


def latents(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@settings(max_examples=20)
@given(seed=st.integers(0, 2**16))
def test_residual_fsq_is_the_expansion_of_the_bounded_latent_in_its_bins(seed: int):
    """The position of u in (-1, 1), read off digit by digit: base n, most significant first."""
    quantizer = FSQ.build(3).double()
    latent = latents(5, seed=seed)
    codes = quantizer(latent).codes
    for row, tokens in zip(torch.tanh(0.851 * latent).tolist(), codes.tolist()):
        for dimension, (u, bins) in enumerate(zip(row, (5, 4, 3))):
            position = (u + 1) / 2
            radix = (1, 5, 20)[dimension]
            for token in tokens:
                position *= bins
                assert token // radix % bins == int(position)
                position -= int(position)


@pytest.mark.parametrize("kind", ["lfq", "bsq"])
def test_residual_lfq_halves_its_step_at_each_level(kind: str):
    quantizer = build(kind)
    latent = latents(2, 6)
    rest = latent / latent.norm(dim=-1, keepdim=True) if kind == "bsq" else latent.clone()
    total = torch.zeros_like(latent)
    codes = quantizer(latent).codes
    for number in range(4):
        step = 0.5**number / (3**0.5 if kind == "bsq" else 1.0)
        bits = rest > 0
        assert torch.equal(codes[..., number], (bits * torch.tensor([1, 2, 4])).sum(-1))
        chosen = torch.where(bits, step, -step).double()
        rest, total = rest - chosen, total + chosen
    torch.testing.assert_close(quantizer(latent).latent, total)


def error(quantizer: ResidualQuantizer, latent: Tensor, codes: Tensor) -> float:
    entered = quantizer.bound(latent)
    return float((quantizer.decode(codes) - entered).square().mean())


@every_kind
def test_quality_grows_with_the_number_of_levels(kind: str):
    quantizer = build(kind).eval()
    latent = latents(16, 64)
    codes = quantizer(latent).codes
    errors = [error(quantizer, latent, codes[..., :levels]) for levels in range(1, 5)]
    assert all(finer < 0.6 * coarser for coarser, finer in zip(errors, errors[1:])), errors


@pytest.mark.parametrize("kind", ["fsq", "lfq", "bsq"])
def test_each_level_of_a_fixed_grid_writes_about_as_much_as_it_can(kind: str):
    """A level whose range did not fit what is left over would use few of its symbols."""
    quantizer = build(kind)
    codes = quantizer(latents(16, 256)).codes
    for number in range(quantizer.levels):
        share = torch.bincount(codes[..., number].flatten(), minlength=quantizer.vocab_size) / (
            16 * 256
        )
        entropy = (
            -(share * share.clamp_min(1e-12).log()).sum() / torch.tensor(quantizer.vocab_size).log()
        )
        assert entropy > 0.98, number


@every_kind
def test_decoding_the_first_levels_is_keeping_the_first_levels(kind: str):
    quantizer = build(kind)
    latent = latents(3, 5)
    whole = quantizer(latent)
    for levels in range(1, 5):
        kept = quantizer(latent, num_quantizers_B=torch.full((3,), levels))
        assert torch.equal(kept.codes[..., :levels], whole.codes[..., :levels])
        assert torch.equal(kept.latent, quantizer.decode(whole.codes[..., :levels]))


@every_kind
def test_each_example_keeps_its_own_number_of_levels(kind: str):
    quantizer = build(kind)
    latent, keep = latents(4, 2, 3), torch.tensor([2, 4, 1, 3])
    quantized = quantizer(latent, num_quantizers_B=keep)
    for example, levels in enumerate(keep.tolist()):
        alone = quantizer(
            latent[example : example + 1], num_quantizers_B=keep[example : example + 1]
        )
        assert torch.equal(quantized.codes[example], alone.codes[0])
        assert torch.equal(quantized.latent[example], alone.latent[0])
        assert not quantized.codes[example, ..., levels:].any()
    assert torch.equal(quantizer.decode(quantized.codes, num_quantizers_B=keep), quantized.latent)
    assert not torch.equal(quantizer.decode(quantized.codes), quantized.latent), (
        "code 0 speaks unless left out"
    )


@every_kind
def test_keeping_and_masking_go_together(kind: str):
    quantizer = build(kind)
    latent, keep = latents(4, 6), torch.tensor([2, 4, 1, 3])
    mask = torch.rand(4, 6) < 0.5
    quantized = quantizer(latent, mask, num_quantizers_B=keep)
    unmasked = quantizer(latent, num_quantizers_B=keep)
    assert torch.equal(quantized.latent[mask], unmasked.latent[mask])
    assert torch.equal(quantized.codes[mask], unmasked.codes[mask])
    assert not quantized.latent[~mask].any() and not quantized.codes[~mask].any()


@pytest.mark.parametrize("kind", ["lfq", "bsq", "vq"])
def test_micro_batches_are_one_batch_whatever_their_examples_keep(kind: str):
    quantizer = build(kind)
    latent, keep = latents(8, 6), torch.tensor([1, 1, 1, 2, 4, 4, 3, 4])

    def gradient(micro_batches: int) -> Tensor:
        seen = latent.clone().requires_grad_()
        for part, part_keep in zip(seen.chunk(micro_batches), keep.chunk(micro_batches)):
            (
                sum(quantizer(part, num_quantizers_B=part_keep).penalties.values()) / micro_batches
            ).backward()
        return seen.grad

    whole = gradient(1)
    if quantizer.needs_global_stats:
        assert (gradient(4) - whole).abs().max() > 1e-6, "this test would not notice"
        shares = [
            quantizer.batch_stats(part, num_quantizers_B=part_keep)
            for part, part_keep in zip(latent.chunk(4), keep.chunk(4))
        ]
        quantizer.set_global_stats(sum(shares))
    torch.testing.assert_close(gradient(4), whole, rtol=1e-10, atol=1e-12)


def test_penalties_are_the_mean_over_levels_and_each_level_moves_the_latent():
    quantizer = build("lfq")
    latent = latents(3, 5).requires_grad_()
    rest, each = latent, []
    for level in quantizer.cascade:
        quantized = level(rest)
        each.append(quantized.penalties)
        rest = rest - quantized.latent.detach()
    for name, penalty in quantizer(latent).penalties.items():
        expected = sum(found[name] for found in each) / 4
        torch.testing.assert_close(penalty, expected)
        ours, theirs = (
            torch.autograd.grad(value, latent, retain_graph=True)[0]
            for value in (penalty, expected)
        )
        torch.testing.assert_close(ours, theirs)


def test_every_level_is_equally_sure_of_a_remainder_of_its_own_size():
    rows = latents(1, 50)
    sure = [
        level(rows * 0.5**n).penalties["entropy"] for n, level in enumerate(build("lfq").cascade)
    ]
    torch.testing.assert_close(torch.stack(sure), sure[0].expand(4))


def test_the_chance_of_an_example_says_how_many_levels_it_keeps():
    quantizer = ResidualConfig(quantizer=LFQConfig(codebook_size=8), levels=4, dropout=0.8).build(3)
    keep = quantizer.num_quantizers_to_keep(torch.arange(1000) / 1000)
    assert torch.bincount(keep).tolist() == [0, 200, 200, 200, 400], (
        "a fifth always whole, the rest even"
    )
    never = ResidualConfig(quantizer=LFQConfig(codebook_size=8), levels=4).build(3)
    assert (never.num_quantizers_to_keep(torch.rand(100)) == 4).all()


def test_what_cannot_be_kept_or_decoded_is_refused_with_a_letter():
    quantizer = build("fsq")
    for keep in ([1, 5], [0, 1], [1, 1, 1]):
        with pytest.raises(ValueError, match="from 1 to 4"):
            quantizer(latents(2, 3), num_quantizers_B=torch.tensor(keep))
    with pytest.raises(ValueError, match="5 symbols per place.*4 levels"):
        quantizer.decode(torch.zeros(2, 3, 5, dtype=torch.long))
