"""Tests of MaskGIT decoding with a table of logits in place of a network."""

from __future__ import annotations

import dataclasses
import math
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
    DecodingStage,
    MaskedSampling,
    gumbel,
    halton_order,
    lowest_k,
    maskgit_decode,
    rotate_order,
)
from tessera.sampling.schedules import Schedule, mask_ratio, num_masked_after

SCHEDULES = typing.get_args(Schedule)
VOCABULARY = 11
MASK = VOCABULARY
CPU = torch.device("cpu")


@dataclass
class Table:
    """Logits for each token that depend on nothing. Records the arguments of each call."""

    logits_NSV: Tensor
    masked: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)

    def __call__(self, tokens_BNS: Tensor, masked_BNS: Tensor, progress: float) -> Tensor:
        assert (tokens_BNS[masked_BNS] == MASK).all()
        self.masked.append(masked_BNS.clone())
        self.tokens.append(tokens_BNS.clone())
        self.progress.append(progress)
        return self.logits_NSV.expand(len(masked_BNS), *self.logits_NSV.shape)[masked_BNS]

    @property
    def counts(self) -> list[list[int]]:
        """The number of masked tokens in each step, by example."""
        return [masked.flatten(1).sum(1).tolist() for masked in self.masked]


def random_table(positions: int = 8, slots: int = 2) -> Table:
    return Table(torch.randn(positions, slots, VOCABULARY))


def make_generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def all_masked(batch: int = 1, positions: int = 8, slots: int = 2) -> tuple[Tensor, Tensor]:
    shape = (batch, positions, slots)
    return torch.zeros(shape, dtype=torch.long), torch.ones(shape, dtype=torch.bool)


def decode_all(
    table: Table, config: MaskedSampling, seeds: tuple[int, ...] = (0,), **options: typing.Any
) -> Tensor:
    return maskgit_decode(
        *all_masked(len(seeds), *table.logits_NSV.shape[:2]),
        table,
        config,
        make_generators(*seeds),
        mask_token_id=MASK,
        **options,
    )


def parity_critic(tokens: Tensor, progress: float) -> Tensor:
    """Score even tokens higher than odd ones."""
    return -(tokens % 2).float()


ORDERS: dict[str, dict[str, typing.Any]] = {
    "confidence": {},
    "halton": {"rank_NS": torch.arange(16).view(8, 2)},
    "critic": {"critic": parity_critic},
}


# ---- the number of masked tokens


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("decoding_steps", [1, 3, 8, 12])
def test_number_of_masked_tokens_follows_the_schedule(schedule, order, decoding_steps):
    table = random_table()
    codes = decode_all(
        table,
        MaskedSampling(decoding_steps=decoding_steps, schedule=schedule, order=order),
        (1, 2),
        **ORDERS[order],
    )
    expected = [16]
    for step in range(decoding_steps - 1):
        expected.append(min(num_masked_after(schedule, step, decoding_steps, 16), expected[-1] - 1))
    expected = [count for count in expected if count > 0]
    assert table.counts == [[count, count] for count in expected]
    assert table.progress == [step / decoding_steps for step in range(len(expected))]
    assert (codes < VOCABULARY).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_step_keeps_at_least_one_token(schedule, order):
    table = random_table()
    config = MaskedSampling(decoding_steps=100, schedule=schedule, order=order)
    codes = decode_all(table, config, **ORDERS[order])
    counts = [count for (count,) in table.counts]
    assert all(after < before for before, after in zip(counts, counts[1:]))
    assert counts[0] == 16 and counts[-1] >= 1
    assert len(counts) <= 16 and (codes < VOCABULARY).all()


@pytest.mark.parametrize("order", ["confidence", "halton"])
def test_kept_tokens_are_never_masked_again_without_a_critic(order):
    table = random_table()
    config = MaskedSampling(decoding_steps=6, order=order)
    codes = decode_all(table, config, (3,), **ORDERS[order])
    for tokens, before, after in zip(table.tokens[1:], table.masked, table.masked[1:]):
        assert not (after & ~before).any()
        assert torch.equal(tokens[~after], codes[~after])


