"""SimVQ against reference computations and vector-quantize-pytorch, and a codebook that moves as a
whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import vector_quantize_pytorch as reference
from torch import Tensor

from tessera.nn.quantize import ResidualConfig, SimVQ, SimVQConfig

SMALL = SimVQConfig(codebook_size=24, code_dim=3, normalised=False)


def build(config: SimVQConfig = SMALL) -> SimVQ:
    """Build a quantizer with a map that is not the identity, in float64."""
    torch.manual_seed(0)
    quantizer = config.build(config.code_dim).double()
    torch.nn.init.normal_(quantizer.table_map.weight)
    torch.nn.init.normal_(quantizer.table_map.bias)
    return quantizer


def latents(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("normalised", [True, False])
def test_a_latent_gets_the_nearest_code_of_the_mapped_table(normalised: bool):
    quantizer = build(replace(SMALL, normalised=normalised))
    latent = 2 * latents(5, 4)
    quantized = quantizer(latent)
    codebook = quantizer.table_VW @ quantizer.table_map.weight.T + quantizer.table_map.bias
    if normalised:
        latent, codebook = (rows / rows.norm(dim=-1, keepdim=True) for rows in (latent, codebook))
    torch.testing.assert_close(quantizer.codebooks()[0], codebook.detach())
    nearest = torch.cdist(latent, codebook.expand(5, -1, -1)).argmin(-1)
    assert torch.equal(quantized.codes, nearest) and len(nearest.unique()) > 5
    torch.testing.assert_close(quantized.latent, codebook[nearest])


def test_the_first_codebook_is_the_table():
    quantizer = SimVQConfig(codebook_size=4096, normalised=False).build(8)
    torch.testing.assert_close(quantizer.codebooks()[0], quantizer.table_VW)
    assert quantizer.table_VW.square().sum(1).mean() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("gradient", ["straight_through", "rotation"])
def test_codes_penalties_and_gradients_equal_the_reference(gradient: str):
    ours = build(replace(SMALL, gradient=gradient))
    theirs = reference.SimVQ(
        dim=3,
        codebook_size=24,
        codebook_transform=torch.nn.Linear(3, 3),
        rotation_trick=gradient == "rotation",
    ).double()
    theirs.frozen_codebook.copy_(ours.table_VW)
    theirs.code_transform.load_state_dict(ours.table_map.state_dict())

    gradients = []
    direction = torch.randn(2, 7, 3, dtype=torch.float64)
    for forward, parameters in (
        (lambda z: split(ours(z)), ours.parameters()),
        (theirs, theirs.parameters()),
    ):
        latent = latents(2, 7).requires_grad_()
        values, codes, penalty = forward(latent)
        loss = (values * direction).sum() + penalty
        gradients.append(
            (values, codes, penalty, *torch.autograd.grad(loss, (latent, *parameters)))
        )
    torch.testing.assert_close(*gradients)


def split(quantized) -> tuple[Tensor, Tensor, Tensor]:
    return quantized.latent, quantized.codes, sum(quantized.penalties.values())


def test_each_penalty_moves_only_its_side():
    quantizer = build()
    latent = latents(2, 5).requires_grad_()
    penalties = quantizer(latent).penalties
    weight = quantizer.table_map.weight
    for name, moved, fixed in (("codebook", weight, latent), ("commitment", latent, weight)):
        gradients = torch.autograd.grad(penalties[name], (moved, fixed), allow_unused=True)
        assert gradients[0].any() and gradients[1] is None
    distance = (latent - quantizer(latent).latent).square().mean()
    torch.testing.assert_close(penalties["codebook"], distance)
    torch.testing.assert_close(penalties["commitment"], 0.25 * distance)


def test_a_residual_level_is_trained_by_its_own_penalties_only():
    residual = ResidualConfig(quantizer=SMALL, num_quantizers=3).build(3).double()
    first = residual.quantizers[0]
    of_all, of_first = (
        torch.autograd.grad(sum(one(latents(2, 5)).penalties.values()), first.table_map.weight)[0]
        for one in (residual, first)
    )
    torch.testing.assert_close(of_all, of_first / 3)


def test_the_table_is_saved_and_not_trained():
    quantizer = build()
    assert set(quantizer.state_dict()) == {"table_VW", "table_map.weight", "table_map.bias"}
    assert {name for name, _ in quantizer.named_parameters()} == {
        "table_map.weight",
        "table_map.bias",
    }


def test_codes_that_are_never_chosen_move_too():
    quantizer = build()
    latent = latents(1, 4)
    chosen = quantizer(latent).codes.unique()
    before = quantizer.codebooks()[0]
    train(quantizer, latent, steps=1)
    moved = (quantizer.codebooks()[0] - before).abs().sum(1) > 1e-4
    assert len(chosen) <= 4 and moved.sum() >= 20


def test_training_brings_the_codebook_to_latents_that_are_far_away():
    """Few codes are nearest to all latents at first; in the end about half of them are in use."""
    torch.manual_seed(0)
    quantizer = replace(SMALL, codebook_size=64).build(3)
    latent = torch.randn(8, 64, 3) * torch.tensor([2.0, 0.5, 0.5]) + torch.tensor([9.0, 0.0, 0.0])
    assert len(quantizer(latent).codes.unique()) < 5
    first = quantizer(latent).penalties["codebook"]
    train(quantizer, latent, steps=300, lr=0.05)
    quantized = quantizer(latent)
    assert len(quantized.codes.unique()) > 30
    assert quantized.penalties["codebook"] < 0.02 * first


def train(quantizer: SimVQ, latent: Tensor, *, steps: int, lr: float = 0.01) -> None:
    optimizer = torch.optim.Adam(quantizer.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        sum(quantizer(latent).penalties.values()).backward()
        optimizer.step()
