"""Schedules: from everything hidden to nothing, and never more than before."""

from __future__ import annotations

import math
import typing

import pytest

from tessera.sampling.schedules import Schedule, hidden_after, hidden_share, mean_share

SCHEDULES = typing.get_args(Schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_is_hidden_at_first_and_nothing_at_last(schedule):
    shares = [hidden_share(schedule, i / 50) for i in range(51)]
    assert shares[0] == pytest.approx(1) and shares[-1] == pytest.approx(0, abs=1e-12)
    assert shares == sorted(shares, reverse=True) and min(shares) >= 0 and max(shares) <= 1


@pytest.mark.parametrize(
    ("schedule", "at_half"),
    [("cosine", math.sqrt(0.5)), ("linear", 0.5), ("arccos", 2 / 3), ("power", 0.75)],
)
def test_each_has_its_own_shape(schedule, at_half):
    assert hidden_share(schedule, 0.5) == pytest.approx(at_half)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_mean_share_is_the_mean_of_the_shares(schedule):
    middle = sum(hidden_share(schedule, (i + 0.5) / 10_000) for i in range(10_000)) / 10_000
    assert mean_share(schedule) == pytest.approx(middle, abs=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("rounds", "total"), [(1, 16), (4, 16), (12, 256), (40, 7)])
def test_fewer_stay_hidden_after_every_round_and_none_after_the_last(
    schedule, decoding_steps, total
):
    left = [
        hidden_after(schedule, number, decoding_steps, total) for number in range(decoding_steps)
    ]
    assert left == sorted(left, reverse=True) and left[-1] == 0
    assert all(0 <= one <= total for one in left)


def test_sixteen_symbols_in_four_rounds():
    assert [hidden_after("cosine", number, 4, 16) for number in range(4)] == [14, 11, 6, 0]
