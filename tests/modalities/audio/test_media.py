"""Audio files are read, resampled, plotted and written correctly, and unusable files give a
reason."""

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
from tessera.modalities.audio.io.files import probe, read_samples, scan_audio
from tessera.modalities.audio.media import PAUSE_SECONDS, Audio, read_segment
from tessera.modalities.image.media import Image
from tessera.modalities.video.media import Video


def make_chirp(seconds: float = 2.0, rate: int = 44_100, channels: int = 1) -> np.ndarray:
    """Return (N, C): from 200 to 3000 Hz, each channel at half the amplitude of the one before."""
    wave = 0.5 * np.sin(2 * np.pi * np.cumsum(np.linspace(200, 3000, round(seconds * rate))) / rate)
    return np.stack([wave / 2**channel for channel in range(channels)], axis=1).astype(np.float32)


def write_file(path, samples, rate: int = 44_100, **options):
    soundfile.write(path, samples, rate, **options)
    return path


def encode_file(path, codec: str, samples, rate: int = 44_100):
    """Write a file with PyAV."""
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


def truncate(path, fraction: float):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])
    return path


# ---- reading


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
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
def test_every_common_format_is_read_exactly(tmp_path, name, options, tolerance, channels):
    path = write_file(tmp_path / name, make_chirp(channels=channels), **options)
    audio, info = Audio.load(path), probe(path)
    count = audio.samples.shape[1]
    assert (info.rate_hz, info.channels, info.num_samples, audio.rate_hz) == (
        44_100,
        channels,
        88_200,
        44_100,
    )
    assert len(audio.samples) == channels and audio.samples.dtype == np.float32
    # FFmpeg omits the last samples of Vorbis.
    assert 88_200 - (128 if name == "a.ogg" else 0) <= count <= 88_200
    difference = abs(audio.samples - make_chirp(channels=channels).T[:, :count])
    assert difference[:, 2000:-2000].max() <= tolerance
    assert scan_audio(path).num_samples == count and scan_audio(path).error == ""


@pytest.mark.parametrize(
    ("name", "codec", "rate"),
    [
        ("a.m4a", "aac", 44_100),
        ("a.aac", "aac", 44_100),
        ("a.webm", "libopus", 48_000),
        ("a.mka", "ac3", 44_100),
    ],
)
def test_formats_that_soundfile_lacks_are_read_with_pyav(tmp_path, name, codec, rate):
    path = encode_file(tmp_path / name, codec, make_chirp(rate=rate, channels=2), rate)
    audio = Audio.load(path)
    assert (audio.rate_hz, len(audio.samples)) == (rate, 2)
    assert audio.seconds == pytest.approx(2, abs=0.1)
    correlation = np.corrcoef(*spectra(audio.samples[0], make_chirp(rate=rate)[:, 0]))[0, 1]
    assert correlation > 0.95, "encoders add silence at the start, which spectra ignore"
    left, right = audio.samples.std(axis=1)
    assert left == pytest.approx(2 * right, rel=0.05)


def spectra(*signals: np.ndarray) -> list[np.ndarray]:
    return [
        abs(np.fft.rfft(signal, 1 << 17))[: 1 << 14].reshape(-1, 64).mean(axis=1)
        for signal in signals
    ]


def test_headerless_g722_is_recognized_by_its_suffix(tmp_path):
    with av.open(str(tmp_path / "a.g722"), "w", format="g722") as container:
        stream = container.add_stream("g722", rate=16_000)
        stream.layout = "mono"
        samples = (make_chirp(rate=16_000) * 32_767).astype(np.int16)
        for start in range(0, len(samples), 320):
            frame = av.AudioFrame.from_ndarray(
                samples[start : start + 320].T.copy(), format="s16", layout="mono"
            )
            frame.rate, frame.pts = 16_000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    audio = Audio.load(tmp_path / "a.g722")
    assert (audio.rate_hz, audio.samples.shape) == (16_000, (1, 32_000))
    assert np.corrcoef(*spectra(audio.samples[0], make_chirp(rate=16_000)[:, 0]))[0, 1] > 0.99


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg", "a.mp3"])
def test_reading_a_part_gives_the_samples_of_the_whole(tmp_path, name):
    path = write_file(tmp_path / name, make_chirp(4.0, channels=2))
    whole = read_samples(path)
    for start in (0, 1, 30_000, 100_001, 176_000):
        part = read_samples(path, start, 1000)
        assert part.shape == (2, min(1000, 176_400 - start))
        assert np.allclose(part, whole[:, start : start + 1000], atol=1e-5), start


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("file_rate", [8_000, 16_000, 44_100, 48_000])
def test_a_resampled_segment_equals_that_of_the_resampled_file(tmp_path, file_rate, rate):
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (file_rate * 2, 2))
    path = write_file(tmp_path / "a.wav", noise, file_rate, subtype="FLOAT")
    whole = Audio.load(path).to_mono().resample(rate).samples
    assert whole.shape == (1, 2 * rate)
    for start_seconds in (0.0, 0.3, 1.23456, 1.9):
        start = round(start_seconds * rate)
        segment = read_segment(path, start_seconds, 1000, rate)
        assert segment.rate_hz == rate
        assert np.allclose(segment.samples, whole[:, start : start + 1000], atol=2e-5)


