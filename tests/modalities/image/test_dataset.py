"""A folder of pictures becomes squares: held out by name, cut by the example's own generator,
broken files named."""

from __future__ import annotations

import os
import pickle

import numpy as np
import PIL.Image
import pytest
import torch

from tessera.data.dataset import split_names
from tessera.data.discovery import list_files
from tessera.data.errors import UnreadableFile
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.inspect import inspect_folder
from tessera.modalities.image.media import Image
from tessera.run.errors import UserError

PLAIN = np.random.default_rng(0)


def gradient(width: int, height: int) -> PIL.Image.Image:
    """Red grows to the right and green downwards, so that a pixel tells where it came from."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)[None, :]
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return PIL.Image.fromarray(pixels)


def fill(folder, count: int, width: int = 12, height: int = 12):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        gradient(width, height).save(folder / f"{number:04d}.png")
    return folder


def names(source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def item(source, index: int = 0, seed: int = 0) -> np.ndarray:
    return source.item(index, np.random.default_rng(seed)).pixels


# ---- what comes out


def test_a_picture_becomes_a_square_as_models_see_it(tmp_path):
    gradient(90, 60).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("two ramps")
    source = ImageDataConfig(path=str(tmp_path), size=32).full()
    example = source.item(0, PLAIN)
    assert example.pixels.shape == (3, 32, 32) and example.pixels.dtype == np.float32
    assert example.pixels.min() >= -1 and example.pixels.max() <= 1
    assert example.caption == "two ramps"


def test_a_batch_holds_tensors_and_moves(tmp_path):
    source = ImageDataConfig(path=str(fill(tmp_path / "p", 3)), size=8).full()
    batch = source.collate([source.item(i, PLAIN) for i in range(3)])
    assert batch.pixels.shape == (3, 3, 8, 8) and batch.pixels.dtype == torch.float32
    assert batch.captions == ["", "", ""]
    moved = batch.to("meta")
    assert moved.pixels.device.type == "meta" and moved.captions == batch.captions


def test_the_centre_is_cut_from_the_middle_and_whole_in_the_short_side(tmp_path):
    gradient(96, 32).save(tmp_path / "wide.png")
    pixels = item(ImageDataConfig(path=str(tmp_path), size=32, crop="centre").build().train)
    across, down = (pixels[0].mean(0) + 1) / 2, (pixels[1].mean(1) + 1) / 2
    assert across[0] == pytest.approx(1 / 3, abs=0.02) and across[-1] == pytest.approx(
        2 / 3, abs=0.02
    )
    assert down[0] == pytest.approx(0, abs=0.02) and down[-1] == pytest.approx(1, abs=0.02)


def test_a_random_square_moves_along_the_long_side_only(tmp_path):
    gradient(96, 32).save(tmp_path / "wide.png")
    source = ImageDataConfig(path=str(tmp_path), size=32).build().train
    pictures = [item(source, seed=seed) for seed in range(20)]
    lefts = [(pixels[0, :, 0].mean() + 1) / 2 for pixels in pictures]
    assert max(lefts) - min(lefts) > 0.3
    assert all(abs(pixels[1] - pictures[0][1]).max() < 0.02 for pixels in pictures)


def test_a_smaller_scale_cuts_smaller_squares(tmp_path):
    gradient(64, 64).save(tmp_path / "a.png")
    source = ImageDataConfig(path=str(tmp_path), size=32, min_scale=0.5).build().train
    spans = [
        (pixels[0, :, -1].mean() - pixels[0, :, 0].mean()) / 2
        for pixels in (item(source, 0, s) for s in range(30))
    ]
    assert 0.45 < min(spans) < 0.6 and 0.85 < max(spans) <= 1


def test_a_flip_mirrors_half_of_the_pictures(tmp_path):
    gradient(32, 32).save(tmp_path / "a.png")
    pictures = [
        item(ImageDataConfig(path=str(tmp_path), size=32, flip=True).build().train, seed=seed)
        for seed in range(60)
    ]
    mirrored = sum(pixels[0, 0, 0] > pixels[0, 0, -1] for pixels in pictures)
    assert 15 < mirrored < 45
    assert not any(
        item(ImageDataConfig(path=str(tmp_path), size=32).build().train, seed=s)[0, 0, 0] > 0
        for s in range(20)
    )


def test_augmentation_is_a_function_of_the_examples_own_generator(tmp_path):
    gradient(96, 64).save(tmp_path / "a.png")
    source = ImageDataConfig(path=str(tmp_path), size=16, flip=True, min_scale=0.6).build().train
    np.random.seed(1)
    one = item(source, seed=3)
    np.random.seed(2)
    assert np.array_equal(one, item(source, seed=3))
    assert not np.array_equal(one, item(source, seed=4))


def test_every_setting_draws_equally_often_from_the_generator(tmp_path):
    gradient(96, 64).save(tmp_path / "a.png")
    after = []
    for config in (
        ImageDataConfig(path=str(tmp_path)),
        ImageDataConfig(path=str(tmp_path), crop="centre", flip=True, min_scale=0.5),
    ):
        rng = np.random.default_rng(0)
        config.build().train.item(0, rng)
        after.append(rng.random())
    assert after[0] == after[1]


def test_pictures_held_out_are_never_augmented(tmp_path):
    fill(tmp_path / "p", 40, width=30, height=20)
    config = ImageDataConfig(
        path=str(tmp_path / "p"), size=16, flip=True, min_scale=0.5, val_fraction=0.3
    )
    for source in (config.build().validation, config.full()):
        assert np.array_equal(item(source, seed=1), item(source, seed=2))
        assert np.array_equal(
            item(source),
            item(ImageDataConfig(path=str(tmp_path / "p"), size=16, crop="centre").full()),
        )


def test_reduction_is_antialiased(tmp_path):
    board = (np.indices((256, 256)).sum(0) % 2 * 255).astype(np.uint8)
    PIL.Image.fromarray(board).save(tmp_path / "checks.png")
    assert abs(item(ImageDataConfig(path=str(tmp_path), size=32).full())).max() < 0.05


def test_a_large_jpeg_gives_the_same_square_as_the_same_picture_in_png(tmp_path):
    gradient(1200, 900).save(tmp_path / "a.jpg", quality=95)
    gradient(1200, 900).save(tmp_path / "b.png")
    source = ImageDataConfig(path=str(tmp_path), size=64).full()
    assert abs(item(source, 0) - item(source, 1)).mean() < 0.02


@pytest.mark.parametrize("width, height", [(5, 7), (1, 1), (1, 300)])
def test_small_pictures_are_enlarged_or_skipped_as_asked(tmp_path, width, height):
    gradient(width, height).save(tmp_path / "small.png")
    config = ImageDataConfig(path=str(tmp_path), size=16, min_scale=0.3)
    assert item(config.build().train).shape == (3, 16, 16)
    with pytest.raises(
        UnreadableFile, match=rf"small.png: it is {width} x {height}, smaller than the 16 asked for"
    ):
        item(ImageDataConfig(path=str(tmp_path), size=16, on_small="skip").full())


def test_a_picture_of_just_the_size_asked_for_is_not_small(tmp_path):
    gradient(16, 16).save(tmp_path / "a.png")
    source = ImageDataConfig(path=str(tmp_path), size=16, on_small="skip").full()
    assert np.array_equal(Image.from_floats(item(source)).pixels, np.asarray(gradient(16, 16)))


def test_a_broken_file_is_unreadable_with_its_name_and_the_others_are_not(tmp_path):
    fill(tmp_path, 2)
    (tmp_path / "0000.png").write_bytes(b"")
    source = ImageDataConfig(path=str(tmp_path), size=8).full()
    with pytest.raises(UnreadableFile, match="0000.png: the file is empty"):
        source.item(0, PLAIN)
    assert item(source, 1).shape == (3, 8, 8)


def test_a_source_can_be_sent_to_a_worker(tmp_path):
    source = ImageDataConfig(path=str(fill(tmp_path / "p", 3)), size=8).build().train
    copy = pickle.loads(pickle.dumps(source))
    assert names(copy) == names(source)
    assert np.array_equal(item(copy), item(source))


def test_a_source_knows_how_many_of_its_pictures_have_a_caption(tmp_path):
    fill(tmp_path, 3)
    (tmp_path / "0001.txt").write_text("a ramp")
    assert ImageDataConfig(path=str(tmp_path)).full().captioned == 1


def test_a_caption_can_be_had_without_opening_its_picture(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(b"no picture at all")
    (tmp_path / "b.txt").write_text("a ramp")
    source = ImageDataConfig(path=str(tmp_path)).full()
    assert [source.caption(i) for i in range(2)] == ["", "a ramp"]


# ---- what is held out


def test_a_growing_folder_moves_no_file_from_one_side_to_the_other():
    few = [f"dogs/{number}.jpg" for number in range(0, 3000, 3)]
    many = sorted(
        [f"dogs/{number}.jpg" for number in range(3000)]
        + [f"cats/{number}.jpg" for number in range(500)]
    )
    _, before = split_names(few, 0.05)
    _, after = split_names(many, 0.05)
    was, now = {few[i] for i in before}, {many[i] for i in after}
    assert was == now & set(few)
    assert 0.03 < len(now) / len(many) < 0.07


def test_the_split_depends_on_names_alone_and_never_changes():
    """These are what the very first version held out; another answer would move files in
    everybody's folders."""
    listed = [f"{number}.png" for number in range(100)]
    _, held_out = split_names(listed, 0.05)
    assert [listed[i] for i in held_out] == ["25.png", "40.png", "41.png", "63.png"]


