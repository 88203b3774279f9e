"""MaskGIT decoding: start from all tokens masked, and in each step predict them and keep the best
(Chang 2022, arXiv 2202.04200).

`logits_fn(tokens, masked, progress)` returns logits for the masked tokens, one row each, in
row-major order. The random numbers of an example come from its own generator, so its sample does
not depend on the rest of the batch. Tokens that are given at the start (the rest of an image to
inpaint, an audio prompt) are never changed.

B batch, N positions, S tokens per position, M masked tokens, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tessera.sampling.logits import FilteredLogits, filter_top_k_p, sample_from_logits
from tessera.sampling.schedules import Schedule, check_schedule, num_masked_after


def halton_order(cells_NSA: Tensor) -> Tensor:
    """Rank tokens in an order that spreads evenly over the grid: (N, S), 0 first.

    Points of the Halton sequence, with bases 2, 3 and 5 along the axes, fall into cells of the
    grid; the rank of a cell is that of the first point in it (Besnier 2025, arXiv 2503.17076).
    Tokens of one cell are consecutive.
    """
    flat = cells_NSA.reshape(-1, cells_NSA.shape[-1])
    sides = (flat.max(0).values + 1).tolist()
    bases = (2, 3, 5)[: len(sides)]
    rank: dict[tuple[int, ...], int] = {}
    number = 0
    while len(rank) < math.prod(sides):
        number += 1
        cell = tuple(
            int(radical_inverse(number, base) * side)
            for base, side in zip(bases, sides, strict=True)
        )
        rank.setdefault(cell, len(rank))
    cell_rank = torch.tensor([rank[tuple(cell)] for cell in flat.tolist()])
    return (
        (cell_rank * len(flat) + torch.arange(len(flat)))
        .argsort()
        .argsort()
        .view(cells_NSA.shape[:-1])
    )


def rotate_order(rank_NS: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Start the order of each example at a random token, so that orders differ: (B, N, S)."""
    starts = [torch.randint(rank_NS.numel(), (), generator=one) for one in generators]
    return (rank_NS - torch.stack(starts)[:, None, None]) % rank_NS.numel()


def radical_inverse(number: int, base: int) -> float:
    """Mirror the digits of a number at the radix point."""
    value, weight = 0.0, 1.0
    while number:
        weight /= base
        number, digit = divmod(number, base)
        value += digit * weight
    return value


LogitsFn = Callable[[Tensor, Tensor, float], Tensor]
"""Token ids (B, N, S), masked (B, N, S) and progress in [0, 1) -> logits (M, V)."""
CriticFn = Callable[[Tensor, float], Tensor]
"""Token ids (B, N, S) without masks and progress -> realness scores (B, N, S)."""
OnStep = Callable[[int, int, Tensor], None]
"""Called after a decoding step with its number, the number of steps, and token ids (B, N, S)
without masks: the tokens kept so far and the predictions for the others."""


Order = Literal["confidence", "critic", "halton"]


