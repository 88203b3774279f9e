"""Who moves and who looks on, and the addresses of randomness."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from tessera.engine.modes import eval_mode, hash_seed, only, seed
from tessera.engine.task import Frozen


class Pair(nn.Module):
    """Two networks and one that is held: a small GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        self.judge = nn.Sequential(nn.Linear(2, 1), nn.Dropout())
        self.eye = Frozen(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))


def trains(network: nn.Module) -> set[bool]:
    return {parameter.requires_grad for parameter in network.parameters()}


def modes(network: nn.Module) -> set[bool]:
    return {module.training for module in network.modules()}


def test_only_one_network_is_trainable_and_in_train_mode():
    task = Pair()
    with only(task, task.judge):
        assert trains(task.judge) == {True} and modes(task.judge) == {True}
        assert trains(task.model) == {False} and modes(task.model) == {False}
        assert trains(task.eye.network) == {False} and modes(task.eye.network) == {False}
        task.judge(task.model(torch.randn(3, 2))).sum().backward()
    assert all(p.grad is not None for p in task.judge.parameters())
    assert all(p.grad is None for p in task.model.parameters())


@pytest.mark.parametrize("accident", [None, ValueError, KeyboardInterrupt])
def test_afterwards_everything_is_as_it_was(accident):
    task = Pair()
    task.model.eval()
    task.judge[0].bias.requires_grad_(False)
    parameters = [p.requires_grad for p in task.parameters()]
    modules = [m.training for m in task.modules()]
    try:
        with only(task, task.judge):
            if accident is not None:
                raise accident
    except (ValueError, KeyboardInterrupt):
        pass
    assert [p.requires_grad for p in task.parameters()] == parameters
    assert [m.training for m in task.modules()] == modules


def test_a_gradient_passes_through_those_who_look_on():
    """The model learns from the judge's opinion while the judge itself is frozen."""
    task = Pair()
    with only(task, task.model):
        task.judge(task.model(torch.randn(3, 2))).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in task.model[0].parameters())
    assert all(p.grad is None for p in task.judge.parameters())


def test_evaluating_is_eval_mode_without_gradients_and_ends():
    task = Pair()
    task.judge.eval()
    before = [m.training for m in task.modules()]
    with pytest.raises(ValueError), eval_mode(task):
        assert modes(task.model) == modes(task.judge) == modes(task.eye.network) == {False}
        assert not task.model(torch.randn(1, 2)).requires_grad
        raise ValueError
    assert [m.training for m in task.modules()] == before
    assert torch.is_grad_enabled()


def drawn() -> tuple[list[float], list[float], list[float]]:
    return torch.rand(4).tolist(), np.random.rand(4).tolist(), [random.random() for _ in range(4)]


def test_all_global_randomness_is_a_function_of_the_address():
    seed(7, 0, 12)
    first = drawn()
    drawn()
    seed(7, 0, 12)
    assert drawn() == first
    for other in [(7, 0, 13), (7, 1, 12), (8, 0, 12), (0, 7, 12)]:
        seed(*other)
        assert all(a != b for a, b in zip(drawn(), first)), other


def test_neighbouring_addresses_never_meet():
    """Seeds, ranks and steps around zero, a negative part, and addresses of other lengths: each its
    own number."""
    addresses = [
        *itertools.product(range(-1, 4), range(-2, 5), range(1000)),
        *itertools.product(range(100), range(100)),
        *((part,) for part in range(-500, 500)),
    ]
    numbers = {hash_seed(*address) for address in addresses}
    assert len(numbers) == len(addresses)
    assert all(0 <= number < 2**63 for number in numbers)


def test_each_bit_of_an_address_turns_half_the_bits_of_its_number():
    """Otherwise generators of neighbours, which are seeded with these numbers, could be alike."""
    turned = [
        bin(hash_seed(3, 1, step) ^ hash_seed(3, 1, step ^ (1 << bit))).count("1")
        for bit in range(20)
        for step in range(200)
    ]
    assert 29 < sum(turned) / len(turned) < 34  # of 63
    assert min(turned) > 8
