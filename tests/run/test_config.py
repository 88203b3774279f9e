"""A run as JSON and back, and what may change when it goes on."""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass, field, replace

import pytest

from tessera.engine.engine import EngineConfig
from tessera.modalities.image.recipes import images_maskgit_superres, images_vqgan
from tessera.nn.quantize import FSQConfig, LFQConfig, ResidualConfig, VQConfig
from tessera.recipes.presets import Preset
from tessera.run.config import (
    MAY_DIFFER,
    Run,
    decode,
    decode_run,
    did_you_mean,
    list_differences,
    encode,
    flatten,
)
from tessera.run.errors import UserError

PRESETS = typing.get_args(Preset)


def decode_as_recipe(like: Run, values: dict) -> Run:
    return decode_run(values, type(like.task), type(like.data))


def through_json(run: Run) -> Run:
    return decode_as_recipe(images_vqgan(), json.loads(json.dumps(encode(run))))


@pytest.mark.parametrize("quantizer", ["fsq", "lfq", "bsq", "vq"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_comes_back_from_its_config_json(preset, quantizer):
    for adversary in ("on", "off"):
        run = images_vqgan(
            preset=preset, quantizer=quantizer, perceptual="off", adversary=adversary
        )
        back = through_json(run)
        assert back == run
        assert list_differences(encode(run), encode(back)) == []


def test_parts_within_parts_and_none_come_back():
    """A union inside a union, tuples, None where a part is left out, and a part where None is the
    default."""
    run = images_vqgan(preset="tiny", perceptual="somewhere/vgg16.pth", adversary="on")
    deep = ResidualConfig(quantizer=LFQConfig(codebook_size=64, spherical=True), num_quantizers=3)
    model = replace(run.task.model, quantizer=deep, blocks=(2, 3))
    optimizer = replace(run.task.optimizer, max_grad_norm=None, betas=(0.5, 0.75))
    run = replace(run, task=replace(run.task, model=model, optimizer=optimizer))
    run = replace(run, engine=replace(run.engine, log_with=("tensorboard", "wandb")))
    back = through_json(run)
    assert back == run
    assert back.task.model.quantizer.quantizer == LFQConfig(codebook_size=64, spherical=True)
    assert (
        back.task.optimizer.max_grad_norm is None
        and back.task.reconstruction.perceptual.vgg == "somewhere/vgg16.pth"
    )


@pytest.mark.parametrize(
    "config", [FSQConfig(levels=(8, 5)), LFQConfig(), VQConfig(codebook_size=64)]
)
def test_the_member_of_a_union_is_told_by_its_name(config):
    run = images_vqgan(preset="tiny")
    run = replace(run, task=replace(run.task, model=replace(run.task.model, quantizer=config)))
    stored = encode(run)["task"]["model"]["quantizer"]
    assert stored["kind"] == type(config).__name__
    assert type(through_json(run).task.model.quantizer) is type(config)


def test_a_field_that_is_always_the_same_class_needs_no_kind():
    stored = encode(images_vqgan(preset="tiny", adversary="on"))
    assert "kind" not in stored["engine"] and "kind" not in stored["task"]["adversary"]
    assert stored["task"]["optimizer"]["kind"] == "adamw", "a setting of that name is a setting"


def test_a_whole_number_where_a_float_belongs_becomes_one():
    stored = encode(images_vqgan(preset="tiny"))
    stored["task"]["optimizer"] |= {"rate": 1, "clip": 2}
    optimizer = decode_as_recipe(images_vqgan(), stored).task.optimizer
    assert (type(optimizer.lr), type(optimizer.max_grad_norm)) == (float, float)
    assert type(decode_as_recipe(images_vqgan(), stored).engine.steps) is int


# ---------------------------------------------------------------------------------------------------------- refusals


def stored_with(place: str, value: object) -> dict:
    """The tiny run's config with one setting put in, given as "engine.steps"."""
    stored = encode(images_vqgan(preset="tiny"))
    *path, name = place.split(".")
    group = stored
    for part in path:
        group = group[part]
    group[name] = value
    return stored


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("engine.step", 3, "no setting 'engine.step' in EngineConfig: did you mean 'steps'?"),
        ("task.model.quantiser", None, "did you mean 'quantizer'?"),
        (
            "task.model.quantizer.level",
            [4],
            "'task.model.quantizer.level' in FSQConfig: did you mean 'levels'?",
        ),
        ("data.xyz", 1, "There are: path, size"),
        (
            "task.model.quantizer",
            {"kind": "PQConfig"},
            "FSQConfig or LFQConfig or VQConfig or ResidualConfig",
        ),
        ("task.model.quantizer", {"levels": [4]}, "is of kind None"),
        ("engine", 3, "engine. must be a group of settings, but it is 3"),
        ("engine.steps", 0, "steps must be 1 or more, but it is 0"),
        ("engine.workers", -1, "workers must be 0 or more, but it is -1"),
        ("engine.batch_size", "many", "engine"),
        ("task.optimizer.lr", -1.0, "above zero"),
        ("data.size", 15, "multiple of 4. Use 12 or 16"),
    ],
)
def test_a_setting_that_cannot_be_read_is_refused_with_its_place(place, value, says):
    with pytest.raises(UserError) as run_invalid:
        decode_as_recipe(images_vqgan(), stored_with(place, value))
    assert says in str(run_invalid.value)


