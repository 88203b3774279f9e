"""Distances of sounds: nothing for equal ones, known numbers for known differences, nothing of what
lies beyond a length."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.losses.adversarial import feature_matching_B
from tessera.losses.spectral import mel_distance_B, si_sdr_B, stft_distance_B

RATE = 16000
SHORT = (64, 256)
"""Windows for sounds of a tenth of a second."""


def noise(samples: int = 1600, count: int = 2, seed: int = 1) -> Tensor:
    return 0.3 * torch.randn(count, 1, samples, generator=torch.Generator().manual_seed(seed))


def tone(hertz: float, samples: int = 1600, phase: float = 0.0) -> Tensor:
    return 0.5 * torch.sin(2 * math.pi * hertz * torch.arange(samples) / RATE + phase)[None, None]


def mel(a: Tensor, b: Tensor, lengths_B: Tensor | None = None) -> Tensor:
    return mel_distance_B(a, b, rate_hz=RATE, lengths_B=lengths_B, windows=SHORT)


def stft(a: Tensor, b: Tensor, lengths_B: Tensor | None = None) -> Tensor:
    return stft_distance_B(a, b, lengths_B=lengths_B, windows=SHORT)


def sdr(a: Tensor, b: Tensor, lengths_B: Tensor | None = None) -> Tensor:
    return si_sdr_B(a, b, lengths_B=lengths_B)


spectral = pytest.mark.parametrize("distance", [mel, stft])
every_one = pytest.mark.parametrize("distance", [mel, stft, sdr])


# ------------------------------------------------------------------------------------------------------------- spectra


@spectral
def test_equal_sounds_are_not_apart_and_others_are_equally_far_both_ways(distance):
    a, b = noise(), noise(seed=2)
    assert torch.equal(distance(a, a), torch.zeros(2))
    torch.testing.assert_close(distance(a, b), distance(b, a))
    assert (distance(a, b) > 0.1).all()


def test_a_tenth_of_the_loudness_is_one_power_of_ten():
    torch.testing.assert_close(mel(noise(), noise() / 10), torch.ones(2), atol=0.02, rtol=0)


def test_a_tenth_of_the_magnitudes_is_known_to_the_stft_too():
    expected = 0.9 / math.sqrt(1 + 0.1**2) + math.log(10)
    torch.testing.assert_close(
        stft(noise(), noise() / 10), torch.full((2,), expected), atol=0.01, rtol=0
    )


@spectral
def test_another_pitch_is_far_and_another_phase_is_near(distance):
    assert distance(tone(440), tone(440, phase=1.0)) < 0.5 * distance(tone(440), tone(660))


def test_all_windows_count_alike():
    a, b = noise(), noise(seed=2)
    each = [mel_distance_B(a, b, rate_hz=RATE, windows=[window]) for window in SHORT]
    torch.testing.assert_close(mel(a, b), torch.stack(each).mean(0))


@pytest.mark.parametrize("samples", [1, 20, 1600])
def test_all_the_usual_windows_take_sounds_of_any_length(samples):
    a, b = noise(samples), noise(samples, seed=2)
    assert (
        mel_distance_B(a, b, rate_hz=RATE).isfinite().all()
        and stft_distance_B(a, b).isfinite().all()
    )


@spectral
def test_silence_has_a_distance_and_a_slope(distance):
    silence = torch.zeros(1, 1, 800)
    for a, b in ((silence, silence), (silence, noise(800, 1)), (noise(800, 1), silence)):
        output = a.clone().requires_grad_()
        apart = distance(output, b)
        apart.sum().backward()
        assert apart.isfinite().all() and output.grad.isfinite().all()
        assert apart < 20


@spectral
def test_descending_it_brings_a_sound_nearer(distance):
    target = tone(600, 800) + 0.1 * noise(800, 1)
    output = noise(800, 1, seed=3).requires_grad_()
    optimizer = torch.optim.Adam([output], lr=0.02)
    before = distance(output, target).item()
    for _ in range(60):
        optimizer.zero_grad()
        distance(output, target).mean().backward()
        optimizer.step()
    assert distance(output, target) < 0.5 * before


# ------------------------------------------------------------------------------------------------------ what is shared


@every_one
def test_what_lies_beyond_its_length_does_not_change_a_sound(distance):
    lengths = [1600, 900, 130, 1]
    a, b = noise(count=4), noise(count=4, seed=2)
    together = distance(a, b, torch.tensor(lengths))
    alone = torch.cat(
        [distance(a[i : i + 1, :, :n], b[i : i + 1, :, :n]) for i, n in enumerate(lengths)]
    )
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    other = torch.cat([a[:1], a[1:] + F.pad(noise(700, 3, seed=4), (900, 0))])
    torch.testing.assert_close(distance(other, b, torch.tensor(lengths)), together)


@every_one
def test_half_precision_is_summed_in_full(distance):
    a, b = noise().bfloat16(), noise(seed=2).bfloat16()
    found = distance(a, b)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, distance(a.float(), b.float()))
    assert distance(a.double(), b.double()).dtype == torch.float64


@every_one
@pytest.mark.parametrize(
    "shapes",
    [((2, 1, 8), (2, 1, 9)), ((2, 8), (2, 8)), ((1, 2, 8), (1, 2, 8)), ((1, 1, 0), (1, 1, 0))],
)
def test_sounds_that_cannot_be_compared_are_refused(distance, shapes):
    with pytest.raises(ValueError, match="the same"):
        distance(torch.zeros(shapes[0]), torch.zeros(shapes[1]))


# -------------------------------------------------------------------------------------------------------------- SI-SDR


@pytest.mark.parametrize("decibels", [-10.0, 0.0, 10.0, 35.0])
def test_noise_of_a_known_power_gives_its_ratio(decibels):
    original = tone(
        500, 3200
    )  # whole periods, so that the other tone has nothing in common with it
    disturbed = original + tone(1000, 3200) * 10 ** (-decibels / 20)
    torch.testing.assert_close(
        sdr(disturbed, original), torch.tensor([decibels]), atol=0.01, rtol=0
    )


def test_neither_loudness_nor_an_offset_is_a_distortion():
    original, output = noise(), noise() + 0.1 * noise(seed=2)
    expected = sdr(output, original)
    for other in (0.2 * output, -3 * output, output + 0.4):
        torch.testing.assert_close(sdr(other, original), expected, atol=1e-2, rtol=0)


def test_equal_sounds_and_silence_have_numbers_that_can_be_averaged():
    silence = torch.zeros(1, 1, 100)
    assert sdr(noise(), noise()).min() > 90 and sdr(noise(), noise()).max() <= 100
    assert sdr(silence, noise(100, 1)) == -100
    assert sdr(noise(100, 1), silence) == -100 and sdr(silence, silence) == -100
    assert sdr(torch.full((1, 1, 100), 0.3), torch.full((1, 1, 100), 0.5)) == -100


# ---------------------------------------------------------------------------------------------------- feature matching


def test_features_are_compared_relative_to_what_is_seen_of_the_real_sound():
    real = [torch.full((2, 3, 4), 2.0), torch.full((2, 1, 5, 2), -10.0)]
    fake = [real[0] + 1, real[1] - 1]
    torch.testing.assert_close(
        feature_matching_B(real, fake), torch.full((2,), (1 / 2 + 1 / 10) / 2)
    )
    assert torch.equal(feature_matching_B(real, real), torch.zeros(2))


def test_only_the_fake_is_descended_and_silent_layers_do_no_harm():
    real, fake = torch.zeros(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    feature_matching_B([real], [fake]).sum().backward()
    assert real.grad is None and fake.grad.isfinite().all() and fake.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("real", "fake"),
    [([], []), ([torch.zeros(1, 2)], []), ([torch.zeros(1, 2)], [torch.zeros(1, 3)])],
)
def test_features_of_different_judges_are_refused(real, fake):
    with pytest.raises(ValueError, match="one judge"):
        feature_matching_B(real, fake)
