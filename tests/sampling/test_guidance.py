"""Guidance: the formula, off at 1, on within its interval, and growing as its ramp says."""

from __future__ import annotations

import pytest
import torch

from tessera.sampling.guidance import Guidance, guided


def test_the_formula():
    with_prompt, without = torch.randn(2, 5, 7, dtype=torch.float64)
    assert torch.allclose(guided(with_prompt, without, 1.0), with_prompt)
    assert torch.equal(guided(with_prompt, without, 0.0), without)
    assert torch.allclose(guided(with_prompt, without, 3.0), 3 * with_prompt - 2 * without)


@pytest.mark.parametrize("ramp", ["constant", "linear", "cosine"])
def test_a_scale_of_one_is_off_whenever_it_is_asked(ramp):
    assert {Guidance(scale=1.0, ramp=ramp).at(i / 12) for i in range(13)} == {1.0}


def test_outside_its_interval_it_is_off():
    guidance = Guidance(scale=4.0, start=0.25, end=0.5)
    assert [guidance.at(i / 8) for i in range(9)] == [1, 1, 4, 4, 4, 1, 1, 1, 1]


def test_an_interval_of_one_moment_is_that_moment():
    guidance = Guidance(scale=4.0, start=0.5, end=0.5, ramp="linear")
    assert [guidance.at(time) for time in (0.25, 0.5, 0.75)] == [1, 4, 1]


def test_a_ramp_grows_from_one_to_the_scale_within_the_interval():
    linear = Guidance(scale=5.0, start=0.2, end=0.6, ramp="linear")
    assert [linear.at(time) for time in (0.1, 0.2, 0.4, 0.6, 0.7)] == pytest.approx([1, 1, 3, 5, 1])
    cosine = Guidance(scale=5.0, ramp="cosine")
    assert [cosine.at(time) for time in (0, 0.25, 0.5, 1)] == pytest.approx(
        [1, 1 + 4 * (1 - 2**-0.5) / 2, 3, 5]
    )


@pytest.mark.parametrize(("start", "end"), [(-0.1, 1), (0, 1.1), (0.6, 0.4), (float("nan"), 1)])
def test_what_is_no_interval_is_refused(start, end):
    with pytest.raises(ValueError, match="no interval"):
        Guidance(start=start, end=end)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused(scale):
    with pytest.raises(ValueError, match="scale"):
        Guidance(scale=scale)
