"""The tables of the pages are what the code makes: a row per preset, and a row per parameter of a
front door."""

from __future__ import annotations

import inspect
import re
from math import ceil, log2
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn

from tessera.modalities.audio.recipes import audio_codec, audio_semantic, audio_soundstorm
from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
from tessera.modalities.image.recipes import images_maskgit, images_maskgit_superres, images_vqgan
from tessera.modalities.mesh.recipes import meshes_autoencoder, meshes_transformer
from tessera.modalities.music.recipes import music_mulan
from tessera.modalities.video.recipes import videos_magvit2
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
    VideoTokenizerTrainer,
    VQGanVAETrainer,
)
from tests.pages import page_of, prose, table

# ---- presets: what a recipe makes, in the order of its page's columns


def image_tokenizer(preset: Preset) -> list[str]:
    run = images_vqgan(preset)
    with torch.device("meta"):  # sizes without the memory
        model = run.task.model.build()
    grid = run.data.size // run.task.model.stride
    return [
        square(run),
        f"{grid} x {grid}",
        f"{model.vocab_size:,}",
        size_of(model),
        *engine_config(run),
        rate_of(run),
        judged(run),
    ]


def image_generator(preset: Preset) -> list[str]:
    run, tokens = images_maskgit(preset), symbols_of_images(preset)
    with torch.device("meta"):
        task = run.task.build(tokens)
    return [
        square(run),
        f"{' x '.join(map(str, tokens.grid))} of {tokens.vocab_size:,}",
        f"{task.layout.num_positions}",
        size_of(task.model),
        *engine_config(run),
        run.task.optimizer.name,
        rate_of(run),
        f"{run.task.sampling.decoding_steps}",
    ]


def video_tokenizer(preset: Preset) -> list[str]:
    run = videos_magvit2(preset)
    with torch.device("meta"):
        model = run.task.model.build()
    return [
        f"{run.data.frames} x {square(run)}",
        " x ".join(map(str, run.task.model.grid(run.data))),
        f"{model.vocab_size:,}",
        size_of(model),
        *engine_config(run),
        rate_of(run),
        judged(run),
    ]


def mesh_autoencoder(preset: Preset) -> list[str]:
    run = meshes_autoencoder(preset)
    model = run.task.model.build()
    return [
        f"{run.data.bins}",
        f"{run.data.max_faces}",
        f"{model.num_quantizers} of {model.vocab_size:,}",
        size_of(model),
        *engine_config(run),
        rate_of(run),
    ]


def mesh_transformer(preset: Preset) -> list[str]:
    run, tokenizer = meshes_transformer(preset), meshes_autoencoder(preset).task.model
    config, quantizer = run.task.model, tokenizer.quantizer
    with torch.device("meta"):
        model = config.build(quantizer.quantizer.codebook_size, tokenizer.corners, quantizer.num_quantizers)
    return [
        f"{config.max_len}",
        f"{config.width}",
        f"{config.depth}",
        f"{config.fine_dim} x {config.fine_depth}",
        size_of(model),
        *engine_config(run),
        run.task.optimizer.name,
        rate_of(run),
    ]


def music(preset: Preset) -> list[str]:
    run = music_mulan(preset)
    audio = run.task.model.audio
    with torch.device("meta"):
        model = run.task.model.build()
    times = ceil(ceil(run.data.length / audio.hop) / audio.patch[1])
    return [
        clip(run),
        f"{audio.bands}",
        f"{audio.bands // audio.patch[0]} x {times}",
        f"{audio.width}",
        f"{audio.depth}",
        size_of(model),
        *engine_config(run),
        run.task.optimizer.name,
        rate_of(run),
    ]


def sound_codec(preset: Preset) -> list[str]:
    run = audio_codec(preset)
    with torch.device("meta"):
        model = run.task.model.build()
    frames_hz = run.data.rate_hz / model.hop
    return [
        clip(run),
        f"{frames_hz:g}",
        f"{model.num_quantizers} of {model.vocab_size:,}",
        f"{model.num_quantizers * log2(model.vocab_size) * frames_hz / 1000:g}",
        size_of(model),
        *engine_config(run),
        rate_of(run),
        judged(run),
    ]


def semantic_symbols(preset: Preset) -> list[str]:
    run = audio_semantic(preset)
    model = run.task.model
    symbols_hz = model.rate_hz / model.hop
    bits = f"{symbols_hz * log2(model.vocab_size):g}"
    return [
        clip(run),
        f"{symbols_hz:g}",
        f"{model.vocab_size:,}",
        bits,
        *engine_config(run),
        rate_of(run),
    ]


def soundstorm(preset: Preset) -> list[str]:
    run = audio_soundstorm(preset)
    acoustic, said = (
        symbols_of_sounds(recipe(preset), run.data) for recipe in (audio_codec, audio_semantic)
    )
    with torch.device("meta"):
        task = run.task.build(acoustic, semantic=said)
    first, finer = run.task.sampling.decoding_steps_per_level
    return [
        clip(run),
        f"{acoustic.grid[0]} x {acoustic.num_quantizers}",
        f"{said.grid[0]} of {said.vocab_size:,}",
        f"{run.task.model.width}",
        f"{run.task.model.depth}",
        size_of(task.model),
        *engine_config(run),
        run.task.optimizer.name,
        rate_of(run),
        f"{first} + {finer * (acoustic.num_quantizers - 1)}",
    ]


