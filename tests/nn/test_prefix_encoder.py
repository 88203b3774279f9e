"""The summary of a given prefix: what it depends on, and how a masked model uses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.nn.conformer import ConformerConfig
from tessera.nn.masked_transformer import MaskedTransformer, MaskedTransformerConfig
from tessera.nn.prefix_encoder import Prefix, PrefixEncoder, PrefixEncoderConfig, leading_positions
from tessera.nn.token_embedding import TokenSpec
from tessera.nn.token_layout import Layout
from tessera.objectives.generation import GenerationRequest, TokenPrompt
from tessera.objectives.masked import GuidedLogits
from tessera.sampling.guidance import Guidance
from tests.objectives.test_level_masking import (
    CRITICS,
    LEVELS,
    MASK,
    POSITIONS,
    VOCAB_SIZE,
    build_batch,
)
from tests.objectives.test_level_masking import build_task as build_masked_task

CONFIG = PrefixEncoderConfig(dim=16, depth=2, kernel=3)
SPEC = TokenSpec(VOCAB_SIZE, Layout((POSITIONS,), LEVELS))


def build_encoder() -> PrefixEncoder:
    torch.manual_seed(0)
    encoder = CONFIG.build(SPEC, dim=8)
    for parameter in encoder.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return encoder.double()


def random_tokens(count: int = 3, positions: int = POSITIONS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (count, positions, LEVELS), generator=generator)


def prefix_of(tokens_BNS: Tensor, *lengths: int) -> Prefix:
    return Prefix(tokens_BNS, torch.arange(tokens_BNS.shape[1]) < torch.tensor(lengths)[:, None])


def test_only_the_tokens_of_the_prefix_matter() -> None:
    encoder, tokens = build_encoder(), random_tokens()
    summary = encoder(prefix_of(tokens, 5, 12, 1))
    assert summary.shape == (3, 1, 8)
    other = tokens.clone()
    other[0, 5:], other[2, 1:] = MASK, VOCAB_SIZE - 1
    torch.testing.assert_close(encoder(prefix_of(other, 5, 12, 1)), summary)
    other[0, 4] = (other[0, 4] + 1) % VOCAB_SIZE
    assert not torch.allclose(encoder(prefix_of(other, 5, 12, 1))[0], summary[0])


def test_padding_and_other_examples_do_not_change_a_summary() -> None:
    encoder, tokens = build_encoder(), random_tokens()
    together = encoder(prefix_of(tokens, 5, 12, 1))
    for row, length in enumerate((5, 12, 1)):
        alone = encoder(prefix_of(tokens[row : row + 1, :length], length))
        torch.testing.assert_close(together[row : row + 1], alone)


def test_an_empty_prefix_has_a_summary_of_zero_and_finite_gradients() -> None:
    encoder = build_encoder()
    summary = encoder(prefix_of(random_tokens(), 0, 3, 0))
    assert not summary[[0, 2]].any() and summary[1].any()
    encoder(prefix_of(random_tokens(), 0, 0, 0)).sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_the_prefix_ends_before_the_first_hidden_token() -> None:
    hidden = torch.zeros(3, 6, LEVELS, dtype=torch.bool)
    hidden[0, 2, 1] = hidden[1, 0, 0] = True
    prefix = Prefix.find(random_tokens(3, 6), hidden)
    assert prefix.mask_BN.sum(1).tolist() == [2, 0, 6]
    given = torch.tensor([[True, True, False, True]])
    assert leading_positions(given).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("settings", [{"dim": 0}, {"depth": 0}, {"kernel": 4}])
def test_invalid_settings_give_an_error(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 1|odd"):
        PrefixEncoderConfig(**settings)


# ---- in a masked model


def build_task(**choices: Any) -> Any:
    return build_masked_task(prefix=CONFIG, **choices)


def test_a_new_model_ignores_the_prefix() -> None:
    """The summary is zero at initialization."""
    config = MaskedTransformerConfig(
        dim=16,
        depth=1,
        heads=2,
        text=None,
        conformer=ConformerConfig(),
        absolute_positions=False,
        prefix=CONFIG,
    )
    network: MaskedTransformer = config.build(SPEC)
    condition = network.condition([""] * 3, (), None, prefix_of(random_tokens(), 3, 4, 5))
    assert condition.prefix_B1W is not None and not condition.prefix_B1W.any()


def test_all_positions_get_the_summary() -> None:
    """With other tokens in the prefix, the input of the first layer differs after it too."""
    network = build_task().network
    tokens, semantic = random_tokens(1), torch.zeros(1, 8, dtype=torch.long)
    inputs = [
        network.crop_base_embedding(
            network.condition([""], (), semantic, prefix_of(one, 4)), tokens
        )
        for one in (tokens, (tokens + 1) % VOCAB_SIZE)
    ]
    difference = (inputs[0] - inputs[1]).abs().sum(-1)
    assert difference.shape == (1, POSITIONS) and (difference > 1e-3).all()


def test_losses_do_not_depend_on_masked_tokens() -> None:
    task, batch = build_task(), build_batch(12, 5, 1, 9)
    inputs = task.get_inputs(batch)
    assert inputs.prefix_BN is not None and inputs.prefix_BN.any()
    assert not (inputs.prefix_BN[..., None] & (inputs.mask.hidden | inputs.mask.loss_mask)).any()
    tokens, masked = task.mask_batch(batch, inputs)
    other = build_batch(12, 5, 1, 9)
    codes = other.examples.codes["tokenizer"]
    hidden = inputs.mask.hidden & (codes >= 0)
    codes[hidden] = (codes[hidden] + 1) % VOCAB_SIZE
    logits = []
    for one in (batch, other):
        _, shown = task.mask_batch(one, inputs)
        prefix = Prefix(shown.input_ids, inputs.prefix_BN)
        condition = task.get_condition(task.network, one.examples, prefix=prefix)
        logits.append(task.predict(shown, condition))
    assert not torch.equal(tokens, task.get_padded_tokens(other.examples).clamp_min(0))
    assert torch.equal(*logits)


def test_the_prompt_of_a_sample_is_summarised_once_for_each_network() -> None:
    task, batch = build_task(critic=CRITICS["own"]), build_batch(12, 12)
    codes = batch.examples.codes["tokenizer"][:1]
    mask = (torch.arange(POSITIONS) >= 5)[None, :, None].expand_as(codes)
    passed: list[Prefix] = []
    for network in (task.network, task.model.critic_backbone):
        network.prefix.register_forward_pre_hook(lambda module, args: passed.append(args[0]))
    start = TokenPrompt(codes, mask, batch.examples.codes["semantic"][:1])
    request = GenerationRequest(prompts=[""] * 2, seeds=[1, 2], start=start)
    task.generate(request)
    assert len(passed) == 2
    for prefix in passed:
        assert prefix.mask_BN.sum(1).tolist() == [5, 5]
        assert torch.equal(prefix.tokens_BNS[:, :5], codes[:, :5].expand(2, -1, -1))


def test_guidance_leads_away_from_samples_without_the_summary() -> None:
    task, batch = build_task(), build_batch(12)
    network = task.network
    codes, semantic = (batch.examples.codes[name] for name in ("tokenizer", "semantic"))
    mask = (torch.arange(POSITIONS) >= 6)[None, :, None].expand_as(codes)
    request = GenerationRequest(
        prompts=[""], seeds=[1], start=TokenPrompt(codes, mask, semantic, trim=6)
    )
    shown, prefix = codes.masked_fill(mask, MASK), Prefix.find(codes, mask)
    first_level = mask & (torch.arange(LEVELS) == 0)
    with torch.no_grad():
        guided = GuidedLogits(
            network, request, Guidance(scale=2.5), None, torch.device("cpu"), prefix
        )(shown, first_level, 0.5)
        condition = network.condition([""], (), semantic, prefix)
        whole = network.logits_at(shown, first_level, condition)
        rest = network.condition([""], (), semantic[:, 4:])
        without = network.logits_at(shown[:, 6:], first_level[:, 6:], rest)
    assert condition.prefix_B1W is not None and rest.prefix_B1W is None
    torch.testing.assert_close(guided, without + 2.5 * (whole - without))


def test_the_summary_carries_what_only_the_prefix_has() -> None:
    """The tokens after the prompt are those of its first position: one of ten, without semantic
    tokens or attention to it."""
    task = build_task().float()
    network, positions = task.network, 6
    optimizer = torch.optim.Adam(network.prefix.parameters(), lr=1e-2)
    heads = torch.optim.Adam(network.heads.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    semantic = torch.zeros(10, 4, dtype=torch.long)
    voices = torch.arange(10)[:, None, None].expand(-1, positions, LEVELS)
    losses = []
    for _ in range(60):
        noise = torch.randint(VOCAB_SIZE, (10, positions, LEVELS), generator=generator)
        given = torch.where(torch.rand(voices.shape, generator=generator) < 0.7, voices, noise)
        shown = torch.full_like(voices, MASK)
        condition = network.condition([""] * 10, (), semantic, prefix_of(given, *[positions] * 10))
        predict = torch.zeros_like(voices, dtype=torch.bool)
        predict[:, :, 0] = True
        logits = network.logits_at(shown, predict, condition)
        loss = nn.functional.cross_entropy(logits, voices[..., 0].flatten())
        losses.append(float(loss.detach()))
        loss.backward()
        for one in (optimizer, heads):
            one.step()
            one.zero_grad()
    assert losses[0] > 2.0 and losses[-1] < 0.5
