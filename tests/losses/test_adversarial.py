"""Networks here are small and in float64, so that what is equal on paper is equal to ten digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.losses.adversarial import (
    balanced_adversarial,
    gradient_penalty,
    hinge_discriminator,
    hinge_generator,
    non_saturating_discriminator,
    non_saturating_generator,
)

EXACT = {"rtol": 0, "atol": 1e-10}


def patch_judge() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 4, 2, 1), nn.SiLU(), nn.Conv2d(6, 1, 3, padding=1)
    ).double()


def images(count: int = 4, size: int = 8) -> Tensor:
    return torch.rand(count, 3, size, size, dtype=torch.float64) * 2 - 1


def gradients(network: nn.Module, loss: Tensor) -> list[Tensor]:
    network.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in network.parameters()]


# ------------------------------------------------------------------------------------------- what each of the two loses


def test_the_hinge_losses_by_hand():
    real, fake = torch.tensor([2.0, 0.5]), torch.tensor([-3.0, 0.5])

    assert hinge_discriminator(real, fake).item() == pytest.approx((0 + 0.5) / 2 + (0 + 1.5) / 2)
    assert hinge_generator(fake).item() == pytest.approx(1.25)


def test_the_non_saturating_losses_are_cross_entropies():
    real, fake = torch.randn(2, 5, 1, 3, 3)
    entropy = nn.functional.binary_cross_entropy_with_logits

    expected = entropy(real, torch.ones_like(real)) + entropy(fake, torch.zeros_like(fake))

    torch.testing.assert_close(non_saturating_discriminator(real, fake), expected)
    torch.testing.assert_close(non_saturating_generator(fake), entropy(fake, torch.ones_like(fake)))


@pytest.mark.parametrize("loss", [hinge_discriminator, non_saturating_discriminator])
def test_the_judge_wants_real_high_and_fake_low(loss):
    real, fake = torch.zeros(2, 4, 1, 2, 2).unbind()
    real.requires_grad_()
    fake.requires_grad_()

    loss(real, fake).backward()

    assert (real.grad < 0).all()
    assert (fake.grad > 0).all()


@pytest.mark.parametrize("loss", [hinge_generator, non_saturating_generator])
def test_the_network_still_learns_when_the_judge_is_sure(loss):
    fake = torch.full((4, 1), -20.0, requires_grad=True)

    loss(fake).backward()

    torch.testing.assert_close(fake.grad, torch.full((4, 1), -0.25))


@pytest.mark.parametrize("loss", [hinge_discriminator, non_saturating_discriminator])
def test_logits_in_half_precision_are_averaged_in_full(loss):
    logits = torch.randn(64, 1, 8, 8).bfloat16()

    assert loss(logits, logits).dtype == torch.float32
    torch.testing.assert_close(loss(logits, logits), loss(logits.float(), logits.float()))


# ---------------------------------------------------------------------------------------------------- gradient penalty


@pytest.mark.parametrize("centre", [0.0, 1.0])
def test_the_penalty_is_the_squared_steepness_of_each_example(centre):
    discriminator, batch = patch_judge(), images()
    expected = []
    for image in batch:
        slope = torch.autograd.functional.jacobian(
            lambda x: discriminator(x[None]).sum() / 16**0.5, image
        )
        expected.append((slope.norm() - centre) ** 2)

    torch.testing.assert_close(
        gradient_penalty(discriminator, batch, centre), torch.stack(expected).mean(), **EXACT
    )


def test_patches_that_do_not_overlap_are_penalised_as_if_each_were_an_image():
    discriminator = nn.Sequential(
        nn.Conv2d(3, 5, 4, stride=4), nn.SiLU(), nn.Conv2d(5, 1, 1)
    ).double()
    whole = images(2, size=8)
    patches = whole.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(8, 3, 4, 4)

    torch.testing.assert_close(
        gradient_penalty(discriminator, whole), gradient_penalty(discriminator, patches), **EXACT
    )


@pytest.mark.parametrize("centre", [0.0, 1.0])
def test_descending_the_penalty_flattens_the_judge_as_finite_differences_say(centre):
    discriminator, batch = patch_judge(), images()
    weight = discriminator[0].weight
    gradient = gradients(discriminator, gradient_penalty(discriminator, batch, centre))[0]

    step = 1e-5
    with torch.no_grad():
        weight[2, 1, 0, 3] += step
        above = gradient_penalty(discriminator, batch, centre)
        weight[2, 1, 0, 3] -= 2 * step
        below = gradient_penalty(discriminator, batch, centre)

    assert gradient[2, 1, 0, 3].item() == pytest.approx(
        ((above - below) / (2 * step)).item(), rel=1e-5, abs=1e-9
    )


def test_four_micro_batches_are_one_batch_for_the_judge_penalty_included():
    discriminator, real, fake = patch_judge(), images(8), images(8)

    def loss(real: Tensor, fake: Tensor) -> Tensor:
        told_apart = hinge_discriminator(discriminator(real), discriminator(fake))
        return (
            told_apart
            + gradient_penalty(discriminator, real)
            + 10 * gradient_penalty(discriminator, fake, centre=1.0)
        )

    whole = gradients(discriminator, loss(real, fake))
    micros = [loss(real[i : i + 2], fake[i : i + 2]) for i in range(0, 8, 2)]

    for accumulated, at_once in zip(gradients(discriminator, torch.stack(micros).mean()), whole):
        torch.testing.assert_close(accumulated, at_once, **EXACT)


def test_the_penalty_under_autocast_is_the_float32_penalty():
    discriminator, batch = patch_judge().float(), images(2).float()
    plain = gradients(discriminator, gradient_penalty(discriminator, batch))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert discriminator(batch).dtype == torch.bfloat16
        penalty = gradient_penalty(discriminator, batch)

    assert penalty.dtype == torch.float32
    for under_autocast, expected in zip(gradients(discriminator, penalty), plain):
        assert torch.equal(under_autocast, expected)


def test_the_penalty_has_a_value_in_validation_and_nothing_to_descend():
    discriminator, batch = patch_judge(), images()

    with torch.no_grad():
        penalty = gradient_penalty(discriminator, batch)

    assert not penalty.requires_grad
    torch.testing.assert_close(penalty, gradient_penalty(discriminator, batch).detach(), **EXACT)


def test_the_penalty_leaves_the_images_as_they_were():
    network, discriminator = nn.Conv2d(3, 3, 1).double(), patch_judge()
    output = network(images())

    gradient_penalty(discriminator, output).backward()

    assert output.requires_grad
    assert network.weight.grad is None
    assert all(
        parameter.grad is not None
        for name, parameter in discriminator.named_parameters()
        if name != "2.bias"
    )


def test_a_judge_that_ignores_its_image_gives_finite_gradients():
    discriminator = patch_judge()
    nn.init.zeros_(discriminator[2].weight)

    penalty = gradient_penalty(discriminator, images(), centre=1.0)
    discriminator.zero_grad()
    penalty.backward()

    assert penalty.item() == pytest.approx(1)
    assert all(
        parameter.grad.isfinite().all()
        for parameter in discriminator.parameters()
        if parameter.grad is not None
    )


def test_a_judge_with_one_logit_an_image_needs_no_second_dimension():
    weight = torch.randn(3 * 8 * 8, dtype=torch.float64)

    penalty = gradient_penalty(lambda batch: batch.flatten(1) @ weight, images())

    torch.testing.assert_close(penalty, weight.square().sum(), **EXACT)


# ------------------------------------------------------------------------------------------------------------- balance


class Counted(torch.autograd.Function):
    """The identity, which counts how often somebody goes backward through it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, count: Callable[[], None]) -> Tensor:
        ctx.count = count
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.count()
        return gradient, None


