"""bench/video.py: our sides do the configured work; other work is rejected."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def video(monkeypatch):
    """The bench script as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("video")
    monkeypatch.setattr(module.timing, "set_threads", lambda threads: None)
    return module


@pytest.fixture
def memory(video):
    return video.video_memory


def test_our_side_trains_networks_as_large_as_theirs(video, tmp_path):
    """magvit2-pytorch 0.5.1 has 884,693 parameters."""
    workload = video.OURS["our tokenizer"](tmp_path)
    workload.step()
    assert workload.info.parameters["model"] == pytest.approx(0.88e6, rel=0.05)
    assert set(workload.info.parameters) == {"model", "discriminator"}
    task = video.video_tokenizer.build_run(16, 64).task.build()
    assert [update.name for update in task.updates] == ["model", "discriminator"]
    assert (task.config.model.stride, task.config.model.time_factor) == (4, 2)


def test_the_larger_discriminator_has_the_operations_of_theirs(video):
    """The discriminator of magvit2-pytorch 0.5.1 has 403 MFLOP."""
    discriminator = video.video_tokenizer.build_run(128, 512).task.build().discriminator
    assert video.video_tokenizer.count_frame_mflop(discriminator) >= 403


def test_memory_is_the_growth_to_the_peak():
    script = (
        "import json, memory; from dataclasses import asdict; before = bytearray(b'a') * 2**26;"
        "use = memory.measure_memory(lambda: len(bytearray(b'b') * 2**27));"
        "print(json.dumps(asdict(use)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=BENCH, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["mb"] == pytest.approx(128, abs=4)


def test_a_variant_is_measured_in_a_process_of_its_own(video, memory):
    use = video.measure(memory.GROUPED, Namespace(threads=1))
    assert 0 <= use.mb < 100
    assert use.outcome < 0


def test_a_failing_variant_is_an_error(video):
    with pytest.raises(SystemExit, match="no such variant"):
        video.measure("no such variant", Namespace(threads=1))


def test_the_generated_video_comes_in_chunks_and_moves(memory):
    chunks = list(memory.moving_stripes(25))
    assert [chunk.shape[2] for chunk in chunks] == [8, 8, 8, 1]
    assert {chunk.shape[:2] + chunk.shape[3:] for chunk in chunks} == {(1, 3, 256, 256)}
    assert not torch.equal(chunks[0][:, :, 0], chunks[1][:, :, 0])


def test_chunks_and_whole_videos_have_the_same_number_of_frames(memory, monkeypatch):
    monkeypatch.setattr(memory, "FRAME_SIZE", 32)
    assert memory.run_in_chunks(1).outcome == memory.run_at_once(1).outcome == 25


def test_the_direct_penalty_equals_ours_in_one_group(memory, monkeypatch):
    monkeypatch.setattr(memory, "BITS", 8)
    exact = memory.run_our_penalty(20, group_bits=8).outcome
    assert memory.run_direct_penalty(20).outcome == pytest.approx(exact, rel=1e-5)
    # The batch entropy has a negative sign, and groups overestimate it.
    assert memory.run_our_penalty(20, group_bits=4).outcome < exact - 1e-3


@pytest.mark.parametrize(("exact", "rejected"), [(-0.5, False), (-0.51, True)])
def test_penalties_that_differ_are_rejected(
    video, memory, monkeypatch, exact: float, rejected: bool
):
    penalties = {
        memory.EXACT: exact,
        memory.DIRECT: -0.5,
        memory.GROUPED: -0.6,
        memory.GROUPED_MANY: -0.6,
    }
    monkeypatch.setattr(video, "measure", lambda name, args: memory.MemoryUse(1.0, penalties[name]))
    with pytest.raises(SystemExit, match="not the same work") if rejected else nullcontext():
        assert video.main(["--only", "lfq"]) == 0


@pytest.mark.parametrize(("mb", "code"), [(105.0, 0), (150.0, 1)])
def test_memory_above_the_target_is_exit_code_1(
    video, memory, monkeypatch, capsys, tmp_path, mb, code
):
    used = {memory.LONG: mb, memory.SHORT: 100.0, memory.SHORT_AT_ONCE: 300.0}
    monkeypatch.setattr(video, "measure", lambda name, args: memory.MemoryUse(used[name], 49))
    file = tmp_path / "numbers.json"
    assert video.main(["--only", "long", "--json", str(file)]) == code
    assert f"{mb / 100:.2f} times the memory of 2 s in chunks" in capsys.readouterr().out
    assert json.loads(file.read_text())["long"][memory.LONG]["mb"] == mb


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "step", "--peers-python", "missing"], "run `make peers`"),
        (["--only", "lfq", "--steps", "6"], "use a multiple of 4"),
    ],
)
def test_wrong_arguments_are_reported(video, capsys, arguments, message):
    with pytest.raises(SystemExit):
        video.main(arguments)
    assert message in capsys.readouterr().err
