"""Small runs for tests: every recipe in its tiny preset, and what is worth comparing of what they
leave behind."""

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
from tessera.modalities.audio.recipes import audio_codec, audio_soundstorm
from tessera.modalities.image.recipes import images_maskgit, images_vqgan
from tessera.modalities.mesh.recipes import meshes_autoencoder, meshes_transformer
from tessera.modalities.music.recipes import music_mulan
from tessera.modalities.video.recipes import videos_magvit2
from tessera.recipes.registry import RECIPES, default_dependency, get_recipe, recipe_name
from tessera.run.config import Run
from tessera.run.directory import RunDirectory
from tessera.run.train import build_engine, build_task

TIMINGS = ("examples_per_second", "data_wait_frac", "peak_memory_mb")

if (
    "TESSERA_TEST_PARTS" not in os.environ
):  # the processes of a run find what the test that started them has made
    os.environ["TESSERA_TEST_PARTS"] = tempfile.mkdtemp(prefix="tessera-parts-")
    atexit.register(shutil.rmtree, os.environ["TESSERA_TEST_PARTS"], ignore_errors=True)


def tokenizer(size: int = 16) -> str:
    """The run of a tiny tokenizer for pictures of this size, trained once for all tests."""
    run = images_vqgan("tiny")
    return trained_once(
        f"tokenizer-{size}", dataclasses.replace(run, data=dataclasses.replace(run.data, size=size))
    )


def mesh_tokenizer() -> str:
    return trained_once("meshes-autoencoder", meshes_autoencoder("tiny"))


def trained_once(name: str, run: Run) -> str:
    place = Path(os.environ["TESSERA_TEST_PARTS"], name)
    if not place.exists():
        unfinished = place.with_name(f"{place.name}-{os.getpid()}")
        build_engine(run, RunDirectory(unfinished)).run()
        unfinished.rename(place)
    return str(place)


def on_tiny_parts(recipe: Callable[..., Run], **choices: Any) -> Run:
    """A recipe's tiny preset, on tiny tokenizers where it stands on any."""
    parameters = inspect.signature(recipe).parameters
    if "smaller" in parameters:
        return recipe("tiny", tokenizer=tokenizer(32), low_res_tokenizer=tokenizer(16), **choices)
    below = {
        part: default_dependency(recipe_name(recipe), part)
        for part in ("tokenizer", "semantic")
        if part in parameters
    }
    return recipe("tiny", **{part: tiny_part(one) for part, one in below.items()}, **choices)


def tiny_part(recipe: str) -> str:
    return (
        tokenizer()
        if recipe == "images-vqgan"
        else trained_once(recipe, get_recipe(recipe)("tiny"))
    )


def live(run: Run) -> Run:
    """Tokenized at every step, and augmented."""
    data = dataclasses.replace(run.data, crop="random", min_scale=0.7)
    return dataclasses.replace(run, task=dataclasses.replace(run.task, codes="raw"), data=data)


def remembering(run: Run) -> Run:
    model = dataclasses.replace(run.task.model, self_condition=True)
    masking = dataclasses.replace(run.task.masking, keep=0.1, replace=0.1)
    return dataclasses.replace(
        run, task=dataclasses.replace(run.task, model=model, masking=masking)
    )


def at_two_depths(run: Run) -> Run:
    model = dataclasses.replace(
        run.task.model, text=dataclasses.replace(run.task.model.text, depth=2)
    )
    return dataclasses.replace(run, task=dataclasses.replace(run.task, model=model, layers=1))


