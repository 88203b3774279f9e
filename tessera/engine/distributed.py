"""Collective operations on Accelerate's device and rank.

With one process every method returns its argument unchanged, so callers need no special case. Only
tensors, and JSON as tensors of bytes, are sent: the port of a run has no authentication, and
unpickling what arrives there would run any code.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed
from accelerate import PartialState
from safetensors.torch import load, save
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

    def all_reduce_or(self, flags: Tensor) -> Tensor:
        """Return which flags are set on any process, without reading them."""
        if self.world_size == 1:
            return flags
        total = flags.to(torch.int32)
        torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.MAX)
        return total > 0

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

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all processes, ordered by rank."""
        if self.world_size == 1:
            return [data]
        length = self.all_reduce_max(len(data))
        # The length of the own bytes is in front of them.
        padded = torch.zeros(8 + length, dtype=torch.uint8)
        framed = len(data).to_bytes(8, "little") + data
        padded[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        padded = padded.to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, padded)
        received = [part.cpu().numpy().tobytes() for part in parts]
        return [part[8 : 8 + int.from_bytes(part[:8], "little")] for part in received]

    def all_gather_json(self, items: list[Item]) -> list[Item]:
        """Return the items of all processes, ordered by rank; they are sent as JSON."""
        if self.world_size == 1:
            return items
        return [
            item
            for one in self.all_gather_bytes(json.dumps(items).encode())
            for item in json.loads(one)
        ]

    def all_gather_tensors(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the named tensors of each process on the CPU, ordered by rank."""
        if self.world_size == 1:
            return [dict(tensors)]
        data = save({name: one.cpu().contiguous() for name, one in tensors.items()})
        return [load(one) for one in self.all_gather_bytes(data)]

    def on_main(self, function: Callable[[], Result]) -> Result:
        """Call a function on rank 0 and send its result, or its UserError, to all ranks as JSON."""
        if self.world_size == 1:
            return function()
        outcome: list[Any] = []
        if self.is_main:
            try:
                outcome = [function(), None]
            except UserError as error:
                outcome = [None, str(error)]
        outcome = json.loads(self.all_gather_bytes(json.dumps(outcome).encode())[0])
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
                (f, n, list(t.shape), str(t.dtype).removeprefix("torch."))
                for f, tensors in (files or {}).items()
                for n, t in tensors.items()
            ]
        )
        received: dict[str, dict[str, Tensor]] = {}
        for file, name, shape, dtype in specs:
            empty = torch.empty(shape, dtype=getattr(torch, dtype))
            tensor = (files[file][name] if files is not None else empty).to(self.device)
            torch.distributed.broadcast(tensor, src=0)
            received.setdefault(file, {})[name] = tensor
        return received
