"""What a run needs before it is started: parameters, memory and FLOPs of a step.

Networks and two synthetic examples are on torch's meta device, which has shapes and no data, so
the largest presets are planned in seconds on any computer. FLOPs are counted by torch during a
forward and a backward pass of each update; activations are the tensors that autograd keeps between
them, in fp32; with --checkpoint-activations, one block's come on top at a time. So do buffers of
the allocator and of libraries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tessera.api.tokenizer import Tokenizer
from tessera.data.dataset import ExampleDataset
from tessera.data.tokens import TokenDataset
from tessera.engine.distributed import Distributed
from tessera.engine.modes import checkpoint_activations
from tessera.engine.task import Batch, Task, Update, prepare_batch
from tessera.objectives.generation import TokenizedGeneratorConfig, TokenizerProtocol
from tessera.recipes.registry import RECIPES, default_dependency, get_recipe, read_run, recipe_name
from tessera.run.config import Run
from tessera.run.directory import Json, RunDirectory
from tessera.run.errors import UserError
from tessera.run.load import TrainedRun

META = torch.device("meta")
NUM_EXAMPLES = 2
LATE_STEP = 10**9
"""A step at which every update runs."""
FLOAT_BYTES = 4
STATE_BYTES = {"adamw": 8, "adam": 8, "lion": 4, "muon": 8}
"""Bytes of optimizer state for each parameter; of the matrices that Muon trains, 4."""


@dataclass(frozen=True)
class UpdatePlan:
    """The costs of one optimizer's part of a step; activations and FLOPs are of one example."""

    name: str
    network: str
    parameters: int
    optimizer: str
    optimizer_bytes: int
    activation_bytes: float
    flops: float


@dataclass(frozen=True)
class Plan:
    updates: list[UpdatePlan]
    ema_bytes: int
    frozen_bytes: int
    """The weights of networks that are used and not trained, such as tokenizers."""
    batch_size: int
    micro_batch_size: int
    """The examples of one micro-batch on one process."""
    steps: int

    @property
    def parameters(self) -> int:
        return sum(update.parameters for update in self.updates)

    @property
    def state_bytes(self) -> int:
        """The memory of weights, gradients, optimizer states and EMA, on every process."""
        trained = sum(
            2 * FLOAT_BYTES * update.parameters + update.optimizer_bytes for update in self.updates
        )
        return trained + self.ema_bytes + self.frozen_bytes

    @property
    def activation_bytes(self) -> float:
        """The activations of a micro-batch; updates run one after the other."""
        return self.micro_batch_size * max(update.activation_bytes for update in self.updates)

    @property
    def flops_per_step(self) -> float:
        return self.batch_size * sum(update.flops for update in self.updates)

    def table(self) -> Table:
        table = Table(title="Plan of a step, for one example", title_justify="left")
        headings = "update,network,parameters,optimizer,optimizer state,activations (fp32),GFLOPs"
        for heading in headings.split(","):
            table.add_column(heading)
        for update in self.updates:
            table.add_row(
                update.name,
                update.network,
                f"{update.parameters:,}",
                update.optimizer,
                format_bytes(update.optimizer_bytes),
                format_bytes(update.activation_bytes),
                f"{update.flops / 1e9:,.1f}",
            )
        return table

    def lines(self) -> list[str]:
        return [
            f"weights, gradients, optimizer and EMA: {format_bytes(self.state_bytes)} on each "
            f"process, of which {format_bytes(self.frozen_bytes)} are not trained",
            f"activations of a micro-batch of {self.micro_batch_size}: "
            f"{format_bytes(self.activation_bytes)} in fp32, about half in bf16",
            f"a step of {self.batch_size} examples: {self.flops_per_step / 1e12:,.2f} TFLOPs; "
            f"{self.steps:,} steps: {self.steps * self.flops_per_step / 1e18:,.3f} EFLOPs",
        ]


def format_bytes(number: float) -> str:
    return f"{number / 1e9:,.2f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"