class Scene:
    """A network with a last layer, a judge, an eye, and the three terms that VQGAN has."""

    def __init__(self) -> None:
        self.network = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1)
        ).double()
        self.discriminator = patch_judge().requires_grad_(False)
        self.eye = nn.Sequential(nn.Conv2d(3, 5, 3, 2), nn.SiLU()).double().requires_grad_(False)
        self.images = images()
        self.passes = {"judge": 0, "eye": 0}

    @property
    def last_weight(self) -> Tensor:
        return self.network[-1].weight

    def count(self, name: str) -> Callable[[], None]:
        def counted() -> None:
            self.passes[name] += 1

        return counted

    def evaluate(self) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        output = self.network(self.images)
        seen = self.eye(Counted.apply(output, self.count("eye")))
        reconstruction = {
            "pixels": (output - self.images).abs().mean(),
            "perceptual": 0.7 * (seen - self.eye(self.images)).square().mean(),
        }
        return (
            output,
            reconstruction,
            hinge_generator(self.discriminator(Counted.apply(output, self.count("judge")))),
        )

    def weight(self) -> Tensor:
        """Eq. 7, by two passes through everything."""
        _, reconstruction, adversarial = self.evaluate()
        [pull] = torch.autograd.grad(
            sum(reconstruction.values()), self.last_weight, retain_graph=True
        )
        [push] = torch.autograd.grad(adversarial, self.last_weight)
        return pull.norm() / (push.norm() + 1e-6)


