"""Examples are tokenized once: what is learnt from codes is what would be learnt from pictures, and
no code is ever stale."""

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

from tessera.data.dataset import Split
from tessera.engine.distributed import Distributed
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.recipes import images_maskgit, images_maskgit_superres, images_vqgan
from tessera.run.config import Run
from tessera.run.errors import UserError
from tessera.run.load import Tokenizer, load_run
from tessera.run.token_cache import Coder, coded
from tests.cli_runner import run_invalid, tessera
from tests.runs import engine_in, build_tiny, read_metrics, read_checkpoint, tokenizer, train


def paint(folder: Path, count: int = 12, size: int = 20, captions: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (5, 5, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).resize((size, size)).save(folder / f"{number:03d}.png")
        if captions:
            (folder / f"{number:03d}.txt").write_text(f"number {number}")
    return folder


def spoil(folder: Path, number: int) -> None:
    file = folder / f"{number:03d}.png"
    file.write_bytes(file.read_bytes()[:60])


@pytest.fixture(scope="module")
def codec() -> Tokenizer:
    return Tokenizer(load_run(tokenizer()))


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with other weights."""
    place = tmp_path_factory.mktemp("runs") / "another"
    run = images_vqgan("tiny")
    train(
        place,
        dataclasses.replace(run, engine=dataclasses.replace(run.engine, steps=2, sample_count=1)),
    )
    return place


class Coding:
    """A coder with a place for its cache, and all it says."""

    def __init__(self, place: Path, *, given: Path | None = None, **parts: Tokenizer):
        self.said: list[str] = []
        self.coder = Coder(parts, given, place / "cache", self.said.append)

    def __call__(self, source: Any) -> Any:
        return self.coder.coded(source, "Nothing is left.")

    @property
    def tokenized(self) -> int:
        """How often it had to."""
        return sum(line.startswith("Tokenizing") for line in self.said)


def pictures(folder: Path, **settings: Any) -> Any:
    return ImageDataConfig(path=str(folder), size=16, **settings).full()


# ------------------------------------------------------------------------------------------------- codes or pictures


def with_codes(run: Run, codes: str) -> Run:
    engine = dataclasses.replace(
        run.engine, steps=6, validate_every=3, sample_every=6, sample_count=2
    )
    return dataclasses.replace(run, engine=engine, task=dataclasses.replace(run.task, codes=codes))


@pytest.mark.parametrize("recipe", [images_maskgit, images_maskgit_superres])
def test_what_is_learnt_from_cached_codes_is_what_is_learnt_from_live_ones(recipe, tmp_path):
    for codes in ("cache", "raw"):
        train(tmp_path / codes, with_codes(build_tiny(recipe), codes))
    assert read_metrics(tmp_path / "cache") == read_metrics(tmp_path / "raw")
    cached, live = read_checkpoint(tmp_path / "cache", 6), read_checkpoint(tmp_path / "live", 6)
    assert [name for name in cached if not torch.equal(cached[name], live[name])] == []
    for sample in sorted((tmp_path / "cache" / "samples").rglob("*.png")):
        assert (
            sample.read_bytes()
            == (tmp_path / "live" / sample.relative_to(tmp_path / "cache")).read_bytes()
        )


def test_cached_codes_are_what_the_tokenizer_says_one_by_one(codec, tmp_path):
    source = pictures(paint(tmp_path / "pictures"))
    made = Coding(tmp_path, tokenizer=codec)(source)
    rng = np.random.default_rng(0)
    for i in range(len(source)):
        alone = codec.codes(source.collate([source.item(i, rng)]))[0]
        assert torch.equal(made.item(i, rng).codes["tokenizer"].long(), alone)
        assert (
            made.name(i) == source.name(i) and made.caption(i) == source.caption(i) == f"number {i}"
        )


def test_a_side_that_validates_on_itself_is_tokenized_once(codec, tmp_path):
    source = pictures(paint(tmp_path / "pictures"))
    said: list[str] = []
    split = coded(
        Split(source, source),
        {"tokenizer": codec},
        None,
        tmp_path / "cache",
        Distributed.from_environment(),
        said.append,
    )
    assert split.train is split.validation and len(said) == 1


def test_pictures_cut_anew_at_every_visit_are_not_cached(tmp_path):
    command = (
        "train",
        "images-maskgit",
        "--preset",
        "tiny",
        "--tokenizer",
        tokenizer(),
        "--out",
        tmp_path / "run",
    )
    for augmentation in (("--data.crop", "random"), ("--data.flip",), ("--data.min-scale", "0.7")):
        assert "--task.tokens live" in run_invalid(*command, *augmentation)
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------------- the cache


def test_a_second_start_tokenizes_nothing(codec, tmp_path):
    folder = paint(tmp_path / "pictures")
    first, second = Coding(tmp_path, tokenizer=codec), Coding(tmp_path, tokenizer=codec)
    one, other = first(pictures(folder)), second(pictures(folder))
    assert (first.tokenized, second.tokenized) == (1, 0)
    assert torch.equal(one.codes["tokenizer"], other.codes["tokenizer"])


def test_a_new_caption_is_heard_without_tokenizing_again(codec, tmp_path):
    folder = paint(tmp_path / "pictures")
    Coding(tmp_path, tokenizer=codec)(pictures(folder))
    (folder / "003.txt").write_text("something else")
    again = Coding(tmp_path, tokenizer=codec)
    assert again(pictures(folder)).caption(3) == "something else" and again.tokenized == 0


def repaint(folder: Path) -> None:
    PIL.Image.new("RGB", (20, 20), "red").save(folder / "004.png")


def touch(folder: Path) -> None:
    status = (folder / "004.png").stat()
    os.utime(folder / "004.png", ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def add(folder: Path) -> None:
    PIL.Image.new("RGB", (20, 20), "red").save(folder / "red.png")


def remove(folder: Path) -> None:
    (folder / "004.png").unlink()


@pytest.mark.parametrize("change", [repaint, touch, add, remove])
def test_a_changed_folder_is_tokenized_again(change, codec, tmp_path):
    folder = paint(tmp_path / "pictures")
    Coding(tmp_path, tokenizer=codec)(pictures(folder))
    change(folder)
    again = Coding(tmp_path, tokenizer=codec)
    source = pictures(folder)
    made = again(source)
    assert again.tokenized == 1 and made.names == source.names
    fresh = Coding(tmp_path / "elsewhere", tokenizer=codec)(source)
    assert torch.equal(made.codes["tokenizer"], fresh.codes["tokenizer"])


def test_another_tokenizer_has_a_cache_of_its_own(codec, another, tmp_path):
    source = pictures(paint(tmp_path / "pictures"))
    other = Tokenizer(load_run(another))
    one = Coding(tmp_path, tokenizer=codec)(source)
    coding = Coding(tmp_path, tokenizer=other)
    made = coding(source)
    assert coding.tokenized == 1 and not torch.equal(
        made.codes["tokenizer"], one.codes["tokenizer"]
    )
    back = Coding(tmp_path, tokenizer=codec)
    assert (
        torch.equal(back(source).codes["tokenizer"], one.codes["tokenizer"]) and back.tokenized == 0
    )


def test_a_cache_that_was_never_finished_is_made_again(codec, tmp_path):
    source = pictures(paint(tmp_path / "pictures"))
    one = Coding(tmp_path, tokenizer=codec)(source)
    (index,) = tmp_path.glob("cache/*/index.json")
    index.unlink()
    again = Coding(tmp_path, tokenizer=codec)
    assert (
        torch.equal(again(source).codes["tokenizer"], one.codes["tokenizer"])
        and again.tokenized == 1
    )


def test_a_damaged_cache_is_no_reason_to_stop(codec, tmp_path):
    """It is ours and can be made again: nobody should be sent to a verb for it."""
    source = pictures(paint(tmp_path / "pictures"))
    one = Coding(tmp_path, tokenizer=codec)(source)
    (shard,) = tmp_path.glob("cache/*/*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-5])
    assert torch.equal(
        Coding(tmp_path, tokenizer=codec)(source).codes["tokenizer"], one.codes["tokenizer"]
    )


# ------------------------------------------------------------------------------------------------- what cannot be read


def test_an_unreadable_picture_is_left_out_and_said(codec, tmp_path):
    folder = paint(tmp_path / "pictures")
    spoil(folder, 5)
    coding = Coding(tmp_path, tokenizer=codec)
    made = coding(pictures(folder))
    assert len(made) == 11 and "005.png" not in made.names
    assert any("Left out 005.png" in line for line in coding.said)
    assert [made.caption(i) for i in range(len(made))] == [
        f"number {i}" for i in range(12) if i != 5
    ]


def test_a_run_tells_what_it_leaves_out(tmp_path):
    folder = paint(tmp_path / "pictures")
    spoil(folder, 5)
    said = tessera(
        "train",
        "images-maskgit",
        "--preset",
        "tiny",
        "--tokenizer",
        tokenizer(),
        "--data",
        folder,
        "--steps",
        "1",
        "--sample-count",
        "1",
        "--out",
        tmp_path / "run",
    )
    assert said.code == 0 and "Left out 005.png" in said.out


@pytest.mark.parametrize(
    ("unreadable", "sentence"),
    [("train", "there is nothing to learn from"), ("validation", "The held-out set has no")],
)
def test_a_side_of_which_nothing_can_be_read_is_named_and_the_letter_says_who_knows_why(
    unreadable, sentence, codec, tmp_path
):
    folder = paint(tmp_path / "pictures")
    split = ImageDataConfig(path=str(folder), size=16, val_fraction=0.25).build()
    side = getattr(split, unreadable)
    for i in range(len(side)):
        (folder / side.name(i)).write_bytes(b"no picture")
    with pytest.raises(UserError, match=f"{sentence}.*`tessera check` tells why"):
        coded(
            split,
            {"tokenizer": codec},
            None,
            tmp_path / "cache",
            Distributed.from_environment(),
            lambda line: None,
        )


@pytest.mark.parametrize("codes", [None, "cache", "raw"])
def test_one_caption_that_cannot_be_read_stops_no_run(codes, tmp_path):
    folder = paint(tmp_path / "pictures")
    (folder / "005.txt").write_bytes(b"caf\xe9")
    recipe = "images-vqgan" if codes is None else "images-maskgit"
    tokenized = () if codes is None else ("--tokenizer", tokenizer(), "--task.tokens", codes)
    said = tessera(
        "train",
        recipe,
        "--preset",
        "tiny",
        *tokenized,
        "--data",
        folder,
        "--steps",
        "1",
        "--sample-count",
        "1",
        "--out",
        tmp_path / "run",
    )
    assert said.code == 0, said


# ------------------------------------------------------------------------------------------- codes of `tessera tokenize`


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return paint(tmp_path / "pictures")


@pytest.fixture
def codes(folder: Path, tmp_path: Path) -> Path:
    assert tessera("tokenize", tokenizer(), "--data", folder, "--out", tmp_path / "codes").code == 0
    return tmp_path / "codes"


def test_codes_of_the_verb_are_taken_as_they_are(codes, folder, codec, tmp_path):
    coding = Coding(tmp_path, given=codes, tokenizer=codec)
    made = coding(pictures(folder))
    assert coding.said == [] and not (tmp_path / "cache").exists()
    assert torch.equal(
        made.codes["tokenizer"],
        Coding(tmp_path, tokenizer=codec)(pictures(folder)).codes["tokenizer"],
    )


def learning_from(
    codes: Path, folder: Path, out: Path, tokens: str | Path
) -> tuple[str | Path, ...]:
    return (
        "train",
        "images-maskgit",
        "--preset",
        "tiny",
        "--tokenizer",
        tokens,
        "--data",
        folder,
        "--task.tokens",
        codes,
        "--steps",
        "2",
        "--sample-count",
        "1",
        "--out",
        out,
    )


def test_a_run_learns_from_codes_of_the_verb(codes, folder, tmp_path):
    said = tessera(*learning_from(codes, folder, tmp_path / "run", tokenizer()))
    assert said.code == 0 and "Tokenizing" not in said.out
    train(
        tmp_path / "cached",
        dataclasses.replace(stored(tmp_path / "run"), task=cached(stored(tmp_path / "run").task)),
    )
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "cached")


def stored(place: Path) -> Run:
    return load_run(place).run


def cached(task: Any) -> Any:
    return dataclasses.replace(task, tokens="cache")


def test_codes_of_another_tokenizer_are_refused_with_both_fingerprints(
    codes, folder, another, codec, tmp_path
):
    letter = run_invalid(*learning_from(codes, folder, tmp_path / "run", another))
    assert "made by another tokenizer" in letter and codec.fingerprint[:12] in letter
    assert Tokenizer(load_run(another)).fingerprint[:12] in letter and "tessera tokenize" in letter


def test_codes_of_pictures_that_changed_since_are_made_anew_and_that_is_said(
    codes, folder, codec, tmp_path
):
    repaint(folder)
    coding = Coding(tmp_path, given=codes, tokenizer=codec)
    made = coding(pictures(folder))
    assert coding.tokenized == 1 and "as they are now; the rest is tokenized here" in coding.said[0]
    assert torch.equal(
        made.codes["tokenizer"],
        Coding(tmp_path, tokenizer=codec)(pictures(folder)).codes["tokenizer"],
    )


def test_codes_are_of_use_though_one_picture_was_unreadable(folder, codec, tmp_path):
    """The verb leaves out what it cannot read, and so does the run: for one bad file a million are
    not tokenized again."""
    spoil(folder, 5)
    assert tessera("tokenize", tokenizer(), "--data", folder, "--out", tmp_path / "codes").code == 0
    coding = Coding(tmp_path, given=tmp_path / "codes", tokenizer=codec)
    assert len(coding(pictures(folder))) == 11
    assert [line for line in coding.said if line.startswith("Tokenizing")][0].startswith(
        "Tokenizing 1 examples"
    )


def test_a_folder_without_codes_is_refused_and_not_passed_over(folder, tmp_path):
    letter = run_invalid(*learning_from(tmp_path / "cods", folder, tmp_path / "run", tokenizer()))
    assert "no codes" in letter and "tessera tokenize" in letter


def test_a_folder_that_happens_to_be_called_cache_is_not_meant(tmp_path, codec, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "index.json").write_text("{}")
    run = with_codes(build_tiny(images_maskgit), "cache")
    engine_in(tmp_path / "run", run).folder.unlock()


def test_super_resolution_takes_given_codes_for_the_larger_pictures_only(tmp_path):
    folder = paint(tmp_path / "pictures", size=40)
    assert (
        tessera("tokenize", tokenizer(32), "--data", folder, "--out", tmp_path / "codes").code == 0
    )
    parts = {
        "tokenizer": Tokenizer(load_run(tokenizer(32))),
        "smaller": Tokenizer(load_run(tokenizer(16))),
    }
    coding = Coding(tmp_path, given=tmp_path / "codes", **parts)
    made = coding(ImageDataConfig(path=str(folder), size=32).full())
    assert coding.tokenized == 1 and {
        name: tuple(one.shape) for name, one in made.codes.items()
    } == {
        "tokenizer": (12, 8, 8),
        "smaller": (12, 4, 4),
    }


def test_the_verb_marks_what_it_tokenized(codes, folder):
    index = json.loads((codes / "index.json").read_text())
    source = pictures(folder)
    assert (
        index["marks"] == [source.signature(i) for i in range(len(source))]
        and len(set(index["names"])) == 12
    )


def test_toys_know_all_that_they_depend_on():
    made = [
        ImageDataConfig(size=16, num_synthetic=6, **choice).full()
        for choice in ({}, {"toy_seed": 1}, {"toy_shapes": 1})
    ]
    assert len({source.signature(0) for source in made}) == 3
