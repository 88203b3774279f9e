"""Tests of tables: parquet files, and datasets in the format of Hugging Face's `save_to_disk`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest

from tessera.data.dataset import read_item
from tessera.data.errors import UnreadableFile
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.media import Audio
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.mesh.synthetic import generate_object
from tessera.modalities.video.dataset import VideoDataConfig
from tessera.run.errors import UserError
from tests.cli_runner import run_invalid, tessera
from tests.videos import grey_frames, write_video

STORED = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
"""How Hugging Face stores images, audio and videos."""


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (8, 8), (value, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def build_table(features: dict[str, Any], **columns: Any) -> pyarrow.Table:
    """Build a table with the features in its schema, where Hugging Face writes them."""
    table = pyarrow.table(columns)
    stored = json.dumps({"info": {"features": features}})
    return table.replace_schema_metadata({"huggingface": stored})


def image_table(count: int = 8, **columns: Any) -> pyarrow.Table:
    cells = [{"bytes": png(10 * i), "path": f"{i}.png"} for i in range(count)]
    features = {
        "image": {"_type": "Image"},
        "text": {"_type": "Value", "dtype": "string"},
        "label": {"_type": "ClassLabel", "names": ["cat", "guinea_pig"]},
    }
    columns = columns or {"text": [f"photo {i}" for i in range(count)]}
    return build_table(features, image=pyarrow.array(cells, STORED), **columns)


def write_parquet(path: Path, table: pyarrow.Table, rows: int = 3) -> Path:
    pyarrow.parquet.write_table(table, path, row_group_size=rows)
    return path


def save_to_disk(folder: Path, *tables: pyarrow.Table) -> Path:
    """Write what `datasets.Dataset.save_to_disk` writes: streams of batches and two JSON files."""
    folder.mkdir(parents=True)
    for number, table in enumerate(tables):
        path = folder / f"data-{number:05d}-of-{len(tables):05d}.arrow"
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text("{}")
    return folder


def reds(config: ImageDataConfig) -> list[float]:
    """Return the red of each image, which identifies it."""
    dataset = config.full()
    items = (read_item(dataset, i, np.random.default_rng(0)) for i in range(len(dataset)))
    return [round((float(item.pixels[0].mean()) + 1) * 127.5) for item in items]


@pytest.fixture(params=["parquet", "folder of parquet files", "save_to_disk"])
def path(request, tmp_path) -> str:
    """Eight images with captions, in one table or two."""
    table = image_table()
    if request.param == "parquet":
        return str(write_parquet(tmp_path / "a.parquet", table))
    if request.param == "save_to_disk":
        return str(save_to_disk(tmp_path / "saved", table.slice(0, 5), table.slice(5)))
    write_parquet(tmp_path / "a-0.parquet", table.slice(0, 5))
    write_parquet(tmp_path / "a-1.parquet", table.slice(5))
    return str(tmp_path)


def test_images_and_captions_are_found_by_their_features(path):
    config = ImageDataConfig(path=path, size=8, val_fraction=0.25)
    assert reds(config) == [10 * i for i in range(8)]
    dataset = config.full()
    assert [dataset.caption(i) for i in (0, 7)] == ["photo 0", "photo 7"]
    assert dataset.classes() == []
    split = config.build()
    names = {*split.train.names, *split.validation.names}
    assert len(names) == 8 and len(split.validation) >= 1
    assert len({dataset.signature(i) for i in range(8)}) >= 5  # rows, and files


def test_check_and_train_read_tables(path, tmp_path):
    result = tessera("check", path)
    assert result.code == 0 and "8 images, 8 usable" in result.text
    assert "captions: 8 of 8 usable images (8 in columns)" in result.text
    command = ("train", "images-vqgan", "--preset", "tiny", "--data", path, "--batch-size", "4")
    for workers, steps in ((0, 1), (1, 2)):
        out = ("--out", tmp_path / "run", "--steps", str(steps), "--num-workers", str(workers))
        assert tessera(*command, *out).code == 0


def test_shards_of_a_table_have_its_examples(path, tmp_path):
    assert tessera("pack", path, "--out", tmp_path / "shards").code == 0
    table, shards = (ImageDataConfig(path=str(one), size=8) for one in (path, tmp_path / "shards"))
    assert reds(table) == reds(shards)
    captions = [[one.full().caption(i) for i in range(8)] for one in (table, shards)]
    assert captions[0] == captions[1]


def test_class_labels_are_captions_and_classes(tmp_path):
    table = image_table(3, label=[0, 1, -1], id=["a", "b", "c"], url=["x", "y", "z"])
    path = write_parquet(tmp_path / "a.parquet", table)
    dataset = ImageDataConfig(path=str(path)).full()
    assert [dataset.caption(i) for i in range(3)] == ["cat", "guinea pig", ""]
    assert dataset.classes() == ["cat", "guinea_pig"]


def test_named_columns_are_used(tmp_path):
    cells = pyarrow.array([png(200), png(201)], pyarrow.binary())
    columns = {"text": ["x", "y"], "other": cells, "titles": [["a", "b"], []]}
    path = write_parquet(tmp_path / "a.parquet", image_table(2, **columns))
    config = ImageDataConfig(path=str(path), size=8, columns=("other", "titles", "text"))
    assert reds(config) == [200, 201]
    assert config.full().all_captions(0) == ["a", "b", "x"]
    result = tessera("check", path, "--columns", "other", "titles")
    assert "--data.columns other titles" in result.text


def test_audio_videos_and_meshes_are_read_from_tables(tmp_path):
    Audio(np.zeros((1, 8000), np.float32), 16_000).write(tmp_path / "a.wav")
    write_video(tmp_path / "a.mp4", grey_frames(6))
    generate_object(0, 0).mesh.save(tmp_path / "a.glb")
    cases = {
        "Audio": ("a.wav", AudioDataConfig(seconds=0.25)),
        "Video": ("a.mp4", VideoDataConfig(size=8, frames=3)),
        "": ("a.glb", MeshDataConfig()),
    }
    for feature, (name, config) in cases.items():
        content = (tmp_path / name).read_bytes()
        cells = pyarrow.array([{"bytes": content, "path": None}], STORED)
        table = build_table({"media": {"_type": feature}}, media=cells)
        path = write_parquet(tmp_path / f"{feature}.parquet", table)
        direct, stored = (
            type(config)(**vars(config) | {"path": str(one)}).full()
            for one in (tmp_path / name, path)
        )
        left, right = (read_item(one, 0, np.random.default_rng(0)) for one in (direct, stored))
        for one, other in zip(vars(left).values(), vars(right).values(), strict=True):
            np.testing.assert_array_equal(one, other)
        assert tessera("check", path).code == 0


# ---- bad tables


def test_cells_without_an_image_cost_one_example_each(tmp_path):
    (tmp_path / "secret.png").write_bytes(png(99))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/inside.png").write_bytes(png(50))
    cells = [
        {"bytes": png(10), "path": None},
        None,
        {"bytes": b"no image", "path": None},
        {"bytes": None, "path": "../secret.png"},
        {"bytes": None, "path": str(tmp_path / "secret.png")},
        {"bytes": None, "path": "inside.png"},
    ]
    table = pyarrow.table({"image": pyarrow.array(cells, STORED)})
    path = write_parquet(tmp_path / "data/a.parquet", table)
    dataset = ImageDataConfig(path=str(path), size=8).full()
    reasons = []
    for index in (1, 2, 3, 4):
        with pytest.raises(UnreadableFile) as raised:
            read_item(dataset, index, np.random.default_rng(0))
        reasons.append(str(raised.value))
    assert "the cell is empty" in reasons[0] and "a.parquet/row 1" in reasons[0]
    assert "outside the folder" in reasons[2] and "outside the folder" in reasons[3]
    result = tessera("check", path)
    assert result.code == 0 and "6 images, 2 usable" in result.text


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"], "number": [1]}, "has 0 columns that may hold images"),
        ({"a": [b"x"], "b": [b"y"]}, "has 2 columns that may hold images"),
        ({"text": pyarrow.array([], pyarrow.string())}, "has 0 columns"),
    ],
)
def test_a_table_without_a_usable_column_is_described(columns, message, tmp_path):
    path = write_parquet(tmp_path / "a.parquet", pyarrow.table(columns))
    found = run_invalid("train", "images-vqgan", "--data", path)
    assert message in found and "--data.columns" in found


def test_columns_that_do_not_exist_or_hold_no_files_are_named(tmp_path):
    path = str(write_parquet(tmp_path / "a.parquet", image_table()))
    for columns, message in ((("photo",), "no column 'photo'"), (("text",), "has no files")):
        with pytest.raises(UserError, match=message):
            ImageDataConfig(path=path, columns=columns).full()


def test_audio_in_a_table_is_no_image(tmp_path):
    cells = pyarrow.array([{"bytes": b"", "path": None}], STORED)
    table = build_table({"audio": {"_type": "Audio"}}, audio=cells)
    path = write_parquet(tmp_path / "a.parquet", table)
    with pytest.raises(UserError, match=r"its columns are audio \(Audio\)"):
        ImageDataConfig(path=str(path)).full()


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_damaged_table_is_rejected_and_good_ones_beside_it_are_used(name, tmp_path):
    (tmp_path / name).write_bytes(b"PAR1 and no table" * 20)
    assert "cannot be read as a table" in run_invalid(
        "train", "images-vqgan", "--data", tmp_path / name
    )
    write_parquet(tmp_path / "b.parquet", image_table(3))
    dataset = ImageDataConfig(path=str(tmp_path), size=8).full()
    assert len(dataset) == 3 and "is left out" in dataset.notices[0]


def test_a_dataset_of_several_splits_needs_the_name_of_one(tmp_path):
    save_to_disk(tmp_path / "train", image_table(2))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    message = run_invalid("train", "images-vqgan", "--data", tmp_path)
    assert "several splits (train)" in message and str(tmp_path / "train") in message
