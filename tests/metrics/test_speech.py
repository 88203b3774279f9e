"""Tests of STOI against the package pystoi, on synthetic voices with noise."""

from __future__ import annotations

import numpy as np
import pystoi
import pytest
import torch
from torch import Tensor

from tessera.metrics.speech import stoi_B
from tessera.modalities.audio.synthetic_voices import SPEAKERS, Syllable, synthesize_speech


def make_voices(rate_hz: int = 16_000, count: int = 3) -> Tensor:
    """Return five syllables of several speakers, (B, 1, N)."""
    syllables = (
        Syllable("m", "ah"),
        Syllable("s", "ee"),
        Syllable("", "oo"),
        Syllable("t", "eh"),
        Syllable("m", "aw"),
    )
    voices = [
        synthesize_speech(speaker, syllables, False, 2.0, 0.35, rate_hz, np.random.default_rng(0))
        for speaker in SPEAKERS[1 : 1 + count]
    ]
    return torch.from_numpy(np.stack(voices))[:, None].double()


def add_noise(audio: Tensor, decibels: float) -> Tensor:
    noise = torch.randn(audio.shape, generator=torch.Generator().manual_seed(0), dtype=audio.dtype)
    level = audio.square().mean((1, 2), keepdim=True).sqrt() * 10 ** (-decibels / 20)
    return audio + noise * level


@pytest.mark.parametrize("rate_hz", [8_000, 10_000, 16_000, 22_050, 24_000, 48_000])
@pytest.mark.parametrize("decibels", [15, 0, -10])
def test_stoi_matches_pystoi(rate_hz: int, decibels: float):
    original = make_voices(rate_hz, count=2)
    output = add_noise(original, decibels)
    values = stoi_B(output, original, rate_hz=rate_hz)
    expected = [
        pystoi.stoi(real[0].numpy(), fake[0].numpy(), rate_hz)
        for real, fake in zip(original, output)
    ]
    torch.testing.assert_close(
        values, torch.tensor(expected, dtype=values.dtype), rtol=0, atol=0.003
    )


def test_stoi_decreases_with_noise_and_does_not_depend_on_gain():
    original = make_voices()
    values = [
        stoi_B(add_noise(original, decibels), original, rate_hz=16_000)
        for decibels in (30, 10, 0, -10)
    ]
    assert all((better > worse).all() for better, worse in zip(values, values[1:]))
    torch.testing.assert_close(
        stoi_B(0.01 * original, original, rate_hz=16_000), torch.ones(3).double(), rtol=0, atol=1e-6
    )


def test_samples_beyond_the_length_have_no_effect():
    original, output = make_voices(), add_noise(make_voices(), 5)
    lengths_B = torch.tensor([28_000, 20_000, 16_001])
    train_together = stoi_B(output, original, rate_hz=16_000, lengths_B=lengths_B)
    for number, length in enumerate(lengths_B.tolist()):
        alone = stoi_B(
            output[number : number + 1, :, :length],
            original[number : number + 1, :, :length],
            rate_hz=16_000,
        )
        assert torch.equal(train_together[number], alone[0])


def test_silent_frames_of_the_original_are_removed():
    original, output = make_voices(count=1), add_noise(make_voices(count=1), 5)
    pause = torch.zeros(1, 1, 16_000).double()
    with_pause = stoi_B(
        torch.cat([output, pause + 0.1], 2), torch.cat([original, pause], 2), rate_hz=16_000
    )
    expected = stoi_B(output, original, rate_hz=16_000)
    torch.testing.assert_close(with_pause, expected, rtol=0, atol=0.01)


@pytest.mark.parametrize(
    "audio",
    [
        torch.zeros(1, 1, 16_000),
        torch.randn(1, 1, 4000),
        torch.zeros(1, 1, 1),
        torch.ones(1, 1, 100),
    ],
)
def test_too_little_audio_gives_nan(audio: Tensor):
    assert stoi_B(audio, audio, rate_hz=16_000).isnan().all()


def test_silent_reconstruction_is_unintelligible():
    original = make_voices(count=1)
    assert stoi_B(torch.zeros_like(original), original, rate_hz=16_000).abs() < 0.01


def test_different_shapes_are_errors():
    with pytest.raises(ValueError, match=r"both must have the same shape \(B, 1, N\)"):
        stoi_B(torch.zeros(2, 1, 10), torch.zeros(2, 1, 11), rate_hz=16_000)