@pytest.mark.parametrize("order", ORDERS)
def test_given_tokens_are_never_changed_or_predicted(order):
    table, (tokens, masked) = random_table(), all_masked(3)
    tokens = torch.randint(VOCABULARY, tokens.shape)
    masked = torch.rand(masked.shape) < torch.tensor([0.2, 0.5, 0.9])[:, None, None]
    totals = masked.flatten(1).sum(1).tolist()
    assert len(set(totals)) == 3
    codes = maskgit_decode(
        tokens,
        masked,
        table,
        MaskedSampling(decoding_steps=5, order=order),
        make_generators(1, 2, 3),
        mask_token_id=MASK,
        **ORDERS[order],
    )
    assert torch.equal(codes[~masked], tokens[~masked]) and (codes < VOCABULARY).all()
    for step_masked, step_tokens in zip(table.masked, table.tokens):
        assert not (step_masked & ~masked).any()
        assert torch.equal(step_tokens[~masked], tokens[~masked])
    expected = totals
    for step, counts in enumerate(table.counts):
        assert counts == expected
        expected = [
            min(num_masked_after("cosine", step, 5, total), max(0, before - 1))
            for total, before in zip(totals, expected)
        ]
    assert not any(expected)


def test_network_is_not_called_if_nothing_is_masked():
    table, (tokens, masked) = random_table(), all_masked()
    codes = maskgit_decode(
        tokens + 4, ~masked, table, MaskedSampling(), make_generators(1), mask_token_id=MASK
    )
    assert torch.equal(codes, tokens + 4) and table.masked == []


def test_inputs_are_not_modified():
    (tokens, masked), config = all_masked(), MaskedSampling(decoding_steps=3)
    maskgit_decode(tokens, masked, random_table(), config, make_generators(1), mask_token_id=MASK)
    assert (tokens == 0).all() and masked.all()


# ---- the order in which tokens are kept


def test_most_confident_tokens_are_kept_first_without_noise():
    table = random_table()
    codes = decode_all(
        table, MaskedSampling(decoding_steps=4, temperature=0.0, choice_temperature=0.0)
    )
    confidence = table.logits_NSV.log_softmax(-1).amax(-1).flatten()
    for step_masked in table.masked[1:]:
        masked = step_masked.flatten()
        assert confidence[masked].max() < confidence[~masked].min()
    assert torch.equal(codes[0], table.logits_NSV.argmax(-1))


def test_order_depends_on_the_seed_only_through_the_noise():
    def masked_after_first_step(choice_temperature: float, seed: int) -> Tensor:
        table = Table(torch.linspace(0, 3, 16 * VOCABULARY).view(8, 2, VOCABULARY))
        config = MaskedSampling(
            decoding_steps=4, temperature=0.0, choice_temperature=choice_temperature
        )
        decode_all(table, config, (seed,))
        return table.masked[1]

    assert torch.equal(masked_after_first_step(0.0, 1), masked_after_first_step(0.0, 2))
    assert not torch.equal(masked_after_first_step(100.0, 1), masked_after_first_step(100.0, 2))


def test_halton_keeps_tokens_in_the_order_of_their_ranks():
    ranks = torch.randperm(16).view(8, 2)
    table = random_table()
    config = MaskedSampling(decoding_steps=5, order="halton")
    decode_all(table, config, (1, 2), rank_NS=ranks)
    rotated = rotate_order(ranks, make_generators(1, 2))
    for masked in table.masked:
        kept = 16 - int(masked[0].sum())
        assert torch.equal(masked, rotated >= kept)


def test_each_example_starts_its_order_at_its_own_token():
    ranks = torch.randperm(16).view(8, 2)
    rotated = rotate_order(ranks, make_generators(1, 2, 3, 1))
    assert torch.equal(rotated[0], rotated[3]) and len(set(rotated[:, 0, 0].tolist())) > 1
    shifts = (ranks - rotated) % 16
    assert (shifts == shifts[:, :1, :1]).all(), "the order itself is kept"
    assert (rotated.flatten(1).sort(1).values == torch.arange(16)).all()


def test_missing_ranks_are_an_error():
    with pytest.raises(ValueError, match="pass `rank_NS`"):
        decode_all(random_table(), MaskedSampling(order="halton"))


