"""The masked task: what must be guessed is never seen, guidance is its formula, and a seed is a
picture in any company.

The tokenizer here is none: examples are codes already, and what codes look like is not asked.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.data.tokens import TokenizedBatch
from tessera.engine.engine import heard
from tessera.engine.modes import eval_mode, hash_seed
from tessera.engine.task import Batch, check_ownership
from tessera.modalities.image.recipes import images_maskgit
from tessera.nn.masked_transformer import CriticConfig, CriticHeadConfig, MaskedTransformerConfig
from tessera.objectives.generation import GenerationRequest
from tessera.objectives.masked import Guide, MaskedConfig, MaskedTask
from tessera.objectives.masking import ExampleRandomness, MaskingConfig, TokenBatch
from tessera.sampling.guidance import Guidance
from tessera.sampling.maskgit import MaskedSampling
from tessera.sampling.schedules import Schedule, mean_mask_ratio
from tessera.text.learned import LearnedTextConfig
from tests.networks import randomize_zero_weights

VOCABULARY = 10
TEXT = LearnedTextConfig(dim=16, depth=1, heads=2, vocab_size=300, max_len=16)
TEXTS = ["a red circle", "two blue squares", "x", "a green ring"]


class NoTokenizer:
    """Codes on a grid of 4 x 4, or of 2 x 2 for the smaller pictures."""

    def __init__(self, side: int = 4, vocab_size: int = VOCABULARY):
        self.network = nn.Identity()
        self.vocab_size, self.grid, self.num_quantizers = vocab_size, (side, side), 1
        self.features = torch.randn(
            vocab_size, 3, generator=torch.Generator().manual_seed(vocab_size)
        )
        self.seconds = None

    def codes(self, examples: Any) -> Tensor:
        raise AssertionError("these examples are codes already")

    def media(self, codes: Tensor) -> list[Any]:
        return list(codes)


def ready(task: MaskedTask) -> MaskedTask:
    """It has something to say everywhere, and has met the texts."""
    for reader in task.readers():
        reader.text.prepare_text(TEXTS)
    return randomize_zero_weights(task)


def build_task(low_res_tokenizer: bool = False, **choices: Any) -> MaskedTask:
    model = MaskedTransformerConfig(dim=24, depth=2, heads=2, text=TEXT)
    config = MaskedConfig(**{"model": model, "places": 4, **choices})
    return ready(config.build(NoTokenizer(), **({"smaller": NoTokenizer(2, 7)} if low_res_tokenizer else {})))


def self_condition() -> MaskedTransformerConfig:
    return MaskedTransformerConfig(dim=24, depth=2, heads=2, text=TEXT, self_condition=True)


def batch_of(count: int = 4, low_res_tokenizer: bool = False, first: int = 0) -> Batch:
    codes = {"tokenizer": torch.randint(VOCABULARY, (count, 4, 4))}
    if low_res_tokenizer:
        codes["smaller"] = torch.randint(7, (count, 2, 2))
    texts = [TEXTS[(first + i) % len(TEXTS)] for i in range(count)]
    names = [str(first + i) for i in range(count)]
    return Batch(
        TokenizedBatch(codes, texts), names, [hash_seed(5, first + i) for i in range(count)]
    )


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -------------------------------------------------------------------------------------------------- what is hidden


@pytest.mark.parametrize("replace", [0.0, 0.3, 1.0])
def test_the_true_symbol_under_a_mask_never_reaches_what_is_shown(replace):
    masking = MaskingConfig(replace=replace)
    for seed in range(30):
        tokens = torch.randint(VOCABULARY, (4, 4), generator=generator(seed))
        masked = masking.draw(tokens, VOCABULARY, generator(seed))
        others = torch.where(masked.asked, (tokens + 1 + seed % 8) % VOCABULARY, tokens)
        again = masking.draw(others, VOCABULARY, generator(seed))
        assert torch.equal(again.shown, masked.shown) and torch.equal(again.asked, masked.asked)
        assert torch.equal(masked.shown[~masked.asked], tokens[~masked.asked])


@pytest.mark.parametrize(
    "choices",
    [{}, {"critic": CriticHeadConfig(dim=8)}, {"model": self_condition()}],
    ids=["plain", "head", "remembers"],
)
def test_the_true_symbol_under_a_mask_changes_no_logit(choices):
    task, batch = build_task(**choices).double(), batch_of()
    seen: list[Tensor] = []
    read = task.model.network.read

    def noted(rows: Tensor, asked: Tensor) -> Tensor:
        seen.append(read(rows, asked))
        return seen[-1]

    task.model.network.read = noted
    losses = [task.masked_token_loss(batch, 0).total()]
    asked = task.masked(task.token_batch(batch.examples), ExampleRandomness.of(batch)).asked
    codes = batch.examples.codes["tokenizer"]
    hidden = task.layout.unpatchify(asked)
    batch.examples.codes["tokenizer"] = torch.where(hidden, (codes + 3) % VOCABULARY, codes)
    losses.append(task.masked_token_loss(batch, 0).total())
    assert torch.equal(seen[0], seen[1]) and losses[0] != losses[1]


def test_no_gradient_flows_to_the_row_of_a_symbol_that_is_hidden_everywhere():
    task, batch = (
        build_task(model=MaskedTransformerConfig(dim=24, depth=2, heads=2, text=None), places=None),
        batch_of(2),
    )
    tokens = task.token_batch(batch.examples).tokens_BNS
    asked = task.masked(TokenBatch.of(tokens), ExampleRandomness.of(batch)).asked
    codes = torch.where(task.layout.unpatchify(asked), 9, batch.examples.codes["tokenizer"] % 9)
    batch.examples.codes["tokenizer"] = codes
    task.masked_token_loss(batch, 0).total().backward()
    table = task.model.network.embedding.table.weight.grad
    assert (table[9] == 0).all(), "9 is only ever hidden"
    assert (table[VOCABULARY] != 0).any() and (table[:9] != 0).any()


@pytest.mark.parametrize("schedule", typing.get_args(Schedule))
def test_as_many_are_hidden_on_average_as_the_schedule_says_and_at_least_one(schedule):
    masking, tokens = MaskingConfig(schedule=schedule), torch.zeros(16, 4, dtype=torch.long)
    counts = [
        int(masking.draw(tokens, VOCABULARY, generator(seed)).asked.sum()) for seed in range(1500)
    ]
    assert min(counts) >= 1 and max(counts) <= 64
    assert sum(counts) / len(counts) / 64 == pytest.approx(mean_mask_ratio(schedule), abs=0.03)


def test_of_a_mosaic_of_one_symbol_that_one_is_hidden():
    masked = MaskingConfig().draw(torch.tensor([[4]]), VOCABULARY, generator(1))
    assert masked.asked.all() and masked.shown.item() == VOCABULARY


def test_every_symbol_is_hidden_equally_often():
    masking, tokens = MaskingConfig(schedule="linear"), torch.zeros(4, 2, dtype=torch.long)
    often = (
        torch.stack(
            [masking.draw(tokens, VOCABULARY, generator(seed)).asked for seed in range(3000)]
        )
        .float()
        .mean(0)
    )
    assert torch.allclose(often, often.mean().expand(4, 2), atol=0.04)


def test_some_hidden_symbols_are_shown_after_all_and_some_are_replaced():
    masking, tokens = MaskingConfig(keep=0.2, replace=0.3), torch.full((64, 16), 3)
    drawn = [masking.draw(tokens, VOCABULARY, generator(seed)) for seed in range(20)]
    shown = torch.cat([one.shown[one.asked] for one in drawn])
    share = {
        name: (shown == value).float().mean().item()
        for name, value in (("mask", VOCABULARY), ("true", 3))
    }
    assert share["mask"] == pytest.approx(0.5, abs=0.02)
    assert share["true"] == pytest.approx(0.2 + 0.3 / VOCABULARY, abs=0.02)


def test_what_is_hidden_does_not_depend_on_keeping_and_replacing():
    tokens = torch.randint(VOCABULARY, (8, 4))
    one = MaskingConfig().draw(tokens, VOCABULARY, generator(3))
    other = MaskingConfig(keep=0.4, replace=0.4).draw(tokens, VOCABULARY, generator(3))
    assert torch.equal(one.asked, other.asked)


@pytest.mark.parametrize(
    "wrong",
    [{"keep": -0.1}, {"replace": -0.1}, {"keep": 0.6, "replace": 0.6}, {"keep": 1.1}],
    ids=str,
)
def test_shares_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="shares"):
        MaskingConfig(**wrong)


# ------------------------------------------------------------------------------------------------------------- the loss


def test_the_loss_is_the_cross_entropy_of_the_hidden_symbols():
    task, batch = build_task(cond_drop_prob=0.0).double(), batch_of()
    tokens = task.token_batch(batch.examples).tokens_BNS
    masked = task.masked(TokenBatch.of(tokens), ExampleRandomness.of(batch))
    logits = task.logits_of(masked, batch, batch.examples.captions)
    expected = F.cross_entropy(logits, tokens[masked.asked], reduction="sum") / (
        4 * 16 * mean_mask_ratio("cosine")
    )
    loss = task.masked_token_loss(batch, 0)
    assert torch.allclose(loss.terms["cross_entropy"], expected) and loss.terms.keys() == {
        "cross_entropy"
    }
    with eval_mode(task):
        numbers = task.compute_metrics(task.eval_step(batch))
    mean = F.cross_entropy(logits, tokens[masked.asked])
    assert numbers["cross_entropy"] == pytest.approx(mean.item())
    assert 0 <= numbers["accuracy"] <= 1 and "condition_gain" in numbers


@pytest.mark.parametrize(
    "choices", [{}, {"critic": CriticConfig(dim=16, depth=1, heads=2)}, {"model": self_condition()}]
)
def test_a_batch_of_four_is_two_of_two(choices):
    task, whole = (
        build_task(masking=MaskingConfig(keep=0.1, replace=0.1), **choices).double(),
        batch_of(),
    )
    halves = []
    for start in (0, 2):
        part = batch_of(2, first=start)
        part.examples.codes["tokenizer"] = whole.examples.codes["tokenizer"][start : start + 2]
        halves.append(part)
    for update in task.updates:
        losses = [update.loss(batch, 0) for batch in (whole, *halves)]
        for name in losses[0].terms:
            assert torch.allclose(
                losses[0].terms[name], (losses[1].terms[name] + losses[2].terms[name]) / 2
            )
        metrics = [heard(loss) for loss in losses]
        for name in metrics[0]:
            assert torch.allclose(metrics[0][name], (metrics[1][name] + metrics[2][name]) / 2)


def test_a_dropped_caption_does_not_enter_the_loss():
    batch, other = batch_of(), batch_of()
    other.examples.codes["tokenizer"] = batch.examples.codes["tokenizer"]
    other.examples.captions = list(reversed(batch.examples.captions))
    always = build_task(cond_drop_prob=0.999999).double()
    assert torch.allclose(
        always.masked_token_loss(batch, 0).total(), always.masked_token_loss(other, 0).total()
    )
    never = build_task(cond_drop_prob=0.0).double()
    assert not torch.allclose(
        never.masked_token_loss(batch, 0).total(), never.masked_token_loss(other, 0).total()
    )


def test_captions_are_dropped_as_often_as_asked():
    task = build_task(cond_drop_prob=0.3)
    dropped: list[bool] = []
    condition = task.model.network.condition

    def noted(texts: Any, which: Any, low_res_tokenizer: Any = None) -> Any:
        dropped.extend(which)
        return condition(texts, which, low_res_tokenizer)

    task.model.network.condition = noted
    for first in range(0, 800, 100):
        task.masked_token_loss(batch_of(100, first=first), 0)
    assert sum(dropped) / len(dropped) == pytest.approx(0.3, abs=0.05)


def test_smoothing_the_labels_is_for_training_only():
    batch = batch_of()
    torch.manual_seed(1)
    plain = build_task().double()
    torch.manual_seed(1)
    smooth = build_task(label_smoothing=0.2).double()
    assert not torch.allclose(
        plain.masked_token_loss(batch, 0).total(), smooth.masked_token_loss(batch, 0).total()
    )
    with eval_mode(plain), eval_mode(smooth):
        assert torch.equal(
            plain.eval_step(batch)["cross_entropy"], smooth.eval_step(batch)["cross_entropy"]
        )


@pytest.mark.parametrize("name", ["drop_condition", "label_smoothing"])
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_settings_that_are_no_shares_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        MaskedConfig(**{name: value})


def test_right_captions_are_held_against_those_of_neighbours():
    task, batch = build_task().double(), batch_of()
    with eval_mode(task):
        seen = task.eval_step(batch)
        masked = task.masked(task.token_batch(batch.examples), ExampleRandomness.of(batch))
        shuffled = task.logits_of(masked, batch, TEXTS[1:] + TEXTS[:1])
    wrong = F.cross_entropy(
        shuffled, task.token_batch(batch.examples).tokens_BNS[masked.asked], reduction="sum"
    )
    assert torch.allclose(seen["gain"], wrong - seen["cross_entropy"])
    batch.examples.captions = ["x"] * 4
    with eval_mode(task):
        assert task.eval_step(batch)["gain"].abs() < 1e-9, (
            "where all captions are the same no shuffling shows"
        )
        assert "gain" not in task.eval_step(batch_of(1)), (
            "one example has nobody to borrow a caption from"
        )


# -------------------------------------------------------------------------------------------------------------- critics


@pytest.mark.parametrize(
    "critic", [CriticConfig(dim=16, depth=1, heads=2), CriticHeadConfig(dim=8)]
)
def test_the_critic_is_shown_real_and_drawn_symbols_and_told_which(critic):
    task, batch = build_task(critic=critic), batch_of()
    check_ownership(task)
    assert [update.name for update in task.updates] == ["model", "critic"]
    task.masked_token_loss(batch, 0)
    filled, drawn = batch.scratch["filled"], batch.scratch["drawn"]
    tokens = task.token_batch(batch.examples).tokens_BNS
    assert (filled < VOCABULARY).all() and torch.equal(filled[~drawn], tokens[~drawn])
    assert not torch.equal(filled[drawn], tokens[drawn])
    realness_logits = task.realness_logits(filled, batch.examples, task.token_batch(batch.examples))
    expected = F.binary_cross_entropy_with_logits(realness_logits, (~drawn).float())
    loss = task.critic_loss(batch, 0)
    assert torch.allclose(loss.total(), expected)
    loss.total().backward()
    assert all(p.grad is not None for p in task.model.critic.parameters() if p.requires_grad)


def test_with_symbols_kept_in_sight_what_the_critic_sees_as_drawn_is_drawn():
    task, batch = (
        build_task(critic=CriticHeadConfig(dim=8), masking=MaskingConfig(keep=0.5, replace=0.5)),
        batch_of(),
    )
    task.masked_token_loss(batch, 0)
    assert (
        not torch.equal(batch.scratch["filled"], task.token_batch(batch.examples).tokens_BNS)
        and batch.scratch["drawn"].any()
    )


@pytest.mark.parametrize(
    "critic", [CriticConfig(dim=16, depth=1, heads=2), CriticHeadConfig(dim=8)]
)
def test_sampling_by_the_critic_asks_it(critic):
    task = build_task(critic=critic)
    wanted = GenerationRequest(TEXTS, [1, 2, 3, 4])
    by_critic = task.generate(wanted, MaskedSampling(decoding_steps=4, order="critic", noise=0.0))
    by_confidence = task.generate(wanted, MaskedSampling(decoding_steps=4, noise=0.0))
    assert not torch.equal(by_critic, by_confidence) and by_critic.max() < VOCABULARY


def test_a_model_without_a_critic_says_so():
    with pytest.raises(ValueError, match="no critic"):
        build_task().generate(
            GenerationRequest(TEXTS, [1, 2, 3, 4]), MaskedSampling(order="critic")
        )


# ------------------------------------------------------------------------------------------------------------- guidance


def noting_rows(task: MaskedTask) -> list[int]:
    """How many rows each pass of the network ends with."""
    rows: list[int] = []
    last = task.model.network.transformer.blocks[-1]
    attn = last.attn

    def noted(*looking: Any) -> Tensor:
        made = attn(*looking)
        rows.append(len(made))
        return made

    last.attn = noted
    return rows


def hidden_mosaic(task: MaskedTask, count: int = 4) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (count, 4, 4))
    asked = torch.rand(tokens.shape) < 0.6
    return tokens.masked_fill(asked, VOCABULARY), asked


def passed(
    task: MaskedTask, tokens: Tensor, asked: Tensor, texts: list[str], dropped: bool = False
) -> Tensor:
    network = task.model.network
    return network.logits(
        network.states(tokens, network.condition(texts, [dropped] * len(texts))), asked
    )


def test_a_scale_of_one_is_the_conditional_pass_to_the_bit_and_at_half_the_cost():
    task = build_task()
    tokens, asked = hidden_mosaic(task)
    expected = passed(task, tokens, asked, TEXTS)
    rows = noting_rows(task)
    guide = Guide(
        task.model.network,
        GenerationRequest(TEXTS, [0] * 4),
        Guidance(scale=1.0),
        torch.device("cpu"),
    )
    assert torch.equal(guide(tokens, asked, 0.5), expected) and rows == [4]


def test_a_scale_is_the_formula_of_two_passes():
    task = build_task().double()
    tokens, asked = hidden_mosaic(task)
    with_prompt, without = (
        passed(task, tokens, asked, TEXTS),
        passed(task, tokens, asked, TEXTS, dropped=True),
    )
    rows = noting_rows(task)
    guide = Guide(
        task.model.network,
        GenerationRequest(TEXTS, [0] * 4),
        Guidance(scale=2.5),
        torch.device("cpu"),
    )
    assert torch.allclose(
        guide(tokens, asked, 0.5), without + 2.5 * (with_prompt - without)
    ) and rows == [8]


def test_a_negative_prompt_takes_the_place_of_nothing():
    task = build_task().double()
    tokens, asked = hidden_mosaic(task)
    with_prompt, instead = (
        passed(task, tokens, asked, TEXTS),
        passed(task, tokens, asked, ["a blue ring, blurred"] * 4),
    )
    wanted = GenerationRequest(TEXTS, [0] * 4, negative=["a blue ring, blurred"] * 4)
    guide = Guide(task.model.network, wanted, Guidance(scale=3.0), torch.device("cpu"))
    assert torch.allclose(guide(tokens, asked, 0.0), instead + 3 * (with_prompt - instead))


def test_guidance_costs_twice_only_within_its_interval():
    task = build_task()
    rows = noting_rows(task)
    guidance = Guidance(scale=3.0, start=0.25, end=0.5)
    task.generate(
        GenerationRequest(TEXTS, [1, 2, 3, 4]), MaskedSampling(decoding_steps=8), guidance
    )
    assert rows == [4, 4, 8, 8, 8, 4, 4, 4]
    rows.clear()
    task.generate(
        GenerationRequest(TEXTS, [1, 2, 3, 4]),
        MaskedSampling(decoding_steps=4),
        Guidance(scale=3.0, ramp="linear"),
    )
    assert rows == [4, 8, 8, 8], "a ramp begins at 1"


def test_a_ramp_is_the_formula_with_its_own_scale():
    task = build_task().double()
    tokens, asked = hidden_mosaic(task)
    with_prompt, without = (
        passed(task, tokens, asked, TEXTS),
        passed(task, tokens, asked, TEXTS, dropped=True),
    )
    guide = Guide(
        task.model.network,
        GenerationRequest(TEXTS, [0] * 4),
        Guidance(scale=5.0, ramp="linear"),
        torch.device("cpu"),
    )
    assert torch.allclose(guide(tokens, asked, 0.25), without + 2.0 * (with_prompt - without))


def test_where_there_is_no_text_there_is_no_guidance():
    task = build_task(model=MaskedTransformerConfig(dim=24, depth=2, heads=2, text=None))
    rows = noting_rows(task)
    task.generate(
        GenerationRequest([""] * 3, [1, 2, 3]),
        MaskedSampling(decoding_steps=3),
        Guidance(scale=5.0),
    )
    assert rows == [3, 3, 3]


def test_guidance_of_one_that_remembers_keeps_both_memories():
    """Each pass sees its own states of the round before; where guidance begins late, both see the
    conditional ones."""
    task = build_task(model=self_condition()).double()
    network = task.model.network
    tokens, asked = hidden_mosaic(task)
    guide = Guide(
        task.model.network,
        GenerationRequest(TEXTS, [0] * 4),
        Guidance(scale=3.0),
        torch.device("cpu"),
    )
    guide(tokens, asked, 0.0)
    second = guide(tokens, asked, 0.5)
    logits = []
    for dropped in (False, True):
        condition = network.condition(TEXTS, [dropped] * 4)
        before = network.states(tokens, condition)
        logits.append(network.logits(network.states(tokens, condition, before), asked))
    assert torch.allclose(second, logits[1] + 3 * (logits[0] - logits[1]))


# ---------------------------------------------------------------------------------------------------- one seed, one picture


def company(
    task: MaskedTask,
    size: int,
    wanted: Callable[[int], tuple[str, int]],
    count: int = 8,
    **settings: Any,
) -> Tensor:
    parts = []
    for first in range(0, count, size):
        some = [wanted(i) for i in range(first, min(first + size, count))]
        parts.append(
            task.generate(
                GenerationRequest([text for text, _ in some], [seed for _, seed in some]),
                **settings,
            )
        )
    return torch.cat(parts)


def one_of(i: int) -> tuple[str, int]:
    return ["a red circle", "two blue squares left of a ring", "x", ""][i % 4], hash_seed(3, i)


@pytest.mark.parametrize("order", ["confidence", "halton", "critic"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_same_seed_is_the_same_picture_whatever_the_batch(order, scale):
    task = build_task(critic=CriticHeadConfig(dim=8)).eval()
    settings = {
        "sampling": MaskedSampling(decoding_steps=6, order=order),
        "guidance": Guidance(scale=scale),
    }
    train_together = company(task, 8, one_of, **settings)
    for size in (1, 3):
        assert torch.equal(company(task, size, one_of, **settings), train_together)
    assert len({tuple(one.flatten().tolist()) for one in train_together}) == 8


@pytest.fixture(scope="module")
def as_small() -> MaskedTask:
    """A network of the small preset's shape."""
    torch.manual_seed(0)
    return ready(images_maskgit("small").task.build(NoTokenizer(16, 1000))).eval()


