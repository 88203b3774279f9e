"""The masked objective: masked tokens do not leak, guidance is its formula, and samples depend only
on their seeds and prompts.

The examples are codes already, and the tokenizer is a stand-in without a network.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.data.tokens import TokenizedBatch
from tessera.engine.modes import eval_mode, hash_seed
from tessera.engine.task import Batch, check_ownership
from tessera.modalities.image.recipes import images_maskgit
from tessera.nn.masked_transformer import CriticConfig, CriticHeadConfig, MaskedTransformerConfig
from tessera.nn.token_layout import Layout
from tessera.objectives.generation import GenerationRequest, TokenPrompt, other_captions
from tessera.objectives.masked import GuidedLogits, MaskedConfig, MaskedTask
from tessera.objectives.masking import MaskedTokens, MaskingConfig, TokenBatch
from tessera.sampling.guidance import Guidance
from tessera.sampling.maskgit import MaskedSampling
from tessera.sampling.schedules import Schedule, mean_mask_ratio
from tessera.text.learned import LearnedTextConfig
from tests.masking import mask_example
from tests.networks import randomize_zero_weights

VOCAB_SIZE = 10
TEXT = LearnedTextConfig(dim=16, depth=1, heads=2, vocab_size=300, max_len=16)
TEXTS = ["a red circle", "two blue squares", "x", "a green ring"]
SEEDS = [1, 2, 3, 4]
CRITICS = [CriticConfig(dim=16, depth=1, heads=2), CriticHeadConfig(dim=8)]
CPU = torch.device("cpu")


class FakeTokenizer:
    """Codes on a grid of 4 x 4, or of 2 x 2 for low-resolution images."""

    is_external = False
    seconds = None

    def __init__(self, side: int = 4, vocab_size: int = VOCAB_SIZE):
        self.network: nn.Module = nn.Identity()
        self.vocab_size, self.grid, self.num_quantizers = vocab_size, (side, side), 1
        self.features = torch.randn(1, vocab_size, 3, generator=generator(vocab_size))

    def encode_examples(self, examples: Any) -> Tensor:
        raise AssertionError("the examples are codes already")

    def to_media(self, codes: Tensor) -> list[Any]:
        return list(codes)


def model_config(**choices: Any) -> MaskedTransformerConfig:
    return MaskedTransformerConfig(**{"dim": 24, "depth": 2, "heads": 2, "text": TEXT, **choices})


def prepare(task: MaskedTask) -> MaskedTask:
    """Train the text vocabulary and randomize weights that start at zero."""
    for network in task.text_networks():
        network.text.prepare_text(TEXTS)
    return randomize_zero_weights(task)


def build_config(**choices: Any) -> MaskedConfig:
    return MaskedConfig(**{"tokenizer": "", "model": model_config(), "max_positions": 4, **choices})


def build_task(low_res: bool = False, **choices: Any) -> MaskedTask:
    conditioners = {"low_res_tokenizer": FakeTokenizer(2, 7)} if low_res else {}
    return prepare(build_config(**choices).build(tokenizer=FakeTokenizer(), **conditioners))


def build_batch(count: int = 4, low_res: bool = False, first: int = 0) -> Batch[Any]:
    codes = {"tokenizer": torch.randint(VOCAB_SIZE, (count, 4, 4))}
    if low_res:
        codes["low_res_tokenizer"] = torch.randint(7, (count, 2, 2))
    texts = [TEXTS[(first + i) % len(TEXTS)] for i in range(count)]
    names = [str(first + i) for i in range(count)]
    seeds = [hash_seed(5, first + i) for i in range(count)]
    return Batch(TokenizedBatch(codes, texts), names, seeds)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mask_batch(task: MaskedTask, batch: Batch[Any]) -> MaskedTokens:
    """Mask a batch as the loss does."""
    return task.mask_batch(batch, task.get_inputs(batch))[1]


def predict(
    task: MaskedTask, masked: MaskedTokens, batch: Batch[Any], captions: Sequence[str]
) -> Tensor:
    kept = [False] * len(batch)
    return task.predict(masked, task.get_condition(task.network, batch.examples, kept, captions))


def request(texts: Sequence[str] = TEXTS, seeds: Sequence[int] = SEEDS, **more: Any) -> Any:
    return GenerationRequest(prompts=texts, seeds=seeds, **more)


# ---- masking


@pytest.mark.parametrize("replace", [0.0, 0.3, 1.0])
def test_input_ids_do_not_depend_on_masked_tokens(replace):
    masking = MaskingConfig(replace=replace)
    for seed in range(30):
        tokens = torch.randint(VOCAB_SIZE, (4, 4), generator=generator(seed))
        masked = mask_example(masking, tokens, VOCAB_SIZE, generator(seed))
        others = torch.where(masked.loss_mask, (tokens + 1 + seed % 8) % VOCAB_SIZE, tokens)
        again = mask_example(masking, others, VOCAB_SIZE, generator(seed))
        assert torch.equal(again.input_ids, masked.input_ids)
        assert torch.equal(again.loss_mask, masked.loss_mask)
        assert torch.equal(masked.input_ids[~masked.loss_mask], tokens[~masked.loss_mask])


@pytest.mark.parametrize(
    "choices",
    [{}, {"critic": CriticHeadConfig(dim=8)}, {"model": model_config(self_condition=True)}],
    ids=["plain", "critic head", "self-conditioning"],
)
def test_logits_do_not_depend_on_masked_tokens(choices):
    task, batch = build_task(**choices).double(), build_batch()
    logits: list[Tensor] = []
    apply_heads = task.network.apply_heads

    def record(states: Tensor, predict: Tensor) -> Tensor:
        logits.append(apply_heads(states, predict))
        return logits[-1]

    task.network.apply_heads = record
    losses = [task.masked_token_loss(batch, 0).total()]
    is_masked = task.layout.unpatchify(mask_batch(task, batch).loss_mask)
    codes = batch.examples.codes["tokenizer"]
    batch.examples.codes["tokenizer"] = torch.where(is_masked, (codes + 3) % VOCAB_SIZE, codes)
    losses.append(task.masked_token_loss(batch, 0).total())
    assert torch.equal(logits[0], logits[1]) and losses[0] != losses[1]


def test_embedding_of_a_token_that_is_always_masked_gets_no_gradient():
    task = build_task(model=model_config(text=None), max_positions=None)
    batch = build_batch(2)
    is_masked = task.layout.unpatchify(mask_batch(task, batch).loss_mask)
    codes = torch.where(is_masked, 9, batch.examples.codes["tokenizer"] % 9)
    batch.examples.codes["tokenizer"] = codes
    task.masked_token_loss(batch, 0).total().backward()
    gradient = task.network.embedding.table.weight.grad
    assert (gradient[9] == 0).all(), "token 9 is always masked"
    assert (gradient[VOCAB_SIZE] != 0).any() and (gradient[:9] != 0).any()


@pytest.mark.parametrize("schedule", typing.get_args(Schedule))
@pytest.mark.parametrize("time_power", [1.0, 2.0])
def test_mean_number_of_masked_tokens_follows_the_schedule(schedule, time_power):
    masking = MaskingConfig(schedule=schedule, time_power=time_power)
    tokens = torch.zeros(16, 4, dtype=torch.long)
    counts = [
        int(mask_example(masking, tokens, VOCAB_SIZE, generator(seed)).loss_mask.sum())
        for seed in range(1500)
    ]
    assert min(counts) >= 1 and max(counts) <= 64
    mean = masking.expected_num_masked(Layout((16,), 4))
    assert mean == pytest.approx(64 * mean_mask_ratio(schedule, time_power))
    assert sum(counts) / len(counts) == pytest.approx(mean, abs=2)


def test_single_token_is_always_masked():
    masked = mask_example(MaskingConfig(), torch.tensor([[4]]), VOCAB_SIZE, generator(1))
    assert masked.loss_mask.all() and masked.input_ids.item() == VOCAB_SIZE


def test_all_tokens_are_masked_equally_often():
    masking, tokens = MaskingConfig(schedule="linear"), torch.zeros(4, 2, dtype=torch.long)
    masks = [
        mask_example(masking, tokens, VOCAB_SIZE, generator(seed)).loss_mask for seed in range(3000)
    ]
    frequency = torch.stack(masks).float().mean(0)
    assert torch.allclose(frequency, frequency.mean().expand(4, 2), atol=0.04)


def test_fractions_of_masked_tokens_are_kept_and_replaced():
    masking, tokens = MaskingConfig(keep=0.2, replace=0.3), torch.full((64, 16), 3)
    masked = [mask_example(masking, tokens, VOCAB_SIZE, generator(seed)) for seed in range(20)]
    input_ids = torch.cat([one.input_ids[one.loss_mask] for one in masked])
    is_mask, is_true = ((input_ids == value).float().mean().item() for value in (VOCAB_SIZE, 3))
    assert is_mask == pytest.approx(0.5, abs=0.02)
    assert is_true == pytest.approx(0.2 + 0.3 / VOCAB_SIZE, abs=0.02)


def test_loss_mask_does_not_depend_on_keep_and_replace():
    tokens = torch.randint(VOCAB_SIZE, (8, 4))
    one = mask_example(MaskingConfig(), tokens, VOCAB_SIZE, generator(3))
    other = mask_example(MaskingConfig(keep=0.4, replace=0.4), tokens, VOCAB_SIZE, generator(3))
    assert torch.equal(one.loss_mask, other.loss_mask)


@pytest.mark.parametrize(
    "options",
    [{"keep": -0.1}, {"replace": -0.1}, {"keep": 0.6, "replace": 0.6}, {"keep": 1.1}],
    ids=str,
)
def test_invalid_keep_and_replace_are_errors(options):
    with pytest.raises(ValueError, match="must be fractions whose sum is at most 1"):
        MaskingConfig(**options)


@pytest.mark.parametrize("power", [0.0, -1.0, float("inf"), float("nan")])
def test_an_invalid_power_of_time_is_an_error(power):
    with pytest.raises(ValueError, match="time_power must be above 0 and finite"):
        MaskingConfig(time_power=power)


# ---- the loss


def test_loss_is_the_cross_entropy_of_masked_tokens():
    task, batch = build_task(cond_drop_prob=0.0).double(), build_batch()
    tokens = task.get_tokens(batch.examples).tokens_BNS
    masked = mask_batch(task, batch)
    logits = predict(task, masked, batch, batch.examples.captions)
    targets = tokens[masked.loss_mask]
    expected = F.cross_entropy(logits, targets, reduction="sum")
    expected = expected / (4 * 16 * mean_mask_ratio("cosine"))
    loss = task.masked_token_loss(batch, 0)
    assert loss.terms.keys() == {"cross_entropy"}
    assert torch.allclose(loss.terms["cross_entropy"], expected)
    with eval_mode(task):
        metrics = task.compute_metrics(task.eval_step(batch))
    assert metrics["cross_entropy"] == pytest.approx(F.cross_entropy(logits, targets).item())
    assert 0 <= metrics["accuracy"] <= 1 and "condition_gain" in metrics


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_cross_entropy_per_token_is_the_mean_over_masked_tokens(label_smoothing):
    """First over those of each example, then over the examples, and without label smoothing.

    The loss is the sum over all masked tokens, divided by their expected number.
    """
    task = build_task(cond_drop_prob=0.0, label_smoothing=label_smoothing).double()
    expected_count = 4 * 16 * mean_mask_ratio("cosine")
    num_masked, differences = [], []
    for first in range(0, 16, 4):
        batch = build_batch(first=first)
        masked = mask_batch(task, batch)
        logits = predict(task, masked, batch, batch.examples.captions)
        targets = task.get_tokens(batch.examples).tokens_BNS[masked.loss_mask]
        counts = masked.loss_mask.flatten(1).sum(1).tolist()
        losses = F.cross_entropy(logits, targets, reduction="none").split(counts)
        expected = torch.stack([one.mean() for one in losses]).mean()
        loss = task.masked_token_loss(batch, 0)
        per_token = loss.metrics["cross_entropy_per_token"]
        assert callable(per_token), "it is computed only at steps that are logged"
        value, term = per_token(), loss.terms["cross_entropy"].detach()
        torch.testing.assert_close(value, expected.detach())
        assert not value.requires_grad
        if not label_smoothing:
            torch.testing.assert_close(term, torch.cat(losses).detach().sum() / expected_count)
        num_masked.append(sum(counts))
        differences.append(abs(float(value - term)))
    assert len(set(num_masked)) > 1 and min(differences) > 0.01


@pytest.mark.parametrize(
    "choices", [{}, {"critic": CRITICS[0]}, {"model": model_config(self_condition=True)}]
)
def test_batch_of_four_equals_two_of_two(choices):
    masking = MaskingConfig(keep=0.1, replace=0.1)
    task, whole = build_task(masking=masking, **choices).double(), build_batch()
    halves = [build_batch(2, first=start) for start in (0, 2)]
    for start, half in zip((0, 2), halves, strict=True):
        half.examples.codes["tokenizer"] = whole.examples.codes["tokenizer"][start : start + 2]
    for update in task.updates:
        losses = [update.loss(batch, 0) for batch in (whole, *halves)]
        for name in losses[0].terms:
            expected = (losses[1].terms[name] + losses[2].terms[name]) / 2
            assert torch.allclose(losses[0].terms[name], expected)
        metrics = [loss.detached() for loss in losses]
        for name, value in metrics[0].items():
            assert torch.allclose(value, (metrics[1][name] + metrics[2][name]) / 2), name


def test_loss_does_not_depend_on_a_dropped_caption():
    batch, other = build_batch(), build_batch()
    other.examples.codes["tokenizer"] = batch.examples.codes["tokenizer"]
    other.examples.captions = list(reversed(batch.examples.captions))
    always, never = (build_task(cond_drop_prob=p).double() for p in (0.999999, 0.0))
    losses = [
        [task.masked_token_loss(one, 0).total() for one in (batch, other)]
        for task in (always, never)
    ]
    assert torch.allclose(*losses[0]) and not torch.allclose(*losses[1])


def test_captions_are_dropped_with_the_configured_probability():
    task = build_task(cond_drop_prob=0.3)
    recorded: list[bool] = []
    condition = task.network.condition

    def record(texts: Any, *others: Any) -> Any:
        recorded.extend((~texts.has_text_B).tolist())
        return condition(texts, *others)

    task.network.condition = record
    for first in range(0, 800, 100):
        task.masked_token_loss(build_batch(100, first=first), 0)
    assert sum(recorded) / len(recorded) == pytest.approx(0.3, abs=0.05)


def test_label_smoothing_is_for_training_only():
    batch = build_batch()
    torch.manual_seed(1)
    plain = build_task().double()
    torch.manual_seed(1)
    smoothed = build_task(label_smoothing=0.2).double()
    assert not torch.allclose(
        plain.masked_token_loss(batch, 0).total(), smoothed.masked_token_loss(batch, 0).total()
    )
    with eval_mode(plain), eval_mode(smoothed):
        assert torch.equal(
            plain.eval_step(batch)["cross_entropy"], smoothed.eval_step(batch)["cross_entropy"]
        )


@pytest.mark.parametrize("name", ["cond_drop_prob", "label_smoothing"])
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_fractions_outside_of_zero_to_one_are_errors(name, value):
    with pytest.raises(ValueError, match=f"{name} must be at least 0 and below 1"):
        build_config(**{name: value})


def test_condition_gain_compares_captions_with_those_of_neighbours():
    task, batch = build_task().double(), build_batch()
    with eval_mode(task):
        sums = task.eval_step(batch)
        masked = mask_batch(task, batch)
        shuffled = predict(task, masked, batch, TEXTS[1:] + TEXTS[:1])
    targets = task.get_tokens(batch.examples).tokens_BNS[masked.loss_mask]
    other = F.cross_entropy(shuffled, targets, reduction="sum")
    assert torch.allclose(sums["gain"], other - sums["cross_entropy"])
    batch.examples.captions = ["x"] * 4
    with eval_mode(task):
        assert "gain" not in task.eval_step(batch), "there is no other caption"
        assert "gain" not in task.eval_step(build_batch(1)), "one example has no neighbour"


def test_condition_gain_skips_neighbours_of_the_same_class():
    assert other_captions(["a", "a", "b", "a", "c"]) == ["b", "b", "a", "c", "a"]
    assert other_captions(["a", "a"]) is None and other_captions([]) is None


# ---- critics


def realness_logits(task: MaskedTask, batch: Batch[Any]) -> Tensor:
    """Return the critic's logits for the completed tokens of the last loss."""
    backbone, critic = task.model.critic_backbone, task.model.critic
    assert critic is not None
    condition = task.get_condition(backbone, batch.examples, [False] * len(batch))
    return critic.realness_logits(backbone.states(batch.scratch["completed"], condition))


