"""The task of a module that computes its own loss.

The module is called with what a batch of the dataset holds: a tensor, the values of a tuple, or
those of a dictionary by name. It returns its loss, or the loss and further values, or a dictionary
or an object with `loss`, as models of Hugging Face do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tessera.engine.modes import hash_seed, seed
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, BestMetric, Loss, Task, Update

DEFAULT_OPTIMIZER = OptimizerConfig()


class LossTask(Task):
    """Train a module on its own loss.

    The loss must be a mean over examples. Random numbers of the module come from the global
    generators, which are seeded by the first example of each micro-batch.
    """

    best_metric = BestMetric(name="loss", higher_is_better=False)

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
        *,
        find_unused: bool = False,
    ):
        super().__init__()
        self.model = model
        self.updates = (
            Update(
                name="model",
                trains=model,
                loss=self.compute_loss,
                optimizer=optimizer,
                find_unused=find_unused,
            ),
        )

    def compute_loss(self, batch: Batch, step: int) -> Loss:
        total, metrics = self.call_model(batch)
        return Loss({"loss": total}, {**metrics})

    def eval_step(self, batch: Batch) -> dict[str, Tensor]:
        total, metrics = self.call_model(batch)
        sums = {name: value * len(batch) for name, value in {"loss": total, **metrics}.items()}
        return sums | {"examples": torch.tensor(len(batch), device=total.device)}

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        count = totals["examples"]
        return {name: float(one / count) for name, one in totals.items() if name != "examples"}

    def call_model(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch and the scalars that were returned beside it."""
        seed(hash_seed(batch.seeds[0]))
        data = batch.examples.data
        if isinstance(data, Mapping):
            result = self.model(**data)
        elif isinstance(data, (tuple, list)):
            result = self.model(*data)
        else:
            result = self.model(data)
        return parse_result(result)


def parse_result(result: object) -> tuple[Tensor, dict[str, Tensor]]:
    """Split what a module returned into its loss and further scalars."""
    others: Mapping[str, object] = {}
    if isinstance(result, Mapping):
        others, loss = result, result.get("loss")
    elif isinstance(result, (tuple, list)) and result:
        loss = result[0]
        others = next((one for one in result[1:] if isinstance(one, Mapping)), {})
    else:
        loss = getattr(result, "loss", result)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"The model returned a loss of {found}, but must return a scalar tensor, alone, first "
            "in a tuple, or as `loss` of a dictionary or an object: take the mean over the batch."
        )
    metrics = {
        name: value.detach()
        for name, value in others.items()
        if name != "loss" and isinstance(value, Tensor) and value.numel() == 1
    }
    return loss.reshape(()), metrics
