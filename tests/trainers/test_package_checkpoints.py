"""Checkpoints of the research packages: weights, EMA, optimizer and step go into our trainers.

The files have the structure of those that the published trainers write; `bench/peers` reads files
of the packages themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.run.errors import UserError
from tests.cli_runner import run_invalid, tessera
from tests.trainers.stand_ins import CONTRACTS, VideoTokenizer, build


def train_adam(parameters: list[nn.Parameter], groups: bool = False) -> torch.optim.Optimizer:
    """Return an optimizer with the state of one step."""
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    matrices = [one for one in parameters if one.ndim >= 2]
    vectors = [one for one in parameters if one.ndim < 2]
    split: list[Any] = [{"params": matrices}, {"params": vectors, "weight_decay": 0}]
    optimizer = torch.optim.Adam(split if groups else parameters, lr=1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def build_model(contract: str) -> nn.Module:
    """Return a model with other weights than those of `build`."""
    torch.manual_seed(9)
    return CONTRACTS[contract].build_model()


def average(model: nn.Module) -> dict[str, Tensor]:
    """Return weights in place of an average, which are half of those of the model."""
    return {f"ema_model.{name}": value * 0.5 for name, value in model.state_dict().items()}


def write_soundstorm(path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build_model("soundstorm")
    optimizer = train_adam(list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    content = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    torch.save(content, path)
    return model, optimizer


def write_video(path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build_model("video")
    assert isinstance(model, VideoTokenizer)
    optimizer = train_adam(model.parameters(), groups=True)
    discr_optimizer = train_adam(list(model.discr_parameters()), groups=True)
    content = {
        "model": model.state_dict(),
        "ema_model": average(model) | {"initted": torch.tensor(True), "step": torch.tensor(7)},
        "optimizer": optimizer.state_dict(),
        "discr_optimizer": discr_optimizer.state_dict(),
        "warmup": {"warmup_params": [{"warmup_period": 10}], "last_step": 3},
        "step": 3,
    }
    torch.save(content, path)
    return model, optimizer


def write_mesh_autoencoder(path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build_model("mesh-autoencoder")
    optimizer = train_adam(list(model.parameters()))
    content = {
        "model": model.state_dict(),
        "ema_model": average(model)
        | {f"online_model.{name}": one for name, one in model.state_dict().items()},
        "optimizer": {"optimizer": optimizer.state_dict(), "scheduler": {"last_epoch": 3}},
        "version": "1.8.1",
        "step": 3,
        "config": b"a pickled configuration, which is not read",
    }
    torch.save(content, path)
    return model, optimizer


WRITERS = {
    "soundstorm": write_soundstorm,
    "video": write_video,
    "mesh-autoencoder": write_mesh_autoencoder,
}


@pytest.mark.parametrize("contract", WRITERS)
def test_weights_ema_optimizer_and_step_are_restored(contract: str, tmp_path: Path) -> None:
    path = tmp_path / "package.2.pt"  # the number of the step that was finished last
    model, optimizer = WRITERS[contract](path)
    trainer = build(contract, tmp_path)
    trainer.load(path)
    assert trainer.steps == 3
    own = trainer.model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())
    factor = 1.0 if contract == "soundstorm" else 0.5
    ema = trainer.engine.ema.state_dict()
    assert all(torch.equal(ema[name], value * factor) for name, value in own.items())
    names = dict(trainer.model.named_parameters())
    restored = trainer.engine.updates["model"].optimizer.state
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            expected = optimizer.state[parameter]
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(restored[names[name]][key], expected[key]), (name, key)
    assert trainer.train_step()


def test_a_file_of_bare_weights_or_averages_is_loaded(tmp_path: Path) -> None:
    """The published VQGAN trainer writes such files, and cannot load them itself."""
    model = build_model("vqgan")
    torch.save(model.state_dict(), tmp_path / "vae.1.pt")
    torch.save(average(model), tmp_path / "vae.1.ema.pt")
    trainer = build("vqgan", tmp_path)
    for file, factor in (("vae.1.pt", 1.0), ("vae.1.ema.pt", 0.5)):
        trainer.load(tmp_path / file)
        own = trainer.model.state_dict()
        assert all(torch.equal(own[n], value * factor) for n, value in model.state_dict().items())
        assert trainer.steps == 2 and trainer.train_step()


def test_without_restore_optimizer_training_starts_at_step_0(tmp_path: Path) -> None:
    model, _ = write_video(tmp_path / "package.pt")
    trainer = build("video", tmp_path)
    trainer.load(tmp_path / "package.pt", restore_optimizer=False)
    assert trainer.steps == 0 and not trainer.engine.updates["model"].optimizer.state
    own = trainer.model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())


class Payload:
    """An object that would run code when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": {}, "config": Payload()}, "cannot be read without running code"),
        ({"model": {"other.weight": torch.zeros(1)}}, "holds weights of another model"),
        ([1, 2], "must hold a dictionary of weights"),
    ],
)
def test_other_files_are_rejected_and_nothing_is_executed(
    content: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "package.pt")
    trainer = build("soundstorm", tmp_path)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(UserError, match=message):
        trainer.load("package.pt")
    assert not Path("executed").exists()
    own = trainer.model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in before.items())


def test_the_command_import_makes_a_run_that_a_trainer_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = write_soundstorm(tmp_path / "soundstorm.2.pt")
    run = tmp_path / "imported/run"
    command = ("import", "tests.trainers.stand_ins:SoundStorm", tmp_path / "soundstorm.2.pt")
    flags = ("--trainer", "soundstorm", "--out", run)
    result = tessera(*command, *flags)
    assert result.code == 0 and "Step 3 of" in result.out
    trainer = build("soundstorm", tmp_path / "imported")
    assert trainer.steps == 3
    own = trainer.model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())
    assert "has checkpoints already" in run_invalid(*command, *flags)
    missing = run_invalid("import", "no_module:Model", "x.pt", *flags)
    assert "'no_module:Model' cannot be imported" in missing