@pytest.mark.parametrize("critic", CRITICS)
def test_critic_is_trained_to_classify_real_and_sampled_tokens(critic):
    task, batch = build_task(critic=critic), build_batch()
    check_ownership(task)
    assert [update.name for update in task.updates] == ["model", "critic"]
    task.masked_token_loss(batch, 0)
    completed, is_sampled = batch.scratch["completed"], batch.scratch["is_sampled"]
    tokens = task.get_tokens(batch.examples).tokens_BNS
    assert (completed < VOCAB_SIZE).all()
    assert torch.equal(completed[~is_sampled], tokens[~is_sampled])
    assert not torch.equal(completed[is_sampled], tokens[is_sampled])
    expected = F.binary_cross_entropy_with_logits(
        realness_logits(task, batch), (~is_sampled).float()
    )
    loss = task.critic_loss(batch, 0)
    assert loss.terms.keys() == {"bce"} and torch.allclose(loss.total(), expected)
    loss.total().backward()
    assert task.model.critic is not None
    assert all(p.grad is not None for p in task.model.critic.parameters() if p.requires_grad)


def test_critic_gets_sampled_tokens_where_masked_tokens_are_kept():
    masking = MaskingConfig(keep=0.5, replace=0.5)
    task, batch = build_task(critic=CriticHeadConfig(dim=8), masking=masking), build_batch()
    task.masked_token_loss(batch, 0)
    tokens = task.get_tokens(batch.examples).tokens_BNS
    assert not torch.equal(batch.scratch["completed"], tokens) and batch.scratch["is_sampled"].any()


