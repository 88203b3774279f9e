"""bench/music.py: our side does the configured work; other work is rejected."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def music(monkeypatch):
    """The bench script as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("music")
    monkeypatch.setattr(module.timing, "set_threads", lambda threads: None)
    return module


def test_our_side_trains_on_whole_batches(music, tmp_path, monkeypatch) -> None:
    steps = []
    step = importlib.import_module("tessera.engine.engine").Engine.run_step
    monkeypatch.setattr(
        "tessera.engine.engine.Engine.run_step",
        lambda self, *args: steps.append((self, args)) or step(self, *args),
    )
    workload = music.music_networks.build_ours(tmp_path)
    assert 0 < float(workload.step()["model"].norm) < 1000
    [(engine, (_, [batch]))] = steps
    assert batch.examples.samples.shape == (8, 1, 4096)
    assert len(batch.examples.captions[0].split()) == 32
    parameters = engine.task.model.parameters()
    assert workload.info.parameters["model"] == sum(one.numel() for one in parameters)
    assert workload.info.mflop["model"] > 1


def test_our_network_is_about_as_large_as_theirs(music) -> None:
    """musiclm-pytorch 0.2.8: 0.99 M, and 84 patches of which 63 are kept."""
    model = music.music_networks.model_config().build()
    assert music.music_networks.count_parameters(model) == pytest.approx(0.99e6, rel=0.3)
    spectrogram = model.audio.compute_spectrogram(torch.randn(1, 4096), torch.tensor([4096]))
    assert model.audio.patchify(spectrogram).values_BPV.shape == (1, 88, 256)


def fake_processes(music, monkeypatch, micro_mb: float = 100.0, micro_loss: float = 4.5) -> None:
    """Replace the measured processes by numbers."""
    results = {
        music.IN_MICRO_BATCHES: {"mb": micro_mb, "outcome": micro_loss},
        music.SMALL_BATCH: {"mb": 90.0, "outcome": 3.4},
        music.AT_ONCE: {"mb": 700.0, "outcome": 4.5},
    }
    monkeypatch.setattr(music.memory, "run_process", lambda name, command: results[name])


@pytest.mark.parametrize(("mb", "code"), [(100.0, 0), (134.0, 0), (136.0, 1)])
def test_memory_above_the_target_is_exit_code_1(
    music, monkeypatch, capsys, tmp_path, mb: float, code: int
) -> None:
    fake_processes(music, monkeypatch, micro_mb=mb)
    file = tmp_path / "numbers.json"
    assert music.main(["--only", "memory", "--json", str(file)]) == code
    output = capsys.readouterr().out
    assert f"{mb / 90:.2f} times the memory of batch of 32 (target: at most 1.5)" in output
    assert json.loads(file.read_text())["memory"][music.IN_MICRO_BATCHES]["mb"] == mb


def test_variants_with_different_losses_are_rejected(music, monkeypatch) -> None:
    fake_processes(music, monkeypatch, micro_loss=4.6)
    with pytest.raises(SystemExit, match="they are not the same work"):
        music.main(["--only", "memory"])


def test_missing_research_packages_are_reported(music, capsys, tmp_path) -> None:
    with pytest.raises(SystemExit):
        music.main(["--only", "step", "--peers-python", str(tmp_path / "missing")])
    assert "run `make peers`" in capsys.readouterr().err


def test_memory_is_that_of_one_step(music, monkeypatch) -> None:
    """Two micro-batches of two, after a warm-up step of one batch of two."""
    sizes = []
    task = importlib.import_module("tessera.objectives.contrastive").ContrastiveTask
    prepare = task.gather_embeddings
    monkeypatch.setattr(
        task,
        "gather_embeddings",
        lambda self, micros, *args: (
            sizes.append([len(one) for one in micros]) or prepare(self, micros, *args)
        ),
    )
    use = music.music_networks.run_step(4, 2)
    # So small a step may fit into memory that this process has freed before.
    assert sizes == [[2], [2, 2]] and use.mb >= 0 and use.outcome < 10
