"""Adversarial losses: discriminator and generator losses, gradient penalty, feature matching, and
the adaptive weight.

Logits are the outputs of a discriminator, (B, ...), high for real. All losses are means over
examples and over an example's logits, so that the mean over micro-batches of equal size is the loss
of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tessera.losses.balancer import attach_grad, check_has_grad, grad_at
from tessera.nn.precision import full_precision, to_fp32

MIN_FEATURE_SCALE = 1e-5
"""The lower bound of the mean absolute feature by which feature matching is normalized."""


def hinge_discriminator(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Return the hinge loss (Lim & Ye 2017, arXiv 1705.02894), zero beyond a margin of 1."""
    return F.relu(1 - to_fp32(real_logits)).mean() + F.relu(1 + to_fp32(fake_logits)).mean()


def hinge_generator(fake_logits: Tensor) -> Tensor:
    """Return the generator loss of the hinge loss: the negative mean logit."""
    return -to_fp32(fake_logits).mean()


def non_saturating_discriminator(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Return the cross-entropy of real and fake (Goodfellow 2014, arXiv 1406.2661, eq. 1)."""
    return F.softplus(-to_fp32(real_logits)).mean() + F.softplus(to_fp32(fake_logits)).mean()


def non_saturating_generator(fake_logits: Tensor) -> Tensor:
    """Return -log D (same paper, end of section 3).

    log(1 - D) would be flat where the discriminator wins.
    """
    return F.softplus(-to_fp32(fake_logits)).mean()


def gradient_penalty(
    discriminator: Callable[[Tensor], Tensor], images: Tensor, center: float = 0.0
) -> Tensor:
    """Return the mean over examples of (|gradient of the discriminator| - center)^2.

    With a `center` of 0 on real images this is R1 without its gamma / 2, on fake ones R2 (Mescheder
    2018, arXiv 1801.04406, eq. 9 and 10); with a `center` of 1 it has the form of Gulrajani 2017
    (arXiv 1704.00028, eq. 3), where it is taken between real and fake. For a discriminator with n
    logits per image, the gradient is that of their sum over the square root of n: for patches that
    do not overlap, the zero-centered penalty is then the mean of the patches' own, so that its
    weight means the same for images of any size.

    Computed in float32 under autocast too: squared gradients exceed the range of float16. Where
    gradients are disabled (in validation) the value is the same, without a graph.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), full_precision(images.device.type):
        images = to_fp32(images.detach()).requires_grad_()
        logits = discriminator(images).reshape(len(images), -1)
        [grad] = torch.autograd.grad(
            logits.sum() / logits.shape[1] ** 0.5, images, create_graph=create_graph
        )
        squared_B = grad.square().flatten(1).sum(1)
        if center == 0:
            return squared_B.mean()
        # The square root has an infinite derivative at 0: a discriminator that ignores its input
        # would get NaN gradients.
        return ((squared_B + torch.finfo(squared_B.dtype).tiny).sqrt() - center).square().mean()


def feature_matching_B(real: Sequence[Tensor], fake: Sequence[Tensor]) -> Tensor:
    """Return the distance of discriminator features relative to those of the real example, (B,).

    The mean over layers, as in EnCodec (Defossez 2022, arXiv 2210.13438, section 3.4). No gradient
    flows to `real`.
    """
    shapes_real, shapes_fake = ([tuple(feature.shape) for feature in side] for side in (real, fake))
    if shapes_real != shapes_fake or not shapes_real:
        raise ValueError(
            f"Features of shapes {shapes_real} and {shapes_fake} cannot be matched: take both from "
            "one discriminator, for inputs of one size, of one layer or more."
        )
    return torch.stack(
        [_layer_matching_B(to_fp32(a.detach()), to_fp32(b)) for a, b in zip(real, fake)]
    ).mean(0)


def _layer_matching_B(real_BC: Tensor, fake_BC: Tensor) -> Tensor:
    scale_B = real_BC.abs().flatten(1).mean(1)
    return (real_BC - fake_BC).abs().flatten(1).mean(1) / scale_B.clamp(min=MIN_FEATURE_SCALE)


@dataclass
class BalancedTerms:
    reconstruction: dict[str, Tensor]
    """The reconstruction terms by name, with their values."""
    adversarial: Tensor
    """weight * adversarial."""
    weight: Tensor
    """The adaptive weight of the adversarial term, detached."""


def balance_adversarial(
    reconstruction: Mapping[str, Tensor],
    adversarial: Tensor,
    output: Tensor,
    last_weight: Tensor,
    adaptive_max: float = 1e4,
) -> BalancedTerms:
    """Weight the adversarial term so that its gradient is as large as that of the reconstruction.

    The weight is |d reconstruction / d last_weight| / (|d adversarial / d last_weight| + 1e-6), at
    most `adaptive_max` (Esser 2021, arXiv 2012.09841, eq. 7).

    All terms must be functions of `output`, the network's reconstruction; `last_weight` belongs to
    the layer that computed it. The gradient of each term with respect to `output` is computed once
    and continued both to `last_weight` and, in the returned terms, to the rest of the network: no
    discriminator or perceptual network is backpropagated through twice. Do not add the original
    terms to the loss as well, and keep terms of other parts of the network (a commitment loss) out
    of this function.

    The weight is a ratio and not a mean over examples: it is that of the micro-batch from which it
    is computed.
    """
    check_has_grad(output)
    grads = {name: _required_grad(term, output, name) for name, term in reconstruction.items()}
    adversarial_grad = _required_grad(adversarial, output, "the adversarial term")
    reconstruction_grad = torch.stack(list(grads.values())).sum(0)
    weight = _grad_ratio(last_weight, output, reconstruction_grad, adversarial_grad).clamp(
        max=adaptive_max
    )
    return BalancedTerms(
        reconstruction={
            name: attach_grad(term, grads[name], output) for name, term in reconstruction.items()
        },
        adversarial=attach_grad(weight * adversarial, weight * adversarial_grad, output),
        weight=weight,
    )


def _required_grad(term: Tensor, output: Tensor, name: str) -> Tensor:
    grad = grad_at(output, term)
    if grad is None:
        raise ValueError(
            f"{name} does not depend on the output, so it cannot be balanced: add it to the loss "
            "separately."
        )
    return grad


def _grad_ratio(weight: Tensor, output: Tensor, grad_a: Tensor, grad_b: Tensor) -> Tensor:
    """Continue two gradients from the output to a weight, and divide their norms."""
    [weight_grad_a] = torch.autograd.grad(output, weight, grad_a, retain_graph=True)
    [weight_grad_b] = torch.autograd.grad(output, weight, grad_b, retain_graph=True)
    return to_fp32(weight_grad_a).norm() / (to_fp32(weight_grad_b).norm() + 1e-6)
