"""Count training steps, so that a part of a network starts or ends its work at a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.nn.quantize import ProcessGroup


class DelayedStart(nn.Module):
    """Count training steps up to a number; like a codebook, it changes only by `commit`.

    The count is read only when it may be reached, because reading waits for a device.
    """

    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps
        self.has_step = self._is_reached = False
        self._min_remaining = 0
        """No fewer steps remain, and possibly more: a device undoes a step that is not finite."""
        self.register_buffer("steps_done", torch.zeros((), dtype=torch.long))
        self.steps_done: Tensor

    @property
    def is_reached(self) -> bool:
        if self.steps_done.is_meta:  # of a plan, which has no values
            return True
        if not self._is_reached and self._min_remaining <= 0:
            self._min_remaining = self.steps - int(self.steps_done)
            self._is_reached = self._min_remaining <= 0
        return self._is_reached

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._is_reached, self._min_remaining = False, 0

    def note_step(self) -> None:
        self.has_step = self.has_step or self.training

    def rollback(self) -> None:
        """Do not count a step that was skipped."""
        self.has_step = False

    @torch.no_grad()
    def commit(self, dist: ProcessGroup, step: int) -> None:
        if self.has_step:
            self.steps_done += 1
            self._min_remaining -= 1
        self.rollback()
