"""The losses of a network and of its judge, as parts: what each of them loses, and what keeps the
two in balance.

Logits are whatever a judge gives, (B, ...), high for real. All losses are means over examples and
over an example's logits, so that the mean over micro-batches of equal size is the loss of the whole
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tessera.losses import to_fp32
from tessera.losses.balancer import gradient_at, known, refuse_without_gradients

NOTHING = 1e-5
"""What a layer sees of an original counts as so much at least, where it is less."""


def hinge_discriminator(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Lim & Ye 2017 (arXiv 1705.02894): indifferent to whatever is already told apart by a
    margin."""
    return F.relu(1 - to_fp32(real_logits)).mean() + F.relu(1 + to_fp32(fake_logits)).mean()


def hinge_generator(fake_logits: Tensor) -> Tensor:
    return -to_fp32(fake_logits).mean()


def non_saturating_discriminator(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Goodfellow 2014 (arXiv 1406.2661, eq. 1): the cross-entropy of telling real from fake."""
    return F.softplus(-to_fp32(real_logits)).mean() + F.softplus(to_fp32(fake_logits)).mean()


def non_saturating_generator(fake_logits: Tensor) -> Tensor:
    """The same paper, end of section 3: ascend log D and not descend log(1 - D), which is flat
    where one is losing."""
    return F.softplus(-to_fp32(fake_logits)).mean()


def gradient_penalty(
    discriminator: Callable[[Tensor], Tensor], images: Tensor, centre: float = 0.0
) -> Tensor:
    """How steep the judge is at these images: the mean over examples of (|gradient| - centre)^2.

    With `centre` 0 on real images this is R1 without its gamma / 2, on fake ones R2 (Mescheder
    2018, arXiv 1801.04406, eq. 9 and 10); with `centre` 1 it has the form of Gulrajani 2017 (arXiv
    1704.00028, eq. 3), who take it between real and fake. For a judge with n logits for an image,
    the gradient is that of their sum over the square root of n: for patches that do not overlap
    this makes the zero-centred penalty the mean of the patches' own, so that its weight means the
    same for images of any size.

    In float32 whatever the autocast: squares of gradients leave the range of float16. Where
    gradients are off (in validation) the value is the same and there is nothing to descend.
    """
    descended = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
        images = to_fp32(images.detach()).requires_grad_()
        logits = discriminator(images).reshape(len(images), -1)
        [gradient] = torch.autograd.grad(
            logits.sum() / logits.shape[1] ** 0.5, images, create_graph=descended
        )
        squared_B = gradient.square().flatten(1).sum(1)
        if centre == 0:
            return squared_B.mean()
        # The root has no slope at 0: for a judge that ignores its image the gradient would not be a
        # number.
        return ((squared_B + torch.finfo(squared_B.dtype).tiny).sqrt() - centre).square().mean()


def feature_matching_B(real: Sequence[Tensor], fake: Sequence[Tensor]) -> Tensor:
    """(B,): how differently a judge's layers see two things, relative to what they see of the real
    one, over layers.

    EnCodec (Defossez 2022, arXiv 2210.13438, section 3.4). Nothing is descended through `real`.
    """
    shapes_real, shapes_fake = ([tuple(feature.shape) for feature in side] for side in (real, fake))
    if shapes_real != shapes_fake or not shapes_real:
        raise ValueError(
            f"Features of shapes {shapes_real} and {shapes_fake} cannot be matched: take both from one judge, for things of "
            "one size, of one layer or more."
        )
    return torch.stack(
        [_matched_B(to_fp32(a.detach()), to_fp32(b)) for a, b in zip(real, fake)]
    ).mean(0)


def _matched_B(real_BC: Tensor, fake_BC: Tensor) -> Tensor:
    seen_B = real_BC.abs().flatten(1).mean(1)
    return (real_BC - fake_BC).abs().flatten(1).mean(1) / seen_B.clamp(min=NOTHING)


@dataclass
class BalancedTerms:
    reconstruction: dict[str, Tensor]
    """The terms that were given, by their names, with their values."""
    adversarial: Tensor
    """weight * adversarial."""
    weight: Tensor
    """What the adversarial term was multiplied with; without gradient."""


def balanced_adversarial(
    reconstruction: Mapping[str, Tensor],
    adversarial: Tensor,
    output: Tensor,
    last_weight: Tensor,
    adaptive_max: float = 1e4,
) -> BalancedTerms:
    """Weighs the adversarial term so that it pulls at the last layer as hard as the reconstruction
    does.

    The weight is |d reconstruction / d last_weight| / (|d adversarial / d last_weight| + 1e-6), at
    most `adaptive_max` (Esser 2021, arXiv 2012.09841, eq. 7).

    All terms must be functions of `output`, the network's reconstruction; `last_weight` belongs to
    the layer that made it. Each term's gradient is taken to `output` once, and from there both to
    `last_weight` and, in the terms that come back, to the rest of the network: nobody goes backward
    through the judge or the perceptual network twice. So the terms that came in must not be
    descended as well, and whatever else hangs on the network (a commitment) stays outside.

    The weight is a ratio and not a mean over examples: it belongs to the micro-batch it was taken
    from.
    """
    refuse_without_gradients(output)
    pulls = {name: _pull(term, output, name) for name, term in reconstruction.items()}
    pull_adversarial = _pull(adversarial, output, "the adversarial term")
    pull_reconstruction = torch.stack(list(pulls.values())).sum(0)
    weight = _ratio_at(last_weight, output, pull_reconstruction, pull_adversarial).clamp(
        max=adaptive_max
    )
    return BalancedTerms(
        reconstruction={
            name: known(term, pulls[name], output) for name, term in reconstruction.items()
        },
        adversarial=known(weight * adversarial, weight * pull_adversarial, output),
        weight=weight,
    )


def _pull(term: Tensor, output: Tensor, name: str) -> Tensor:
    """The gradient of a term at the output."""
    gradient = gradient_at(output, term)
    if gradient is None:
        raise ValueError(
            f"{name} does not depend on the output, so it has no part in the balance. Add it to the loss."
        )
    return gradient


def _ratio_at(weight: Tensor, output: Tensor, pull_a: Tensor, pull_b: Tensor) -> Tensor:
    [at_weight_a] = torch.autograd.grad(output, weight, pull_a, retain_graph=True)
    [at_weight_b] = torch.autograd.grad(output, weight, pull_b, retain_graph=True)
    return to_fp32(at_weight_a).norm() / (to_fp32(at_weight_b).norm() + 1e-6)
