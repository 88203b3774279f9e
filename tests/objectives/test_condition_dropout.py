"""Validation and samples during training change neither train mode nor caption dropout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.runs import engine_in, tiny


@pytest.mark.parametrize("case", ["images-maskgit", "meshes-transformer"])
def test_train_mode_and_caption_dropout_survive_validation_and_samples(
    case: str, tmp_path: Path
) -> None:
    run: Any = tiny(
        case, steps=40, validate_every=10, sample_every=10, checkpoint_every=40, sample_count=2
    )
    run = dataclasses.replace(run, task=dataclasses.replace(run.task, cond_drop_prob=0.4))
    engine: Any = engine_in(tmp_path, run)
    network = engine.task.network
    condition, run_step = network.condition, engine.run_step
    modes: list[bool] = []
    dropped_in_training: list[bool] = []
    in_step = False

    def record_step(*args: object) -> object:
        nonlocal in_step
        modes.append(network.training)
        in_step = True
        results = run_step(*args)
        in_step = False
        return results

    def record_condition(texts: Any, dropped: list[bool] = (), *args: object) -> object:
        prepared = hasattr(texts, "has_text_B")
        in_training = (~texts.has_text_B).tolist() if prepared else dropped
        dropped_in_training.extend(in_training if in_step else [])
        assert in_step or not any(dropped) or not network.training, (
            "outside of training captions are dropped only for guidance, in eval mode"
        )
        return condition(texts, dropped, *args)

    engine.run_step, network.condition = record_step, record_condition
    engine.run()
    assert modes == [True] * 40
    quarter = len(dropped_in_training) // 4  # the steps before the first validation
    for part in (dropped_in_training[:quarter], dropped_in_training[quarter:]):
        assert sum(part) / len(part) == pytest.approx(0.4, abs=0.15)
