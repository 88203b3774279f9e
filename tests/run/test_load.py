"""Loading trained runs: objectives that overfit are loaded at their best checkpoint."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tessera.modalities.mesh.recipes import meshes_tree
from tessera.run.errors import UserError
from tessera.run.load import load_run
from tests.runs import train


def test_an_autoregressive_run_is_loaded_at_its_best_checkpoint(tmp_path):
    run = meshes_tree("tiny", text="none")
    engine = dataclasses.replace(
        run.engine, steps=3, batch_size=2, checkpoint_every=1, validate_every=1, keep_last=3
    )
    train(tmp_path, dataclasses.replace(run, engine=engine))
    metrics = tmp_path / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    for losses, expected in (((3.0, 1.0, 2.0), 2), ((3.0, 2.0, 1.0), 3), ((None, None, None), 3)):
        by_step = dict(zip((1, 2, 3), losses, strict=True))
        for record in records:
            if record.get("kind") == "validation":
                record["val_ema/cross_entropy"] = by_step[record["step"]]
        metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
        trained = load_run(tmp_path)
        assert trained.steps == expected
        assert any("Step 2 of 3 is used" in line for line in trained.notices) == (expected == 2)
    metrics.unlink()
    assert load_run(tmp_path).steps == 3


def test_load_best_off_loads_the_last_checkpoint(tmp_path):
    run = meshes_tree("tiny", text="none")
    engine = dataclasses.replace(
        run.engine, steps=2, batch_size=2, checkpoint_every=1, validate_every=1, keep_last=2
    )
    task = dataclasses.replace(run.task, load_best=False)
    train(tmp_path, dataclasses.replace(run, engine=engine, task=task))
    metrics = tmp_path / "metrics.jsonl"
    lines = [
        json.dumps({"step": step, "kind": "validation", "val_ema/cross_entropy": step})
        for step in (1, 2)
    ]
    metrics.write_text("".join(f"{line}\n" for line in lines))
    assert load_run(tmp_path).steps == 2


def test_unknown_weights_are_rejected(tmp_path):
    with pytest.raises(UserError, match="weights must be one of 'ema', 'raw', got 'last'"):
        load_run(tmp_path, weights="last")
