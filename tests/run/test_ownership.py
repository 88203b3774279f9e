"""Commands write only to folders that are new, empty or theirs, and finish what a kill left."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.api.tokenizer import Tokenizer
from tessera.cli.commands import COMMANDS
from tessera.data import tokens
from tessera.data.tokens import TokenWriter, read_tokens
from tessera.engine import evaluation
from tessera.engine.checkpoint import find_newest, list_steps, load_newest
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tessera.run.train import claim_directory
from tests.cli_runner import read_files, run_invalid, tessera
from tests.data.test_tokens import INFO, make_batches
from tests.run.test_token_cache import RecordingCache, open_images, write_images
from tests.runs import tokenizer

TRAIN = ("train", "images-vqgan", "--preset", "tiny", "--steps", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "tiny"
    assert tessera(*TRAIN, "--out", run).code == 0
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


# ---- folders of others

STRANGERS: dict[str, dict[str, str]] = {
    "a program": {"config.json": '{"debug": true}', "README.md": "# Mine"},
    "photographs": {"a.jpg": "pixels"},
    "broken": {"config.json": "{"},
    "a list": {"config.json": "[]", "lock": "1"},
}


@pytest.mark.parametrize("name", STRANGERS)
def test_no_command_writes_into_a_folder_of_others(name, run, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    for file, text in STRANGERS[name].items():
        (folder / file).write_text(text)
    before = read_files(folder)
    for command in (
        (*TRAIN, "--out", folder),
        ("sample", run, "--count", "1", "--out", folder),
        ("tokenize", run, "--out", folder),
    ):
        run_invalid(*command)
        assert read_files(folder) == before and len(list(folder.iterdir())) == len(before)


def test_an_evaluation_replaces_only_an_evaluation(run, tmp_path):
    file = tmp_path / "package.json"
    file.write_text('{"name": "mine"}')
    assert "is another file" in run_invalid("evaluate", run, "--out", file)
    assert "is a folder" in run_invalid("evaluate", run, "--out", tmp_path)
    assert file.read_text() == '{"name": "mine"}'
    for _ in range(2):
        result = tessera("evaluate", run, "--samples", "0", "--out", tmp_path / "new.json")
        assert result.code == 0, result.err


def test_a_readme_or_lock_of_others_is_kept(run, tmp_path):
    (run / "README.md").write_text("# My notes")
    result = tessera(*TRAIN[:-1], "3", "--out", run)
    assert result.code == 0 and "stays as it is" in result.text
    assert (run / "README.md").read_text() == "# My notes"
    (run / "lock").write_text("a poem about locks")
    assert "is not the lock of a run" in run_invalid(*TRAIN[:-1], "4", "--out", run)
    assert (run / "lock").read_text() == "a poem about locks"


def test_what_a_kill_left_before_the_first_step_is_taken_over(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    (directory.path / ".config.json.writing").write_text("{")
    (directory.path / "lock").write_text("123")
    claim_directory(directory, {"recipe": "images-vqgan"})
    assert directory.is_run() and not list(directory.path.glob(".*"))
    directory.unlock()


def test_a_copy_for_inference_is_not_resumed(run):
    folder = run / "checkpoints" / "000002"
    for file in ("model.safetensors", "others.safetensors", "optimizer.model.safetensors"):
        (folder / file).unlink(missing_ok=True)
    before = read_files(run)
    assert "is a copy for inference" in run_invalid(*TRAIN, "--out", run)
    assert read_files(run) == before


def test_fewer_steps_than_are_done_end_without_a_traceback(run):
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "samples")
    result = tessera(*TRAIN[:-1], "1", "--out", run)
    assert result.code == 0 and "no step was left to train" in result.text


# ---- permissions


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_all_files_of_a_run_have_the_permissions_of_the_umask(umask, mode, tmp_path):
    previous = os.umask(umask)
    try:
        assert tessera(*TRAIN, "--out", tmp_path / "run").code == 0
    finally:
        os.umask(previous)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    wrong = {
        path.name: oct(stat.S_IMODE(path.stat().st_mode))
        for path in files
        if stat.S_IMODE(path.stat().st_mode) != mode and path.name != "lock"
    }
    assert len(files) > 10 and wrong == {}


# ---- reading while a run prunes


def test_a_checkpoint_that_is_pruned_while_it_is_read_is_replaced_by_the_next(run, monkeypatch):
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "000002", checkpoints / "000001")
    manifest = json.loads((checkpoints / "000001" / "manifest.json").read_text())
    (checkpoints / "000001" / "manifest.json").write_text(json.dumps(manifest | {"step": 1}))
    from tessera.engine import checkpoint

    read = checkpoint.read_tensors

    def prune_first(path: Path) -> dict[str, torch.Tensor]:
        if path.parent.name == "000002":
            shutil.rmtree(path.parent)
        return read(path)

    monkeypatch.setattr(checkpoint, "read_tensors", prune_first)
    warnings: list[str] = []
    loaded = load_newest(checkpoints, "ema.safetensors", warnings.append)
    assert loaded is not None and loaded.step == 1 and warnings == []


def test_folders_that_are_no_checkpoints_are_ignored_and_kept(run):
    for name in ("7", "backup", "00000009", "000009.incomplete-1"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints" / "000003").mkdir()
    (run / "checkpoints" / "000003" / "notes.txt").write_text("mine")
    assert list_steps(run / "checkpoints") == [2, 3]
    flags = ("--steps", "4", "--checkpoint-every", "1", "--keep-last", "1")
    result = tessera(*TRAIN[:-2], *flags, "--out", run)
    assert result.code == 0, result.err
    assert find_newest(run / "checkpoints", print) == run / "checkpoints" / "000004"
    kept = run / "checkpoints" / "000003.incomplete-1" / "notes.txt"
    assert kept.read_text() == "mine"
    assert {"7", "backup", "00000009"} <= {one.name for one in (run / "checkpoints").iterdir()}


# ---- killed commands


class Killed(BaseException):
    """Ends a command without any clean-up of its own."""


def test_a_killed_sample_command_can_be_repeated(run, tmp_path, monkeypatch):
    save = evaluation.make_sheet

    def kill(samples: Any) -> Any:
        raise Killed

    command = ("sample", run, "--count", "2", "--out", tmp_path / "samples")
    monkeypatch.setattr(evaluation, "make_sheet", kill)
    with pytest.raises(Killed):
        COMMANDS["sample"](str(run), count=2, out=str(tmp_path / "samples"))
    settings = json.loads((tmp_path / "samples" / "settings.json").read_text())
    assert settings["complete"] is False
    monkeypatch.setattr(evaluation, "make_sheet", save)
    assert tessera(*command).code == 0
    assert (tmp_path / "samples" / "sheet.png").exists()
    assert (tmp_path / "samples" / "earlier-001" / "settings.json").exists()


def test_interrupted_codes_are_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "SHARD_SIZE", 4)

    def write(batches: Any, stop_after: int | None = None) -> TokenWriter:
        writer = TokenWriter(tmp_path / "codes", INFO, source="a hash")
        done = writer.num_read
        for number, (names, signatures, codes) in enumerate(batches):
            if number * 3 >= done:
                if stop_after is not None and number >= stop_after:
                    return writer
                writer.add(names, signatures, codes, len(names))
        writer.finish()
        return writer

    write(make_batches(20), stop_after=5)
    with pytest.raises(UserError, match="no index.json"):
        read_tokens(tmp_path / "codes", INFO.fingerprint)
    again = TokenWriter(tmp_path / "codes", INFO, source="a hash")
    assert again.num_read == 12 and again.names == [f"{i}.png" for i in range(12)]
    write(make_batches(20))
    stored = read_tokens(tmp_path / "codes", INFO.fingerprint)
    assert stored.names == [f"{i}.png" for i in range(20)]
    assert stored.codes[:, 0, 0].tolist() == list(range(20))
    assert not (tmp_path / "codes" / "progress.json").exists()


def test_codes_of_other_examples_are_not_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "SHARD_SIZE", 2)
    writer = TokenWriter(tmp_path / "codes", INFO, source="a hash")
    for names, signatures, codes in make_batches(6):
        writer.add(names, signatures, codes, len(names))
    assert TokenWriter(tmp_path / "codes", INFO, source="another hash").num_read == 0
    assert list((tmp_path / "codes").glob("*.safetensors")) == []


@pytest.mark.parametrize("position", [-1, -40, 9])
def test_a_flipped_bit_in_codes_is_detected(position, tmp_path):
    writer = TokenWriter(tmp_path / "codes", INFO, source="a hash")
    for names, signatures, codes in make_batches(6):
        writer.add(names, signatures, codes, len(names))
    writer.finish()
    (shard,) = (tmp_path / "codes").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[position] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match="does not match its checksum"):
        read_tokens(tmp_path / "codes", INFO.fingerprint)


def test_a_cache_is_continued_and_a_corrupt_one_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "SHARD_SECONDS", -1.0)
    vqgan = Tokenizer.load(tokenizer())
    dataset = open_images(write_images(tmp_path / "images", 40))
    expected = RecordingCache(tmp_path / "whole", tokenizer=vqgan).codes(dataset)
    encode, encoded = Tokenizer.encode_dataset, []

    def interrupt(self: Tokenizer, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for number, one in enumerate(encode(self, *args, **kwargs)):
            if number == 1 and not encoded:
                raise Killed
            yield one

    monkeypatch.setattr(Tokenizer, "encode_dataset", interrupt)
    with pytest.raises(Killed):
        RecordingCache(tmp_path, tokenizer=vqgan).codes(dataset)
    encoded.append("from now on")
    again = RecordingCache(tmp_path, tokenizer=vqgan)
    assert torch.equal(again.codes(dataset), expected)
    assert "32 of them were tokenized before." in again.notices
    shard = sorted(tmp_path.glob("cache/*/*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    repaired = RecordingCache(tmp_path, tokenizer=vqgan)
    assert torch.equal(repaired.codes(dataset), expected) and repaired.runs == 1
    assert any("are made again" in line for line in repaired.notices)
