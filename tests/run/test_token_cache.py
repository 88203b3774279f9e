"""Examples are tokenized once: results equal those of live tokens, and no stale code is used."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from tessera.api.tokenizer import Tokenizer
from tessera.data.dataset import ExampleDataset, Split
from tessera.data.tokens import TokenDataset
from tessera.engine.distributed import Distributed
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.recipes import images_maskgit, images_maskgit_superres, images_vqgan
from tessera.run.config import Run
from tessera.run.errors import UserError
from tessera.run.load import load_run
from tessera.run.token_cache import TokenCache
from tests.cli_runner import run_invalid, tessera
from tests.runs import build_tiny, engine_in, read_checkpoint, read_metrics, tokenizer, train

TRAIN = ("train", "images-maskgit", "--preset", "tiny")


def write_images(folder: Path, count: int = 12, size: int = 20) -> Path:
    """Write images with captions."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (5, 5, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).resize((size, size)).save(folder / f"{number:03d}.png")
        (folder / f"{number:03d}.txt").write_text(f"number {number}")
    return folder


def truncate_image(folder: Path, number: int) -> None:
    file = folder / f"{number:03d}.png"
    file.write_bytes(file.read_bytes()[:60])


def open_images(folder: Path) -> ExampleDataset:
    return ImageDataConfig(path=str(folder), size=16).full()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images")


@pytest.fixture(scope="module")
def vqgan() -> Tokenizer:
    return Tokenizer.load(tokenizer())


