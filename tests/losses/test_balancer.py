"""Networks here are small and in float64, so that what is equal on paper is equal to ten digits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.losses.balancer import balanced

EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Scene:
    """A network whose output (B, 4) is compared in three ways, and something that hangs on the
    network alone."""

    def __init__(self, examples: int = 4) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
        self.inputs, self.targets = (
            torch.randn(examples, 3).double(),
            torch.randn(examples, 4).double(),
        )

    def terms(self, output: Tensor, targets: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {
            "near": (output - targets).abs().mean(),
            "square": scale * (output - targets).square().mean(),
            "loud": (output.exp() - targets.exp()).square().mean(),
        }

    def gradients(self, loss: Tensor) -> list[Tensor]:
        self.network.zero_grad()
        loss.backward()
        return [parameter.grad.clone() for parameter in self.network.parameters()]


WEIGHTS = {"near": 1.0, "square": 2.0, "loud": 5.0}


def pulls(terms: dict[str, Tensor], output: Tensor) -> dict[str, Tensor]:
    return {
        name: torch.autograd.grad(term, output, retain_graph=True)[0]
        for name, term in terms.items()
    }


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e-3])
def test_every_term_has_its_share_of_every_example_and_its_own_direction(scale: float):
    scene = Scene()
    output = scene.network(scene.inputs)
    terms = scene.terms(output, scene.targets, scale)
    before, after = pulls(terms, output), pulls(balanced(terms, WEIGHTS, output), output)
    common_B = sum(WEIGHTS[name] * before[name].norm(dim=1) for name in terms)
    for name in terms:
        torch.testing.assert_close(after[name].norm(dim=1), WEIGHTS[name] / 8 * common_B, **EXACT)
        direction = nn.functional.cosine_similarity(after[name], before[name])
        torch.testing.assert_close(direction, torch.ones_like(direction), **EXACT)


def test_terms_that_pull_equally_hard_are_left_as_their_weights_say():
    scene = Scene()
    output = scene.network(scene.inputs)
    term = (output - scene.targets).square().mean()
    told = balanced({"one": term, "other": term.clone()}, {"one": 1.0, "other": 3.0}, output)
    plain = torch.autograd.grad(term, output, retain_graph=True)[0]
    for name, weight in (("one", 1.0), ("other", 3.0)):
        torch.testing.assert_close(
            torch.autograd.grad(told[name], output, retain_graph=True)[0], weight * plain, **EXACT
        )


def test_the_network_gets_the_balanced_gradients_and_the_values_are_told_as_they_are():
    scene = Scene()
    output = scene.network(scene.inputs)
    terms = scene.terms(output, scene.targets)
    told = balanced(terms, WEIGHTS, output)
    assert {name: term.item() for name, term in told.items()} == {
        name: term.item() for name, term in terms.items()
    }
    at_output = sum(pulls(told, output).values())
    expected = torch.autograd.grad(
        output, list(scene.network.parameters()), at_output, retain_graph=True
    )
    for ours, theirs in zip(scene.gradients(sum(told.values())), expected):
        torch.testing.assert_close(ours, theirs, **EXACT)
        assert ours.abs().max() > 1e-4


def test_four_micro_batches_are_one_batch():
    scene = Scene(examples=8)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        output = scene.network(inputs)
        return sum(balanced(scene.terms(output, targets), WEIGHTS, output).values())

    whole = scene.gradients(loss(scene.inputs, scene.targets))
    micros = [loss(*part) for part in zip(scene.inputs.chunk(4), scene.targets.chunk(4))]
    for accumulated, at_once in zip(scene.gradients(torch.stack(micros).mean()), whole):
        torch.testing.assert_close(accumulated, at_once, **EXACT)


def test_a_term_that_does_not_touch_the_output_passes_as_it_came():
    scene = Scene()
    output = scene.network(scene.inputs)
    aside = {"commitment": scene.network[0].weight.square().mean(), "constant": torch.tensor(2.0)}
    told = balanced(scene.terms(output, scene.targets) | aside, WEIGHTS, output)
    assert list(told) == ["near", "square", "loud", "commitment", "constant"]
    assert all(told[name] is aside[name] for name in aside)


def test_a_gradient_of_zero_stays_zero_and_the_others_stay_finite():
    scene = Scene()
    output = scene.network(scene.inputs)
    terms = scene.terms(output, scene.targets) | {
        "satisfied": (output - output.detach()).square().mean()
    }
    after = pulls(balanced(terms, WEIGHTS | {"satisfied": 4.0}, output), output)
    assert not after["satisfied"].any()
    assert all(
        pull.isfinite().all() and (name == "satisfied" or pull.any())
        for name, pull in after.items()
    )


def test_examples_that_are_rebuilt_exactly_are_left_in_peace():
    scene = Scene()
    output = scene.network(scene.inputs)
    targets = torch.cat([output[:1].detach(), scene.targets[1:]])
    terms = {
        "square": (output - targets).square().mean(),
        "loud": (output.exp() - targets.exp()).square().mean(),
    }
    after = pulls(balanced(terms, WEIGHTS, output), output)
    assert all(
        not pull[0].any() and pull[1:].any() and pull.isfinite().all() for pull in after.values()
    )


@pytest.mark.parametrize("faint", [1e-20, 1e-30])
def test_what_is_almost_nothing_is_not_made_vast(faint: float):
    output = torch.randn(2, 4, requires_grad=True)
    terms = {"faint": (faint * output).sum(), "square": output.square().mean()}
    after = pulls(
        balanced(terms, {"faint": 1.0, "square": 1.0}, output, adaptive_max=100.0), output
    )
    assert after["faint"].abs().max() <= 101 * faint


def test_a_gradient_that_is_not_finite_shows():
    output = torch.randn(2, 4, requires_grad=True)
    terms = {"ill": (output * float("nan")).sum(), "square": output.square().mean()}
    after = pulls(balanced(terms, {"ill": 1.0, "square": 1.0}, output), output)
    assert all(pull.isnan().all() for pull in after.values()), (
        "the engine's guard sees it in every term"
    )


def test_a_weight_of_zero_silences_and_absent_terms_count_for_nothing():
    scene = Scene()
    output = scene.network(scene.inputs)
    terms = {
        name: term for name, term in scene.terms(output, scene.targets).items() if name != "loud"
    }
    before = pulls(terms, output)
    after = pulls(balanced(terms, WEIGHTS | {"near": 0.0}, output), output)
    assert not after["near"].any()
    torch.testing.assert_close(after["square"], 2 * before["square"], **EXACT)


def test_what_cannot_be_balanced_is_refused_with_what_to_do():
    scene = Scene()
    output = scene.network(scene.inputs)
    with pytest.raises(ValueError, match="'loud'.*None.*near, square, loud"):
        balanced(scene.terms(output, scene.targets), {"near": 1.0, "square": 1.0}, output)
    with pytest.raises(ValueError, match="'near'.*-1"):
        balanced(scene.terms(output, scene.targets), WEIGHTS | {"near": -1.0}, output)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="In validation, report the terms as they are"),
    ):
        balanced(scene.terms(output, scene.targets), WEIGHTS, output)
