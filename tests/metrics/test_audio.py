"""Tests of the scale-invariant signal-to-distortion ratio."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.metrics.audio import si_sdr_B

RATE = 16000


def noise(samples: int = 1600, count: int = 2, seed: int = 1) -> Tensor:
    return 0.3 * torch.randn(count, 1, samples, generator=torch.Generator().manual_seed(seed))


def tone(hertz: float, samples: int = 3200) -> Tensor:
    return 0.5 * torch.sin(2 * math.pi * hertz * torch.arange(samples) / RATE)[None, None]


@pytest.mark.parametrize("decibels", [-10.0, 0.0, 10.0, 35.0])
def test_orthogonal_noise_of_known_power_gives_its_ratio(decibels):
    original = tone(500)  # whole periods, so that the other tone is orthogonal
    output = original + tone(1000) * 10 ** (-decibels / 20)
    torch.testing.assert_close(
        si_sdr_B(output, original), torch.tensor([decibels]), atol=0.01, rtol=0
    )


def test_gain_and_offset_are_no_distortion():
    original, output = noise(), noise() + 0.1 * noise(seed=2)
    expected = si_sdr_B(output, original)
    for other in (0.2 * output, -3 * output, output + 0.4):
        torch.testing.assert_close(si_sdr_B(other, original), expected, atol=1e-2, rtol=0)


def test_equal_audio_and_silence_have_finite_values():
    silence = torch.zeros(1, 1, 100)
    assert si_sdr_B(noise(), noise()).min() > 90 and si_sdr_B(noise(), noise()).max() <= 100
    assert si_sdr_B(silence, noise(100, 1)) == -100
    assert si_sdr_B(noise(100, 1), silence) == -100 and si_sdr_B(silence, silence) == -100
    assert si_sdr_B(torch.full((1, 1, 100), 0.3), torch.full((1, 1, 100), 0.5)) == -100


def test_samples_beyond_the_length_have_no_effect():
    lengths = [1600, 900, 130, 1]
    a, b = noise(count=4), noise(count=4, seed=2)
    train_together = si_sdr_B(a, b, lengths_B=torch.tensor(lengths))
    alone = torch.cat(
        [si_sdr_B(a[i : i + 1, :, :n], b[i : i + 1, :, :n]) for i, n in enumerate(lengths)]
    )
    torch.testing.assert_close(train_together, alone, rtol=1e-4, atol=1e-5)
    other = torch.cat([a[:1], a[1:] + F.pad(noise(700, 3, seed=4), (900, 0))])
    torch.testing.assert_close(si_sdr_B(other, b, lengths_B=torch.tensor(lengths)), train_together)


def test_half_precision_is_computed_in_float32():
    a, b = noise().bfloat16(), noise(seed=2).bfloat16()
    value = si_sdr_B(a, b)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, si_sdr_B(a.float(), b.float()))
    assert si_sdr_B(a.double(), b.double()).dtype == torch.float64


@pytest.mark.parametrize(
    "shapes",
    [((2, 1, 8), (2, 1, 9)), ((2, 8), (2, 8)), ((1, 2, 8), (1, 2, 8)), ((1, 1, 0), (1, 1, 0))],
)
def test_invalid_shapes_are_errors(shapes):
    with pytest.raises(ValueError, match=r"both must have the same shape \(B, 1, N\)"):
        si_sdr_B(torch.zeros(shapes[0]), torch.zeros(shapes[1]))
