"""Tests of folders of images: preprocessing, augmentation, the split, and errors."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from tessera.data.dataset import FileDataset
from tessera.data.discovery import find_files, list_files
from tessera.data.errors import UnreadableFile
from tessera.data.split import split_names
from tessera.modalities.image.dataset import ImageDataConfig, ImageFolderDataset
from tessera.modalities.image.inspect import inspect_folder
from tessera.modalities.image.media import SUFFIXES, Image
from tessera.run.errors import UserError

RNG = np.random.default_rng(0)


def gradient(width: int, height: int) -> PIL.Image.Image:
    """Return an image whose red rises to the right and whose green rises downwards."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)[None, :]
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return PIL.Image.fromarray(pixels)


def write_images(folder: Path, count: int, width: int = 12, height: int = 12) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        gradient(width, height).save(folder / f"{number:04d}.png")
    return folder


def names(dataset: FileDataset) -> list[str]:
    return [dataset.name(i) for i in range(len(dataset))]


def load(dataset: FileDataset, index: int = 0, seed: int = 0) -> np.ndarray:
    return dataset.item(index, np.random.default_rng(seed)).pixels


# ---- preprocessing and augmentation


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "P", "I;16"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_every_mode_is_read_with_the_requested_channels(mode, channels, tmp_path):
    grey = PIL.Image.new("L", (20, 20), 51)
    sixteen_bit = PIL.Image.fromarray(np.full((20, 20), 51 * 257, np.uint16))
    image = sixteen_bit if mode == "I;16" else grey.convert(mode)
    image.save(tmp_path / "a.png")
    dataset = ImageDataConfig(path=str(tmp_path), size=16, channels=channels).full()
    pixels = Image.from_floats(load(dataset)).pixels
    assert pixels.shape == (16, 16, channels)
    assert (pixels[..., :3] == 51).all()
    assert channels != 4 or (pixels[..., 3] == 255).all()


def test_alpha_is_kept_or_composited_over_white(tmp_path):
    pixels = np.zeros((16, 16, 4), np.uint8)
    pixels[:8] = (200, 100, 0, 255)  # below, the colour of clear pixels is black
    PIL.Image.fromarray(pixels).save(tmp_path / "a.png")
    PIL.Image.fromarray(pixels).quantize(4).save(tmp_path / "b.png")  # a palette with alpha
    for index in (0, 1):
        with_alpha, without = (
            Image.from_floats(
                load(ImageDataConfig(path=str(tmp_path), size=16, channels=c).full(), index)
            ).pixels
            for c in (4, 3)
        )
        assert (with_alpha[:8] == (200, 100, 0, 255)).all()
        assert (with_alpha[8:] == (255, 255, 255, 0)).all()
        assert (without[8:] == 255).all()


def test_synthetic_images_have_the_requested_channels():
    colour, grey = (ImageDataConfig(size=16, channels=c).full().item(0, RNG) for c in (3, 1))
    expected = PIL.Image.fromarray(Image.from_floats(colour.pixels).pixels).convert("L")
    assert np.array_equal(Image.from_floats(grey.pixels).pixels[..., 0], np.array(expected))
    grey = ImageDataConfig(channels=1).sample_metrics()
    assert not any(metric.uses_prompts for metric in grey)  # prompts name colours


def test_image_becomes_a_square_in_the_range_of_models(tmp_path):
    gradient(90, 60).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("two ramps")
    dataset = ImageDataConfig(path=str(tmp_path), size=32).full()
    example = dataset.item(0, RNG)
    assert example.pixels.shape == (3, 32, 32) and example.pixels.dtype == np.float32
    assert example.pixels.min() >= -1 and example.pixels.max() <= 1
    assert example.caption == "two ramps"


def test_batch_consists_of_tensors_that_can_be_moved(tmp_path):
    dataset = ImageDataConfig(path=str(write_images(tmp_path / "images", 3)), size=8).full()
    batch = dataset.collate([dataset.item(i, RNG) for i in range(3)])
    assert batch.pixels.shape == (3, 3, 8, 8) and batch.pixels.dtype == torch.float32
    assert batch.captions == ["", "", ""]
    moved = batch.to("meta")
    assert moved.pixels.device.type == "meta" and moved.captions == batch.captions


