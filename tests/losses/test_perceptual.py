from __future__ import annotations

import pytest
import torch

from tessera.losses.perceptual import perceptual_distance_B


def features(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


SHAPES = ((3, 4, 5, 5), (3, 7, 2, 3))


def test_the_distance_is_that_of_directions_averaged_over_places_and_depths():
    a, b = features(*SHAPES), features(*SHAPES)
    expected = []
    for example in range(3):
        depths = []
        for one, other in zip(a, b):
            places = []
            for y in range(one.shape[2]):
                for x in range(one.shape[3]):
                    u, v = one[example, :, y, x], other[example, :, y, x]
                    places.append(((u / u.norm() - v / v.norm()) ** 2).sum())
            depths.append(sum(places) / len(places))
        expected.append(sum(depths) / len(depths))

    torch.testing.assert_close(
        perceptual_distance_B(a, b), torch.stack(expected), rtol=1e-4, atol=0
    )


def test_the_distance_is_symmetric_and_nothing_at_equality():
    a, b = features(*SHAPES), features(*SHAPES)

    assert torch.equal(perceptual_distance_B(a, b), perceptual_distance_B(b, a))
    assert perceptual_distance_B(a, a).tolist() == [0, 0, 0]
    assert (perceptual_distance_B(a, b) > 0).all()


def test_a_depth_with_large_numbers_does_not_drown_the_others():
    a, b = features(*SHAPES), features(*SHAPES)

    louder = perceptual_distance_B([a[0] * 1000, a[1]], [b[0] * 1000, b[1]])

    torch.testing.assert_close(louder, perceptual_distance_B(a, b), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["equal", "silent"])
def test_gradients_are_finite_where_images_are_equal_and_where_all_channels_are_silent(kind):
    a = torch.randn(2, 4, 3, 3) if kind == "equal" else torch.zeros(2, 4, 3, 3)
    moved = a.clone().requires_grad_()

    perceptual_distance_B(
        [moved], [a if kind == "equal" else torch.randn(2, 4, 3, 3)]
    ).mean().backward()

    assert moved.grad.isfinite().all()
    assert (moved.grad == 0).all() == (kind == "equal")


def test_following_the_gradient_makes_features_alike():
    target, moved = torch.randn(1, 4, 3, 3), torch.randn(1, 4, 3, 3).requires_grad_()
    before = perceptual_distance_B([moved], [target]).item()

    for _ in range(50):
        [gradient] = torch.autograd.grad(perceptual_distance_B([moved], [target]).sum(), moved)
        moved = (moved - gradient).detach().requires_grad_()

    assert perceptual_distance_B([moved], [target]).item() < 0.1 * before


def test_half_precision_features_are_compared_in_float32():
    a = torch.randn(2, 8, 4, 4).bfloat16()
    b = (a + 0.05 * torch.randn(2, 8, 4, 4)).bfloat16()

    distance_B = perceptual_distance_B([a], [b])

    assert distance_B.dtype == torch.float32
    torch.testing.assert_close(distance_B, perceptual_distance_B([a.float()], [b.float()]))


@pytest.mark.parametrize(
    "other", [features((3, 4, 5, 5)), features((3, 4, 5, 5), (3, 7, 2, 2)), []]
)
def test_features_of_other_shapes_are_refused(other):
    with pytest.raises(ValueError, match="take both from one network"):
        perceptual_distance_B(features(*SHAPES), other)


def test_no_features_at_all_are_refused():
    with pytest.raises(ValueError, match="at one depth or more"):
        perceptual_distance_B([], [])