@pytest.mark.parametrize("critic", CRITICS)
def test_sampling_order_critic_uses_the_critic(critic):
    task = build_task(critic=critic)
    by_critic, by_confidence = (
        task.generate(
            request(sampling=MaskedSampling(decoding_steps=4, order=order, choice_temperature=0.0))
        )
        for order in ("critic", "confidence")
    )
    assert not torch.equal(by_critic, by_confidence) and by_critic.max() < VOCAB_SIZE


def test_sampling_order_critic_without_a_critic_is_an_error():
    with pytest.raises(ValueError, match="no critic"):
        build_task().generate(request(sampling=MaskedSampling(order="critic")))
    with pytest.raises(ValueError, match="order is critic, but there is none"):
        build_config(sampling=MaskedSampling(order="critic"))


# ---- guidance


def record_rows(task: MaskedTask) -> list[int]:
    """Return a list to which each pass of the network appends its number of rows."""
    rows: list[int] = []
    last: Any = task.network.transformer.blocks[-1]
    attn = last.attn

    def record(*args: Any) -> Tensor:
        output = attn(*args)
        rows.append(len(output))
        return output

    last.attn = record
    return rows


def random_masked_tokens(count: int = 4) -> tuple[Tensor, Tensor]:
    """Return input ids and the mask of the tokens to predict."""
    tokens = torch.randint(VOCAB_SIZE, (count, 4, 4))
    masked = torch.rand(tokens.shape) < 0.6
    return tokens.masked_fill(masked, VOCAB_SIZE), masked


