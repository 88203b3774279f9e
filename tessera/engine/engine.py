"""The engine: the life of a run. Steps, accumulation, precision, distribution, average,
checkpoints, validation, samples.

It is handed a task (what is learnt) and two streams of batches (from what), and knows neither by
name. `done`, the number of finished steps, is the only clock: data, randomness and rates are
functions of it, so nothing but tensors needs saving. Read `run` and `step`; the rest serves them.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from tessera.engine import checkpoint
from tessera.engine.checkpoint import Snapshot, restore_network, stage
from tessera.engine.distributed import Distributed
from tessera.engine.ema import EMA, EMAConfig
from tessera.engine.evaluation import ValidationStream, evaluate_task, make_samples, save_media
from tessera.engine.guards import NonFiniteGuard
from tessera.engine.logging import (
    TRACKERS,
    MetricLogger,
    ProgressPrinter,
    ThroughputMeter,
    Trackers,
)
from tessera.engine.memory import keep_freed_memory
from tessera.engine.modes import only, seed
from tessera.engine.optim.config import (
    clip_grad_norm,
    grad_norm,
    optimizer_tensors,
    restore_optimizer,
    set_lr,
    zero_grad,
)
from tessera.engine.signals import Interrupted, Signals
from tessera.engine.task import Batch, Loss, Objective, Task, Update, check_ownership
from tessera.run.directory import RunDirectory, UserError

Precision = Literal["auto", "fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    steps: int = 1000
    """Optimizer steps of the whole run."""
    batch_size: int = 16
    """Examples in one step, over all micro-batches and processes."""
    grad_accum_steps: int = 1
    """Micro-batches in one step: more of them need less memory and change nothing else."""
    seed: int = 0
    """All randomness of the run starts here."""
    init_from: str | None = None
    """A run of the same network, with whose averaged weights this one begins: pictures first and
    then clips, say."""
    num_workers: int = 0
    """Processes that read and prepare data; 0 does it in between."""
    nproc: int = 1
    """Processes that train, on this machine."""
    precision: Precision = "auto"
    """auto is bf16 on a GPU that has it and fp32 elsewhere."""
    log_every: int = 10
    """Steps between lines in metrics.jsonl."""
    validate_every: int = 500
    """Steps between validations of the whole held-out set; the last step always has one."""
    sample_every: int = 500
    """Steps between samples; the last step always has some."""
    sample_count: int = 16
    """Held-out examples that samples are made of."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last step always has one."""
    keep_last: int = 2
    """Newest checkpoints to keep, beside the best one."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are kept for ever; 0 keeps none for ever."""
    max_skipped_steps: int = 10
    """Steps in a row that may be skipped because their numbers are not finite."""
    ema: EMAConfig = field(default_factory=EMAConfig)
    log_with: tuple[str, ...] = ()
    """Mirrors of metrics.jsonl: tensorboard, wandb, trackio."""

    def __post_init__(self) -> None:
        for name in (
            "steps batch_size accumulate processes log_every validate_every sample_every sample_count "
            "checkpoint_every keep_last patience"
        ).split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, but it is {getattr(self, name)}.")
        for name in ("workers", "keep_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, but it is {getattr(self, name)}.")
        for name in self.log_with:
            if name not in TRACKERS:
                raise ValueError(
                    f"There is no tracker {name!r}: a run can be mirrored in {', '.join(TRACKERS)}."
                )
        share = self.grad_accum_steps * self.nproc
        if self.batch_size % share:
            raise ValueError(
                f"A batch of {self.batch_size} examples cannot be cut into equal micro-batches, {self.grad_accum_steps} on each of "
                f"{self.nproc} process(es): use a batch size of {-(-self.batch_size // share) * share}."
            )


class TrainingStream(Protocol):
    def micro_batches(
        self, first_step: int, steps: int, rank: int, nproc: int
    ) -> Iterator[list[Batch]]: ...


@dataclass
class UpdateState:
    """An update with what carries it out."""

    update: Update
    objective: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    parameters: list[nn.Parameter]
    only: only
    """While it moves: its network learns, the rest of the task looks on."""
    stateful_modules: list[Any]
    """Parts of the network that are moved by statistics instead of gradients, such as a
    codebook."""


