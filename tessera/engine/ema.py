"""A moving average of the model: what is validated, sampled from and published.

It has no counter of its own: its decay is a function of the engine's one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class EMAConfig:
    decay: float = 0.999
    """How much of the average stays at each update, once warmed up; 0 is the live model."""
    update_after: int = 0
    """Until this step the average is a copy of the live model."""
    update_every: int = 1
    """Steps between updates."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"The average's decay must be at least 0 and below 1, but it is {self.decay}."
            )
        if self.update_every < 1:
            raise ValueError(
                f"The average is updated every 1 or more steps, not every {self.update_every}."
            )


class EMA:
    """Holds one tensor for each of the model's. Parameters are averaged, in fp32 as they are kept
    under any precision.

    Buffers are copied: they are statistics already, and a codebook's row that was revived is
    another row than before.
    """

    def __init__(self, config: EMAConfig, model: nn.Module):
        self.config = config
        state = model.state_dict(keep_vars=True)
        self._names = list(state)
        self._holders = list(state.values())
        self._mean = [tensor.detach().clone() for tensor in state.values()]
        self._lerped = [
            i for i, holder in enumerate(self._holders) if isinstance(holder, nn.Parameter)
        ]
        self._parameters = [self._holders[i] for i in self._lerped]
        self._copied = [
            i for i, holder in enumerate(self._holders) if not isinstance(holder, nn.Parameter)
        ]

    def decay_at(self, done: int) -> float:
        """Rises from nothing: an average that is mostly its random start would be worthless for
        thousands of steps."""
        age = max(0, done - self.config.update_after) // self.config.update_every
        return min(self.config.decay, age / (age + 9)) if done > self.config.update_after else 0.0

    @torch.no_grad()
    def update(self, done: int) -> None:
        if done > self.config.update_after and done % self.config.update_every:
            return
        mean = [self._mean[i] for i in self._lerped]
        torch._foreach_lerp_(mean, self._parameters, 1 - self.decay_at(done))
        for i in self._copied:
            self._mean[i].copy_(self._holders[i].data)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the average's values inside; pointers are exchanged, nothing is copied."""
        there = range(len(self._holders))
        self._exchange(there)
        try:
            yield
        finally:
            self._exchange(
                reversed(there)
            )  # backwards, because a weight with two names is exchanged twice

    def _exchange(self, places: Iterable[int]) -> None:
        for i in places:
            self._holders[i].data, self._mean[i] = self._mean[i], self._holders[i].data

    def state_dict(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._mean, strict=True))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, mean in zip(self._names, self._mean, strict=True):
            mean.copy_(state[name])
