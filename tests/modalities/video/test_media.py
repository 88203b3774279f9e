"""Tests of `Video`: saving, conversion to floats, contact sheets."""

from __future__ import annotations

import pickle
from io import BytesIO

import av
import numpy as np
import PIL.Image
import pytest

from tessera.engine.guards import retain_freed_memory
from tessera.modalities.image.media import Image
from tessera.modalities.video.io.files import probe
from tessera.modalities.video.io.writer import write_mp4
from tessera.modalities.video.media import Video
from tests.videos import grey_frames

# ---- saving


@pytest.mark.parametrize(("height", "width"), [(32, 48), (31, 47), (1, 1)])
@pytest.mark.parametrize("rate", [8.0, 24000 / 1001, 30.0])
def test_saved_files_contain_all_frames(tmp_path, height, width, rate):
    video = Video(grey_frames(10, height, width) + 40, rate)
    path = video.save(tmp_path / "samples" / "guidance-1.5")
    assert path == tmp_path / "samples" / "guidance-1.5.mp4"
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert float(container.streams.video[0].average_rate) == pytest.approx(rate, rel=1e-3)
    assert len(frames) == 10 and frames[0].shape == (height + height % 2, width + width % 2, 3)
    assert np.allclose([frame.mean() for frame in frames], 40 + 8 * np.arange(10), atol=3)
    with PIL.Image.open(tmp_path / "samples" / "guidance-1.5.gif") as gif:
        assert (gif.n_frames, gif.size, gif.info["loop"]) == (10, (width, height), 0)


def test_saved_video_loads_with_small_error(tmp_path):
    x, y, t = np.meshgrid(np.arange(64), np.arange(48), np.arange(12), indexing="xy")
    waves = [127 + 100 * np.sin((x + k * y) / 15 + t / 6 + k) for k in range(3)]
    video = Video(np.stack(waves, -1).transpose(2, 0, 1, 3).astype(np.uint8), 12.0)
    loaded = Video.load(video.save(tmp_path / "a"))
    assert loaded.frames.shape == video.frames.shape and loaded.rate_hz == 12
    assert abs(loaded.frames.astype(int) - video.frames).mean() < 4
    assert abs(Video.load(tmp_path / "a.gif").frames.astype(int) - video.frames).mean() < 6, (
        "256 colours"
    )


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("a", {"a.mp4", "a.gif"}),
        ("a-1.5", {"a-1.5.mp4", "a-1.5.gif"}),
        ("a.mp4", {"a.mp4"}),
        ("a.GIF", {"a.GIF"}),
    ],
)
def test_save_writes_the_format_of_the_suffix(tmp_path, name, written):
    path = Video(grey_frames(3), 10.0).save(tmp_path / name)
    assert {file.name for file in tmp_path.iterdir()} == written
    assert path.name == (name if name in written else f"{name}.mp4")
    assert all(len(Video.load(tmp_path / each).frames) == 3 for each in written)


def test_save_rejects_formats_that_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match=r"\.webm, but .* are \.mp4, \.gif"):
        Video(grey_frames(3), 10.0).save(tmp_path / "a.webm")
    assert not list(tmp_path.iterdir())


def test_gif_keeps_the_duration_of_videos_above_its_maximum_rate(tmp_path):
    path = Video(grey_frames(24), 120.0).save(tmp_path / "a.gif")
    assert probe(path).seconds == pytest.approx(24 / 120, abs=0.011)
    assert probe(path).rate_hz <= 50


def test_mp4_has_regular_key_frames(tmp_path):
    write_mp4(Video(grey_frames(100), 10.0), tmp_path / "a.mp4")
    with av.open(str(tmp_path / "a.mp4")) as container:
        keys = [packet.pts for packet in container.demux(video=0) if packet.is_keyframe]
    assert len(keys) >= 4


