"""Tests of autoregressive sampling with a table of logits in place of a network."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tessera.sampling.autoregressive import (
    AutoregressiveSampling,
    GeneratedTokens,
    NextLogits,
    StartDecoding,
    generate,
    with_cfg,
)

VOCABULARY, SLOTS = 5, 3
EOS = VOCABULARY
GREEDY = AutoregressiveSampling(temperature=0)


@dataclass
class Table:
    """Logits for each step, (T, B, V + 1), the last of them for all further steps.

    Records the prefix and the tokens of each call.
    """

    logits_TBV: Tensor
    prefix: Tensor | None = None
    calls: list[Tensor | None] = field(default_factory=list)

    def __call__(self, prefix_BNS: Tensor) -> NextLogits:
        self.prefix = prefix_BNS
        return self.next_logits

    def next_logits(self, tokens_B: Tensor | None) -> Tensor:
        self.calls.append(tokens_B)
        step = min(len(self.calls), len(self.logits_TBV)) - 1
        return self.logits_TBV[step].expand(len(self.prefix), -1)


def predict(*tokens: list[int]) -> Table:
    """Return a table that predicts given tokens in each step, one for each example."""
    return Table(10 * torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY + 1).float())


def empty_prompt(batch: int) -> Tensor:
    return torch.zeros(batch, 0, SLOTS, dtype=torch.long)


def run(
    start: StartDecoding,
    prompt: Tensor,
    config: AutoregressiveSampling = GREEDY,
    seeds: tuple[int, ...] | None = None,
    max_positions: int = 9,
) -> GeneratedTokens:
    seeds = tuple(range(len(prompt))) if seeds is None else seeds
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return generate(
        start, prompt, config, generators, eos_token_id=EOS, max_positions=max_positions
    )


def test_each_token_is_an_input_of_the_next_step():
    table = predict([1], [2], [3], [4], [0], [1], [EOS])
    generated = run(table, empty_prompt(1))
    assert generated.tokens_BNS.tolist() == [[[1, 2, 3], [4, 0, 1]]]
    assert generated.ended_B.tolist() == [True]
    assert table.calls[0] is None
    assert [call.tolist() for call in table.calls[1:]] == [[1], [2], [3], [4], [0], [1]]


def test_examples_end_separately_and_decoding_stops_with_the_last():
    table = predict([1, 2], [1, 2], [1, 2], [EOS, 3], [4, 3], [4, 3], [4, EOS])
    generated = run(table, empty_prompt(2))
    assert generated.tokens_BNS.tolist() == [[[1, 1, 1], [-1, -1, -1]], [[2, 2, 2], [3, 3, 3]]]
    assert generated.ended_B.tolist() == [True, True] and len(table.calls) == 7
    assert all(call is None or call.max() < EOS for call in table.calls), (
        "networks have no embedding of the end token"
    )


@pytest.mark.parametrize(
    "config",
    [
        GREEDY,
        AutoregressiveSampling(),
        AutoregressiveSampling(top_k=1),
        AutoregressiveSampling(top_p=0.5),
    ],
    ids=str,
)
def test_end_token_is_never_sampled_within_a_position(config):
    uniform = torch.zeros(VOCABULARY + 1)
    likely_end = uniform.clone()
    likely_end[EOS] = 50.0
    first = uniform.masked_fill(torch.arange(VOCABULARY + 1) == EOS, -math.inf)
    table = Table(torch.stack([first, likely_end, likely_end, likely_end])[:, None])
    generated = run(table, empty_prompt(4), config)
    assert generated.tokens_BNS.shape == (4, 1, SLOTS) and generated.ended_B.all()
    assert generated.tokens_BNS.min() >= 0 and generated.tokens_BNS.max() < EOS


def test_examples_without_an_end_are_cut_off_and_reported():
    table = predict([1, 1], [1, 1], [1, 1], [EOS, 1], [1, 1])
    generated = run(table, empty_prompt(2), max_positions=3)
    assert generated.tokens_BNS.shape == (2, 3, SLOTS)
    assert generated.ended_B.tolist() == [True, False]


def test_examples_that_end_at_once_are_empty():
    generated = run(predict([EOS, EOS]), empty_prompt(2), max_positions=3)
    assert generated.tokens_BNS.shape == (2, 0, SLOTS) and generated.ended_B.all()


# ---- prompts


def test_prompts_of_different_lengths_are_kept_and_continued():
    prompt = torch.tensor(
        [[[1, 2, 3], [-1, -1, -1], [-1, -1, -1]], [[0, 0, 1], [2, 2, 2], [3, 3, 3]]]
    )
    table = predict(*[[4, 4]] * 6, [EOS, 4], *[[4, 4]] * 2, [4, EOS])
    generated = run(table, prompt)
    assert torch.equal(table.prefix, prompt[:, :1]), "the common prefix is processed at once"
    assert generated.tokens_BNS.tolist() == [
        [[1, 2, 3], [4, 4, 4], [4, 4, 4], [-1, -1, -1]],
        [[0, 0, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4]],
    ]
    assert [call.tolist() for call in table.calls[1:4]] == [[4, 2]] * 3


def test_prompts_are_never_cut_short_by_an_end_token():
    prompt = torch.tensor([[[-1] * 3, [-1] * 3], [[1, 1, 1], [2, 2, 2]]])
    generated = run(predict([EOS, EOS]), prompt)
    assert generated.tokens_BNS.tolist() == [[[-1] * 3, [-1] * 3], [[1, 1, 1], [2, 2, 2]]]
    assert generated.ended_B.tolist() == [True, True]


def test_prompt_of_maximum_length_is_returned_and_a_longer_one_an_error():
    prompt = torch.ones(1, 3, SLOTS, dtype=torch.long)
    generated = run(predict([EOS]), prompt, max_positions=3)
    assert torch.equal(generated.tokens_BNS, prompt) and not generated.ended_B.any()
    with pytest.raises(ValueError, match="The prompt has 3 positions, but the maximum is 2"):
        run(predict([EOS]), prompt, max_positions=2)


# ---- randomness


def test_samples_of_a_seed_do_not_depend_on_the_batch():
    logits = torch.randn(9, 1, VOCABULARY + 1)
    logits[..., EOS] += 0.5
    config = AutoregressiveSampling(top_k=4, top_p=0.95)
    train_together = run(Table(logits), empty_prompt(4), config, (5, 6, 7, 8), 6).tokens_BNS
    lengths = (train_together[..., 0] >= 0).sum(1).tolist()
    assert len(set(lengths)) > 1
    for number, seed in enumerate([5, 6, 7, 8]):
        alone = run(Table(logits), empty_prompt(1), config, (seed,), 6).tokens_BNS
        assert torch.equal(alone[0], train_together[number, : lengths[number]])


def test_continuations_do_not_depend_on_prompts_of_other_examples():
    logits = torch.randn(VOCABULARY + 1).index_fill(0, torch.tensor([EOS]), -20.0).expand(1, 1, -1)
    config = AutoregressiveSampling()
    short = torch.ones(1, 1, SLOTS, dtype=torch.long)
    long = torch.full((1, 2, SLOTS), 2)
    both = torch.cat([torch.cat([short, -torch.ones_like(short)], dim=1), long])
    train_together = run(Table(logits), both, config, (3, 4), 4).tokens_BNS
    assert torch.equal(run(Table(logits), short, config, (3,), 4).tokens_BNS[0], train_together[0])
    assert torch.equal(run(Table(logits), long, config, (4,), 4).tokens_BNS[0], train_together[1])


PROBS = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0, 0.0])


def test_frequencies_are_the_probabilities():
    table = Table(PROBS.log()[None, None])
    tokens = run(table, empty_prompt(50), AutoregressiveSampling(), max_positions=20).tokens_BNS
    frequencies = torch.bincount(tokens.flatten(), minlength=5) / tokens.numel()
    assert torch.allclose(frequencies, PROBS[:5], atol=0.03)  # 3,000 draws: 3 standard deviations


@pytest.mark.parametrize(
    ("config", "candidates"),
    [
        (AutoregressiveSampling(top_k=2), {0, 1}),
        (AutoregressiveSampling(top_p=0.5), {0}),
        (AutoregressiveSampling(top_p=0.6), {0, 1}),
        (GREEDY, {0}),
        (AutoregressiveSampling(temperature=50.0), {0, 1, 2, 3}),
    ],
)
def test_only_candidates_are_sampled(config, candidates):
    generated = run(Table(PROBS.log()[None, None]), empty_prompt(10), config, max_positions=10)
    assert set(generated.tokens_BNS.flatten().tolist()) == candidates


# ---- guidance


def test_guidance_extrapolates_from_the_second_half_of_the_batch():
    cond, uncond = torch.tensor([[2.0, 1.5, 0, 0, 0, -20], [2.0, 0.5, 0, 0, 0, -20]])
    first = torch.stack([cond, cond.roll(1), uncond, uncond.roll(1)])
    first[[1, 3], 0], first[[1, 3], EOS] = 0.0, -20.0
    inner = first.index_fill(1, torch.tensor([EOS]), -math.inf)  # as a network within a position
    table = Table(torch.stack([first, inner, inner] * 2))
    generated = run(with_cfg(table, 3.0), empty_prompt(2), max_positions=2)
    assert generated.tokens_BNS.shape == (2, 2, SLOTS)
    assert (generated.tokens_BNS == torch.tensor([1, 2])[:, None, None]).all(), (
        "0.5 + 3 x 1 is more than 2 + 3 x 0"
    )
    assert table.prefix.shape == (4, 0, SLOTS)
    assert all(call is None or torch.equal(*call.chunk(2)) for call in table.calls)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be finite and at least 0"),
        ({"temperature": math.inf}, "temperature must be finite and at least 0"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1"),
        ({"retries": -1}, "retries must be at least 0"),
    ],
)
def test_invalid_options_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        AutoregressiveSampling(**options)
