"""The grouped form: who writes which part, what "the first k symbols" means, and that fewer still
decode.

What it has in common with all quantizers is held in test_quantize.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tessera.nn.quantize import FSQConfig, LFQConfig, ResidualConfig, VQConfig
from tessera.nn.quantize.grouped import GroupedConfig, GroupedQuantizer

CASCADES = {
    "fsq": ResidualConfig(quantizer=FSQConfig(levels=(5, 4, 3)), levels=3, dropout=0.5),
    "lfq": ResidualConfig(quantizer=LFQConfig(codebook_size=8), levels=3, dropout=0.5),
    "vq": ResidualConfig(quantizer=VQConfig(codebook_size=32, code_dim=3), levels=3, dropout=0.5),
}
every_kind = pytest.mark.parametrize("kind", CASCADES)

ALONE = SimpleNamespace(sum=lambda tensor: tensor, rows=lambda tensor: tensor)
"""The meeting of one process."""


def build(kind: str, *, dim: int = 6) -> GroupedQuantizer:
    """Two groups of three levels; tables have started, on the data of the tests."""
    torch.manual_seed(0)
    quantizer = GroupedConfig(residual=CASCADES[kind], groups=2).build(dim)
    for step in range(3):
        quantizer(torch.randn(16, 64, dim))
        for module in quantizer.modules():
            if hasattr(module, "settle"):
                module.commit(ALONE, step)
    return quantizer.double()


def latents(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@every_kind
def test_each_group_writes_its_part_and_its_symbols_stand_level_by_level(kind: str):
    quantizer, latent = build(kind), latents(3, 5)
    whole = quantizer(latent)
    assert quantizer.levels == 6 and whole.codes.shape == (3, 5, 6)
    all_levels = torch.full((3,), 3)
    for group, (part, share) in enumerate(zip(quantizer.parts, latent.chunk(2, dim=-1))):
        alone = part(share, num_quantizers_B=all_levels)
        assert torch.equal(whole.codes[..., group::2], alone.codes)
        assert torch.equal(whole.latent.chunk(2, dim=-1)[group], alone.latent)


@every_kind
def test_quality_grows_with_every_symbol_of_either_group(kind: str):
    quantizer, latent = build(kind).eval(), latents(16, 64)
    entered = torch.cat(
        [part.bound(share) for part, share in zip(quantizer.parts, latent.chunk(2, dim=-1))], dim=-1
    )
    codes = quantizer(latent).codes
    errors = [
        float((quantizer.decode(codes[..., :kept]) - entered).square().mean())
        for kept in range(1, 7)
    ]
    assert all(finer < 0.8 * coarser for coarser, finer in zip(errors, errors[1:])), errors


@every_kind
@pytest.mark.parametrize("dim", [6, 5])
def test_decoding_the_first_symbols_is_keeping_the_first_symbols(kind: str, dim: int):
    quantizer, latent = build(kind, dim=dim), latents(3, 5)[..., :dim]
    whole = quantizer(latent)
    for kept in range(1, 7):
        short = quantizer(latent, num_quantizers_B=torch.full((3,), kept))
        assert (
            torch.equal(short.codes[..., :kept], whole.codes[..., :kept])
            and not short.codes[..., kept:].any()
        )
        torch.testing.assert_close(
            short.latent, quantizer.decode(whole.codes[..., :kept]), rtol=0, atol=1e-14
        )


@every_kind
def test_each_example_keeps_its_own_number_of_symbols(kind: str):
    quantizer, latent, num_quantizers_B = build(kind), latents(4, 2, 3), torch.tensor([2, 6, 1, 3])
    quantized = quantizer(latent, num_quantizers_B=num_quantizers_B)
    for example, kept in enumerate(num_quantizers_B.tolist()):
        alone = quantizer(
            latent[example : example + 1], num_quantizers_B=num_quantizers_B[example : example + 1]
        )
        assert torch.equal(quantized.codes[example], alone.codes[0])
        assert torch.equal(quantized.latent[example], alone.latent[0])
        assert not quantized.codes[example, ..., kept:].any()
    assert torch.equal(
        quantizer.decode(quantized.codes, num_quantizers_B=num_quantizers_B), quantized.latent
    )
    assert not torch.equal(quantizer.decode(quantized.codes), quantized.latent), (
        "code 0 speaks unless left out"
    )


def test_the_part_of_a_group_that_has_no_symbol_is_nothing():
    latent = build("fsq")(latents(2, 3), num_quantizers_B=torch.tensor([1, 2])).latent
    assert latent[0, :, :3].any() and not latent[0, :, 3:].any() and latent[1, :, 3:].any()


@pytest.mark.parametrize("kind", ["lfq", "vq"])
def test_micro_batches_are_one_batch_whatever_their_examples_keep(kind: str):
    quantizer, latent = build(kind, dim=6), latents(8, 6)
    num_quantizers_B, mask = torch.tensor([1, 1, 1, 2, 6, 6, 3, 4]), torch.rand(8, 6) < 0.7

    def micros(micro_batches: int, tensor: Tensor) -> zip:
        return zip(
            tensor.chunk(micro_batches),
            mask.chunk(micro_batches),
            num_quantizers_B.chunk(micro_batches),
        )

    def gradient(micro_batches: int) -> Tensor:
        seen = latent.clone().requires_grad_()
        for part, real, keep in micros(micro_batches, seen):
            (
                sum(quantizer(part, real, num_quantizers_B=keep).penalties.values()) / micro_batches
            ).backward()
        return seen.grad

    whole = gradient(1)
    assert (gradient(4) - whole).abs().max() > 1e-6, "this test would not notice"
    quantizer.set_global_stats(
        sum(
            quantizer.batch_stats(part, real, num_quantizers_B=keep)
            for part, real, keep in micros(4, latent)
        )
    )
    torch.testing.assert_close(gradient(4), whole, rtol=1e-10, atol=1e-12)
    quantizer.set_global_stats(None)
    assert all(level.expected_S is None for part in quantizer.parts for level in part.cascade)


def test_a_table_of_each_group_and_level_settles_once():
    quantizer = build("vq")
    tables = [module for module in quantizer.modules() if hasattr(module, "settle")]
    assert len(tables) == 6 and all(table.started for table in tables)
    assert not torch.equal(tables[0].table_VW, tables[3].table_VW), (
        "groups learn from different channels"
    )


def test_the_chance_of_an_example_keeps_whole_levels_of_all_groups():
    quantizer = build("fsq")
    num_quantizers_B = quantizer.num_quantizers_to_keep(torch.arange(1000) / 1000)
    assert (
        set(num_quantizers_B.tolist()) == {2, 4, 6} and (num_quantizers_B == 6).float().mean() > 0.6
    )


def test_what_cannot_be_built_kept_or_decoded_is_refused_with_a_letter():
    with pytest.raises(ValueError, match="0 groups.*such as 2"):
        GroupedConfig(groups=0)
    quantizer = build("fsq")
    for keep in ([1, 7], [0, 1], [1, 1, 1]):
        with pytest.raises(ValueError, match="from 1 to 6, all groups"):
            quantizer(latents(2, 3), num_quantizers_B=torch.tensor(keep))
    with pytest.raises(ValueError, match="7 symbols per place.*2 groups of 3 levels have 6"):
        quantizer.decode(torch.zeros(2, 3, 7, dtype=torch.long))
    with pytest.raises(ValueError, match="0 to 59"):
        quantizer.decode(torch.full((2, 3, 6), 60))
