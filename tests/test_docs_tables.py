"""The tables of the documentation agree with the code: presets, trainer parameters and settings."""

from __future__ import annotations

import inspect
import re
import tomllib
from math import ceil, log2
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn

from tessera.modalities.audio.recipes import (
    audio_codec,
    audio_semantic,
    audio_soundstorm,
    audio_text2semantic,
)
from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
from tessera.modalities.image.recipes import images_maskgit, images_maskgit_superres, images_vqgan
from tessera.modalities.mesh.recipes import (
    meshes_autoencoder,
    meshes_transformer,
    meshes_tree,
)
from tessera.modalities.music.recipes import music_mulan
from tessera.modalities.video.masking import VideoMaskingConfig
from tessera.modalities.video.recipes import videos_magvit2, videos_maskgit
from tessera.modalities.video.reconstruction import VideoAdversaryConfig
from tessera.nn.masked_transformer import MaskedTransformerConfig
from tessera.nn.quantize.features import code_features
from tessera.recipes.presets import Preset
from tessera.run.config import MAY_DIFFER
from tessera.trainers import (
    MaskGitTrainer,
    MuLaNTrainer,
    SoundStormTrainer,
    Trainer,
    VideoGeneratorTrainer,
    VideoTokenizerTrainer,
    VQGanVAETrainer,
)
from tests.pages import read_prose, read_table, recipe_page

ROOT = Path(__file__).resolve().parent.parent

# ---- presets: the cells of a row, in the order of the columns


def image_tokenizer_row(preset: Preset) -> list[str]:
    run: Any = images_vqgan(preset)
    with torch.device("meta"):  # sizes without the memory
        model = run.task.model.build()
    grid = run.data.size // run.task.model.stride
    return [
        image_size(run),
        f"{grid} x {grid}",
        f"{model.vocab_size:,}",
        count_parameters(model),
        *steps_and_batch_size(run),
        learning_rate(run),
        adversary(run),
    ]


def image_generator_row(preset: Preset) -> list[str]:
    run: Any = images_maskgit(preset)
    tokenizer = image_tokenizer_stub(preset)
    with torch.device("meta"):
        task = run.task.build(tokenizer=tokenizer)
    return [
        image_size(run),
        f"{' x '.join(map(str, tokenizer.grid))} of {tokenizer.vocab_size:,}",
        f"{task.layout.num_positions}",
        count_parameters(task.model),
        *steps_and_batch_size(run),
        run.task.optimizer.name,
        learning_rate(run),
        f"{run.task.sampling.decoding_steps}",
    ]


def video_tokenizer_row(preset: Preset) -> list[str]:
    run: Any = videos_magvit2(preset)
    with torch.device("meta"):
        model = run.task.model.build()
    return [
        f"{run.data.frames} x {image_size(run)}",
        " x ".join(map(str, run.task.model.grid(run.data))),
        f"{model.vocab_size:,}",
        count_parameters(model),
        *steps_and_batch_size(run),
        learning_rate(run),
        adversary(run),
    ]


def video_generator_row(preset: Preset) -> list[str]:
    run: Any = videos_maskgit(preset)
    tokenizer_run: Any = videos_magvit2(preset)
    model = tokenizer_run.task.model
    tokenizer = tokenizer_stub(
        model.quantizer.build(model.latent_dim), model.grid(run.data), seconds=None
    )
    with torch.device("meta"):
        task = run.task.build(tokenizer=tokenizer)
    return [
        f"{run.data.frames} x {image_size(run)}",
        f"{' x '.join(map(str, tokenizer.grid))} of {tokenizer.vocab_size:,}",
        f"{task.layout.num_positions}",
        count_parameters(task.model),
        *steps_and_batch_size(run),
        run.task.optimizer.name,
        learning_rate(run),
        f"{run.task.sampling.decoding_steps}",
    ]


def mesh_tokenizer_row(preset: Preset) -> list[str]:
    run: Any = meshes_autoencoder(preset)
    model = run.task.model.build()
    return [
        f"{run.data.bins}",
        f"{run.data.max_faces}",
        f"{model.num_quantizers} of {model.vocab_size:,}",
        count_parameters(model),
        *steps_and_batch_size(run),
        learning_rate(run),
    ]


def mesh_generator_row(preset: Preset) -> list[str]:
    run: Any = meshes_transformer(preset)
    tokenizer: Any = meshes_autoencoder(preset).task
    config, quantizer = run.task.model, tokenizer.model.quantizer
    with torch.device("meta"):
        model = config.build(
            quantizer.quantizer.codebook_size, tokenizer.model.corners, quantizer.num_quantizers
        )
    return [
        f"{config.max_len}",
        f"{config.dim}",
        f"{config.depth}",
        f"{config.fine_dim} x {config.fine_depth}",
        count_parameters(model),
        *steps_and_batch_size(run),
        run.task.optimizer.name,
        learning_rate(run),
    ]


