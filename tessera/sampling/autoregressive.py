"""Autoregressive sampling, token by token.

A network is called through two functions. `start(prefix)` gets the positions that all examples have
in common and returns `next_logits(tokens)`, which gets the tokens that were just sampled, None at
first, and returns logits for the next ones. The random numbers of an example come from its own
generator, so its sample does not depend on the rest of the batch.

An example is a whole number of positions of S tokens: the end token can be sampled only as the
first token of a position.

B batch, N positions, S tokens per position, V vocabulary size, which is also the id of the end
token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.sampling.guidance import apply_cfg
from tessera.sampling.logits import filter_top_k_p, sample_from_logits

NextLogits = Callable[[Tensor | None], Tensor]
"""(B,) token ids -> (B, V + 1) logits."""
StartDecoding = Callable[[Tensor], NextLogits]
"""(B, N, S) prefix -> the function that decodes what follows."""
OnStep = Callable[[int, int, Tensor], None]
"""Called after each position with the number of positions, their maximum, and token ids (B, N, S)
so far."""


@dataclass(frozen=True, kw_only=True)
class AutoregressiveSampling:
    temperature: float = 1.0
    """Sampling temperature; 0 takes the most likely token."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 for all."""
    top_p: float = 1.0
    """Total probability of the most likely tokens to sample from; 1 for all."""
    retries: int = 0
    """How often an example that does not end within the maximum length is sampled again."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0 for all tokens), got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}.")
        if self.retries < 0:
            raise ValueError(f"retries must be at least 0, got {self.retries}.")


@dataclass
class GeneratedTokens:
    tokens_BNS: Tensor
    """Token ids, -1 after an example's last position."""
    ended_B: Tensor
    """Whether an example sampled its end token, and was not cut off at the maximum length."""


@torch.inference_mode()
def generate(
    start: StartDecoding,
    prompt_BNS: Tensor,
    config: AutoregressiveSampling,
    generators: Sequence[torch.Generator],
    *,
    eos_token_id: int,
    max_positions: int,
    on_step: OnStep | None = None,
) -> GeneratedTokens:
    """Continue prompts to at most `max_positions` positions.

    `prompt_BNS` is padded with -1 where prompts are shorter, and N may be 0. `on_step` is called
    after each position, for progress; it may raise to stop.
    """
    batch, prompt_len, slots = prompt_BNS.shape
    if prompt_len > max_positions:
        raise ValueError(
            f"The prompt has {prompt_len} positions, but the maximum is {max_positions}: shorten "
            "it, or raise the maximum."
        )
    common_len = int((prompt_BNS >= 0).all(2).sum(1).min())
    decoder = AutoregressiveDecoder(
        start(prompt_BNS[:, :common_len]),
        config,
        sample_uniforms(generators, (max_positions, slots), prompt_BNS.device),
        eos_token_id,
        ended_B=prompt_BNS.new_zeros(batch, dtype=torch.bool),
    )
    positions = list(prompt_BNS[:, :common_len].unbind(1))
    for number in range(common_len, max_positions):
        tokens_BS = decoder.decode_position(
            number, prompt_BNS[:, number] if number < prompt_len else None
        )
        if tokens_BS is None:
            break
        positions.append(tokens_BS)
        if on_step is not None:
            on_step(number + 1, max_positions, torch.stack(positions, dim=1))
    return GeneratedTokens(
        torch.stack(positions, dim=1) if positions else prompt_BNS[:, :0], decoder.ended_B
    )


def sample_uniforms(
    generators: Sequence[torch.Generator], shape: tuple[int, int], device: torch.device
) -> Tensor:
    """Sample a uniform number for every possible token, from its example's generator: (N, S, B)."""
    return torch.stack(
        [torch.rand(shape, generator=generator) for generator in generators], dim=2
    ).to(device)


@dataclass
class AutoregressiveDecoder:
    """Decodes one position after the other, for all examples at once."""

    next_logits: NextLogits
    config: AutoregressiveSampling
    uniform_NSB: Tensor
    eos_token_id: int
    ended_B: Tensor
    previous_B: Tensor | None = None

    def decode_position(self, number: int, prompt_BS: Tensor | None) -> Tensor | None:
        """Return the tokens of the next position, (B, S), or None if all examples have ended.

        Tokens of the prompt are kept where they are not -1; ended examples get -1.
        """
        tokens = []
        for slot, uniform_B in enumerate(self.uniform_NSB[number].unbind(0)):
            token_B = self.sample(uniform_B, may_end=slot == 0)
            if prompt_BS is not None:
                token_B = torch.where(prompt_BS[:, slot] >= 0, prompt_BS[:, slot], token_B)
            if slot == 0:
                self.ended_B = self.ended_B | (token_B == self.eos_token_id)
                if self.ended_B.all():
                    return None
                token_B = token_B.masked_fill(self.ended_B, 0)  # unused, but must be a valid id
            self.previous_B = token_B
            tokens.append(token_B)
        return torch.stack(tokens, dim=1).masked_fill(self.ended_B[:, None], -1)

    def sample(self, uniform_B: Tensor, *, may_end: bool) -> Tensor:
        logits_BV = self.next_logits(self.previous_B)
        candidates = filter_top_k_p(
            logits_BV if may_end else logits_BV[:, : self.eos_token_id],
            self.config.top_k,
            self.config.top_p,
        )
        return candidates.token_ids(
            sample_from_logits(candidates.logits_MK, uniform_B, self.config.temperature)
        )


def with_cfg(start: StartDecoding, scale: float) -> StartDecoding:
    """Wrap a network with classifier-free guidance.

    `start` is called with the batch repeated twice and must treat the second half as unconditional.
    """

    def start_both(prefix_BNS: Tensor) -> NextLogits:
        next_logits = start(prefix_BNS.repeat(2, 1, 1))

        def guided_logits(tokens_B: Tensor | None) -> Tensor:
            cond_logits, uncond_logits = next_logits(
                tokens_B.repeat(2) if tokens_B is not None else None
            ).chunk(2)
            guided = apply_cfg(cond_logits, uncond_logits, scale)
            # The difference of two infinite logits, of a token that cannot follow, is NaN.
            return guided.masked_fill_(cond_logits == -math.inf, -math.inf)

        return guided_logits

    return start_both