def test_centre_crop_covers_the_short_side(tmp_path):
    gradient(96, 32).save(tmp_path / "wide.png")
    pixels = load(ImageDataConfig(path=str(tmp_path), size=32, crop="centre").build().train)
    across, down = (pixels[0].mean(0) + 1) / 2, (pixels[1].mean(1) + 1) / 2
    assert across[0] == pytest.approx(1 / 3, abs=0.02)
    assert across[-1] == pytest.approx(2 / 3, abs=0.02)
    assert down[0] == pytest.approx(0, abs=0.02) and down[-1] == pytest.approx(1, abs=0.02)


def test_random_crop_moves_along_the_long_side_only(tmp_path):
    gradient(96, 32).save(tmp_path / "wide.png")
    dataset = ImageDataConfig(path=str(tmp_path), size=32).build().train
    images = [load(dataset, seed=seed) for seed in range(20)]
    lefts = [(pixels[0, :, 0].mean() + 1) / 2 for pixels in images]
    assert max(lefts) - min(lefts) > 0.3
    assert all(abs(pixels[1] - images[0][1]).max() < 0.02 for pixels in images)


def test_min_scale_allows_smaller_crops(tmp_path):
    gradient(64, 64).save(tmp_path / "a.png")
    dataset = ImageDataConfig(path=str(tmp_path), size=32, min_scale=0.5).build().train
    images = [load(dataset, 0, seed) for seed in range(30)]
    spans = [(pixels[0, :, -1].mean() - pixels[0, :, 0].mean()) / 2 for pixels in images]
    assert 0.45 < min(spans) < 0.6 and 0.85 < max(spans) <= 1


def test_flip_mirrors_half_of_the_images(tmp_path):
    gradient(32, 32).save(tmp_path / "a.png")
    flipping = ImageDataConfig(path=str(tmp_path), size=32, flip=True).build().train
    images = [load(flipping, seed=seed) for seed in range(60)]
    mirrored = sum(pixels[0, 0, 0] > pixels[0, 0, -1] for pixels in images)
    assert 15 < mirrored < 45
    dataset = ImageDataConfig(path=str(tmp_path), size=32).build().train
    assert not any(load(dataset, seed=seed)[0, 0, 0] > 0 for seed in range(20))


def test_augmentation_depends_on_the_generator_of_the_example_only(tmp_path):
    gradient(96, 64).save(tmp_path / "a.png")
    dataset = ImageDataConfig(path=str(tmp_path), size=16, flip=True, min_scale=0.6).build().train
    np.random.seed(1)
    first = load(dataset, seed=3)
    np.random.seed(2)
    assert np.array_equal(first, load(dataset, seed=3))
    assert not np.array_equal(first, load(dataset, seed=4))


def test_all_settings_draw_the_same_number_of_random_numbers(tmp_path):
    gradient(96, 64).save(tmp_path / "a.png")
    following = []
    for config in (
        ImageDataConfig(path=str(tmp_path)),
        ImageDataConfig(path=str(tmp_path), crop="centre", flip=True, min_scale=0.5),
    ):
        rng = np.random.default_rng(0)
        config.build().train.item(0, rng)
        following.append(rng.random())
    assert following[0] == following[1]


def test_held_out_images_are_not_augmented(tmp_path):
    folder = str(write_images(tmp_path / "images", 40, width=30, height=20))
    config = ImageDataConfig(path=folder, size=16, flip=True, min_scale=0.5, val_fraction=0.3)
    centre = load(ImageDataConfig(path=folder, size=16, crop="centre").full())
    for dataset in (config.build().validation, config.full()):
        assert np.array_equal(load(dataset, seed=1), load(dataset, seed=2))
        assert np.array_equal(load(dataset), centre)


def test_downscaling_is_antialiased(tmp_path):
    board = (np.indices((256, 256)).sum(0) % 2 * 255).astype(np.uint8)
    PIL.Image.fromarray(board).save(tmp_path / "checks.png")
    assert abs(load(ImageDataConfig(path=str(tmp_path), size=32).full())).max() < 0.05


