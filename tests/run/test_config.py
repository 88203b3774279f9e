"""A run as JSON and back, and the settings that may change when it is resumed."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from dataclasses import dataclass, field, replace

import pytest

from tessera import modalities
from tessera.engine.config import EngineConfig
from tessera.modalities.audio.recipes import audio_soundstorm, audio_text2semantic
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.recipes import images_maskgit_superres, images_vqgan
from tessera.modalities.image.reconstruction import ImageTokenizerConfig
from tessera.nn.quantize import FSQConfig, LFQConfig, ResidualConfig, SimVQConfig, VQConfig
from tessera.recipes.presets import Preset
from tessera.run.config import (
    MAY_DIFFER,
    Run,
    choose_class,
    decode,
    decode_run,
    did_you_mean,
    encode,
    flatten,
    list_differences,
)
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tessera.text.pretrained import PretrainedTextConfig

PRESETS = typing.get_args(Preset)


def decode_as(run: Run, values: dict) -> Run:
    """Decode with the classes of another run's configurations."""
    return decode_run(values, type(run.task), type(run.data))


def through_json(run: Run) -> Run:
    return decode_as(images_vqgan(), json.loads(json.dumps(encode(run))))


# ---- encoding and decoding


@pytest.mark.parametrize("quantizer", ["fsq", "lfq", "bsq", "vq", "simvq"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_restored_from_its_config(preset, quantizer):
    for adversary in ("on", "off"):
        run = images_vqgan(preset, quantizer, perceptual="off", adversary=adversary)
        decoded = through_json(run)
        assert decoded == run
        assert list_differences(encode(run), encode(decoded)) == []


def test_nested_dataclasses_unions_tuples_and_none_are_restored():
    run = images_vqgan("tiny", perceptual="somewhere/vgg16.pth", adversary="on")
    nested = ResidualConfig(quantizer=LFQConfig(codebook_size=64, spherical=True), num_quantizers=3)
    model = replace(run.task.model, quantizer=nested, blocks=(2, 3))
    optimizer = replace(run.task.optimizer, max_grad_norm=None, betas=(0.5, 0.75))
    run = replace(run, task=replace(run.task, model=model, optimizer=optimizer))
    run = replace(run, engine=replace(run.engine, log_with=("tensorboard", "wandb")))
    decoded = through_json(run)
    assert decoded == run
    assert decoded.task.model.quantizer.quantizer == LFQConfig(codebook_size=64, spherical=True)
    assert decoded.task.optimizer.max_grad_norm is None
    assert decoded.task.reconstruction.perceptual.vgg == "somewhere/vgg16.pth"


@pytest.mark.parametrize(
    "config",
    [FSQConfig(levels=(8, 5)), LFQConfig(), VQConfig(codebook_size=64), SimVQConfig(code_dim=4)],
)
def test_member_of_a_union_is_stored_with_its_class_name(config):
    run = images_vqgan("tiny")
    run = replace(run, task=replace(run.task, model=replace(run.task.model, quantizer=config)))
    stored = encode(run)["task"]["model"]["quantizer"]
    assert stored["class"] == type(config).__name__
    assert type(through_json(run).task.model.quantizer) is type(config)


def test_field_with_a_single_class_is_stored_without_its_name():
    stored = encode(images_vqgan("tiny", adversary="on"))
    assert "class" not in stored["engine"] and "class" not in stored["task"]["adversary"]
    assert "class" not in stored["task"]["optimizer"]


def test_field_with_a_class_or_none_is_stored_without_its_name():
    stored = encode(images_vqgan("tiny", adversary="off"))
    assert stored["task"]["adversary"] is None
    assert through_json(images_vqgan("tiny", adversary="off")).task.adversary is None


def test_integer_is_converted_where_a_float_is_declared():
    stored = encode(images_vqgan("tiny"))
    stored["task"]["optimizer"] |= {"lr": 1, "max_grad_norm": 2}
    run = decode_as(images_vqgan(), stored)
    optimizer = run.task.optimizer
    assert (type(optimizer.lr), type(optimizer.max_grad_norm)) == (float, float)
    assert type(run.engine.steps) is int


def test_setting_that_is_called_name_is_restored():
    run = images_vqgan("tiny")
    lion = replace(run, task=replace(run.task, optimizer=replace(run.task.optimizer, name="lion")))
    assert encode(lion)["task"]["optimizer"]["name"] == "lion"
    assert decode_as(run, encode(lion)) == lion


def test_dataclasses_within_tuples_are_encoded():
    @dataclass(frozen=True)
    class One:
        size: int = 1

    @dataclass(frozen=True)
    class Many:
        parts: tuple[int, ...] = field(default=(1, 2))
        name: str | None = None

    assert encode(Many()) == {"parts": [1, 2], "name": None}
    assert encode((One(), One(size=2))) == [{"size": 1}, {"size": 2}]


# ---- invalid configurations


def encode_with(path: str, value: object) -> dict:
    """Return the tiny run as JSON with one setting replaced, named as in "engine.steps"."""
    stored = encode(images_vqgan("tiny"))
    *groups, name = path.split(".")
    group = stored
    for one in groups:
        group = group[one]
    group[name] = value
    return stored


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("engine.step", 3, "EngineConfig has no setting 'engine.step': did you mean 'steps'?"),
        ("task.model.quantiser", None, "did you mean 'quantizer'?"),
        (
            "task.model.quantizer.level",
            [4],
            "FSQConfig has no setting 'task.model.quantizer.level': did you mean 'levels'?",
        ),
        ("data.xyz", 1, "Known names: path, columns"),
        (
            "task.model.quantizer",
            {"class": "PQConfig"},
            "must be FSQConfig or LFQConfig or VQConfig or SimVQConfig or ResidualConfig, got "
            "'PQConfig'",
        ),
        ("task.model.quantizer", {"levels": [4]}, "The class of task.model.quantizer must be"),
        ("task.model.quantizer", {"levels": [4]}, "got None"),
        ("engine", 3, "engine. must be a JSON object, got 3"),
        ("engine.steps", 0, "steps must be at least 1, got 0"),
        ("engine.num_workers", -1, "num_workers must be at least 0, got -1"),
        ("engine.batch_size", "many", "engine"),
        ("task.optimizer.lr", -1.0, "The learning rate must be above 0 and finite, got -1.0"),
        ("data.size", 15, "multiple of 4: use 12 or 16"),
    ],
)
def test_invalid_setting_is_rejected_with_its_name(path, value, expected):
    with pytest.raises(UserError) as raised:
        decode_as(images_vqgan(), encode_with(path, value))
    assert expected in str(raised.value)