def compute_logits(
    task: MaskedTask, tokens: Tensor, masked: Tensor, texts: list[str], dropped: bool = False
) -> Tensor:
    condition = task.network.condition(texts, [dropped] * len(texts))
    return task.network.logits(task.network.states(tokens, condition), masked)


def guide(task: MaskedTask, guidance: Guidance, **more: Any) -> GuidedLogits:
    return GuidedLogits(task.network, request(**more), guidance, None, CPU)


def test_guidance_scale_one_is_a_single_conditional_pass():
    task = build_task()
    tokens, masked = random_masked_tokens()
    expected = compute_logits(task, tokens, masked, TEXTS)
    rows = record_rows(task)
    assert torch.equal(guide(task, Guidance(scale=1.0))(tokens, masked, 0.5), expected)
    assert rows == [4]


def test_guidance_extrapolates_between_two_passes():
    task = build_task().double()
    tokens, masked = random_masked_tokens()
    conditional = compute_logits(task, tokens, masked, TEXTS)
    unconditional = compute_logits(task, tokens, masked, TEXTS, dropped=True)
    rows = record_rows(task)
    guided = guide(task, Guidance(scale=2.5))(tokens, masked, 0.5)
    assert torch.allclose(guided, unconditional + 2.5 * (conditional - unconditional))
    assert rows == [8]


