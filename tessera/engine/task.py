"""The interface between a task and the engine.

A task holds the network that will be published, whatever else is needed to train it, and its
losses. Each of its updates is one optimizer's part of a training step: which network is updated, by
which loss. This file imports only torch, so that a task can be written and tested without the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)

import torch
from torch import Tensor, nn

from tessera.engine.device import move_tensors
from tessera.engine.optim.config import OptimizerConfig


class Examples(Protocol):
    """Collated examples of one modality."""

    captions: list[str]
    """One caption for each example; empty strings where captions are not used or missing."""

    def to(self, device: torch.device, /) -> Self: ...


DataSettings: TypeAlias = Any
"""The data configuration of a run. Each part of a task annotates that of its own modality."""
Inputs: TypeAlias = Any
"""What a task prepares for its losses on the CPU; each task annotates its own type."""
AnyExamples = TypeVar("AnyExamples", bound=Examples)
Network = TypeVar("Network", bound=nn.Module)


@dataclass
class TensorExamples:
    """Examples that are tensors, alone or in tuples, lists and dictionaries."""

    data: Any
    captions: list[str] = field(default_factory=list)

    def to(self, device: torch.device, /) -> TensorExamples:
        return TensorExamples(move_tensors(self.data, device), self.captions)


@dataclass
class Batch(Generic[AnyExamples]):
    """A micro-batch of examples with their names and seeds."""

    examples: AnyExamples
    """The result of the dataset's `collate`."""
    names: list[str]
    """The name of each example in its dataset."""
    seeds: list[int]
    """The seed of each example; everything random about an example is drawn from it."""
    rejected: list[tuple[str, str]] = field(default_factory=list)
    """Examples that could not be read, as pairs of name and reason."""
    scratch: dict[str, Any] = field(default_factory=dict)
    """Detached tensors that one update passes to the next update of the same step."""
    inputs: Inputs = None
    """The result of the task's `prepare_inputs`; None before it was called."""

    def __len__(self) -> int:
        return len(self.names)

    def to(self, device: torch.device) -> Batch[AnyExamples]:
        inputs = move_tensors(self.inputs, device)
        return Batch(self.examples.to(device), self.names, self.seeds, self.rejected, inputs=inputs)

    def generators(self) -> list[torch.Generator]:
        """Return one generator per example, independent of batch size and number of processes."""
        return [torch.Generator().manual_seed(seed) for seed in self.seeds]


@dataclass
class Loss:
    terms: dict[str, Tensor]
    """Weighted loss terms; their sum is minimised."""
    metrics: dict[str, Tensor | Callable[[], Tensor]] = field(default_factory=dict)
    """Logged values that are not minimised. Functions are called only at steps that are logged."""

    def total(self) -> Tensor:
        first, *others = (term.float() for term in self.terms.values())
        return reduce(add, others, first)

    @torch.no_grad()
    def detached(self) -> dict[str, Tensor]:
        """Return the total as `loss`, each term and each metric, detached and in fp32."""
        metrics = {
            name: metric() if callable(metric) else metric for name, metric in self.metrics.items()
        }
        values = {"loss": self.total(), **self.terms, **metrics}
        return {name: value.detach().float() for name, value in values.items()}


@runtime_checkable
class Source(Protocol):
    """Examples by index, each of which can be loaded again from its index and a generator."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return the name of an example, by which it is held out or not."""

    def item(self, index: int, rng: Any) -> object:
        """Return one example; everything random about it is drawn from `rng`."""

    def collate(self, examples: list[Any]) -> Examples:
        """Make a batch of examples: an object with `to(device)`."""


