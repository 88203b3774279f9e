"""The verbs, on one tiny run: what a person types, what they are told, and what lies on their disk
afterwards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from tessera import __version__
from tessera.api.tokenizer import Tokenizer
from tessera.cli.main import VERBS
from tessera.data.tokens import read_tokens
from tessera.engine.checkpoint import list_steps
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tests.cli_runner import CommandResult, files, run_invalid, tessera


def paint(folder: Path, count: int, size: int = 24, first: int = 0) -> Path:
    """A folder of small pictures, each another."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        pixels = np.random.default_rng(number).integers(0, 255, (4, 4, 3), dtype=np.uint8)
        picture = PIL.Image.fromarray(pixels).resize((size, size + number % 5))
        picture.save(folder / f"{number:03d}.png")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CommandResult]:
    run = tmp_path_factory.mktemp("runs") / "tiny"
    return run, tessera("train", "images-vqgan", "--preset", "tiny", "--steps", "4", "--out", run)


@pytest.fixture(scope="module")
def run(trained: tuple[Path, CommandResult]) -> Path:
    return trained[0]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paint(tmp_path_factory.mktemp("data") / "pictures", 9)


# ---------------------------------------------------------------------------------------------------------- the start


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], ["help"]])
def test_help_lists_the_verbs(arguments):
    said = tessera(*arguments)
    assert said.code == 0
    assert all(f"tessera {verb}" in said.out for verb in VERBS)


def test_the_version_is_told():
    assert tessera("--version") == CommandResult(0, f"{__version__}\n", "")


def test_recipes_are_listed_with_a_summary():
    said = tessera("recipes")
    assert (
        said.code == 0
        and "images-vqgan" in said.out
        and "An image tokenizer" in said.out
        and "tiny" in said.out
    )


@pytest.mark.parametrize(
    ("wrong", "meant"), [("tran", "train"), ("evalute", "evaluate"), ("tokenise", "tokenize")]
)
def test_an_unknown_verb_is_refused_with_the_nearest(wrong, meant):
    assert f"There is no verb '{wrong}': did you mean '{meant}'?" in run_invalid(wrong)


def test_a_verb_like_no_other_is_refused_with_all_of_them():
    assert "tessera recipes" in run_invalid("xyzzy")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "train"])
def test_every_verb_explains_itself(verb):
    said = tessera(verb, "--help")
    assert said.code == 0 and f"usage: tessera {verb}" in said.text


def test_an_unknown_recipe_is_refused_with_the_nearest():
    assert "There is no recipe 'images-vqgn': did you mean 'images-vqgan'?" in run_invalid(
        "train", "images-vqgn"
    )


@pytest.mark.parametrize("arguments", [["train"], ["train", "--steps", "3"]])
def test_a_recipe_must_be_named(arguments):
    assert "Which recipe?" in run_invalid(*arguments)


# -------------------------------------------------------------------------------------------------------------- train


def test_a_run_tells_what_it_does_and_where_to_look(trained):
    run, said = trained
    assert said.code == 0 and said.err == ""
    assert "4 steps of 8 examples from built-in toys" in said.out
    assert "The perceptual term is off." in said.out
    assert (
        "validation at 4: psnr" in said.out
        and "Done: 4 steps. On 16 held-out examples:" in said.out
    )
    assert f"Samples to look at: {run / 'samples' / '000004'}" in said.out


def test_a_runs_folder_holds_what_was_promised(run):
    assert list_steps(run / "checkpoints") == [4]
    assert json.loads((run / "config.json").read_text())["engine"]["steps"] == 4
    kinds = [(record["kind"], record["step"]) for record in RunDirectory(run).read_records()]
    assert kinds == [("train", 1), ("train", 2), ("train", 3), ("train", 4), ("validation", 4)]
    with PIL.Image.open(run / "samples" / "000004" / "sheet.png") as sheet:
        assert sheet.width > 32
    card = (run / "README.md").read_text()
    assert "images-vqgan" in card and "for 4 steps" in card and "| psnr |" in card


