"""The commands on one tiny run: output, exit codes, and the files they write."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import tyro

from tessera import __version__
from tessera.api.tokenizer import Tokenizer
from tessera.cli import flags
from tessera.cli.commands import COMMANDS, find_sheet
from tessera.data.tokens import read_tokens
from tessera.engine.checkpoint import list_steps
from tessera.modalities import MODALITIES
from tessera.modalities.image.media import Image
from tessera.recipes.registry import get_recipe
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tests.cli_runner import CommandResult, read_files, run_invalid, tessera

TRAIN = ("train", "images-vqgan", "--preset", "tiny")


def write_images(folder: Path, count: int, size: int = 24) -> Path:
    """Write small images, all of them different."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (4, 4, 3), dtype=np.uint8)
        image = PIL.Image.fromarray(pixels).resize((size, size + number % 5))
        image.save(folder / f"{number:03d}.png")
    return folder


def copy_with_broken_image(images: Path, folder: Path) -> Path:
    shutil.copytree(images, folder)
    (folder / "broken.png").write_bytes(b"not an image")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CommandResult]:
    run = tmp_path_factory.mktemp("runs") / "tiny"
    return run, tessera(*TRAIN, "--steps", "4", "--out", run)


@pytest.fixture(scope="module")
def run(trained: tuple[Path, CommandResult]) -> Path:
    return trained[0]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "images", 9)


# ---- help and unknown names


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], ["help"]])
def test_help_lists_every_command(arguments):
    result = tessera(*arguments)
    assert result.code == 0
    assert all(f"tessera {command}" in result.out for command in COMMANDS)


def test_version_is_printed():
    assert tessera("--version") == CommandResult(0, f"{__version__}\n", "")


def test_recipes_are_listed_with_their_summaries():
    result = tessera("recipes")
    assert result.code == 0
    for text in ("images-vqgan", "Train an image tokenizer", "tiny"):
        assert text in result.out


@pytest.mark.parametrize(
    ("wrong", "closest"), [("tran", "train"), ("evalute", "evaluate"), ("tokenise", "tokenize")]
)
def test_unknown_command_is_rejected_with_the_closest_one(wrong, closest):
    assert f"There is no command '{wrong}': did you mean '{closest}'?" in run_invalid(wrong)


def test_command_similar_to_none_is_rejected_with_all_of_them():
    message = run_invalid("xyzzy")
    assert all(f"tessera {command}" in message for command in COMMANDS)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "train"])
def test_every_command_has_help(command):
    result = tessera(command, "--help")
    assert result.code == 0 and f"usage: tessera {command}" in result.text


def test_unknown_recipe_is_rejected_with_the_closest_one():
    message = run_invalid("train", "images-vqgn")
    assert "There is no recipe 'images-vqgn': did you mean 'images-vqgan'?" in message


@pytest.mark.parametrize("arguments", [["train"], ["train", "--steps", "3"]])
def test_training_needs_a_recipe(arguments):
    assert "No recipe given: tessera train RECIPE" in run_invalid(*arguments)


def test_help_of_the_demo_states_the_time_of_each_medium():
    text = tessera("demo", "--help").text
    stated = {name for name, _ in re.findall(r"(\w+) (\d+) minutes", text)}
    assert stated == {modality.name for modality in MODALITIES.values() if modality.demo}
    assert "two CPU cores" in text


# ---- train


def test_training_prints_what_it_does_and_where_results_are(trained):
    run, result = trained
    assert result.code == 0 and result.err == ""
    for text in (
        "4 steps of 8 examples from synthetic data",
        "The perceptual loss is disabled.",
        "validation at step 4: psnr",
        "Done: 4 steps. On 16 held-out examples:",
        f"Samples: {run / 'samples' / '000004'}",
    ):
        assert text in result.out, text


