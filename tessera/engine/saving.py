"""Saving a run: what a checkpoint holds, when it is written, and which checkpoints are kept.

A checkpoint holds tensors and a few counters; everything else is a function of the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import tessera.engine.checkpoint as checkpoint
from tessera.engine.checkpoint import Snapshot, load_strictly, stage
from tessera.engine.config import EngineConfig
from tessera.engine.distributed import Distributed
from tessera.engine.ema import EMA
from tessera.engine.fsdp import (
    copy_to_shard,
    gather_tensor,
    gather_tensors,
    local_tensor,
    take_shard,
)
from tessera.engine.guards import Diverged, NonFiniteGuard, all_finite
from tessera.engine.logging import ProgressPrinter
from tessera.engine.optim.config import load_optimizer_state, optimizer_state
from tessera.engine.task import Task
from tessera.engine.updates import UpdateState
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError


class Saver:
    """Save and restore the networks, EMA, optimizers and counters of a run.

    All processes call its methods; the main process reads and writes the files.
    """

    def __init__(
        self,
        task: Task,
        updates: Mapping[str, UpdateState],
        ema: EMA,
        guard: NonFiniteGuard,
        *,
        config: EngineConfig,
        directory: RunDirectory,
        dist: Distributed,
        printer: ProgressPrinter,
    ):
        self.task, self.updates, self.ema, self.guard = task, updates, ema, guard
        self.config, self.directory, self.dist, self.printer = config, directory, dist, printer
        self.saved_step = 0

    def start(self) -> None:
        """Start the thread that writes checkpoints."""
        self.writer = checkpoint.Writer(
            self.directory.checkpoints, self.select_checkpoints, self.on_failed_write
        )

    # ---- what a checkpoint holds

    def snapshot(self, step: int) -> Snapshot:
        """Return everything that a checkpoint holds; shards are gathered on all processes."""
        state_dict = self.task.state_dict()
        others = {name: one for name, one in state_dict.items() if not name.startswith("model.")}
        model, ema = self.task.model.state_dict(), self.ema.state_dict()
        files = {"model": model, "ema": ema, "others": others}
        if self.config.shard:
            ema = {name: gather_tensor(one, model[name]) for name, one in ema.items()}
            files = {"model": gather_tensors(model), "ema": ema, "others": gather_tensors(others)}
        for name, update in self.updates.items():
            moments = optimizer_state(update.optimizer)
            if update.sharded is not None:
                moments = update.sharded.gather_state(moments)
            files[f"optimizer.{name}"] = moments
        state = {
            "guard": self.guard.state_dict(),
            "scalers": {name: one.scaler.state_dict() for name, one in self.updates.items()},
            "threads": torch.get_num_threads(),
            "world_size": self.dist.world_size,
            "torch": torch.__version__,
        }
        tensors = {name: stage(one) for name, one in files.items() if one}
        return Snapshot(step, tensors, state)

    def restore(self, snapshot: Snapshot | None) -> int:
        """Restore a snapshot, which only the main process needs to have, and return its step."""
        state = self.dist.on_main(
            lambda: {"step": snapshot.step, **snapshot.state} if snapshot else {}
        )
        tensors = self.dist.broadcast_tensors(snapshot.tensors if snapshot else None)
        copy = copy_to_shard if self.config.shard else Tensor.copy_
        load_strictly(self.task.model, tensors["model"], "model in the checkpoint", copy)
        model = {f"model.{name}": tensor for name, tensor in tensors["model"].items()}
        load_strictly(self.task, model | tensors.get("others", {}), "checkpoint", copy)
        own = self.task.model.state_dict()
        self.ema.load_state_dict({n: take_shard(one, own[n]) for n, one in tensors["ema"].items()})
        for name, update in self.updates.items():
            moments = tensors.get(f"optimizer.{name}", {})
            if update.sharded is not None:
                moments = update.sharded.take_state(moments)
            load_optimizer_state(update.optimizer, moments)
            if update.scaler.is_enabled():
                update.scaler.load_state_dict(state["scalers"][name])
        self.guard.load_state_dict(state["guard"])
        self.saved_step = state["step"]
        self.printer.print(f"Resuming from step {self.saved_step}.")
        if state["threads"] != torch.get_num_threads():
            self.printer.print(
                f"The checkpoint was written with {state['threads']} threads and training resumes "
                f"with {torch.get_num_threads()}: results are valid, but not bit for bit the same."
            )
        return self.saved_step

    def has_finite_weights(self) -> bool:
        tensors = [*self.task.state_dict().values(), *self.ema.state_dict().values()]
        local = map(local_tensor, tensors) if self.config.shard else tensors
        return not self.dist.all_reduce_any(not all_finite(local))

    def check_weights(self, step: int) -> None:
        """Raise Diverged if a weight is not finite; a step with finite gradients can cause that."""
        if not self.has_finite_weights():
            raise Diverged(
                f"Some weights were not finite at step {step}, although the gradients were: the "
                "optimizer's step was too large."
            )

    # ---- when it is written

    def save(self, step: int) -> None:
        """Stage a copy on the main process and write it in the background."""
        is_written = self.dist.is_main and step > 0
        if is_written and (problem := self.directory.fsync_metrics()):
            self.printer.print(f"metrics.jsonl may not be on the disk ({problem}).")
        if is_written or self.config.shard:  # all processes gather the shards
            snapshot = self.snapshot(step)
        if is_written:
            self.writer.submit(snapshot, prune=not self.guard.is_skipping)
        self.saved_step = step

    def ensure_saved(self, step: int) -> None:
        """Return when a step is on the disk; retry once, then raise UserError."""
        if self.saved_step != step:
            self.check_weights(step)
            self.save(step)
        if self.dist.on_main(lambda: not self.writer.wait()):
            snapshot = self.snapshot(step)
            if not self.dist.on_main(lambda: self.writer.rewrite(snapshot)):
                raise UserError(
                    f"Step {step} could not be saved in {self.directory.path}. Older checkpoints "
                    "are unchanged. Free some disk space and run the command again."
                )

    def save_interrupted(self, step: int) -> None:
        """Save a step, unless its weights are not finite."""
        if not self.has_finite_weights():
            self.printer.print(
                f"Some weights are not finite: step {step} is not saved, and the run resumes from "
                "an older checkpoint."
            )
            return
        self.ensure_saved(step)

    def on_failed_write(self, error: Exception) -> None:
        self.printer.print(
            f"A checkpoint could not be written ({error}). Training continues, and the older "
            "checkpoint stays."
        )

    # ---- which checkpoints are kept

    def select_checkpoints(self, steps: list[int]) -> set[int]:
        """Return the steps to keep: the newest, multiples of `keep_every`, and the best.

        The last of `steps` is being written. Only older ones are compared by their validation, so
        that the choice does not depend on whether its own validation is finished.
        """
        kept = set(steps[-self.config.keep_last :])
        if self.config.keep_every:
            kept |= {step for step in steps if step % self.config.keep_every == 0}
        metric, records = self.task.best_metric, self.directory.read_records("validation")
        best = checkpoint.best_step(steps[:-1], records, metric.name, metric.higher_is_better)
        if best is not None:
            kept.add(best)
        return kept
