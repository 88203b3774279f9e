"""Small runs for tests: every recipe in its tiny preset, and comparisons of what runs wrote."""

from __future__ import annotations

import atexit
import dataclasses
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from tessera.engine.engine import Engine
from tessera.modalities.audio.recipes import (
    audio_codec,
    audio_semantic,
    audio_soundstorm,
    audio_text2semantic,
)
from tessera.modalities.image.recipes import images_maskgit, images_vqgan
from tessera.modalities.mesh.recipes import meshes_autoencoder, meshes_transformer
from tessera.modalities.music.recipes import music_mulan
from tessera.modalities.video.recipes import videos_magvit2
from tessera.recipes.registry import RECIPES, default_dependency, get_recipe, recipe_name
from tessera.run.config import Run
from tessera.run.directory import RunDirectory
from tessera.run.train import build_engine, build_task

TIMINGS = ("examples_per_second", "data_wait_frac", "peak_memory_mb")

# The processes of a run use the tokenizers of the test that started them.
if "TESSERA_TEST_TOKENIZERS" not in os.environ:
    os.environ["TESSERA_TEST_TOKENIZERS"] = tempfile.mkdtemp(prefix="tessera-tokenizers-")
    atexit.register(shutil.rmtree, os.environ["TESSERA_TEST_TOKENIZERS"], ignore_errors=True)


def tokenizer(size: int = 16) -> str:
    """Return the run of a tiny image tokenizer, trained once for all tests."""
    run = images_vqgan("tiny")
    data = dataclasses.replace(run.data, size=size)
    return train_once(f"tokenizer-{size}", dataclasses.replace(run, data=data))


def mesh_tokenizer() -> str:
    return train_once("meshes-autoencoder", meshes_autoencoder("tiny"))


def train_once(name: str, run: Run) -> str:
    folder = Path(os.environ["TESSERA_TEST_TOKENIZERS"], name)
    if not folder.exists():
        temporary = folder.with_name(f"{folder.name}-{os.getpid()}")
        build_engine(run, RunDirectory(temporary)).run()
        temporary.rename(folder)
    return str(folder)


def build_tiny(recipe: Callable[..., Run], **choices: Any) -> Run:
    """Return a recipe's tiny preset, on tiny tokenizers where it needs any."""
    parameters = inspect.signature(recipe).parameters
    if "low_res_tokenizer" in parameters:
        return recipe("tiny", tokenizer=tokenizer(32), low_res_tokenizer=tokenizer(16), **choices)
    if recipe is audio_text2semantic:
        return recipe("tiny", tokenizer=tiny_recognizer(), soundstorm="none", **choices)
    dependencies = {
        name: tiny_dependency(default_dependency(recipe_name(recipe), name))
        for name in ("tokenizer", "semantic")
        if name in parameters
    }
    return recipe("tiny", **dependencies, **choices)


def tiny_dependency(recipe: str) -> str:
    if recipe == "images-vqgan":
        return tokenizer()
    return train_once(recipe, get_recipe(recipe)("tiny"))


def tiny_recognizer() -> str:
    """Return the run of a tiny semantic tokenizer that is trained on transcripts."""
    return train_once("audio-semantic-ctc", audio_semantic("tiny", features="ctc"))


def tokenize_live(run: Run) -> Run:
    """Tokenize at every step, with augmentation."""
    data = dataclasses.replace(run.data, crop="random", min_scale=0.7)
    return dataclasses.replace(run, task=dataclasses.replace(run.task, tokens="live"), data=data)


def self_condition(run: Run) -> Run:
    model = dataclasses.replace(run.task.model, self_condition=True)
    masking = dataclasses.replace(run.task.masking, keep=0.1, replace=0.1)
    task = dataclasses.replace(run.task, model=model, masking=masking)
    return dataclasses.replace(run, task=task)


def in_stereo(run: Run) -> Run:
    data = dataclasses.replace(run.data, channels=2)
    return dataclasses.replace(run, data=data, task=run.task.fit_data(data))


def train_decoder(run: Run) -> Run:
    return dataclasses.replace(run, task=dataclasses.replace(run.task, train_only="decoder"))


def join_speakers(run: Run) -> Run:
    """Train on two recordings of a speaker, one after the other."""
    task = dataclasses.replace(run.task, prompts="speaker")
    data = dataclasses.replace(run.data, synthetic_content="speech")
    return dataclasses.replace(run, task=task, data=data)


def with_two_layers(run: Run) -> Run:
    text = dataclasses.replace(run.task.model.text, depth=2)
    model = dataclasses.replace(run.task.model, text=text)
    return dataclasses.replace(run, task=dataclasses.replace(run.task, model=model, layers=1))


