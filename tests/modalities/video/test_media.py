"""What is written opens elsewhere and is the same each time; clips as models see them, and side by
side."""

from __future__ import annotations

import pickle
from io import BytesIO

import av
import numpy as np
import PIL.Image
import pytest

from tessera.engine.memory import keep_freed_memory
from tessera.modalities.image.media import Image
from tessera.modalities.video.io.files import probe
from tessera.modalities.video.io.writer import write_mp4
from tessera.modalities.video.media import Video
from tests.films import levels

# ---- what is written


@pytest.mark.parametrize(("height", "width"), [(32, 48), (31, 47), (1, 1)])
@pytest.mark.parametrize("rate", [8.0, 24000 / 1001, 30.0])
def test_a_saved_clip_opens_elsewhere_with_all_its_frames_and_is_not_black(
    tmp_path, height, width, rate
):
    path = Video(levels(10, height, width) + 40, rate).save(tmp_path / "samples" / "guidance-1.5")
    assert path == tmp_path / "samples" / "guidance-1.5.mp4"
    with av.open(str(path)) as film:
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
        assert float(film.streams.video[0].average_rate) == pytest.approx(rate, rel=1e-3)
    assert len(frames) == 10 and frames[0].shape == (height + height % 2, width + width % 2, 3)
    assert np.allclose([frame.mean() for frame in frames], 40 + 8 * np.arange(10), atol=3)
    with PIL.Image.open(tmp_path / "samples" / "guidance-1.5.gif") as gif:
        assert (gif.n_frames, gif.size, gif.info["loop"]) == (10, (width, height), 0)


def test_a_saved_clip_comes_back_close_to_what_it_was(tmp_path):
    x, y, t = np.meshgrid(np.arange(64), np.arange(48), np.arange(12), indexing="xy")
    waves = [127 + 100 * np.sin((x + k * y) / 15 + t / 6 + k) for k in range(3)]
    clip = Video(np.stack(waves, -1).transpose(2, 0, 1, 3).astype(np.uint8), 12.0)
    back = Video.load(clip.save(tmp_path / "a"))
    assert back.frames.shape == clip.frames.shape and back.rate_hz == 12
    assert abs(back.frames.astype(int) - clip.frames).mean() < 4
    assert abs(Video.load(tmp_path / "a.gif").frames.astype(int) - clip.frames).mean() < 6, (
        "256 colours"
    )


def test_a_fast_clip_keeps_its_pace_in_a_gif(tmp_path):
    path = Video(levels(24), 120.0).save(tmp_path / "a").with_suffix(".gif")
    assert probe(path).seconds == pytest.approx(24 / 120, abs=0.011)
    assert probe(path).rate_hz <= 50


def test_what_was_written_can_be_read_from_anywhere(tmp_path):
    write_mp4(Video(levels(100), 10.0), tmp_path / "a.mp4")
    with av.open(str(tmp_path / "a.mp4")) as film:
        keys = [packet.pts for packet in film.demux(video=0) if packet.is_keyframe]
    assert len(keys) >= 4


def test_a_clip_is_the_same_file_whatever_was_in_memory_before(tmp_path):
    """Samples are part of a run that goes on bit for bit; an encoder that reads what nobody wrote
    would show it here."""
    keep_freed_memory()  # as in a run
    chance = np.random.default_rng(3)
    for height, width, count in ((36, 16, 9), (18, 70, 9), (54, 52, 5), (70, 18, 9), (34, 70, 9)):
        clip = Video(chance.integers(0, 256, (count, height, width, 3), dtype=np.uint8), 8.0)
        files = set()
        for _ in range(12):
            for _ in range(20):
                np.full(chance.integers(1_000, 200_000), chance.integers(256), np.uint8)
            write_mp4(clip, tmp_path / "clip.mp4")
            files.add((tmp_path / "clip.mp4").read_bytes())
        assert len(files) == 1, f"{count} x {height} x {width}"


# ---- as models see it, and side by side


def test_every_byte_survives_the_way_through_floats():
    clip = Video(np.random.default_rng(0).integers(0, 256, (5, 6, 7, 3), dtype=np.uint8), 12.0)
    floats = clip.floats()
    assert floats.shape == (3, 5, 6, 7) and floats.dtype == np.float32
    assert np.array_equal(floats[:, 3], Image(clip.frames[3]).floats())
    back = Video.from_floats(floats, 12.0)
    assert np.array_equal(back.frames, clip.frames) and back.rate_hz == 12


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((2, 3, 4, 4), np.uint8),
        np.zeros((4, 4, 3), np.uint8),
        np.zeros((2, 4, 4, 3)),
        levels(0),
    ],
)
def test_frames_of_another_shape_or_type_are_refused(frames):
    with pytest.raises(ValueError, match=r"\(frames, height, width, 3\) bytes"):
        Video(frames, 10.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_cannot_be_is_refused(rate):
    with pytest.raises(ValueError, match="frames a second"):
        Video(levels(1), rate)


def test_floats_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(3, frames, height, width\)"):
        Video.from_floats(np.zeros((8, 3, 4, 4)), 10.0)


def test_a_sheet_is_as_long_as_its_longest_clip_and_the_others_wait():
    sheet = Video.sheet([Video(levels(4, 16, 16), 10.0), Video(levels(2, 16, 16), 10.0)])
    assert sheet.frames.shape == (4, 20, 38, 3) and sheet.rate_hz == 10
    assert sheet.frames[:, 10, 10, 0].tolist() == [0, 8, 16, 24]
    assert sheet.frames[:, 10, 28, 0].tolist() == [0, 8, 8, 8]


def test_clips_of_different_rates_run_side_by_side_at_their_own_pace():
    pair = Video.beside(Video(levels(3, 16, 16), 10.0), Video(levels(6, 16, 16), 20.0))
    assert pair.rate_hz == 20 and len(pair.frames) == 6
    assert pair.frames[:, 8, 8, 0].tolist() == [0, 0, 8, 8, 16, 16]
    assert pair.frames[:, 8, -8, 0].tolist() == [0, 8, 16, 24, 32, 40]


def test_a_sheet_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        Video.sheet([])


def test_a_clip_survives_the_way_between_processes():
    back = pickle.load(BytesIO(pickle.dumps(Video(levels(3), 8.0))))
    assert np.array_equal(back.frames, levels(3)) and back.rate_hz == 8
