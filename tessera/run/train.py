"""From a Run to an engine at work in a folder: what the command line and the trainers share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tessera import __version__
from tessera.api.generator import CLASSES
from tessera.data.dataset import Split, Subset, all_captions
from tessera.data.errors import UnreadableFile
from tessera.data.loader import EvalLoader, TrainLoader
from tessera.engine.checkpoint import newest, restore_network, step_name, steps_in, tensors_in
from tessera.engine.distributed import Distributed
from tessera.engine.engine import Engine
from tessera.engine.modes import seed
from tessera.engine.task import Task
from tessera.run.config import Run, differences, encode, flat
from tessera.run.dependencies import copy_dependencies, find_dependencies
from tessera.run.directory import RunDirectory, UserError, write_atomically
from tessera.run.load import Tokenizer
from tessera.run.token_cache import tokenize_dataset

NO_PARTS: Mapping[str, Tokenizer] = {}


def build_task(run: Run, parts: Mapping[str, Tokenizer] = NO_PARTS) -> Task:
    """The run's task with its first weights, which the seed decides."""
    seed(run.engine.seed)
    return run.build_task(parts)


def build_engine(
    run: Run,
    folder: RunDirectory,
    *,
    task: Task | None = None,
    split: Split | None = None,
    on_log: Callable[[dict[str, Any]], None] | None = None,
) -> Engine:
    """An engine that stands where the folder stands: a new run, or an old one about to go on."""
    dist = Distributed.from_environment()
    split = split or run.data.build()
    parts = find_dependencies(run, folder)
    task = task or build_task(run, parts)
    if run.engine.init_from is not None and not steps_in(folder.checkpoints):
        load_initial_weights(task, run.engine.init_from)
    stream_of(split, run)  # what can be refused is refused before anything is written
    prepare_text(task, split.train, folder.cache)
    if dist.is_main and (silent := getattr(split.train, "without_caption", 0)):
        say(
            f"{silent:,} example(s) have no caption and are left out; `tessera check` names where captions are looked for."
        )
    dist.on_main(lambda: claim_run_dir(folder, run))
    copy_dependencies(run, folder, dist)
    split = tokenize_split(run, split, parts, folder, dist)
    config = run.engine
    micro = config.batch_size // config.grad_accum_steps
    training = stream_of(split, run)
    validation = EvalLoader(
        split.validation, seed=config.seed, batch_size=micro, num_workers=config.num_workers
    )
    engine = Engine(task, training, validation, config, folder, on_log=on_log)
    engine.open(flat(encode(run)))
    return engine


def load_initial_weights(task: Task, path: str) -> None:
    """The first weights of the model are the averaged ones of another run; judges begin anew."""
    found = newest(RunDirectory(path).checkpoints, say)
    if found is None:
        raise UserError(
            f"A run cannot start from {path}: it has no checkpoint. Give the folder of a run that was trained."
        )
    restore_network(
        task.model, tensors_in(found / "ema.safetensors"), f"model in {path}, to start from,"
    )


def stream_of(split: Split, run: Run) -> TrainLoader:
    config = run.engine
    return TrainLoader(
        split.train,
        seed=config.seed,
        batch_size=config.batch_size,
        grad_accum_steps=config.grad_accum_steps,
        num_workers=config.num_workers,
    )


def tokenize_split(
    run: Run, split: Split, parts: dict[str, Tokenizer], folder: RunDirectory, dist: Distributed
) -> Split:
    """The examples in the form in which the task learns from them: as they are, or as codes."""
    if classes := getattr(split.train, "classes", list)():
        dist.on_main(
            lambda: write_atomically(folder.path / CLASSES, json.dumps(classes, indent=1) + "\n")
        )
    if parts and run.task.tokens != "raw":
        given = None if run.task.tokens == "cache" else Path(run.task.tokens)
        try:
            return tokenize_dataset(
                split, parts, given, folder.cache, dist, say if dist.is_main else lambda line: None
            )
        except ValueError as error:
            raise UserError(str(error)) from error
    return split


def prepare_text(task: Task, dataset: Any, place: Path) -> None:
    """A task hears what is said about all training examples before it meets the first."""
    if hasattr(dataset, "caption"):
        try:
            task.meet(captions_of(dataset), place)
        except (ValueError, OSError) as error:
            raise UserError(str(error)) from error


def captions_of(dataset: Any) -> list[str]:
    """One that cannot be read is met when its example is, and left out there."""
    captions = []
    for i in range(len(dataset)):
        with contextlib.suppress(UnreadableFile):
            captions += all_captions(dataset, i) or [""]
    return captions


def say(line: str) -> None:
    print(line, flush=True)


def claim_run_dir(folder: RunDirectory, run: Run) -> None:
    """The folder is this run's from here on, or a letter says why it cannot be."""
    folder.make()
    folder.lock()
    if (
        not folder.config.exists() or not folder.begun
    ):  # a run that was refused before its first step may be asked for better
        folder.write_config(encode(run))
        return
    other = differences(folder.read_config(), encode(run))
    if other:
        raise UserError(
            f"{folder.path} holds a run with other settings:\n  " + "\n  ".join(other) + "\n"
            "Use its settings, give another --out, or add --fresh for a new folder beside it. Nothing was changed."
        )
    folder.write_config(encode(run))


