"""bench/music.py in small: its sides do the work they claim, and its judges are not blind. Nothing
is timed here."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def music(monkeypatch):
    """The bench as a module; it is a script and in no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("music")
    monkeypatch.setattr(
        module.pairs, "pin", lambda threads: None
    )  # the threads of the tests are not the bench's to choose
    return module


def test_our_side_learns_from_whole_batches(music, tmp_path, monkeypatch) -> None:
    moved = []
    step = importlib.import_module("tessera.engine.engine").Engine.step
    monkeypatch.setattr(
        "tessera.engine.engine.Engine.step",
        lambda self, *rest: moved.append((self, rest)) or step(self, *rest),
    )
    side = music.music_networks.ours(tmp_path)
    assert 0 < float(side.step()["model"].norm) < 1000
    [(engine, (_, [batch]))] = moved
    assert (
        batch.examples.samples.shape == (8, 1, 4096)
        and len(batch.examples.captions[0].split()) == 32
    )
    assert side.about.parameters["model"] == sum(
        parameter.numel() for parameter in engine.task.model.parameters()
    )
    assert side.about.mflop["model"] > 1


def test_our_network_is_about_as_large_as_theirs(music) -> None:
    """musiclm-pytorch 0.2.8: 0.99 M, and 84 patches of which 63 are kept."""
    model = music.music_networks.config().build()
    assert music.music_networks.parameters(model) == pytest.approx(0.99e6, rel=0.3)
    heard = model.audio.hear(torch.randn(1, 4096), torch.tensor([4096]))
    assert model.audio.patches(heard).values_BPV.shape == (1, 88, 256)


def used(music, cached: float = 100.0, small: float = 90.0, outcome: float = 4.5):
    return {music.CACHED: (cached, outcome), music.SMALL: (small, 3.4), music.AT_ONCE: (700.0, 4.5)}


@pytest.mark.parametrize(("cached", "code"), [(100.0, 0), (134.0, 0), (136.0, 1)])
def test_too_much_memory_ends_in_exit_code_1(
    music, monkeypatch, capsys, tmp_path, cached: float, code: int
) -> None:
    told = used(music, cached)
    monkeypatch.setattr(
        music.memory, "told_by", lambda name, command: dict(zip(("mb", "outcome"), told[name]))
    )
    assert music.main(["--what", "memory", "--json", str(tmp_path / "numbers.json")]) == code
    assert (
        f"takes {cached / 90:.2f} times the memory of 32 by itself; wanted: at most 1.5"
        in capsys.readouterr().out
    )
    assert (
        json.loads((tmp_path / "numbers.json").read_text())["memory"][music.CACHED]["mb"] == cached
    )


def test_other_work_is_refused(music, monkeypatch) -> None:
    told = used(music, outcome=4.6)
    monkeypatch.setattr(
        music.memory, "told_by", lambda name, command: dict(zip(("mb", "outcome"), told[name]))
    )
    with pytest.raises(SystemExit, match="they are not the same work"):
        music.main(["--what", "memory"])


def test_the_package_must_be_there_for_a_comparison(music, capsys) -> None:
    with pytest.raises(SystemExit):
        music.main(["--what", "step"])
    assert "give --peer-env and --peer-adapters" in capsys.readouterr().err


def test_memory_is_that_of_one_step(music, monkeypatch) -> None:
    """Of a small one: two micro-batches of two are told apart from each other."""
    seen = []
    task = importlib.import_module("tessera.objectives.contrastive").ContrastiveTask
    look = task.look_at_whole_batch
    monkeypatch.setattr(
        task,
        "look_at_whole_batch",
        lambda self, micros, *rest: (
            seen.append([len(one) for one in micros]) or look(self, micros, *rest)
        ),
    )
    found = music.music_networks.stepped(4, 2)
    # So small a step may find all it needs in what this process has freed before.
    assert seen == [[2], [2, 2]] and found.mb >= 0 and found.outcome < 10
