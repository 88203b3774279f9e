"""The flags of `tessera train`: everything a run has, under the names that every recipe shares."""

from __future__ import annotations

import pytest

from tessera.cli.flags import Asked, parse
from tessera.modalities.image.recipes import images_vqgan
from tessera.run.errors import UserError

COMMON = (
    "--data --out --steps --batch-size --grad-accum-steps --seed --num-workers --nproc --precision --log-every "
    "--validate-every --sample-every --checkpoint-every --preset"
).split()


def ask(*arguments: str) -> Asked:
    return parse(images_vqgan, ["--preset", "tiny", *arguments])


def unboxed(text: str) -> str:
    """Without tyro's frames and line breaks."""
    return " ".join(text.replace("│", " ").split())


def test_without_flags_a_run_is_its_preset():
    for preset in ("tiny", "small"):
        asked = parse(images_vqgan, ["--preset", preset])
        assert asked.run == images_vqgan(preset=preset)
        assert (asked.out, asked.fresh, asked.dry_run) == (None, False, False)
    assert parse(images_vqgan, []).run == images_vqgan(preset="small"), "the default"


def test_the_common_flags_reach_the_run():
    asked = ask(
        *"--data pictures --out runs/mine --steps 7 --batch-size 12 --grad-accum-steps 3 --seed 5 --num-workers 2 --nproc 2".split(),
        *"--precision bf16 --log-every 2 --validate-every 3 --sample-every 4 --checkpoint-every 5".split(),
    )
    engine = asked.run.engine
    assert asked.out == "runs/mine" and asked.run.data.path == "pictures"
    assert (engine.steps, engine.batch_size, engine.grad_accum_steps, engine.seed) == (7, 12, 3, 5)
    assert (engine.num_workers, engine.processes, engine.precision) == (2, 2, "bf16")
    assert (
        engine.log_every,
        engine.validate_every,
        engine.sample_every,
        engine.checkpoint_every,
    ) == (2, 3, 4, 5)


@pytest.mark.parametrize("spelling", [["--data", "a=b"], ["--data=a=b"], ["--data.path", "a=b"]])
def test_the_place_of_the_data_can_be_given_in_any_spelling(spelling):
    assert ask(*spelling).run.data.path == "a=b"


@pytest.mark.parametrize(
    "spelling",
    [
        ["--log-with", "tensorboard,wandb"],
        ["--log-with=tensorboard,wandb"],
        ["--log-with", "tensorboard", "wandb"],
    ],
)
def test_several_trackers_can_be_asked_for(spelling):
    asked = ask(*spelling, "--steps", "3")
    assert asked.run.engine.log_with == ("tensorboard", "wandb") and asked.run.engine.steps == 3


def test_the_fields_of_parts_carry_their_place():
    asked = ask(
        "--task.model.dim",
        "24",
        "--task.optimizer.max_grad_norm",
        "None",
        "--ema.decay",
        "0.5",
        "--data.flip",
    )
    assert asked.run.task.model.dim == 24 and asked.run.task.optimizer.max_grad_norm is None
    assert asked.run.engine.ema.decay == 0.5 and asked.run.data.flip


def test_the_choices_of_a_recipe_come_first_and_the_fields_of_what_they_chose_follow():
    asked = ask(
        "--quantizer", "lfq", "--adversary", "on", "--task.model.quantizer.codebook-size", "256"
    )
    assert asked.run.task.model.quantizer.codebook_size == 256
    assert asked.run.task.adversary is not None


def test_fresh_and_dry_run_are_switches():
    asked = ask("--fresh", "--dry-run")
    assert asked.fresh and asked.dry_run


def test_help_lists_every_common_flag_and_what_the_recipe_offers(capsys):
    with pytest.raises(SystemExit) as ended:
        ask("--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        *COMMON,
        "--fresh",
        "--dry-run",
        "--quantizer",
        "--perceptual",
        "--adversary",
        "--task.model.dim",
    ):
        assert any(word.strip(",[]`|│ ") == flag for word in text.split()), flag
    assert (
        "An image tokenizer" in text and "Optimizer steps of the whole run. (default: 20)" in text
    )
    assert "fsq needs no tuning; lfq and bsq scale to huge codebooks" in unboxed(text)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("--stesp", "--steps"),
        ("--batchsize", "--batch-size"),
        ("--task.modle.dim", "--task.model.dim"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest(wrong, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        ask(wrong, "3")
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert wrong in told.out + told.err and meant in told.out + told.err


@pytest.mark.parametrize(
    "arguments", [["--steps", "many"], ["--preset", "huge"], ["--precision", "fp8"]]
)
def test_a_value_of_the_wrong_kind_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        ask(*arguments)
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps", "0"], "steps must be 1 or more"),
        (["--num-workers", "-1"], "workers must be 0 or more"),
        (["--batch-size", "10", "--grad-accum-steps", "4"], "use a batch size of 12"),
        (["--data.size", "18"], "multiple of 4. Use 16 or 20"),
        (["--task.model.quantizer.levels", "1", "4"], "two or more"),
        (["--task.model.blocks", "1", "1", "1"], "it needs 2 numbers, but it has 3"),
        (["--log-with", "tensorbord"], "mirrored in tensorboard"),
        (["--ema.decay", "1.5"], "below 1"),
    ],
)
def test_settings_that_cannot_work_become_a_sentence(arguments, says, capsys):
    """Ours, or in the case of a part's own settings tyro's box around it; never a trace."""
    with pytest.raises((UserError, SystemExit)) as refused:
        ask(*arguments)
    assert getattr(refused.value, "exit_code", None) == 2 or refused.value.code == 2
    assert says in unboxed(f"{refused.value} {capsys.readouterr().err}")
