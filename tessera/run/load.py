"""Runs that can be put to use: a task with the weights of its newest complete checkpoint. The folder is all they need.

A run may stand on others, its tokenizer say: copies of them lie in its folder under `parts/`, as runs that can be used but not
gone on with (`parts.py` puts them there).
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

from tessera.data.loader import Source, Validation
from tessera.engine import checkpoint
from tessera.engine.distributed import Processes
from tessera.engine.task import Batch, Task
from tessera.nn.quantize.features import features
from tessera.recipes import registry as recipes
from tessera.run.config import Run, encode
from tessera.run.directory import Refused, RunFolder

Weights = Literal["average", "live"]
"""The moving average of the model, or the model as the optimizer left it."""


@dataclass
class Finished:
    run: Run
    task: Task
    steps: int
    """How far it was trained."""
    weights: Weights
    meeting: Processes
    notices: list[str]
    """What a person should hear about how it was found."""


def finished(path: str | Path, weights: Weights = "average") -> Finished:
    """The run in a folder, or a letter if there is none or it was never trained."""
    folder = RunFolder(path)
    run = recipes.stored(folder)
    notices: list[str] = []
    found = checkpoint.newest(folder.checkpoints, notices.append)
    if found is None:
        raise Refused(f"The run in {path} was never trained: it has no checkpoint. `tessera train` it first.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = run.build_task(parts_in(folder, run)).to(device).eval()
    file = "average" if weights == "average" else "model"
    checkpoint.restore_network(task.model, checkpoint.tensors_in(found / f"{file}.safetensors"), f"{weights} model in {found}")
    return Finished(run, task, int(found.name), weights, Processes(device=device), notices)


def parts_in(folder: RunFolder, run: Run) -> dict[str, Codec]:
    """The tokenizers that a run stands on, from its own folder."""
    return {name: codec_of(finished(folder.parts / name), name, run) for name in run.task.parts()}


def codec_of(made: Finished, name: str, run: Run) -> Codec:
    """A part as the run uses it: on its own examples. Only smaller pictures are what they were."""
    return Codec(made, None if name == "smaller" else run.data)


def codecs_of(made: Finished) -> dict[str, Codec]:
    """By the folder their codes go to: a tokenizer itself, or all that a generator stands on."""
    parts = getattr(made.task, "codecs", None)
    return {".": Codec(made)} if parts is None else dict(parts)


class Codec:
    """A finished tokenizer, as others use it: what an example's codes are, and what codes look like."""

    def __init__(self, made: Finished, data: Any = None):
        self.made, self.data = made, made.run.data if data is None else data
        """What it is used on: examples prepared as those it learnt from, but perhaps longer or shorter."""
        self.network: Any = made.task
        self.model: Any = made.task.model
        if not (hasattr(self.model, "encode") and hasattr(self.model, "decode")):
            raise Refused(f"The run is of recipe {made.run.recipe!r}, which makes no tokenizer: it cannot encode or decode.")
        self.run, self.steps, self.weights = made.run, made.steps, made.weights

    def on(self, data: Any) -> Codec:
        """The same tokenizer, for these data."""
        return Codec(self.made, data)

    @property
    def vocabulary(self) -> int:
        """How many symbols there are."""
        return self.model.vocabulary

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
    def transform(self) -> dict[str, Any]:
        """How an example is prepared before it is encoded."""
        return self.run.data.transform()

    @property
    def fingerprint(self) -> str:
        """A hash of the weights and of how examples are prepared: codes of one tokenizer mean nothing to another."""
        digest = hashlib.sha256(json.dumps([self.transform, encode(self.run.task.model)], sort_keys=True).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def codes(self, examples: Any) -> Tensor:
        """The symbols of a batch of examples, (B, *grid), and -1 where an example does not fill the grid."""
        fidelity = self.network.fidelity
        dtype = next(self.model.parameters()).dtype
        target = fidelity.fitted(fidelity.target(examples), self.data, dtype)
        codes = self.model.encode(target, **fidelity.alongside(examples))
        whole = codes.new_full((len(codes), *self.grid, *codes.shape[1 + len(self.grid) :]), -1)
        whole[tuple(slice(0, side) for side in codes.shape)] = codes
        return whole

    def codes_of(self, source: Source, batch_size: int, workers: int = 0) -> Iterator[tuple[Batch, Tensor]]:
        """The codes of the readable examples of a source, batch by batch, in its order."""
        device = next(self.model.parameters()).device
        stream = Validation(source, seed=self.run.engine.seed, batch_size=batch_size, workers=workers)
        for batch in stream.batches(rank=0, processes=1):
            if len(batch):
                yield batch, self.codes(batch.to(device).examples).cpu()

    @torch.no_grad()
    def media(self, codes: Tensor) -> list[Any]:
        """What codes look like."""
        return self.network.fidelity.media(self.model.decode(codes))
