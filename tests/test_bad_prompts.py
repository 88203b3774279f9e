"""Tests of invalid prompts, masks, captions and settings of generators, and of their errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tessera.api.generator import Generator
from tessera.modalities.image.recipes import images_maskgit
from tessera.run.config import Run
from tessera.run.errors import UserError
from tests.cli_runner import run_invalid, tessera
from tests.runs import build_tiny, tokenizer, train

TRAIN = (
    *("train", "images-maskgit", "--preset", "tiny"),
    *("--steps", "1", "--batch-size", "2", "--sample-count", "1"),
)


def shorten(run: Run, steps: int = 1) -> Run:
    engine = dataclasses.replace(run.engine, steps=steps, sample_count=1)
    return dataclasses.replace(run, engine=engine)


def write_images(folder: Path, count: int = 6, size: int = 16) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (4, 4, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).resize((size, size)).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "captioned"
    train(folder, shorten(build_tiny(images_maskgit)))
    return folder


@pytest.fixture(scope="module")
def unconditional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "unconditional"
    train(folder, shorten(build_tiny(images_maskgit, text="none")))
    return folder


@pytest.fixture(scope="module")
def class_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was trained on the folders "cat", "golden_retriever" and "T-Rex"."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("cat", "golden_retriever", "T-Rex"):
        write_images(folder / "images" / name)
    result = tessera(
        *TRAIN, "--tokenizer", tokenizer(), "--data", folder / "images", "--out", folder / "run"
    )
    assert result.code == 0, result
    return folder / "run"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


# ---- captions


def test_missing_captions_are_an_error_that_names_the_options(tmp_path):
    folder = write_images(tmp_path / "images")
    command = (*TRAIN, "--tokenizer", tokenizer(), "--data", folder)
    message = run_invalid(*command, "--out", tmp_path / "run")
    assert "No example has a caption" in message
    assert "--text none" in message and "metadata.jsonl" in message
    result = tessera(*command, "--text", "none", "--out", tmp_path / "unconditional")
    assert result.code == 0, result


def test_missing_captions_are_an_error_with_live_tokens_too(tmp_path):
    folder = write_images(tmp_path / "images")
    flags = ("--task.tokens", "live", "--out", tmp_path / "run")
    message = run_invalid(*TRAIN, "--tokenizer", tokenizer(), "--data", folder, *flags)
    assert "No example has a caption" in message


def test_captions_of_some_examples_are_enough(tmp_path):
    folder = write_images(tmp_path / "images")
    for number in range(6):
        (folder / f"{number}.txt").write_text("a ramp" if number % 2 else "")
    flags = ("--tokenizer", tokenizer(), "--data", folder, "--out", tmp_path / "run")
    assert tessera(*TRAIN, *flags).code == 0


@pytest.mark.parametrize("tokens", ["cache", "live"])
def test_unreadable_caption_leaves_out_its_example_only(tokens, tmp_path):
    folder = write_images(tmp_path / "images")
    for number in range(6):
        (folder / f"{number}.txt").write_text("a ramp")
    (folder / "4.txt").write_bytes(b"caf\xe9")
    flags = ("--task.tokens", tokens, "--steps", "4", "--data.val-fraction", "0")
    command = (*TRAIN, "--tokenizer", tokenizer(), "--data", folder, *flags)
    result = tessera(*command, "--out", tmp_path / "run")
    assert result.code == 0, result
    assert "Skipped 4.png" in result.text and "4.txt: the caption cannot be read" in result.text


def test_unreadable_caption_cannot_be_a_prompt(run, tmp_path, out):
    folder = write_images(tmp_path / "images", 1)
    (folder / "0.txt").write_bytes(b"caf\xe9")
    message = run_invalid("sample", run, "--data", folder, "--count", "1", "--out", out)
    assert "0.txt: the caption cannot be read" in message and not out.exists()


def test_unconditional_run_generates_but_supports_no_prompt(unconditional, out):
    assert tessera("sample", unconditional, "--count", "2", "--out", out).code == 0
    for flags in (("--prompt", "a ring"), ("--negative-prompt", "a ring")):
        message = run_invalid("sample", unconditional, *flags, "--out", out / "other")
        assert "trained without captions and supports no prompt" in message
    assert len(Generator.load(unconditional).generate([""] * 2).media) == 2


def test_unconditional_run_rejects_prompts_in_python(unconditional):
    with pytest.raises(UserError, match="without captions"):
        Generator.load(unconditional).generate(["a ring"])


def test_settings_of_unconditional_samples_have_no_prompts(unconditional, out):
    assert tessera("sample", unconditional, "--count", "2", "--out", out).code == 0
    assert not any(json.loads((out / "settings.json").read_text())["prompts"])


# ---- prompts


def test_truncated_prompt_is_reported_once(run, out):
    long = "a red circle left of a blue square, " * 30
    result = tessera("sample", run, "--prompt", long, "--count", "3", "--out", out)
    assert result.code == 0 and result.err.count("The text encoder truncates this prompt") == 1
    other = out.with_name("short")
    short = tessera("sample", run, "--prompt", "a red circle", "--count", "1", "--out", other)
    assert "truncates" not in short.err


def test_truncated_negative_prompt_is_reported_too(run, out):
    flags = ("--prompt", "x", "--negative-prompt", "blurred and dark " * 60, "--count", "1")
    result = tessera("sample", run, *flags, "--out", out)
    assert result.code == 0 and result.err.count("The text encoder truncates") == 1


@pytest.mark.parametrize("prompt", ["", "   ", "木🚲", "a\nb", "\x00", "-" * 5 + "x", "\udce9"])
def test_unusual_prompts_are_accepted(prompt, run):
    assert len(Generator.load(run).generate([prompt]).media) == 1


def test_tokenizer_supports_no_prompt(out):
    message = run_invalid("sample", tokenizer(), "--prompt", "a ring", "--out", out)
    assert "images-vqgan reconstructs examples (--data) and supports no prompt" in message
    assert "images-maskgit" in message and not out.exists()
    with pytest.raises(UserError, match="trains no generator"):
        Generator.load(tokenizer())


def test_missing_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match="There is no run in .*nowhere"):
        Generator.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--decoding-steps", "0"), "decoding_steps must be at least 1, got 0"),
        (("--guidance-from", "0.8", "--guidance-to", "0.2"), "not an interval"),
        (("--temperature", "-1"), "temperature must be finite and at least 0"),
        (("--top-p", "0"), "top_p must be above 0"),
        (("--order", "critic"), "no critic"),
        (("--count", "0"), "--count must be at least 1, got 0"),
        (("--count", "-2"), "--count must be at least 1, got -2"),
        (("--guidance", "nan"), "guidance scale must be a finite number"),
    ],
)
def test_invalid_sampling_settings(flags, expected, run, out):
    assert expected in run_invalid("sample", run, "--prompt", "a ring", *flags, "--out", out)
    assert not out.exists()


# ---- named folders


def test_class_names_are_stored_and_accepted_in_any_case(class_run, out):
    generator = Generator.load(class_run)
    assert generator.classes == ["T-Rex", "cat", "golden retriever"]
    flags = ("--prompt", "Golden Retriever", "--count", "1", "--out", out)
    assert tessera("sample", class_run, *flags).code == 0
    assert len(generator.generate(["cat", ""]).media) == 2


def test_class_name_is_spelled_as_in_training(class_run):
    generator = Generator.load(class_run)
    typed, exact = (generator.generate([name]) for name in ("t rex", "T-Rex"))
    assert typed.names == exact.names == ["T-Rex"]
    assert typed.codes[0].equal(exact.codes[0])


def test_unknown_class_is_rejected_with_the_closest_name(class_run, out):
    flags = ("--prompt", "golden retreiver", "--count", "1", "--out", out)
    message = run_invalid("sample", class_run, *flags)
    expected = "'golden retreiver' is not one of them: did you mean 'golden retriever'?"
    assert expected in message and not out.exists()
    with pytest.raises(UserError, match="T-Rex, cat, golden retriever"):
        Generator.load(class_run).generate(["zeppelin"])


def test_unknown_class_as_negative_prompt_is_rejected(class_run, out):
    flags = ("--prompt", "cat", "--negative-prompt", "zeppelin", "--count", "1", "--out", out)
    assert "'zeppelin' is not one of them" in run_invalid("sample", class_run, *flags)


def test_run_on_captions_accepts_any_prompt(run):
    generator = Generator.load(run)
    assert generator.classes == [] and len(generator.generate(["zeppelin"]).media) == 1


# ---- masks


def write_mask(folder: Path, size: int, white: bool = True) -> Path:
    path = folder / f"mask-{size}-{white}.png"
    PIL.Image.new("L", (size, size), 255 if white else 0).save(path)
    return path


def test_mask_of_another_size_is_rejected_with_both_sizes(run, tmp_path, out):
    image = write_images(tmp_path / "images", 1) / "0.png"
    flags = ("--data", image, "--mask", write_mask(tmp_path, 20), "--prompt", "x", "--out", out)
    message = run_invalid("sample", run, *flags)
    assert "20 x 20" in message and "16 x 16" in message and not out.exists()


def test_mask_without_white_is_rejected(run, tmp_path, out):
    image = write_images(tmp_path / "images", 1) / "0.png"
    mask = write_mask(tmp_path, 16, white=False)
    message = run_invalid(
        "sample", run, "--data", image, "--mask", mask, "--prompt", "x", "--out", out
    )
    assert "has no white pixel" in message and not out.exists()


def test_mask_needs_a_single_image(run, tmp_path, out):
    mask = write_mask(tmp_path, 16)
    message = run_invalid("sample", run, "--mask", mask, "--prompt", "x", "--out", out)
    assert "--data IMAGE" in message
    folder = write_images(tmp_path / "images", 3)
    message = run_invalid(
        "sample", run, "--mask", mask, "--data", folder, "--prompt", "x", "--out", out
    )
    assert "has 3 examples, expected a single file" in message and not out.exists()


def test_unreadable_image_or_mask_is_an_error(run, tmp_path, out):
    image, mask = write_images(tmp_path / "images", 1) / "0.png", write_mask(tmp_path, 16)
    truncated, missing = tmp_path / "truncated.png", tmp_path / "nowhere.png"
    truncated.write_bytes(image.read_bytes()[:50])
    for data, given_mask in (
        (image, truncated),
        (truncated, mask),
        (image, missing),
        (missing, mask),
    ):
        flags = ("--data", data, "--mask", given_mask, "--prompt", "x", "--out", out)
        message = run_invalid("sample", run, *flags)
        assert "truncated.png" in message or "nowhere.png" in message
    assert not out.exists()


# ---- settings of a run


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--task.max-positions", "0"), "max_positions must be at least 1"),
        (("--task.model.dim", "33"), "dim"),
        (("--task.masking.keep", "2"), "keep (2.0)"),
        (("--task.cond-drop-prob", "1"), "cond_drop_prob must be at least 0 and below 1"),
        (("--task.sampling.order", "critic"), "The sampling order is critic, but there is none"),
        (("--text", "no/such/encoder"), "no/such/encoder"),
    ],
)
def test_invalid_training_settings(flags, expected, tmp_path):
    command = (*TRAIN, "--tokenizer", tokenizer(), *flags, "--out", tmp_path / "run")
    assert expected in run_invalid(*command)
    assert not (tmp_path / "run").exists()
