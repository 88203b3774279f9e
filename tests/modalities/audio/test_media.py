"""Any recording that a person may have comes in as they would hear it; what is none is refused with
the reason."""

from __future__ import annotations

import math
import pickle
import sys

import av
import numpy as np
import PIL.Image
import pytest
import soundfile

from tessera.data.errors import UnreadableFile
from tessera.modalities.audio.io.files import examine, probe, read_samples
from tessera.modalities.audio.media import PAUSE_SECONDS, Audio, read_part
from tessera.modalities.image.media import Image
from tessera.modalities.video.media import Video


def chirp(seconds: float = 2.0, rate: int = 44_100, channels: int = 1) -> np.ndarray:
    """(N, C): from 200 to 3000 Hz, each further channel half as loud as the one before."""
    wave = 0.5 * np.sin(2 * np.pi * np.cumsum(np.linspace(200, 3000, round(seconds * rate))) / rate)
    return np.stack([wave / 2**channel for channel in range(channels)], axis=1).astype(np.float32)


def written(path, samples, rate: int = 44_100, **how):
    soundfile.write(path, samples, rate, **how)
    return path


def encoded(path, codec: str, samples, rate: int = 44_100):
    """By PyAV itself."""
    with av.open(str(path), "w") as container:
        layout = "mono" if samples.shape[1] == 1 else "stereo"
        stream = container.add_stream(codec, rate=rate)
        stream.layout = layout
        size = stream.codec_context.frame_size or 1024
        for start in range(0, len(samples), size):
            planes = np.ascontiguousarray(samples[start : start + size].T)
            frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout=layout)
            frame.rate, frame.pts = rate, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def cut_short(path, share: float):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


# ---- what is read


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(
    ("name", "how", "tolerance"),
    [
        ("a.wav", {}, 1e-4),
        ("a.WAV", {"subtype": "PCM_24"}, 1e-6),
        ("a.wav", {"subtype": "PCM_U8"}, 1e-2),
        ("a.wav", {"subtype": "FLOAT"}, 0),
        ("a.flac", {}, 1e-4),
        ("a.aiff", {}, 1e-4),
        ("a.ogg", {}, 0.05),
        ("a.mp3", {}, 0.05),
    ],
)
def test_every_common_recording_is_read_sample_by_sample(tmp_path, name, how, tolerance, channels):
    path = written(tmp_path / name, chirp(channels=channels), **how)
    sound, facts = Audio.load(path), probe(path)
    count = sound.samples.shape[1]
    assert (facts.rate_hz, facts.channels, facts.count, sound.rate_hz) == (
        44_100,
        channels,
        88_200,
        44_100,
    )
    assert len(sound.samples) == channels and sound.samples.dtype == np.float32
    assert (
        88_200 - (128 if name == "a.ogg" else 0) <= count <= 88_200
    )  # FFmpeg leaves the last of Vorbis out
    assert (
        abs(sound.samples - chirp(channels=channels).T[:, :count])[:, 2000:-2000].max() <= tolerance
    )
    assert examine(path).count == count and examine(path).broke == ""


@pytest.mark.parametrize(
    ("name", "codec", "rate"),
    [
        ("a.m4a", "aac", 44_100),
        ("a.aac", "aac", 44_100),
        ("a.webm", "libopus", 48_000),
        ("a.mka", "ac3", 44_100),
    ],
)
def test_what_soundfile_cannot_read_pyav_reads(tmp_path, name, codec, rate):
    path = encoded(tmp_path / name, codec, chirp(rate=rate, channels=2), rate)
    sound = Audio.load(path)
    assert (sound.rate_hz, len(sound.samples)) == (rate, 2) and sound.seconds == pytest.approx(
        2, abs=0.1
    )
    heard = np.corrcoef(*spectra(sound.samples[0], chirp(rate=rate)[:, 0]))[0, 1]
    assert heard > 0.95, "the chirp, give or take the silence that an encoder puts before it"
    assert sound.samples.std(axis=1)[0] == pytest.approx(2 * sound.samples.std(axis=1)[1], rel=0.05)


def spectra(*sounds: np.ndarray) -> list[np.ndarray]:
    return [
        abs(np.fft.rfft(sound, 1 << 17))[: 1 << 14].reshape(-1, 64).mean(axis=1) for sound in sounds
    ]