def test_only_the_needed_segment_is_decoded(tmp_path, monkeypatch):
    path = write_file(tmp_path / "a.wav", np.zeros((44_100 * 60, 1), np.float32))
    read, counts = soundfile.SoundFile.read, []
    monkeypatch.setattr(
        soundfile.SoundFile,
        "read",
        lambda *args, **options: counts.append(args[1]) or read(*args, **options),
    )
    assert read_segment(path, 30.0, 16_000, 16_000).samples.shape == (1, 16_000)
    assert sum(counts) < 44_100 * 2


def test_resampling_keeps_the_pitch_and_does_not_alias(tmp_path):
    time = np.arange(48_000) / 48_000
    tones = 0.4 * np.sin(2 * np.pi * 1000 * time) + 0.4 * np.sin(2 * np.pi * 11_000 * time)
    path = write_file(tmp_path / "a.wav", tones, 48_000, subtype="FLOAT")
    amplitude = abs(np.fft.rfft(read_segment(path, 0.0, 16_000, 16_000).samples[0])) / 8000
    assert amplitude[1000] == pytest.approx(0.4, abs=0.01)
    amplitude[990:1010] = 0
    assert amplitude[100:].max() < 1e-3, "11 kHz would alias to 5 kHz"


def test_channels_are_averaged(tmp_path):
    stereo = np.stack([np.full(4000, 0.5), np.full(4000, -0.1)], axis=1)
    path = write_file(tmp_path / "a.wav", stereo, 16_000, subtype="FLOAT")
    assert read_segment(path, 0.0, 100, 16_000).samples == pytest.approx(
        np.full((1, 100), 0.2), abs=1e-6
    )


def test_floats_beyond_full_scale_are_clipped(tmp_path):
    path = write_file(tmp_path / "a.wav", np.linspace(-1.5, 1.5, 1000), 16_000, subtype="FLOAT")
    samples = Audio.load(path).samples
    assert (samples.min(), samples.max()) == (-1, 1)
    assert samples[0, 500] == pytest.approx(0, abs=0.01)


# ---- writing


def test_save_writes_a_wav_file_and_a_plot(tmp_path):
    audio = Audio(make_chirp(1.0, channels=2).T, 44_100)
    path = audio.save(tmp_path / "deep" / "epoch-0.5")
    assert path == tmp_path / "deep" / "epoch-0.5.wav"
    loaded = Audio.load(path)
    assert loaded.rate_hz == 44_100 and np.allclose(loaded.samples, audio.samples, atol=1e-4)
    with PIL.Image.open(tmp_path / "deep" / "epoch-0.5.png") as plot:
        assert plot.size == (384, 184)
    assert len(list((tmp_path / "deep").iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "codec", "tolerance"),
    [
        ("a.wav", "WAV PCM 16", 1e-4),
        ("a.FLAC", "FLAC PCM 16", 1e-4),
        ("a.ogg", "vorbis", 0.05),
        ("a.mp3", "mp3float", 0.05),
    ],
)
def test_the_suffix_selects_the_format(tmp_path, name, codec, tolerance):
    audio = Audio(make_chirp(1.0, channels=2).T, 44_100)
    path = audio.save(tmp_path / name)
    assert path == tmp_path / name and (tmp_path / "a.png").is_file()
    assert probe(path).codec == codec
    loaded = Audio.load(path)
    count = loaded.samples.shape[1]
    assert (len(loaded.samples), loaded.rate_hz) == (2, 44_100) and 44_100 - count <= 128
    difference = abs(loaded.samples - audio.samples[:, :count])
    assert difference[:, 2000:-2000].max() <= tolerance


def test_other_suffixes_give_an_error_that_lists_the_formats(tmp_path):
    audio = Audio(make_chirp(0.1).T, 44_100)
    for write in (audio.save, audio.write):
        with pytest.raises(ValueError, match=r"a\.m4a .*\.wav, \.flac, \.ogg, \.mp3"):
            write(tmp_path / "a.m4a")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "channels", "rate"),
    [("a.mp3", 1, 96_000), ("a.mp3", 3, 44_100), ("a.ogg", 1, 384_000)],
)
def test_what_a_format_cannot_hold_gives_an_error(tmp_path, name, channels, rate):
    audio = Audio(np.zeros((channels, 4000), np.float32), rate)
    with pytest.raises(ValueError, match=rf"{name} cannot hold {channels} .*{rate:,} Hz.*use .wav"):
        audio.save(tmp_path / name)
    assert audio.save(tmp_path / "a").suffix == ".wav"