@pytest.mark.parametrize(
    "texts",
    [["a red circle"] * 8, ["a red circle", "two blue squares left of a ring", "x", ""] * 2],
)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.13, 0.03])
def test_a_guess_is_the_same_to_the_bit_whoever_is_guessed_beside_it(as_small, share, texts):
    """Else a seed is now and then another picture: a sum that is rounded otherwise moves the border
    between two symbols."""
    tokens = torch.randint(1000, (8, 64, 4), generator=generator(1))
    asked = torch.rand(tokens.shape, generator=generator(2)) < share
    shown = tokens.masked_fill(asked, 1000)
    with torch.no_grad():
        train_together = passed(as_small, shown, asked, texts)
        for size in (1, 3):
            parts = [slice(first, first + size) for first in range(0, 8, size)]
            apart = torch.cat(
                [passed(as_small, shown[some], asked[some], texts[some]) for some in parts]
            )
            assert torch.equal(apart, train_together), (
                f"{size}: up to {(apart - train_together).abs().max():.1e} apart"
            )


def test_the_same_seed_is_the_same_picture_with_a_network_of_the_small_presets_shape(as_small):
    settings = {"sampling": MaskedSampling(decoding_steps=6), "guidance": Guidance(scale=3.0)}
    train_together = company(as_small, 8, one_of, **settings)
    apart = {
        size: (company(as_small, size, one_of, **settings) != train_together).sum().item()
        for size in (1, 3)
    }
    assert apart == {1: 0, 3: 0}, f"of {train_together.numel()} symbols so many are others"


