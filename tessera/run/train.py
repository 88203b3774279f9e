"""Build an engine that trains a Run in a run directory, for the command line and the trainers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import tessera.engine.checkpoint as checkpoint
from tessera import __version__
from tessera.data.dataset import ExampleDataset, Split
from tessera.data.discovery import Listing, fixed_listing, list_files
from tessera.data.errors import UnreadableFile
from tessera.data.loader import EvalLoader, TrainLoader, check_held_out, check_num_examples
from tessera.data.shard_index import INDEX_SUFFIX
from tessera.data.tokens import TokenDataset
from tessera.engine.config import EngineConfig
from tessera.engine.distributed import Distributed
from tessera.engine.engine import Engine
from tessera.engine.modes import seed
from tessera.engine.task import Task
from tessera.run.config import Run, encode, flatten, list_differences
from tessera.run.directory import (
    CLASSES,
    VERSION,
    Json,
    RunDirectory,
    read_json,
    remove_partial,
    write_atomically,
)
from tessera.run.errors import UserError, as_user_error, printable
from tessera.run.load import EXPORTED, find_weights

if TYPE_CHECKING:
    from tessera.api.tokenizer import Tokenizer
    from tessera.objectives.generation import TokenizedGeneratorConfig, TokenizerProtocol

FILES = "files.json"
"""The files of the data when the run was started: a run does not change while its folder grows."""
CARD_MARK = "trained with Tessera"
"""What every model card contains."""
NO_DEPENDENCIES: Mapping[str, TokenizerProtocol] = {}


def build_task(run: Run, dependencies: Mapping[str, TokenizerProtocol] = NO_DEPENDENCIES) -> Task:
    """Build the task of a run with initial weights that depend on the seed."""
    seed(run.engine.seed)
    return run.build_task(dependencies)


def build_engine(
    run: Run,
    directory: RunDirectory,
    *,
    task: Task | None = None,
    split: Split | None = None,
    extra_settings: Json | None = None,
    on_log: Callable[[Json], None] | None = None,
    rescan: bool = False,
) -> Engine:
    """Build an engine at the newest checkpoint of the directory, or at step 0.

    Nothing is written before the directory is locked and its settings are compared.

    Args:
        run: The settings.
        directory: The run directory.
        task: The task, if it is built already.
        split: The examples, if they are not those of `run.data`.
        extra_settings: Settings that are no part of `run`; they are compared and stored too.
        on_log: Receives every record.
        rescan: Whether files that were added since the run was started are used.
    """
    dist = Distributed.from_environment()
    listing = Listing()
    if split is None and run.data.path is not None and not rescan:
        listing = Listing(**dist.on_main(lambda: read_listing(directory)))
    if split is None:
        with fixed_listing(listing):
            split = run.data.build(captions=run.task.uses_captions)
        if dist.is_main:
            for line in split.train.notices:
                print_line(line)
    dependencies: dict[str, Tokenizer] = {}
    if run.task.dependencies():
        from tessera.run.dependencies import check_companions, find_dependencies

        dependencies = find_dependencies(run, directory)
        check_companions(run, directory)
        notices = [line for one in dependencies.values() for line in one.trained.notices]
        if dist.is_main:
            print(*notices, sep="\n", end="\n" if notices else "")
    task = task or build_task(run, dependencies)
    if run.engine.init_from is not None and not checkpoint.list_steps(directory.checkpoints):
        load_initial_weights(task, run.engine.init_from)
    check_split(split, run.engine)
    group_by_name = run.data.balanced_groups(split.train)
    captions = read_captions(split.train) if run.task.uses_captions else []
    settings = encode(run) | ({"trainer": extra_settings} if extra_settings else {})
    dist.on_main(lambda: claim_directory(directory, settings))
    if listing.files is not None:
        dist.on_main(lambda: write_listing(directory, listing, run.data.path or ""))
    with directory.explain_write_errors():
        if run.task.uses_captions:
            prepare_text(task, captions, split.train, directory, dist)
            missing = sum(not caption.strip() for caption in captions)
            line = run.task.describe_missing_captions(missing, len(captions)) if missing else ""
            if line and dist.is_main:
                print_line(line)
        if dependencies:
            split = prepare_tokens(run, split, dependencies, directory, dist)
    groups = group_examples(split.train, group_by_name)
    return open_engine(task, split, run.engine, directory, settings, groups=groups, on_log=on_log)


def group_examples(dataset: ExampleDataset, by_name: dict[str, str] | None) -> list[str] | None:
    """Return the group of each example; None if all examples are drawn equally often."""
    if by_name is None:
        return None
    return [by_name[dataset.name(index)] for index in range(len(dataset))]


def check_split(split: Split, config: EngineConfig) -> None:
    """Raise UserError if there are too few examples for a batch, or none for a validation."""
    check_num_examples(split.train, config.batch_size)
    check_held_out(split.validation, config.num_workers)


def open_engine(
    task: Task,
    split: Split,
    config: EngineConfig,
    directory: RunDirectory,
    settings: Json,
    *,
    contiguous: bool = False,
    groups: Sequence[str] | None = None,
    on_log: Callable[[Json], None] | None = None,
) -> Engine:
    """Build an engine for a task and its examples in a directory that was claimed."""
    training = TrainLoader(
        split.train,
        seed=config.seed,
        batch_size=config.batch_size,
        grad_accum_steps=config.grad_accum_steps,
        num_workers=config.num_workers,
        contiguous=contiguous,
        groups=groups,
    )
    validation = EvalLoader(
        split.validation,
        seed=config.seed,
        batch_size=config.batch_size // config.grad_accum_steps,
        num_workers=config.num_workers,
    )
    engine = Engine(task, training, validation, config, directory, on_log=on_log)
    engine.open(flatten(settings))
    return engine


def load_initial_weights(task: Task, path: str) -> None:
    """Initialise the model with the EMA weights of another run."""
    found = find_weights(RunDirectory(path), "ema", print)
    if found is None:
        raise UserError(f"--init-from {path} has no checkpoint: give the folder of a trained run.")
    checkpoint.load_strictly(task.model, found.tensors, f"model in {path} (--init-from)")


def read_listing(directory: RunDirectory) -> Json:
    """Return the fields of the listing that a run was started with; none if it has not started."""
    stored = read_json(directory.path / FILES)
    if not isinstance(stored, dict) or not directory.has_started:
        return {}
    files, checksums = stored.get("files"), stored.get("checksums")
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        return {}
    return {"files": files, "checksums": checksums if isinstance(checksums, dict) else {}}


def write_listing(directory: RunDirectory, listing: Listing, path: str) -> None:
    """Store the files of a run, and report those that were added since."""
    root, files = Path(path).expanduser(), listing.files or []
    present = list_files(root) if root.is_dir() else []
    added = {name for name in present if not name.endswith(INDEX_SUFFIX)} - set(files)
    if added:
        print(
            f"{len(added):,} file(s) were added to {path} since the run was started and are left "
            "out; --data.rescan uses them."
        )
    content = {"files": files, "checksums": listing.checksums}
    if read_json(directory.path / FILES) != content:
        with directory.explain_write_errors():
            write_atomically(directory.path / FILES, json.dumps(content, indent=0) + "\n")


def claim_directory(directory: RunDirectory, settings: Json) -> None:
    """Create and lock the directory; raise UserError if it is not ours, or a run with other
    settings."""
    directory.check_ownership()
    check_resumable(directory)
    directory.create()
    directory.lock()
    remove_partial(directory.path)
    config = settings | {VERSION: __version__}
    # A run that failed before its first step may be started with other settings.
    if directory.config.exists() and directory.has_started:
        different = list_differences(directory.read_config(), config)
        if different:
            raise UserError(
                f"{directory.path} holds a run with other settings:\n  "
                + "\n  ".join(different)
                + "\nUse its settings, give another --out, or add --fresh for a new folder beside "
                "it. Nothing was changed."
            )
    directory.write_config(config)


def check_resumable(directory: RunDirectory) -> None:
    """Raise UserError for a copy of a run that another run or an index contains."""
    steps = checkpoint.list_steps(directory.checkpoints)
    files = {
        path.name
        for step in steps
        for path in (directory.checkpoints / checkpoint.step_name(step)).iterdir()
    }
    is_exported = (directory.path / EXPORTED).is_file()
    if is_exported or ("ema.safetensors" in files and "model.safetensors" not in files):
        raise UserError(
            f"{directory.path} is a copy for inference, without the state of the optimizers, and "
            f"cannot be resumed. Give another --out, with --init-from {directory.path} to start "
            "with its weights."
        )


def read_captions(dataset: ExampleDataset) -> list[str]:
    """Read all captions; an unreadable one is reported when its example is loaded.

    If there are only unreadable ones, UserError is raised with the first reasons.
    """
    captions: list[str] = []
    reasons: list[str] = []
    for i in range(len(dataset)):
        try:
            captions += dataset.all_captions(i) or [""]
        except UnreadableFile as error:
            reasons.append(f"{dataset.name(i)}: {error}")
    if reasons and not any(captions):
        shown = "\n  ".join(reasons[:3])
        raise UserError(
            f"The captions of {len(reasons)} of {len(dataset)} examples could not be read, and the "
            f"others have none:\n  {shown}"
        )
    return captions


def prepare_text(
    task: Task,
    captions: list[str],
    dataset: ExampleDataset,
    directory: RunDirectory,
    dist: Distributed,
) -> None:
    """Prepare the text encoders and write the class names of a dataset of named folders."""
    with as_user_error(ValueError, OSError):
        task.prepare_text(captions, directory.cache)
    if dist.is_main and dataset.num_without_caption:
        print(
            f"{dataset.num_without_caption:,} example(s) have no caption and are left out; "
            "`tessera check` shows where captions are read from."
        )
    if classes := dataset.classes():
        text = json.dumps(classes, indent=1) + "\n"
        dist.on_main(lambda: write_atomically(directory.path / CLASSES, text))


def prepare_tokens(
    run: Run,
    split: Split,
    tokenizers: dict[str, Tokenizer],
    directory: RunDirectory,
    dist: Distributed,
) -> Split:
    """Copy the tokenizers and tokenize both sides of the split, unless that is done live."""
    from tessera.objectives.generation import TokenizedGeneratorConfig
    from tessera.run.dependencies import copy_companions, copy_dependencies
    from tessera.run.token_cache import TokenCache

    copy_dependencies(run, directory, dist)
    copy_companions(run, directory, dist)
    assert isinstance(run.task, TokenizedGeneratorConfig)
    if run.task.tokens == "live":
        return split
    given = None if run.task.tokens == "cache" else Path(run.task.tokens)
    notify = print_line if dist.is_main else ignore_line
    cache = TokenCache(tokenizers, given, directory.cache, dist, notify)
    with as_user_error(ValueError):
        return prepare_split(run.task, cache.tokenize_split(split), tokenizers, split)


def prepare_split(
    task: TokenizedGeneratorConfig,
    split: Split,
    tokenizers: Mapping[str, TokenizerProtocol],
    source: Split,
) -> Split:
    """Return both sides of a tokenized split as the task is trained on them.

    `source` is the split before it was tokenized.
    """
    train, validation = split.train, split.validation
    assert isinstance(train, TokenDataset) and isinstance(validation, TokenDataset)
    prepared = task.prepare_dataset(train, tokenizers, source.train)
    held_out = prepared
    if validation is not train:
        held_out = task.prepare_dataset(validation, tokenizers, source.validation)
    assert isinstance(prepared, ExampleDataset) and isinstance(held_out, ExampleDataset)
    return Split(prepared, held_out)


def print_line(line: str) -> None:
    print(printable(line), flush=True)


def ignore_line(line: str) -> None:
    """Print nothing: only the main process reports."""


def find_unused_folder(path: Path) -> Path:
    """Return the folder itself if it holds no run, else the first free name beside it."""
    if not (path / "config.json").exists():
        return path
    number = 2
    while path.with_name(f"{path.name}-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}-{number}")


# ---- what a user sees


def print_header(run: Run, directory: RunDirectory, remark: str = "") -> None:
    """Print what is trained, on which data, and where, and a remark about the settings."""
    dist = Distributed.from_environment()
    if dist.is_main:
        engine, data = run.engine, run.data.path or "synthetic data"
        print(
            f"{run.recipe}: {engine.steps} steps of {engine.batch_size} examples from {data}, in "
            f"{directory.path}"
        )
        print(remark, end="\n" if remark else "")
        threads = f"{dist.world_size} process(es), {torch.get_num_threads()} thread(s) each."
        print(f"{threads} {run.task.notice(run.data)}".strip())


def print_summary(run: Run, directory: RunDirectory) -> None:
    """Print the final metrics and write the model card."""
    if not Distributed.from_environment().is_main:
        return
    results = read_results(directory)
    if results is None:
        print("Done: no step was left to train, and there is no validation yet.")
        return
    try:
        write_model_card(run, directory, results)
    except OSError as error:
        print(f"{directory.card.name} could not be written ({error.strerror}).")
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in results.metrics.items())
    print(f"Done: {results.step} steps. On {results.examples} held-out examples: {metrics}")
    print(f"Samples: {directory.samples / checkpoint.step_name(results.step)}")


@dataclass
class Results:
    """The last validation of a run, with EMA weights."""

    step: int
    examples: int
    metrics: dict[str, float]


def read_results(directory: RunDirectory, step: int | None = None) -> Results | None:
    """Return the results of the validation at a step, by default the last, if there is one."""
    records = directory.read_records("validation")
    if step is not None:
        records = [record for record in records if record["step"] == step]
    if not records:
        return None
    record = records[-1]
    metrics = {
        name.removeprefix("val_ema/"): value
        for name, value in record.items()
        if name.startswith("val_ema/") and value is not None
    }
    return Results(record["step"], int(record.get("examples") or 0), metrics)


def write_model_card(run: Run, directory: RunDirectory, results: Results) -> None:
    """Write README.md, unless it is there and of another origin."""
    if directory.card.exists():
        found = directory.card.read_text(encoding="utf-8", errors="replace")
        if CARD_MARK not in found:
            print(f"{directory.card} was not written by a run and stays as it is.")
            return
    rows = "\n".join(f"| {name} | {value:.5g} |" for name, value in results.metrics.items())
    text = f"""# {directory.path.name}

A model of the recipe `{run.recipe}`, {CARD_MARK} {__version__} for {results.step} steps of
{run.engine.batch_size} examples on {run.data.path or "synthetic data"}. `config.json` holds all
settings.

{results.examples} held-out examples, EMA weights, step {results.step}:

| metric | value |
|---|---|
{rows}

`tessera sample {directory.path}` generates samples, `tessera evaluate {directory.path}` computes
metrics, `{run.task.entry_point}.load("{directory.path}")` loads the model in Python.
"""
    write_atomically(directory.card, text)
