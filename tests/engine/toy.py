"""The smallest task that an engine can carry out: a net of two layers learns one number from four.

It trains in a millisecond a step, so tests can let a real engine run instead of imitating one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tessera.data.loader import EvalLoader, TrainLoader
from tessera.engine.engine import Engine, EngineConfig
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, BestMetric, Loss, Task, Update
from tessera.run.directory import RunDirectory


class Numbers:
    """A source of rows of four numbers."""

    def __init__(self, count: int = 32):
        self.rows = np.random.default_rng(1).standard_normal((count, 4)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        return f"row {index}"

    def item(self, index: int, rng: np.random.Generator) -> np.ndarray:
        return self.rows[index]

    def collate(self, examples: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(examples))


class Toy(Task):
    best_metric = BestMetric(metric="error", higher_is_better=False)

    def __init__(self, optimizer: OptimizerConfig):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.updates = (
            Update(name="model", trains=self.model, loss=self.miss, optimizer=optimizer),
        )

    def miss(self, batch: Batch, step: int) -> Loss:
        return Loss({"error": self.errors(batch).mean()})

    def errors(self, batch: Batch) -> Tensor:
        return (self.model(batch.examples)[:, 0] - batch.examples.sum(1)).square()

    def eval_step(self, batch: Batch) -> dict[str, Tensor]:
        return {"error": self.errors(batch).sum(), "examples": torch.tensor(len(batch))}

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {"error": float(totals["error"] / totals["examples"])}

    def sample(self, batch: Batch) -> list[Any]:
        return []


def toy_engine(path: Path, optimizer: OptimizerConfig | None = None, **settings: Any) -> Engine:
    """An engine at the start of a toy run, its folder made and opened."""
    config = EngineConfig(**({"steps": 10, "batch_size": 4} | settings))
    folder = RunDirectory(path)
    folder.make()
    source = Numbers()
    training = TrainLoader(
        source,
        seed=config.seed,
        batch_size=config.batch_size,
        grad_accum_steps=config.grad_accum_steps,
    )
    validation = EvalLoader(source, seed=config.seed, batch_size=8)
    engine = Engine(Toy(optimizer or OptimizerConfig()), training, validation, config, folder)
    engine.open({})
    return engine