def test_minutes_of_ogg_are_written(tmp_path):
    """libsndfile crashes where such a file is written at once."""
    audio = Audio(np.zeros((2, 48_000 * 300), np.float32), 48_000)
    assert probe(audio.write(tmp_path / "a.ogg")).seconds == pytest.approx(300)


def test_any_output_of_a_network_can_be_written(tmp_path):
    samples = np.array([[0.0, np.nan, 5.0, -np.inf] * 100], np.float32)
    loaded = Audio.load(Audio(samples, 16_000).save(tmp_path / "a")).samples[0, :4]
    assert loaded == pytest.approx([0, 0, 1, -1], abs=1e-4)


def test_audio_must_be_channels_of_floats():
    with pytest.raises(ValueError, match=r"\(channels, samples\) .*float32, .*\(5,\) .*float64"):
        Audio(np.zeros(5), 16_000)
    with pytest.raises(ValueError, match="greater than 0, but got 0"):
        Audio(np.zeros((1, 5), np.float32), 0)


def test_repr_is_one_short_line():
    audio = Audio(np.zeros((2, 24_000), np.float32), 16_000)
    assert repr(audio) == "Audio(seconds=1.50, channels=2, rate_hz=16000)"
    pair = Audio.side_by_side(audio, audio)
    assert repr(pair) == "AudioPair(seconds=3.40, channels=2, rate_hz=16000)"


# ---- plots


def band_brightness(hertz: float, amplitude: float = 0.5, rate: int = 16_000) -> np.ndarray:
    """Return the brightness of the 128 bands of a tone's spectrogram, the lowest first."""
    tone = amplitude * np.sin(2 * np.pi * hertz * np.arange(rate) / rate)
    plot = Audio(tone[None].astype(np.float32), rate).plot()
    return plot.pixels[:55:-1, 100:300].astype(float).mean(axis=(1, 2))


@pytest.mark.parametrize("hertz", [200, 1000, 4000])
def test_a_tone_is_a_line_at_its_frequency(hertz):
    height = math.log(1 + hertz / 700) / math.log(1 + 8000 / 700) * 128
    brightness = band_brightness(hertz)
    assert abs(int(brightness.argmax()) - height) < 3
    assert brightness.max() > 3 * np.median(brightness)


def test_louder_audio_is_brighter_and_silence_is_dark():
    loud, quiet, faint, silent = (
        band_brightness(1000, amplitude).max() for amplitude in (0.5, 0.05, 0.005, 0.0)
    )
    assert loud > quiet > faint > silent + 20


@pytest.mark.parametrize("count", [1, 7, 100, 5000, 200_000])
def test_audio_of_any_length_can_be_plotted(count):
    assert Audio(np.zeros((1, count), np.float32), 16_000).plot().pixels.shape == (184, 384, 3)


def test_the_height_of_a_waveform_is_its_amplitude():
    for amplitude, height in ((0.0, 1), (0.5, 28), (1.0, 56)):
        samples = (amplitude * np.resize([1, -1], 16_000)[None]).astype(np.float32)
        waveform = Audio(samples, 16_000).plot().pixels[:56]
        assert (waveform[:, 100] != 255).any(axis=1).sum() == pytest.approx(height, abs=2)


def test_contact_sheets_and_pairs():
    one, other = (
        Audio(np.zeros((1, 100), np.float32), 16_000),
        Audio(np.zeros((2, 300), np.float32), 8_000),
    )
    assert isinstance(Audio.sheet([one, other, one]), Image)
    pair = Audio.side_by_side(one, other)
    assert pair.plot().pixels.shape[1] > 2 * 384
    assert pair.seconds == pytest.approx(one.seconds + PAUSE_SECONDS + other.seconds, abs=0.001)
    with pytest.raises(ValueError, match="at least one"):
        Audio.sheet([])


# ---- unusable files


@pytest.mark.parametrize("name", ["a.wav", "a.mp3", "a.flac", "a.m4a"])
def test_text_is_not_audio(tmp_path, name):
    (tmp_path / name).write_text("Dear reader,\nthis is a text. " * 50)
    with pytest.raises(
        UnreadableFile, match=rf"{name}: it is not a WAV, .* \(it begins with b'Dear rea'\)"
    ):
        Audio.load(tmp_path / name)


