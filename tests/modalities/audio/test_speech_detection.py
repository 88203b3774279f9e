"""Speech is separated from drums, instruments, noise and tones."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.modalities.audio.speech_detection import detect_speech, measure_speech
from tessera.modalities.audio.synthetic import Beat, Melody, Piece, Speech, sample_piece


def sample_pieces(kind: type, count: int, *, whispered: bool = False) -> list[Piece]:
    """Return the first pieces whose first part is of a kind."""
    pieces: list[Piece] = []
    number = 0
    while len(pieces) < count:
        piece = sample_piece(1, number)
        part = piece.parts[0]
        number += 1
        if not isinstance(part, kind):
            continue
        if isinstance(part, Speech) and (part.speaker.breathiness == 1) != whispered:
            continue
        pieces.append(piece)
    return pieces


def fraction_detected(pieces: list[Piece], seconds: float, rate_hz: int) -> float:
    rendered = (
        piece.render(round(seconds * rate_hz), rate_hz, np.random.default_rng(0))
        for piece in pieces
    )
    return float(np.mean([detect_speech(samples, rate_hz) for samples in rendered]))


LENGTHS_AND_RATES = [(1.0, 8_000), (1.0, 16_000), (2.0, 16_000), (2.0, 44_100)]


@pytest.mark.parametrize(("seconds", "rate_hz"), LENGTHS_AND_RATES)
def test_most_synthetic_voices_are_detected(seconds, rate_hz):
    assert fraction_detected(sample_pieces(Speech, 60), seconds, rate_hz) >= 0.75


def test_most_long_whispers_are_detected():
    assert fraction_detected(sample_pieces(Speech, 30, whispered=True), 2.0, 16_000) >= 0.7


@pytest.mark.parametrize("kind", [Beat, Melody])
@pytest.mark.parametrize(("seconds", "rate_hz"), LENGTHS_AND_RATES)
def test_synthetic_drums_and_instruments_are_not_speech(kind, seconds, rate_hz):
    assert fraction_detected(sample_pieces(kind, 30), seconds, rate_hz) <= 0.05


@pytest.mark.parametrize("snr_db", [20, 10])
def test_speech_is_detected_in_noise(snr_db):
    rng = np.random.default_rng(0)
    detected = []
    for piece in sample_pieces(Speech, 30):
        samples = piece.render(32_000, 16_000, rng)[0]
        noise = rng.normal(0.0, samples.std() * 10 ** (-snr_db / 20), len(samples))
        detected.append(detect_speech(samples + noise, 16_000))
    assert np.mean(detected) >= 0.8


@pytest.mark.parametrize("modulation_hz", [0.0, 4.0, 7.0])
def test_noise_and_tones_are_not_speech_even_if_modulated(modulation_hz):
    rng = np.random.default_rng(0)
    time = np.arange(32_000) / 16_000
    envelope = 0.5 + 0.5 * np.cos(2 * np.pi * modulation_hz * time)
    for pitch_hz in (90, 140, 220, 350):
        tone = sum(np.sin(2 * np.pi * pitch_hz * k * time) / k for k in range(1, 9))
        assert not detect_speech(0.2 * envelope * tone, 16_000)
    for _ in range(4):
        assert not detect_speech(0.2 * envelope * rng.normal(size=32_000), 16_000)


def test_level_and_channels_do_not_matter():
    piece = sample_pieces(Speech, 1)[0]
    samples = piece.render(32_000, 16_000, np.random.default_rng(0))
    expected = measure_speech(samples[0], 16_000)
    assert expected is not None and expected.is_speech()
    for other in (0.01 * samples, np.concatenate([samples, samples]), samples + 0.05):
        measured = measure_speech(other, 16_000)
        assert vars(measured) == pytest.approx(vars(expected), rel=1e-3)


@pytest.mark.parametrize(
    ("samples", "rate_hz"),
    [
        (np.zeros(16_000), 16_000),
        (np.full(16_000, 0.5), 16_000),
        (np.ones(1), 16_000),
        (np.random.default_rng(0).normal(size=3_999), 16_000),
        (np.random.default_rng(0).normal(size=4_000), 2_000),
    ],
    ids=["silence", "constant", "one sample", "too short", "low rate"],
)
def test_audio_that_cannot_be_analysed_is_not_speech(samples, rate_hz):
    assert not detect_speech(samples, rate_hz)


def test_long_audio_is_classified_by_its_beginning():
    piece = sample_pieces(Speech, 1)[0]
    speech = piece.render(30 * 8_000, 8_000, np.random.default_rng(0))[0]
    noise = np.random.default_rng(0).normal(size=60 * 8_000)
    beginning = measure_speech(speech, 8_000)
    assert measure_speech(np.concatenate([speech, noise]), 8_000) == beginning
