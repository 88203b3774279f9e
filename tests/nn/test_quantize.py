"""Guarantees of all quantizers, for each kind: with and without projections, single, residual and
grouped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.quantize import (
    FSQConfig,
    GroupedConfig,
    LevelQuantizerConfig,
    LFQConfig,
    Quantizer,
    QuantizerConfig,
    ResidualConfig,
    SimVQConfig,
    VQConfig,
)

FSQ = FSQConfig(levels=(5, 4, 2, 3))
LFQ = LFQConfig(codebook_size=16, group_bits=3)
VQ = VQConfig(codebook_size=24, code_dim=4)
SIMVQ = SimVQConfig(codebook_size=24, code_dim=4)


def two_groups(quantizer: LevelQuantizerConfig) -> GroupedConfig:
    return GroupedConfig(residual=ResidualConfig(quantizer=quantizer, num_quantizers=3), groups=2)


CONFIGS: dict[str, QuantizerConfig | GroupedConfig] = {
    "fsq": FSQ,
    "lfq": LFQ,
    "spherical lfq": LFQConfig(codebook_size=16, spherical=True),
    "vq": VQ,
    "unnormalized vq": VQConfig(codebook_size=24, code_dim=4, normalised=False),
    "rotated vq": VQConfig(codebook_size=24, code_dim=4, gradient="rotation"),
    "simvq": SIMVQ,
    "unnormalized simvq": SimVQConfig(codebook_size=24, code_dim=4, normalised=False),
    "residual fsq": ResidualConfig(quantizer=FSQ, num_quantizers=3),
    "residual lfq": ResidualConfig(quantizer=LFQ, num_quantizers=3),
    "residual vq": ResidualConfig(quantizer=VQ, num_quantizers=3),
    "residual simvq": ResidualConfig(quantizer=SIMVQ, num_quantizers=3),
    "grouped residual fsq": two_groups(FSQConfig(levels=(5, 4))),
    "grouped residual lfq": two_groups(LFQConfig(codebook_size=4)),
    "grouped residual vq": two_groups(VQConfig(codebook_size=24, code_dim=2)),
    "grouped residual simvq": two_groups(SimVQConfig(codebook_size=24, code_dim=2)),
}
"""Each has a code dimension of 4."""

KINDS = {name: (config, 4) for name, config in CONFIGS.items()} | {
    f"{name}, projected": (config, 6) for name, config in CONFIGS.items()
}

every_kind = pytest.mark.parametrize("kind", KINDS)
few_cases = settings(max_examples=6)
"""Examples of each property for each kind, about a hundred in total."""


def build(kind: str) -> Quantizer:
    config, dim = KINDS[kind]
    torch.manual_seed(3)
    return config.build(dim)


def latents(
    quantizer: Quantizer, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, quantizer.dim, generator=generator, dtype=torch.float64).to(dtype)


def random_mask(*shape: int, seed: int = 0) -> Tensor:
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask.view(-1)[0], mask.view(-1)[-1] = True, False
    return mask


@every_kind
@few_cases
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_decoding_the_codes_gives_the_latent(kind: str, shape: list[int], seed: int):
    quantizer = build(kind)
    quantized = quantizer(latents(quantizer, *shape, seed=seed))
    decoded = quantizer.decode(quantized.codes)
    assert decoded.shape == (*shape, quantizer.dim) and decoded.dtype == quantized.latent.dtype
    if quantizer.dim == quantizer.code_dim:
        assert torch.equal(decoded, quantized.latent)
    else:
        torch.testing.assert_close(decoded, quantized.latent, rtol=0, atol=1e-6)


@every_kind
@few_cases
@given(seed=st.integers(0, 2**16), scale=st.sampled_from([0.0, 1e-3, 1.0, 1e3, 1e30]))
def test_codes_are_integers_below_the_vocabulary_size(kind: str, seed: int, scale: float):
    quantizer = build(kind)
    codes = quantizer(latents(quantizer, 2, 5, seed=seed) * scale).codes
    assert codes.dtype == torch.int64
    assert codes.shape == ((2, 5, quantizer.num_quantizers) if "residual" in kind else (2, 5))
    assert codes.min() >= 0 and codes.max() < quantizer.vocab_size


@every_kind
@few_cases
@given(
    seed=st.integers(0, 2**16),
    filler=st.sampled_from([0.0, -7.0, 1e30, float("inf"), float("nan")]),
)
def test_masked_positions_have_no_effect(kind: str, seed: int, filler: float):
    quantizer = build(kind)
    mask = random_mask(3, 2, 4, seed=seed)
    latent = latents(quantizer, 3, 2, 4, seed=seed, dtype=torch.float64)
    unpadded = quantizer(latent[mask].unsqueeze(0))
    padded = latent.masked_fill(~mask.unsqueeze(-1), filler).requires_grad_()
    quantized = quantizer(padded, mask)

    assert torch.equal(quantized.codes[mask], unpadded.codes[0])
    torch.testing.assert_close(quantized.latent[mask], unpadded.latent[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(quantized.penalties, unpadded.penalties, rtol=1e-12, atol=1e-12)
    assert not quantized.latent[~mask].any() and not quantized.codes[~mask].any()

    (quantized.latent.square().sum() + sum(quantized.penalties.values())).backward()
    assert padded.grad[mask].isfinite().all() and padded.grad[mask].any()
    assert not padded.grad[~mask].any()
    assert all(parameter.grad.isfinite().all() for parameter in quantizer.parameters())


@every_kind
def test_a_mask_of_only_valid_positions_has_no_effect(kind: str):
    quantizer = build(kind)
    latent = latents(quantizer, 2, 3)
    with_mask, without = quantizer(latent, torch.ones(2, 3, dtype=torch.bool)), quantizer(latent)
    assert torch.equal(with_mask.latent, without.latent) and torch.equal(
        with_mask.codes, without.codes
    )
    assert with_mask.penalties == without.penalties


@every_kind
def test_a_batch_of_only_padding_has_zero_loss(kind: str):
    quantizer = build(kind)
    latent = latents(quantizer, 2, 3).requires_grad_()
    quantized = quantizer(latent, torch.zeros(2, 3, dtype=torch.bool))
    assert not quantized.latent.any() and not quantized.codes.any()
    total = quantized.latent.sum() + sum(quantized.penalties.values())
    assert total == 0
    total.backward()
    assert not latent.grad.any()


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if "rotated" not in kind])
def test_gradients_pass_straight_through_to_the_bounded_latent(kind: str):
    quantizer = build(kind)
    latent = latents(quantizer, 2, 3, dtype=torch.float64)
    direction = torch.randn(2, 3, 4, dtype=torch.float64)

    quantized, bounded = latent.clone().requires_grad_(), latent.clone().requires_grad_()
    quantizer(quantized).latent.mul(direction).sum().backward()
    bounds = {
        "fsq": lambda z: torch.tanh(0.851 * z),
        "sphere": lambda z: z / z.norm(dim=-1, keepdim=True),
        "circles": lambda z: (
            z.unflatten(-1, (2, 2)) / z.unflatten(-1, (2, 2)).norm(dim=-1, keepdim=True)
        ).flatten(-2),
        "unbounded": lambda z: z,
    }
    bound = (
        "fsq"
        if "fsq" in kind
        else "sphere"
        if kind in ("spherical lfq", "vq", "residual vq", "simvq", "residual simvq")
        else "unbounded"
    )
    bound = "circles" if kind in ("grouped residual vq", "grouped residual simvq") else bound
    bounds[bound](bounded).mul(direction).sum().backward()
    torch.testing.assert_close(quantized.grad, bounded.grad, rtol=1e-12, atol=1e-12)


@every_kind
def test_autocast_to_bfloat16_gives_the_same_codes(kind: str):
    quantizer = build(kind)
    latent = latents(quantizer, 2, 30)
    plain = quantizer(latent)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = quantizer(latent)
        decoded = quantizer.decode(cast.codes)
    assert torch.equal(cast.codes, plain.codes)
    assert torch.equal(cast.latent, plain.latent) and torch.equal(
        decoded, quantizer.decode(plain.codes)
    )
    assert cast.penalties == plain.penalties


@every_kind
def test_a_half_precision_latent_is_quantized_in_float32(kind: str):
    quantizer = build(kind)
    half = latents(quantizer, 2, 30).bfloat16()
    quantized, expected = quantizer(half), quantizer(half.float())
    assert torch.equal(quantized.codes, expected.codes)
    assert quantized.latent.dtype == torch.bfloat16 and torch.equal(
        quantized.latent, expected.latent.bfloat16()
    )
    assert all(penalty.dtype == torch.float32 for penalty in quantized.penalties.values())


@every_kind
def test_a_model_cast_to_half_precision_quantizes(kind: str):
    quantizer = build(kind).bfloat16().eval()
    quantized = quantizer(latents(quantizer, 2, 3, dtype=torch.bfloat16))
    decoded = quantizer.decode(quantized.codes)
    assert quantized.latent.dtype == decoded.dtype == torch.bfloat16
    torch.testing.assert_close(decoded, quantized.latent, rtol=0.02, atol=0.02)


@every_kind
def test_float64_stays_float64(kind: str):
    quantizer = build(kind).double()
    quantized = quantizer(latents(quantizer, 2, 3, dtype=torch.float64))
    assert quantized.latent.dtype == torch.float64
    assert all(penalty.dtype == torch.float64 for penalty in quantized.penalties.values())
    torch.testing.assert_close(
        quantizer.decode(quantized.codes), quantized.latent, rtol=0, atol=1e-14
    )


@every_kind
@pytest.mark.parametrize("training", [True, False])
def test_forward_and_batch_stats_do_not_change_the_state_dict(kind: str, training: bool):
    quantizer = build(kind).train(training)
    before = {name: value.clone() for name, value in quantizer.state_dict().items()}
    quantizer.batch_stats(latents(quantizer, 2, 3))
    quantizer(latents(quantizer, 2, 3))
    after = quantizer.state_dict()
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )


@every_kind
def test_a_latent_of_nan_gives_nan_and_valid_codes(kind: str):
    quantizer = build(kind)
    latent = latents(quantizer, 2, 3)
    latent[1, 2] = float("nan")
    quantized = quantizer(latent)
    assert quantized.latent[1, 2].isnan().all()
    assert quantized.codes.min() >= 0 and quantized.codes.max() < quantizer.vocab_size


@every_kind
def test_projections_exist_only_where_the_dimensions_differ(kind: str):
    quantizer = build(kind)
    names = [name for name, module in quantizer.named_modules() if isinstance(module, nn.Linear)]
    projections = [name for name in names if not name.endswith("table_map")]
    assert projections == (["in_proj", "out_proj"] if "projected" in kind else [])
    assert "projected" in kind or "simvq" in kind or not list(quantizer.parameters())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "projected" in kind])
def test_every_parameter_gets_a_gradient(kind: str):
    quantizer = build(kind)
    quantized = quantizer(latents(quantizer, 2, 3))
    (quantized.latent.square().sum() + sum(quantized.penalties.values())).backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in quantizer.parameters()
    )


@pytest.mark.parametrize(
    "kind",
    [
        "lfq",
        "vq",
        "residual lfq",
        "simvq",
        "residual vq",
        "residual simvq",
        "spherical lfq, projected",
        "grouped residual lfq, projected",
    ],
)
def test_global_stats_make_unevenly_padded_micro_batches_equal_one_batch(kind: str):
    quantizer = build(kind).double()
    latent = latents(quantizer, 8, 5, dtype=torch.float64)
    mask = random_mask(8, 5)
    whole = gradient_of_penalties(quantizer, latent, mask, micro_batches=1)
    quantizer.set_global_stats(
        sum(quantizer.batch_stats(*micro) for micro in zip(latent.chunk(4), mask.chunk(4)))
    )
    parts = gradient_of_penalties(quantizer, latent, mask, micro_batches=4)
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)

    quantizer.set_global_stats(None)
    local = gradient_of_penalties(quantizer, latent, mask, micro_batches=4)
    assert (local - whole).abs().max() > 1e-6, "the comparison above would prove nothing"


def gradient_of_penalties(
    quantizer: Quantizer, latent: Tensor, mask: Tensor, *, micro_batches: int
) -> Tensor:
    """Accumulate gradients as the engine does, of the mean of the micro-batches' losses."""
    latent = latent.clone().requires_grad_()
    for part, part_mask in zip(latent.chunk(micro_batches), mask.chunk(micro_batches)):
        (sum(quantizer(part, part_mask).penalties.values()) / micro_batches).backward()
    return latent.grad


