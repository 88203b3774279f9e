"""Tests of the masked transformer: its inputs, its heads, its conditions and its critics.

Zero-initialized layers get random weights, and the networks are in double precision, so that what
is equal in exact arithmetic is equal to many digits.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera.nn.conformer import ConformerConfig
from tessera.nn.masked_transformer import (
    Condition,
    CriticConfig,
    CriticHeadConfig,
    DispatchIndex,
    FirstLayerCache,
    MaskedTransformer,
    MaskedTransformerConfig,
    TokenConditioner,
    TokenTransformer,
    matmul_by,
)
from tessera.nn.token_embedding import TokenSpec
from tessera.nn.token_layout import Layout
from tessera.text.learned import LearnedTextConfig
from tests.networks import randomize_zero_weights, record_row_counts

VOCABULARY = 13
TEXT = LearnedTextConfig(dim=16, depth=1, heads=2, vocab_size=300, max_len=16)
TEXTS = ["a red circle", "two blue squares", "x"]
FEATURES = torch.randn(1, VOCABULARY, 5, generator=torch.Generator().manual_seed(1))


def build(
    patch: int = 1,
    cond_tokens: TokenSpec | None = None,
    features: Tensor | None = FEATURES,
    **options: object,
) -> MaskedTransformer:
    config = MaskedTransformerConfig(**{"dim": 24, "depth": 2, "heads": 2, "text": TEXT, **options})
    tokens = TokenSpec(VOCABULARY, Layout((4, 4), patch=patch), features)
    return randomize_zero_weights(config.build(tokens, cond_tokens)).double().eval()


def make_tokens(
    network: TokenTransformer, batch: int = 3, ratio: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Return random tokens of which some are masked, and which."""
    layout = network.tokens.layout
    shape = (batch, layout.num_positions, layout.tokens_per_position)
    tokens = torch.randint(network.tokens.vocab_size, shape)
    masked = torch.rand(tokens.shape) < ratio
    return tokens.masked_fill(masked, network.mask_token_id), masked


def make_condition(
    network: TokenTransformer,
    texts: list[str] = TEXTS,
    dropped: bool = False,
    cond_codes: Tensor | None = None,
) -> Condition:
    return network.condition(texts, [dropped] * len(texts), cond_codes)


# ---- tokens and logits


@pytest.mark.parametrize("patch", [1, 2])
def test_logits_of_selected_tokens_are_rows_of_the_full_logits(patch):
    network = build(patch)
    tokens, masked = make_tokens(network)
    states = network.states(tokens, make_condition(network))
    full = network.logits(states, torch.ones_like(masked)).view(*masked.shape, VOCABULARY)
    assert torch.allclose(network.logits(states, masked), full[masked])
    assert network.logits(states, torch.zeros_like(masked)).shape == (0, VOCABULARY)


BACKBONES = {"transformer": None, "conformer": ConformerConfig(kernel=3)}


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("patch", [1, 2])
def test_logits_at_equals_logits_of_all_states_with_less_computation(patch, backbone):
    network = build(patch, conformer=BACKBONES[backbone])
    tokens, masked = make_tokens(network)
    masked[1] = False  # an example without tokens to predict
    condition = network.condition(TEXTS, [False, True, False])
    expected = network.logits(network.states(tokens, condition), masked)
    assert torch.allclose(network.logits_at(tokens, masked, condition), expected)
    rows = record_row_counts(network.transformer.blocks[-1].feed_forward)
    network.logits_at(tokens, masked, condition)
    assert rows == [int(masked.any(2).sum())], "only positions with a token to predict"


@torch.no_grad()
@pytest.mark.parametrize("backbone", BACKBONES)
def test_cache_recomputes_only_positions_whose_tokens_changed(backbone, monkeypatch):
    monkeypatch.setattr("tessera.nn.token_embedding.MIN_ROWS", 4)
    network, cache = build(patch=2, conformer=BACKBONES[backbone]), FirstLayerCache()
    condition, (tokens, masked) = make_condition(network), make_tokens(network)
    rows = record_row_counts(network.transformer.blocks[0].attention.to_qkv)
    changes = [[], [(0, 1)], [(0, 1), (2, 0), (2, 3)], [(e, p) for e in range(3) for p in range(4)]]
    for changed in changes:
        tokens = tokens.clone()
        for example, position in changed:
            tokens[example, position, 1] = (tokens[example, position, 1] + 1) % VOCABULARY
        cached = network.logits_at(tokens, masked, condition, cache=cache)
        assert torch.allclose(cached, network.logits_at(tokens, masked, condition))
    assert rows[::2] == [12, 4, 4, 12], (
        "all at first, then the changed ones, padded to four for batch invariance"
    )