def test_critic_can_mask_kept_tokens_again():
    """The scores are reversed in every step, so that the tokens kept last have the lowest."""
    table = random_table()
    scores = [torch.arange(16.0).view(8, 2), -torch.arange(16.0).view(8, 2)]
    calls: list[Tensor] = []

    def critic(tokens: Tensor, progress: float) -> Tensor:
        assert (tokens < VOCABULARY).all(), "the critic gets no masked tokens"
        calls.append(tokens)
        return scores[(len(calls) - 1) % 2].expand(tokens.shape)

    config = MaskedSampling(
        decoding_steps=4, order="critic", choice_temperature=0.0, schedule="linear"
    )
    decode_all(table, config, critic=critic)
    indices = [masked.flatten().nonzero()[:, 0].tolist() for masked in table.masked]
    assert indices == [list(range(16)), list(range(12)), list(range(8, 16)), list(range(4))]


def test_critic_scores_decide_which_tokens_remain():
    config = MaskedSampling(decoding_steps=12, choice_temperature=0.0)
    with_critic = decode_all(
        Table(torch.zeros(8, 2, VOCABULARY)),
        dataclasses.replace(config, order="critic"),
        (1, 2, 3, 4),
        critic=parity_critic,
    )
    without = decode_all(Table(torch.zeros(8, 2, VOCABULARY)), config, (1, 2, 3, 4))
    assert (with_critic % 2).float().mean() < 0.15 < 0.35 < (without % 2).float().mean()


def test_missing_critic_is_an_error():
    with pytest.raises(ValueError, match="no critic"):
        decode_all(random_table(), MaskedSampling(order="critic"))


@pytest.mark.parametrize(
    "layout",
    [
        Layout((8, 8)),
        Layout((8, 8), patch=2),
        Layout((16, 12), patch=2),
        Layout((32,), num_quantizers=2),
    ],
)
def test_halton_order_spreads_evenly(layout):
    """The first quarter of the tokens is spread over all quadrants."""
    cells = layout.cell_coordinates()
    order, total = halton_order(cells), layout.num_positions * layout.tokens_per_position
    assert sorted(order.flatten().tolist()) == list(range(total))
    early = cells[order < total // 4]
    halves = (early >= torch.tensor(layout.grid) / 2).long()
    quadrants = halves @ (2 ** torch.arange(len(layout.grid)))
    counts = torch.bincount(quadrants, minlength=2 ** len(layout.grid))
    assert (counts > 0).all() and counts.max() <= 2 * counts.min()


def test_tokens_of_a_cell_are_consecutive_in_halton_order():
    order = halton_order(Layout((8,), num_quantizers=3).cell_coordinates())
    assert (order % 3 == torch.arange(3)).all()


# ---- sampled tokens


def test_temperature_zero_takes_the_most_likely_token_for_any_seed():
    table = random_table()
    codes = decode_all(table, MaskedSampling(decoding_steps=4, temperature=0.0), (1, 2, 3))
    assert torch.equal(codes, table.logits_NSV.argmax(-1).expand(3, 8, 2))


def test_temperature_changes_linearly_to_the_final_one():
    config = MaskedSampling(decoding_steps=5, temperature=1.0, final_temperature=0.2)
    stage = config.build_stage(torch.ones(8, 2, dtype=torch.bool), 5)
    assert [stage.temperature_at(step) for step in range(5)] == pytest.approx(
        [1, 0.8, 0.6, 0.4, 0.2]
    )
    constant = MaskedSampling(temperature=0.7).build_stage(stage.tokens_NS, 3)
    assert [constant.temperature_at(step) for step in range(3)] == [0.7, 0.7, 0.7]
    assert config.build_stage(stage.tokens_NS, 1).temperature_at(0) == 1


def test_final_temperature_of_zero_takes_the_most_likely_last_tokens():
    table = random_table()
    config = MaskedSampling(decoding_steps=4, temperature=5.0, final_temperature=0.0)
    codes = decode_all(table, config, (1, 2, 3))
    last, likely = table.masked[-1], table.logits_NSV.argmax(-1).expand(3, 8, 2)
    assert torch.equal(codes[last], likely[last])
    assert not torch.equal(codes, likely)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.4), (4, 0.6)])
