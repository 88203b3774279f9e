"""A generator that was looked at amid its training goes on as before: in train mode, captions left
out as often."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.runs import engine_in, tiny


@pytest.mark.parametrize("case", ["images-maskgit", "meshes-transformer"])
def test_after_validation_and_samples_it_is_in_train_mode_and_captions_are_dropped_at_their_rate(
    case: str, tmp_path: Path
) -> None:
    run = tiny(
        case, steps=40, validate_every=10, sample_every=10, checkpoint_every=40, sample_count=2
    )
    engine = engine_in(
        tmp_path, dataclasses.replace(run, task=dataclasses.replace(run.task, cond_drop_prob=0.4))
    )
    network, steps = engine.task.network, []
    condition, step = network.condition, engine.step
    learning: list[bool] = []
    dropped: list[bool] = []

    def noted_step(*arguments: object) -> object:
        steps.append(network.training)
        learning.append(True)
        moved = step(*arguments)
        learning.clear()
        return moved

    def noted_condition(texts: list[str], left_out: list[bool], *rest: object) -> object:
        dropped.extend(left_out if learning else [])
        assert learning or not any(left_out) or not network.training, (
            "in validation nothing is left out but for guidance"
        )
        return condition(texts, left_out, *rest)

    engine.step, network.condition = noted_step, noted_condition
    engine.run()
    assert steps == [True] * 40
    for part in (
        dropped[: len(dropped) // 4],
        dropped[len(dropped) // 4 :],
    ):  # before the first validation, and after
        assert sum(part) / len(part) == pytest.approx(0.4, abs=0.15)