def test_logits_of_patches_match_a_loop_over_tokens():
    network = build(patch=2)
    tokens, masked = make_tokens(network)
    states = network.states(tokens, make_condition(network))
    rows = []
    for example, position, slot in masked.nonzero().tolist():
        rows.append(network.heads[0]((states[example, position] @ network.to_cells[slot])[None])[0])
    assert torch.allclose(network.logits(states, masked), torch.stack(rows))


def test_head_adds_logits_of_rows_and_of_features():
    head, states = build().heads[0], torch.randn(6, 24, dtype=torch.float64)
    expected = [
        head.to_logits.weight @ state + FEATURES[0].double() @ (head.to_features.weight @ state)
        for state in states
    ]
    assert torch.allclose(head(states), torch.stack(expected))


@pytest.mark.parametrize("features", [None, FEATURES], ids=["without features", "with features"])
def test_each_slot_has_its_own_embedding_tables(features):
    network = build(patch=2, features=features)
    tokens, _ = make_tokens(network)
    table = network.embedding.table.weight.view(4, VOCABULARY + 1, 24)
    expected = sum(table[slot][tokens[..., slot]] for slot in range(4))
    if features is not None:
        padded = torch.cat([features[0], torch.zeros(1, 5)]).double()  # zeros for the mask token
        matrices = network.embedding.from_features.weight.view(24, 4, 5)
        expected = expected + sum(
            padded[tokens[..., slot]] @ matrices[:, slot].T for slot in range(4)
        )
    assert torch.allclose(network.embedding(tokens), expected)
    assert not torch.allclose(network.embedding(tokens.flip(-1)), expected)


def test_each_quantizer_has_its_own_features():
    features = torch.randn(2, VOCABULARY, 5)
    tokens = TokenSpec(VOCABULARY, Layout((6,), num_quantizers=2), features)
    config = MaskedTransformerConfig(dim=24, depth=1, heads=2, text=None)
    network = randomize_zero_weights(config.build(tokens)).double().eval()
    codes = torch.randint(VOCABULARY, (2, 6, 2))
    matrices = network.embedding.from_features.weight.view(24, 2, 5)
    table = network.embedding.table.weight.view(2, VOCABULARY + 1, 24)
    expected = sum(
        table[q][codes[..., q]] + features[q].double()[codes[..., q]] @ matrices[:, q].T
        for q in range(2)
    )
    assert torch.allclose(network.embedding(codes), expected)
    for quantizer, head in enumerate(network.heads):
        assert torch.equal(head.features.float(), features[quantizer])


def test_dispatch_keeps_the_order_of_rows():
    """Also where a function gets no rows."""
    rows, matrices, index = (
        torch.randn(7, 5),
        torch.randn(4, 5, 5),
        torch.tensor([3, 0, 3, 0, 1, 1, 3]),
    )
    functions = [matmul_by(matrix) for matrix in matrices]
    assert torch.allclose(
        DispatchIndex.build(index, 4).apply(rows, functions),
        torch.stack([row @ matrices[i] for row, i in zip(rows, index)]),
    )


@pytest.mark.parametrize("patch", [1, 2])
def test_every_visible_token_affects_every_prediction(patch):
    network = build(patch, text=None)
    tokens, masked = make_tokens(network, batch=1)
    before = network.logits(network.states(tokens, make_condition(network, [""])), masked)
    for position, slot in (~masked[0]).nonzero().tolist():
        other = tokens.clone()
        other[0, position, slot] = (other[0, position, slot] + 1) % VOCABULARY
        after = network.logits(network.states(other, make_condition(network, [""])), masked)
        assert ((after - before).abs().amax(1) > 0).all()


