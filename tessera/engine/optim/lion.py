"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT


class Lion(torch.optim.Optimizer):
    """Lion (Chen 2023, arXiv 2302.06675, algorithm 2).

    This is our own implementation because torch has none and it takes twenty lines over foreach.
    """

    def __init__(self, groups: ParamsT, lr: float, betas: tuple[float, float]):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            grads = [p.grad for p in parameters]
            for p in parameters:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            momenta = [self.state[p]["momentum"] for p in parameters]
            beta1, beta2 = group["betas"]
            updates = torch._foreach_lerp(momenta, grads, 1 - beta1)
            torch._foreach_sign_(updates)
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, grads, 1 - beta2)
