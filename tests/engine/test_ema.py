"""The EMA of the model: its formula, its schedule, and swapping it with the raw weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessera.engine.ema import EMA, EMAConfig


class Model(nn.Module):
    """A layer, a floating point buffer, a counter and a flag."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("counter", torch.tensor(0))
        self.register_buffer("started", torch.tensor(False))


def change_weights(model: Model, step: int) -> None:
    """Change a model as a training step does."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in (*model.parameters(), model.table):
            tensor.add_(torch.randn(tensor.shape, generator=generator))
        model.counter.add_(1)
        model.started.fill_(step > 3)


def compute_reference(config: EMAConfig, steps: int) -> list[float]:
    """Return the EMA of the first weight after each step, computed from the formula."""
    model = Model()
    ema = model.layer.weight[0, 0].item()
    values = []
    for step in range(1, steps + 1):
        change_weights(model, step)
        raw = model.layer.weight[0, 0].item()
        if step <= config.update_after:
            ema = raw
        elif step % config.update_every == 0:
            updates = (step - config.update_after) // config.update_every
            decay = min(config.decay, updates / (updates + 9))
            ema = decay * ema + (1 - decay) * raw
        values.append(ema)
    return values


@pytest.mark.parametrize(
    "config",
    [
        EMAConfig(),
        EMAConfig(decay=0.6),
        EMAConfig(decay=0.9, update_after=7),
        EMAConfig(decay=0.9, update_every=3),
        EMAConfig(decay=0.9, update_after=5, update_every=4),
    ],
    ids=str,
)
def test_the_ema_equals_its_formula(config):
    model = Model()
    ema = EMA(config, model)
    values = []
    for step in range(1, 41):
        change_weights(model, step)
        ema.update(step)
        values.append(ema.state_dict()["layer.weight"][0, 0].item())
    assert values == pytest.approx(compute_reference(config, 40), rel=1e-5, abs=1e-6)


def test_until_update_after_the_ema_equals_the_raw_weights():
    model = Model()
    ema = EMA(EMAConfig(update_after=3), model)
    for step in range(1, 5):
        change_weights(model, step)
        ema.update(step)
        state = model.state_dict()
        is_equal = all(torch.equal(one, state[name]) for name, one in ema.state_dict().items())
        assert is_equal == (step <= 3)


def test_the_ema_changes_only_every_update_every_steps():
    model = Model()
    ema = EMA(EMAConfig(update_every=4), model)
    changed = []
    for step in range(1, 13):
        before = ema.state_dict()["table"].clone()
        change_weights(model, step)
        ema.update(step)
        if not torch.equal(before, ema.state_dict()["table"]):
            changed.append(step)
    assert changed == [4, 8, 12]


def test_with_decay_zero_the_ema_equals_the_raw_weights():
    model = Model()
    ema = EMA(EMAConfig(decay=0.0), model)
    for step in range(1, 6):
        change_weights(model, step)
        ema.update(step)
    assert torch.equal(ema.state_dict()["layer.weight"], model.layer.weight)


def test_integer_and_boolean_buffers_are_copied_instead_of_averaged():
    _, ema = train_with_ema()
    state = ema.state_dict()
    assert state["counter"].dtype == torch.int64 and state["counter"].item() == 5
    assert state["started"].dtype == torch.bool and state["started"].item() is True


def copy_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def train_with_ema() -> tuple[Model, EMA]:
    model = Model()
    ema = EMA(EMAConfig(), model)
    for step in range(1, 6):
        change_weights(model, step)
        ema.update(step)
    return model, ema


def test_the_model_has_the_ema_weights_only_while_they_are_applied():
    model, ema = train_with_ema()
    raw, averaged = copy_state(model.state_dict()), copy_state(ema.state_dict())
    assert not torch.equal(raw["layer.weight"], averaged["layer.weight"])
    rows = torch.randn(5, 3)
    expected = nn.functional.linear(rows, averaged["layer.weight"], averaged["layer.bias"])
    parameter, address = model.layer.weight, model.layer.weight.data_ptr()
    with ema.applied():
        assert all(torch.equal(one, averaged[name]) for name, one in model.state_dict().items())
        assert torch.equal(model.layer(rows), expected)
    assert all(torch.equal(one, raw[name]) for name, one in model.state_dict().items())
    assert all(torch.equal(one, averaged[name]) for name, one in ema.state_dict().items())
    assert model.layer.weight is parameter and parameter.data_ptr() == address, (
        "the optimizer refers to this tensor"
    )


def test_the_raw_weights_are_restored_after_an_exception():
    model, ema = train_with_ema()
    raw, averaged = copy_state(model.state_dict()), copy_state(ema.state_dict())
    with pytest.raises(KeyboardInterrupt), ema.applied():
        raise KeyboardInterrupt
    assert all(torch.equal(one, raw[name]) for name, one in model.state_dict().items())
    assert all(torch.equal(one, averaged[name]) for name, one in ema.state_dict().items())


def test_a_weight_with_two_names_is_swapped_correctly():
    """Tied weights, such as an embedding and an output layer, are in the state dict twice."""
    model = nn.ModuleDict(
        {"first": nn.Linear(3, 3, bias=False), "last": nn.Linear(3, 3, bias=False)}
    )
    model["last"].weight = model["first"].weight
    ema = EMA(EMAConfig(), model)
    with torch.no_grad():
        model["first"].weight.add_(1)
    ema.update(1)
    raw, averaged = model["first"].weight.clone(), ema.state_dict()["first.weight"].clone()
    with ema.applied():
        assert torch.equal(model["first"].weight, averaged)
    assert torch.equal(model["first"].weight, raw)
    assert torch.equal(ema.state_dict()["first.weight"], averaged)
    assert torch.equal(ema.state_dict()["last.weight"], averaged)


def test_the_ema_is_restored_exactly_from_its_state():
    _, ema = train_with_ema()
    saved = copy_state(ema.state_dict())
    other = EMA(EMAConfig(), Model())
    other.load_state_dict(saved)
    assert all(torch.equal(one, saved[name]) for name, one in other.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": 1.0}, "EMA decay must be at least 0 and below 1, got 1.0"),
        ({"decay": -0.1}, "EMA decay must be at least 0 and below 1, got -0.1"),
        ({"update_every": 0}, "ema.update_every must be at least 1, got 0"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        EMAConfig(**settings)
