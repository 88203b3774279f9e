"""Tests of the adversarial losses on small networks in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.losses.adversarial import (
    balance_adversarial,
    feature_matching_B,
    gradient_penalty,
    hinge_discriminator,
    hinge_generator,
    non_saturating_discriminator,
    non_saturating_generator,
)

EXACT = {"rtol": 0, "atol": 1e-10}


def build_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 4, 2, 1), nn.SiLU(), nn.Conv2d(6, 1, 3, padding=1)
    ).double()


def random_images(count: int = 4, size: int = 8) -> Tensor:
    return torch.rand(count, 3, size, size, dtype=torch.float64) * 2 - 1


def parameter_grads(network: nn.Module, loss: Tensor) -> list[Tensor]:
    network.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in network.parameters()]


# ---- discriminator and generator losses


def test_hinge_losses_match_values_computed_by_hand():
    real, fake = torch.tensor([2.0, 0.5]), torch.tensor([-3.0, 0.5])

    assert hinge_discriminator(real, fake).item() == pytest.approx((0 + 0.5) / 2 + (0 + 1.5) / 2)
    assert hinge_generator(fake).item() == pytest.approx(1.25)


def test_non_saturating_losses_are_cross_entropies():
    real, fake = torch.randn(2, 5, 1, 3, 3)
    entropy = nn.functional.binary_cross_entropy_with_logits

    expected = entropy(real, torch.ones_like(real)) + entropy(fake, torch.zeros_like(fake))

    torch.testing.assert_close(non_saturating_discriminator(real, fake), expected)
    torch.testing.assert_close(non_saturating_generator(fake), entropy(fake, torch.ones_like(fake)))


@pytest.mark.parametrize("loss", [hinge_discriminator, non_saturating_discriminator])
def test_discriminator_losses_raise_real_and_lower_fake_logits(loss):
    real, fake = torch.zeros(2, 4, 1, 2, 2).unbind()
    real.requires_grad_()
    fake.requires_grad_()

    loss(real, fake).backward()

    assert (real.grad < 0).all()
    assert (fake.grad > 0).all()


@pytest.mark.parametrize("loss", [hinge_generator, non_saturating_generator])
def test_generator_losses_do_not_saturate(loss):
    fake = torch.full((4, 1), -20.0, requires_grad=True)

    loss(fake).backward()

    torch.testing.assert_close(fake.grad, torch.full((4, 1), -0.25))


@pytest.mark.parametrize("loss", [hinge_discriminator, non_saturating_discriminator])
def test_half_precision_logits_are_averaged_in_float32(loss):
    logits = torch.randn(64, 1, 8, 8).bfloat16()

    assert loss(logits, logits).dtype == torch.float32
    torch.testing.assert_close(loss(logits, logits), loss(logits.float(), logits.float()))


# ---- gradient penalty


@pytest.mark.parametrize("center", [0.0, 1.0])
def test_penalty_is_the_mean_over_examples_of_the_squared_deviation(center):
    discriminator, images = build_discriminator(), random_images()
    expected = []
    for image in images:
        grad = torch.autograd.functional.jacobian(
            lambda x: discriminator(x[None]).sum() / 16**0.5, image
        )
        expected.append((grad.norm() - center) ** 2)

    torch.testing.assert_close(
        gradient_penalty(discriminator, images, center), torch.stack(expected).mean(), **EXACT
    )


def test_patches_without_overlap_are_penalized_like_separate_images():
    discriminator = nn.Sequential(
        nn.Conv2d(3, 5, 4, stride=4), nn.SiLU(), nn.Conv2d(5, 1, 1)
    ).double()
    images = random_images(2, size=8)
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(8, 3, 4, 4)

    torch.testing.assert_close(
        gradient_penalty(discriminator, images), gradient_penalty(discriminator, patches), **EXACT
    )


@pytest.mark.parametrize("center", [0.0, 1.0])
def test_gradient_of_the_penalty_matches_finite_differences(center):
    discriminator, images = build_discriminator(), random_images()
    weight = discriminator[0].weight
    grad = parameter_grads(discriminator, gradient_penalty(discriminator, images, center))[0]

    step = 1e-5
    with torch.no_grad():
        weight[2, 1, 0, 3] += step
        above = gradient_penalty(discriminator, images, center)
        weight[2, 1, 0, 3] -= 2 * step
        below = gradient_penalty(discriminator, images, center)

    assert grad[2, 1, 0, 3].item() == pytest.approx(
        ((above - below) / (2 * step)).item(), rel=1e-5, abs=1e-9
    )


def test_four_micro_batches_equal_one_batch_with_penalties():
    discriminator, real, fake = build_discriminator(), random_images(8), random_images(8)

    def loss(real: Tensor, fake: Tensor) -> Tensor:
        return (
            hinge_discriminator(discriminator(real), discriminator(fake))
            + gradient_penalty(discriminator, real)
            + 10 * gradient_penalty(discriminator, fake, center=1.0)
        )

    expected = parameter_grads(discriminator, loss(real, fake))
    micros = [loss(real[i : i + 2], fake[i : i + 2]) for i in range(0, 8, 2)]

    for grad, whole in zip(parameter_grads(discriminator, torch.stack(micros).mean()), expected):
        torch.testing.assert_close(grad, whole, **EXACT)


def test_penalty_under_autocast_equals_the_float32_penalty():
    discriminator, images = build_discriminator().float(), random_images(2).float()
    expected = parameter_grads(discriminator, gradient_penalty(discriminator, images))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert discriminator(images).dtype == torch.bfloat16
        penalty = gradient_penalty(discriminator, images)

    assert penalty.dtype == torch.float32
    for grad, exact in zip(parameter_grads(discriminator, penalty), expected):
        assert torch.equal(grad, exact)


def test_penalty_in_validation_has_its_value_and_no_graph():
    discriminator, images = build_discriminator(), random_images()

    with torch.no_grad():
        penalty = gradient_penalty(discriminator, images)

    assert not penalty.requires_grad
    torch.testing.assert_close(penalty, gradient_penalty(discriminator, images).detach(), **EXACT)


def test_penalty_has_no_gradient_to_the_images():
    network, discriminator = nn.Conv2d(3, 3, 1).double(), build_discriminator()
    output = network(random_images())

    gradient_penalty(discriminator, output).backward()

    assert output.requires_grad
    assert network.weight.grad is None
    assert all(
        parameter.grad is not None
        for name, parameter in discriminator.named_parameters()
        if name != "2.bias"
    )


def test_constant_discriminators_have_finite_gradients():
    discriminator = build_discriminator()
    nn.init.zeros_(discriminator[2].weight)

    penalty = gradient_penalty(discriminator, random_images(), center=1.0)
    discriminator.zero_grad()
    penalty.backward()

    assert penalty.item() == pytest.approx(1)
    assert all(
        parameter.grad.isfinite().all()
        for parameter in discriminator.parameters()
        if parameter.grad is not None
    )


def test_discriminator_may_return_one_logit_per_image():
    weight = torch.randn(3 * 8 * 8, dtype=torch.float64)

    penalty = gradient_penalty(lambda images: images.flatten(1) @ weight, random_images())

    torch.testing.assert_close(penalty, weight.square().sum(), **EXACT)


# ---- feature matching


def test_features_are_compared_relative_to_those_of_the_real_example():
    real = [torch.full((2, 3, 4), 2.0), torch.full((2, 1, 5, 2), -10.0)]
    fake = [real[0] + 1, real[1] - 1]
    torch.testing.assert_close(
        feature_matching_B(real, fake), torch.full((2,), (1 / 2 + 1 / 10) / 2)
    )
    assert torch.equal(feature_matching_B(real, real), torch.zeros(2))


def test_only_fake_features_have_gradients_and_zero_features_are_finite():
    real, fake = torch.zeros(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    feature_matching_B([real], [fake]).sum().backward()
    assert real.grad is None and fake.grad.isfinite().all() and fake.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("real", "fake"),
    [([], []), ([torch.zeros(1, 2)], []), ([torch.zeros(1, 2)], [torch.zeros(1, 3)])],
)
def test_features_of_different_shapes_are_errors(real, fake):
    with pytest.raises(ValueError, match="one discriminator"):
        feature_matching_B(real, fake)


# ---- adaptive weight


class CountBackward(torch.autograd.Function):
    """The identity, with a callback in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, callback: Callable[[], None]) -> Tensor:
        ctx.callback = callback
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.callback()
        return grad, None


