"""How a network moves: its optimizer, its clipping, and its rate as a pure function of the step.

The rate is written into the optimizer before each step and is never accumulated, so the rate asked
for is the rate used, on any number of processes and after any resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Schedule = Literal["constant", "warmup", "cosine", "wsd"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    kind: Literal["adamw", "adam", "lion", "muon"] = "adamw"
    """adamw decays matrices only; adam decays nothing; lion (Chen 2023) wants a rate 3 to 10 times
    smaller; muon (Jordan 2024) moves the matrices of a transformer by all their directions alike,
    and the rest as adamw does."""
    rate: float = 3e-4
    """The peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    decay: float = 0.0
    """Decoupled weight decay, on tensors of two dimensions or more."""
    eps: float = 1e-8
    clip: float | None = 1.0
    """Largest norm of this update's gradient; none leaves it as it is."""
    schedule: Schedule = "constant"
    """constant; warmup (linear, then constant); cosine (warm-up, then to the floor); wsd (warm-up,
    stable, linear decay)."""
    warmup: int = 0
    """Steps of linear warm-up."""
    initial: float = 0.0
    """Rate at which the warm-up starts."""
    floor: float = 0.0
    """Rate at which cosine and wsd end, as a share of the peak."""
    cooldown: float = 0.2
    """Share of all steps that wsd spends decaying."""

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"The learning rate must be above zero, but it is {self.rate}.")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(
                f"A gradient is clipped to a norm above zero, not to {self.clip}; none leaves it as it is."
            )
        if self.schedule == "constant" and self.warmup:
            raise ValueError(
                f"The schedule is constant but a warm-up of {self.warmup} steps is asked for: use warmup, cosine or wsd."
            )

    def lr_at(self, step: int, steps: int) -> float:
        """The rate with which step number `step` (from 0) of `steps` moves."""
        if step < self.warmup:
            return self.initial + (self.rate - self.initial) * (step + 1) / self.warmup
        lowest = self.rate * self.floor
        if self.schedule == "cosine":
            gone = (step - self.warmup) / max(1, steps - self.warmup)
            return lowest + (self.rate - lowest) * 0.5 * (1 + math.cos(math.pi * min(1.0, gone)))
        if self.schedule == "wsd":
            length = max(1, round(self.cooldown * steps))
            return lowest + (self.rate - lowest) * min(1.0, max(0.0, (steps - step) / length))
        return self.rate

    def build(self, network: nn.Module) -> torch.optim.Optimizer:
        """An optimizer over all parameters of `network`, in the order of their names."""
        named = list(network.named_parameters())
        if self.kind == "muon":
            return self._muon(named)
        decay = self.decay if self.kind != "adam" else 0.0
        decayed = [(n, p) for n, p in named if p.ndim >= 2 and decay]
        others = [
            (n, p) for n, p in named if p.ndim < 2 or not decay
        ]  # all in one group: a second one is a second call
        groups = [
            {
                "params": [p for _, p in chosen],
                "names": [n for n, _ in chosen],
                "weight_decay": weight,
            }
            for chosen, weight in ((decayed, decay), (others, 0.0))
            if chosen
        ]
        if self.kind == "lion":
            return Lion(groups, lr=self.rate, betas=self.betas)
        # fused: 1.8 ms against 6.8 (foreach) and 14.3 (loop) for 300 tensors on a CPU. Zero decay
        # makes AdamW Adam.
        return torch.optim.AdamW(groups, lr=self.rate, betas=self.betas, eps=self.eps, fused=True)

    def _muon(self, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        between = [(n, p) for n, p in named if getattr(p, "between_states", False)]
        if not between:
            raise ValueError(
                "muon is for the matrices of a transformer, and this network has none: use adamw."
            )
        chosen = (
            (between, self.decay, True),
            (
                [
                    (n, p)
                    for n, p in named
                    if not getattr(p, "between_states", False) and p.ndim >= 2
                ],
                self.decay,
                False,
            ),
            (
                [
                    (n, p)
                    for n, p in named
                    if not getattr(p, "between_states", False) and p.ndim < 2
                ],
                0.0,
                False,
            ),
        )
        groups = [
            {
                "params": [p for _, p in some],
                "names": [n for n, _ in some],
                "weight_decay": decay,
                "even": even,
            }
            for some, decay, even in chosen
            if some
        ]
        return Muon(groups, lr=self.rate, betas=self.betas, eps=self.eps)


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal (Jordan 2024, github.com/KellerJordan/Muon): every direction of a
    matrix moves equally far.

    Only for matrices that lead from states to states, which a network marks with `use_muon`; a step
    moves their entries by the rate in the root mean square. The rest moves by AdamW. Ours, because
    torch has it only from 2.9 on and for matrices alone. Seen: a masked transformer on the toys'
    symbols reaches after 300 steps what AdamW reaches after about 480.
    """

    MOMENTUM = 0.95
    ITERATIONS = 5

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            directions = self._even(parameters) if group["even"] else self._adam(parameters, group)
            torch._foreach_add_(parameters, directions, alpha=-group["lr"])

    def _memory(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [self.state[parameter][name] for parameter in parameters]

    def _even(self, parameters: list[Tensor]) -> list[Tensor]:
        momenta = self._memory(parameters, "momentum")
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_lerp_(momenta, gradients, 1 - self.MOMENTUM)
        ahead = torch._foreach_lerp(gradients, momenta, self.MOMENTUM)  # Nesterov's
        alike: dict[torch.Size, list[int]] = {}
        for i, direction in enumerate(ahead):
            alike.setdefault(direction.shape, []).append(i)
        found: dict[int, Tensor] = {}
        for shape, members in alike.items():  # matrices of one shape are multiplied together
            even = (
                newton_schulz(torch.stack([ahead[i] for i in members]), self.ITERATIONS)
                * max(shape) ** 0.5
            )
            found |= dict(zip(members, even, strict=True))
        return [found[i] for i in range(len(parameters))]

    def _adam(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        first, second = group["betas"]
        means, squares = self._memory(parameters, "exp_avg"), self._memory(parameters, "exp_avg_sq")
        gradients = [p.grad for p in parameters if p.grad is not None]
        for parameter in parameters:
            count = self.state[parameter].get("step", torch.zeros(()))
            self.state[parameter]["step"] = count + 1
        done = float(self.state[parameters[0]]["step"])
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - second**done) ** 0.5)
        torch._foreach_add_(roots, group["eps"])
        directions = torch._foreach_div(means, roots)
        torch._foreach_div_(directions, 1 - first**done)
        return list(directions)


def newton_schulz(matrices_KMN: Tensor, iterations: int) -> Tensor:
    """Nearly the closest orthogonal matrices: a polynomial, applied again and again, drives all
    singular values towards 1.

    The coefficients are Jordan's, for speed instead of exactness: the values end between about 0.7
    and 1.2. Each round multiplies from the left by a polynomial of the Gram matrix. Where that is
    much smaller than the matrix, the rounds are multiplied together first: six of 192 x 1024 take
    28 ms so, and 59 one after the other, and differ by 1e-4 at most.
    """
    tall = matrices_KMN.shape[-2] > matrices_KMN.shape[-1]
    x = matrices_KMN.mT if tall else matrices_KMN
    x = x / x.flatten(1).norm(dim=1)[:, None, None].clamp_min(1e-7)
    x = (
        all_rounds(x, iterations) @ x
        if x.shape[-1] >= 2 * x.shape[-2]
        else round_by_round(x, iterations)
    )
    return x.mT if tall else x


LINEAR, CUBIC, QUINTIC = 3.4445, -4.7750, 2.0315


def round_by_round(x_KMN: Tensor, iterations: int) -> Tensor:
    for _ in range(iterations):
        gram_KMM = x_KMN @ x_KMN.mT
        beyond_KMM = torch.baddbmm(gram_KMM, gram_KMM, gram_KMM, beta=CUBIC, alpha=QUINTIC)
        x_KMN = torch.baddbmm(x_KMN, beyond_KMM, x_KMN, beta=LINEAR)
    return x_KMN


def all_rounds(x_KMN: Tensor, iterations: int) -> Tensor:
    """(K, M, M): what all rounds together multiply by."""
    gram_KMM, factor_KMM = x_KMN @ x_KMN.mT, None
    for left in reversed(range(iterations)):
        round_KMM = torch.baddbmm(gram_KMM, gram_KMM, gram_KMM, beta=CUBIC, alpha=QUINTIC)
        round_KMM.diagonal(dim1=-2, dim2=-1).add_(LINEAR)
        factor_KMM = round_KMM if factor_KMM is None else round_KMM @ factor_KMM
        if left:
            gram_KMM = round_KMM @ gram_KMM @ round_KMM
    assert factor_KMM is not None
    return factor_KMM


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv 2302.06675, algorithm 2: the sign of an interpolated momentum.

    Ours, because torch has none; twenty lines over foreach need no package of their own.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradients = [p.grad for p in parameters]
            for p in parameters:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            momenta = [self.state[p]["momentum"] for p in parameters]
            towards, remember = group["betas"]
            directions = torch._foreach_lerp(momenta, gradients, 1 - towards)
            torch._foreach_sign_(directions)
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, directions, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, gradients, 1 - remember)


def set_lr(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def grad_norm(parameters: list[nn.Parameter]) -> Tensor:
    return torch.nn.utils.get_total_norm(
        [p.grad for p in parameters if p.grad is not None], foreach=True
    )


def clip_grad_norm(parameters: list[nn.Parameter], norm: Tensor, clip: float | None) -> None:
    """Those that are short enough are left alone; torch would multiply them by 1, in 0.15 ms of a
    step of 16."""
    if clip is not None and norm.item() > clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm, foreach=True)


def zero_grad(parameters: list[nn.Parameter]) -> None:
    """What `Optimizer.zero_grad` does, without the profiler's bookkeeping around it: 0.01 ms
    against 0.08."""
    for parameter in parameters:
        parameter.grad = None


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's memory under names: `exp_avg/encoder.conv.weight`."""
    return {
        f"{key}/{name}": value
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Puts the memory back by name; a name that belongs to no parameter is an error, not an
    oversight."""
    parameters = {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }
    optimizer.state.clear()
    for path, value in tensors.items():
        key, name = path.split("/", 1)
        if name not in parameters:
            raise ValueError(
                f"The checkpoint has optimizer state for {name!r}, which this network does not have."
            )
        parameter = parameters[name]
        if value.ndim and value.shape != parameter.shape:
            raise ValueError(
                f"The checkpoint's optimizer state for {name!r} has shape {tuple(value.shape)}, "
                f"the network {tuple(parameter.shape)}."
            )
        # Adam's own counter stays where torch keeps it: on the parameter's device for the fused
        # form. The rest has to lie in memory as the parameter does (channels last, say), for the
        # fused form walks through both without looking.
        optimizer.state[parameter][key] = (
            torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            if value.ndim
            else value.to(parameter.device)
        )
