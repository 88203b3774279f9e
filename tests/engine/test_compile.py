"""--compile, for every recipe by dynamo alone and for one with inductor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch._dynamo.utils import counters

from tessera.recipes.registry import RECIPES, recipe_name
from tessera.run.config import Run
from tests.runs import (
    endless,
    engine_in,
    read_checkpoint,
    read_metrics,
    tiny,
    train,
    train_steps,
)

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


@contextmanager
def compiling(backend: str) -> Iterator[None]:
    """Compile with a backend; a recompilation above the limit is an error."""
    torch._dynamo.reset()
    counters.clear()
    limits = {
        "recompile_limit": 1 + MAX_RECOMPILATIONS,
        "fail_on_recompile_limit_hit": True,
    }
    with (
        mock.patch("tessera.engine.updates.COMPILE_BACKEND", backend),
        torch._dynamo.config.patch(**limits),
    ):
        yield


@pytest.mark.parametrize("case", [VARIED.get(name, name) for name in map(recipe_name, RECIPES)])
def test_losses_compile_without_graph_breaks_in_networks(case: str, tmp_path: Path) -> None:
    train_steps(engine_in(tmp_path / "plain", endless(case)), STEPS)
    with compiling("eager"):
        train_steps(engine_in(tmp_path / "compiled", endless(case, compile=True)), STEPS)
    breaks = [
        one for one in counters["graph_break"] if not any(o in one for o in OUTSIDE_OF_NETWORKS)
    ]
    assert breaks == []
    assert counters["stats"]["unique_graphs"] >= 1
    losses = read_losses(tmp_path / "compiled")
    assert len(losses) == STEPS
    assert losses == pytest.approx(read_losses(tmp_path / "plain"), rel=1e-4)


def with_one_layer(run: Run) -> Run:
    """Return an image tokenizer with few layers: a C++ compiler takes seconds for each."""
    model = replace(run.task.model, layers=1, blocks=(0,))
    return replace(run, task=replace(run.task, model=model))


def test_inductor_gives_the_same_losses_and_names(tmp_path: Path) -> None:
    train(tmp_path / "plain", with_one_layer(tiny("images-vqgan", steps=6)))
    one_process = torch._inductor.config.patch(compile_threads=1)  # without a pool of processes
    with compiling("inductor"), one_process:
        train(tmp_path / "compiled", with_one_layer(tiny("images-vqgan", steps=6, compile=True)))
    losses = read_losses(tmp_path / "compiled")
    assert losses == pytest.approx(read_losses(tmp_path / "plain"), rel=1e-4)
    names = [read_checkpoint(tmp_path / run, 6).keys() for run in ("plain", "compiled")]
    assert names[0] == names[1]
    resumed = train(tmp_path / "compiled", with_one_layer(tiny("images-vqgan", steps=8)))
    assert resumed.global_step == 8  # without compilation