def test_telephone_speech_is_known_by_its_ending(tmp_path):
    with av.open(str(tmp_path / "a.g722"), "w", format="g722") as container:
        stream = container.add_stream("g722", rate=16_000)
        stream.layout = "mono"
        samples = (chirp(rate=16_000) * 32_767).astype(np.int16)
        for start in range(0, len(samples), 320):
            frame = av.AudioFrame.from_ndarray(
                samples[start : start + 320].T.copy(), format="s16", layout="mono"
            )
            frame.rate, frame.pts = 16_000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    sound = Audio.load(tmp_path / "a.g722")
    assert (sound.rate_hz, sound.samples.shape) == (16_000, (1, 32_000))
    assert np.corrcoef(*spectra(sound.samples[0], chirp(rate=16_000)[:, 0]))[0, 1] > 0.99


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg", "a.mp3"])
def test_a_part_holds_the_same_samples_as_the_whole(tmp_path, name):
    path = written(tmp_path / name, chirp(4.0, channels=2))
    whole = read_samples(path)
    for start in (0, 1, 30_000, 100_001, 176_000):
        part = read_samples(path, start, 1000)
        assert part.shape == (2, min(1000, 176_400 - start))
        assert np.allclose(part, whole[:, start : start + 1000], atol=1e-5), start


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("own", [8_000, 16_000, 44_100, 48_000])
def test_a_resampled_part_is_the_part_of_the_resampled_whole(tmp_path, own, rate):
    path = written(
        tmp_path / "a.wav",
        np.random.default_rng(0).uniform(-0.5, 0.5, (own * 2, 2)),
        own,
        subtype="FLOAT",
    )
    whole = Audio.load(path).mono().resampled(rate).samples
    assert whole.shape == (1, 2 * rate)
    for start_seconds in (0.0, 0.3, 1.23456, 1.9):
        start = round(start_seconds * rate)
        part = read_part(path, start_seconds, 1000, rate)
        assert part.rate_hz == rate
        assert np.allclose(part.samples, whole[:, start : start + 1000], atol=2e-5)


def test_only_the_needed_part_is_decoded(tmp_path, monkeypatch):
    path = written(tmp_path / "a.wav", np.zeros((44_100 * 60, 1), np.float32))
    read, asked = soundfile.SoundFile.read, []
    monkeypatch.setattr(
        soundfile.SoundFile,
        "read",
        lambda *args, **how: asked.append(args[1]) or read(*args, **how),
    )
    assert read_part(path, 30.0, 16_000, 16_000).samples.shape == (1, 16_000)
    assert sum(asked) < 44_100 * 2


def test_a_resampled_tone_keeps_its_pitch_and_what_is_too_high_goes(tmp_path):
    time = np.arange(48_000) / 48_000
    tones = 0.4 * np.sin(2 * np.pi * 1000 * time) + 0.4 * np.sin(2 * np.pi * 11_000 * time)
    path = written(tmp_path / "a.wav", tones, 48_000, subtype="FLOAT")
    heard = abs(np.fft.rfft(read_part(path, 0.0, 16_000, 16_000).samples[0])) / 8000
    assert heard[1000] == pytest.approx(0.4, abs=0.01)
    heard[990:1010] = 0
    assert heard[100:].max() < 1e-3, "11 kHz would have come back as 5 kHz"


def test_channels_become_one_by_their_mean(tmp_path):
    stereo = np.stack([np.full(4000, 0.5), np.full(4000, -0.1)], axis=1)
    path = written(tmp_path / "a.wav", stereo, 16_000, subtype="FLOAT")
    assert read_part(path, 0.0, 100, 16_000).samples == pytest.approx(
        np.full((1, 100), 0.2), abs=1e-6
    )


def test_floats_beyond_full_scale_are_cut_off(tmp_path):
    path = written(tmp_path / "a.wav", np.linspace(-1.5, 1.5, 1000), 16_000, subtype="FLOAT")
    samples = Audio.load(path).samples
    assert (samples.min(), samples.max()) == (-1, 1) and samples[0, 500] == pytest.approx(
        0, abs=0.01
    )


# ---- what is written


