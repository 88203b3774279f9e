"""The interface of tasks: frozen networks, parameters that belong to exactly one update, losses
and the randomness of examples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, Frozen, Loss, Objective, Task, Update, check_ownership

# ---- frozen networks


class PerceptualModel(nn.Module):
    """A model and a frozen network that is used in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(3, 3)
        self.perceptual = Frozen(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout()))


def test_a_frozen_network_is_not_registered():
    both, alone = PerceptualModel(), nn.ModuleDict({"model": nn.Linear(3, 3)})
    assert list(both.state_dict()) == list(alone.state_dict())
    assert [name for name, _ in both.named_parameters()] == [
        name for name, _ in alone.named_parameters()
    ]
    assert not list(both.named_buffers())
    assert {type(module) for module in both.modules()} == {PerceptualModel, nn.Linear, Frozen}


def test_a_frozen_network_follows_device_and_dtype():
    both = PerceptualModel().to(torch.float64)
    assert {p.dtype for p in both.perceptual.network.parameters()} == {torch.float64}
    assert both.perceptual(torch.randn(4, 3, dtype=torch.float64)).dtype == torch.float64
    both.to("meta")
    tensors = [*both.perceptual.network.parameters(), *both.perceptual.network.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_a_frozen_network_passes_gradients_to_its_input_only():
    both = PerceptualModel()
    inputs = torch.randn(4, 3, requires_grad=True)
    both.perceptual(inputs).square().sum().backward()
    assert inputs.grad is not None and inputs.grad.abs().sum() > 0
    parameters = both.perceptual.network.parameters()
    assert all(p.grad is None and not p.requires_grad for p in parameters)


def test_a_frozen_network_stays_in_eval_mode():
    both = PerceptualModel()
    before = both.perceptual.network[1].running_mean.clone()
    both.train()
    rows = torch.randn(16, 3) + 5
    assert torch.equal(both.perceptual(rows), both.perceptual(rows)), (
        "dropout and batch statistics are off"
    )
    assert torch.equal(both.perceptual.network[1].running_mean, before)
    assert not both.perceptual.network.training


# ---- ownership of parameters


class TwoNetworks(Task):
    """A task of two networks with updates for those that are named."""

    def __init__(self, *names: str):
        super().__init__()
        self.model, self.discriminator = nn.Linear(2, 2), nn.Linear(2, 1)
        self.updates = tuple(make_update(name, getattr(self, name)) for name in names)


def make_update(name: str, network: nn.Module) -> Update:
    return Update(
        name=name, trains=network, loss=lambda batch, step: Loss({}), optimizer=OptimizerConfig()
    )


def test_a_task_whose_parameters_have_one_update_each_is_accepted():
    check_ownership(TwoNetworks("model", "discriminator"))


def test_a_parameter_without_an_update_is_named():
    with pytest.raises(ValueError) as raised:
        check_ownership(TwoNetworks("model"))
    message = str(raised.value)
    assert "discriminator.weight belongs to no update" in message
    assert "discriminator.bias belongs to no update" in message
    assert "model.weight" not in message and "Frozen" in message


def test_a_parameter_of_two_updates_is_named_with_both():
    task = TwoNetworks("model", "discriminator")
    task.updates += (make_update("second", nn.ModuleList([task.discriminator])),)
    with pytest.raises(
        ValueError,
        match="discriminator.weight belongs to discriminator and second, which both train it",
    ):
        check_ownership(task)


def test_a_trained_network_outside_the_task_is_named():
    """No checkpoint would contain it."""
    task = TwoNetworks("model", "discriminator")
    task.updates += (make_update("outside", nn.Linear(2, 2)),)
    with pytest.raises(
        ValueError, match="weight, which 'outside' trains, is not registered in the task"
    ):
        check_ownership(task)


def test_two_updates_with_the_same_name_are_rejected():
    """Otherwise the second would replace the first in logs and checkpoints."""
    task = TwoNetworks("model", "discriminator")
    task.updates = (make_update("both", task.model), make_update("both", task.discriminator))
    with pytest.raises(ValueError, match="Two updates are named 'both'"):
        check_ownership(task)


def test_a_long_list_of_problems_ends_with_a_count():
    task = TwoNetworks("model", "discriminator")
    task.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(20))
    with pytest.raises(ValueError, match="and 30 more"):
        check_ownership(task)


def test_an_objective_registers_only_the_network_of_its_update():
    """DDP wraps it and waits for the gradients of all its parameters."""
    task = TwoNetworks("model", "discriminator")
    objective = Objective(task.updates[1])
    expected = {id(p) for p in task.discriminator.parameters()}
    assert {id(p) for p in objective.parameters()} == expected


# ---- batches and losses


def test_the_randomness_of_an_example_is_independent_of_its_batch():
    def draw(batch: Batch) -> list[Tensor]:
        return [torch.rand(3, generator=generator) for generator in batch.generators()]

    train_together = draw(Batch(torch.zeros(3), ["a", "b", "c"], [11, 12, 13]))
    torch.manual_seed(99)
    alone = draw(Batch(torch.zeros(1), ["b"], [12]))
    assert torch.equal(train_together[1], alone[0])
    assert not torch.equal(train_together[0], train_together[1])


def test_compiled_losses_get_few_lengths():
    task = Task()
    assert [task.pad_length(length, 10) for length in (1, 7, 10, 12)] == [1, 7, 10, 12]
    task.num_lengths = 4
    padded = {length: task.pad_length(length, 10) for length in range(1, 11)}
    assert all(padded[length] >= length for length in padded)
    assert set(padded.values()) == {3, 5, 8, 10} and task.pad_length(12, 10) == 12


def test_the_total_loss_sums_the_terms_without_the_metrics():
    weight = torch.tensor(2.0, requires_grad=True)
    loss = Loss({"a": weight * 3, "b": weight.half() * 5}, {"metric": weight * 100})
    total = loss.total()
    total.backward()
    assert total.dtype == torch.float32 and total.item() == 16
    assert weight.grad == 8


def test_detached_values_are_fp32_and_include_lazy_metrics():
    weight = torch.tensor(2.0, requires_grad=True)
    calls: list[str] = []

    def lazy_metric() -> Tensor:
        calls.append("lazy")
        return weight * 10

    loss = Loss({"a": weight * 3, "b": weight.half() * 5}, {"c": weight * 100, "lazy": lazy_metric})
    loss.total()
    assert not calls, "metrics are computed only for the log"
    values = loss.detached()
    assert calls == ["lazy"]
    assert {name: value.item() for name, value in values.items()} == {
        "loss": 16,
        "a": 6,
        "b": 10,
        "c": 200,
        "lazy": 20,
    }
    assert all(one.dtype == torch.float32 and not one.requires_grad for one in values.values())