def test_only_candidates_of_top_k_and_top_p_are_sampled(top_k, top_p):
    table = random_table()
    candidates = filter_top_k_p(table.logits_NSV.flatten(0, 1), top_k, top_p)
    allowed = torch.zeros(16, VOCABULARY, dtype=torch.bool).scatter(
        1, candidates.tokens_MK, candidates.logits_MK.isfinite()
    )
    config = MaskedSampling(decoding_steps=3, top_k=top_k, top_p=top_p, temperature=5.0)
    codes = decode_all(table, config, tuple(range(50)))
    assert allowed.view(8, 2, VOCABULARY).expand(50, -1, -1, -1).gather(-1, codes[..., None]).all()


def test_gumbel_noise_has_its_moments_and_is_finite_at_both_ends():
    noise = gumbel(torch.rand(100_000, generator=torch.Generator().manual_seed(1)))
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.std() == pytest.approx(1.2825, abs=0.02)
    assert gumbel(torch.tensor([0.0, 1 - 2**-24])).isfinite().all()


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_lowest_k_marks_exactly_k_tokens_among_ties(counts):
    scores = torch.randint(3, (len(counts), 3, 2)).float()
    lowest = lowest_k(scores, counts)
    assert lowest.flatten(1).sum(1).tolist() == counts
    for row, marked in zip(scores, lowest):
        if marked.any() and not marked.all():
            assert row[marked].max() <= row[~marked].min()


# ---- masking kept tokens again

REMASKING: dict[str, dict[str, typing.Any]] = {
    order: ORDERS[order] for order in ("confidence", "halton")
}


@pytest.mark.parametrize("order", REMASKING)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fraction_of_kept_tokens_is_masked_again_in_every_step(schedule, order):
    table, fraction = random_table(), 0.3
    config = MaskedSampling(decoding_steps=8, schedule=schedule, order=order, remask=fraction)
    codes = decode_all(table, config, (1, 2), **REMASKING[order])
    assert (codes < VOCABULARY).all()
    left, expected = 16, [16]
    for step, (before, after) in enumerate(zip(table.masked, table.masked[1:])):
        left = min(num_masked_after(schedule, step, 8, 16), left - 1)
        num_remasked = int(fraction * (16 - expected[-1]))
        assert (after & ~before).flatten(1).sum(1).tolist() == [num_remasked] * 2
        expected.append(left + num_remasked)
    assert table.counts == [[count, count] for count in expected]
    assert num_remasked > 0, "in the last step, too"


def test_remasked_tokens_are_random_and_sampled_again():
    table = random_table()
    config = MaskedSampling(decoding_steps=6, remask=0.4, choice_temperature=0.0)
    codes = decode_all(table, config, (1, 2))
    remasked = [after & ~before for before, after in zip(table.masked, table.masked[1:])]
    assert any(not torch.equal(first, second) for first, second in remasked)
    before = zip(table.tokens, remasked, strict=False)
    assert any((tokens[again] != codes[again]).any() for tokens, again in before)


@pytest.mark.parametrize("order", REMASKING)
def test_samples_do_not_change_if_no_token_is_masked_again(order):
    """16 tokens: a hundredth of them is none."""
    table, config = random_table(), MaskedSampling(decoding_steps=6, order=order)
    without = decode_all(table, config, (1, 2), **REMASKING[order])
    config = dataclasses.replace(config, remask=0.01)
    assert torch.equal(decode_all(table, config, (1, 2), **REMASKING[order]), without)


@pytest.mark.parametrize("order", REMASKING)
def test_given_tokens_and_other_stages_are_never_masked_again(order):
    table, (tokens, masked) = random_table(), all_masked(2)
    tokens = torch.randint(VOCABULARY, tokens.shape)
    masked[:, :3] = False
    config = MaskedSampling(decoding_steps_per_level=(5, 5), order=order, remask=0.6)
    codes = maskgit_decode(
        tokens,
        masked,
        table,
        config,
        make_generators(1, 2),
        mask_token_id=MASK,
        stages=config.build_stages(8, 2, CPU),
        **REMASKING[order],
    )
    assert torch.equal(codes[~masked], tokens[~masked]) and (codes < VOCABULARY).all()
    levels = [int(step_masked[..., 1].any()) for step_masked in table.masked]
    assert levels == sorted(levels) and set(levels) == {0, 1}
    for level, step_masked, step_tokens in zip(levels, table.masked, table.tokens):
        assert not step_masked[:, :3].any() and not step_masked[..., 1 - level].any()
        assert torch.equal(step_tokens[:, :3], tokens[:, :3])
        if level:
            assert torch.equal(step_tokens[..., 0], codes[..., 0]), "the first level is done"


