"""How the processes of a run come together, on Accelerate's idea of device and rank.

With one process every method gives back what it was given, so nothing above needs a case for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tessera.run.directory import UserError

Answer = TypeVar("Answer")


class Distributed:
    def __init__(self, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu"):
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)

    @classmethod
    def from_environment(cls) -> Distributed:
        """Joins the processes that a launcher started, or stands alone."""
        # Without `cpu` Accelerate takes each of several CPU processes for a run of its own.
        state = PartialState(cpu=not torch.accelerator.is_available())
        return cls(state.process_index, state.num_processes, state.device)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def wrapped(self, objective: nn.Module) -> nn.Module:
        """An objective whose gradients are averaged over the processes.

        Buffers are left alone: what moves by statistics is kept equal by `commit`, and sending them
        at each forward costs time. torch renamed that option; both names are in the range of
        versions we allow.
        """
        if self.world_size == 1:
            return objective
        names = inspect.signature(DistributedDataParallel).parameters
        option = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        leave_buffers: dict[str, Any] = {option: False}
        devices = None if self.device.type == "cpu" else [self.device]
        return DistributedDataParallel(
            objective, device_ids=devices, gradient_as_bucket_view=True, **leave_buffers
        )

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, on each of them."""
        if self.world_size == 1:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of all processes in the order of the global batch, which was dealt out like
        cards."""
        if self.world_size == 1:
            return tensor
        hands = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(hands, tensor.contiguous())
        return torch.stack(hands, dim=1).flatten(0, 1)

    def any(self, flag: bool) -> bool:
        """Whether it is so on any process; all processes hear the same answer."""
        return bool(self.largest(int(flag)))

    def largest(self, number: int) -> int:
        if self.world_size == 1:
            return number
        tensor = torch.tensor(number, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor.item())

    def lists(self, items: list[Any]) -> list[Any]:
        """The items of all processes, one process after the other."""
        return items if self.world_size == 1 else gather_object(items)

    def on_main(self, act: Callable[[], Answer]) -> Answer:
        """Only the main process acts, since only its disk counts; its answer, or its refusal, is
        everybody's."""
        if self.world_size == 1:
            return act()
        heard: list[Any] = [None, None]
        if self.main:
            try:
                heard = [act(), None]
            except UserError as refused:
                heard = [None, str(refused)]
        dist.broadcast_object_list(heard, src=0, device=self.device)
        if heard[1] is not None:
            raise UserError(heard[1])
        return heard[0]

    def handed_out(
        self, files: dict[str, dict[str, Tensor]] | None
    ) -> dict[str, dict[str, Tensor]]:
        """The main process's tensors, on every process: nobody else needs to see its disk."""
        if self.world_size == 1:
            assert files is not None
            return files
        described = self.on_main(
            lambda: [
                (f, n, t.shape, t.dtype)
                for f, tensors in (files or {}).items()
                for n, t in tensors.items()
            ]
        )
        received: dict[str, dict[str, Tensor]] = {}
        for file, name, shape, dtype in described:
            tensor = files[file][name] if files is not None else torch.empty(shape, dtype=dtype)
            tensor = tensor.to(self.device)
            dist.broadcast(tensor, src=0)
            received.setdefault(file, {})[name] = tensor
        return received