def test_negative_prompt_replaces_the_unconditional_pass():
    task = build_task().double()
    tokens, masked = random_masked_tokens()
    negative = "a blue ring, blurred"
    conditional = compute_logits(task, tokens, masked, TEXTS)
    other = compute_logits(task, tokens, masked, [negative] * 4)
    guided = guide(task, Guidance(scale=3.0), negative_prompt=negative)(tokens, masked, 0.0)
    assert torch.allclose(guided, other + 3 * (conditional - other))


def test_guidance_doubles_the_batch_only_within_its_interval():
    task = build_task()
    rows = record_rows(task)
    guidance = Guidance(scale=3.0, start=0.25, end=0.5)
    task.generate(request(sampling=MaskedSampling(decoding_steps=8), guidance=guidance))
    assert rows == [4, 4, 8, 8, 8, 4, 4, 4]
    rows.clear()
    guidance = Guidance(scale=3.0, ramp="linear")
    task.generate(request(sampling=MaskedSampling(decoding_steps=4), guidance=guidance))
    assert rows == [4, 8, 8, 8], "a ramp starts at 1"


def test_an_interval_without_a_step_equals_no_guidance():
    task = build_task()
    rows = record_rows(task)
    sampling = MaskedSampling(decoding_steps=4)
    outside = request(sampling=sampling, guidance=Guidance(scale=9.0, start=1.0))
    off = request(sampling=sampling, guidance=Guidance(scale=1.0))
    assert torch.equal(task.generate(outside), task.generate(off))
    assert rows == [4] * 8