def test_accents_spelt_in_two_ways_are_one_name():
    share = 0.5
    composed = [f"caf\u00e9-{number}.png" for number in range(50)]
    decomposed = [f"cafe\u0301-{number}.png" for number in range(50)]
    assert split_names(composed, share) == split_names(decomposed, share)


def test_names_that_are_no_utf8_can_be_split_too():
    train, validation = split_names(["\udcff.png", "b.png"], 0.5)
    assert sorted(train + validation) == [0, 1]


@pytest.mark.parametrize("share", [0.0001, 0.9999])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_neither_side_of_a_small_folder_is_empty(count, share):
    listed = [f"{number}.png" for number in range(count)]
    train, validation = split_names(listed, share)
    assert train and validation and sorted(train + validation) == list(range(count))
    assert min(len(train), len(validation)) == 1
    assert split_names(listed[::-1], share)[1] == sorted(count - 1 - i for i in validation), (
        "the order does not matter"
    )


@pytest.mark.parametrize(("count", "share"), [(1, 0.05), (5, 0)])
def test_a_single_file_or_a_share_of_nothing_is_validated_on_itself_unaugmented(
    tmp_path, count, share
):
    fill(tmp_path, count, width=30, height=10)
    split = ImageDataConfig(path=str(tmp_path), size=8, val_fraction=share).build()
    assert names(split.train) == names(split.validation) and len(split.train) == count
    assert np.array_equal(item(split.validation, seed=1), item(split.validation, seed=2))
    assert not np.array_equal(item(split.train, seed=1), item(split.train, seed=2))


