"""bench/video.py in small: its sides and ways do the work they claim, and its judges are not blind.
Nothing is timed here."""

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
    """The bench as a module; it is a script and in no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("video")
    monkeypatch.setattr(
        module.pairs, "pin", lambda threads: None
    )  # the threads of the tests are not the bench's to choose
    return module


@pytest.fixture
def memory(video):
    return video.video_memory


def test_our_side_does_a_step_of_both_networks_at_the_size_of_theirs(video, tmp_path):
    side = video.OURS["our tokenizer"](tmp_path)
    side.step()
    assert side.about.parameters["model"] == pytest.approx(
        0.88e6, rel=0.05
    )  # magvit2-pytorch 0.5.1 has 884,693
    assert set(side.about.parameters) == {"model", "judge"}
    task = video.video_tokenizer.run_of(16, 64).task.build()
    assert [update.name for update in task.updates] == ["model", "discriminator"]
    assert (task.config.model.stride, task.config.model.time_factor) == (4, 2)


def test_the_costlier_judge_has_the_operations_of_theirs(video):
    judge = video.video_tokenizer.run_of(128, 512).task.build().discriminator
    assert (
        video.video_tokenizer.frame_mflop(judge) >= 403
    )  # what is counted for magvit2-pytorch 0.5.1


def test_growth_is_measured_from_now_to_the_peak():
    script = (
        "import json, memory as v; from dataclasses import asdict; kept = bytearray(b'a') * 2**26;"
        "print(json.dumps(asdict(v.measured(lambda: len(bytearray(b'b') * 2**27)))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=BENCH, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["mb"] == pytest.approx(128, abs=4)


def test_a_way_runs_in_a_process_of_its_own_and_tells_what_it_took(video, memory):
    found = video.used(memory.GROUPED, Namespace(threads=1))
    assert 0 <= found.mb < 100
    assert found.outcome < 0


def test_a_way_that_dies_is_not_taken_for_one_that_took_nothing(video):
    with pytest.raises(SystemExit, match="no such way"):
        video.used("no such way", Namespace(threads=1))


def test_the_wave_comes_in_pieces_and_moves(memory):
    pieces = list(memory.wave(25))
    assert [piece.shape[2] for piece in pieces] == [8, 8, 8, 1]
    assert {piece.shape[:2] + piece.shape[3:] for piece in pieces} == {(1, 3, 256, 256)}
    assert not torch.equal(pieces[0][:, :, 0], pieces[1][:, :, 0])


def test_in_pieces_and_at_once_the_same_number_of_frames_comes_back(memory, monkeypatch):
    monkeypatch.setattr(memory, "SIDE", 32)
    assert memory.in_pieces(1).outcome == memory.at_once(1).outcome == 25


def test_the_penalty_as_written_is_ours_in_one_group_and_bounded_by_ours_in_two(
    memory, monkeypatch
):
    monkeypatch.setattr(memory, "BITS", 8)
    exact, grouped = memory.ours(20, group_bits=8).outcome, memory.ours(20, group_bits=4).outcome
    assert memory.as_written(20).outcome == pytest.approx(exact, rel=1e-5)
    assert (
        grouped < exact - 1e-3
    )  # the use of symbols counts negatively, and in groups it is overestimated


@pytest.mark.parametrize(("exact", "refused"), [(-0.5, False), (-0.51, True)])
def test_two_penalties_that_differ_are_refused(
    video, memory, monkeypatch, exact: float, refused: bool
):
    penalties = {memory.EXACT: exact, memory.NAIVE: -0.5, memory.GROUPED: -0.6, memory.MANY: -0.6}
    monkeypatch.setattr(video, "used", lambda name, asked: memory.Used(1.0, penalties[name]))
    with pytest.raises(SystemExit, match="not the same work") if refused else nullcontext():
        assert video.main(["--what", "lfq"]) == 0


@pytest.mark.parametrize(("mb", "code"), [(105.0, 0), (150.0, 1)])
def test_memory_that_grows_with_the_clip_ends_in_exit_code_1(
    video, memory, monkeypatch, capsys, tmp_path, mb, code
):
    took = {memory.LONG: mb, memory.SHORT: 100.0, memory.SHORT_AT_ONCE: 300.0}
    monkeypatch.setattr(video, "used", lambda name, asked: memory.Used(took[name], 49))
    assert video.main(["--what", "long", "--json", str(tmp_path / "numbers.json")]) == code
    assert f"{mb / 100:.2f} times the memory of 2 s in pieces" in capsys.readouterr().out
    assert json.loads((tmp_path / "numbers.json").read_text())["long"][memory.LONG]["mb"] == mb


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["--what", "step"], "give --peer-env and --peer-adapters"),
        (["--what", "lfq", "--steps", "6"], "blocks of 6 would not be alike"),
    ],
)
def test_what_cannot_be_measured_is_refused(video, capsys, asked, says):
    with pytest.raises(SystemExit):
        video.main(asked)
    assert says in capsys.readouterr().err