CASES: dict[str, Callable[[], Run]] = {
    recipe_name(recipe): partial(on_tiny_parts, recipe) for recipe in RECIPES
} | {
    "images-vqgan judged": lambda: images_vqgan("tiny", adversary="on"),
    "images-vqgan judged vq": lambda: images_vqgan("tiny", quantizer="vq", adversary="on"),
    "images-vqgan lfq": lambda: images_vqgan("tiny", quantizer="lfq"),
    "images-maskgit with a critic": lambda: remembering(
        on_tiny_parts(images_maskgit, critic="own")
    ),
    "images-maskgit with a critic's head, live": lambda: live(
        on_tiny_parts(images_maskgit, critic="head")
    ),
    "videos-magvit2 judged": lambda: videos_magvit2("tiny", adversary="on"),
    "videos-magvit2 lfq": lambda: videos_magvit2("tiny", quantizer="lfq"),
    "music-mulan by sigmoid, at two depths": lambda: at_two_depths(
        music_mulan("tiny", loss="sigmoid")
    ),
    "audio-codec judged": lambda: audio_codec("tiny", adversary="on"),
    "audio-codec lfq": lambda: audio_codec("tiny", quantizer="lfq"),
    "audio-soundstorm with a critic": lambda: on_tiny_parts(audio_soundstorm, critic="own"),
    "meshes-autoencoder vq": lambda: meshes_autoencoder("tiny", quantizer="vq"),
    "meshes-transformer without text": lambda: on_tiny_parts(meshes_transformer, text="none"),
    "images-maskgit without text": lambda: on_tiny_parts(images_maskgit, text="none"),
}
"""Every recipe as it comes, so that a new one gets the promises' tests for free, and variants that
move in other ways."""


def tiny(case: str, **engine: Any) -> Run:
    """A case with some of the engine's settings changed."""
    run = CASES[case]()
    if adversary := getattr(
        run.task, "adversary", None
    ):  # in so short a life the judge starts early
        run = dataclasses.replace(
            run,
            task=dataclasses.replace(
                run.task, adversary=dataclasses.replace(adversary, start_step=2, warmup_steps=3)
            ),
        )
    return dataclasses.replace(run, engine=dataclasses.replace(run.engine, **engine))


def engine_in(folder: Path, run: Run, **kwargs: Any) -> Engine:
    return build_engine(run, RunDirectory(folder), **kwargs)


def train(folder: Path, run: Run, **kwargs: Any) -> Engine:
    engine = engine_in(folder, run, **kwargs)
    engine.run()
    return engine


def train_in_double(folder: Path, run: Run) -> Engine:
    """In double precision what is equal in exact arithmetic is equal to a few more digits than
    anybody could wish."""
    with mock.patch(
        "tessera.run.train.task_of", lambda run, parts: build_task(run, parts).double()
    ):
        engine = engine_in(folder, run)
    for stream, method in ((engine.training, "micro_batches"), (engine.validation, "batches")):
        setattr(stream, method, partial(_doubled, getattr(stream, method)))
    engine.run()
    return engine


def _doubled(batches: Callable[..., Iterator[Any]], *args: Any, **kwargs: Any) -> Iterator[Any]:
    for batch in batches(*args, **kwargs):
        for one in batch if isinstance(batch, list) else [batch]:
            for field in dataclasses.fields(one.examples):
                value = getattr(one.examples, field.name)
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    setattr(one.examples, field.name, value.double())
        yield batch


def tensors_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Everything a checkpoint holds, under `file/name`."""
    files = sorted((folder / "checkpoints" / f"{step:06d}").glob("*.safetensors"))
    assert files, f"no checkpoint of step {step} in {folder}"
    return {
        f"{file.stem}/{name}": tensor for file in files for name, tensor in load_file(file).items()
    }


def records_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock or the memory says."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMINGS} for line in lines]


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """Bit for bit: weights, average, optimizers, logged numbers, samples."""
    left, right = tensors_of(one, step), tensors_of(other, step)
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert different == []
    assert records_of(one) == records_of(other)
    left, right = samples_of(one), samples_of(other)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []


def samples_of(folder: Path) -> dict[str, bytes]:
    """Every file that was made of held-out examples, by its name."""
    files = (path for path in (folder / "samples").rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def assert_close_run(one: Path, other: Path, step: int, tolerance: float = 1e-8) -> None:
    """The same but for rounding, which Adam makes larger where a gradient is almost nothing."""
    left, right = tensors_of(one, step), tensors_of(other, step)
    assert left.keys() == right.keys()
    apart = {name: float((left[name].double() - right[name].double()).abs().max()) for name in left}
    assert {name: distance for name, distance in apart.items() if not distance < tolerance} == {}


def tessera(*arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """A command as a person gives it, in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "tessera", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        **kwargs,
    )