def test_balancing_gives_the_gradients_of_the_formula_with_two_backward_passes():
    scene = Scene()
    weight = scene.weight()
    _, reconstruction, adversarial = scene.evaluate()
    expected = gradients(scene.network, (sum(reconstruction.values()) + weight * adversarial) / 4)

    output, reconstruction, adversarial = scene.evaluate()
    balanced = balanced_adversarial(
        reconstruction, adversarial, output, scene.last_weight, adaptive_max=1e4
    )
    found = gradients(
        scene.network, (sum(balanced.reconstruction.values()) + balanced.adversarial) / 4
    )

    torch.testing.assert_close(balanced.weight, weight, **EXACT)
    for ours, naive in zip(found, expected):
        torch.testing.assert_close(ours, naive, **EXACT)
        assert naive.abs().max() > 1e-4


def test_each_balanced_term_has_its_own_value_and_its_own_gradient():
    scene = Scene()
    for name in ("pixels", "perceptual"):
        _, reconstruction, _ = scene.evaluate()
        expected = gradients(scene.network, reconstruction[name])

        output, reconstruction, adversarial = scene.evaluate()
        balanced = balanced_adversarial(reconstruction, adversarial, output, scene.last_weight)

        assert list(balanced.reconstruction) == ["pixels", "perceptual"]
        assert balanced.reconstruction[name].item() == reconstruction[name].item()
        assert balanced.adversarial.item() == pytest.approx(
            balanced.weight.item() * adversarial.item(), rel=1e-12
        )
        for ours, naive in zip(gradients(scene.network, balanced.reconstruction[name]), expected):
            torch.testing.assert_close(ours, naive, **EXACT)


def test_nobody_goes_backward_through_judge_or_eye_twice():
    scene = Scene()
    output, reconstruction, adversarial = scene.evaluate()

    balanced = balanced_adversarial(reconstruction, adversarial, output, scene.last_weight)
    gradients(scene.network, sum(balanced.reconstruction.values()) + balanced.adversarial)

    assert scene.passes == {"judge": 1, "eye": 1}


def test_the_weight_stops_at_the_ceiling_and_is_not_descended():
    scene = Scene()
    output, reconstruction, adversarial = scene.evaluate()

    balanced = balanced_adversarial(
        reconstruction, 1e-9 * adversarial, output, scene.last_weight, adaptive_max=50.0
    )

    assert balanced.weight.item() == 50.0
    assert not balanced.weight.requires_grad
    assert balanced.adversarial.item() == pytest.approx(50e-9 * adversarial.item())


def test_a_judge_without_opinion_pulls_at_nothing():
    scene = Scene()
    nn.init.zeros_(scene.discriminator[2].weight)
    output, reconstruction, adversarial = scene.evaluate()

    balanced = balanced_adversarial(reconstruction, adversarial, output, scene.last_weight)

    assert balanced.weight.isfinite()
    assert all((gradient == 0).all() for gradient in gradients(scene.network, balanced.adversarial))


def test_terms_that_share_a_part_of_their_way_can_be_balanced():
    scene = Scene()
    output = scene.network(scene.images)
    seen = scene.eye(output)
    terms = {"mean": seen.mean().square(), "spread": seen.square().mean()}

    balanced = balanced_adversarial(
        terms, hinge_generator(scene.discriminator(output)), output, scene.last_weight
    )

    assert {name: term.item() for name, term in balanced.reconstruction.items()} == {
        name: term.item() for name, term in terms.items()
    }


def test_balancing_in_validation_is_refused_with_what_to_do_instead():
    scene = Scene()
    with torch.no_grad():
        output, reconstruction, adversarial = scene.evaluate()
        with pytest.raises(ValueError, match="In validation, report the terms as they are"):
            balanced_adversarial(reconstruction, adversarial, output, scene.last_weight)


@pytest.mark.parametrize("stray", ["constant", "elsewhere"])
def test_a_term_that_does_not_hang_on_the_output_is_refused_by_name(stray):
    scene = Scene()
    output, reconstruction, adversarial = scene.evaluate()
    terms = {
        "constant": torch.tensor(1.0, dtype=torch.float64),
        "elsewhere": scene.network[0].weight.square().mean(),
    }

    with pytest.raises(ValueError, match=f"{stray} does not depend on the output"):
        balanced_adversarial(
            {**reconstruction, stray: terms[stray]}, adversarial, output, scene.last_weight
        )
