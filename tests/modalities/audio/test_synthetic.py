"""Synthetic audio is reproducible, its classes are distinguishable, and its captions are true."""

from __future__ import annotations

import pickle
import re
from collections import Counter

import numpy as np
import pytest
import torch

from tessera.data.dataset import FIRST_HELD_OUT
from tessera.losses.spectrogram import mfcc
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.synthetic import (
    CONTOURS,
    SCALE,
    Beat,
    Melody,
    Speech,
    SyntheticAudio,
    sample_piece,
)
from tessera.modalities.audio.synthetic_instruments import (
    DRUMS,
    INSTRUMENTS,
    synthesize_drums,
    synthesize_notes,
)
from tessera.modalities.audio.synthetic_voices import (
    ONSETS,
    SPEAKERS,
    VOWELS,
    Syllable,
    synthesize_speech,
)

RATE = 16_000
PIECES = [sample_piece(0, number) for number in range(400)]
UNUSED = np.random.default_rng(0)

SYLLABLE = f"(?:{'|'.join(ONSETS)})(?:{'|'.join(VOWELS)})"
SPEAKER = "|".join(speaker.name for speaker in SPEAKERS)
SPEECH = rf"(?:{SPEAKER}) (?:saying|asking) {SYLLABLE}(?: {SYLLABLE})+"
BEAT = rf"drums going (?:{'|'.join(DRUMS)})(?: (?:{'|'.join(DRUMS)}))+"
INSTRUMENT = "|".join(instrument.name for instrument in INSTRUMENTS)
MELODY = rf"(?:{INSTRUMENT}) playing (?:three|four) (?:{'|'.join(CONTOURS)}) notes"
CAPTION = re.compile(rf"{SPEECH}(?: with {BEAT})?|{BEAT}|{MELODY}")


def make_rng() -> np.random.Generator:
    return np.random.default_rng(0)


def speak(
    speaker, *syllables: str, is_question: bool = False, step: float = 0.3, seed: int = 0
) -> np.ndarray:
    parts = tuple(Syllable(text[:-2], text[-2:]) for text in syllables)
    rng = np.random.default_rng(seed)
    return synthesize_speech(speaker, parts, is_question, 1.0, step, RATE, rng)


def estimate_pitch(samples: np.ndarray, low: float = 60, high: float = 500) -> float:
    """Return the pitch in Hz by the maximum of the autocorrelation."""
    power = abs(np.fft.rfft(samples - samples.mean(), 2 * len(samples))) ** 2
    correlation = np.fft.irfft(power)[: len(samples)]
    lags = np.arange(int(RATE / high), int(RATE / low))
    is_peak = (correlation[lags] > correlation[lags - 1]) & (
        correlation[lags] >= correlation[lags + 1]
    )
    peaks = lags[is_peak]
    return RATE / float(peaks[correlation[peaks].argmax()])


def mean_mfcc(samples: np.ndarray) -> torch.Tensor:
    """Return the mean MFCC without the level; enough coefficients to include the pitch."""
    samples_BN = torch.from_numpy(samples)[None].float()
    return mfcc(samples_BN, rate_hz=RATE, window=640, hop=320, coefficients=32)[0, 1:].mean(dim=1)


# ---- examples


def test_an_example_depends_only_on_seed_and_number():
    one, other = (
        SyntheticAudio(20, 8000, RATE, seed=5),
        SyntheticAudio(3, 8000, RATE, seed=5, first=7),
    )
    first, second = one.item(9, np.random.default_rng(1)), other.item(2, np.random.default_rng(2))
    assert one.name(9) == other.name(2) == "synthetic-000009"
    assert first.caption == second.caption == one.caption(9)
    assert np.array_equal(first.samples, second.samples)
    third = SyntheticAudio(20, 8000, RATE, seed=6).item(9, UNUSED)
    assert not np.array_equal(first.samples, third.samples)


def test_the_first_captions_never_change():
    """Results are compared between releases: a change here is a new dataset."""
    assert [piece.caption for piece in PIECES[:3]] == [
        "a large bell playing three trilling notes",
        "a man's voice saying seh teh too ee with drums going clap tom boom tick",
        "a deep voice asking meh soo",
    ]


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 44_100])
@pytest.mark.parametrize("seconds", [0.1, 1.0, 5.0])
def test_examples_are_valid_at_any_rate_and_length(rate, seconds):
    dataset = SyntheticAudio(12, round(seconds * rate), rate)
    for index in range(12 if seconds < 2 else 3):
        example = dataset.item(index, UNUSED)
        assert example.samples.shape == (1, round(seconds * rate))
        assert example.samples.dtype == np.float32 and np.isfinite(example.samples).all()
        assert 0.45 < abs(example.samples).max() <= 0.91
        assert (example.length, example.rate_hz) == (round(seconds * rate), rate)


def test_loudness_is_normalized():
    dataset = SyntheticAudio(8, 16_000, RATE, loudness_db=-26)
    levels = [20 * np.log10(dataset.item(i, UNUSED).samples.std()) for i in range(8)]
    assert levels == pytest.approx([-26] * 8, abs=0.5)