class Problem:
    """A network, a discriminator and a perceptual network, with the three terms of VQGAN."""

    def __init__(self) -> None:
        self.network = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1)
        ).double()
        self.discriminator = build_discriminator().requires_grad_(False)
        self.perceptual = nn.Sequential(nn.Conv2d(3, 5, 3, 2), nn.SiLU()).double()
        self.perceptual.requires_grad_(False)
        self.images = random_images()
        self.backward_passes = {"discriminator": 0, "perceptual": 0}

    @property
    def last_weight(self) -> Tensor:
        return self.network[-1].weight

    def counter(self, name: str) -> Callable[[], None]:
        def count() -> None:
            self.backward_passes[name] += 1

        return count

    def forward(self) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        output = self.network(self.images)
        features = self.perceptual(CountBackward.apply(output, self.counter("perceptual")))
        logits = self.discriminator(CountBackward.apply(output, self.counter("discriminator")))
        reconstruction = {
            "pixels": (output - self.images).abs().mean(),
            "perceptual": 0.7 * (features - self.perceptual(self.images)).square().mean(),
        }
        return output, reconstruction, hinge_generator(logits)

    def expected_weight(self) -> Tensor:
        """Compute eq. 7 with two full backward passes."""
        _, reconstruction, adversarial = self.forward()
        [reconstruction_grad] = torch.autograd.grad(
            sum(reconstruction.values()), self.last_weight, retain_graph=True
        )
        [adversarial_grad] = torch.autograd.grad(adversarial, self.last_weight)
        return reconstruction_grad.norm() / (adversarial_grad.norm() + 1e-6)


