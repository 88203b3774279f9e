"""Terms in balance: each pulls at the output with the share of the strength that was asked for,
whatever its own scale.

With five terms, weights are guesswork: what counts is not how large a term is but how hard it
pulls, and that changes as the network learns. EnCodec's balancer (Defossez 2022, arXiv 2210.13438,
section 3.4) takes the gradient of each term at the output and gives it a length of its own choice,
so that a weight *is* a share. Two things are otherwise here:

- There is no running average of lengths, so there is nothing to save, to resume and to keep equal
  on several processes; and lengths are taken **per example**. So the balanced gradient is a sum
  over examples as the plain one is, and four micro-batches are one batch exactly, which with one
  length for a whole micro-batch they would not be.
- The common length is not fixed but that of the plain weighted terms together, sum of weight *
  |gradient|. So where all pull equally hard nothing is changed, and an example that is rebuilt well
  (a silent one, say) is left in peace.

B examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tessera.losses import to_fp32


def balanced(
    terms: Mapping[str, Tensor],
    weights: Mapping[str, float],
    output: Tensor,
    adaptive_max: float = 1e4,
) -> dict[str, Tensor]:
    """The terms by their names and with their own values; each example's gradients at `output` (B,
    ...) have the lengths

        weight_i / sum of weights * sum over j of weight_j |gradient_j|

    and the directions that they had; no gradient is made longer than `adaptive_max` times itself. A
    term that does not depend on the output (a commitment) comes back as it came; one whose gradient
    is zero stays without one. Weights of terms that are not there count for nothing.

    From `output` the gradients that are known go on by themselves, so nobody goes backward through
    a judge twice, and the terms that came in must not be descended as well.
    """
    refuse_without_gradients(output)
    pulls = {name: gradient_at(output, term) for name, term in terms.items()}
    balancing = {name: pull for name, pull in pulls.items() if pull is not None}
    share = shares(weights, balancing)
    lengths_B = {name: to_fp32(pull).flatten(1).norm(dim=1) for name, pull in balancing.items()}
    common_B = sum(
        (weights[name] * length_B for name, length_B in lengths_B.items()),
        start=torch.zeros(()).to(output.device),
    )
    told = dict(terms)
    for name, pull in balancing.items():
        least_B = lengths_B[name].clamp_min(torch.finfo(lengths_B[name].dtype).tiny)
        factor_B = (share[name] * common_B / least_B).clamp(max=adaptive_max)
        told[name] = known(
            terms[name], pull * factor_B.to(pull.dtype).view(-1, *[1] * (pull.ndim - 1)), output
        )
    return told


def shares(weights: Mapping[str, float], names: Mapping[str, Tensor]) -> dict[str, float]:
    """What part of the common length each of these terms is to have."""
    for name in names:
        if name not in weights or not 0 <= weights[name] < float("inf"):
            raise ValueError(
                f"The term {name!r} is to be balanced and its weight is {weights.get(name)}: give each of "
                f"{', '.join(names)} a number of 0 or more."
            )
    whole = sum(weights[name] for name in names)
    return {name: weights[name] / whole if whole else 0.0 for name in names}


# ---- gradients that are found once and used twice


def refuse_without_gradients(output: Tensor) -> None:
    if not (torch.is_grad_enabled() and output.requires_grad):
        raise ValueError(
            "Terms are balanced by their gradients, and there are none here: the output has no graph, or gradients are off. "
            "In validation, report the terms as they are, without balancing them."
        )


def gradient_at(output: Tensor, term: Tensor) -> Tensor | None:
    """None where it does not depend on the output. The graph is kept, because terms may share a
    part of it."""
    if not term.requires_grad:
        return None
    [gradient] = torch.autograd.grad(term, output, retain_graph=True, allow_unused=True)
    return gradient


def known(term: Tensor, gradient: Tensor, output: Tensor) -> Tensor:
    """The term again, with nothing behind it but `output`. Undetached, its old graph would be kept
    and walked again."""
    return _Known.apply(output, term.detach(), gradient)


class _Known(torch.autograd.Function):
    """A number whose gradient with respect to `output` has been found already."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor, None, None]:
        [gradient] = ctx.saved_tensors
        return arriving * gradient, None, None
