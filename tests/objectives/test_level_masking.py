"""The masked task on symbols in levels, as sounds have them: one level is guessed, finer ones are
never seen, and where a sound has ended there is nothing.

The tokenizers here are none: examples are codes already, three levels of them, beside codes that
say what is said, two frames of which last as long as three places. In double precision, where equal
is equal to many digits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.data.tokens import TokenizedBatch
from tessera.engine.engine import heard
from tessera.engine.modes import eval_mode, hash_seed
from tessera.engine.task import Batch, check_ownership
from tessera.nn.conformer import ConformerConfig
from tessera.nn.masked_transformer import CriticConfig, CriticHeadConfig, MaskedTransformerConfig
from tessera.nn.token_layout import Layout
from tessera.objectives.generation import GenerationRequest
from tessera.objectives.masked import NEVER, MaskedConfig, MaskedTask
from tessera.objectives.masking import ExampleRandomness, LevelMaskingConfig, Masked, TokenBatch
from tessera.sampling.maskgit import MaskedSampling
from tessera.sampling.schedules import num_masked_after

VOCABULARY, SAID, LEVELS, PLACES = 10, 7, 3, 12
FRAMES = 8
"""of what is said"""
MASK = VOCABULARY
CRITICS = {
    "none": None,
    "own": CriticConfig(dim=16, depth=1, heads=2),
    "head": CriticHeadConfig(dim=8),
}


class NoTokenizer:
    def __init__(self, frames: int, vocab_size: int, num_quantizers: int, seconds: float):
        self.network = nn.Identity()
        self.vocab_size, self.grid, self.num_quantizers, self.features, self.seconds = (
            vocab_size,
            (frames,),
            num_quantizers,
            None,
            seconds,
        )

    def codes(self, examples: Any) -> Tensor:
        raise AssertionError("these examples are codes already")

    def media(self, codes: Tensor) -> list[Any]:
        return list(codes)


def build_task(**choices: Any) -> MaskedTask:
    """With something to say at every place that starts as nothing."""
    model = MaskedTransformerConfig(
        dim=24,
        depth=2,
        heads=2,
        text=None,
        conformer=ConformerConfig(kernel=3),
        absolute_positions=False,
        self_condition=choices.pop("self_condition", False),
    )
    usual = {
        "masking": LevelMaskingConfig(),
        "sampling": MaskedSampling(decoding_steps_per_level=(4, 1), noise=1.0),
    }
    config = MaskedConfig(model=model, semantic="elsewhere", **usual | choices)
    task = config.build(
        NoTokenizer(PLACES, VOCABULARY, LEVELS, 0.02), semantic=NoTokenizer(FRAMES, SAID, 1, 0.03)
    )
    for parameter in task.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return task.double()


def batch_of(*lengths: int, first: int = 0) -> Batch:
    """Sounds of so many places; number i is the same in any company."""
    codes, said = (
        torch.full((len(lengths), PLACES, LEVELS), -1),
        torch.full((len(lengths), FRAMES), -1),
    )
    for row, length in enumerate(lengths):
        own = generator(100 + first + row)
        codes[row, :length] = torch.randint(VOCABULARY, (PLACES, LEVELS), generator=own)[:length]
        frames = -(-length * FRAMES // PLACES)
        said[row, :frames] = torch.randint(SAID, (FRAMES,), generator=own)[:frames]
    numbers = range(first, first + len(lengths))
    examples = TokenizedBatch({"tokenizer": codes, "semantic": said}, [""] * len(lengths))
    return Batch(examples, [str(i) for i in numbers], [hash_seed(5, i) for i in numbers])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_by_one(*lengths: int) -> list[Batch]:
    return [batch_of(length, first=i) for i, length in enumerate(lengths)]


def masked_of(task: MaskedTask, batch: Batch) -> Masked:
    return task.masked(task.token_batch(batch.examples), ExampleRandomness.of(batch))


# ------------------------------------------------------------------------------------------------ what is hidden of one


def draws(count: int = 300, places: int = PLACES, **settings: Any) -> list[tuple[Tensor, Masked]]:
    masking = LevelMaskingConfig(**settings)
    tokens = [
        torch.randint(VOCABULARY, (places, LEVELS), generator=generator(seed))
        for seed in range(count)
    ]
    return [
        (one, masking.draw(one, VOCABULARY, generator(1000 + seed)))
        for seed, one in enumerate(tokens)
    ]


def level_of(masked: Masked) -> int:
    [level] = masked.asked.any(0).nonzero().flatten().tolist()
    return level


def prompt_of(masked: Masked) -> int:
    """How many places are shown in the finest level; only where that is not itself asked about."""
    assert level_of(masked) < LEVELS - 1
    shown = (masked.shown[:, -1] != MASK).tolist()
    return shown.index(False)


def test_of_one_level_some_are_asked_coarser_ones_are_seen_and_finer_ones_are_not():
    for tokens, masked in draws():
        level = level_of(masked)
        assert torch.equal(masked.shown[:, :level], tokens[:, :level])
        assert torch.equal(masked.shown[:, level] == MASK, masked.asked[:, level])
        assert torch.equal(
            masked.shown[~masked.asked[:, level], level], tokens[~masked.asked[:, level], level]
        )
        if level < LEVELS - 1:
            begins = prompt_of(masked)
            assert (masked.shown[begins:, level + 1 :] == MASK).all()


def test_the_prompt_is_shown_in_all_levels_and_nothing_is_asked_in_it():
    lengths = []
    for tokens, masked in draws():
        if level_of(masked) < LEVELS - 1:
            begins = prompt_of(masked)
            assert (
                torch.equal(masked.shown[:begins], tokens[:begins])
                and not masked.asked[:begins].any()
            )
            assert masked.asked[begins:].any()
            lengths.append(begins)
    assert set(lengths) == set(range(PLACES)), (
        "every length of a prompt is drawn, none and all but one place included"
    )


def test_without_a_prompt_finer_levels_are_hidden_everywhere():
    for _, masked in draws(prompt=False):
        assert (masked.shown[:, level_of(masked) + 1 :] == MASK).all()


def test_every_level_is_drawn_equally_often_and_does_not_depend_on_the_settings():
    levels = [level_of(masked) for _, masked in draws(900)]
    assert all(abs(levels.count(level) - 300) < 60 for level in range(LEVELS))
    assert [level_of(masked) for _, masked in draws(900, prompt=False, schedule="linear")] == levels


@pytest.mark.parametrize("prompt", [True, False])
def test_as_many_are_asked_on_average_as_the_loss_counts_on(prompt):
    counts = [int(masked.asked.sum()) for _, masked in draws(1500, places=100, prompt=prompt)]
    assert min(counts) >= 1
    usual = LevelMaskingConfig(prompt=prompt).expected_num_masked(Layout((100,), LEVELS))
    assert sum(counts) / len(counts) == pytest.approx(usual, abs=2)


def test_neither_what_is_asked_nor_what_is_finer_reaches_what_is_shown():
    masking = LevelMaskingConfig()
    for seed, (tokens, masked) in enumerate(draws(60)):
        others = torch.where(masked.shown == MASK, (tokens + 3) % VOCABULARY, tokens)
        again = masking.draw(others, VOCABULARY, generator(1000 + seed))
        assert torch.equal(again.shown, masked.shown) and torch.equal(again.asked, masked.asked)


@pytest.mark.parametrize("places", [1, 2])
def test_of_the_shortest_sound_something_is_asked(places):
    for _, masked in draws(50, places=places):
        assert masked.asked.any()


def test_one_level_is_refused_with_what_to_do():
    model = MaskedTransformerConfig(dim=24, depth=2, heads=2, text=None)
    with pytest.raises(ValueError, match="one level.*codec of several levels"):
        MaskedConfig(model=model, masking=LevelMaskingConfig()).build(
            NoTokenizer(PLACES, VOCABULARY, 1, 0.02)
        )


# ----------------------------------------------------------------------------------------- sounds of different lengths


LENGTHS = (12, 5, 1, 9)


def test_beyond_the_end_nothing_is_asked_and_nothing_is_shown():
    task, batch = build_task(), batch_of(*LENGTHS)
    token_batch, masked = task.token_batch(batch.examples), masked_of(task, batch)
    assert token_batch.lengths == list(LENGTHS)
    for length, shown, asked in zip(LENGTHS, masked.shown, masked.asked, strict=True):
        assert asked[:length].any() and not asked[length:].any()
        assert (shown[length:] == MASK).all()


@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("self_condition", [False, True], ids=["", "remembers"])
def test_a_padded_batch_costs_what_its_sounds_cost_one_by_one(critic, self_condition):
    task, batch = (
        build_task(critic=CRITICS[critic], self_condition=self_condition),
        batch_of(*LENGTHS),
    )
    alone = one_by_one(*LENGTHS)
    for update in task.updates:
        loss, losses = update.loss(batch, 0), [update.loss(one, 0) for one in alone]
        for name, term in loss.terms.items():
            torch.testing.assert_close(
                term, torch.stack([one.terms[name] for one in losses]).mean(), msg=name
            )
        metrics = [heard(one) for one in (loss, *losses)]
        for name, value in metrics[0].items():
            torch.testing.assert_close(
                value, torch.stack([one[name] for one in metrics[1:]]).mean(), msg=name
            )


def test_a_padded_batch_is_measured_as_its_sounds_one_by_one():
    task, batch = build_task(), batch_of(*LENGTHS)
    with eval_mode(task):
        seen, others = task.eval_step(batch), [task.eval_step(one) for one in one_by_one(*LENGTHS)]
    for name, value in seen.items():
        torch.testing.assert_close(
            value, torch.stack([one[name] for one in others]).sum(0), msg=name
        )
    numbers = task.compute_metrics(seen)
    assert numbers.keys() == {"cross_entropy", "accuracy", "accuracy_1", "accuracy_2", "accuracy_3"}


def test_the_loss_is_the_cross_entropy_of_what_is_asked_and_each_level_has_a_head_of_its_own():
    task, batch = build_task(), batch_of(*LENGTHS)
    masked, token_batch = masked_of(task, batch), task.token_batch(batch.examples)
    network = task.model.network
    condition = network.condition([""] * 4, [False] * 4, batch.examples.codes["semantic"])
    states = network.states(masked.shown, condition, valid_BN=masked.valid_BN)
    summed = torch.zeros(())
    for example, place, level in masked.asked.nonzero().tolist():
        logits_V = network.heads[level](states[example, place][None])[0]
        summed = summed + F.cross_entropy(logits_V, token_batch.tokens_BNS[example, place, level])
    usual = 4 * LevelMaskingConfig().expected_num_masked(task.layout)
    torch.testing.assert_close(
        task.masked_token_loss(batch, 0).terms["cross_entropy"], summed / usual
    )


def test_what_is_hidden_from_the_model_changes_no_logit():
    """Neither the symbols that it has to guess, nor any that is finer."""
    task, batch = build_task(), batch_of(*LENGTHS)
    seen: list[Tensor] = []
    read = task.model.network.read
    task.model.network.read = lambda rows, asked: seen.append(read(rows, asked)) or seen[-1]
    losses = [task.masked_token_loss(batch, 0).total()]
    masked, codes = masked_of(task, batch), batch.examples.codes["tokenizer"]
    hidden = (masked.shown == MASK) & (codes >= 0)
    assert (hidden & ~masked.asked).any(), "something finer is hidden"
    batch.examples.codes["tokenizer"] = torch.where(hidden, (codes + 3) % VOCABULARY, codes)
    losses.append(task.masked_token_loss(batch, 0).total())
    assert torch.equal(seen[0], seen[1]) and losses[0] != losses[1]


@pytest.mark.parametrize("critic", CRITICS)
def test_a_callers_symbols_are_never_changed(critic):
    """Theirs wrote its mask into the batch that it was given."""
    task, batch = build_task(critic=CRITICS[critic]), batch_of(*LENGTHS)
    before = {name: codes.clone() for name, codes in batch.examples.codes.items()}
    for update in task.updates:
        update.loss(batch, 0)
    with eval_mode(task):
        task.eval_step(batch)
        task.sample(batch)
    codes, hidden = (
        before["tokenizer"][:1].clone(),
        torch.arange(PLACES)[None, :, None].expand(1, -1, LEVELS) >= 4,
    )
    task.generate(
        GenerationRequest([""], [1], codes=codes, hidden=hidden, coarser=before["semantic"][:1])
    )
    assert torch.equal(codes, before["tokenizer"][:1])
    assert all(torch.equal(batch.examples.codes[name], codes) for name, codes in before.items())


# ------------------------------------------------------------------------------------------------------------ critics


@pytest.mark.parametrize("critic", ["own", "head"])
def test_the_critic_is_asked_about_nothing_that_is_hidden_or_beyond_the_end(critic):
    task, batch = build_task(critic=CRITICS[critic]), batch_of(*LENGTHS)
    check_ownership(task)
    task.masked_token_loss(batch, 0)
    filled, drawn = batch.scratch["filled"], batch.scratch["drawn"]
    real = task.token_batch(batch.examples).valid_BN1.expand_as(drawn)
    question = (filled != MASK) & real
    assert drawn[question].any() and not question.all() and not drawn[~question].any()
    realness_logits = task.realness_logits(filled, batch.examples, task.token_batch(batch.examples))
    each = [
        F.binary_cross_entropy_with_logits(belief[asked], (~made)[asked].double())
        for belief, made, asked in zip(realness_logits, drawn, question, strict=True)
    ]
    torch.testing.assert_close(task.critic_loss(batch, 0).terms["apart"], torch.stack(each).mean())


@pytest.mark.parametrize(
    ("learns", "starts"), [("all", [0, 0]), ("generator", [0, NEVER]), ("critic", [NEVER, 0])]
)
def test_only_who_is_to_learn_ever_starts(train_only, starts):
    task = build_task(critic=CRITICS["own"], train_only=train_only)
    assert [update.starts for update in task.updates] == starts


def test_a_critic_that_learns_alone_is_shown_what_the_model_draws():
    batch, alone = batch_of(*LENGTHS), batch_of(*LENGTHS)
    task = build_task(critic=CRITICS["own"])
    task.masked_token_loss(batch, 0)
    expected = task.critic_loss(batch, 0).total()
    assert torch.equal(task.critic_loss(alone, 0).total(), expected)
    assert all(parameter.grad is None for parameter in task.model.network.parameters())


def test_to_learn_a_critic_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="there is none: --critic"):
        MaskedConfig(train_only="critic")


# ----------------------------------------------------------------------------------------------------------- sampling


def noted(task: MaskedTask) -> list[tuple[Tensor, Tensor]]:
    """What the network is shown and asked in each pass."""
    passes: list[tuple[Tensor, Tensor]] = []
    masked_token_loss = task.model.network.logits_at

    def noting(tokens: Tensor, asked: Tensor, *more: Any) -> Tensor:
        passes.append((tokens.clone(), asked.clone()))
        return masked_token_loss(tokens, asked, *more)

    task.model.network.logits_at = noting
    return passes


def make_request(batch: Batch, **more: Any) -> GenerationRequest:
    lengths = TokenBatch.of(batch.examples.codes["tokenizer"]).lengths
    return GenerationRequest(
        [""] * len(batch),
        batch.seeds,
        coarser=batch.examples.codes["semantic"],
        lengths=lengths,
        **more,
    )


@pytest.mark.parametrize("rounds", [(4, 1), (3, 2, 1), (1,)], ids=str)
def test_each_round_sees_no_finer_level_and_hides_as_many_as_the_schedule_says(decoding_steps):
    task, batch = build_task(), batch_of(12, 5)
    passes = noted(task)
    codes = task.generate(
        make_request(batch), MaskedSampling(decoding_steps_per_level=decoding_steps)
    )
    each = [decoding_steps[min(level, len(decoding_steps) - 1)] for level in range(LEVELS)]
    expected = [
        (
            level,
            [
                length if number == 0 else num_masked_after("cosine", number - 1, count, length)
                for length in (12, 5)
            ],
        )
        for level, count in enumerate(each)
        for number in range(count)
    ]
    assert len(passes) == sum(each)
    for (shown, asked), (level, hidden) in zip(passes, expected, strict=True):
        assert asked[..., level].sum(1).tolist() == hidden
        assert asked.sum((1, 2)).tolist() == hidden, "only symbols of this level"
        real = torch.arange(PLACES) < torch.tensor([[12], [5]])
        assert (shown[..., level + 1 :][real] == MASK).all(), (
            "finer ones are hidden until their turn"
        )
        assert torch.equal(shown[..., :level][real], codes[..., :level][real]), (
            "coarser ones are laid"
        )


def test_a_level_with_fewer_symbols_than_rounds_takes_as_many_rounds_as_it_has_symbols():
    task = build_task()
    passes = noted(task)
    task.generate(make_request(batch_of(12)), MaskedSampling(decoding_steps_per_level=(16, 1)))
    assert len(passes) == 12 + LEVELS - 1, "each round lays at least one"


@pytest.mark.parametrize("critic", CRITICS)
def test_a_sound_is_drawn_the_same_alone_and_beside_longer_ones(critic):
    task, batch = build_task(critic=CRITICS[critic]), batch_of(*LENGTHS)
    sampling = MaskedSampling(
        decoding_steps_per_level=(4, 2), order="confidence" if critic == "none" else "critic"
    )
    train_together = task.generate(make_request(batch), sampling)
    for row, (length, one) in enumerate(zip(LENGTHS, one_by_one(*LENGTHS), strict=True)):
        assert torch.equal(task.generate(make_request(one), sampling)[0], train_together[row])
        assert (train_together[row, :length] >= 0).all() and (train_together[row, :length] < VOCABULARY).all()
        assert (train_together[row, length:] == -1).all()


def test_what_is_padded_is_drawn_as_what_is_cut_to_its_length():
    """Nothing is left to chance, so that both draw alike, and 6 places last as long as 4 frames."""
    task, sampling = (
        build_task(),
        MaskedSampling(decoding_steps_per_level=(4, 2), temperature=0.0, noise=0.0),
    )
    batch = batch_of(6)
    padded = task.generate(make_request(batch), sampling)
    codes = batch.examples.codes["tokenizer"][:, :6]
    short = GenerationRequest(
        [""],
        batch.seeds,
        codes=codes,
        hidden=codes >= 0,
        coarser=batch.examples.codes["semantic"][:, :4],
    )
    assert torch.equal(task.generate(short, sampling), padded[:, :6])


def test_a_prompt_stays_as_it_is_and_is_seen_in_all_levels_in_every_round():
    task, batch = build_task(), batch_of(12, 12)
    codes = batch.examples.codes["tokenizer"]
    hidden = (torch.arange(PLACES) >= 5)[None, :, None].expand_as(codes)
    passes = noted(task)
    made = task.generate(make_request(batch, codes=codes, hidden=hidden))
    assert torch.equal(made[:, :5], codes[:, :5]) and not torch.equal(made, codes)
    assert all(
        torch.equal(shown[:, :5], codes[:, :5]) and not asked[:, :5].any()
        for shown, asked in passes
    )
    assert [asked.sum().item() for _, asked in passes][:2] == [
        2 * 7,
        2 * num_masked_after("cosine", 0, 4, 7),
    ]


def test_sounds_longer_than_any_that_was_learnt_from_can_be_asked_for():
    task = build_task()
    codes, said = torch.zeros(1, 30, LEVELS, dtype=torch.long), torch.randint(SAID, (1, 20))
    made = task.generate(
        GenerationRequest(
            [""], [1], codes=codes, hidden=torch.ones_like(codes).bool(), coarser=said
        )
    )
    assert made.shape == (1, 30, LEVELS) and (made >= 0).all()
    other = task.generate(
        GenerationRequest(
            [""], [1], codes=codes, hidden=torch.ones_like(codes).bool(), coarser=(said + 1) % SAID
        )
    )
    assert not torch.equal(made, other)


# ----------------------------------------------------------------------------------------------------------- learning


def test_what_is_said_is_learnt_from_and_followed():
    """Symbols that what is said decides, by heart: told right, it lays them; told what another
    sound says, it lays others."""
    batch = batch_of(12, 12, 9, 12, 6, 12, 12, 12)
    said, codes = batch.examples.codes["semantic"], batch.examples.codes["tokenizer"]
    under = said[:, ((torch.arange(PLACES) + 0.5) * FRAMES / PLACES).long()]
    batch.examples.codes["tokenizer"] = torch.where(
        codes >= 0, (under[..., None] + torch.arange(LEVELS)) % VOCABULARY, -1
    )
    task = build_task().float()
    optimizer = torch.optim.AdamW(task.parameters(), 3e-3)
    for step in range(120):
        batch.seeds = [hash_seed(9, step, i) for i in range(len(batch))]
        optimizer.zero_grad()
        task.masked_token_loss(batch, step).total().backward()
        optimizer.step()
    truth = batch.examples.codes["tokenizer"]
    followed = task.generate(make_request(batch))
    batch.examples.codes["semantic"] = torch.where(said >= 0, said.roll(1, 0).clamp_min(0), -1)
    shuffled = task.generate(make_request(batch))
    real = truth >= 0
    right, wrong = ((made == truth)[real].float().mean().item() for made in (followed, shuffled))
    assert right > 0.9 and wrong < 0.5, (right, wrong)