@pytest.mark.parametrize("part", ["task", "data", "engine", "published"])
def test_a_config_that_is_not_whole_is_refused(part):
    stored = encode(images_vqgan(preset="tiny"))
    del stored[part]
    with pytest.raises(UserError, match=f"has no '{part}'"):
        decode_as_recipe(images_vqgan(), stored)


def test_an_older_config_without_a_newer_field_takes_its_default():
    stored = encode(images_vqgan(preset="tiny"))
    del stored["engine"]["patience"]
    assert (
        decode_as_recipe(images_vqgan(), stored).engine.max_skipped_steps
        == EngineConfig().max_skipped_steps
    )


def test_a_required_setting_that_is_missing_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Needs:
        size: int
        colour: str = "red"

    with pytest.raises(UserError, match="size"):
        decode(Needs, {"colour": "blue"})


def test_the_nearest_name_is_suggested_or_all_are_listed():
    assert did_you_mean("step", ["steps", "seed"]) == ": did you mean 'steps'?"
    assert did_you_mean("zzz", ["steps", "seed"]) == ". There are: steps, seed."


# ------------------------------------------------------------------------------------------------------- differences


def test_differing_settings_are_named_with_both_values():
    run = images_vqgan(preset="tiny")
    other = replace(
        run, engine=replace(run.engine, seed=7, batch_size=16), data=replace(run.data, flip=True)
    )
    assert list_differences(encode(run), encode(other)) == [
        "data.flip: False in the folder, True asked for",
        "engine.batch_size: 8 in the folder, 16 asked for",
        "engine.seed: 0 in the folder, 7 asked for",
    ]


def test_another_kind_of_part_is_a_difference_and_so_is_one_that_is_gone():
    run = images_vqgan(preset="tiny", adversary="on")
    other = images_vqgan(preset="tiny", quantizer="vq", adversary="off")
    named = [line.split(":")[0] for line in list_differences(encode(run), encode(other))]
    assert "task.model.quantizer.kind" in named and "task.model.quantizer.codebook_size" in named
    assert any(name.startswith("task.adversary") for name in named)


@pytest.mark.parametrize("name", sorted(MAY_DIFFER))
def test_how_long_how_often_and_on_what_may_differ(name):
    run = images_maskgit_superres(preset="tiny")
    group, field_name = name.split(".")
    before = getattr(getattr(run, group), field_name)
    value = (
        ("wandb",)
        if field_name == "track"
        else "elsewhere"
        if isinstance(before, str | None)
        else before + 1
    )
    other = replace(run, **{group: replace(getattr(run, group), **{field_name: value})})
    assert other != run and list_differences(encode(run), encode(other)) == []


def test_what_may_differ_is_what_was_promised():
    promised = (
        "steps log_every validate_every sample_every checkpoint_every workers processes".split()
    )
    assert {f"engine.{name}" for name in promised} <= MAY_DIFFER
    never = "seed batch_size accumulate precision average.decay".split()
    assert not {f"engine.{name}" for name in never} & MAY_DIFFER
    assert flatten(encode(images_maskgit_superres("tiny"))).keys() >= MAY_DIFFER, (
        "and each of them exists"
    )


def test_a_field_that_is_called_kind_comes_back_too():
    run = images_vqgan(preset="tiny")
    lion = replace(run, task=replace(run.task, optimizer=replace(run.task.optimizer, name="lion")))
    assert decode_as_recipe(run, encode(lion)) == lion


def test_settings_are_flattened_by_place():
    assert flatten({"a": {"b": {"c": 1}, "d": [2]}, "e": None}) == {"a.b.c": 1, "a.d": [2], "e": None}


def test_encoding_reaches_dataclasses_in_tuples():
    @dataclass(frozen=True)
    class One:
        size: int = 1

    @dataclass(frozen=True)
    class Many:
        parts: tuple[int, ...] = field(default=(1, 2))
        name: str | None = None

    assert encode(Many()) == {"parts": [1, 2], "name": None}
    assert encode((One(), One(size=2))) == [{"size": 1}, {"size": 2}]


# ------------------------------------------------------------------------------------------------------------ engine


@pytest.mark.parametrize(
    "name",
    "steps batch_size accumulate processes log_every sample_count keep_last patience".split(),
)
def test_what_must_be_counted_from_one_is_refused_below(name):
    with pytest.raises(ValueError, match=f"{name} must be 1 or more, but it is 0"):
        EngineConfig(**{name: 0})


@pytest.mark.parametrize(
    ("accumulate", "processes", "works"), [(4, 1, 12), (1, 3, 12), (2, 3, 12), (4, 4, 16)]
)
def test_a_batch_that_cannot_be_cut_evenly_is_refused_with_one_that_can(
    grad_accum_steps, processes, works
):
    with pytest.raises(ValueError, match=f"A batch of 10 examples .* use a batch size of {works}"):
        EngineConfig(batch_size=10, grad_accum_steps=grad_accum_steps, processes=processes)
    EngineConfig(batch_size=works, grad_accum_steps=grad_accum_steps, processes=processes)


def test_an_unknown_tracker_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="no tracker 'mlflow': .* tensorboard, wandb, trackio"):
        EngineConfig(log_with=("mlflow",))