def test_a_seed_decides_and_so_does_the_text():
    task = build_task().eval()

    def made(text: str, seed: int) -> Tensor:
        return task.generate(GenerationRequest([text], [seed]))

    assert torch.equal(made("x", 1), made("x", 1))
    assert not torch.equal(made("x", 1), made("x", 2)) and not torch.equal(
        made("x", 1), made("a red circle", 1)
    )


def test_sampling_leaves_the_global_generator_alone():
    task = build_task()
    before = torch.get_rng_state()
    task.generate(GenerationRequest(["x"], [1]))
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------------ mending, enlarging


@pytest.mark.parametrize("order", ["confidence", "halton", "critic"])
def test_what_is_not_to_be_drawn_anew_stays_as_it_was(order):
    task = build_task(critic=CriticHeadConfig(dim=8))
    codes = torch.randint(VOCABULARY, (4, 4, 4))
    hidden = torch.zeros(4, 4, 4, dtype=torch.bool)
    hidden[:, 1:3, 2:] = True
    mended = task.generate(
        GenerationRequest(TEXTS, [1, 2, 3, 4], codes=codes, hidden=hidden),
        MaskedSampling(decoding_steps=3, order=order),
    )
    assert torch.equal(mended[~hidden], codes[~hidden]) and not torch.equal(mended, codes)
    other = torch.where(hidden, 0, codes)
    again = task.generate(
        GenerationRequest(TEXTS, [1, 2, 3, 4], codes=other, hidden=hidden),
        MaskedSampling(decoding_steps=3, order=order),
    )
    assert torch.equal(again, mended), "what was under the mask is not looked at"


