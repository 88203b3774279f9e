"""bench/audio.py: our side does the configured work; other work is rejected."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def audio(monkeypatch):
    """The bench script as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("audio")
    monkeypatch.setattr(module.timing, "set_threads", lambda threads: None)
    return module


def test_our_side_trains_on_semantic_tokens(audio, tmp_path, monkeypatch):
    engines = []
    step = importlib.import_module("tessera.engine.engine").Engine.run_step
    monkeypatch.setattr(
        "tessera.engine.engine.Engine.run_step",
        lambda self, *args: engines.append(self) or step(self, *args),
    )
    workload = audio.OURS["our engine"](tmp_path)
    workload.step()
    model = engines[0].task.model
    table = model.network.token_conditioner.embedding.table.weight
    before = table.clone()
    workload.step()
    assert len(engines) == 2 and not torch.equal(table, before)
    assert workload.info.parameters["model"] == sum(one.numel() for one in model.parameters())


def test_our_network_is_about_as_large_as_theirs(audio):
    """soundstorm-pytorch 0.6.1: 1.23 M parameters, and 1,132 MFLOP for a batch of 4."""
    info = audio.audio_networks.our_info(audio.audio_networks.build_our_task(128))
    assert info.parameters["model"] == pytest.approx(1.23e6, rel=0.2)
    assert info.mflop["model"] == pytest.approx(1132, rel=0.2)


def test_a_sample_takes_the_configured_number_of_passes(audio, tmp_path):
    networks = audio.audio_networks
    small = networks.SampleSize(16, 3)
    assert (networks.SHORT.passes, networks.LONG.passes, small.passes) == (11, 19, 6)
    networks.build_our_sampler(tmp_path, size=small).step()


def test_samples_of_another_size_are_rejected(audio):
    networks = audio.audio_networks
    small = networks.SampleSize(16, 3)
    codes = torch.zeros(1, 16, 4, dtype=torch.long)
    networks.check_sample(codes, small)
    for wrong in (codes[:, 1:], codes - 1, codes + 256):
        with pytest.raises(SystemExit, match="16 x 4 tokens from 0 to 255 were expected"):
            networks.check_sample(wrong, small)
    with pytest.raises(SystemExit, match="took 0 forward passes, but 6 were expected"):
        networks.check_passes(lambda: None, [0], small)()


def test_the_step_with_code_vectors_has_their_embedding_and_logits(audio):
    networks = audio.audio_networks
    parameters = [
        networks.our_info(networks.build_our_task(128, dim)).parameters["model"]
        for dim in (None, 8, 16)
    ]
    assert parameters[0] < parameters[1] < parameters[2]


def test_the_long_sample_is_timed_in_few_blocks(audio, monkeypatch, capsys):
    runs = []

    def compare_all(self, comparisons, args):
        runs.append(([comparison.part for comparison in comparisons], args.blocks, args.steps))
        return audio.BenchResult({}, True)

    monkeypatch.setattr(audio.BenchScript, "compare_all", compare_all)
    settings = ["--peers-python", sys.executable, "--blocks", "30", "--steps", "4"]
    assert audio.main(settings) == 0
    assert runs == [(["step", "step"], 30, 4), (["sample"], 30, 4), (["long"], 3, 1)]
    assert "differences:" in capsys.readouterr().out


def test_missing_research_packages_are_reported(audio, capsys, tmp_path):
    with pytest.raises(SystemExit):
        audio.main(["--peers-python", str(tmp_path / "missing")])
    assert "run `make peers`" in capsys.readouterr().err
