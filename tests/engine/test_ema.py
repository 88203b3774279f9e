"""The moving average of the model: the formula, its clock, and the exchange of weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessera.engine.ema import EMA, EMAConfig


class Model(nn.Module):
    """Weights, a buffer of floats, a counter and a switch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("counter", torch.tensor(0))
        self.register_buffer("started", torch.tensor(False))


def move(model: Model, step: int) -> None:
    """One step of training, imitated."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in (*model.parameters(), model.table):
            tensor.add_(torch.randn(tensor.shape, generator=generator))
        model.counter.add_(1)
        model.started.fill_(step > 3)


def slowly(config: EMAConfig, steps: int) -> list[float]:
    """The average of the first weight after each step, by the formula and one number at a time."""
    model = Model()
    mean = model.layer.weight[0, 0].item()
    means = []
    for done in range(1, steps + 1):
        move(model, done)
        live = model.layer.weight[0, 0].item()
        if done <= config.update_after:
            mean = live
        elif done % config.update_every == 0:
            updates = (done - config.update_after) // config.update_every
            decay = min(config.decay, updates / (updates + 9))
            mean = decay * mean + (1 - decay) * live
        means.append(mean)
    return means


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
def test_the_average_follows_its_formula(config):
    model = Model()
    ema = EMA(config, model)
    found = []
    for done in range(1, 41):
        move(model, done)
        ema.update(done)
        found.append(ema.state_dict()["layer.weight"][0, 0].item())
    assert found == pytest.approx(slowly(config, 40), rel=1e-5, abs=1e-6)


def test_until_update_after_the_average_is_the_live_model():
    model = Model()
    ema = EMA(EMAConfig(update_after=3), model)
    for done in range(1, 5):
        move(model, done)
        ema.update(done)
        same = all(
            torch.equal(mean, model.state_dict()[name]) for name, mean in ema.state_dict().items()
        )
        assert same == (done <= 3)


def test_between_updates_the_average_stands_still():
    model = Model()
    ema = EMA(EMAConfig(update_every=4), model)
    changed = []
    for done in range(1, 13):
        before = ema.state_dict()["table"].clone()
        move(model, done)
        ema.update(done)
        changed.append(not torch.equal(before, ema.state_dict()["table"]))
    assert [done for done, did in enumerate(changed, start=1) if did] == [4, 8, 12]


def test_without_decay_the_average_is_the_live_model():
    model = Model()
    ema = EMA(EMAConfig(decay=0.0), model)
    for done in range(1, 6):
        move(model, done)
        ema.update(done)
    assert torch.equal(ema.state_dict()["layer.weight"], model.layer.weight)


def test_counters_and_switches_are_copied_and_not_averaged():
    model = Model()
    ema = EMA(EMAConfig(), model)
    for done in range(1, 6):
        move(model, done)
        ema.update(done)
    scratch = ema.state_dict()
    assert scratch["counter"].dtype == torch.int64 and scratch["counter"].item() == 5
    assert scratch["started"].dtype == torch.bool and scratch["started"].item() is True


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def moved_and_averaged() -> tuple[Model, EMA]:
    model = Model()
    ema = EMA(EMAConfig(), model)
    for done in range(1, 6):
        move(model, done)
        ema.update(done)
    return model, ema


def test_swapped_in_the_model_is_the_average_and_after_it_itself():
    model, ema = moved_and_averaged()
    live, mean = bits(model), {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    assert not torch.equal(live["layer.weight"], mean["layer.weight"])
    rows = torch.randn(5, 3)
    expected = nn.functional.linear(rows, mean["layer.weight"], mean["layer.bias"])
    parameter, place = model.layer.weight, model.layer.weight.data_ptr()
    with ema.applied():
        assert all(torch.equal(tensor, mean[name]) for name, tensor in model.state_dict().items())
        assert torch.equal(model.layer(rows), expected)
    assert all(torch.equal(tensor, live[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, mean[name]) for name, tensor in ema.state_dict().items())
    assert model.layer.weight is parameter and parameter.data_ptr() == place, (
        "the optimizer holds this very tensor"
    )


def test_the_weights_come_back_after_an_accident_too():
    model, ema = moved_and_averaged()
    live, mean = bits(model), {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    with pytest.raises(KeyboardInterrupt), ema.applied():
        raise KeyboardInterrupt
    assert all(torch.equal(tensor, live[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, mean[name]) for name, tensor in ema.state_dict().items())


def test_a_weight_with_two_names_survives_the_exchange():
    """An embedding that is also the last layer stands twice in the state, and must not be exchanged
    back and forth."""
    model = nn.ModuleDict(
        {"first": nn.Linear(3, 3, bias=False), "last": nn.Linear(3, 3, bias=False)}
    )
    model["last"].weight = model["first"].weight
    ema = EMA(EMAConfig(), model)
    with torch.no_grad():
        model["first"].weight.add_(1)
    ema.update(1)
    live, mean = model["first"].weight.clone(), ema.state_dict()["first.weight"].clone()
    with ema.applied():
        assert torch.equal(model["first"].weight, mean)
    assert torch.equal(model["first"].weight, live)
    assert torch.equal(ema.state_dict()["first.weight"], mean)
    assert torch.equal(ema.state_dict()["last.weight"], mean)


def test_the_average_comes_back_from_a_checkpoint_exactly():
    model, ema = moved_and_averaged()
    saved = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    other = EMA(EMAConfig(), Model())
    other.load_state_dict(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize("settings", [{"decay": 1.0}, {"decay": -0.1}, {"update_every": 0}])
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ValueError, match="ema"):
        EMAConfig(**settings)