def plan_run(run: Run, preset: str = "small", world_size: int = 1) -> Plan:
    """Plan a run; tokenizers that do not exist yet are those of the preset."""
    tokenizers = {name: plan_tokenizer(run, name, preset) for name in run.task.dependencies()}
    with META:
        task = run.build_task(tokenizers)
    task = task.to(META)
    if run.engine.checkpoint_activations:
        for update in task.updates:
            checkpoint_activations(update.trains)
    try:
        batch = prepare_batch(task, load_batch(run, tokenizers), META)
        updates = [plan_update(update, batch) for update in task.updates]
    except NotImplementedError:  # the CTC loss, for example, reads its labels
        raise UserError(
            f"A loss of {run.recipe} needs data, so that --plan-only cannot compute its memory: "
            "leave --plan-only out, and --dry-run measures two steps."
        ) from None
    engine = run.engine
    return Plan(
        updates=updates,
        ema_bytes=count_bytes(task.model.state_dict()),
        frozen_bytes=count_frozen(task, tokenizers),
        batch_size=engine.batch_size,
        micro_batch_size=-(-engine.batch_size // (engine.grad_accum_steps * world_size)),
        steps=engine.steps,
    )


def plan_tokenizer(run: Run, name: str, preset: str) -> Tokenizer:
    """Return a tokenizer with arbitrary weights: that of a run, or the recipe's own."""
    directory = RunDirectory(run.task.dependencies()[name])
    if directory.config.is_file():
        found = read_run(directory)
    else:
        found = default_run(run, name, preset)
    task = found.build_task({}).eval()
    trained = TrainedRun(directory, found, task, 0, "ema", Distributed(device=torch.device("cpu")))
    return Tokenizer(trained, found.data if name == "low_res_tokenizer" else run.data)


def default_run(run: Run, name: str, preset: str) -> Run:
    """Return the run of the recipe that trains a dependency."""
    default = default_dependency(run.recipe, name)
    recipes = [one for one in map(recipe_name, RECIPES) if default.startswith(one)]
    found = get_recipe(max(recipes, key=len))(preset)
    if default in recipes:
        return found
    changes: Json = {"size": run.data.preprocessing()["size"] // 2}  # type: ignore[operator]
    return dataclasses.replace(found, data=dataclasses.replace(found.data, **changes))


def load_batch(run: Run, tokenizers: Mapping[str, TokenizerProtocol]) -> Batch:
    """Return a few synthetic examples, tokenized if the run trains on stored tokens."""
    count = max(NUM_EXAMPLES, run.task.min_batch_size)
    dataset: ExampleDataset = dataclasses.replace(run.data, path=None).synthetic_dataset()
    if isinstance(run.task, TokenizedGeneratorConfig) and run.task.tokens != "live":
        captions = [dataset.caption(index) for index in range(count)]
        codes = {name: draw_codes(one, count) for name, one in tokenizers.items()}
        dataset = TokenDataset([str(index) for index in range(count)], codes, captions)
    examples = [dataset.item(index, np.random.default_rng(index)) for index in range(count)]
    names = [dataset.name(index) for index in range(count)]
    return Batch(
        examples=dataset.collate(examples), names=names, seeds=list(range(count)), rejected=[]
    )


def draw_codes(tokenizer: TokenizerProtocol, count: int) -> Tensor:
    """Return codes (count, *grid) of full length."""
    levels = (tokenizer.num_quantizers,) if tokenizer.num_quantizers > 1 else ()
    shape = (count, *tokenizer.grid, *levels)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(tokenizer.vocab_size, shape, generator=generator)


class FlopCounter(TorchDispatchMode):
    """Sum the FLOPs of operators by torch's own formulas.

    `FlopCounterMode` also tracks modules, by hooks that fail in a gradient penalty (torch 2.13).
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def plan_update(update: Update, batch: Batch) -> UpdatePlan:
    """Count what a forward and a backward pass cost."""
    trained = [one for one in update.trains.parameters() if one.requires_grad]
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor  # held, so that no storage is freed
        return tensor

    was_training = update.trains.training
    update.trains.train()
    counter = FlopCounter()
    with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if update.prepare is not None:
            update.prepare([batch], LATE_STEP, Distributed(device=META))
        update.loss(batch, LATE_STEP).total().backward()
    update.trains.train(was_training)
    for parameter in trained:
        parameter.grad = None
    own = {parameter.untyped_storage()._cdata for parameter in trained}
    activations = sum(
        one.untyped_storage().nbytes() for key, one in saved.items() if key not in own
    )
    return UpdatePlan(
        name=update.name,
        network=type(update.trains).__name__,
        parameters=sum(one.numel() for one in trained),
        optimizer=update.optimizer.name,
        optimizer_bytes=sum(count_state(update.optimizer.name, one) for one in trained),
        activation_bytes=activations / len(batch),
        flops=counter.total / len(batch),
    )


def count_state(optimizer: str, parameter: Tensor) -> int:
    uses_muon = optimizer == "muon" and getattr(parameter, "use_muon", False)
    return parameter.numel() * (FLOAT_BYTES if uses_muon else STATE_BYTES[optimizer])


def count_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def count_frozen(task: Task, tokenizers: Mapping[str, Tokenizer]) -> int:
    """Return the bytes of the networks that are in memory and not trained."""
    if isinstance(task.config, TokenizedGeneratorConfig) and task.config.tokens != "live":
        return sum(count_bytes(one.model.state_dict()) for one in tokenizers.values())
    return 0
