"""Runs that can be put to use: a task with the weights of its newest complete checkpoint. The
folder is all they need.

A run may stand on others, its tokenizer say: copies of them lie in its folder under `parts/`, as
runs that can be used but not gone on with (`parts.py` puts them there).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tessera.data.loader import EvalLoader, ExampleDataset
from tessera.engine import checkpoint
from tessera.engine.distributed import Distributed
from tessera.engine.task import Batch, Task
from tessera.nn.quantize.features import features
from tessera.recipes import registry as recipes
from tessera.run.config import Run, encode
from tessera.run.directory import RunDirectory, UserError

Weights = Literal["ema", "raw"]
"""The moving average of the model, or the model as the optimizer left it."""


@dataclass
class TrainedRun:
    run: Run
    task: Task
    steps: int
    """How far it was trained."""
    weights: Weights
    dist: Distributed
    notices: list[str]
    """What a person should hear about how it was found."""


def load_run(path: str | Path, weights: Weights = "ema") -> TrainedRun:
    """The run in a folder, or a letter if there is none or it was never trained."""
    folder = RunDirectory(path)
    run = recipes.read_run(folder)
    notices: list[str] = []
    found = checkpoint.newest(folder.checkpoints, notices.append)
    if found is None:
        raise UserError(
            f"The run in {path} was never trained: it has no checkpoint. `tessera train` it first."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = run.build_task(parts_in(folder, run)).to(device).eval()
    file = "ema" if weights == "ema" else "model"
    checkpoint.restore_network(
        task.model,
        checkpoint.tensors_in(found / f"{file}.safetensors"),
        f"{weights} model in {found}",
    )
    return TrainedRun(run, task, int(found.name), weights, Distributed(device=device), notices)


def parts_in(folder: RunDirectory, run: Run) -> dict[str, Tokenizer]:
    """The tokenizers that a run stands on, from its own folder."""
    return {
        name: tokenizer_for(load_run(folder.parts / name), name, run) for name in run.task.parts()
    }


def tokenizer_for(made: TrainedRun, name: str, run: Run) -> Tokenizer:
    """A part as the run uses it: on its own examples. Only smaller pictures are what they were."""
    return Tokenizer(made, None if name == "smaller" else run.data)


def tokenizers_of(made: TrainedRun) -> dict[str, Tokenizer]:
    """By the folder their codes go to: a tokenizer itself, or all that a generator stands on."""
    parts = getattr(made.task, "codecs", None)
    return {".": Tokenizer(made)} if parts is None else dict(parts)


class Tokenizer:
    """A finished tokenizer, as others use it: what an example's codes are, and what codes look
    like."""

    def __init__(self, made: TrainedRun, data: Any = None):
        self.made, self.data = made, made.run.data if data is None else data
        """What it is used on: examples prepared as those it learnt from, but perhaps longer or
        shorter."""
        self.network: Any = made.task
        self.model: Any = made.task.model
        if not (hasattr(self.model, "encode") and hasattr(self.model, "decode")):
            raise UserError(
                f"The run is of recipe {made.run.recipe!r}, which makes no tokenizer: it cannot encode or decode."
            )
        self.run, self.steps, self.weights = made.run, made.steps, made.weights

    def on(self, data: Any) -> Tokenizer:
        """The same tokenizer, for these data."""
        return Tokenizer(self.made, data)

    @property
    def vocab_size(self) -> int:
        """How many symbols there are."""
        return self.model.vocab_size

    @property
    def grid(self) -> tuple[int, ...]:
        """The sides of the grid of symbols that an example becomes."""
        return self.run.task.model.grid(self.data)

    @property
    def levels(self) -> int:
        """Symbols in one cell of the grid."""
        return self.model.quantizer.levels

    @property
    def hop(self) -> int | None:
        """How many samples one cell of the grid stands for, in media that are a row of samples."""
        return getattr(self.model, "hop", None)

    @property
    def seconds(self) -> float | None:
        """How long one cell of the grid lasts, in such media."""
        return self.hop / self.run.data.rate_hz if self.hop is not None else None

    @property
    def features(self) -> Tensor | None:
        """What each symbol stands for, (V, F); of a cascade of several levels nothing is said."""
        table_VW = self.model.quantizer.table()
        return None if table_VW is None else features(table_VW.float())

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How an example is prepared before it is encoded."""
        return self.run.data.preprocessing()

    @property
    def fingerprint(self) -> str:
        """A hash of the weights and of how examples are prepared: codes of one tokenizer mean
        nothing to another."""
        digest = hashlib.sha256(
            json.dumps([self.preprocessing, encode(self.run.task.model)], sort_keys=True).encode()
        )
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def codes(self, examples: Any) -> Tensor:
        """The symbols of a batch of examples, (B, *grid), and -1 where an example does not fill the
        grid."""
        reconstruction = self.network.reconstruction
        dtype = next(self.model.parameters()).dtype
        target = reconstruction.preprocess(reconstruction.target(examples), self.data, dtype)
        codes = self.model.encode(target, **reconstruction.model_kwargs(examples))
        whole = codes.new_full((len(codes), *self.grid, *codes.shape[1 + len(self.grid) :]), -1)
        whole[tuple(slice(0, side) for side in codes.shape)] = codes
        return whole

    def codes_of(
        self, dataset: ExampleDataset, batch_size: int, num_workers: int = 0
    ) -> Iterator[tuple[Batch, Tensor]]:
        """The codes of the readable examples of a source, batch by batch, in its order."""
        device = next(self.model.parameters()).device
        stream = EvalLoader(
            dataset, seed=self.run.engine.seed, batch_size=batch_size, num_workers=num_workers
        )
        for batch in stream.batches(rank=0, processes=1):
            if len(batch):
                yield batch, self.codes(batch.to(device).examples).cpu()

    @torch.no_grad()
    def media(self, codes: Tensor) -> list[Any]:
        """What codes look like."""
        return self.network.reconstruction.media(self.model.decode(codes))