def test_the_smaller_picture_has_its_say_in_loss_and_samples():
    task, batch = build_task(low_res_tokenizer=True).double(), batch_of(low_res_tokenizer=True)
    loss = task.masked_token_loss(batch, 0).total()
    low_res_tokenizer = batch.examples.codes["smaller"]
    batch.examples.codes["smaller"] = (low_res_tokenizer + 1) % 7
    assert not torch.allclose(task.masked_token_loss(batch, 0).total(), loss)
    one, other = (
        task.generate(GenerationRequest(TEXTS, [1, 2, 3, 4], coarser=codes))
        for codes in (low_res_tokenizer, (low_res_tokenizer + 1) % 7)
    )
    assert not torch.equal(one, other)


def overfitted(task: MaskedTask, batch: Batch, steps: int) -> MaskedTask:
    optimizer = torch.optim.AdamW(task.parameters(), 3e-3)
    for step in range(steps):
        batch.seeds = [hash_seed(9, step, i) for i in range(len(batch))]
        optimizer.zero_grad()
        task.masked_token_loss(batch, step).total().backward()
        optimizer.step()
    return task


def seen_after(task: MaskedTask, batch: Batch) -> float:
    batch.seeds = [hash_seed(1, i) for i in range(len(batch))]
    with eval_mode(task):
        return task.compute_metrics(task.eval_step(batch))["cross_entropy"]