@pytest.mark.parametrize("part", ["task", "data", "engine", "reference"])
def test_incomplete_config_is_rejected(part):
    stored = encode(images_vqgan("tiny"))
    del stored[part]
    with pytest.raises(UserError, match=f"has no '{part}'"):
        decode_as(images_vqgan(), stored)


def test_config_without_a_newer_setting_uses_its_default():
    stored = encode(images_vqgan("tiny"))
    del stored["engine"]["max_skipped_steps"]
    engine = decode_as(images_vqgan(), stored).engine
    assert engine.max_skipped_steps == EngineConfig().max_skipped_steps


def test_missing_required_setting_is_rejected():
    @dataclass(frozen=True, kw_only=True)
    class Sized:
        size: int
        colour: str = "red"

    with pytest.raises(UserError, match="size"):
        decode(Sized, {"colour": "blue"})


def test_class_is_chosen_among_the_candidates_only():
    assert choose_class([FSQConfig, LFQConfig], "LFQConfig", "quantizer") is LFQConfig
    with pytest.raises(UserError, match="FSQConfig or LFQConfig, got 'EngineConfig'"):
        choose_class([FSQConfig, LFQConfig], "EngineConfig", "quantizer")


def test_closest_name_is_suggested_or_all_names_are_listed():
    assert did_you_mean("step", ["steps", "seed"]) == ": did you mean 'steps'?"
    assert did_you_mean("zzz", ["steps", "seed"]) == ". Known names: steps, seed."


# ---- differences


def test_differences_are_listed_with_both_values():
    run = images_vqgan("tiny")
    engine = replace(run.engine, seed=7, batch_size=16)
    other = replace(run, engine=engine, data=replace(run.data, flip=True))
    assert list_differences(encode(run), encode(other)) == [
        "data.flip: False in the folder, True requested",
        "engine.batch_size: 8 in the folder, 16 requested",
        "engine.seed: 0 in the folder, 7 requested",
    ]


def test_other_class_and_missing_dataclass_are_differences():
    run = images_vqgan("tiny", adversary="on")
    other = images_vqgan("tiny", quantizer="vq", adversary="off")
    names = [line.split(":")[0] for line in list_differences(encode(run), encode(other))]
    assert "task.model.quantizer.class" in names
    assert "task.model.quantizer.codebook_size" in names
    assert any(name.startswith("task.adversary") for name in names)


