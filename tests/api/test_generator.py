"""Tests of `Generator` and `tessera sample`: prompts, super-resolution, inpainting and settings."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

import tessera as package
from tessera.api.evaluation import RejectedExamples, evaluate_samples, reconstruct_samples
from tessera.api.generator import (
    Generator,
    choose_captions,
    make_seeds,
)
from tessera.cli.commands import sample as sample_command
from tessera.engine.task import Batch
from tessera.modalities import recipes, resolve
from tessera.modalities.image.generation import cover_cells
from tessera.modalities.image.media import Image
from tessera.modalities.image.recipes import images_maskgit, images_maskgit_superres
from tessera.objectives.generation import Generated, GenerationRequest, TokenPrompt
from tessera.run.errors import UserError
from tessera.run.load import load_run
from tessera.sampling.guidance import Guidance
from tessera.sampling.maskgit import MaskedSampling
from tests.cli_runner import CommandResult, run_invalid, tessera
from tests.runs import build_tiny, tokenizer, train

PROMPT = "a red circle"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "base"
    train(folder, build_tiny(images_maskgit, critic="head"))
    return folder


@pytest.fixture(scope="module")
def superres(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "superres"
    train(folder, build_tiny(images_maskgit_superres))
    return folder


@pytest.fixture(scope="module")
def generator(base: Path) -> Generator:
    return Generator.load(base)


@pytest.fixture(scope="module")
def cascade(base: Path, superres: Path) -> Generator:
    return Generator.load(base, superres)


def as_bytes(media: list[Image]) -> list[bytes]:
    return [image.pixels.tobytes() for image in media]


def generate(generator: Generator, prompts: list[str], **settings: Any) -> list[bytes]:
    return as_bytes(generator.generate(prompts, **settings).media)


def write_image(file: Path, size: tuple[int, int] = (16, 16), seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).resize(size).save(file)
    return file


def write_mask(
    file: Path,
    size: tuple[int, int] = (16, 16),
    white: tuple[int, int, int, int] = (0, 0, 8, 16),
) -> Path:
    """Write a black image with a white rectangle (left, top, right, bottom)."""
    image = PIL.Image.new("L", size)
    image.paste(255, white)
    image.save(file)
    return file


# ---- generation


def test_every_prompt_has_an_image(generator):
    prompts = [PROMPT, "two blue squares", ""]
    generated = generator.generate(prompts)
    assert isinstance(generated, Generated) and len(generated.media) == 3
    for image in generated.media:
        assert isinstance(image, Image) and image.pixels.shape == (16, 16, 3)
    assert [codes.shape for codes in generated.codes] == [(4, 4)] * 3
    assert generated.names == [PROMPT, "two blue squares", "unconditional"]
    assert generated.settings["prompts"] == prompts and generated.notices == []
    assert generator.generate([]).media == []


def test_codes_are_those_of_the_images(generator):
    generated = generator.generate([PROMPT] * 3, seed=4)
    decoded = generator.tokenizers["tokenizer"].to_media(torch.stack(generated.codes))
    assert as_bytes(decoded) == as_bytes(generated.media)


def test_generated_image_can_be_saved(generator, tmp_path):
    (image,) = generator.generate([PROMPT]).media
    with PIL.Image.open(image.save(tmp_path / "circle")) as saved:
        assert saved.size == (16, 16)


def test_image_depends_on_seed_and_prompt_but_not_on_others(generator):
    prompts = [PROMPT, "two blue squares", "a ring"] * 6  # more than one batch
    images = generate(generator, prompts, seed=5)
    assert generate(generator, prompts, seed=5) == images
    assert generate(generator, prompts[:3], seed=5) == images[:3]
    assert generate(generator, prompts[:1], seed=5) == images[:1]
    assert generate(generator, prompts[:3], seed=6) != images[:3]


def test_repeated_prompt_has_different_images(generator):
    images = generate(generator, [PROMPT] * 18)  # more than one batch
    assert images[16:] != images[:2] and len(set(images)) > 12


def test_codes_of_a_trained_network_do_not_depend_on_batch_size(generator):
    prompts, seeds = [PROMPT, "two blue squares", "a ring", ""] * 2, make_seeds(1, 8)
    request = GenerationRequest(prompts=prompts, seeds=seeds)
    whole = generator.task.generate(request)
    for size in (1, 3):
        parts = [generator.task.generate(request.slice(i, i + size)) for i in range(0, 8, size)]
        assert torch.equal(torch.cat(parts), whole)


def test_each_setting_changes_the_images(generator):
    plain = generate(generator, [PROMPT] * 4)
    for settings in (
        {"decoding_steps": 9},
        {"guidance": 9.0},
        {"negative_prompt": "a blue square"},
        {"sampling": MaskedSampling(temperature=0.0)},
    ):
        assert generate(generator, [PROMPT] * 4, **settings) != plain, settings
    config = generator.task.config
    same = {
        "decoding_steps": config.sampling.decoding_steps,
        "guidance": config.guidance,
        "sampling": config.sampling,
    }
    assert generate(generator, [PROMPT] * 4, **same) == plain


def test_settings_that_are_left_out_are_those_of_the_run(generator):
    config = generator.task.config
    request = generator.build_request(
        prompts=[PROMPT], count=2, sampling={"decoding_steps": 7}, guidance={"scale": 2.0}
    )
    assert request.sampling == dataclasses.replace(config.sampling, decoding_steps=7)
    assert request.guidance == dataclasses.replace(config.guidance, scale=2.0)
    settings = generator.generate([PROMPT], decoding_steps=7, guidance=2).settings
    assert settings["sampling"] == dataclasses.asdict(request.sampling)
    assert settings["guidance"] == dataclasses.asdict(Guidance(scale=2.0))
    with pytest.raises(UserError, match="must be at least 1"):
        generator.generate([PROMPT], decoding_steps=0)


def test_python_and_the_command_line_have_the_same_settings():
    """`run`, `superres`, `weights` are of `Generator.load`; media are saved by their `save`."""
    flags = inspect.signature(sample_command).parameters
    parameters = inspect.signature(Generator.generate).parameters
    loading = {"run", "superres", "weights", "out"}
    of_whole_files = {"start", "format"}
    tasks = [resolve(one.task) for one in recipes().values() if one.kind == "generator"]
    inputs = {field.name for task in tasks for field in dataclasses.fields(task.inputs_class)}
    assert inputs >= {"data", "mask", "like", "frames"}
    assert flags.keys() - loading - of_whole_files - {"prompt"} == (
        parameters.keys() - {"self", "prompts", "start", "sampling", "inputs"} | inputs
    )
    defaults = {name: flags[name].default for name in flags.keys() & parameters.keys()}
    assert defaults | {"count": 1} == {name: parameters[name].default for name in defaults}


def test_every_setting_reaches_the_sampler(generator):
    chosen: dict[str, Any] = {
        "schedule": "linear",
        "order": "halton",
        "temperature": 0.8,
        "final_temperature": 0.4,
        "choice_temperature": 1.5,
        "remask": 0.2,
        "top_k": 20,
        "top_p": 0.9,
    }
    interval = {"guidance_from": 0.1, "guidance_to": 0.9, "guidance_ramp": "linear"}
    generated = generator.generate(PROMPT, count=2, guidance_power=2.0, **chosen, **interval)
    run = generator.task.config
    sampling = dataclasses.asdict(dataclasses.replace(run.sampling, **chosen))
    assert generated.settings["sampling"] == sampling
    assert generated.settings["guidance"] == {
        **dataclasses.asdict(run.guidance),
        "start": 0.1,
        "end": 0.9,
        "ramp": "linear",
        "ramp_power": 2.0,
    }
    with pytest.raises(UserError, match="must be at least 1, got 0"):
        generator.generate(PROMPT, count=0)


def test_without_prompts_captions_of_held_out_examples_are_used(generator):
    held_out = generator.data.build().validation
    assert generator.generate(count=2).names == [held_out.caption(i) for i in (0, 8)]


def test_decoding_steps_of_a_run_by_levels_are_rejected(generator):
    by_level = dataclasses.replace(generator.task.config.sampling, decoding_steps_per_level=(16, 1))
    with pytest.raises(UserError, match="one after the other: use --decoding-steps-per-level"):
        generator.generate([PROMPT], decoding_steps=7, sampling=by_level)


def test_unknown_setting_is_rejected_with_the_known_ones(generator):
    with pytest.raises(UserError, match="has no --top-a: it has choice_temperature, .* top_p"):
        generator.build_request(prompts=[PROMPT], sampling={"top_a": 1})


def test_repr_names_the_run(base, generator):
    expected = f"Generator({str(base)!r}, recipe='images-maskgit', step=20, prompts=True)"
    assert repr(generator) == expected


def test_generator_and_tokenizer_can_be_moved_to_a_device(base, superres):
    moved = Generator.load(base, superres)
    assert moved.to("meta") is moved and moved.device.type == "meta"
    tasks = (moved.task, moved.superres)
    devices = {one.device.type for task in tasks for one in task.tokenizers.values()}
    assert devices == {"meta"} == {p.device.type for task in tasks for p in task.parameters()}


def test_single_prompt_has_one_image(generator):
    [image] = generator.generate(PROMPT, seed=3).media
    assert as_bytes([image]) == generate(generator, [PROMPT], seed=3)


def test_raw_and_ema_weights_generate_different_images(base):
    ema, raw = (
        generate(Generator.load(base, weights=weights), [PROMPT] * 2) for weights in ("ema", "raw")
    )
    assert ema != raw


def test_package_exports_the_generator():
    assert package.Generator is Generator


def test_model_card_shows_how_to_load_a_generator(tmp_path):
    flags = ("--preset", "tiny", "--steps", "1", "--sample-count", "1", "--out", tmp_path / "run")
    result = tessera("train", "images-maskgit", "--tokenizer", tokenizer(), *flags)
    card = (tmp_path / "run" / "README.md").read_text()
    assert result.code == 0 and "Generator.load" in card and "Tokenizer.load" not in card


# ---- requests without prompts


def test_default_prompts_are_spread_over_the_held_out_set(base, generator):
    """The tiny preset holds out 16 examples; more samples repeat their captions."""
    held_out = generator.data.build().validation
    request = generator.build_request(count=4)
    assert request.prompts == [held_out.caption(i) for i in (0, 4, 8, 12)]
    captions = [held_out.caption(i) for i in range(16)]
    assert choose_captions(load_run(base), None, 18) == [*captions, *captions[:2]]


def test_tokenizer_reconstructs_examples_spread_over_the_held_out_set():
    trained = load_run(tokenizer())
    held_out = trained.run.data.build().validation
    generated = reconstruct_samples(trained, count=4)
    assert generated.names == [held_out.name(i) for i in (0, 4, 8, 12)]
    assert len(generated.media) == 4 and generated.notices == []


def test_rejected_examples_are_collected_over_batches():
    rejected = RejectedExamples()
    for batch in (None, Batch([], [], [], [("a.png", "empty")]), None):
        rejected.add(batch)
    rejected.add(Batch([], [], [], [("b.png", "truncated")]))
    assert rejected.lines() == ["Skipped a.png: empty", "Skipped b.png: truncated"]


# ---- super-resolution


def test_second_run_enlarges_the_images(generator, cascade):
    small, large = (one.generate([PROMPT] * 2).media for one in (generator, cascade))
    assert [image.pixels.shape for image in small] == [(16, 16, 3)] * 2
    assert [image.pixels.shape for image in large] == [(32, 32, 3)] * 2


def test_large_image_depends_on_the_small_one(cascade):
    seeds = make_seeds(0, 1)
    codes = cascade.task.generate(GenerationRequest(prompts=[PROMPT], seeds=seeds))
    one, other = (
        cascade.superres.generate(
            GenerationRequest(prompts=[PROMPT], seeds=seeds, cond_codes=cond_codes)
        )
        for cond_codes in (codes, (codes + 7) % 64)
    )
    assert not torch.equal(one, other)
    decoded = cascade.superres.tokenizers["tokenizer"].to_media(one)
    assert as_bytes(decoded) == generate(cascade, [PROMPT])


def test_large_image_depends_on_seed_and_prompt_but_not_on_others(cascade):
    prompts = [PROMPT, "two blue squares", "a ring"]
    images = generate(cascade, prompts, seed=2)
    assert generate(cascade, prompts, seed=2) == images
    assert generate(cascade, prompts[:1], seed=2) == images[:1]


def test_decoding_steps_of_the_second_run_can_be_set(cascade):
    plain = generate(cascade, [PROMPT] * 2)
    generated = cascade.generate([PROMPT] * 2, superres_decoding_steps=3)
    assert as_bytes(generated.media) != plain
    assert generated.settings["superres"]["sampling"]["decoding_steps"] == 3


def test_runs_in_the_wrong_order_are_rejected(base, superres):
    with pytest.raises(UserError, match="For super-resolution give it after the run"):
        Generator.load(superres).generate([PROMPT])
    with pytest.raises(UserError, match="not a super-resolution run"):
        Generator.load(base, base)


def test_cascade_over_different_tokenizers_is_rejected(base, tmp_path):
    """The tokenizer of large images has the same vocabulary, but its tokens differ."""
    run = build_tiny(images_maskgit_superres)
    task = dataclasses.replace(run.task, low_res_tokenizer=run.task.tokenizer)
    engine = dataclasses.replace(run.engine, steps=1, sample_count=1)
    train(tmp_path, dataclasses.replace(run, task=task, engine=engine))
    with pytest.raises(UserError, match="trained on the tokens of another tokenizer"):
        Generator.load(base, tmp_path)


# ---- inpainting


def encode_prompt(generator: Generator, image: Path, mask: Path) -> TokenPrompt:
    prompt = generator.encode_prompt(data=str(image), mask=str(mask))
    assert prompt is not None
    return prompt


def test_only_the_white_part_of_a_mask_is_generated(generator, tmp_path):
    image, half = write_image(tmp_path / "image.png"), write_mask(tmp_path / "mask.png")
    start = encode_prompt(generator, image, half)
    mask = torch.zeros(1, 4, 4, dtype=torch.bool)
    mask[..., :2] = True
    assert torch.equal(start.mask, mask) and start.codes.shape == (1, 4, 4)
    generated = generator.generate([PROMPT] * 3, start=start)
    codes, given = torch.stack(generated.codes), start.codes.expand(3, 4, 4)
    kept = ~mask.expand(3, 4, 4)
    assert torch.equal(codes[kept], given[kept])
    assert len(generated.media) == 3 and not torch.equal(codes, given)


def test_token_with_any_white_pixel_is_generated():
    white = torch.zeros(16, 16, dtype=torch.bool)
    white[5, 11] = True
    assert cover_cells(white, (4, 4)).nonzero().tolist() == [[1, 2]]
    assert cover_cells(torch.ones(16, 16, dtype=torch.bool), (4, 4)).all()


def test_mask_is_cropped_as_its_image(generator, tmp_path):
    """An image twice as wide as high loses its outer quarters, and so does its mask."""
    image = write_image(tmp_path / "image.png", (32, 16))
    outside = write_mask(tmp_path / "outside.png", (32, 16), (0, 0, 8, 16))
    left = write_mask(tmp_path / "left.png", (32, 16), (0, 0, 16, 16))
    with pytest.raises(UserError, match="has no white pixel"):
        encode_prompt(generator, image, outside)
    mask = encode_prompt(generator, image, left).mask[0]
    assert mask[:, :2].all() and not mask[:, 3].any()


def test_white_mask_generates_a_new_image(generator, tmp_path):
    image = write_image(tmp_path / "image.png")
    start = encode_prompt(generator, image, write_mask(tmp_path / "mask.png", white=(0, 0, 16, 16)))
    assert isinstance(start, TokenPrompt) and start.mask.all()
    images = generate(generator, [PROMPT] * 2, start=start)
    assert images == generate(generator, [PROMPT] * 2)


# ---- tessera sample


def read_settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "settings.json").read_text())


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_images(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(folder.glob("0*.png"))]


def sample(*arguments: str | Path) -> CommandResult:
    result = tessera("sample", *arguments)
    assert result.code == 0, result
    return result


def test_samples_are_saved_with_every_setting(base, tmp_path):
    out = tmp_path / "out"
    result = sample(
        *(base, "--prompt", PROMPT, "two blue squares", "--negative-prompt", "a ring"),
        *("--count", "2", "--seed", "7", "--out", out),
        *("--guidance", "2.5", "--guidance-from", "0.1", "--guidance-to", "0.9"),
        *(
            "--guidance-ramp",
            "linear",
            "--guidance-power",
            "2",
            "--decoding-steps",
            "3",
            "--order",
            "halton",
        ),
        *(
            "--schedule",
            "linear",
            "--temperature",
            "0.8",
            "--final-temperature",
            "0.4",
            "--choice-temperature",
            "1.5",
            "--remask",
            "0.2",
        ),
        *("--top-k", "20", "--top-p", "0.9"),
    )
    numbered = [f"{number:04d}.png" for number in range(4)]
    assert list_names(out) == [*numbered, "settings.json", "sheet.png"]
    assert str(out) in result.out
    settings = read_settings(out)
    prompts = [PROMPT] * 2 + ["two blue squares"] * 2
    assert settings == {
        "run": str(base),
        "superres_run": None,
        "step": 20,
        "weights": "ema",
        "data": None,
        "seed": 7,
        "count": 4,
        "examples": prompts,
        "prompts": prompts,
        "negative_prompt": "a ring",
        "sampling": {
            "decoding_steps": 3,
            "schedule": "linear",
            "order": "halton",
            "temperature": 0.8,
            "final_temperature": 0.4,
            "choice_temperature": 1.5,
            "remask": 0.2,
            "top_k": 20,
            "top_p": 0.9,
            "decoding_steps_per_level": [],
        },
        "guidance": {
            "scale": 2.5,
            "start": 0.1,
            "end": 0.9,
            "ramp": "linear",
            "ramp_power": 2.0,
        },
    }


def test_command_and_python_generate_the_same_images(base, generator, tmp_path):
    flags = ("--count", "2", "--seed", "3", "--decoding-steps", "5", "--guidance", "2")
    sample(base, "--prompt", PROMPT, *flags, "--out", tmp_path)
    expected = generator.generate([PROMPT] * 2, seed=3, decoding_steps=5, guidance=2.0).media
    for number, image in enumerate(expected):
        with PIL.Image.open(tmp_path / f"{number:04d}.png") as saved:
            assert np.array_equal(np.asarray(saved.convert("RGB")), image.pixels)


def test_captions_of_held_out_examples_are_the_default_prompts(base, generator, tmp_path):
    sample(base, "--count", "4", "--out", tmp_path)
    held_out = generator.data.build().validation
    captions = [held_out.caption(i) for i in (0, 4, 8, 12)]
    settings = read_settings(tmp_path)
    assert all(captions) and settings["prompts"] == settings["examples"] == captions


def test_samples_of_training_have_the_captions_of_their_examples(base, generator):
    settings = read_settings(base / "samples" / "000020")
    held_out = generator.data.build().validation
    by_name = {held_out.name(i): held_out.caption(i) for i in range(len(held_out))}
    assert settings["captions"] == [by_name[name] for name in settings["examples"]]


def test_captions_of_a_folder_can_be_the_prompts(base, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        write_image(folder / f"{number}.png", seed=number)
        (folder / f"{number}.txt").write_text("a red ring")
    for name, flags in {
        "plain": (),
        "other": ("--temperature", "0", "--guidance", "1", "--seed", "4"),
    }.items():
        sample(base, "--data", folder, "--count", "3", *flags, "--out", tmp_path / name)
    assert read_images(tmp_path / "plain") != read_images(tmp_path / "other")
    settings = read_settings(tmp_path / "other")
    assert settings["prompts"] == ["a red ring"] * 3
    assert settings["guidance"]["scale"] == 1 and settings["sampling"]["temperature"] == 0


def test_critic_can_choose_the_tokens(base, tmp_path):
    for order in ("critic", "confidence"):
        flags = ("--count", "2", "--order", order, "--out", tmp_path / order)
        sample(base, "--prompt", PROMPT, *flags)
    assert read_images(tmp_path / "critic") != read_images(tmp_path / "confidence")


def test_two_runs_are_a_cascade_with_settings_of_both(base, superres, tmp_path):
    flags = ("--count", "2", "--decoding-steps", "3", "--superres-decoding-steps", "4")
    sample(base, superres, "--prompt", PROMPT, *flags, "--out", tmp_path)
    with PIL.Image.open(tmp_path / "0001.png") as saved:
        assert saved.size == (32, 32)
    settings = read_settings(tmp_path)
    assert settings["superres_run"] == str(superres)
    assert settings["sampling"]["decoding_steps"] == 3 and "scale" in settings["guidance"]
    assert settings["superres"]["sampling"]["decoding_steps"] == 4
    assert "scale" in settings["superres"]["guidance"]


def test_corrupt_checkpoint_of_the_second_run_is_reported(base, superres, tmp_path):
    copy = tmp_path / "superres"
    shutil.copytree(superres, copy)
    corrupt = copy / "checkpoints" / "000021"
    shutil.copytree(copy / "checkpoints" / "000020", corrupt)
    (corrupt / "ema.safetensors").write_bytes(b"")
    result = sample(base, copy, "--prompt", PROMPT, "--count", "1", "--out", tmp_path / "out")
    assert "000021" in result.err


def test_super_resolution_run_enlarges_given_images(superres, tmp_path):
    image = write_image(tmp_path / "image.png", (40, 40))
    for seed in ("1", "2"):
        flags = ("--count", "1", "--seed", seed, "--out", tmp_path / seed)
        sample(superres, "--data", image, *flags)
        with PIL.Image.open(tmp_path / seed / "0000.png") as saved:
            assert saved.size == (32, 32)
        assert read_settings(tmp_path / seed)["examples"] == ["image.png"]
    assert read_images(tmp_path / "1") != read_images(tmp_path / "2")


def test_super_resolution_samples_name_held_out_examples(superres, tmp_path):
    sample(superres, "--count", "4", "--out", tmp_path)
    held_out = load_run(superres).run.data.build().validation
    settings = read_settings(tmp_path)
    assert settings["examples"] == [held_out.name(i) for i in (0, 4, 8, 12)]
    assert settings["prompts"] == [held_out.caption(i) for i in (0, 4, 8, 12)]


def test_inpainting_settings_name_image_and_mask(base, tmp_path):
    image, half = write_image(tmp_path / "image.png"), write_mask(tmp_path / "mask.png")
    inputs = ("--data", image, "--mask", half, "--count", "2")
    sample(base, *inputs, "--prompt", PROMPT, "--out", tmp_path / "prompt")
    settings = read_settings(tmp_path / "prompt")
    assert settings["mask"] == str(half) and settings["data"] == str(image)
    assert settings["prompts"] == [PROMPT] * 2
    sample(base, *inputs, "--out", tmp_path / "none")
    assert read_settings(tmp_path / "none")["prompts"] == ["", ""]


def test_earlier_samples_are_moved_and_never_mixed_with_new_ones(base, tmp_path):
    prompt = (base, "--prompt", PROMPT, "--out", tmp_path)
    sample(*prompt, "--count", "3")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for number, count in ((1, "2"), (2, "1")):
        result = sample(*prompt, "--count", count, "--seed", "9")
        assert f"earlier-00{number}" in result.out
    single = ["0000.png", "settings.json", "sheet.png"]
    assert list_names(tmp_path) == sorted([*single, "earlier-001", "earlier-002"])
    moved = {path.name: path.read_bytes() for path in (tmp_path / "earlier-001").iterdir()}
    assert moved == before
    assert list_names(tmp_path / "earlier-002") == sorted([*single, "0001.png"])
    for name in single:
        (tmp_path / name).unlink()
    assert "earlier-003" not in sample(*prompt, "--count", "1").out


def test_folder_with_other_files_is_left_unchanged(base, tmp_path):
    (tmp_path / "0000.png").write_bytes(b"another image")
    message = run_invalid("sample", base, "--prompt", PROMPT, "--count", "1", "--out", tmp_path)
    assert f"{tmp_path} holds files that are not samples. Give another --out." in message
    assert list_names(tmp_path) == ["0000.png"]
    assert (tmp_path / "0000.png").read_bytes() == b"another image"


# ---- tessera evaluate


def test_super_resolution_run_is_evaluated(superres):
    result = tessera("evaluate", superres)
    assert result.code == 0, result
    assert "cross_entropy" in result.out and "condition_gain" in result.out


def test_samples_of_a_generator_are_compared_with_their_prompts(base):
    result = tessera("evaluate", base, "--samples", "4")
    assert result.code == 0 and "prompt_match" in result.out and "condition_gain" in result.out
    evaluation = json.loads((base / "evaluation.json").read_text())
    metrics, protocol = evaluation["metrics"], evaluation["protocol"]["sample_metrics"]
    assert protocol["samples"] == 4 and "sampling" in protocol and len(protocol["prompts"]) == 4
    assert {"cross_entropy", "accuracy", "condition_gain"} <= metrics["raw"].keys()
    assert {"prompt_match", "prompt_match_chance"} <= metrics["ema"].keys() - metrics["raw"].keys()


def test_samples_are_compared_with_real_images_in_a_table(base, tmp_path):
    result = tessera("evaluate", base, "--out", tmp_path / "evaluation.json")
    assert result.code == 0, result
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    metrics, protocol = evaluation["metrics"]["ema"], evaluation["protocol"]["sample_metrics"]
    assert (protocol["samples"], protocol["compared_images"], protocol["probe_images"]) == (
        64,
        16,
        64,
    )
    rows = {row.split()[0]: row.split()[1:] for row in result.out.splitlines() if row.strip()}
    assert rows["samples"] == ["real", "chance"]
    for name, columns in {
        "frechet_lite0": ("", "_real"),
        "precision": ("", "_real"),
        "recall": ("", "_real"),
        "caption_R@1": ("", "_real", "_chance"),
        "copy_rate": ("", "_real"),
    }.items():
        assert rows[name] == [f"{metrics[name + suffix]:.4f}" for suffix in columns]


def test_settings_of_the_samples_that_are_evaluated_can_be_replaced(base):
    settings = {"sampling": {"decoding_steps": 2}, "guidance": {"scale": 1.0}}
    found = evaluate_samples(load_run(base), count=5, **settings)
    assert found is not None
    assert found.protocol["sampling"]["decoding_steps"] == 2
    assert found.protocol["guidance"]["scale"] == 1.0
    with pytest.raises(UserError, match="This generator has no --beams"):
        evaluate_samples(load_run(base), count=5, sampling={"beams": 2})


def test_a_negative_number_of_samples_is_an_error(base):
    message = run_invalid("evaluate", base, "--samples", "-1")
    assert "--samples must be at least 0, got -1." in message
