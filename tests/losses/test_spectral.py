"""Tests of spectral distances: known values for known differences, silence, and lengths."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.losses.spectral import mel_distance_B, stft_distance_B

RATE = 16000
SHORT_WINDOWS = (64, 256)
"""Windows for audio of a tenth of a second."""


def noise(samples: int = 1600, count: int = 2, seed: int = 1) -> Tensor:
    return 0.3 * torch.randn(count, 1, samples, generator=torch.Generator().manual_seed(seed))


def tone(hertz: float, samples: int = 1600, phase: float = 0.0) -> Tensor:
    return 0.5 * torch.sin(2 * math.pi * hertz * torch.arange(samples) / RATE + phase)[None, None]


def mel(a: Tensor, b: Tensor, lengths_B: Tensor | None = None) -> Tensor:
    return mel_distance_B(a, b, rate_hz=RATE, lengths_B=lengths_B, windows=SHORT_WINDOWS)


def stft(a: Tensor, b: Tensor, lengths_B: Tensor | None = None) -> Tensor:
    return stft_distance_B(a, b, lengths_B=lengths_B, windows=SHORT_WINDOWS)


every_distance = pytest.mark.parametrize("distance", [mel, stft])


@every_distance
def test_distance_is_symmetric_and_zero_for_equal_audio(distance):
    a, b = noise(), noise(seed=2)
    assert torch.equal(distance(a, a), torch.zeros(2))
    torch.testing.assert_close(distance(a, b), distance(b, a))
    assert (distance(a, b) > 0.1).all()


def test_mel_distance_is_in_powers_of_ten():
    torch.testing.assert_close(mel(noise(), noise() / 10), torch.ones(2), atol=0.02, rtol=0)


def test_stft_distance_of_a_tenth_of_the_magnitude_matches_its_formula():
    expected = 0.9 / math.sqrt(1 + 0.1**2) + math.log(10)
    torch.testing.assert_close(
        stft(noise(), noise() / 10), torch.full((2,), expected), atol=0.01, rtol=0
    )


@every_distance
def test_pitch_matters_more_than_phase(distance):
    assert distance(tone(440), tone(440, phase=1.0)) < 0.5 * distance(tone(440), tone(660))


def test_distance_is_the_mean_over_windows():
    a, b = noise(), noise(seed=2)
    each = [mel_distance_B(a, b, rate_hz=RATE, windows=[window]) for window in SHORT_WINDOWS]
    torch.testing.assert_close(mel(a, b), torch.stack(each).mean(0))


@pytest.mark.parametrize("samples", [1, 20, 1600])
def test_default_windows_take_audio_of_any_length(samples):
    a, b = noise(samples), noise(samples, seed=2)
    assert mel_distance_B(a, b, rate_hz=RATE).isfinite().all()
    assert stft_distance_B(a, b).isfinite().all()


@every_distance
def test_silence_has_a_finite_distance_and_finite_gradients(distance):
    silence = torch.zeros(1, 1, 800)
    for a, b in ((silence, silence), (silence, noise(800, 1)), (noise(800, 1), silence)):
        output = a.clone().requires_grad_()
        value = distance(output, b)
        value.sum().backward()
        assert value.isfinite().all() and output.grad.isfinite().all()
        assert value < 20


@every_distance
def test_gradient_descent_reduces_the_distance(distance):
    target = tone(600, 800) + 0.1 * noise(800, 1)
    output = noise(800, 1, seed=3).requires_grad_()
    optimizer = torch.optim.Adam([output], lr=0.02)
    before = distance(output, target).item()
    for _ in range(60):
        optimizer.zero_grad()
        distance(output, target).mean().backward()
        optimizer.step()
    assert distance(output, target) < 0.5 * before


@every_distance
def test_samples_beyond_the_length_have_no_effect(distance):
    lengths = [1600, 900, 130, 1]
    a, b = noise(count=4), noise(count=4, seed=2)
    train_together = distance(a, b, torch.tensor(lengths))
    alone = torch.cat(
        [distance(a[i : i + 1, :, :n], b[i : i + 1, :, :n]) for i, n in enumerate(lengths)]
    )
    torch.testing.assert_close(train_together, alone, rtol=1e-4, atol=1e-5)
    other = torch.cat([a[:1], a[1:] + F.pad(noise(700, 3, seed=4), (900, 0))])
    torch.testing.assert_close(distance(other, b, torch.tensor(lengths)), train_together)


@every_distance
def test_half_precision_is_computed_in_float32(distance):
    a, b = noise().bfloat16(), noise(seed=2).bfloat16()
    value = distance(a, b)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, distance(a.float(), b.float()))
    assert distance(a.double(), b.double()).dtype == torch.float64


@every_distance
@pytest.mark.parametrize(
    "shapes",
    [((2, 1, 8), (2, 1, 9)), ((2, 8), (2, 8)), ((1, 2, 8), (1, 2, 8)), ((1, 1, 0), (1, 1, 0))],
)
def test_invalid_shapes_are_errors(distance, shapes):
    with pytest.raises(ValueError, match=r"both must have the same shape \(B, 1, N\)"):
        distance(torch.zeros(shapes[0]), torch.zeros(shapes[1]))
