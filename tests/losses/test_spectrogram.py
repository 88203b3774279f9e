"""Tests of spectrograms: alignment, scale, mel bands, silence and padding."""

from __future__ import annotations

import math

import pytest
import torch

from tessera.losses.spectrogram import (
    append_deltas,
    compute_deltas,
    hz_to_mel,
    log_mel_spectrogram,
    mel_filterbank,
    mel_spectrogram,
    mfcc,
    stft,
)

RATE = 16_000


def sine(hertz: float, count: int = RATE) -> torch.Tensor:
    return torch.sin(2 * math.pi * hertz * torch.arange(count, dtype=torch.float64) / RATE)[None]


@pytest.mark.parametrize(
    ("count", "hop", "frames"),
    [(16_000, 320, 50), (16_001, 320, 51), (319, 320, 1), (1, 64, 1), (64, 64, 1)],
)
def test_every_hop_has_a_frame(count, hop, frames):
    assert stft(torch.zeros(2, count), 640, hop).shape == (2, 321, frames)


def test_frames_are_centered_on_their_samples():
    click = torch.zeros(1, 3200)
    click[0, 5 * 320 + 160] = 1  # the middle of the sixth hop
    loudness = stft(click, 640, 320).abs().sum(dim=1)[0]
    assert int(loudness.argmax()) == 5
    assert loudness[4] == pytest.approx(float(loudness[6]), abs=1e-3)


def test_energy_of_the_spectrum_is_that_of_the_audio():
    """Parseval. Squared Hann windows at a quarter of their length sum to 1.5 everywhere."""
    window, hop = 256, 64
    audio = torch.zeros(1, 8000, dtype=torch.float64)
    audio[:, 500:-500] = torch.randn(1, 7000, dtype=torch.float64)
    power = (stft(audio, window, hop) * window / 4).abs().square()
    both_sides = 2 * power.sum() - power[:, 0].sum() - power[:, -1].sum()
    assert float(both_sides / window / 1.5) == pytest.approx(float(audio.square().sum()), rel=1e-9)


def test_full_scale_sine_has_magnitude_one_at_its_frequency():
    spectrum = stft(sine(1000), 512, 128).abs()[0, :, 20:-20]
    assert spectrum.max(dim=0).values.tolist() == pytest.approx([1.0] * spectrum.shape[1], abs=1e-6)
    assert set(spectrum.argmax(dim=0).tolist()) == {1000 * 512 // RATE}


@pytest.mark.parametrize("hertz", [120.0, 440.0, 1234.0, 3000.0, 6500.0])
def test_loudest_mel_band_of_a_sine_is_at_its_frequency(hertz):
    bands = 40
    magnitudes = mel_spectrogram(sine(hertz), rate_hz=RATE, window=1024, hop=256, bands=bands)
    loudest = magnitudes[0, :, 5:-5].mean(dim=1).argmax()
    expected = hz_to_mel(hertz) / hz_to_mel(RATE / 2) * (bands + 1) - 1
    assert abs(int(loudest) - expected) < 0.75


def test_mel_scale_has_its_reference_points():
    assert hz_to_mel(0) == 0 and hz_to_mel(1000) == pytest.approx(1000, abs=0.1)


def test_mel_filters_sum_to_one_and_none_is_empty():
    filters = mel_filterbank(40, 1024, RATE)
    assert filters.shape == (40, 513) and (filters >= 0).all()
    inside = filters.sum(dim=0)[8:460]  # beyond the outer peaks there is only one slope
    assert torch.allclose(inside, torch.ones_like(inside), atol=1e-3)
    narrow = mel_filterbank(80, 64, RATE)
    assert (narrow.sum(dim=1) > 0).all(), "80 bands from 33 frequencies"


def test_zeros_after_the_audio_change_no_frame_before_them():
    audio = torch.randn(1, 6400)
    padded = torch.nn.functional.pad(audio, (0, 3200))
    short, long = (mfcc(each, rate_hz=RATE, window=640, hop=320) for each in (audio, padded))
    assert torch.allclose(short, long[:, :, :20], atol=1e-5)


def test_silence_is_clamped_and_has_finite_gradients():
    silence = torch.zeros(1, 3200, requires_grad=True)
    spectrum = log_mel_spectrogram(silence, rate_hz=RATE, window=512, hop=128, bands=20)
    assert torch.allclose(spectrum, torch.full_like(spectrum, math.log(1e-5)))
    for function in (
        lambda x: mel_spectrogram(x, rate_hz=RATE, window=512, hop=128, bands=20),
        lambda x: stft(x, 512, 128).abs(),
    ):
        (grad,) = torch.autograd.grad(function(silence).sum(), silence)
        assert grad.isfinite().all()


def test_gain_changes_only_the_first_coefficient():
    audio = torch.randn(1, 8000) * 0.1
    quiet, loud = (mfcc(each, rate_hz=RATE, window=640, hop=320) for each in (audio, 10 * audio))
    assert torch.allclose(quiet[:, 1:], loud[:, 1:], atol=1e-3)
    assert torch.allclose(
        loud[:, 0] - quiet[:, 0], torch.tensor(math.log(10) * math.sqrt(40)), atol=1e-3
    )


def test_deltas_are_slopes():
    ramp = torch.arange(20.0).expand(1, 3, 20) * torch.tensor([1.0, -2.0, 0.0])[:, None]
    assert torch.allclose(
        compute_deltas(ramp)[0, :, 2:-2], torch.tensor([1.0, -2.0, 0.0])[:, None].expand(3, 16)
    )
    features = append_deltas(ramp)
    assert features.shape == (1, 9, 20) and torch.equal(features[:, :3], ramp)
    assert features[0, 6:, 4:-4].abs().max() < 1e-6, "second deltas of a ramp are zero"


def test_half_precision_is_computed_in_float32():
    assert stft(torch.zeros(1, 640, dtype=torch.bfloat16), 64, 16).dtype == torch.complex64


def test_hop_longer_than_the_window_is_an_error():
    with pytest.raises(ValueError, match="at most the window, got 65 and 64"):
        stft(torch.zeros(1, 640), 64, 65)
