"""Tests of the perceptual distance on random features."""

from __future__ import annotations

import pytest
import torch

from tessera.losses.perceptual import perceptual_distance_B


def random_features(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


SHAPES = ((3, 4, 5, 5), (3, 7, 2, 3))


def test_distance_matches_a_loop_over_pixels_and_layers():
    a, b = random_features(*SHAPES), random_features(*SHAPES)
    expected = []
    for example in range(3):
        layers = []
        for one, other in zip(a, b):
            pixels = []
            for y in range(one.shape[2]):
                for x in range(one.shape[3]):
                    u, v = one[example, :, y, x], other[example, :, y, x]
                    pixels.append(((u / u.norm() - v / v.norm()) ** 2).sum())
            layers.append(sum(pixels) / len(pixels))
        expected.append(sum(layers) / len(layers))

    torch.testing.assert_close(
        perceptual_distance_B(a, b), torch.stack(expected), rtol=1e-4, atol=0
    )


def test_distance_is_symmetric_and_zero_for_equal_features():
    a, b = random_features(*SHAPES), random_features(*SHAPES)

    assert torch.equal(perceptual_distance_B(a, b), perceptual_distance_B(b, a))
    assert perceptual_distance_B(a, a).tolist() == [0, 0, 0]
    assert (perceptual_distance_B(a, b) > 0).all()


def test_scale_of_a_layer_does_not_change_its_weight():
    a, b = random_features(*SHAPES), random_features(*SHAPES)

    scaled = perceptual_distance_B([a[0] * 1000, a[1]], [b[0] * 1000, b[1]])

    torch.testing.assert_close(scaled, perceptual_distance_B(a, b), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["equal", "zero"])
def test_gradients_are_finite_for_equal_and_for_zero_features(kind):
    a = torch.randn(2, 4, 3, 3) if kind == "equal" else torch.zeros(2, 4, 3, 3)
    features = a.clone().requires_grad_()

    perceptual_distance_B(
        [features], [a if kind == "equal" else torch.randn(2, 4, 3, 3)]
    ).mean().backward()

    assert features.grad.isfinite().all()
    assert (features.grad == 0).all() == (kind == "equal")


def test_gradient_descent_reduces_the_distance():
    target, features = torch.randn(1, 4, 3, 3), torch.randn(1, 4, 3, 3).requires_grad_()
    before = perceptual_distance_B([features], [target]).item()

    for _ in range(50):
        [grad] = torch.autograd.grad(perceptual_distance_B([features], [target]).sum(), features)
        features = (features - grad).detach().requires_grad_()

    assert perceptual_distance_B([features], [target]).item() < 0.1 * before


def test_half_precision_is_computed_in_float32():
    a = torch.randn(2, 8, 4, 4).bfloat16()
    b = (a + 0.05 * torch.randn(2, 8, 4, 4)).bfloat16()

    distance_B = perceptual_distance_B([a], [b])

    assert distance_B.dtype == torch.float32
    torch.testing.assert_close(distance_B, perceptual_distance_B([a.float()], [b.float()]))


@pytest.mark.parametrize(
    "other", [random_features((3, 4, 5, 5)), random_features((3, 4, 5, 5), (3, 7, 2, 2)), []]
)
def test_different_shapes_are_errors(other):
    with pytest.raises(ValueError, match="take both from one network"):
        perceptual_distance_B(random_features(*SHAPES), other)


def test_missing_features_are_an_error():
    with pytest.raises(ValueError, match="at one layer or more"):
        perceptual_distance_B([], [])
