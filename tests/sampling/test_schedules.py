"""Tests of the masking schedules: from all tokens masked to none, and never increasing."""

from __future__ import annotations

import math
import typing

import pytest

from tessera.sampling.schedules import Schedule, mask_ratio, mean_mask_ratio, num_masked_after

SCHEDULES = typing.get_args(Schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ratio_decreases_from_one_to_zero(schedule):
    ratios = [mask_ratio(schedule, i / 50) for i in range(51)]
    assert ratios[0] == pytest.approx(1) and ratios[-1] == pytest.approx(0, abs=1e-12)
    assert ratios == sorted(ratios, reverse=True) and min(ratios) >= 0 and max(ratios) <= 1


@pytest.mark.parametrize(
    ("schedule", "half_way"),
    [("cosine", math.sqrt(0.5)), ("linear", 0.5), ("arccos", 2 / 3), ("power", 0.75)],
)
def test_ratio_at_half_time_is_that_of_the_schedule(schedule, half_way):
    assert mask_ratio(schedule, 0.5) == pytest.approx(half_way)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("time_power", [1.0, 2.0])
def test_mean_ratio_is_the_mean_over_all_times(schedule, time_power):
    times = [((i + 0.5) / 7_000) ** time_power for i in range(7_000)]
    mean = sum(mask_ratio(schedule, time) for time in times) / len(times)
    assert mean_mask_ratio(schedule, time_power) == pytest.approx(mean, abs=1e-4)


def test_the_mean_rises_with_the_power_of_time():
    means = [mean_mask_ratio("cosine", power) for power in (0.5, 1.0, 2.0, 4.0)]
    assert means == sorted(means) and means[2] == pytest.approx(0.7799, abs=1e-3)  # Fresnel C(1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("decoding_steps", "total"), [(1, 16), (4, 16), (12, 256), (40, 7)])
def test_number_of_masked_tokens_never_increases_and_ends_at_zero(schedule, decoding_steps, total):
    counts = [
        num_masked_after(schedule, step, decoding_steps, total) for step in range(decoding_steps)
    ]
    assert counts == sorted(counts, reverse=True) and counts[-1] == 0
    assert all(0 <= count <= total for count in counts)


def test_sixteen_tokens_in_four_cosine_steps():
    assert [num_masked_after("cosine", step, 4, 16) for step in range(4)] == [14, 11, 6, 0]
