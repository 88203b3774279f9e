"""Tests of groups of files that are held out together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tessera.data.collection import FolderFiles
from tessera.data.split import find_groupings, group_names, report_groups, split_names
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.run.errors import UserError
from tests.cli_runner import tessera
from tests.data.test_shards import png, write_tar
from tests.data.test_tables import image_table, write_parquet

SPEAKERS = ("anna", "ben", "carl", "dora")
NAMES = [f"{speaker}/{speaker}-{number}.png" for speaker in SPEAKERS for number in range(5)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write five images of each of four speakers, with a column of the metadata."""
    lines = []
    for number, name in enumerate(NAMES):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(np.full((16, 16, 3), number, np.uint8)).save(path)
        lines.append({"file_name": name, "text": name, "sentence": str(number % 5)})
    metadata = tmp_path / "data/metadata.jsonl"
    metadata.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return tmp_path / "data"


def files_of(folder: Path, names: Sequence[str] = NAMES) -> FolderFiles:
    return FolderFiles(folder, list(names), ["metadata.jsonl"])


def groups_of(names: Sequence[str], group_by: str, folder: Path) -> set[str]:
    by_name = dict(zip(NAMES, group_names(files_of(folder), group_by), strict=True))
    return {by_name[name] for name in names}


@pytest.mark.parametrize(
    ("group_by", "count"), [("folder", 4), ("prefix", 4), ("sentence", 5), ("file", 20)]
)
def test_no_group_is_on_both_sides(group_by: str, count: int, folder: Path) -> None:
    assert len(groups_of(NAMES, group_by, folder)) == count
    for seed in range(10):
        config = ImageDataConfig(
            path=str(folder), size=16, val_fraction=0.3, split_seed=seed, group_by=group_by
        )
        split = config.build()
        sides = [
            {one.name(index) for index in range(len(one))}
            for one in (split.train, split.validation)
        ]
        assert sides[0] | sides[1] == set(NAMES) and all(sides)
        train, held_out = (groups_of(sorted(side), group_by, folder) for side in sides)
        assert train and held_out and not train & held_out


def test_new_files_move_no_group() -> None:
    groups = ["a", "b", "c", "d", "e"] * 3
    _, held_out = split_names(groups, 0.4)
    _, after = split_names([*groups, "f", "g"], 0.4)
    assert {groups[i] for i in held_out} <= {[*groups, "f", "g"][i] for i in after}


def test_small_fraction_holds_out_one_whole_group() -> None:
    groups = ["a", "b", "c"] * 4
    train, held_out = split_names(groups, 1e-9)
    assert len(held_out) == 4 and len({groups[i] for i in held_out}) == 1
    train, held_out = split_names(groups, 1 - 1e-9)
    assert len(train) == 4 and len({groups[i] for i in train}) == 1


def test_check_names_the_groups_that_are_held_out(folder: Path) -> None:
    result = tessera("check", folder)
    assert "can hold out groups as a whole: folder (4 groups), prefix (4 groups)" in result.out
    assert "sentence (5 groups)" in result.out
    result = tessera("check", folder, "--group-by", "sentence")
    expected = report_groups(files_of(folder), "sentence", 0.05, 0)
    assert expected.held_out_files == 4 * len(expected.held_out_groups)
    assert expected.line() in result.out and "--data.group-by sentence" in result.out
    report = json.loads(tessera("check", folder, "--group-by", "folder", "--json").out)
    assert report["split"]["groups"]["groups"] == 4
    assert find_groupings(files_of(folder)) == {"folder": 4, "prefix": 4, "sentence": 5}


@pytest.mark.parametrize(
    ("group_by", "expected"),
    [
        ("voice", "use one of file, folder, prefix, sentence"),
        ("prefix", "are in one group by prefix"),
    ],
)
def test_unusable_groups_are_rejected(group_by: str, expected: str, folder: Path) -> None:
    names = [name for name in NAMES if name.startswith("anna")]
    with pytest.raises(UserError, match=expected):
        group_names(files_of(folder, names), group_by)


def test_files_without_a_value_are_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"1 of 21 files have no such value.*new\.png"):
        group_names(files_of(folder, [*NAMES, "new.png"]), "sentence")


def test_groups_are_fields_of_shards_and_columns_of_tables(tmp_path: Path) -> None:
    members = {}
    for number in range(4):
        members[f"{number}.png"] = png(number)
        members[f"{number}.json"] = json.dumps({"speaker": number % 2}).encode()
    write_tar(tmp_path / "shard.tar", members)
    write_parquet(tmp_path / "table.parquet", image_table(4, speaker=[0, 1, 0, 1]))
    for name in ("shard.tar", "table.parquet"):
        config = ImageDataConfig(path=str(tmp_path / name), size=16)
        dataset = config.folder_dataset()
        assert group_names(dataset.files, "speaker") == ["0", "1", "0", "1"]
        with pytest.raises(UserError, match="use one of file, folder, prefix, speaker"):
            group_names(dataset.files, "voice")
