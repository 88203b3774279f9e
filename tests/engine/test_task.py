"""The contract of a task: networks that are held and not trained, and parameters that belong to
exactly one update."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, Frozen, Loss, Objective, Task, Update, check_ownership


class Looks(nn.Module):
    """A model, and an eye that it is looked at with."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(3, 3)
        self.eye = Frozen(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout()))


def test_a_frozen_network_is_registered_nowhere():
    held, alone = Looks(), nn.ModuleDict({"model": nn.Linear(3, 3)})
    assert list(held.state_dict()) == list(alone.state_dict())
    assert [name for name, _ in held.named_parameters()] == [
        name for name, _ in alone.named_parameters()
    ]
    assert not list(held.named_buffers())
    assert {type(module) for module in held.modules()} == {Looks, nn.Linear, Frozen}


def test_a_frozen_network_follows_to_another_device_and_precision():
    held = Looks().to(torch.float64)
    assert {p.dtype for p in held.eye.network.parameters()} == {torch.float64}
    assert held.eye(torch.randn(4, 3, dtype=torch.float64)).dtype == torch.float64
    held.to("meta")
    tensors = [*held.eye.network.parameters(), *held.eye.network.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_a_frozen_network_passes_gradients_to_its_input_and_takes_none():
    held = Looks()
    inputs = torch.randn(4, 3, requires_grad=True)
    held.eye(inputs).square().sum().backward()
    assert inputs.grad is not None and inputs.grad.abs().sum() > 0
    assert all(p.grad is None and not p.requires_grad for p in held.eye.network.parameters())


def test_a_frozen_network_stays_in_eval_mode_whatever_its_task_does():
    held = Looks()
    before = held.eye.network[1].running_mean.clone()
    held.train()
    rows = torch.randn(16, 3) + 5
    assert torch.equal(held.eye(rows), held.eye(rows)), "dropout and batch statistics are off"
    assert torch.equal(held.eye.network[1].running_mean, before)
    assert not held.eye.network.training


class Two(Task):
    """A task of two networks, with the updates that it is given."""

    def __init__(self, *updates: str):
        super().__init__()
        self.model, self.judge = nn.Linear(2, 2), nn.Linear(2, 1)
        self.updates = tuple(update(name, getattr(self, name)) for name in updates)


def update(name: str, network: nn.Module) -> Update:
    return Update(
        name=name, trains=network, loss=lambda batch, step: Loss({}), optimizer=OptimizerConfig()
    )


def test_a_task_whose_parameters_are_all_owned_once_is_accepted():
    check_ownership(Two("model", "judge"))


def test_a_parameter_that_would_never_move_is_named():
    with pytest.raises(ValueError) as refused:
        check_ownership(Two("model"))
    letter = str(refused.value)
    assert (
        "judge.weight belongs to no update" in letter
        and "judge.bias belongs to no update" in letter
    )
    assert "model.weight" not in letter and "Frozen" in letter


def test_a_parameter_that_two_updates_would_move_is_named_with_both():
    task = Two("model", "judge")
    task.updates += (update("again", nn.ModuleList([task.judge])),)
    with pytest.raises(
        ValueError, match="judge.weight belongs to judge and again, which would both move it"
    ):
        check_ownership(task)


def test_a_network_that_would_move_but_never_be_saved_is_named():
    """It is not part of the task, so no checkpoint would hold it."""
    task = Two("model", "judge")
    task.updates += (update("apart", nn.Linear(2, 2)),)
    with pytest.raises(
        ValueError, match="weight of the network that 'apart' trains is no part of the task"
    ):
        check_ownership(task)


def test_two_updates_of_one_name_are_refused():
    """The second would take the first one's place, and its optimizer's place in the checkpoint."""
    task = Two("model", "judge")
    task.updates = (update("both", task.model), update("both", task.judge))
    with pytest.raises(ValueError, match="two updates are called 'both'"):
        check_ownership(task)


def test_a_long_list_of_strays_is_cut():
    task = Two("model", "judge")
    task.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(20))
    with pytest.raises(ValueError, match="and 30 more"):
        check_ownership(task)


def test_an_objective_holds_the_network_of_its_update_and_nothing_else():
    """DDP wraps it: whatever it registered would be waited for."""
    task = Two("model", "judge")
    objective = Objective(task.updates[1])
    assert {id(p) for p in objective.parameters()} == {id(p) for p in task.judge.parameters()}


def test_an_examples_randomness_is_its_own_in_any_batch():
    def draws(batch: Batch) -> list[Tensor]:
        return [torch.rand(3, generator=generator) for generator in batch.generators()]

    together = draws(Batch(torch.zeros(3), ["a", "b", "c"], [11, 12, 13]))
    torch.manual_seed(99)
    alone = draws(Batch(torch.zeros(1), ["b"], [12]))
    assert torch.equal(together[1], alone[0])
    assert not torch.equal(together[0], together[1])


def test_a_loss_descends_its_terms_and_only_watches_its_metrics():
    weight = torch.tensor(2.0, requires_grad=True)
    loss = Loss({"a": weight * 3, "b": weight.half() * 5}, {"watched": weight * 100})
    total = loss.total()
    total.backward()
    assert total.dtype == torch.float32 and total.item() == 16
    assert weight.grad == 8