def mesh_tree_row(preset: Preset) -> list[str]:
    run: Any = meshes_tree(preset)
    config = run.task.model
    with torch.device("meta"):
        model = config.build()
    return [
        f"{config.bins}",
        f"{run.data.max_faces:,}",
        f"{config.max_len:,}",
        f"{config.dim:,}",
        f"{config.depth}",
        count_parameters(model),
        *steps_and_batch_size(run),
        run.task.optimizer.name,
        learning_rate(run),
    ]


def music_row(preset: Preset) -> list[str]:
    run: Any = music_mulan(preset)
    audio = run.task.model.audio
    with torch.device("meta"):
        model = run.task.model.build()
    patches_in_time = ceil(ceil(run.data.length / audio.hop) / audio.patch[1])
    return [
        audio_length(run),
        f"{audio.bands}",
        f"{audio.bands // audio.patch[0]} x {patches_in_time}",
        f"{audio.dim}",
        f"{audio.depth}",
        count_parameters(model),
        *steps_and_batch_size(run),
        run.task.optimizer.name,
        learning_rate(run),
    ]


def codec_row(preset: Preset) -> list[str]:
    run: Any = audio_codec(preset)
    with torch.device("meta"):
        model = run.task.model.build()
    frames_hz = run.data.rate_hz / model.hop
    return [
        audio_length(run),
        f"{frames_hz:g}",
        f"{model.num_quantizers} of {model.vocab_size:,}",
        f"{model.num_quantizers * log2(model.vocab_size) * frames_hz / 1000:g}",
        count_parameters(model),
        *steps_and_batch_size(run),
        learning_rate(run),
        adversary(run),
    ]


def semantic_row(preset: Preset) -> list[str]:
    run: Any = audio_semantic(preset)
    model = run.task.model
    tokens_hz = model.rate_hz / model.hop
    return [
        audio_length(run),
        f"{tokens_hz:g}",
        f"{model.vocab_size:,}",
        f"{tokens_hz * log2(model.vocab_size):g}",
        *steps_and_batch_size(run),
        learning_rate(run),
    ]


def soundstorm_row(preset: Preset) -> list[str]:
    run: Any = audio_soundstorm(preset)
    acoustic, semantic = (
        audio_tokenizer_stub(recipe(preset), run.data) for recipe in (audio_codec, audio_semantic)
    )
    with torch.device("meta"):
        task = run.task.build(tokenizer=acoustic, semantic=semantic)
    first, finer = run.task.sampling.decoding_steps_per_level
    return [
        audio_length(run),
        f"{acoustic.grid[0]} x {acoustic.num_quantizers}",
        f"{semantic.grid[0]} of {semantic.vocab_size:,}",
        f"{run.task.model.dim}",
        f"{run.task.model.depth}",
        count_parameters(task.model),
        *steps_and_batch_size(run),
        run.task.optimizer.name,
        learning_rate(run),
        f"{first} + {finer * (acoustic.num_quantizers - 1)}",
    ]


def text_to_semantic_row(preset: Preset) -> list[str]:
    run: Any = audio_text2semantic(preset)
    recognizer: Any = audio_semantic(preset, features="ctc").task.model
    grid = recognizer.grid(run.data)
    model = run.task.model.build(recognizer.build(), 2 * grid[0])
    return [
        audio_length(run),
        f"{recognizer.token_rate_hz:g}",
        f"{run.task.model.dim}",
        f"{run.task.model.depth}",
        count_parameters(model),
        *steps_and_batch_size(run),
        run.task.optimizer.name,
        learning_rate(run),
    ]


ROWS = {
    "images-vqgan": image_tokenizer_row,
    "images-maskgit": image_generator_row,
    "videos-magvit2": video_tokenizer_row,
    "videos-maskgit": video_generator_row,
    "meshes-autoencoder": mesh_tokenizer_row,
    "meshes-transformer": mesh_generator_row,
    "meshes-tree": mesh_tree_row,
    "music-mulan": music_row,
    "audio-codec": codec_row,
    "audio-semantic": semantic_row,
    "audio-soundstorm": soundstorm_row,
    "audio-text2semantic": text_to_semantic_row,
}