def test_no_two_examples_are_equal():
    dataset = SyntheticAudio(60, 4000, RATE)
    assert len({dataset.item(i, UNUSED).samples.tobytes() for i in range(60)}) == 60
    assert len({piece.caption for piece in PIECES}) > 0.75 * len(PIECES)


def test_every_class_occurs():
    parts = [part for piece in PIECES for part in piece.parts]
    speech = [part for part in parts if isinstance(part, Speech)]
    melodies = [part for part in parts if isinstance(part, Melody)]
    kinds = Counter(tuple(type(part) for part in piece.parts) for piece in PIECES)
    assert set(kinds) == {(Speech,), (Melody,), (Beat,), (Speech, Beat)}
    assert min(kinds.values()) > 20
    assert {part.speaker for part in speech} == set(SPEAKERS)
    assert {part.is_question for part in speech} == {True, False}
    assert {part.instrument for part in melodies} == set(INSTRUMENTS)
    assert {part.contour for part in melodies} == set(CONTOURS)
    assert {drum for part in parts if isinstance(part, Beat) for drum in part.drums} == set(DRUMS)
    assert {syllable for part in speech for syllable in part.syllables} == {
        Syllable(onset, vowel) for onset in ONSETS for vowel in VOWELS
    }


def test_captions_follow_one_grammar_and_name_every_part():
    for piece in PIECES:
        assert CAPTION.fullmatch(piece.caption), piece.caption
        assert piece.caption == " with ".join(part.describe() for part in piece.parts)


def test_melodies_have_the_contour_that_they_name():
    for piece in PIECES:
        for part in piece.parts:
            if isinstance(part, Melody):
                steps = np.diff([SCALE[note] for note in part.notes])
                rises, falls = (steps > 0).all(), (steps < 0).all()
                assert (rises, falls, (steps == 0).all()) == tuple(
                    part.contour == name for name in ("rising", "falling", "repeated")
                )


# ---- audible properties


@pytest.mark.parametrize(
    "speaker",
    [speaker for speaker in SPEAKERS if speaker.breathiness < 0.3],
    ids=lambda speaker: speaker.name,
)
def test_a_voice_has_the_pitch_of_its_speaker(speaker):
    middle = speak(speaker, "ah", step=1.0)[7000:9000]
    assert estimate_pitch(middle) == pytest.approx(speaker.pitch_hz, rel=0.1)


def test_the_pitch_rises_in_questions_and_falls_in_statements():
    for speaker in SPEAKERS[:4]:
        question = speak(speaker, "ah", "ah", "ah", is_question=True)
        statement = speak(speaker, "ah", "ah", "ah")
        first, last = slice(800, 3200), slice(11_000, 13_400)
        assert estimate_pitch(question[last]) > 1.2 * estimate_pitch(question[first])
        assert estimate_pitch(statement[last]) < 0.9 * estimate_pitch(statement[first])


@pytest.mark.parametrize("vowel", VOWELS)
def test_a_vowel_has_spectral_peaks_at_its_formants(vowel):
    """Measured on a whisper, whose source is white."""
    whisper = next(speaker for speaker in SPEAKERS if speaker.breathiness == 1)
    samples = np.concatenate([speak(whisper, vowel, seed=seed)[400:4200] for seed in range(8)])
    frames = np.lib.stride_tricks.sliding_window_view(samples, 512)[::128] * np.hanning(512)
    power = (abs(np.fft.rfft(frames, axis=1)) ** 2).mean(axis=0)
    hertz = np.fft.rfftfreq(512, 1 / RATE)
    for formant in VOWELS[vowel][:2]:
        near = np.flatnonzero(abs(hertz - formant * whisper.formant_scale) < 100)
        peak = near[power[near].argmax()]
        assert power[peak] > max(power[peak - 1], power[peak + 1])
        assert power[peak] > 3 * np.median(power)


def test_speakers_are_distinguishable_in_other_sentences():
    """By the nearest mean of other sentences; chance is one in six."""
    sentences = [
        "mah see too",
        "eh saw tah",
        "ee moo teh",
        "aw ah soo",
        "tee maw seh",
        "oo mee sah",
    ]
    features = torch.stack(
        [
            torch.stack([mean_mfcc(speak(speaker, *words.split())) for words in sentences])
            for speaker in SPEAKERS
        ]
    )
    correct = 0
    for left_out in range(len(sentences)):
        others = [index for index in range(len(sentences)) if index != left_out]
        means = features[:, others].mean(dim=1)
        nearest = torch.cdist(features[:, left_out], means).argmin(dim=1)
        correct += int((nearest == torch.arange(len(SPEAKERS))).sum())
    assert correct >= 0.8 * len(sentences) * len(SPEAKERS)


def test_vowels_are_distinguishable_for_every_speaker():
    for speaker in SPEAKERS:
        features = {vowel: mean_mfcc(speak(speaker, vowel, seed=1)) for vowel in VOWELS}
        for vowel in VOWELS:
            query = mean_mfcc(speak(speaker, vowel, seed=2, step=0.35))
            nearest = min(features, key=lambda other: float((features[other] - query).norm()))
            assert nearest == vowel, (speaker.name, vowel)