def test_mp4_files_are_deterministic(tmp_path):
    """Resumed runs must be bitwise identical; an encoder that reads uninitialized memory is not."""
    retain_freed_memory()  # as training does
    rng = np.random.default_rng(3)
    for height, width, count in ((36, 16, 9), (18, 70, 9), (54, 52, 5), (70, 18, 9), (34, 70, 9)):
        video = Video(rng.integers(0, 256, (count, height, width, 3), dtype=np.uint8), 8.0)
        files = set()
        for _ in range(12):
            for _ in range(20):
                np.full(rng.integers(1_000, 200_000), rng.integers(256), np.uint8)
            write_mp4(video, tmp_path / "video.mp4")
            files.add((tmp_path / "video.mp4").read_bytes())
        assert len(files) == 1, f"{count} x {height} x {width}"


# ---- floats and sheets


def test_conversion_to_floats_and_back_is_exact():
    video = Video(np.random.default_rng(0).integers(0, 256, (5, 6, 7, 3), dtype=np.uint8), 12.0)
    floats = video.to_floats()
    assert floats.shape == (3, 5, 6, 7) and floats.dtype == np.float32
    assert np.array_equal(floats[:, 3], Image(video.frames[3]).to_floats())
    converted = Video.from_floats(floats, 12.0)
    assert np.array_equal(converted.frames, video.frames) and converted.rate_hz == 12


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((2, 3, 4, 4), np.uint8),
        np.zeros((4, 4, 3), np.uint8),
        np.zeros((2, 4, 4, 3)),
        grey_frames(0),
    ],
)
def test_frames_of_wrong_shape_or_dtype_are_an_error(frames):
    with pytest.raises(ValueError, match=r"uint8 frames of shape \(frames, height, width, 3\)"):
        Video(frames, 10.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_rate_is_an_error(rate):
    with pytest.raises(ValueError, match="rate_hz must be positive and finite"):
        Video(grey_frames(1), rate)


def test_floats_of_wrong_shape_are_an_error():
    with pytest.raises(ValueError, match=r"\(3, frames, height, width\)"):
        Video.from_floats(np.zeros((8, 3, 4, 4)), 10.0)


def test_shorter_videos_on_a_sheet_hold_their_last_frame():
    sheet = Video.sheet([Video(grey_frames(4, 96, 96), 10.0), Video(grey_frames(2, 96, 96), 10.0)])
    assert sheet.frames.shape == (4, 120, 228, 3) and sheet.rate_hz == 10
    assert sheet.frames[:, 50, 50, 0].tolist() == [0, 8, 16, 24]
    assert sheet.frames[:, 50, 150, 0].tolist() == [0, 8, 8, 8]


def test_side_by_side_videos_keep_their_own_speed():
    pair = Video.side_by_side(
        Video(grey_frames(3, 16, 16), 10.0), Video(grey_frames(6, 16, 16), 20.0)
    )
    assert pair.rate_hz == 20 and len(pair.frames) == 6
    assert pair.frames[:, 8, 8, 0].tolist() == [0, 0, 8, 8, 16, 16]
    assert pair.frames[:, 8, -8, 0].tolist() == [0, 8, 16, 24, 32, 40]


def test_empty_sheet_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        Video.sheet([])


def test_video_can_be_pickled():
    loaded = pickle.load(BytesIO(pickle.dumps(Video(grey_frames(3), 8.0))))
    assert np.array_equal(loaded.frames, grey_frames(3)) and loaded.rate_hz == 8


def test_repr_is_short() -> None:
    video = Video(np.zeros((4, 2, 3, 3), np.uint8), 24.0)
    assert repr(video) == "Video(frames=4, width=3, height=2, rate_hz=24)"


def test_a_saved_sheet_has_a_contact_sheet_of_frames(tmp_path):
    rng = np.random.default_rng(0)
    videos = [Video(rng.integers(0, 255, (9, 16, 16, 3), dtype=np.uint8), 12.0) for _ in range(2)]
    sheet = Video.sheet(videos, ["one", "two"])
    assert repr(sheet).startswith("Video(frames=9, ")
    sheet.save(tmp_path / "sheet")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["frames.png", "sheet.gif", "sheet.mp4"]
    assert videos[0].strip().pixels.shape == (16, 6 * 16 + 5, 3)
    sheet.save(tmp_path / "alone" / "sheet.gif")
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["sheet.gif"]
