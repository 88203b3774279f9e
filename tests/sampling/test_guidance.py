"""Tests of classifier-free guidance: its formula, its interval and its ramps."""

from __future__ import annotations

import pytest
import torch

from tessera.sampling.guidance import Guidance, apply_cfg


def test_guidance_extrapolates_linearly():
    cond, uncond = torch.randn(2, 5, 7, dtype=torch.float64)
    assert torch.allclose(apply_cfg(cond, uncond, 1.0), cond)
    assert torch.equal(apply_cfg(cond, uncond, 0.0), uncond)
    assert torch.allclose(apply_cfg(cond, uncond, 3.0), 3 * cond - 2 * uncond)


@pytest.mark.parametrize("ramp", ["constant", "linear", "cosine"])
def test_scale_of_one_is_off_at_all_times(ramp):
    assert {Guidance(scale=1.0, ramp=ramp).at(i / 12) for i in range(13)} == {1.0}


def test_guidance_is_off_outside_its_interval():
    guidance = Guidance(scale=4.0, start=0.25, end=0.5)
    assert [guidance.at(i / 8) for i in range(9)] == [1, 1, 4, 4, 4, 1, 1, 1, 1]


def test_interval_of_length_zero_has_the_full_scale():
    guidance = Guidance(scale=4.0, start=0.5, end=0.5, ramp="linear")
    assert [guidance.at(time) for time in (0.25, 0.5, 0.75)] == [1, 4, 1]


def test_ramp_grows_from_one_to_the_scale_within_the_interval():
    linear = Guidance(scale=5.0, start=0.2, end=0.6, ramp="linear")
    assert [linear.at(time) for time in (0.1, 0.2, 0.4, 0.6, 0.7)] == pytest.approx([1, 1, 3, 5, 1])
    cosine = Guidance(scale=5.0, ramp="cosine")
    assert [cosine.at(time) for time in (0, 0.25, 0.5, 1)] == pytest.approx(
        [1, 1 + 4 * (1 - 2**-0.5) / 2, 3, 5]
    )


def test_power_delays_the_ramp_and_keeps_its_ends():
    late = Guidance(scale=5.0, ramp="linear", ramp_power=2.0)
    assert [late.at(time) for time in (0, 0.5, 1)] == pytest.approx([1, 2, 5])
    constant = Guidance(scale=5.0, ramp_power=2.0)
    assert [constant.at(time) for time in (0, 0.5, 1)] == [5, 5, 5]


def test_interval_without_a_step_is_off_at_every_step():
    guidance = Guidance(scale=5.0, start=1.0, end=1.0)
    assert {guidance.at(step / 12) for step in range(12)} == {1.0}


@pytest.mark.parametrize("power", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_powers_are_errors(power):
    with pytest.raises(ValueError, match="ramp_power must be finite and above 0"):
        Guidance(ramp_power=power)


@pytest.mark.parametrize(("start", "end"), [(-0.1, 1), (0, 1.1), (0.6, 0.4), (float("nan"), 1)])
def test_invalid_intervals_are_errors(start, end):
    with pytest.raises(ValueError, match="not an interval"):
        Guidance(start=start, end=end)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_errors(scale):
    with pytest.raises(ValueError, match="scale must be a finite number"):
        Guidance(scale=scale)


def test_unknown_ramp_is_rejected():
    with pytest.raises(ValueError, match="ramp must be one of 'constant', 'linear', 'cosine'"):
        Guidance(ramp="sine")
