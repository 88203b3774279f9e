"""Tests of tokenized examples: stored codes, and datasets of codes in memory."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.data import tokens
from tessera.data.tokens import TokenDataset, TokensInfo, read_tokens, write_tokens
from tessera.run.errors import UserError

INFO = TokensInfo(
    fingerprint="f" * 64, vocab_size=64, recipe="images-vqgan", steps=20, preprocessing={"size": 16}
)


def make_batches(count: int, size: int = 3) -> Iterator[tuple[list[str], list[str], Tensor]]:
    """Yield batches of 2 x 2 codes; the last batch may be smaller."""
    for start in range(0, count, size):
        members = range(start, min(start + size, count))
        codes = torch.tensor([[[i % 64, 1], [2, 63]] for i in members])
        yield [f"{i}.png" for i in members], [f"{i} bytes" for i in members], codes


def test_codes_are_read_in_order_with_names_signatures_and_info(tmp_path):
    assert write_tokens(tmp_path / "codes", make_batches(8), INFO) == 8
    stored = read_tokens(tmp_path / "codes", INFO.fingerprint)
    assert stored.names == [f"{i}.png" for i in range(8)]
    assert stored.signatures == [f"{i} bytes" for i in range(8)]
    assert torch.equal(stored.codes, torch.cat([codes for _, _, codes in make_batches(8)]))
    assert stored.codes.dtype == torch.int64
    assert stored.info == INFO


def test_many_codes_are_written_to_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "SHARD_SIZE", 4)
    write_tokens(tmp_path, make_batches(20), INFO)
    assert len(list(tmp_path.glob("codes-*.safetensors"))) == 4
    stored = read_tokens(tmp_path, INFO.fingerprint)
    assert stored.codes[:, 0, 0].tolist() == list(range(20)) and len(stored.names) == 20


def test_codes_of_a_huge_vocabulary_are_stored_exactly(tmp_path):
    codes = torch.tensor([[2**40 + 5, 2**31], [0, 2**41 - 1]])
    info = TokensInfo("f", 2**41, "images-vqgan", 1, {})
    write_tokens(tmp_path, [(["a.png", "b.png"], ["1", "2"], codes)], info)
    assert torch.equal(read_tokens(tmp_path, "f").codes, codes)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_permissions_of_the_umask(tmp_path, umask, mode):
    previous = os.umask(umask)
    try:
        write_tokens(tmp_path / "codes", make_batches(3), INFO)
    finally:
        os.umask(previous)
    modes = {
        file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "codes").iterdir()
    }
    assert modes == {"codes-00000.safetensors": mode, "index.json": mode}


def test_codes_of_another_tokenizer_are_rejected(tmp_path):
    write_tokens(tmp_path, make_batches(3), INFO)
    with pytest.raises(UserError) as raised:
        read_tokens(tmp_path, "0" * 64)
    message = str(raised.value)
    assert "another tokenizer" in message and "tessera tokenize" in message
    assert "f" * 12 in message and "0" * 12 in message


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_existing_codes_are_never_overwritten(tmp_path):
    write_tokens(tmp_path, make_batches(3), INFO)
    before = read_folder(tmp_path)
    with pytest.raises(UserError, match="already holds codes.*nothing was changed"):
        write_tokens(tmp_path, make_batches(5), INFO)
    assert read_folder(tmp_path) == before


def test_output_folder_that_is_a_file_is_rejected(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for out in (file, file / "codes"):
        with pytest.raises(UserError, match="cannot be written"):
            write_tokens(out, make_batches(3), INFO)
    assert file.read_text() == "mine"


def test_no_index_is_written_without_examples(tmp_path):
    assert write_tokens(tmp_path / "codes", iter([]), INFO) == 0
    with pytest.raises(UserError, match="no index.json"):
        read_tokens(tmp_path / "codes", INFO.fingerprint)


def test_interrupted_codes_are_incomplete_and_can_be_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "SHARD_SIZE", 4)

    def interrupt() -> Iterator[tuple[list[str], list[str], Tensor]]:
        yield from make_batches(9)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path, interrupt(), INFO)
    with pytest.raises(UserError, match="no index.json"):
        read_tokens(tmp_path, INFO.fingerprint)
    write_tokens(tmp_path, make_batches(5), INFO)
    assert len(read_tokens(tmp_path, INFO.fingerprint).names) == 5


def remove_file(folder: Path) -> None:
    (folder / "codes-00000.safetensors").unlink()


def truncate_file(folder: Path) -> None:
    file = folder / "codes-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def truncate_index(folder: Path) -> None:
    (folder / "index.json").write_text('{"names": ["0.pn')


def remove_index_field(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    del index["shards"]
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "corrupt", [remove_file, truncate_file, truncate_index, remove_index_field]
)
def test_corrupt_codes_are_rejected_with_the_command_to_run(corrupt, tmp_path):
    write_tokens(tmp_path, make_batches(3), INFO)
    corrupt(tmp_path)
    with pytest.raises(UserError, match="corrupt.*tessera tokenize"):
        read_tokens(tmp_path, INFO.fingerprint)


# ---- in memory


def test_token_dataset_yields_codes_with_one_of_the_captions():
    codes = torch.arange(8, dtype=torch.int32).view(2, 2, 2)
    dataset = TokenDataset(["a", "b"], {"tokenizer": codes}, ["one", "red"], {1: ["red", "round"]})
    assert len(dataset) == 2 and dataset.name(1) == "b"
    assert dataset.all_captions(0) == ["one"] and dataset.all_captions(1) == ["red", "round"]
    assert [dataset.caption(i) for i in range(2)] == ["one", "red"]
    drawn = {dataset.item(1, np.random.default_rng(seed)).caption for seed in range(20)}
    assert drawn == {"red", "round"}
    batch = dataset.collate([dataset.item(i, np.random.default_rng(0)) for i in range(2)])
    assert torch.equal(batch.codes["tokenizer"], codes.long())
    assert batch.codes["tokenizer"].dtype == torch.int64 and batch.captions[0] == "one"
    moved = batch.to("meta")
    assert moved.codes["tokenizer"].device.type == "meta" and moved.captions == batch.captions


def test_token_dataset_draws_no_random_number_for_a_single_caption():
    dataset = TokenDataset(["a"], {"tokenizer": torch.zeros(1, 4)}, ["one"])
    rng = np.random.default_rng(0)
    dataset.item(0, rng)
    assert rng.random() == np.random.default_rng(0).random()
