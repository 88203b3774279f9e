"""`tessera train --dry-run`: what a run would do, and a try of two steps that keeps nothing."""

from __future__ import annotations

import dataclasses
import os
import tempfile

import torch
from rich.console import Console
from rich.table import Table

from tessera.data.dataset import Split, Subset
from tessera.engine.distributed import Distributed
from tessera.engine.task import Task
from tessera.run.config import Run
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tessera.run.train import build_engine


def dry_run(run: Run) -> None:
    """Print the update plan, then train two steps, validate, sample, save and load.

    It uses one example per micro-batch, a few held-out examples and a temporary folder.
    """
    dist = Distributed.from_environment()
    parts = run.engine.grad_accum_steps * dist.world_size
    short = dataclasses.replace(
        run.engine,
        steps=2,
        batch_size=parts * -(-run.task.min_batch_size // parts),
        log_every=1,
        validate_every=2,
        sample_every=2,
        sample_count=2,
        checkpoint_every=2,
        log_with=(),
        num_workers=min(run.engine.num_workers, os.cpu_count() or 1),
    )
    short_run = dataclasses.replace(run, engine=short)
    full = run.data.build(captions=run.task.uses_captions)
    train = Subset(full.train, range(max(2, short.batch_size)))
    split = Split(train, Subset(full.validation, range(2)))
    with tempfile.TemporaryDirectory() as folder:
        engine = build_engine(short_run, RunDirectory(folder), split=split)
        if dist.is_main:
            Console(width=160).print(update_plan(engine.task))  # a pipe's 80 would cut names
            print(run.reference, end="\n" if run.reference else "")
        engine.run()
        trained = {name: tensor.clone() for name, tensor in engine.task.state_dict().items()}
        loaded = build_engine(short_run, RunDirectory(folder), split=split)
        state = loaded.task.state_dict()
        is_same = all(torch.equal(tensor, trained[name]) for name, tensor in state.items())
        loaded.directory.unlock()
    if not is_same:
        raise UserError(
            "The loaded weights differ from the saved ones: this is a defect of Tessera, please "
            "report it."
        )
    if dist.is_main:
        print("Two steps, a validation, samples, a save and a load succeeded. Nothing was kept.")


def print_plan(run: Run, preset: str) -> None:
    """Print parameters, memory and FLOPs of a step; nothing is trained or read."""
    from tessera.run.plan import plan_run

    dist = Distributed.from_environment()
    plan = plan_run(run, preset, max(dist.world_size, run.engine.nproc))
    if dist.is_main:
        Console(width=160).print(plan.table())
        print("\n".join(plan.lines()))
        print(run.reference, end="\n" if run.reference else "")


def update_plan(task: Task) -> Table:
    """Return a table of the updates: network, size, optimizer and first step."""
    table = Table(title="Updates", title_justify="left")
    headings = ("update", "network", "parameters", "optimizer", "lr", "schedule", "max grad norm")
    for heading in (*headings, "start step"):
        table.add_column(heading)
    for update in task.updates:
        parameters = sum(parameter.numel() for parameter in update.trains.parameters())
        optimizer = update.optimizer
        table.add_row(
            update.name,
            type(update.trains).__name__,
            f"{parameters:,}",
            optimizer.name,
            f"{optimizer.lr:g}",
            optimizer.schedule,
            str(optimizer.max_grad_norm),
            str(update.start_step),
        )
    return table
