"""bench/images.py in small: our sides do the work they claim. Nothing is timed here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def images(monkeypatch):
    """The bench as a module; it is a script and in no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("images")


def test_our_generator_is_of_the_size_that_is_compared_and_learns(images, tmp_path):
    side = images.OURS["our generator"](tmp_path)
    assert side.about.parameters["model"] == pytest.approx(0.57e6, rel=0.02)
    assert side.about.mflop["model"] == pytest.approx(281, rel=0.02)
    assert side.step()["model"].norm > 0


def test_what_is_cached_and_what_is_live_teach_the_same_from_the_same_files(
    images, monkeypatch, tmp_path
):
    monkeypatch.setattr(images.cached, "PICTURES", 32)
    cached, live = (
        images.cached.step(tmp_path, size="64", codes=codes) for codes in ("cache", "raw")
    )
    assert (
        sorted(path.suffix for path in (tmp_path / "pictures").iterdir())
        == [".jpg"] * 32 + [".txt"] * 32
    )
    for _ in range(2):
        torch.testing.assert_close(cached.step()["model"].norm, live.step()["model"].norm)
    assert (tmp_path / "cache" / "cache").is_dir() and not (tmp_path / "live" / "cache").exists()