def test_large_jpeg_gives_the_same_square_as_a_png(tmp_path):
    gradient(1200, 900).save(tmp_path / "a.jpg", quality=95)
    gradient(1200, 900).save(tmp_path / "b.png")
    dataset = ImageDataConfig(path=str(tmp_path), size=64).full()
    assert abs(load(dataset, 0) - load(dataset, 1)).mean() < 0.02


@pytest.mark.parametrize(("width", "height"), [(5, 7), (1, 1), (1, 300)])
def test_small_images_are_enlarged_or_skipped(tmp_path, width, height):
    gradient(width, height).save(tmp_path / "small.png")
    config = ImageDataConfig(path=str(tmp_path), size=16, min_scale=0.3)
    assert load(config.build().train).shape == (3, 16, 16)
    message = rf"small.png: the image is {width} x {height}, smaller than the requested 16"
    with pytest.raises(UnreadableFile, match=message):
        load(ImageDataConfig(path=str(tmp_path), size=16, on_small="skip").full())


def test_image_of_exactly_the_requested_size_is_not_skipped(tmp_path):
    gradient(16, 16).save(tmp_path / "a.png")
    dataset = ImageDataConfig(path=str(tmp_path), size=16, on_small="skip").full()
    assert np.array_equal(Image.from_floats(load(dataset)).pixels, np.asarray(gradient(16, 16)))


def test_unreadable_file_is_reported_by_name_and_others_are_read(tmp_path):
    write_images(tmp_path, 2)
    (tmp_path / "0000.png").write_bytes(b"")
    dataset = ImageDataConfig(path=str(tmp_path), size=8).full()
    with pytest.raises(UnreadableFile, match="0000.png: the file is empty"):
        dataset.item(0, RNG)
    assert load(dataset, 1).shape == (3, 8, 8)


def test_dataset_can_be_pickled_for_a_worker(tmp_path):
    dataset = ImageDataConfig(path=str(write_images(tmp_path / "images", 3)), size=8).build().train
    copy = pickle.loads(pickle.dumps(dataset))
    assert names(copy) == names(dataset)
    assert np.array_equal(load(copy), load(dataset))


# ---- captions


def test_captions_are_counted_by_source(tmp_path):
    write_images(tmp_path, 3)
    (tmp_path / "0001.txt").write_text("a ramp")
    dataset = ImageDataConfig(path=str(tmp_path)).full()
    assert dataset.files.count_captions() == {"text files": 1}