def test_guidance_ramp_changes_the_scale_with_progress():
    task = build_task().double()
    tokens, masked = random_masked_tokens()
    conditional = compute_logits(task, tokens, masked, TEXTS)
    unconditional = compute_logits(task, tokens, masked, TEXTS, dropped=True)
    guided = guide(task, Guidance(scale=5.0, ramp="linear"))(tokens, masked, 0.25)
    assert torch.allclose(guided, unconditional + 2.0 * (conditional - unconditional))


def test_model_without_text_has_no_guidance():
    task = build_task(model=model_config(text=None))
    rows = record_rows(task)
    sampling, guidance = MaskedSampling(decoding_steps=3), Guidance(scale=5.0)
    task.generate(request([""] * 3, SEEDS[:3], sampling=sampling, guidance=guidance))
    assert rows == [3, 3, 3]


def test_guidance_with_self_conditioning_keeps_states_of_both_passes():
    task = build_task(model=model_config(self_condition=True)).double()
    network = task.network
    tokens, masked = random_masked_tokens()
    guided_logits = guide(task, Guidance(scale=3.0))
    guided_logits(tokens, masked, 0.0)
    second = guided_logits(tokens, masked, 0.5)
    logits = []
    for dropped in (False, True):
        condition = network.condition(TEXTS, [dropped] * 4)
        previous = network.states(tokens, condition)
        logits.append(network.logits(network.states(tokens, condition, previous), masked))
    assert torch.allclose(second, logits[1] + 3 * (logits[0] - logits[1]))


# ---- one seed, one image


