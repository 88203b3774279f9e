"""The toy sounds are the same for everybody, can be told apart by ear, and what is said about them
is true."""

from __future__ import annotations

import pickle
import re
from collections import Counter

import numpy as np
import pytest
import torch

from tessera.data.dataset import HELD_OUT_TOYS
from tessera.losses.spectra import mfcc
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.synthetic import (
    MELODIES,
    SCALE,
    Beat,
    Melody,
    Speech,
    SyntheticAudio,
    imagine,
)
from tessera.modalities.audio.synthetic_instruments import DRUMS, INSTRUMENTS, played, struck
from tessera.modalities.audio.synthetic_voices import ONSETS, SPEAKERS, VOWELS, Syllable, spoken

RATE = 16_000
PIECES = [imagine(0, number) for number in range(400)]
ANYTHING = np.random.default_rng(0)

SYLLABLE = f"(?:{'|'.join(ONSETS)})(?:{'|'.join(VOWELS)})"
SPEECH = rf"(?:{'|'.join(speaker.name for speaker in SPEAKERS)}) (?:saying|asking) {SYLLABLE}(?: {SYLLABLE})+"
BEAT = rf"drums going (?:{'|'.join(DRUMS)})(?: (?:{'|'.join(DRUMS)}))+"
MELODY = rf"(?:{'|'.join(each.name for each in INSTRUMENTS)}) playing (?:three|four) (?:{'|'.join(MELODIES)}) notes"
SENTENCE = re.compile(rf"{SPEECH}(?: with {BEAT})?|{BEAT}|{MELODY}")


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def said(
    speaker, *syllables: str, asks: bool = False, step: float = 0.3, noise: int = 0
) -> np.ndarray:
    parts = tuple(Syllable(spelt[:-2], spelt[-2:]) for spelt in syllables)
    return spoken(speaker, parts, asks, 1.0, step, RATE, np.random.default_rng(noise))


def pitch(sound: np.ndarray, low: float = 60, high: float = 500) -> float:
    """In Hz, by the strongest echo of the sound in itself."""
    power = abs(np.fft.rfft(sound - sound.mean(), 2 * len(sound))) ** 2
    echo = np.fft.irfft(power)[: len(sound)]
    lags = np.arange(int(RATE / high), int(RATE / low))
    peaks = lags[(echo[lags] > echo[lags - 1]) & (echo[lags] >= echo[lags + 1])]
    return RATE / float(peaks[echo[peaks].argmax()])


def timbre(sound: np.ndarray) -> torch.Tensor:
    """Mean MFCC, without loudness; so many of them that pitch is among what they tell."""
    sound_BN = torch.from_numpy(sound)[None].float()
    return mfcc(sound_BN, rate_hz=RATE, window=640, hop=320, coefficients=32)[0, 1:].mean(dim=1)


# ---- what a toy is


def test_a_toy_depends_on_its_seed_and_number_alone():
    one, other = (
        SyntheticAudio(20, 8000, RATE, seed=5),
        SyntheticAudio(3, 8000, RATE, seed=5, first=7),
    )
    mine, yours = one.item(9, np.random.default_rng(1)), other.item(2, np.random.default_rng(2))
    assert one.name(9) == other.name(2) == "toy-000009"
    assert mine.caption == yours.caption == one.caption(9) and np.array_equal(
        mine.samples, yours.samples
    )
    assert not np.array_equal(
        mine.samples, SyntheticAudio(20, 8000, RATE, seed=6).item(9, ANYTHING).samples
    )


def test_the_first_toys_are_those_they_have_always_been():
    """Runs compare numbers with those of last year: a change here is a new data set."""
    assert [piece.caption for piece in PIECES[:3]] == [
        "a large bell playing three trilling notes",
        "a man's voice saying seh teh too ee with drums going clap tom boom tick",
        "a deep voice asking meh soo",
    ]


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 44_100])
@pytest.mark.parametrize("seconds", [0.1, 1.0, 5.0])
def test_toys_are_sounds_as_models_hear_them_at_any_rate_and_length(rate, seconds):
    toys = SyntheticAudio(12, round(seconds * rate), rate)
    for index in range(12 if seconds < 2 else 3):
        example = toys.item(index, ANYTHING)
        assert (
            example.samples.shape == (1, round(seconds * rate))
            and example.samples.dtype == np.float32
        )
        assert np.isfinite(example.samples).all() and 0.45 < abs(example.samples).max() <= 0.91
        assert (example.length, example.rate_hz) == (round(seconds * rate), rate)


def test_loudness_is_that_asked_for():
    toys = SyntheticAudio(8, 16_000, RATE, loudness_db=-26)
    levels = [20 * np.log10(toys.item(i, ANYTHING).samples.std()) for i in range(8)]
    assert levels == pytest.approx([-26] * 8, abs=0.5)


def test_no_two_toys_are_alike():
    toys = SyntheticAudio(60, 4000, RATE)
    assert len({toys.item(i, ANYTHING).samples.tobytes() for i in range(60)}) == 60
    assert len({piece.caption for piece in PIECES}) > 0.75 * len(PIECES)