def test_onsets_are_distinguishable():
    starts = {onset: speak(SPEAKERS[1], onset + "ah")[:1200] for onset in ONSETS}
    high = {onset: np.diff(samples).std() / samples.std() for onset, samples in starts.items()}
    assert high["s"] > 2 * high[""], "a fricative"
    assert starts["t"][:200].std() < 0.05 * starts["t"][400:800].std(), "silence, then a burst"
    assert 0 < starts["m"][:800].std() < starts[""][:800].std(), "a quiet nasal"


@pytest.mark.parametrize(
    "instrument",
    [instrument for instrument in INSTRUMENTS if not instrument.is_bell],
    ids=lambda instrument: instrument.name,
)
@pytest.mark.parametrize("semitones", [0, 7, 16])
def test_strings_are_in_tune(instrument, semitones):
    hertz = instrument.lowest_hz * 2 ** (semitones / 12)
    note = synthesize_notes(instrument, [hertz], 0.6, RATE, make_rng())
    power = abs(np.fft.rfft(note * np.hanning(len(note)), 1 << 18))
    bins = np.arange(int(hertz * 0.9 / RATE * (1 << 18)), int(hertz * 1.1 / RATE * (1 << 18)))
    measured = bins[power[bins].argmax()] * RATE / (1 << 18)
    assert abs(1200 * np.log2(measured / hertz)) < 12, "cents"


def test_notes_decay_and_bells_overlap():
    for instrument in INSTRUMENTS:
        note = synthesize_notes(instrument, [instrument.lowest_hz], 0.8, RATE, make_rng())
        assert note[800:2400].std() > 1.3 * note[-2400:-800].std(), instrument.name
    bell = INSTRUMENTS[-1]
    two = synthesize_notes(bell, [800.0, 1000.0], 0.4, RATE, make_rng())
    spectrum = abs(np.fft.rfft(two[6400:12_800] * np.hanning(6400)))
    assert spectrum[320] > 5 * np.median(spectrum[300:340]), "800 Hz during the note of 1000 Hz"


def test_drums_are_distinguishable():
    centroid = {}
    for drum in DRUMS:
        power = abs(np.fft.rfft(synthesize_drums((drum,), 0.4, RATE, make_rng()))) ** 2
        centroid[drum] = (power * np.fft.rfftfreq(6400, 1 / RATE)).sum() / power.sum()
    assert centroid["boom"] < 100 < centroid["tom"] < 300 < 1.5 * centroid["clap"]
    assert 1.5 * centroid["clap"] < centroid["tick"]


def test_long_audio_repeats_the_piece():
    for beat in [piece for piece in PIECES if isinstance(piece.parts[0], Beat)][:5]:
        repeats = round(6.0 * beat.tempo_hz / len(beat.parts[0]))
        assert repeats >= 2
        amplitude = abs(beat.render(6 * RATE, RATE, make_rng())[0])
        length = len(amplitude) // repeats // 100 * 100
        starts = [round(index * len(amplitude) / repeats) for index in range(2)]
        first, second = (
            amplitude[start : start + length].reshape(-1, 100).max(axis=1) for start in starts
        )
        assert np.corrcoef(first, second)[0, 1] > 0.7, beat.caption


# ---- dataset


def test_training_and_held_out_examples_are_different():
    split = AudioDataConfig(seconds=0.5, num_synthetic=100, val_fraction=0.1).build()
    train = {split.train.name(i) for i in range(len(split.train))}
    held_out = {split.validation.name(i) for i in range(len(split.validation))}
    assert (len(train), len(held_out)) == (100, 10) and not train & held_out
    assert split.validation.first == FIRST_HELD_OUT
    assert split.validation.item(0, UNUSED).samples.shape == (1, 8000)


def test_a_fraction_of_zero_validates_on_the_training_set():
    split = AudioDataConfig(num_synthetic=7, val_fraction=0).build()
    assert split.validation == split.train == AudioDataConfig(num_synthetic=7).full()


def test_the_dataset_can_be_pickled_and_collated():
    dataset = pickle.loads(pickle.dumps(SyntheticAudio(3, 4000, RATE)))
    batch = dataset.collate([dataset.item(i, UNUSED) for i in range(3)])
    assert batch.samples.shape == (3, 1, 4000)
    assert batch.lengths.tolist() == [4000] * 3 and batch.rate_hz == RATE
    assert batch.captions == [dataset.caption(i) for i in range(3)]
    assert all(dataset.all_captions(i) == [batch.captions[i]] for i in range(3))


def test_the_signature_covers_every_setting():
    dataset = SyntheticAudio(1, 4000, RATE)
    assert dataset.signature(0) == SyntheticAudio(1, 4000, RATE, first=5).signature(0)
    others = [
        SyntheticAudio(1, 4001, RATE),
        SyntheticAudio(1, 4000, 8000),
        SyntheticAudio(1, 4000, RATE, -20),
        SyntheticAudio(1, 4000, RATE, seed=1),
    ]
    assert len({dataset.signature(0), *(other.signature(0) for other in others)}) == 5
