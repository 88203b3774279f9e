"""A folder of recordings becomes clips of one rate and length, cut by the example's own generator;
broken files are named."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest
import soundfile
import torch

from tessera.data.errors import UnreadableFile
from tessera.data.loader import TrainLoader
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.media import Audio, normalize_loudness
from tessera.run.errors import UserError

PLAIN = np.random.default_rng(0)


def ramp(path, count: int = 1000, rate: int = 16_000, channels: int = 1):
    """Sample k has the value k / count, so that a sample tells which one it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(
        path, np.repeat(np.arange(count)[:, None] / count, channels, axis=1), rate, subtype="FLOAT"
    )
    return path


def noise(path, seconds: float, rate: int = 16_000, channels: int = 1, loudness: float = 0.3):
    samples = np.random.default_rng(0).uniform(
        -loudness, loudness, (round(seconds * rate), channels)
    )
    soundfile.write(path, samples, rate)
    return path


def numbers(example, count: int = 1000) -> list[int]:
    """Which samples of a `ramp` there are."""
    return np.rint(example.samples[0] * count).astype(int).tolist()


def item(source, index: int = 0, seed: int = 0):
    return source.item(index, np.random.default_rng(seed))


def level(samples: np.ndarray) -> float:
    """In decibels of full scale."""
    return float(20 * np.log10(np.sqrt(np.mean(np.square(samples)))))


# ---- what comes out


@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (44_100, 2), (8_000, 1), (48_000, 6)])
def test_any_recording_becomes_a_clip_as_models_hear_it(tmp_path, rate, channels):
    noise(tmp_path / "a.wav", 2.0, rate, channels)
    (tmp_path / "a.txt").write_text("some  noise\n")
    source = AudioDataConfig(path=str(tmp_path), seconds=1.5).full()
    example = source.item(0, PLAIN)
    assert example.samples.shape == (1, 24_000) and example.samples.dtype == np.float32
    assert abs(example.samples).max() <= 1 and example.samples.std() > 0.03
    assert (example.length, example.rate_hz, example.caption) == (24_000, 16_000, "some noise")


def test_a_batch_holds_tensors_and_moves(tmp_path):
    for number in range(3):
        ramp(tmp_path / f"{number}.wav", 1000 - 300 * number)
    source = AudioDataConfig(path=str(tmp_path), samples=800).full()
    batch = source.collate([source.item(i, PLAIN) for i in range(3)])
    assert batch.samples.shape == (3, 1, 800) and batch.samples.dtype == torch.float32
    assert batch.lengths.tolist() == [800, 700, 400] and batch.lengths.dtype == torch.int64
    assert (
        (batch.samples[1, 0, 700:] == 0).all()
        and (batch.samples[2, 0, 400:] == 0).all()
        and batch.rate_hz == 16_000
    )
    moved = batch.to("meta")
    assert moved.samples.device.type == moved.lengths.device.type == "meta" and moved.captions == [
        "",
        "",
        "",
    ]


def test_samples_say_the_length_exactly_and_seconds_nearly():
    assert (
        AudioDataConfig(seconds=0.5).length,
        AudioDataConfig(seconds=0.5, samples=8191).length,
    ) == (8000, 8191)
    assert AudioDataConfig(seconds=1 / 3, rate_hz=24_000).length == 8000


def test_every_beginning_is_drawn_and_all_samples_follow_on(tmp_path):
    ramp(tmp_path / "a.wav", 1000)
    source = AudioDataConfig(path=str(tmp_path), samples=993).build().train
    seen = [numbers(item(source, seed=seed)) for seed in range(100)]
    assert {clip[0] for clip in seen} == set(range(8)), "the last beginning is as good as the first"
    assert all(clip == list(range(clip[0], clip[0] + 993)) for clip in seen)


def test_held_out_clips_and_those_to_look_at_are_the_middle(tmp_path):
    for name in "abcd":
        ramp(tmp_path / f"{name}.wav")
    config = AudioDataConfig(path=str(tmp_path), samples=200, val_fraction=0.3)
    for source in (config.build().validation, config.full()):
        assert {numbers(item(source, seed=seed))[0] for seed in range(5)} == {400}


def test_a_short_recording_is_followed_by_silence_or_left_out(tmp_path):
    path = ramp(tmp_path / "a.wav", 1000)
    example = AudioDataConfig(path=str(tmp_path), samples=1500).full().item(0, PLAIN)
    assert example.length == 1000 and numbers(example) == [*range(1000), *[0] * 500]
    with pytest.raises(
        UnreadableFile, match=f"{path}: it lasts 0.06 s, less than the 0.09 s asked for"
    ):
        AudioDataConfig(path=str(tmp_path), samples=1500, on_short="skip").full().item(0, PLAIN)


def test_mixed_rates_and_channels_share_a_batch(tmp_path):
    for number, (rate, channels) in enumerate([(8_000, 1), (22_050, 2), (48_000, 1)]):
        noise(tmp_path / f"{number}.wav", 0.5, rate, channels)
    source = AudioDataConfig(path=str(tmp_path), seconds=1.0).full()
    batch = source.collate([source.item(i, PLAIN) for i in range(3)])
    assert batch.samples.shape == (3, 1, 16_000) and batch.lengths.tolist() == [8000, 8000, 8000]


# ---- loudness


