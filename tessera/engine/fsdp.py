"""Sharded training: each process holds a part of every parameter, of its moments and of its EMA.

This is FSDP2 (`torch.distributed.fsdp.fully_shard`; Zhao 2023, arXiv 2304.11277) around each block
of a network (`find_blocks`) and around the objective of an update, as with DDP. The parameters of
a block are gathered when it is called, freed, gathered again in its backward pass, and their
gradients are reduced to the shards there. The other parameters are gathered for the whole update,
so that a loss may call any method of a network but those of its blocks.

Optimizers and the EMA work on the local shards, which are plain tensors. Checkpoints are gathered
and have the format of unsharded ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
import torch.distributed
from torch import Tensor, nn

from tessera.engine.modes import find_blocks
from tessera.engine.task import Loss, Objective
from tessera.run.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from tessera.engine.distributed import Distributed


def is_sharded(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Return whether this is a DTensor, without importing the class, which takes half a second."""
    return hasattr(tensor, "to_local")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the shard of this process, without a copy; a tensor that is not sharded as it is."""
    if not is_sharded(tensor):
        return tensor
    return cast("DTensor", tensor.detach()).to_local()


def gather_tensor(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the whole tensor on every process.

    `like` is a sharded parameter of which `tensor` is a local shard, such as one of its moments.
    """
    if is_sharded(like) and not is_sharded(tensor) and tensor.ndim:
        from torch.distributed.tensor import DTensor

        spec = like.device_mesh, like.placements
        tensor = DTensor.from_local(tensor, *spec, shape=like.shape, stride=like.stride())
    if not is_sharded(tensor):
        return tensor
    return cast("DTensor", tensor.detach()).full_tensor()


def take_shard(whole: Tensor, like: Tensor) -> Tensor:
    """Return the shard of this process of a whole tensor that every process has."""
    if not is_sharded(like) or not whole.ndim:
        return whole
    from torch.distributed.tensor import distribute_tensor

    sharded = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return sharded.to_local()


def copy_to_shard(tensor: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor that every process has into the shard of this process."""
    local_tensor(tensor).copy_(take_shard(whole, tensor))


@cache
def register_loss() -> None:
    """Let FSDP find the tensors of a `Loss`, before whose backward it gathers parameters."""
    from torch.utils import _pytree as pytree

    pytree.register_pytree_node(
        Loss,
        lambda loss: (list(loss.terms.values()), (list(loss.terms), loss.metrics)),
        lambda terms, context: Loss(dict(zip(context[0], terms, strict=True)), context[1]),
    )


@dataclass
class LocalShard:
    """Attached to a local parameter as `shard`, for optimizers that need whole matrices."""

    parameter: nn.Parameter

    def gather(self, local: Tensor) -> Tensor:
        return gather_tensor(local, self.parameter)

    def take(self, whole: Tensor) -> Tensor:
        return take_shard(whole, self.parameter)


class ShardedObjective:
    """An objective whose network is sharded over all processes, block by block."""

    def __init__(self, objective: Objective, network: nn.Module, dist: Distributed):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not hasattr(FSDPModule, "set_reshard_after_forward"):
            raise UserError(f"--shard needs torch 2.8 or newer, found {torch.__version__}.")
        register_loss()
        trainable = {name: one.requires_grad for name, one in network.named_parameters()}
        marks = {name: vars(one).copy() for name, one in network.named_parameters()}
        for parameter in network.parameters():  # FSDP shards no channels-last weights
            parameter.data = parameter.data.contiguous()
        for tensor in (*network.parameters(), *network.buffers()):  # as DDP does
            torch.distributed.broadcast(tensor.detach(), src=0)
        mesh = init_device_mesh(dist.device.type, (dist.world_size,))
        self.blocks = [
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
            for block in find_blocks(network)
        ]
        self.root: FSDPModule = fully_shard(objective, mesh=mesh, reshard_after_forward=False)
        objective.run_hooks()  # FSDP finds the blocks of a module when it is called first
        self.root.reshard()
        self.parameters = dict(network.named_parameters())
        self.trainable = [name for name, is_trained in trainable.items() if is_trained]
        self.local = {name: self.build_local(name, marks[name]) for name in self.trainable}

    def build_local(self, name: str, marks: Mapping[str, object]) -> nn.Parameter:
        local = nn.Parameter(local_tensor(self.parameters[name]))
        vars(local).update(marks)
        local.shard = LocalShard(self.parameters[name])  # type: ignore[attr-defined]
        return local

    @contextmanager
    def in_update(self, *, is_trained: bool) -> Iterator[None]:
        """Gather the parameters that are in no block; all have gradients only if they are trained.

        Those of the blocks are gathered when these are called.
        """
        for name in self.trainable:  # gathered parameters get the flags of their shards
            self.parameters[name].requires_grad_(is_trained)
        self.root.unshard()
        # The root stays gathered for the next micro-batch, also if only its blocks have gradients.
        self.root.set_reshard_after_backward(is_trained, recurse=False)
        try:
            yield
        finally:
            self.root.reshard()
            for name in self.trainable:
                self.parameters[name].requires_grad_(True)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather all parameters, for evaluation, which may call any method of a block."""
        self.root.unshard()
        for block in self.blocks:
            block.set_reshard_after_forward(False, recurse=False)
            block.unshard()
        try:
            yield
        finally:
            for block in self.blocks:
                block.set_reshard_after_forward(True, recurse=False)
                block.reshard()
            self.root.reshard()

    def move_grads(self) -> None:
        """Move the reduced gradients to the local parameters, which the optimizer updates."""
        for name, local in self.local.items():
            grad = self.parameters[name].grad
            local.grad = None if grad is None else local_tensor(grad)
            self.parameters[name].grad = None

    def gather_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather optimizer state, named `exp_avg/encoder.conv.weight`."""
        return {
            path: gather_tensor(one, self.parameters[path.split("/", 1)[1]])
            for path, one in state.items()
        }

    def take_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            path: take_shard(one, self.parameters[path.split("/", 1)[1]])
            for path, one in state.items()
        }


def global_norm(local_norm: Tensor) -> Tensor:
    """Return the norm of sharded gradients from the norm of this process's shards."""
    squared = local_norm.square()
    torch.distributed.all_reduce(squared)
    return squared.sqrt()


def gather_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with whole tensors, on every process."""
    return {name: gather_tensor(one) for name, one in tensors.items()}


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the memory of tensors of this process."""
    return sum(local_tensor(one).nbytes for one in tensors)