@pytest.mark.parametrize("name", sorted(MAY_DIFFER))
def test_setting_that_may_differ_is_no_difference(name):
    recipes = {"task.semantic": audio_soundstorm, "task.soundstorm": audio_text2semantic}
    run = recipes.get(name, images_maskgit_superres)("tiny")
    group, field_name = name.split(".")
    before = getattr(getattr(run, group), field_name)
    value: object = "elsewhere"
    if field_name == "log_with":
        value = ("wandb",)
    elif isinstance(before, int):
        value = before + 1
    other = replace(run, **{group: replace(getattr(run, group), **{field_name: value})})
    assert other != run and list_differences(encode(run), encode(other)) == []


def test_length_and_logging_may_differ_but_nothing_that_changes_results():
    names = (
        "steps log_every validate_every sample_every checkpoint_every num_workers nproc"
    ).split()
    assert {f"engine.{name}" for name in names} <= MAY_DIFFER
    fixed = "seed batch_size grad_accum_steps precision ema.decay".split()
    known = {f"engine.{name}" for name in fixed}
    images, audio, speech = (
        flatten(encode(recipe("tiny"))).keys()
        for recipe in (images_maskgit_superres, audio_soundstorm, audio_text2semantic)
    )
    assert known <= images and not known & MAY_DIFFER
    assert images | audio | speech >= MAY_DIFFER, "each of them exists"


def test_nested_settings_are_flattened_with_dots():
    nested = {"a": {"b": {"c": 1}, "d": [2]}, "e": None}
    assert flatten(nested) == {"a.b.c": 1, "a.d": [2], "e": None}


# ---- the engine's settings


@pytest.mark.parametrize(
    "name",
    "steps batch_size grad_accum_steps nproc log_every validate_every sample_every sample_count "
    "checkpoint_every keep_last max_skipped_steps".split(),
)
def test_setting_that_must_be_positive_is_rejected_at_zero(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        EngineConfig(**{name: 0})


@pytest.mark.parametrize(
    ("grad_accum_steps", "nproc", "expected"), [(4, 1, 12), (1, 3, 12), (2, 3, 12), (4, 4, 16)]
)
def test_batch_that_cannot_be_divided_is_rejected_with_a_valid_size(
    grad_accum_steps, nproc, expected
):
    parts = {"grad_accum_steps": grad_accum_steps, "nproc": nproc}
    with pytest.raises(ValueError, match=f"A batch of 10 examples .*: use --batch-size {expected}"):
        EngineConfig(batch_size=10, **parts)
    EngineConfig(batch_size=expected, **parts)


def test_unknown_tracker_is_rejected_with_the_known_ones():
    with pytest.raises(ValueError, match="among tensorboard, wandb, trackio, got 'mlflow'"):
        EngineConfig(log_with=("mlflow",))


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("engine", "steps"), "many", 'engine.steps must be a whole number, got "many"'),
        (("engine", "steps"), 1.5, "must be a whole number"),
        (("engine", "steps"), True, "must be a whole number"),
        (("engine", "precision"), "fp8", 'must be "auto" or "fp32"'),
        (("engine", "log_with"), "wandb", "must be a list"),
        (("engine", "log_with"), [1], "must be a list"),
        (("engine", "ema"), 3, "must be a JSON object"),
        (("engine", "ema", "decay"), None, "must be a number"),
        (("data", "flip"), "yes", "must be true or false"),
        (("data", "path"), 3, "must be a text or null"),
        (("task", "model", "dim"), [16], "must be a whole number"),
        (("recipe",), ["images-vqgan"], "must be a text"),
        (("reference",), 1, "must be a text"),
    ],
)
def test_values_of_wrong_types_are_rejected_by_name(path, value, expected):
    values = encode(images_vqgan("tiny"))
    inner = values
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(UserError, match=re.escape(expected)):
        decode_run(values, ImageTokenizerConfig, ImageDataConfig)


def test_every_recipe_survives_encoding_and_decoding():
    """The types of all fields are understood."""
    for name, recipe in modalities.recipes().items():
        for preset in ("tiny", "paper"):
            run = modalities.resolve(recipe.build)(preset)
            task, data = modalities.resolve(recipe.task), modalities.resolve(recipe.data)
            decoded = decode_run(json.loads(json.dumps(encode(run))), task, data)
            assert decoded == dataclasses.replace(run, recipe=name)


def test_deep_json_is_rejected_with_a_message(tmp_path):
    (tmp_path / "config.json").write_text('{"recipe": ' + "[" * 100_000)
    with pytest.raises(UserError, match="not valid JSON"):
        RunDirectory(tmp_path).read_config()


def test_a_file_cannot_allow_downloads():
    config = PretrainedTextConfig(name="some/model", download=True)
    assert decode(PretrainedTextConfig, encode(config)).download is False