def test_caption_is_read_without_opening_the_image(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(b"not an image")
    (tmp_path / "b.txt").write_text("a ramp")
    dataset = ImageDataConfig(path=str(tmp_path)).full()
    assert [dataset.caption(i) for i in range(2)] == ["", "a ramp"]


def test_without_captions_no_caption_file_is_opened(tmp_path):
    write_images(tmp_path / "cats", 3)
    write_images(tmp_path / "dogs", 3)
    (tmp_path / "cats" / "0000.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "metadata.jsonl").write_text("not JSON")
    config = ImageDataConfig(path=str(tmp_path), size=8, val_fraction=0.3)
    split = config.build(captions=False)
    for dataset in (split.train, split.validation, config.full(captions=False)):
        assert all(dataset.item(i, RNG).caption == "" for i in range(len(dataset)))
        assert dataset.classes() == [] and dataset.all_captions(0) == []
    with pytest.raises(UserError, match="metadata.jsonl, line 1: is not JSON"):
        config.build()


def test_captions_of_a_dataset_can_be_dropped(tmp_path):
    write_images(tmp_path, 2)
    (tmp_path / "0000.txt").write_bytes(b"\xff\xfe\x00")
    dataset = ImageDataConfig(path=str(tmp_path), size=8).full()
    with pytest.raises(UnreadableFile, match="0000.txt: the caption cannot be read"):
        dataset.item(0, RNG)
    without = dataset.without_captions()
    assert names(without) == names(dataset) and without.item(0, RNG).caption == ""
    assert without.signature(0) == dataset.signature(0)


def test_selected_files_keep_their_captions(tmp_path):
    write_images(tmp_path, 4)
    (tmp_path / "0002.txt").write_text("a ramp")
    found = find_files(tmp_path, SUFFIXES, "images")
    dataset = ImageFolderDataset(found, ImageDataConfig(size=8))
    selected = dataset.with_captions().select([3, 2])
    assert names(selected) == ["0003.png", "0002.png"]
    assert [selected.caption(i) for i in range(2)] == ["", "a ramp"]
    assert dataset.caption(2) == ""


# ---- images in memory


def codes_of(example) -> bytes:
    """Return the pixels as bytes: equal inputs have equal codes."""
    assert example.pixels.dtype == np.float32 and example.caption == ""
    return example.pixels.tobytes()


@pytest.mark.parametrize(("width", "height"), [(16, 16), (90, 60), (40, 70), (5, 9)])
def test_image_in_memory_is_preprocessed_like_its_file(tmp_path, width, height):
    path = tmp_path / "a.png"
    gradient(width, height).save(path)
    config = ImageDataConfig(path="unused", size=16, flip=True, min_scale=0.5)
    expected = codes_of(config.example_from_file(str(path)))
    assert codes_of(config.example_from_media(Image.load(path))) == expected
    assert codes_of(config.example_from_media(np.asarray(gradient(width, height)))) == expected
    assert expected == load(ImageDataConfig(path=str(path), size=16).full()).tobytes()


@pytest.mark.parametrize("media", [None, 3, [1, 2], b"png"])
def test_other_types_than_images_and_arrays_are_rejected(media):
    message = rf"Expected an Image, a path, .* or an array .*, got a {type(media).__name__}\."
    with pytest.raises(UserError, match=message):
        ImageDataConfig().example_from_media(media)


@pytest.mark.parametrize("array", [np.zeros((4, 4, 3), int), np.zeros((5, 4, 5), np.uint8)])
def test_arrays_of_another_shape_or_type_are_rejected(array):
    with pytest.raises(ValueError, match=r"expects uint8 pixels of shape .*, got .*from_floats"):
        ImageDataConfig().example_from_media(array)


def test_folder_of_several_images_is_not_a_single_file(tmp_path):
    write_images(tmp_path, 3)
    with pytest.raises(UserError, match="has 3 examples, expected a single file"):
        ImageDataConfig().example_from_file(str(tmp_path))


# ---- the split


def test_growing_folder_moves_no_file_between_the_sets():
    few = [f"dogs/{number}.jpg" for number in range(0, 3000, 3)]
    many = sorted(
        [f"dogs/{number}.jpg" for number in range(3000)]
        + [f"cats/{number}.jpg" for number in range(500)]
    )
    _, before = split_names(few, 0.05)
    _, after = split_names(many, 0.05)
    held_out_before, held_out_after = {few[i] for i in before}, {many[i] for i in after}
    assert held_out_before == held_out_after & set(few)
    assert 0.03 < len(held_out_after) / len(many) < 0.07


def test_split_depends_on_names_only_and_never_changes():
    """These were held out by the first version; a change would move files of existing folders."""
    listed = [f"{number}.png" for number in range(100)]
    _, held_out = split_names(listed, 0.05)
    assert [listed[i] for i in held_out] == ["25.png", "40.png", "41.png", "63.png"]


def test_both_unicode_forms_of_an_accent_are_the_same_name():
    composed = [f"caf\u00e9-{number}.png" for number in range(50)]
    decomposed = [f"cafe\u0301-{number}.png" for number in range(50)]
    assert split_names(composed, 0.5) == split_names(decomposed, 0.5)


def test_names_that_are_not_utf8_can_be_split():
    train, validation = split_names(["\udcff.png", "b.png"], 0.5)
    assert sorted(train + validation) == [0, 1]


@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_neither_set_of_a_small_folder_is_empty(count, fraction):
    listed = [f"{number}.png" for number in range(count)]
    train, validation = split_names(listed, fraction)
    assert train and validation and sorted(train + validation) == list(range(count))
    assert min(len(train), len(validation)) == 1
    reversed_validation = split_names(listed[::-1], fraction)[1]
    expected = sorted(count - 1 - i for i in validation)
    assert list(reversed_validation) == expected, "in any order"


@pytest.mark.parametrize(("count", "fraction"), [(1, 0.05), (5, 0)])
def test_single_file_or_zero_fraction_validates_on_the_training_set(tmp_path, count, fraction):
    write_images(tmp_path, count, width=30, height=10)
    split = ImageDataConfig(path=str(tmp_path), size=8, val_fraction=fraction).build()
    assert names(split.train) == names(split.validation) and len(split.train) == count
    assert np.array_equal(load(split.validation, seed=1), load(split.validation, seed=2))
    assert not np.array_equal(load(split.train, seed=1), load(split.train, seed=2))


def test_split_is_disjoint_and_complete(tmp_path):
    write_images(tmp_path, 60)
    split = ImageDataConfig(path=str(tmp_path), val_fraction=0.2).build()
    assert not set(names(split.train)) & set(names(split.validation))
    full = ImageDataConfig(path=str(tmp_path)).full()
    assert sorted(names(split.train) + names(split.validation)) == names(full)


# ---- discovery of files


def test_subfolders_are_searched_and_hidden_files_are_ignored(tmp_path):
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
    images = ["a/b/c/y.webp", "a/x.Jpg", "b.PNG"]
    assert names(ImageDataConfig(path=str(tmp_path)).full()) == images


def test_cyclic_links_are_followed_once(tmp_path):
    write_images(tmp_path / "real" / "deep", 1)
    (tmp_path / "real" / "deep" / "up").symlink_to(tmp_path)
    for name in ("again", "zagain"):
        (tmp_path / name).symlink_to(tmp_path / "real")
    assert list_files(tmp_path) == ["real/deep/0000.png"]


def test_link_to_a_folder_outside_is_followed(tmp_path):
    write_images(tmp_path / "elsewhere", 1)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")
    assert list_files(tmp_path / "here") == ["link/0000.png"]


def test_dangling_link_is_listed_as_unreadable_and_pipes_are_ignored(tmp_path):
    (tmp_path / "lost.png").symlink_to(tmp_path / "gone.png")
    os.mkfifo(tmp_path / "pipe.png")
    dataset = ImageDataConfig(path=str(tmp_path)).full()
    assert names(dataset) == ["lost.png"]
    with pytest.raises(UnreadableFile, match="lost.png: the file cannot be opened"):
        load(dataset)


def test_single_image_is_a_dataset(tmp_path):
    write_images(tmp_path, 3)
    (tmp_path / "0001.txt").write_text("a ramp")
    dataset = ImageDataConfig(path=str(tmp_path / "0001.png"), size=8).full()
    assert names(dataset) == ["0001.png"]
    assert dataset.item(0, RNG).caption == "a ramp"


def assert_rejected(path: Path, message: str) -> None:
    for open_folder in (
        ImageDataConfig(path=str(path)).build,
        ImageDataConfig(path=str(path)).full,
        lambda: inspect_folder(path),
    ):
        with pytest.raises(UserError, match=message):
            open_folder()


def test_missing_folder_is_rejected(tmp_path):
    assert_rejected(tmp_path / "nowhere", r"nowhere does not exist .*give a folder of images")


def test_empty_folder_is_rejected_with_the_expected_suffixes(tmp_path):
    message = r"has no images: expected files ending in \.png, \.jpg, .*found no files at all"
    assert_rejected(tmp_path, message)


def test_folder_of_other_files_is_rejected_with_what_was_found(tmp_path):
    for name in ("a.mp4", "b.mp4", "README"):
        (tmp_path / name).touch()
    assert_rejected(tmp_path, r"has no images: .*found only 2 \.mp4, 1 without suffix")


def test_file_of_another_kind_is_rejected(tmp_path):
    (tmp_path / "photos.zip").touch()
    message = r"photos.zip is a file of another kind than the images .*unpack other"
    assert_rejected(tmp_path / "photos.zip", message)


@pytest.mark.parametrize(
    "setting",
    [
        {"size": 0},
        {"min_scale": 0.0},
        {"min_scale": 1.5},
        {"val_fraction": 1.0},
        {"num_synthetic": 0},
    ],
)
def test_invalid_setting_is_rejected_by_name(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"{name} must be"):
        ImageDataConfig(**setting)


@pytest.mark.parametrize("shapes", [0, 4])
def test_number_of_synthetic_shapes_must_be_one_to_three(shapes):
    with pytest.raises(ValueError, match=f"synthetic_max_shapes must be 1, 2 or 3, got {shapes}"):
        ImageDataConfig(synthetic_max_shapes=shapes)
