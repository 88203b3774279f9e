"""Tests of folders of videos: frames and their times, crops, padding, and errors."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from tessera.data.dataset import FileDataset
from tessera.data.errors import UnreadableFile
from tessera.data.loader import TrainLoader
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.media import Image
from tessera.modalities.video.dataset import VideoDataConfig, find_videos
from tessera.modalities.video.io.files import decode_all
from tessera.modalities.video.io.writer import write_mp4
from tessera.modalities.video.media import Video, VideoExample
from tessera.run.errors import UserError

RNG = np.random.default_rng(0)


def make_video(count: int, height: int = 16, width: int = 16, rate: float = 10.0) -> Video:
    """Return a video whose frame k has blue 8 k; red rises to the right and green downwards."""
    frames = np.zeros((count, height, width, 3), dtype=np.uint8)
    frames[..., 0] = np.linspace(0, 255, width)
    frames[..., 1] = np.linspace(0, 255, height)[:, None]
    frames[..., 2] = 8 * np.arange(count)[:, None, None]
    return Video(frames, rate)


def write_lossless(
    path: Path, count: int, height: int = 16, width: int = 16, rate: float = 10.0
) -> Path:
    """Write an animation, which keeps every pixel, unlike an MP4."""
    frames = make_video(count, height, width).frames
    first, *others = [PIL.Image.fromarray(frame) for frame in frames]
    path.parent.mkdir(parents=True, exist_ok=True)
    first.save(path, save_all=True, append_images=others, duration=1000 / rate, lossless=True)
    return path


def frame_numbers(example: VideoExample) -> list[int]:
    """Return which frames of `make_video` an example has, from their blue."""
    return np.rint((example.video[2].mean(axis=(1, 2)) + 1) * 127.5 / 8).astype(int).tolist()


def names(dataset: FileDataset) -> list[str]:
    return [dataset.name(i) for i in range(len(dataset))]


def load(dataset: FileDataset, index: int = 0, seed: int = 0) -> VideoExample:
    return dataset.item(index, np.random.default_rng(seed))


# ---- frames, crops and augmentation


def test_video_becomes_squares_in_the_range_of_models(tmp_path):
    write_mp4(make_video(20, 60, 90), tmp_path / "a.mp4")
    (tmp_path / "a.txt").write_text("three ramps")
    dataset = VideoDataConfig(path=str(tmp_path), size=32, frames=5).full()
    example = dataset.item(0, RNG)
    assert example.video.shape == (3, 5, 32, 32) and example.video.dtype == np.float32
    assert example.video.min() >= -1 and example.video.max() <= 1
    assert example.length == 5
    assert example.caption == dataset.caption(0) == "three ramps"


def test_batch_consists_of_tensors_that_can_be_moved(tmp_path):
    for number in range(3):
        write_lossless(tmp_path / f"{number}.webp", 6)
    dataset = VideoDataConfig(path=str(tmp_path), size=8, frames=4).full()
    batch = dataset.collate([dataset.item(i, RNG) for i in range(3)])
    assert batch.videos.shape == (3, 3, 4, 8, 8) and batch.videos.dtype == torch.float32
    assert batch.lengths.tolist() == [4, 4, 4] and batch.lengths.dtype == torch.int64
    moved = batch.to("meta")
    assert moved.videos.device.type == moved.lengths.device.type == "meta"
    assert moved.captions == ["", "", ""]


def test_every_start_is_drawn_and_frames_are_consecutive(tmp_path):
    write_lossless(tmp_path / "a.webp", 12)
    dataset = VideoDataConfig(path=str(tmp_path), size=16, frames=5).build().train
    parts = [frame_numbers(load(dataset, seed=seed)) for seed in range(100)]
    assert {frames[0] for frames in parts} == set(range(8)), "first and last included"
    assert all(frames == list(range(frames[0], frames[0] + 5)) for frames in parts)
    counts = np.bincount([frames[0] for frames in parts])
    assert counts.min() > 4


@pytest.mark.parametrize("rate", [24.0, 30.0])
def test_last_start_is_possible_despite_rounded_time_stamps(tmp_path, rate):
    make_video(12, rate=rate).save(tmp_path / "a")
    (tmp_path / "a.mp4").unlink()  # time stamps of a GIF are hundredths of a second
    config = VideoDataConfig(path=str(tmp_path), size=16, frames=10, on_short="skip")
    dataset = config.build().train
    assert {frame_numbers(load(dataset, seed=seed))[0] for seed in range(40)} == {0, 1, 2}


@pytest.mark.parametrize("suffix", ["mp4", "webp"])
@pytest.mark.parametrize(
    ("settings", "distance"),
    [({}, 1), ({"stride": 3}, 3), ({"rate_hz": 5.0}, 2), ({"rate_hz": 5.0, "stride": 2}, 4)],
)
def test_rate_and_stride_set_the_distance_of_frames(tmp_path, suffix, settings, distance):
    path = tmp_path / f"a.{suffix}"
    if suffix == "mp4":
        write_mp4(make_video(24), path)
    else:
        write_lossless(path, 24)
    dataset = VideoDataConfig(path=str(tmp_path), size=16, frames=4, **settings).build().train
    for seed in range(12):
        frames = frame_numbers(load(dataset, seed=seed))
        assert np.diff(frames).tolist() == [distance] * 3


def test_higher_rate_than_that_of_the_file_repeats_frames(tmp_path):
    write_lossless(tmp_path / "a.webp", 12)
    config = VideoDataConfig(path=str(tmp_path), size=16, frames=6, rate_hz=20.0)
    differences = np.diff(frame_numbers(load(config.full()))).tolist()
    assert differences in ([0, 1, 0, 1, 0], [1, 0, 1, 0, 1])


def test_all_frames_have_the_same_crop(tmp_path):
    write_lossless(tmp_path / "a.webp", 8, 40, 90)
    config = VideoDataConfig(path=str(tmp_path), size=16, frames=6, min_scale=0.4, flip=True)
    dataset = config.build().train
    positions = []
    for seed in range(8):
        video = load(dataset, seed=seed).video
        difference = abs(video[:2] - video[:2, :1]).max()
        assert difference < 0.02, "red and green show the position"
        positions.append(video[0, 0].mean())
    assert np.ptp(positions) > 0.2


def test_frame_is_cropped_like_an_image(tmp_path):
    write_lossless(tmp_path / "a.webp", 1 + 5, 24, 40)
    PIL.Image.fromarray(make_video(1, 24, 40).frames[0]).save(tmp_path / "first.png")
    settings: dict[str, Any] = {"size": 16, "crop": "random", "min_scale": 0.5, "flip": True}
    video = VideoDataConfig(path=str(tmp_path / "a.webp"), frames=6, **settings).build().train
    image = ImageDataConfig(path=str(tmp_path / "first.png"), **settings).build().train
    rng = np.random.default_rng(5)
    rng.random()  # the start of the video
    assert np.array_equal(load(video, seed=5).video[:, 0], image.item(0, rng).pixels)


def test_flip_mirrors_half_of_the_videos(tmp_path):
    write_lossless(tmp_path / "a.webp", 4)
    dataset = VideoDataConfig(path=str(tmp_path), size=8, frames=4, flip=True).build().train
    mirrored = sum(load(dataset, seed=seed).video[0, 0, 0, 0] > 0 for seed in range(60))
    assert 15 < mirrored < 45


def test_augmentation_depends_on_the_generator_of_the_example_only(tmp_path):
    write_lossless(tmp_path / "a.webp", 12, 20, 30)
    config = VideoDataConfig(path=str(tmp_path), size=16, frames=4, flip=True, min_scale=0.6)
    dataset = config.build().train
    np.random.seed(1)
    first = load(dataset, seed=3)
    np.random.seed(2)
    assert np.array_equal(first.video, load(dataset, seed=3).video)
    assert not np.array_equal(first.video, load(dataset, seed=4).video)


def test_all_settings_draw_the_same_number_of_random_numbers(tmp_path):
    write_lossless(tmp_path / "a.webp", 12, 20, 30)
    PIL.Image.new("RGB", (9, 9)).save(tmp_path / "b.png")
    path, following = str(tmp_path), []
    for config in (
        VideoDataConfig(path=path),
        VideoDataConfig(path=path, frames=4),
        VideoDataConfig(path=path, frames=4, crop="centre", flip=True, stride=2),
    ):
        for index in range(2):
            rng = np.random.default_rng(0)
            config.full().item(index, rng)
            following.append(rng.random())
        rng = np.random.default_rng(0)
        config.build().train.item(0, rng)
        following.append(rng.random())
    assert len(set(following)) == 1


def test_held_out_videos_are_the_middle_and_not_augmented(tmp_path):
    for number in range(6):
        write_lossless(tmp_path / f"{number}.webp", 13, 20, 30)
    config = VideoDataConfig(
        path=str(tmp_path), size=16, frames=5, flip=True, min_scale=0.5, val_fraction=0.3
    )
    for dataset in (config.build().validation, config.full()):
        assert np.array_equal(load(dataset, seed=1).video, load(dataset, seed=2).video)
        assert frame_numbers(load(dataset)) == [4, 5, 6, 7, 8]


def test_large_frames_give_the_same_squares_as_small_ones(tmp_path):
    write_mp4(make_video(6, 480, 640), tmp_path / "large.mp4")
    write_mp4(make_video(6, 48, 64), tmp_path / "small.mp4")
    dataset = VideoDataConfig(path=str(tmp_path), size=16, frames=6).full()
    assert abs(load(dataset, 0).video - load(dataset, 1).video).mean() < 0.03


def test_small_frames_are_enlarged(tmp_path):
    write_lossless(tmp_path / "a.webp", 4, 5, 7)
    dataset = VideoDataConfig(path=str(tmp_path), size=32, frames=4).full()
    assert load(dataset).video.shape == (3, 4, 32, 32)


# ---- short videos, images and folders of frames


def test_short_video_is_padded_with_its_last_frame(tmp_path):
    write_lossless(tmp_path / "a.webp", 3)
    write_mp4(make_video(3), tmp_path / "b.mp4")
    dataset = VideoDataConfig(path=str(tmp_path), size=16, frames=6).full()
    for index in range(2):
        example = load(dataset, index)
        assert (example.length, frame_numbers(example)) == (3, [0, 1, 2, 2, 2, 2])


def test_short_video_is_skipped_if_requested(tmp_path):
    write_lossless(tmp_path / "a.webp", 3)
    write_lossless(tmp_path / "b.webp", 6)
    dataset = VideoDataConfig(path=str(tmp_path), size=16, frames=6, on_short="skip").full()
    message = "a.webp: it has 3 frames at 10 per second, fewer than the requested 6"
    with pytest.raises(UnreadableFile, match=message):
        load(dataset, 0)
    assert load(dataset, 1).length == 6


def test_video_of_one_frame_is_a_short_video(tmp_path):
    write_mp4(make_video(1), tmp_path / "a.mp4")
    assert load(VideoDataConfig(path=str(tmp_path), size=16, frames=4).full()).length == 1
    with pytest.raises(UnreadableFile, match="it has 1 frames"):
        load(VideoDataConfig(path=str(tmp_path), size=16, frames=4, on_short="skip").full())


def test_images_and_videos_can_share_a_batch(tmp_path):
    write_lossless(tmp_path / "a.webp", 6)
    PIL.Image.fromarray(make_video(4).frames[3]).save(tmp_path / "b.png")
    dataset = VideoDataConfig(path=str(tmp_path), size=16, frames=4, on_short="skip").full()
    examples = [load(dataset, index) for index in range(2)]
    assert frame_numbers(examples[1]) == [3, 3, 3, 3], "an image is not a short video"
    batch = dataset.collate(examples)
    assert batch.videos.shape == (2, 3, 4, 16, 16) and batch.lengths.tolist() == [4, 1]


def test_folder_of_images_only_can_be_trained_on(tmp_path):
    for number in range(4):
        PIL.Image.fromarray(make_video(4).frames[number]).save(tmp_path / f"{number}.png")
    config = VideoDataConfig(path=str(tmp_path), size=8, frames=5, val_fraction=0)
    loader = TrainLoader(config.build().train, seed=0, batch_size=4)
    (batch,) = next(loader.micro_batches(0, 1, 0, 1))
    assert batch.examples.lengths.tolist() == [1, 1, 1, 1]


def test_images_are_skipped_if_requested(tmp_path):
    write_lossless(tmp_path / "a.webp", 6)
    PIL.Image.new("RGB", (9, 9)).save(tmp_path / "b.png")
    PIL.Image.new("RGB", (9, 9)).save(tmp_path / "still.gif")
    dataset = VideoDataConfig(path=str(tmp_path), size=16, frames=4, images="skip").full()
    assert names(dataset) == ["a.webp", "still.gif"]
    with pytest.raises(UnreadableFile, match="still.gif: it is an image, and images are skipped"):
        load(dataset, 1)


def test_folder_of_frames_is_a_video_only_if_requested(tmp_path):
    write_lossless(tmp_path / "moving.webp", 6)
    for folder in ("walk", "run/fast"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(1, 8):
            frame = PIL.Image.fromarray(make_video(8).frames[number])
            frame.save(tmp_path / folder / f"{number}.png")
    (tmp_path / "walk.txt").write_text("a person walks")
    path = str(tmp_path)
    assert len(find_videos(path).names) == 15
    dataset = VideoDataConfig(path=path, size=16, frames=4, folders="videos").full()
    assert names(dataset) == ["moving.webp", "run/fast", "walk"]
    assert dataset.caption(2) == "a person walks"
    assert (frame_numbers(load(dataset, 1)), load(dataset, 1).length) == ([3, 4, 5, 6], 4)
    single = VideoDataConfig(path=f"{path}/walk", size=16, frames=7, folders="videos").full()
    assert names(single) == ["."] and frame_numbers(load(single)) == [1, 2, 3, 4, 5, 6, 7]


def test_single_image_is_read_where_folders_are_videos(tmp_path):
    for number in range(3):
        PIL.Image.new("RGB", (9, 9)).save(tmp_path / f"{number}.png")
    dataset = VideoDataConfig(path=str(tmp_path / "1.png"), folders="videos").full()
    assert names(dataset) == ["1.png"]


# ---- unreadable files


@pytest.fixture
def truncated(tmp_path: Path) -> Path:
    """Return a folder with an MP4 that declares 60 frames and has about half of them."""
    noise = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
    write_mp4(Video(noise, 10.0), tmp_path / "cut.mp4")
    data = (tmp_path / "cut.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
    return tmp_path


def test_truncated_file_is_used_up_to_its_end(truncated):
    config = VideoDataConfig(path=str(truncated), size=16, frames=9, on_short="skip")
    dataset = config.build().train
    readable = Video.load(truncated / "cut.mp4").to_floats()
    assert 15 < readable.shape[1] < 45
    starts = set()
    for seed in range(30):
        example = load(dataset, seed=seed)
        (start,) = (
            k
            for k in range(readable.shape[1])
            if np.array_equal(readable[:, k : k + 9], example.video)
        )
        starts.add(start)
    assert max(starts) > readable.shape[1] / 2, "all of the readable part"
    assert load(dataset, seed=0).length == 9


def test_truncated_file_that_is_too_short_is_padded_or_skipped(truncated):
    count = round(decode_all(truncated / "cut.mp4").seconds * 10)
    assert load(VideoDataConfig(path=str(truncated), size=16, frames=50).full()).length == count
    message = f"cut.mp4: it has {count} frames at 10 per second, fewer than the requested 50"
    with pytest.raises(UnreadableFile, match=message):
        load(VideoDataConfig(path=str(truncated), size=16, frames=50, on_short="skip").full())


def test_unreadable_file_is_reported_by_name_and_others_are_read(tmp_path):
    write_lossless(tmp_path / "b.webp", 4)
    (tmp_path / "a.mp4").write_bytes(b"")
    dataset = VideoDataConfig(path=str(tmp_path), size=8, frames=4).full()
    with pytest.raises(UnreadableFile, match="a.mp4: the file is empty"):
        dataset.item(0, RNG)
    assert load(dataset, 1).length == 4


def test_training_replaces_and_reports_unreadable_files(tmp_path):
    for number in range(3):
        write_lossless(tmp_path / f"{number}.webp", 4)
    (tmp_path / "2.webp").write_bytes(b"not an animation")
    config = VideoDataConfig(path=str(tmp_path), size=8, frames=4, val_fraction=0)
    loader = TrainLoader(config.build().train, seed=0, batch_size=3)
    (batch,) = next(loader.micro_batches(0, 1, 0, 1))
    assert batch.examples.videos.shape[0] == 3
    assert {name for name, _ in batch.rejected} == {"2.webp"} and "2.webp" not in batch.names


# ---- videos in memory


@pytest.mark.parametrize("count", [1, 2, 5, 6, 11, 12, 13, 24])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stride": 2},
        {"stride": 3},
        {"rate_hz": 5.0},
        {"rate_hz": 20.0},
        {"rate_hz": 4.0},
        {"rate_hz": 30.0, "stride": 2},
    ],
)
def test_video_in_memory_is_preprocessed_like_its_file(tmp_path, count, settings):
    path = write_lossless(tmp_path / "a.webp", count, 20, 30)
    config = VideoDataConfig(path="unused", size=16, frames=5, flip=True, **settings)
    expected = config.example_from_file(str(path))
    example = config.example_from_media(make_video(count, 20, 30))
    assert frame_numbers(example) == frame_numbers(expected)
    assert np.array_equal(example.video, expected.video)
    assert example.caption == ""
    if count > 1:  # a file of a single frame is an image
        assert example.length == expected.length
        assert example.rate_hz == pytest.approx(expected.rate_hz)
        assert np.array_equal(config.example_from_media(Video.load(path)).video, expected.video)


@pytest.mark.parametrize("rate_hz", [None, 10.0])
def test_array_is_a_video_at_the_rate_of_the_data(rate_hz):
    frames = make_video(12).frames
    config = VideoDataConfig(size=16, frames=5, rate_hz=rate_hz)
    expected = config.example_from_media(Video(frames, rate_hz or 24.0))
    example = config.example_from_media(frames)
    assert np.array_equal(example.video, expected.video) and example.rate_hz == (rate_hz or 24.0)
    assert frame_numbers(example) == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("media", [None, 3, [1, 2], Image(np.zeros((4, 4, 3), np.uint8))])
def test_other_types_than_videos_and_arrays_are_rejected(media):
    message = rf"Expected a Video, a path or an array .*, got a {type(media).__name__}\."
    with pytest.raises(UserError, match=message):
        VideoDataConfig().example_from_media(media)


@pytest.mark.parametrize("array", [np.zeros((2, 4, 4, 3), int), np.zeros((4, 4, 3), np.uint8)])
def test_arrays_of_another_shape_or_type_are_rejected(array):
    with pytest.raises(ValueError, match=r"expects uint8 frames of shape .*, got .*from_floats"):
        VideoDataConfig().example_from_media(array)


# ---- configuration


def test_dataset_can_be_pickled_for_a_worker(tmp_path):
    write_lossless(tmp_path / "a.webp", 5)
    dataset = VideoDataConfig(path=str(tmp_path), size=8, frames=4).build().train
    copy = pickle.loads(pickle.dumps(dataset))
    assert names(copy) == names(dataset)
    assert np.array_equal(load(copy).video, load(dataset).video)


def test_captions_are_counted_by_source(tmp_path):
    for name in ("a", "b"):
        write_lossless(tmp_path / f"{name}.webp", 3)
    (tmp_path / "a.txt").write_text("ramps")
    dataset = VideoDataConfig(path=str(tmp_path), frames=3).full()
    assert dataset.files.count_captions() == {"text files": 1}
    assert [dataset.caption(i) for i in range(2)] == ["ramps", ""]


def test_signature_changes_when_the_file_or_a_frame_changes(tmp_path):
    write_lossless(tmp_path / "a.webp", 3)
    (tmp_path / "walk").mkdir()
    PIL.Image.new("RGB", (9, 9)).save(tmp_path / "walk" / "1.png")
    (tmp_path / "gone.mp4").symlink_to(tmp_path / "nowhere")
    dataset = VideoDataConfig(path=str(tmp_path), folders="videos").full()
    before = [dataset.signature(i) for i in range(3)]
    assert before == [dataset.signature(i) for i in range(3)] and before[1] == "missing"
    write_lossless(tmp_path / "a.webp", 4)
    PIL.Image.new("RGB", (90, 90), "red").save(tmp_path / "walk" / "1.png")
    unchanged = [signature == dataset.signature(i) for i, signature in enumerate(before)]
    assert unchanged == [False, True, False]


def test_split_is_disjoint_and_complete(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.mp4").touch()
    split = VideoDataConfig(path=str(tmp_path), val_fraction=0.2).build()
    expected = sorted(f"{number}.mp4" for number in range(30))
    assert sorted(names(split.train) + names(split.validation)) == expected
    assert 0 < len(split.validation) < len(split.train)


def test_folder_of_other_files_is_rejected_with_the_expected_suffixes(tmp_path):
    (tmp_path / "song.mp3").touch()
    config = VideoDataConfig(path=str(tmp_path))
    message = r"has no videos: expected files ending in \.mp4, .*found only 1 \.mp3"
    for open_dataset in (config.build, config.full):
        with pytest.raises(UserError, match=message):
            open_dataset()


@pytest.mark.parametrize("path", [None, "videos"])
def test_missing_library_is_reported_at_the_start(monkeypatch, path):
    monkeypatch.setitem(sys.modules, "av", None)
    for open_dataset in (VideoDataConfig(path=path).build, VideoDataConfig(path=path).full):
        with pytest.raises(UserError, match=r"not installed .*pip install \"tessera\[video\]"):
            open_dataset()


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
        {"num_synthetic": 0},
    ],
)
def test_invalid_setting_is_rejected_by_name(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"{name} must be"):
        VideoDataConfig(**setting)


def test_a_generator_inherits_rates_but_only_the_size_must_be_equal():
    config = VideoDataConfig(size=32, frames=9, rate_hz=12.0, stride=2, flip=True)
    expected = {"size": 32, "frames": 9, "rate_hz": 12.0, "stride": 2}
    assert config.inherited() == config.without_augmentation().inherited() == expected
    assert config.preprocessing() == {"size": 32}
