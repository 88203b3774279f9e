"""Inspecting a folder of audio counts every file once and lists silent, clipped, off-centre,
damaged and unusable ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import soundfile

from tessera.data.errors import UnreadableFile
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.inspect import inspect_folder
from tessera.run.errors import UserError

RNG = np.random.default_rng(0)


def make_noise(
    seconds: float, rate: int = 16_000, channels: int = 1, amplitude: float = 0.3
) -> np.ndarray:
    return np.random.default_rng(channels).uniform(
        -amplitude, amplitude, (round(seconds * rate), channels)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audio")
    soundfile.write(folder / "a.wav", make_noise(1.0), 16_000)
    shutil.copy(folder / "a.wav", folder / "copy.wav")
    (folder / "a.txt").write_text("noise")
    soundfile.write(folder / "b.flac", make_noise(3.0, 44_100, 2), 44_100)
    soundfile.write(folder / "cut.flac", make_noise(4.0, 44_100, 1), 44_100)
    data = (folder / "cut.flac").read_bytes()
    (folder / "cut.flac").write_bytes(data[: len(data) // 2])
    soundfile.write(folder / "clipped.wav", 4 * make_noise(1.0), 16_000)
    soundfile.write(folder / "dc.wav", np.full(16_000, 0.25), 16_000, subtype="FLOAT")
    soundfile.write(folder / "hushed.wav", 0.0005 * make_noise(1.0), 16_000, subtype="FLOAT")
    soundfile.write(folder / "shifted.wav", make_noise(1.0) + 0.1, 16_000)
    (folder / "empty.wav").touch()
    (folder / "text.mp3").write_text("dear reader " * 100)
    soundfile.write(folder / "one.wav", np.zeros(1), 16_000)
    broken = make_noise(1.0)
    broken[100] = np.nan
    soundfile.write(folder / "nan.wav", broken, 16_000, subtype="FLOAT")
    (folder / "video.mov").touch()
    return folder


def names(entries) -> list[str]:
    return [entry["name"] for entry in entries]


def test_every_file_is_counted_once(folder):
    report = inspect_folder(folder)
    assert (report.files, report.usable, report.sizes) == (12, 8, None)
    assert report.rates == {"16,000 Hz": 6, "44,100 Hz": 2}
    assert report.channels == {"mono": 7, "stereo": 1}
    assert report.codecs == {"WAV PCM 16": 4, "FLAC PCM 16": 2, "WAV FLOAT": 2}
    assert (report.lengths.min, report.lengths.median, report.lengths.max) == (1.0, 1.0, 3.0)
    assert report.duplicates == [["a.wav", "copy.wav"]] and report.captions == {"text files": 1}
    assert report.other_files == "1 .mov"
    assert report.bytes == sum(
        file.stat().st_size for file in folder.iterdir() if file.suffix not in (".txt", ".mov")
    )
    assert names(report.unusable) == ["empty.wav", "nan.wav", "one.wav", "text.mp3"]
    reasons = " ".join(each["reason"] for each in report.unusable)
    for reason in ("dear rea", "1 sample", "0 bytes", "not numbers"):
        assert reason in reasons
    assert str(folder) not in reasons


def test_silent_clipped_off_centre_and_damaged_files_are_listed(folder):
    report = inspect_folder(folder)
    assert report.silent == [
        {"name": "dc.wav", "reason": "all of its samples are 0.25"},
        {"name": "hushed.wav", "reason": "its level is -81 dB of full scale"},
    ]
    assert names(report.clipped) == ["clipped.wav"]
    assert report.clipped[0]["reason"].endswith("% of its samples")
    assert names(report.off_centre) == ["dc.wav", "shifted.wav"]
    assert report.off_centre[0]["reason"] == "a mean of 0.250"
    (damaged,) = report.damaged
    assert damaged["name"] == "cut.flac"
    assert damaged["reason"].startswith("it is damaged at 1.") and "of 4.00 s" in damaged["reason"]


def test_single_peaks_at_full_scale_are_not_clipping(tmp_path):
    peaks = np.zeros(16_000)
    peaks[::100] = 1.0
    soundfile.write(tmp_path / "a.wav", peaks, 16_000)
    assert inspect_folder(tmp_path).clipped == []


def test_training_reads_exactly_the_files_reported_as_usable(folder):
    unusable = set(names(inspect_folder(folder).unusable))
    dataset = AudioDataConfig(path=str(folder), seconds=0.5).full()
    for index in range(len(dataset)):
        # nan.wav fails in training only if the segment contains the NaN.
        if dataset.name(index) in unusable and dataset.name(index) != "nan.wav":
            with pytest.raises(UnreadableFile):
                dataset.item(index, RNG)
        else:
            assert dataset.item(index, RNG).samples.shape == (1, 8000)


def test_the_printed_lines_show_the_same_numbers(folder):
    lines = "\n".join(inspect_folder(folder).lines())
    assert f"{folder}: 12 audio files, 8 usable" in lines
    assert "lengths: 1.00 to 3.00 s, median 1.00 s; total 0:00:1" in lines
    assert "rates: 16,000 Hz (6), 44,100 Hz (2)" in lines
    assert "channels: mono (7), stereo (1)\n  several channels are averaged, unless" in lines
    assert "silent: 2 audio files, with nothing to learn from\n  dc.wav: all of its " in lines
    assert "unusable: 4 audio files" in lines
    assert json.loads(inspect_folder(folder).as_json())["usable"] == 8


def test_a_folder_without_usable_files_gives_a_report(tmp_path):
    (tmp_path / "empty.wav").touch()
    (tmp_path / "lost.wav").symlink_to(tmp_path / "gone.wav")
    report = inspect_folder(tmp_path)
    assert (report.files, report.usable, report.lengths) == (2, 0, None)
    assert "lost.wav: the file cannot be opened" in report.lines()[-1]


def test_a_folder_without_audio_gives_an_error(tmp_path):
    with pytest.raises(UserError, match="no audio files: .*found no files at all"):
        inspect_folder(tmp_path)


def test_inspection_imports_no_torch():
    code = "import sys, tessera.modalities.audio.inspect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
