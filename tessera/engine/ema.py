"""Exponential moving average (EMA) of the model's weights.

The EMA weights are what is validated, sampled from and published. There is no update counter: the
decay is a function of the training step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.engine.fsdp import local_tensor


@dataclass(frozen=True, kw_only=True)
class EMAConfig:
    decay: float = 0.999
    """The decay of the EMA after its warm-up; 0 makes the EMA a copy of the raw weights."""
    update_after: int = 0
    """The step until which the EMA is a copy of the raw weights."""
    update_every: int = 1
    """The number of steps between updates of the EMA."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"The EMA decay must be at least 0 and below 1, got {self.decay}.")
        if self.update_every < 1:
            raise ValueError(f"ema.update_every must be at least 1, got {self.update_every}.")


class EMA:
    """Hold one tensor for each tensor of the model, or a shard of it where the model is sharded.

    Parameters are averaged in fp32, the type in which they are kept under any precision. Buffers
    are copied: they hold statistics already, and an expired codebook row is replaced, not moved.
    """

    def __init__(self, config: EMAConfig, model: nn.Module, *, is_sharded: bool = False):
        self.config = config
        state = model.state_dict(keep_vars=True)
        self._names = list(state)
        self._is_sharded = is_sharded
        self._raw = [local_tensor(one) if is_sharded else one for one in state.values()]
        self._ema = [tensor.detach().clone() for tensor in self._raw]
        is_parameter = [isinstance(one, nn.Parameter) for one in state.values()]
        self._averaged = [i for i, averaged in enumerate(is_parameter) if averaged]
        self._parameters = [self._raw[i] for i in self._averaged]
        self._copied = [i for i, averaged in enumerate(is_parameter) if not averaged]

    def decay_at(self, step: int) -> float:
        """Return the decay after `step` steps.

        It rises from 0, since an average of mostly initial weights is useless for thousands of
        steps.
        """
        age = max(0, step - self.config.update_after) // self.config.update_every
        if step <= self.config.update_after:
            return 0.0
        return min(self.config.decay, age / (age + 9))

    @torch.no_grad()
    def update(self, step: int) -> None:
        if step > self.config.update_after and step % self.config.update_every:
            return
        averaged = [self._ema[i] for i in self._averaged]
        torch._foreach_lerp_(averaged, self._parameters, 1 - self.decay_at(step))
        for i in self._copied:
            self._ema[i].copy_(self._raw[i].data)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the EMA weights into the model.

        Storage is exchanged and nothing is copied, except for shards, whose storage FSDP refers to.
        """
        indices = range(len(self._raw))
        # The second swap runs backwards, because a weight with two names is swapped twice.
        for i in indices:
            self._swap(i)
        try:
            yield
        finally:
            for i in reversed(indices):
                self._swap(i)

    @torch.no_grad()
    def _swap(self, i: int) -> None:
        if not self._is_sharded:
            self._raw[i].data, self._ema[i] = self._ema[i], self._raw[i].data
            return
        raw = self._raw[i].clone()
        self._raw[i].copy_(self._ema[i])
        self._ema[i].copy_(raw)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._ema, strict=True))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in zip(self._names, self._ema, strict=True):
            tensor.copy_(state[name])
