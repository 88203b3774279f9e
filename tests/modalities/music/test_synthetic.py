"""Synthetic music: captions describe the audio, and held-out combinations are not in training."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest

from tessera.data.dataset import FIRST_HELD_OUT
from tessera.modalities.music.dataset import MusicDataConfig
from tessera.modalities.music.synthetic import (
    HELD_OUT_START,
    PHRASES,
    TEMPOS,
    TIMBRES,
    WORDS,
    SyntheticMusic,
    Traits,
    Tune,
    combinations,
    generate_tune,
)

RATE = 8000
DATASET = SyntheticMusic(40, samples=2 * RATE, rate_hz=RATE)
PLAIN = Traits("flute", "moderate", "major", "rising", "alone", "loud", "plain")


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def synthesize(
    traits: Traits, seconds: float = 2.0, notes_hz: float | None = None, key: int = 0
) -> np.ndarray:
    tune = Tune(traits, key, TEMPOS[traits.tempo] if notes_hz is None else notes_hz, -20.0, 0)
    return tune.synthesize(round(seconds * RATE), RATE, rng())[0]


def dominant_hz(samples: np.ndarray) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(spectrum.argmax()) * RATE / len(samples)


def notes(traits: Traits, count: int = 8, key: int = 0) -> list[float]:
    """Return the pitches of the first notes, in semitones above the first."""
    samples = synthesize(replace(traits, tempo="slow"), seconds=count / 2, notes_hz=2.0, key=key)
    steps = samples.reshape(count, -1)[:, 400:3600]
    pitches = [dominant_hz(step) for step in steps]
    return [round(12 * np.log2(pitch / pitches[0])) for pitch in pitches]


# ---- determinism


def test_a_tune_is_a_function_of_seed_and_number() -> None:
    one, other = DATASET, replace(DATASET, count=20, first=7)
    first, second = one.item(9, rng()), other.item(2, rng())
    assert one.name(9) == other.name(2) == "synthetic-000009" and one.caption(9) == other.caption(2)
    assert first.caption == second.caption and np.array_equal(first.samples, second.samples)
    assert replace(one, seed=1).generate(9) != one.generate(9)
    copy = pickle.loads(pickle.dumps(one))
    assert np.array_equal(copy.item(3, rng()).samples, one.item(3, rng()).samples)


def test_the_caption_is_sampled_at_each_visit_and_the_audio_is_fixed() -> None:
    visits = [DATASET.item(4, np.random.default_rng(seed)) for seed in range(30)]
    assert len({visit.caption for visit in visits}) > 10
    assert all(
        np.array_equal(visit.samples, visits[0].samples) and visit.tags == visits[0].tags
        for visit in visits
    )
    assert len(DATASET.all_captions(4)) == len(PHRASES)


@pytest.mark.parametrize("number", range(10))
def test_samples_are_audible_and_within_full_scale(number: int) -> None:
    example = DATASET.item(number, rng())
    assert example.samples.shape == (1, 2 * RATE) and example.samples.dtype == np.float32
    assert 0.001 < np.abs(example.samples).max() <= 1


# ---- held-out combinations


def test_every_combination_is_either_for_training_or_held_out() -> None:
    training, held_out = combinations()
    assert (
        len(training) + len(held_out)
        == len(set(training) | set(held_out))
        == 8 * 3 * 2 * 3 * 2 * 2 * 3
    )
    assert len(held_out) >= 256
    assert {generate_tune(0, number).traits for number in range(500)} <= set(training)


def test_each_held_out_combination_occurs_once_and_never_in_training() -> None:
    assert HELD_OUT_START == FIRST_HELD_OUT
    split = MusicDataConfig(rate_hz=RATE, seconds=1, num_synthetic=2048, val_fraction=0.125).build()
    held_out = [split.validation.generate(i).traits for i in range(len(split.validation))]
    assert len(held_out) == len(set(held_out)) == 256
    assert not set(held_out) & {split.train.generate(i).traits for i in range(0, 2048, 5)}


def test_every_held_out_trait_occurs_in_training() -> None:
    training, held_out = combinations()
    for field in fields(Traits):
        assert {getattr(traits, field.name) for traits in held_out} == {
            getattr(traits, field.name) for traits in training
        }


# ---- captions describe the audio


def test_major_and_minor_scales_rise_and_fall() -> None:
    assert notes(PLAIN) == [0, 2, 4, 5, 7, 9, 11, 12]
    assert notes(replace(PLAIN, mode="minor")) == [0, 2, 3, 5, 7, 8, 10, 12]
    assert notes(replace(PLAIN, shape="falling")) == [0, -1, -3, -5, -7, -8, -10, -12]
    assert notes(replace(PLAIN, shape="circling"), key=5)[:5] == [0, 4, 7, 4, 0]


def test_a_fast_tune_has_more_notes() -> None:
    def onsets(tempo: str) -> int:
        samples = np.abs(synthesize(replace(PLAIN, instrument="harp", tempo=tempo)))
        level = samples.reshape(-1, 80).max(1)
        return int(((level[1:] > 1.5 * level[:-1]) & (level[1:] > 0.3 * level.max())).sum())

    assert onsets("slow") < onsets("moderate") < onsets("fast")


def test_chords_are_several_notes_at_once() -> None:
    def peaks(texture: str) -> int:
        samples = synthesize(replace(PLAIN, instrument="harp", texture=texture), notes_hz=0.5)
        spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))[: 1200 * 2]
        inner = spectrum[1:-1]
        return int(
            (
                (inner > spectrum[:-2]) & (inner > spectrum[2:]) & (inner > 0.4 * spectrum.max())
            ).sum()
        )

    assert peaks("alone") == 1 and peaks("chords") == 3


def test_loud_tunes_are_louder_for_every_instrument() -> None:
    for instrument in TIMBRES:
        levels = {
            word: np.sqrt(
                np.mean(np.square(find_tune(instrument, word).synthesize(2 * RATE, RATE, rng())))
            )
            for word in ("quiet", "loud")
        }
        assert levels["loud"] > 4 * levels["quiet"]


def find_tune(instrument: str, loudness: str) -> Tune:
    """Return the first tune with this instrument and loudness."""
    return next(
        tune
        for tune in (generate_tune(0, number) for number in range(5000))
        if (tune.traits.instrument, tune.traits.loudness) == (instrument, loudness)
    )


def test_echo_and_tremolo_change_the_audio() -> None:
    plain, echo, tremolo = (
        synthesize(replace(PLAIN, effect=effect), notes_hz=0.5)
        for effect in ("plain", "echo", "tremolo")
    )
    assert not np.allclose(plain, echo, atol=0.02)
    level = np.abs(tremolo[800:-800]).reshape(-1, 80).max(1)
    assert level.min() < 0.3 * level.max()
    plain_level = np.abs(plain[800:-800]).reshape(-1, 80).max(1)
    assert plain_level.min() > 0.3 * plain_level.max()


def test_instruments_differ_in_their_spectrum() -> None:
    spectra = [np.abs(np.fft.rfft(synthesize(replace(PLAIN, instrument=name)))) for name in TIMBRES]
    unit = np.stack([spectrum / np.linalg.norm(spectrum) for spectrum in spectra])
    similarity = unit @ unit.T
    assert (similarity - np.eye(len(unit))).max() < 0.95


def test_captions_mention_every_trait() -> None:
    traits = Traits("violin", "slow", "minor", "falling", "chords", "quiet", "echo")
    for phrase in range(len(PHRASES)):
        for seed in range(5):
            caption = traits.caption(phrase, np.random.default_rng(seed))
            assert "violin" in caption and "minor" in caption
            for trait in ("slow", "falling", "chords", "quiet", "echo"):
                assert sum(word in caption for word in WORDS[trait]) >= 1, (trait, caption)
    assert traits.tags() == ("violin", "minor key", "slow", "falling", "chords", "quiet", "an echo")
