"""bench/images.py: our sides do the configured work; other work is rejected."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def images(monkeypatch):
    """The bench script as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("images")


def test_our_generator_has_the_expected_size_and_trains(images, tmp_path):
    workload = images.OURS["our generator"](tmp_path)
    assert workload.info.parameters["model"] == pytest.approx(0.57e6, rel=0.02)
    assert workload.info.mflop["model"] == pytest.approx(281, rel=0.02)
    assert workload.step()["model"].norm > 0


def test_our_sampler_generates_tokens(images, tmp_path):
    codes = images.OURS["our sampler"](tmp_path).step()
    assert codes.shape == (1, 8, 8) and int(codes.min()) >= 0 and int(codes.max()) < 256


def test_our_tokenizer_trains_both_networks(images, tmp_path):
    workload = images.OURS["ours, GP every 4"](tmp_path)
    assert set(workload.info.parameters) == {"model", "discriminator"}
    assert set(workload.step()) == {"model", "discriminator"}


def test_cached_and_live_tokens_train_the_same_model(images, monkeypatch, tmp_path):
    monkeypatch.setattr(images.token_cache, "NUM_IMAGES", 32)
    cached, live = (
        images.token_cache.build_step(tmp_path, size="64", tokens=tokens)
        for tokens in ("cache", "live")
    )
    suffixes = sorted(path.suffix for path in (tmp_path / "images").iterdir())
    assert suffixes == [".jpg"] * 32 + [".txt"] * 32
    for _ in range(2):
        torch.testing.assert_close(cached.step()["model"].norm, live.step()["model"].norm)
    assert (tmp_path / "cache" / "cache").is_dir() and not (tmp_path / "live" / "cache").exists()


def test_every_comparison_has_its_workers(images):
    for comparison in images.COMPARISONS:
        assert comparison.ours in images.OURS
        assert comparison.theirs in images.THEIRS | images.OURS


def test_missing_research_packages_are_reported(images, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(images.timing, "set_threads", lambda threads: None)
    with pytest.raises(SystemExit):
        images.main(["--only", "masked", "--peers-python", str(tmp_path / "missing")])
    assert "run `make peers`" in capsys.readouterr().err