def unused(path: Path) -> Path:
    """For --fresh: the folder itself if it is new, else the first free name beside it."""
    if not (path / "config.json").exists():
        return path
    number = 2
    while path.with_name(f"{path.name}-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}-{number}")


# ---- what a person is told


def print_header(run: Run, folder: RunDirectory) -> None:
    """Before the work: what will be trained, from what, and where it will stand."""
    if is_main():
        data = run.data.path or "built-in toys"
        print(
            f"{run.recipe}: {run.engine.steps} steps of {run.engine.batch_size} examples from {data}, in {folder.path}"
        )
        print(
            f"{processes()} process(es), {torch.get_num_threads()} thread(s) each. {run.task.notice()}".strip()
        )


def print_summary(run: Run, folder: RunDirectory) -> None:
    """After the work: the numbers reached, where the samples are, and the model card."""
    if not is_main():
        return
    card = card_of(folder)
    try:
        write_card(run, folder, card)
    except OSError as error:
        print(f"{folder.card.name} could not be written ({error.strerror}).")
    numbers = "  ".join(f"{name} {value:.4g}" for name, value in card.numbers.items())
    print(f"Done: {card.steps} steps. On {card.examples} held-out examples: {numbers}")
    print(f"Samples to look at: {folder.samples / step_name(card.steps)}")


@dataclass
class Card:
    """What a model card says of a run's last validation, with averaged weights."""

    steps: int
    examples: int
    numbers: dict[str, float]


def card_of(folder: RunDirectory) -> Card:
    newest = folder.records("validation")[-1]
    numbers = {
        name.removeprefix("val_ema/"): n
        for name, n in newest.items()
        if name.startswith("val_ema/") and n is not None
    }
    return Card(newest["step"], newest["examples"], numbers)


def write_card(run: Run, folder: RunDirectory, card: Card) -> None:
    """README.md in the run's folder: what, on which data, how far, which numbers."""
    rows = "\n".join(f"| {name} | {value:.5g} |" for name, value in card.numbers.items())
    text = f"""# {folder.path.name}

A model of recipe `{run.recipe}`, trained by Tessera {__version__} for {card.steps} steps of {run.engine.batch_size} examples
on {run.data.path or "the built-in toys"}. `config.json` holds every setting.

{card.examples} held-out examples, averaged weights, step {card.steps}:

| measure | value |
|---|---|
{rows}

`tessera sample {folder.path}` makes samples, `tessera evaluate {folder.path}` measures, `{run.task.entry_point}.load("{folder.path}")`
opens it in Python.
"""
    write_atomically(folder.card, text)


def is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def processes() -> int:
    """How many were started, by us or by torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


# ---- the rehearsal


def dry_run(run: Run) -> None:
    """--dry-run: shows the update plan, then two steps, a validation, samples, a save and a load,
    in a passing folder.

    With one example per micro-batch and a handful held out: it is about whether everything fits
    together, on any machine.
    """
    share = run.engine.grad_accum_steps * processes()
    batch_size = share * -(-run.least_batch // share)
    short = dataclasses.replace(
        run.engine, steps=2, batch_size=batch_size, log_every=1, validate_every=2, sample_every=2, sample_count=2,
        checkpoint_every=2, track=(), num_workers=min(run.engine.num_workers, os.cpu_count() or 1),
    )  # fmt: skip
    rehearsal = dataclasses.replace(run, engine=short)
    split = run.data.build()
    split = Split(
        Subset(split.train, range(max(2, short.batch_size))), Subset(split.validation, range(2))
    )
    with tempfile.TemporaryDirectory() as place:
        engine = build_engine(rehearsal, RunDirectory(place), split=split)
        if is_main():
            Console(width=110).print(plan(engine.task))  # 80, the width of a pipe, breaks words
            print(run.published, end="\n" if run.published else "")
        engine.run()
        learnt = {name: tensor.clone() for name, tensor in engine.task.state_dict().items()}
        again = build_engine(rehearsal, RunDirectory(place), split=split)
        same = all(
            torch.equal(tensor, learnt[name]) for name, tensor in again.task.state_dict().items()
        )
        again.folder.unlock()
    if not same:
        raise UserError(
            "What was loaded is not what was saved: this is a defect of Tessera, please report it."
        )
    if is_main():
        print("Two steps, one validation, samples, a save and a load: all well. Nothing was kept.")


def plan(task: Task) -> Table:
    """Which network moves, by which optimizer, from which step, and how large each is."""
    table = Table(title="The update plan", title_justify="left")
    for heading in (
        "update",
        "network",
        "parameters",
        "optimizer",
        "rate",
        "schedule",
        "clip",
        "from step",
    ):
        table.add_column(heading)
    for update in task.updates:
        parameters = sum(parameter.numel() for parameter in update.trains.parameters())
        how = update.optimizer
        table.add_row(
            update.name, type(update.trains).__name__, f"{parameters:,}", how.kind, f"{how.rate:g}", how.schedule,
            str(how.clip), str(update.start_step),
        )  # fmt: skip
    return table