def test_the_same_command_goes_on_and_a_finished_run_stays_as_it_is(run, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(run, again)
    before = files(again / "checkpoints", again / "samples")
    command = ["train", "images-vqgan", "--preset", "tiny", "--out", again]
    said = tessera(*command, "--steps", "4")
    assert said.code == 0 and "Going on from step 4." in said.out
    assert files(again / "checkpoints", again / "samples") == before
    said = tessera(*command, "--steps", "6")
    assert said.code == 0 and "Done: 6 steps." in said.out
    assert [record["step"] for record in RunDirectory(again).read_records("train")] == [1, 2, 3, 4, 5, 6]


def test_other_settings_on_a_used_folder_are_refused_and_fresh_takes_a_new_one(run, tmp_path):
    used = tmp_path / "used"
    shutil.copytree(run, used)
    before = files(used)
    command = [
        "train",
        "images-vqgan",
        "--preset",
        "tiny",
        "--steps",
        "2",
        "--batch-size",
        "4",
        "--out",
        used,
    ]
    letter = run_invalid(*command)
    assert "engine.batch_size: 8 in the folder, 4 asked for" in letter and "--fresh" in letter
    assert "steps" not in letter.split("settings:")[1].split("Use its")[0]
    assert tessera(*command, "--fresh").code == 0
    assert list_steps(tmp_path / "used-2" / "checkpoints") == [2]
    assert {name: data for name, data in files(used).items() if not name.endswith("/lock")} == {
        name: data for name, data in before.items() if not name.endswith("/lock")
    }


def test_a_rehearsal_shows_the_plan_and_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = tessera("train", "images-vqgan", "--preset", "tiny", "--adversary", "on", "--dry-run")
    assert said.code == 0
    for word in ("VQGAN", "PatchDiscriminator", "adamw", "cosine", "all well", "Nothing was kept"):
        assert word in said.out, word
    assert list(tmp_path.iterdir()) == []


def test_own_pictures_are_trained_on_without_a_word_about_toys(pictures, tmp_path):
    said = tessera(
        "train",
        "images-vqgan",
        "--preset",
        "tiny",
        "--data",
        pictures,
        "--batch-size",
        "4",
        "--steps",
        "1",
        "--out",
        tmp_path / "run",
    )
    assert said.code == 0 and f"from {pictures}" in said.out and "toys" not in said.out
    assert str(pictures) in (tmp_path / "run" / "README.md").read_text()


# ------------------------------------------------------------------------------------------------------------- sample


def test_given_files_are_rebuilt_beside_their_originals(run, pictures, tmp_path):
    said = tessera("sample", run, "--data", pictures, "--out", tmp_path / "made", "--count", "5")
    assert said.code == 0 and "5 samples of step 4 (average weights)" in said.out
    made = sorted(path.name for path in (tmp_path / "made").iterdir())
    assert made == [
        "0000.png",
        "0001.png",
        "0002.png",
        "0003.png",
        "0004.png",
        "settings.json",
        "sheet.png",
    ]
    with PIL.Image.open(tmp_path / "made" / "0002.png") as pair:
        assert pair.width >= 2 * pair.height
    settings = json.loads((tmp_path / "made" / "settings.json").read_text())
    assert (
        settings["steps"] == 4
        and settings["data"] == str(pictures)
        and settings["weights"] == "ema"
    )


def test_one_file_can_be_rebuilt(run, pictures, tmp_path):
    said = tessera("sample", run, "--data", pictures / "003.png", "--out", tmp_path)
    assert said.code == 0 and "1 samples" in said.out


def test_samples_left_without_a_place_get_a_new_one_each_time(run):
    places = [
        tessera("sample", run, "--count", "2").out.split(" in ")[1].split(";")[0] for _ in range(2)
    ]
    assert [Path(place).name for place in places] == ["by-hand-001", "by-hand-002"]
    assert all((Path(place) / "sheet.png").is_file() for place in places)


def test_a_sample_is_the_same_every_time_and_of_the_weights_asked_for(run, pictures, tmp_path):
    for name, weights in (("a", "ema"), ("b", "ema"), ("raw", "raw")):
        tessera(
            "sample",
            run,
            "--data",
            pictures,
            "--count",
            "3",
            "--weights",
            weights,
            "--out",
            tmp_path / name,
        )
    a, b, live = ((tmp_path / name / "sheet.png").read_bytes() for name in ("a", "b", "raw"))
    assert a == b and a != live


# ----------------------------------------------------------------------------------------------------------- tokenize


@pytest.fixture(scope="module")
def codes(run: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("codes") / "codes"
    said = tessera("tokenize", run, "--data", pictures, "--out", out, "--batch-size", "4")
    assert said.code == 0 and "9 of 9 examples as codes of 64 symbols" in said.out
    return out


def test_the_codes_of_a_folder_are_those_of_the_tokenizer_in_python(run, pictures, codes):
    tokenizer = Tokenizer.load(run)
    stored = read_tokens(codes, tokenizer.fingerprint)
    assert stored.names == [f"{number:03d}.png" for number in range(9)]
    assert stored.codes.shape == (9, 4, 4) and stored.about.vocab_size == tokenizer.vocab_size == 64
    source = tokenizer.run.data.__class__(path=str(pictures), size=16).full()
    batch = source.collate([source.item(i, np.random.default_rng(0)) for i in range(9)])
    live = tokenizer.encode(batch.pixels)
    assert torch.equal(stored.codes, live)
    assert torch.equal(tokenizer.decode(stored.codes), tokenizer.decode(live))
    assert (
        tokenizer.decode(live).shape == (9, 3, 16, 16) and not tokenizer.decode(live).requires_grad
    )


def test_a_fingerprint_is_that_of_the_weights_and_of_how_pictures_are_prepared(run):
    first, second, live = (
        Tokenizer.load(run),
        Tokenizer.load(run),
        Tokenizer.load(run, weights="raw"),
    )
    assert first.fingerprint == second.fingerprint != live.fingerprint
    with torch.no_grad():
        second.model.last_layer[0, 0, 0, 0] += 1e-3
    assert first.fingerprint != second.fingerprint
    assert first.preprocessing == {"size": 16}


def test_codes_of_other_weights_are_refused(run, codes):
    with pytest.raises(UserError, match="another tokenizer"):
        read_tokens(codes, Tokenizer.load(run, weights="raw").fingerprint)


def test_codes_are_not_written_over(run, pictures, codes):
    before = files(codes)
    assert "already holds codes" in run_invalid("tokenize", run, "--data", pictures, "--out", codes)
    assert files(codes) == before


def test_the_runs_own_data_is_tokenized_where_none_is_given(run, tmp_path):
    said = tessera("tokenize", run, "--out", tmp_path / "codes")
    assert said.code == 0 and "64 of 64 examples" in said.out


# ----------------------------------------------------------------------------------------------------------- evaluate


def test_an_evaluation_tells_live_and_average_and_how_they_came_about(run):
    said = tessera("evaluate", run)
    assert said.code == 0 and "raw" in said.out and "ema" in said.out
    written = json.loads((run / "evaluation.json").read_text())
    measures = {"psnr", "ssim", "pixel", "usage", "perplexity"}
    for weights in ("raw", "ema"):
        assert measures <= written["numbers"][weights].keys()
    protocol = written["protocol"]
    assert (protocol["recipe"], protocol["steps"], protocol["examples"]) == ("images-vqgan", 4, 16)
    assert protocol["transform"] == {"size": 16} and protocol["tessera"] == __version__
    record = RunDirectory(run).read_records("validation")[-1]
    for weights in ("raw", "ema"):
        assert written["numbers"][weights]["psnr"] == pytest.approx(
            record[f"{weights}/psnr"], rel=1e-5
        )


def test_a_given_folder_is_evaluated_whole_and_what_cannot_be_read_is_not_counted(
    run, pictures, tmp_path
):
    hash_seed = tmp_path / "mixed"
    shutil.copytree(pictures, hash_seed)
    (hash_seed / "broken.png").write_bytes(b"no picture")
    out = tmp_path / "numbers.json"
    said = tessera("evaluate", run, "--data", hash_seed, "--out", out)
    assert said.code == 0 and "on 9 examples" in said.out and "Left out broken.png" in said.err
    written = json.loads(out.read_text())
    assert written["protocol"]["examples"] == 9 and written["protocol"]["data"] == str(hash_seed)
    tessera("evaluate", run, "--data", pictures, "--out", tmp_path / "clean.json")
    assert json.loads((tmp_path / "clean.json").read_text())["numbers"] == written["numbers"]


# -------------------------------------------------------------------------------------------------------------- check


def test_check_counts_what_can_be_used_and_says_why_the_rest_cannot(pictures, tmp_path):
    hash_seed = tmp_path / "mixed"
    shutil.copytree(pictures, hash_seed)
    (hash_seed / "broken.png").write_bytes(b"no picture")
    said = tessera("check", hash_seed)
    assert said.code == 0 and "broken.png" in said.out
    report = json.loads(tessera("check", hash_seed, "--json").out)
    assert (report["images"], report["usable"]) == (10, 9)
    assert [one["name"] for one in report["unusable"]] == ["broken.png"] and report["unusable"][0][
        "reason"
    ]


def test_check_fails_where_nothing_is_usable(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"no picture")
    for name in ("empty", "broken", "nowhere"):
        said = tessera("check", tmp_path / name)
        assert said.code == 1 and said.text
        as_json = tessera("check", tmp_path / name, "--json")
        assert as_json.code == 1 and json.loads(as_json.out)["usable"] == 0


# --------------------------------------------------------------------------------------------------- what is no run


@pytest.mark.parametrize("verb", [["sample"], ["evaluate"], ["tokenize", "--out", "codes"]])
def test_a_folder_without_a_trained_run_is_refused(verb, run, tmp_path):
    name, *rest = verb
    assert "no such folder" in run_invalid(name, tmp_path / "nowhere", *rest)
    assert "it has no config.json" in run_invalid(name, tmp_path, *rest)
    untrained = tmp_path / "untrained"
    untrained.mkdir()
    shutil.copy(run / "config.json", untrained)
    assert "never trained" in run_invalid(name, untrained, *rest)
    assert sorted(path.name for path in untrained.iterdir()) == ["config.json"]


@pytest.mark.parametrize("verb", ["sample", "evaluate", "tokenize"])
def test_a_place_that_cannot_be_written_is_refused(verb, run, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    assert f"{file / 'x'} cannot be written" in run_invalid(verb, run, "--out", file / "x")
    assert file.read_text() == "mine"
