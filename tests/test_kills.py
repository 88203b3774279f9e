"""A short form of bench/kills.py, and tests of its comparison of runs."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def kills(monkeypatch):
    """Import the bench, which is a script in no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("kills", BENCH / "kills.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kills", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def equal_runs(tmp_path):
    """Write two equal run directories without training."""
    run = tmp_path / "reference"
    checkpoint = run / "checkpoints" / "000002"
    checkpoint.mkdir(parents=True)
    (run / "samples" / "000002").mkdir(parents=True)
    (run / "samples" / "000002" / "sheet.png").write_bytes(b"image")
    (run / "config.json").write_text("{}")
    (run / "README.md").write_text("card")
    lines = [
        {"step": step, "model/loss": 0.5 / step, "examples_per_second": 7.0} for step in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_file(
        {"exp_avg/weight": np.arange(3.0), "step/weight": np.array(2.0)},
        checkpoint / "optimizer.model.safetensors",
    )
    (checkpoint / "state.json").write_text('{"step": 2}')
    shutil.copytree(run, tmp_path / "killed")
    return run, tmp_path / "killed"


def test_a_repeatedly_killed_run_equals_an_uninterrupted_one(tmp_path):
    arguments = (
        "--kills 4 --seed 3 --steps 8 --phases training write rename prune --work-dir".split()
    )
    done = subprocess.run(
        [sys.executable, BENCH / "kills.py", *arguments, tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills (rank 0 4)" in done.stdout
    assert "all equal, bit for bit" in done.stdout


def test_runs_that_differ_in_time_only_are_equal(kills, equal_runs):
    reference, killed = equal_runs
    metrics = killed / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("7.0", "9.0"))
    assert kills.list_differences(reference, killed) == []


def change_one_bit(killed: Path) -> None:
    path = killed / "checkpoints" / "000002" / "optimizer.model.safetensors"
    tensors = load_file(path)
    tensors["exp_avg/weight"] = np.nextafter(tensors["exp_avg/weight"], 9)
    save_file(tensors, path)


def repeat_a_step(killed: Path) -> None:
    path = killed / "metrics.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines(keepends=True)[-1])


def change_a_metric(killed: Path) -> None:
    path = killed / "metrics.jsonl"
    path.write_text(path.read_text().replace("0.25", "0.2500001"))


def remove_a_sample(killed: Path) -> None:
    (killed / "samples" / "000002" / "sheet.png").unlink()


def change_a_counter(killed: Path) -> None:
    (killed / "checkpoints" / "000002" / "state.json").write_text('{"step": 3}')


def remove_the_last_step(killed: Path) -> None:
    (killed / "checkpoints" / "000002").rename(killed / "checkpoints" / "000001")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_one_bit, "['exp_avg/weight']"),
        (repeat_a_step, "3 lines instead of 2"),
        (change_a_metric, "line 2: model/loss 0.25 / 0.2500001"),
        (remove_a_sample, "sheet.png differs"),
        (change_a_counter, "state.json differs"),
        (remove_the_last_step, "end at ['000001'] instead of ['000002']"),
    ],
)
def test_the_smallest_difference_is_reported(kills, equal_runs, change, message):
    reference, killed = equal_runs
    change(killed)
    [difference] = kills.list_differences(reference, killed)
    assert message in difference


def test_kills_are_spread_over_phases_and_repeatable_by_seed(kills):
    first, again = (
        kills.schedule_phases(24, kills.DEFAULT_PHASES, kills.random.Random(7)) for _ in range(2)
    )
    assert first == again
    assert set(first) == {"timer", *kills.PHASES}
    assert first.count("timer") == 8
