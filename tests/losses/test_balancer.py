"""Tests of the loss balancer on a small network in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.losses.balancer import balance_gradients

EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Problem:
    """A network whose output (B, 4) has three loss terms."""

    def __init__(self, examples: int = 4) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
        self.inputs, self.targets = (
            torch.randn(examples, 3).double(),
            torch.randn(examples, 4).double(),
        )

    def terms(self, output: Tensor, targets: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {
            "absolute": (output - targets).abs().mean(),
            "squared": scale * (output - targets).square().mean(),
            "exponential": (output.exp() - targets.exp()).square().mean(),
        }

    def parameter_grads(self, loss: Tensor) -> list[Tensor]:
        self.network.zero_grad()
        loss.backward()
        return [parameter.grad.clone() for parameter in self.network.parameters()]


WEIGHTS = {"absolute": 1.0, "squared": 2.0, "exponential": 5.0}


def output_grads(terms: dict[str, Tensor], output: Tensor) -> dict[str, Tensor]:
    return {
        name: torch.autograd.grad(term, output, retain_graph=True)[0]
        for name, term in terms.items()
    }


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e-3])
def test_gradients_have_their_share_per_example_and_their_direction(scale: float):
    problem = Problem()
    output = problem.network(problem.inputs)
    terms = problem.terms(output, problem.targets, scale)
    before = output_grads(terms, output)
    after = output_grads(balance_gradients(terms, WEIGHTS, output), output)
    total_B = sum(WEIGHTS[name] * before[name].norm(dim=1) for name in terms)
    for name in terms:
        torch.testing.assert_close(after[name].norm(dim=1), WEIGHTS[name] / 8 * total_B, **EXACT)
        direction = nn.functional.cosine_similarity(after[name], before[name])
        torch.testing.assert_close(direction, torch.ones_like(direction), **EXACT)


def test_terms_with_equal_gradients_are_only_weighted():
    problem = Problem()
    output = problem.network(problem.inputs)
    term = (output - problem.targets).square().mean()
    weights = {"one": 1.0, "other": 3.0}
    balanced = balance_gradients({"one": term, "other": term.clone()}, weights, output)
    plain = torch.autograd.grad(term, output, retain_graph=True)[0]
    for name, weight in weights.items():
        torch.testing.assert_close(
            torch.autograd.grad(balanced[name], output, retain_graph=True)[0],
            weight * plain,
            **EXACT,
        )


def test_network_gets_balanced_gradients_and_values_are_unchanged():
    problem = Problem()
    output = problem.network(problem.inputs)
    terms = problem.terms(output, problem.targets)
    balanced = balance_gradients(terms, WEIGHTS, output)
    assert {name: term.item() for name, term in balanced.items()} == {
        name: term.item() for name, term in terms.items()
    }
    at_output = sum(output_grads(balanced, output).values())
    expected = torch.autograd.grad(
        output, list(problem.network.parameters()), at_output, retain_graph=True
    )
    for grad, expected_grad in zip(problem.parameter_grads(sum(balanced.values())), expected):
        torch.testing.assert_close(grad, expected_grad, **EXACT)
        assert grad.abs().max() > 1e-4


def test_four_micro_batches_equal_one_batch():
    problem = Problem(examples=8)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        output = problem.network(inputs)
        return sum(balance_gradients(problem.terms(output, targets), WEIGHTS, output).values())

    expected = problem.parameter_grads(loss(problem.inputs, problem.targets))
    micros = [loss(*part) for part in zip(problem.inputs.chunk(4), problem.targets.chunk(4))]
    for grad, whole in zip(problem.parameter_grads(torch.stack(micros).mean()), expected):
        torch.testing.assert_close(grad, whole, **EXACT)


def test_terms_independent_of_the_output_are_returned_unchanged():
    problem = Problem()
    output = problem.network(problem.inputs)
    other = {"commitment": problem.network[0].weight.square().mean(), "constant": torch.tensor(2.0)}
    balanced = balance_gradients(problem.terms(output, problem.targets) | other, WEIGHTS, output)
    assert list(balanced) == ["absolute", "squared", "exponential", "commitment", "constant"]
    assert all(balanced[name] is other[name] for name in other)


def test_zero_gradients_stay_zero_and_others_finite():
    problem = Problem()
    output = problem.network(problem.inputs)
    terms = problem.terms(output, problem.targets) | {
        "zero": (output - output.detach()).square().mean()
    }
    after = output_grads(balance_gradients(terms, WEIGHTS | {"zero": 4.0}, output), output)
    assert not after["zero"].any()
    assert all(
        grad.isfinite().all() and (name == "zero" or grad.any()) for name, grad in after.items()
    )


def test_perfect_reconstructions_keep_zero_gradients():
    problem = Problem()
    output = problem.network(problem.inputs)
    targets = torch.cat([output[:1].detach(), problem.targets[1:]])
    terms = {
        "squared": (output - targets).square().mean(),
        "exponential": (output.exp() - targets.exp()).square().mean(),
    }
    after = output_grads(balance_gradients(terms, WEIGHTS, output), output)
    assert all(
        not grad[0].any() and grad[1:].any() and grad.isfinite().all() for grad in after.values()
    )


@pytest.mark.parametrize("tiny", [1e-20, 1e-30])
def test_tiny_gradients_are_scaled_by_at_most_the_maximum(tiny: float):
    output = torch.randn(2, 4, requires_grad=True)
    terms = {"tiny": (tiny * output).sum(), "squared": output.square().mean()}
    weights = {"tiny": 1.0, "squared": 1.0}
    after = output_grads(balance_gradients(terms, weights, output, adaptive_max=100.0), output)
    assert after["tiny"].abs().max() <= 101 * tiny


def test_nan_gradients_make_all_terms_nan():
    """The guard of the engine then skips the step."""
    output = torch.randn(2, 4, requires_grad=True)
    terms = {"nan": (output * float("nan")).sum(), "squared": output.square().mean()}
    after = output_grads(balance_gradients(terms, {"nan": 1.0, "squared": 1.0}, output), output)
    assert all(grad.isnan().all() for grad in after.values())


def test_weight_of_zero_removes_a_term_and_absent_terms_are_ignored():
    problem = Problem()
    output = problem.network(problem.inputs)
    terms = problem.terms(output, problem.targets)
    del terms["exponential"]
    before = output_grads(terms, output)
    after = output_grads(balance_gradients(terms, WEIGHTS | {"absolute": 0.0}, output), output)
    assert not after["absolute"].any()
    torch.testing.assert_close(after["squared"], 2 * before["squared"], **EXACT)


def test_invalid_weights_and_missing_gradients_are_errors():
    problem = Problem()
    output = problem.network(problem.inputs)
    terms = problem.terms(output, problem.targets)
    with pytest.raises(ValueError, match="'exponential'.*None.*absolute, squared, exponential"):
        balance_gradients(terms, {"absolute": 1.0, "squared": 1.0}, output)
    with pytest.raises(ValueError, match="'absolute'.*-1"):
        balance_gradients(terms, WEIGHTS | {"absolute": -1.0}, output)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="In validation, report the terms without balancing"),
    ):
        balance_gradients(terms, WEIGHTS, output)