def test_everything_that_a_toy_may_be_occurs():
    parts = [part for piece in PIECES for part in piece.parts]
    kinds = Counter(tuple(type(part) for part in piece.parts) for piece in PIECES)
    assert (
        set(kinds) == {(Speech,), (Melody,), (Beat,), (Speech, Beat)} and min(kinds.values()) > 20
    )
    assert {part.speaker for part in parts if isinstance(part, Speech)} == set(SPEAKERS)
    assert {part.asks for part in parts if isinstance(part, Speech)} == {True, False}
    assert {part.instrument for part in parts if isinstance(part, Melody)} == set(INSTRUMENTS)
    assert {part.shape for part in parts if isinstance(part, Melody)} == set(MELODIES)
    assert {drum for part in parts if isinstance(part, Beat) for drum in part.drums} == set(DRUMS)
    spoken_ones = {each for part in parts if isinstance(part, Speech) for each in part.syllables}
    assert spoken_ones == {Syllable(onset, vowel) for onset in ONSETS for vowel in VOWELS}


def test_captions_name_every_part_in_one_grammar():
    for piece in PIECES:
        assert SENTENCE.fullmatch(piece.caption), piece.caption
        assert piece.caption == " with ".join(part.said() for part in piece.parts)


def test_melodies_go_where_their_word_says():
    for piece in PIECES:
        for part in piece.parts:
            if isinstance(part, Melody):
                steps = np.diff([SCALE[note] for note in part.notes])
                rises, falls = (steps > 0).all(), (steps < 0).all()
                assert (rises, falls, (steps == 0).all()) == tuple(
                    part.shape == word for word in ("rising", "falling", "repeated")
                )


# ---- what is heard


@pytest.mark.parametrize(
    "speaker", [each for each in SPEAKERS if each.breath < 0.3], ids=lambda each: each.name
)
def test_a_voice_has_its_pitch(speaker):
    middle = said(speaker, "ah", step=1.0)[7000:9000]
    assert pitch(middle) == pytest.approx(speaker.pitch_hz, rel=0.1)


def test_a_question_rises_and_a_sentence_falls():
    for speaker in SPEAKERS[:4]:
        question, sentence = (
            said(speaker, "ah", "ah", "ah", asks=True),
            said(speaker, "ah", "ah", "ah"),
        )
        first, last = slice(800, 3200), slice(11_000, 13_400)
        assert pitch(question[last]) > 1.2 * pitch(question[first])
        assert pitch(sentence[last]) < 0.9 * pitch(sentence[first])


@pytest.mark.parametrize("vowel", VOWELS)
def test_a_vowel_has_its_formants(vowel):
    """A whisper shows them best: its source is white, and the higher resonators only tilt what is
    heard."""
    whisper = next(speaker for speaker in SPEAKERS if speaker.breath == 1)
    sound = np.concatenate([said(whisper, vowel, noise=seed)[400:4200] for seed in range(8)])
    frames = np.lib.stride_tricks.sliding_window_view(sound, 512)[::128] * np.hanning(512)
    power = (abs(np.fft.rfft(frames, axis=1)) ** 2).mean(axis=0)
    hertz = np.fft.rfftfreq(512, 1 / RATE)
    for formant in VOWELS[vowel][:2]:
        near = np.flatnonzero(abs(hertz - formant * whisper.tract) < 100)
        peak = near[power[near].argmax()]
        assert power[peak] > max(power[peak - 1], power[peak + 1]) and power[peak] > 3 * np.median(
            power
        )


def test_speakers_are_told_apart_whatever_they_say():
    """By the nearest mean of other sentences: chance would be one in six."""
    sentences = [
        "mah see too",
        "eh saw tah",
        "ee moo teh",
        "aw ah soo",
        "tee maw seh",
        "oo mee sah",
    ]
    heard = torch.stack(
        [
            torch.stack([timbre(said(who, *words.split())) for words in sentences])
            for who in SPEAKERS
        ]
    )
    correct = 0
    for left_out in range(len(sentences)):
        others = [at for at in range(len(sentences)) if at != left_out]
        means = heard[:, others].mean(dim=1)
        nearest = torch.cdist(heard[:, left_out], means).argmin(dim=1)
        correct += int((nearest == torch.arange(len(SPEAKERS))).sum())
    assert correct >= 0.8 * len(sentences) * len(SPEAKERS)


def test_vowels_are_told_apart_whoever_says_them():
    for speaker in SPEAKERS:
        heard = {vowel: timbre(said(speaker, vowel, noise=1)) for vowel in VOWELS}
        for vowel in VOWELS:
            again = timbre(said(speaker, vowel, noise=2, step=0.35))
            assert min(heard, key=lambda other: float((heard[other] - again).norm())) == vowel, (
                speaker.name,
                vowel,
            )


