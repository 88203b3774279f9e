"""The masked objective with residual quantizers, as for audio: one level is predicted, finer levels
are masked, and padding has no influence.

The examples are codes already: three levels of acoustic codes, and semantic codes as the condition,
two frames of which last as long as three positions. Everything is in double precision.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.data.tokens import TokenizedBatch
from tessera.engine.modes import eval_mode, hash_seed
from tessera.engine.task import Batch, check_ownership
from tessera.nn.conformer import ConformerConfig
from tessera.nn.masked_transformer import CriticConfig, CriticHeadConfig, MaskedTransformerConfig
from tessera.nn.token_layout import Layout
from tessera.objectives.generation import GenerationRequest, TokenPrompt
from tessera.objectives.masked import NEVER, GuidedLogits, MaskedConfig, MaskedTask
from tessera.objectives.masking import (
    LevelMaskingConfig,
    MaskedTokens,
    TokenBatch,
)
from tessera.sampling.guidance import Guidance
from tessera.sampling.maskgit import MaskedSampling
from tessera.sampling.schedules import num_masked_after
from tests.masking import mask_example

VOCAB_SIZE, SEMANTIC_VOCAB_SIZE, LEVELS = 10, 7, 3
POSITIONS, FRAMES = 12, 8
"""The length of the acoustic and of the semantic codes."""
MASK = VOCAB_SIZE
CRITICS = {
    "none": None,
    "own": CriticConfig(dim=16, depth=1, heads=2),
    "head": CriticHeadConfig(dim=8),
}
LENGTHS = (12, 5, 1, 9)


class FakeTokenizer:
    is_external = False
    features = None

    def __init__(self, frames: int, vocab_size: int, num_quantizers: int, seconds: float):
        self.network: nn.Module = nn.Identity()
        self.vocab_size, self.num_quantizers, self.seconds = vocab_size, num_quantizers, seconds
        self.grid: tuple[int, ...] = (frames,)

    def encode_examples(self, examples: Any) -> Tensor:
        raise AssertionError("the examples are codes already")

    def to_media(self, codes: Tensor) -> list[Any]:
        return list(codes)


def build_task(**choices: Any) -> MaskedTask:
    """Build a task in which no parameter is zero."""
    model = MaskedTransformerConfig(
        dim=24,
        depth=2,
        heads=2,
        text=None,
        conformer=ConformerConfig(kernel=3),
        absolute_positions=False,
        self_condition=choices.pop("self_condition", False),
        prefix=choices.pop("prefix", None),
    )
    defaults: dict[str, Any] = {
        "masking": LevelMaskingConfig(),
        "sampling": MaskedSampling(decoding_steps_per_level=(4, 1), choice_temperature=1.0),
    }
    config = MaskedConfig(tokenizer="", model=model, **defaults | choices)
    task = config.build(
        tokenizer=FakeTokenizer(POSITIONS, VOCAB_SIZE, LEVELS, 0.02),
        semantic=FakeTokenizer(FRAMES, SEMANTIC_VOCAB_SIZE, 1, 0.03),
    )
    for parameter in task.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return task.double()


def build_batch(*lengths: int, first: int = 0) -> Batch[Any]:
    """Return examples of some lengths; example i is the same in every batch."""
    codes = torch.full((len(lengths), POSITIONS, LEVELS), -1)
    semantic = torch.full((len(lengths), FRAMES), -1)
    for row, length in enumerate(lengths):
        own = generator(100 + first + row)
        codes[row, :length] = torch.randint(VOCAB_SIZE, (POSITIONS, LEVELS), generator=own)[:length]
        frames = -(-length * FRAMES // POSITIONS)
        semantic[row, :frames] = torch.randint(SEMANTIC_VOCAB_SIZE, (FRAMES,), generator=own)[
            :frames
        ]
    indices = range(first, first + len(lengths))
    examples = TokenizedBatch({"tokenizer": codes, "semantic": semantic}, [""] * len(lengths))
    return Batch(examples, [str(i) for i in indices], [hash_seed(5, i) for i in indices])


def build_single_batches(*lengths: int) -> list[Batch[Any]]:
    return [build_batch(length, first=i) for i, length in enumerate(lengths)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mask_batch(task: MaskedTask, batch: Batch[Any]) -> MaskedTokens:
    return task.mask_batch(batch, task.get_inputs(batch))[1]


# ---- masking of one example


def mask_examples(
    count: int = 300, positions: int = POSITIONS, **settings: Any
) -> list[tuple[Tensor, MaskedTokens]]:
    """Return random tokens together with their masked version."""
    masking = LevelMaskingConfig(**settings)
    tokens = [
        torch.randint(VOCAB_SIZE, (positions, LEVELS), generator=generator(seed))
        for seed in range(count)
    ]
    return [
        (one, mask_example(masking, one, VOCAB_SIZE, generator(1000 + seed)))
        for seed, one in enumerate(tokens)
    ]


def predicted_level(masked: MaskedTokens) -> int:
    [level] = masked.loss_mask.any(0).nonzero().flatten().tolist()
    return level


def prompt_length(masked: MaskedTokens) -> int:
    """Return the length of the prefix in the finest level, if that is not the predicted one."""
    assert predicted_level(masked) < LEVELS - 1
    return (masked.input_ids[:, -1] != MASK).tolist().index(False)


def test_coarser_levels_are_shown_and_finer_levels_are_masked():
    for tokens, masked in mask_examples():
        level = predicted_level(masked)
        assert torch.equal(masked.input_ids[:, :level], tokens[:, :level])
        is_masked = masked.loss_mask[:, level]
        assert torch.equal(masked.input_ids[:, level] == MASK, is_masked)
        assert torch.equal(masked.input_ids[~is_masked, level], tokens[~is_masked, level])
        if level < LEVELS - 1:
            start = prompt_length(masked)
            assert (masked.input_ids[start:, level + 1 :] == MASK).all()


def test_prompt_is_shown_in_all_levels_and_not_predicted():
    lengths = []
    for tokens, masked in mask_examples():
        if predicted_level(masked) < LEVELS - 1:
            start = prompt_length(masked)
            assert torch.equal(masked.input_ids[:start], tokens[:start])
            assert not masked.loss_mask[:start].any() and masked.loss_mask[start:].any()
            lengths.append(start)
    assert set(lengths) == set(range(POSITIONS)), "every length from 0 to all but one position"


def test_without_a_prompt_finer_levels_are_masked_everywhere():
    for _, masked in mask_examples(prompt=False):
        assert (masked.input_ids[:, predicted_level(masked) + 1 :] == MASK).all()


def test_levels_are_drawn_uniformly_and_independently_of_settings():
    levels = [predicted_level(masked) for _, masked in mask_examples(900)]
    assert all(abs(levels.count(level) - 300) < 60 for level in range(LEVELS))
    others = mask_examples(900, prompt=False, schedule="linear")
    assert [predicted_level(masked) for _, masked in others] == levels


def test_coarse_bias_draws_coarse_levels_more_often():
    levels = [predicted_level(masked) for _, masked in mask_examples(900, coarse_bias=1.0)]
    total = sum(1 / q for q in range(1, LEVELS + 1))
    expected = [900 / q / total for q in range(1, LEVELS + 1)]
    assert all(abs(levels.count(q) - count) < 60 for q, count in enumerate(expected))


@pytest.mark.parametrize("bias", [-0.5, float("nan"), float("inf")])
def test_coarse_bias_must_be_a_number_from_0(bias):
    with pytest.raises(ValueError, match="coarse_bias must be at least 0"):
        LevelMaskingConfig(coarse_bias=bias)


@pytest.mark.parametrize("prompt", [True, False])
def test_mean_number_of_predicted_tokens_is_the_expected_one(prompt):
    masked = mask_examples(1500, positions=100, prompt=prompt)
    counts = [int(one.loss_mask.sum()) for _, one in masked]
    assert min(counts) >= 1
    expected = LevelMaskingConfig(prompt=prompt).expected_num_masked(Layout((100,), LEVELS))
    assert sum(counts) / len(counts) == pytest.approx(expected, abs=2)


def test_input_ids_do_not_depend_on_masked_tokens():
    masking = LevelMaskingConfig()
    for seed, (tokens, masked) in enumerate(mask_examples(60)):
        others = torch.where(masked.input_ids == MASK, (tokens + 3) % VOCAB_SIZE, tokens)
        again = mask_example(masking, others, VOCAB_SIZE, generator(1000 + seed))
        assert torch.equal(again.input_ids, masked.input_ids)
        assert torch.equal(again.loss_mask, masked.loss_mask)


@pytest.mark.parametrize("positions", [1, 2])
def test_at_least_one_token_of_the_shortest_examples_is_predicted(positions):
    for _, masked in mask_examples(50, positions=positions):
        assert masked.loss_mask.any()


def test_tokenizer_with_one_quantizer_is_an_error():
    model = MaskedTransformerConfig(dim=24, depth=2, heads=2, text=None)
    config = MaskedConfig(tokenizer="", model=model, masking=LevelMaskingConfig())
    with pytest.raises(ValueError, match="several quantizers, and this one has 1.*--tokenizer RUN"):
        config.build(tokenizer=FakeTokenizer(POSITIONS, VOCAB_SIZE, 1, 0.02))


# ---- examples of different lengths


def test_padding_is_masked_and_not_predicted():
    task, batch = build_task(), build_batch(*LENGTHS)
    token_batch, masked = task.get_tokens(batch.examples), mask_batch(task, batch)
    assert token_batch.lengths == list(LENGTHS)
    rows = zip(LENGTHS, masked.input_ids, masked.loss_mask, strict=True)
    for length, input_ids, loss_mask in rows:
        assert loss_mask[:length].any() and not loss_mask[length:].any()
        assert (input_ids[length:] == MASK).all()


@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("self_condition", [False, True], ids=["plain", "self-conditioning"])
def test_losses_of_a_padded_batch_are_means_over_its_examples(critic, self_condition):
    task = build_task(critic=CRITICS[critic], self_condition=self_condition)
    batch, singles = build_batch(*LENGTHS), build_single_batches(*LENGTHS)
    for update in task.updates:
        loss, losses = update.loss(batch, 0), [update.loss(one, 0) for one in singles]
        for name, term in loss.terms.items():
            expected = torch.stack([one.terms[name] for one in losses]).mean()
            torch.testing.assert_close(term, expected, msg=name)
        metrics = [one.detached() for one in losses]
        for name, value in loss.detached().items():
            expected = torch.stack([one[name] for one in metrics]).mean()
            torch.testing.assert_close(value, expected, msg=name)


def test_eval_sums_of_a_padded_batch_are_those_of_its_examples():
    task, batch = build_task(), build_batch(*LENGTHS)
    with eval_mode(task):
        sums = task.eval_step(batch)
        singles = [task.eval_step(one) for one in build_single_batches(*LENGTHS)]
    for name, value in sums.items():
        torch.testing.assert_close(
            value, torch.stack([one[name] for one in singles]).sum(0), msg=name
        )
    metrics = task.compute_metrics(sums)
    assert metrics.keys() == {"cross_entropy", "accuracy", "accuracy_1", "accuracy_2", "accuracy_3"}


def test_loss_is_the_cross_entropy_with_one_head_for_each_level():
    task, batch = build_task(), build_batch(*LENGTHS)
    masked, token_batch = mask_batch(task, batch), task.get_tokens(batch.examples)
    network = task.network
    condition = network.condition([""] * 4, [False] * 4, batch.examples.codes["semantic"])
    states = network.states(masked.input_ids, condition, valid_BN=masked.valid_BN)
    summed_B = [torch.zeros(()) for _ in LENGTHS]
    for example, position, level in masked.loss_mask.nonzero().tolist():
        logits_V = network.heads[level](states[example, position][None])[0]
        target = token_batch.tokens_BNS[example, position, level]
        summed_B[example] = summed_B[example] + F.cross_entropy(logits_V, target)
    summed = torch.stack(summed_B)
    expected = summed.sum() / (4 * LevelMaskingConfig().expected_num_masked(task.layout))
    loss = task.masked_token_loss(batch, 0)
    torch.testing.assert_close(loss.terms["cross_entropy"], expected)
    per_token = (summed / masked.loss_mask.flatten(1).sum(1)).mean()
    logged = loss.detached()["cross_entropy_per_token"]
    torch.testing.assert_close(logged, per_token.detach().float())


def test_logits_do_not_depend_on_masked_tokens():
    """Neither on tokens to predict nor on finer levels."""
    task, batch = build_task(), build_batch(*LENGTHS)
    logits: list[Tensor] = []
    apply_heads = task.network.apply_heads

    def record(states: Tensor, predict: Tensor) -> Tensor:
        logits.append(apply_heads(states, predict))
        return logits[-1]

    task.network.apply_heads = record
    losses = [task.masked_token_loss(batch, 0).total()]
    masked, codes = mask_batch(task, batch), batch.examples.codes["tokenizer"]
    is_masked = (masked.input_ids == MASK) & (codes >= 0)
    assert (is_masked & ~masked.loss_mask).any(), "finer levels are masked"
    batch.examples.codes["tokenizer"] = torch.where(is_masked, (codes + 3) % VOCAB_SIZE, codes)
    losses.append(task.masked_token_loss(batch, 0).total())
    assert torch.equal(logits[0], logits[1]) and losses[0] != losses[1]


@pytest.mark.parametrize("critic", CRITICS)
def test_codes_of_the_caller_are_never_changed(critic):
    task, batch = build_task(critic=CRITICS[critic]), build_batch(*LENGTHS)
    before = {name: codes.clone() for name, codes in batch.examples.codes.items()}
    for update in task.updates:
        update.loss(batch, 0)
    with eval_mode(task):
        task.eval_step(batch)
        task.sample(batch)
    codes = before["tokenizer"][:1].clone()
    mask = torch.arange(POSITIONS)[None, :, None].expand(1, -1, LEVELS) >= 4
    start = TokenPrompt(codes, mask, before["semantic"][:1])
    task.generate(GenerationRequest(prompts=[""], seeds=[1], start=start))
    assert torch.equal(codes, before["tokenizer"][:1])
    assert all(torch.equal(batch.examples.codes[name], codes) for name, codes in before.items())


# ---- critics


@pytest.mark.parametrize("critic", ["own", "head"])
def test_critic_loss_excludes_masked_tokens_and_padding(critic):
    task, batch = build_task(critic=CRITICS[critic]), build_batch(*LENGTHS)
    check_ownership(task)
    task.masked_token_loss(batch, 0)
    completed, is_sampled = batch.scratch["completed"], batch.scratch["is_sampled"]
    token_batch = task.get_tokens(batch.examples)
    counts = (completed != MASK) & token_batch.valid_BN1.expand_as(is_sampled)
    assert is_sampled[counts].any() and not counts.all() and not is_sampled[~counts].any()
    backbone, network = task.model.critic_backbone, task.model.critic
    assert network is not None
    condition = task.get_condition(backbone, batch.examples, [False] * len(batch))
    logits = network.realness_logits(
        backbone.states(completed, condition, valid_BN=token_batch.valid_BN)
    )
    expected = [
        F.binary_cross_entropy_with_logits(logit[count], (~sampled)[count].double())
        for logit, sampled, count in zip(logits, is_sampled, counts, strict=True)
    ]
    loss = task.critic_loss(batch, 0)
    torch.testing.assert_close(loss.terms["bce"], torch.stack(expected).mean())


@pytest.mark.parametrize(
    ("train_only", "start_steps"),
    [("all", [0, 0]), ("generator", [0, NEVER]), ("critic", [NEVER, 0])],
)
def test_train_only_disables_the_other_update(train_only, start_steps):
    task = build_task(critic=CRITICS["own"], train_only=train_only)
    assert [update.start_step for update in task.updates] == start_steps


def test_critic_that_is_trained_alone_gets_samples_of_the_generator():
    batch, alone = build_batch(*LENGTHS), build_batch(*LENGTHS)
    task = build_task(critic=CRITICS["own"])
    task.masked_token_loss(batch, 0)
    expected = task.critic_loss(batch, 0).total()
    assert torch.equal(task.critic_loss(alone, 0).total(), expected)
    assert all(parameter.grad is None for parameter in task.network.parameters())


def test_training_only_a_missing_critic_is_an_error():
    with pytest.raises(ValueError, match="there is none: use --critic own or head"):
        MaskedConfig(tokenizer="", train_only="critic")


# ---- sampling


def record_passes(task: MaskedTask) -> list[tuple[Tensor, Tensor]]:
    """Return a list of the input ids and the tokens to predict of each pass."""
    passes: list[tuple[Tensor, Tensor]] = []
    network: Any = task.network
    logits_at = network.logits_at

    def record(tokens: Tensor, predict: Tensor, *args: Any) -> Tensor:
        passes.append((tokens.clone(), predict.clone()))
        return logits_at(tokens, predict, *args)

    network.logits_at = record
    return passes


def make_request(batch: Batch[Any], **more: Any) -> GenerationRequest:
    return GenerationRequest(
        prompts=[""] * len(batch),
        seeds=batch.seeds,
        cond_codes=batch.examples.codes["semantic"],
        lengths=TokenBatch.from_padded(batch.examples.codes["tokenizer"]).lengths,
        **more,
    )


@pytest.mark.parametrize("steps_per_level", [(4, 1), (3, 2, 1), (1,)], ids=str)
def test_decoding_goes_level_by_level_with_the_scheduled_number_of_tokens(steps_per_level):
    task, batch = build_task(), build_batch(12, 5)
    passes = record_passes(task)
    sampling = MaskedSampling(decoding_steps_per_level=steps_per_level)
    codes = task.generate(make_request(batch, sampling=sampling))
    steps = [steps_per_level[min(level, len(steps_per_level) - 1)] for level in range(LEVELS)]
    expected = [
        (
            level,
            [
                length if step == 0 else num_masked_after("cosine", step - 1, count, length)
                for length in (12, 5)
            ],
        )
        for level, count in enumerate(steps)
        for step in range(count)
    ]
    assert len(passes) == sum(steps)
    for (input_ids, predict), (level, num_masked) in zip(passes, expected, strict=True):
        assert predict[..., level].sum(1).tolist() == num_masked
        assert predict.sum((1, 2)).tolist() == num_masked, "only tokens of this level"
        valid = torch.arange(POSITIONS) < torch.tensor([[12], [5]])
        assert (input_ids[..., level + 1 :][valid] == MASK).all(), "finer levels are masked"
        assert torch.equal(input_ids[..., :level][valid], codes[..., :level][valid]), (
            "coarser levels are complete"
        )


def test_level_with_fewer_tokens_than_steps_takes_fewer_steps():
    task = build_task()
    passes = record_passes(task)
    sampling = MaskedSampling(decoding_steps_per_level=(16, 1))
    task.generate(make_request(build_batch(12), sampling=sampling))
    assert len(passes) == 12 + LEVELS - 1, "each step completes at least one token"


@pytest.mark.parametrize("critic", CRITICS)
def test_sample_does_not_depend_on_longer_examples_in_the_batch(critic):
    task, batch = build_task(critic=CRITICS[critic]), build_batch(*LENGTHS)
    order: Any = "confidence" if critic == "none" else "critic"
    sampling = MaskedSampling(decoding_steps_per_level=(4, 2), order=order)
    together = task.generate(make_request(batch, sampling=sampling))
    singles = build_single_batches(*LENGTHS)
    for row, length, one in zip(together, LENGTHS, singles, strict=True):
        assert torch.equal(task.generate(make_request(one, sampling=sampling))[0], row)
        assert (row[:length] >= 0).all() and (row[:length] < VOCAB_SIZE).all()
        assert (row[length:] == -1).all()


def test_padded_and_cropped_examples_have_equal_samples():
    """Sampling is deterministic here, because the two use different random numbers."""
    task, batch = build_task(), build_batch(6)
    sampling = MaskedSampling(
        decoding_steps_per_level=(4, 2), temperature=0.0, choice_temperature=0.0
    )
    padded = task.generate(make_request(batch, sampling=sampling))
    codes = batch.examples.codes["tokenizer"][:, :6]
    # 6 positions last as long as 4 semantic frames.
    start = TokenPrompt(codes, codes >= 0, batch.examples.codes["semantic"][:, :4])
    cropped = GenerationRequest(prompts=[""], seeds=batch.seeds, start=start, sampling=sampling)
    assert torch.equal(task.generate(cropped), padded[:, :6])


@pytest.mark.parametrize("num_prompts", [1, 2], ids=["one prompt", "one prompt for each sample"])
def test_prompt_is_kept_and_shown_in_all_levels_at_every_step(num_prompts):
    task, batch = build_task(), build_batch(12, 12)
    codes = batch.examples.codes["tokenizer"][:num_prompts]
    mask = (torch.arange(POSITIONS) >= 5)[None, :, None].expand_as(codes)
    passes = record_passes(task)
    sampled = task.generate(make_request(batch, start=TokenPrompt(codes, mask)))
    given = codes.expand_as(sampled)
    assert torch.equal(sampled[:, :5], given[:, :5]) and not torch.equal(sampled, given)
    assert all(
        torch.equal(input_ids[:, :5], given[:, :5]) and not predict[:, :5].any()
        for input_ids, predict in passes
    )
    assert [predict.sum().item() for _, predict in passes][:2] == [
        2 * 7,
        2 * num_masked_after("cosine", 0, 4, 7),
    ]


def test_guidance_leads_away_from_samples_without_the_prompt():
    """The second pass gets neither the tokens nor the condition of the trimmed positions."""
    task, batch = build_task(), build_batch(12)
    network = task.network
    codes, semantic = (batch.examples.codes[name] for name in ("tokenizer", "semantic"))
    mask = (torch.arange(POSITIONS) >= 6)[None, :, None].expand_as(codes)
    start = TokenPrompt(codes, mask, semantic, trim=6)
    request = GenerationRequest(prompts=[""], seeds=[1], start=start)
    shown, device = codes.masked_fill(mask, MASK), torch.device("cpu")
    first_level = mask & (torch.arange(LEVELS) == 0)

    def guided(scale: float) -> Tensor:
        guidance = Guidance(scale=scale)
        return GuidedLogits(network, request, guidance, None, device)(shown, first_level, 0.5)

    with torch.no_grad():
        whole = network.logits_at(shown, first_level, network.condition([""], [False], semantic))
        # 6 positions last as long as 4 semantic frames.
        rest = network.condition([""], [False], semantic[:, 4:])
        without = network.logits_at(shown[:, 6:], first_level[:, 6:], rest)
        assert torch.equal(guided(1.0), whole)
        torch.testing.assert_close(guided(2.5), without + 2.5 * (whole - without))
    assert not torch.allclose(whole, without)


def test_samples_can_be_longer_than_the_training_examples():
    task = build_task()
    codes = torch.zeros(1, 30, LEVELS, dtype=torch.long)
    semantic = torch.randint(SEMANTIC_VOCAB_SIZE, (1, 20))

    def generate(cond_codes: Tensor) -> Tensor:
        start = TokenPrompt(codes, torch.ones_like(codes).bool(), cond_codes)
        return task.generate(GenerationRequest(prompts=[""], seeds=[1], start=start))

    sampled = generate(semantic)
    assert sampled.shape == (1, 30, LEVELS) and (sampled >= 0).all()
    assert not torch.equal(generate((semantic + 1) % SEMANTIC_VOCAB_SIZE), sampled)


# ---- training


def test_overfitted_model_follows_the_semantic_codes():
    """The semantic codes determine all tokens; those of another example give other samples."""
    batch = build_batch(12, 12, 9, 12, 6, 12, 12, 12)
    semantic, codes = batch.examples.codes["semantic"], batch.examples.codes["tokenizer"]
    aligned = semantic[:, ((torch.arange(POSITIONS) + 0.5) * FRAMES / POSITIONS).long()]
    batch.examples.codes["tokenizer"] = torch.where(
        codes >= 0, (aligned[..., None] + torch.arange(LEVELS)) % VOCAB_SIZE, -1
    )
    task = build_task().float()
    optimizer = torch.optim.AdamW(task.parameters(), 3e-3)
    for step in range(120):
        batch.seeds = [hash_seed(9, step, i) for i in range(len(batch))]
        optimizer.zero_grad()
        task.masked_token_loss(batch, step).total().backward()
        optimizer.step()
    target = batch.examples.codes["tokenizer"]
    followed = task.generate(make_request(batch))
    shifted = torch.where(semantic >= 0, semantic.roll(1, 0).clamp_min(0), -1)
    batch.examples.codes["semantic"] = shifted
    shuffled = task.generate(make_request(batch))
    valid = target >= 0
    right, wrong = (
        (sampled == target)[valid].float().mean().item() for sampled in (followed, shuffled)
    )
    assert right > 0.9 and wrong < 0.5, (right, wrong)


def test_masked_tokens_of_a_level_can_be_kept_or_replaced():
    tokens = torch.randint(VOCAB_SIZE, (64, LEVELS), generator=torch.Generator().manual_seed(1))

    def mask(**settings: Any) -> MaskedTokens:
        generator = torch.Generator().manual_seed(4)
        return mask_example(LevelMaskingConfig(**settings), tokens, MASK, generator)

    plain, kept, replaced = mask(), mask(keep=1.0), mask(replace=1.0)
    for other in (kept, replaced):
        assert torch.equal(other.loss_mask, plain.loss_mask), "the same tokens are predicted"
        rest = ~plain.loss_mask
        assert torch.equal(other.input_ids[rest], plain.input_ids[rest])
    predicted = plain.loss_mask
    assert (plain.input_ids[predicted] == MASK).all()
    assert torch.equal(kept.input_ids[predicted], tokens[predicted])
    assert (replaced.input_ids[predicted] < MASK).all()
    assert not torch.equal(replaced.input_ids[predicted], tokens[predicted])
    with pytest.raises(ValueError, match="fractions whose sum is at most 1"):
        LevelMaskingConfig(keep=0.7, replace=0.4)
