"""bench/sound.py in small: its sides do the work they claim, and its judges are not blind. Nothing
is timed here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def sound(monkeypatch):
    """The bench as a module; it is a script and in no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("sound")
    monkeypatch.setattr(
        module.pairs, "pin", lambda threads: None
    )  # the threads of the tests are not the bench's to choose
    return module


def test_our_side_learns_by_levels_under_what_is_said(sound, tmp_path, monkeypatch):
    moved = []
    step = importlib.import_module("tessera.engine.engine").Engine.step
    monkeypatch.setattr(
        "tessera.engine.engine.Engine.step",
        lambda self, *rest: moved.append(self) or step(self, *rest),
    )
    side = sound.OURS["our engine"](tmp_path)
    side.step()
    network = moved[0].task.model.network
    before = network.smaller.embedding.table.weight.clone()
    side.step()
    assert len(moved) == 2 and not torch.equal(network.smaller.embedding.table.weight, before), (
        "the condition is learnt from"
    )
    assert side.about.parameters["model"] == sum(
        parameter.numel() for parameter in moved[0].task.model.parameters()
    )


def test_our_network_is_about_as_large_as_theirs(sound):
    """soundstorm-pytorch 0.6.1: 1.23 M parameters, and 1,132 MFLOP for a batch of 4."""
    about = sound.sound_networks.about_us(sound.sound_networks.our_task(128))
    assert about.parameters["model"] == pytest.approx(1.23e6, rel=0.2)
    assert about.mflop["model"] == pytest.approx(1132, rel=0.2)


def test_a_sample_is_made_in_the_rounds_that_are_told(sound, tmp_path):
    networks = sound.sound_networks
    short = networks.Length(16, 3)
    assert (networks.SHORT.passes, networks.LONG.passes, short.passes) == (11, 19, 6)
    networks.our_sample(tmp_path, length=short).step()


def test_whoever_does_other_work_is_refused(sound):
    networks = sound.sound_networks
    short = networks.Length(16, 3)
    codes = torch.zeros(1, 16, 4, dtype=torch.long)
    networks.refuse_other_work(codes, short)
    for other in (codes[:, 1:], codes - 1, codes + 256):
        with pytest.raises(SystemExit, match="16 x 4 symbols"):
            networks.refuse_other_work(other, short)
    with pytest.raises(SystemExit, match="takes 6 passes, but there were 0"):
        networks.checked(lambda: None, [0], short)()


def test_the_long_sample_is_taken_only_a_few_times_and_the_package_must_be_given(
    sound, monkeypatch, capsys, tmp_path
):
    asked = []

    def noted(self, comparisons, how):
        asked.append(([comparison.what for comparison in comparisons], how.blocks, how.steps))
        return sound.Finding({}, True)

    monkeypatch.setattr(sound.Script, "find", noted)
    where = ["--peer-env", str(tmp_path), "--peer-adapters", str(tmp_path)]
    assert sound.main([*where, "--blocks", "30", "--steps", "4"]) == 0
    assert asked == [(["step"], 30, 4), (["sample"], 30, 4), (["long"], 3, 1)]
    assert "not the same" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        sound.main([])
