"""The flags of `tessera train`: the parameters of a recipe and every setting of its run."""

from __future__ import annotations

import inspect
import re

import pytest
import tyro

from tessera.cli.flags import TrainArguments, choices_class, parse
from tessera.modalities.image.recipes import images_vqgan
from tessera.recipes.registry import RECIPES, recipe_name, recipe_summary
from tessera.run.errors import UserError

COMMON = (
    "--data --out --steps --batch-size --grad-accum-steps --seed --num-workers --nproc --precision "
    "--log-every --validate-every --sample-every --checkpoint-every --preset"
).split()


def parse_tiny(*arguments: str) -> TrainArguments:
    return parse(images_vqgan, ["--preset", "tiny", *arguments])


def without_frames(text: str) -> str:
    """Remove the frames and line breaks of tyro."""
    return " ".join(text.replace("│", " ").split())


def test_without_flags_the_run_equals_its_preset():
    for preset in ("tiny", "small"):
        parsed = parse(images_vqgan, ["--preset", preset])
        assert parsed.run == images_vqgan(preset=preset)
        assert (parsed.out, parsed.fresh, parsed.dry_run) == (None, False, False)
    assert parse(images_vqgan, []).run == images_vqgan(preset="small"), "the default"


def test_common_flags_set_the_engine_and_the_data():
    given = (
        "--data images --out runs/mine --steps 7 --batch-size 12 --grad-accum-steps 3 --seed 5 "
        "--num-workers 2 --nproc 2 --precision bf16 --log-every 2 --validate-every 3 "
        "--sample-every 4 --checkpoint-every 5"
    )
    parsed = parse_tiny(*given.split())
    engine = parsed.run.engine
    assert parsed.out == "runs/mine" and parsed.run.data.path == "images"
    assert (engine.steps, engine.batch_size, engine.grad_accum_steps, engine.seed) == (7, 12, 3, 5)
    assert (engine.num_workers, engine.nproc, engine.precision) == (2, 2, "bf16")
    assert (engine.log_every, engine.validate_every) == (2, 3)
    assert (engine.sample_every, engine.checkpoint_every) == (4, 5)


@pytest.mark.parametrize("spelling", [["--data", "a=b"], ["--data=a=b"], ["--data.path", "a=b"]])
def test_the_data_path_accepts_every_spelling(spelling):
    assert parse_tiny(*spelling).run.data.path == "a=b"


@pytest.mark.parametrize(
    "spelling",
    [
        ["--log-with", "tensorboard,wandb"],
        ["--log-with=tensorboard,wandb"],
        ["--log-with", "tensorboard", "wandb"],
    ],
)
def test_several_trackers_can_be_selected(spelling):
    parsed = parse_tiny(*spelling, "--steps", "3")
    assert parsed.run.engine.log_with == ("tensorboard", "wandb") and parsed.run.engine.steps == 3


def test_nested_settings_have_dotted_flags():
    given = "--task.model.dim 24 --task.optimizer.max_grad_norm None --ema.decay 0.5 --data.flip"
    parsed = parse_tiny(*given.split())
    assert parsed.run.task.model.dim == 24 and parsed.run.task.optimizer.max_grad_norm is None
    assert parsed.run.engine.ema.decay == 0.5 and parsed.run.data.flip


def test_recipe_choices_determine_which_nested_settings_exist():
    given = "--quantizer lfq --adversary on --task.model.quantizer.codebook-size 256"
    parsed = parse_tiny(*given.split())
    assert parsed.run.task.model.quantizer.codebook_size == 256
    assert parsed.run.task.adversary is not None


def test_fresh_and_dry_run_take_no_value():
    parsed = parse_tiny("--fresh", "--dry-run")
    assert parsed.fresh and parsed.dry_run


def test_help_lists_common_flags_and_those_of_the_recipe(capsys):
    with pytest.raises(SystemExit) as exited:
        parse_tiny("--help")
    assert exited.value.code == 0
    text = capsys.readouterr().out
    own = ("--quantizer", "--perceptual", "--adversary", "--task.model.dim")
    for flag in (*COMMON, "--fresh", "--dry-run", *own):
        assert any(word.strip(",[]`|│ ") == flag for word in text.split()), flag
    assert "Train an image tokenizer" in text
    assert "The number of optimizer steps of the whole run. (default: 20)" in without_frames(text)
    assert "fsq needs no tuning; lfq and bsq scale to huge codebooks" in without_frames(text)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("--stesp", "--steps"),
        ("--batchsize", "--batch-size"),
        ("--task.modle.dim", "--task.model.dim"),
    ],
)
def test_an_unknown_flag_exits_with_the_closest_one(wrong, meant, capsys):
    with pytest.raises(SystemExit) as exited:
        parse_tiny(wrong, "3")
    assert exited.value.code == 2
    printed = capsys.readouterr()
    assert wrong in printed.out + printed.err and meant in printed.out + printed.err


@pytest.mark.parametrize(
    "arguments", [["--steps", "many"], ["--preset", "huge"], ["--precision", "fp8"]]
)
def test_a_value_of_the_wrong_type_exits_with_that_value(arguments, capsys):
    with pytest.raises(SystemExit) as exited:
        parse_tiny(*arguments)
    assert exited.value.code == 2
    assert arguments[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps must be at least 1, got 0."),
        (["--num-workers", "-1"], "num_workers must be at least 0, got -1."),
        (["--batch-size", "10", "--grad-accum-steps", "4"], "use --batch-size 12"),
        (["--data.size", "18"], "multiple of 4: use 16 or 20"),
        (["--task.model.quantizer.levels", "1", "4"], "two or more"),
        (
            ["--task.model.blocks", "1", "1", "1"],
            "blocks has 3 numbers, but with layers=2 it needs 2",
        ),
        (["--log-with", "tensorbord"], "log_with must be among tensorboard"),
        (["--ema.decay", "1.5"], "below 1, got 1.5"),
    ],
)
def test_invalid_settings_raise_one_sentence(arguments, message, capsys):
    """Settings of nested dataclasses are reported in a frame of tyro, all others as UserError."""
    with pytest.raises((UserError, SystemExit)) as raised:
        parse_tiny(*arguments)
    assert getattr(raised.value, "exit_code", None) == 2 or raised.value.code == 2
    assert message in without_frames(f"{raised.value} {capsys.readouterr().err}")


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_name)
def test_every_parameter_of_a_recipe_has_help(recipe, capsys):
    """The summary is one line, as `tessera recipes` prints it, and each flag has a sentence."""
    with pytest.raises(SystemExit):
        tyro.cli(choices_class(recipe), args=["--help"])
    text = without_frames(capsys.readouterr().out)
    assert recipe_summary(recipe).endswith(".") and recipe_summary(recipe) in text
    for name in inspect.signature(recipe).parameters:
        flag = f"--{name.replace('_', '-')}"
        assert re.search(rf"{flag} (?:\{{[^}}]*\}}(?:\|FLOAT)?|STR) The [^.]*", text), flag
