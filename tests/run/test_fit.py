"""Training a module of one's own: fit, LossTask and load_weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tessera import __version__
from tessera.engine import LossTask, OptimizerConfig, fit, load_weights
from tessera.run.errors import UserError
from tests.cli_runner import run_invalid
from tests.runs import read_metrics
from tests.worker_pool import call_together


class Regression(nn.Module):
    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.form = form

    def forward(self, x: Tensor, y: Tensor) -> Any:
        errors = (self.net(x)[:, 0] - y).abs()
        loss = errors.square().mean()
        if self.form == "tuple":
            return loss, {"largest": errors.max()}
        return {"loss": loss, "largest": errors.max()} if self.form == "dict" else loss


def build_data() -> TensorDataset:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1))


SETTINGS: dict[str, Any] = {"steps": 6, "batch_size": 8, "checkpoint_every": 2, "log_every": 1}


def train(out: Path, model: nn.Module | None = None, **settings: Any) -> nn.Module:
    task = LossTask(model or Regression(), OptimizerConfig(lr=1e-2))
    return fit(task, build_data(), out=out, **(SETTINGS | settings)).task.model


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_a_module_is_trained_on_the_loss_that_it_returns(form: str, tmp_path: Path) -> None:
    model = Regression(form)
    assert train(tmp_path, model, steps=60, validate_every=20) is model
    losses = [one["val/loss"] for one in read_metrics(tmp_path) if one["kind"] == "validation"]
    assert losses[-1] < losses[0] / 2
    logged = [one for one in read_metrics(tmp_path) if one["kind"] == "train"]
    assert ("model/largest" in logged[0]) == (form != "tensor")
    assert not any((tmp_path / "samples").iterdir())
    loaded = load_weights(Regression(), tmp_path, "raw")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters()))


class Killed(Exception):
    pass


def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")

    def kill(record: Any) -> None:
        if record["step"] == 5:
            raise Killed

    with pytest.raises(Killed):
        train(tmp_path / "killed", on_log=kill)
    torch.manual_seed(5)
    resumed = train(tmp_path / "killed")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "killed")


def train_in_worker(folder: str, settings: dict[str, Any], store: bool = True) -> None:
    model = Regression()
    train(Path(folder), model, **settings)
    torch.save(model.state_dict(), Path(folder) / "weights.pt")


def test_two_processes_equal_one_with_twice_the_micro_batches(tmp_path: Path) -> None:
    one = train(tmp_path / "one", grad_accum_steps=2)
    call_together(
        "tests.run.test_fit:train_in_worker",
        nproc=2,
        folder=str(tmp_path / "two"),
        settings={"nproc": 2},
    )
    two = torch.load(tmp_path / "two/weights.pt", weights_only=True)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6)


class Unused(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


def train_unused(folder: str) -> None:
    """Train a network with unused parameters, without and with `find_unused`."""
    task = LossTask(Unused())
    try:
        fit(task, build_data(), out=Path(folder) / "refused", **SETTINGS, nproc=2)
    except UserError as error:
        Path(folder, "error.txt").write_text(str(error))
    task = LossTask(Unused(), find_unused=True)
    fit(task, build_data(), out=Path(folder) / "searched", **SETTINGS, nproc=2)
    frozen = Unused()
    frozen.spare.requires_grad_(False)
    fit(LossTask(frozen), build_data(), out=Path(folder) / "frozen", **SETTINGS, nproc=2)


def test_unused_parameters_on_two_processes_are_named(tmp_path: Path) -> None:
    call_together("tests.run.test_fit:train_unused", nproc=2, folder=str(tmp_path))
    message = (tmp_path / "error.txt").read_text()
    assert "does not depend on spare.weight, spare.bias" in message
    assert "find_unused=True" in message
    for name in ("searched", "frozen"):
        assert read_metrics(tmp_path / name)[-1]["step"] == 6


def test_frozen_parameters_stay_frozen(tmp_path: Path) -> None:
    model = Regression()
    model.net[0].weight.requires_grad_(False)
    before = model.net[0].weight.clone()
    train(tmp_path, model)
    assert torch.equal(model.net[0].weight, before)
    assert not torch.equal(model.net[2].weight, Regression().net[2].weight)
    with pytest.raises(ValueError, match="trains nothing, since all its parameters are frozen"):
        train(tmp_path / "none", Regression().requires_grad_(False))


def test_settings_are_stored_compared_and_explained(tmp_path: Path) -> None:
    train(tmp_path, settings={"width": 8})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tessera"] == __version__
    assert config["task"]["class"] == "tessera.engine.loss_task.LossTask"
    with pytest.raises(UserError, match="settings.width: 8 in the folder, 9 requested"):
        train(tmp_path, settings={"width": 9})
    assert "was trained from Python" in run_invalid("sample", tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step": 6}, "fit has no parameter 'step'"),
        ({"batch_size": 100}, "The batch size is 100, but the training set has"),
        ({"val_fraction": 2.0}, "val_fraction must be at least 0"),
    ],
)
def test_invalid_settings_get_a_sentence(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        train(tmp_path, **settings)


def test_data_without_a_length_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a generator, but must have a length"):
        fit(LossTask(Regression()), (one for one in ()), out=tmp_path)


def test_a_loss_that_is_no_scalar_gets_a_sentence(tmp_path: Path) -> None:
    class Wrong(Regression):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.net(x)

    with pytest.raises(ValueError, match=r"a loss of shape \(8, 1\), but must return a scalar"):
        train(tmp_path, Wrong())