def generate_in_batches(
    task: MaskedTask, size: int, prompt_of: Callable[[int], tuple[str, int]], **settings: Any
) -> Tensor:
    """Generate eight samples in batches of some size."""
    parts = []
    for first in range(0, 8, size):
        texts, seeds = zip(*[prompt_of(i) for i in range(first, min(first + size, 8))], strict=True)
        parts.append(task.generate(request(texts, seeds, **settings)))
    return torch.cat(parts)


def prompt_of(i: int) -> tuple[str, int]:
    return ["a red circle", "two blue squares left of a ring", "x", ""][i % 4], hash_seed(3, i)


@pytest.mark.parametrize("order", ["confidence", "halton", "critic"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_sample_of_a_seed_does_not_depend_on_the_batch(order, scale):
    task = build_task(critic=CriticHeadConfig(dim=8)).eval()
    settings = {
        "sampling": MaskedSampling(decoding_steps=6, order=order),
        "guidance": Guidance(scale=scale),
    }
    together = generate_in_batches(task, 8, prompt_of, **settings)
    for size in (1, 3):
        assert torch.equal(generate_in_batches(task, size, prompt_of, **settings), together)
    assert len({tuple(one.flatten().tolist()) for one in together}) == 8


@pytest.fixture(scope="module")
def small_task() -> MaskedTask:
    """A network with the sizes of the small preset."""
    torch.manual_seed(0)
    config: Any = images_maskgit("small").task
    return prepare(config.build(tokenizer=FakeTokenizer(16, 1000))).eval()


@pytest.mark.parametrize(
    "texts",
    [["a red circle"] * 8, ["a red circle", "two blue squares left of a ring", "x", ""] * 2],
    ids=["equal texts", "different texts"],
)
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.13, 0.03])
def test_logits_do_not_depend_on_the_batch(small_task, fraction, texts):
    """Otherwise different rounding changes a token now and then, and a seed has two images."""
    tokens = torch.randint(1000, (8, 64, 4), generator=generator(1))
    masked = torch.rand(tokens.shape, generator=generator(2)) < fraction
    input_ids = tokens.masked_fill(masked, 1000)
    with torch.no_grad():
        together = compute_logits(small_task, input_ids, masked, texts)
        for size in (1, 3):
            rows = [slice(first, first + size) for first in range(0, 8, size)]
            parts = [
                compute_logits(small_task, input_ids[some], masked[some], texts[some])
                for some in rows
            ]
            difference = (torch.cat(parts) - together).abs().max()
            assert torch.equal(torch.cat(parts), together), f"{size}: {difference:.1e}"


def test_samples_of_the_small_preset_do_not_depend_on_the_batch(small_task):
    settings = {"sampling": MaskedSampling(decoding_steps=6), "guidance": Guidance(scale=3.0)}
    together = generate_in_batches(small_task, 8, prompt_of, **settings)
    different = {
        size: (generate_in_batches(small_task, size, prompt_of, **settings) != together)
        .sum()
        .item()
        for size in (1, 3)
    }
    assert different == {1: 0, 3: 0}, f"different tokens of {together.numel()}"


def test_samples_depend_on_seed_and_text():
    task = build_task().eval()

    def generate(text: str, seed: int) -> Tensor:
        return task.generate(request([text], [seed]))

    assert torch.equal(generate("x", 1), generate("x", 1))
    assert not torch.equal(generate("x", 1), generate("x", 2))
    assert not torch.equal(generate("x", 1), generate("a red circle", 1))


def test_sampling_does_not_use_the_global_generator():
    task = build_task()
    before = torch.get_rng_state()
    task.generate(request(["x"], [1]))
    assert torch.equal(torch.get_rng_state(), before)


# ---- inpainting and super-resolution


@pytest.mark.parametrize("num_prompts", [1, 4], ids=["one prompt", "one prompt for each sample"])
@pytest.mark.parametrize("order", ["confidence", "halton", "critic"])
def test_inpainting_changes_only_masked_tokens(order, num_prompts):
    task = build_task(critic=CriticHeadConfig(dim=8))
    codes = torch.randint(VOCAB_SIZE, (num_prompts, 4, 4))
    mask = torch.zeros(num_prompts, 4, 4, dtype=torch.bool)
    mask[:, 1:3, 2:] = True
    sampling = MaskedSampling(decoding_steps=3, order=order)
    inpainted = task.generate(request(start=TokenPrompt(codes, mask), sampling=sampling))
    given, kept = codes.expand(4, 4, 4), ~mask.expand(4, 4, 4)
    assert torch.equal(inpainted[kept], given[kept]) and not torch.equal(inpainted, given)
    others = torch.where(mask, 0, codes)
    again = task.generate(request(start=TokenPrompt(others, mask), sampling=sampling))
    assert torch.equal(again, inpainted), "codes under the mask have no influence"