def test_only_an_entropy_penalty_needs_global_stats():
    needs = {name: config.build(4).needs_global_stats for name, config in CONFIGS.items()}
    assert {name for name, needed in needs.items() if needed} == {
        "lfq",
        "spherical lfq",
        "residual lfq",
        "grouped residual lfq",
    }
    assert not LFQConfig(codebook_size=16, entropy_weight=0.0).build(4).needs_global_stats


def test_fsq_has_no_penalty_and_the_others_have_named_ones():
    names = {
        name: set(config.build(4)(torch.randn(1, 2, 4)).penalties)
        for name, config in CONFIGS.items()
    }
    assert names["fsq"] == names["residual fsq"] == set()
    assert names["lfq"] == names["residual lfq"] == {"entropy", "commitment"}
    assert names["vq"] == names["residual vq"] == {"commitment"}
    assert names["simvq"] == names["residual simvq"] == {"codebook", "commitment"}
    unweighted = LFQConfig(codebook_size=16, entropy_weight=0.0, commitment_weight=0.0).build(4)
    assert unweighted(torch.randn(1, 2, 4)).penalties == {}


@pytest.mark.parametrize(
    "build_config, words",
    [
        (lambda: FSQConfig(levels=(8, 1)), ["(8, 1)", "two or more"]),
        (lambda: FSQConfig(levels=(8, 2.5)), ["(8, 2.5)", "whole number"]),
        (lambda: FSQConfig(levels=()), ["()"]),
        (lambda: FSQConfig(levels=(2**31, 2**31, 2)), ["64 bit"]),
        (lambda: LFQConfig(codebook_size=1000), ["1000", "512 or 1024"]),
        (lambda: LFQConfig(codebook_size=16385), ["16384 or 32768"]),
        (lambda: LFQConfig(codebook_size=1), ["power of two", "2, 4, 8"]),
        (lambda: LFQConfig(codebook_size=2**63), [str(2**62)]),
        (lambda: LFQConfig(group_bits=0), ["group_bits"]),
        (lambda: LFQConfig(inverse_temperature=0.0), ["inverse_temperature", "above 0"]),
        (lambda: VQConfig(codebook_size=1), ["codebook_size is 1,", "2 or more"]),
        (lambda: VQConfig(code_dim=1), ["sphere", "2 or more"]),
        (lambda: VQConfig(code_dim=0, normalised=False), ["1 or more"]),
        (lambda: VQConfig(decay=1.0), ["decay", "0.99"]),
        (lambda: VQConfig(expire_below=1.5), ["expire_below", "0.1"]),
        (lambda: SimVQConfig(codebook_size=1), ["codebook_size is 1,", "2 or more"]),
        (lambda: SimVQConfig(code_dim=1), ["sphere", "2 or more"]),
        (lambda: SimVQConfig(code_dim=0, normalised=False), ["1 or more"]),
        (lambda: SimVQConfig(codebook_weight=0.0), ["codebook_weight", "above 0"]),
        (lambda: ResidualConfig(num_quantizers=0), ["is 0,", "1 or more"]),
        (lambda: ResidualConfig(dropout=1.5), ["probability"]),
        (
            lambda: ResidualConfig(quantizer=FSQConfig(levels=(8, 5)), num_quantizers=9).build(2),
            ["8 quantizers or fewer"],
        ),
        (
            lambda: ResidualConfig(quantizer=LFQConfig(codebook_size=4), num_quantizers=25).build(
                2
            ),
            ["24 quantizers or fewer"],
        ),
    ],
)
def test_an_invalid_setting_raises_an_error(build_config, words: list[str]):
    with pytest.raises(ValueError) as error:
        build_config()
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("kind", ["fsq", "residual vq"])
def test_wrong_shapes_masks_and_codes_raise_an_error(kind: str):
    quantizer = build(kind)
    with pytest.raises(ValueError, match=r"\(2, 3, 5\).*dim=4.*dim=5"):
        quantizer(torch.randn(2, 3, 5))
    with pytest.raises(ValueError, match=r"bool mask of shape \(2, 3\)"):
        quantizer(torch.randn(2, 3, 4), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"bool mask of shape \(2, 3\)"):
        quantizer(torch.randn(2, 3, 4), torch.ones(2, dtype=torch.bool))
    for code in (-1, quantizer.vocab_size):
        with pytest.raises(ValueError, match=f"{code}.*0 to {quantizer.vocab_size - 1}"):
            quantizer.decode(torch.full((1, 2, 3), code))


def test_full_precision_disables_autocast_and_to_fp32_keeps_float64():
    a = torch.randn(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        with full_precision("cpu"):
            assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16
    with full_precision("meta"):
        assert (
            to_fp32(a.bfloat16()).dtype
            == to_fp32(a.half()).dtype
            == to_fp32(a).dtype
            == torch.float32
        )
    assert to_fp32(a.double()).dtype == torch.float64
