"""A folder of clips becomes squares of equal length: cut by the example's own generator, broken
files used or named."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import PIL.Image
import pytest
import torch

from tessera.data.errors import UnreadableFile
from tessera.data.loader import TrainLoader
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.video.dataset import VideoDataConfig, find_videos
from tessera.modalities.video.io.files import decode_all
from tessera.modalities.video.io.writer import write_mp4
from tessera.modalities.video.media import Video
from tessera.run.errors import UserError

PLAIN = np.random.default_rng(0)


def clip(count: int, height: int = 16, width: int = 16, rate: float = 10.0) -> Video:
    """Frame k is a blue of 8 k; red grows to the right and green downwards, so that a pixel tells
    where it came from."""
    frames = np.zeros((count, height, width, 3), dtype=np.uint8)
    frames[..., 0] = np.linspace(0, 255, width)
    frames[..., 1] = np.linspace(0, 255, height)[:, None]
    frames[..., 2] = 8 * np.arange(count)[:, None, None]
    return Video(frames, rate)


def lossless(path, count: int, height: int = 16, width: int = 16, rate: float = 10.0):
    """An animation, which keeps every pixel, unlike an MP4."""
    first, *others = [PIL.Image.fromarray(frame) for frame in clip(count, height, width).frames]
    path.parent.mkdir(parents=True, exist_ok=True)
    first.save(path, save_all=True, append_images=others, duration=1000 / rate, lossless=True)
    return path


def numbers(example) -> list[int]:
    """Which frames of `clip` there are, by their blue."""
    return np.rint((example.video[2].mean(axis=(1, 2)) + 1) * 127.5 / 8).astype(int).tolist()


def names(source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def item(source, index: int = 0, seed: int = 0):
    return source.item(index, np.random.default_rng(seed))


# ---- what comes out


def test_a_clip_becomes_squares_as_models_see_them(tmp_path):
    write_mp4(clip(20, 60, 90), tmp_path / "a.mp4")
    (tmp_path / "a.txt").write_text("three ramps")
    source = VideoDataConfig(path=str(tmp_path), size=32, frames=5).full()
    example = source.item(0, PLAIN)
    assert example.video.shape == (3, 5, 32, 32) and example.video.dtype == np.float32
    assert example.video.min() >= -1 and example.video.max() <= 1
    assert (example.length, example.caption, source.caption(0)) == (5, "three ramps", "three ramps")


def test_a_batch_holds_tensors_and_moves(tmp_path):
    for number in range(3):
        lossless(tmp_path / f"{number}.webp", 6)
    source = VideoDataConfig(path=str(tmp_path), size=8, frames=4).full()
    batch = source.collate([source.item(i, PLAIN) for i in range(3)])
    assert batch.videos.shape == (3, 3, 4, 8, 8) and batch.videos.dtype == torch.float32
    assert batch.lengths.tolist() == [4, 4, 4] and batch.lengths.dtype == torch.int64
    moved = batch.to("meta")
    assert moved.videos.device.type == moved.lengths.device.type == "meta" and moved.captions == [
        "",
        "",
        "",
    ]


def test_every_beginning_is_drawn_and_all_frames_follow_on(tmp_path):
    lossless(tmp_path / "a.webp", 12)
    source = VideoDataConfig(path=str(tmp_path), size=16, frames=5).build().train
    seen = [numbers(item(source, seed=seed)) for seed in range(100)]
    assert {frames[0] for frames in seen} == set(range(8)), (
        "the last beginning is as good as the first"
    )
    assert all(frames == list(range(frames[0], frames[0] + 5)) for frames in seen)
    counts = np.bincount([frames[0] for frames in seen])
    assert counts.min() > 4


@pytest.mark.parametrize("rate", [24.0, 30.0])
def test_the_last_beginning_is_not_lost_to_rounded_time_stamps(tmp_path, rate):
    clip(12, rate=rate).save(tmp_path / "a")
    (tmp_path / "a.mp4").unlink()  # the GIF counts hundredths of a second
    source = VideoDataConfig(path=str(tmp_path), size=16, frames=10, on_short="skip").build().train
    assert {numbers(item(source, seed=seed))[0] for seed in range(40)} == {0, 1, 2}


@pytest.mark.parametrize("ending", ["mp4", "webp"])
@pytest.mark.parametrize(
    ("settings", "apart"),
    [({}, 1), ({"stride": 3}, 3), ({"rate_hz": 5.0}, 2), ({"rate_hz": 5.0, "stride": 2}, 4)],
)
def test_rate_and_stride_say_how_far_apart_the_frames_are(tmp_path, ending, settings, apart):
    path = tmp_path / f"a.{ending}"
    write_mp4(clip(24), path) if ending == "mp4" else lossless(path, 24)
    source = VideoDataConfig(path=str(tmp_path), size=16, frames=4, **settings).build().train
    for seed in range(12):
        frames = numbers(item(source, seed=seed))
        assert np.diff(frames).tolist() == [apart] * 3


def test_a_rate_above_the_files_own_repeats_frames(tmp_path):
    lossless(tmp_path / "a.webp", 12)
    frames = numbers(
        item(VideoDataConfig(path=str(tmp_path), size=16, frames=6, rate_hz=20.0).full())
    )
    assert [after - before for before, after in zip(frames, frames[1:])] in (
        [0, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    )


def test_all_frames_are_cut_alike(tmp_path):
    lossless(tmp_path / "a.webp", 8, 40, 90)
    source = (
        VideoDataConfig(path=str(tmp_path), size=16, frames=6, min_scale=0.4, flip=True)
        .build()
        .train
    )
    places = []
    for seed in range(8):
        clip_ = item(source, seed=seed).video
        assert abs(clip_[:2] - clip_[:2, :1]).max() < 0.02, (
            "red and green, the place, are those of the first frame"
        )
        places.append(clip_[0, 0].mean())
    assert np.ptp(places) > 0.2


def test_a_frame_is_cut_as_a_picture_would_be(tmp_path):
    lossless(tmp_path / "a.webp", 1 + 5, 24, 40)
    PIL.Image.fromarray(clip(1, 24, 40).frames[0]).save(tmp_path / "first.png")
    settings = {"size": 16, "crop": "random", "min_scale": 0.5, "flip": True}
    video = VideoDataConfig(path=str(tmp_path / "a.webp"), frames=6, **settings).build().train
    picture = ImageDataConfig(path=str(tmp_path / "first.png"), **settings).build().train
    rng = np.random.default_rng(5)
    rng.random()  # the beginning of the clip
    assert np.array_equal(item(video, seed=5).video[:, 0], picture.item(0, rng).pixels)


def test_a_flip_mirrors_half_of_the_clips(tmp_path):
    lossless(tmp_path / "a.webp", 4)
    source = VideoDataConfig(path=str(tmp_path), size=8, frames=4, flip=True).build().train
    mirrored = sum(item(source, seed=seed).video[0, 0, 0, 0] > 0 for seed in range(60))
    assert 15 < mirrored < 45


def test_augmentation_is_a_function_of_the_examples_own_generator(tmp_path):
    lossless(tmp_path / "a.webp", 12, 20, 30)
    source = (
        VideoDataConfig(path=str(tmp_path), size=16, frames=4, flip=True, min_scale=0.6)
        .build()
        .train
    )
    np.random.seed(1)
    one = item(source, seed=3)
    np.random.seed(2)
    assert np.array_equal(one.video, item(source, seed=3).video)
    assert not np.array_equal(one.video, item(source, seed=4).video)


def test_every_setting_draws_equally_often_from_the_generator(tmp_path):
    lossless(tmp_path / "a.webp", 12, 20, 30)
    PIL.Image.new("RGB", (9, 9)).save(tmp_path / "b.png")
    path, after = str(tmp_path), []
    for config in (
        VideoDataConfig(path=path),
        VideoDataConfig(path=path, frames=4),
        VideoDataConfig(path=path, frames=4, crop="centre", flip=True, stride=2),
    ):
        for index in range(2):
            rng = np.random.default_rng(0)
            config.full().item(index, rng)
            after.append(rng.random())
        rng = np.random.default_rng(0)
        config.build().train.item(0, rng)
        after.append(rng.random())
    assert len(set(after)) == 1


def test_clips_held_out_are_the_middle_and_never_augmented(tmp_path):
    for number in range(6):
        lossless(tmp_path / f"{number}.webp", 13, 20, 30)
    config = VideoDataConfig(
        path=str(tmp_path), size=16, frames=5, flip=True, min_scale=0.5, val_fraction=0.3
    )
    for source in (config.build().validation, config.full()):
        assert np.array_equal(item(source, seed=1).video, item(source, seed=2).video)
        assert numbers(item(source)) == [4, 5, 6, 7, 8]


def test_large_frames_give_the_same_squares_as_small_ones(tmp_path):
    write_mp4(clip(6, 480, 640), tmp_path / "large.mp4")
    write_mp4(clip(6, 48, 64), tmp_path / "small.mp4")
    source = VideoDataConfig(path=str(tmp_path), size=16, frames=6).full()
    assert abs(item(source, 0).video - item(source, 1).video).mean() < 0.03


def test_small_frames_are_enlarged(tmp_path):
    lossless(tmp_path / "a.webp", 4, 5, 7)
    assert item(VideoDataConfig(path=str(tmp_path), size=32, frames=4).full()).video.shape == (
        3,
        4,
        32,
        32,
    )


# ---- short clips, pictures, folders of frames


def test_a_short_clip_is_padded_with_its_last_frame_and_says_how_long_it_is(tmp_path):
    lossless(tmp_path / "a.webp", 3)
    write_mp4(clip(3), tmp_path / "b.mp4")
    source = VideoDataConfig(path=str(tmp_path), size=16, frames=6).full()
    for index in range(2):
        example = item(source, index)
        assert (example.length, numbers(example)) == (3, [0, 1, 2, 2, 2, 2])


def test_a_short_clip_is_left_out_if_asked(tmp_path):
    lossless(tmp_path / "a.webp", 3)
    lossless(tmp_path / "b.webp", 6)
    source = VideoDataConfig(path=str(tmp_path), size=16, frames=6, on_short="skip").full()
    with pytest.raises(
        UnreadableFile,
        match=r"a.webp: it gives 3 frames at 10 a second, fewer than the 6 asked for",
    ):
        item(source, 0)
    assert item(source, 1).length == 6


def test_a_clip_of_one_frame_is_a_short_clip(tmp_path):
    write_mp4(clip(1), tmp_path / "a.mp4")
    assert item(VideoDataConfig(path=str(tmp_path), size=16, frames=4).full()).length == 1
    with pytest.raises(UnreadableFile, match="it gives 1 frames"):
        item(VideoDataConfig(path=str(tmp_path), size=16, frames=4, on_short="skip").full())


def test_pictures_and_clips_share_a_batch(tmp_path):
    lossless(tmp_path / "a.webp", 6)
    PIL.Image.fromarray(clip(4).frames[3]).save(tmp_path / "b.png")
    source = VideoDataConfig(path=str(tmp_path), size=16, frames=4, on_short="skip").full()
    examples = [item(source, index) for index in range(2)]
    assert numbers(examples[1]) == [3, 3, 3, 3], (
        "a picture is no short clip, and its one frame is repeated"
    )
    batch = source.collate(examples)
    assert batch.videos.shape == (2, 3, 4, 16, 16) and batch.lengths.tolist() == [4, 1]


def test_a_folder_of_pictures_alone_can_be_learnt_from(tmp_path):
    for number in range(4):
        PIL.Image.fromarray(clip(4).frames[number]).save(tmp_path / f"{number}.png")
    stream = TrainLoader(
        VideoDataConfig(path=str(tmp_path), size=8, frames=5, val_fraction=0).build().train,
        seed=0,
        batch_size=4,
    )
    (batch,) = next(stream.micro_batches(0, 1, 0, 1))
    assert batch.examples.lengths.tolist() == [1, 1, 1, 1]


def test_pictures_are_left_out_if_asked(tmp_path):
    lossless(tmp_path / "a.webp", 6)
    PIL.Image.new("RGB", (9, 9)).save(tmp_path / "b.png")
    PIL.Image.new("RGB", (9, 9)).save(tmp_path / "still.gif")
    source = VideoDataConfig(path=str(tmp_path), size=16, frames=4, images="skip").full()
    assert names(source) == ["a.webp", "still.gif"]
    with pytest.raises(
        UnreadableFile, match="still.gif: it is a still picture, and only clips are asked for"
    ):
        item(source, 1)


def test_a_folder_of_frames_is_a_clip_only_if_asked(tmp_path):
    lossless(tmp_path / "moving.webp", 6)
    for folder in ("walk", "run/fast"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(1, 8):
            PIL.Image.fromarray(clip(8).frames[number]).save(tmp_path / folder / f"{number}.png")
    (tmp_path / "walk.txt").write_text("somebody walks")
    path = str(tmp_path)
    assert len(find_videos(path).names) == 15
    source = VideoDataConfig(path=path, size=16, frames=4, folders="clips").full()
    assert names(source) == ["moving.webp", "run/fast", "walk"]
    assert source.caption(2) == "somebody walks"
    assert (numbers(item(source, 1)), item(source, 1).length) == ([3, 4, 5, 6], 4)
    alone = VideoDataConfig(path=f"{path}/walk", size=16, frames=7, folders="clips").full()
    assert names(alone) == ["."] and numbers(item(alone)) == [1, 2, 3, 4, 5, 6, 7]


def test_a_single_picture_is_itself_also_where_folders_are_clips(tmp_path):
    for number in range(3):
        PIL.Image.new("RGB", (9, 9)).save(tmp_path / f"{number}.png")
    assert names(VideoDataConfig(path=str(tmp_path / "1.png"), folders="clips").full()) == ["1.png"]


# ---- broken files


@pytest.fixture
def cut_off(tmp_path):
    """An MP4 whose header promises 60 frames, of which about half are there."""
    noise = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
    write_mp4(Video(noise, 10.0), tmp_path / "cut.mp4")
    data = (tmp_path / "cut.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
    return tmp_path


def test_of_a_file_that_breaks_half_way_the_readable_part_is_used(cut_off):
    source = VideoDataConfig(path=str(cut_off), size=16, frames=9, on_short="skip").build().train
    readable = Video.load(cut_off / "cut.mp4").to_floats()
    assert 15 < readable.shape[1] < 45
    beginnings = set()
    for seed in range(30):
        example = item(source, seed=seed)
        (start,) = (
            k
            for k in range(readable.shape[1])
            if np.array_equal(readable[:, k : k + 9], example.video)
        )
        beginnings.add(start)
    assert max(beginnings) > readable.shape[1] / 2, (
        "all of the readable part, and not only its beginning"
    )
    assert item(source, seed=0).length == 9


def test_of_a_file_that_breaks_too_early_a_clip_is_padded_or_the_file_is_listed(cut_off):
    fits = round(decode_all(cut_off / "cut.mp4").seconds * 10)
    assert item(VideoDataConfig(path=str(cut_off), size=16, frames=50).full()).length == fits
    with pytest.raises(
        UnreadableFile, match=rf"cut.mp4: it gives {fits} frames at 10 a second, fewer than the 50"
    ):
        item(VideoDataConfig(path=str(cut_off), size=16, frames=50, on_short="skip").full())


def test_a_broken_file_is_unreadable_with_its_name_and_the_others_are_not(tmp_path):
    lossless(tmp_path / "b.webp", 4)
    (tmp_path / "a.mp4").write_bytes(b"")
    source = VideoDataConfig(path=str(tmp_path), size=8, frames=4).full()
    with pytest.raises(UnreadableFile, match="a.mp4: the file is empty"):
        source.item(0, PLAIN)
    assert item(source, 1).length == 4


def test_a_run_replaces_a_broken_file_and_lists_it(tmp_path):
    for number in range(3):
        lossless(tmp_path / f"{number}.webp", 4)
    (tmp_path / "2.webp").write_bytes(b"nothing of the kind")
    stream = TrainLoader(
        VideoDataConfig(path=str(tmp_path), size=8, frames=4, val_fraction=0).build().train,
        seed=0,
        batch_size=3,
    )
    (batch,) = next(stream.micro_batches(0, 1, 0, 1))
    assert batch.examples.videos.shape[0] == 3
    assert {name for name, _ in batch.rejected} == {"2.webp"} and "2.webp" not in batch.names


# ---- what is found and what is refused


def test_a_source_can_be_sent_to_a_worker(tmp_path):
    lossless(tmp_path / "a.webp", 5)
    source = VideoDataConfig(path=str(tmp_path), size=8, frames=4).build().train
    copy = pickle.loads(pickle.dumps(source))
    assert names(copy) == names(source) and np.array_equal(item(copy).video, item(source).video)


def test_a_source_knows_how_many_of_its_clips_have_a_caption(tmp_path):
    for name in ("a", "b"):
        lossless(tmp_path / f"{name}.webp", 3)
    (tmp_path / "a.txt").write_text("ramps")
    source = VideoDataConfig(path=str(tmp_path), frames=3).full()
    assert source.captioned == 1 and [source.caption(i) for i in range(2)] == ["ramps", ""]


def test_a_mark_changes_when_the_file_or_a_frame_does(tmp_path):
    lossless(tmp_path / "a.webp", 3)
    (tmp_path / "walk").mkdir()
    PIL.Image.new("RGB", (9, 9)).save(tmp_path / "walk" / "1.png")
    (tmp_path / "gone.mp4").symlink_to(tmp_path / "nowhere")
    source = VideoDataConfig(path=str(tmp_path), folders="clips").full()
    before = [source.signature(i) for i in range(3)]
    assert before == [source.signature(i) for i in range(3)] and before[1] == "not there"
    lossless(tmp_path / "a.webp", 4)
    PIL.Image.new("RGB", (90, 90), "red").save(tmp_path / "walk" / "1.png")
    assert [signature == source.signature(i) for i, signature in enumerate(before)] == [
        False,
        True,
        False,
    ]


def test_the_two_sides_share_no_file_and_leave_none_out(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.mp4").touch()
    split = VideoDataConfig(path=str(tmp_path), val_fraction=0.2).build()
    assert sorted(names(split.train) + names(split.validation)) == sorted(
        f"{n}.mp4" for n in range(30)
    )
    assert 0 < len(split.validation) < len(split.train)


def test_a_folder_of_other_things_is_refused_with_what_is_looked_for(tmp_path):
    (tmp_path / "song.mp3").touch()
    for open_it in (
        VideoDataConfig(path=str(tmp_path)).build,
        VideoDataConfig(path=str(tmp_path)).full,
    ):
        with pytest.raises(
            UserError, match=r"holds no clips: files ending in \.mp4, .*there are only 1 \.mp3"
        ):
            open_it()


@pytest.mark.parametrize("path", [None, "clips"])
def test_without_pyav_a_run_is_refused_at_its_start(tmp_path, monkeypatch, path):
    monkeypatch.setitem(sys.modules, "av", None)
    for open_it in (VideoDataConfig(path=path).build, VideoDataConfig(path=path).full):
        with pytest.raises(UserError, match=r"Install tessera\[video\]"):
            open_it()


@pytest.mark.parametrize(
    "setting",
    [
        {"size": 0},
        {"frames": 0},
        {"rate_hz": 0.0},
        {"rate_hz": float("nan")},
        {"stride": 0},
        {"min_scale": 0.0},
        {"val_fraction": 1.0},
        {"toys": 0},
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=name):
        VideoDataConfig(**setting)


def test_the_transform_says_how_a_clip_is_prepared():
    config = VideoDataConfig(size=32, frames=9, rate_hz=12.0, stride=2, flip=True)
    assert (
        config.preprocessing()
        == config.without_augmentation().preprocessing()
        == {"size": 32, "frames": 9, "rate_hz": 12.0, "stride": 2}
    )
    assert config.judge() is None
