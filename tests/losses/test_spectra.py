"""What the ear is told of a sound: energy is kept, a tone lights its own band, silence has
gradients, and padding is inert."""

from __future__ import annotations

import math

import pytest
import torch

from tessera.losses.spectra import (
    deltas,
    log_mel,
    mel,
    mel_filters,
    mel_of_hertz,
    mfcc,
    stft,
    with_deltas,
)

RATE = 16_000


def sine(hertz: float, count: int = RATE) -> torch.Tensor:
    return torch.sin(2 * math.pi * hertz * torch.arange(count, dtype=torch.float64) / RATE)[None]


@pytest.mark.parametrize(
    ("count", "hop", "frames"),
    [(16_000, 320, 50), (16_001, 320, 51), (319, 320, 1), (1, 64, 1), (64, 64, 1)],
)
def test_every_hop_of_samples_has_a_frame(count, hop, frames):
    assert stft(torch.zeros(2, count), 640, hop).shape == (2, 321, frames)


def test_a_frame_stands_where_its_samples_are():
    click = torch.zeros(1, 3200)
    click[0, 5 * 320 + 160] = 1  # the middle of the sixth hop
    loudness = stft(click, 640, 320).abs().sum(dim=1)[0]
    assert int(loudness.argmax()) == 5 and loudness[4] == pytest.approx(
        float(loudness[6]), abs=1e-3
    )


def test_the_energy_of_a_sound_is_the_energy_of_its_spectrum():
    """Parseval. Squared Hann windows a quarter of their length apart sum to 1.5 everywhere."""
    window, hop = 256, 64
    sound = torch.zeros(1, 8000, dtype=torch.float64)
    sound[:, 500:-500] = torch.randn(1, 7000, dtype=torch.float64)
    power = (stft(sound, window, hop) * window / 4).abs().square()
    both_sides = 2 * power.sum() - power[:, 0].sum() - power[:, -1].sum()
    assert float(both_sides / window / 1.5) == pytest.approx(float(sound.square().sum()), rel=1e-9)


def test_a_full_scale_sine_has_a_magnitude_of_one_at_its_own_frequency():
    spectrum = stft(sine(1000), 512, 128).abs()[0, :, 20:-20]
    assert spectrum.max(dim=0).values.tolist() == pytest.approx([1.0] * spectrum.shape[1], abs=1e-6)
    assert set(spectrum.argmax(dim=0).tolist()) == {1000 * 512 // RATE}


@pytest.mark.parametrize("hertz", [120.0, 440.0, 1234.0, 3000.0, 6500.0])
def test_a_sine_lights_the_band_around_its_frequency(hertz):
    bands = 40
    loudest = (
        mel(sine(hertz), rate_hz=RATE, window=1024, hop=256, bands=bands)[0, :, 5:-5]
        .mean(dim=1)
        .argmax()
    )
    expected = mel_of_hertz(hertz) / mel_of_hertz(RATE / 2) * (bands + 1) - 1
    assert abs(int(loudest) - expected) < 0.75


def test_the_mel_scale_is_where_it_is_agreed_to_be():
    assert mel_of_hertz(0) == 0 and mel_of_hertz(1000) == pytest.approx(1000, abs=0.1)


def test_filters_share_each_frequency_among_them_and_none_is_empty():
    filters = mel_filters(40, 1024, RATE)
    assert filters.shape == (40, 513) and (filters >= 0).all()
    inside = filters.sum(dim=0)[8:460]  # beyond the first and the last peak there is only one slope
    assert torch.allclose(inside, torch.ones_like(inside), atol=1e-3)
    crowded = mel_filters(80, 64, RATE)
    assert (crowded.sum(dim=1) > 0).all(), "80 bands from 33 frequencies"


def test_zeros_after_a_sound_change_no_frame_but_those_whose_window_reaches_them():
    sound = torch.randn(1, 6400)
    longer = torch.nn.functional.pad(sound, (0, 3200))
    short, long = (mfcc(each, rate_hz=RATE, window=640, hop=320) for each in (sound, longer))
    assert torch.allclose(short, long[:, :, :20], atol=1e-5)


def test_silence_is_as_quiet_as_it_gets_and_has_gradients():
    silence = torch.zeros(1, 3200, requires_grad=True)
    spectrum = log_mel(silence, rate_hz=RATE, window=512, hop=128, bands=20)
    assert torch.allclose(spectrum, torch.full_like(spectrum, math.log(1e-5)))
    for function in (
        lambda x: mel(x, rate_hz=RATE, window=512, hop=128, bands=20),
        lambda x: stft(x, 512, 128).abs(),
    ):
        (gradient,) = torch.autograd.grad(function(silence).sum(), silence)
        assert gradient.isfinite().all()


def test_a_louder_sound_moves_only_the_first_coefficient():
    sound = torch.randn(1, 8000) * 0.1
    quiet, loud = (mfcc(each, rate_hz=RATE, window=640, hop=320) for each in (sound, 10 * sound))
    assert torch.allclose(quiet[:, 1:], loud[:, 1:], atol=1e-3)
    assert torch.allclose(
        loud[:, 0] - quiet[:, 0], torch.tensor(math.log(10) * math.sqrt(40)), atol=1e-3
    )


def test_deltas_are_slopes():
    ramp = torch.arange(20.0).expand(1, 3, 20) * torch.tensor([1.0, -2.0, 0.0])[:, None]
    assert torch.allclose(
        deltas(ramp)[0, :, 2:-2], torch.tensor([1.0, -2.0, 0.0])[:, None].expand(3, 16)
    )
    joined = with_deltas(ramp)
    assert joined.shape == (1, 9, 20) and torch.equal(joined[:, :3], ramp)
    assert joined[0, 6:, 4:-4].abs().max() < 1e-6, "a ramp does not bend"


def test_half_precision_is_computed_in_full():
    assert stft(torch.zeros(1, 640, dtype=torch.bfloat16), 64, 16).dtype == torch.complex64


def test_a_hop_longer_than_the_window_is_refused():
    with pytest.raises(ValueError, match="at most the window, but they are 65 and 64"):
        stft(torch.zeros(1, 640), 64, 65)
