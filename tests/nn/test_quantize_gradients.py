"""The rotation trick: the value is the code, and the Jacobian a rotation times a ratio of lengths.

The straight-through estimator is tested for every quantizer in test_quantize.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import vector_quantize_pytorch as reference
from torch import Tensor, nn

from tessera.nn.quantize import GradientEstimator, ResidualConfig, SimVQConfig, VQConfig
from tessera.nn.quantize.base import attach_gradients
from tessera.nn.quantize.geometry import rotate

SINGLE_PROCESS = SimpleNamespace(
    all_reduce_sum=lambda tensor: tensor, all_gather_rows=lambda tensor: tensor
)


def random_pairs(count: int, dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    rows, codes = torch.randn(2, count, dim, generator=generator, dtype=torch.float64)
    return rows, codes * 3


def jacobian(row: Tensor, code: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(
        lambda row: attach_gradients(row, code, "rotation"), row
    )


def rotation_matrix(source: Tensor, target: Tensor) -> Tensor:
    """Return the rotation of source to target, by the angle in an orthonormal basis of their
    plane."""
    s, t = source / source.norm(), target / target.norm()
    perpendicular = t - (t @ s) * s
    p = perpendicular / perpendicular.norm()
    cos, sin = t @ s, perpendicular.norm()
    identity = torch.eye(len(s), dtype=s.dtype)
    plane = torch.outer(s, s) + torch.outer(p, p)
    turned = cos * plane + sin * (torch.outer(p, s) - torch.outer(s, p))
    return identity - plane + turned


@pytest.mark.parametrize("dim", [2, 3, 8])
def test_the_jacobian_is_the_rotation_times_the_ratio_of_lengths(dim: int):
    for row, code in zip(*random_pairs(10, dim)):
        matrix = rotation_matrix(row, code) * code.norm() / row.norm()
        torch.testing.assert_close(matrix @ row, code, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(jacobian(row, code), matrix, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", ["straight_through", "rotation"])
def test_the_value_is_exactly_the_code(estimator: GradientEstimator):
    rows, codes = (pair.float() for pair in random_pairs(50, 4))
    assert torch.equal(attach_gradients(rows.requires_grad_(), codes, estimator), codes)


def test_a_code_in_the_direction_of_its_row_scales_the_gradient():
    row = torch.tensor([0.3, -0.4, 1.2], dtype=torch.float64)
    torch.testing.assert_close(jacobian(row, 2 * row), 2 * torch.eye(3, dtype=torch.float64))


def test_rows_without_a_rotation_have_finite_gradients():
    row = torch.tensor([0.3, -0.4, 1.2], dtype=torch.float64)
    zero = torch.zeros_like(row)
    assert torch.equal(jacobian(zero, row), torch.eye(3, dtype=torch.float64))
    assert torch.equal(jacobian(row, zero), torch.zeros(3, 3, dtype=torch.float64))
    torch.testing.assert_close(jacobian(row, -row) @ row, -row)


def test_rotation_keeps_the_angle_between_gradient_and_code():
    row, code = torch.randn(2, 6, dtype=torch.float64)
    gradient = torch.randn(6, dtype=torch.float64)
    rotated = jacobian(row, code).T @ gradient
    torch.testing.assert_close(
        nn.functional.cosine_similarity(rotated, row, dim=0),
        nn.functional.cosine_similarity(gradient, code, dim=0),
    )


def test_rows_that_are_not_finite_stay_so():
    row = torch.tensor([0.1, float("nan"), 1.0])
    assert attach_gradients(row, torch.ones(3), "rotation").isnan().any()


def test_gradients_of_vq_equal_the_reference():
    theirs = reference.VectorQuantize(
        dim=4, codebook_size=16, rotation_trick=True, commitment_weight=0.0, decay=1.0
    )
    ours = VQConfig(
        codebook_size=16, code_dim=4, normalised=False, gradient="rotation", commitment_weight=0.0
    ).build(4)
    theirs._codebook.embed.data.copy_(ours.codebook_VW)
    direction = torch.randn(3, 20, 4)
    results = []
    for forward in (lambda z: theirs(z, freeze_codebook=True)[0], lambda z: ours(z).latent):
        latent = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(2)).requires_grad_()
        values = forward(latent)
        (values * direction).sum().backward()
        results.append((values, latent.grad))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("quantizer", [VQConfig, SimVQConfig])
def test_residual_levels_rotate_by_the_sum_of_their_codes(
    quantizer: type[VQConfig] | type[SimVQConfig],
):
    config = quantizer(codebook_size=16, code_dim=4, gradient="rotation")
    residual = ResidualConfig(quantizer=config, num_quantizers=3).build(4)
    latent, direction = torch.randn(2, 1, 5, 4)
    leaf = latent.clone().requires_grad_()
    quantized = residual(leaf).latent
    (quantized * direction).sum().backward()

    expected = latent.clone().requires_grad_()
    rows = residual.bound(expected)
    (rotate(rows, rows.detach(), quantized.detach()) * direction).sum().backward()
    torch.testing.assert_close(leaf.grad, expected.grad)


@pytest.mark.parametrize("gradient", ["straight_through", "rotation"])
@pytest.mark.parametrize("quantizer", [VQConfig, SimVQConfig])
def test_an_autoencoder_learns_with_either_estimator(
    quantizer: type[VQConfig] | type[SimVQConfig], gradient: GradientEstimator
):
    """The error of 64 codes falls below a sixth of the variance of the data."""
    torch.manual_seed(0)
    data = torch.tanh(torch.randn(512, 2)) @ torch.randn(2, 8)
    config = quantizer(codebook_size=64, code_dim=4, gradient=gradient)
    encoder = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    decoder = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 8))
    model = nn.ModuleList([encoder, config.build(4), decoder])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(200):
        quantized = model[1](encoder(data))
        error = (decoder(quantized.latent) - data).square().mean()
        optimizer.zero_grad()
        (error + sum(quantized.penalties.values())).backward()
        optimizer.step()
        if quantizer is VQConfig:
            model[1].commit(SINGLE_PROCESS, step)
    usage = len(quantized.codes.unique()) / 64
    assert error < data.var() / 6 and usage > 0.5, (float(error / data.var()), usage)