def test_balancing_equals_the_formula_with_two_backward_passes():
    problem = Problem()
    weight = problem.expected_weight()
    _, reconstruction, adversarial = problem.forward()
    expected = parameter_grads(
        problem.network, (sum(reconstruction.values()) + weight * adversarial) / 4
    )

    output, reconstruction, adversarial = problem.forward()
    balanced = balance_adversarial(
        reconstruction, adversarial, output, problem.last_weight, adaptive_max=1e4
    )
    grads = parameter_grads(
        problem.network, (sum(balanced.reconstruction.values()) + balanced.adversarial) / 4
    )

    torch.testing.assert_close(balanced.weight, weight, **EXACT)
    for grad, expected_grad in zip(grads, expected):
        torch.testing.assert_close(grad, expected_grad, **EXACT)
        assert expected_grad.abs().max() > 1e-4


@pytest.mark.parametrize("name", ["pixels", "perceptual"])
def test_each_balanced_term_keeps_its_value_and_its_gradient(name):
    problem = Problem()
    _, reconstruction, _ = problem.forward()
    expected = parameter_grads(problem.network, reconstruction[name])

    output, reconstruction, adversarial = problem.forward()
    balanced = balance_adversarial(reconstruction, adversarial, output, problem.last_weight)

    assert list(balanced.reconstruction) == ["pixels", "perceptual"]
    assert balanced.reconstruction[name].item() == reconstruction[name].item()
    assert balanced.adversarial.item() == pytest.approx(
        balanced.weight.item() * adversarial.item(), rel=1e-12
    )
    grads = parameter_grads(problem.network, balanced.reconstruction[name])
    for grad, expected_grad in zip(grads, expected):
        torch.testing.assert_close(grad, expected_grad, **EXACT)


def test_discriminator_and_perceptual_network_are_backpropagated_once():
    problem = Problem()
    output, reconstruction, adversarial = problem.forward()

    balanced = balance_adversarial(reconstruction, adversarial, output, problem.last_weight)
    parameter_grads(problem.network, sum(balanced.reconstruction.values()) + balanced.adversarial)

    assert problem.backward_passes == {"discriminator": 1, "perceptual": 1}


def test_weight_is_limited_and_detached():
    problem = Problem()
    output, reconstruction, adversarial = problem.forward()

    balanced = balance_adversarial(
        reconstruction, 1e-9 * adversarial, output, problem.last_weight, adaptive_max=50.0
    )

    assert balanced.weight.item() == 50.0
    assert not balanced.weight.requires_grad
    assert balanced.adversarial.item() == pytest.approx(50e-9 * adversarial.item())


def test_constant_discriminators_give_a_finite_weight_and_no_gradient():
    problem = Problem()
    nn.init.zeros_(problem.discriminator[2].weight)
    output, reconstruction, adversarial = problem.forward()

    balanced = balance_adversarial(reconstruction, adversarial, output, problem.last_weight)

    assert balanced.weight.isfinite()
    grads = parameter_grads(problem.network, balanced.adversarial)
    assert all((grad == 0).all() for grad in grads)


def test_terms_that_share_a_part_of_the_graph_can_be_balanced():
    problem = Problem()
    output = problem.network(problem.images)
    features = problem.perceptual(output)
    terms = {"mean": features.mean().square(), "spread": features.square().mean()}

    balanced = balance_adversarial(
        terms, hinge_generator(problem.discriminator(output)), output, problem.last_weight
    )

    assert {name: term.item() for name, term in balanced.reconstruction.items()} == {
        name: term.item() for name, term in terms.items()
    }


def test_balancing_without_gradients_is_an_error():
    problem = Problem()
    with torch.no_grad():
        output, reconstruction, adversarial = problem.forward()
        with pytest.raises(ValueError, match="In validation, report the terms without balancing"):
            balance_adversarial(reconstruction, adversarial, output, problem.last_weight)


@pytest.mark.parametrize("name", ["constant", "elsewhere"])
def test_terms_independent_of_the_output_are_errors(name):
    problem = Problem()
    output, reconstruction, adversarial = problem.forward()
    terms = {
        "constant": torch.tensor(1.0, dtype=torch.float64),
        "elsewhere": problem.network[0].weight.square().mean(),
    }

    with pytest.raises(ValueError, match=f"{name} does not depend on the output"):
        balance_adversarial(
            {**reconstruction, name: terms[name]}, adversarial, output, problem.last_weight
        )