def test_the_two_sides_share_no_file_and_leave_none_out(tmp_path):
    fill(tmp_path, 60)
    split = ImageDataConfig(path=str(tmp_path), val_fraction=0.2).build()
    assert not set(names(split.train)) & set(names(split.validation))
    full = ImageDataConfig(path=str(tmp_path)).full()
    assert sorted(names(split.train) + names(split.validation)) == names(full)


# ---- what lies in a folder


def test_a_folder_is_searched_to_the_bottom_and_hidden_files_are_not_seen(tmp_path):
    for name in (
        "b.PNG",
        "a/x.Jpg",
        "a/b/c/y.webp",
        ".DS_Store",
        "._b.PNG",
        ".cache/z.png",
        "notes.md",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert list_files(tmp_path) == ["a/b/c/y.webp", "a/x.Jpg", "b.PNG", "notes.md"]
    assert names(ImageDataConfig(path=str(tmp_path)).full()) == ["a/b/c/y.webp", "a/x.Jpg", "b.PNG"]


def test_links_that_go_round_end(tmp_path):
    fill(tmp_path / "real" / "deep", 1)
    (tmp_path / "real" / "deep" / "up").symlink_to(tmp_path)
    for name in ("again", "zagain"):
        (tmp_path / name).symlink_to(tmp_path / "real")
    assert list_files(tmp_path) == ["real/deep/0000.png"]


def test_a_linked_folder_outside_is_followed(tmp_path):
    fill(tmp_path / "elsewhere", 1)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")
    assert list_files(tmp_path / "here") == ["link/0000.png"]


def test_a_link_to_nothing_is_listed_and_unreadable_and_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "lost.png").symlink_to(tmp_path / "gone.png")
    os.mkfifo(tmp_path / "pipe.png")
    source = ImageDataConfig(path=str(tmp_path)).full()
    assert names(source) == ["lost.png"]
    with pytest.raises(UnreadableFile, match="lost.png: the file cannot be opened"):
        item(source)