def test_positions_of_tokens_matter():
    network = build(text=None)
    tokens, masked = make_tokens(network, batch=1)
    order, every = torch.randperm(16), torch.ones_like(masked)
    before = network.logits(network.states(tokens, make_condition(network, [""])), every)
    after = network.logits(network.states(tokens[:, order], make_condition(network, [""])), every)
    assert not torch.allclose(after, before[order])


def test_states_do_not_depend_on_the_batch():
    network = build(patch=2)
    tokens, _ = make_tokens(network)
    train_together = network.states(tokens, make_condition(network))
    for i, text in enumerate(TEXTS):
        assert torch.allclose(
            network.states(tokens[i : i + 1], make_condition(network, [text]))[0], train_together[i]
        )


# ---- text


def test_text_matters():
    network = build()
    tokens, _ = make_tokens(network)
    assert not torch.allclose(
        network.states(tokens, make_condition(network)),
        network.states(tokens, make_condition(network, TEXTS[::-1])),
    )


def test_longer_texts_in_the_batch_change_nothing():
    network = build()
    tokens, _ = make_tokens(network, batch=1)
    short = network.states(tokens, make_condition(network, ["x"]))
    both = network.states(
        tokens.expand(2, -1, -1), make_condition(network, ["x", "a text that is longer by far"])
    )
    assert torch.allclose(both[0], short[0])


def test_dropped_texts_are_all_equal():
    network = build()
    tokens, _ = make_tokens(network, batch=1)
    one, other = (
        network.states(tokens, make_condition(network, [text], dropped=True))
        for text in ("a red circle", "x")
    )
    assert torch.allclose(one, other)
    assert not torch.allclose(one, network.states(tokens, make_condition(network, ["x"])))


def test_dropped_texts_of_one_length_are_bitwise_equal():
    network = build()
    tokens, _ = make_tokens(network, batch=1)
    one, other = (
        network.states(tokens, make_condition(network, [text], dropped=True))
        for text in ("qqqq", "zzzz")
    )
    assert torch.equal(one, other)


def test_empty_text_equals_a_dropped_text():
    """A network trained with captions or none has no other meaning for an empty prompt."""
    network = build()
    tokens, _ = make_tokens(network, batch=1)
    empty, dropped = (
        network.states(tokens, make_condition(network, [""])),
        network.states(tokens, make_condition(network, ["x"], dropped=True)),
    )
    assert torch.allclose(empty, dropped)


def test_dropped_texts_give_the_text_encoder_no_gradient():
    network = build()
    states = network.states(make_tokens(network)[0], make_condition(network, dropped=True))
    states.square().sum().backward()
    grads = [parameter.grad for parameter in network.text.parameters()]
    assert all(grad is None or (grad == 0).all() for grad in grads)


def test_condition_can_be_reused_in_every_step():
    network = build()
    condition = make_condition(network)
    for _ in range(3):
        tokens, _ = make_tokens(network)
        assert torch.equal(
            network.states(tokens, condition), network.states(tokens, make_condition(network))
        )


# ---- self-conditioning


@pytest.mark.parametrize("self_condition", [True, False])
def test_previous_states_matter_only_with_self_conditioning(self_condition):
    network = build(self_condition=self_condition)
    tokens, _ = make_tokens(network)
    condition = make_condition(network)
    first = network.states(tokens, condition)
    assert torch.equal(network.states(tokens, condition, torch.zeros_like(first)), first)
    assert torch.equal(network.states(tokens, condition, first), first) == (not self_condition)


# ---- conditions on a grid


