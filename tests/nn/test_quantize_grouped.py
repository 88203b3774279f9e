"""Grouped quantizers: the part of each group, the order of codes, and decoding of the first codes.

Guarantees of all quantizers are tested in test_quantize.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tessera.nn.quantize import FSQConfig, LFQConfig, ResidualConfig, VQConfig
from tessera.nn.quantize.grouped import GroupedConfig, GroupedQuantizer

CONFIGS = {
    "fsq": ResidualConfig(quantizer=FSQConfig(levels=(5, 4, 3)), num_quantizers=3, dropout=0.5),
    "lfq": ResidualConfig(quantizer=LFQConfig(codebook_size=8), num_quantizers=3, dropout=0.5),
    "vq": ResidualConfig(
        quantizer=VQConfig(codebook_size=32, code_dim=3), num_quantizers=3, dropout=0.5
    ),
}
every_kind = pytest.mark.parametrize("kind", CONFIGS)

SINGLE_PROCESS = SimpleNamespace(
    all_reduce_sum=lambda tensor: tensor, all_gather_rows=lambda tensor: tensor
)


def build(kind: str, *, dim: int = 6) -> GroupedQuantizer:
    """Build two groups of three quantizers with initialized codebooks."""
    torch.manual_seed(0)
    quantizer = GroupedConfig(residual=CONFIGS[kind], groups=2).build(dim)
    for step in range(3):
        quantizer(torch.randn(16, 64, dim))
        for module in quantizer.modules():
            if hasattr(module, "commit"):
                module.commit(SINGLE_PROCESS, step)
    return quantizer.double()


def latents(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@every_kind
def test_each_group_quantizes_its_part_and_codes_alternate_between_groups(kind: str):
    quantizer, latent = build(kind), latents(3, 5)
    whole = quantizer(latent)
    assert quantizer.num_quantizers == 6 and whole.codes.shape == (3, 5, 6)
    num_quantizers_B = torch.full((3,), 3)
    parts = zip(quantizer.group_quantizers, latent.chunk(2, dim=-1))
    for group, (group_quantizer, part) in enumerate(parts):
        alone = group_quantizer(part, num_quantizers_B=num_quantizers_B)
        assert torch.equal(whole.codes[..., group::2], alone.codes)
        assert torch.equal(whole.latent.chunk(2, dim=-1)[group], alone.latent)


@every_kind
def test_quality_grows_with_every_code_of_either_group(kind: str):
    quantizer, latent = build(kind).eval(), latents(16, 64)
    parts = zip(quantizer.group_quantizers, latent.chunk(2, dim=-1))
    bounded = torch.cat([group.bound(part) for group, part in parts], dim=-1)
    codes = quantizer(latent).codes
    errors = [
        float((quantizer.decode(codes[..., :count]) - bounded).square().mean())
        for count in range(1, 7)
    ]
    assert all(finer < 0.8 * coarser for coarser, finer in zip(errors, errors[1:])), errors


@every_kind
@pytest.mark.parametrize("dim", [6, 5])
def test_decoding_the_first_codes_equals_quantizing_with_the_first_quantizers(kind: str, dim: int):
    quantizer, latent = build(kind, dim=dim), latents(3, 5)[..., :dim]
    whole = quantizer(latent)
    for count in range(1, 7):
        short = quantizer(latent, num_quantizers_B=torch.full((3,), count))
        assert (
            torch.equal(short.codes[..., :count], whole.codes[..., :count])
            and not short.codes[..., count:].any()
        )
        torch.testing.assert_close(
            short.latent, quantizer.decode(whole.codes[..., :count]), rtol=0, atol=1e-14
        )


@every_kind
def test_each_example_has_its_own_number_of_codes(kind: str):
    quantizer, latent, num_quantizers_B = build(kind), latents(4, 2, 3), torch.tensor([2, 6, 1, 3])
    quantized = quantizer(latent, num_quantizers_B=num_quantizers_B)
    for example, count in enumerate(num_quantizers_B.tolist()):
        alone = quantizer(
            latent[example : example + 1], num_quantizers_B=num_quantizers_B[example : example + 1]
        )
        assert torch.equal(quantized.codes[example], alone.codes[0])
        assert torch.equal(quantized.latent[example], alone.latent[0])
        assert not quantized.codes[example, ..., count:].any()
    assert torch.equal(
        quantizer.decode(quantized.codes, num_quantizers_B=num_quantizers_B), quantized.latent
    )
    assert not torch.equal(quantizer.decode(quantized.codes), quantized.latent), (
        "without num_quantizers_B, code 0 is decoded"
    )


def test_the_part_of_a_group_without_codes_is_zero():
    latent = build("fsq")(latents(2, 3), num_quantizers_B=torch.tensor([1, 2])).latent
    assert latent[0, :, :3].any() and not latent[0, :, 3:].any() and latent[1, :, 3:].any()


@pytest.mark.parametrize("kind", ["lfq", "vq"])
def test_micro_batches_with_quantizer_dropout_equal_one_batch(kind: str):
    quantizer, latent = build(kind, dim=6), latents(8, 6)
    num_quantizers_B, mask = torch.tensor([1, 1, 1, 2, 6, 6, 3, 4]), torch.rand(8, 6) < 0.7

    def micros(micro_batches: int, tensor: Tensor) -> zip:
        return zip(
            tensor.chunk(micro_batches),
            mask.chunk(micro_batches),
            num_quantizers_B.chunk(micro_batches),
        )

    def gradient(micro_batches: int) -> Tensor:
        leaf = latent.clone().requires_grad_()
        for part, part_mask, part_num_B in micros(micro_batches, leaf):
            quantized = quantizer(part, part_mask, num_quantizers_B=part_num_B)
            (sum(quantized.penalties.values()) / micro_batches).backward()
        return leaf.grad

    whole = gradient(1)
    assert (gradient(4) - whole).abs().max() > 1e-6, "the comparison below would prove nothing"
    quantizer.set_global_stats(
        sum(
            quantizer.batch_stats(part, part_mask, num_quantizers_B=part_num_B)
            for part, part_mask, part_num_B in micros(4, latent)
        )
    )
    torch.testing.assert_close(gradient(4), whole, rtol=1e-10, atol=1e-12)
    quantizer.set_global_stats(None)
    assert all(
        level.global_stats_S is None
        for group in quantizer.group_quantizers
        for level in group.quantizers
    )


def test_each_group_and_level_commits_its_own_codebook():
    quantizer = build("vq")
    codebooks = [module for module in quantizer.modules() if hasattr(module, "commit")]
    assert len(codebooks) == 6 and all(codebook.initialized for codebook in codebooks)
    assert not torch.equal(codebooks[0].codebook_VW, codebooks[3].codebook_VW), (
        "groups are trained on different channels"
    )


def test_quantizer_dropout_drops_whole_levels_of_all_groups():
    quantizer = build("fsq")
    num_quantizers_B = quantizer.sample_num_quantizers(torch.arange(1000) / 1000)
    assert (
        set(num_quantizers_B.tolist()) == {2, 4, 6} and (num_quantizers_B == 6).float().mean() > 0.6
    )


def test_invalid_groups_counts_and_codes_raise_an_error():
    with pytest.raises(ValueError, match="groups of a grouped quantizer is 0.*use 2"):
        GroupedConfig(groups=0)
    quantizer = build("fsq")
    for counts in ([1, 7], [0, 1], [1, 1, 1]):
        with pytest.raises(ValueError, match="all groups per example, from 1 to 6"):
            quantizer(latents(2, 3), num_quantizers_B=torch.tensor(counts))
    with pytest.raises(ValueError, match="7 codes per position.*2 groups of 3 quantizers have 6"):
        quantizer.decode(torch.zeros(2, 3, 7, dtype=torch.long))
    with pytest.raises(ValueError, match="0 to 59"):
        quantizer.decode(torch.full((2, 3, 6), 60))