def test_run_directory_has_all_documented_files(run):
    assert list_steps(run / "checkpoints") == [4]
    assert json.loads((run / "config.json").read_text())["engine"]["steps"] == 4
    kinds = [(record["kind"], record["step"]) for record in RunDirectory(run).read_records()]
    assert kinds == [("train", 1), ("train", 2), ("train", 3), ("train", 4), ("validation", 4)]
    with PIL.Image.open(run / "samples" / "000004" / "sheet.png") as sheet:
        assert sheet.width > 32
    card = (run / "README.md").read_text()
    assert "images-vqgan" in card and "for 4 steps" in card and "| psnr |" in card


def test_samples_of_a_run_are_spread_over_the_held_out_set(tmp_path):
    flags = ("--steps", "1", "--sample-count", "4", "--out", tmp_path)
    assert tessera(*TRAIN, *flags).code == 0
    folder = tmp_path / "samples" / "000001"
    settings = json.loads((folder / "settings.json").read_text())
    assert (settings["step"], settings["examples"]) == (1, held_out_names([0, 4, 8, 12]))
    assert settings.keys() == {"step", "examples", "captions"} and all(settings["captions"])
    assert len(list(folder.glob("0*.png"))) == 4


def held_out_names(indices: list[int]) -> list[str]:
    """Return names of the 16 synthetic examples that the tiny preset holds out."""
    return [f"synthetic-{(1 << 32) + index:06d}" for index in indices]


