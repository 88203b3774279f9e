"""--compile, for every recipe by dynamo alone and for one with inductor."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from tessera.recipes.registry import RECIPES, recipe_name
from tests.runs import read_checkpoint, read_metrics, tiny, train

MAX_RECOMPILATIONS = 3
STEPS = 20
OUTSIDE_OF_NETWORKS = (
    "torch.autograd.grad",
    "requires_grad_()",
    "Tensor.item()",
    "torch.compiler.disable",
)
"""Graph breaks of losses that compute gradients (adaptive weights, gradient penalties), of
codebooks and feature statistics while it is read whether they are initialized, and of the features
of audio and the CTC loss, which depend on each length."""
VARIED = {
    "audio-semantic": "audio-semantic ctc",
    "audio-soundstorm": "audio-soundstorm speakers",
}
"""Cases with examples of many lengths in place of those with one."""
# Warnings of dynamo and inductor about themselves.
pytestmark = pytest.mark.filterwarnings("ignore")


def read_losses(folder: Path) -> list[float]:
    return [record["model/loss"] for record in read_metrics(folder) if record["kind"] == "train"]


def train_both(case: str, backend: str, steps: int, tmp_path: Path) -> None:
    """Train a case compiled and not compiled; a recompilation above the limit is an error."""
    torch._dynamo.reset()
    counters.clear()
    run: Any = tiny(case, steps=steps, validate_every=1000, sample_every=1000)
    train(tmp_path / "plain", run)
    limits = {
        "recompile_limit": 1 + MAX_RECOMPILATIONS,
        "fail_on_recompile_limit_hit": True,
    }
    with (
        mock.patch("tessera.engine.engine.COMPILE_BACKEND", backend),
        torch._dynamo.config.patch(**limits),
    ):
        train(tmp_path / "compiled", tiny(case, steps=steps, compile=True))


@pytest.mark.parametrize("case", [VARIED.get(name, name) for name in map(recipe_name, RECIPES)])
def test_losses_compile_without_graph_breaks_in_networks(case: str, tmp_path: Path) -> None:
    train_both(case, "eager", STEPS, tmp_path)
    breaks = [
        one for one in counters["graph_break"] if not any(o in one for o in OUTSIDE_OF_NETWORKS)
    ]
    assert breaks == []
    assert counters["stats"]["unique_graphs"] >= 1
    losses = read_losses(tmp_path / "compiled")
    assert losses == pytest.approx(read_losses(tmp_path / "plain"), rel=1e-4)


def test_inductor_gives_the_same_losses_and_names(tmp_path: Path) -> None:
    train_both("images-vqgan", "inductor", 6, tmp_path)
    losses = read_losses(tmp_path / "compiled")
    assert losses == pytest.approx(read_losses(tmp_path / "plain"), rel=1e-4)
    names = [read_checkpoint(tmp_path / run, 6).keys() for run in ("plain", "compiled")]
    assert names[0] == names[1]
    train(tmp_path / "compiled", tiny("images-vqgan", steps=8))  # resumed without it
