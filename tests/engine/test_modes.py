"""Train and eval modes of the networks of a task, and the seeds of global randomness."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from tessera.engine.modes import eval_mode, hash_seed, seed, train_only
from tessera.engine.task import Frozen


class GAN(nn.Module):
    """Two trainable networks and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        self.discriminator = nn.Sequential(nn.Linear(2, 1), nn.Dropout())
        self.perceptual = Frozen(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))


def requires_grad(network: nn.Module) -> set[bool]:
    return {parameter.requires_grad for parameter in network.parameters()}


def training_modes(network: nn.Module) -> set[bool]:
    return {module.training for module in network.modules()}


def test_only_one_network_is_trainable_and_in_train_mode():
    task = GAN()
    with train_only(task, task.discriminator):
        for network, expected in (
            (task.discriminator, {True}),
            (task.model, {False}),
            (task.perceptual.network, {False}),
        ):
            assert requires_grad(network) == expected and training_modes(network) == expected
        task.discriminator(task.model(torch.randn(3, 2))).sum().backward()
    assert all(p.grad is not None for p in task.discriminator.parameters())
    assert all(p.grad is None for p in task.model.parameters())


@pytest.mark.parametrize("exception", [None, ValueError, KeyboardInterrupt])
def test_train_only_restores_all_modes_on_exit(exception):
    task = GAN()
    task.model.eval()
    task.discriminator[0].bias.requires_grad_(False)
    parameters = [p.requires_grad for p in task.parameters()]
    modules = [m.training for m in task.modules()]
    context = train_only(task, task.discriminator)
    for _ in range(2):  # a context is entered once per step
        try:
            with context:
                assert task.discriminator[0].weight.requires_grad
                assert not task.discriminator[0].bias.requires_grad, "it was frozen before"
                if exception is not None:
                    raise exception
        except (ValueError, KeyboardInterrupt):
            pass
        assert [p.requires_grad for p in task.parameters()] == parameters
        assert [m.training for m in task.modules()] == modules


def test_gradients_pass_through_a_network_that_is_not_trained():
    """The model is trained with the loss of a discriminator that is frozen at the time."""
    task = GAN()
    with train_only(task, task.model):
        task.discriminator(task.model(torch.randn(3, 2))).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in task.model[0].parameters())
    assert all(p.grad is None for p in task.discriminator.parameters())


def test_eval_mode_disables_gradients_and_restores_modes_on_exit():
    task = GAN()
    task.discriminator.eval()
    before = [m.training for m in task.modules()]
    with pytest.raises(ValueError), eval_mode(task):
        for network in (task.model, task.discriminator, task.perceptual.network):
            assert training_modes(network) == {False}
        assert not task.model(torch.randn(1, 2)).requires_grad
        raise ValueError
    assert [m.training for m in task.modules()] == before
    assert torch.is_grad_enabled()


def draw_numbers() -> tuple[list[float], list[float], list[float]]:
    return torch.rand(4).tolist(), np.random.rand(4).tolist(), [random.random() for _ in range(4)]


def test_all_global_randomness_is_a_function_of_the_seed_parts():
    seed(7, 0, 12)
    first = draw_numbers()
    draw_numbers()
    seed(7, 0, 12)
    assert draw_numbers() == first
    for other in [(7, 0, 13), (7, 1, 12), (8, 0, 12), (0, 7, 12)]:
        seed(*other)
        assert all(a != b for a, b in zip(draw_numbers(), first)), other


def test_hashes_of_neighbouring_inputs_never_collide():
    """Seeds, ranks and steps around zero, negative parts, and inputs of different lengths."""
    inputs = [
        *itertools.product(range(-1, 4), range(-2, 5), range(1000)),
        *itertools.product(range(100), range(100)),
        *((part,) for part in range(-500, 500)),
    ]
    numbers = {hash_seed(*parts) for parts in inputs}
    assert len(numbers) == len(inputs)
    assert all(0 <= number < 2**63 for number in numbers)


def test_each_input_bit_changes_about_half_of_the_hash():
    """Otherwise generators that are seeded with neighbouring inputs could be correlated."""
    changed = [
        bin(hash_seed(3, 1, step) ^ hash_seed(3, 1, step ^ (1 << bit))).count("1")
        for bit in range(20)
        for step in range(200)
    ]
    assert 29 < sum(changed) / len(changed) < 34  # of 63
    assert min(changed) > 8