@pytest.mark.parametrize(
    ("grid", "patch", "cond_grid"),
    [
        ((8, 8), 1, (4, 4)),
        ((8, 8), 2, (4, 4)),
        ((8, 8), 2, (2, 2)),
        ((8, 8), 2, (8, 8)),
        ((8, 8), 4, (4, 4)),
        ((4, 8), 1, (2, 2)),
    ],
)
def test_condition_tokens_are_aligned_with_the_positions_they_cover(grid, patch, cond_grid):
    layout = Layout(grid, patch=patch)
    conditioner = TokenConditioner(
        TokenSpec(7, Layout(cond_grid), torch.randn(1, 7, 3)), TokenSpec(VOCABULARY, layout), 6
    ).double()
    codes = torch.randint(7, (2, *cond_grid))
    rows, columns = layout.position_grid
    x = conditioner(codes).view(2, rows, columns, 6)
    for y in range(cond_grid[0]):
        for z in range(cond_grid[1]):
            other = codes.clone()
            other[:, y, z] = (other[:, y, z] + 1) % 7
            changed = (conditioner(other).view(x.shape) - x).abs().amax(-1) > 0
            first_row, first_column = y * rows // cond_grid[0], z * columns // cond_grid[1]
            height, width = max(1, rows // cond_grid[0]), max(1, columns // cond_grid[1])
            expected = torch.zeros(rows, columns, dtype=torch.bool)
            expected[first_row : first_row + height, first_column : first_column + width] = True
            assert torch.equal(changed[0], expected)


def test_condition_tokens_change_all_logits():
    network = build(cond_tokens=TokenSpec(7, Layout((2, 2))))
    tokens, masked = make_tokens(network)
    codes = torch.randint(7, (3, 2, 2))
    one, other = (
        network.logits(network.states(tokens, make_condition(network, cond_codes=each)), masked)
        for each in (codes, (codes + 1) % 7)
    )
    assert ((one - other).abs().amax(1) > 0).all()


@pytest.mark.parametrize("cond_grid", [(3, 3), (2, 8)])
def test_condition_grids_that_do_not_divide_are_errors(cond_grid):
    with pytest.raises(ValueError, match="whole multiple"):
        TokenConditioner(TokenSpec(7, Layout(cond_grid)), TokenSpec(VOCABULARY, Layout((4, 4))), 6)


def test_missing_and_unexpected_condition_tokens_are_errors():
    with pytest.raises(ValueError, match="not conditioned on tokens: leave them out"):
        make_condition(build(), cond_codes=torch.zeros(3, 2, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="is conditioned on tokens, but got no `cond_codes`"):
        make_condition(build(cond_tokens=TokenSpec(7, Layout((2, 2)))))


# ---- conditions in time


def build_streams(
    positions: int, position_ms: float, frames: int, frame_ms: float, num_quantizers: int = 2
) -> tuple[TokenSpec, TokenSpec]:
    return (
        TokenSpec(VOCABULARY, Layout((positions,), num_quantizers), None, position_ms / 1000),
        TokenSpec(7, Layout((frames,)), torch.randn(1, 7, 3), frame_ms / 1000),
    )


def affected_positions(
    conditioner: TokenConditioner, codes: Tensor, positions: int
) -> list[list[int]]:
    """Return for each condition token the positions whose embedding it changes."""
    x, affected = conditioner(codes)[:, :positions], []
    for frame in range(codes.shape[1]):
        other = codes.clone()
        other[:, frame] = (other[:, frame] + 1) % 7
        changed = (conditioner(other)[:, :positions] - x).abs().amax((0, 2)) > 0
        affected.append(changed.nonzero().flatten().tolist())
    return affected


@pytest.mark.parametrize(
    ("frame_ms", "expected"),
    [
        (20, [[0], [1], [2], [3], [4], [5]]),
        (40, [[0, 1], [2, 3], [4, 5]]),
        (5, [[position] if slot == 2 else [] for position in range(6) for slot in range(4)]),
        (30, [[0], [1, 2], [3], [4, 5]]),
    ],
    ids=["equal rates", "half the rate", "four times the rate", "two thirds of the rate"],
)
def test_position_gets_the_condition_token_at_the_middle_of_its_span(frame_ms, expected):
    """Where the middle falls between two tokens, the later one."""
    tokens, cond_tokens = build_streams(6, 20, len(expected), frame_ms)
    conditioner = TokenConditioner(cond_tokens, tokens, 6).double()
    assert affected_positions(conditioner, torch.randint(7, (2, len(expected))), 6) == expected


def test_streams_of_two_rates_are_aligned_at_any_length():
    """130 ms are 7 positions of 20 ms and 5 frames of 30 ms; 5 full frames are 8 positions."""
    config = MaskedTransformerConfig(dim=24, depth=2, heads=2, text=None, absolute_positions=False)
    network = randomize_zero_weights(config.build(*build_streams(7, 20, 5, 30))).double().eval()
    for positions, frames in ((7, 5), (8, 5), (3, 2), (30, 20)):
        tokens = torch.randint(VOCABULARY, (1, positions, 2))
        codes = torch.randint(7, (1, frames))
        one, other = (
            network.states(tokens, network.condition([""], [False], each))
            for each in (codes, (codes + 1) % 7)
        )
        assert one.shape == (1, positions, 24) and ((one - other).abs().amax(-1) > 0).all()


def test_padding_of_condition_tokens_embeds_to_zero():
    tokens, cond_tokens = build_streams(6, 20, 4, 30)
    conditioner = TokenConditioner(cond_tokens, tokens, 6).double()
    x = conditioner(torch.tensor([[1, 2, -1, -1]]))
    assert not x[:, 3:].any() and x[:, :3].any(-1).all()
    assert torch.equal(x[:, :3], conditioner(torch.tensor([[1, 2, 3, 4]]))[:, :3])


def test_absolute_positions_fix_the_number_of_positions():
    tokens, _ = build_streams(6, 20, 4, 30)
    config = MaskedTransformerConfig(dim=24, depth=2, heads=2, text=None)
    network = randomize_zero_weights(config.build(tokens)).double().eval()
    with pytest.raises((ValueError, RuntimeError), match="this model has 6|must match"):
        network.states(torch.zeros(1, 7, 2, dtype=torch.long), network.condition([""], [False]))


def test_each_quantizer_has_its_own_head_for_its_own_rows():
    tokens, _ = build_streams(6, 20, 4, 30, num_quantizers=3)
    config = MaskedTransformerConfig(dim=24, depth=2, heads=2, text=None, absolute_positions=False)
    network = randomize_zero_weights(config.build(tokens)).double().eval()
    assert len(network.heads) == 3
    rows: dict[int, int] = {}
    for level, head in enumerate(network.heads):
        head.register_forward_hook(
            lambda _, inputs, __, level=level: rows.update({level: len(inputs[0])})
        )
    predict = torch.zeros(2, 6, 3, dtype=torch.bool)
    predict[0, 2:, 1], predict[1, 5, 2] = True, True
    states = torch.randn(2, 6, 24, dtype=torch.float64)
    logits = network.logits(states, predict)
    assert rows == {0: 0, 1: 4, 2: 1}
    torch.testing.assert_close(
        logits, torch.cat([network.heads[1](states[0, 2:]), network.heads[2](states[1, 5:])])
    )


# ---- critics


def test_critic_depends_on_text_and_on_all_tokens_of_an_example():
    tokens_spec = TokenSpec(VOCABULARY, Layout((4, 4), patch=2))
    config = CriticConfig(dim=16, depth=1, heads=2)
    critic = config.build(build(patch=2).config, tokens_spec)
    critic = randomize_zero_weights(critic).double().eval()
    tokens, _ = make_tokens(critic, ratio=0.0)
    realness = critic.realness_logits(critic.states(tokens, make_condition(critic)))
    assert realness.shape == tokens.shape
    assert not torch.allclose(
        critic.realness_logits(critic.states(tokens, make_condition(critic, TEXTS[::-1]))), realness
    )
    other = tokens.clone()
    other[0, 0, 0] = (other[0, 0, 0] + 1) % VOCABULARY
    after = critic.realness_logits(critic.states(other, make_condition(critic)))
    changed = (after - realness).abs() > 0
    assert changed[0].all() and not changed[1:].any()


def test_critic_head_rates_tokens_from_the_states_of_the_generator():
    network = build(patch=2)
    head = CriticHeadConfig(dim=8).build(network.config, network.tokens).double()
    tokens, _ = make_tokens(network, ratio=0.0)
    states = network.states(tokens, make_condition(network))
    assert head.realness_logits(states).shape == tokens.shape


def test_untrained_network_predicts_nearly_uniform_logits():
    network = MaskedTransformerConfig(dim=24, depth=2, heads=2, text=None).build(
        TokenSpec(VOCABULARY, Layout((4, 4)))
    )
    tokens, masked = make_tokens(network)
    logits = network.logits(network.states(tokens, make_condition(network, [""] * 3)), masked)
    assert logits.abs().max() < 1 and (logits.std(1) > 0).all()