def test_super_resolution_learns_from_the_smaller_picture():
    batch = batch_of(8, low_res_tokenizer=True)
    batch.examples.captions = ["x"] * 8
    task = overfitted(
        build_task(low_res_tokenizer=True, masking=MaskingConfig(schedule="cosine")), batch, 150
    )
    right = seen_after(task, batch)
    batch.examples.codes["smaller"] = batch.examples.codes["smaller"].roll(1, 0)
    shuffled = seen_after(task, batch)
    assert right < 0.7 < 2 * right + 0.7 < shuffled, (right, shuffled)


def test_captions_are_learnt_from():
    batch = batch_of(4)
    task = overfitted(build_task(), batch, 150)
    batch.seeds = [hash_seed(1, i) for i in range(4)]
    with eval_mode(task):
        numbers = task.compute_metrics(task.eval_step(batch))
    assert numbers["cross_entropy"] < 1.6 and numbers["condition_gain"] > 1, numbers


# ------------------------------------------------------------------------------------------------------------- captions


def test_not_one_caption_is_refused_and_some_are_enough(tmp_path):
    task = build_task()
    with pytest.raises(ValueError, match="Not one example has a caption.*--text none"):
        task.prepare_text(["", ""], tmp_path)
    task.prepare_text(["", "a ring"], tmp_path)
    build_task(model=MaskedTransformerConfig(dim=24, depth=2, heads=2, text=None)).prepare_text(
        ["", ""], tmp_path
    )


def test_a_critic_of_its_own_hears_the_captions_too(tmp_path):
    task = MaskedConfig(
        model=MaskedTransformerConfig(dim=24, depth=2, heads=2, text=TEXT),
        critic=CriticConfig(dim=16, depth=1, heads=2),
    ).build(NoTokenizer())
    before = [
        reader.text.tokenize(["a green ring"]).shape[1]
        for reader in (task.model.network, task.model.critic)
    ]
    task.prepare_text(TEXTS * 3, tmp_path)
    after = [
        reader.text.tokenize(["a green ring"]).shape[1]
        for reader in (task.model.network, task.model.critic)
    ]
    assert after[0] == after[1] < before[0] == before[1]
