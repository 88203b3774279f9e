"""The engine's promises, each for every recipe: the numbers are those of docs/design.md, section
6."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tessera.data.loader import TrainLoader
from tessera.engine.engine import Engine, resolve_precision
from tessera.engine.guards import Diverged
from tessera.engine.signals import Interrupted
from tessera.engine.task import Batch
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tessera.run.train import build_task, claim_directory, find_unused_folder
from tests.runs import (
    CASES,
    assert_close_run,
    assert_same_run,
    engine_in,
    read_metrics,
    read_checkpoint,
    tessera,
    tiny,
    train,
    train_in_double,
)
from tests.worker_pool import train_together

every_case = pytest.mark.parametrize("case", CASES)


class Killed(BaseException):
    """Stands in for SIGKILL: nothing catches it, nothing is saved after it. (bench/kills.py sends
    real ones.)"""


def killed_at(step: int) -> Any:
    def on_log(record: dict[str, Any]) -> None:
        if record["step"] == step and record["kind"] == "train":
            raise Killed

    return on_log


# ---- 1. a resumed run is the same run


@every_case
def test_a_resumed_run_is_the_same_run(case: str, tmp_path: Path) -> None:
    """It is killed within an epoch, at the end of one, and in the second."""
    run = tiny(case, steps=13, checkpoint_every=3, validate_every=4, sample_every=6)
    train(tmp_path / "whole", run)
    for death in (5, 8, 11):
        with pytest.raises(Killed):
            train(tmp_path / "cut", run, on_log=killed_at(death))
        assert 0 < engine_in(tmp_path / "cut", run).done < death
    train(tmp_path / "cut", run)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 13)


@pytest.mark.parametrize("workers", [1, 2])
def test_loader_workers_change_nothing_and_a_run_may_go_on_with_others(
    num_workers: int, tmp_path: Path
) -> None:
    run = tiny("images-vqgan judged", steps=9, checkpoint_every=3)
    train(tmp_path / "whole", run)
    with pytest.raises(Killed):
        train(
            tmp_path / "cut",
            tiny("images-vqgan judged", steps=9, checkpoint_every=3, num_workers=num_workers),
            on_log=killed_at(5),
        )
    train(
        tmp_path / "cut",
        tiny("images-vqgan judged", steps=9, checkpoint_every=3, num_workers=3 - num_workers),
    )
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 9)


def test_validating_and_sampling_between_steps_change_no_weight(tmp_path: Path) -> None:
    train(tmp_path / "busy", tiny("images-vqgan judged", steps=6, validate_every=1, sample_every=1))
    train(
        tmp_path / "quiet", tiny("images-vqgan judged", steps=6, validate_every=6, sample_every=6)
    )
    busy, quiet = read_checkpoint(tmp_path / "busy", 6), read_checkpoint(tmp_path / "quiet", 6)
    assert all(torch.equal(busy[name], quiet[name]) for name in quiet)


def test_a_longer_run_goes_on_from_a_shorter_one(tmp_path: Path) -> None:
    run = tiny("images-vqgan", steps=4)
    constant = dataclasses.replace(run.task.optimizer, schedule="constant", warmup_steps=0)
    run = dataclasses.replace(run, task=dataclasses.replace(run.task, optimizer=constant))
    longer = dataclasses.replace(run, engine=dataclasses.replace(run.engine, steps=8))
    train(tmp_path / "stages", run)
    train(tmp_path / "stages", longer)
    train(tmp_path / "whole", longer)
    stages, whole = read_checkpoint(tmp_path / "stages", 8), read_checkpoint(tmp_path / "whole", 8)
    assert all(torch.equal(stages[name], whole[name]) for name in whole)


def test_what_a_kill_left_half_done_is_cleared_when_the_run_goes_on(tmp_path: Path) -> None:
    train(tmp_path, tiny("images-vqgan", steps=2))
    for ruin in (".writing-000003", ".deleting-000001"):
        (tmp_path / "checkpoints" / ruin).mkdir()
    engine_in(tmp_path, tiny("images-vqgan", steps=2))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000002"]


# ---- 2. four micro-batches are one batch


@every_case
def test_micro_batches_are_one_batch(case: str, tmp_path: Path) -> None:
    train_in_double(tmp_path / "one", tiny(case, steps=5))
    for count in (2, 4):
        train_in_double(tmp_path / f"{count}", tiny(case, steps=5, grad_accum_steps=count))
        assert_close_run(tmp_path / "one", tmp_path / f"{count}", 5)


@every_case
def test_two_processes_are_one(case: str, tmp_path: Path) -> None:
    """Gradient penalty, codebook statistics and entropy included; and the numbers of validation are
    the same."""
    steps = {"steps": 4, "validate_every": 2, "sample_every": 4, "accumulate": 2}
    train_in_double(tmp_path / "one", tiny(case, **steps))
    train_together(tmp_path / "two", case, **steps, processes=2)
    assert_close_run(tmp_path / "one", tmp_path / "two", 4)
    for alone, shared in zip(
        read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two"), strict=True
    ):
        assert alone.pop("kind") == shared.pop("kind")
        assert alone == pytest.approx(shared, rel=1e-5, abs=1e-6)  # what is logged is cut to fp32
    alone, shared = (
        sorted(file.name for file in (tmp_path / run / "samples/000004").iterdir())
        for run in ("one", "two")
    )
    assert alone == shared and len(shared) > 8


def test_a_run_of_two_processes_goes_on_alone_and_back(tmp_path: Path) -> None:
    case = "images-vqgan judged vq"
    stages = [(2, 2), (4, 1), (6, 2)]
    for steps, processes in stages:
        train_together(
            tmp_path / "changing",
            case,
            steps=steps,
            processes=processes,
            validate_every=6,
            sample_every=6,
        )
    train_in_double(tmp_path / "one", tiny(case, steps=6, validate_every=6, sample_every=6))
    assert_close_run(tmp_path / "one", tmp_path / "changing", 6)


def test_replicas_stay_equal_to_the_bit(tmp_path: Path) -> None:
    train_together(tmp_path / "two", "images-vqgan judged vq", steps=5, processes=2, tell_replicas=True)
    first, second = ((tmp_path / f"two/replica-{rank}.txt").read_text() for rank in (0, 1))
    assert first == second


# ---- 3. an update moves its own network and no other


def test_an_update_moves_its_own_network_and_no_other(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, tiny("images-vqgan judged", steps=6))
    micros = next(iter(engine.batches()))
    engine.step(3, micros)  # both have begun
    for name, prepared in engine.prepared.items():
        before = {key: value.clone() for key, value in engine.task.state_dict().items()}
        memory = {
            key: {k: v.clone() for k, v in other.optimizer.state_dict()["state"][0].items()}
            for key, other in engine.prepared.items()
        }
        engine.move(prepared, 4, micros)
        owned = {"model": "model.", "discriminator": "discriminator."}[name]
        moved = {
            key
            for key, value in engine.task.state_dict().items()
            if not torch.equal(value, before[key])
        }
        assert moved
        assert all(key.startswith(owned) for key in moved)
        for key, other in engine.prepared.items():
            now = other.optimizer.state_dict()["state"][0]
            assert all(torch.equal(now[k], memory[key][k]) for k in now) == (key != name)
        assert all(p.grad is None for p in engine.task.parameters())


def test_the_discriminator_does_not_move_before_it_starts(tmp_path: Path) -> None:
    run = tiny("images-vqgan judged", steps=4)
    assert run.task.adversary.starts == 2
    engine = engine_in(tmp_path, run)
    first = {name: value.clone() for name, value in engine.task.discriminator.state_dict().items()}
    moved_at = []
    for _ in engine.steps():
        now = engine.task.discriminator.state_dict()
        if any(not torch.equal(now[name], first[name]) for name in first):
            moved_at.append(engine.done)
    assert moved_at == [3, 4]
    logged = [record for record in read_metrics(tmp_path) if record["kind"] == "train"]
    assert ["model/adversarial" in record for record in logged] == [False, False, True, True]


def test_without_an_adversary_nothing_of_it_is_left_behind(tmp_path: Path) -> None:
    train(tmp_path, tiny("images-vqgan", steps=2))
    assert not [name for name in read_checkpoint(tmp_path, 2) if "discriminator" in name]
    assert not [
        key
        for record in read_metrics(tmp_path)
        for key in record
        if "discriminator" in key or "adversarial" in key
    ]


def test_the_gradient_penalty_comes_every_n_steps_and_only_then(tmp_path: Path) -> None:
    train(tmp_path, tiny("images-vqgan judged", steps=10))
    penalised = [r["step"] - 1 for r in read_metrics(tmp_path) if "discriminator/penalty" in r]
    assert penalised == [4, 8]  # it starts at step 2, and the penalty falls on multiples of 4


# ---- 4 and 5 are held by tests/engine/test_checkpoint.py and tests/test_shape.py; 6 by tests/test_bad_input.py


@pytest.mark.parametrize("change", ["batch_size", "seed"])
def test_other_settings_on_a_used_folder_are_refused_by_name(change: str, tmp_path: Path) -> None:
    train(tmp_path, tiny("images-vqgan", steps=2))
    before = read_checkpoint(tmp_path, 2)
    with pytest.raises(UserError, match=f"engine.{change}"):
        engine_in(tmp_path, tiny("images-vqgan", steps=2, **{change: 4}))
    assert all(torch.equal(before[name], value) for name, value in read_checkpoint(tmp_path, 2).items())


def test_a_folder_in_which_no_step_was_taken_takes_other_settings(tmp_path: Path) -> None:
    """A run may be refused after its folder was made; whoever follows the advice is not refused for
    that."""
    engine_in(tmp_path, tiny("images-vqgan", steps=2)).folder.unlock()
    assert not RunDirectory(tmp_path).begun
    train(tmp_path, tiny("images-vqgan", steps=2, seed=4))
    assert (
        RunDirectory(tmp_path).begun and RunDirectory(tmp_path).read_config()["engine"]["seed"] == 4
    )
    with pytest.raises(UserError, match="engine.seed"):
        engine_in(tmp_path, tiny("images-vqgan", steps=2))


def test_fresh_takes_a_new_folder_and_leaves_the_old_one(tmp_path: Path) -> None:
    train(tmp_path / "run", tiny("images-vqgan", steps=2))
    assert find_unused_folder(tmp_path / "run") == tmp_path / "run-2"
    assert find_unused_folder(tmp_path / "new") == tmp_path / "new"


# ---- 7. validation


def test_validation_covers_the_held_out_set_once(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, tiny("images-vqgan", steps=1))
    seen: list[str] = []
    observe = engine.task.observe
    engine.task.observe = lambda batch: (seen.extend(batch.names), observe(batch))[1]  # type: ignore[method-assign]
    engine.measured()
    assert sorted(seen) == sorted(
        engine.validation.source.name(i) for i in range(len(engine.validation))
    )


@every_case
def test_one_held_out_example_is_enough(case: str, tmp_path: Path) -> None:
    """A small folder may hold out no more. What cannot be said of one example is left out; no
    number is ill."""
    engine = engine_in(tmp_path, tiny(case, steps=1))
    batches = engine.validation.batches
    engine.validation.batches = lambda rank, processes, limit=None: batches(rank, processes, 1)  # type: ignore[method-assign]
    numbers = engine.measured()
    assert engine.task.best_metric.metric in numbers
    assert [name for name, value in numbers.items() if not math.isfinite(value)] == []
    engine.sample()
    assert list((tmp_path / "samples").rglob("*.*"))


def test_validation_gives_the_same_numbers_again(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, tiny("images-vqgan judged", steps=1))
    assert engine.measured() == engine.measured()


def test_live_and_average_are_both_told(tmp_path: Path) -> None:
    train(tmp_path, tiny("images-vqgan", steps=5, validate_every=5))
    [record] = [record for record in read_metrics(tmp_path) if record["kind"] == "validation"]
    assert record["val/psnr"] != record["val_ema/psnr"]


# ---- 8. numbers that are not finite


def poisoned(engine: Engine, step: int) -> None:
    """From now on the examples of one step, or of all from step -n on, are not numbers; nor are the
    losses, since codes have no way not to be numbers."""
    batches = engine.batches

    def is_ill(at: int) -> bool:
        return at == step or (step < 0 and at >= -step)

    def spoilt(loss: Any) -> Any:
        def of(batch: Batch, at: int) -> Any:
            found = loss(batch, at)
            found.terms = {
                name: term * (float("nan") if is_ill(at) else 1)
                for name, term in found.terms.items()
            }
            return found

        return of

    for prepared in engine.prepared.values():
        prepared.objective._loss = spoilt(prepared.objective._loss)

    def spoil() -> Any:
        for number, micros in enumerate(batches()):
            for batch in micros:
                if is_ill(number) and hasattr(batch.examples, "pixels"):
                    batch.examples.pixels.fill_(float("nan"))
            yield micros

    engine.batches = spoil  # type: ignore[method-assign]


@every_case
def test_a_step_that_is_not_finite_reaches_no_weight(case: str, tmp_path: Path) -> None:
    engine = engine_in(tmp_path, tiny(case, steps=5, checkpoint_every=1))
    poisoned(engine, 3)
    engine.run()
    assert all(value.isfinite().all() for value in read_checkpoint(tmp_path, 5).values())
    read_records = [record for record in read_metrics(tmp_path) if record["kind"] == "train"]
    assert read_records[3]["skipped_steps"] == len(engine.task.updates)
    read_notes = [json.loads(line) for line in (tmp_path / "nonfinite.jsonl").read_text().splitlines()]
    assert {line["step"] for line in read_notes} == {3}
    assert len(read_notes[0]["examples"]) == engine.config.batch_size


def test_a_skipped_step_leaves_its_network_as_it_was(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, tiny("images-vqgan judged vq", steps=4))
    micros = next(iter(engine.batches()))
    engine.step(0, micros)
    before = {name: value.clone() for name, value in engine.task.model.state_dict().items()}
    for batch in micros:
        batch.examples.pixels.fill_(float("inf"))
    engine.step(1, micros)
    assert all(
        torch.equal(value, before[name]) for name, value in engine.task.model.state_dict().items()
    )


def test_a_run_that_stays_ill_stops_with_a_sentence_and_a_healthy_checkpoint(
    tmp_path: Path,
) -> None:
    engine = engine_in(
        tmp_path, tiny("images-vqgan", steps=9, checkpoint_every=2, max_skipped_steps=3)
    )
    poisoned(engine, -3)
    with pytest.raises(Diverged, match="not finite in 3 steps in a row"):
        engine.run()
    assert all(value.isfinite().all() for value in read_checkpoint(tmp_path, 4).values())


# ---- 9. signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", ["train", "validation", "sampling"])
def test_a_signal_in_any_phase_ends_in_a_checkpoint_and_the_run_goes_on(
    number: int, phase: str, tmp_path: Path
) -> None:
    run = tiny("images-vqgan judged", steps=8, validate_every=4, sample_every=4, checkpoint_every=8)
    train(tmp_path / "whole", run)
    engine = engine_in(tmp_path / "cut", run)
    call = {"train": "rebuild", "validation": "observe", "sampling": "sample"}[phase]
    interrupted = signalled_once(engine, call, number, after=3 if phase == "train" else 0)
    with pytest.raises(Interrupted) as stopped:
        engine.run()
    assert stopped.value.exit_code == 128 + number
    assert interrupted == [True]
    assert engine.done in (4, 5)
    train(tmp_path / "cut", run)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 8)


def signalled_once(engine: Engine, call: str, number: int, after: int) -> list[bool]:
    """Sends this process a signal while the task is inside `call`, at its next call but `after`."""
    sent: list[bool] = []
    calls = [0]
    target: Any = engine.task if call != "rebuild" else engine.prepared["model"].objective
    name = call if call != "rebuild" else "_loss"
    original = getattr(target, name)

    def with_signal(batch: Batch, *rest: Any) -> Any:
        calls[0] += 1
        if calls[0] > after and not sent:
            sent.append(True)
            os.kill(os.getpid(), number)
        return original(batch, *rest)

    setattr(target, name, with_signal)
    return sent


def test_sigterm_before_the_first_step_leaves_no_checkpoint(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, tiny("images-vqgan", steps=3))
    steps = engine.steps()
    original = engine.run_due_events
    engine.run_due_events = lambda: (os.kill(os.getpid(), signal.SIGTERM), original())  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        next(steps)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_command_line_exits_with_143_on_every_process_and_goes_on(tmp_path: Path) -> None:
    """Two processes under our launcher; SIGTERM goes to the launcher, as a batch system would send
    it."""
    import subprocess
    import sys

    command = [
        "train",
        "images-vqgan",
        "--preset",
        "tiny",
        "--adversary",
        "on",
        "--nproc",
        "2",
        "--out",
        str(tmp_path / "run"),
    ]
    command += [
        "--steps",
        "100000",
        "--validate-every",
        "100000",
        "--sample-every",
        "100000",
        "--checkpoint-every",
        "100000",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        [sys.executable, "-m", "tessera", *command],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("step"):
            running.send_signal(signal.SIGTERM)
            break
    rest = running.communicate(timeout=60)[0]
    assert running.returncode == 143
    assert "stopped by SIGTERM: saving step" in rest
    [saved] = [int(path.name) for path in (tmp_path / "run/checkpoints").iterdir()]
    again = tessera(*command[:-8], "--steps", str(saved + 2), timeout=100)
    assert again.returncode == 0, again.stderr
    assert f"Going on from step {saved}." in again.stdout


# ---- precision


def test_auto_precision_is_fp32_on_a_cpu() -> None:
    assert resolve_precision("auto", torch.device("cpu")) == "fp32"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_and_resumes_the_same_run(precision: Any, tmp_path: Path) -> None:
    run = tiny("images-vqgan judged", steps=4, checkpoint_every=2, precision=precision)
    train(tmp_path / "whole", run)
    with pytest.raises(Killed):
        train(tmp_path / "cut", run, on_log=killed_at(3))
    train(tmp_path / "cut", run)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 4)
    weights = read_checkpoint(tmp_path / "whole", 4)
    assert all(
        value.dtype == torch.float32
        for name, value in weights.items()
        if name.startswith(("model/", "val_ema/")) and value.is_floating_point()
    )
    to_fp32 = records_of_fp32(tmp_path)
    half = [r["model/loss"] for r in read_metrics(tmp_path / "whole") if r["kind"] == "train"]
    assert half == pytest.approx(to_fp32, rel=0.1)


def records_of_fp32(tmp_path: Path) -> list[float]:
    train(tmp_path / "full", tiny("images-vqgan judged", steps=4, precision="fp32"))
    return [r["model/loss"] for r in read_metrics(tmp_path / "full") if r["kind"] == "train"]


# ---- the record


def test_a_logged_loss_is_the_mean_over_all_examples_of_the_step(tmp_path: Path) -> None:
    run = tiny("images-vqgan", steps=1, grad_accum_steps=4)
    task = build_task(run)
    [micros] = TrainLoader(
        run.data.build().train, seed=run.engine.seed, batch_size=8
    ).micro_batches(0, 1, 0, 1)
    expected = task.reconstruction_loss(micros[0], 0).terms["pixel"].item()
    train(tmp_path, run)
    [record] = [r for r in read_metrics(tmp_path) if r["kind"] == "train"]
    assert record["model/pixel"] == pytest.approx(expected, rel=1e-5)


def test_every_line_tells_how_the_run_fares(tmp_path: Path) -> None:
    train(tmp_path, tiny("images-vqgan judged", steps=3))
    last = json.loads(
        [
            line
            for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
            if '"train"' in line
        ][-1]
    )
    for name in ("model/lr", "model/grad_norm", "discriminator/lr", "discriminator/grad_norm"):
        assert last[name] > 0
    assert last["examples_per_second"] > 0
    assert 0 <= last["data_wait_frac"] <= 1
    assert last["peak_memory_mb"] > 50


def test_the_folder_is_taken_by_one_run_at_a_time(tmp_path: Path) -> None:
    run = tiny("images-vqgan", steps=1)
    folder = RunDirectory(tmp_path)
    claim_directory(folder, run)
    command = ("train", "images-vqgan", "--preset", "tiny", "--steps", "1", "--out", str(tmp_path))
    run_invalid = tessera(*command, timeout=60)
    assert run_invalid.returncode == 2
    assert f"Another run is at work in {tmp_path} (process {os.getpid()})" in run_invalid.stderr
    folder.unlock()
    assert tessera(*command, timeout=60).returncode == 0


# ---- a run may begin with the weights of another


def test_pictures_first_and_then_clips(tmp_path: Path) -> None:
    """The averaged weights of one run are the first weights of the next, whose judges begin
    anew."""
    pictures = tiny("videos-magvit2", steps=3)
    train(
        tmp_path / "pictures",
        dataclasses.replace(pictures, data=dataclasses.replace(pictures.data, frames=1)),
    )
    learnt = load_file(tmp_path / "pictures/checkpoints/000003/ema.safetensors")
    clips = tiny("videos-magvit2 judged", steps=2, init_from=str(tmp_path / "pictures"))
    engine = engine_in(tmp_path / "clips", clips)
    assert all(
        torch.equal(learnt[name], tensor) for name, tensor in engine.task.model.state_dict().items()
    )
    engine.run()
    shutil.rmtree(tmp_path / "pictures")  # once it has begun it needs the other no more
    train(
        tmp_path / "clips",
        tiny("videos-magvit2 judged", steps=4, init_from=str(tmp_path / "pictures")),
    )


def test_a_run_does_not_begin_with_another_network(tmp_path: Path) -> None:
    train(tmp_path / "pictures", tiny("images-vqgan", steps=2))
    with pytest.raises(UserError, match="another network"):
        engine_in(tmp_path / "clips", tiny("videos-magvit2", init_from=str(tmp_path / "pictures")))
    with pytest.raises(UserError, match="no checkpoint"):
        engine_in(tmp_path / "clips", tiny("videos-magvit2", init_from=str(tmp_path / "nowhere")))
    assert not (tmp_path / "clips").exists()
