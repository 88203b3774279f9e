"""A check of a folder of recordings counts everything once, and names what is silent, clipped, off
centre, broken or none."""

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
from tessera.modalities.audio.inspect import check
from tessera.run.directory import UserError

PLAIN = np.random.default_rng(0)


def noise(
    seconds: float, rate: int = 16_000, channels: int = 1, loudness: float = 0.3
) -> np.ndarray:
    return np.random.default_rng(channels).uniform(
        -loudness, loudness, (round(seconds * rate), channels)
    )


@pytest.fixture(scope="module")
def hash_seed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    soundfile.write(folder / "a.wav", noise(1.0), 16_000)
    shutil.copy(folder / "a.wav", folder / "copy.wav")
    (folder / "a.txt").write_text("noise")
    soundfile.write(folder / "b.flac", noise(3.0, 44_100, 2), 44_100)
    soundfile.write(folder / "cut.flac", noise(4.0, 44_100, 1), 44_100)
    data = (folder / "cut.flac").read_bytes()
    (folder / "cut.flac").write_bytes(data[: len(data) // 2])
    soundfile.write(folder / "clipped.wav", 4 * noise(1.0), 16_000)
    soundfile.write(folder / "dc.wav", np.full(16_000, 0.25), 16_000, subtype="FLOAT")
    soundfile.write(folder / "hushed.wav", 0.0005 * noise(1.0), 16_000, subtype="FLOAT")
    soundfile.write(folder / "shifted.wav", noise(1.0) + 0.1, 16_000)
    (folder / "empty.wav").touch()
    (folder / "letter.mp3").write_text("dear reader " * 100)
    soundfile.write(folder / "one.wav", np.zeros(1), 16_000)
    broken = noise(1.0)
    broken[100] = np.nan
    soundfile.write(folder / "nan.wav", broken, 16_000, subtype="FLOAT")
    (folder / "film.mov").touch()
    return folder


def names(entries) -> list[str]:
    return [entry["name"] for entry in entries]


def test_a_check_counts_everything_once(hash_seed):
    report = check(hash_seed)
    assert (report.recordings, report.usable, report.sizes) == (12, 8, None)
    assert report.rates == {"16,000 Hz": 6, "44,100 Hz": 2} and report.channels == {
        "mono": 7,
        "stereo": 1,
    }
    assert report.tokenizers == {"WAV PCM 16": 4, "FLAC PCM 16": 2, "WAV FLOAT": 2}
    assert (report.lengths.shortest, report.lengths.median, report.lengths.max_len) == (
        1.0,
        1.0,
        3.0,
    )
    assert report.duplicates == [["a.wav", "copy.wav"]] and report.captions == {"text files": 1}
    assert report.other_files == "1 .mov"
    assert report.bytes == sum(
        file.stat().st_size for file in hash_seed.iterdir() if file.suffix not in (".txt", ".mov")
    )
    assert names(report.unusable) == ["empty.wav", "letter.mp3", "nan.wav", "one.wav"]
    reasons = " ".join(each["reason"] for each in report.unusable)
    assert (
        "dear rea" in reasons
        and "1 sample" in reasons
        and "0 bytes" in reasons
        and "not numbers" in reasons
    )
    assert str(hash_seed) not in reasons


def test_a_check_names_what_is_silent_clipped_off_centre_or_broken(hash_seed):
    report = check(hash_seed)
    assert report.silent == [
        {"name": "dc.wav", "reason": "all of its samples are 0.25"},
        {"name": "hushed.wav", "reason": "its loudness is -81 dB of full scale"},
    ]
    assert names(report.clipped) == ["clipped.wav"] and report.clipped[0]["reason"].endswith(
        "% of it"
    )
    assert (
        names(report.off_centre) == ["dc.wav", "shifted.wav"]
        and report.off_centre[0]["reason"] == "a mean of 0.250"
    )
    (broken,) = report.broken
    assert (
        broken["name"] == "cut.flac"
        and broken["reason"].startswith("it breaks at 1.")
        and "of 4.00 s" in broken["reason"]
    )


def test_loud_is_not_clipped(tmp_path):
    peaks = np.zeros(16_000)
    peaks[::100] = 1.0
    soundfile.write(tmp_path / "a.wav", peaks, 16_000)
    assert check(tmp_path).clipped == []


def test_what_a_check_calls_usable_is_what_training_can_read(hash_seed):
    unusable = set(names(check(hash_seed).unusable))
    source = AudioDataConfig(path=str(hash_seed), seconds=0.5).full()
    for index in range(len(source)):
        if (
            source.name(index) in unusable and source.name(index) != "nan.wav"
        ):  # which training meets only where it is broken
            with pytest.raises(UnreadableFile):
                source.item(index, PLAIN)
        else:
            assert source.item(index, PLAIN).samples.shape == (1, 8000)


def test_the_lines_for_people_tell_the_same(hash_seed):
    said = "\n".join(check(hash_seed).lines())
    assert f"{hash_seed}: 12 recordings, 8 usable" in said
    assert "lengths: 1.00 to 3.00 s, median 1.00 s; in all 0:00:1" in said
    assert (
        "rates: 16,000 Hz (6), 44,100 Hz (2)" in said and "channels: mono (7), stereo (1)" in said
    )
    assert (
        "silent: 2 recordings, in which nothing is to be learnt\n  dc.wav: all of its samples are 0.25"
        in said
    )
    assert "unusable: 4 recordings, left out when a run meets them" in said
    assert json.loads(check(hash_seed).as_json())["usable"] == 8


def test_a_check_of_nothing_usable_says_so_and_does_not_fail(tmp_path):
    (tmp_path / "empty.wav").touch()
    (tmp_path / "lost.wav").symlink_to(tmp_path / "gone.wav")
    report = check(tmp_path)
    assert (report.recordings, report.usable, report.lengths) == (2, 0, None)
    assert "lost.wav: the file cannot be opened" in report.lines()[-1]


def test_a_check_of_no_recording_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no recordings: .*the folder is empty"):
        check(tmp_path)


def test_a_check_needs_no_torch():
    code = "import sys, tessera.modalities.audio.inspect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
