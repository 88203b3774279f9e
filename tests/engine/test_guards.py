"""A sick step is skipped and counted, a sick run is stopped with a letter, and alarms are raised
once."""

from __future__ import annotations

import pytest
import torch

from tessera.engine.guards import Diverged, Health, NonFiniteGuard
from tessera.engine.task import Alarm, Batch, Loss
from tests.engine.toy import toy_engine


def test_skipped_steps_are_counted_and_a_run_of_them_stops_the_run():
    guard = NonFiniteGuard(patience=3)
    guard.skip("model", ["a.png"])
    guard.skip("model", ["b.png"])
    with pytest.raises(Diverged) as stopped:
        guard.skip("model", ["c.png", "d.png"])
    letter = str(stopped.value)
    assert "'model'" in letter and "3 steps in a row" in letter and "c.png, d.png" in letter
    assert "learning rate" in letter
    assert stopped.value.exit_code == 1 and guard.skipped == 3


def test_one_good_step_starts_the_count_again():
    guard = NonFiniteGuard(patience=2)
    for _ in range(5):
        guard.skip("model", [])
        guard.fine("model")
    assert guard.skipped == 5


def test_each_update_has_a_count_of_its_own():
    guard = NonFiniteGuard(patience=2)
    guard.skip("model", [])
    guard.fine("judge")
    guard.skip("judge", [])
    with pytest.raises(Diverged, match="'model'"):
        guard.skip("model", [])


def test_the_count_survives_a_resume():
    """Otherwise a run that is restarted whenever it stops would go on for ever without learning."""
    first, second = NonFiniteGuard(patience=3), NonFiniteGuard(patience=3)
    first.skip("model", [])
    first.skip("model", [])
    second.restore(first.state())
    assert second.skipped == 2
    with pytest.raises(Diverged):
        second.skip("model", [])


def sick_at(engine, steps: set[int]) -> None:
    """The loss of these steps is not a number."""
    well = engine.task.miss

    def miss(batch: Batch, step: int) -> Loss:
        loss = well(batch, step)
        return Loss({"error": loss.terms["error"] * float("nan")}) if step in steps else loss

    engine.prepared["model"].objective._loss = miss


def test_a_step_that_is_not_finite_touches_no_weight_and_no_moment(tmp_path):
    engine = toy_engine(tmp_path, steps=3, log_every=1)
    sick_at(engine, {1})
    seen: list[torch.Tensor] = []
    for _ in engine.steps():
        moments = engine.prepared["model"].optimizer.state[engine.task.model[0].weight]["exp_avg"]
        seen.append(
            torch.cat([engine.task.model[0].weight.detach().flatten(), moments.flatten()]).clone()
        )
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert [record["skipped_steps"] for record in engine.folder.records("train")] == [0, 1, 1]
    noted = engine.folder.noted("nonfinite.jsonl")
    assert [(line["step"], line["update"], len(line["examples"])) for line in noted] == [
        (1, "model", 4)
    ]
    assert all(name.startswith("row ") for name in noted[0]["examples"])


def test_a_run_that_stays_sick_ends_and_its_checkpoint_is_healthy(tmp_path):
    engine = toy_engine(tmp_path, steps=20, checkpoint_every=2, patience=4)
    sick_at(engine, set(range(3, 20)))
    with pytest.raises(Diverged, match="4 steps in a row"):
        engine.run()
    assert engine.done == 6
    again = toy_engine(tmp_path, steps=20)
    assert again.done == 6
    assert all(torch.isfinite(tensor).all() for tensor in again.task.state_dict().values())


# ------------------------------------------------------------------------------------------------------------ alarms

LOW = Alarm(
    name="flat", metric="model/contrast", below=0.1, patience=3, after=100, hint="Lower the rate."
)
HIGH = Alarm(name="wins", metric="judge/accuracy", above=0.9, patience=1, hint="Raise the penalty.")


def heard(
    health: Health, values: list[float], metric: str = "model/contrast", first: int = 100
) -> list[int]:
    """The places of the values at which an alarm was raised."""
    return [i for i, value in enumerate(values) if health.listen(first + i, {metric: value})]


def test_an_alarm_waits_for_its_patience_and_is_raised_once():
    assert heard(Health((LOW,)), [0.05] * 10) == [2]


def test_an_alarm_is_raised_again_only_after_it_was_well():
    assert heard(Health((LOW,)), [0.05] * 4 + [0.5] + [0.05] * 4) == [2, 7]


def test_a_good_value_in_between_starts_the_patience_again():
    assert heard(Health((LOW,)), [0.05, 0.05, 0.5, 0.05, 0.05, 0.5]) == []


def test_much_is_allowed_to_a_young_run():
    assert heard(Health((LOW,)), [0.05] * 6, first=97) == [5], (
        "records before step 100 do not count"
    )


def test_a_record_without_the_number_says_nothing():
    health = Health((LOW, HIGH))
    assert health.listen(200, {"model/loss": 1.0}) == []
    assert health.listen(200, {"model/contrast": None}) == []  # type: ignore[dict-item]


def test_the_message_says_what_was_met_what_was_expected_and_what_to_do():
    (message,) = Health((HIGH,)).listen(1, {"judge/accuracy": 0.987})
    assert message == "wins: judge/accuracy is 0.987, above 0.9, for 1 records. Raise the penalty."
    low = Health((LOW,))
    said = [low.listen(100, {"model/contrast": 0.01}) for _ in range(3)]
    assert said[2] == ["flat: model/contrast is 0.01, below 0.1, for 3 records. Lower the rate."]