ROWS = {
    "images-vqgan": image_tokenizer,
    "images-maskgit": image_generator,
    "videos-magvit2": video_tokenizer,
    "meshes-autoencoder": mesh_autoencoder,
    "meshes-transformer": mesh_transformer,
    "music-mulan": music,
    "audio-codec": sound_codec,
    "audio-semantic": semantic_symbols,
    "audio-soundstorm": soundstorm,
}


@pytest.mark.parametrize("preset", get_args(Preset))
@pytest.mark.parametrize("recipe", ROWS)
def test_the_table_of_presets_is_what_the_recipe_makes(recipe: str, preset: Preset) -> None:
    told = {row[0]: row for row in table(page_of(recipe), "preset")}
    made = [f"`{preset}`", *ROWS[recipe](preset)]
    assert told[f"`{preset}`"] == made, (
        f"in docs/{recipe}.md the row is to be:\n| {' | '.join(made)} |"
    )


@pytest.mark.parametrize("preset", get_args(Preset))
def test_the_sizes_of_super_resolution_are_those_of_its_presets(preset: Preset) -> None:
    [pictures] = [
        row[1]
        for row in table(page_of("images-maskgit-superres"), "preset")
        if row[0] == f"`{preset}`"
    ]
    assert pictures == square(images_maskgit_superres(preset))


def square(run: Any) -> str:
    return f"{run.data.size} x {run.data.size}"


def clip(run: Any) -> str:
    return f"{run.data.seconds:g} s at {run.data.rate_hz / 1000:g} kHz"


def size_of(model: nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()):,}"


def engine_config(run: Any) -> list[str]:
    return [f"{run.engine.steps:,}", f"{run.engine.batch_size}"]


def rate_of(run: Any) -> str:
    return f"{run.task.optimizer.lr:g}"


def judged(run: Any) -> str:
    return "off" if run.task.adversary is None else "on"


def symbols_of_images(preset: Preset) -> Any:
    """All that a generator's size depends on of a tokenizer: its quantizer and its grid."""
    run = images_vqgan(preset)
    quantizer = run.task.model.quantizer.build(run.task.model.widths[-1])
    return tokens(quantizer, run.task.model.grid(run.data), seconds=None)


def symbols_of_sounds(run: Any, data: Any) -> Any:
    model = run.task.model.build()
    return tokens(model.quantizer, run.task.model.grid(data), seconds=model.hop / run.data.rate_hz)


def tokens(quantizer: Any, grid: tuple[int, ...], *, seconds: float | None) -> Any:
    """What is known of a cascade's symbols is nothing."""
    every = torch.arange(quantizer.vocab_size)
    known = (
        code_features(quantizer.lookup(every, torch.float32).detach()) if quantizer.num_quantizers == 1 else None
    )
    return SimpleNamespace(
        network=nn.Identity(),
        vocab_size=quantizer.vocab_size,
        grid=grid,
        num_quantizers=quantizer.num_quantizers,
        features=known,
        seconds=seconds,
    )


# ---- front doors, and settings

DOORS = {
    "images-vqgan": VQGanVAETrainer,
    "images-maskgit": MaskGitTrainer,
    "videos-magvit2": VideoTokenizerTrainer,
    "music-mulan": MuLaNTrainer,
    "audio-soundstorm": SoundStormTrainer,
}


@pytest.mark.parametrize(("recipe", "door"), DOORS.items(), ids=DOORS)
def test_the_table_of_a_front_door_is_its_signature(
    recipe: str, entry_point: type[Trainer]
) -> None:
    _, *rows = table(page_of(recipe), "parameter")
    told = {name.strip("`"): default.strip("`") for name, default, _ in rows}
    real = {
        name: "required"
        if parameter.default is inspect.Parameter.empty
        else repr(parameter.default)
        for name, parameter in inspect.signature(entry_point).parameters.items()
    }
    configs = {
        repr(PatchDiscriminatorConfig()),
        repr(MaskedTransformerConfig()),
        repr(VideoAdversaryConfig()),
    }
    assert told == real | {name: "a config" for name, default in real.items() if default in configs}


def test_the_settings_that_may_change_are_all_told() -> None:
    """Those of every recipe on the first recipe's page, and those of runs that stand on others
    where such a run is told of."""
    pages = (page_of("images-vqgan"), page_of("images-maskgit"))
    sentences = [
        line
        for page in pages
        for line in re.split(r"\n\n|(?<=\.)\s", prose(page))
        if "may differ" in line
    ]
    told = {name for sentence in sentences for name in re.findall(r"`--([\w.-]+)`", sentence)}
    assert len(sentences) == 2
    assert told == {name.removeprefix("engine.").replace("_", "-") for name in MAY_DIFFER}
