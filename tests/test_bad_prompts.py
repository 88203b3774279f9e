"""Prompts, masks and captions that a generator can do nothing with: a letter for each, and no
trace."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tessera.api.generator import Generator, classes_of
from tessera.modalities.image.recipes import images_maskgit
from tessera.run.config import Run
from tessera.run.errors import UserError
from tests.cli_runner import run_invalid, tessera
from tests.runs import build_tiny, tokenizer, train

TRAIN = (
    "train",
    "images-maskgit",
    "--preset",
    "tiny",
    "--steps",
    "1",
    "--batch-size",
    "2",
    "--sample-count",
    "1",
)


def brief(run: Run, steps: int = 1) -> Run:
    return dataclasses.replace(
        run, engine=dataclasses.replace(run.engine, steps=steps, sample_count=1)
    )


def paint(folder: Path, count: int = 6, size: int = 16) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (4, 4, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).resize((size, size)).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "captioned"
    train(place, brief(build_tiny(images_maskgit)))
    return place


@pytest.fixture(scope="module")
def wordless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "wordless"
    train(place, brief(build_tiny(images_maskgit, text="none")))
    return place


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on folders of cats and of golden retrievers."""
    place = tmp_path_factory.mktemp("runs")
    for name in ("cat", "golden_retriever"):
        paint(place / "pictures" / name)
    said = tessera(
        *TRAIN, "--tokenizer", tokenizer(), "--data", place / "pictures", "--out", place / "run"
    )
    assert said.code == 0, said
    return place / "run"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


# ------------------------------------------------------------------------------------------------------------- captions


def test_no_caption_where_the_recipe_wants_them_is_refused_with_the_way_out(tmp_path):
    folder = paint(tmp_path / "pictures")
    command = (*TRAIN, "--tokenizer", tokenizer(), "--data", folder)
    letter = run_invalid(*command, "--out", tmp_path / "run")
    assert (
        "Not one example has a caption" in letter
        and "--text none" in letter
        and "metadata.jsonl" in letter
    )
    said = tessera(*command, "--text", "none", "--out", tmp_path / "wordless")
    assert said.code == 0, said


def test_live_too_no_caption_is_refused(tmp_path):
    folder = paint(tmp_path / "pictures")
    letter = run_invalid(
        *TRAIN,
        "--tokenizer",
        tokenizer(),
        "--data",
        folder,
        "--task.tokens",
        "live",
        "--out",
        tmp_path / "run",
    )
    assert "Not one example has a caption" in letter


def test_some_captions_are_enough(tmp_path):
    folder = paint(tmp_path / "pictures")
    for number in range(6):
        (folder / f"{number}.txt").write_text("a ramp" if number % 2 else "")
    assert (
        tessera(
            *TRAIN, "--tokenizer", tokenizer(), "--data", folder, "--out", tmp_path / "run"
        ).code
        == 0
    )


def test_a_run_without_words_makes_pictures_and_takes_no_prompt(wordless, out):
    assert tessera("sample", wordless, "--count", "2", "--out", out).code == 0
    for asked in (("--prompt", "a ring"), ("--negative", "a ring")):
        assert "trained without captions: it takes no prompt" in run_invalid(
            "sample", wordless, *asked, "--out", out / "other"
        )
    assert len(Generator.load(wordless).generate([""] * 2)) == 2


def test_in_python_too_a_run_without_words_takes_no_prompt(wordless):
    with pytest.raises(UserError, match="without captions"):
        Generator.load(wordless).generate(["a ring"])


def test_what_was_not_asked_of_a_run_without_words_is_not_written_down_as_asked(wordless, out):
    assert tessera("sample", wordless, "--count", "2", "--out", out).code == 0
    assert not any(json.loads((out / "settings.json").read_text())["prompts"])


# -------------------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_longer_than_the_encoder_reads_is_cut_and_that_is_said_once(run, out):
    long = "a red circle left of a blue square, " * 30
    said = tessera("sample", run, "--prompt", long, "--count", "3", "--out", out)
    assert said.code == 0 and said.err.count("does not read the end of so long a prompt") == 1
    short = tessera(
        "sample", run, "--prompt", "a red circle", "--count", "1", "--out", out.with_name("short")
    )
    assert "does not read" not in short.err


def test_a_long_negative_prompt_is_said_too(run, out):
    said = tessera(
        "sample",
        run,
        "--prompt",
        "x",
        "--negative",
        "blurred and dark " * 60,
        "--count",
        "1",
        "--out",
        out,
    )
    assert said.code == 0 and said.err.count("does not read the end") == 1


@pytest.mark.parametrize("prompt", ["", "   ", "木🚲", "a\nb", "\x00", "-" * 5 + "x", "\udce9"])
def test_odd_prompts_are_prompts(prompt, run):
    assert len(Generator.load(run).generate([prompt])) == 1