@pytest.fixture(scope="module")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of a tokenizer with other weights."""
    folder = tmp_path_factory.mktemp("runs") / "other"
    run = images_vqgan("tiny")
    engine = dataclasses.replace(run.engine, steps=2, sample_count=1)
    train(folder, dataclasses.replace(run, engine=engine))
    return folder


class RecordingCache:
    """A token cache below a folder, with the notices it printed."""

    def __init__(self, folder: Path, *, given: Path | None = None, **tokenizers: Tokenizer):
        self.notices: list[str] = []
        self.cache = TokenCache(
            tokenizers, given, folder / "cache", Distributed(), self.notices.append
        )

    def tokenize(self, dataset: ExampleDataset) -> TokenDataset:
        return self.cache.tokenize(dataset, "No example is left.")

    def codes(self, dataset: ExampleDataset) -> torch.Tensor:
        return self.tokenize(dataset).codes["tokenizer"]

    @property
    def runs(self) -> int:
        """How often examples were tokenized."""
        return sum(line.startswith("Tokenizing") for line in self.notices)


# ---- cached and live tokens


def with_tokens(run: Run, tokens: str) -> Run:
    engine = dataclasses.replace(
        run.engine, steps=6, validate_every=3, sample_every=6, sample_count=2
    )
    task = dataclasses.replace(run.task, tokens=tokens)
    return dataclasses.replace(run, engine=engine, task=task)


@pytest.mark.parametrize("recipe", [images_maskgit, images_maskgit_superres])
def test_training_on_cached_tokens_equals_training_on_live_ones(recipe, tmp_path):
    for tokens in ("cache", "live"):
        train(tmp_path / tokens, with_tokens(build_tiny(recipe), tokens))
    assert read_metrics(tmp_path / "cache") == read_metrics(tmp_path / "live")
    cached, live = read_checkpoint(tmp_path / "cache", 6), read_checkpoint(tmp_path / "live", 6)
    assert [name for name in cached if not torch.equal(cached[name], live[name])] == []
    samples = sorted((tmp_path / "cache" / "samples").rglob("*.png"))
    assert samples
    for sample in samples:
        other = tmp_path / "live" / sample.relative_to(tmp_path / "cache")
        assert sample.read_bytes() == other.read_bytes()


def test_cached_codes_equal_those_of_single_examples(vqgan, folder, tmp_path):
    dataset = open_images(folder)
    tokens = RecordingCache(tmp_path, tokenizer=vqgan).tokenize(dataset)
    rng = np.random.default_rng(0)
    for i in range(len(dataset)):
        single = vqgan.encode_examples(dataset.collate([dataset.item(i, rng)]))[0]
        assert torch.equal(tokens.item(i, rng).codes["tokenizer"].long(), single)
        assert tokens.name(i) == dataset.name(i)
        assert tokens.caption(i) == dataset.caption(i) == f"number {i}"


def test_training_set_that_is_also_held_out_is_tokenized_once(vqgan, folder, tmp_path):
    dataset = open_images(folder)
    recording = RecordingCache(tmp_path, tokenizer=vqgan)
    split = recording.cache.tokenize_split(Split(dataset, dataset))
    assert split.train is split.validation and recording.runs == 1


def test_augmented_images_are_not_cached(tmp_path):
    command = (*TRAIN, "--tokenizer", tokenizer(), "--out", tmp_path / "run")
    for augmentation in (("--data.crop", "random"), ("--data.flip",), ("--data.min-scale", "0.7")):
        assert "--task.tokens live" in run_invalid(*command, *augmentation)
    assert not (tmp_path / "run").exists()


# ---- the cache


def test_second_start_tokenizes_nothing(vqgan, folder, tmp_path):
    first, second = (RecordingCache(tmp_path, tokenizer=vqgan) for _ in range(2))
    one, other = first.codes(open_images(folder)), second.codes(open_images(folder))
    assert (first.runs, second.runs) == (1, 0)
    assert torch.equal(one, other)


def test_changed_caption_is_used_without_tokenizing_again(vqgan, folder, tmp_path):
    RecordingCache(tmp_path, tokenizer=vqgan).tokenize(open_images(folder))
    (folder / "003.txt").write_text("something else")
    again = RecordingCache(tmp_path, tokenizer=vqgan)
    assert again.tokenize(open_images(folder)).caption(3) == "something else"
    assert again.runs == 0


def replace_image(folder: Path) -> None:
    PIL.Image.new("RGB", (20, 20), "red").save(folder / "004.png")


def touch_image(folder: Path) -> None:
    status = (folder / "004.png").stat()
    os.utime(folder / "004.png", ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def add_image(folder: Path) -> None:
    PIL.Image.new("RGB", (20, 20), "red").save(folder / "red.png")


def remove_image(folder: Path) -> None:
    (folder / "004.png").unlink()


@pytest.mark.parametrize("change", [replace_image, touch_image, add_image, remove_image])
def test_changed_folder_is_tokenized_again(change, vqgan, folder, tmp_path):
    RecordingCache(tmp_path, tokenizer=vqgan).tokenize(open_images(folder))
    change(folder)
    again = RecordingCache(tmp_path, tokenizer=vqgan)
    dataset = open_images(folder)
    tokens = again.tokenize(dataset)
    assert again.runs == 1
    assert tokens.names == [dataset.name(i) for i in range(len(dataset))]
    expected = RecordingCache(tmp_path / "elsewhere", tokenizer=vqgan).codes(dataset)
    assert torch.equal(tokens.codes["tokenizer"], expected)


def test_another_tokenizer_has_its_own_cache(vqgan, other_run, folder, tmp_path):
    dataset = open_images(folder)
    one = RecordingCache(tmp_path, tokenizer=vqgan).codes(dataset)
    other = RecordingCache(tmp_path, tokenizer=Tokenizer.load(other_run))
    assert not torch.equal(other.codes(dataset), one) and other.runs == 1
    again = RecordingCache(tmp_path, tokenizer=vqgan)
    assert torch.equal(again.codes(dataset), one) and again.runs == 0


def test_incomplete_cache_is_tokenized_again(vqgan, folder, tmp_path):
    dataset = open_images(folder)
    one = RecordingCache(tmp_path, tokenizer=vqgan).codes(dataset)
    (index,) = tmp_path.glob("cache/*/index.json")
    index.unlink()
    again = RecordingCache(tmp_path, tokenizer=vqgan)
    assert torch.equal(again.codes(dataset), one) and again.runs == 1


def test_corrupt_cache_is_tokenized_again(vqgan, folder, tmp_path):
    dataset = open_images(folder)
    one = RecordingCache(tmp_path, tokenizer=vqgan).codes(dataset)
    (shard,) = tmp_path.glob("cache/*/*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-5])
    again = RecordingCache(tmp_path, tokenizer=vqgan)
    assert torch.equal(again.codes(dataset), one) and again.runs == 1


# ---- unreadable files


def test_unreadable_image_is_skipped_and_reported(vqgan, folder, tmp_path):
    truncate_image(folder, 5)
    recording = RecordingCache(tmp_path, tokenizer=vqgan)
    tokens = recording.tokenize(open_images(folder))
    assert len(tokens) == 11 and "005.png" not in tokens.names
    assert any("Skipped 005.png:" in line for line in recording.notices)
    captions = [tokens.caption(i) for i in range(len(tokens))]
    assert captions == [f"number {i}" for i in range(12) if i != 5]


def test_training_prints_the_images_it_skips(folder, tmp_path):
    truncate_image(folder, 5)
    flags = ("--tokenizer", tokenizer(), "--data", folder, "--steps", "1", "--sample-count", "1")
    result = tessera(*TRAIN, *flags, "--out", tmp_path / "run")
    assert result.code == 0 and "Skipped 005.png:" in result.out


@pytest.mark.parametrize(
    ("side", "expected"),
    [("train", "there is nothing to train on"), ("validation", "The held-out set has no")],
)
def test_side_without_readable_images_is_named(side, expected, vqgan, folder, tmp_path):
    split = ImageDataConfig(path=str(folder), size=16, val_fraction=0.25).build()
    unreadable = getattr(split, side)
    for i in range(len(unreadable)):
        (folder / unreadable.name(i)).write_bytes(b"not an image")
    cache = RecordingCache(tmp_path, tokenizer=vqgan).cache
    with pytest.raises(UserError, match=f"{expected}.*`tessera check` shows the reasons"):
        cache.tokenize_split(split)


@pytest.mark.parametrize("tokens", [None, "cache", "live"])
def test_unreadable_caption_does_not_stop_a_run(tokens, folder, tmp_path):
    (folder / "005.txt").write_bytes(b"caf\xe9")
    recipe, flags = "images-vqgan", ()
    if tokens is not None:
        recipe, flags = "images-maskgit", ("--tokenizer", tokenizer(), "--task.tokens", tokens)
    common = ("--preset", "tiny", "--data", folder, "--steps", "1", "--sample-count", "1")
    result = tessera("train", recipe, *common, *flags, "--out", tmp_path / "run")
    assert result.code == 0, result


# ---- codes of `tessera tokenize`


@pytest.fixture
def codes(folder: Path, tmp_path: Path) -> Path:
    out = tmp_path / "codes"
    assert tessera("tokenize", tokenizer(), "--data", folder, "--out", out).code == 0
    return out


def train_on_codes(codes: Path, folder: Path, out: Path, run: str | Path) -> tuple[str | Path, ...]:
    return (
        *(*TRAIN, "--tokenizer", run, "--data", folder, "--task.tokens", codes),
        *("--steps", "2", "--sample-count", "1", "--out", out),
    )


def test_given_codes_are_used_and_nothing_is_tokenized(codes, folder, vqgan, tmp_path):
    recording = RecordingCache(tmp_path, given=codes, tokenizer=vqgan)
    found = recording.codes(open_images(folder))
    assert recording.notices == [] and not (tmp_path / "cache").exists()
    expected = RecordingCache(tmp_path, tokenizer=vqgan).codes(open_images(folder))
    assert torch.equal(found, expected)


def test_training_on_given_codes_equals_training_on_cached_ones(codes, folder, tmp_path):
    result = tessera(*train_on_codes(codes, folder, tmp_path / "run", tokenizer()))
    assert result.code == 0 and "Tokenizing" not in result.out
    run = load_run(tmp_path / "run").run
    cached = dataclasses.replace(run, task=dataclasses.replace(run.task, tokens="cache"))
    train(tmp_path / "cached", cached)
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "cached")


def test_codes_of_another_tokenizer_are_rejected_with_both_fingerprints(
    codes, folder, other_run, vqgan, tmp_path
):
    message = run_invalid(*train_on_codes(codes, folder, tmp_path / "run", other_run))
    assert "were written by another tokenizer" in message and "tessera tokenize" in message
    for fingerprint in (vqgan.fingerprint, Tokenizer.load(other_run).fingerprint):
        assert fingerprint[:12] in message


def test_codes_of_changed_images_are_computed_again(codes, folder, vqgan, tmp_path):
    replace_image(folder)
    recording = RecordingCache(tmp_path, given=codes, tokenizer=vqgan)
    found = recording.codes(open_images(folder))
    assert recording.runs == 1
    assert "codes of 11 of 12 examples in their current version" in recording.notices[0]
    expected = RecordingCache(tmp_path, tokenizer=vqgan).codes(open_images(folder))
    assert torch.equal(found, expected)


def test_given_codes_are_used_despite_an_unreadable_image(folder, vqgan, tmp_path):
    """`tessera tokenize` skips it too; the codes of the others are not computed again."""
    truncate_image(folder, 5)
    out = tmp_path / "codes"
    assert tessera("tokenize", tokenizer(), "--data", folder, "--out", out).code == 0
    recording = RecordingCache(tmp_path, given=out, tokenizer=vqgan)
    assert len(recording.tokenize(open_images(folder))) == 11
    [notice] = [line for line in recording.notices if line.startswith("Tokenizing")]
    assert notice.startswith("Tokenizing 1 examples")


def test_folder_without_codes_is_rejected(folder, tmp_path):
    command = train_on_codes(tmp_path / "cods", folder, tmp_path / "run", tokenizer())
    message = run_invalid(*command)
    assert "There are no codes in" in message and "tessera tokenize" in message


def test_folder_named_cache_is_not_read_as_codes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "index.json").write_text("{}")
    run = with_tokens(build_tiny(images_maskgit), "cache")
    engine_in(tmp_path / "run", run).directory.unlock()


def test_super_resolution_uses_given_codes_of_large_images_only(tmp_path):
    folder, out = write_images(tmp_path / "images", size=40), tmp_path / "codes"
    assert tessera("tokenize", tokenizer(32), "--data", folder, "--out", out).code == 0
    tokenizers = {
        "tokenizer": Tokenizer.load(tokenizer(32)),
        "low_res_tokenizer": Tokenizer.load(tokenizer(16)),
    }
    recording = RecordingCache(tmp_path, given=out, **tokenizers)
    tokens = recording.tokenize(ImageDataConfig(path=str(folder), size=32).full())
    assert recording.runs == 1
    shapes = {name: tuple(one.shape) for name, one in tokens.codes.items()}
    assert shapes == {"tokenizer": (12, 8, 8), "low_res_tokenizer": (12, 4, 4)}


# ---- signatures


def test_stored_codes_have_the_signatures_of_their_examples(codes, folder):
    index = json.loads((codes / "index.json").read_text())
    dataset = open_images(folder)
    assert index["signatures"] == [dataset.signature(i) for i in range(len(dataset))]
    assert len(set(index["names"])) == 12


def test_signature_of_synthetic_images_depends_on_every_setting():
    settings: list[dict[str, Any]] = [
        {},
        {"synthetic_seed": 1},
        {"synthetic_max_shapes": 1},
        {"synthetic_plain": True},
    ]
    datasets = [ImageDataConfig(size=16, num_synthetic=6, **one).full() for one in settings]
    assert len({dataset.signature(0) for dataset in datasets}) == 4