def test_empty_missing_and_too_short_files_give_a_reason(tmp_path):
    (tmp_path / "empty.wav").touch()
    with pytest.raises(UnreadableFile, match=r"empty.wav: the file is empty \(0 bytes\)"):
        Audio.load(tmp_path / "empty.wav")
    with pytest.raises(UnreadableFile, match="gone.wav: the file cannot be opened"):
        read_segment(tmp_path / "gone.wav", 0.0, 100, 16_000)
    with pytest.raises(
        UnreadableFile, match="one.wav: it holds 1 sample, but audio must last at least 10 ms"
    ):
        Audio.load(write_file(tmp_path / "one.wav", np.zeros(1), 16_000))
    with pytest.raises(UnreadableFile, match="none.wav: it holds 0 samples"):
        Audio.load(write_file(tmp_path / "none.wav", np.zeros(0), 16_000))


def test_a_video_without_audio_gives_a_reason(tmp_path):
    video = Video(np.zeros((5, 16, 16, 3), np.uint8), 10.0).save(tmp_path / "video")
    video.rename(tmp_path / "a.m4a")
    with pytest.raises(UnreadableFile, match="it holds video but no audio"):
        Audio.load(tmp_path / "a.m4a")


@pytest.mark.parametrize("rate", [50, 2_000_000])
def test_impossible_rates_give_a_reason(tmp_path, rate):
    with pytest.raises(
        UnreadableFile,
        match=f"its header states a rate of {rate:,} Hz, but 1,000 to 768,000 Hz are supported",
    ):
        Audio.load(write_file(tmp_path / "a.wav", np.zeros(10_000), rate))


def test_nan_and_unscaled_samples_give_a_reason(tmp_path):
    broken = np.zeros(4000)
    broken[100] = np.nan
    with pytest.raises(UnreadableFile, match="some of its samples are not numbers"):
        Audio.load(write_file(tmp_path / "nan.wav", broken, 16_000, subtype="FLOAT"))
    unscaled = np.full(4000, 32_000.0)
    with pytest.raises(UnreadableFile, match="its samples reach 32,000, but full scale is 1"):
        Audio.load(write_file(tmp_path / "loud.wav", unscaled, 16_000, subtype="FLOAT"))


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg", "a.mp3"])
def test_a_truncated_file_is_read_up_to_the_damage(tmp_path, name, capfd):
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 88_200)
    path = truncate(write_file(tmp_path / name, noise), 0.5)
    assert 0.4 < Audio.load(path).seconds < 1.3
    with pytest.raises(UnreadableFile, match="a\\.\\w+: "):
        read_segment(path, 1.9, 100, 16_000)
    if name in ("a.wav", "a.flac"):
        scan = scan_audio(path)
        assert scan.error.startswith("it is damaged at") and "of 2.00 s" in scan.error
        assert read_samples(path, scan.num_samples - 1000, 1000).shape == (1, 1000), (
            "wherever reading begins"
        )
    capfd.readouterr()  # messages of the decoders


def test_a_wav_file_of_unknown_length_is_not_damaged(tmp_path):
    """Programs that write to a pipe cannot state the length."""
    path = write_file(tmp_path / "a.wav", np.zeros(16_000), 16_000)
    content = bytearray(path.read_bytes())
    content[40:44] = b"\xff\xff\xff\xff"
    path.write_bytes(bytes(content))
    assert scan_audio(path).error == ""


def test_a_segment_at_the_end_is_short_and_beyond_it_unreadable(tmp_path):
    path = write_file(tmp_path / "a.wav", np.zeros(16_000), 16_000)
    assert read_segment(path, 0.9, 16_000, 16_000).samples.shape == (1, 1600)
    with pytest.raises(UnreadableFile, match="a.wav: "):
        read_segment(path, 1.5, 100, 16_000)


def test_errors_can_be_pickled_by_workers(tmp_path):
    (tmp_path / "a.wav").touch()
    with pytest.raises(UnreadableFile) as caught:
        probe(tmp_path / "a.wav")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_playlists_are_not_followed(tmp_path):
    write_file(tmp_path / "secret.wav", np.zeros(16_000), 16_000)
    (tmp_path / "a.mp3").write_text("ffconcat version 1.0\nfile secret.wav\n")
    with pytest.raises(UnreadableFile, match="it is not a WAV"):
        Audio.load(tmp_path / "a.mp3")


@pytest.mark.parametrize("module", ["soundfile", "soxr"])
def test_a_missing_package_is_named_with_the_command_to_install_it(tmp_path, monkeypatch, module):
    path = write_file(tmp_path / "a.wav", np.zeros(16_000), 16_000)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ModuleNotFoundError,
        match=rf'{module}, which is not installed .*pip install "tessera\[audio\]"',
    ):
        read_segment(path, 0.0, 100, 8_000)


def test_without_pyav_an_mp3_file_names_the_missing_package(tmp_path, monkeypatch):
    path = write_file(tmp_path / "a.mp3", make_chirp())
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        UnreadableFile, match=r"a.mp3: soundfile cannot read it .*package av,.*tessera\[audio\]"
    ):
        Audio.load(path)
