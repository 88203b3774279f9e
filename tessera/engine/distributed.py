"""Collective operations on Accelerate's device and rank.

With one process every method returns its argument unchanged, so callers need no special case.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tessera.run.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Distributed:
    def __init__(self, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu"):
        self.rank = rank
        self.world_size = world_size
        self.is_main = rank == 0
        self.device = torch.device(device)

    @classmethod
    def from_environment(cls) -> Distributed:
        """Join the processes that a launcher started, or use a single process."""
        # Without `cpu` Accelerate treats each of several CPU processes as a run of its own.
        state = PartialState(cpu=not torch.accelerator.is_available())
        return cls(state.process_index, state.num_processes, state.device)

    def wrap_ddp(self, objective: nn.Module, find_unused: bool = False) -> nn.Module:
        """Wrap an objective so that its gradients are averaged over the processes.

        Buffers are not broadcast: modules that are updated from statistics keep them equal in
        `commit`, and a broadcast at each forward pass costs time. The option has two names in the
        range of torch versions that is supported.
        """
        if self.world_size == 1:
            return objective
        names = inspect.signature(DistributedDataParallel).parameters
        option = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        options: dict[str, Any] = {option: False, "find_unused_parameters": find_unused}
        devices = None if self.device.type == "cpu" else [self.device]
        return DistributedDataParallel(
            objective, device_ids=devices, gradient_as_bucket_view=True, **options
        )

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.world_size == 1:
            return tensor
        total = tensor.detach().clone()
        torch.distributed.all_reduce(total)
        return total

    def all_gather_rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of all processes in the order of the global batch.

        Example i of a micro-batch is on process i modulo the number of processes.
        """
        if self.world_size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, tensor.contiguous())
        return torch.stack(parts, dim=1).flatten(0, 1)

    def all_reduce_any(self, flag: bool) -> bool:
        """Return whether the flag is set on any process."""
        return bool(self.all_reduce_max(int(flag)))

    def all_reduce_max(self, number: int) -> int:
        if self.world_size == 1:
            return number
        tensor = torch.tensor(number, device=self.device)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
        return int(tensor.item())

    def all_gather_object(self, items: list[Item]) -> list[Item]:
        """Return the items of all processes, ordered by rank."""
        return items if self.world_size == 1 else gather_object(items)

    def on_main(self, function: Callable[[], Result]) -> Result:
        """Call a function on rank 0 and broadcast its result, or its UserError, to all ranks."""
        if self.world_size == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome = [function(), None]
            except UserError as error:
                outcome = [None, str(error)]
        torch.distributed.broadcast_object_list(outcome, src=0, device=self.device)
        if outcome[1] is not None:
            raise UserError(outcome[1])
        return outcome[0]

    def broadcast_tensors(
        self, files: dict[str, dict[str, Tensor]] | None
    ) -> dict[str, dict[str, Tensor]]:
        """Broadcast named tensors from rank 0; only rank 0 needs access to the disk."""
        if self.world_size == 1:
            assert files is not None
            return files
        specs = self.on_main(
            lambda: [
                (f, n, t.shape, t.dtype)
                for f, tensors in (files or {}).items()
                for n, t in tensors.items()
            ]
        )
        received: dict[str, dict[str, Tensor]] = {}
        for file, name, shape, dtype in specs:
            tensor = files[file][name] if files is not None else torch.empty(shape, dtype=dtype)
            tensor = tensor.to(self.device)
            torch.distributed.broadcast(tensor, src=0)
            received.setdefault(file, {})[name] = tensor
        return received