def test_remasking_corrects_tokens_that_were_sampled_in_parallel():
    """All tokens should be equal; several are sampled in the first step, and differ. Later ones
    follow the majority."""

    def follow_majority(tokens_BNS: Tensor, masked_BNS: Tensor, progress: float) -> Tensor:
        counts = torch.stack([(tokens_BNS == one).flatten(1).sum(1) for one in (0, 1)], 1)
        return (10.0 * counts)[:, None, None].expand(*masked_BNS.shape, 2)[masked_BNS]

    def fraction_equal(remask: float) -> float:
        codes = maskgit_decode(
            *all_masked(100, 64, 1),
            follow_majority,
            MaskedSampling(decoding_steps=12, schedule="linear", remask=remask),
            make_generators(*range(100)),
            mask_token_id=2,
        )
        return float((codes == codes[:, :1]).flatten(1).all(1).float().mean())

    assert fraction_equal(0.0) < 0.2 < 0.7 < fraction_equal(0.4)


# ---- independence of the batch


@pytest.mark.parametrize(
    ("order", "remask"), [*((order, 0.0) for order in ORDERS), ("confidence", 0.3), ("halton", 0.3)]
)
def test_samples_of_a_seed_do_not_depend_on_the_batch(order, remask):
    config = MaskedSampling(decoding_steps=5, order=order, remask=remask)
    table, seeds = random_table(), tuple(range(8))
    train_together = decode_all(table, config, seeds, **ORDERS[order])
    for size in (1, 3):
        parts = [
            decode_all(table, config, seeds[i : i + size], **ORDERS[order])
            for i in range(0, 8, size)
        ]
        assert torch.equal(torch.cat(parts), train_together)
    assert len({tuple(one.flatten().tolist()) for one in train_together}) == 8, "each seed differs"


@pytest.mark.parametrize("remask", [0.0, 0.3])
def test_samples_do_not_depend_on_masks_of_other_examples(remask):
    table, config = random_table(), MaskedSampling(decoding_steps=6, remask=remask)
    tokens, masked = all_masked(2)
    masked[0, 1:] = False
    train_together, alone = (
        maskgit_decode(
            tokens[:count],
            masked[:count],
            table,
            config,
            make_generators(1, 2)[:count],
            mask_token_id=MASK,
        )
        for count in (2, 1)
    )
    assert torch.equal(train_together[:1], alone)


# ---- stages


def two_stages(first_steps: int = 3, second_steps: int = 2) -> list[DecodingStage]:
    first = torch.zeros(8, 2, dtype=torch.bool)
    first[:, 0] = True
    return [
        DecodingStage(first, first_steps, 1.0, 1.0),
        DecodingStage(~first, second_steps, 0.0, 0.0),
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_stages_are_decoded_one_after_the_other(order):
    """Each with its own number of steps and its own temperature."""
    table = random_table()
    config = MaskedSampling(decoding_steps=99, order=order)
    codes = decode_all(table, config, (1, 2), stages=two_stages(), **ORDERS[order])
    for tokens, masked in zip(table.tokens[:3], table.masked[:3]):
        assert (tokens[..., 1] == MASK).all() and not masked[..., 1].any()
    for tokens, masked in zip(table.tokens[3:], table.masked[3:]):
        assert torch.equal(tokens[..., 0], codes[..., 0]) and not masked[..., 0].any()
    expected = (
        [8]
        + [num_masked_after("cosine", step, 3, 8) for step in range(2)]
        + [8, num_masked_after("cosine", 0, 2, 8)]
    )
    assert table.counts == [[count, count] for count in expected]
    assert torch.equal(codes[..., 1], table.logits_NSV[:, 1].argmax(-1).expand(2, 8))


@pytest.mark.parametrize("remask", [0.0, 0.3])
def test_staged_samples_do_not_depend_on_masks_of_other_examples(remask):
    table, config = random_table(), MaskedSampling(decoding_steps=6, remask=remask)
    tokens, masked = all_masked(2)
    masked[0, 1:, 0] = False  # one token in the first stage: finished after one step, not three
    stages = [dataclasses.replace(stage, temperature=1.0) for stage in two_stages()]
    train_together, alone = (
        maskgit_decode(
            tokens[:count],
            masked[:count],
            table,
            config,
            make_generators(1, 2)[:count],
            mask_token_id=MASK,
            stages=stages,
        )
        for count in (2, 1)
    )
    assert torch.equal(train_together[:1], alone)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [(4, 1), (5, 3, 2), (1,), (2, 2, 2, 9)], ids=str)
