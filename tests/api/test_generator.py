"""A finished generator: pictures for prompts, larger ones by a second run, and parts of a picture
drawn anew."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

import tessera as package
from tessera.api.generator import Generator, Start, covered, settings
from tessera.engine.modes import hash_seed
from tessera.modalities.image.media import Image
from tessera.modalities.image.recipes import images_maskgit, images_maskgit_superres
from tessera.objectives.generation import GenerationRequest
from tessera.run.errors import UserError
from tessera.sampling.guidance import Guidance
from tessera.sampling.maskgit import MaskedSampling
from tests.cli_runner import CommandResult, run_invalid, tessera
from tests.runs import build_tiny, train

PROMPT = "a red circle"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "base"
    train(place, build_tiny(images_maskgit, critic="head"))
    return place


@pytest.fixture(scope="module")
def superres(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "superres"
    train(place, build_tiny(images_maskgit_superres))
    return place


@pytest.fixture(scope="module")
def generator(base: Path) -> Generator:
    return Generator.load(base)


@pytest.fixture(scope="module")
def chained(base: Path, superres: Path) -> Generator:
    return Generator.load(base, superres)


def bytes_of(pictures: list[Image]) -> list[bytes]:
    return [picture.pixels.tobytes() for picture in pictures]


def paint(file: Path, size: tuple[int, int] = (16, 16), seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).resize(size).save(file)
    return file


def mask(
    file: Path,
    size: tuple[int, int] = (16, 16),
    white: tuple[int, int, int, int] | None = (0, 0, 8, 16),
) -> Path:
    picture = PIL.Image.new("L", size)
    if white is not None:
        picture.paste(255, white)
    picture.save(file)
    return file


# ------------------------------------------------------------------------------------------------------------- pictures


def test_texts_become_pictures(generator):
    made = generator.generate([PROMPT, "two blue squares", ""])
    assert len(made) == 3 and all(
        isinstance(one, Image) and one.pixels.shape == (16, 16, 3) for one in made
    )
    assert generator.generate([]) == []


def test_a_picture_can_be_saved(generator, tmp_path):
    (picture,) = generator.generate([PROMPT])
    with PIL.Image.open(picture.save(tmp_path / "circle")) as saved:
        assert saved.size == (16, 16)


def test_the_same_seed_is_the_same_picture_whoever_else_is_made(generator):
    texts = [PROMPT, "two blue squares", "a ring"] * 6  # more than are drawn together
    all_of_them = bytes_of(generator.generate(texts, seed=5))
    assert bytes_of(generator.generate(texts, seed=5)) == all_of_them
    assert bytes_of(generator.generate(texts[:3], seed=5)) == all_of_them[:3]
    assert bytes_of(generator.generate(texts[:1], seed=5)) == all_of_them[:1]
    assert bytes_of(generator.generate(texts[:3], seed=6)) != all_of_them[:3]


def test_one_prompt_is_many_pictures(generator):
    made = bytes_of(generator.generate([PROMPT] * 18))  # more than are drawn together
    assert made[16:] != made[:2] and len(set(made)) > 12


def test_a_trained_networks_codes_are_the_same_in_batches_of_one_three_and_eight(generator):
    texts, seeds = (
        [PROMPT, "two blue squares", "a ring", ""] * 2,
        [hash_seed(1, i) for i in range(8)],
    )
    train_together = generator.task.generate(GenerationRequest(texts, seeds))
    for size in (1, 3):
        parts = [
            generator.task.generate(GenerationRequest(texts[i : i + size], seeds[i : i + size]))
            for i in range(0, 8, size)
        ]
        assert torch.equal(torch.cat(parts), train_together)


def test_settings_change_what_is_made(generator):
    plain = bytes_of(generator.generate([PROMPT] * 4))
    for asked in (
        {"rounds": 9},
        {"guidance": 9.0},
        {"negative": "a blue square"},
        {"sampling": MaskedSampling(temperature=0.0)},
    ):
        assert bytes_of(generator.generate([PROMPT] * 4, **asked)) != plain, asked
    known = generator.task.config
    same = {
        "rounds": known.sampling.decoding_steps,
        "guidance": known.guidance,
        "sampling": known.sampling,
    }
    assert bytes_of(generator.generate([PROMPT] * 4, **same)) == plain


def test_what_is_not_asked_for_is_as_the_run_says(generator):
    chosen = settings(generator.task, decoding_steps=7, guidance=2)
    assert chosen.sampling == dataclasses.replace(generator.task.config.sampling, decoding_steps=7)
    assert chosen.guidance == Guidance(scale=2.0)
    with pytest.raises(UserError, match="must be at least 1"):
        settings(generator.task, decoding_steps=0)
    by_level = dataclasses.replace(generator.task.config.sampling, decoding_steps_per_level=(16, 1))
    with pytest.raises(UserError, match="level by level"):
        settings(generator.task, decoding_steps=7, sampling=by_level)


def test_one_text_is_one_picture(generator):
    [made] = generator.generate(PROMPT, seed=3)
    assert bytes_of([made]) == bytes_of(generator.generate([PROMPT], seed=3))


def test_live_and_averaged_weights_are_two_models(base):
    averaged, live = (
        Generator.load(base, weights=weights).generate([PROMPT] * 2) for weights in ("ema", "raw")
    )
    assert bytes_of(averaged) != bytes_of(live)


def test_the_package_offers_it_by_name():
    assert package.Generator is Generator


def test_the_card_says_how_a_generator_is_opened(tmp_path):
    said = tessera(
        "train",
        "images-maskgit",
        "--preset",
        "tiny",
        "--steps",
        "1",
        "--sample-count",
        "1",
        "--tokenizer",
        build_tiny(images_maskgit).task.tokenizer,
        "--out",
        tmp_path / "run",
    )
    card = (tmp_path / "run" / "README.md").read_text()
    assert said.code == 0 and "Generator.load" in card and "Tokenizer.load" not in card


# ------------------------------------------------------------------------------------------------------ a larger picture


def test_a_second_run_makes_them_larger(generator, chained):
    small, large = generator.generate([PROMPT] * 2), chained.generate([PROMPT] * 2)
    assert [one.pixels.shape for one in large] == [(32, 32, 3)] * 2 and small[0].pixels.shape == (
        16,
        16,
        3,
    )


def test_the_larger_picture_depends_on_the_smaller(chained):
    larger = chained.larger
    seeds = [hash_seed(0, 0)]
    codes = chained.task.generate(GenerationRequest([PROMPT], seeds))
    one = larger.generate(GenerationRequest([PROMPT], seeds, coarser=codes))
    other = larger.generate(GenerationRequest([PROMPT], seeds, coarser=(codes + 7) % 64))
    assert not torch.equal(one, other)
    assert bytes_of(larger.tokenizers["tokenizer"].media(one)) == bytes_of(
        chained.generate([PROMPT])
    )


def test_seeds_hold_through_the_chain(chained):
    texts = [PROMPT, "two blue squares", "a ring"]
    made = bytes_of(chained.generate(texts, seed=2))
    assert (
        bytes_of(chained.generate(texts, seed=2)) == made
        and bytes_of(chained.generate(texts[:1], seed=2)) == made[:1]
    )


def test_runs_in_the_wrong_order_are_refused(base, superres):
    with pytest.raises(UserError, match="super-resolution run"):
        Generator.load(superres).generate([PROMPT])
    with pytest.raises(UserError, match="not a super-resolution run"):
        Generator.load(base, base)


def test_a_chain_over_different_tokenizers_is_refused(base, tmp_path):
    """The larger pictures' own tokenizer taken for the smaller one: the same vocabulary, and other
    symbols."""
    run = build_tiny(images_maskgit_superres)
    run = dataclasses.replace(
        run, task=dataclasses.replace(run.task, low_res_tokenizer=run.task.tokenizer)
    )
    train(
        tmp_path,
        dataclasses.replace(run, engine=dataclasses.replace(run.engine, steps=1, sample_count=1)),
    )
    with pytest.raises(UserError, match="symbols of another tokenizer"):
        Generator.load(base, tmp_path)


# -------------------------------------------------------------------------------------------------- a part drawn anew


def test_only_what_is_white_is_drawn_anew(generator, tmp_path):
    picture, half = paint(tmp_path / "picture.png"), mask(tmp_path / "mask.png")
    start = generator.start(picture, half)
    hidden = torch.zeros(1, 4, 4, dtype=torch.bool)
    hidden[..., :2] = True
    assert torch.equal(start.hidden, hidden) and start.codes.shape == (1, 4, 4)
    seen: list[torch.Tensor] = []
    media = generator.task.tokenizers["tokenizer"].media
    generator.task.tokenizers["tokenizer"].media = lambda codes: (seen.append(codes), media(codes))[
        1
    ]
    try:
        made = generator.generate([PROMPT] * 3, start=start)
    finally:
        del generator.task.tokenizers["tokenizer"].media
    (codes,) = seen
    kept = ~hidden.expand(3, 4, 4)
    assert torch.equal(codes[kept], start.codes.expand(3, 4, 4)[kept])
    assert len(made) == 3 and not torch.equal(codes, start.codes.expand(3, 4, 4))


def test_a_symbol_that_is_white_in_part_is_drawn_anew():
    white = torch.zeros(16, 16, dtype=torch.bool)
    white[5, 11] = True
    assert covered(white, (4, 4)).nonzero().tolist() == [[1, 2]]
    assert covered(torch.ones(16, 16, dtype=torch.bool), (4, 4)).all()


def test_a_mask_is_cut_as_its_picture_is(generator, tmp_path):
    """Of a picture twice as wide as high the middle is shown: the outer quarters of its mask cover
    nothing."""
    picture = paint(tmp_path / "picture.png", (32, 16))
    outside = mask(tmp_path / "outside.png", (32, 16), (0, 0, 8, 16))
    left = mask(tmp_path / "left.png", (32, 16), (0, 0, 16, 16))
    with pytest.raises(UserError, match="Nothing is white"):
        generator.start(picture, outside)
    hidden = generator.start(picture, left).hidden[0]
    assert hidden[:, :2].all() and not hidden[:, 3].any()


def test_everything_may_be_white_and_then_it_is_a_new_picture(generator, tmp_path):
    start = generator.start(
        paint(tmp_path / "picture.png"), mask(tmp_path / "mask.png", white=(0, 0, 16, 16))
    )
    assert bytes_of(generator.generate([PROMPT] * 2, start=start)) == bytes_of(
        generator.generate([PROMPT] * 2)
    )
    assert isinstance(start, Start) and start.hidden.all()


# ----------------------------------------------------------------------------------------------------- the command line


def settings_in(place: Path) -> dict:
    return json.loads((place / "settings.json").read_text())


def names_in(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def sampled(*arguments: str | Path) -> CommandResult:
    said = tessera("sample", *arguments)
    assert said.code == 0, said
    return said


def test_prompts_become_files_with_every_setting_beside_them(base, tmp_path):
    out = tmp_path / "out"
    said = sampled(
        base,
        "--prompt",
        PROMPT,
        "two blue squares",
        "--negative",
        "a ring",
        "--count",
        "2",
        "--guidance",
        "2.5",
        "--guidance-from",
        "0.1",
        "--guidance-to",
        "0.9",
        "--guidance-ramp",
        "linear",
        "--decoding-steps",
        "3",
        "--order",
        "halton",
        "--schedule",
        "linear",
        "--temperature",
        "0.8",
        "--choice-temperature",
        "1.5",
        "--top-k",
        "20",
        "--top-p",
        "0.9",
        "--seed",
        "7",
        "--out",
        out,
    )
    assert names_in(out) == [
        "0000.png",
        "0001.png",
        "0002.png",
        "0003.png",
        "settings.json",
        "sheet.png",
    ]
    assert str(out) in said.out
    found = settings_in(out)
    assert (
        found["prompts"] == [PROMPT] * 2 + ["two blue squares"] * 2
        and found["negative"] == "a ring"
        and found["count"] == 4
    )
    assert found["guidance"] == {"scale": 2.5, "start": 0.1, "end": 0.9, "ramp": "linear"}
    assert found["sampling"] == {
        "rounds": 3,
        "schedule": "linear",
        "order": "halton",
        "temperature": 0.8,
        "noise": 1.5,
        "top_k": 20,
        "top_p": 0.9,
        "level_rounds": [],
    }
    assert (found["run"], found["steps"], found["weights"], found["seed"]) == (
        str(base),
        20,
        "ema",
        7,
    )


def test_the_command_makes_what_python_makes(base, generator, tmp_path):
    sampled(
        base,
        "--prompt",
        PROMPT,
        "--count",
        "2",
        "--seed",
        "3",
        "--decoding-steps",
        "5",
        "--guidance",
        "2",
        "--out",
        tmp_path,
    )
    expected = generator.generate([PROMPT] * 2, seed=3, decoding_steps=5, guidance=2.0)
    for number, picture in enumerate(expected):
        with PIL.Image.open(tmp_path / f"{number:04d}.png") as saved:
            assert np.array_equal(np.asarray(saved.convert("RGB")), picture.pixels)


def test_without_a_prompt_the_captions_of_held_out_examples_are_asked_for(base, tmp_path):
    sampled(base, "--count", "3", "--out", tmp_path)
    prompts = settings_in(tmp_path)["prompts"]
    assert len(prompts) == 3 and all(prompts)


def test_settings_are_heard_where_captions_come_from_a_folder(base, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(3):
        paint(folder / f"{number}.png", seed=number)
        (folder / f"{number}.txt").write_text("a red ring")
    made = {}
    for name, flags in {
        "plain": (),
        "other": ("--temperature", "0", "--guidance", "1", "--seed", "4"),
    }.items():
        sampled(base, "--data", folder, "--count", "3", *flags, "--out", tmp_path / name)
        made[name] = [file.read_bytes() for file in sorted((tmp_path / name).glob("0*.png"))]
    assert made["plain"] != made["other"]
    found = settings_in(tmp_path / "other")
    assert (
        found["prompts"] == ["a red ring"] * 3
        and found["guidance"]["scale"] == 1
        and found["sampling"]["temperature"] == 0
    )


def test_the_critic_can_choose(base, tmp_path):
    for order in ("critic", "confidence"):
        sampled(
            base, "--prompt", PROMPT, "--count", "2", "--order", order, "--out", tmp_path / order
        )
    one, other = (
        [file.read_bytes() for file in sorted((tmp_path / order).glob("0*.png"))]
        for order in ("critic", "confidence")
    )
    assert one != other


def test_two_runs_are_chained(base, superres, tmp_path):
    sampled(base, superres, "--prompt", PROMPT, "--count", "2", "--out", tmp_path)
    with PIL.Image.open(tmp_path / "0001.png") as saved:
        assert saved.size == (32, 32)
    assert settings_in(tmp_path)["superres"] == str(superres)


def test_of_a_chain_both_runs_settings_are_written_down(base, superres, tmp_path):
    sampled(
        base,
        superres,
        "--prompt",
        PROMPT,
        "--count",
        "1",
        "--decoding-steps",
        "3",
        "--out",
        tmp_path,
    )
    found = json.dumps(settings_in(tmp_path))
    assert found.count('"rounds"') == 2 and found.count('"scale"') == 2


def test_a_super_resolution_run_enlarges_pictures_that_are_given(superres, tmp_path):
    paint(tmp_path / "picture.png", (40, 40))
    sampled(superres, "--data", tmp_path / "picture.png", "--count", "1", "--out", tmp_path / "out")
    with PIL.Image.open(tmp_path / "out" / "0000.png") as saved:
        assert saved.size == (32, 32)


def test_another_seed_enlarges_them_otherwise(superres, tmp_path):
    paint(tmp_path / "picture.png", (40, 40))
    for seed in ("1", "2"):
        sampled(
            superres,
            "--data",
            tmp_path / "picture.png",
            "--count",
            "1",
            "--seed",
            seed,
            "--out",
            tmp_path / seed,
        )
    assert (tmp_path / "1" / "0000.png").read_bytes() != (tmp_path / "2" / "0000.png").read_bytes()


def test_a_super_resolution_run_can_be_evaluated(superres):
    said = tessera("evaluate", superres)
    assert said.code == 0 and "cross_entropy" in said.out and "condition_gain" in said.out, said


def test_a_generator_is_evaluated_with_a_judge_on_toys(base):
    said = tessera("evaluate", base, "--samples", "4")
    assert said.code == 0 and "prompt_match" in said.out and "condition_gain" in said.out
    found = json.loads((base / "evaluation.json").read_text())
    assert found["protocol"]["judged"]["samples"] == 4 and "sampling" in found["protocol"]["judged"]
    assert {"cross_entropy", "accuracy", "condition_gain"} <= found["numbers"]["raw"].keys()


def test_mending_by_the_command(base, tmp_path):
    picture, half = paint(tmp_path / "picture.png"), mask(tmp_path / "mask.png")
    sampled(
        base,
        "--data",
        picture,
        "--mask",
        half,
        "--prompt",
        PROMPT,
        "--count",
        "2",
        "--out",
        tmp_path / "out",
    )
    found = settings_in(tmp_path / "out")
    assert (
        found["mask"] == str(half)
        and found["data"] == str(picture)
        and found["prompts"] == [PROMPT] * 2
    )
    sampled(base, "--data", picture, "--mask", half, "--count", "2", "--out", tmp_path / "unasked")
    assert settings_in(tmp_path / "unasked")["prompts"] == ["", ""]


def test_earlier_samples_are_set_aside_whole_and_never_mixed_with_new_ones(base, tmp_path):
    sampled(base, "--prompt", PROMPT, "--count", "3", "--out", tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for number, count in ((1, "2"), (2, "1")):
        said = sampled(base, "--prompt", PROMPT, "--count", count, "--seed", "9", "--out", tmp_path)
        assert f"earlier-00{number}" in said.out
    assert names_in(tmp_path) == [
        "0000.png",
        "earlier-001",
        "earlier-002",
        "settings.json",
        "sheet.png",
    ]
    assert {path.name: path.read_bytes() for path in (tmp_path / "earlier-001").iterdir()} == before
    assert names_in(tmp_path / "earlier-002") == [
        "0000.png",
        "0001.png",
        "settings.json",
        "sheet.png",
    ]
    for name in ("0000.png", "settings.json", "sheet.png"):
        (tmp_path / name).unlink()
    assert (
        "earlier-003"
        not in sampled(base, "--prompt", PROMPT, "--count", "1", "--out", tmp_path).out
    )


def test_a_folder_with_other_things_in_it_is_no_place_for_samples(base, tmp_path):
    (tmp_path / "0000.png").write_bytes(b"somebody's picture")
    letter = run_invalid("sample", base, "--prompt", PROMPT, "--count", "1", "--out", tmp_path)
    assert (
        "nothing was changed" in letter
        and (tmp_path / "0000.png").read_bytes() == b"somebody's picture"
    )
