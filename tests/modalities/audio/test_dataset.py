"""Tests of folders of audio: segments of one rate and length, loudness, and errors."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from tessera.data.dataset import FileDataset
from tessera.data.errors import UnreadableFile
from tessera.data.loader import TrainLoader
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.media import Audio, AudioExample, normalize_loudness
from tessera.run.errors import UserError

RNG = np.random.default_rng(0)


def write_ramp(path: Path, count: int = 1000, rate: int = 16_000, channels: int = 1) -> Path:
    """Write audio whose sample number k has the value k / count."""
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = np.repeat(np.arange(count)[:, None] / count, channels, axis=1)
    soundfile.write(path, samples, rate, subtype="FLOAT")
    return path


def write_noise(
    path: Path, seconds: float, rate: int = 16_000, channels: int = 1, amplitude: float = 0.3
) -> Path:
    shape = (round(seconds * rate), channels)
    samples = np.random.default_rng(0).uniform(-amplitude, amplitude, shape)
    soundfile.write(path, samples, rate)
    return path


def sample_numbers(example: AudioExample, count: int = 1000) -> list[int]:
    """Return which samples of the ramp an example consists of."""
    return np.rint(example.samples[0] * count).astype(int).tolist()


def load(dataset: FileDataset, index: int = 0, seed: int = 0) -> AudioExample:
    return dataset.item(index, np.random.default_rng(seed))


def level_db(samples: np.ndarray) -> float:
    """Return the root mean square in decibels of full scale."""
    return float(20 * np.log10(np.sqrt(np.mean(np.square(samples)))))


# ---- segments


@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (44_100, 2), (8_000, 1), (48_000, 6)])
def test_any_audio_becomes_a_mono_segment_of_the_requested_rate(tmp_path, rate, channels):
    write_noise(tmp_path / "a.wav", 2.0, rate, channels)
    (tmp_path / "a.txt").write_text("some  noise\n")
    dataset = AudioDataConfig(path=str(tmp_path), seconds=1.5).full()
    example = dataset.item(0, RNG)
    assert example.samples.shape == (1, 24_000) and example.samples.dtype == np.float32
    assert abs(example.samples).max() <= 1 and example.samples.std() > 0.03
    assert (example.length, example.rate_hz, example.caption) == (24_000, 16_000, "some noise")


def test_batch_consists_of_padded_tensors_that_can_be_moved(tmp_path):
    for number in range(3):
        write_ramp(tmp_path / f"{number}.wav", 1000 - 300 * number)
    dataset = AudioDataConfig(path=str(tmp_path), samples=800).full()
    batch = dataset.collate([dataset.item(i, RNG) for i in range(3)])
    assert batch.samples.shape == (3, 1, 800) and batch.samples.dtype == torch.float32
    assert batch.lengths.tolist() == [800, 700, 400] and batch.lengths.dtype == torch.int64
    assert (batch.samples[1, 0, 700:] == 0).all() and (batch.samples[2, 0, 400:] == 0).all()
    assert batch.rate_hz == 16_000
    moved = batch.to("meta")
    assert moved.samples.device.type == moved.lengths.device.type == "meta"
    assert moved.captions == ["", "", ""]


def test_samples_set_the_exact_length_instead_of_seconds():
    assert AudioDataConfig(seconds=0.5).length == 8000
    assert AudioDataConfig(seconds=0.5, samples=8191).length == 8191
    assert AudioDataConfig(seconds=1 / 3, rate_hz=24_000).length == 8000


def test_every_start_is_drawn_and_samples_are_consecutive(tmp_path):
    write_ramp(tmp_path / "a.wav", 1000)
    dataset = AudioDataConfig(path=str(tmp_path), samples=993).build().train
    segments = [sample_numbers(load(dataset, seed=seed)) for seed in range(100)]
    assert {segment[0] for segment in segments} == set(range(8)), "first and last included"
    assert all(segment == list(range(segment[0], segment[0] + 993)) for segment in segments)


def test_held_out_segments_are_the_middle(tmp_path):
    for name in "abcd":
        write_ramp(tmp_path / f"{name}.wav")
    config = AudioDataConfig(path=str(tmp_path), samples=200, val_fraction=0.3)
    for dataset in (config.build().validation, config.full()):
        assert {sample_numbers(load(dataset, seed=seed))[0] for seed in range(5)} == {400}


def test_short_audio_is_padded_or_skipped(tmp_path):
    path = write_ramp(tmp_path / "a.wav", 1000)
    example = AudioDataConfig(path=str(tmp_path), samples=1500).full().item(0, RNG)
    assert example.length == 1000
    assert sample_numbers(example) == [*range(1000), *[0] * 500]
    message = f"{path}: it has 0.06 s, less than the requested 0.09 s"
    with pytest.raises(UnreadableFile, match=message):
        AudioDataConfig(path=str(tmp_path), samples=1500, on_short="skip").full().item(0, RNG)


def test_files_of_different_rates_and_channels_can_share_a_batch(tmp_path):
    for number, (rate, channels) in enumerate([(8_000, 1), (22_050, 2), (48_000, 1)]):
        write_noise(tmp_path / f"{number}.wav", 0.5, rate, channels)
    dataset = AudioDataConfig(path=str(tmp_path), seconds=1.0).full()
    batch = dataset.collate([dataset.item(i, RNG) for i in range(3)])
    assert batch.samples.shape == (3, 1, 16_000) and batch.lengths.tolist() == [8000, 8000, 8000]


# ---- loudness


@pytest.mark.parametrize("amplitude", [0.02, 0.3])
def test_examples_are_normalised_to_the_requested_loudness(tmp_path, amplitude):
    write_noise(tmp_path / "a.wav", 1.0, amplitude=amplitude)
    dataset = AudioDataConfig(path=str(tmp_path), seconds=0.5, loudness_db=-24).full()
    assert level_db(dataset.item(0, RNG).samples) == pytest.approx(-24, abs=0.01)


def test_loudness_is_computed_without_padding(tmp_path):
    write_noise(tmp_path / "a.wav", 0.5)
    config = AudioDataConfig(path=str(tmp_path), seconds=2.0, loudness_db=-20)
    example = config.full().item(0, RNG)
    assert level_db(example.samples[:, : example.length]) == pytest.approx(-20, abs=0.01)


def test_loudness_never_clips_and_does_not_amplify_silence():
    click = np.zeros((1, 1000), np.float32)
    click[0, :2] = 0.5, 0.25
    assert normalize_loudness(click, -3)[0, :3] == pytest.approx([1, 0.5, 0]), "not clipped"
    silence = np.full((1, 1000), 3e-5, np.float32)
    assert normalize_loudness(silence, -20) is silence
    quiet = np.resize([1e-3, -1e-3], (1, 1000)).astype(np.float32)
    assert level_db(normalize_loudness(quiet, -6)) == pytest.approx(-60 + 30, abs=0.01), "30 dB"
    assert normalize_loudness(click, None) is click


def test_silence_and_constant_offset_stay_finite(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(16_000), 16_000)
    soundfile.write(tmp_path / "b.wav", np.full(16_000, 0.5), 16_000)
    dataset = AudioDataConfig(path=str(tmp_path), seconds=0.5, loudness_db=-24).full()
    assert (dataset.item(0, RNG).samples == 0).all()
    assert np.isfinite(dataset.item(1, RNG).samples).all()


# ---- unreadable files


def test_truncated_file_is_used_up_to_its_end(tmp_path):
    path = write_noise(tmp_path / "a.flac", 4.0, 44_100)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    dataset = AudioDataConfig(path=str(tmp_path), seconds=0.5).build().train
    for seed in range(10):
        example = load(dataset, seed=seed)
        assert example.length == 8000 and example.samples.std() > 0.05


def test_unreadable_file_does_not_stop_training(tmp_path):
    for name in "abc":
        write_ramp(tmp_path / f"{name}.wav")
    (tmp_path / "d.wav").write_text("dear reader")
    dataset = AudioDataConfig(path=str(tmp_path), samples=500, val_fraction=0).build().train
    with pytest.raises(UnreadableFile, match="d.wav: it is not a WAV"):
        dataset.item(3, RNG)
    loader = TrainLoader(dataset, seed=0, batch_size=4)
    (batch,) = next(loader.micro_batches(0, 1, 0, 1))
    assert batch.examples.samples.shape == (4, 1, 500)
    assert batch.examples.lengths.tolist() == [500] * 4


# ---- audio in memory


@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (44_100, 2)])
@pytest.mark.parametrize("loudness_db", [None, -20.0])
def test_audio_in_memory_is_preprocessed_like_its_file(tmp_path, rate, channels, loudness_db):
    path = write_noise(tmp_path / "a.wav", 0.7, rate, channels)
    config = AudioDataConfig(path="unused", seconds=0.5, loudness_db=loudness_db)
    expected = config.example_from_file(str(path))
    example = config.example_from_media(Audio.load(path))
    assert np.array_equal(example.samples, expected.samples)
    assert (example.length, example.rate_hz, example.caption) == (11_200, 16_000, "")
    assert example.length == expected.length == example.samples.shape[1]


def test_array_is_audio_at_the_rate_of_the_data(tmp_path):
    path = write_ramp(tmp_path / "a.wav", 1000)
    config = AudioDataConfig(path="unused", samples=1000)
    expected = config.example_from_file(str(path)).samples
    mono = Audio.load(path).samples
    for array in (mono, mono[0], mono[0].astype(np.float64), np.repeat(mono, 2, axis=0)):
        assert np.array_equal(config.example_from_media(array).samples, expected)


@pytest.mark.parametrize("media", [None, 3, [0.5], b"wav"])
def test_other_types_than_audio_and_arrays_are_rejected(media):
    message = rf"Expected an Audio, a path or an array .*, got a {type(media).__name__}\."
    with pytest.raises(UserError, match=message):
        AudioDataConfig().example_from_media(media)


def test_array_of_other_integers_than_16_bits_is_rejected():
    """Its values may be of 24 bits or of 32: full scale is unknown."""
    with pytest.raises(UserError, match=r"floats in \[-1, 1\], got an array of int32\."):
        AudioDataConfig().example_from_media(np.zeros(100, np.int32))
    example = AudioDataConfig().example_from_media(np.full(100, -(2**14), np.int16))
    assert (example.samples == -0.5).all() and example.samples.dtype == np.float32


def test_array_of_another_shape_is_rejected():
    with pytest.raises(ValueError, match=r"Audio needs samples of shape .* got shape \(2, 3, 4\)"):
        AudioDataConfig().example_from_media(np.zeros((2, 3, 4), np.float32))


def test_audio_of_different_lengths_in_memory_is_padded():
    config = AudioDataConfig()
    examples = [config.example_from_media(np.full(n, 0.5, np.float32)) for n in (300, 500)]
    batch = config.collate(examples)
    assert batch.samples.shape == (2, 1, 500) and batch.lengths.tolist() == [300, 500]
    assert (batch.samples[0, 0, 300:] == 0).all() and (batch.samples[1] == 0.5).all()


# ---- configuration


def test_folder_without_audio_is_rejected_with_what_was_found(tmp_path):
    (tmp_path / "a.png").touch()
    with pytest.raises(UserError, match="has no audio files: .* found only 1 .png"):
        AudioDataConfig(path=str(tmp_path)).build()


@pytest.mark.parametrize("module", ["soundfile", "soxr"])
def test_missing_library_is_reported_at_the_start(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"{module}.*tessera\[audio\]"):
        AudioDataConfig().build()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rate_hz": 10}, "rate_hz must be between 1,000 and 768,000 .*, got 10"),
        ({"seconds": 0.0}, "seconds must be at least 0.01, got 0.0"),
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"loudness_db": 3.0}, "loudness_db must be between -90 and 0, or None, got 3.0"),
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1"),
        ({"num_synthetic": 0}, "num_synthetic must be at least 1"),
        ({"samples": 100}, "at least 0.1 seconds .*, got 100 samples at 16,000"),
        ({"rate_hz": 4000}, "at 8,000 samples per second or more"),
    ],
)
def test_invalid_setting_is_rejected(setting, message):
    with pytest.raises(ValueError, match=message):
        AudioDataConfig(**setting)


def test_preprocessing_consists_of_rate_and_loudness():
    config = AudioDataConfig(seconds=0.5, loudness_db=-20)
    assert config.preprocessing() == {"rate_hz": 16_000, "loudness_db": -20}
    assert config.without_augmentation().crop == "centre" and not config.sample_metrics()


def test_transcripts_are_read_from_metadata(tmp_path):
    write_ramp(tmp_path / "en" / "a.wav")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "en/a.wav", "text": "good morning"}\n')
    dataset = AudioDataConfig(path=str(tmp_path), samples=100).full()
    assert dataset.caption(0) == dataset.item(0, RNG).caption == "good morning"
    assert dataset.files.count_captions() == {"metadata": 1}


def test_single_file_is_a_dataset_that_can_be_pickled(tmp_path):
    path = write_ramp(tmp_path / "a.wav")
    dataset = pickle.loads(pickle.dumps(AudioDataConfig(path=str(path), samples=100).full()))
    assert len(dataset) == 1 and sample_numbers(dataset.item(0, RNG))[0] == 450
    before = dataset.signature(0)
    Audio.load(path).save(tmp_path / "a")
    assert dataset.signature(0) != before


# ---- augmentation


def write_tone(path: Path, frequency_hz: float, amplitude: float = 0.3) -> Path:
    times = np.arange(32_000) / 16_000
    soundfile.write(path, amplitude * np.sin(2 * np.pi * frequency_hz * times), 16_000)
    return path


def peak_hz(example: AudioExample) -> float:
    """Return the frequency of the largest bin of the spectrum."""
    valid = example.samples[0, : example.length]
    spectrum = np.abs(np.fft.rfft(valid * np.hanning(example.length)))
    return float(spectrum.argmax() * example.rate_hz / example.length)


def test_speed_changes_the_pitch_within_its_range_and_keeps_the_length(tmp_path):
    write_tone(tmp_path / "a.wav", 400)
    data = AudioDataConfig(path=str(tmp_path), seconds=0.5, val_fraction=0, speed=1.5)
    examples = [load(data.build(captions=False).train, seed=seed) for seed in range(20)]
    pitches = [peak_hz(one) for one in examples]
    assert {(one.samples.shape[1], one.length) for one in examples} == {(8000, 8000)}
    assert 400 / 1.5 - 3 <= min(pitches) < 330
    assert 490 < max(pitches) <= 400 * 1.5 + 3


def test_a_faster_example_of_a_short_file_is_shorter(tmp_path):
    write_tone(tmp_path / "a.wav", 400)  # 2 s
    data = AudioDataConfig(path=str(tmp_path), seconds=4, val_fraction=0, speed=1.5)
    for seed in range(8):
        example = load(data.build(captions=False).train, seed=seed)
        assert example.length == pytest.approx(32_000 * 400 / peak_hz(example), rel=0.01)


def test_a_slower_recording_with_a_transcript_is_never_cut(tmp_path):
    write_tone(tmp_path / "a.wav", 400)  # 2 s
    data = AudioDataConfig(
        path=str(tmp_path), seconds=2.2, val_fraction=0, on_long="skip", speed=1.5
    )
    pitches = []
    for seed in range(12):
        example = load(data.build(captions=False).train, seed=seed)
        pitches.append(peak_hz(example))
        assert example.length == pytest.approx(32_000 * 400 / pitches[-1], rel=0.01)
    assert min(pitches) < 375


def test_gain_changes_the_level_within_its_range_and_never_clips(tmp_path):
    write_tone(tmp_path / "a.wav", 400, amplitude=0.6)
    data = AudioDataConfig(path=str(tmp_path), seconds=0.5, val_fraction=0, gain_db=12)
    dataset = data.build(captions=False).train
    peaks = [np.abs(load(dataset, seed=seed).samples).max() for seed in range(30)]
    assert 0.6 / 4 - 0.01 <= min(peaks) < 0.25
    assert 0.9 < max(peaks) <= 1


def test_flip_inverts_some_examples_and_changes_nothing_else(tmp_path):
    write_ramp(tmp_path / "a.wav")
    data = AudioDataConfig(path=str(tmp_path), samples=1000, val_fraction=0, flip=True)
    dataset = data.build(captions=False).train
    expected = np.arange(1000)
    signs = [np.array(sample_numbers(load(dataset, seed=seed))) for seed in range(12)]
    assert {tuple(one == expected) for one in signs} != {(True,) * 1000}
    assert all((one == expected).all() or (one == -expected).all() for one in signs)
    assert any((one == expected).all() for one in signs)


def test_held_out_examples_are_not_augmented(tmp_path):
    for number in range(8):
        write_tone(tmp_path / f"{number}.wav", 400)
    plain = AudioDataConfig(path=str(tmp_path), seconds=0.5, val_fraction=0.4)
    data = AudioDataConfig(
        path=str(tmp_path), seconds=0.5, val_fraction=0.4, speed=2, gain_db=20, flip=True
    )
    kept, changed = (one.build(captions=False).validation for one in (plain, data))
    assert len(kept) == len(changed) > 0
    for index in range(len(kept)):
        same = [load(one, index, seed=3).samples for one in (kept, changed)]
        np.testing.assert_array_equal(*same)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speed": 0.5}, "speed must be between 1"),
        ({"speed": 9}, "speed must be between 1"),
        ({"gain_db": -3}, "gain_db must be between 0"),
    ],
)
def test_augmentation_out_of_range_is_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        AudioDataConfig(**settings)