def test_same_command_resumes_and_leaves_a_finished_run_unchanged(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    before = read_files(copy / "checkpoints", copy / "samples")
    result = tessera(*TRAIN, "--out", copy, "--steps", "4")
    assert result.code == 0 and "Resuming from step 4." in result.out
    assert read_files(copy / "checkpoints", copy / "samples") == before
    result = tessera(*TRAIN, "--out", copy, "--steps", "6")
    assert result.code == 0 and "Done: 6 steps." in result.out
    steps = [record["step"] for record in RunDirectory(copy).read_records("train")]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_other_settings_are_rejected_unless_fresh_uses_a_new_folder(run, tmp_path):
    used = tmp_path / "used"
    shutil.copytree(run, used)
    before = read_files(used)
    command = (*TRAIN, "--steps", "2", "--batch-size", "4", "--out", used)
    message = run_invalid(*command)
    assert "engine.batch_size: 8 in the folder, 4 requested" in message and "--fresh" in message
    assert "steps" not in message.split("settings:")[1].split("Use its")[0]
    assert without_lock(read_files(used)) == without_lock(before)
    assert tessera(*command, "--fresh").code == 0
    assert list_steps(tmp_path / "used-2" / "checkpoints") == [2]
    assert without_lock(read_files(used)) == without_lock(before)


def without_lock(files: dict[str, bytes]) -> dict[str, bytes]:
    """Leave out the lock, which has the number of the last process that held it."""
    return {name: data for name, data in files.items() if not name.endswith("/lock")}


def test_dry_run_prints_the_plan_and_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = tessera(*TRAIN, "--adversary", "on", "--dry-run")
    assert result.code == 0
    for text in ("VQGAN", "PatchDiscriminator", "adamw", "cosine", "succeeded", "Nothing was kept"):
        assert text in result.out, text
    assert list(tmp_path.iterdir()) == []


def test_output_on_own_images_names_them_and_no_synthetic_data(images, tmp_path):
    flags = ("--data", images, "--batch-size", "4", "--steps", "1", "--out", tmp_path / "run")
    result = tessera(*TRAIN, *flags)
    assert result.code == 0 and f"from {images}" in result.out and "synthetic" not in result.out
    card = (tmp_path / "run" / "README.md").read_text()
    assert str(images) in card and "synthetic" not in card


# ---- sample


def test_files_are_reconstructed_next_to_their_originals(run, images, tmp_path):
    out = tmp_path / "samples"
    result = tessera("sample", run, "--data", images, "--out", out, "--count", "5")
    assert result.code == 0 and "5 samples of step 4 (ema weights)" in result.out
    numbered = [f"{number:04d}.png" for number in range(5)]
    assert sorted(path.name for path in out.iterdir()) == [*numbered, "settings.json", "sheet.png"]
    with PIL.Image.open(out / "0002.png") as pair:
        assert pair.width >= 2 * pair.height
    settings = json.loads((out / "settings.json").read_text())
    assert settings["step"] == 4 and settings["weights"] == "ema"
    assert settings["data"] == str(images) and settings["count"] == 5
    assert settings["examples"] == [f"{number:03d}.png" for number in (0, 1, 3, 5, 7)]


def test_samples_are_spread_over_the_held_out_set_and_named(run, tmp_path):
    assert tessera("sample", run, "--count", "4", "--out", tmp_path).code == 0
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["examples"] == held_out_names([0, 4, 8, 12])
    assert settings["data"] is None and len(list(tmp_path.glob("0*.png"))) == 4


def test_single_file_can_be_reconstructed(run, images, tmp_path):
    result = tessera("sample", run, "--data", images / "003.png", "--out", tmp_path)
    assert result.code == 0 and "1 samples" in result.out


def test_samples_without_an_output_folder_get_a_new_one(run):
    results = [tessera("sample", run, "--count", "2") for _ in range(2)]
    folders = [Path(result.out.split(" in ")[1].split(";")[0]) for result in results]
    assert [folder.name for folder in folders] == ["by-hand-001", "by-hand-002"]
    assert all((folder / "sheet.png").is_file() for folder in folders)


def test_samples_are_reproducible_and_of_the_requested_weights(run, images, tmp_path):
    for name, weights in (("a", "ema"), ("b", "ema"), ("raw", "raw")):
        flags = ("--count", "3", "--weights", weights, "--out", tmp_path / name)
        assert tessera("sample", run, "--data", images, *flags).code == 0
    a, b, raw = ((tmp_path / name / "sheet.png").read_bytes() for name in ("a", "b", "raw"))
    assert a == b and a != raw


@pytest.mark.parametrize(
    "flags",
    [
        ("--mask", "mask.png"),
        ("--like", "a.wav"),
        ("--prompt-audio", "a.wav"),
        ("--negative-prompt", "a ring"),
    ],
    ids=str,
)
def test_tokenizer_rejects_the_inputs_of_generators(flags, run, tmp_path):
    message = run_invalid("sample", run, *flags, "--out", tmp_path / "out")
    assert "reconstructs examples (--data)" in message and not (tmp_path / "out").exists()


@pytest.mark.parametrize("flag", ["seconds", "start"])
def test_flags_of_recordings_are_rejected_for_images(flag, run, tmp_path):
    message = run_invalid("sample", run, f"--{flag}", "1", "--out", tmp_path / "out")
    assert f"--{flag} is for recordings and videos" in message


def test_images_are_written_in_the_requested_format(run, tmp_path):
    common = ("sample", run, "--count", "2", "--out", tmp_path / "out")
    message = run_invalid(*common, "--format", "mp3")
    assert "--format mp3 cannot be written for this medium: its formats are png" in message
    assert tessera(*common, "--format", "jpg").code == 0
    assert len(list((tmp_path / "out").glob("0*.jpg"))) == 2


# ---- tokenize and decode


@pytest.fixture(scope="module")
def codes(run: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("codes") / "codes"
    result = tessera("tokenize", run, "--data", images, "--out", out, "--batch-size", "4")
    assert result.code == 0, result
    assert f"9 of 9 examples encoded in {out}, vocabulary size 64" in result.out
    return out


def test_codes_of_a_folder_equal_those_computed_in_python(run, images, codes):
    tokenizer = Tokenizer.load(run)
    stored = read_tokens(codes, tokenizer.fingerprint)
    assert stored.names == [f"{number:03d}.png" for number in range(9)]
    assert stored.codes.shape == (9, 4, 4)
    assert stored.info.vocab_size == tokenizer.vocab_size == 64
    dataset = type(tokenizer.run.data)(path=str(images), size=16).full()
    batch = dataset.collate([dataset.item(i, np.random.default_rng(0)) for i in range(9)])
    computed = tokenizer.encode(batch.pixels)
    assert torch.equal(stored.codes, computed)
    decoded = tokenizer.decode(computed)
    assert torch.equal(tokenizer.decode(stored.codes), decoded)
    assert decoded.shape == (9, 3, 16, 16) and not decoded.requires_grad


def test_fingerprint_depends_on_the_weights_and_the_preprocessing(run):
    first, second, raw = (
        Tokenizer.load(run),
        Tokenizer.load(run),
        Tokenizer.load(run, weights="raw"),
    )
    assert first.fingerprint == second.fingerprint != raw.fingerprint
    changed = Tokenizer.load(run)
    with torch.no_grad():
        changed.model.last_layer[0, 0, 0, 0] += 1e-3
    assert first.fingerprint != changed.fingerprint
    assert first.info().preprocessing == {"size": 16, "channels": 3}


def test_codes_of_other_weights_are_rejected(run, codes):
    with pytest.raises(UserError, match="another tokenizer"):
        read_tokens(codes, Tokenizer.load(run, weights="raw").fingerprint)


def test_existing_codes_are_not_overwritten(run, images, codes):
    before = read_files(codes)
    message = run_invalid("tokenize", run, "--data", images, "--out", codes)
    assert "already holds codes" in message and read_files(codes) == before


def test_data_of_the_run_are_tokenized_by_default(run, tmp_path):
    result = tessera("tokenize", run, "--out", tmp_path / "codes")
    assert result.code == 0 and "64 of 64 examples" in result.out


def test_decoded_images_have_the_names_of_their_originals(run, codes, tmp_path):
    out = tmp_path / "decoded"
    result = tessera("decode", run, codes, "--out", out)
    assert result.code == 0 and "9 of 9 examples" in result.out, result
    assert sorted(path.name for path in out.iterdir()) == [f"{n:03d}.png" for n in range(9)]
    tokenizer = Tokenizer.load(run)
    stored = read_tokens(codes, tokenizer.fingerprint)
    for name, image in zip(stored.names, tokenizer.to_media(stored.codes), strict=True):
        assert (Image.load(out / name).pixels == image.pixels).all()
    assert tessera("decode", run, codes, "--out", tmp_path / "j", "--format", "jpg").code == 0
    assert (tmp_path / "j/000.jpg").is_file()


# ---- evaluate


def test_evaluation_has_raw_and_ema_metrics_and_a_protocol(run):
    result = tessera("evaluate", run)
    assert result.code == 0 and "raw" in result.out and "ema" in result.out
    written = json.loads((run / "evaluation.json").read_text())
    expected = {"psnr", "ssim", "pixel", "codebook_usage", "codebook_perplexity"}
    for weights in ("raw", "ema"):
        assert expected <= written["metrics"][weights].keys()
    protocol = written["protocol"]
    assert (protocol["recipe"], protocol["step"], protocol["examples"]) == ("images-vqgan", 4, 16)
    assert protocol["preprocessing"] == {"size": 16, "channels": 3}
    assert protocol["tessera"] == __version__
    record = RunDirectory(run).read_records("validation")[-1]
    for weights, prefix in (("raw", "val"), ("ema", "val_ema")):
        logged = record[f"{prefix}/psnr"]
        assert written["metrics"][weights]["psnr"] == pytest.approx(logged, rel=1e-5)


def test_evaluation_of_a_folder_skips_unreadable_files(run, images, tmp_path):
    mixed = copy_with_broken_image(images, tmp_path / "mixed")
    out = tmp_path / "mixed.json"
    result = tessera("evaluate", run, "--data", mixed, "--out", out)
    assert result.code == 0 and "on 9 examples" in result.out
    assert "Skipped broken.png:" in result.err
    written = json.loads(out.read_text())
    assert written["protocol"]["examples"] == 9 and written["protocol"]["data"] == str(mixed)
    tessera("evaluate", run, "--data", images, "--out", tmp_path / "clean.json")
    assert json.loads((tmp_path / "clean.json").read_text())["metrics"] == written["metrics"]


# ---- check


def test_check_counts_usable_files_and_explains_the_others(images, tmp_path):
    mixed = copy_with_broken_image(images, tmp_path / "mixed")
    result = tessera("check", mixed)
    assert result.code == 0 and "broken.png" in result.out
    report = json.loads(tessera("check", mixed, "--json").out)
    assert (report["images"], report["usable"]) == (10, 9)
    [unusable] = report["unusable"]
    assert unusable["name"] == "broken.png" and unusable["reason"]


def test_check_fails_if_nothing_is_usable(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"not an image")
    for name in ("empty", "broken", "nowhere"):
        result = tessera("check", tmp_path / name)
        assert result.code == 1 and result.text
        as_json = tessera("check", tmp_path / name, "--json")
        assert as_json.code == 1 and json.loads(as_json.out)["usable"] == 0


# ---- demo


AUDIO_RECIPES = ["audio-codec", "audio-semantic", "audio-soundstorm", "audio-text2semantic"]
ALL_RECIPES = [
    *("images-vqgan", "images-maskgit", "videos-magvit2", "videos-maskgit"),
    *AUDIO_RECIPES,
    *("music-mulan", "meshes-tree"),
]


def replace_commands_of_demos(monkeypatch: pytest.MonkeyPatch, used: list[str]) -> None:
    """Replace `evaluate`, `sample` and `speak` by functions that only note the run, and those of a
    search by functions that do nothing."""

    def evaluate(run: str, /, *, samples: int = 0) -> int:
        used.append(run)
        return 0

    def sample(run: str, /, *, prompt: tuple[str, ...] = (), count: int, out: str = "") -> int:
        used.append(run)
        return 0

    def speak(run: str, /, *, text: str) -> int:
        used.append(run)
        return 0

    def index(run: str, /, *, out: str) -> int:
        return 0

    def search(index: str, query: str, /, *, top: int = 10) -> int:
        return 0

    for command in (evaluate, sample, speak, index, search):
        monkeypatch.setitem(COMMANDS, command.__name__, command)


@pytest.mark.parametrize(
    ("medium", "recipes"),
    [
        ("image", ["images-vqgan", "images-maskgit"]),
        ("video", ["videos-magvit2", "videos-maskgit"]),
        ("audio", AUDIO_RECIPES),
        ("music", ["music-mulan"]),
        ("mesh", ["meshes-tree"]),
        ("all", ALL_RECIPES),
    ],
)
def test_demo_of_a_medium_trains_its_recipes(medium, recipes, monkeypatch):
    trained: list[tuple[str, ...]] = []
    used: list[str] = []
    monkeypatch.setitem(COMMANDS, "train", lambda *arguments: trained.append(arguments))
    replace_commands_of_demos(monkeypatch, used)
    assert tessera("demo", "--medium", medium, "--out", "demo").code == 0
    assert [recipe for recipe, *_ in trained] == recipes
    last = ("images-maskgit", "videos-maskgit", "meshes-tree", "audio-text2semantic")
    assert sorted(used) == sorted(f"demo/{one}" for one in recipes if one in last)
    for recipe, *arguments in trained:
        parsed = flags.parse(get_recipe(recipe), arguments)
        assert parsed.run.recipe == recipe and parsed.out == f"demo/{recipe}"


@pytest.mark.parametrize(
    "modality", [one for one in MODALITIES.values() if one.demo], ids=lambda one: one.name
)
def test_demo_ends_with_a_sheet_and_the_next_command(modality, tmp_path, monkeypatch):
    original = dict(COMMANDS)
    monkeypatch.setitem(COMMANDS, "train", lambda *_: 0)
    replace_commands_of_demos(monkeypatch, [])
    run = Path(modality.demo_run.format(out=tmp_path))
    for step, suffix in (("000500", "png"), ("001000", "png"), ("001000", "txt")):
        sheet = run / "samples" / step / f"sheet.{suffix}"
        sheet.parent.mkdir(parents=True, exist_ok=True)
        sheet.touch()
    lines = tessera("demo", "--medium", modality.name, "--out", tmp_path).out.splitlines()
    assert lines[-2].endswith(f": {run / 'samples' / '001000' / 'sheet.png'}")
    program, command, *arguments = shlex.split(lines[-1].removeprefix("Try next: "))
    assert program == "tessera"
    if command == "train":
        assert flags.parse(get_recipe(arguments[0]), arguments[1:]).out != str(run)
    else:
        given = tyro.cli(returning_arguments(original[command]), args=arguments)
        assert Path(given[0]).parent == tmp_path


def test_step_of_a_demo_is_skipped_if_its_file_exists(tmp_path, monkeypatch):
    called: list[str] = []
    monkeypatch.setitem(COMMANDS, "train", lambda *_: 0)
    replace_commands_of_demos(monkeypatch, [])

    def index(run: str, /, *, out: str) -> int:
        called.append(out)
        (Path(out)).mkdir()
        (Path(out) / "index.json").touch()
        return 0

    monkeypatch.setitem(COMMANDS, "index", index)
    for _ in range(2):
        result = tessera("demo", "--medium", "music", "--out", tmp_path)
        assert result.code == 0 and "The nearest tunes to a text:" in result.out
    assert called == [f"{tmp_path}/music-index"]


def returning_arguments(command: Callable[..., int]) -> Callable[..., tuple[Any, ...]]:
    """Return a function with the parameters of a command that returns its arguments."""

    @functools.wraps(command)
    def return_arguments(*arguments: Any, **_: Any) -> tuple[Any, ...]:
        return arguments

    return return_arguments


def test_sheet_of_videos_is_the_animation(tmp_path):
    folder = tmp_path / "samples" / "000500"
    folder.mkdir(parents=True)
    assert find_sheet(RunDirectory(tmp_path)) is None
    for name in ("sheet.mp4", "sheet.gif", "0000.gif"):
        (folder / name).touch()
    assert find_sheet(RunDirectory(tmp_path)) == folder / "sheet.gif"


# ---- folders without a run, and folders that cannot be written


@pytest.mark.parametrize("command", [["sample"], ["evaluate"], ["tokenize", "--out", "codes"]])
def test_folder_without_a_trained_run_is_rejected(command, run, tmp_path):
    name, *rest = command
    assert "the folder does not exist" in run_invalid(name, tmp_path / "nowhere", *rest)
    assert "it has no config.json" in run_invalid(name, tmp_path, *rest)
    untrained = tmp_path / "untrained"
    untrained.mkdir()
    shutil.copy(run / "config.json", untrained)
    assert "has no checkpoint: train it first" in run_invalid(name, untrained, *rest)
    assert [path.name for path in untrained.iterdir()] == ["config.json"]


@pytest.mark.parametrize("command", ["sample", "evaluate", "tokenize"])
def test_output_path_that_cannot_be_written_is_rejected(command, run, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    assert f"{file / 'x'} cannot be written" in run_invalid(command, run, "--out", file / "x")
    assert file.read_text() == "mine"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_inside_an_import_ends_the_command(number, code, tmp_path):
    """An exception there would leave modules half initialised."""
    (tmp_path / "recipes.py").write_text(
        f"import os\ntry:\n    os.kill(os.getpid(), {int(number)})\n    import json.tool\n"
        "except BaseException:\n    pass\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    ended = subprocess.run(
        [sys.executable, "-m", "tessera", "train", "recipes:mine"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        # A shell starts commands in the background with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (ended.returncode, ended.stderr) == (code, "tessera: stopped\n")
