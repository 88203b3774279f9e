"""Tests of the inspection of a folder of videos."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

from tessera.data.errors import UnreadableFile
from tessera.modalities.video.dataset import VideoDataConfig
from tessera.modalities.video.inspect import inspect_folder
from tessera.modalities.video.io.writer import write_mp4
from tessera.modalities.video.media import Video
from tessera.run.errors import UserError

RNG = np.random.default_rng(0)


def noise(count: int, height: int = 16, width: int = 16, rate: float = 10.0) -> Video:
    return Video(
        np.random.default_rng(count).integers(0, 256, (count, height, width, 3), dtype=np.uint8),
        rate,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    write_mp4(noise(20), folder / "a.mp4")
    shutil.copy(folder / "a.mp4", folder / "copy.mp4")
    (folder / "a.txt").write_text("noise")
    write_mp4(noise(60, 48, 64, rate=24.0), folder / "b.mp4")
    write_mp4(noise(60), folder / "cut.mp4")
    data = (folder / "cut.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(data[: len(data) // 2])
    noise(5, rate=20.0).save(folder / "animation.gif")
    PIL.Image.new("RGB", (8, 6)).save(folder / "still.png")
    (folder / "empty.mov").touch()
    (folder / "text.webm").write_text("dear reader")
    (folder / "song.mp3").touch()
    return folder


def test_report_counts_every_file_once(folder):
    report = inspect_folder(folder)
    assert (report.files, report.usable, report.videos, report.images) == (8, 6, 5, 1)
    assert report.sizes.smallest == (8, 6) and report.sizes.largest == (64, 48)
    assert report.codecs == {"h264": 4, "GIF": 1, "still": 1}
    assert report.rates[0] == (10.0, 3) and {rate for rate, _ in report.rates} == {10.0, 20.0, 24.0}
    durations = report.durations
    assert (durations.min_seconds, durations.median_seconds) == (0.25, 2.0)
    assert (durations.min_frames, durations.max_frames) == (5, 60)
    assert report.duplicates == [["a.mp4", "copy.mp4"]]
    assert report.captioned == 1 and report.captions == {"text files": 1}
    assert report.other_files == "1 .mp3"
    assert report.bytes == sum(
        file.stat().st_size for file in folder.iterdir() if file.suffix not in (".txt", ".mp3")
    )
    assert [each["name"] for each in report.unusable] == ["empty.mov", "text.webm"]
    assert "dear rea" in report.unusable[1]["reason"]


def test_report_lists_where_truncated_files_end(folder):
    (truncated,) = inspect_folder(folder).partly_readable
    assert truncated["name"] == "cut.mp4"
    assert truncated["reason"].startswith("readable up to 2.")
    assert "of 6.00 s" in truncated["reason"]


def test_usable_files_are_those_that_training_can_read(folder):
    unusable = {each["name"] for each in inspect_folder(folder).unusable}
    source = VideoDataConfig(path=str(folder), size=8, frames=4).full()
    for index in range(len(source)):
        if source.name(index) in unusable:
            with pytest.raises(UnreadableFile):
                source.item(index, RNG)
        else:
            assert source.item(index, RNG).video.shape == (3, 4, 8, 8)


def test_report_as_text_and_json(folder):
    report = inspect_folder(folder)
    text = "\n".join(report.lines())
    assert "8 files, 6 usable (5 videos and 1 image), " in text
    assert "durations: 0.25 to 2.50 s, median 2.00 s; 5 to 60 frames; total 0:00:09" in text
    assert "frame rates: 10 Hz (3), " in text
    assert "captions: 1 of 6 usable files (1 in text files)" in text
    assert "a.mp4 = copy.mp4" in text
    assert "partly readable: 1 file, used up to the error\n  cut.mp4: readable up to " in text
    assert "  empty.mov: the file is empty (0 bytes)" in text
    parsed = json.loads(report.as_json())
    assert parsed["usable"] == 6
    assert {"name": "empty.mov", "reason": "the file is empty (0 bytes)"} in parsed["unusable"]


def test_folder_of_frames_is_inspected_as_a_video_on_request(tmp_path):
    (tmp_path / "walk").mkdir()
    for number in range(6):
        PIL.Image.new("RGB", (8, 6)).save(tmp_path / "walk" / f"{number}.png")
    report = inspect_folder(tmp_path)
    assert (report.videos, report.images) == (0, 6)
    report = inspect_folder(tmp_path, folders="videos")
    assert (report.videos, report.images) == (1, 0)
    assert report.durations.max_frames == 6 and report.codecs == {"frames": 1}


def test_folder_without_usable_files_is_reported(tmp_path):
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "lost.mp4").symlink_to(tmp_path / "gone.mp4")
    report = inspect_folder(tmp_path)
    assert (report.files, report.usable, report.sizes, report.durations) == (2, 0, None, None)
    assert report.lines()[0].endswith("2 files, 0 usable (0 videos and 0 images), 0.0 MB")
    assert "lost.mp4: the file cannot be opened" in report.lines()[-1]
    assert json.loads(report.as_json())["durations"] is None


def test_folder_without_videos_is_an_error(tmp_path):
    with pytest.raises(UserError, match="has no videos: .*found no files at all"):
        inspect_folder(tmp_path)


def test_caption_errors_progress_and_long_lists_are_reported(tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02d}.mp4").touch()
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "../00.mp4"}\n')
    steps = []
    report = inspect_folder(
        tmp_path, num_workers=2, progress=lambda done, total: steps.append((done, total))
    )
    assert steps == [(done, 30) for done in range(1, 31)]
    assert "leads out of the folder" in "\n".join(report.lines())
    assert report.lines()[-1] == "  and 20 more" and len(report.unusable) == 30


def test_inspection_does_not_import_torch():
    code = "import sys, tessera.modalities.video.inspect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