def test_a_tokenizer_takes_no_prompt(out):
    letter = run_invalid("sample", tokenizer(), "--prompt", "a ring", "--out", out)
    assert (
        "images-vqgan rebuilds what it is shown" in letter
        and "images-maskgit" in letter
        and not out.exists()
    )
    with pytest.raises(UserError, match="makes nothing from a prompt"):
        Generator.load(tokenizer())


def test_a_run_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError):
        Generator.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--decoding-steps", "0"), "must be at least 1"),
        (("--guidance-from", "0.8", "--guidance-to", "0.2"), "not an interval"),
        (("--temperature", "-1"), "temperature"),
        (("--top-p", "0"), "top_p"),
        (("--order", "critic"), "no critic"),
        (("--count", "0"), "count"),
        (("--count", "-2"), "count"),
        (("--guidance", "nan"), "scale"),
    ],
)
def test_settings_that_cannot_be_are_refused(flags, says, run, out):
    assert says in run_invalid("sample", run, "--prompt", "a ring", *flags, "--out", out)
    assert not out.exists()


# ------------------------------------------------------------------------------------------------------- named folders


def test_a_run_on_named_folders_knows_their_names(classes, out):
    assert classes_of(classes) == ["cat", "golden retriever"]
    assert (
        tessera(
            "sample", classes, "--prompt", "Golden Retriever", "--count", "1", "--out", out
        ).code
        == 0
    )
    assert len(Generator.load(classes).generate(["cat", ""])) == 2


def test_an_unknown_class_is_refused_with_the_nearest_name(classes, out):
    letter = run_invalid(
        "sample", classes, "--prompt", "golden retreiver", "--count", "1", "--out", out
    )
    assert (
        "knows no 'golden retreiver': did you mean 'golden retriever'?" in letter
        and not out.exists()
    )
    with pytest.raises(UserError, match="cat, golden retriever"):
        Generator.load(classes).generate(["zeppelin"])


def test_an_unknown_class_to_lead_away_from_is_refused_too(classes, out):
    assert "knows no" in run_invalid(
        "sample", classes, "--prompt", "cat", "--negative", "zeppelin", "--count", "1", "--out", out
    )


def test_a_run_on_captions_takes_any_prompt(run):
    assert classes_of(run) == [] and len(Generator.load(run).generate(["zeppelin"])) == 1


# ---------------------------------------------------------------------------------------------------------------- masks


def masked(folder: Path, size: int, white: bool = True) -> Path:
    PIL.Image.new("L", (size, size), 255 if white else 0).save(folder / f"mask-{size}-{white}.png")
    return folder / f"mask-{size}-{white}.png"


def test_a_mask_of_another_size_is_refused_with_both_sizes(run, tmp_path, out):
    picture = paint(tmp_path / "pictures", 1) / "0.png"
    letter = run_invalid(
        "sample",
        run,
        "--data",
        picture,
        "--mask",
        masked(tmp_path, 20),
        "--prompt",
        "x",
        "--out",
        out,
    )
    assert "20 x 20" in letter and "16 x 16" in letter and not out.exists()


def test_a_mask_without_white_is_refused(run, tmp_path, out):
    picture = paint(tmp_path / "pictures", 1) / "0.png"
    letter = run_invalid(
        "sample",
        run,
        "--data",
        picture,
        "--mask",
        masked(tmp_path, 16, white=False),
        "--prompt",
        "x",
        "--out",
        out,
    )
    assert "Nothing is white" in letter and not out.exists()


def test_a_mask_without_a_picture_or_for_many_is_refused(run, tmp_path, out):
    mask = masked(tmp_path, 16)
    assert "--data PICTURE" in run_invalid("sample", run, "--mask", mask, "--prompt", "x", "--out", out)
    folder = paint(tmp_path / "pictures", 3)
    assert "holds 3" in run_invalid(
        "sample", run, "--mask", mask, "--data", folder, "--prompt", "x", "--out", out
    )


def test_a_picture_or_a_mask_that_cannot_be_read_is_told(run, tmp_path, out):
    picture, mask = paint(tmp_path / "pictures", 1) / "0.png", masked(tmp_path, 16)
    torn = tmp_path / "torn.png"
    torn.write_bytes(picture.read_bytes()[:50])
    for data, mask_given in (
        (picture, torn),
        (torn, mask),
        (picture, tmp_path / "nowhere.png"),
        (tmp_path / "nowhere.png", mask),
    ):
        run_invalid("sample", run, "--data", data, "--mask", mask_given, "--prompt", "x", "--out", out)
    assert not out.exists()


# ------------------------------------------------------------------------------------------------------ settings of a run


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--task.places", "0"), "places"),
        (("--task.model.width", "33"), "width"),
        (("--task.masking.keep", "2"), "keep"),
        (("--task.drop-condition", "1"), "drop_condition"),
        (("--task.sampling.order", "critic"), "critic"),
        (("--text", "no/such/encoder"), "no/such/encoder"),
    ],
)
def test_a_network_that_cannot_be_is_refused(flags, says, tmp_path):
    assert says in run_invalid(*TRAIN, "--tokenizer", tokenizer(), *flags, "--out", tmp_path / "run")