@dataclass(frozen=True, kw_only=True)
class MaskedSampling:
    decoding_steps: int = 12
    """Number of decoding steps; more steps give better samples and take more time."""
    schedule: Schedule = "cosine"
    """How the number of masked tokens decreases from step to step."""
    order: Order = "confidence"
    """Which tokens are kept first: the most confident ones, those with the highest critic score,
    or an even spread over the grid (Besnier 2025, arXiv 2503.17076)."""
    temperature: float = 1.0
    """Sampling temperature of the tokens; 0 takes the most likely token."""
    final_temperature: float | None = None
    """Sampling temperature in the last decoding step, reached linearly; None keeps it constant."""
    choice_temperature: float = 4.5
    """Scale of the Gumbel noise on the scores in the first step; it decreases linearly to 0 in the
    last (Besnier 2023, arXiv 2310.14400)."""
    remask: float = 0.0
    """Fraction of the tokens kept in earlier decoding steps that are masked again after each step,
    to be sampled again with more context (ReMDM, Wang 2025, arXiv 2503.00307)."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 for all."""
    top_p: float = 1.0
    """Total probability of the most likely tokens to sample from; 1 for all."""
    decoding_steps_per_level: tuple[int, ...] = ()
    """Decoding steps of each quantizer level, decoded one after the other, coarsest first; the last
    number holds for all further levels. A level after the first with one step takes the most likely
    tokens. Empty decodes all levels together, in `decoding_steps`."""

    def __post_init__(self) -> None:
        if self.decoding_steps < 1:
            raise ValueError(f"decoding_steps must be at least 1, got {self.decoding_steps}.")
        check_schedule(self.schedule)
        if self.order not in get_args(Order):
            names = ", ".join(map(repr, get_args(Order)))
            raise ValueError(f"order must be one of {names}, got {self.order!r}.")
        for name in ("temperature", "final_temperature", "choice_temperature"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {value}.")
        if not 0 <= self.remask < 1:
            raise ValueError(f"remask must be at least 0 and below 1, got {self.remask}.")
        if self.remask and self.order == "critic":
            raise ValueError(
                'order="critic" masks kept tokens again by their scores: use it without remask, '
                f"got {self.remask}."
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0 for all tokens), got {self.top_k}.")
        if any(steps < 1 for steps in self.decoding_steps_per_level):
            raise ValueError(
                "Every number in decoding_steps_per_level must be at least 1, got "
                f"{self.decoding_steps_per_level}."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}.")

    def build_stages(
        self, num_positions: int, num_quantizers: int, device: torch.device
    ) -> list[DecodingStage] | None:
        """Build one stage per level, coarsest first; None if all levels are decoded together."""
        if not self.decoding_steps_per_level:
            return None
        stages = []
        for level in range(num_quantizers):
            tokens_NS = torch.zeros(num_positions, num_quantizers, dtype=torch.bool, device=device)
            tokens_NS[:, level] = True
            steps = self.decoding_steps_per_level[
                min(level, len(self.decoding_steps_per_level) - 1)
            ]
            if level and steps == 1:
                stages.append(DecodingStage(tokens_NS, steps, 0.0, 0.0))
            else:
                stages.append(self.build_stage(tokens_NS, steps))
        return stages

    def build_stage(self, tokens_NS: Tensor, decoding_steps: int) -> DecodingStage:
        final = self.temperature if self.final_temperature is None else self.final_temperature
        return DecodingStage(tokens_NS, decoding_steps, self.temperature, final)


@dataclass
class DecodingStage:
    """A set of tokens that are decoded together, such as one quantizer level of audio."""

    tokens_NS: Tensor
    """True for the tokens of this stage."""
    decoding_steps: int
    temperature: float
    """Sampling temperature of the first decoding step."""
    final_temperature: float
    """Sampling temperature of the last decoding step."""

    def temperature_at(self, step: int) -> float:
        time = step / (self.decoding_steps - 1) if self.decoding_steps > 1 else 0.0
        return self.temperature + time * (self.final_temperature - self.temperature)


def maskgit_decode(
    tokens_BNS: Tensor,
    masked_BNS: Tensor,
    logits_fn: LogitsFn,
    config: MaskedSampling,
    generators: Sequence[torch.Generator],
    *,
    mask_token_id: int,
    rank_NS: Tensor | None = None,
    critic: CriticFn | None = None,
    stages: Sequence[DecodingStage] | None = None,
    on_step: OnStep | None = None,
) -> Tensor:
    """Return the tokens with all masked ones sampled, (B, N, S).

    Args:
        tokens_BNS: token ids; those of masked tokens are ignored.
        masked_BNS: True for the tokens to sample.
        logits_fn: the network.
        config: the sampling parameters.
        generators: a random generator for each example.
        mask_token_id: the id that `logits_fn` gets for a masked token.
        rank_NS: the order in which tokens are kept, for `order="halton"`.
        critic: realness scores, for `order="critic"`.
        stages: sets of tokens to decode one after the other; all together if None.
        on_step: called after each decoding step, for progress; it may raise to stop.
    """
    if config.order == "critic" and critic is None:
        raise ValueError(
            'This model has no critic, which order="critic" needs: use "confidence" or "halton".'
        )
    if config.order == "halton" and rank_NS is None:
        raise ValueError(
            'order="halton" needs the rank of each token, and got none: pass `rank_NS`.'
        )
    rank_BNS = None
    if config.order == "halton" and rank_NS is not None:
        rank_BNS = rotate_order(rank_NS, generators).to(tokens_BNS.device)
    decoder = MaskGITDecoder(
        config,
        logits_fn,
        generators,
        lengths_to_decode(masked_BNS),
        mask_token_id,
        rank_BNS,
        critic,
    )
    tokens = tokens_BNS.masked_fill(masked_BNS, mask_token_id)
    all_tokens = config.build_stage(torch.ones_like(masked_BNS[0]), config.decoding_steps)
    stages = stages or [all_tokens]
    decoder.on_step, decoder.num_steps = on_step, sum(stage.decoding_steps for stage in stages)
    for stage in stages:
        tokens = decoder.decode_stage(tokens, masked_BNS & stage.tokens_NS, stage)
        decoder.steps_before += stage.decoding_steps
    return tokens


@dataclass
class MaskGITDecoder:
    """Decodes one stage after the other."""

    config: MaskedSampling
    logits_fn: LogitsFn
    generators: Sequence[torch.Generator]
    lengths: Sequence[int]
    """For each example, the positions up to its last masked one."""
    mask_token_id: int
    rank_BNS: Tensor | None
    critic: CriticFn | None
    on_step: OnStep | None = None
    num_steps: int = 0
    """The number of decoding steps of all stages."""
    steps_before: int = 0
    """The number of decoding steps of earlier stages."""

    def decode_stage(self, tokens: Tensor, stage_masked: Tensor, stage: DecodingStage) -> Tensor:
        """Sample the tokens where `stage_masked` is True, (B, N, S)."""
        totals = stage_masked.flatten(1).sum(1).tolist()
        num_masked, num_left, masked = totals, totals, stage_masked
        for step in range(stage.decoding_steps):
            if not any(num_masked):
                break
            progress, temperature = step / stage.decoding_steps, stage.temperature_at(step)
            index_M = masked.flatten().nonzero()[:, 0]
            token_uniform, order_uniform = self.sample_uniforms(tokens, num_masked)
            logits_MV = self.logits_fn(tokens, masked, progress)
            candidates = (
                FilteredLogits(logits_MV, None)
                if temperature == 0  # filters always keep the most likely token
                else filter_top_k_p(logits_MV, self.config.top_k, self.config.top_p)
            )
            uniform_M = token_uniform.flatten().index_select(0, index_M)
            sampled_M = candidates.token_ids(
                sample_from_logits(candidates.logits_MK, uniform_M, temperature)
            )
            tokens = tokens.flatten().index_copy(0, index_M, sampled_M).view_as(tokens)
            if self.on_step is not None:
                self.on_step(self.steps_before + step + 1, self.num_steps, tokens)
            num_left = [
                min(
                    num_masked_after(self.config.schedule, step, stage.decoding_steps, total),
                    max(0, before - 1),
                )
                for total, before in zip(totals, num_left, strict=True)
            ]
            num_masked = num_left
            if any(num_left):
                scale = self.config.choice_temperature * (1 - (step + 1) / stage.decoding_steps)
                prediction = StepPrediction(masked, index_M, logits_MV, sampled_M)
                scores = self.scores(
                    tokens, stage_masked, prediction, ScaledGumbel(order_uniform, scale), progress
                )
                kept_before = stage_masked & ~masked
                masked = lowest_k(scores, num_left)
                if self.config.remask:
                    remasked = self.choose_remasked(kept_before, order_uniform, num_left)
                    masked = masked | remasked
                    num_masked = masked.flatten(1).sum(1).tolist()
                tokens = tokens.masked_fill(masked, self.mask_token_id)
        return tokens

    def choose_remasked(
        self, kept_BNS: Tensor, uniform_BNS: Tensor, num_left: Sequence[int]
    ) -> Tensor:
        """Choose a fraction of the kept tokens at random, (B, N, S); none of a finished example.

        The uniform numbers are those of the order, which kept tokens do not use.
        """
        num_kept = kept_BNS.flatten(1).sum(1).tolist()
        counts = [
            int(self.config.remask * kept) if left else 0
            for kept, left in zip(num_kept, num_left, strict=True)
        ]
        return lowest_k(uniform_BNS.masked_fill(~kept_BNS, math.inf), counts)

    def sample_uniforms(self, tokens: Tensor, num_masked: list[int]) -> Tensor:
        """Sample two uniform numbers per token from its example's generator, (2, B, N, S).

        Nothing is drawn for padding after an example, which would make a short example depend on
        longer ones beside it, nor for examples that are finished.
        """
        batch, positions, slots = tokens.shape
        uniform = torch.zeros(2, batch, positions, slots)
        for row, (generator, count, length) in enumerate(
            zip(self.generators, num_masked, self.lengths, strict=True)
        ):
            if count:
                uniform[:, row, :length] = torch.rand(2, length, slots, generator=generator)
        return uniform.to(tokens.device)

    def scores(
        self,
        tokens: Tensor,
        stage_masked: Tensor,
        prediction: StepPrediction,
        noise: ScaledGumbel,
        progress: float,
    ) -> Tensor:
        """Score tokens, (B, N, S): the lowest are masked again, and inf marks those that stay."""
        if self.rank_BNS is not None:
            return (-self.rank_BNS.float()).masked_fill(~prediction.masked, math.inf)
        if self.config.order == "critic" and self.critic is not None:
            # Tokens that were kept in an earlier step of this stage can be masked again.
            realness = self.critic(tokens, progress) + noise.full()
            return realness.masked_fill(~stage_masked, math.inf)
        log_probs_MV = prediction.logits_MV.log_softmax(-1)
        confidence_M = log_probs_MV.gather(-1, prediction.tokens_M[:, None])[:, 0].float()
        scores = torch.full(tokens.shape, math.inf, device=tokens.device)
        scores_M = confidence_M + noise.at(prediction.index_M)
        return scores.flatten().index_copy(0, prediction.index_M, scores_M).view_as(scores)


@dataclass
class StepPrediction:
    """The masked tokens of one decoding step, and what was sampled for them."""

    masked: Tensor
    """(B, N, S)."""
    index_M: Tensor
    """Their indices into the flattened (B x N x S) tokens."""
    logits_MV: Tensor
    tokens_M: Tensor


@dataclass
class ScaledGumbel:
    """Gumbel noise for the order in which tokens are kept."""

    uniform: Tensor
    """(B, N, S)."""
    scale: float

    def full(self) -> Tensor:
        """Return the noise of all tokens, (B, N, S)."""
        return self.scale * gumbel(self.uniform)

    def at(self, index_M: Tensor) -> Tensor:
        """Return the noise of the tokens at flat indices, (M,)."""
        return self.scale * gumbel(self.uniform.flatten().index_select(0, index_M))


def lengths_to_decode(masked_BNS: Tensor) -> list[int]:
    """Return for each example the number of positions up to its last masked one."""
    numbers_N = torch.arange(1, masked_BNS.shape[1] + 1, device=masked_BNS.device)
    return (masked_BNS.any(2) * numbers_N).amax(1).tolist()


def gumbel(uniform: Tensor) -> Tensor:
    """Transform uniform numbers to Gumbel noise, finite at both ends."""
    return -torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))


def lowest_k(scores_BNS: Tensor, counts: Sequence[int]) -> Tensor:
    """Mark the `counts[b]` lowest scores of each example, (B, N, S)."""
    order = scores_BNS.flatten(1).argsort(dim=1, stable=True)
    among = (
        torch.arange(order.shape[1], device=order.device)
        < torch.tensor(counts, device=order.device)[:, None]
    )
    return torch.zeros_like(among).scatter(1, order, among).view(scores_BNS.shape)
