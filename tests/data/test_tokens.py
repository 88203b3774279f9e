"""Codes on disk: they come back with their names, and only to the tokenizer that made them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera.data import tokens as codes_module
from tessera.data.tokens import TokensInfo, read_tokens, write_tokens
from tessera.run.errors import UserError

ABOUT = TokensInfo(
    fingerprint="f" * 64, vocab_size=64, recipe="images-vqgan", steps=20, preprocessing={"size": 16}
)


def some(count: int, each: int = 3) -> Iterator[tuple[list[str], list[str], Tensor]]:
    """Batches of grids of 2 x 2 codes, the last one smaller."""
    for start in range(0, count, each):
        members = range(start, min(start + each, count))
        codes = torch.tensor([[[i % 64, 1], [2, 63]] for i in members])
        yield [f"{i}.png" for i in members], [f"{i} bytes" for i in members], codes


def test_codes_come_back_in_their_order_with_names_and_origin(tmp_path):
    assert write_tokens(tmp_path / "codes", some(8), ABOUT) == 8
    found = read_tokens(tmp_path / "codes", ABOUT.fingerprint)
    assert found.names == [f"{i}.png" for i in range(8)]
    assert (
        torch.equal(found.codes, torch.cat([codes for _, _, codes in some(8)]))
        and found.codes.dtype == torch.int64
    )
    assert found.about == ABOUT


def test_many_codes_are_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(codes_module, "SHARD", 4)
    write_tokens(tmp_path, some(20), ABOUT)
    assert len(list(tmp_path.glob("codes-*.safetensors"))) == 4
    found = read_tokens(tmp_path, ABOUT.fingerprint)
    assert found.codes[:, 0, 0].tolist() == list(range(20)) and len(found.names) == 20


def test_symbols_of_a_huge_vocabulary_survive(tmp_path):
    huge = torch.tensor([[2**40 + 5, 2**31], [0, 2**41 - 1]])
    write_tokens(
        tmp_path,
        [(["a.png", "b.png"], ["1", "2"], huge)],
        TokensInfo("f", 2**41, "images-vqgan", 1, {}),
    )
    assert torch.equal(read_tokens(tmp_path, "f").codes, huge)


def test_codes_of_another_tokenizer_are_refused(tmp_path):
    write_tokens(tmp_path, some(3), ABOUT)
    with pytest.raises(UserError) as run_invalid:
        read_tokens(tmp_path, "0" * 64)
    letter = str(run_invalid.value)
    assert (
        "another tokenizer" in letter
        and "f" * 12 in letter
        and "0" * 12 in letter
        and "tessera tokenize" in letter
    )


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_codes_are_never_written_over(tmp_path):
    write_tokens(tmp_path, some(3), ABOUT)
    before = files(tmp_path)
    with pytest.raises(UserError, match="already holds codes.*nothing was changed"):
        write_tokens(tmp_path, some(5), ABOUT)
    assert files(tmp_path) == before


def test_a_place_that_is_a_file_is_refused(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for out in (file, file / "codes"):
        with pytest.raises(UserError, match="cannot be written"):
            write_tokens(out, some(3), ABOUT)
    assert file.read_text() == "mine"


def test_where_nothing_could_be_read_there_are_no_codes(tmp_path):
    assert write_tokens(tmp_path / "codes", iter([]), ABOUT) == 0
    with pytest.raises(UserError, match="no index.json"):
        read_tokens(tmp_path / "codes", ABOUT.fingerprint)


def test_a_tokenization_that_was_interrupted_is_no_codes_and_can_be_done_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(codes_module, "SHARD", 4)

    def interrupted() -> Iterator[tuple[list[str], Tensor]]:
        yield from some(9)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path, interrupted(), ABOUT)
    with pytest.raises(UserError, match="no index.json"):
        read_tokens(tmp_path, ABOUT.fingerprint)
    write_tokens(tmp_path, some(5), ABOUT)
    assert len(read_tokens(tmp_path, ABOUT.fingerprint).names) == 5


def lose_a_file(folder: Path) -> None:
    (folder / "codes-00000.safetensors").unlink()


def cut_a_file_short(folder: Path) -> None:
    file = folder / "codes-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def tear_the_index(folder: Path) -> None:
    (folder / "index.json").write_text('{"names": ["0.pn')


def lose_a_part_of_the_index(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    del index["shards"]
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "harm", [lose_a_file, cut_a_file_short, tear_the_index, lose_a_part_of_the_index]
)
def test_damaged_codes_are_refused_with_what_to_do(harm, tmp_path):
    write_tokens(tmp_path, some(3), ABOUT)
    harm(tmp_path)
    with pytest.raises(UserError, match="damaged.*tessera tokenize"):
        read_tokens(tmp_path, ABOUT.fingerprint)
