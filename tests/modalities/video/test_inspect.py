"""A check of a folder of clips counts everything once, and says of each broken file where it
breaks."""

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
from tessera.modalities.video.inspect import check
from tessera.modalities.video.io.writer import write_mp4
from tessera.modalities.video.media import Video
from tessera.run.directory import UserError

PLAIN = np.random.default_rng(0)


def noise(count: int, height: int = 16, width: int = 16, rate: float = 10.0) -> Video:
    return Video(
        np.random.default_rng(count).integers(0, 256, (count, height, width, 3), dtype=np.uint8),
        rate,
    )


@pytest.fixture(scope="module")
def hash_seed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    write_mp4(noise(20), folder / "a.mp4")
    shutil.copy(folder / "a.mp4", folder / "copy.mp4")
    (folder / "a.txt").write_text("noise")
    write_mp4(noise(60, 48, 64, rate=24.0), folder / "b.mp4")
    write_mp4(noise(60), folder / "cut.mp4")
    data = (folder / "cut.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(data[: len(data) // 2])
    noise(5, rate=20.0).save(folder / "both")
    (folder / "both.mp4").unlink()
    PIL.Image.new("RGB", (8, 6)).save(folder / "still.png")
    (folder / "empty.mov").touch()
    (folder / "letter.webm").write_text("dear reader")
    (folder / "song.mp3").touch()
    return folder


def test_a_check_counts_everything_once(hash_seed):
    report = check(hash_seed)
    assert (report.files, report.usable, report.clips, report.pictures) == (8, 6, 5, 1)
    assert report.sizes.smallest == (8, 6) and report.sizes.largest == (64, 48)
    assert report.tokenizers == {"h264": 4, "GIF": 1, "still": 1}
    assert report.rates[0] == (10.0, 3) and {rate for rate, _ in report.rates} == {10.0, 20.0, 24.0}
    assert (report.lengths.shortest, report.lengths.median, report.lengths.fewest_frames) == (
        0.25,
        2.0,
        5,
    )
    assert report.lengths.most_frames == 60
    assert report.duplicates == [["a.mp4", "copy.mp4"]]
    assert report.captioned == 1 and report.captions == {"text files": 1}
    assert report.other_files == "1 .mp3"
    assert report.bytes == sum(
        file.stat().st_size for file in hash_seed.iterdir() if file.suffix not in (".txt", ".mp3")
    )
    assert [each["name"] for each in report.unusable] == ["empty.mov", "letter.webm"]
    assert "dear rea" in report.unusable[1]["reason"]


def test_a_check_says_where_a_file_breaks(hash_seed):
    (broken,) = check(hash_seed).broken
    assert broken["name"] == "cut.mp4"
    assert broken["reason"].startswith("it breaks at 2.") and "of 6.00 s" in broken["reason"]


def test_what_a_check_calls_usable_is_what_training_can_read(hash_seed):
    unusable = {each["name"] for each in check(hash_seed).unusable}
    source = VideoDataConfig(path=str(hash_seed), size=8, frames=4).full()
    for index in range(len(source)):
        if source.name(index) in unusable:
            with pytest.raises(UnreadableFile):
                source.item(index, PLAIN)
        else:
            assert source.item(index, PLAIN).clip.shape == (3, 4, 8, 8)


def test_a_check_reads_well_and_as_json(hash_seed):
    report = check(hash_seed)
    text = "\n".join(report.lines())
    assert "8 files, 6 usable (5 clips and 1 picture), " in text
    assert "lengths: 0.25 to 2.50 s, median 2.00 s; 5 to 60 frames; in all 0:00:09" in text
    assert "rates: 10 a second (3), " in text
    assert "captions: 1 of 6 usable files (1 in text files)" in text
    assert "a.mp4 = copy.mp4" in text
    assert "broken: 1 file, of which the part before is used\n  cut.mp4: it breaks at " in text
    assert "  empty.mov: the file is empty (0 bytes)" in text
    told = json.loads(report.as_json())
    assert (
        told["usable"] == 6
        and {"name": "empty.mov", "reason": "the file is empty (0 bytes)"} in told["unusable"]
    )


def test_a_folder_of_frames_is_checked_as_a_clip_if_asked(tmp_path):
    (tmp_path / "walk").mkdir()
    for number in range(6):
        PIL.Image.new("RGB", (8, 6)).save(tmp_path / "walk" / f"{number}.png")
    assert (check(tmp_path).clips, check(tmp_path).pictures) == (0, 6)
    report = check(tmp_path, folders="clips")
    assert (report.clips, report.pictures, report.lengths.most_frames, report.tokenizers) == (
        1,
        0,
        6,
        {"frames": 1},
    )


def test_a_check_of_nothing_usable_says_so_and_does_not_fail(tmp_path):
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "lost.mp4").symlink_to(tmp_path / "gone.mp4")
    report = check(tmp_path)
    assert (report.files, report.usable, report.sizes, report.lengths) == (2, 0, None, None)
    assert report.lines()[0].endswith("2 files, 0 usable (0 clips and 0 pictures), 0.0 MB")
    assert "lost.mp4: the file cannot be opened" in report.lines()[-1]
    assert json.loads(report.as_json())["lengths"] is None


def test_a_check_of_no_clip_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no clips: .*the folder is empty"):
        check(tmp_path)


def test_a_check_tells_of_unusable_captions_and_how_far_it_is_and_shows_few_of_many(tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02d}.mp4").touch()
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "../00.mp4"}\n')
    steps = []
    report = check(
        tmp_path, num_workers=2, progress=lambda done, total: steps.append((done, total))
    )
    assert steps == [(done, 30) for done in range(1, 31)]
    assert "leads out of the folder" in "\n".join(report.lines())
    assert report.lines()[-1] == "  and 20 more" and len(report.unusable) == 30


def test_a_check_needs_no_torch():
    code = "import sys, tessera.modalities.video.inspect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