def test_one_picture_by_itself_is_a_source_too(tmp_path):
    fill(tmp_path, 3)
    (tmp_path / "0001.txt").write_text("a ramp")
    source = ImageDataConfig(path=str(tmp_path / "0001.png"), size=8).full()
    assert names(source) == ["0001.png"]
    assert source.item(0, PLAIN).caption == "a ramp"


def run_invalid(path, words: str):
    for open_it in (
        ImageDataConfig(path=str(path)).build,
        ImageDataConfig(path=str(path)).full,
        lambda: inspect_folder(path),
    ):
        with pytest.raises(UserError, match=words):
            open_it()


def test_a_missing_folder_is_refused(tmp_path):
    run_invalid(tmp_path / "nowhere", r"There is nothing at .*nowhere .*give a folder of pictures")


def test_an_empty_folder_is_refused_with_what_is_looked_for(tmp_path):
    run_invalid(tmp_path, r"holds no pictures: files ending in \.png, \.jpg, .*the folder is empty")


def test_a_folder_of_other_things_is_refused_with_what_there_is(tmp_path):
    for name in ("a.mp4", "b.mp4", "README"):
        (tmp_path / name).touch()
    run_invalid(tmp_path, r"there are only 2 \.mp4, 1 without ending")


def test_a_file_of_another_type_is_refused(tmp_path):
    (tmp_path / "photos.zip").touch()
    run_invalid(
        tmp_path / "photos.zip", r"photos.zip is a file, but not one of the pictures .*unpacked"
    )


@pytest.mark.parametrize(
    "setting",
    [{"size": 0}, {"min_scale": 0.0}, {"min_scale": 1.5}, {"val_fraction": 1.0}, {"toys": 0}],
)
def test_a_setting_that_cannot_be_is_refused(setting):
    with pytest.raises(ValueError, match=r"size|min_scale|val_fraction|toys"):
        ImageDataConfig(**setting)


@pytest.mark.parametrize("shapes", [0, 4])
def test_toys_of_no_shape_or_of_too_many_are_refused(shapes):
    with pytest.raises(ValueError, match=rf"1, 2 or 3 shapes, but toy_shapes is {shapes}"):
        ImageDataConfig(synthetic_max_shapes=shapes)