def test_a_saved_sound_is_a_wav_and_a_picture(tmp_path):
    sound = Audio(chirp(1.0, channels=2).T, 44_100)
    path = sound.save(tmp_path / "deep" / "epoch-0.5")
    assert path == tmp_path / "deep" / "epoch-0.5.wav"
    again = Audio.load(path)
    assert again.rate_hz == 44_100 and np.allclose(again.samples, sound.samples, atol=1e-4)
    with PIL.Image.open(tmp_path / "deep" / "epoch-0.5.png") as picture:
        assert picture.size == (384, 184)


def test_what_a_network_made_is_written_whatever_it_is(tmp_path):
    wild = np.array([[0.0, np.nan, 5.0, -np.inf] * 100], np.float32)
    samples = Audio.load(Audio(wild, 16_000).save(tmp_path / "a")).samples[0, :4]
    assert samples == pytest.approx([0, 0, 1, -1], abs=1e-4)


def test_a_sound_must_be_channels_of_floats():
    with pytest.raises(
        ValueError, match=r"\(channels, samples\) of float32, but was given \(5,\) of float64"
    ):
        Audio(np.zeros(5), 16_000)
    with pytest.raises(ValueError, match="its rate is 0"):
        Audio(np.zeros((1, 5), np.float32), 0)


# ---- what is drawn


def rows(hertz: float, loudness: float = 0.5, rate: int = 16_000) -> np.ndarray:
    """How bright each of the 128 rows of a tone's spectrogram is, the lowest band first."""
    tone = loudness * np.sin(2 * np.pi * hertz * np.arange(rate) / rate)
    return (
        Audio(tone[None].astype(np.float32), rate)
        .picture()
        .pixels[:55:-1, 100:300]
        .astype(float)
        .mean(axis=(1, 2))
    )


@pytest.mark.parametrize("hertz", [200, 1000, 4000])
def test_a_tone_is_a_line_at_its_height(hertz):
    height = math.log(1 + hertz / 700) / math.log(1 + 8000 / 700) * 128
    assert abs(int(rows(hertz).argmax()) - height) < 3
    assert rows(hertz).max() > 3 * np.median(rows(hertz))


def test_louder_is_brighter_and_silence_is_dark():
    assert (
        rows(1000, 0.5).max()
        > rows(1000, 0.05).max()
        > rows(1000, 0.005).max()
        > rows(1000, 0.0).max() + 20
    )


@pytest.mark.parametrize("count", [1, 7, 100, 5000, 200_000])
def test_sounds_of_any_length_are_drawn(count):
    assert Audio(np.zeros((1, count), np.float32), 16_000).picture().pixels.shape == (184, 384, 3)


def test_a_waveform_is_as_high_as_it_is_loud():
    for loudness, height in ((0.0, 1), (0.5, 28), (1.0, 56)):
        wave = (
            Audio((loudness * np.resize([1, -1], 16_000)[None]).astype(np.float32), 16_000)
            .picture()
            .pixels[:56]
        )
        assert (wave[:, 100] != 255).any(axis=1).sum() == pytest.approx(height, abs=2)


def test_sounds_lie_on_a_sheet_and_beside_each_other():
    one, other = (
        Audio(np.zeros((1, 100), np.float32), 16_000),
        Audio(np.zeros((2, 300), np.float32), 8_000),
    )
    assert isinstance(Audio.sheet([one, other, one]), Image)
    pair = Audio.beside(one, other)
    assert pair.picture().pixels.shape[1] > 2 * 384
    assert pair.seconds == pytest.approx(one.seconds + PAUSE_SECONDS + other.seconds, abs=0.001)
    with pytest.raises(ValueError, match="at least one"):
        Audio.sheet([])


# ---- what is refused


@pytest.mark.parametrize("name", ["a.wav", "a.mp3", "a.flac", "a.m4a"])
def test_text_is_no_recording(tmp_path, name):
    (tmp_path / name).write_text("Dear reader,\nthis is a letter. " * 50)
    with pytest.raises(
        UnreadableFile, match=rf"{name}: it is no WAV, .* \(it begins with b'Dear rea'\)"
    ):
        Audio.load(tmp_path / name)


