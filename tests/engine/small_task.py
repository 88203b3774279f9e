"""A task small enough to train a real engine in tests, at about a millisecond per step.

A network of two layers is trained to add four numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tessera.data.dataset import ExampleDataset
from tessera.data.errors import UnreadableFile
from tessera.data.loader import EvalLoader, TrainLoader
from tessera.engine.config import EngineConfig
from tessera.engine.engine import Engine
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, BestMetric, Loss, Task, Update
from tessera.run.directory import RunDirectory


class NumberDataset(ExampleDataset):
    """Rows of four numbers; the rows in `unreadable` cannot be loaded."""

    def __init__(self, count: int = 32, unreadable: Sequence[int] = ()):
        self.rows = np.random.default_rng(1).standard_normal((count, 4)).astype(np.float32)
        self.unreadable = unreadable

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        return f"row {index}"

    def item(self, index: int, rng: np.random.Generator) -> np.ndarray:
        if index in self.unreadable:
            raise UnreadableFile("the file is empty")
        return self.rows[index]

    def collate(self, examples: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(examples))


@dataclass
class TextMedia:
    """A medium that is saved as a text file."""

    text: str

    def save(self, path: str | Path) -> Path:
        path = Path(path).with_suffix(".txt")
        path.write_text(self.text)
        return path

    @classmethod
    def sheet(cls, items: Sequence[TextMedia], labels: Sequence[str] = ()) -> TextMedia:
        pairs = zip(items, labels, strict=True)
        return cls("\n".join(f"{label}: {item.text}" for item, label in pairs))


class AddTask(Task):
    best_metric = BestMetric(name="error", higher_is_better=False)

    def __init__(self, optimizer: OptimizerConfig):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.updates = (
            Update(name="model", trains=self.model, loss=self.mean_error, optimizer=optimizer),
        )

    def mean_error(self, batch: Batch, step: int) -> Loss:
        return Loss({"error": self.errors(batch).mean()})

    def errors(self, batch: Batch) -> Tensor:
        return (self.model(batch.examples)[:, 0] - batch.examples.sum(1)).square()

    def eval_step(self, batch: Batch) -> dict[str, Tensor]:
        return {"error": self.errors(batch).sum(), "examples": torch.tensor(len(batch))}

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {"error": float(totals["error"] / totals["examples"])}

    def sample(self, batch: Batch) -> list[Any]:
        return [TextMedia(f"{row.sum():.3f}") for row in batch.examples]


def small_engine(
    path: Path,
    optimizer: OptimizerConfig | None = None,
    held_out: NumberDataset | None = None,
    **settings: Any,
) -> Engine:
    """Build an engine in a new or existing run directory and open it."""
    config = EngineConfig(**({"steps": 10, "batch_size": 4} | settings))
    directory = RunDirectory(path)
    directory.create()
    training = TrainLoader(
        NumberDataset(),
        seed=config.seed,
        batch_size=config.batch_size,
        grad_accum_steps=config.grad_accum_steps,
    )
    validation = EvalLoader(held_out or NumberDataset(), seed=config.seed, batch_size=8)
    task = AddTask(optimizer or OptimizerConfig())
    engine = Engine(task, training, validation, config, directory)
    engine.open({})
    return engine