class ProcessGroup(Protocol):
    """The collective operations that a loss may use; with one process each is the identity."""

    rank: int
    world_size: int

    def all_reduce_sum(self, tensor: Tensor) -> Tensor: ...
    def all_gather_rows(self, tensor: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer's part of a training step."""

    name: str
    """The name in logs and checkpoints."""
    trains: nn.Module
    """The network whose parameters are updated: all that require gradients when the engine is
    built, and no others."""
    loss: Callable[[Batch, int], Loss]
    """The loss of a micro-batch at a step."""
    optimizer: OptimizerConfig
    start_step: int = 0
    """The first step at which this update runs."""
    prepare: Callable[[Sequence[Batch], int, ProcessGroup], None] | None = None
    """Called with all micro-batches of a step, for losses that are not a mean over examples."""
    find_unused: bool = False
    """Whether parameters may get no gradient in some steps. With several processes, DDP then
    searches for them at every step, which costs time; with one process it changes nothing."""
    also_train: tuple[nn.Module, ...] = ()
    """Modules that are in train mode during this update beside those of `trains`, such as the
    module that contains `trains`."""


class Objective(nn.Module):
    """The module that DDP wraps: the loss instead of the network.

    A task may therefore call any method of any network inside its loss, and no key of a state dict
    gets a prefix. Only `update.trains` is registered; the loss is a bound method of the task.
    """

    def __init__(self, update: Update):
        super().__init__()
        self.trains = update.trains
        self._loss = update.loss

    def compile_loss(self, backend: str) -> None:
        """Compile the loss. No module is wrapped, so that no name of a state dict changes."""
        self._loss = torch.compile(self._loss, backend=backend)

    @torch.no_grad()
    def run_hooks(self) -> None:
        """Call the module without its loss, for what its hooks do when it is called first."""
        loss, self._loss = self._loss, lambda batch, step: Loss({})
        self(None, 0)
        self._loss = loss

    def forward(self, batch: Batch, step: int) -> Loss:
        loss = self._loss(batch, step)
        # FSDP registers hooks on the tensors of an output, which those of a view may lose.
        loss.terms = {name: t.clone() if t._is_view() else t for name, t in loss.terms.items()}
        loss.metrics = {
            name: one.detach() if isinstance(one, Tensor) else one
            for name, one in loss.metrics.items()
        }
        return loss


class Frozen(nn.Module, Generic[Network]):
    """A network that is used but not trained: a perceptual network, a text encoder, a tokenizer.

    It follows `.to(device)`, passes gradients to its input and stays in eval mode. It is not
    registered, so it is in no optimizer, DDP bucket, EMA or checkpoint.
    """

    def __init__(self, network: Network):
        super().__init__()
        # nn.Module does not register what is inside a tuple.
        self._unregistered = (network.eval().requires_grad_(False),)

    @property
    def network(self) -> Network:
        return self._unregistered[0]

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self.network(*args, **kwargs)

    def train(self, mode: bool = True) -> Frozen:
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Frozen:
        self.network._apply(fn, recurse)
        return self


class Saveable(Protocol):
    """An object that can be saved as a file."""

    def save(self, path: str | Path) -> Path: ...


class Media(Saveable, Protocol):
    """An image, a video, an audio recording or a mesh; several make a contact sheet."""

    @classmethod
    def sheet(cls, items: Sequence[Self], labels: Sequence[str] = ()) -> Saveable: ...


@dataclass(frozen=True, kw_only=True)
class TrackedMedia:
    """A medium as trackers such as TensorBoard receive it."""

    kind: Literal["image", "video", "audio", "mesh"]
    array: Tensor
    """Pixels (H, W, C) or frames (T, H, W, C) of uint8, samples (C, N), or vertices (V, 3)."""
    content: bytes
    """The same as a file: PNG, GIF, WAV or OBJ."""
    suffix: str
    """The suffix of that file."""
    rate_hz: float = 0.0
    """Frames or samples per second."""
    faces: Tensor | None = None
    """Triangles (F, 3) of a mesh."""


@runtime_checkable
class Trackable(Protocol):
    """A medium that trackers can show."""

    def to_tracker(self) -> TrackedMedia: ...


@dataclass(frozen=True)
class Rows:
    """Evaluation results that are concatenated instead of summed, for metrics such as ranks.

    They are ordered as the held-out set, whatever the number of processes.
    """

    values: Tensor
    """The rows, (number of rows, ...)."""


@dataclass(frozen=True, kw_only=True)
class BestMetric:
    """The validation metric by which the best checkpoint is chosen."""

    name: str
    higher_is_better: bool = True


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A range of a metric in which a run needs attention, with a hint about what to do."""

    name: str
    metric: str
    """The key in metrics.jsonl."""
    below: float | None = None
    above: float | None = None
    patience: int = 3
    """The number of consecutive records that must be out of range."""
    after: int = 0
    """The first step at which the alarm is active."""
    hint: str


class Task(nn.Module):
    """Base class of tasks. A subclass defines `model`, `updates`, `best_metric`, `eval_step` and
    `compute_metrics`, and `sample` if there is something to show."""

    model: Any
    """The network that is published."""
    updates: tuple[Update, ...]
    best_metric: BestMetric
    alarms: tuple[Alarm, ...] = ()
    num_lengths: int | None = None
    """The number of lengths to which batches are padded, which the engine sets for losses that are
    compiled; None pads to the longest example."""

    def pad_length(self, longest: int, maximum: int) -> int:
        """Return the length to which a batch is padded whose longest example has `longest`
        positions, of at most `maximum`. A loss is compiled again for every other length."""
        if self.num_lengths is None or longest > maximum:
            return longest
        lengths = [-(-maximum * k // self.num_lengths) for k in range(1, self.num_lengths + 1)]
        return next(length for length in lengths if length >= longest)

    def pad_examples(self, examples: Examples) -> Examples:
        """Pad examples on the CPU to `pad_length`, if they were padded to the longest of them."""
        return examples

    def prepare_text(self, captions: Sequence[str], cache_dir: Path) -> None:
        """Process all training captions before the first step."""

    def prepare_inputs(self, batch: Batch) -> Inputs:
        """Return what the losses need beside the examples, from a batch on the CPU: random numbers
        from the generators of the examples, tokenized captions, and indices.

        The result, tensors in nested tuples, lists, dictionaries and dataclasses, is copied to the
        device with the batch as `batch.inputs`, so that no loss waits for a copy, and nothing that
        determines a shape has to be read from the device.
        """
        return None

    def get_inputs(self, batch: Batch) -> Inputs:
        """Return `batch.inputs`; a batch that does not come from the engine is prepared now."""
        if batch.inputs is not None:
            return batch.inputs
        return move_tensors(self.prepare_inputs(batch), next(self.model.parameters()).device)

    def eval_step(self, batch: Batch) -> Mapping[str, Tensor | Rows]:
        """Return sums over some held-out examples (never means), or rows to be collected."""
        raise NotImplementedError

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Compute metrics from the sums and rows of the whole held-out set."""
        raise NotImplementedError

    def compute_histograms(self, totals: dict[str, Tensor]) -> dict[str, list[float]]:
        """Compute what a validation logs beside its metrics and is no single number."""
        return {}

    def sample(self, batch: Batch) -> Sequence[Media]:
        """Return one medium for each example of a batch; a task may have no samples."""
        raise NotImplementedError

    @property
    def has_samples(self) -> bool:
        """Whether the task defines `sample`."""
        return type(self).sample is not Task.sample


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Base class of task configurations."""

    entry_point: ClassVar[str] = "Tokenizer"
    """The class that opens such a run in Python."""
    min_batch_size: ClassVar[int] = 1
    """The smallest batch size that the loss allows."""

    @property
    def load_best(self) -> bool:
        """Whether a trained run is loaded at its best checkpoint, by the task's `best_metric`,
        instead of the newest one: for objectives that overfit small datasets."""
        return False

    @property
    def uses_captions(self) -> bool:
        """Whether captions are needed; where they are not, no caption file is opened."""
        return False

    def validate_data(self, data: DataSettings) -> None:
        """Raise ValueError if the task cannot be trained on these data."""

    def validate_dependency(self, name: str, data: DataSettings) -> None:
        """Raise ValueError if a dependency that was trained on these data cannot be used."""

    def fit_data(self, data: DataSettings) -> Self:
        """Return the configuration for these data, with their channels for example."""
        return self

    def dependencies(self) -> dict[str, str]:
        """Return the runs that this task needs, as names and paths."""
        return {}

    def companions(self) -> dict[str, str]:
        """Return trained runs that are copied into the run directory and that only the use of the
        run needs, as names and paths."""
        return {}

    def describe_missing_captions(self, missing: int, total: int) -> str:
        """Return what becomes of examples without a caption, to be printed; "" prints nothing."""
        return ""

    def notice(self, data: DataSettings) -> str:
        """Return remarks about training on these data, which are printed before."""
        return ""

    def for_inference(self) -> Self:
        """Return the configuration without networks that only training needs."""
        return self

    def build(self, **dependencies: Any) -> Task:
        raise NotImplementedError


def prepare_batch(task: Task, batch: Batch, device: torch.device) -> Batch:
    """Prepare the task's inputs on the CPU and copy the batch with them to a device."""
    if task.num_lengths is not None:
        batch = replace(batch, examples=task.pad_examples(batch.examples))
    return copy_batch(replace(batch, inputs=task.prepare_inputs(batch), scratch={}), device)


def copy_batch(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch of a loader to a device; on the CPU, where loaders make it, it stays."""
    return batch if device.type == "cpu" else batch.to(device)


def check_ownership(task: Task) -> None:
    """Raise ValueError unless every trainable parameter belongs to exactly one update."""
    names = [update.name for update in task.updates]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"Two updates are named {duplicates[0]!r}: give each its own name.")
    registered = {id(parameter) for parameter in task.parameters()}
    owners: dict[int, list[str]] = {}
    problems = []
    for update in task.updates:
        if not any(parameter.requires_grad for parameter in update.trains.parameters()):
            problems.append(f"{update.name!r} trains nothing, since all its parameters are frozen")
        for name, parameter in update.trains.named_parameters():
            owners.setdefault(id(parameter), []).append(update.name)
            if id(parameter) not in registered:
                problems.append(
                    f"{name}, which {update.name!r} trains, is not registered in the task and "
                    "would not be saved"
                )
    for name, parameter in task.named_parameters():
        owned_by = owners.get(id(parameter), [])
        if not owned_by and parameter.requires_grad:
            problems.append(f"{name} belongs to no update and would never be trained")
        if len(owned_by) > 1:
            problems.append(f"{name} belongs to {' and '.join(owned_by)}, which both train it")
    if problems:
        raise ValueError(
            "Every trainable parameter must belong to exactly one update of its task:\n  "
            + "\n  ".join(problems[:10])
            + (f"\n  and {len(problems) - 10} more" if len(problems) > 10 else "")
            + "\nPass the network to an update's `trains`, freeze it with requires_grad_(False), "
            "or wrap it in Frozen(...)."
        )
