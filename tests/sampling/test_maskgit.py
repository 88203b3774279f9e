"""Laying a mosaic: as many hidden as the schedule says, nothing given is touched, and every draw is
the example's own.

The model here is a table: what it guesses is known, and who asked for what is written down.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tessera.nn.token_layout import Layout
from tessera.sampling.logits import filter_top_k_p
from tessera.sampling.maskgit import (
    MaskedSampling,
    Stage,
    gumbel,
    halton_order,
    lowest_k,
    maskgit_decode,
)
from tessera.sampling.schedules import Schedule, hidden_after

SCHEDULES = typing.get_args(Schedule)
VOCABULARY = 11
MASK = VOCABULARY


@dataclass
class Table:
    """A guess for each symbol that depends on nothing, and a record of all that was asked."""

    logits_NSV: Tensor
    asked: list[Tensor] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)

    def __call__(self, tokens_BNS: Tensor, asked_BNS: Tensor, progress: float) -> Tensor:
        assert (tokens_BNS[asked_BNS] == MASK).all(), "what is asked for is hidden"
        self.asked.append(asked_BNS.clone())
        self.seen.append(tokens_BNS.clone())
        self.progress.append(progress)
        return self.logits_NSV.expand(len(asked_BNS), *self.logits_NSV.shape)[asked_BNS]

    @property
    def counts(self) -> list[list[int]]:
        """How many were asked for in each round, of each example."""
        return [asked.flatten(1).sum(1).tolist() for asked in self.asked]


def table(places: int = 8, slots: int = 2) -> Table:
    return Table(torch.randn(places, slots, VOCABULARY))


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def full(batch: int = 1, places: int = 8, slots: int = 2) -> tuple[Tensor, Tensor]:
    shape = (batch, places, slots)
    return torch.zeros(shape, dtype=torch.long), torch.ones(shape, dtype=torch.bool)


def filled(
    guess: Table, config: MaskedSampling, seeds: tuple[int, ...] = (0,), **more: typing.Any
) -> Tensor:
    return maskgit_decode(
        *full(len(seeds), *guess.logits_NSV.shape[:2]),
        guess,
        config,
        generators(*seeds),
        mask=MASK,
        **more,
    )


def doubt(tokens: Tensor, progress: float) -> Tensor:
    """A critic that believes even symbols."""
    return -(tokens % 2).float()


ORDERS: dict[str, dict[str, typing.Any]] = {
    "confidence": {}, "halton": {"first_NS": torch.arange(16).view(8, 2)}, "critic": {"score": doubt},
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ how many, and when


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rounds", [1, 3, 8, 12])
def test_as_many_are_hidden_as_the_schedule_says_and_none_at_the_end(
    schedule, order, decoding_steps
):
    guess = table()
    codes = filled(
        guess,
        MaskedSampling(decoding_steps=decoding_steps, schedule=schedule, order=order),
        (1, 2),
        **ORDERS[order],
    )
    expected = [16]
    for number in range(decoding_steps - 1):
        expected.append(min(hidden_after(schedule, number, decoding_steps, 16), expected[-1] - 1))
    expected = [one for one in expected if one > 0]
    assert guess.counts == [[one, one] for one in expected]
    assert guess.progress == [number / decoding_steps for number in range(len(expected))]
    assert (codes < VOCABULARY).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_rounds_than_symbols_reveal_one_at_a_time(schedule, order):
    guess = table()
    codes = filled(
        guess, MaskedSampling(decoding_steps=100, schedule=schedule, order=order), **ORDERS[order]
    )
    counts = [one for (one,) in guess.counts]
    assert (
        all(after < before for before, after in zip(counts, counts[1:]))
        and counts[0] == 16
        and counts[-1] >= 1
    )
    assert len(counts) <= 16 and (codes < VOCABULARY).all()


@pytest.mark.parametrize("order", ["confidence", "halton"])
def test_what_was_kept_stays(order):
    guess = table()
    codes = filled(guess, MaskedSampling(decoding_steps=6, order=order), (3,), **ORDERS[order])
    for seen, before, after in zip(guess.seen[1:], guess.asked, guess.asked[1:]):
        assert not (after & ~before).any(), "only hidden symbols stay hidden"
        assert torch.equal(seen[~after], codes[~after])


@pytest.mark.parametrize("order", ORDERS)
def test_given_symbols_are_never_touched_nor_asked_for(order):
    guess, (tokens, hidden) = table(), full(3)
    tokens = torch.randint(VOCABULARY, tokens.shape)
    hidden = torch.rand(hidden.shape) < torch.tensor([0.2, 0.5, 0.9])[:, None, None]
    totals = hidden.flatten(1).sum(1).tolist()
    assert len(set(totals)) == 3
    config = MaskedSampling(decoding_steps=5, order=order)
    codes = maskgit_decode(
        tokens, hidden, guess, config, generators(1, 2, 3), mask=MASK, **ORDERS[order]
    )
    assert torch.equal(codes[~hidden], tokens[~hidden]) and (codes < VOCABULARY).all()
    for asked, seen in zip(guess.asked, guess.seen):
        assert not (asked & ~hidden).any() and torch.equal(seen[~hidden], tokens[~hidden])
    left = totals
    for number, counts in enumerate(guess.counts):
        assert counts == left
        left = [
            min(hidden_after("cosine", number, 5, total), max(0, one - 1))
            for total, one in zip(totals, left)
        ]
    assert not any(left)


def test_where_nothing_is_hidden_nobody_is_asked():
    guess, (tokens, hidden) = table(), full()
    codes = maskgit_decode(tokens + 4, ~hidden, guess, MaskedSampling(), generators(1), mask=MASK)
    assert torch.equal(codes, tokens + 4) and guess.asked == []


def test_the_symbols_that_came_in_are_left_as_they_were():
    (tokens, hidden), guess = full(), table()
    maskgit_decode(
        tokens, hidden, guess, MaskedSampling(decoding_steps=3), generators(1), mask=MASK
    )
    assert (tokens == 0).all() and hidden.all()


# -------------------------------------------------------------------------------------------------------- which first


def test_without_noise_the_surest_are_kept_first():
    guess = table()
    codes = filled(guess, MaskedSampling(decoding_steps=4, temperature=0.0, choice_temperature=0.0))
    sure = guess.logits_NSV.log_softmax(-1).amax(-1).flatten()
    for asked in guess.asked[1:]:
        hidden = asked.flatten()
        assert sure[hidden].max() < sure[~hidden].min()
    assert torch.equal(codes[0], guess.logits_NSV.argmax(-1))


def test_noise_and_only_noise_lets_the_seed_change_the_order():
    def kept_first(choice_temperature: float, seed: int) -> Tensor:
        guess = table()
        guess.logits_NSV = torch.linspace(0, 3, 16 * VOCABULARY).view(8, 2, VOCABULARY)
        filled(
            guess,
            MaskedSampling(
                decoding_steps=4, temperature=0.0, choice_temperature=choice_temperature
            ),
            (seed,),
        )
        return guess.asked[1]

    assert torch.equal(kept_first(0.0, 1), kept_first(0.0, 2))
    assert not torch.equal(kept_first(100.0, 1), kept_first(100.0, 2))


def test_halton_reveals_in_its_order():
    ranks = torch.randperm(16).view(8, 2)
    guess = table()
    filled(guess, MaskedSampling(decoding_steps=5, order="halton"), (1, 2), first_NS=ranks)
    for asked in guess.asked:
        revealed = 16 - int(asked[0].sum())
        assert torch.equal(asked, (ranks >= revealed).expand(2, 8, 2))


def test_an_order_that_is_not_given_is_refused():
    with pytest.raises(ValueError, match="halton"):
        filled(table(), MaskedSampling(order="halton"))


def test_what_the_critic_disbelieves_is_taken_up_again_even_if_it_was_kept():
    """It believes places in turn: whatever was kept in one round is what it doubts in the next."""
    guess, decoding_steps = table(), 4
    realness_logits = [torch.arange(16.0).view(8, 2), -torch.arange(16.0).view(8, 2)]
    asked_for: list[Tensor] = []

    def score(tokens: Tensor, progress: float) -> Tensor:
        assert (tokens < VOCABULARY).all(), "the critic sees a whole mosaic"
        asked_for.append(tokens)
        return realness_logits[(len(asked_for) - 1) % 2].expand(tokens.shape)

    filled(
        guess,
        MaskedSampling(
            decoding_steps=decoding_steps, order="critic", choice_temperature=0.0, schedule="linear"
        ),
        score=score,
    )
    flat = [asked.flatten().nonzero()[:, 0].tolist() for asked in guess.asked]
    assert flat == [list(range(16)), list(range(12)), list(range(8, 16)), list(range(4))]


def test_the_critic_doubts_symbols_and_not_places():
    guess = Table(torch.zeros(8, 2, VOCABULARY))
    codes = filled(
        guess,
        MaskedSampling(decoding_steps=12, order="critic", choice_temperature=0.0),
        (1, 2, 3, 4),
        score=doubt,
    )
    by_chance = filled(
        Table(torch.zeros(8, 2, VOCABULARY)),
        MaskedSampling(decoding_steps=12, choice_temperature=0.0),
        (1, 2, 3, 4),
    )
    assert (codes % 2).float().mean() < 0.15 < 0.35 < (by_chance % 2).float().mean()


def test_a_critic_that_is_not_there_is_missed_with_a_letter():
    with pytest.raises(ValueError, match="no critic"):
        filled(table(), MaskedSampling(order="critic"))


@pytest.mark.parametrize(
    "layout",
    [Layout((8, 8)), Layout((8, 8), patch=2), Layout((16, 12), patch=2), Layout((32,), levels=2)],
)
def test_halton_order_is_an_order_that_spreads(layout):
    order, cells = halton_order(layout.cells()), layout.cells()
    total = layout.count * layout.slots
    assert sorted(order.flatten().tolist()) == list(range(total))
    early = cells[order < total // 4]
    halves = (early >= torch.tensor(layout.grid) / 2).long()
    quadrants = halves @ (2 ** torch.arange(len(layout.grid)))
    counts = torch.bincount(quadrants, minlength=2 ** len(layout.grid))
    assert (counts > 0).all() and counts.max() <= 2 * counts.min(), (
        "a quarter of the symbols touches all quadrants alike"
    )


def test_the_levels_of_a_cell_follow_each_other_in_halton_order():
    order = halton_order(Layout((8,), levels=3).cells())
    assert (order % 3 == torch.arange(3)).all()


# ---------------------------------------------------------------------------------------------------------- the draws


def test_temperature_nothing_takes_the_likeliest_whatever_the_seed():
    guess = table()
    config = MaskedSampling(decoding_steps=4, temperature=0.0)
    assert torch.equal(
        filled(guess, config, (1, 2, 3)), guess.logits_NSV.argmax(-1).expand(3, 8, 2)
    )


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.4), (4, 0.6)])
def test_the_sampler_never_draws_outside(top_k, top_p):
    guess = table()
    choice = filter_top_k_p(guess.logits_NSV.flatten(0, 1), top_k, top_p)
    allowed = torch.zeros(16, VOCABULARY, dtype=torch.bool).scatter(
        1, choice.tokens_MK, choice.logits_MK.isfinite()
    )
    codes = filled(
        guess,
        MaskedSampling(decoding_steps=3, top_k=top_k, top_p=top_p, temperature=5.0),
        tuple(range(50)),
    )
    assert allowed.view(8, 2, VOCABULARY).expand(50, -1, -1, -1).gather(-1, codes[..., None]).all()


def test_gumbel_noise_has_its_mean_and_spread_and_is_finite_at_both_ends():
    choice_temperature = gumbel(torch.rand(100_000, generator=torch.Generator().manual_seed(1)))
    assert choice_temperature.mean() == pytest.approx(
        0.5772, abs=0.02
    ) and choice_temperature.std() == pytest.approx(1.2825, abs=0.02)
    assert gumbel(torch.tensor([0.0, 1 - 2**-24])).isfinite().all()


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_least_takes_exactly_so_many_also_among_equals(counts):
    worth = torch.randint(3, (len(counts), 3, 2)).float()
    taken = lowest_k(worth, counts)
    assert taken.flatten(1).sum(1).tolist() == counts
    for one, mine in zip(worth, taken):
        if mine.any() and not mine.all():
            assert one[mine].max() <= one[~mine].min()


# ------------------------------------------------------------------------------------------------------- one's own draws


@pytest.mark.parametrize("order", ORDERS)
def test_the_same_seed_draws_the_same_whoever_is_drawn_beside_it(order):
    config = MaskedSampling(decoding_steps=5, order=order)
    guess, seeds = table(), tuple(range(8))
    together = filled(guess, config, seeds, **ORDERS[order])
    for size in (1, 3):
        parts = [
            filled(guess, config, seeds[i : i + size], **ORDERS[order]) for i in range(0, 8, size)
        ]
        assert torch.equal(torch.cat(parts), together)
    assert len({tuple(one.flatten().tolist()) for one in together}) == 8, (
        "another seed is another mosaic"
    )


def test_an_example_with_little_to_fill_is_drawn_the_same_beside_one_with_much():
    guess, config = table(), MaskedSampling(decoding_steps=6)
    tokens, hidden = full(2)
    hidden[0, 1:] = False
    together = maskgit_decode(tokens, hidden, guess, config, generators(1, 2), mask=MASK)
    alone = maskgit_decode(tokens[:1], hidden[:1], guess, config, generators(1), mask=MASK)
    assert torch.equal(together[:1], alone)


# ------------------------------------------------------------------------------------------------------------- stages


def levels(first_rounds: int = 3, second_rounds: int = 2) -> list[Stage]:
    which = torch.zeros(8, 2, dtype=torch.bool)
    which[:, 0] = True
    return [Stage(which, first_rounds, 1.0), Stage(~which, second_rounds, 0.0)]


@pytest.mark.parametrize("order", ORDERS)
def test_a_second_stage_begins_when_the_first_is_done(order):
    guess = table()
    config = MaskedSampling(decoding_steps=99, order=order)
    codes = filled(guess, config, (1, 2), stages=levels(), **ORDERS[order])
    for seen, asked in zip(guess.seen[:3], guess.asked[:3]):
        assert (seen[..., 1] == MASK).all() and not asked[..., 1].any()
    for seen, asked in zip(guess.seen[3:], guess.asked[3:]):
        assert torch.equal(seen[..., 0], codes[..., 0]) and not asked[..., 0].any()
    expected = (
        [8]
        + [hidden_after("cosine", n, 3, 8) for n in range(2)]
        + [8, hidden_after("cosine", 0, 2, 8)]
    )
    assert guess.counts == [[one, one] for one in expected]
    assert torch.equal(codes[..., 1], guess.logits_NSV[:, 1].argmax(-1).expand(2, 8)), (
        "each stage has its temperature"
    )


def test_in_stages_too_a_draw_does_not_depend_on_how_much_others_have_to_fill():
    guess, config = table(), MaskedSampling(decoding_steps=6)
    tokens, hidden = full(2)
    hidden[0, 1:, 0] = (
        False  # of its first level one symbol only: done after one round, its neighbour after three
    )
    stages = [dataclasses.replace(stage, temperature=1.0) for stage in levels()]
    together = maskgit_decode(
        tokens, hidden, guess, config, generators(1, 2), mask=MASK, stages=stages
    )
    alone = maskgit_decode(
        tokens[:1], hidden[:1], guess, config, generators(1), mask=MASK, stages=stages
    )
    assert torch.equal(together[:1], alone)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rounds", [(4, 1), (5, 3, 2), (1,), (2, 2, 2, 9)], ids=str)
def test_each_level_is_laid_in_its_rounds_with_as_many_hidden_as_the_schedule_says(
    decoding_steps, schedule
):
    guess, config = (
        table(slots=3),
        MaskedSampling(decoding_steps_per_level=decoding_steps, schedule=schedule),
    )
    codes = filled(guess, config, (1, 2), stages=config.stages(8, 3, torch.device("cpu")))
    expected = []
    for level in range(3):
        count, left = decoding_steps[min(level, len(decoding_steps) - 1)], 8
        for number in range(count):
            if left:
                expected.append((level, left))
            left = min(hidden_after(schedule, number, count, 8), max(0, left - 1))
    assert guess.counts == [[left, left] for _, left in expected]
    for (level, _), seen, asked in zip(expected, guess.seen, guess.asked, strict=True):
        assert not asked[..., :level].any() and not asked[..., level + 1 :].any()
        assert torch.equal(seen[..., :level], codes[..., :level]), "coarser levels are laid"
        assert (seen[..., level + 1 :] == MASK).all(), "finer ones are hidden until their turn"


def test_a_finer_level_of_one_round_takes_the_likeliest_and_others_are_drawn():
    cold = [
        stage.temperature
        for stage in MaskedSampling(decoding_steps_per_level=(16, 1)).stages(
            8, 3, torch.device("cpu")
        )
    ]
    assert cold == [1.0, 0.0, 0.0]
    drawn_too = MaskedSampling(decoding_steps_per_level=(1, 2, 1), temperature=0.7).stages(
        8, 3, torch.device("cpu")
    )
    assert [stage.temperature for stage in drawn_too] == [0.7, 0.7, 0.0]
    assert MaskedSampling().stages(8, 3, torch.device("cpu")) is None


@pytest.mark.parametrize("order", ORDERS)
def test_of_a_level_that_is_given_in_part_only_the_rest_is_counted(order):
    """Of 8 places 3 are given in both levels; what came in is left as it was."""
    guess, config = table(), MaskedSampling(decoding_steps_per_level=(4, 2), order=order)
    tokens, hidden = torch.randint(VOCABULARY, (1, 8, 2)), torch.ones(1, 8, 2, dtype=torch.bool)
    hidden[:, :3] = False
    before, stages = (tokens.clone(), hidden.clone()), config.stages(8, 2, torch.device("cpu"))
    codes = maskgit_decode(
        tokens, hidden, guess, config, generators(1), mask=MASK, stages=stages, **ORDERS[order]
    )
    first = [5] + [hidden_after("cosine", number, 4, 5) for number in range(3)]
    assert [one for (one,) in guess.counts] == first + [5, hidden_after("cosine", 0, 2, 5)]
    assert all(torch.equal(seen[:, :3], tokens[:, :3]) for seen in guess.seen) and torch.equal(
        codes[:, :3], tokens[:, :3]
    )
    assert torch.equal(tokens, before[0]) and torch.equal(hidden, before[1])


# --------------------------------------------------------------------------------------------------------- bad settings


@pytest.mark.parametrize(
    "wrong",
    [{"rounds": 0}, {"temperature": -1.0}, {"noise": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5},
     {"temperature": float("nan")}, {"noise": float("nan")}, {"top_p": float("nan")}, {"level_rounds": (16, 0)}],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MaskedSampling(**wrong)
