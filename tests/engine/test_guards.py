"""Guards: non-finite steps are skipped and counted, a diverged run stops, alarms are raised once,
and freed memory stays in the process."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

from tessera.engine import checkpoint
from tessera.engine.checkpoint import find_healthy
from tessera.engine.engine import Engine
from tessera.engine.guards import AlarmMonitor, Diverged, NonFiniteGuard
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.signals import Interrupted
from tessera.engine.task import Alarm, Batch, Loss
from tessera.sampling.logits import sample_from_logits
from tests.engine.small_task import small_engine

# ---- non-finite steps


def test_a_run_stops_after_too_many_consecutive_skipped_steps():
    guard = NonFiniteGuard(max_skipped_steps=3)
    guard.skip("model", ["a.png"])
    guard.skip("model", ["b.png"])
    with pytest.raises(Diverged) as raised:
        guard.skip("model", ["c.png", "d.png"])
    message = str(raised.value)
    assert "'model'" in message and "3 consecutive steps" in message and "c.png, d.png" in message
    assert raised.value.exit_code == 1 and guard.skipped == 3


def test_a_finite_step_resets_the_count_of_consecutive_steps():
    guard = NonFiniteGuard(max_skipped_steps=2)
    for _ in range(5):
        guard.skip("model", [])
        guard.accept("model")
    assert guard.skipped == 5


def test_each_update_is_counted_separately():
    guard = NonFiniteGuard(max_skipped_steps=2)
    guard.skip("model", [])
    guard.accept("discriminator")
    guard.skip("discriminator", [])
    with pytest.raises(Diverged, match="'model'"):
        guard.skip("model", [])


def test_the_count_is_restored_when_a_run_resumes():
    """Otherwise a diverged run that is restarted automatically would never end."""
    first, second = NonFiniteGuard(max_skipped_steps=3), NonFiniteGuard(max_skipped_steps=3)
    first.skip("model", [])
    first.skip("model", [])
    second.load_state_dict(first.state_dict())
    assert second.skipped == 2
    with pytest.raises(Diverged):
        second.skip("model", [])


def make_loss_nan(engine: Engine, steps: set[int]) -> None:
    """Replace the loss of these steps by NaN."""
    finite_loss = engine.task.mean_error

    def loss_or_nan(batch: Batch, step: int) -> Loss:
        loss = finite_loss(batch, step)
        return Loss({"error": loss.terms["error"] * float("nan")}) if step in steps else loss

    engine.updates["model"].objective._loss = loss_or_nan


def test_a_non_finite_step_changes_no_weight_and_no_moment(tmp_path):
    engine = small_engine(tmp_path, steps=3, log_every=1)
    make_loss_nan(engine, {1})
    weight = engine.task.model[0].weight
    states: list[torch.Tensor] = []
    for _ in engine.steps():
        moments = engine.updates["model"].optimizer.state[weight]["exp_avg"]
        states.append(torch.cat([weight.detach().flatten(), moments.flatten()]).clone())
    assert torch.equal(states[0], states[1]) and not torch.equal(states[1], states[2])
    records = engine.directory.read_records("train")
    assert [record["skipped_steps"] for record in records] == [0, 1, 1]
    notes = engine.directory.read_notes("nonfinite.jsonl")
    assert [(note["step"], note["update"], len(note["examples"])) for note in notes] == [
        (1, "model", 4)
    ]
    assert all(name.startswith("row ") for name in notes[0]["examples"])


def test_a_diverged_run_stops_and_its_checkpoint_is_finite(tmp_path):
    engine = small_engine(tmp_path, steps=20, checkpoint_every=2, max_skipped_steps=4)
    make_loss_nan(engine, set(range(3, 20)))
    with pytest.raises(Diverged, match=r"4 consecutive steps.* also after .* was halved"):
        engine.run()
    assert engine.global_step == 6
    resumed = small_engine(tmp_path, steps=20)
    assert resumed.global_step == 2, "no checkpoint is written while steps are skipped"
    assert all(torch.isfinite(tensor).all() for tensor in resumed.task.state_dict().values())


def ruin_weights(engine: Engine, step: int, times: int = 1) -> None:
    """Make a weight infinite after the optimizer step of one step, although all was finite."""
    run_step, ruined = engine.run_step, []

    def run_and_ruin(at: int, micro_batches: list[Batch]) -> Any:
        results = run_step(at, micro_batches)
        if at == step and len(ruined) < times:
            ruined.append(at)
            with torch.no_grad():
                engine.task.model[0].weight[0, 0] = float("inf")
        return results

    engine.run_step = run_and_ruin


SETTINGS = {"steps": 8, "checkpoint_every": 2, "validate_every": 8, "sample_every": 8}


def test_weights_that_are_not_finite_reach_no_checkpoint_and_are_rolled_back(tmp_path, capsys):
    engine = small_engine(tmp_path, **SETTINGS, log_every=1)
    ruin_weights(engine, 4)
    engine.run()
    output = " ".join(capsys.readouterr().out.split())
    assert "Some weights were not finite at step 6" in output and "Going back to step 4" in output
    records = engine.directory.read_records("train")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 7, 8]
    lrs = [record["model/lr"] for record in records]
    assert lrs[4:] == pytest.approx([lr / 2 for lr in lrs[:4]])
    for step in checkpoint.list_steps(engine.directory.checkpoints):
        snapshot = checkpoint.read(engine.directory.checkpoints / f"{step:06d}")
        for tensors in snapshot.tensors.values():
            assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert small_engine(tmp_path, **SETTINGS).guard.lr_scale == 0.5, "also after a resume"


def test_a_run_that_diverges_again_ends(tmp_path):
    engine = small_engine(tmp_path, **SETTINGS)
    ruin_weights(engine, 4, times=2)
    with pytest.raises(Diverged, match="not finite at step 6.*also after the learning rate was"):
        engine.run()
    assert checkpoint.list_steps(engine.directory.checkpoints)[-1] == 4


def test_a_run_that_diverges_before_its_first_checkpoint_ends(tmp_path):
    engine = small_engine(tmp_path, **SETTINGS)
    ruin_weights(engine, 0)
    with pytest.raises(Diverged, match="not finite at step 2.*Lower the learning rate"):
        engine.run()
    assert checkpoint.list_steps(engine.directory.checkpoints) == []


def test_a_signal_during_skipped_steps_keeps_the_healthy_checkpoint(tmp_path):
    engine = small_engine(tmp_path, **SETTINGS | {"steps": 20, "keep_last": 1})
    make_loss_nan(engine, {5, 6, 7, 8})
    steps = engine.steps()
    for _ in range(7):
        next(steps)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted):
        next(steps)
    assert checkpoint.list_steps(engine.directory.checkpoints) == [4, 8]
    assert find_healthy(engine.directory.checkpoints).endswith("000004")


def test_samples_of_a_network_that_diverged_end_in_a_message(tmp_path):
    engine = small_engine(tmp_path, **SETTINGS | {"sample_every": 2, "checkpoint_every": 8})

    def diverge(batch: Batch) -> list[Any]:
        tokens = torch.full((len(batch), 4), float("nan"))
        sample_from_logits(tokens, torch.zeros(len(batch)), temperature=1.0)
        raise AssertionError

    engine.task.sample = diverge
    with pytest.raises(Diverged, match="No samples can be made at step 2.* not finite"):
        engine.run()


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": math.inf},
        {"lr": math.nan},
        {"eps": 0.0},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9, math.nan)},
        {"weight_decay": -1.0},
        {"min_lr_ratio": math.nan},
        {"warmup_steps": -1, "schedule": "warmup"},
    ],
)
def test_optimizer_settings_that_cannot_work_are_rejected(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))}|learning rate"):
        OptimizerConfig(**settings)


def test_notes_of_steps_that_are_repeated_after_a_kill_are_written_once(tmp_path):
    engine = small_engine(tmp_path, **SETTINGS)
    make_loss_nan(engine, {1, 4})
    steps = engine.steps()
    for _ in range(5):
        next(steps)
    steps.close()  # without a checkpoint of step 5, as after a kill
    resumed = small_engine(tmp_path, **SETTINGS)
    make_loss_nan(resumed, {1, 4})
    resumed.run()
    assert [note["step"] for note in resumed.directory.read_notes("nonfinite.jsonl")] == [1, 4]


# ---- alarms

LOW = Alarm(
    name="flat", metric="model/contrast", below=0.1, patience=3, after=100, hint="Lower the lr."
)
HIGH = Alarm(
    name="strong discriminator",
    metric="discriminator/accuracy",
    above=0.9,
    patience=1,
    hint="Raise the penalty.",
)


def raised_at(values: list[float], first_step: int = 100) -> list[int]:
    """Return the indices of the values at which the alarm LOW is raised."""
    monitor = AlarmMonitor((LOW,))
    return [
        i for i, value in enumerate(values) if monitor.check(first_step + i, {LOW.metric: value})
    ]


def test_an_alarm_is_raised_once_after_its_patience():
    assert raised_at([0.05] * 10) == [2]


def test_an_alarm_is_raised_again_only_after_a_good_value():
    assert raised_at([0.05] * 4 + [0.5] + [0.05] * 4) == [2, 7]


def test_a_good_value_resets_the_patience_of_an_alarm():
    assert raised_at([0.05, 0.05, 0.5, 0.05, 0.05, 0.5]) == []


def test_records_before_the_first_active_step_do_not_count():
    assert raised_at([0.05] * 6, first_step=97) == [5]


def test_records_without_the_metric_raise_no_alarm():
    monitor = AlarmMonitor((LOW, HIGH))
    assert monitor.check(200, {"model/loss": 1.0}) == []
    assert monitor.check(200, {LOW.metric: None}) == []  # type: ignore[dict-item]


def test_an_alarm_names_its_value_its_bound_and_a_hint():
    (message,) = AlarmMonitor((HIGH,)).check(1, {HIGH.metric: 0.987})
    assert message == (
        "strong discriminator: discriminator/accuracy is 0.987, above 0.9, in 1 consecutive "
        "records. Raise the penalty."
    )
    monitor = AlarmMonitor((LOW,))
    messages = [monitor.check(100, {LOW.metric: 0.01}) for _ in range(3)]
    assert messages[2] == [
        "flat: model/contrast is 0.01, below 0.1, in 3 consecutive records. Lower the lr."
    ]


# ---- memory

REPEATS, PAGES = 20, 24 * 512
PAGE_FAULTS = f"""
import resource
import numpy
from tessera.engine.guards import retain_freed_memory

def work():
    arrays = [numpy.ones(1 << 18) for _ in range(24)]  # 48 MB, like the activations of a step

retain_freed_memory()
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({REPEATS}):
    work()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / {REPEATS})
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc is configured on Linux")
def test_a_step_reuses_freed_memory_unless_the_environment_configures_malloc() -> None:
    assert count_page_faults({}) < PAGES / 100
    limits = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    assert count_page_faults(limits) > PAGES / 2


def count_page_faults(variables: dict[str, str]) -> float:
    """Return the number of page faults of one repetition in a new process."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    process = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(process.stdout)