CASES: dict[str, Callable[[], Run]] = {
    recipe_name(recipe): partial(build_tiny, recipe) for recipe in RECIPES
} | {
    "images-vqgan adversarial": lambda: images_vqgan("tiny", adversary="on"),
    "images-vqgan adversarial vq": lambda: images_vqgan("tiny", quantizer="vq", adversary="on"),
    "images-vqgan lfq": lambda: images_vqgan("tiny", quantizer="lfq"),
    "images-vqgan simvq": lambda: images_vqgan("tiny", quantizer="simvq"),
    "images-maskgit critic": lambda: self_condition(build_tiny(images_maskgit, critic="own")),
    "images-maskgit critic head, live": lambda: tokenize_live(
        build_tiny(images_maskgit, critic="head")
    ),
    "videos-magvit2 adversarial": lambda: videos_magvit2("tiny", adversary="on"),
    "videos-magvit2 lfq": lambda: videos_magvit2("tiny", quantizer="lfq"),
    "music-mulan sigmoid, two layers": lambda: with_two_layers(music_mulan("tiny", loss="sigmoid")),
    "audio-codec adversarial": lambda: audio_codec("tiny", adversary="on", network="soundstream"),
    "audio-codec stereo": lambda: in_stereo(audio_codec("tiny", adversary="on")),
    "audio-codec decoder": lambda: train_decoder(audio_codec("tiny", adversary="on")),
    "audio-codec lfq": lambda: audio_codec("tiny", quantizer="lfq"),
    "audio-semantic hubert": lambda: audio_semantic("tiny", features="hubert"),
    "audio-semantic ctc": lambda: audio_semantic("tiny", features="ctc"),
    "audio-soundstorm speakers": lambda: join_speakers(build_tiny(audio_soundstorm)),
    "audio-soundstorm speaker embedding": lambda: join_speakers(
        build_tiny(audio_soundstorm, speaker_embedding="on", critic="own")
    ),
    "audio-soundstorm critic": lambda: build_tiny(audio_soundstorm, critic="own"),
    "meshes-autoencoder vq": lambda: meshes_autoencoder("tiny", quantizer="vq"),
    "meshes-transformer without text": lambda: build_tiny(meshes_transformer, text="none"),
    "images-maskgit without text": lambda: build_tiny(images_maskgit, text="none"),
}
"""Every recipe, so that a new one gets the tests of the guarantees, and variants with other
updates."""


def tiny(case: str, **engine: Any) -> Run:
    """Return a case with some of the engine's settings changed."""
    run = CASES[case]()
    if adversary := getattr(run.task, "adversary", None):  # short runs start it early
        adversary = dataclasses.replace(adversary, start_step=2, warmup_steps=3)
        run = dataclasses.replace(run, task=dataclasses.replace(run.task, adversary=adversary))
    return dataclasses.replace(run, engine=dataclasses.replace(run.engine, **engine))


def engine_in(folder: Path, run: Run, **kwargs: Any) -> Engine:
    return build_engine(run, RunDirectory(folder), **kwargs)


def train(folder: Path, run: Run, **kwargs: Any) -> Engine:
    engine = engine_in(folder, run, **kwargs)
    engine.run()
    return engine


NEVER = 10**6


def endless(case: str, **engine: Any) -> Run:
    """Return a case that does not reach its end, for `train_steps`."""
    names = ("steps", "validate_every", "sample_every", "checkpoint_every")
    return tiny(case, **dict.fromkeys(names, NEVER) | engine)


def train_steps(engine: Engine, count: int) -> None:
    """Train some steps and save, without the validation and samples at the end of every run."""
    steps = engine.steps()
    for _ in range(count):
        next(steps)
    engine.saver.ensure_saved(engine.global_step)
    steps.close()


def train_in_double(folder: Path, run: Run) -> Engine:
    engine = engine_in_double(folder, run)
    engine.run()
    return engine


def engine_in_double(folder: Path, run: Run) -> Engine:
    """Build a run in double precision, in which exact equalities hold to many digits."""

    def build_double(run: Run, dependencies: Any) -> Any:
        return build_task(run, dependencies).double()

    with mock.patch("tessera.run.train.build_task", build_double):
        engine = engine_in(folder, run)
    for stream, method in ((engine.training, "micro_batches"), (engine.validation, "batches")):
        setattr(stream, method, partial(convert_to_double, getattr(stream, method)))
    return engine


def convert_to_double(
    batches: Callable[..., Iterator[Any]], *args: Any, **kwargs: Any
) -> Iterator[Any]:
    for batch in batches(*args, **kwargs):
        for one in batch if isinstance(batch, list) else [batch]:
            for field in dataclasses.fields(one.examples):
                value = getattr(one.examples, field.name)
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    setattr(one.examples, field.name, value.double())
        yield batch


def read_checkpoint(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, under `file/name`."""
    files = sorted((folder / "checkpoints" / f"{step:06d}").glob("*.safetensors"))
    assert files, f"no checkpoint of step {step} in {folder}"
    return {
        f"{file.stem}/{name}": tensor for file in files for name, tensor in load_file(file).items()
    }


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without times and memory; each bin is a value."""
    records = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record: dict[str, Any] = {}
        for name, value in json.loads(line).items():
            if isinstance(value, list):
                record |= {f"{name}/{number}": one for number, one in enumerate(value)}
            elif name not in TIMINGS:
                record[name] = value
        records.append(record)
    return records


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """Assert bit for bit equality of weights, EMA, optimizers, metrics and samples."""
    left, right = read_checkpoint(one, step), read_checkpoint(other, step)
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert different == []
    assert read_metrics(one) == read_metrics(other)
    left, right = read_samples(one), read_samples(other)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []


def read_samples(folder: Path) -> dict[str, bytes]:
    """Return all sample files by name."""
    files = (path for path in (folder / "samples").rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def assert_close_run(one: Path, other: Path, step: int, tolerance: float = 1e-8) -> None:
    """Assert equality up to rounding, which Adam amplifies where a gradient is almost zero."""
    left, right = read_checkpoint(one, step), read_checkpoint(other, step)
    assert left.keys() == right.keys()
    distances = {
        name: float((left[name].double() - right[name].double()).abs().max()) for name in left
    }
    assert {name: one for name, one in distances.items() if not one < tolerance} == {}


def tessera(*arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "tessera", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        **kwargs,
    )
