"""Toy music: what a caption says can be heard, and what is held out was never learnt from, part by
part though it was."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest

from tessera.data.dataset import HELD_OUT_TOYS
from tessera.modalities.music.dataset import MusicDataConfig
from tessera.modalities.music.synthetic import (
    PHRASES,
    TEMPOS,
    TIMBRES,
    UNSEEN,
    WORDS,
    SyntheticMusic,
    Traits,
    Tune,
    combinations,
    imagine,
)

RATE = 8000
TOYS = SyntheticMusic(40, samples=2 * RATE, rate_hz=RATE)
PLAIN = Traits("flute", "moderate", "major", "rising", "alone", "loud", "plain")


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def heard(
    traits: Traits, seconds: float = 2.0, notes_hz: float | None = None, key: int = 0
) -> np.ndarray:
    tune = Tune(traits, key, TEMPOS[traits.tempo] if notes_hz is None else notes_hz, -20.0, 0)
    return tune.play(round(seconds * RATE), RATE, rng())[0]


def loudest_hz(sound: np.ndarray) -> float:
    return float(np.abs(np.fft.rfft(sound * np.hanning(len(sound)))).argmax()) * RATE / len(sound)


def notes(traits: Traits, count: int = 8, key: int = 0) -> list[float]:
    """The pitch of each of the first notes, in semitones above the first."""
    sound = heard(replace(traits, tempo="slow"), seconds=count / 2, notes_hz=2.0, key=key)
    steps = sound.reshape(count, -1)[:, 400:3600]
    pitches = [loudest_hz(step) for step in steps]
    return [round(12 * np.log2(pitch / pitches[0])) for pitch in pitches]


# ---- a toy is its number


def test_a_toy_is_a_function_of_its_number() -> None:
    one, other = TOYS, replace(TOYS, count=20, first=7)
    mine, yours = one.item(9, rng()), other.item(2, rng())
    assert one.name(9) == other.name(2) == "toy-000009" and one.caption(9) == other.caption(2)
    assert mine.caption == yours.caption and np.array_equal(mine.samples, yours.samples)
    assert replace(one, seed=1).tune(9) != one.tune(9)
    copy = pickle.loads(pickle.dumps(one))
    assert np.array_equal(copy.item(3, rng()).samples, one.item(3, rng()).samples)


def test_the_phrasing_is_drawn_at_each_visit_and_the_music_is_not() -> None:
    visits = [TOYS.item(4, np.random.default_rng(seed)) for seed in range(30)]
    assert len({visit.caption for visit in visits}) > 10
    assert all(
        np.array_equal(visit.samples, visits[0].samples) and visit.tags == visits[0].tags
        for visit in visits
    )
    assert len(TOYS.all_captions(4)) == len(PHRASES)


@pytest.mark.parametrize("number", range(10))
def test_samples_are_sound_within_full_scale(number: int) -> None:
    example = TOYS.item(number, rng())
    assert example.samples.shape == (1, 2 * RATE) and example.samples.dtype == np.float32
    assert 0.001 < np.abs(example.samples).max() <= 1


# ---- what is held out


def test_every_combination_is_either_learnt_from_or_held_out() -> None:
    seen, unseen = combinations()
    assert len(seen) + len(unseen) == len(set(seen) | set(unseen)) == 8 * 3 * 2 * 3 * 2 * 2 * 3
    assert len(unseen) >= 256
    assert {imagine(0, number).traits for number in range(500)} <= set(seen)


def test_held_out_toys_are_combinations_that_were_never_learnt_from_each_once() -> None:
    assert UNSEEN == HELD_OUT_TOYS
    split = MusicDataConfig(rate_hz=RATE, seconds=1, toys=2048, val_fraction=0.125).build()
    held_out = [split.validation.tune(i).traits for i in range(len(split.validation))]
    assert len(held_out) == len(set(held_out)) == 256
    assert not set(held_out) & {split.train.tune(i).traits for i in range(0, 2048, 5)}


def test_each_trait_that_is_held_out_was_met_in_other_company() -> None:
    seen, unseen = combinations()
    for field in fields(Traits):
        assert {getattr(one, field.name) for one in unseen} == {
            getattr(one, field.name) for one in seen
        }


# ---- what is said is heard


def test_major_and_minor_scales_rise_and_fall() -> None:
    assert notes(PLAIN) == [0, 2, 4, 5, 7, 9, 11, 12]
    assert notes(replace(PLAIN, mode="minor")) == [0, 2, 3, 5, 7, 8, 10, 12]
    assert notes(replace(PLAIN, shape="falling")) == [0, -1, -3, -5, -7, -8, -10, -12]
    assert notes(replace(PLAIN, shape="circling"), key=5)[:5] == [0, 4, 7, 4, 0]


def test_a_fast_tune_has_more_notes() -> None:
    def onsets(tempo: str) -> int:
        sound = np.abs(heard(replace(PLAIN, instrument="harp", tempo=tempo)))
        level = sound.reshape(-1, 80).max(1)
        return int(((level[1:] > 1.5 * level[:-1]) & (level[1:] > 0.3 * level.max())).sum())

    assert onsets("slow") < onsets("moderate") < onsets("fast")


def test_chords_are_several_notes_at_once() -> None:
    def peaks(texture: str) -> int:
        sound = heard(replace(PLAIN, instrument="harp", texture=texture), notes_hz=0.5)
        spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound))))[: 1200 * 2]
        inner = spectrum[1:-1]
        return int(
            (
                (inner > spectrum[:-2]) & (inner > spectrum[2:]) & (inner > 0.4 * spectrum.max())
            ).sum()
        )

    assert peaks("alone") == 1 and peaks("chords") == 3


def test_loud_is_louder_than_quiet_whatever_plays() -> None:
    for instrument in TIMBRES:
        levels = {
            word: np.sqrt(
                np.mean(np.square(imagined(instrument, word).play(2 * RATE, RATE, rng())))
            )
            for word in ("quiet", "loud")
        }
        assert levels["loud"] > 4 * levels["quiet"]


def imagined(instrument: str, loudness: str) -> Tune:
    """The first toy in which this one plays so."""
    return next(
        tune for tune in (imagine(0, number) for number in range(5000))
        if (tune.traits.instrument, tune.traits.loudness) == (instrument, loudness)
    )  # fmt: skip


def test_an_echo_sounds_on_and_a_tremolo_trembles() -> None:
    without_augmentation, echo, tremolo = (
        heard(replace(PLAIN, effect=effect), notes_hz=0.5)
        for effect in ("plain", "echo", "tremolo")
    )
    assert not np.allclose(without_augmentation, echo, atol=0.02)
    level = np.abs(tremolo[800:-800]).reshape(-1, 80).max(1)
    assert level.min() < 0.3 * level.max()
    pad_for_batch_invariance = np.abs(without_augmentation[800:-800]).reshape(-1, 80).max(1)
    assert pad_for_batch_invariance.min() > 0.3 * pad_for_batch_invariance.max()


def test_instruments_differ_in_their_spectrum() -> None:
    spectra = [np.abs(np.fft.rfft(heard(replace(PLAIN, instrument=name)))) for name in TIMBRES]
    unit = np.stack([spectrum / np.linalg.norm(spectrum) for spectrum in spectra])
    nearness = unit @ unit.T
    assert (nearness - np.eye(len(unit))).max() < 0.95


def test_captions_name_every_trait_in_words_of_its_own() -> None:
    traits = Traits("violin", "slow", "minor", "falling", "chords", "quiet", "echo")
    for phrase in range(len(PHRASES)):
        for seed in range(5):
            said = traits.caption(phrase, np.random.default_rng(seed))
            assert "violin" in said and "minor" in said
            for trait in ("slow", "falling", "chords", "quiet", "echo"):
                assert sum(word in said for word in WORDS[trait]) >= 1, (trait, said)
    assert traits.tags() == ("violin", "minor key", "slow", "falling", "chords", "quiet", "an echo")
