"""The engine's steps on a small task: logged means, gradient accumulation, codebook-like modules,
resuming, failed writes, and its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.engine import checkpoint
from tessera.engine.config import EngineConfig
from tessera.engine.distributed import Distributed
from tessera.engine.updates import UpdateResult, UpdateState
from tessera.run.errors import UserError
from tests.engine.small_task import small_engine
from tests.engine.test_guards import make_loss_nan

TIMES = {"examples_per_second", "data_wait_frac", "peak_memory_mb"}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a run without measured times and memory."""
    records = small_engine(path).directory.read_records()
    return [{k: v for k, v in record.items() if k not in TIMES} for record in records]


def test_logged_values_are_means_over_micro_batches():
    logs = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(4.0)}]
    result = UpdateResult(logs, norm=torch.tensor(0.0), lr=0.1)
    assert {name: float(value) for name, value in result.mean_logs().items()} == {"loss": 2.5}
    assert UpdateResult(logs[:1], torch.tensor(0.0), 0.1).mean_logs() == logs[0]


def test_gradient_accumulation_changes_results_only_by_rounding(tmp_path):
    weights, losses = [], []
    for parts in (1, 2, 4):
        engine = small_engine(
            tmp_path / str(parts), batch_size=8, grad_accum_steps=parts, log_every=1
        )
        engine.run()
        weights.append({n: t.clone() for n, t in engine.task.state_dict().items()})
        losses.append([one["model/loss"] for one in engine.directory.read_records("train")])
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-4, atol=1e-6)
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


def test_values_are_collected_only_at_steps_that_are_logged(tmp_path):
    engine = small_engine(tmp_path, steps=5, log_every=2)
    logged = [step for step, one in enumerate(engine.steps(), start=1) if one["model"].logs]
    assert logged == [2, 4, 5]
    assert [one["step"] for one in engine.directory.read_records("train")] == logged


class StatefulLayer(nn.Module):
    """A layer that records when its statistics are committed or rolled back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return x

    def commit(self, dist: Distributed, step: int) -> None:
        self.calls.append(f"commit {step}")

    def rollback(self) -> None:
        self.calls.append("rollback")


def test_stateful_modules_are_committed_or_rolled_back_each_step(tmp_path):
    engine = small_engine(tmp_path, steps=3)
    layer = StatefulLayer()
    engine.task.model.append(layer)
    engine.updates["model"] = UpdateState.build(
        engine.task.updates[0], engine.task, engine.config, engine.dist, use_scaler=False
    )
    make_loss_nan(engine, {1})
    engine.run()
    assert layer.calls == ["commit 0", "rollback", "commit 2"]


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    settings: dict[str, Any] = {
        "steps": 8,
        "log_every": 1,
        "validate_every": 4,
        "checkpoint_every": 3,
    }
    whole = small_engine(tmp_path / "whole", **settings)
    whole.run()
    stopped = small_engine(tmp_path / "stopped", **settings)
    for _ in stopped.steps():
        if stopped.global_step == 5:
            break
    resumed = small_engine(tmp_path / "stopped", **settings)
    assert resumed.global_step == 3
    resumed.run()
    ours, expected = (one.saver.snapshot(one.global_step) for one in (resumed, whole))
    assert ours.state == expected.state and ours.tensors.keys() == expected.tensors.keys()
    for file, tensors in expected.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(ours.tensors[file][name], tensor), (file, name)
    assert read_records(tmp_path / "stopped") == read_records(tmp_path / "whole")


def test_a_run_that_cannot_be_saved_ends_with_a_remedy(tmp_path, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    engine = small_engine(tmp_path, steps=2)
    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(UserError, match="Step 2 could not be saved .* Free some disk space"):
        engine.run()


def test_samples_that_cannot_be_saved_do_not_stop_the_run(tmp_path, monkeypatch, capsys):
    engine = small_engine(tmp_path, steps=2)

    def fail(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(engine.directory, "writing_samples", fail)
    engine.run()
    assert engine.global_step == 2 and not list(engine.directory.samples.iterdir())
    assert "The samples of step 2 could not be written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"keep_last": 0}, "keep_last must be at least 1, got 0"),
        ({"num_workers": -1}, "num_workers must be at least 0, got -1"),
        ({"keep_every": -1}, "keep_every must be at least 0, got -1"),
        ({"log_with": ("excel",)}, "log_with must be among tensorboard, wandb, trackio, got 'ex"),
        (
            {"batch_size": 10, "grad_accum_steps": 2, "nproc": 2},
            r"batch of 10 examples cannot be divided evenly .* use --batch-size 12\.",
        ),
    ],
)
def test_invalid_settings_are_rejected_with_a_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


def test_kept_checkpoints_do_not_depend_on_the_validation_of_the_newest(tmp_path):
    """Its validation may or may not be finished when older ones are removed."""
    engine = small_engine(tmp_path, steps=6, keep_last=1)
    name = f"val_ema/{engine.task.best_metric.name}"
    values = {2: 5.0, 4: 1.0} if engine.task.best_metric.higher_is_better else {2: 1.0, 4: 5.0}
    for step, value in values.items():
        engine.directory.log({"step": step, "kind": "validation", name: value})
    before = engine.saver.select_checkpoints([2, 4, 6])
    best = 100.0 if engine.task.best_metric.higher_is_better else -100.0
    engine.directory.log({"step": 6, "kind": "validation", name: best})
    assert engine.saver.select_checkpoints([2, 4, 6]) == before == {2, 6}
