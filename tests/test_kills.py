"""The short form of bench/kills.py: a handful of kills in a handful of steps, and that its judge is
not blind."""

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
    """The bench as a module; it is a script and in no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("kills", BENCH / "kills.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kills", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def load_run(tmp_path):
    """What two equal runs leave behind, as small as can be: nothing is trained here."""
    run = tmp_path / "peaceful"
    checkpoint = run / "checkpoints" / "000002"
    checkpoint.mkdir(parents=True)
    (run / "samples" / "000002").mkdir(parents=True)
    (run / "samples" / "000002" / "sheet.png").write_bytes(b"picture")
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
    (checkpoint / "state.json").write_text('{"done": 2}')
    shutil.copytree(run, tmp_path / "killed")
    return run, tmp_path / "killed"


def test_a_run_that_is_killed_again_and_again_is_the_run_that_was_never_killed(tmp_path):
    asked = "--kills 4 --seed 3 --steps 8 --phases training write rename prune --work-dir".split()
    done = subprocess.run(
        [sys.executable, BENCH / "kills.py", *asked, tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills (rank 0 4)" in done.stdout
    assert "all equal, bit for bit" in done.stdout


def test_the_judge_finds_two_equal_runs_equal_whatever_the_clock_says(kills, load_run):
    peaceful, killed = load_run
    metrics = killed / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("7.0", "9.0"))
    assert kills.list_differences(peaceful, killed) == []


def one_bit(killed: Path) -> None:
    path = killed / "checkpoints" / "000002" / "optimizer.model.safetensors"
    tensors = load_file(path)
    tensors["exp_avg/weight"] = np.nextafter(tensors["exp_avg/weight"], 9)
    save_file(tensors, path)


def a_step_twice(killed: Path) -> None:
    path = killed / "metrics.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines(keepends=True)[-1])


def another_number(killed: Path) -> None:
    path = killed / "metrics.jsonl"
    path.write_text(path.read_text().replace("0.25", "0.2500001"))


def a_missing_sample(killed: Path) -> None:
    (killed / "samples" / "000002" / "sheet.png").unlink()


def another_counter(killed: Path) -> None:
    (killed / "checkpoints" / "000002" / "state.json").write_text('{"done": 3}')


def an_older_end(killed: Path) -> None:
    (killed / "checkpoints" / "000002").rename(killed / "checkpoints" / "000001")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (one_bit, "['exp_avg/weight']"),
        (a_step_twice, "3 lines instead of 2"),
        (another_number, "line 2: model/loss 0.25 / 0.2500001"),
        (a_missing_sample, "sheet.png differs"),
        (another_counter, "state.json differs"),
        (an_older_end, "end at ['000001'] instead of ['000002']"),
    ],
)
def test_the_judge_names_the_smallest_difference(kills, load_run, harm, told):
    peaceful, killed = load_run
    harm(killed)
    [difference] = kills.list_differences(peaceful, killed)
    assert told in difference


def test_every_phase_gets_its_share_of_the_kills_and_a_seed_repeats_them(kills):
    first, again = (
        kills.schedule_phases(24, kills.DEFAULT_PHASES, kills.random.Random(7)) for _ in range(2)
    )
    assert first == again
    assert set(first) == {"timer", *kills.PHASES}
    assert first.count("timer") == 8