def test_an_empty_file_a_missing_one_and_one_sample_are_refused(tmp_path):
    (tmp_path / "empty.wav").touch()
    with pytest.raises(UnreadableFile, match=r"empty.wav: the file is empty \(0 bytes\)"):
        Audio.load(tmp_path / "empty.wav")
    with pytest.raises(UnreadableFile, match="gone.wav: the file cannot be opened"):
        read_part(tmp_path / "gone.wav", 0.0, 100, 16_000)
    with pytest.raises(
        UnreadableFile, match="one.wav: it holds 1 sample: a recording lasts at least 10 ms"
    ):
        Audio.load(written(tmp_path / "one.wav", np.zeros(1), 16_000))
    with pytest.raises(UnreadableFile, match="none.wav: it holds 0 samples"):
        Audio.load(written(tmp_path / "none.wav", np.zeros(0), 16_000))


def test_a_film_without_sound_is_refused(tmp_path):
    film = Video(np.zeros((5, 16, 16, 3), np.uint8), 10.0).save(tmp_path / "film")
    film.rename(tmp_path / "a.m4a")
    with pytest.raises(UnreadableFile, match="it holds only pictures, and no sound"):
        Audio.load(tmp_path / "a.m4a")


@pytest.mark.parametrize("rate", [50, 2_000_000])
def test_absurd_rates_are_refused(tmp_path, rate):
    with pytest.raises(
        UnreadableFile,
        match=f"it claims a rate of {rate:,} Hz, where 1,000 to 768,000 Hz can be sound",
    ):
        Audio.load(written(tmp_path / "a.wav", np.zeros(10_000), rate))


def test_what_is_not_a_number_or_was_never_scaled_is_refused(tmp_path):
    broken = np.zeros(4000)
    broken[100] = np.nan
    with pytest.raises(UnreadableFile, match="some of its samples are not numbers"):
        Audio.load(written(tmp_path / "nan.wav", broken, 16_000, subtype="FLOAT"))
    with pytest.raises(UnreadableFile, match="its samples reach 32,000, where 1 is full scale"):
        Audio.load(written(tmp_path / "loud.wav", np.full(4000, 32_000.0), 16_000, subtype="FLOAT"))


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg", "a.mp3"])
def test_a_file_that_is_cut_short_is_read_as_far_as_it_goes(tmp_path, name, capfd):
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 88_200)
    path = cut_short(written(tmp_path / name, noise), 0.5)
    assert 0.4 < Audio.load(path).seconds < 1.3
    with pytest.raises(UnreadableFile, match="a\\.\\w+: "):
        read_part(path, 1.9, 100, 16_000)
    if name == "a.flac":
        found = examine(path)
        assert found.broke.startswith("it breaks at") and "of 2.00 s" in found.broke
        assert read_samples(path, found.count - 1000, 1000).shape == (1, 1000), (
            "as far as it goes, wherever reading begins"
        )
    capfd.readouterr()  # the decoders' own words


def test_a_part_beyond_the_end_is_refused_and_at_the_end_is_short(tmp_path):
    path = written(tmp_path / "a.wav", np.zeros(16_000), 16_000)
    assert read_part(path, 0.9, 16_000, 16_000).samples.shape == (1, 1600)
    with pytest.raises(UnreadableFile, match="a.wav: "):
        read_part(path, 1.5, 100, 16_000)


def test_a_reason_survives_the_way_back_from_a_worker(tmp_path):
    (tmp_path / "a.wav").touch()
    with pytest.raises(UnreadableFile) as caught:
        probe(tmp_path / "a.wav")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_playlist_leads_nowhere(tmp_path):
    written(tmp_path / "secret.wav", np.zeros(16_000), 16_000)
    (tmp_path / "a.mp3").write_text("ffconcat version 1.0\nfile secret.wav\n")
    with pytest.raises(UnreadableFile, match="it is no WAV"):
        Audio.load(tmp_path / "a.mp3")


@pytest.mark.parametrize("module", ["soundfile", "soxr"])
def test_without_its_library_a_sentence_says_so(tmp_path, monkeypatch, module):
    path = written(tmp_path / "a.wav", np.zeros(16_000), 16_000)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"{module}, which is not installed. Install tessera\[sound\]"
    ):
        read_part(path, 0.0, 100, 8_000)


def test_without_pyav_what_soundfile_cannot_read_is_named(tmp_path, monkeypatch):
    path = written(tmp_path / "a.mp3", chirp())
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UnreadableFile, match="a.mp3: soundfile cannot read it .*PyAV"):
        Audio.load(path)