@dataclass
class UpdateResult:
    """What one update did in one step, still as tensors."""

    logs: list[dict[str, Tensor]]
    """Loss, terms and metrics of each micro-batch, at steps that are logged; most are not."""
    norm: Tensor
    rate: float


class Engine:
    def __init__(
        self,
        task: Task,
        training: TrainingStream,
        validation: ValidationStream,
        config: EngineConfig,
        directory: RunDirectory,
        *,
        on_log: Callable[[dict[str, Any]], None] | None = None,
    ):
        check_ownership(task)
        keep_freed_memory()
        self.config, self.directory = config, directory
        self.training, self.validation = training, validation
        self.dist = Distributed.from_environment()
        self.device = self.dist.device
        self.precision = resolved(config.precision, self.device)
        self.task = task.to(self.device)
        self.prepared = {update.name: self.prepare(update) for update in task.updates}
        self.ema = EMA(config.ema, task.model)
        self.guard = NonFiniteGuard(config.max_skipped_steps)
        self.signals = Signals()
        self.report = ProgressPrinter(self.dist.is_main)
        self.pace = ThroughputMeter(self.device)
        self.on_log = on_log
        self.done = 0
        self.saved_at = 0

    def prepare(self, update: Update) -> UpdateState:
        return UpdateState(
            update=update,
            objective=self.dist.wrap_ddp(Objective(update)),
            optimizer=update.optimizer.build(update.trains),
            scaler=torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16"),
            parameters=list(update.trains.parameters()),
            only=only(self.task, update.trains),
            stateful_modules=[
                module for module in update.trains.modules() if hasattr(module, "settle")
            ],
        )

    # ---- the heart

    def run(self) -> None:
        """From where the folder stands to the last step. `open` comes before."""
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[dict[str, UpdateResult]]:
        """The run, one step at a time; whoever stops asking stops it."""
        self.begin()
        try:
            self.run_due_events()
            for step, micros in zip(range(self.done, self.config.steps), self.batches()):
                seed(
                    self.config.seed, self.dist.rank, step
                )  # all randomness is addressed by the step
                results = self.step(step, micros)
                self.done = step + 1
                self.report.advance(self.done)
                if self.due(self.config.log_every):
                    self.log(results)
                if self.due(self.config.checkpoint_every):
                    self.checkpoint()
                self.run_due_events()
                yield results
            self.ensure_saved()
        except Interrupted as interrupted:
            self.report.say(
                f"{interrupted}: saving step {self.done}; the same command goes on from there."
            )
            self.ensure_saved()
            raise
        finally:
            self.close()

    def step(self, step: int, micros: list[Batch]) -> dict[str, UpdateResult]:
        """Each update that has started moves its own network once."""
        results = {}
        for name, prepared in self.prepared.items():
            if step >= prepared.update.start_step:
                results[name] = self.move(prepared, step, micros)
        self.ema.update(step + 1)
        return results

    def move(self, prepared: UpdateState, step: int, micros: list[Batch]) -> UpdateResult:
        """One optimizer's share of a step: its losses on all micro-batches, then one movement, or
        none if it is not finite."""
        update, optimizer, scaler = prepared.update, prepared.optimizer, prepared.scaler
        logs, shares, logged = [], [], self.due(self.config.log_every, step + 1)
        with prepared.only:
            if update.prepare is not None:
                with self.autocast():
                    update.prepare(micros, step, self.dist)
            for i, batch in enumerate(micros, start=1):
                with self.sync_grads(prepared.objective, now=i == len(micros)):
                    with self.autocast():
                        loss = prepared.objective(batch, step)
                    share = loss.total() / len(micros) if len(micros) > 1 else loss.total()
                    scaler.scale(share).backward()
                shares.append(share.detach())
                if logged:
                    logs.append(detach_logs(loss))
        scaler.unscale_(optimizer)
        total = torch.stack(shares).sum() if len(shares) > 1 else shares[0]
        norm = grad_norm(prepared.parameters)
        rate = update.optimizer.lr_at(step, self.config.steps)
        if self.is_finite(prepared, total, norm, micros, step):
            clip_grad_norm(prepared.parameters, norm, update.optimizer.max_grad_norm)
            set_lr(optimizer, rate)
            scaler.step(optimizer)
            for part in prepared.stateful_modules:
                part.commit(self.dist, step)
        else:
            for part in prepared.stateful_modules:
                part.rollback()
        if scaler.is_enabled():
            scaler.update()
        zero_grad(prepared.parameters)
        return UpdateResult(logs, norm, rate)

    def due(self, every: int, done: int | None = None) -> bool:
        """Now, or when so many steps are done."""
        done = self.done if done is None else done
        return done % every == 0 or done == self.config.steps

    def run_due_events(self) -> None:
        """Validation and samples that are due at this step and not yet in the folder.

        A run that was stopped in the middle of them does them after it resumes, before it goes on,
        so its record has no gap. The folder is the memory; no flag is kept anywhere.
        """
        self.raise_if_interrupted()
        if (
            self.done
            and self.due(self.config.validate_every)
            and not self.dist.on_main(self.is_validated)
        ):
            self.validate()
        if (
            self.done
            and self.due(self.config.sample_every)
            and not self.dist.on_main(self.is_sampled)
        ):
            self.sample()

    # ---- parts of a step

    def batches(self) -> Iterator[list[Batch]]:
        """The micro-batches of each step on this device; the time spent waiting for them is told to
        the pace."""
        stream = self.training.micro_batches(
            self.done, self.config.steps, self.dist.rank, self.dist.world_size
        )
        while True:
            began = time.perf_counter()
            micros = next(stream, None)
            if micros is None:
                return
            micros = [batch.to(self.device) for batch in micros]
            self.pace.waited(time.perf_counter() - began)
            self.pace.trained(self.config.batch_size)
            for batch in micros:
                self.record.note_skipped_examples(batch)
            yield micros

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16 if self.precision == "bf16" else torch.float16
        )

    def sync_grads(
        self, objective: nn.Module, now: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Gradients travel between the processes once per step, with the last micro-batch."""
        return contextlib.nullcontext() if now or self.dist.world_size == 1 else objective.no_sync()  # type: ignore[operator]

    def is_finite(
        self, prepared: UpdateState, total: Tensor, norm: Tensor, micros: list[Batch], step: int
    ) -> bool:
        """Whether this update may move: on no process did it meet a number that is not finite."""
        name = prepared.update.name
        ill = not math.isfinite(total.item() + norm.item())
        if not self.dist.all_reduce_any(ill):
            self.guard.fine(name)
            return True
        if prepared.scaler.is_enabled() and not self.dist.all_reduce_any(
            not math.isfinite(total.item())
        ):
            return (
                False  # fp16's loss scale is still too high: the scaler's business, and no illness
            )
        names = self.dist.all_gather_object(
            [example for batch in micros for example in batch.names] if ill else []
        )
        if self.dist.is_main:
            self.directory.note(
                "nonfinite.jsonl", {"step": step, "update": name, "examples": names}
            )
            self.report.say(
                f"Step {step}: {name!r} met a number that is not finite and was skipped; see nonfinite.jsonl."
            )
        self.guard.skip(name, names)
        return False

    def raise_if_interrupted(self) -> None:
        """All processes agree on whether to stop, between two pieces of work."""
        received = self.dist.all_reduce_max(self.signals.received)
        if received:
            raise Interrupted(received)

    # ---- what it writes down

    def log(self, results: dict[str, UpdateResult]) -> None:
        """One line: terms and metrics averaged over micro-batches and processes, and how the run
        fares."""
        record: dict[str, Any] = {
            "step": self.done,
            "kind": "train",
            "examples": self.done * self.config.batch_size,
        }
        for name, one in results.items():
            values = mean_logs(one.logs)
            means = (
                self.dist.all_reduce_sum(torch.stack(list(values.values()))) / self.dist.world_size
            )
            record |= {
                f"{name}/{key}": mean for key, mean in zip(values, means.tolist(), strict=True)
            }
            record |= {f"{name}/grad_norm": float(one.norm), f"{name}/rate": one.rate}
        record |= {"skipped_steps": self.guard.skipped} | self.pace.logs()
        self.record.write(record)
        shown = {name: record[f"{name}/loss"] for name in results} | {
            "examples/s": record["examples_per_second"]
        }
        self.report.numbers(self.done, shown)

    def validate(self) -> None:
        """The whole held-out set, with the live weights and with the average."""
        live = self.measured()
        with self.ema.applied():
            ema = self.measured()
        record = {"step": self.done, "kind": "validation", "examples": len(self.validation)}
        record |= {f"val/{name}": value for name, value in live.items()}
        record |= {f"val_ema/{name}": value for name, value in ema.items()}
        self.record.write(record)
        self.report.say(
            f"validation at {self.done}: " + "  ".join(f"{n} {v:.4g}" for n, v in ema.items())
        )

    def measured(self) -> dict[str, float]:
        with self.autocast():
            return evaluate_task(self.task, self.validation, self.dist, self.between_batches)

    def sample(self) -> None:
        """What the average model makes of the first held-out examples, as files."""
        with self.ema.applied(), self.autocast():
            media = make_samples(
                self.task,
                self.validation,
                self.config.sample_count,
                self.dist,
                self.between_batches,
            )
        if self.dist.is_main:
            try:
                with self.directory.writing_samples(checkpoint.step_name(self.done)) as place:
                    save_media(media, place)
            except OSError as error:
                self.report.say(
                    f"The samples of step {self.done} could not be written ({error}). The run goes on."
                )

    def between_batches(self, batch: Batch | None) -> None:
        self.raise_if_interrupted()
        self.record.note_skipped_examples(batch)

    def is_validated(self) -> bool:
        return any(record["step"] == self.done for record in self.directory.records("validation"))

    def is_sampled(self) -> bool:
        return (self.directory.samples / checkpoint.step_name(self.done)).is_dir()

    # ---- saving and going on

    def open(self, config: dict[str, Any]) -> None:
        """Takes the folder for this process and goes to where it stands. `config` is what the
        trackers are told."""
        self.dist.on_main(lambda: checkpoint.remove_partial(self.directory.checkpoints))
        found = self.dist.on_main(
            lambda: checkpoint.newest(self.directory.checkpoints, self.report.say)
        )
        if found is not None:
            self.restore(checkpoint.read(found) if self.dist.is_main else None)
        self.dist.on_main(lambda: self.directory.forget_after(self.done))
        trackers = (
            Trackers(self.config.log_with, self.directory.path, config, self.report.say)
            if self.dist.is_main
            else None
        )
        self.record = MetricLogger(
            self.directory,
            self.report,
            self.dist,
            alarms=self.task.alarms,
            trackers=trackers,
            on_log=self.on_log,
        )

    def restore(self, snapshot: Snapshot | None) -> None:
        """Everything as it was at the snapshot's step; only the main process needs to have one."""
        state = self.dist.on_main(
            lambda: {"done": snapshot.done, **snapshot.state} if snapshot else {}
        )
        tensors = self.dist.broadcast_tensors(snapshot.tensors if snapshot else None)
        restore_network(self.task.model, tensors["model"], "model in the checkpoint")
        restore_network(self.task, self.whole_state(tensors), "checkpoint")
        self.ema.load_state_dict(tensors["ema"])
        for name, prepared in self.prepared.items():
            restore_optimizer(prepared.optimizer, tensors.get(f"optimizer.{name}", {}))
            if prepared.scaler.is_enabled():
                prepared.scaler.load_state_dict(state["scalers"][name])
        self.guard.restore(state["guard"])
        self.done = self.saved_at = state["done"]
        self.report.say(f"Going on from step {self.done}.")
        if state["threads"] != torch.get_num_threads():
            self.report.say(
                f"It was trained with {state['threads']} threads and goes on with {torch.get_num_threads()}: "
                "right, but not bit for bit the same."
            )

    @staticmethod
    def whole_state(tensors: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        return {f"model.{name}": tensor for name, tensor in tensors["model"].items()} | tensors.get(
            "others", {}
        )

    def checkpoint(self) -> None:
        """The main process stages a copy and writes it in the background; the step goes on."""
        if self.dist.is_main and self.done:
            self.directory.fsync_metrics()
            self.writer.begin(self.snapshot())
        self.saved_at = self.done

    def snapshot(self) -> Snapshot:
        others = {
            name: tensor
            for name, tensor in self.task.state_dict().items()
            if not name.startswith("model.")
        }
        files = {
            "model": self.task.model.state_dict(),
            "ema": self.ema.state_dict(),
            "others": others,
        }
        files |= {
            f"optimizer.{name}": optimizer_tensors(prepared.optimizer)
            for name, prepared in self.prepared.items()
        }
        state = {
            "guard": self.guard.state(),
            "scalers": {
                name: prepared.scaler.state_dict() for name, prepared in self.prepared.items()
            },
            "threads": torch.get_num_threads(),
            "processes": self.dist.world_size,
            "torch": torch.__version__,
        }
        return Snapshot(
            self.done, {name: stage(tensors) for name, tensors in files.items() if tensors}, state
        )

    def ensure_saved(self) -> None:
        """The step reached is on the disk when this returns; a full disk gets a second chance, then
        a letter."""
        if self.saved_at != self.done:
            self.checkpoint()
        if self.dist.is_main and not self.writer.wait():
            self.writer.begin(self.snapshot())
            if not self.writer.wait():
                raise UserError(
                    f"Step {self.done} could not be saved in {self.directory.path}. Older checkpoints are untouched."
                )

    def worth_keeping(self, steps: list[int]) -> set[int]:
        """The newest, those at multiples of `keep_every`, and the best by the task's headline."""
        kept = set(steps[-self.config.keep_last :])
        if self.config.keep_every:
            kept |= {step for step in steps if step % self.config.keep_every == 0}
        best_metric = self.task.best_metric
        scores = {
            r["step"]: r[f"val_ema/{best_metric.metric}"]
            for r in self.directory.records("validation")
        }
        scored = {step: scores[step] for step in steps if scores.get(step) is not None}
        if scored:
            kept.add(
                (max if best_metric.higher_is_better else min)(
                    scored, key=lambda step: scored[step]
                )
            )
        return kept

    def save_failed(self, error: Exception) -> None:
        self.report.say(
            f"A checkpoint could not be written ({error}). The run goes on, and the older checkpoint stays."
        )

    def begin(self) -> None:
        """From here on the folder is this run's, a signal is a question, and checkpoints are
        written beside the work."""
        self.dist.on_main(self.directory.lock)
        self.signals.__enter__()
        self.writer = checkpoint.Writer(
            self.directory.checkpoints, self.worth_keeping, self.save_failed
        )
        self.report.begin(self.done, self.config.steps)
        # What is there by now stays for the whole run; looking through it for garbage every few
        # steps took 0.25 ms a step.
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        """Nothing is left half done: the last write ends, trackers are told; terminal, signals and
        folder are given back."""
        gc.unfreeze()
        self.report.end()
        self.record.close()
        self.writer.close()
        self.signals.__exit__()
        self.directory.unlock()


def resolved(precision: Precision, device: torch.device) -> Precision:
    """`auto` never picks half precision on a CPU, where it is 20 to 60 times slower than fp32."""
    if precision != "auto":
        return precision
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


@torch.no_grad()
def detach_logs(loss: Loss) -> dict[str, Tensor]:
    """The total (`loss`), each term and each metric; functions are asked now, while what they look
    at is still there."""
    metrics = {
        name: metric() if callable(metric) else metric for name, metric in loss.metrics.items()
    }
    logs = {"loss": loss.total(), **loss.terms, **metrics}
    return {name: value.detach().float() for name, value in logs.items()}


def mean_logs(logs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean over micro-batches."""
    if len(logs) == 1:
        return logs[0]
    return {name: torch.stack([one[name] for one in logs]).mean() for name in logs[0]}
