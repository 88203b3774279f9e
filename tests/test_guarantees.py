"""The guarantees of the engine, for every recipe; docs/design.md numbers them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tessera.api.tokenizer import Tokenizer
from tessera.data.discovery import find_files
from tessera.data.loader import TrainLoader
from tessera.data.pack import pack_files
from tessera.engine.checkpoint import list_steps
from tessera.engine.engine import Engine
from tessera.engine.guards import Diverged
from tessera.engine.signals import Interrupted
from tessera.engine.task import Batch
from tessera.run.config import Run, encode
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tessera.run.train import build_task, claim_directory, find_unused_folder
from tests.cli_runner import tessera as run_here
from tests.media_folders import write_captioned_images
from tests.runs import (
    CASES,
    assert_close_run,
    assert_same_run,
    endless,
    engine_in,
    engine_in_double,
    read_checkpoint,
    read_metrics,
    tessera,
    tiny,
    train,
    train_in_double,
    train_steps,
)
from tests.worker_pool import train_together

every_case = pytest.mark.parametrize("case", CASES)


class Killed(BaseException):
    """Simulate SIGKILL: nothing catches it, and nothing is saved after it. tests/test_kills.py and
    bench/kills.py send real ones."""


def kill_at(step: int) -> Any:
    def on_log(record: dict[str, Any]) -> None:
        if record["step"] == step and record["kind"] == "train":
            raise Killed

    return on_log


# ---- 1. a resumed run equals an uninterrupted one


@every_case
def test_a_resumed_run_equals_an_uninterrupted_one(case: str, tmp_path: Path) -> None:
    """The run is killed within an epoch, at the end of one, and in the second."""
    every = {"checkpoint_every": 3, "validate_every": 4, "sample_every": 6}
    run = tiny(case, steps=13, **every, sample_count=2)
    train(tmp_path / "whole", run)
    for killed_step in (5, 8, 11):
        with pytest.raises(Killed):
            train(tmp_path / "cut", run, on_log=kill_at(killed_step))
        assert 0 < engine_in(tmp_path / "cut", run).global_step < killed_step
    train(tmp_path / "cut", run)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 13)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_number_of_workers_changes_nothing_and_may_change_on_resume(
    num_workers: int, tmp_path: Path
) -> None:
    run = tiny("images-vqgan adversarial", steps=9, checkpoint_every=3)
    train(tmp_path / "whole", run)
    with pytest.raises(Killed):
        train(
            tmp_path / "cut",
            tiny("images-vqgan adversarial", steps=9, checkpoint_every=3, num_workers=num_workers),
            on_log=kill_at(5),
        )
    train(
        tmp_path / "cut",
        tiny("images-vqgan adversarial", steps=9, checkpoint_every=3, num_workers=3 - num_workers),
    )
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 9)


def with_path(run: Run, path: Path) -> Run:
    return dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(path)))


@pytest.mark.parametrize("case", ["images-vqgan", "images-maskgit"])
def test_a_killed_run_on_shards_equals_one_on_the_folder(case: str, tmp_path: Path) -> None:
    """It is killed and resumed with other numbers of workers, within an epoch and in the second."""
    write_captioned_images(tmp_path / "folder", 12)
    files = find_files(tmp_path / "folder", (".png",), "images").with_captions()
    pack_files(files, tmp_path / "shards", max_bytes=6000)
    run = tiny(case, steps=9, batch_size=4, checkpoint_every=2, validate_every=4)
    train(tmp_path / "whole", with_path(run, tmp_path / "folder"))
    for num_workers, killed_step in ((0, 3), (2, 6)):
        engine = dataclasses.replace(run.engine, num_workers=num_workers)
        killed = dataclasses.replace(run, engine=engine)
        with pytest.raises(Killed):
            train(
                tmp_path / "cut",
                with_path(killed, tmp_path / "shards"),
                on_log=kill_at(killed_step),
            )
    train(tmp_path / "cut", with_path(run, tmp_path / "shards"))
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 9)


def test_shards_may_be_added_but_not_changed_on_resume(tmp_path: Path) -> None:
    write_captioned_images(tmp_path / "folder", 12)
    files = find_files(tmp_path / "folder", (".png",), "images").with_captions()
    pack_files(files, tmp_path / "shards", max_bytes=6000)
    run = tiny("images-vqgan", steps=6, batch_size=4, checkpoint_every=3)
    run = with_path(run, tmp_path / "shards")
    train(tmp_path / "whole", run)
    with pytest.raises(Killed):
        train(tmp_path / "grown", run, on_log=kill_at(6))
    first, *_, last = sorted((tmp_path / "shards").glob("*.tar"))
    shutil.copy(first, last.with_name("shards-99999.tar"))
    train(tmp_path / "grown", run)
    assert_same_run(tmp_path / "whole", tmp_path / "grown", 6)
    pack_files(files.select(range(4)), tmp_path / "other", max_bytes=10**6)
    shutil.copy(tmp_path / "other" / "shards-00000.tar", first)
    longer = dataclasses.replace(run, engine=dataclasses.replace(run.engine, steps=8))
    with pytest.raises(UserError, match="has other content than when the run was started"):
        train(tmp_path / "grown", longer)
    train(tmp_path / "grown", longer, rescan=True)


def test_validating_and_sampling_change_no_weight(tmp_path: Path) -> None:
    train(
        tmp_path / "busy",
        tiny("images-vqgan adversarial", steps=6, validate_every=1, sample_every=1),
    )
    train(
        tmp_path / "quiet",
        tiny("images-vqgan adversarial", steps=6, validate_every=6, sample_every=6),
    )
    busy, quiet = read_checkpoint(tmp_path / "busy", 6), read_checkpoint(tmp_path / "quiet", 6)
    assert all(torch.equal(busy[name], quiet[name]) for name in quiet)


def test_a_longer_run_resumes_a_shorter_one(tmp_path: Path) -> None:
    run = tiny("images-vqgan", steps=4)
    constant = dataclasses.replace(run.task.optimizer, schedule="constant", warmup_steps=0)
    run = dataclasses.replace(run, task=dataclasses.replace(run.task, optimizer=constant))
    longer = dataclasses.replace(run, engine=dataclasses.replace(run.engine, steps=8))
    train(tmp_path / "stages", run)
    train(tmp_path / "stages", longer)
    train(tmp_path / "whole", longer)
    stages, whole = read_checkpoint(tmp_path / "stages", 8), read_checkpoint(tmp_path / "whole", 8)
    assert all(torch.equal(stages[name], whole[name]) for name in whole)


def test_partial_checkpoints_are_removed_on_resume(tmp_path: Path) -> None:
    train(tmp_path, tiny("images-vqgan", steps=2))
    for name in (".writing-000003", ".deleting-000001"):
        (tmp_path / "checkpoints" / name).mkdir()
    engine_in(tmp_path, tiny("images-vqgan", steps=2))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000002"]


# ---- 2. micro-batches and processes do not change the result


@every_case
def test_micro_batches_equal_one_batch(case: str, tmp_path: Path) -> None:
    for count in (1, 2, 4):
        run = endless(case, grad_accum_steps=count)
        train_steps(engine_in_double(tmp_path / f"{count}", run), 5)
        assert_close_run(tmp_path / "1", tmp_path / f"{count}", 5)


@every_case
def test_two_processes_equal_one(case: str, tmp_path: Path) -> None:
    """This includes gradient penalty, codebook statistics and entropy, and the validation
    metrics; sharded processes too."""
    steps = {"steps": 4, "validate_every": 2, "sample_every": 4, "grad_accum_steps": 2}
    train_in_double(tmp_path / "one", tiny(case, **steps))
    train_together(tmp_path / "two", case, **steps, nproc=2)
    assert_close_run(tmp_path / "one", tmp_path / "two", 4)
    train_together(tmp_path / "sharded", case, **steps, nproc=2, shard=True)
    assert_close_run(tmp_path / "one", tmp_path / "sharded", 4)
    for single, double in zip(
        read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two"), strict=True
    ):
        assert single.pop("kind") == double.pop("kind")
        assert single == pytest.approx(double, rel=1e-5, abs=1e-6)  # logs are rounded to fp32
    single, double = (
        sorted(file.name for file in (tmp_path / run / "samples/000004").iterdir())
        for run in ("one", "two")
    )
    assert single == double and len(double) > 8


def test_processes_and_sharding_may_change_on_resume(tmp_path: Path) -> None:
    case = "images-vqgan adversarial vq"
    stages = [(2, 2, True), (4, 1, False), (6, 2, False), (8, 2, True)]
    for steps, nproc, shard in stages:
        train_together(
            tmp_path / "changing",
            case,
            steps=steps,
            nproc=nproc,
            shard=shard,
            checkpoint_activations=shard,
            validate_every=8,
            sample_every=8,
        )
    train_in_double(tmp_path / "one", tiny(case, steps=8, validate_every=8, sample_every=8))
    assert_close_run(tmp_path / "one", tmp_path / "changing", 8)


def test_replicas_stay_equal_bit_for_bit(tmp_path: Path) -> None:
    train_together(
        tmp_path / "two", "images-vqgan adversarial vq", steps=5, nproc=2, write_digest=True
    )
    first, second = ((tmp_path / f"two/replica-{rank}.txt").read_text() for rank in (0, 1))
    assert first == second


# ---- 3. an update changes its own network only


def test_an_update_changes_its_own_network_only(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, tiny("images-vqgan adversarial", steps=6))
    micro_batches = next(iter(engine.load_batches()))
    engine.run_step(3, micro_batches)  # both updates have started
    for name, update in engine.updates.items():
        before = {key: value.clone() for key, value in engine.task.state_dict().items()}
        states = {
            key: {k: v.clone() for k, v in other.optimizer.state_dict()["state"][0].items()}
            for key, other in engine.updates.items()
        }
        engine.run_update(update, 4, micro_batches)
        owned = {"model": "model.", "discriminator": "discriminator."}[name]
        changed = {
            key
            for key, value in engine.task.state_dict().items()
            if not torch.equal(value, before[key])
        }
        assert changed
        assert all(key.startswith(owned) for key in changed)
        for key, other in engine.updates.items():
            now = other.optimizer.state_dict()["state"][0]
            assert all(torch.equal(now[k], states[key][k]) for k in now) == (key != name)
        assert all(p.grad is None for p in engine.task.parameters())


def test_training_only_the_decoder_changes_no_code(tmp_path: Path) -> None:
    folders = tmp_path / "codec", tmp_path / "decoder"
    train(folders[0], tiny("audio-codec", steps=4))
    train(folders[1], tiny("audio-codec decoder", steps=4, init_from=str(folders[0])))
    before, after = (read_checkpoint(folder, 4) for folder in folders)
    names = [name.removeprefix("ema/") for name in before if name.startswith("ema/")]
    changed = [n for n in names if not torch.equal(before[f"ema/{n}"], after[f"model/{n}"])]
    assert changed and all(name.startswith("decoder.") for name in changed)
    one, other = (Tokenizer.load(folder) for folder in folders)
    audio = torch.rand(1, 1, 4000, generator=torch.Generator().manual_seed(0)) - 0.5
    codes = one.encode(audio)
    assert torch.equal(codes, other.encode(audio))
    assert not torch.equal(one.decode(codes), other.decode(codes))


def test_the_discriminator_is_not_trained_before_its_start_step(tmp_path: Path) -> None:
    run = tiny("images-vqgan adversarial", steps=4)
    assert run.task.adversary.start_step == 2
    engine = engine_in(tmp_path, run)
    first = {name: value.clone() for name, value in engine.task.discriminator.state_dict().items()}
    changed_at = []
    for _ in engine.steps():
        now = engine.task.discriminator.state_dict()
        if any(not torch.equal(now[name], first[name]) for name in first):
            changed_at.append(engine.global_step)
    assert changed_at == [3, 4]
    logged = [record for record in read_metrics(tmp_path) if record["kind"] == "train"]
    assert ["model/adversarial" in record for record in logged] == [False, False, True, True]


def test_without_an_adversary_nothing_of_it_is_written(tmp_path: Path) -> None:
    train(tmp_path, tiny("images-vqgan", steps=2))
    assert not [name for name in read_checkpoint(tmp_path, 2) if "discriminator" in name]
    assert not [
        key
        for record in read_metrics(tmp_path)
        for key in record
        if "discriminator" in key or "adversarial" in key
    ]


def test_the_gradient_penalty_is_computed_every_n_steps(tmp_path: Path) -> None:
    train(tmp_path, tiny("images-vqgan adversarial", steps=10))
    penalised = [
        r["step"] - 1 for r in read_metrics(tmp_path) if "discriminator/gradient_penalty" in r
    ]
    assert penalised == [4, 8]  # multiples of 4 after the start step 2


# ---- 4 and 5 are tested in tests/engine/test_checkpoint.py and tests/test_shape.py, 6 in
# tests/test_bad_input.py


@pytest.mark.parametrize("change", ["batch_size", "seed"])
def test_other_settings_in_a_used_folder_are_rejected_by_name(change: str, tmp_path: Path) -> None:
    train(tmp_path, tiny("images-vqgan", steps=2))
    before = read_checkpoint(tmp_path, 2)
    with pytest.raises(UserError, match=f"engine.{change}"):
        engine_in(tmp_path, tiny("images-vqgan", steps=2, **{change: 4}))
    assert all(
        torch.equal(before[name], value) for name, value in read_checkpoint(tmp_path, 2).items()
    )


def test_a_folder_without_a_step_accepts_other_settings(tmp_path: Path) -> None:
    """A run may fail after its folder was created and be started with other settings."""
    engine_in(tmp_path, tiny("images-vqgan", steps=2)).directory.unlock()
    assert not RunDirectory(tmp_path).has_started
    train(tmp_path, tiny("images-vqgan", steps=2, seed=4))
    assert (
        RunDirectory(tmp_path).has_started
        and RunDirectory(tmp_path).read_config()["engine"]["seed"] == 4
    )
    with pytest.raises(UserError, match="engine.seed"):
        engine_in(tmp_path, tiny("images-vqgan", steps=2))


def test_fresh_uses_a_new_folder_and_keeps_the_old_one(tmp_path: Path) -> None:
    train(tmp_path / "run", tiny("images-vqgan", steps=2))
    assert find_unused_folder(tmp_path / "run") == tmp_path / "run-2"
    assert find_unused_folder(tmp_path / "new") == tmp_path / "new"


# ---- 7. validation


def test_validation_evaluates_every_held_out_example_once(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, tiny("images-vqgan", steps=1))
    names: list[str] = []
    eval_step = engine.task.eval_step
    engine.task.eval_step = lambda batch: (names.extend(batch.names), eval_step(batch))[1]  # type: ignore[method-assign]
    engine.evaluate()
    assert sorted(names) == sorted(
        engine.validation.dataset.name(i) for i in range(len(engine.validation))
    )


@every_case
def test_one_held_out_example_is_enough(case: str, tmp_path: Path) -> None:
    """Metrics that are not defined for one example are left out, and all others are finite."""
    engine = engine_in(tmp_path, tiny(case, steps=1))
    batches = engine.validation.batches
    engine.validation.batches = lambda rank, world_size, indices=None: batches(
        rank, world_size, [0]
    )  # type: ignore[method-assign]
    metrics = engine.evaluate().metrics
    assert engine.task.best_metric.name in metrics
    assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
    engine.sample()
    assert list((tmp_path / "samples").rglob("*.*"))


def test_repeated_validations_give_the_same_metrics(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, tiny("images-vqgan adversarial", steps=1))
    assert engine.evaluate() == engine.evaluate()


def test_raw_and_ema_weights_are_both_validated(tmp_path: Path) -> None:
    train(tmp_path, tiny("images-vqgan", steps=5, validate_every=5))
    [record] = [record for record in read_metrics(tmp_path) if record["kind"] == "validation"]
    assert record["val/psnr"] != record["val_ema/psnr"]


# ---- 8. non-finite values


def inject_nan(engine: Engine, step: int) -> None:
    """Make the examples and losses of one step NaN, or of all steps from -step on.

    The losses are changed too, because codes are integers.
    """
    load_batches = engine.load_batches

    def is_affected(at: int) -> bool:
        return at == step or (step < 0 and at >= -step)

    def wrap(loss: Any) -> Any:
        def with_nan(batch: Batch, at: int) -> Any:
            result = loss(batch, at)
            result.terms = {
                name: term * (float("nan") if is_affected(at) else 1)
                for name, term in result.terms.items()
            }
            return result

        return with_nan

    for update in engine.updates.values():
        update.objective._loss = wrap(update.objective._loss)

    def load_with_nan() -> Any:
        for number, micro_batches in enumerate(load_batches()):
            for batch in micro_batches:
                if is_affected(number) and hasattr(batch.examples, "pixels"):
                    batch.examples.pixels.fill_(float("nan"))
            yield micro_batches

    engine.load_batches = load_with_nan  # type: ignore[method-assign]


@every_case
def test_a_non_finite_step_changes_no_weight(case: str, tmp_path: Path) -> None:
    engine = engine_in(tmp_path, endless(case, checkpoint_every=1))
    inject_nan(engine, 3)
    train_steps(engine, 5)
    assert all(value.isfinite().all() for value in read_checkpoint(tmp_path, 5).values())
    records = [record for record in read_metrics(tmp_path) if record["kind"] == "train"]
    assert records[3]["skipped_steps"] == len(engine.task.updates)
    notes = [json.loads(line) for line in (tmp_path / "nonfinite.jsonl").read_text().splitlines()]
    assert {line["step"] for line in notes} == {3}
    assert len(notes[0]["examples"]) == engine.config.batch_size


def test_a_skipped_step_leaves_the_network_unchanged(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, tiny("images-vqgan adversarial vq", steps=4))
    micro_batches = next(iter(engine.load_batches()))
    engine.run_step(0, micro_batches)
    before = {name: value.clone() for name, value in engine.task.model.state_dict().items()}
    for batch in micro_batches:
        batch.examples.pixels.fill_(float("inf"))
    engine.run_step(1, micro_batches)
    assert all(
        torch.equal(value, before[name]) for name, value in engine.task.model.state_dict().items()
    )


def test_a_diverged_run_stops_with_a_message_and_a_valid_checkpoint(
    tmp_path: Path,
) -> None:
    engine = engine_in(
        tmp_path, tiny("images-vqgan", steps=9, checkpoint_every=2, max_skipped_steps=3)
    )
    inject_nan(engine, -3)
    with pytest.raises(Diverged, match="not finite in 3 consecutive steps"):
        engine.run()
    # No checkpoint is written after a skipped step, so that of step 2 is the newest.
    assert list_steps(RunDirectory(tmp_path).checkpoints) == [2]
    assert all(value.isfinite().all() for value in read_checkpoint(tmp_path, 2).values())


# ---- 9. signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", ["train", "validation", "sampling"])
def test_a_signal_in_any_phase_saves_a_checkpoint_and_the_run_resumes(
    number: int, phase: str, tmp_path: Path
) -> None:
    run = tiny(
        "images-vqgan adversarial", steps=8, validate_every=4, sample_every=4, checkpoint_every=8
    )
    train(tmp_path / "whole", run)
    engine = engine_in(tmp_path / "cut", run)
    call = {"train": "loss", "validation": "eval_step", "sampling": "sample"}[phase]
    interrupted = send_signal_once(engine, call, number, after=3 if phase == "train" else 0)
    with pytest.raises(Interrupted) as stopped:
        engine.run()
    assert stopped.value.exit_code == 128 + number
    assert interrupted == [True]
    assert engine.global_step in (4, 5)
    train(tmp_path / "cut", run)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 8)


def send_signal_once(engine: Engine, call: str, number: int, after: int) -> list[bool]:
    """Send this process a signal inside a call of the task, after a number of calls."""
    sent: list[bool] = []
    calls = [0]
    target: Any = engine.task if call != "loss" else engine.updates["model"].objective
    name = call if call != "loss" else "_loss"
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


def test_signals_end_all_processes_in_a_checkpoint_and_the_run_resumes(tmp_path: Path) -> None:
    """Ctrl-C reaches the launcher, which passes it on, and every process; SIGTERM the launcher."""
    command = "train images-vqgan --preset tiny --adversary on --nproc 2 --num-workers 1".split()
    every = "--steps 100000 --validate-every 100000 --sample-every 100000 --checkpoint-every 100000"
    command += [*every.split(), "--log-every", "2", "--out", str(tmp_path / "run")]
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        output = interrupt_processes(command, number, to_all=number == signal.SIGINT, code=code)
        saved = max(int(path.name) for path in (tmp_path / "run/checkpoints").iterdir())
        assert f"stopped by {signal.Signals(number).name}: saving step {saved}" in output
        assert "Traceback" not in output
    again = run_here(*command, "--nproc", "1", "--steps", str(saved + 2))
    assert again.code == 0, again.err
    assert f"Resuming from step {saved}." in again.out


def interrupt_processes(command: list[str], number: int, *, to_all: bool, code: int) -> str:
    """Send a signal to a command after its first line about a step; return its output."""
    running = subprocess.Popen(
        [sys.executable, "-m", "tessera", *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("step"):
            break
    processes = psutil.Process(running.pid).children(recursive=True) if to_all else []
    for process in [psutil.Process(running.pid), *processes]:
        process.send_signal(number)
    rest = running.communicate(timeout=3600)[0]
    assert running.returncode == code, rest
    return rest


# ---- precision


def test_auto_precision_is_fp32_on_a_cpu(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, tiny("images-vqgan", steps=1))
    assert engine.config.precision == "auto" and engine.precision == "fp32"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_and_resumes_bit_for_bit(precision: Any, tmp_path: Path) -> None:
    run = tiny("images-vqgan adversarial", steps=4, checkpoint_every=2, precision=precision)
    train(tmp_path / "whole", run)
    with pytest.raises(Killed):
        train(tmp_path / "cut", run, on_log=kill_at(3))
    train(tmp_path / "cut", run)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 4)
    weights = read_checkpoint(tmp_path / "whole", 4)
    assert all(
        value.dtype == torch.float32
        for name, value in weights.items()
        if name.startswith(("model/", "ema/")) and value.is_floating_point()
    )
    full = read_fp32_losses(tmp_path)
    half = [r["model/loss"] for r in read_metrics(tmp_path / "whole") if r["kind"] == "train"]
    assert half == pytest.approx(full, rel=0.1)


def read_fp32_losses(tmp_path: Path) -> list[float]:
    train(tmp_path / "full", tiny("images-vqgan adversarial", steps=4, precision="fp32"))
    return [r["model/loss"] for r in read_metrics(tmp_path / "full") if r["kind"] == "train"]


# ---- logs


def test_a_logged_loss_is_the_mean_over_all_examples_of_the_step(tmp_path: Path) -> None:
    run = tiny("images-vqgan", steps=1, grad_accum_steps=4)
    task = build_task(run)
    [micro_batches] = TrainLoader(
        run.data.build().train, seed=run.engine.seed, batch_size=8
    ).micro_batches(0, 1, 0, 1)
    expected = task.reconstruction_loss(micro_batches[0], 0).terms["pixel"].item()
    train(tmp_path, run)
    [record] = [r for r in read_metrics(tmp_path) if r["kind"] == "train"]
    assert record["model/pixel"] == pytest.approx(expected, rel=1e-5)


def test_every_line_has_lr_grad_norm_throughput_and_memory(tmp_path: Path) -> None:
    train(tmp_path, tiny("images-vqgan adversarial", steps=3))
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


def test_a_run_directory_is_used_by_one_run_at_a_time(tmp_path: Path) -> None:
    run = tiny("images-vqgan", steps=1)
    directory = RunDirectory(tmp_path)
    claim_directory(directory, encode(run))
    command = ("train", "images-vqgan", "--preset", "tiny", "--steps", "1", "--out", str(tmp_path))
    rejected = tessera(*command, timeout=600)
    assert rejected.returncode == 2
    assert f"Another run uses {tmp_path} (process {os.getpid()})" in rejected.stderr
    directory.unlock()
    assert run_here(*command).code == 0


# ---- initial weights of another run


def test_a_video_run_starts_with_the_weights_of_an_image_run(tmp_path: Path) -> None:
    """The EMA weights of one run are the initial weights of the next; discriminators are new."""
    images = tiny("videos-magvit2", steps=3)
    train(
        tmp_path / "images",
        dataclasses.replace(images, data=dataclasses.replace(images.data, frames=1)),
    )
    trained = load_file(tmp_path / "images/checkpoints/000003/ema.safetensors")
    videos = tiny("videos-magvit2 adversarial", steps=2, init_from=str(tmp_path / "images"))
    engine = engine_in(tmp_path / "videos", videos)
    assert all(
        torch.equal(trained[name], tensor)
        for name, tensor in engine.task.model.state_dict().items()
    )
    engine.run()
    shutil.rmtree(tmp_path / "images")  # it is not needed after the start
    train(
        tmp_path / "videos",
        tiny("videos-magvit2 adversarial", steps=4, init_from=str(tmp_path / "images")),
    )


def test_initial_weights_of_another_network_are_rejected(tmp_path: Path) -> None:
    train(tmp_path / "images", tiny("images-vqgan", steps=2))
    with pytest.raises(UserError, match="does not fit this network"):
        engine_in(tmp_path / "videos", tiny("videos-magvit2", init_from=str(tmp_path / "images")))
    with pytest.raises(UserError, match="no checkpoint"):
        engine_in(tmp_path / "videos", tiny("videos-magvit2", init_from=str(tmp_path / "nowhere")))
    assert not (tmp_path / "videos").exists()
