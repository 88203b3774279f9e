"""Masking of tokens for training; everything is drawn from the generator of each example.

B batch, N positions, S tokens in a position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from tessera.engine.task import Batch
from tessera.nn.masked_transformer import SelectedTokens
from tessera.nn.token_layout import Layout
from tessera.sampling.schedules import Schedule, check_schedule, mask_ratio, mean_mask_ratio


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """Mask random tokens (MaskGIT, Chang 2022, arXiv 2202.04200, section 3.2)."""

    schedule: Schedule = "cosine"
    """The schedule of the mask ratio, evaluated at a random time; at least one token is masked."""
    time_power: float = 1.0
    """The exponent of the random time: 1 is uniform, as published; above 1, examples of which few
    tokens are shown, and most are predicted from the caption alone, are drawn more often."""
    keep: float = 0.0
    """The fraction of masked tokens that are shown unchanged and predicted all the same."""
    replace: float = 0.0
    """The fraction of masked tokens that are shown as a random other token."""

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        check_fractions(self.keep, self.replace)
        if not 0 < self.time_power < math.inf:
            raise ValueError(
                f"time_power must be above 0 and finite, got {self.time_power}: use 1 for uniform "
                "times."
            )

    def validate_quantizers(self, num_quantizers: int) -> None:
        """Accept every number of quantizers."""

    def expected_num_masked(self, layout: Layout) -> float:
        """Return the mean number of masked tokens of an example."""
        ratio = mean_mask_ratio(self.schedule, self.time_power)
        return layout.num_positions * layout.tokens_per_position * ratio

    given_noise = 0.0

    def draw_region(self, layout: Layout, generator: torch.Generator) -> Tensor | None:
        """Draw which tokens of an example are generated, (N, S), while the others are given.

        None generates all and draws nothing.
        """
        return None

    def draw(
        self,
        shape: tuple[int, int],
        vocab_size: int,
        generator: torch.Generator,
        region_NS: Tensor | None = None,
    ) -> TokenMask:
        """Draw the mask of one example of N x S tokens; the number of random draws does not depend
        on the settings."""
        count = shape[0] * shape[1]
        time = float(torch.rand((), generator=generator)) ** self.time_power
        order, u = torch.rand(2, *shape, generator=generator)
        random_tokens = torch.randint(vocab_size, shape, generator=generator)
        if region_NS is not None:  # given tokens come last, and none of them is masked
            count, order = int(region_NS.sum()), torch.where(region_NS, order, 2.0)
        num_masked = max(1, round(mask_ratio(self.schedule, time) * count))
        masked = order.flatten().argsort().argsort().view(shape) < num_masked
        drawn = split_masked(masked, u, self.keep, self.replace, random_tokens)
        if region_NS is not None:
            drawn = drawn.with_noise(~region_NS & (u < self.given_noise))
        shows_random = self.replace > 0 or self.given_noise > 0
        return drawn if shows_random else TokenMask(drawn.hidden, drawn.loss_mask)


def split_masked(
    masked: Tensor, u: Tensor, keep: float, replace: float, random_tokens: Tensor
) -> TokenMask:
    """Divide masked tokens into hidden, kept and replaced ones, by a uniform number for each."""
    replaced = masked & (u >= keep) & (u < keep + replace)
    return TokenMask(masked & (u >= keep + replace), masked, replaced, random_tokens)


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
    coarse_bias: float = 0.0
    """How much more often coarse levels are drawn: level q has a probability proportional to
    1 / q^coarse_bias. 0 draws all levels equally often, as published."""
    keep: float = 0.0
    """The fraction of masked tokens that are shown unchanged and predicted all the same."""
    replace: float = 0.0
    """The fraction of masked tokens that are shown as a random other token."""

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        check_fractions(self.keep, self.replace)
        if not 0 <= self.coarse_bias < math.inf:
            raise ValueError(
                f"coarse_bias must be at least 0 and finite, got {self.coarse_bias}: use 0 to draw "
                "all levels equally often."
            )

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

    def choose_level(self, u: float, num_levels: int) -> int:
        """Return the level, from 0, for a uniform number."""
        weights = [q**-self.coarse_bias for q in range(1, num_levels + 1)]
        threshold = u * sum(weights)
        return min(sum(total <= threshold for total in accumulate(weights)), num_levels - 1)

    def draw_region(self, layout: Layout, generator: torch.Generator) -> Tensor | None:
        """Return None: all tokens are generated."""
        return None

    def draw(
        self,
        shape: tuple[int, int],
        vocab_size: int,
        generator: torch.Generator,
        region_NS: Tensor | None = None,
    ) -> TokenMask:
        """Draw the mask of one example of N x S tokens; tokens to keep or replace are drawn last,
        and only if there are any."""
        count, num_levels = shape
        time, u_level, u_prompt = torch.rand(3, generator=generator).tolist()
        order_N = torch.rand(count, generator=generator)
        level = self.choose_level(u_level, num_levels)
        start = int(u_prompt * count) if self.prompt else 0
        num_masked = max(1, round(mask_ratio(self.schedule, time) * (count - start)))
        loss_mask = torch.zeros(shape, dtype=torch.bool)
        loss_mask[start:, level] = order_N[start:].argsort().argsort() < num_masked
        finer = torch.zeros_like(loss_mask)
        finer[start:, level + 1 :] = True
        if not self.keep and not self.replace:
            return TokenMask(loss_mask | finer, loss_mask)
        u = torch.rand(shape, generator=generator)
        random_tokens = torch.randint(vocab_size, shape, generator=generator)
        drawn = split_masked(loss_mask, u, self.keep, self.replace, random_tokens)
        return replace(drawn, hidden=drawn.hidden | finer)


@dataclass
class TokenMask:
    """Which tokens are masked, drawn without reading them: (N, S) or (B, N, S) each."""

    hidden: Tensor
    """True for tokens that are shown as the mask token."""
    loss_mask: Tensor
    """True for tokens that are predicted."""
    replaced: Tensor | None = None
    """True for tokens that are shown as a random token."""
    random_tokens: Tensor | None = None

    def with_noise(self, noisy: Tensor) -> TokenMask:
        """Replace more tokens, which are predicted too."""
        assert self.replaced is not None
        return replace(self, loss_mask=self.loss_mask | noisy, replaced=self.replaced | noisy)

    def apply(self, tokens: Tensor, mask_token_id: int) -> MaskedTokens:
        input_ids = tokens.masked_fill(self.hidden, mask_token_id)
        if self.replaced is not None and self.random_tokens is not None:
            input_ids = torch.where(self.replaced, self.random_tokens, input_ids)
        return MaskedTokens(input_ids, self.loss_mask)

    @classmethod
    def pad(cls, masks: Sequence[TokenMask], shape: tuple[int, int]) -> TokenMask:
        """Make a batch of masks, (B, N, S); padding is hidden and not predicted."""

        def stack(name: str, fill: bool | int) -> Tensor | None:
            first = getattr(masks[0], name)
            if first is None:
                return None
            padded = torch.full((len(masks), *shape), fill, dtype=first.dtype)
            for row, mask in zip(padded, masks, strict=True):
                values = getattr(mask, name)
                row[: len(values)] = values
            return padded

        hidden, loss_mask = stack("hidden", True), stack("loss_mask", False)
        assert hidden is not None and loss_mask is not None
        return cls(hidden, loss_mask, stack("replaced", False), stack("random_tokens", 0))


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
        return valid_positions(self.lengths, self.tokens_BNS.shape[1], self.tokens_BNS.device)

    @property
    def valid_BN1(self) -> Tensor:
        valid_BN = self.valid_BN
        if valid_BN is None:
            return torch.ones_like(self.tokens_BNS[..., :1], dtype=torch.bool)
        return valid_BN[..., None]


def valid_positions(
    lengths: Sequence[int], count: int, device: torch.device | None = None
) -> Tensor | None:
    """Return the mask (B, N) of valid positions; None if all are valid."""
    if min(lengths) == count:
        return None
    lengths_B = torch.tensor(lengths, device=device)
    return torch.arange(count, device=device) < lengths_B[:, None]


@dataclass
class MaskedTokens:
    """Tokens as the model gets them, and which of them it predicts."""

    input_ids: Tensor
    loss_mask: Tensor
    valid_BN: Tensor | None = None
    """The mask of valid positions; None if all are valid."""
    selected: SelectedTokens | None = None
    """The indices of the tokens to predict, if they are known."""


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
