"""A loss balancer: weights set each term's share of the gradient, whatever the scale of the term.

With five loss terms, plain weights are hard to choose: what counts is not the size of a term but
the norm of its gradient, which changes during training. EnCodec's balancer (Defossez 2022, arXiv
2210.13438, section 3.4) takes the gradient of each term with respect to the output and rescales it,
so that a weight is a share of the total. This one differs in two ways:

- There is no running average of norms, so there is no state to save, to resume and to synchronize
  between processes, and norms are taken **per example**. The balanced gradient is then a sum over
  examples as the plain one is, and four micro-batches are exactly one batch, which is not the case
  with one norm for a whole micro-batch.
- The total norm is not fixed but that of the weighted terms together, sum of weight * |gradient|.
  Where all gradients have the same norm nothing is changed, and an example that is reconstructed
  well (a silent one, for instance) keeps its small gradient.

B examples.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tessera.nn.precision import to_fp32


def balance_gradients(
    terms: Mapping[str, Tensor],
    weights: Mapping[str, float],
    output: Tensor,
    adaptive_max: float = 1e4,
) -> dict[str, Tensor]:
    """Return the terms with their values and with balanced gradients.

    The gradient of term i with respect to an example of `output`, (B, ...), keeps its direction and
    gets the norm

        weight_i / sum of weights * sum over j of weight_j |gradient_j|

    but at most `adaptive_max` times its own. A term that does not depend on the output (a
    commitment loss) is returned unchanged, and a gradient of zero stays zero. Weights of absent
    terms are ignored.

    The gradients at `output` are computed here and reused in the backward pass, so that no
    discriminator is backpropagated through twice. Do not add the original terms to the loss as
    well.
    """
    check_has_grad(output)
    all_grads = {name: grad_at(output, term) for name, term in terms.items()}
    grads = {name: grad for name, grad in all_grads.items() if grad is not None}
    shares = normalize_weights(weights, grads)
    norms_B = {name: to_fp32(grad).flatten(1).norm(dim=1) for name, grad in grads.items()}
    total_B = sum(
        (weights[name] * norm_B for name, norm_B in norms_B.items()),
        start=torch.zeros(()).to(output.device),
    )
    balanced = dict(terms)
    for name, grad in grads.items():
        norm_B = norms_B[name].clamp_min(torch.finfo(norms_B[name].dtype).tiny)
        factor_B = (shares[name] * total_B / norm_B).clamp(max=adaptive_max)
        balanced[name] = attach_grad(
            terms[name], grad * factor_B.to(grad.dtype).view(-1, *[1] * (grad.ndim - 1)), output
        )
    return balanced


def normalize_weights(
    weights: Mapping[str, float], names: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return each term's share of the total norm."""
    for name in names:
        if name not in weights or not 0 <= weights[name] < float("inf"):
            raise ValueError(
                f"The weight of the term {name!r} is {weights.get(name)}, but balancing needs a "
                f"finite number of at least 0 for each of {', '.join(names)}."
            )
    total = sum(weights[name] for name in names)
    return {name: weights[name] / total if total else 0.0 for name in names}


# ---- gradients that are computed once and used twice


def check_has_grad(output: Tensor) -> None:
    if not (torch.is_grad_enabled() and output.requires_grad):
        raise ValueError(
            "Loss terms are balanced by their gradients, but the output has no graph, or gradients "
            "are disabled. In validation, report the terms without balancing them."
        )


def grad_at(output: Tensor, term: Tensor) -> Tensor | None:
    """Return the gradient of a term with respect to the output, or None if it does not depend on
    it. The graph is retained, because terms may share parts of it."""
    if not term.requires_grad:
        return None
    [grad] = torch.autograd.grad(term, output, retain_graph=True, allow_unused=True)
    return grad


def attach_grad(term: Tensor, grad: Tensor, output: Tensor) -> Tensor:
    """Return the value of a term with a given gradient with respect to `output`.

    The term is detached: its old graph would otherwise be retained and traversed again.
    """
    return _PrecomputedGrad.apply(output, term.detach(), grad)


class _PrecomputedGrad(torch.autograd.Function):
    """A value whose gradient with respect to `output` is given."""

    @staticmethod
    def forward(
        ctx: torch.autograd.Function, output: Tensor, value: Tensor, grad: Tensor
    ) -> Tensor:
        ctx.save_for_backward(grad)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.Function, grad_output: Tensor) -> tuple[Tensor, None, None]:
        [grad] = ctx.saved_tensors
        return grad_output * grad, None, None