def test_low_resolution_tokens_condition_loss_and_samples():
    task, batch = build_task(low_res=True).double(), build_batch(low_res=True)
    loss = task.masked_token_loss(batch, 0).total()
    codes = batch.examples.codes["low_res_tokenizer"]
    others = (codes + 1) % 7
    batch.examples.codes["low_res_tokenizer"] = others
    assert not torch.allclose(task.masked_token_loss(batch, 0).total(), loss)
    one, other = (task.generate(request(cond_codes=cond)) for cond in (codes, others))
    assert not torch.equal(one, other)
    assert torch.equal(task.request_like(batch).cond_codes, others)


def overfit(task: MaskedTask, batch: Batch[Any], steps: int) -> MaskedTask:
    optimizer = torch.optim.AdamW(task.parameters(), 3e-3)
    for step in range(steps):
        batch.seeds = [hash_seed(9, step, i) for i in range(len(batch))]
        optimizer.zero_grad()
        task.masked_token_loss(batch, step).total().backward()
        optimizer.step()
    return task


def evaluate(task: MaskedTask, batch: Batch[Any]) -> dict[str, float]:
    batch.seeds = [hash_seed(1, i) for i in range(len(batch))]
    with eval_mode(task):
        return task.compute_metrics(task.eval_step(batch))


def test_super_resolution_uses_low_resolution_tokens():
    batch = build_batch(8, low_res=True)
    batch.examples.captions = ["x"] * 8
    task = overfit(build_task(low_res=True, masking=MaskingConfig(schedule="cosine")), batch, 150)
    right = evaluate(task, batch)["cross_entropy"]
    codes = batch.examples.codes["low_res_tokenizer"]
    batch.examples.codes["low_res_tokenizer"] = codes.roll(1, 0)
    shuffled = evaluate(task, batch)["cross_entropy"]
    assert right < 0.7 < 2 * right + 0.7 < shuffled, (right, shuffled)


def test_training_uses_captions():
    batch = build_batch(4)
    metrics = evaluate(overfit(build_task(), batch, 150), batch)
    assert metrics["cross_entropy"] < 1.6 and metrics["condition_gain"] > 1, metrics


# ---- captions


def test_data_without_any_caption_is_an_error(tmp_path):
    task = build_task()
    with pytest.raises(ValueError, match="No example has a caption.*--text none"):
        task.prepare_text(["", ""], tmp_path)
    task.prepare_text(["", "a ring"], tmp_path)
    build_task(model=model_config(text=None)).prepare_text(["", ""], tmp_path)


def test_own_critic_gets_the_text_vocabulary_too(tmp_path):
    config = build_config(max_positions=None, critic=CRITICS[0])
    task = config.build(tokenizer=FakeTokenizer())

    def num_tokens() -> list[int]:
        networks: list[Any] = [task.model.network, task.model.critic]
        return [network.text.tokenize(["a green ring"]).shape[1] for network in networks]

    before = num_tokens()
    task.prepare_text(TEXTS * 3, tmp_path)
    after = num_tokens()
    assert after[0] == after[1] < before[0] == before[1]


def test_token_batch_marks_valid_positions():
    padded = torch.tensor([[[1], [2], [-1]], [[3], [4], [5]]])
    token_batch = TokenBatch.from_padded(padded)
    assert token_batch.lengths == [2, 3] and token_batch.tokens_BNS[0, 2].item() == 0
    expected = torch.tensor([[True, True, False], [True, True, True]])
    assert token_batch.valid_BN is not None and torch.equal(token_batch.valid_BN, expected)
    assert TokenBatch.from_padded(padded[1:]).valid_BN is None, "all positions are valid"