def test_each_level_follows_the_schedule_in_its_own_steps(steps, schedule):
    table = random_table(slots=3)
    config = MaskedSampling(decoding_steps_per_level=steps, schedule=schedule)
    codes = decode_all(table, config, (1, 2), stages=config.build_stages(8, 3, CPU))
    expected = []
    for level in range(3):
        total, count = steps[min(level, len(steps) - 1)], 8
        for step in range(total):
            if count:
                expected.append((level, count))
            count = min(num_masked_after(schedule, step, total, 8), max(0, count - 1))
    assert table.counts == [[count, count] for _, count in expected]
    for (level, _), tokens, masked in zip(expected, table.tokens, table.masked, strict=True):
        assert not masked[..., :level].any() and not masked[..., level + 1 :].any()
        assert torch.equal(tokens[..., :level], codes[..., :level]), "coarser levels are done"
        assert (tokens[..., level + 1 :] == MASK).all(), "finer levels are masked"


def test_finer_levels_of_one_step_take_the_most_likely_tokens():
    stages = MaskedSampling(decoding_steps_per_level=(16, 1)).build_stages(8, 3, CPU)
    assert [stage.temperature for stage in stages] == [1.0, 0.0, 0.0]
    config = MaskedSampling(decoding_steps_per_level=(1, 2, 1), temperature=0.7)
    stages = config.build_stages(8, 3, CPU)
    assert [stage.temperature for stage in stages] == [0.7, 0.7, 0.0]
    assert MaskedSampling().build_stages(8, 3, CPU) is None


@pytest.mark.parametrize("order", ORDERS)
def test_schedule_of_a_level_counts_only_its_masked_tokens(order):
    """3 of 8 positions are given in both levels; the inputs are not modified."""
    table, config = random_table(), MaskedSampling(decoding_steps_per_level=(4, 2), order=order)
    tokens, masked = torch.randint(VOCABULARY, (1, 8, 2)), torch.ones(1, 8, 2, dtype=torch.bool)
    masked[:, :3] = False
    tokens_before, masked_before = tokens.clone(), masked.clone()
    codes = maskgit_decode(
        tokens,
        masked,
        table,
        config,
        make_generators(1),
        mask_token_id=MASK,
        stages=config.build_stages(8, 2, CPU),
        **ORDERS[order],
    )
    first = [5] + [num_masked_after("cosine", step, 4, 5) for step in range(3)]
    second = [5, num_masked_after("cosine", 0, 2, 5)]
    assert [count for (count,) in table.counts] == first + second
    assert all(torch.equal(each[:, :3], tokens[:, :3]) for each in table.tokens)
    assert torch.equal(codes[:, :3], tokens[:, :3])
    assert torch.equal(tokens, tokens_before) and torch.equal(masked, masked_before)


# ---- invalid options


@pytest.mark.parametrize(
    "options",
    [
        {"decoding_steps": 0},
        {"temperature": -1.0},
        {"final_temperature": -1.0},
        {"choice_temperature": -0.1},
        {"remask": -0.1},
        {"remask": 1.0},
        {"remask": float("nan")},
        {"remask": 0.1, "order": "critic"},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"temperature": float("nan")},
        {"choice_temperature": float("nan")},
        {"top_p": float("nan")},
        {"decoding_steps_per_level": (16, 0)},
    ],
    ids=str,
)
def test_invalid_options_are_errors_that_name_the_option(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        MaskedSampling(**options)


@pytest.mark.parametrize("schedule", ["cosin", math.cos, None])
def test_an_unknown_masking_schedule_is_an_error(schedule):
    with pytest.raises(ValueError, match="schedule must be one of 'cosine', 'linear'"):
        MaskedSampling(schedule=schedule)
    with pytest.raises(ValueError, match="schedule must be one of"):
        mask_ratio(schedule, 0.5)


def test_unknown_order_is_rejected():
    with pytest.raises(ValueError, match="order must be one of 'confidence', 'critic', 'halton'"):
        MaskedSampling(order="random")
