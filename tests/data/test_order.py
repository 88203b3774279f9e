"""Tests of the order of training examples, in which groups may be drawn equally often."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tessera.data.order import BalancedOrder, ShuffledOrder
from tessera.modalities.image.dataset import ImageDataConfig, ImageFolderDataset
from tessera.run.errors import UserError
from tests.cli_runner import run_invalid, tessera

GROUPS = [*"aaaaaa", *"bbb", "c"]


@pytest.mark.parametrize("order", [ShuffledOrder(10, 4), BalancedOrder(GROUPS, 4)])
def test_an_order_depends_on_the_position_only(order):
    expected = {position: order.index(position) for position in range(45)}
    assert {position: order.index(position) for position in reversed(range(45))} == expected


def test_each_group_occurs_once_in_an_epoch():
    order = BalancedOrder(GROUPS, seed=4)
    epochs = [[GROUPS[order.index(3 * epoch + i)] for i in range(3)] for epoch in range(20)]
    assert all(sorted(epoch) == ["a", "b", "c"] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 3


def test_members_of_a_group_take_turns():
    order = BalancedOrder(GROUPS, seed=4)
    counts = Counter(order.index(position) for position in range(3 * 12))
    assert counts == {**dict.fromkeys(range(6), 2), **dict.fromkeys((6, 7, 8), 4), 9: 12}
    turns = [
        [i for i in map(order.index, range(start, start + 18)) if i < 6] for start in (0, 18, 36)
    ]
    assert all(sorted(one) == list(range(6)) for one in turns)
    assert len({tuple(one) for one in turns}) == 3


# ---- --data.balance-by


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write nine images of a subject and one of another."""
    lines = []
    for number in range(10):
        subject = "rare" if number == 3 else "frequent"
        path = tmp_path / "data" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        PIL.Image.fromarray(np.full((16, 16, 3), 25 * number, np.uint8)).save(path)
        lines.append({"file_name": path.name, "text": subject, "subject": subject})
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / "data/metadata.jsonl").write_text(text, encoding="utf-8")
    return tmp_path / "data"


def trained_names(
    folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *flags: str
) -> list[str]:
    """Train a tokenizer on the folder, and return the names of the examples of all steps."""
    seen: list[str] = []
    item = ImageFolderDataset.item

    def record(self, index, rng):
        example = item(self, index, rng)
        if "3.png" in self.names:  # the training set
            seen.append(self.names[index])
        return example

    monkeypatch.setattr(ImageFolderDataset, "item", record)
    tessera(
        "train", "images-vqgan", "--preset", "tiny", "--data", folder, "--out", out, "--batch-size",
        "4", "--data.size", "16", "--data.channels", "3", *flags,
    )  # fmt: skip
    monkeypatch.undo()
    return seen


def test_a_rare_subject_is_trained_on_as_often_as_a_frequent_one(folder, tmp_path, monkeypatch):
    flags = ("--data.balance-by", "subject", "--data.split-seed", "1")
    seen = trained_names(folder, tmp_path / "run", monkeypatch, "--steps", "6", *flags)
    assert len(seen) == 24 and seen.count("3.png") == 12
    resumed = trained_names(folder, tmp_path / "two", monkeypatch, "--steps", "3", *flags)
    resumed += trained_names(folder, tmp_path / "two", monkeypatch, "--steps", "6", *flags)
    assert resumed == seen


def test_synthetic_data_have_no_groups(tmp_path):
    flags = ("--preset", "tiny", "--data.balance-by", "subject")
    message = run_invalid("train", "images-vqgan", "--out", tmp_path / "run", *flags)
    assert "--data.balance-by subject needs files in groups" in message
    assert not (tmp_path / "run").exists()


def test_an_unknown_column_is_an_error(folder):
    config = ImageDataConfig(path=str(folder), size=16, balance_by="colour")
    with pytest.raises(UserError, match="balance-by is 'colour'.*file, folder, prefix, subject"):
        config.balanced_groups(config.build().train)