@pytest.mark.parametrize("rms_ratio", [0.02, 0.3])
def test_clips_are_brought_to_one_loudness(tmp_path, loudness):
    noise(tmp_path / "a.wav", 1.0, loudness=loudness)
    source = AudioDataConfig(path=str(tmp_path), seconds=0.5, loudness_db=-24).full()
    assert level(source.item(0, PLAIN).samples) == pytest.approx(-24, abs=0.01)


def test_loudness_is_that_of_what_is_real_and_not_of_the_silence_after_it(tmp_path):
    noise(tmp_path / "a.wav", 0.5)
    example = (
        AudioDataConfig(path=str(tmp_path), seconds=2.0, loudness_db=-20).full().item(0, PLAIN)
    )
    assert level(example.samples[:, : example.length]) == pytest.approx(-20, abs=0.01)


def test_loudness_never_clips_and_raises_no_silence():
    click = np.zeros((1, 1000), np.float32)
    click[0, :2] = 0.5, 0.25
    assert normalize_loudness(click, -3)[0, :3] == pytest.approx([1, 0.5, 0]), "louder, and not cut off"
    silence = np.full((1, 1000), 3e-5, np.float32)
    assert normalize_loudness(silence, -20) is silence
    whisper = np.resize([1e-3, -1e-3], (1, 1000)).astype(np.float32)
    assert level(normalize_loudness(whisper, -6)) == pytest.approx(-60 + 30, abs=0.01), "30 dB at most"
    assert normalize_loudness(click, None) is click


def test_silence_and_dc_are_clips_as_they_are(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(16_000), 16_000)
    soundfile.write(tmp_path / "b.wav", np.full(16_000, 0.5), 16_000)
    source = AudioDataConfig(path=str(tmp_path), seconds=0.5, loudness_db=-24).full()
    assert (source.item(0, PLAIN).samples == 0).all()
    assert np.isfinite(source.item(1, PLAIN).samples).all()


# ---- broken files


def test_a_file_that_claims_more_than_it_holds_is_cut_from_what_is_there(tmp_path):
    path = noise(tmp_path / "a.flac", 4.0, 44_100)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    source = AudioDataConfig(path=str(tmp_path), seconds=0.5).build().train
    for seed in range(10):
        example = item(source, seed=seed)
        assert example.length == 8000 and example.samples.std() > 0.05


def test_one_bad_file_among_others_does_not_stop_training(tmp_path):
    for name in "abc":
        ramp(tmp_path / f"{name}.wav")
    (tmp_path / "d.wav").write_text("dear reader")
    source = AudioDataConfig(path=str(tmp_path), samples=500, val_fraction=0).build().train
    with pytest.raises(UnreadableFile, match="d.wav: it is no WAV"):
        source.item(3, PLAIN)
    stream = TrainLoader(source, seed=0, batch_size=4)
    (batch,) = next(stream.micro_batches(0, 1, 0, 1))
    assert (
        batch.examples.samples.shape == (4, 1, 500) and batch.examples.lengths.tolist() == [500] * 4
    )


# ---- the configuration


def test_no_recordings_is_refused_with_what_there_is_instead(tmp_path):
    (tmp_path / "a.png").touch()
    with pytest.raises(UserError, match="holds no recordings: .* there are only 1 .png"):
        AudioDataConfig(path=str(tmp_path)).build()


@pytest.mark.parametrize("module", ["soundfile", "soxr"])
def test_a_missing_library_is_met_at_the_start_by_toys_too(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"{module}.*tessera\[audio\]"):
        AudioDataConfig().build()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"rate_hz": 10},
            "rate_hz is a number of samples a second, 1,000 to 768,000, but it is 10",
        ),
        ({"seconds": 0.0}, "A clip lasts at least 0.01 seconds, but seconds is 0.0"),
        ({"samples": 0}, "A clip has at least 1 sample, but samples is 0"),
        (
            {"loudness_db": 3.0},
            "loudness_db is -90 to 0 decibels of full scale, or None, but it is 3.0",
        ),
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1"),
        ({"toys": 0}, "at least 1 toy"),
        (
            {"samples": 100},
            "Toys last at least 0.1 seconds, .* but here it is 100 samples at 16,000",
        ),
        ({"rate_hz": 4000}, "at 8,000 samples a second or more"),
    ],
)
def test_a_wrong_setting_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        AudioDataConfig(**wrong)


def test_how_sound_is_prepared_is_told():
    config = AudioDataConfig(seconds=0.5, loudness_db=-20)
    assert config.preprocessing() == {"rate_hz": 16_000, "loudness_db": -20}
    assert config.without_augmentation().crop == "centre" and config.judge() is None


def test_transcripts_come_from_metadata(tmp_path):
    ramp(tmp_path / "en" / "a.wav")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "en/a.wav", "text": "good morning"}\n')
    source = AudioDataConfig(path=str(tmp_path), samples=100).full()
    assert (
        source.caption(0) == source.item(0, PLAIN).caption == "good morning"
        and source.captioned == 1
    )


def test_a_folder_can_be_sent_to_a_worker_and_one_file_is_a_folder(tmp_path):
    path = ramp(tmp_path / "a.wav")
    source = pickle.loads(pickle.dumps(AudioDataConfig(path=str(path), samples=100).full()))
    assert len(source) == 1 and numbers(source.item(0, PLAIN))[0] == 450
    before = source.signature(0)
    Audio.load(path).save(tmp_path / "a")
    assert source.signature(0) != before
