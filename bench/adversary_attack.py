"""What the attacks of adversary.py share: tiny runs of all recipes, and undisturbed ones."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from adversary_faults import Fault
from adversary_process import (
    Child,
    Outcome,
    run_child,
    run_tessera,
    start_child,
    train_rank,
    train_with_fault,
)
from adversary_table import Row

import tessera.cli.train as cli_train
from tessera.cli.launch import find_free_port
from tessera.modalities import recipes
from tessera.recipes.registry import default_dependency, get_recipe

# Flags are parsed once and before the forks: half of the CPU time of a tiny run.
cli_train.parse_recipe = functools.cache(cli_train.parse_recipe)

RUN = "run"
FLAGS = (
    "--preset tiny --steps 4 --batch-size 4 --log-every 1 --validate-every 2 --sample-every 4 "
    "--sample-count 1 --checkpoint-every 1 --keep-last 1 --data.num-synthetic 16"
).split()
TOKENIZERS = {
    ("images-maskgit-superres", "tokenizer"): ["--data.size", "32"],
    ("audio-text2semantic", "tokenizer"): ["--features", "ctc"],
}
"""The flags of tokenizers that are not trained by the defaults of their recipe."""


@dataclass
class Attack:
    """What all sections share."""

    work_dir: Path
    seed: int
    rng: random.Random
    seconds: float
    count: int
    recipes: list[str]
    is_interrupted: bool = False

    def interrupt(self, *_: object) -> None:
        """End the section after the present attempt, as a handler of a signal."""
        self.is_interrupted = True

    def attempts(self, row: Row) -> Iterator[int]:
        """Count attempts until the time is used up or a row has its number."""
        deadline = time.monotonic() + self.seconds
        for number in itertools.count():
            if row.tried >= self.count or time.monotonic() > deadline or self.is_interrupted:
                return
            yield number

    def command(self, recipe: str, *flags: str) -> list[str]:
        """Return the command that trains a tiny run of a recipe, on tiny tokenizers.

        It writes to the folder RUN of the current folder, whose path is part of the model card.
        """
        parameters = inspect.signature(get_recipe(recipe)).parameters
        given: list[str] = []
        for name in ("tokenizer", "semantic", "low_res_tokenizer"):
            if name in parameters:
                run = self.tokenizer(recipe, name)
                given += [f"--{name.replace('_', '-')}", str(run)]
        if "soundstorm" in parameters:
            given += ["--soundstorm", "none"]
        words = [recipe, *FLAGS, *given, *flags, "--out", RUN]
        cli_train.parse_recipe(tuple(words))
        return ["train", *words]

    def tokenizer(self, recipe: str, name: str) -> Path:
        """Train the tokenizer of a recipe, once."""
        default = default_dependency(recipe, name)
        wanted = default if default in recipes() else "images-vqgan"
        special = TOKENIZERS.get((recipe, name), [])
        run = self.work_dir / f"{wanted}{''.join(special)}"
        if not run.exists():
            check(run_child(run_tessera, "train", wanted, *FLAGS, *special, "--out", str(run)))
        return run

    def reference(self, recipe: str, *flags: str, nproc: int = 1) -> Reference:
        """Train a run that is never disturbed, once; its operations are logged."""
        run = self.work_dir / f"reference-{recipe}{''.join(flags)}-{nproc}" / RUN
        log = run.with_suffix(".log")
        if not run.exists():
            run.parent.mkdir()
            watched = Fault(run, log=log)
            check(train(run.parent, self.command(recipe, *flags), nproc, watched))
        operations = [line.partition(" ")[2] for line in log.read_text().splitlines()]
        return Reference(run, operations)

    def new_run(self) -> Path:
        """Return the path of a run in an empty folder."""
        folder = self.work_dir / "attacked"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder / RUN


@dataclass(frozen=True)
class Reference:
    """A run that was never disturbed."""

    run: Path
    operations: list[str]
    """The paths of the operations that change files, in order."""


def check(outcome: Outcome) -> None:
    if outcome.code != 0:
        raise SystemExit(f"A command fails without an attack:\n{outcome.output[-3000:]}")


def train_in(folder: Path, command: list[str]) -> None:
    run_tessera(*command, folder=folder)


def start_ranks(folder: Path, command: list[str], fault: Fault | None = None) -> list[Child]:
    """Start a command in two processes that train together; the main one may have a fault."""
    port = find_free_port()
    faults = (fault, None)
    return [
        start_child(train_rank, folder, rank, 2, port, command, faults[rank]) for rank in (0, 1)
    ]


def train(folder: Path, command: list[str], nproc: int, fault: Fault | None = None) -> Outcome:
    """Train to the end or to a fault; return the outcome of the main process.

    If it is killed, so is the other process, as the launcher does.
    """
    if nproc == 1:
        return run_child(train_with_fault, fault or Fault(folder / RUN), folder, command)
    main, other = start_ranks(folder, command, fault)
    outcome = main.wait(600)
    if outcome.code != 0:
        other.signal(signal.SIGKILL)
    ended = other.wait(600)
    return ended if outcome.code == 0 and ended.code != 0 else outcome


def print_progress(row: Row, what: str) -> None:
    print(
        f"{row.tried} {row.unit}, {len(row.problems)} broken: {what}", file=sys.stderr, flush=True
    )