def test_onsets_are_told_apart():
    beginnings = {onset: said(SPEAKERS[1], onset + "ah")[:1200] for onset in ONSETS}
    high = {onset: np.diff(sound).std() / sound.std() for onset, sound in beginnings.items()}
    assert high["s"] > 2 * high[""], "a hiss"
    assert beginnings["t"][:200].std() < 0.05 * beginnings["t"][400:800].std(), (
        "silence, then a burst"
    )
    assert 0 < beginnings["m"][:800].std() < beginnings[""][:800].std(), "a hum"


@pytest.mark.parametrize(
    "instrument", [each for each in INSTRUMENTS if not each.is_bell], ids=lambda each: each.name
)
@pytest.mark.parametrize("semitones", [0, 7, 16])
def test_a_string_is_in_tune(instrument, semitones):
    hertz = instrument.lowest_hz * 2 ** (semitones / 12)
    note = played(instrument, [hertz], 0.6, RATE, rng())
    power = abs(np.fft.rfft(note * np.hanning(len(note)), 1 << 18))
    around = np.arange(int(hertz * 0.9 / RATE * (1 << 18)), int(hertz * 1.1 / RATE * (1 << 18)))
    found = around[power[around].argmax()] * RATE / (1 << 18)
    assert abs(1200 * np.log2(found / hertz)) < 12, "hundredths of a semitone"


def test_a_note_fades_and_a_bell_rings_on_beneath_the_next():
    for instrument in INSTRUMENTS:
        note = played(instrument, [instrument.lowest_hz], 0.8, RATE, rng())
        assert note[800:2400].std() > 1.3 * note[-2400:-800].std(), instrument.name
    bell = INSTRUMENTS[-1]
    two = played(bell, [800.0, 1000.0], 0.4, RATE, rng())
    spectrum = abs(np.fft.rfft(two[6400:12_800] * np.hanning(6400)))
    assert spectrum[320] > 5 * np.median(spectrum[300:340]), "800 Hz, while 1000 Hz is struck"


def test_drums_are_told_apart():
    centre = {}
    for drum in DRUMS:
        power = abs(np.fft.rfft(struck((drum,), 0.4, RATE, rng()))) ** 2
        centre[drum] = (power * np.fft.rfftfreq(6400, 1 / RATE)).sum() / power.sum()
    assert centre["boom"] < 100 < centre["tom"] < 300 < 1.5 * centre["clap"] < centre["tick"]


def test_a_piece_is_repeated_as_often_as_it_fits_and_begins_anew_each_time():
    for beat in [piece for piece in PIECES if isinstance(piece.parts[0], Beat)][:5]:
        repeats = round(6.0 * beat.steps_hz / len(beat.parts[0]))
        assert repeats >= 2
        loudness = abs(beat.play(6 * RATE, RATE, rng())[0])
        once = len(loudness) // repeats // 100 * 100
        starts = [round(number * len(loudness) / repeats) for number in range(2)]
        first, second = (
            loudness[start : start + once].reshape(-1, 100).max(axis=1) for start in starts
        )
        assert np.corrcoef(first, second)[0, 1] > 0.7, beat.caption


# ---- the source


def test_toys_learnt_from_and_toys_held_out_are_different_ones():
    split = AudioDataConfig(seconds=0.5, toys=100, val_fraction=0.1).build()
    train = {split.train.name(i) for i in range(len(split.train))}
    held_out = {split.validation.name(i) for i in range(len(split.validation))}
    assert (len(train), len(held_out)) == (100, 10) and not train & held_out
    assert split.validation.first == HELD_OUT_TOYS
    assert split.validation.item(0, ANYTHING).samples.shape == (1, 8000)


def test_a_share_of_nothing_validates_on_the_toys_themselves():
    split = AudioDataConfig(toys=7, val_fraction=0).build()
    assert split.validation == split.train == AudioDataConfig(toys=7).full()


def test_toys_can_be_sent_to_a_worker_and_come_in_batches():
    toys = pickle.loads(pickle.dumps(SyntheticAudio(3, 4000, RATE)))
    batch = toys.collate([toys.item(i, ANYTHING) for i in range(3)])
    assert (
        batch.samples.shape == (3, 1, 4000)
        and batch.lengths.tolist() == [4000] * 3
        and batch.rate_hz == RATE
    )
    assert batch.captions == [toys.caption(i) for i in range(3)] and toys.captioned == 3


def test_the_mark_of_a_toy_is_all_that_it_depends_on():
    without_augmentation = SyntheticAudio(1, 4000, RATE)
    assert without_augmentation.signature(0) == SyntheticAudio(1, 4000, RATE, first=5).signature(0)
    others = [
        SyntheticAudio(1, 4001, RATE),
        SyntheticAudio(1, 4000, 8000),
        SyntheticAudio(1, 4000, RATE, -20),
        SyntheticAudio(1, 4000, RATE, seed=1),
    ]
    assert len({without_augmentation.signature(0), *(other.signature(0) for other in others)}) == 5
