"""Tests of plans: numbers of the meta device equal those of a real step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.plans import plan_row
from tessera.engine.task import prepare_batch
from tessera.run.plan import load_batch, plan_run, plan_update
from tessera.run.train import build_task
from tests.cli_runner import run_invalid, tessera
from tests.pages import ROOT
from tests.runs import CASES

PLANNED = [
    "images-vqgan adversarial",
    "images-maskgit",
    "images-maskgit-superres",
    "videos-magvit2",
    "audio-codec adversarial",
    "audio-soundstorm",
    "music-mulan",
    "meshes-autoencoder",
    "meshes-transformer",
    "meshes-tree",
]
"""Cases of every kind of network."""


@pytest.mark.parametrize("case", PLANNED)
def test_a_plan_counts_what_it_counts_for_every_recipe(case):
    plan = plan_run(CASES[case](), "tiny")
    assert plan.parameters > 0 and plan.flops_per_step > 0 and plan.activation_bytes > 0
    assert len(plan.lines()) == 3


@pytest.mark.parametrize("case", ["images-vqgan adversarial", "videos-magvit2"])
def test_the_numbers_equal_those_of_a_real_step(case):
    """Networks without attention, of whose kernels for CPUs torch counts nothing."""
    run = CASES[case]()
    task = build_task(run)
    batch = prepare_batch(task, load_batch(run, {}), torch.device("cpu"))
    plan = plan_run(run, "tiny")
    for update, planned in zip(task.updates, plan.updates, strict=True):
        real = plan_update(update, batch)
        assert (real.name, real.parameters) == (planned.name, planned.parameters)
        assert real.flops == pytest.approx(planned.flops, rel=0.01)
        assert real.activation_bytes == pytest.approx(planned.activation_bytes, rel=0.05)


def test_checkpointing_keeps_fewer_activations_and_computes_more():
    run = CASES["images-maskgit"]()
    plans = [
        plan_run(replace(run, engine=replace(run.engine, checkpoint_activations=on)), "tiny")
        for on in (False, True)
    ]
    assert plans[1].activation_bytes < 0.8 * plans[0].activation_bytes
    assert plans[1].flops_per_step > 1.1 * plans[0].flops_per_step


def test_optimizer_states_are_those_of_the_optimizer():
    plan = plan_run(CASES["images-vqgan"](), "tiny")
    [update] = plan.updates
    assert update.optimizer == "adamw" and update.optimizer_bytes == 8 * update.parameters


@pytest.mark.parametrize("recipe", ["music-mulan", "meshes-autoencoder"])
def test_the_table_of_the_page_is_the_output_of_the_command(recipe):
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    assert f"| {' | '.join(plan_row(recipe, 'base'))} |" in page


def test_the_command_prints_a_plan_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ("--preset", "base", "--dry-run", "--plan-only", "--nproc", "1")
    result = tessera("train", "images-maskgit", *flags)
    assert result.code == 0 and "155,428,992" in result.text and "TFLOPs" in result.text
    assert list(tmp_path.iterdir()) == []
    assert "--plan-only is for --dry-run" in run_invalid("train", "images-vqgan", "--plan-only")


def test_a_loss_that_needs_data_cannot_be_planned():
    flags = ("--features", "ctc", "--preset", "tiny", "--dry-run", "--plan-only")
    message = run_invalid("train", "audio-semantic", *flags)
    assert "A loss of audio-semantic needs data" in message and "leave --plan-only out" in message
