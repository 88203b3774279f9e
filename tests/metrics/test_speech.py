"""Intelligibility, held against the package pystoi, on toy voices in noise."""

from __future__ import annotations

import numpy as np
import pystoi
import pytest
import torch
from torch import Tensor

from tessera.metrics.speech import stoi_B
from tessera.modalities.audio.synthetic_voices import SPEAKERS, Syllable, spoken


def voices(rate_hz: int = 16_000, count: int = 3) -> Tensor:
    """(B, 1, N): five syllables, by a speaker each."""
    words = (
        Syllable("m", "ah"),
        Syllable("s", "ee"),
        Syllable("", "oo"),
        Syllable("t", "eh"),
        Syllable("m", "aw"),
    )
    said = [
        spoken(one, words, False, 2.0, 0.35, rate_hz, np.random.default_rng(0))
        for one in SPEAKERS[1 : 1 + count]
    ]
    return torch.from_numpy(np.stack(said))[:, None].double()


def noisy(sounds: Tensor, decibels: float) -> Tensor:
    noise = torch.randn(
        sounds.shape, generator=torch.Generator().manual_seed(0), dtype=sounds.dtype
    )
    level = sounds.square().mean((1, 2), keepdim=True).sqrt() * 10 ** (-decibels / 20)
    return sounds + noise * level


@pytest.mark.parametrize("rate_hz", [8_000, 10_000, 16_000, 22_050, 24_000, 48_000])
@pytest.mark.parametrize("decibels", [15, 0, -10])
def test_it_is_what_pystoi_says(rate_hz: int, decibels: float):
    original = voices(rate_hz, count=2)
    made = noisy(original, decibels)
    ours = stoi_B(made, original, rate_hz=rate_hz)
    theirs = [
        pystoi.stoi(real[0].numpy(), other[0].numpy(), rate_hz)
        for real, other in zip(original, made)
    ]
    torch.testing.assert_close(ours, torch.tensor(theirs, dtype=ours.dtype), rtol=0, atol=0.003)


def test_it_falls_with_noise_and_does_not_care_how_loud_it_is():
    original = voices()
    told = [
        stoi_B(noisy(original, decibels), original, rate_hz=16_000) for decibels in (30, 10, 0, -10)
    ]
    assert all((better > worse).all() for better, worse in zip(told, told[1:]))
    torch.testing.assert_close(
        stoi_B(0.01 * original, original, rate_hz=16_000), torch.ones(3).double(), rtol=0, atol=1e-6
    )


def test_what_follows_a_sound_changes_nothing():
    original, made = voices(), noisy(voices(), 5)
    lengths_B = torch.tensor([28_000, 20_000, 16_001])
    together = stoi_B(made, original, rate_hz=16_000, lengths_B=lengths_B)
    for number, length in enumerate(lengths_B.tolist()):
        alone = stoi_B(
            made[number : number + 1, :, :length],
            original[number : number + 1, :, :length],
            rate_hz=16_000,
        )
        assert torch.equal(together[number], alone[0])


def test_silence_within_the_original_is_left_out_of_both():
    original, made = voices(count=1), noisy(voices(count=1), 5)
    pause = torch.zeros(1, 1, 16_000).double()
    paused = stoi_B(
        torch.cat([made, pause + 0.1], 2), torch.cat([original, pause], 2), rate_hz=16_000
    )
    torch.testing.assert_close(paused, stoi_B(made, original, rate_hz=16_000), rtol=0, atol=0.01)


@pytest.mark.parametrize(
    "sound",
    [
        torch.zeros(1, 1, 16_000),
        torch.randn(1, 1, 4000),
        torch.zeros(1, 1, 1),
        torch.ones(1, 1, 100),
    ],
)
def test_where_there_is_too_little_nothing_is_said(sound: Tensor):
    assert stoi_B(sound, sound, rate_hz=16_000).isnan().all()


def test_a_reconstruction_that_is_silent_is_not_understood():
    told = stoi_B(torch.zeros_like(voices(count=1)), voices(count=1), rate_hz=16_000)
    assert told.abs() < 0.01


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\(B, 1, N\)"):
        stoi_B(torch.zeros(2, 1, 10), torch.zeros(2, 1, 11), rate_hz=16_000)
