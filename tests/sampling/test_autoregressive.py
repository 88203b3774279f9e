"""Laying a mosaic symbol by symbol: whole places, an end of its own for each, and every draw the
example's own.

The model here is a table: what follows what is known, and who was told what is written down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tessera.sampling.autoregressive import AutoregressiveSampling, NextLogits, with_cfg, write

VOCABULARY, SLOTS = 5, 3
END = VOCABULARY
GREEDY = AutoregressiveSampling(temperature=0)
EVEN = torch.zeros(VOCABULARY + 1)


@dataclass
class Table:
    """The logits of each step (T, B, V + 1), of which the last are said for ever, and a record of
    all that was told."""

    logits_TBV: Tensor
    prefix: Tensor | None = None
    told: list[Tensor | None] = field(default_factory=list)

    def __call__(self, prefix_BNS: Tensor) -> NextLogits:
        self.prefix = prefix_BNS
        return self.following

    def following(self, symbols_B: Tensor | None) -> Tensor:
        self.told.append(symbols_B)
        return self.logits_TBV[min(len(self.told), len(self.logits_TBV)) - 1].expand(
            len(self.prefix), -1
        )


def saying(*tokens: list[int]) -> Table:
    """For each step what each example must say."""
    return Table(10 * torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY + 1).float())


def seeds(*numbers: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(number) for number in numbers]


def nothing(batch: int) -> Tensor:
    return torch.zeros(batch, 0, SLOTS, dtype=torch.long)


def test_symbols_are_laid_in_order_and_each_is_told_before_the_next():
    table = saying([1], [2], [3], [4], [0], [1], [END])
    laid = write(table, nothing(1), GREEDY, seeds(0), end=END, most=9)
    assert laid.tokens_BNS.tolist() == [[[1, 2, 3], [4, 0, 1]]]
    assert laid.ended_B.tolist() == [True]
    assert [told if told is None else told.tolist() for told in table.told] == [
        None,
        [1],
        [2],
        [3],
        [4],
        [0],
        [1],
    ]


def test_each_ends_for_itself_and_all_stop_when_the_last_does():
    table = saying([1, 2], [1, 2], [1, 2], [END, 3], [4, 3], [4, 3], [4, END])
    laid = write(table, nothing(2), GREEDY, seeds(0, 1), end=END, most=9)
    assert laid.tokens_BNS.tolist() == [[[1, 1, 1], [-1, -1, -1]], [[2, 2, 2], [3, 3, 3]]]
    assert laid.ended_B.tolist() == [True, True] and len(table.told) == 7
    assert all(told is None or told.max() < END for told in table.told), (
        "no network knows a vector for the end"
    )


def test_an_end_within_a_place_is_never_drawn_however_likely():
    logits = EVEN.clone()
    logits[END] = 50.0
    logits_TBV = torch.stack(
        [EVEN.masked_fill(torch.arange(6) == END, -math.inf), logits, logits, logits]
    )[:, None]
    for config in (
        GREEDY,
        AutoregressiveSampling(),
        AutoregressiveSampling(top_k=1),
        AutoregressiveSampling(top_p=0.5),
    ):
        laid = write(Table(logits_TBV), nothing(4), config, seeds(0, 1, 2, 3), end=END, most=9)
        assert laid.tokens_BNS.shape == (4, 1, SLOTS) and laid.ended_B.all()
        assert laid.tokens_BNS.min() >= 0 and laid.tokens_BNS.max() < END


def test_who_has_no_end_is_stopped_and_that_is_told():
    table = saying([1, 1], [1, 1], [1, 1], [END, 1], [1, 1])
    laid = write(table, nothing(2), GREEDY, seeds(0, 1), end=END, most=3)
    assert laid.tokens_BNS.shape == (2, 3, SLOTS) and laid.ended_B.tolist() == [True, False]


def test_one_that_ends_at_once_is_empty():
    laid = write(saying([END, END]), nothing(2), GREEDY, seeds(0, 1), end=END, most=3)
    assert laid.tokens_BNS.shape == (2, 0, SLOTS) and laid.ended_B.all()


# ------------------------------------------------------------------------------------------------------------- prompts


def test_prompts_of_different_lengths_stay_as_they_were_and_are_gone_on_with():
    prompt = torch.tensor(
        [[[1, 2, 3], [-1, -1, -1], [-1, -1, -1]], [[0, 0, 1], [2, 2, 2], [3, 3, 3]]]
    )
    table = saying(*[[4, 4]] * 6, [END, 4], *[[4, 4]] * 2, [4, END])
    laid = write(table, prompt, GREEDY, seeds(0, 1), end=END, most=9)
    assert torch.equal(table.prefix, prompt[:, :1]), "what all have is read at once"
    assert laid.tokens_BNS.tolist() == [
        [[1, 2, 3], [4, 4, 4], [4, 4, 4], [-1, -1, -1]],
        [[0, 0, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4]],
    ]
    assert [told.tolist() for told in table.told[1:4]] == [[4, 2]] * 3


def test_what_is_given_may_not_be_ended():
    """A model that would end at once reads the prompt to its end all the same."""
    prompt = torch.tensor([[[-1] * 3, [-1] * 3], [[1, 1, 1], [2, 2, 2]]])
    laid = write(saying([END, END]), prompt, GREEDY, seeds(0, 1), end=END, most=9)
    assert laid.tokens_BNS.tolist() == [[[-1] * 3, [-1] * 3], [[1, 1, 1], [2, 2, 2]]]
    assert laid.ended_B.tolist() == [True, True]


def test_a_prompt_of_the_most_places_is_given_back_and_a_longer_one_refused():
    prompt = torch.ones(1, 3, SLOTS, dtype=torch.long)
    laid = write(saying([END]), prompt, GREEDY, seeds(0), end=END, most=3)
    assert torch.equal(laid.tokens_BNS, prompt) and not laid.ended_B.any()
    with pytest.raises(ValueError, match="A prompt of 3 places came where 2 are the most"):
        write(saying([END]), prompt, GREEDY, seeds(0), end=END, most=2)


# -------------------------------------------------------------------------------------------------------------- chance


def test_the_same_seed_is_the_same_example_whatever_the_batch():
    logits = torch.randn(9, 1, VOCABULARY + 1)
    logits[..., END] += 0.5
    config = AutoregressiveSampling(top_k=4, top_p=0.95)
    together = write(
        Table(logits), nothing(4), config, seeds(5, 6, 7, 8), end=END, most=6
    ).tokens_BNS
    lengths = (together[..., 0] >= 0).sum(1).tolist()
    assert len(set(lengths)) > 1
    for number, seed in enumerate([5, 6, 7, 8]):
        alone = write(Table(logits), nothing(1), config, seeds(seed), end=END, most=6).tokens_BNS
        assert torch.equal(alone[0], together[number, : lengths[number]])


def test_what_is_told_costs_no_draw():
    """Whether a prompt stands beside a longer or a shorter one, what follows it is the same."""
    logits = torch.randn(VOCABULARY + 1).index_fill(0, torch.tensor([END]), -20.0).expand(1, 1, -1)
    short = torch.ones(1, 1, SLOTS, dtype=torch.long)
    alone = write(
        Table(logits), short, AutoregressiveSampling(), seeds(3), end=END, most=4
    ).tokens_BNS
    both = torch.cat(
        [torch.cat([short, -torch.ones_like(short)], dim=1), torch.full((1, 2, SLOTS), 2)]
    )
    beside = write(
        Table(logits), both, AutoregressiveSampling(), seeds(3, 4), end=END, most=4
    ).tokens_BNS
    assert torch.equal(beside[0], alone[0])
    three = torch.full((1, 2, SLOTS), 2)
    assert torch.equal(
        write(Table(logits), three, AutoregressiveSampling(), seeds(4), end=END, most=4).tokens_BNS[
            0
        ],
        beside[1],
    )


def test_symbols_come_as_often_as_they_are_likely():
    likely = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0, 0.0])
    laid = write(
        Table(likely.log()[None, None]),
        nothing(50),
        AutoregressiveSampling(),
        seeds(*range(50)),
        end=END,
        most=20,
    )
    shares = torch.bincount(laid.tokens_BNS.flatten(), minlength=5) / laid.tokens_BNS.numel()
    assert torch.allclose(shares, likely[:5], atol=0.03)  # 3,000 draws: three standard deviations


@pytest.mark.parametrize(
    ("config", "left"),
    [
        (AutoregressiveSampling(top_k=2), {0, 1}),
        (AutoregressiveSampling(top_p=0.5), {0}),
        (AutoregressiveSampling(top_p=0.6), {0, 1}),
        (GREEDY, {0}),
        (AutoregressiveSampling(temperature=50.0), {0, 1, 2, 3}),
    ],
)
def test_only_the_likeliest_are_drawn_from(config, left):
    likely = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0, 0.0]).log()[None, None]
    laid = write(Table(likely), nothing(10), config, seeds(*range(10)), end=END, most=10)
    assert set(laid.tokens_BNS.flatten().tolist()) == left


# ------------------------------------------------------------------------------------------------------------ guidance


def test_guidance_asks_for_both_halves_and_leads_away_from_the_second():
    with_prompt, without = torch.tensor([[2.0, 1.5, 0, 0, 0, -20], [2.0, 0.5, 0, 0, 0, -20]])
    first = torch.stack([with_prompt, with_prompt.roll(1), without, without.roll(1)])
    first[[1, 3], 0], first[[1, 3], END] = 0.0, -20.0
    inner = first.index_fill(
        1, torch.tensor([END]), -math.inf
    )  # as a network says it of the inside of a place
    table = Table(torch.stack([first, inner, inner] * 2))
    laid = write(with_cfg(table, 3.0), nothing(2), GREEDY, seeds(0, 1), end=END, most=2)
    assert laid.tokens_BNS.shape == (2, 2, SLOTS)
    assert (laid.tokens_BNS == torch.tensor([1, 2])[:, None, None]).all(), (
        "0.5 + 3 x 1 is more than 2 + 3 x 0"
    )
    assert table.prefix.shape == (4, 0, SLOTS)
    assert all(told is None or torch.equal(*told.chunk(2)) for told in table.told)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": -1.0}, "from 0 on"),
        ({"temperature": math.inf}, "from 0 on"),
        ({"top_k": -1}, "from 0 on"),
    ]
    + [({"top_p": 0.0}, "above 0 and up to 1"), ({"top_p": 1.1}, "above 0 and up to 1")],
)
def test_a_wrong_setting_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        AutoregressiveSampling(**wrong)
