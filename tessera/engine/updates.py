"""The state of an update: its objective with DDP or FSDP, its optimizer and its gradient scaler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tessera.engine.config import EngineConfig
from tessera.engine.distributed import Distributed
from tessera.engine.ema import EMA
from tessera.engine.fsdp import ShardedObjective, count_bytes
from tessera.engine.modes import checkpoint_activations, train_only
from tessera.engine.optim.config import optimizer_state
from tessera.engine.task import Objective, Task, Update
from tessera.run.errors import UserError

COMPILE_BACKEND = "inductor"


@runtime_checkable
class StatefulModule(Protocol):
    """A module that is updated from statistics instead of gradients, such as a codebook."""

    def commit(self, dist: Distributed, step: int) -> None: ...
    def rollback(self) -> None: ...
    def buffers(self) -> Iterator[Tensor]: ...


@dataclass
class UpdateResult:
    """What one update logged in one step, as tensors."""

    logs: list[dict[str, Tensor]]
    """Loss, terms and metrics of each micro-batch; empty at steps that are not logged."""
    norm: Tensor
    lr: float

    def mean_logs(self) -> dict[str, Tensor]:
        """Return the mean over micro-batches."""
        if len(self.logs) == 1:
            return self.logs[0]
        return {name: torch.stack([one[name] for one in self.logs]).mean() for name in self.logs[0]}


@dataclass
class UpdateState:
    """An update with its optimizer and the modules that carry it out."""

    update: Update
    objective: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    parameters: list[nn.Parameter]
    train_only: train_only
    stateful_modules: list[StatefulModule]
    sharded: ShardedObjective | None = None
    has_run: bool = False

    @classmethod
    def build(
        cls,
        update: Update,
        task: Task,
        config: EngineConfig,
        dist: Distributed,
        *,
        use_scaler: bool,
    ) -> UpdateState:
        """Wrap the objective as the configuration specifies, and build the optimizer."""
        if config.checkpoint_activations:
            checkpoint_activations(update.trains)
        objective = Objective(update)
        if config.compile:
            objective.compile_loss(COMPILE_BACKEND)
        sharded = None
        if config.shard:
            wrapped: nn.Module = objective
            sharded = ShardedObjective(objective, update.trains, dist)
            parameters = sharded.local
        else:
            wrapped = dist.wrap_ddp(objective, find_unused=update.find_unused)
            parameters = {n: p for n, p in update.trains.named_parameters() if p.requires_grad}
        return cls(
            update=update,
            objective=wrapped,
            optimizer=update.optimizer.build(parameters),
            sharded=sharded,
            scaler=torch.amp.GradScaler(dist.device.type, enabled=use_scaler),
            parameters=list(parameters.values()),
            train_only=train_only(task, update.trains, update.also_train),
            stateful_modules=[m for m in update.trains.modules() if isinstance(m, StatefulModule)],
        )

    def sync_grads(self, enabled: bool) -> AbstractContextManager[None]:
        """Synchronise gradients between processes only with the last micro-batch, or with each if
        they are sharded: gradients that are not yet reduced would be whole ones."""
        if enabled or not isinstance(self.objective, DistributedDataParallel):
            return nullcontext()
        return self.objective.no_sync()

    def check_all_used(self) -> None:
        """Raise UserError if a parameter got no gradient and DDP would wait for it."""
        is_ddp = isinstance(self.objective, DistributedDataParallel)
        if not is_ddp or self.update.find_unused:
            return
        unused = [
            name
            for name, one in self.update.trains.named_parameters()
            if one.requires_grad and one.grad is None
        ]
        if unused:
            shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" * (len(unused) > 5))
            raise UserError(
                f"The loss of the update {self.update.name!r} does not depend on {shown}, but with "
                "several processes every trained parameter needs a gradient: freeze them with "
                "requires_grad_(False), or construct the update with find_unused=True."
            )


@contextmanager
def in_update(updates: Mapping[str, UpdateState], trained: UpdateState) -> Iterator[None]:
    """Prepare all sharded networks for an update of one of them."""
    with ExitStack() as stack:
        for state in updates.values():
            if state.sharded is not None:
                stack.enter_context(state.sharded.in_update(is_trained=state is trained))
        yield


@contextmanager
def gathered(updates: Mapping[str, UpdateState]) -> Iterator[None]:
    """Gather the parameters of all sharded networks for evaluation."""
    with ExitStack() as stack:
        for state in updates.values():
            if state.sharded is not None:
                stack.enter_context(state.sharded.gathered())
        yield


def count_memory(task: Task, ema: EMA, updates: Mapping[str, UpdateState]) -> tuple[int, int]:
    """Return the bytes of parameters, optimizer state and EMA: of this process, and of all if
    nothing was sharded."""
    sharded = [*task.parameters()]
    own = {n: one for n, one in task.model.state_dict().items() if one.is_floating_point()}
    local = [*sharded, *(one for n, one in ema.state_dict().items() if n in own)]
    whole = [*sharded, *own.values()]
    for state in updates.values():
        moments = optimizer_state(state.optimizer)
        local += [one for one in moments.values() if one.ndim]
        parameters = state.update.trains.state_dict()
        whole += [parameters[n.split("/", 1)[1]] for n, one in moments.items() if one.ndim]
    return count_bytes(local), sum(one.numel() * one.element_size() for one in whole)
