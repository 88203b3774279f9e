"""A finished tokenizer run in Python.

    tokenizer = Tokenizer.load("runs/images-vqgan")
    codes = tokenizer.encode(pictures)        # (B, 3, H, W) in [-1, 1] -> (B, h, w)
    pictures = tokenizer.decode(codes)

A tokenizer's fingerprint is a hash of its weights and of how examples are prepared for it: codes made by one tokenizer
mean nothing to another, so whoever reads codes compares fingerprints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from tessera.config import encode
from tessera.data.draws import Source, Validation
from tessera.engine.modes import evaluating
from tessera.engine.task import Batch
from tessera.finished import Finished, Weights, finished
from tessera.folder import Refused


class Tokenizer:
    """Encode and decode with the model of a tokenizer run."""

    def __init__(self, made: Finished):
        self.model: Any = made.task.model
        if not (hasattr(self.model, "encode") and hasattr(self.model, "decode")):
            raise Refused(f"The run is of recipe {made.run.recipe!r}, which makes no tokenizer: it cannot encode or decode.")
        self.run, self.steps, self.weights = made.run, made.steps, made.weights
        self.task: Any = made.task
        self.device = made.meeting.device

    @classmethod
    def load(cls, run_folder: str | Path, weights: Weights = "average") -> Tokenizer:
        return cls(finished(run_folder, weights))

    @property
    def vocabulary(self) -> int:
        """How many symbols there are."""
        return self.model.vocabulary

    @property
    def transform(self) -> dict[str, Any]:
        """How an example is prepared before it is encoded."""
        return self.run.data.transform()

    @property
    def fingerprint(self) -> str:
        """A hash of the weights and of how examples are prepared."""
        digest = hashlib.sha256(json.dumps([self.transform, encode(self.run.task.model)], sort_keys=True).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def encode(self, examples: Tensor) -> Tensor:
        with evaluating(self.task):
            return self.model.encode(examples.to(self.device))

    def decode(self, codes: Tensor) -> Tensor:
        with evaluating(self.task):
            return self.model.decode(codes.to(self.device))

    def codes_of(self, source: Source, batch_size: int, workers: int = 0) -> Iterator[tuple[Batch, Tensor]]:
        """The codes of the readable examples of a source, batch by batch, in its order."""
        stream = Validation(source, seed=self.run.engine.seed, batch_size=batch_size, workers=workers)
        for batch in stream.batches(rank=0, processes=1):
            if len(batch):
                yield batch, self.encode(self.task.fidelity.target(batch.examples)).cpu()
