"""Masking of tokens for training; everything is drawn from the generator of each example.

B batch, N positions, S tokens in a position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.engine.task import Batch
from tessera.nn.token_layout import Layout
from tessera.sampling.schedules import Schedule, check_schedule, mask_ratio, mean_mask_ratio


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """Mask random tokens (MaskGIT, Chang 2022, arXiv 2202.04200, section 3.2)."""

    schedule: Schedule = "cosine"
    """The schedule of the mask ratio, evaluated at a random time; at least one token is masked."""
    keep: float = 0.0
    """The fraction of masked tokens that are shown unchanged and predicted all the same."""
    replace: float = 0.0
    """The fraction of masked tokens that are shown as a random other token."""

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        check_fractions(self.keep, self.replace)

    def validate_quantizers(self, num_quantizers: int) -> None:
        """Accept every number of quantizers."""

    def expected_num_masked(self, layout: Layout) -> float:
        """Return the mean number of masked tokens of an example."""
        return layout.num_positions * layout.tokens_per_position * mean_mask_ratio(self.schedule)

    given_noise = 0.0

    def draw_region(self, layout: Layout, generator: torch.Generator) -> Tensor | None:
        """Draw which tokens of an example are generated, (N, S), while the others are given.

        None generates all and draws nothing.
        """
        return None

    def mask(
        self,
        tokens_NS: Tensor,
        mask_token_id: int,
        generator: torch.Generator,
        region_NS: Tensor | None = None,
    ) -> MaskedTokens:
        """Mask one example; the number of random draws does not depend on the settings."""
        tokens_NS, count = tokens_NS.cpu(), tokens_NS.numel()
        time = float(torch.rand((), generator=generator))
        order, u = torch.rand(2, *tokens_NS.shape, generator=generator)
        random_tokens = torch.randint(mask_token_id, tokens_NS.shape, generator=generator)
        if region_NS is not None:  # given tokens come last, and none of them is masked
            count, order = int(region_NS.sum()), torch.where(region_NS, order, 2.0)
        num_masked = max(1, round(mask_ratio(self.schedule, time) * count))
        masked = order.flatten().argsort().argsort().view(tokens_NS.shape) < num_masked
        input_ids = tokens_NS.masked_fill(masked, mask_token_id)
        input_ids = torch.where(masked & (u < self.keep), tokens_NS, input_ids)
        replaced = masked & (u >= self.keep) & (u < self.keep + self.replace)
        if region_NS is not None:
            noisy = ~region_NS & (u < self.given_noise)
            replaced, masked = replaced | noisy, masked | noisy
        return MaskedTokens(torch.where(replaced, random_tokens, input_ids), masked)


def check_fractions(keep: float, replace: float) -> None:
    if not 0 <= keep + replace <= 1 or min(keep, replace) < 0:
        raise ValueError(
            f"keep ({keep}) and replace ({replace}) must be fractions whose sum is at most 1."
        )


@dataclass(frozen=True, kw_only=True)
class LevelMaskingConfig:
    """Mask tokens of one residual quantizer, as SoundStorm (Borsos 2023, arXiv 2305.09636, 3.2).

    A quantizer level is drawn; some of its tokens are predicted, coarser levels are shown, and
    finer levels are masked and not predicted.
    """

    schedule: Schedule = "cosine"
    """The schedule of the mask ratio, evaluated at a random time; at least one token is masked."""
    prompt: bool = True
    """Show a prefix of random length in all levels, as the voice prompt of a sample."""
    keep: float = 0.0
    """The fraction of masked tokens that are shown unchanged and predicted all the same."""
    replace: float = 0.0
    """The fraction of masked tokens that are shown as a random other token."""

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        check_fractions(self.keep, self.replace)

    def validate_quantizers(self, num_quantizers: int) -> None:
        if num_quantizers < 2:
            raise ValueError(
                "Masking by levels needs a tokenizer with several quantizers, and this one has 1: "
                "give the run of a residual codec (--tokenizer RUN)."
            )

    def expected_num_masked(self, layout: Layout) -> float:
        """Return the mean number of predicted tokens of an example: one level, after the prompt."""
        ratio = mean_mask_ratio(self.schedule) * (0.5 if self.prompt else 1.0)
        return layout.num_positions * ratio

    def mask(
        self, tokens_NS: Tensor, mask_token_id: int, generator: torch.Generator
    ) -> MaskedTokens:
        """Mask one example; tokens to keep or replace are drawn last, and only if there are any."""
        tokens_NS = tokens_NS.cpu()
        count, num_levels = tokens_NS.shape
        time, u_level, u_prompt = torch.rand(3, generator=generator).tolist()
        order_N = torch.rand(count, generator=generator)
        level = int(u_level * num_levels)
        start = int(u_prompt * count) if self.prompt else 0
        num_masked = max(1, round(mask_ratio(self.schedule, time) * (count - start)))
        loss_mask = torch.zeros_like(tokens_NS, dtype=torch.bool)
        loss_mask[start:, level] = order_N[start:].argsort().argsort() < num_masked
        finer = torch.zeros_like(loss_mask)
        finer[start:, level + 1 :] = True
        input_ids = tokens_NS.masked_fill(loss_mask | finer, mask_token_id)
        if self.keep or self.replace:
            u = torch.rand(tokens_NS.shape, generator=generator)
            random_tokens = torch.randint(mask_token_id, tokens_NS.shape, generator=generator)
            input_ids = torch.where(loss_mask & (u < self.keep), tokens_NS, input_ids)
            replaced = loss_mask & (u >= self.keep) & (u < self.keep + self.replace)
            input_ids = torch.where(replaced, random_tokens, input_ids)
        return MaskedTokens(input_ids, loss_mask)


@dataclass
class TokenBatch:
    """A padded grid of tokens with the length of each example; padding is 0."""

    tokens_BNS: Tensor
    lengths: list[int]
    """The number of valid positions of each example."""

    @classmethod
    def from_padded(cls, tokens_BNS: Tensor) -> TokenBatch:
        """Create a batch from tokens that are -1 after the end of an example."""
        lengths_B = (tokens_BNS[..., 0] >= 0).sum(1)
        return cls(tokens_BNS.clamp_min(0), lengths_B.tolist())

    @property
    def valid_BN(self) -> Tensor | None:
        """The mask of valid positions; None if all are valid."""
        is_full = min(self.lengths) == self.tokens_BNS.shape[1]
        return None if is_full else self.valid_BN1[..., 0]

    @property
    def valid_BN1(self) -> Tensor:
        positions = torch.arange(self.tokens_BNS.shape[1], device=self.tokens_BNS.device)
        lengths_B = torch.tensor(self.lengths, device=positions.device)
        return (positions < lengths_B[:, None])[..., None]


@dataclass
class MaskedTokens:
    """Tokens as the model gets them, and which of them it predicts."""

    input_ids: Tensor
    loss_mask: Tensor
    valid_BN: Tensor | None = None
    """The mask of valid positions; None if all are valid."""


@dataclass
class ExampleRandomness:
    """Random numbers of each example, always drawn in the same order from its generator."""

    generators: list[torch.Generator]
    drop_u: list[float]
    self_cond_u: list[float]

    @classmethod
    def draw(cls, batch: Batch) -> ExampleRandomness:
        generators = batch.generators()
        numbers = torch.stack([torch.rand(2, generator=one) for one in generators])
        drop_u, self_cond_u = numbers.T.tolist()
        return cls(generators, drop_u, self_cond_u)