@pytest.mark.parametrize("preset", get_args(Preset))
@pytest.mark.parametrize("recipe", ROWS)
def test_table_of_presets_agrees_with_the_recipe(recipe: str, preset: Preset) -> None:
    rows = {row[0]: row for row in read_table(recipe_page(recipe), "preset")}
    expected = [f"`{preset}`", *ROWS[recipe](preset)]
    assert rows[f"`{preset}`"] == expected, (
        f"the row of docs/{recipe}.md must be:\n| {' | '.join(expected)} |"
    )


@pytest.mark.parametrize("preset", get_args(Preset))
def test_image_sizes_of_super_resolution_agree_with_the_recipe(preset: Preset) -> None:
    rows = {row[0]: row for row in read_table(recipe_page("images-maskgit-superres"), "preset")}
    assert rows[f"`{preset}`"][1] == image_size(images_maskgit_superres(preset))


def image_size(run: Any) -> str:
    return f"{run.data.size} x {run.data.size}"


def audio_length(run: Any) -> str:
    return f"{run.data.seconds:g} s at {run.data.rate_hz / 1000:g} kHz"


def count_parameters(model: nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()):,}"


def steps_and_batch_size(run: Any) -> list[str]:
    return [f"{run.engine.steps:,}", f"{run.engine.batch_size}"]


def learning_rate(run: Any) -> str:
    return f"{run.task.optimizer.lr:g}"


def adversary(run: Any) -> str:
    return "off" if run.task.adversary is None else "on"


def image_tokenizer_stub(preset: Preset) -> Any:
    run: Any = images_vqgan(preset)
    quantizer = run.task.model.quantizer.build(run.task.model.stage_channels[-1])
    return tokenizer_stub(quantizer, run.task.model.grid(run.data), seconds=None)


def audio_tokenizer_stub(run: Any, data: Any) -> Any:
    model = run.task.model.build()
    seconds = model.hop / run.data.rate_hz
    return tokenizer_stub(model.quantizer, run.task.model.grid(data), seconds=seconds)


def tokenizer_stub(quantizer: Any, grid: tuple[int, ...], *, seconds: float | None) -> Any:
    """Return the properties of a tokenizer on which the size of a generator depends."""
    codebooks_LVW = quantizer.codebooks()
    return SimpleNamespace(
        network=nn.Identity(),
        vocab_size=quantizer.vocab_size,
        grid=grid,
        num_quantizers=quantizer.num_quantizers,
        features=None if codebooks_LVW is None else code_features(codebooks_LVW.float()),
        seconds=seconds,
    )


# ---- trainers, and settings that may change

TRAINERS = {
    "images-vqgan": VQGanVAETrainer,
    "images-maskgit": MaskGitTrainer,
    "videos-magvit2": VideoTokenizerTrainer,
    "videos-maskgit": VideoGeneratorTrainer,
    "music-mulan": MuLaNTrainer,
    "audio-soundstorm": SoundStormTrainer,
}


@pytest.mark.parametrize(("recipe", "trainer"), TRAINERS.items(), ids=TRAINERS)
def test_table_of_trainer_parameters_is_the_signature(recipe: str, trainer: type[Trainer]) -> None:
    _, *rows = read_table(recipe_page(recipe), "parameter")
    documented = {name.strip("`"): default.strip("`") for name, default, _ in rows}
    defaults = {
        name: "required"
        if parameter.default is inspect.Parameter.empty
        else repr(parameter.default)
        for name, parameter in inspect.signature(trainer).parameters.items()
    }
    configs = {
        repr(PatchDiscriminatorConfig()),
        repr(MaskedTransformerConfig()),
        repr(VideoAdversaryConfig()),
        repr(VideoMaskingConfig()),
    }
    expected = {
        name: "a config" if default in configs else default for name, default in defaults.items()
    }
    assert documented == expected


def test_all_settings_that_may_change_are_documented() -> None:
    """One page lists those of every recipe, another the paths of the runs that a run depends on."""
    pages = (recipe_page("images-vqgan"), recipe_page("images-maskgit"))
    paragraphs = [
        paragraph
        for page in pages
        for paragraph in read_prose(page).split("\n\n")
        if "may change when a run is resumed" in " ".join(paragraph.split())
    ]
    documented = {
        name for paragraph in paragraphs for name in re.findall(r"`--([\w.-]+)`", paragraph)
    }
    assert len(paragraphs) == len(pages)
    assert documented == {name.removeprefix("engine.").replace("_", "-") for name in MAY_DIFFER}


def test_readme_lists_every_extra_that_users_install() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Install\n")[1]
    rows = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed == set(project["optional-dependencies"]) - {"dev"}
